"""The knowledge gate in Triton, forward and backward. Same contract as the reference; dispatch.py knows its limits.

Legend: T tokens, M model width.

Few tokens: W is far larger than everything else, so the kernels are as fast as W is read, once. `_parts` gives each
program some rows of W, which are outputs, and one part of the inputs, h and e, which are not put together; `_combine` adds
the parts, always in the same order, and mixes the result into h. (One kernel without parts reads W more slowly: too few
programs, or too few outputs in each for the matrix unit. docs/log.md.)

Many tokens: two products by torch (cuBLAS), the second added to the first, and `_combine` for the rest.

Where W_e e is known, `_parts` reads half of W, or torch multiplies by half of it, and `_combine` adds what is known.

Backward: a is kept from the forward pass, since computing it again costs half as much as the rest of the backward pass.
`_differentiate` does what is element-wise, torch the products. With gradients the forward pass always goes the way of
many tokens, which has a in memory anyway.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from tiers.vllm_model.ops.topk_kernels import early_launch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MODES = ("linear", "sigmoid", "mix")


class Blocks(NamedTuple):
    """How a product is cut into programs.

    Attributes:
        tokens, outputs: per program.
        inputs: of h, and as many of e, per step, in 16 bits; half of it in float32.
        warps, stages: of a program; two stages more where W_e e is known, since a step then has half as much.
        tiles: read by the tensor memory unit, as whole tiles, where the device has one, the tensors suit it and tokens fill
            three quarters of theirs. With fewer that is slower.
    """

    tokens: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    tiles: bool = False


# The first row with room for the tokens counts; what the last has no room for is many. The fastest of those tried at
# M = 4096 on an H200 (docs/log.md).
FEW = (
    Blocks(16, 64, 128, 4, 4),
    Blocks(32, 64, 128, 4, 4),
    Blocks(64, 64, 128, 4, 3, tiles=True),
    Blocks(128, 64, 64, 4, 4, tiles=True),
)

# Programs to aim at when inputs are cut into parts: the multiprocessors of an H200.
PROGRAMS = 132

# Elements per program of the element-wise kernels, and of `_combine` with few tokens.
ELEMENTS, FEW_ELEMENTS = 1024, 256


def knowledge_gate(
    hidden_TM: Tensor, knowledge_TM: Tensor, weight_M2M: Tensor, bias_M: Tensor | None, mode: str,
    folded_TM: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same contract as the reference, differentiable once; needs float32, float16 or bfloat16 on CUDA.

    Raises:
        ValueError: also where a dtype or the shape of the bias disagrees, or gradients are wanted with `folded_TM`.
    """
    _check(hidden_TM, knowledge_TM, weight_M2M, bias_M, mode, folded_TM)
    tensors = (hidden_TM, knowledge_TM, weight_M2M, bias_M, folded_TM)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if keep and folded_TM is not None:
        raise ValueError("folded_TM is given, but gradients are wanted; give the whole weight and no folded_TM")
    if keep or torch.compiler.is_compiling():
        return torch.ops.tiers_fast.knowledge_gate(*tensors, mode, keep)[0]
    # Past the registered operator, which costs the host more than the launch does.
    return _forward(*tensors, mode, keep)[0]


def _check(
    hidden_TM: Tensor, knowledge_TM: Tensor, weight_M2M: Tensor, bias_M: Tensor | None, mode: str,
    folded_TM: Tensor | None,
) -> None:  # fmt: skip
    if hidden_TM.dim() != 2:
        raise ValueError(f"hidden_TM has shape {tuple(hidden_TM.shape)}; expected tokens and width")
    width = hidden_TM.shape[1]
    expected = {
        "knowledge_TM": (knowledge_TM, tuple(hidden_TM.shape)),
        "weight_M2M": (weight_M2M, (width, 2 * width)),
        "bias_M": (bias_M, (width,)),
        "folded_TM": (folded_TM, tuple(hidden_TM.shape)),
    }
    if hidden_TM.dtype not in DTYPES:
        raise ValueError(f"hidden_TM is {hidden_TM.dtype}; expected float32, float16 or bfloat16")
    for name, (tensor, shape) in expected.items():
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
        if tensor.dtype != hidden_TM.dtype:
            raise ValueError(f"{name} is {tensor.dtype}; expected {hidden_TM.dtype}, that of hidden_TM")
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; expected 'linear', 'sigmoid' or 'mix'")


