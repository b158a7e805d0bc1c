"""`tiers bench`: the check comes before the speed, one bad case does not end a run, and a broken-off run leaves a report."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.reference.config import Attention, Dense, ModelConfig, NoPosition, TopK, Window
from tiers.reference.errors import ServingError
from tiers.reference.load import load_model
from tiers.reference.ops.paged_attention import paged_attention
from tiers.reference.testing.tiny import positions_config, random_ids, save_tiny, tiny_config
from tiers.vllm_model import bench, bench_cases, bench_engine, bench_html, bench_kernels, bench_llama, cli, dispatch
from tiers.vllm_model.bench_cases import AttentionCase, Limits, Machine
from tiers.vllm_model.bench_report import EngineResult, KernelResult, Report, Spread
from tiers.vllm_model.plan import Tier

MIXER = Attention(4, 2, 16, pattern=TopK(8, 1, 2), position=NoPosition())
MACHINE = Machine("cpu", torch.float32, Limits(1e10, 1e10, 1e11))


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few calls are enough here."""
    monkeypatch.setattr(bench_kernels, "SECONDS", 0.0)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Tensor]], None]:
    """Put a function in the place of attention on tier compiled."""

    def put(function: Callable[..., Tensor]) -> None:
        original, unsupported = dispatch.function, dispatch.unsupported
        monkeypatch.setattr(
            dispatch, "function", lambda name, tier: function if tier is Tier.COMPILED else original(name, tier)
        )
        monkeypatch.setattr(
            dispatch,
            "unsupported",
            lambda operator, tier, *rest: None if tier is Tier.COMPILED else unsupported(operator, tier, *rest),
        )

    return put


def run_kernels(
    batches: tuple[int, ...] = (2,), contexts: tuple[int, ...] = (40,), mixers: tuple[Attention, ...] = (MIXER,)
) -> Report:
    report = Report({"device": "a test"}, {})
    groups = bench_cases.attention_groups(mixers, batches, contexts, chunk=7)
    bench_kernels.run(groups, list(Tier), MACHINE, report, lambda: None)
    return report


def of_tier(report: Report, tier: str) -> list[KernelResult]:
    return [result for result in report.kernels if result.tier == tier]


# ---- operators ------------------------------------------------------------------------------------------------------


def test_every_tier_and_dense_attention_are_timed() -> None:
    patterns = (TopK(8), TopK(8, 1, 2, "group"), Window(9, 2), Dense())
    mixers = tuple(Attention(4, 2, 16, pattern=pattern, position=NoPosition()) for pattern in patterns)
    report = run_kernels(batches=(1, 3), contexts=(40, 200), mixers=mixers)
    assert {result.status for result in report.kernels} == {"ok"}
    # Two batches and a prompt, on two contexts.
    assert len(of_tier(report, "torch SDPA")) == 6
    assert len(of_tier(report, "reference")) == 6 * len(patterns)
    for result in report.kernels:
        assert result.time is not None
        assert 0 < result.time.least <= result.time.p10 <= result.time.median <= result.time.p90
        assert result.dense
        assert result.limit
        assert result.error is not None
        assert result.budget is not None
        assert result.error <= result.budget


