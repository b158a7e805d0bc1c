"""`tiers profile`: every range is named and counted, nothing is left behind, and nothing is overwritten."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tiers.reference.config import ModelConfig
from tiers.reference.errors import ServingError
from tiers.reference.testing.tiny import save_tiny, tiny_config, tiny_model
from tiers.vllm_model import bench_kernels, cli, profiling, profiling_ranges, profiling_report
from tiers.vllm_model.bench_cases import AttentionCase, GateCase, Limits
from tiers.vllm_model.profiling import Options
from tiers.vllm_model.profiling_memory import Memory, activations
from tiers.vllm_model.profiling_ranges import Linear, Watched, requests_of, work
from tiers.vllm_model.profiling_report import Report, Time

BATCH, PROMPT, NEW = 2, 21, 4


def model_config(**changes: Any) -> dict[str, Any]:
    """Layer 0 is of a shape that vLLM's own attention serves on the CPU."""
    config = tiny_config(**changes)
    config["mixer"]["head_dim"] = 32
    return config


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One run of the command: its folder, what it printed, and the model that ran."""
    root = tmp_path_factory.mktemp("profile")
    folder = save_tiny(root / "model", model_config())
    found = SimpleNamespace(out=root / "out")
    patch = pytest.MonkeyPatch()
    patch.setattr(bench_kernels, "measure_limits", lambda device, dtype: Limits(1e10, 1.2e10, 1e11))
    ranges = profiling.ranges

    def keeping(model: Any) -> Any:
        found.model = model
        return ranges(model)

    patch.setattr(profiling, "ranges", keeping)
    printed: list[str] = []
    patch.setattr("builtins.print", lambda *words, **options: printed.append(" ".join(map(str, words))))
    try:
        flags = ["--tiers", "auto,*.gate=reference", "--out", str(found.out), "--dtype", "float32"]
        sizes = ["--prompt-len", str(PROMPT), "--output-len", str(NEW), "--batch", str(BATCH)]
        with pytest.raises(SystemExit) as ended:
            cli.main(["profile", str(folder), *flags, *sizes])
        assert ended.value.code == 0
    finally:
        patch.undo()
    found.text = "\n".join(printed)
    found.json = json.loads((found.out / "profile.json").read_text())
    return found


@pytest.mark.engine
def test_every_layer_and_operator_is_there_with_its_tier(profiled: SimpleNamespace) -> None:
    slow = profiled.model.model.layers[1].mixer.attn.impl.tier.value
    expected = {(None, "embedding", "vllm"), (None, "norm", "vllm"), (None, "head", "vllm"), (None, "other", "vllm")}
    for layer in range(4):
        expected |= {(layer, "norm", "vllm"), (layer, "ffn", "vllm")}
        expected.add((layer, "attention", "fast" if layer == 0 and not torch.cuda.is_available() else slow))
    expected |= {(2, "gate", "reference"), (3, "gate", "reference")}
    for phase, steps in (("prefill", 1), ("decode", NEW - 1)):
        rows = [row for row in profiled.json["operators"] if row["phase"] == phase]
        assert {(row["layer"], row["operator"], row["tier"]) for row in rows} == expected
        for row in rows:
            # Two norms in a layer; anything else runs once a step.
            assert row["calls"] == steps * (2 if row["operator"] == "norm" and row["layer"] is not None else 1)
            assert row["ms"] > 0 or row["operator"] == "other"
        assert profiled.json["phases"][phase]["steps"] == steps
        assert profiled.json["phases"][phase]["tokens"] == BATCH * (PROMPT if phase == "prefill" else steps)
    for line in (rf"attention +1-3 +{slow}", r"gate +2-3 +reference", r"ffn +0-3 +vllm", r"head +- +vllm"):
        assert len(re.findall(line, profiled.text)) == 2


@pytest.mark.engine
def test_shares_add_up_to_the_whole(profiled: SimpleNamespace) -> None:
    for phase in ("prefill", "decode"):
        shares = [row["share"] for row in profiled.json["operators"] if row["phase"] == phase]
        assert min(shares) >= 0
        assert 0.99 < sum(shares) < 1.0001
        parts = [row["share"] for row in profiled.json["costs"] if row["phase"] == phase]
        assert 0 < sum(parts) < 1.0001


@pytest.mark.engine
def test_weights_and_cache_are_counted(profiled: SimpleNamespace) -> None:
    memory = {row["what"]: row["bytes"] for row in profiled.json["memory"]}
    assert memory["weights"] == sum(p.nbytes for p in tiny_model(model_config()).parameters())
    # Whole pages, so at least what the tokens need.
    assert memory["KV cache"] >= 4 * BATCH * (PROMPT + NEW) * 2 * 2 * 32 * 4
    # A step holds at least one copy of its hidden state.
    assert memory["activations, prefill"] >= BATCH * PROMPT * 64 * 4
    assert memory["activations, decode"] >= BATCH * 64 * 4
    assert all(row["how"] for row in profiled.json["memory"])


@pytest.mark.engine
def test_costs_say_what_was_achieved_where_that_is_known(profiled: SimpleNamespace) -> None:
    costs = profiled.json["costs"]
    assert [cost["ms"] for cost in costs] == sorted((cost["ms"] for cost in costs), reverse=True)
    for cost in costs:
        known = "the rest" not in cost["what"] and not cost["what"].startswith("norm")
        assert (cost["bandwidth"] is not None) == known, cost["what"]
        if known:
            assert cost["bandwidth"] == pytest.approx(cost["bytes"] / cost["ms"] * 1e3)
            assert cost["of_bandwidth"] == pytest.approx(cost["bandwidth"] / 1.2e10)
            assert cost["of_rate"] == pytest.approx(cost["operations"] / cost["ms"] * 1e3 / 1e11)
    (down,) = [cost for cost in costs if cost["what"] == "ffn/down_proj" and cost["phase"] == "decode"]
    calls = 4 * (NEW - 1)
    assert down["calls"] == calls
    assert down["operations"] == calls * 2 * BATCH * 96 * 64
    assert down["bytes"] == calls * 4 * (96 * 64 + BATCH * (96 + 64))
    (head,) = [cost for cost in costs if cost["what"] == "head" and cost["phase"] == "prefill"]
    # Only the last token of a prompt is read.
    assert head["operations"] == 2 * BATCH * 64 * 320
    assert "What costs most" in profiled.text


@pytest.mark.engine
def test_the_trace_has_our_names(profiled: SimpleNamespace) -> None:
    with gzip.open(profiled.out / "trace.json.gz", "rt") as stream:
        names = Counter(event.get("name") for event in json.load(stream)["traceEvents"])
    assert names["tiers/prefill"] == 1
    assert names["tiers/decode"] == NEW - 1
    for name in ("tiers/layer 2/gate/reference", "tiers/layer 3/ffn/vllm/down_proj", "tiers/embedding/vllm"):
        assert names[name] == NEW


@pytest.mark.engine
def test_no_hook_is_left(profiled: SimpleNamespace) -> None:
    for name, module in profiled.model.named_modules():
        assert not [*module._forward_hooks, *module._forward_pre_hooks], name


@pytest.mark.engine
def test_nothing_is_overwritten(profiled: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    before = (profiled.out / "profile.json").read_bytes()
    with pytest.raises(SystemExit) as ended:
        cli.main(["profile", str(profiled.out.parent / "model"), "--out", str(profiled.out)])
    assert ended.value.code == 1
    assert "holds something already" in capsys.readouterr().err
    assert (profiled.out / "profile.json").read_bytes() == before


# ---- without an engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt-len", "600"], "max_position_embeddings in config.json is 512"),
        (["--output-len", "1"], "expected 2 or more"),
        (["--tiers", "9=fast"], "9"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny(tmp_path / "model", model_config())
    with pytest.raises(SystemExit) as ended:
        cli.main(["profile", str(folder), "--out", str(tmp_path / "out"), *flags])
    assert ended.value.code == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_lengths_suit_the_model(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(model_config(max_position_embeddings=24))
    options = profiling.filled(Options(tmp_path), "cuda", config)
    assert (options.prompt_len, options.output_len, options.batch, options.dtype) == (18, 6, 8, "bfloat16")
    with pytest.raises(ServingError, match="28 tokens"):
        profiling.filled(Options(tmp_path, prompt_len=22), "cpu", config)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([0, 1, 2, 0, 1], [(3, 3), (2, 2)]),
        ([7, 7, 7], [(1, 8)] * 3),
        ([5, 6, 7, 0], [(3, 8), (1, 1)]),
        ([0], [(1, 1)]),
        ([], []),
    ],
)
def test_a_batch_is_cut_into_requests(positions: list[int], expected: list[tuple[int, int]]) -> None:
    assert requests_of(positions) == expected


def test_work_is_that_of_the_cases() -> None:
    config = ModelConfig.from_dict(model_config())
    linears = {"tiers/layer 0/ffn/vllm/up_proj": Linear(64, 96, 1000), "tiers/head/vllm": Linear(64, 320, 5000)}
    batch = [(3, 10), (1, 30)]

    def of(name: str) -> tuple[float, float] | None:
        return work(name, linears, config, batch, 2)

    assert of("tiers/layer 0/ffn/vllm/up_proj") == (1000 + 4 * 160 * 2, 2 * 4 * 64 * 96)
    assert of("tiers/head/vllm") == (5000 + 2 * 384 * 2, 2 * 2 * 64 * 320)
    mixer = config.layers[3].mixer
    parts = [AttentionCase(mixer, 1, context, tokens).needed(2) for tokens, context in batch]
    assert of("tiers/layer 3/attention/fast/attn") == tuple(map(sum, zip(*parts, strict=True)))
    gate = config.layers[3].gate
    assert gate is not None
    assert of("tiers/layer 3/gate/fast") == GateCase(gate, 64, 4).needed(2)
    assert of("tiers/layer 3/norm/vllm") is None
    assert of("tiers/norm/vllm") is None


def test_hooks_go_even_when_a_module_raises() -> None:
    class Breaking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("broken")

    module = Breaking()
    handles = profiling_ranges._hook("tiers/layer 0/ffn/vllm", module)
    with torch.profiler.profile() as profiler:
        for _ in range(2):
            with pytest.raises(ValueError, match="broken"):
                module(torch.ones(1))
        with profiling_ranges.marked("tiers/prefill"):
            torch.ones(2).sum()
    for handle in handles:
        handle.remove()
    names = Counter(event.name for event in profiler.events())
    # Both ranges ended, and what came later is not within them.
    assert names["tiers/layer 0/ffn/vllm"] == 2
    found = profiling_report.times(profiler.events(), cuda=False)
    assert set(found) == {("prefill", "prefill")}
    assert "aten::sum" in found["prefill", "prefill"].inside


def test_a_step_without_time_divides_by_nothing() -> None:
    watched = Watched(steps=[("decode", torch.tensor([4, 4]))])
    report = Report({"kind": "cuda"}, {})
    found = {
        ("decode", "decode"): Time(1, 0.0, 5.0),
        ("decode", "tiers/layer 0/ffn/vllm"): Time(1, 0.0, 3.0),
    }
    config = ModelConfig.from_dict(model_config())
    profiling_report.fill(report, found, watched, config, 2, Limits(1.0, 1.0, 1.0))
    assert [row.share for row in report.operators] == [0.0, 0.0]
    assert "on the device, 0.0 ms on the host" in profiling_report.text(report)


def an_event(name: str, *children: Any, device: str = "CPU", **kernels: float) -> SimpleNamespace:
    """What the profiler tells of an operator or a range; kernels by name, with their microseconds."""
    launched = [SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels.items()]
    times: dict[str, Any] = {"cpu_time_total": 5.0, "self_cpu_time_total": 1.0, "device_type": f"DeviceType.{device}"}
    times["is_user_annotation"] = name.startswith("tiers/")
    return SimpleNamespace(name=name, cpu_children=list(children), kernels=launched, **times)


def test_time_of_the_device_is_that_of_the_kernels_counted_once() -> None:
    part, ffn = "tiers/layer 0/ffn/vllm/down_proj", "tiers/layer 0/ffn/vllm"
    linear = an_event(part, an_event("aten::mm", gemm=30.0), **{part: 31.0})
    step = an_event("tiers/decode", an_event(ffn, linear, an_event("silu", silu=7.0)), an_event("sample", topk=3.0))
    # The device's own event of the range, and an operator outside of any step.
    events = [step, an_event("tiers/decode", device="CUDA", gemm=99.0), an_event("aten::sum", sum=50.0)]
    found = profiling_report.times(events, cuda=True)
    us = {name: time.us for (_, name), time in found.items()}
    assert us == {"decode": 40.0, ffn: 37.0, part: 30.0}
    assert found["decode", part].inside == {"aten::mm": 30.0}
    assert found["decode", ffn].inside == {"silu": 7.0}
    assert found["decode", "decode"].calls == 1


def test_the_highest_memory_of_a_step_is_found() -> None:
    kept: list[torch.Tensor] = []

    def run(around: Any) -> None:
        kept.append(torch.ones(90_000))
        for phase, size in (("prefill", 50_000), ("decode", 1000), ("decode", 3000)):
            with around(phase):
                torch.ones(size)
                kept.append(torch.ones(10))
                kept[0] = torch.ones(1)

    found = activations(run)
    assert list(found) == ["prefill", "decode"]
    assert 200_000 <= found["prefill"] < 203_000
    assert 12_000 <= found["decode"] < 14_000


def test_layers_are_written_as_ranges() -> None:
    assert profiling_report.ranges_of([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert profiling_report.ranges_of([]) == ""


def test_tables_are_written_as_json(tmp_path: Path) -> None:
    report = Report({"kind": "cpu"}, {"model": "x"}, memory=[Memory("weights", 5, "sizes")])
    report.write(tmp_path / "profile.json")
    assert json.loads((tmp_path / "profile.json").read_text())["schema"] == "tiers-profile/1"


def test_an_attention_layer_without_vllm_has_a_tier() -> None:
    mixer = SimpleNamespace(attn=SimpleNamespace(impl=object()))
    assert profiling_ranges.attention_tier(mixer) == "fast"
