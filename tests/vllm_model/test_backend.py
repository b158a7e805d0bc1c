"""The attention backend alone, on batches made by hand: padding rows, layouts, slots, what it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.reference.config import Dense, TopK, Window
from tiers.reference.errors import ServingError
from tiers.reference.ops.attention import attention
from tiers.reference.ops.bias import Bias
from tiers.reference.ops.paged_attention import paged_attention
from tiers.vllm_model import backend, compat, dispatch
from tiers.vllm_model.backend import TiersAttentionImpl, TiersMetadata
from tiers.vllm_model.dispatch import Choice
from tiers.vllm_model.plan import Tier

HEADS, KV_HEADS, SIZE, PAGE, BLOCKS = 4, 2, 8, 16, 12


def make_impl(**changes: Any) -> TiersAttentionImpl:
    options: dict[str, Any] = {
        "num_heads": HEADS, "head_size": SIZE, "scale": 0.3, "num_kv_heads": KV_HEADS, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "auto", "pattern": TopK(k=4, sink=1, window=2), "choice": Choice(0, "attention", Tier.REFERENCE),
        "longest": 64, "most_tokens": 32,
    }  # fmt: skip
    return TiersAttentionImpl(**{**options, **changes})


def make_cache(layout: str) -> Tensor:
    """An empty cache as vLLM hands it over: a view [B, KV, N, 2 D] of memory in one of its layouts; NaN where unwritten."""
    if layout == "HND":
        return torch.full((BLOCKS, KV_HEADS, PAGE, 2 * SIZE), float("nan"))
    return torch.full((BLOCKS, PAGE, KV_HEADS, 2 * SIZE), float("nan")).permute(0, 2, 1, 3)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("padding", [0, 5])
def test_a_padded_batch_equals_each_request_alone(layout: str, padding: int) -> None:
    # A request in decode, one in prefill, one that goes on with a second chunk; and a padding row of no tokens.
    lengths, queries = [21, 18, 40, 0], [1, 18, 7, 0]
    blocks = [[3, 7], [5, 1], [2, 9, 4], [0]]
    keys = [torch.randn(n, KV_HEADS, SIZE) for n in lengths]
    values = [torch.randn(n, KV_HEADS, SIZE) for n in lengths]
    query = torch.randn(sum(queries) + padding, HEADS, SIZE)
    table = torch.full((4, 6), 10_000_000, dtype=torch.int32)  # a stale tail must not be read
    for row, ids in enumerate(blocks):
        table[row, : len(ids)] = torch.tensor(ids)
    impl, cache, layer = make_impl(), make_cache(layout), torch.nn.Module()
    for request in range(3):
        slots = torch.tensor([blocks[request][i // PAGE] * PAGE + i % PAGE for i in range(lengths[request])])
        # Rows beyond the slots, and slots of -1, are padding.
        impl.do_kv_cache_update(
            layer,
            torch.cat((keys[request], torch.full((3, KV_HEADS, SIZE), 1e6))),
            torch.cat((values[request], torch.full((3, KV_HEADS, SIZE), 1e6))),
            cache,
            torch.cat((slots, torch.tensor([-1]))),
        )
    starts = torch.tensor([0, 1, 19, 26, 26], dtype=torch.int32)
    metadata = TiersMetadata(table, torch.tensor(lengths, dtype=torch.int32), starts, 18, 64, sum(queries))
    actual = torch.full_like(query, float("nan"))
    impl.forward(layer, query, query, query, cache, metadata, actual)

    for request in range(3):
        rows = slice(int(starts[request]), int(starts[request + 1]))
        expected = attention(query[rows], keys[request], values[request], scale=0.3, pattern=impl.pattern)
        torch.testing.assert_close(actual[rows], expected, atol=1e-6, rtol=0)
    assert (actual[sum(queries) :] == 0).all()
    # Padding wrote to the null block only.
    assert torch.isnan(cache[[6, 8, 10, 11]]).all()


def test_a_run_without_a_cache_gives_zeros() -> None:
    out = torch.full((3, HEADS, SIZE), float("nan"))
    make_impl().forward(torch.nn.Module(), out, out, out, torch.empty(0), None, out)
    assert (out == 0).all()


@pytest.mark.parametrize("pattern", [TopK(k=4, sink=1, window=2), TopK(4, 0, 0, "group"), Window(9)], ids=str)
def test_the_workspace_of_a_tier_is_part_of_what_is_measured(monkeypatch: pytest.MonkeyPatch, pattern: Any) -> None:
    asked: list[int] = []
    monkeypatch.setattr(compat, "scratch", lambda size, device: asked.append(size))
    impl = make_impl(choice=Choice(0, "attention", Tier.FAST), pattern=pattern)
    out = torch.zeros(1, HEADS, SIZE)
    impl.forward(torch.nn.Module(), out, out, out, out, None, out)
    # At least the scores of every token of the largest step, and no more than a model of this size needs.
    least = 32 * HEADS * 64 * 4 if isinstance(pattern, TopK) else 1
    assert len(asked) == 1
    assert least <= asked[0] <= 2**24


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: vLLM has no workspace elsewhere")
def test_vllms_workspace_serves_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker import workspace

    manager = workspace.WorkspaceManager(torch.device("cpu"))
    monkeypatch.setattr(workspace, "_manager", manager)
    first = compat.scratch(1000, torch.device("cuda"))
    manager.lock()
    assert compat.scratch(900, torch.device("cuda")).data_ptr() == first.data_ptr()
    with pytest.raises(AssertionError):
        compat.scratch(2000, torch.device("cuda"))


def test_a_cache_of_lower_precision_is_written_rounded() -> None:
    cache = torch.zeros(2, KV_HEADS, PAGE, 2 * SIZE, dtype=torch.bfloat16)
    key = torch.randn(1, KV_HEADS, SIZE)
    make_impl(pattern=Dense()).do_kv_cache_update(torch.nn.Module(), key, key, cache, torch.tensor([PAGE + 3]))
    assert torch.equal(cache[1, :, 3, :SIZE], key[0].bfloat16())


def test_a_learned_bias_is_read_again_into_the_same_memory() -> None:
    """Graphs refer to its tensors, and weights can be loaded into a running engine."""
    learned = torch.rand(HEADS)
    impl = make_impl(pattern=Dense(), bias=lambda: Bias("log", learned * 2, learned + 1))
    assert impl.bias is None  # there are no weights yet
    impl.process_weights_after_loading(torch.float32)
    first, packed = impl.bias, impl.bias.packed
    learned += 1
    impl.process_weights_after_loading(torch.float32)
    assert impl.bias is first
    assert torch.equal(impl.bias.rate_H, learned + 1)
    assert impl.bias.packed is packed
    assert torch.equal(packed[:HEADS], learned * 2)
    assert impl.options()["bias"] is first


def test_slopes_come_as_a_bias() -> None:
    with pytest.raises(ServingError, match="expected them as a bias"):
        make_impl(alibi_slopes=[0.5] * HEADS)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype is fp8_e4m3"),
        ({"sliding_window": 7}, "sliding window 7"),
        ({"attn_type": "encoder"}, "attention type encoder"),
        ({"kv_sharing_target_layer_name": "x"}, "shared cache x"),
    ],
)
def test_what_no_tier_computes_is_refused(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ServingError, match=expected):
        make_impl(**change)


def make_fast_impl(
    function: Any, named: bool, tiers: tuple[Tier, ...] = (Tier.FAST, Tier.REFERENCE)
) -> TiersAttentionImpl:
    """An impl whose fast tier is `function`, as if it had been chosen on this machine."""
    impl = make_impl(choice=Choice(7, "attention", Tier.FAST, named=named, tiers=tiers))
    impl.paged_attention = function
    return impl


def off_by_a_little(query: Tensor, *args: Any, **options: Any) -> Tensor:
    return paged_attention(query, *args, **options) * 1.01


def off_in_prompts(query: Tensor, cache: Tensor, batch: Any, **options: Any) -> Tensor:
    return paged_attention(query, cache, batch, **options) * (1.01 if batch.max_query > 5 else 1.0)


def does_not_compile(*args: Any, **options: Any) -> Tensor:
    raise RuntimeError("out of resource: shared memory")


def step(impl: TiersAttentionImpl) -> tuple[Tensor, Tensor, Tensor]:
    """A decode step of one request on a cache of random numbers; output, expected output, and the cache before it."""
    cache = torch.randn(BLOCKS, KV_HEADS, PAGE, 2 * SIZE)
    before = cache.clone()
    metadata = TiersMetadata(torch.tensor([[4]]), torch.tensor([9]), torch.tensor([0, 1]), 1, 9, 1)
    query = torch.randn(1, HEADS, SIZE)
    out = impl.forward(torch.nn.Module(), query, query, query, cache, metadata, torch.empty_like(query))
    assert torch.equal(cache, before), "the check has to leave the cache as it was"
    expected = paged_attention(query, cache, metadata, scale=0.3, pattern=impl.pattern)
    return out, expected, cache


def test_a_tier_that_agrees_with_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[tuple[int, int]] = []
    kernels = SimpleNamespace(
        warm_up=lambda cache, heads, tokens, longest, **options: warmed.append((tokens, longest)),
        fill=lambda query, cache, batch, out, **options: out.copy_(paged_attention(query, cache, batch, **options)),
    )
    monkeypatch.setattr(TiersAttentionImpl, "_kernels", lambda impl: kernels)
    impl = make_fast_impl(paged_attention, named=False)
    dispatch.COUNTS.clear()
    for _ in range(2):
        out, expected, _ = step(impl)
        assert torch.equal(out, expected)
    assert dict(dispatch.COUNTS) == {("attention", "fast"): 2}
    assert warmed == [(32, 64)]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (off_by_a_little, "differs from the reference by 0.01"),
        (off_in_prompts, "differs from the reference by 0.01"),
        (does_not_compile, "out of resource: shared memory"),
    ],
)
def test_under_auto_a_tier_that_fails_takes_its_layer_down(
    function: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(backend.logger, "warning", lambda message, *args: warnings.append(message % args))
    impl = make_fast_impl(function, named=False)
    dispatch.COUNTS.clear()
    out, expected, _ = step(impl)
    assert torch.equal(out, expected)
    assert dict(dispatch.COUNTS) == {("attention", "reference"): 1}
    assert len(warnings) == 1
    assert "layer 7" in warnings[0]
    assert reason in warnings[0]


@pytest.mark.parametrize("function", [off_by_a_little, does_not_compile])
def test_a_tier_that_was_named_and_fails_stops(function: Any) -> None:
    with pytest.raises(ServingError, match="layer 7: attention on tier fast"):
        step(make_fast_impl(function, named=True))


def test_under_auto_a_tier_that_fails_gives_way_to_the_next_that_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "function", lambda name, tier: paged_attention)
    impl = make_fast_impl(off_by_a_little, named=False, tiers=(Tier.FAST, Tier.COMPILED, Tier.REFERENCE))
    dispatch.COUNTS.clear()
    step(impl)
    assert dict(dispatch.COUNTS) == {("attention", "compiled"): 1}


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ([Tier.FAST, Tier.FAST], "UNIFORM_SINGLE_TOKEN_DECODE"),
        ([], "UNIFORM_SINGLE_TOKEN_DECODE"),  # all layers are vLLM's own
        ([Tier.FAST, Tier.COMPILED], "NEVER"),
        ([Tier.REFERENCE], "NEVER"),
    ],
)
def test_full_graphs_need_every_layer_of_ours_on_the_fast_tier(
    monkeypatch: pytest.MonkeyPatch, tiers: list[Tier], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    layers: dict[str, Any] = {
        str(i): SimpleNamespace(impl=make_impl(choice=Choice(i, "attention", tier))) for i, tier in enumerate(tiers)
    }
    layers["native"] = SimpleNamespace(impl=object())
    layers["gate"] = object()
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    spec = SimpleNamespace(block_size=16, dtype=torch.float32)
    assert backend.TiersMetadataBuilder.get_cudagraph_support(config, spec).name == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("size", [40, 24, 32])
@pytest.mark.skipif(torch.cuda.is_available(), reason="a vLLM built for CUDA has no rotary kernel for the CPU")
def test_rope_of_any_head_size_on_the_cpu_in_16_bits(size: int, style: Any, dtype: torch.dtype) -> None:
    """vLLM's kernel ends the process where half of the channels do not fill 16 bytes."""
    from vllm.config import VllmConfig, set_current_vllm_config

    from tiers.reference.config import Rope
    from tiers.reference.ops.rope import rope, rope_table
    from tiers.vllm_model import model as module

    position = Rope(style=style)
    positions = torch.arange(9)
    query, key = torch.randn(9, 3, size).to(dtype), torch.randn(9, 1, size).to(dtype)
    table = rope_table(position, size, 16).to(dtype)
    expected = [rope(x.float(), positions, table.float(), style) for x in (query, key)]
    with set_current_vllm_config(VllmConfig()):
        layer = module._make_rope.__wrapped__(position, size, 16, torch.device("cpu"), dtype)
        actual = layer.forward_cpu(positions, query.flatten(1), key.flatten(1))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.view_as(theirs).float(), theirs, rtol=0.01, atol=0.02)
