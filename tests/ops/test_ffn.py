"""`swiglu` and `gelu` against the formulas, one inner channel at a time."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.reference.ops.ffn import gelu, swiglu
from tiers.reference.testing.compare import assert_close


def inputs(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Tensors whose products with one another are of order 1."""
    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [(tensor * tensor.shape[-1] ** -0.5).to(dtype) for tensor in tensors]


def exact_gelu(x: float) -> float:
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def tanh_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("tokens", "width", "inner"), [(1, 1, 1), (7, 5, 11)], ids=["T1-M1-F1", "T7-M5-F11"])
def test_swiglu_matches_the_formula(tokens: int, width: int, inner: int, has_bias: bool) -> None:
    x, gate, up, down, *biases = inputs(
        (tokens, width), (inner, width), (inner, width), (width, inner), (inner,), (inner,), (width,)
    )
    gate_bias, up_bias, down_bias = biases if has_bias else [torch.zeros_like(bias) for bias in biases]
    expected = torch.zeros_like(x)
    for t in range(tokens):
        expected[t] = down_bias
        for f in range(inner):
            a = float(gate[f] @ x[t] + gate_bias[f])
            expected[t] += a / (1 + math.exp(-a)) * float(up[f] @ x[t] + up_bias[f]) * down[:, f]
    actual = swiglu(x, gate, up, down, *(biases if has_bias else []))
    assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize(("approximate", "formula"), [("none", exact_gelu), ("tanh", tanh_gelu)], ids=["none", "tanh"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("tokens", "width", "inner"), [(1, 1, 1), (7, 5, 11)], ids=["T1-M1-F1", "T7-M5-F11"])
def test_gelu_matches_the_formula(
    tokens: int, width: int, inner: int, has_bias: bool, approximate: str, formula: Any
) -> None:
    x, up, down, up_bias, down_bias = inputs((tokens, width), (inner, width), (width, inner), (inner,), (width,))
    if not has_bias:
        up_bias, down_bias = torch.zeros_like(up_bias), torch.zeros_like(down_bias)
    expected = torch.zeros_like(x)
    for t in range(tokens):
        expected[t] = down_bias
        for f in range(inner):
            expected[t] += formula(float(up[f] @ x[t] + up_bias[f])) * down[:, f]
    given = (up_bias, down_bias) if has_bias else (None, None)
    assert_close(gelu(x, up, down, *given, approximate), expected, 1e-12)


def test_the_two_gelus_differ() -> None:
    x, up, down = inputs((7, 5), (11, 5), (5, 11))
    assert (gelu(x, up, down) - gelu(x, up, down, approximate="tanh")).abs().max() > 1e-6


def test_float32_matches_float64() -> None:
    shapes = ((63, 60), (100, 60), (100, 60), (60, 100))
    assert_close(swiglu(*inputs(*shapes, dtype=torch.float32)), swiglu(*inputs(*shapes)), 1e-6)
    shapes = shapes[:1] + shapes[2:]
    assert_close(gelu(*inputs(*shapes, dtype=torch.float32)), gelu(*inputs(*shapes)), 1e-6)


def test_gradients_match_differences() -> None:
    shapes = ((3, 4), (5, 4), (5, 4), (4, 5), (5,), (5,), (4,))
    assert torch.autograd.gradcheck(swiglu, [tensor.requires_grad_() for tensor in inputs(*shapes)])
    shapes = ((3, 4), (5, 4), (4, 5), (5,), (4,))
    for approximate in ("none", "tanh"):
        leaves = [tensor.requires_grad_() for tensor in inputs(*shapes)]
        assert torch.autograd.gradcheck(lambda *x, kind=approximate: gelu(*x, kind), leaves)
