"""Biases and the decay of xPos inside the kernels of attention, and what a launch hands over of them."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiers.reference.ops.bias import KINDS, Bias


def arguments(bias: Bias | None, decay_D: Tensor | None, unread: Tensor) -> tuple[Sequence[Any], dict[str, Any]]:
    """What a kernel gets: bias_ptr, bias_last, decay_ptr; and BIAS, DECAY.

    BIAS is 0 for none, else the number of the kind: 1 linear, 2 sqrt, 3 log, 4 a table for all heads, 5 a row per head.

    Args:
        bias, decay_D: as of `paged_attention`; on the device.
        unread: any tensor of the device, in place of those that are not there.
    """
    kind = 0 if bias is None else KINDS.index(bias.kind) + 1
    last = 0
    if bias is not None and bias.table_RL is not None:
        last = bias.table_RL.shape[1] - 1
        kind += len(bias.table_RL) > 1
    tensors = (unread if bias is None else bias.packed, last, unread if decay_D is None else decay_D)
    return tensors, {"BIAS": kind, "DECAY": decay_D is not None}


def precision(dtype: torch.dtype, decay_D: Tensor | None) -> str:
    """How products of matrices in float32 are made.

    Three tf32 products stand for one in float32 and err by about as much; products in plain float32 unroll into code that
    takes minutes to compile. Scaled queries and keys of xPos are float32 whatever was cached, and with one tf32 product
    top-k chose other keys than the reference does, in bfloat16 too.
    """
    return "tf32x3" if dtype == torch.float32 or decay_D is not None else "tf32"


@triton.jit
def heads_of_bias(bias_ptr, head, mask, bias_last, H: tl.constexpr, BIAS: tl.constexpr):
    """Factor and rate of each head, and where its row of the table begins."""
    factor = tl.load(bias_ptr + head, mask=mask, other=0.0)
    rate = factor
    if BIAS == 3:
        rate = tl.load(bias_ptr + H + head, mask=mask, other=0.0)
    row = head * 0 + 2 * H
    if BIAS == 5:
        row = tl.where(mask, 2 * H + head * (bias_last + 1), 2 * H)
    return factor, rate, row


@triton.jit
def biased(x, distance, factor, rate, row, bias_ptr, bias_last, BIAS: tl.constexpr):
    """Scores with their bias; everything broadcasts to their shape. Negative distances give any finite number."""
    if BIAS == 1:
        return x - factor * distance.to(tl.float32)
    d = tl.maximum(distance, 0)
    if BIAS == 2:
        return x - factor * tl.sqrt_rn(d.to(tl.float32))
    if BIAS == 3:
        return x - factor * tl.log(1.0 + rate * d.to(tl.float32))
    return x + factor * tl.load(bias_ptr + row + tl.minimum(d, bias_last))


@triton.jit
def decayed(x, decay, distance):
    """Queries or keys of xPos relative to their anchor, in float32: times 2 ** (decay * distance)."""
    return x.to(tl.float32) * tl.exp2(decay * distance.to(tl.float32))
