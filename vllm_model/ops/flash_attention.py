"""Attention over all earlier keys, or a window and sink tokens, over a paged cache, in Triton.

For what vLLM's own kernels cannot do; the rest of dense attention is theirs. Legend: T packed query tokens, R requests, H
query heads, KV key/value heads, G query heads per key/value head, D head size, N tokens per block.

The softmax is computed online over tiles of keys (Dao et al. 2022, 2205.14135): only tiles that some query of the
program keeps are visited. With few queries the keys are cut into parts, put together by `_merge`. The launch needs no
length from the device: programs without work end at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiers.reference.config import Dense, Window
from tiers.reference.ops.bias import Bias
from tiers.reference.ops.paged_attention import Batch
from tiers.vllm_model.ops import workspace
from tiers.vllm_model.ops.positions import arguments, biased, decayed, heads_of_bias, precision
from tiers.vllm_model.ops.topk_kernels import MERGE_PARTS, TARGET_PROGRAMS, VARYING, _capped, _merge, early_launch

# Keys per step, and rows (query tokens times heads of a group) per program of a prompt.
BLOCK_S, PROMPT_ROWS = 64, 128

# Parts of the keys of one program's queries at most.
MAX_PARTS = 32


def flash_attention(
    query_THD: Tensor, cache_BKNC: Tensor, batch: Batch, out_THD: Tensor, *,
    scale: float, pattern: Dense | Window, bias: Bias | None, decay_D: Tensor | None, softcap: float | None,
) -> None:  # fmt: skip
    """Fill `out_THD`, rows of requests only, as `paged_attention` of the reference would."""
    tokens, heads, size = query_THD.shape
    kv_heads, page = cache_BKNC.shape[1], cache_BKNC.shape[2]
    group = heads // kv_heads
    requests = len(batch.lengths_R)
    if batch.max_query == 0:
        return
    longest = batch.max_length
    window, sink = (pattern.window, pattern.sink) if isinstance(pattern, Window) else (longest, 0)

    wide = triton.next_power_of_2(size) > 128 or query_THD.element_size() == 4 or decay_D is not None
    block_g = triton.next_power_of_2(group)
    most = 64 if wide else PROMPT_ROWS
    block_q = 1 if batch.max_query == 1 else max(1, most // block_g)
    block_m = max(16, block_q * block_g)
    block_s = 32 if wide else BLOCK_S
    blocks = -(-batch.max_query // block_q)
    steps = -(-min(longest, window + block_q) // block_s) + -(-min(sink, longest) // block_s)
    # Only single tokens are cut into parts: prompts make enough programs, and parts of them need much memory.
    parts = 1
    if batch.max_query == 1:
        parts = max(1, min(MAX_PARTS, steps // 4, TARGET_PROGRAMS // (requests * kv_heads)))
    split = parts > 1
    partial, stats = workspace.take(
        query_THD.device,
        ((parts if split else 0, tokens, heads, size), torch.float32),
        ((parts if split else 0, tokens, heads, 2), torch.float32),
    )
    target = partial if split else out_THD
    early = early_launch(query_THD.device)
    positions, kinds = arguments(bias, decay_D, query_THD)
    _flash[(blocks, requests * kv_heads, parts)](
        query_THD, cache_BKNC, batch.block_table_RP, batch.lengths_R, batch.starts_R1,
        *positions, target, stats, scale, softcap or 0.0, window, sink, tokens,
        query_THD.stride(0), query_THD.stride(1), *cache_BKNC.stride()[:3], batch.block_table_RP.stride(0),
        target.stride(-3), target.stride(-2), target.stride(0) if split else 0,
        H=heads, KV=kv_heads, G=group, D=size, N=page, BLOCK_G=block_g, BLOCK_M=block_m, BLOCK_Q=block_q, BLOCK_S=block_s,
        BLOCK_D=triton.next_power_of_2(size), SPLIT=split, SOFTCAP=softcap is not None,
        PRECISION=precision(query_THD.dtype, decay_D), **kinds,
        num_warps=8 if block_m >= 128 else 4, num_stages=2 if wide else 3, **early,
    )  # fmt: skip
    if split:
        _merge[(tokens, heads)](
            partial, stats, out_THD, 0, parts, partial.stride(0), out_THD.stride(0), out_THD.stride(1),
            WEIGHTED=True, D=size, BLOCK_D=triton.next_power_of_2(size), BLOCK_P=MERGE_PARTS, num_warps=1, **early,
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _flash(
    q_ptr, cache_ptr, table_ptr, lengths_ptr, starts_ptr, bias_ptr, bias_last, decay_ptr, out_ptr, stats_ptr,
    scale, softcap, window, sink, tokens,
    stride_qt, stride_qh, stride_cb, stride_ch, stride_cn, stride_table, stride_ot, stride_oh, stride_op,
    H: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, N: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BIAS: tl.constexpr, DECAY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program = up to BLOCK_Q query tokens of one request, one key/value head, one part of the tiles of keys."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    request, kv = tl.program_id(1) // KV, tl.program_id(1) % KV
    begin = tl.load(starts_ptr + request)
    end = tl.load(starts_ptr + request + 1)
    length = tl.load(lengths_ptr + request)
    # The last tokens see the most keys; their programs start first.
    lowest = begin + (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    highest = tl.minimum(end, lowest + BLOCK_Q)
    if lowest >= highest:
        if SPLIT:
            # Row r belongs to request r; that of a padding request is put together from parts without keys.
            g = tl.arange(0, BLOCK_G)
            mask = (g < G) & (request < tokens)
            stat = stats_ptr + ((tl.program_id(2) * tokens + request).to(tl.int64) * H + kv * G + g) * 2
            tl.store(stat, tl.full((BLOCK_G,), float("-inf"), tl.float32), mask=mask)
            tl.store(stat + 1, tl.zeros((BLOCK_G,), tl.float32), mask=mask)
        return
    m = tl.arange(0, BLOCK_M)
    token = lowest + m // BLOCK_G  # [BLOCK_M]
    head = kv * G + m % BLOCK_G
    valid = (token < highest) & (m % BLOCK_G < G)
    position = length - end + token
    d = tl.arange(0, BLOCK_D)
    q = tl.load(
        q_ptr + token.to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh + d[None, :],
        mask=valid[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    if BIAS:
        factor, rate, row = heads_of_bias(bias_ptr, head, valid, bias_last, H, BIAS)
    if DECAY:
        decay = tl.load(decay_ptr + d, mask=d < D, other=0.0)
    table_ptr += request.to(tl.int64) * stride_table
    cache_ptr += kv * stride_ch

    # Tiles of the sink, then those of the window of the first token up to the position of the last.
    keys = length - end + highest
    recent = tl.maximum(length - end + lowest - window + 1, 0) // BLOCK_S
    sinks = tl.minimum(tl.cdiv(tl.minimum(sink, keys), BLOCK_S), recent)
    total_steps = sinks + tl.cdiv(keys, BLOCK_S) - recent
    each = tl.cdiv(total_steps, tl.num_programs(2))
    lo = tl.program_id(2) * each
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for step in range(lo, tl.minimum(lo + each, total_steps)):
        tile = tl.where(step < sinks, step, recent + step - sinks)
        s = tile * BLOCK_S + tl.arange(0, BLOCK_S)
        block = tl.load(table_ptr + s // N, mask=s < keys, other=0).to(tl.int64)
        where = cache_ptr + block * stride_cb + (s % N) * stride_cn
        inside = (s < keys)[:, None]
        if D < BLOCK_D:
            inside = inside & (d < D)[None, :]
        k = tl.load(where[:, None] + d[None, :], mask=inside, other=0.0)
        if DECAY:
            # Relative to the last position of the tile; tokens before the tile see none of it.
            anchor = tile * BLOCK_S + BLOCK_S - 1
            near = decayed(q, decay[None, :], tl.maximum(position - anchor, -BLOCK_S)[:, None])
            x = (
                tl.dot(near, tl.trans(decayed(k, decay[None, :], (anchor - s)[:, None])), input_precision=PRECISION)
                * scale
            )
        else:
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_S]
        if SOFTCAP:
            x = _capped(x, softcap)
        if BIAS:
            away = position[:, None] - s[None, :]
            x = biased(x, away, factor[:, None], rate[:, None], row[:, None], bias_ptr, bias_last, BIAS)
        first, last = tile * BLOCK_S, tile * BLOCK_S + BLOCK_S - 1
        # Most tiles are seen whole by all tokens of the program.
        if (last > length - end + lowest) | ((keys - 1 - first >= window) & (last >= sink)):
            distance = position[:, None] - s[None, :]
            x = tl.where((distance >= 0) & ((distance < window) | (s < sink)[None, :]), x, float("-inf"))
        largest = tl.maximum(top, tl.max(x, axis=1))
        safe = tl.where(largest == float("-inf"), 0.0, largest)
        p = tl.exp(x - safe[:, None])
        shrink = tl.exp(top - safe)
        total = total * shrink + tl.sum(p, axis=1)
        v = tl.load(where[:, None] + D + d[None, :], mask=inside, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = largest
    out = acc if SPLIT else acc / tl.where(total == 0, 1.0, total)[:, None]
    place = (
        tl.program_id(2).to(tl.int64) * stride_op + token.to(tl.int64)[:, None] * stride_ot + head[:, None] * stride_oh
    )
    tl.store(out_ptr + place + d[None, :], out.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (d < D)[None, :])
    if SPLIT:
        stat = stats_ptr + ((tl.program_id(2) * tokens + token).to(tl.int64) * H + head) * 2
        tl.store(stat, top, mask=valid)
        tl.store(stat + 1, total, mask=valid)
