"""Exact top-k attention over a paged cache, in Triton. Same contract as the reference; dispatch.py knows its limits.

Legend: T packed query tokens, R requests, H query heads, KV key/value heads, G query heads per key/value head, D head
size, B blocks in the cache, N tokens per block, L longest context of the step (rounded up), Q rows that choose keys:
one per token and query head, or one per token and key/value head where a group chooses together.

Each step is a kernel; a row is a token and what chooses for itself:

1. `_scores`: every key is read once. Scores go to a workspace in float32, and with them the largest candidate score of
   each tile of 16 keys.
2. `_choose`, in stages. `_bound`: a lower bound of the threshold is the k-th largest of those tile maxima, since k tiles
   hold a score at least that large; the tiles whose maximum reaches it are listed, and there are hardly more than k.
   `_candidates`: of the scores in those tiles, the ones that reach the bound are listed; for k = 256 of 32768 keys with
   independent scores there are about 273. `_threshold`: the exact threshold is searched among these. The keys that
   reach it, the sink and the window get their softmax weights, listed with the place of their values.
3. `_gather`: only the listed values are read. Where a group chooses together, the scores of its heads are not kept but
   computed again for the listed keys, which are few: `_gather_group`. With few rows each list is cut into parts, which
   `_merge` puts together.

Nothing depends on the lengths on the host where every request has one query token, so the step can be captured.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiers.reference.config import TopK
from tiers.reference.ops.attention import Pattern
from tiers.reference.ops.paged_attention import Batch

# Bytes of scores and of lists of keys that are held at once; longer work is done in parts. Per key and row: its rank (4),
# its place in the list of candidates (4 + 4), its weight (4) and its slot (8).
WORKSPACE_BYTES = 2**30
BYTES_PER_KEY = 24

# Programs that fill the largest devices: a few per multiprocessor.
TARGET_PROGRAMS = 1024

# Warps of `_choose` (with short lists), keys per step and warps of `_gather`: the best of those tried (docs/log.md).
CHOOSE_WARPS, GATHER_KEYS, GATHER_WARPS = 4, 64, 2


def paged_attention(
    query_THD: Tensor,
    cache_BKNC: Tensor,
    batch: Batch,
    *,
    scale: float,
    pattern: Pattern,
    head_map: Sequence[int] | None = None,
    slopes_H: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Same contract as the reference; needs a top-k pattern and contiguous head groups of one size."""
    if not isinstance(pattern, TopK) or head_map is not None:
        raise ValueError(f"pattern is {pattern}, head_map {head_map}; expected a top-k pattern and contiguous groups")
    tokens, heads = query_THD.shape[:2]
    # Every row is written, rows of padding requests with zeros; only rows past all requests need a fill.
    out_THD = (
        torch.empty_like(query_THD)
        if batch.max_query == 1 and tokens == len(batch.lengths_R)
        else torch.zeros_like(query_THD)
    )
    options = (scale, pattern, slopes_H, softcap)
    if batch.max_query == 1:
        # Token r belongs to request r (padding requests, at the end, have none): no length is needed on the host.
        requests = len(batch.lengths_R)
        part = _rows_at_once(heads, batch.max_length)
        for start in range(0, requests, part):
            stop = min(start + part, requests)
            _run(query_THD, cache_BKNC, batch, out_THD, start, stop, start, min(stop, tokens), *options)
        return out_THD
    lengths, starts = batch.host
    for first, last in _ranges(starts):
        stop = starts[last]
        part = _rows_at_once(heads, max(lengths[first:last]))
        for start in range(starts[first], stop, part):
            _run(query_THD, cache_BKNC, batch, out_THD, first, last, start, min(start + part, stop), *options)
    return out_THD