@pytest.mark.parametrize("fault", ["a little off", "not finite", "one head wrong"])
def test_a_wrong_tier_fails_and_has_no_speed(fault: str, plant: Callable[..., None]) -> None:
    calls = 0

    def wrong(*args: Any, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        out = paged_attention(*args, **options)
        if fault == "a little off":
            return out + 0.01
        if fault == "not finite":
            return out.index_fill(0, torch.tensor(0), float("nan"))
        return out.index_copy(1, torch.tensor([1]), out[:, :1])

    plant(wrong)
    report = run_kernels()
    results = of_tier(report, "compiled")
    assert [result.status for result in results] == ["FAIL", "FAIL"]
    assert all(result.time is None and result.speedup is None and result.of_limit is None for result in results)
    # Once for the check of each case, never for its time.
    assert calls == 2
    assert report.failed
    assert all(result.time is not None for result in of_tier(report, "reference"))


def test_a_tier_that_breaks_is_reported_and_the_rest_goes_on(plant: Callable[..., None]) -> None:
    def broken(query: Tensor, *args: Any, **options: Any) -> Tensor:
        if len(query) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        if len(query) == 2:
            raise RuntimeError("PassManager::run failed\nmore")
        return paged_attention(query, *args, **options)

    plant(broken)
    report = run_kernels(batches=(1, 2, 3))
    statuses = {result.batch: result.status for result in of_tier(report, "compiled") if result.phase == "decode"}
    assert statuses == {1: "ok", 2: "error", 3: "out of memory"}
    details = [result.detail for result in of_tier(report, "compiled") if result.detail]
    assert details == [
        "RuntimeError: PassManager::run failed",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB",
    ]
    assert all(result.status == "ok" for result in of_tier(report, "reference"))


def test_a_case_that_does_not_fit_is_reported_and_the_rest_goes_on() -> None:
    report = run_kernels(contexts=(10**9, 40))
    statuses = {context: {r.status for r in report.kernels if r.context == context} for context in (10**9, 40)}
    assert statuses == {10**9: {"out of memory"}, 40: {"ok"}}
    assert "GiB" in next(result.detail for result in report.kernels if result.context == 10**9)


def test_a_close_choice_of_keys_is_not_compared() -> None:
    case = AttentionCase(Attention(2, 1, 16, pattern=TopK(3), position=NoPosition()), 1, 20, 1)
    inputs = case.inputs(MACHINE)
    assert case.exact(inputs, MACHINE).compared.all()
    # Keys alike score alike, and ties are all kept: nothing was rejected.
    inputs.cache_BKNC[..., :16] = 1
    assert case.exact(inputs, MACHINE).compared.all()
    # Now half of them score a little higher.
    inputs.cache_BKNC[:, :, 1::2, :16] = 1 + 1e-6
    assert not case.exact(inputs, MACHINE).compared.any()


@pytest.mark.parametrize(
    ("pattern", "tokens", "keys_and_values", "operations"),
    [
        (Dense(), 1, 1000 + 1000, 2 * 1000),
        (Window(100, 4), 1, 104 + 104, 2 * 104),
        (TopK(64, 4, 32, "group"), 1, 1000 + 100, 1000 + 100),
        # Four heads choose a tenth each: 1 - 0.9^4 of all values are wanted by some head.
        (TopK(64, 4, 32), 1, 1000 + 1000 * (1 - 0.9**4), 1000 + 100),
        (Dense(), 2, 1000 + 1000, 2 * (999 + 1000)),
    ],
)
def test_what_a_case_needs(pattern: Any, tokens: int, keys_and_values: float, operations: float) -> None:
    mixer = Attention(8, 2, 16, pattern=pattern, position=NoPosition())
    moved, done = AttentionCase(mixer, 3, 1000, tokens).needed(2)
    assert moved == pytest.approx(3 * 2 * (2 * 16 * keys_and_values + 2 * tokens * 8 * 16))
    assert done == pytest.approx(3 * 2 * 8 * 16 * operations)


def test_a_model_gives_its_own_kinds_of_attention_and_gates() -> None:
    config = ModelConfig.from_dict(tiny_config())
    mixers = bench_cases.model_mixers(config)
    assert [mixer.pattern.kind for mixer in mixers] == ["dense", "window", "topk", "topk"]
    assert {mixer.head_map for mixer in mixers} == {"contiguous"}  # as they run inside vLLM


def test_positions_of_a_model_are_timed_as_part_of_attention() -> None:
    mixers = bench_cases.model_mixers(ModelConfig.from_dict(positions_config()))
    kinds = [mixer.position.kind for mixer in mixers]
    assert kinds == ["xpos", "sandwich", "t5", "kerple", "alibi", "none", "t5", "none", "xpos"]
    # Two ways to compute the same, on what the case draws for what is learned.
    for mixer in mixers:
        case = AttentionCase(mixer, 2, 50, 3)
        inputs = case.inputs(MACHINE)
        exact = case.exact(inputs, MACHINE)
        actual = case.call(Tier.REFERENCE, inputs, MACHINE)()[exact.rows]
        assert ((actual - exact.best).abs() < 1e-5)[exact.compared].all()


# ---- the report -----------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Counts elements, and fails on one that is not closed or that asks for something elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        self.seen.append(tag)
        if tag not in ("meta", "rect", "circle", "path", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


def test_kernels_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    sizes = ["--batch", "1,2", "--context", "33,64", "--out", str(out)]
    folder = save_tiny(tmp_path / "m <&>", tiny_config())
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", str(folder), "--kernels", *sizes])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "topk k=8 sink=1 window=2 share=group" in printed
    assert "mix, token" in printed
    if not torch.cuda.is_available():
        assert "tier fast, not timed: topk k=8 sink=1 window=2: needs CUDA" in printed

    report = json.loads((out / "bench.json").read_text())
    assert report["schema"] == "tiers-bench/1"
    assert report["complete"] is True
    assert report["environment"]["torch"] == torch.__version__
    assert report["options"]["context"] == [33, 64]
    assert {result["operator"] for result in report["kernels"]} == {"attention", "gate"}
    assert all(result["time"]["median"] > 0 for result in report["kernels"])

    text = (out / "bench.html").read_text()
    page = Page(text)
    assert page.seen.count("svg") == 3  # decode steps of one and two requests, and a prompt
    assert "http" not in text
    assert "m &lt;&amp;&gt;" in text
    assert sorted(path.name for path in out.iterdir()) == ["bench.html", "bench.json"]


def test_a_failed_check_shows_no_speed_on_the_page_and_in_the_table() -> None:
    good = KernelResult("attention", "decode", "dense", 1, 512, 1, "fast", time=Spread.of([7777.0]), dense=7777.0)
    bad = KernelResult(
        "attention", "decode", "topk", 1, 512, 1, "fast", "FAIL", "differs by 0.3", 0.3, 0.1, dense=7777.0
    )
    report = Report(
        {}, {}, kernels=[good, bad], engines=[EngineResult("auto", "the model", status="FAIL", detail="off")]
    )
    page = bench_html.page(report)
    assert page.count("7.78 ms") == 3  # median, 10% and 90% of the good one
    assert page.count("<td class=bad>FAIL</td>") == 2
    assert "differs by 0.3" in page


def test_a_report_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(ServingError, match="holds something already"):
        bench.run(bench.Options(engine=False), tmp_path)
    assert (tmp_path / "bench.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "needs a model folder"),
        (["--kernels", "--native"], "need a model folder"),
        (["--kernels", "--tiers", "auto"], "the name of a tier"),
        (["--kernels", "--batch", "1,x"], "'x' is no integer of 1 or more"),
        (["DIR", "--k", "64"], "in its config.json"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *arguments])
    assert end.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"plans": ("fsat",)}, "did you mean 'fast'"),
        ({"plans": ("compiled,2.attention=fast",)}, "layer"),
        ({"context": (64, 4096)}, "--context come to 4096 tokens"),
        ({"prompt_len": 500, "output_len": 100}, "come to 600 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_made(
    options: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "m", tiny_config())
    with pytest.raises(ValueError, match=expected):
        bench.run(bench.Options(folder=folder, **options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- a Llama of the same shape --------------------------------------------------------------------------------------


EXPERTS = {"kind": "moe", "num_experts": 4, "top_k": 2, "intermediate_size": 64}


@pytest.mark.parametrize("changes", [{}, {"ffn": EXPERTS}], ids=["Llama", "Mixtral"])
def test_the_same_weights_in_a_llama_compute_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config(layers={}, mixer={**tiny_config()["mixer"], "pattern": {"kind": "dense"}}, **changes)
    folder, parsed = save_tiny(tmp_path / "m", config), ModelConfig.from_dict(config)
    described = bench_llama.as_llama(parsed)
    assert described.name == ("Mixtral" if changes else "Llama")
    assert (described.weights_differ, described.function_differs) == ("", "")
    bench_llama.write(tmp_path / "llama", parsed, folder)
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    ids = torch.tensor(random_ids(50, 320, seed=1))
    with torch.inference_mode():
        actual = llama(ids[None]).logits[0]
    assert (actual - load_model(folder)(ids)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("changes", "weights", "function"),
    [
        ({}, "", "layer 1 has pattern window; a Llama is dense"),
        (
            {"ffn": {"kind": "gelu", "intermediate_size": 96}},
            "layer 0 has another ffn than a Llama",
            "layer 1 has pattern",
        ),
        ({"norm": {"kind": "layer"}}, "its norms are not those of a Llama", "layer 1 has pattern"),
        ({"residual": "parallel"}, "", "its residuals, multipliers or cap on logits"),
        ({"ffn": {**EXPERTS, "score": "sigmoid"}}, "layer 0 has other experts than a Mixtral", "layer 1 has pattern"),
    ],
)
def test_what_a_llama_cannot_express_is_said(changes: dict[str, Any], weights: str, function: str) -> None:
    described = bench_llama.as_llama(ModelConfig.from_dict(tiny_config(**changes)))
    assert described.weights_differ == weights
    assert described.function_differs.startswith(function)


def test_layers_of_several_shapes_have_no_llama() -> None:
    config = tiny_config(layers={"1": {"ffn": {"intermediate_size": 64}}})
    with pytest.raises(ServingError, match="2 shapes"):
        bench_llama.as_llama(ModelConfig.from_dict(config))


# ---- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_an_engine_is_checked_and_measured(start_engine: Callable[..., Any], tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tiny_config())
    engine = start_engine(folder)
    check = {"lengths": [1, 32, 64], "vocab_size": 320, "dtype": "float32"}
    good = bench_engine._check(engine, {**check, "model": str(folder)})
    assert good["failure"] == ""
    assert good["against"] == "the reference model"
    assert 0 < good["error"] <= good["budget"]

    # Of 16 bits the mean is compared, with that of the reference model in 16 bits.
    coarse = bench_engine._check(engine, {**check, "dtype": "bfloat16", "model": str(folder)})
    assert coarse["failure"] == ""
    assert coarse["error"] < coarse["budget"]

    # Against another engine: itself, and one that says something else.
    said = good["said"]
    assert bench_engine._check(engine, {**check, "said": said, "by": "x"})["failure"] == ""
    said[1]["logprobs"][2] += 0.01
    assert "differ from engine x by 0.01" in bench_engine._check(engine, {**check, "said": said, "by": "x"})["failure"]
    other = save_tiny(tmp_path / "other", tiny_config(), seed=1)
    assert "differ from the reference model" in bench_engine._check(engine, {**check, "model": str(other)})["failure"]

    events: list[tuple[str, dict[str, Any]]] = []
    traffic = {"requests": 3, "concurrency": 2, "prompt_len": 20, "output_len": 5, "rounds": 2, "vocab_size": 320}
    bench_engine._measure(engine, traffic, lambda event, **values: events.append((event, values)))
    assert [event for event, _ in events] == [*["request"] * 3, "round"] * 2
    result = EngineResult("x", "a model")
    bench_engine._summarise(result, [values for event, values in events if event == "round"], traffic)
    assert result.tokens_per_s is not None
    assert result.requests_per_s is not None
    assert result.tokens_per_s.median == pytest.approx(5 * result.requests_per_s.median)
    assert result.first_token_ms is not None
    assert result.first_token_ms.samples == 6
    assert result.between_tokens_ms is not None
    assert result.between_tokens_ms.samples == 6 * 4


@pytest.mark.parametrize(
    ("log", "status", "line"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried\nRuntimeError: Engine core initialization failed.", "out of memory", "OutOfMemoryError: CUDA"),
        ("ValueError: No available memory for the cache blocks. Try", "out of memory", "No available memory"),
        ("x.y.SomeError: the cause\nRuntimeError: Engine core initialization failed.", "error", "SomeError: the cause"),
        ("Killed", "error", "ended with code -9"),
    ],
)  # fmt: skip
def test_why_an_engine_ended(log: str, status: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    found = bench_engine._reason(tmp_path / "log", -9)
    assert found[0] == status
    assert line in found[1]


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------------


def processes_of(session: int) -> list[str]:
    """Command lines of the processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, owner = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            if owner == str(session) and state != "Z":
                found.append((path / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.fixture
def start_bench(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tiers.vllm_model.cli", "bench", *arguments, "--out", str(tmp_path / "out")]
        with (tmp_path / "output").open("w") as stream:
            started.append(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        assert process.poll() is None, "ended too early"
        time.sleep(0.1)
    raise AssertionError("waited in vain")


def test_ctrl_c_among_the_operators_leaves_a_partial_report(
    start_bench: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    contexts = ",".join(str(64 + i) for i in range(500))
    process = start_bench("--kernels", "--context", contexts)
    path = tmp_path / "out" / "bench.json"
    wait_for(lambda: path.is_file() and json.loads(path.read_text())["kernels"], process)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    report = json.loads(path.read_text())
    assert report["complete"] is False
    assert report["kernels"][0]["time"]["median"] > 0
    assert "This report is partial" in (tmp_path / "out" / "bench.html").read_text()
    output = (tmp_path / "output").read_text()
    assert "This report is partial" in output
    assert "Traceback" not in output


@pytest.mark.engine
def test_ctrl_c_keeps_the_engines_that_are_done_and_leaves_no_process_of_another(
    start_bench: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Engine and worker are processes of their own, as they are for users.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    folder, path = save_tiny(tmp_path / "m", tiny_config()), tmp_path / "out" / "bench.json"
    process = start_bench(str(folder), "--engine", "--rounds", "2", "--requests", "3", "--output-len", "4")
    wait_for(lambda: path.is_file(), process)

    def second_engine() -> int | None:
        if not (tmp_path / "out" / "engine-auto-1.log").is_file():
            return None
        asked = ["ps", "--ppid", str(process.pid), "-o", "pid="]
        children = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
        return next((int(pid) for pid in children if len(processes_of(int(pid))) > 1), None)

    session = wait_for(second_engine, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert processes_of(session) == []

    report = json.loads(path.read_text())
    assert report["complete"] is False
    first, second = report["engines"]
    assert (second["name"], second["tokens_per_s"]) == ("auto", None)
    assert (first["name"], first["status"]) == ("reference", "ok")
    assert first["check"]["against"] == "the reference model"
    assert first["check"]["error"] <= first["check"]["budget"]
    assert first["tokens_per_s"]["samples"] == 2
    assert first["start_s"] > 0
    # Four layers and two gates.
    assert first["counts"]["attention reference"] == 2 * first["counts"]["gate reference"] > 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["bench.html", "bench.json", "engine-auto-1.log", "engine-reference-1.log"]
    assert "compared with the reference model" in (tmp_path / "output").read_text()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_a_captured_call_reads_lives_as_long_as_the_graph() -> None:
    from tiers.vllm_model.bench_kernels import _captured

    def make() -> Any:
        beforehand = torch.full((1000,), 3.0, device="cuda")
        return lambda: beforehand * 2

    replay, how = _captured(make())
    others = [torch.zeros(1000, device="cuda") for _ in range(100)]
    assert how == "cuda graph"
    assert len(others) == 100
    assert (replay() == 6).all()
