"""Shadow checks: they see what a tier gets wrong, and nothing that is served changes by them."""

import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from torch import Tensor

from tiers.reference.config import Dense, TopK, Window
from tiers.reference.errors import ConfigError
from tiers.reference.ops.bias import Bias
from tiers.reference.ops.knowledge_bank import knowledge_bank
from tiers.reference.ops.knowledge_gate import knowledge_gate
from tiers.reference.ops.paged_attention import Batch, paged_attention
from tiers.reference.positions import Position
from tiers.reference.testing.inputs import POSITIONS, position_options
from tiers.reference.testing.tiny import random_ids, save_tiny, tiny_config
from tiers.vllm_model import check_replay, cli, dispatch, metrics, shadow, shadow_call
from tiers.vllm_model.check_rows import Verdict
from tiers.vllm_model.dispatch import Choice
from tiers.vllm_model.plan import Tier
from tiers.vllm_model.shadow import Shadow
from tiers.vllm_model.testing import run

HEADS, KV_HEADS, SIZE, PAGE, BLOCKS, WIDTH = 4, 2, 8, 16, 12, 16


@pytest.fixture(autouse=True)
def counts() -> Iterator[dict[tuple[str, str], metrics.Shadowed]]:
    metrics.SHADOWED.clear()
    yield metrics.SHADOWED
    metrics.SHADOWED.clear()


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    for level in ("warning", "error"):
        monkeypatch.setattr(metrics.logger, level, lambda message, *args: lines.append(message % args))
    return lines


# ---- without an engine ------------------------------------------------------------------------------------------------


class Something(SimpleNamespace):
    """Stands for a layer, or for a context of vLLM's: with an identity, and for weak references."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@pytest.fixture
def new_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What vLLM does before a step: another forward context."""
    import vllm.forward_context

    def make(attn_metadata: Any = "some", slots: tuple[int, ...] = (17,)) -> None:
        context = Something(attn_metadata=attn_metadata, slot_mapping={"layer": torch.tensor(slots)})
        monkeypatch.setattr(vllm.forward_context, "_forward_context", context)

    return make


def make_shadow(rate: float = 1.0, dumps: Path | None = None, **layers: Tier) -> tuple[Shadow, dict[str, Any]]:
    """Checks of a model whose layers, "a0" and so on, are on these tiers."""
    made = Shadow(shadow.Options(rate, dumps))
    members = {
        name: Something(choice=Choice(int(name[1:]), "attention", tier), tier=tier) for name, tier in layers.items()
    }
    for member in members.values():
        made.members.add(member)
    return made, members


def batch_of_three() -> tuple[Tensor, Tensor, Batch]:
    """A request in decode, a chunk that goes on, a prompt; the first two share a page. NaN where nothing is written."""
    cache = torch.randn(BLOCKS, KV_HEADS, PAGE, 2 * SIZE)
    table = torch.tensor([[7, 3, 10_000_000], [7, 9, 2], [5, 10_000_000, 10_000_000]], dtype=torch.int32)
    lengths, starts = torch.tensor([21, 40, 9], dtype=torch.int32), torch.tensor([0, 1, 8, 17], dtype=torch.int32)
    cache[3, :, 5:] = cache[2, :, 8:] = cache[5, :, 9:] = float("nan")
    return torch.randn(17, HEADS, SIZE), cache, Batch(table, lengths, starts, 9, 40)


def attention_options(pattern: Any) -> dict[str, Any]:
    return {"scale": 0.3, "pattern": pattern, "bias": None, "decay_D": None, "softcap": None}


@pytest.mark.parametrize("pattern", [Dense(), Window(9, 1), TopK(4, 1, 2), TopK(4, 0, 0, "group")], ids=str)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_part_of_a_batch_gives_the_same_outputs(pattern: Any, layout: str) -> None:
    query, cache, batch = batch_of_three()
    if layout == "NHD":
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    options = attention_options(pattern)
    output = paged_attention(query, cache, batch, **options)
    windows = [(1, 2, 6), (0, 0, 1), (2, 0, 4)]
    lengths, starts = batch.lengths_R.tolist(), batch.starts_R1.tolist()
    part = shadow_call.gathered(query, cache, batch, output, options, windows, lengths, starts)
    torch.testing.assert_close(part.run(paged_attention), part.output, atol=1e-6, rtol=0)
    torch.testing.assert_close(part.output, output[[3, 4, 5, 6, 0, 8, 9, 10, 11]])
    # The shared page once, and only pages that are seen; heads and tokens in the order of the cache.
    assert len(part.tensors["cache"]) == 5
    assert part.tensors["block_table"].max() == 4
    assert (part.tensors["cache"].stride(2) > part.tensors["cache"].stride(1)) == (layout == "NHD")


