"""`knowledge_gate`: the three formulas, spelled out channel by channel, and their gradients."""

import math

import pytest
import torch
from torch import Tensor

from tiers.reference.ops.knowledge_gate import combine, fold, knowledge_gate
from tiers.reference.testing.compare import assert_close

MODES = ("linear", "sigmoid", "mix")


def inputs(tokens: int, width: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, e, W and b."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, width), (tokens, width), (width, 2 * width), (width,))
    h, e, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return h.to(dtype), e.to(dtype), weight.to(dtype) * width**-0.5, bias.to(dtype)


def naive_gate(h: Tensor, e: Tensor, weight: Tensor, bias: Tensor | None, mode: str) -> Tensor:
    """The formulas of the module, one number at a time."""
    tokens, width = h.shape
    out = torch.zeros_like(h)
    for t in range(tokens):
        for m in range(width):
            a = sum(float(weight[m, i]) * float(h[t, i]) for i in range(width))
            a += sum(float(weight[m, width + i]) * float(e[t, i]) for i in range(width))
            a += 0.0 if bias is None else float(bias[m])
            g = 1 / (1 + math.exp(-a))
            out[t, m] = {
                "linear": float(h[t, m]) + a,
                "sigmoid": float(h[t, m]) + g * float(e[t, m]),
                "mix": g * float(h[t, m]) + (1 - g) * float(e[t, m]),
            }[mode]
    return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (1, 8), (7, 5)], ids=["T1-M1", "T1-M8", "T7-M5"])
def test_matches_the_formula(tokens: int, width: int, has_bias: bool, mode: str) -> None:
    h, e, weight, bias = inputs(tokens, width)
    expected = naive_gate(h, e, weight, bias if has_bias else None, mode)
    assert_close(knowledge_gate(h, e, weight, bias if has_bias else None, mode), expected, 1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_what_is_folded_stands_for_the_product(has_bias: bool, mode: str) -> None:
    h, e, weight, bias = inputs(7, 5)
    options = (bias if has_bias else None, mode)
    half = weight.clone()
    half[:, 5:] = float("nan")  # not read
    assert_close(knowledge_gate(h, e, half, *options, fold(e, weight)), naive_gate(h, e, weight, *options), 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_float32_matches_float64(mode: str) -> None:
    expected = knowledge_gate(*inputs(63, 60), mode)
    actual = knowledge_gate(*inputs(63, 60, torch.float32), mode)
    assert actual.dtype == torch.float32
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_gives_an_empty_result(mode: str) -> None:
    h, e, weight, bias = inputs(1, 8)
    assert knowledge_gate(h[:0], e[:0], weight, bias, mode).shape == (0, 8)


@pytest.mark.parametrize("mode", MODES)
def test_the_hidden_state_comes_first_in_the_concatenation(mode: str) -> None:
    h, e, weight, bias = inputs(7, 8)
    w_h, w_e = weight.split(8, dim=1)
    expected = combine(h, e, h @ w_h.T + e @ w_e.T + bias, mode)
    assert_close(knowledge_gate(h, e, weight, bias, mode), expected, 1e-12)


@pytest.mark.parametrize(
    ("bias", "expected"), [(1e3, {"sigmoid": "h + e", "mix": "h"}), (-1e3, {"sigmoid": "h", "mix": "e"})],
    ids=["open", "closed"],
)  # fmt: skip
def test_a_saturated_gate_passes_one_side(bias: float, expected: dict[str, str]) -> None:
    h, e, weight, _ = inputs(7, 8)
    sides = {"h": h, "e": e, "h + e": h + e}
    for mode, side in expected.items():
        actual = knowledge_gate(h, e, weight, torch.full((8,), bias, dtype=h.dtype), mode)
        assert_close(actual, sides[side], 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_no_argument_is_modified(mode: str) -> None:
    tensors = inputs(7, 8)
    before = [tensor.clone() for tensor in tensors]
    actual = knowledge_gate(*tensors, mode)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert actual.data_ptr() not in {tensor.data_ptr() for tensor in tensors}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_gradients_match_differences(mode: str, has_bias: bool) -> None:
    tensors = inputs(3, 4)[: 4 if has_bias else 3]
    leaves = tuple(tensor.requires_grad_() for tensor in tensors)
    assert torch.autograd.gradcheck(lambda h, e, weight, bias=None: knowledge_gate(h, e, weight, bias, mode), leaves)


def test_rejects_an_unknown_mode() -> None:
    with pytest.raises(ValueError, match="mode is 'add'; expected 'linear', 'sigmoid' or 'mix'"):
        knowledge_gate(*inputs(1, 4), "add")


def test_rejects_mismatched_shapes() -> None:
    h, e, weight, bias = inputs(3, 4)
    with pytest.raises(ValueError, match=r"knowledge_TM has shape \(2, 4\); expected \(3, 4\)"):
        knowledge_gate(h, e[:2], weight, bias, "mix")
    with pytest.raises(ValueError, match=r"weight_M2M has shape \(8, 4\); expected \(4, 8\)"):
        knowledge_gate(h, e, weight.T, bias, "mix")
