"""Exact top-k attention over a paged cache, in Triton: the kernels and the function that strings them together.

Legend: T packed query tokens, R requests, H query heads, KV key/value heads, G query heads per key/value head, D head
size, N tokens per block, L longest context of the step (rounded up). A row is a token and what chooses keys for itself: a
query head, or a key/value head where a group chooses together.

Each step is a kernel:

1. `_scores`: every key is read once. Scores go to a workspace in float32, and with them the largest candidate score of
   each tile of 16 keys.
2. `_choose`, in stages. `_bound`: the k-th largest of those tile maxima is a lower bound of the threshold, since k tiles
   hold a score at least that large; the tiles whose maximum reaches it are listed, k of them unless some are equal.
   `_candidates`: of the scores in those tiles, the ones that reach the bound are listed; for k = 256 of 32768 keys with
   independent scores there are about 280. `_halved`: the exact threshold is searched among these. The keys that reach
   it, the sink and the window get their softmax weights, listed with the place of their values.
3. `_gather`: only the listed values are read. Where a group chooses together, the scores of its heads are not kept but
   computed again for the listed keys, which are few: `_gather_group`. With few rows each list is cut into parts, which
   `_merge` puts together.

The lists have room for what independent scores need and some more, and what fits into registers is searched there. Where
that does not suffice (top keys that are neighbours, many ties), lists are read again and again (`_keep_in_steps`), or
candidates searched in their tiles, and kept keys in all scores: slower, the same result.

Nothing depends on the lengths on the host where every request has one query token, so the step can be captured.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiers.reference.config import TopK
from tiers.reference.ops.bias import Bias
from tiers.reference.ops.paged_attention import Batch
from tiers.vllm_model.ops import workspace
from tiers.vllm_model.ops.positions import arguments, biased, decayed, heads_of_bias
from tiers.vllm_model.ops.positions import precision as precision_of

# Bytes held at once at most; longer work is done in parts.
WORKSPACE_BYTES = 2**30

# Programs that fill the largest devices: a few per multiprocessor.
TARGET_PROGRAMS = 1024

# Keys per tile maximum, unless a row would then have more maxima than one program can search, and the sizes for which
# that program is compiled.
TILE, BLOCKS_T = 16, (512, 2048, 8192)

# The best of those tried (docs/log.md). Keys per step and warps of `_gather`, with few rows and with many; parts that
# `_merge` reads at once.
FEW, MANY = (128, 4), (64, 2)
MERGE_PARTS = 8

# Query rows, keys per step, warps and registers of `_scores` for prompts in 16 bits.
PROMPT = (128, 64, 8, 128)

# Kept keys of a part, whose values are added up by one program.
KEPT_PER_PART = 256

# Kept keys beyond k + sink + window that a list has room for: ties at the threshold.
SPARE = 64


@dataclass(frozen=True)
class Sizes:
    """How long the lists of a row are.

    Attributes:
        tile: keys per tile maximum.
        width: scores of a row, a multiple of `tile`.
        candidates: room for keys that reach the lower bound of the threshold.
        kept: room for keys that are kept.
    """

    tile: int
    width: int
    candidates: int
    kept: int

    @classmethod
    def of(cls, pattern: TopK, longest: int) -> "Sizes":
        tile = max(TILE, triton.next_power_of_2(-(-longest // BLOCKS_T[-1])))
        step = 16 * tile  # so that the tiles of a row are a multiple of 16, too
        width = -(-longest // step) * step
        candidates = min(width, max(1024, 2 * triton.next_power_of_2(pattern.k)))
        return cls(tile, width, candidates, min(width, pattern.k + pattern.sink + pattern.window + SPARE))

    @property
    def tiles(self) -> int:
        return self.width // self.tile

    @property
    def bytes_per_row(self) -> int:
        # Scores, maxima and ids of tiles; candidates with their scores; kept keys with weights and slots.
        return 4 * self.width + 8 * self.tiles + 8 * self.candidates + 16 * self.kept + 32


def workspace_bytes(pattern: TopK, heads: int, kv_heads: int, size: int, tokens: int, longest: int) -> int:
    """See `paged_attention.workspace_bytes`."""
    token = heads * Sizes.of(pattern, longest).bytes_per_row
    rows = min(tokens * token, max(WORKSPACE_BYTES, token))
    return rows + partial_bytes(heads, kv_heads, size) + workspace.SLACK


def partial_bytes(heads: int, kv_heads: int, size: int) -> int:
    """What `_merge` puts together at most: there are no more parts than TARGET_PROGRAMS programs, of a group each."""
    return 4 * TARGET_PROGRAMS * (heads // kv_heads) * (size + 2)


def batches_to_compile(pattern: TopK, heads: int, longest: int) -> list[tuple[int, int, int]]:
    """Requests, query tokens of each, and context: one for each set of kernels that serving can ask for."""
    batches = []
    lengths = [1, *(TILE * size + 1 for size in BLOCKS_T if TILE * size < longest)]
    for length in (min(n, longest) for n in lengths):
        # Two tokens are as few as one for which kernel is chosen, and more than a decode step has.
        rows = {2, TARGET_PROGRAMS // 2 // heads + 1}
        batches += [(n, 1, length) for n in rows]
        batches += [(1, n, max(n, length)) for n in rows if n <= longest]
    return batches


def topk_attention(
    query_THD: Tensor, cache_BKNC: Tensor, batch: Batch, out_THD: Tensor, *,
    scale: float, pattern: TopK, bias: Bias | None, decay_D: Tensor | None, softcap: float | None,
) -> None:  # fmt: skip
    """Fill `out_THD`, rows of requests only, as `paged_attention` of the reference would."""
    tokens, heads = query_THD.shape[:2]
    options = (scale, pattern, bias, decay_D, softcap)
    if batch.max_query == 1:
        # Token r belongs to request r (padding requests, at the end, have none): no length is needed on the host.
        requests = len(batch.lengths_R)
        part = _rows_at_once(pattern, heads, batch.max_length)
        for start in range(0, requests, part):
            stop = min(start + part, requests)
            _run(
                query_THD,
                cache_BKNC,
                batch,
                out_THD,
                start,
                stop,
                start,
                min(stop, tokens),
                1,
                batch.max_length,
                *options,
            )
        return
    lengths, starts = batch.bounds
    for first, last in _ranges(starts):
        stop = starts[last]
        longest = max(lengths[first:last])
        part = _rows_at_once(pattern, heads, longest)
        for start in range(starts[first], stop, part):
            end = min(start + part, stop)
            per_request = 1 if last - first > 1 else end - start
            # A part of a prompt sees the keys up to its own last token only.
            seen = longest if last - first > 1 else longest - (stop - end)
            _run(query_THD, cache_BKNC, batch, out_THD, first, last, start, end, per_request, seen, *options)


def _rows_at_once(pattern: TopK, heads: int, longest: int) -> int:
    """Query tokens whose scores and lists fit into the workspace."""
    return max(1, WORKSPACE_BYTES // (heads * Sizes.of(pattern, max(1, longest)).bytes_per_row))


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
    first: int, last: int, start: int, stop: int, per_request: int, longest: int,
    scale: float, pattern: TopK, bias: Bias | None, decay_D: Tensor | None, softcap: float | None,
) -> None:  # fmt: skip
    """Tokens `start` to `stop` of requests `first` to `last`, each of `per_request` tokens at most."""
    _, heads, size = query_THD.shape
    kv_heads, page = cache_BKNC.shape[1], cache_BKNC.shape[2]
    group = heads // kv_heads
    rows = stop - start
    if rows <= 0:
        return
    single = batch.max_query == 1
    by_group = pattern.share == "group"
    choosers = kv_heads if by_group else heads
    sizes = Sizes.of(pattern, longest)
    width, tiles, tile = sizes.width, sizes.tiles, sizes.tile

    block_g = triton.next_power_of_2(group)
    block_d = triton.next_power_of_2(size)
    wide = block_d > 128 or query_THD.element_size() == 4 or decay_D is not None
    if per_request > 1 and not wide:
        block_m, block_s, warps, registers = PROMPT
    else:
        block_m, block_s, warps, registers = 64, 64 if wide else 128, 4, None
    block_q = 1 if per_request == 1 else max(1, block_m // block_g)
    block_m, block_s = max(16, block_q * block_g), max(tile, block_s)

    most = pattern.k + pattern.sink + pattern.window
    parts = max(1, min(-(-most // KEPT_PER_PART), TARGET_PROGRAMS // max(1, rows * choosers)))
    split = parts > 1
    # What keys are ranked by: the score, or the largest of a group's scores.
    ranks, maxima, tile_ids, listed, keys, weights, slots, positions, summary, partial, stats = workspace.take(
        query_THD.device,
        ((rows, choosers, width), torch.float32),
        ((rows, choosers, tiles), torch.float32),
        ((rows, choosers, tiles), torch.int32),
        ((rows, choosers, sizes.candidates), torch.int32),
        ((rows, choosers, sizes.candidates), torch.float32),
        ((rows, choosers, 0 if by_group else sizes.kept), torch.float32),
        ((rows, choosers, sizes.kept), torch.int64),
        ((rows, choosers, sizes.kept if by_group else 0), torch.int32),
        ((rows, choosers, 4), torch.int32),
        ((parts if split else 0, rows, heads, size), torch.float32),
        ((parts if split and by_group else 0, rows, heads, 2), torch.float32),
    )

    requests = last - first
    blocks = -(-per_request // block_q)
    splits = max(1, min(width // block_s, TARGET_PROGRAMS // max(1, requests * blocks * kv_heads)))
    precision = precision_of(query_THD.dtype, decay_D)
    distances, kinds = arguments(bias, decay_D, ranks)
    early = early_launch(query_THD.device)
    table = batch.block_table_RP
    cache_strides = cache_BKNC.stride()[:3]
    _scores[(requests * blocks, kv_heads, splits)](
        query_THD, cache_BKNC, table, batch.lengths_R, batch.starts_R1, *distances, ranks, maxima,
        first, start, stop, blocks, scale, softcap or 0.0, pattern.sink, pattern.window,
        query_THD.stride(0), query_THD.stride(1), *cache_strides, table.stride(0), width, tiles,
        H=heads, G=group, D=size, N=page, TILE=tile, BLOCK_G=block_g, BLOCK_M=block_m, BLOCK_Q=block_q, BLOCK_S=block_s,
        BLOCK_D=block_d, SOFTCAP=softcap is not None, GROUP=by_group, PRECISION=precision, **kinds,
        num_warps=warps, num_stages=3, maxnreg=registers, **early,
    )  # fmt: skip

    # Few sizes, so that few kernels are compiled.
    block_t = next(n for n in BLOCKS_T if n >= tiles)
    block_l = min(4096, max(512, triton.next_power_of_2(2 * pattern.k)))
    warps, block_c, block_e = _shape_of_choose(rows * choosers, block_t, block_l)
    _choose[(rows, choosers)](
        ranks, maxima, table, batch.lengths_R, batch.starts_R1, first, last, start,
        tile_ids, listed, keys, weights, slots, positions, summary,
        pattern.k, pattern.sink, pattern.window, width, tiles, sizes.candidates, sizes.kept, table.stride(0),
        SINGLE=single, GROUP=by_group, N=page, TILE=tile, BLOCK_T=block_t, BLOCK_C=max(block_c, tile),
        BLOCK_L=block_l, BLOCK_E=block_e, num_warps=warps, num_stages=1, **early,
    )  # fmt: skip

    target = partial if split else out_THD[start:]
    strides = (*cache_strides, target.stride(-3), target.stride(-2), target.stride(0) if split else 0)
    if by_group:
        _gather_group[(rows, choosers, parts)](
            query_THD, cache_BKNC, table, batch.lengths_R, batch.starts_R1, first, last, start, *distances,
            ranks, slots, positions, summary, target, stats, scale, softcap or 0.0, pattern.sink, pattern.window,
            width, sizes.kept, query_THD.stride(0), query_THD.stride(1), table.stride(0), *strides,
            SINGLE=single, H=heads, G=group, D=size, N=page, BLOCK_M=max(16, block_g), BLOCK_N=64, BLOCK_D=block_d, SPLIT=split,
            SOFTCAP=softcap is not None, PRECISION=precision, **kinds, num_warps=4, num_stages=2, **early,
        )  # fmt: skip
    else:
        gather_keys, gather_warps = FEW if rows * choosers <= TARGET_PROGRAMS // 2 else MANY
        _gather[(rows, choosers, parts)](
            cache_BKNC, table, batch.lengths_R, batch.starts_R1, first, last, start,
            ranks, weights, slots, summary, target, pattern.sink, pattern.window,
            width, sizes.kept, table.stride(0), *strides,
            SINGLE=single, G=group, D=size, N=page, BLOCK_N=gather_keys, BLOCK_D=block_d,
            num_warps=gather_warps, num_stages=2, **early,
        )  # fmt: skip
    if split:
        _merge[(rows, heads)](
            partial, stats, out_THD, start, parts, partial.stride(0), out_THD.stride(0), out_THD.stride(1),
            WEIGHTED=by_group, D=size, BLOCK_D=block_d, BLOCK_P=MERGE_PARTS, num_warps=1, **early,
        )  # fmt: skip


def _shape_of_choose(rows: int, block_t: int, block_l: int) -> tuple[int, int, int]:
    """Warps of `_choose`, candidates and list entries per step; the best of those tried (docs/log.md).

    Few rows want an answer soon: many warps with much in flight. Many rows want many programs at a time.
    """
    if block_l > 1024:
        return 16, 8192, 2048
    if rows > TARGET_PROGRAMS // 2:
        return max(2, block_t // 1024), 512, 256
    return 8, 2048, 512


@functools.cache
def early_launch(device: torch.device) -> dict[str, bool]:
    """Options that let a kernel be set up while the one before it still runs; it waits for that one before it reads.

    Programmatic dependent launch: from compute capability 9.0 on.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True} if torch.cuda.get_device_capability(device)[0] >= 9 else {"PDL": False}


