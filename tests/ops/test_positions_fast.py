"""The Triton tier with every kind of positions and pattern, against the reference; see test_paged_attention_fast.py."""

import os
from typing import Any

import pytest
import torch

from tiers.reference.config import Dense, TopK, Window
from tiers.reference.ops.bias import Bias
from tiers.reference.ops.paged_attention import paged_attention as reference
from tiers.reference.ops.xpos import xpos_decay
from tiers.reference.positions import T5, Position, Sandwich, Xpos
from tiers.reference.testing.compare import assert_close, assert_within_budget
from tiers.reference.testing.inputs import (
    BATCHES,
    FEW_ROWS,
    PATTERNS,
    POSITIONS,
    PagedInputs,
    make_batch,
    position_options,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs CUDA, or the interpreter in a process of its own (see test_interpreter.py)",
)

# Besides those of all tiers: one row of a table for all heads of a model with one head, and decay within a tile.
MORE = {"one t5 head": T5(8, 20), "steep xpos": Xpos(scale_base=10.0, style="half"), "long sandwich": Sandwich(4)}


def run(inputs: PagedInputs, **options: Any) -> torch.Tensor:
    from tiers.vllm_model.ops.paged_attention import paged_attention

    return paged_attention(inputs.query_THD, inputs.cache_BKNC, inputs.batch, **options)


def expect(inputs: PagedInputs, **options: Any) -> torch.Tensor:
    return reference(inputs.query_THD, inputs.cache_BKNC, inputs.batch, **options)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("position", [p for p in POSITIONS.values() if p.kind != "none"], ids=lambda p: p.kind)
@pytest.mark.parametrize("requests", [[(1, 40), (1, 63)], FEW_ROWS], ids=["decodes", "mixed"])
def test_fast_matches_reference_with_every_kind_of_positions(requests: Any, position: Position, pattern: Any) -> None:
    inputs = make_batch(requests, 16, "NHD", 4, 2, 32)
    inputs = (inputs.sharing() if requests is FEW_ROWS else inputs).to(DEVICE)
    options = {"scale": 0.3, "pattern": pattern, **position_options(position, 4, 32, 64, DEVICE)}
    assert_close(run(inputs, **options), expect(inputs, **options), 1e-5)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("position", MORE.values(), ids=MORE)
def test_fast_matches_reference_on_odd_shapes(position: Position, pattern: Any) -> None:
    heads, kv_heads = (1, 1) if isinstance(position, T5) else (5, 1)
    inputs = make_batch([(1, 150), (3, 70), (1, 3)], 32, "HND", heads, kv_heads, 40).to(DEVICE)
    options = {"scale": 0.3, "pattern": pattern, "softcap": 2.0, **position_options(position, heads, 40, 150, DEVICE)}
    assert_close(run(inputs, **options), expect(inputs, **options), 1e-5)


@pytest.mark.parametrize("pattern", [Dense(), TopK(6, 1, 2, "group")], ids=["dense", "group"])
def test_fast_applies_bias_and_decay_together(pattern: Any) -> None:
    inputs = make_batch(FEW_ROWS, 16, "HND", 4, 2, 32).to(DEVICE)
    bias = position_options(POSITIONS["t5"], 4, 32, 64, DEVICE)["bias"]
    decay = xpos_decay(Xpos(scale_base=20.0), 32).to(DEVICE)
    options = {"scale": 0.3, "pattern": pattern, "bias": bias, "decay_D": decay}
    assert_close(run(inputs, **options), expect(inputs, **options), 1e-5)


@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize("position", ["sandwich", "xpos"])
def test_fast_does_without_lists_that_are_too_short(monkeypatch: pytest.MonkeyPatch, position: str, share: Any) -> None:
    from dataclasses import replace

    from tiers.vllm_model.ops import topk_attention as module

    full = module.Sizes.of
    monkeypatch.setattr(module.Sizes, "of", lambda pattern, longest: replace(full(pattern, longest), kept=3))
    inputs = make_batch([(1, 63), (2, 30)], 16, "HND", 4, 2, 32).to(DEVICE)
    options = {"scale": 0.3, "pattern": TopK(6, 1, 2, share)}
    options |= position_options(POSITIONS[position], 4, 32, 63, DEVICE)
    assert_close(run(inputs, **options), expect(inputs, **options), 1e-5)


@pytest.mark.parametrize("pattern", [Window(9, 2), TopK(6, 1, 2), TopK(6, 1, 2, "group")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("position", ["xpos", "t5"])
def test_fast_errs_no_more_than_eager_does(position: str, dtype: torch.dtype, pattern: Any) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 as bit patterns")
    requests, heads = (FEW_ROWS, 4) if INTERPRETED else (BATCHES["mixed"], 6)
    inputs = make_batch(requests, 16, "NHD", heads, heads // 2, 32, dtype).to(DEVICE)
    options = {"scale": 0.3, "pattern": pattern, **position_options(POSITIONS[position], heads, 32, 64, DEVICE)}
    exact = reference(inputs.query_THD.double(), inputs.cache_BKNC.double(), inputs.batch, **options)
    assert_within_budget(run(inputs, **options), expect(inputs, **options), exact)


def far(length: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> PagedInputs:
    """One query token behind a long context."""
    return make_batch([(1, length)], 128, "NHD", heads, kv_heads, size, dtype).to(DEVICE)


@pytest.mark.parametrize("pattern", [Dense(), TopK(64, 1, 16)], ids=["dense", "topk"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_xpos_is_finite_and_exact_at_128k_positions(dtype: torch.dtype, pattern: Any) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 as bit patterns")
    if INTERPRETED and isinstance(pattern, TopK):
        pytest.skip("takes more than a minute in Triton's interpreter")
    inputs = far(2**17, 1, 1, 32, dtype) if INTERPRETED else far(2**17, 32, 8, 128, dtype)
    size = inputs.query_THD.shape[2]
    # Scores of near keys are large enough to matter beside so many far ones.
    options = {"scale": 1.0, "pattern": pattern, "decay_D": xpos_decay(Xpos(), size).to(DEVICE)}
    exact = reference(inputs.query_THD[:1].double(), inputs.cache_BKNC.double(), inputs.batch, **options)
    actual, eager = run(inputs, **options)[:1], expect(inputs, **options)[:1]
    assert_within_budget(actual, eager, exact)


@pytest.mark.parametrize("kind", ["linear", "table"])
def test_a_bias_changed_in_place_is_read_anew(kind: Any) -> None:
    # As weights are loaded again into an engine whose graphs refer to the tensors.
    inputs = make_batch(BATCHES["decodes"], 16, "HND", 4, 2, 32).to(DEVICE)

    def made(factor: float) -> Bias:
        table = torch.rand(4, 9, device=DEVICE) if kind == "table" else None
        return Bias(kind, torch.full((4,), factor, device=DEVICE), table_RL=table)

    bias, other = made(0.1), made(0.7)
    options = {"scale": 0.3, "pattern": Dense()}
    before = run(inputs, bias=bias, **options)
    bias.fill(other)
    after = run(inputs, bias=bias, **options)
    assert_close(after, expect(inputs, bias=other, **options), 1e-5)
    assert not torch.allclose(before[:4], after[:4])