def _rows_at_once(heads: int, longest: int) -> int:
    """Query tokens whose scores, and lists of keys, fit into the workspace."""
    return max(1, WORKSPACE_BYTES // (BYTES_PER_KEY * heads * max(1, longest)))


def _ranges(starts: Sequence[int]) -> list[tuple[int, int]]:
    """Requests that are done together: runs of those with one query token or none, and every other one by itself."""
    ranges: list[tuple[int, int]] = []
    joined = False
    for request in range(len(starts) - 1):
        single = starts[request + 1] - starts[request] <= 1
        if single and joined:
            ranges[-1] = (ranges[-1][0], request + 1)
        else:
            ranges.append((request, request + 1))
        joined = single
    return [(first, last) for first, last in ranges if starts[last] > starts[first]]


def _run(
    query_THD: Tensor, cache_BKNC: Tensor, batch: Batch, out_THD: Tensor,
    first: int, last: int, start: int, stop: int,
    scale: float, pattern: TopK, slopes_H: Tensor | None, softcap: float | None,
) -> None:  # fmt: skip
    """Tokens `start` to `stop` of requests `first` to `last`."""
    _, heads, size = query_THD.shape
    kv_heads, page = cache_BKNC.shape[1], cache_BKNC.shape[2]
    group = heads // kv_heads
    device = query_THD.device
    rows = stop - start
    if rows <= 0:
        return
    single = batch.max_query == 1
    if single:
        longest, per_request = batch.max_length, 1
    else:
        lengths, starts = batch.host
        longest = max(lengths[first:last])
        per_request = min(
            rows, max(b - a for a, b in zip(starts[first:last], starts[first + 1 : last + 1], strict=True))
        )
    by_group = pattern.share == "group"
    choosers = kv_heads if by_group else heads

    block_g = triton.next_power_of_2(group)
    block_q = 1 if per_request == 1 else max(1, 64 // block_g)
    block_m = max(16, block_q * block_g)
    block_d = triton.next_power_of_2(size)
    block_s = 64 if block_d > 128 or query_THD.element_size() == 4 else 128
    tile = 16 if longest <= 8192 * 16 else triton.next_power_of_2(-(-longest // 8192))
    block_s = max(block_s, tile)
    width = -(-longest // block_s) * block_s
    tiles = width // tile

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    # What keys are ranked by: the score, or the largest of a group's scores.
    ranks = scratch(rows, choosers, width, dtype=torch.float32)
    maxima = scratch(rows, choosers, tiles, dtype=torch.float32)
    tile_ids = scratch(rows, choosers, tiles)
    listed, keys = scratch(rows, choosers, width), scratch(rows, choosers, width)

    requests = last - first
    blocks = -(-per_request // block_q)
    splits = max(1, min(width // block_s, TARGET_PROGRAMS // max(1, requests * blocks * kv_heads)))
    # Three tf32 products stand for one in float32 and err by about as much; products in plain float32 unroll into code
    # that takes minutes to compile.
    precision = "tf32x3" if query_THD.dtype == torch.float32 else "tf32"
    slopes = slopes_H if slopes_H is not None else ranks  # never read without slopes
    _scores[(requests * blocks, kv_heads, splits)](
        query_THD, cache_BKNC, batch.block_table_RP, batch.lengths_R, batch.starts_R1, slopes, ranks, maxima,
        first, start, stop, blocks, scale, softcap or 0.0, pattern.sink, pattern.window, size,
        query_THD.stride(0), query_THD.stride(1),
        cache_BKNC.stride(0), cache_BKNC.stride(1), cache_BKNC.stride(2),
        batch.block_table_RP.stride(0), width, tiles,
        H=heads, G=group, N=page, TILE=tile, BLOCK_G=block_g, BLOCK_Q=block_q, BLOCK_M=block_m, BLOCK_S=block_s,
        BLOCK_D=block_d, SPLITS=splits, SLOPES=slopes_H is not None, SOFTCAP=softcap is not None, GROUP=by_group,
        PRECISION=precision, num_warps=4, num_stages=3,
    )  # fmt: skip

    request_of = batch.lengths_R if single else _requests(batch, first, last, start, rows)
    weights = scratch(rows, choosers, 1 if by_group else width, dtype=torch.float32)
    slots, kept = scratch(rows, choosers, width, dtype=torch.int64), scratch(rows, choosers)
    block_t = triton.next_power_of_2(tiles)
    block_l = min(4096, max(512, triton.next_power_of_2(2 * pattern.k)))
    _choose[(rows, choosers)](
        ranks, maxima, batch.block_table_RP, batch.lengths_R, batch.starts_R1, request_of, start,
        tile_ids, listed, keys, weights, slots, kept,
        pattern.k, pattern.sink, pattern.window, width, tiles, batch.block_table_RP.stride(0),
        SINGLE=single, GROUP=by_group, N=page, TILE=tile, BLOCK_T=block_t, BLOCK_C=max(1024, block_l),
        BLOCK_L=block_l, BLOCK_E=512,
        num_warps=16 if block_l > 1024 else max(8, CHOOSE_WARPS) if block_t > 2048 else CHOOSE_WARPS,
    )  # fmt: skip

    most = pattern.k + pattern.sink + pattern.window
    parts = max(1, min(-(-most // 128), TARGET_PROGRAMS // max(1, rows * choosers)))
    partial = scratch(parts, rows, heads, size, dtype=torch.float32) if parts > 1 else out_THD[start:]
    stats = scratch(parts, rows, heads, 2, dtype=torch.float32) if by_group and parts > 1 else weights
    strides = (partial.stride(-3), partial.stride(-2), partial.stride(0) if parts > 1 else 0)
    where = (cache_BKNC.stride(0), cache_BKNC.stride(1), cache_BKNC.stride(2), *strides)
    if by_group:
        _gather_group[(rows, choosers, parts)](
            query_THD, cache_BKNC, batch.lengths_R, batch.starts_R1, request_of, start, slopes, slots, listed, kept,
            partial, stats, scale, softcap or 0.0, width, size, query_THD.stride(0), query_THD.stride(1), *where,
            SINGLE=single, H=heads, G=group, N=page, BLOCK_M=max(16, block_g), BLOCK_N=64, BLOCK_D=block_d, PARTS=parts,
            SLOPES=slopes_H is not None, SOFTCAP=softcap is not None, PRECISION=precision, num_warps=4, num_stages=2,
        )  # fmt: skip
    else:
        _gather[(rows, choosers, parts)](
            cache_BKNC, weights, slots, kept, partial, width, size, *where,
            G=group, N=page, BLOCK_N=GATHER_KEYS, BLOCK_D=block_d, PARTS=parts, num_warps=GATHER_WARPS, num_stages=2,
        )  # fmt: skip
    if parts > 1:
        _merge[(rows, heads)](
            partial, stats, out_THD, start, size, partial.stride(0), out_THD.stride(0), out_THD.stride(1),
            PARTS=parts, WEIGHTED=by_group, BLOCK_D=block_d, num_warps=1,
        )  # fmt: skip


def _requests(batch: Batch, first: int, last: int, start: int, rows: int) -> Tensor:
    """[rows] the request of each token from `start` on; -1 for padding."""
    ends = batch.starts_R1[first + 1 : last + 1]
    tokens = torch.arange(start, start + rows, device=ends.device, dtype=ends.dtype)
    request = torch.searchsorted(ends.contiguous(), tokens, right=True) + first
    return torch.where(request < last, request, -1).to(torch.int32)


@triton.jit
def _ordered(x):
    """Integers that compare as the floats do (NaN with a clear sign bit above infinity)."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _capped(x, softcap):
    """softcap * tanh(x / softcap), through exp of a negative number, which cannot overflow."""
    e = tl.exp(-2.0 * tl.abs(x) / softcap)
    return tl.where(x < 0, -1.0, 1.0) * softcap * (1.0 - e) / (1.0 + e)


@triton.jit
def _scores(
    q_ptr, cache_ptr, table_ptr, lengths_ptr, starts_ptr, slopes_ptr, ranks_ptr, maxima_ptr,
    first_request, first_token, stop_token, blocks, scale, softcap, sink, window, size,
    stride_qt, stride_qh, stride_cb, stride_ch, stride_cn, stride_table, width, tiles,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, SLOPES: tl.constexpr,
    SOFTCAP: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program = up to BLOCK_Q query tokens of one request, one key/value head, one part of the keys."""
    request = first_request + tl.program_id(0) // blocks
    part = tl.program_id(0) % blocks
    kv = tl.program_id(1)
    begin = tl.load(starts_ptr + request)
    end = tl.load(starts_ptr + request + 1)
    length = tl.load(lengths_ptr + request)
    lowest = tl.maximum(begin, first_token) + part * BLOCK_Q
    highest = tl.minimum(tl.minimum(end, stop_token), lowest + BLOCK_Q)
    if lowest >= highest:
        return
    TOKENS: tl.constexpr = BLOCK_M // BLOCK_G
    m = tl.arange(0, BLOCK_M)
    token = lowest + m // BLOCK_G  # [BLOCK_M]
    head = kv * G + m % BLOCK_G
    valid = (token < highest) & (m % BLOCK_G < G)
    position = length - end + token
    d = tl.arange(0, BLOCK_D)
    q = tl.load(
        q_ptr + token.to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh + d[None, :],
        mask=valid[:, None] & (d < size)[None, :], other=0.0,
    )  # fmt: skip
    if SLOPES:
        slope = tl.load(slopes_ptr + head, mask=valid, other=0.0)
    row = (token - first_token).to(tl.int64)

    keys = length - end + highest  # keys that the last of these tokens may see
    total = tl.cdiv(keys, BLOCK_S)
    each = tl.cdiv(total, SPLITS)
    lo = tl.program_id(2) * each
    for step in range(lo, tl.minimum(lo + each, total)):
        s = step * BLOCK_S + tl.arange(0, BLOCK_S)
        block = tl.load(table_ptr + request.to(tl.int64) * stride_table + s // N, mask=s < keys, other=0).to(tl.int64)
        k = tl.load(
            cache_ptr + block[None, :] * stride_cb + kv * stride_ch + (s % N)[None, :] * stride_cn + d[:, None],
            mask=(s < keys)[None, :] & (d < size)[:, None], other=0.0,
        )  # fmt: skip
        x = tl.dot(q, k, input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_S]
        if SOFTCAP:
            x = _capped(x, softcap)
        if SLOPES:
            x -= slope[:, None] * (position[:, None] - s[None, :]).to(tl.float32)
        if GROUP:
            # One row per token from here on; rows of other heads than the group's must not count.
            x = tl.max(tl.reshape(tl.where(valid[:, None], x, float("-inf")), (TOKENS, BLOCK_G, BLOCK_S)), axis=1)
            u = lowest + tl.arange(0, TOKENS)  # [TOKENS]
            chooser = (u - first_token).to(tl.int64) * (H // G) + kv
            some = u < highest
            here = length - end + u
        else:
            chooser, some, here = row * H + head, valid, position
        tl.store(ranks_ptr + chooser[:, None] * width + s[None, :], x, mask=some[:, None] & (s < keys)[None, :])
        candidate = some[:, None] & (s[None, :] >= sink) & (s[None, :] <= here[:, None] - window)
        x = tl.where(candidate, x, float("-inf"))
        t = step * (BLOCK_S // TILE) + tl.arange(0, BLOCK_S // TILE)
        best = tl.max(tl.reshape(x, (TOKENS if GROUP else BLOCK_M, BLOCK_S // TILE, TILE)), axis=2)
        tl.store(maxima_ptr + chooser[:, None] * tiles + t[None, :], best, mask=some[:, None])


@triton.jit
def _row(lengths_ptr, starts_ptr, request_ptr, first_token, SINGLE: tl.constexpr):
    """The row of this program: its token among the step's, the request (-1: padding), and the token's position."""
    token = tl.program_id(0)
    if SINGLE:
        request = first_token + token
        idle = tl.load(starts_ptr + request + 1) <= tl.load(starts_ptr + request)
        request = tl.where(idle, -1, request)
    else:
        request = tl.load(request_ptr + token)
    safe = tl.maximum(request, 0)
    position = tl.load(lengths_ptr + safe) - tl.load(starts_ptr + safe + 1) + first_token + token
    return request, position


@triton.jit
def _bound(maxima_ptr, ids_ptr, k, position, TILE: tl.constexpr, BLOCK_T: tl.constexpr):
    """A lower bound of the k-th largest rank of a row, and how many tiles reach it; lists those tiles."""
    t = tl.arange(0, BLOCK_T)
    best = tl.load(maxima_ptr + t, mask=t * TILE <= position, other=float("-inf"))
    key = _ordered(best)
    nothing = _ordered(tl.full((1,), float("-inf"), tl.float32))  # a tile without candidates
    # The upper 18 bits are enough: a bound that is a little low lists a few tiles more.
    bound = tl.full((), -2147483648, tl.int64)
    for i in range(18):
        trial = bound + (tl.full((), 1, tl.int64) << (31 - i))
        count = tl.sum((key >= trial.to(tl.int32)).to(tl.int32))
        bound = tl.where(count >= k, trial, bound)
    reached = (key >= bound.to(tl.int32)) & (key > nothing)
    tl.store(ids_ptr + tl.cumsum(reached.to(tl.int32)) - 1, t, mask=reached)
    return bound.to(tl.int32), tl.sum(reached.to(tl.int32))


@triton.jit
def _candidates(
    ranks_ptr, ids_ptr, listed_ptr, keys_ptr, bound, reached_tiles, sink, window, position,
    TILE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """List the keys in the listed tiles whose rank reaches the bound, in order of position; returns how many."""
    entries = reached_tiles * TILE
    found = tl.full((), 0, tl.int32)
    for begin in range(0, entries, BLOCK_C):
        e = begin + tl.arange(0, BLOCK_C)
        s = tl.load(ids_ptr + e // TILE, mask=e < entries, other=0) * TILE + e % TILE
        candidate = (e < entries) & (s >= sink) & (s <= position - window)
        key = _ordered(tl.load(ranks_ptr + s, mask=candidate, other=float("-inf")))
        reached = candidate & (key >= bound)
        place = found + tl.cumsum(reached.to(tl.int32)) - 1
        tl.store(listed_ptr + place, s, mask=reached)
        tl.store(keys_ptr + place, key, mask=reached)
        found += tl.sum(reached.to(tl.int32))
    return found


@triton.jit
def _threshold(keys_ptr, count, k, BLOCK_L: tl.constexpr):
    """The k-th largest of the listed keys: bit by bit the largest integer that at least k of them reach."""
    threshold = tl.full((), -2147483648, tl.int64)
    if count > k:
        if count <= BLOCK_L:
            e = tl.arange(0, BLOCK_L)
            key = tl.load(keys_ptr + e, mask=e < count, other=-2147483648)
            for i in range(32):
                trial = threshold + (tl.full((), 1, tl.int64) << (31 - i))
                reach = tl.sum((key >= trial.to(tl.int32)).to(tl.int32))
                threshold = tl.where(reach >= k, trial, threshold)
        else:
            for i in range(32):
                trial = threshold + (tl.full((), 1, tl.int64) << (31 - i))
                reach = tl.full((), 0, tl.int32)
                for begin in range(0, count, BLOCK_L):
                    e = begin + tl.arange(0, BLOCK_L)
                    key = tl.load(keys_ptr + e, mask=e < count, other=-2147483648)
                    reach += tl.sum((key >= trial.to(tl.int32)).to(tl.int32))
                threshold = tl.where(reach >= k, trial, threshold)
    return threshold.to(tl.int32)


@triton.jit
def _choose(
    ranks_ptr, maxima_ptr, table_ptr, lengths_ptr, starts_ptr, request_ptr, first_token,
    ids_ptr, listed_ptr, keys_ptr, weights_ptr, slots_ptr, kept_ptr,
    k, sink, window, width, tiles, stride_table,
    SINGLE: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program = one row: which keys are kept, and the slots of their values.

    For a head its softmax weights too; for a group the positions of the keys, over the list that they came from.
    """
    request, position = _row(lengths_ptr, starts_ptr, request_ptr, first_token, SINGLE)
    chooser = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + chooser
    if request < 0:
        tl.store(kept_ptr + row, 0)
        return
    ids_ptr += row * tiles
    listed_ptr += row * width
    keys_ptr += row * width
    bound, reached = _bound(maxima_ptr + row * tiles, ids_ptr, k, position, TILE, BLOCK_T)
    tl.debug_barrier()  # what other threads of the program stored is read next, here and below
    count = _candidates(
        ranks_ptr + row * width, ids_ptr, listed_ptr, keys_ptr, bound, reached, sink, window, position, TILE, BLOCK_C
    )
    tl.debug_barrier()
    threshold = _threshold(keys_ptr, count, k, BLOCK_L)

    # The list goes on with the sink tokens and the window; a window that reaches into the sink starts behind it.
    sinks = tl.minimum(sink, position + 1)
    recent = tl.maximum(sinks, position - window + 1)
    entries = count + sinks + (position + 1 - recent)
    ranks_ptr += row * width
    weights_ptr += row * width
    slots_ptr += row * width
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    found = tl.full((), 0, tl.int32)
    for begin in range(0, entries, BLOCK_E):
        e = begin + tl.arange(0, BLOCK_E)
        s = tl.load(listed_ptr + e, mask=e < count, other=0)
        key = tl.load(keys_ptr + e, mask=e < count, other=2147483647)
        s = tl.where(e < count, s, tl.where(e < count + sinks, e - count, recent + e - count - sinks))
        keep = (key >= threshold) & (e < entries)
        block = tl.load(table_ptr + request.to(tl.int64) * stride_table + s // N, mask=keep, other=0).to(tl.int64)
        place = found + tl.cumsum(keep.to(tl.int32)) - 1
        tl.store(slots_ptr + place, block * N + s % N, mask=keep)
        if GROUP:
            # Behind what is read: a list only ever gets shorter, but this block has to be read first.
            tl.debug_barrier()
            tl.store(listed_ptr + place, s, mask=keep)
        else:
            x = tl.load(ranks_ptr + s, mask=keep, other=float("-inf"))
            # The score for now; it becomes a weight below, when the largest is known.
            tl.store(weights_ptr + place, x, mask=keep)
            largest = tl.maximum(top, tl.max(x))
            safe = tl.where(largest == float("-inf"), 0.0, largest)
            total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe))
            top = largest
        found += tl.sum(keep.to(tl.int32))
    tl.store(kept_ptr + row, found)
    if not GROUP:
        tl.debug_barrier()
        for begin in range(0, found, BLOCK_E):
            e = begin + tl.arange(0, BLOCK_E)
            x = tl.load(weights_ptr + e, mask=e < found, other=0.0)
            tl.store(weights_ptr + e, tl.exp(x - top) / total, mask=e < found)


@triton.jit
def _gather(
    cache_ptr, weights_ptr, slots_ptr, kept_ptr, out_ptr, width, size,
    stride_cb, stride_ch, stride_cn, stride_ot, stride_oh, stride_op,
    G: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program = one token, one head and one part of its list: the weighted sum of the listed values."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token * tl.num_programs(1) + head
    kept = tl.load(kept_ptr + row)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    each = tl.cdiv(tl.cdiv(kept, PARTS), BLOCK_N) * BLOCK_N
    lo = tl.program_id(2) * each
    for begin in range(lo, tl.minimum(lo + each, kept), BLOCK_N):
        e = begin + tl.arange(0, BLOCK_N)
        slot = tl.load(slots_ptr + row * width + e, mask=e < kept, other=0)
        p = tl.load(weights_ptr + row * width + e, mask=e < kept, other=0.0)
        v = tl.load(
            cache_ptr + (slot // N)[:, None] * stride_cb + (head // G) * stride_ch + (slot % N)[:, None] * stride_cn
            + size + d[None, :],
            mask=(e < kept)[:, None] & (d < size)[None, :], other=0.0,
        )  # fmt: skip
        acc += tl.sum(p[:, None] * v.to(tl.float32), axis=0)
    place = tl.program_id(2).to(tl.int64) * stride_op + token * stride_ot + head * stride_oh
    tl.store(out_ptr + place + d, acc.to(out_ptr.dtype.element_ty), mask=d < size)


@triton.jit
def _gather_group(
    q_ptr, cache_ptr, lengths_ptr, starts_ptr, request_ptr, first_token, slopes_ptr, slots_ptr, listed_ptr, kept_ptr,
    out_ptr, stats_ptr, scale, softcap, width, size, stride_qt, stride_qh,
    stride_cb, stride_ch, stride_cn, stride_ot, stride_oh, stride_op,
    SINGLE: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PARTS: tl.constexpr, SLOPES: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program = one token, one group of heads and one part of its list: attention over the listed keys."""
    token, kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, position = _row(lengths_ptr, starts_ptr, request_ptr, first_token, SINGLE)
    row = token * tl.num_programs(1) + kv
    kept = tl.load(kept_ptr + row)
    g, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head = kv * G + g
    q = tl.load(
        q_ptr + (first_token + token) * stride_qt + head[:, None] * stride_qh + d[None, :],
        mask=(g < G)[:, None] & (d < size)[None, :], other=0.0,
    )  # fmt: skip
    if SLOPES:
        slope = tl.load(slopes_ptr + head, mask=g < G, other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    each = tl.cdiv(tl.cdiv(kept, PARTS), BLOCK_N) * BLOCK_N
    lo = tl.program_id(2) * each
    for begin in range(lo, tl.minimum(lo + each, kept), BLOCK_N):
        e = begin + tl.arange(0, BLOCK_N)
        slot = tl.load(slots_ptr + row * width + e, mask=e < kept, other=0)
        where = cache_ptr + (slot // N) * stride_cb + kv * stride_ch + (slot % N) * stride_cn
        k = tl.load(where[None, :] + d[:, None], mask=(e < kept)[None, :] & (d < size)[:, None], other=0.0)
        v = tl.load(where[:, None] + size + d[None, :], mask=(e < kept)[:, None] & (d < size)[None, :], other=0.0)
        x = tl.dot(q, k, input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_N]
        if SOFTCAP:
            x = _capped(x, softcap)
        if SLOPES:
            s = tl.load(listed_ptr + row * width + e, mask=e < kept, other=0)
            x -= slope[:, None] * (position - s)[None, :].to(tl.float32)
        x = tl.where((e < kept)[None, :], x, float("-inf"))
        largest = tl.maximum(top, tl.max(x, axis=1))
        p = tl.exp(x - largest[:, None])
        shrink = tl.exp(top - largest)
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = largest
    # A padding row, or a part beyond the end of a short list, has nothing to add.
    out = acc if PARTS > 1 else acc / tl.where(total > 0, total, 1.0)[:, None]
    place = tl.program_id(2).to(tl.int64) * stride_op + token * stride_ot + head[:, None] * stride_oh + d[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=(g < G)[:, None] & (d < size)[None, :])
    if PARTS > 1:
        stat = stats_ptr + ((tl.program_id(2) * tl.num_programs(0) + token) * H + head) * 2
        tl.store(stat, top, mask=g < G)
        tl.store(stat + 1, total, mask=g < G)


@triton.jit
def _merge(
    partial_ptr, stats_ptr, out_ptr, first_token, size, stride_op, stride_ot, stride_oh,
    PARTS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program = one token and one head: its parts put together, always in the same order.

    Parts of a weighted sum are added. Parts of a softmax come with their largest score and their sum of exponentials.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token * tl.num_programs(1) + head
    rows = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    if WEIGHTED:
        top = tl.full((), float("-inf"), tl.float32)
        for part in range(PARTS):
            top = tl.maximum(top, tl.load(stats_ptr + (part * rows + row) * 2))
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.full((), 0.0, tl.float32)
        for part in range(PARTS):
            share = tl.exp(tl.load(stats_ptr + (part * rows + row) * 2) - top)
            total += share * tl.load(stats_ptr + (part * rows + row) * 2 + 1)
            acc += share * tl.load(partial_ptr + part * stride_op + row * size + d, mask=d < size, other=0.0)
        acc = acc / tl.where(total > 0, total, 1.0)
    else:
        for part in range(PARTS):
            acc += tl.load(partial_ptr + part * stride_op + row * size + d, mask=d < size, other=0.0)
    place = (first_token + token) * stride_ot + head * stride_oh + d
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=d < size)