# Numbers that change from step to step or from model to model: a kernel for each value of 1 or each multiple of 16 among
# them would be compiled while serving.
VARYING = [
    "first_request", "last_request", "first_token", "stop_token", "blocks", "k", "sink", "window", "room", "kept_room",
    "parts", "tokens", "stride_table", "bias_last",
]  # fmt: skip


@triton.jit
def _ordered(x):
    """Integers that compare as the floats do, NaN above everything."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _float_of(key):
    """The float that `_ordered` made an integer of; NaN for NaN."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _capped(x, softcap):
    """softcap * tanh(x / softcap), through exp of a negative number, which cannot overflow."""
    e = tl.exp(-2.0 * tl.abs(x) / softcap)
    return tl.where(x < 0, -1.0, 1.0) * softcap * (1.0 - e) / (1.0 + e)


@triton.jit
def _between(s, low, high, s_axis: tl.constexpr, m_axis: tl.constexpr):
    """low <= s <= high, for every s and every high."""
    return tl.expand_dims(s >= low, s_axis) & (tl.expand_dims(s, s_axis) <= tl.expand_dims(high, m_axis))


@triton.jit(do_not_specialize=VARYING)
def _scores(
    q_ptr, cache_ptr, table_ptr, lengths_ptr, starts_ptr, bias_ptr, bias_last, decay_ptr, ranks_ptr, maxima_ptr,
    first_request, first_token, stop_token, blocks, scale, softcap, sink, window,
    stride_qt, stride_qh, stride_cb, stride_ch, stride_cn, stride_table, width, tiles,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BIAS: tl.constexpr,
    DECAY: tl.constexpr, SOFTCAP: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program = up to BLOCK_Q query tokens of one request, one key/value head, one part of the keys.

    For heads, scores are [BLOCK_M, BLOCK_S], so that neighbouring keys are stored together. For groups they are
    [BLOCK_S, BLOCK_M]: little is stored, and keys as rows make full tiles of the matrix unit even for one token.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
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
    M_AXIS: tl.constexpr = 0 if GROUP else 1  # the axis along which queries are broadcast
    S_AXIS: tl.constexpr = 1 - M_AXIS
    m = tl.arange(0, BLOCK_M)
    token = lowest + m // BLOCK_G  # [BLOCK_M]
    head = kv * G + m % BLOCK_G
    valid = (token < highest) & (m % BLOCK_G < G)
    position = length - end + token
    d = tl.arange(0, BLOCK_D)
    q = tl.load(
        q_ptr + tl.expand_dims(token.to(tl.int64) * stride_qt + head * stride_qh, M_AXIS) + tl.expand_dims(d, S_AXIS),
        mask=tl.expand_dims(valid, M_AXIS) & tl.expand_dims(d < D, S_AXIS), other=0.0,
    )  # fmt: skip
    if BIAS:
        factor, rate, row = heads_of_bias(bias_ptr, head, valid, bias_last, H, BIAS)
    if DECAY:
        decay = tl.load(decay_ptr + d, mask=d < D, other=0.0)

    keys = length - end + highest  # keys that the last of these tokens may see
    total = tl.cdiv(keys, BLOCK_S)
    each = tl.cdiv(total, tl.num_programs(2))
    lo = tl.program_id(2) * each
    for step in range(lo, tl.minimum(lo + each, total)):
        s = step * BLOCK_S + tl.arange(0, BLOCK_S)
        block = tl.load(table_ptr + request.to(tl.int64) * stride_table + s // N, mask=s < keys, other=0).to(tl.int64)
        inside = tl.expand_dims(s < keys, S_AXIS)
        if D < BLOCK_D:
            inside = inside & tl.expand_dims(d < D, M_AXIS)
        k = tl.load(
            cache_ptr + tl.expand_dims(block, S_AXIS) * stride_cb + kv * stride_ch
            + tl.expand_dims(s % N, S_AXIS) * stride_cn + tl.expand_dims(d, M_AXIS),
            mask=inside, other=0.0,
        )  # fmt: skip
        near = q
        if DECAY:
            # Relative to the last position of the tile; tokens before the tile see none of it.
            anchor = step * BLOCK_S + BLOCK_S - 1
            beyond = tl.maximum(position - anchor, -BLOCK_S)
            near = decayed(q, tl.expand_dims(decay, S_AXIS), tl.expand_dims(beyond, M_AXIS))
            k = decayed(k, tl.expand_dims(decay, M_AXIS), tl.expand_dims(anchor - s, S_AXIS))
        x = (
            tl.dot(k, near, input_precision=PRECISION) if GROUP else tl.dot(near, k, input_precision=PRECISION)
        ) * scale
        if SOFTCAP:
            x = _capped(x, softcap)
        if BIAS:
            distance = tl.expand_dims(position, M_AXIS) - tl.expand_dims(s, S_AXIS)
            x = biased(
                x, distance, tl.expand_dims(factor, M_AXIS), tl.expand_dims(rate, M_AXIS), tl.expand_dims(row, M_AXIS),
                bias_ptr, bias_last, BIAS,
            )  # fmt: skip
        if GROUP:
            # One column per token from here on; columns of other heads than the group's must not count.
            x = tl.reshape(tl.where(valid[None, :], x, float("-inf")), (BLOCK_S, TOKENS, BLOCK_G))
            x = tl.reduce(x, 2, _largest)
            u = lowest + tl.arange(0, TOKENS)  # [TOKENS]
            chooser = (u - first_token).to(tl.int64) * (H // G) + kv
            some = u < highest
            here = length - end + u
        else:
            chooser, some, here = (token - first_token).to(tl.int64) * H + head, valid, position
        # A row has room for whole tiles: what is stored beyond its last key is never read, and a mask that differs from
        # key to key would cut the stores into single numbers.
        tl.store(
            ranks_ptr + tl.expand_dims(chooser * width, M_AXIS) + tl.expand_dims(s, S_AXIS),
            x, mask=tl.expand_dims(some, M_AXIS),
        )  # fmt: skip
        # Most tiles of a long prompt hold candidates only. For single tokens, the branch costs more than it saves.
        if BLOCK_Q == 1:  # noqa: SIM114  this is decided when the kernel is compiled, the other on the device
            x = tl.where(_between(s, sink, here - window, S_AXIS, M_AXIS), x, float("-inf"))
        elif (step * BLOCK_S < sink) | ((step + 1) * BLOCK_S > length - end + lowest - window + 1):
            x = tl.where(_between(s, sink, here - window, S_AXIS, M_AXIS), x, float("-inf"))
        t = step * (BLOCK_S // TILE) + tl.arange(0, BLOCK_S // TILE)
        if GROUP:
            best = tl.reduce(tl.reshape(x, (BLOCK_S // TILE, TILE, TOKENS)), 1, _largest)
        else:
            best = tl.reduce(tl.reshape(x, (BLOCK_M, BLOCK_S // TILE, TILE)), 2, _largest)
        tl.store(
            maxima_ptr + tl.expand_dims(chooser * tiles, M_AXIS) + tl.expand_dims(t, S_AXIS),
            best, mask=tl.expand_dims(some, M_AXIS),
        )  # fmt: skip


@triton.jit
def _row(lengths_ptr, starts_ptr, first_request, last_request, first_token, SINGLE: tl.constexpr):
    """The row of this program: its token among the step's, the request (-1: padding), and the token's position."""
    token = first_token + tl.program_id(0)
    if SINGLE:
        request = token
        idle = tl.load(starts_ptr + request + 1) <= tl.load(starts_ptr + request)
        request = tl.where(idle, -1, request)
    else:
        request = first_request
        for begin in range(first_request, last_request, 64):
            r = begin + tl.arange(0, 64)
            end = tl.load(starts_ptr + r + 1, mask=r < last_request, other=2147483647)
            request += tl.sum((end <= token).to(tl.int32))
    safe = tl.maximum(request, 0)
    position = tl.load(lengths_ptr + safe) - tl.load(starts_ptr + safe + 1) + token
    return request, position


@triton.jit
def _bound(maxima_ptr, ids_ptr, k, position, TILE: tl.constexpr, BLOCK_T: tl.constexpr):
    """A lower bound of the k-th largest rank of a row, how many tiles reach it, and the largest; lists those tiles.

    The search halves the range of integers between smallest and largest maximum until the tiles that reach the middle
    are k, so that they can be read at once; with ties they may be more.
    """
    # In rows of 16: places in a list are then counted within a few lanes, and for whole rows once.
    t = tl.arange(0, BLOCK_T // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    best = tl.load(maxima_ptr + t, mask=t * TILE <= position, other=float("-inf"))
    key = _ordered(best)
    nothing = _ordered(tl.full((), float("-inf"), tl.float32))  # a tile without candidates
    some = key > nothing
    count = tl.sum(some.to(tl.int32))
    highest = tl.max(key)
    low = tl.min(tl.where(some, key, 2147483647)).to(tl.int64)
    high = highest.to(tl.int64) + 1
    while (count > k) & (high - low > 1):
        middle = (low + high) // 2
        reach = tl.sum((key >= middle.to(tl.int32)).to(tl.int32))
        enough = reach >= k
        low = tl.where(enough, middle, low)
        count = tl.where(enough, reach, count)
        high = tl.where(enough, high, middle)
    reached = some & (key >= low.to(tl.int32))
    # Fewer than k tiles do not hold k scores as large as their maxima.
    bound = tl.where(count < k, -2147483647, low).to(tl.int32)
    place, _ = _places(reached)
    tl.store(ids_ptr + place, t, mask=reached)
    return bound, count, highest


@triton.jit
def _places(reached):
    """Where each marked element of a matrix goes in a list of them, row by row, and how many there are."""
    flag = reached.to(tl.int32)
    per_row = tl.sum(flag, axis=1)
    before = tl.cumsum(per_row, axis=0) - per_row
    return before[:, None] + tl.cumsum(flag, axis=1) - 1, tl.sum(per_row)


@triton.jit
def _in_tiles(ranks_ptr, ids_ptr, e, entries, sink, window, position, TILE: tl.constexpr):
    """The e-th key of the listed tiles and its rank as an integer; the smallest integer if it is no candidate."""
    s = tl.load(ids_ptr + e // TILE, mask=e < entries, other=0) * TILE + e % TILE
    candidate = (e < entries) & (s >= sink) & (s <= position - window)
    rank = tl.load(ranks_ptr + s, mask=candidate, other=0.0)
    return s, tl.where(candidate, _ordered(rank), -2147483648)


@triton.jit
def _candidates(
    ranks_ptr, ids_ptr, listed_ptr, keys_ptr, bound, reached_tiles, room, sink, window, position,
    TILE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """List the keys in the listed tiles whose rank reaches the bound, by position, while there is room.

    Returns:
        How many there are.
    """
    found = tl.full((), 0, tl.int32)
    # The integer for "everything" becomes NaN, which no score is below.
    least = _float_of(bound)
    for begin in range(0, reached_tiles, BLOCK_C // TILE):
        i = begin + tl.arange(0, BLOCK_C // TILE)
        tile = tl.load(ids_ptr + i, mask=i < reached_tiles, other=0)
        s = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        candidate = (i < reached_tiles)[:, None] & (s >= sink) & (s <= position - window)
        rank = tl.load(ranks_ptr + s, mask=candidate, other=float("-inf"))
        reached = candidate & ~(rank < least)
        place, more = _places(reached)
        place += found
        tl.store(listed_ptr + place, s, mask=reached & (place < room))
        tl.store(keys_ptr + place, rank, mask=reached & (place < room))
        found += more
    return found


@triton.jit
def _halved(key, count, low, high, k):
    """The k-th largest of `key`, or any integer above the one after it: what reaches either is the same.

    Halves the range between `low`, which `count` >= k of them reach, and `high`, which none does.
    """
    low, high = low.to(tl.int64), high.to(tl.int64) + 1
    while (count > k) & (high - low > 1):
        middle = (low + high) // 2
        reach = tl.sum((key >= middle.to(tl.int32)).to(tl.int32))
        enough = reach >= k
        low = tl.where(enough, middle, low)
        count = tl.where(enough, reach, count)
        high = tl.where(enough, high, middle)
    return low.to(tl.int32)


@triton.jit
def _threshold(
    keys_ptr, ranks_ptr, ids_ptr, count, room, entries, low, high, k, sink, window, position,
    TILE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """As `_halved`, for candidates that are read again for every half."""
    low, high = low.to(tl.int64), high.to(tl.int64) + 1
    listed = count <= room
    searched = tl.where(listed, count, entries)
    while (count > k) & (high - low > 1):
        middle = (low + high) // 2
        reach = tl.full((), 0, tl.int32)
        for begin in range(0, searched, BLOCK_E):
            e = begin + tl.arange(0, BLOCK_E)
            if listed:
                rank = tl.load(keys_ptr + e, mask=e < searched, other=float("-inf"))
                key = tl.where(e < searched, _ordered(rank), -2147483648)
            else:
                _, key = _in_tiles(ranks_ptr, ids_ptr, e, searched, sink, window, position, TILE)
            reach += tl.sum((key >= middle.to(tl.int32)).to(tl.int32))
        enough = reach >= k
        low = tl.where(enough, middle, low)
        count = tl.where(enough, reach, count)
        high = tl.where(enough, high, middle)
    return low.to(tl.int32)


@triton.jit(do_not_specialize=VARYING)
def _choose(
    ranks_ptr, maxima_ptr, table_ptr, lengths_ptr, starts_ptr, first_request, last_request, first_token,
    ids_ptr, listed_ptr, keys_ptr, weights_ptr, slots_ptr, positions_ptr, summary_ptr,
    k, sink, window, width, tiles, room, kept_room, stride_table,
    SINGLE: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program = one row: which keys are kept, and the slots of their values.

    For a head its softmax weights too; for a group the positions of the keys. The summary of a row: how many keys are
    kept, the integer that their ranks reach, largest score and sum of exponentials.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    request, position = _row(lengths_ptr, starts_ptr, first_request, last_request, first_token, SINGLE)
    chooser = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + chooser
    summary_ptr += row * 4
    if request < 0:
        tl.store(summary_ptr, 0)
        return
    ids_ptr += row * tiles
    bound, reached, highest = _bound(maxima_ptr + row * tiles, ids_ptr, k, position, TILE, BLOCK_T)
    tl.debug_barrier()  # what other threads of the program stored is read next, here and below
    listed_ptr += row * room
    keys_ptr += row * room
    ranks_ptr += row * width
    entries = reached * TILE
    count = _candidates(
        ranks_ptr, ids_ptr, listed_ptr, keys_ptr, bound, reached, room, sink, window, position, TILE, BLOCK_C
    )
    tl.debug_barrier()

    # The list goes on with the sink tokens and the window; a window that reaches into the sink starts behind it.
    listed = count <= room
    candidates = tl.where(listed, count, entries)
    sinks = tl.minimum(sink, position + 1)
    recent = tl.maximum(sinks, position - window + 1)
    total_entries = candidates + sinks + (position + 1 - recent)
    weights_ptr += row * kept_room
    slots_ptr += row * kept_room
    positions_ptr += row * kept_room
    table_ptr += request.to(tl.int64) * stride_table
    if listed & (total_entries <= BLOCK_L):
        # All at once, in registers.
        e = tl.arange(0, BLOCK_L)
        rank = tl.load(keys_ptr + e, mask=e < count, other=float("-inf"))
        key = tl.where(e < count, _ordered(rank), -2147483648)
        s = tl.load(listed_ptr + e, mask=e < count, other=0)
        threshold = _halved(key, count, bound, highest, k)
        s = tl.where(e < count, s, tl.where(e < count + sinks, e - count, recent + e - count - sinks))
        keep = ((key >= threshold) | (e >= count)) & (e < total_entries)
        block = tl.load(table_ptr + s // N, mask=keep, other=0).to(tl.int64)
        found = tl.sum(keep.to(tl.int32))
        place = tl.cumsum(keep.to(tl.int32)) - 1
        fits = keep & (place < kept_room)
        tl.store(slots_ptr + place, block * N + s % N, mask=fits)
        if GROUP:
            tl.store(positions_ptr + place, s, mask=fits)
        else:
            x = tl.load(ranks_ptr + s, mask=keep & (e >= count), other=float("-inf"))
            x = tl.where(keep & (e < count), rank, x)
            top = tl.max(x)
            x = tl.exp(x - top)
            total = tl.sum(x)
            tl.store(weights_ptr + place, x / total, mask=fits)
            tl.store(summary_ptr + 2, top.to(tl.int32, bitcast=True))
            tl.store(summary_ptr + 3, total.to(tl.int32, bitcast=True))
        tl.store(summary_ptr, found)
        tl.store(summary_ptr + 1, threshold)
    else:
        _keep_in_steps(
            ranks_ptr, table_ptr, ids_ptr, listed_ptr, keys_ptr, weights_ptr, slots_ptr, positions_ptr, summary_ptr,
            bound, highest, count, room, entries, candidates, sinks, recent, total_entries, k, sink, window, position,
            kept_room, GROUP, N, TILE, BLOCK_E,
        )  # fmt: skip


@triton.jit
def _keep_in_steps(
    ranks_ptr, table_ptr, ids_ptr, listed_ptr, keys_ptr, weights_ptr, slots_ptr, positions_ptr, summary_ptr,
    bound, highest, count, room, entries, candidates, sinks, recent, total_entries, k, sink, window, position, kept_room,
    GROUP: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The last stage of `_choose` for rows with more entries than fit into registers."""
    listed = count <= room
    threshold = _threshold(
        keys_ptr, ranks_ptr, ids_ptr, count, room, entries, bound, highest, k, sink, window, position, TILE, BLOCK_E
    )
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    found = tl.full((), 0, tl.int32)
    for begin in range(0, total_entries, BLOCK_E):
        e = begin + tl.arange(0, BLOCK_E)
        if listed:
            s = tl.load(listed_ptr + e, mask=e < candidates, other=0)
            key = _ordered(tl.load(keys_ptr + e, mask=e < candidates, other=float("nan")))
        else:
            s, key = _in_tiles(ranks_ptr, ids_ptr, e, candidates, sink, window, position, TILE)
            key = tl.where(e < candidates, key, 2147483647)
        s = tl.where(
            e < candidates, s, tl.where(e < candidates + sinks, e - candidates, recent + e - candidates - sinks)
        )
        keep = (key >= threshold) & (e < total_entries)
        block = tl.load(table_ptr + s // N, mask=keep, other=0).to(tl.int64)
        place = found + tl.cumsum(keep.to(tl.int32)) - 1
        fits = keep & (place < kept_room)
        tl.store(slots_ptr + place, block * N + s % N, mask=fits)
        if GROUP:
            tl.store(positions_ptr + place, s, mask=fits)
        else:
            x = tl.load(ranks_ptr + s, mask=keep, other=float("-inf"))
            # The score for now; it becomes a weight below, when the largest is known.
            tl.store(weights_ptr + place, x, mask=fits)
            largest = tl.maximum(top, tl.max(x))
            safe = tl.where(largest == float("-inf"), 0.0, largest)
            total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe))
            top = largest
        found += tl.sum(keep.to(tl.int32))
    tl.store(summary_ptr, found)
    tl.store(summary_ptr + 1, threshold)
    if not GROUP:
        tl.store(summary_ptr + 2, top.to(tl.int32, bitcast=True))
        tl.store(summary_ptr + 3, total.to(tl.int32, bitcast=True))
        tl.debug_barrier()
        for begin in range(0, tl.minimum(found, kept_room), BLOCK_E):
            e = begin + tl.arange(0, BLOCK_E)
            x = tl.load(weights_ptr + e, mask=e < tl.minimum(found, kept_room), other=0.0)
            tl.store(weights_ptr + e, tl.exp(x - top) / total, mask=e < tl.minimum(found, kept_room))


@triton.jit
def _kept_of_all(ranks_ptr, table_ptr, s, length, threshold, sink, window, position, N: tl.constexpr):
    """For keys s of a row whose list was too short: which are kept, their ranks, and their slots."""
    rank = tl.load(ranks_ptr + s, mask=s < length, other=float("-inf"))
    always = (s < sink) | (s > position - window)
    keep = (s < length) & (always | (_ordered(rank) >= threshold))
    block = tl.load(table_ptr + s // N, mask=keep, other=0).to(tl.int64)
    return keep, rank, block * N + s % N


@triton.jit(do_not_specialize=VARYING)
def _gather(
    cache_ptr, table_ptr, lengths_ptr, starts_ptr, first_request, last_request, first_token,
    ranks_ptr, weights_ptr, slots_ptr, summary_ptr, out_ptr, sink, window, width, kept_room, stride_table,
    stride_cb, stride_ch, stride_cn, stride_ot, stride_oh, stride_op,
    SINGLE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program = one token, one head and one part of its list: the weighted sum of the listed values."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token * tl.num_programs(1) + head
    kept = tl.load(summary_ptr + row * 4)
    values_ptr = cache_ptr + (head // G) * stride_ch + D
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    if kept <= kept_room:
        each = tl.cdiv(tl.cdiv(kept, tl.num_programs(2)), BLOCK_N) * BLOCK_N
        lo = tl.program_id(2) * each
        for begin in range(lo, tl.minimum(lo + each, kept), BLOCK_N):
            e = begin + tl.arange(0, BLOCK_N)
            slot = tl.load(slots_ptr + row * kept_room + e, mask=e < kept, other=0)
            p = tl.load(weights_ptr + row * kept_room + e, mask=e < kept, other=0.0)
            v = tl.load(
                values_ptr + (slot // N)[:, None] * stride_cb + (slot % N)[:, None] * stride_cn + d[None, :],
                mask=(e < kept)[:, None] & (d < D)[None, :], other=0.0,
            )  # fmt: skip
            acc += tl.sum(p[:, None] * v.to(tl.float32), axis=0)
    else:
        request, position = _row(lengths_ptr, starts_ptr, first_request, last_request, first_token, SINGLE)
        threshold = tl.load(summary_ptr + row * 4 + 1)
        top = tl.load(summary_ptr + row * 4 + 2).to(tl.float32, bitcast=True)
        total = tl.load(summary_ptr + row * 4 + 3).to(tl.float32, bitcast=True)
        length = position + 1
        each = tl.cdiv(tl.cdiv(length, tl.num_programs(2)), BLOCK_N) * BLOCK_N
        lo = tl.program_id(2) * each
        for begin in range(lo, tl.minimum(lo + each, length), BLOCK_N):
            s = begin + tl.arange(0, BLOCK_N)
            keep, rank, slot = _kept_of_all(
                ranks_ptr + row * width, table_ptr + request.to(tl.int64) * stride_table, s,
                length, threshold, sink, window, position, N,
            )  # fmt: skip
            p = tl.where(keep, tl.exp(rank - top) / total, 0.0)
            v = tl.load(
                values_ptr + (slot // N)[:, None] * stride_cb + (slot % N)[:, None] * stride_cn + d[None, :],
                mask=keep[:, None] & (d < D)[None, :], other=0.0,
            )  # fmt: skip
            acc += tl.sum(p[:, None] * v.to(tl.float32), axis=0)
    place = tl.program_id(2).to(tl.int64) * stride_op + token * stride_ot + head * stride_oh
    tl.store(out_ptr + place + d, acc.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=VARYING)
def _gather_group(
    q_ptr, cache_ptr, table_ptr, lengths_ptr, starts_ptr, first_request, last_request, first_token,
    bias_ptr, bias_last, decay_ptr, ranks_ptr, slots_ptr, positions_ptr, summary_ptr, out_ptr, stats_ptr, scale, softcap, sink, window,
    width, kept_room, stride_qt, stride_qh, stride_table,
    stride_cb, stride_ch, stride_cn, stride_ot, stride_oh, stride_op,
    SINGLE: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, BIAS: tl.constexpr, DECAY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program = one token, one group of heads and one part of its list: attention over the listed keys."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    token, kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, position = _row(lengths_ptr, starts_ptr, first_request, last_request, first_token, SINGLE)
    row = token * tl.num_programs(1) + kv
    kept = tl.load(summary_ptr + row * 4)
    g, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head = kv * G + g
    q = tl.load(
        q_ptr + (first_token + token) * stride_qt + head[:, None] * stride_qh + d[None, :],
        mask=(g < G)[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    if BIAS:
        factor, rate, row_of = heads_of_bias(bias_ptr, head, g < G, bias_last, H, BIAS)
    if DECAY:
        decay = tl.load(decay_ptr + d, mask=d < D, other=0.0)
        q = q.to(tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # A list that was too short is replaced by all keys, of which few are kept.
    listed = kept <= kept_room
    entries = tl.where(listed, kept, position + 1)
    threshold = tl.load(summary_ptr + row * 4 + 1, mask=kept > 0, other=0)
    each = tl.cdiv(tl.cdiv(entries, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    lo = tl.program_id(2) * each
    for begin in range(lo, tl.minimum(lo + each, entries), BLOCK_N):
        e = begin + tl.arange(0, BLOCK_N)
        if listed:
            keep = e < entries
            slot = tl.load(slots_ptr + row * kept_room + e, mask=keep, other=0)
            s = tl.load(positions_ptr + row * kept_room + e, mask=keep, other=0)
        else:
            s = e
            keep, _, slot = _kept_of_all(
                ranks_ptr + row * width, table_ptr + request.to(tl.int64) * stride_table, s,
                entries, threshold, sink, window, position, N,
            )  # fmt: skip
        where = cache_ptr + (slot // N) * stride_cb + kv * stride_ch + (slot % N) * stride_cn
        k = tl.load(where[None, :] + d[:, None], mask=keep[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(where[:, None] + D + d[None, :], mask=keep[:, None] & (d < D)[None, :], other=0.0)
        if DECAY:
            k = decayed(k, decay[:, None], (position - s)[None, :])
        x = tl.dot(q, k, input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_N]
        if SOFTCAP:
            x = _capped(x, softcap)
        if BIAS:
            away = (position - s)[None, :]
            x = biased(x, away, factor[:, None], rate[:, None], row_of[:, None], bias_ptr, bias_last, BIAS)
        x = tl.where(keep[None, :], x, float("-inf"))
        largest = tl.maximum(top, tl.max(x, axis=1))
        safe = tl.where(largest == float("-inf"), 0.0, largest)
        p = tl.exp(x - safe[:, None])
        shrink = tl.exp(top - safe)
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = largest
    # A padding row, or a part beyond the end of a short list, has nothing to add.
    out = acc if SPLIT else acc / tl.where(total == 0, 1.0, total)[:, None]
    place = tl.program_id(2).to(tl.int64) * stride_op + token * stride_ot + head[:, None] * stride_oh + d[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None, :])
    if SPLIT:
        stat = stats_ptr + ((tl.program_id(2) * tl.num_programs(0) + token) * H + head) * 2
        tl.store(stat, top, mask=g < G)
        tl.store(stat + 1, total, mask=g < G)


@triton.jit(do_not_specialize=VARYING)
def _merge(
    partial_ptr, stats_ptr, out_ptr, first_token, parts, stride_op, stride_ot, stride_oh,
    WEIGHTED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program = one token and one head: its parts put together, always in the same order.

    Parts of a weighted sum are added. Parts of a softmax come with their largest score and their sum of exponentials.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token * tl.num_programs(1) + head
    rows = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    d, p = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for begin in range(0, parts, BLOCK_P):
        part = begin + p
        here = partial_ptr + part.to(tl.int64)[:, None] * stride_op + row * D + d[None, :]
        if WEIGHTED:
            stat = stats_ptr + (part * rows + row) * 2
            tops = tl.load(stat, mask=part < parts, other=float("-inf"))
            largest = tl.maximum(top, tl.max(tops))
            safe = tl.where(largest == float("-inf"), 0.0, largest)
            share = tl.exp(tops - safe)
            shrink = tl.exp(top - safe)
            total = total * shrink + tl.sum(share * tl.load(stat + 1, mask=part < parts, other=0.0))
            # A part without keys may hold anything.
            values = tl.load(here, mask=(share != 0)[:, None] & (d < D)[None, :], other=0.0)
            acc = acc * shrink + tl.sum(share[:, None] * values, axis=0)
            top = largest
        else:
            acc += tl.sum(tl.load(here, mask=(part < parts)[:, None] & (d < D)[None, :], other=0.0), axis=0)
    if WEIGHTED:
        acc = acc / tl.where(total == 0, 1.0, total)
    place = (first_token + token) * stride_ot + head * stride_oh + d
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=d < D)
