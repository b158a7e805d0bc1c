"""`knowledge_bank`: softmax over learned slots, against the formula one token and slot at a time."""

import math

import pytest
import torch
from torch import Tensor

from tiers.reference.ops.knowledge_bank import knowledge_bank
from tiers.reference.ops.knowledge_gate import fold
from tiers.reference.testing.compare import assert_close, assert_within_budget


def inputs(tokens: int, slots: int, width: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """h, K and V."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, width), (slots, width), (slots, width))
    h, keys, values = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return h.to(dtype), keys.to(dtype), values.to(dtype)


@pytest.mark.parametrize("scale", [0.25, 1.0])
@pytest.mark.parametrize(("tokens", "slots", "width"), [(1, 1, 1), (1, 5, 8), (7, 3, 5), (3, 63, 20)])
def test_matches_the_formula(tokens: int, slots: int, width: int, scale: float) -> None:
    h, keys, values = inputs(tokens, slots, width)
    expected = torch.zeros_like(h)
    for t in range(tokens):
        weights = [math.exp(scale * sum(float(h[t, m] * key[m]) for m in range(width))) for key in keys]
        for n in range(slots):
            expected[t] += weights[n] / sum(weights) * values[n]
    assert_close(knowledge_bank(h, keys, values, scale), expected, 1e-12)


def test_one_slot_is_returned_as_it_is() -> None:
    h, keys, values = inputs(7, 1, 8)
    assert torch.equal(knowledge_bank(h, keys, values, 0.5), values.expand(7, 8))


def test_the_order_of_slots_does_not_matter() -> None:
    h, keys, values = inputs(7, 12, 8)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    expected = knowledge_bank(h, keys, values, 0.5)
    assert_close(knowledge_bank(h, keys[order], values[order], 0.5), expected, 1e-12)


def test_large_scores_do_not_overflow() -> None:
    h, keys, values = inputs(7, 12, 8, torch.float32)
    best = (h @ keys.T).argmax(-1)
    assert_close(knowledge_bank(h * 1e4, keys, values, 1.0), values[best], 1e-6)


def test_an_empty_batch_gives_an_empty_result() -> None:
    h, keys, values = inputs(1, 3, 8)
    assert knowledge_bank(h[:0], keys, values, 0.5).shape == (0, 8)


def test_bfloat16_stays_near_the_exact_result() -> None:
    # 4096 slots of nearly equal weight: added up in bfloat16, the weights would not sum to 1.
    h, keys, values = inputs(7, 4096, 16, torch.bfloat16)
    exact = knowledge_bank(h.double(), keys.double(), values.double(), 0.05)
    eager = ((h @ keys.T).float() * 0.05).softmax(-1).bfloat16() @ values
    actual = knowledge_bank(h, keys, values, 0.05)
    assert actual.dtype == torch.bfloat16
    assert_within_budget(actual, eager, exact)


def test_values_may_be_wider_than_keys() -> None:
    h, keys, values = inputs(7, 5, 8)
    weight = torch.randn(8, 16, dtype=torch.float64)
    knowledge = knowledge_bank(h, keys, values, 0.5)
    both = knowledge_bank(h, keys, torch.cat((values, fold(values, weight)), dim=1), 0.5)
    assert_close(both, torch.cat((knowledge, fold(knowledge, weight)), dim=1), 1e-12)


def test_no_argument_is_modified() -> None:
    tensors = inputs(7, 5, 8)
    before = [tensor.clone() for tensor in tensors]
    knowledge_bank(*tensors, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_gradients_match_differences() -> None:
    leaves = tuple(tensor.requires_grad_() for tensor in inputs(3, 4, 5))
    assert torch.autograd.gradcheck(lambda h, keys, values: knowledge_bank(h, keys, values, 0.7), leaves)


def test_rejects_mismatched_shapes() -> None:
    h, keys, values = inputs(3, 4, 5)
    with pytest.raises(ValueError, match="keys_NM has width 4; expected 5, that of hidden_TM"):
        knowledge_bank(h, keys[:, :4], values, 1.0)
    with pytest.raises(ValueError, match="values_NC has 3 rows; expected 4, one per key"):
        knowledge_bank(h, keys, values[:3], 1.0)
