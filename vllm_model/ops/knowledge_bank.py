"""The bank of learned slots in Triton, forward and backward. Same contract as the reference; dispatch.py knows its limits.

Legend: T tokens, N slots, M model width, C channels of a value.

Few tokens: `_scores` multiplies h by the keys, cut into parts along M since there are few slots, and `_look_up` adds the
parts, does the softmax and multiplies by the values. Scores stay in float32.

Many tokens, and whenever gradients are wanted: the products are torch's, `_softmax` stands between them. The backward
pass uses the kept weights; `_softmax_backward` stands between its products.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiers.vllm_model.ops.knowledge_gate import DTYPES, PROGRAMS, rows

# With more tokens than this the products are torch's.
FEW_TOKENS = 128


def knowledge_bank(hidden_TM: Tensor, keys_NM: Tensor, values_NC: Tensor, scale: float) -> Tensor:
    """Same contract as the reference, differentiable once; needs float32, float16 or bfloat16 on CUDA.

    Raises:
        ValueError: also where a dtype disagrees.
    """
    _check(hidden_TM, keys_NM, values_NC)
    tensors = (hidden_TM, keys_NM, values_NC)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if keep or torch.compiler.is_compiling():
        return torch.ops.tiers_fast.knowledge_bank(*tensors, scale, keep)[0]
    # Past the registered operator, which costs the host more than the launches do.
    return _forward(*tensors, scale, keep)[0]


def _check(hidden_TM: Tensor, keys_NM: Tensor, values_NC: Tensor) -> None:
    if hidden_TM.dim() != 2:
        raise ValueError(f"hidden_TM has shape {tuple(hidden_TM.shape)}; expected tokens and width")
    if hidden_TM.dtype not in DTYPES:
        raise ValueError(f"hidden_TM is {hidden_TM.dtype}; expected float32, float16 or bfloat16")
    width = hidden_TM.shape[1]
    if keys_NM.shape[-1] != width:
        raise ValueError(f"keys_NM has width {keys_NM.shape[-1]}; expected {width}, that of hidden_TM")
    if len(values_NC) != len(keys_NM):
        raise ValueError(f"values_NC has {len(values_NC)} rows; expected {len(keys_NM)}, one per key")
    for name, tensor in (("keys_NM", keys_NM), ("values_NC", values_NC)):
        if tensor.dtype != hidden_TM.dtype:
            raise ValueError(f"{name} is {tensor.dtype}; expected {hidden_TM.dtype}, that of hidden_TM")


def _forward(hidden_TM: Tensor, keys_NM: Tensor, values_NC: Tensor, scale: float, keep: bool) -> tuple[Tensor, Tensor]:
    """The result, and the weights [T, N] if they are to be kept, else an empty tensor."""
    tokens, slots = len(hidden_TM), len(keys_NM)
    if tokens and slots and tokens <= FEW_TOKENS and not keep:
        return _few(rows(hidden_TM), rows(keys_NM), rows(values_NC), scale), hidden_TM.new_empty(0)
    weights_TN = torch.mm(hidden_TM, keys_NM.t())
    if weights_TN.numel():
        _softmax[(tokens,)](weights_TN, scale, slots, BLOCK=_block(slots), num_warps=4)
    return torch.mm(weights_TN, values_NC), weights_TN if keep else hidden_TM.new_empty(0)


def _few(hidden_TM: Tensor, keys_NM: Tensor, values_NC: Tensor, scale: float) -> Tensor:
    (tokens, width), (slots, channels) = hidden_TM.shape, values_NC.shape
    out_TC = torch.empty((tokens, channels), dtype=hidden_TM.dtype, device=hidden_TM.device)
    block_t = 16 if tokens <= 16 else 32
    block_n = 16 if slots <= 16 else 32
    exact = hidden_TM.dtype == torch.float32
    block_m = 64 if exact else 256
    # Narrow, so that few tokens make enough programs too.
    columns = 32 if block_t == 16 else 64
    grid = (triton.cdiv(tokens, block_t), triton.cdiv(slots, block_n))
    # `_look_up` adds the parts in each of its programs, so more than 8 of them would cost more than they gain.
    parts = max(1, min(8, PROGRAMS // (grid[0] * grid[1]), triton.cdiv(width, block_m)))
    partial_PTN = torch.empty((parts, tokens, slots), dtype=torch.float32, device=hidden_TM.device)
    # Three tf32 products stand for one in float32, see knowledge_gate.py.
    options = {"BLOCK_T": block_t, "PRECISION": "tf32x3" if exact else "tf32"}
    _scores[(*grid, parts)](
        hidden_TM, keys_NM, partial_PTN, tokens, slots, width, hidden_TM.stride(0), keys_NM.stride(0),
        PARTS=parts, BLOCK_N=block_n, BLOCK_M=block_m, **options, num_warps=4, num_stages=4,
    )  # fmt: skip
    _look_up[(grid[0], triton.cdiv(channels, columns))](
        partial_PTN, values_NC, out_TC, scale, tokens, slots, channels, values_NC.stride(0),
        PARTS=parts, BLOCK_N=block_n, BLOCK_C=columns, **options, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out_TC


def _block(slots: int) -> int:
    return min(1024, triton.next_power_of_2(slots))


# ---- gradients ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("tiers_fast::knowledge_bank", mutates_args=())
def _bank_op(hidden: Tensor, keys: Tensor, values: Tensor, scale: float, keep: bool) -> tuple[Tensor, Tensor]:
    return _forward(hidden, keys, values, scale, keep)


@_bank_op.register_fake
def _(hidden: Tensor, keys: Tensor, values: Tensor, scale: float, keep: bool) -> tuple[Tensor, Tensor]:
    shape = (hidden.shape[0], keys.shape[0]) if keep else (0,)
    return hidden.new_empty((hidden.shape[0], values.shape[1])), hidden.new_empty(shape)


@torch.library.custom_op("tiers_fast::softmax_backward", mutates_args=())
def _softmax_backward_op(grad: Tensor, weights: Tensor, scale: float) -> Tensor:
    """The gradient of the scores before they were scaled, from that of the weights."""
    grad_scores = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    tokens, slots = weights.shape
    if weights.numel():
        _softmax_backward[(tokens,)](rows(grad), weights, grad_scores, scale, slots, BLOCK=_block(slots), num_warps=4)
    return grad_scores


@_softmax_backward_op.register_fake
def _(grad: Tensor, weights: Tensor, scale: float) -> Tensor:
    return weights.new_empty(weights.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    hidden, keys, values, weights = ctx.saved_tensors
    grad_weights = torch.mm(grad, values.t())
    grad_scores = torch.ops.tiers_fast.softmax_backward(grad_weights, weights, ctx.scale)
    needs_hidden, needs_keys, needs_values = ctx.needs_input_grad[:3]
    return (
        torch.mm(grad_scores, keys) if needs_hidden else None,
        torch.mm(grad_scores.t(), hidden) if needs_keys else None,
        torch.mm(weights.t(), grad) if needs_values else None,
        None,
        None,
    )


_bank_op.register_autograd(_backward, setup_context=_setup_context)


# ---- kernels --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens"])
def _scores(
    h_ptr, k_ptr, partial_ptr, tokens, slots, width, stride_ht, stride_kn,
    PARTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program = BLOCK_T tokens and BLOCK_N slots, summed over one part of the width, not yet scaled."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    h_rows = h_ptr + t.to(tl.int64)[:, None] * stride_ht
    k_rows = k_ptr + n.to(tl.int64)[None, :] * stride_kn
    x = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    steps = tl.cdiv(width, BLOCK_M)
    each = tl.cdiv(steps, PARTS)
    for step in range(part * each, tl.minimum(part * each + each, steps)):
        m = step * BLOCK_M + tl.arange(0, BLOCK_M)
        h = tl.load(h_rows + m[None, :], mask=(t < tokens)[:, None] & (m < width)[None, :], other=0.0)
        k = tl.load(k_rows + m[:, None], mask=(n < slots)[None, :] & (m < width)[:, None], other=0.0)
        x = tl.dot(h, k, x, input_precision=PRECISION)
    place = (part.to(tl.int64) * tokens + t)[:, None] * slots + n[None, :]
    tl.store(partial_ptr + place, x, mask=(t < tokens)[:, None] & (n < slots)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _look_up(
    partial_ptr, v_ptr, out_ptr, scale, tokens, slots, channels, stride_vn,
    PARTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program = BLOCK_T tokens and BLOCK_C channels: softmax over the slots, a block of them at a time."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    top = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    acc = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for start in range(0, slots, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        valid = (t < tokens)[:, None] & (n < slots)[None, :]
        x = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        for part in tl.static_range(PARTS):  # unrolled, since only an innermost loop is pipelined
            place = (part * tl.cast(tokens, tl.int64) + t)[:, None] * slots + n[None, :]
            x += tl.load(partial_ptr + place, mask=valid, other=0.0)
        x = tl.where((n < slots)[None, :], x * scale, float("-inf"))
        largest = tl.maximum(top, tl.max(x, axis=1))
        safe = tl.where(largest == float("-inf"), 0.0, largest)
        p = tl.exp(x - safe[:, None])
        shrink = tl.exp(top - safe)
        v = tl.load(
            v_ptr + n.to(tl.int64)[:, None] * stride_vn + c[None, :],
            mask=(n < slots)[:, None] & (c < channels)[None, :], other=0.0,
        )  # fmt: skip
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = largest
    place = t.to(tl.int64)[:, None] * channels + c[None, :]
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, out, mask=(t < tokens)[:, None] & (c < channels)[None, :])


@triton.jit
def _softmax(x_ptr, scale, slots, BLOCK: tl.constexpr):
    """One program = one token: its scores, which are not yet scaled, become weights in place."""
    x_ptr += tl.program_id(0).to(tl.int64) * slots
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, slots, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + n, mask=n < slots, other=float("-inf")).to(tl.float32)
        x = tl.where(n < slots, x * scale, float("-inf"))  # a negative scale would turn the padding around
        largest = tl.maximum(top, tl.max(x))
        safe = tl.where(largest == float("-inf"), 0.0, largest)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe))
        top = largest
    for start in range(0, slots, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + n, mask=n < slots, other=0.0).to(tl.float32)
        tl.store(x_ptr + n, (tl.exp(x * scale - top) / total).to(x_ptr.dtype.element_ty), mask=n < slots)


@triton.jit
def _softmax_backward(grad_ptr, p_ptr, out_ptr, scale, slots, BLOCK: tl.constexpr):
    """One program = one token: weights and their gradients to the gradients of its scores before they were scaled."""
    row = tl.program_id(0).to(tl.int64) * slots
    mean = tl.full((), 0.0, tl.float32)
    for start in range(0, slots, BLOCK):
        n = start + tl.arange(0, BLOCK)
        grad = tl.load(grad_ptr + row + n, mask=n < slots, other=0.0).to(tl.float32)
        mean += tl.sum(grad * tl.load(p_ptr + row + n, mask=n < slots, other=0.0).to(tl.float32))
    for start in range(0, slots, BLOCK):
        n = start + tl.arange(0, BLOCK)
        grad = tl.load(grad_ptr + row + n, mask=n < slots, other=0.0).to(tl.float32)
        p = tl.load(p_ptr + row + n, mask=n < slots, other=0.0).to(tl.float32)
        tl.store(out_ptr + row + n, (p * (grad - mean) * scale).to(out_ptr.dtype.element_ty), mask=n < slots)