@pytest.mark.parametrize("seed", range(20))
def test_a_check_looks_at_few_tokens_of_few_requests(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    made = Shadow(shadow.Options(1.0), seed)
    lengths, starts = [0, 5000, 90, 70, 3], [0, 0, 1000, 1070, 1071, 1074]
    monkeypatch.setattr(shadow, "MAX_KEYS", 4200)
    windows = made._windows(lengths, starts)
    assert 1 <= sum(stop - first for _, first, stop in windows) <= shadow.MAX_ROWS
    for request, first, stop in windows:
        assert 0 <= first < stop <= starts[request + 1] - starts[request]
    contexts = [lengths[r] - (starts[r + 1] - starts[r]) + stop for r, _, stop in windows]
    assert len(windows) == 1 or sum(contexts) <= 4200
    # Alone, a request of any length is looked at.
    assert made._windows([100_000], [0, 1]) == [(0, 0, 1)]


def test_one_layer_of_a_step_is_checked(new_step: Callable[..., None]) -> None:
    made, members = make_shadow(a0=Tier.REFERENCE, a1=Tier.FAST, a2=Tier.COMPILED, a3=Tier.FAST)
    seen = []
    for _ in range(30):
        new_step()
        due = [name for name, member in members.items() if made._due(member)]
        assert len(due) == 1
        seen += due
        # Asked again within the step the answer is the same.
        assert [name for name, member in members.items() if made._due(member)] == due
    # Not the reference, as long as there is anything else.
    assert set(seen) == {"a1", "a2", "a3"}


def test_the_reference_is_checked_where_nothing_else_is(new_step: Callable[..., None]) -> None:
    made, members = make_shadow(a0=Tier.REFERENCE)
    new_step()
    assert made._due(members["a0"])


def test_the_rate_is_the_share_of_the_steps(new_step: Callable[..., None]) -> None:
    made, members = make_shadow(0.1, a0=Tier.FAST)

    def steps() -> Iterator[bool]:
        for _ in range(2000):
            new_step()
            yield made._due(members["a0"])

    assert 150 <= sum(steps()) <= 250


def test_all_ranks_check_the_same_steps(new_step: Callable[..., None]) -> None:
    ranks = [make_shadow(0.3, a0=Tier.FAST, a1=Tier.FAST) for _ in range(2)]
    for _ in range(50):
        new_step()
        first, second = ([made._due(member) for member in members.values()] for made, members in ranks)
        assert first == second


@pytest.mark.parametrize("step", [{"attn_metadata": None}, {"attn_metadata": {}}, {"slots": (-1, -1)}], ids=str)
def test_a_dummy_step_is_not_checked(new_step: Callable[..., None], step: dict[str, Any]) -> None:
    made, members = make_shadow(a0=Tier.FAST)
    new_step(**step)
    assert not made._due(members["a0"])
    new_step(slots=(-1, 5))
    assert made._due(members["a0"])


def test_nothing_is_checked_while_a_graph_is_captured(
    new_step: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, members = make_shadow(a0=Tier.FAST)
    new_step()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not made._due(members["a0"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_is_judged(new_step: Callable[..., None], counts: Any, logged: list[str], dtype: torch.dtype) -> None:
    made, members = make_shadow(a3=Tier.FAST)
    query, cache, batch = batch_of_three()
    query, cache, options = query.to(dtype), cache.to(dtype), attention_options(TopK(4, 1, 2))
    output = paged_attention(query, cache, batch, **options)
    before = [x.clone() for x in (query, cache, output)]
    kept = set(vars(batch))
    states = torch.get_rng_state(), random.getstate()
    dispatch.COUNTS.clear()
    for factor in (1.0, 1.05):
        new_step()
        made.attention(members["a3"], query, cache, batch, output * factor, options)
    found = counts["attention", "fast"]
    assert (found.checks, found.failures, found.exceptions) == (2, 1, 0)
    assert 0.049 < found.worst < 0.06
    assert len(logged) == 1
    assert "layer 3: paged_attention on tier fast differs from the reference by 0.05" in logged[0]
    # Nothing else has changed.
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, (query, cache, output), strict=True))
    assert set(vars(batch)) == kept
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert not dispatch.COUNTS


def test_tokens_that_say_nothing_do_not_fail(new_step: Callable[..., None], counts: Any) -> None:
    made, members = make_shadow(a3=Tier.FAST)
    hidden, keys = torch.randn(5, WIDTH), torch.randn(3, WIDTH)
    for values in (torch.zeros(3, WIDTH), torch.full((3, WIDTH), float("nan"))):
        new_step()
        output = knowledge_bank(hidden, keys, values, 0.2)
        made.gate(members["a3"], "knowledge_bank", (hidden,), (keys, values, 0.2), output)
    # Zeros that should be zeros agree; where the reference gives NaN too there is nothing to say.
    assert counts["gate", "fast"] == metrics.Shadowed(checks=1)
    new_step()
    made.gate(members["a3"], "knowledge_bank", (hidden,), (keys, torch.zeros(3, WIDTH), 0.2), torch.ones(5, WIDTH))
    assert counts["gate", "fast"].failures == 1


def test_a_planted_wrong_gate_is_dumped_and_replayed(
    new_step: Callable[..., None], counts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, members = make_shadow(dumps=tmp_path, a3=Tier.COMPILED)
    # Views, which must not take what they are views of into the file.
    hidden, knowledge = torch.randn(10_000, WIDTH)[5:105], torch.randn(100, WIDTH)
    weight, bias, keys = torch.randn(WIDTH, 2 * WIDTH), torch.randn(WIDTH), torch.randn(3, WIDTH)
    new_step()
    output = knowledge_gate(hidden, knowledge, weight, bias, "mix") * 1.01
    made.gate(members["a3"], "knowledge_gate", (hidden, knowledge), (weight, bias, "mix"), output)
    made.gate(members["a3"], "knowledge_gate", (hidden, knowledge), (weight, None, "mix"), output)
    made.gate(members["a3"], "knowledge_bank", (hidden,), (keys, keys, 0.2), knowledge_bank(hidden, keys, keys, 0.3))
    assert counts["gate", "compiled"].failures == 3
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    for file in files:
        assert file.stat().st_size < 50_000
        assert check_replay.run(file) == 1
        printed = capsys.readouterr().out
        assert "recorded on cpu, tier compiled" in printed
        assert "100 tokens of width 16" in printed
        assert "What tier compiled gave when this was recorded is wrong; every tier that ran here is right" in printed


@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)
def test_a_dump_keeps_what_distance_does(
    new_step: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str], position: Position
) -> None:
    made, members = make_shadow(dumps=tmp_path, a3=Tier.COMPILED)
    query, cache, batch = batch_of_three()
    options = attention_options(Dense()) | position_options(position, HEADS, query.shape[2], 64)
    output = paged_attention(query, cache, batch, **options)
    new_step()
    made.attention(members["a3"], query, cache, batch, output * 1.01, options)
    (file,) = tmp_path.iterdir()
    _, call = shadow_call.read(file)
    # Only with the same bias and decay does the reference give the same again.
    assert torch.equal(call.run(paged_attention), output)
    assert check_replay.run(file) == 1
    assert "what tier compiled gave when this was recorded is wrong" in capsys.readouterr().out.lower()


def test_dumps_are_few_and_private(new_step: Callable[..., None], tmp_path: Path, logged: list[str]) -> None:
    made, members = make_shadow(dumps=tmp_path, a3=Tier.FAST)
    query, cache, batch = batch_of_three()
    options = attention_options(Dense()) | {"bias": Bias("linear", torch.rand(HEADS))}
    output = paged_attention(query, cache, batch, **options) * 1.01
    for _ in range(shadow.MAX_DUMPS + 3):
        new_step()
        made.attention(members["a3"], query, cache, batch, output, options)
    files = list(tmp_path.iterdir())
    assert len(files) == shadow.MAX_DUMPS
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    content, call = shadow_call.read(files[0])
    # The whole step, whatever part of it was compared.
    assert torch.equal(call.output, output)
    assert call.options["pattern"] == Dense()
    assert content["layer"] == 3
    assert content["versions"].keys() == {"tiers", "vllm", "torch"}
    assert sum("differs from the reference" in line for line in logged) == 1
    assert sum("tiers check --replay" in line for line in logged) == shadow.MAX_DUMPS


def test_of_a_large_step_only_what_was_compared_is_kept(
    new_step: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, members = make_shadow(dumps=tmp_path, a3=Tier.FAST)
    query, cache, batch = batch_of_three()
    output = paged_attention(query, cache, batch, **attention_options(Dense())) * 1.01
    monkeypatch.setattr(shadow, "MAX_DUMP", 1000)
    monkeypatch.setattr(shadow, "MAX_ROWS", 2)
    new_step()
    made.attention(members["a3"], query, cache, batch, output, attention_options(Dense()))
    _, call = shadow_call.read(next(tmp_path.iterdir()))
    assert len(call.output) == 2


def test_a_dump_that_cannot_be_written_stops_nothing(
    new_step: Callable[..., None], tmp_path: Path, counts: Any, logged: list[str]
) -> None:
    made, members = make_shadow(dumps=tmp_path / "gone", a3=Tier.FAST)
    query, cache, batch = batch_of_three()
    output = paged_attention(query, cache, batch, **attention_options(Dense())) * 1.01
    for _ in range(2):
        new_step()
        made.attention(members["a3"], query, cache, batch, output, attention_options(Dense()))
    assert counts["attention", "fast"].failures == 2
    assert counts["attention", "fast"].exceptions == 2
    assert sum("could not be made; serving goes on" in line for line in logged) == 1


@pytest.mark.parametrize("content", [b"", b"no dump", None])
def test_what_is_no_dump_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "x.pt"
    if content is None:
        torch.save({"format": 7}, file)
    else:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--replay {file}"):
        check_replay.run(file)
    with pytest.raises(ConfigError, match="nowhere"):
        check_replay.run(tmp_path / "nowhere")


@pytest.mark.parametrize("rate", [0, 0.0, -0.1, 1.01, "0.1", True, float("nan"), [0.1]], ids=repr)
def test_what_is_no_rate_is_refused(rate: Any) -> None:
    with pytest.raises(ConfigError, match=r"additional-config: shadow is .*expected a number above 0 and at most 1"):
        shadow.options_of({"shadow": rate})


@pytest.mark.parametrize("rate", ["0", "2", "-1", "nan", "inf", "often"])
def test_the_flag_names_what_is_no_rate(rate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["serve", str(tmp_path), f"--shadow={rate}"])
    assert stopped.value.code == 1
    assert "--shadow is" in capsys.readouterr().err


def test_options_travel(tmp_path: Path) -> None:
    assert shadow.from_flags(None, None) == {}
    assert shadow.options_of(None) is shadow.options_of({"tiers": "auto"}) is None
    given = shadow.from_flags("0.25", tmp_path / "new" / "folder")
    assert shadow.options_of(given) == shadow.Options(0.25, tmp_path / "new" / "folder")
    assert stat.S_IMODE((tmp_path / "new" / "folder").stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="nothing is checked without --shadow"):
        shadow.from_flags(None, tmp_path)
    with pytest.raises(ConfigError, match="shadow_dumps is set without shadow"):
        shadow.options_of({"shadow_dumps": str(tmp_path)})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is no folder"):
        shadow.options_of({"shadow": 1, "shadow_dumps": str(tmp_path / "file")})


def test_metrics_show_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path))
    metrics._file.cache_clear()
    try:
        metrics.count_shadow("attention", "fast", 1e-6)
        metrics.count_shadow("attention", "fast", 0.25, failed=True)
        metrics.count_shadow("gate", "compiled", None)
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(tmp_path))
        lines = generate_latest(registry).decode().splitlines()
        published, counted = metrics.published_shadow(), metrics.published()
    finally:
        metrics._file.cache_clear()
    assert 'tiers_shadow_checks_total{operator="attention",tier="fast"} 2.0' in lines
    assert 'tiers_shadow_failures_total{operator="attention",tier="fast"} 1.0' in lines
    assert 'tiers_shadow_exceptions_total{operator="gate",tier="compiled"} 1.0' in lines
    assert 'tiers_shadow_error_max{operator="attention",tier="fast"} 0.25' in lines
    assert published[os.getpid()]["attention", "fast"] == metrics.Shadowed(2, 1, 0, 0.25)
    # They are no calls that were served.
    assert not counted[os.getpid()]