def _forward(
    hidden_TM: Tensor, knowledge_TM: Tensor, weight_M2M: Tensor, bias_M: Tensor | None, folded_TM: Tensor | None,
    mode: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result, and W [h; e] without the bias if it is to be kept and of use, else an empty tensor."""
    tokens, width = hidden_TM.shape
    hidden_TM, knowledge_TM, weight_M2M = rows(hidden_TM), rows(knowledge_TM), rows(weight_M2M)
    bias_M = None if bias_M is None else bias_M.contiguous()
    folded_TM = None if folded_TM is None else rows(folded_TM)
    if tokens <= FEW[-1].tokens and not keep:
        return _few(hidden_TM, knowledge_TM, weight_M2M, bias_M, folded_TM, mode), hidden_TM.new_empty(0)
    # In 16 bits a is rounded after either product, once more than in the reference. In float32 it would not be, but
    # reading and writing it would take twice as long.
    a_TM = torch.mm(hidden_TM, weight_M2M[:, :width].t())
    if folded_TM is None:
        torch.addmm(a_TM, knowledge_TM, weight_M2M[:, width:].t(), out=a_TM)
    kept = keep and mode != "linear"
    # Each element of a is read by the program that writes the result in its place.
    out_TM = _empty(tokens, width, hidden_TM) if kept else a_TM
    _finish(hidden_TM, knowledge_TM, a_TM[None], bias_M, folded_TM, out_TM, mode, ELEMENTS, False)
    return out_TM, a_TM if kept else hidden_TM.new_empty(0)


def _few(
    hidden_TM: Tensor, knowledge_TM: Tensor, weight_M2M: Tensor, bias_M: Tensor | None, folded_TM: Tensor | None,
    mode: str,
) -> Tensor:  # fmt: skip
    tokens, width = hidden_TM.shape
    out_TM = _empty(tokens, width, hidden_TM)
    if not out_TM.numel():
        return out_TM
    blocks = next(b for b in FEW if tokens <= b.tokens)
    options = _options(blocks, hidden_TM.dtype)
    options["num_stages"] += 0 if folded_TM is None else 2
    grid = (triton.cdiv(tokens, blocks.tokens), triton.cdiv(width, blocks.outputs))
    # A part of fewer than 8 steps would spend most of its time on waiting for the first.
    parts = max(1, min(PROGRAMS // (grid[0] * grid[1]), triton.cdiv(width, options["BLOCK_K"]) // 8))
    partial_PTM = torch.empty((parts, tokens, width), dtype=torch.float32, device=hidden_TM.device)
    # What launches early reads tiles too.
    hopper = early_launch(hidden_TM.device)["PDL"]
    read = (hidden_TM, knowledge_TM, weight_M2M)
    # A tile that begins in W_h must not end in W_e. The interpreter has no trouble with tiles.
    tiles = blocks.tiles and not width % options["BLOCK_K"] and all(_suits_tiles(x) for x in read)
    tiles = tiles and 4 * tokens >= 3 * blocks.tokens and (hopper or not hidden_TM.is_cuda)
    given: tuple[Any, ...] = read
    if tiles:
        given = tuple(
            TensorDescriptor.from_tensor(x, [count, options["BLOCK_K"]])
            for x, count in zip(read, (blocks.tokens, blocks.tokens, blocks.outputs), strict=True)
        )
    _parts[(*grid, parts)](
        *given, partial_PTM, tokens, width, *(x.stride(0) for x in read),
        FOLDED=folded_TM is not None, TILES=tiles, PARTS=parts, OVERLAP=hopper, **options,
    )  # fmt: skip
    _finish(hidden_TM, knowledge_TM, partial_PTM, bias_M, folded_TM, out_TM, mode, FEW_ELEMENTS, hopper)
    return out_TM


def _suits_tiles(x: Tensor) -> bool:
    """What the tensor memory unit asks for, of rows whose channels are neighbours."""
    return not x.data_ptr() % 16 and not x.stride(0) * x.element_size() % 16


def _options(blocks: Blocks, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "BLOCK_T": blocks.tokens, "BLOCK_O": blocks.outputs, "BLOCK_K": blocks.inputs * 2 // dtype.itemsize,
        # Three tf32 products stand for one in float32 and err by about as much; products in plain float32 unroll into
        # code that takes minutes to compile.
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
        "num_warps": blocks.warps, "num_stages": blocks.stages,
    }  # fmt: skip


def _finish(
    hidden_TM: Tensor, knowledge_TM: Tensor, partial_PTM: Tensor, bias_M: Tensor | None, folded_TM: Tensor | None,
    out_TM: Tensor, mode: str, elements: int, overlap: bool,
) -> None:  # fmt: skip
    """Fill `out_TM` from the parts of a, which may be the same memory if there is one."""
    parts, tokens, width = partial_PTM.shape
    if not out_TM.numel():
        return
    _combine[(tokens, triton.cdiv(width, elements))](
        hidden_TM, knowledge_TM, partial_PTM, bias_M, folded_TM, out_TM, width, hidden_TM.stride(0), knowledge_TM.stride(0),
        partial_PTM.stride(0), 0 if folded_TM is None else folded_TM.stride(0),
        MODE=mode, BIAS=bias_M is not None, FOLDED=folded_TM is not None, PARTS=parts, OVERLAP=overlap, BLOCK=elements,
        num_warps=4, launch_pdl=overlap,
    )  # fmt: skip


def rows(x: Tensor) -> Tensor:
    """The same with neighbouring channels next to each other; rows may be any distance apart."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty(tokens: int, width: int, like: Tensor) -> Tensor:
    return torch.empty((tokens, width), dtype=like.dtype, device=like.device)


# ---- gradients ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("tiers_fast::knowledge_gate", mutates_args=())
def _gate_op(
    hidden: Tensor, knowledge: Tensor, weight: Tensor, bias: Tensor | None, folded: Tensor | None, mode: str, keep: bool
) -> tuple[Tensor, Tensor]:
    return _forward(hidden, knowledge, weight, bias, folded, mode, keep)


@_gate_op.register_fake
def _(
    hidden: Tensor, knowledge: Tensor, weight: Tensor, bias: Tensor | None, folded: Tensor | None, mode: str, keep: bool
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape if keep and mode != "linear" else (0,))


@torch.library.custom_op("tiers_fast::knowledge_gate_backward", mutates_args=())
def _backward_op(
    grad: Tensor, hidden: Tensor, knowledge: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, mode: str,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of h, e, W and b; an empty tensor where none is needed."""
    tokens, width = hidden.shape
    # `grads` starts as what reaches h and e directly; what reaches them through a is added.
    if mode == "linear":
        grad_a, grads = (
            grad,
            [grad.contiguous().clone(), torch.zeros((tokens, width), dtype=grad.dtype, device=grad.device)],
        )
    else:
        grad_a, *grads = (_empty(tokens, width, grad) for _ in range(3))
        grad, hidden, knowledge = rows(grad), rows(hidden), rows(knowledge)
        bias = None if bias is None else bias.contiguous()
        if tokens:
            _differentiate[(tokens, triton.cdiv(width, ELEMENTS))](
                grad, hidden, knowledge, a, bias, grad_a, *grads, width,
                grad.stride(0), hidden.stride(0), knowledge.stride(0),
                MODE=mode, BIAS=bias is not None, BLOCK=ELEMENTS, num_warps=4,
            )  # fmt: skip
    for side, half in enumerate(weight.split(width, dim=1)):
        grads[side] = torch.addmm(grads[side], grad_a, half, out=grads[side]) if needed[side] else grad.new_empty(0)
    if needed[2]:
        grad_weight = _empty(width, 2 * width, weight)
        torch.mm(grad_a.t(), hidden, out=grad_weight[:, :width])
        torch.mm(grad_a.t(), knowledge, out=grad_weight[:, width:])
    else:
        grad_weight = grad.new_empty(0)
    grad_bias = grad_a.sum(dim=0) if needed[3] else grad.new_empty(0)
    return grads[0], grads[1], grad_weight, grad_bias


@_backward_op.register_fake
def _(
    grad: Tensor, hidden: Tensor, knowledge: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, mode: str,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    width = hidden.shape[1]
    shapes = (hidden.shape, hidden.shape, (width, 2 * width), (width,))
    one, two, three, four = (grad.new_empty(s if n else (0,)) for s, n in zip(shapes, needed, strict=True))
    return one, two, three, four


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, _, ctx.mode, _ = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, a = ctx.saved_tensors
    needed = ctx.needs_input_grad[:4]
    grads = torch.ops.tiers_fast.knowledge_gate_backward(grad, *tensors, a, ctx.mode, needed)
    return *(g if n else None for g, n in zip(grads, needed, strict=True)), None, None, None


_gate_op.register_autograd(_backward, setup_context=_setup_context)


# ---- kernels --------------------------------------------------------------------------------------------------------


@triton.jit
def _mixed(h, e, a, MODE: tl.constexpr):
    """a mixed into h, in float32."""
    if MODE == "linear":
        y = h + a
    else:
        g = tl.sigmoid(a)
        y = h + g * e if MODE == "sigmoid" else g * h + (1 - g) * e
    return y


@triton.jit(do_not_specialize=["tokens"])
def _parts(
    h_ptr, e_ptr, w_ptr, partial_ptr, tokens, width, stride_ht, stride_et, stride_wo,
    FOLDED: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program = BLOCK_O outputs of BLOCK_T tokens, summed over one part of the inputs, in float32.

    FOLDED: without e. TILES: h, e and W are descriptors of tensors instead of pointers.

    Outputs are the rows of the product, since Hopper multiplies 64 rows at once.
    """
    if OVERLAP:
        gdc_launch_dependents()  # programs of `_combine` may start; they wait for the sums
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    part = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    steps = tl.cdiv(width, BLOCK_K)
    each = tl.cdiv(steps, PARTS)
    for step in range(part * each, tl.minimum(part * each + each, steps)):
        i = step * BLOCK_K + k
        if TILES:
            t0, o0, i0 = tl.program_id(0) * BLOCK_T, tl.program_id(1) * BLOCK_O, step * BLOCK_K
            acc = tl.dot(w_ptr.load([o0, i0]), h_ptr.load([t0, i0]).T, acc, input_precision=PRECISION)
            if not FOLDED:
                acc = tl.dot(w_ptr.load([o0, width + i0]), e_ptr.load([t0, i0]).T, acc, input_precision=PRECISION)
        else:
            w_rows = w_ptr + o.to(tl.int64)[:, None] * stride_wo
            w_mask = (o < width)[:, None] & (i < width)[None, :]
            x_mask = (i < width)[:, None] & (t < tokens)[None, :]
            w = tl.load(w_rows + i[None, :], mask=w_mask, other=0.0)  # [BLOCK_O, BLOCK_K]
            h = tl.load(h_ptr + t.to(tl.int64)[None, :] * stride_ht + i[:, None], mask=x_mask, other=0.0)
            acc = tl.dot(w, h, acc, input_precision=PRECISION)
            if not FOLDED:
                w = tl.load(w_rows + width + i[None, :], mask=w_mask, other=0.0)
                e = tl.load(e_ptr + t.to(tl.int64)[None, :] * stride_et + i[:, None], mask=x_mask, other=0.0)
                acc = tl.dot(w, e, acc, input_precision=PRECISION)
    place = (part.to(tl.int64) * tokens + t)[None, :] * width + o[:, None]
    tl.store(partial_ptr + place, acc, mask=(o < width)[:, None] & (t < tokens)[None, :])


@triton.jit
def _combine(
    h_ptr, e_ptr, a_ptr, b_ptr, f_ptr, out_ptr, width, stride_ht, stride_et, stride_ap, stride_ft,
    MODE: tl.constexpr, BIAS: tl.constexpr, FOLDED: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program = BLOCK channels of one token: the parts of a are added, and a is mixed into h."""
    t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = tl.load(h_ptr + t * stride_ht + o, mask=o < width, other=0.0).to(tl.float32)
    e = tl.load(e_ptr + t * stride_et + o, mask=o < width, other=0.0).to(tl.float32)
    a = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        a += tl.load(b_ptr + o, mask=o < width, other=0.0).to(tl.float32)
    if FOLDED:
        a += tl.load(f_ptr + t * stride_ft + o, mask=o < width, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()  # until `_parts` is done; nothing above is its work
    for part in range(PARTS):
        a += tl.load(a_ptr + part * stride_ap + t * width + o, mask=o < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * width + o, _mixed(h, e, a, MODE).to(out_ptr.dtype.element_ty), mask=o < width)


@triton.jit
def _differentiate(
    grad_ptr, h_ptr, e_ptr, a_ptr, b_ptr, grad_a_ptr, grad_h_ptr, grad_e_ptr, width, stride_gt, stride_ht, stride_et,
    MODE: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program = BLOCK channels of one token: the gradient of a, and those of h and e apart from what a passes on."""
    t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_ptr + t * stride_gt + o, mask=o < width, other=0.0).to(tl.float32)
    e = tl.load(e_ptr + t * stride_et + o, mask=o < width, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + t * width + o, mask=o < width, other=0.0).to(tl.float32)
    if BIAS:
        a += tl.load(b_ptr + o, mask=o < width, other=0.0).to(tl.float32)
    g = tl.sigmoid(a)
    if MODE == "sigmoid":
        grad_a = grad * e * g * (1 - g)
        grad_h, grad_e = grad, grad * g
    else:
        h = tl.load(h_ptr + t * stride_ht + o, mask=o < width, other=0.0).to(tl.float32)
        grad_a = grad * (h - e) * g * (1 - g)
        grad_h, grad_e = grad * g, grad * (1 - g)
    place = t * width + o
    tl.store(grad_a_ptr + place, grad_a.to(grad_a_ptr.dtype.element_ty), mask=o < width)
    tl.store(grad_h_ptr + place, grad_h.to(grad_h_ptr.dtype.element_ty), mask=o < width)
    tl.store(grad_e_ptr + place, grad_e.to(grad_e_ptr.dtype.element_ty), mask=o < width)
