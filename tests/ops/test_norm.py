"""`rms_norm` and `layer_norm` against the formulas and against torch."""

import math

import pytest
import torch
from torch import Tensor

from tiers.reference.ops.norm import layer_norm, rms_norm
from tiers.reference.testing.compare import assert_close

SHAPES = [(1, 1), (1, 8), (7, 20), (63, 60), (3, 4, 5), (0, 8)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(shape, generator=generator, dtype=torch.float64) + 1
    weight, bias = torch.randn(2, shape[-1], generator=generator, dtype=torch.float64)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_matches_the_formula(shape: tuple[int, ...], eps: float) -> None:
    x, weight, _ = inputs(shape)
    expected = torch.zeros_like(x)
    for row, out in zip(x.reshape(-1, shape[-1]), expected.view(-1, shape[-1]), strict=True):
        root = math.sqrt(sum(float(v) ** 2 for v in row) / len(row) + eps)
        out.copy_(row / root * weight)
    assert_close(rms_norm(x, weight, eps), expected, 1e-12)
    assert_close(torch.nn.functional.rms_norm(x, shape[-1:], weight, eps), expected, 1e-12)


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm_matches_the_formula(shape: tuple[int, ...], eps: float, has_bias: bool) -> None:
    x, weight, bias = inputs(shape)
    expected = torch.zeros_like(x)
    for row, out in zip(x.reshape(-1, shape[-1]), expected.view(-1, shape[-1]), strict=True):
        mean = sum(float(v) for v in row) / len(row)
        variance = sum((float(v) - mean) ** 2 for v in row) / len(row)
        out.copy_((row - mean) / math.sqrt(variance + eps) * weight + (bias if has_bias else 0))
    assert_close(layer_norm(x, weight, bias if has_bias else None, eps), expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x, weight, bias = inputs((7, 60), dtype)
    exact = rms_norm(x.float(), weight.float(), 1e-5)
    assert torch.equal(rms_norm(x, weight, 1e-5), exact.to(dtype))
    exact = layer_norm(x.float(), weight.float(), bias.float(), 1e-5)
    assert torch.equal(layer_norm(x, weight, bias, 1e-5), exact.to(dtype))


def test_squares_beyond_float16_do_not_overflow() -> None:
    x = torch.full((1, 8), 3e4, dtype=torch.float16)
    ones = torch.ones(8, dtype=torch.float16)
    assert_close(rms_norm(x, ones, 1e-5), torch.ones(1, 8, dtype=torch.float16), 1e-3)
    assert_close(layer_norm(x, ones, None, 1e-5), torch.zeros(1, 8, dtype=torch.float16), 1e-3)


def test_a_row_of_zeros_stays_zero() -> None:
    x = torch.zeros(2, 8)
    assert (rms_norm(x, torch.ones(8), 1e-5) == 0).all()
    assert (layer_norm(x, torch.ones(8), None, 1e-5) == 0).all()


def test_no_argument_is_modified() -> None:
    tensors = inputs((7, 8), torch.float32)
    before = [tensor.clone() for tensor in tensors]
    x, weight, bias = tensors
    rms_norm(x, weight, 1e-5)
    layer_norm(x, weight, bias, 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_gradients_match_differences() -> None:
    x, weight, bias = (tensor.requires_grad_() for tensor in inputs((3, 5)))
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(lambda x, weight, bias: layer_norm(x, weight, bias, 1e-3), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda x, weight: layer_norm(x, weight, None, 1e-3), (x, weight))