# ---- engines ----------------------------------------------------------------------------------------------------------

PROMPTS = [random_ids(length, 320, seed=length) for length in (70, 40, 9, 1)]


def answers(engine: Any) -> list[Any]:
    """Tokens and log-probabilities, exactly; nothing comes out of the cache of an earlier call."""
    engine.reset_prefix_cache()
    outputs = run(engine, PROMPTS, 8, prompt_logprobs=0)
    return [
        (
            list(o.outputs[0].token_ids),
            [{token: x.logprob for token, x in entry.items()} for entry in (*(o.prompt_logprobs or [])[1:], *o.outputs[0].logprobs)],
        )
        for o in outputs
    ]  # fmt: skip


def served(engine: Any) -> dict[str, list[Any]]:
    """The attention and gate of every layer of an engine in this process."""

    def look(model: Any) -> dict[str, list[Any]]:
        layers = model.model.layers
        return {
            "attention": [layer.mixer.attn.impl for layer in layers],
            "gate": [layer.gate.served for layer in layers if layer.gate is not None],
        }

    return engine.apply_model(look)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("shadow") / "model", tiny_config())


@pytest.fixture(scope="module")
def plain(start_engine: Callable[..., Any], folder: Path) -> list[Any]:
    """What an engine without checks answers."""
    return answers(start_engine(folder))


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., Any], folder: Path, plain: list[Any]) -> Any:
    """An engine that checks every step. It runs on the reference, which is checked since there is nothing else."""
    dumps = folder.parent / "dumps"
    options = {"tiers": "reference", "shadow": 1, "shadow_dumps": str(dumps)}
    return start_engine(folder, additional_config=options)


