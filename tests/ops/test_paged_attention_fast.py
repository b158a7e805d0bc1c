"""The Triton tier of paged attention against the reference, on the named cases of every tier.

On a machine without CUDA it needs Triton's interpreter, which has to be chosen before Triton is imported:
test_interpreter.py runs this file in a process of its own.
"""

import os
from typing import Any

import pytest
import torch

from tiers.reference.config import Dense, TopK, Window
from tiers.reference.ops.bias import Bias
from tiers.reference.ops.paged_attention import paged_attention as reference
from tiers.reference.testing.compare import assert_close, assert_within_budget
from tiers.reference.testing.inputs import BATCHES, PagedInputs, make_batch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs CUDA, or the interpreter in a process of its own (see test_interpreter.py)",
)

TOPK = {
    "head": TopK(6, 1, 2),
    "group": TopK(6, 1, 2, "group"),
    "one-key": TopK(1),
    "more-than-there-are": TopK(100, 2, 3),
}
OTHERS = {"dense": Dense(), "window": Window(9, 2), "narrow-window": Window(1, 0)}
PATTERNS = {**TOPK, **OTHERS}
# name -> query heads, key/value heads, head size, tokens per block
SHAPES = {
    "G2-D40-page16": (4, 2, 40, 16),
    "G5-D32-page32": (5, 1, 32, 32),
    "G1-D64-page128": (3, 3, 64, 128),
    "G24-D48-page64": (24, 1, 48, 64),
    "G20-D32-page16": (20, 1, 32, 16),
}


def run(inputs: PagedInputs, **options: Any) -> torch.Tensor:
    from tiers.vllm_model.ops.paged_attention import paged_attention

    return paged_attention(inputs.query_THD, inputs.cache_BKNC, inputs.batch, **options)


def make(requests: Any, shape: str, layout: str = "HND", dtype: torch.dtype = torch.float32) -> PagedInputs:
    heads, kv_heads, size, page = SHAPES[shape]
    return make_batch(requests, page, layout, heads, kv_heads, size, dtype).to(DEVICE)


def expect(inputs: PagedInputs, **options: Any) -> torch.Tensor:
    return reference(inputs.query_THD, inputs.cache_BKNC, inputs.batch, **options)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("name", BATCHES)
def test_fast_matches_reference_on_every_batch(name: str, pattern: TopK) -> None:
    inputs = make(BATCHES[name], "G2-D40-page16")
    options = {"scale": 0.3, "pattern": pattern}
    actual = run(inputs, **options)
    assert_close(actual, expect(inputs, **options), 1e-5)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    "pattern", [TopK(5, 1, 2), TopK(5, 1, 2, "group"), Window(7, 2), Dense()], ids=["head", "group", "window", "dense"]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_fast_matches_reference_on_every_shape(shape: str, pattern: Any, layout: str) -> None:
    inputs = make([(1, 40), (3, 7)], shape, layout)
    options = {
        "scale": 0.4, "pattern": pattern, "softcap": 3.0,
        "bias": Bias("linear", torch.linspace(0.5, 0.1, SHAPES[shape][0], device=DEVICE)),
    }  # fmt: skip
    assert_close(run(inputs, **options), expect(inputs, **options), 1e-5)


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("share", ["head", "group"])
def test_fast_matches_reference_around_k(share: Any, offset: int) -> None:
    # 33 tokens, of which sink and window take 3: k is one less than the candidates, as many, one more.
    inputs = make([(1, 33)], "G2-D40-page16")
    options = {"scale": 0.3, "pattern": TopK(30 + offset, 1, 2, share)}
    assert_close(run(inputs, **options), expect(inputs, **options), 1e-5)


