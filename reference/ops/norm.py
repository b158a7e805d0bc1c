"""Normalisation over the last dimension. Legend: ... any leading dimensions, M model width."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_M: Tensor, weight_M: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight), in float32 (float64 for float64 input), rounded once.

    Args:
        x_M: [..., M].
        weight_M: [M].
        eps: added to the mean square.
        offset: added to the weight, in float32; 1 in Gemma.

    Returns:
        [..., M] in the dtype of x_M.

    Source: Zhang and Sennrich 2019 (1910.07467).
    """
    exact = torch.float64 if x_M.dtype == torch.float64 else torch.float32
    x = x_M.to(exact)
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight_M.to(exact) + offset)).to(x_M.dtype)


def layer_norm(x_M: Tensor, weight_M: Tensor, bias_M: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, in float32 (float64 for float64 input), rounded once.

    Args:
        x_M: [..., M].
        weight_M: [M].
        bias_M: [M] or None.
        eps: added to the variance (the mean of squares, not divided by M - 1).

    Returns:
        [..., M] in the dtype of x_M.

    Source: Ba et al. 2016 (1607.06450).
    """
    exact = torch.float64 if x_M.dtype == torch.float64 else torch.float32
    bias = None if bias_M is None else bias_M.to(exact)
    return F.layer_norm(x_M.to(exact), x_M.shape[-1:], weight_M.to(exact), bias, eps).to(x_M.dtype)