@pytest.mark.engine
def test_answers_are_the_same_bit_for_bit(engine: Any, plain: list[Any], counts: Any) -> None:
    state, calls = torch.get_rng_state(), dispatch.COUNTS.copy()
    assert answers(engine) == plain
    assert torch.equal(torch.get_rng_state(), state)
    ran = dispatch.COUNTS - calls
    found = counts["attention", "reference"]
    # One layer of four in every step, and nothing of it counts as served.
    assert found.checks * 4 == ran["attention", "reference"]
    assert (found.failures, found.exceptions) == (0, 0)
    assert found.worst < 1e-5
    assert counts["gate", "reference"].checks > 0
    assert counts["gate", "reference"].failures == counts["gate", "reference"].exceptions == 0


@pytest.mark.engine
def test_a_wrong_tier_is_found_and_goes_on_serving(
    engine: Any, plain: list[Any], counts: Any, folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def wrong(*args: Any, **options: Any) -> Tensor:
        return paged_attention(*args, **options) * 1.01

    for impl in served(engine)["attention"]:
        monkeypatch.setattr(impl, "paged_attention", wrong)
    actual = answers(engine)
    found = counts["attention", "reference"]
    assert found.failures == found.checks > 0
    assert found.exceptions == 0
    assert counts["gate", "reference"].failures == 0
    # The answers are those of the wrong tier, checked or not.
    for impl in served(engine)["attention"]:
        monkeypatch.setattr(impl, "shadow", None)
    assert actual == answers(engine)
    assert actual != plain

    files = sorted((folder.parent / "dumps").iterdir())
    assert len(files) == shadow.MAX_DUMPS
    for file in files[:3]:
        content, call = shadow_call.read(file)
        assert content["operator"] == "attention"
        assert set(content["inputs"]) == {"query", "cache", "block_table", "lengths", "starts"}
        assert not [x for x in call.tensors.values() if x.dtype == torch.int64], "no token ids"
        assert check_replay.run(file) == 1
        printed = capsys.readouterr().out
        assert "What tier reference gave when this was recorded is wrong; every tier that ran here is right" in printed
        (recorded, *here), _ = check_replay.compare(content, call)
        assert recorded.verdict is Verdict.FAIL
        assert {row.verdict for row in here} == {Verdict.PASS}


@pytest.mark.engine
def test_a_wrong_gate_is_found(engine: Any, counts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for gate in served(engine)["gate"]:
        right = gate.functions["knowledge_gate"]
        monkeypatch.setitem(gate.functions, "knowledge_gate", lambda *args, right=right: right(*args) * 1.01)
    answers(engine)
    assert counts["gate", "reference"].failures > 0
    assert counts["attention", "reference"].failures == 0


@pytest.mark.engine
def test_whatever_goes_wrong_in_a_check_the_engine_serves(
    engine: Any, plain: list[Any], counts: Any, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(call: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(shadow, "expected", broken)
    assert answers(engine) == plain
    assert counts["attention", "reference"].exceptions > 1
    assert counts["attention", "reference"].checks == 0
    assert len(logged) == 1
    assert "OutOfMemoryError: no memory left" in logged[0]


@pytest.mark.engine
def test_all_layers_share_their_checks(engine: Any) -> None:
    layers = served(engine)
    (made,) = {layer.shadow for layer in (*layers["attention"], *layers["gate"])}
    assert set(made.members) == {*layers["attention"], *layers["gate"]}