@pytest.mark.parametrize("k", [1, 5, 20])
def test_fast_keeps_all_ties(k: int) -> None:
    # Keys of three kinds only: every threshold is a tie of many. Small integers, so that equal keys have equal scores
    # whatever the order of the sums.
    inputs = make([(1, 63), (4, 30)], "G2-D40-page16")
    for request in range(2):
        length = int(inputs.batch.lengths_R[request])
        blocks = inputs.batch.block_table_RP[request, : -(-length // 16)].long()
        kinds = torch.randint(-1, 2, (3, 40), device=DEVICE).float()
        tokens = kinds[torch.arange(len(blocks) * 16, device=DEVICE) % 3].view(len(blocks), 1, 16, 40)
        inputs.cache_BKNC[blocks, :, :, :40] = tokens.expand(-1, 2, -1, -1)
    inputs.query_THD = torch.randint(-2, 3, inputs.query_THD.shape, device=DEVICE).float()
    options = {"scale": 0.25, "pattern": TopK(k, 1, 2)}
    assert_close(run(inputs, **options)[:5], expect(inputs, **options)[:5], 1e-5)


@pytest.mark.parametrize(
    "pattern", [TopK(6, 1, 2), TopK(6, 1, 2, "group"), Window(9, 2)], ids=["head", "group", "window"]
)
def test_fast_gives_the_same_bits_every_time(pattern: Any) -> None:
    inputs = make(BATCHES["decodes"], "G2-D40-page16")
    options = {"scale": 0.3, "pattern": pattern}
    first = run(inputs, **options)
    for _ in range(3 if INTERPRETED else 20):
        assert torch.equal(run(inputs, **options), first)


@pytest.mark.parametrize("pattern", [TopK(6, 1, 2), Window(9, 2)], ids=["topk", "window"])
def test_fast_writes_every_row(monkeypatch: pytest.MonkeyPatch, pattern: Any) -> None:
    # Whatever the kernels do not write stays NaN: scratch memory and output alike.
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(result: torch.Tensor) -> torch.Tensor:
        return result.fill_(float("nan") if result.is_floating_point() else 255)

    monkeypatch.setattr(torch, "empty", lambda *a, **kw: poisoned(empty(*a, **kw)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **kw: poisoned(empty_like(*a, **kw)))
    one_of_three = [(1, 40), (0, 0), (0, 0)]  # as many rows as requests, but not one each
    for requests in (BATCHES["decodes"], BATCHES["padding rows"], BATCHES["only padding"], one_of_three):
        inputs = make(requests, "G2-D40-page16")
        options = {"scale": 0.3, "pattern": pattern}
        assert_close(run(inputs, **options), expect(inputs, **options), 1e-5)


def test_fast_pads_decode_batches_with_zeros() -> None:
    # As a captured graph does: more rows and requests than there are, one token each.
    for pattern in (TopK(6, 1, 2), TopK(6, 1, 2, "group"), Window(30, 2)):
        inputs = make([(1, 40), (1, 20), (0, 0), (0, 0)], "G2-D40-page16")
        options = {"scale": 0.3, "pattern": pattern}
        assert inputs.batch.max_query == 1
        actual = run(inputs, **options)
        assert_close(actual, expect(inputs, **options), 1e-5)
        assert not actual[2:].any()


def test_fast_stays_in_bounds_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiers.vllm_model.ops import topk_attention as module

    inputs = make(BATCHES["mixed"], "G2-D40-page16")
    pattern = TopK(6, 1, 2)
    # Room for the scores of 5 tokens at a time.
    monkeypatch.setattr(module, "WORKSPACE_BYTES", module.Sizes.of(pattern, 60).bytes_per_row * 4 * 5)
    options = {"scale": 0.3, "pattern": pattern}
    assert_close(run(inputs, **options), expect(inputs, **options), 1e-5)


@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize("short", ["candidates", "kept"])
def test_fast_does_without_lists_that_are_too_short(monkeypatch: pytest.MonkeyPatch, short: str, share: Any) -> None:
    from dataclasses import replace

    from tiers.vllm_model.ops import topk_attention as module

    full = module.Sizes.of
    monkeypatch.setattr(module.Sizes, "of", lambda pattern, longest: replace(full(pattern, longest), **{short: 3}))
    inputs = make([(1, 63), (4, 30)], "G2-D40-page16")
    options = {"scale": 0.3, "pattern": TopK(6, 1, 2, share)}
    assert_close(run(inputs, **options), expect(inputs, **options), 1e-5)


@pytest.mark.parametrize("share", ["head", "group"])
def test_fast_lets_nan_scores_show(share: Any) -> None:
    inputs = make([(1, 60), (1, 60)], "G2-D40-page16")
    block = int(inputs.batch.block_table_RP[0, 1])
    for sign in (1.0, -1.0):
        inputs.cache_BKNC[block, 0, 3, 5] = sign * float("nan")
        options = {"scale": 0.3, "pattern": TopK(6, 1, 2, share)}
        actual, expected = run(inputs, **options), expect(inputs, **options)
        assert expected[0, :2].isnan().all()
        assert torch.equal(actual.isnan(), expected.isnan())


@pytest.mark.parametrize(
    "pattern", [TopK(6, 1, 2), TopK(6, 1, 2, "group"), Window(9, 2)], ids=["head", "group", "window"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fast_errs_no_more_than_eager_does(dtype: torch.dtype, pattern: Any) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 as bit patterns")
    inputs = make(BATCHES["mixed"], "G2-D40-page16", dtype=dtype)
    options = {"scale": 0.3, "pattern": pattern}
    exact = reference(inputs.query_THD.double(), inputs.cache_BKNC.double(), inputs.batch, **options)
    assert_within_budget(run(inputs, **options), expect(inputs, **options), exact)


def test_fast_refuses_what_it_does_not_compute() -> None:
    inputs = make([(1, 20)], "G2-D40-page16")
    with pytest.raises(ValueError, match="expected contiguous groups"):
        run(inputs, scale=0.3, pattern=Dense(), head_map=[0, 1, 0, 1])


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: the cache is larger than 2 GiB")
def test_fast_reaches_blocks_beyond_32_bit_offsets() -> None:
    # 2 heads x 16 tokens x 2 * 64 channels x 2 bytes = 8 KiB a block; element offsets pass 2 ** 31 at block 524288.
    inputs = make_batch([(1, 40)], 16, "HND", 4, 2, 64, torch.bfloat16).to("cuda")
    cache = torch.zeros(600_000, 2, 16, 128, dtype=torch.bfloat16, device="cuda")
    far = torch.tensor([599_999, 550_000, 530_000], device="cuda")
    near = inputs.batch.block_table_RP[0, :3].long()
    cache[far] = inputs.cache_BKNC[near]
    options = {"scale": 0.3, "pattern": TopK(6, 1, 2)}
    expected = run(inputs, **options)
    inputs.batch.block_table_RP[0, :3] = far.int()
    inputs.cache_BKNC = cache
    assert torch.equal(run(inputs, **options), expected)


@pytest.mark.parametrize(
    "pattern", [TopK(6, 1, 2), TopK(300, 1, 2), TopK(300, 1, 2, "group"), Window(70, 2), Dense()], ids=str
)
@pytest.mark.parametrize("requests", [[(1, 80)], [(1, 80), (1, 3), (1, 41)], [(9, 80)]], ids=["one", "three", "prompt"])
def test_what_is_reserved_suffices(monkeypatch: pytest.MonkeyPatch, requests: Any, pattern: Any) -> None:
    from tiers.vllm_model.ops import paged_attention as module
    from tiers.vllm_model.ops import workspace

    asked: list[int] = []
    allocate = workspace._allocate
    monkeypatch.setattr(workspace, "provide", lambda size, device: asked.append(size) or allocate(size, device))
    inputs = make(requests, "G2-D40-page16")
    inputs.query_THD = inputs.query_THD[: int(inputs.batch.starts_R1[-1])]
    tokens = len(inputs.query_THD)
    run(inputs, scale=0.3, pattern=pattern)
    assert max(asked) <= module.workspace_bytes(pattern, 4, 2, 40, tokens, inputs.batch.max_length)
