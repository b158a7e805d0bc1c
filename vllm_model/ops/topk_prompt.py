"""Exact top-k attention for long prompts whose heads choose for themselves, in Triton: few scores are ever stored.

Storing every score of a prompt takes longer than computing it. A bound for each row, guessed from a sample of the keys, tells
which can matter:

1. `_contiguous`: the keys of the request, copied out of its pages, and again one of every SAMPLED.
2. `_maxima`: the largest candidate score of each tile of sampled keys, for every row.
3. `_bounds`: the bound that by these scores somewhat more keys reach than are wanted, but fewer than a list has room for.
4. `_hits`: all scores; those that reach the bound are listed with their keys, and the sink and the window.
5. `_attend`: the exact threshold among what is listed, the softmax weights, and the weighted sum of the values.
6. `_alone`: rows whose guess was bad, because too few keys reach the bound or too many. All their scores are stored and searched.

What is listed are all keys that reach the bound, so wherever they are enough they hold the k largest: a guess decides how
fast a row is, never what it is. If keys were drawn independently, 3 rows of 10,000 would be guessed badly.

Legend: T packed query tokens, H query heads, KV key/value heads, G query heads per key/value head, D head size, N tokens
per block, S keys of the request, rounded up. A row is a token and a query head.
"""

import math
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiers.reference.config import TopK
from tiers.vllm_model.ops import topk_kernels as kernels
from tiers.vllm_model.ops import workspace


class Shape(NamedTuple):
    """Of a kernel that computes scores: query rows and keys at a time, how it is compiled, and programs at most."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int
    programs: int


class Attend(NamedTuple):
    """Of `_attend`, for lists of 512: values at a time, and how it is compiled."""

    values: int
    warps: int
    registers: int


# The best of those tried (docs/log.md). Two programs on each multiprocessor of an H200, twice.
MAXIMA = Shape(128, 64, 8, 3, 128, 528)
HITS = Shape(128, 64, 8, 3, 128, 528)
ATTEND = Attend(32, 1, 96)

# One key of so many is sampled.
SAMPLED = tl.constexpr(4)

# Maxima of a row, at least: as many as `_bounds` searches in hardly more time than fewer. Entries of a list, at most: one program
# has them in registers.
FEWEST_MAXIMA, LONGEST_LIST = 512, 8192

# How far the guess keeps away from too few keys, and a list from being too short, in standard deviations.
SURE, ROOMY = 4.2, 3.5

# Keys that a program of `_contiguous` copies.
COPIED = 64

# Parts of the keys that a row has lists of its own for, at most: with few rows, one after another would take long.
MOST_SPLITS = 16

# Programs of `_alone`, each with all scores of a few rows, and what these take of the workspace if they can do with so little.
ALONE, ALONE_BYTES = 264, 2**28

# Keys that it multiplies at a time.
ALONE_KEYS = 128

# The longest context: more keys are not copied.
MOST = 2**19

# Lists of a row and a part of the keys, and entries that are added to one at once.
LISTS, MOST_AT_ONCE = tl.constexpr(4), tl.constexpr(16)

# The smallest number that is finite.
LOWEST = tl.constexpr(-3.4028234663852886e38)

# Entries are stored by an instruction of our own: Triton would first bring all products into another order, by way of shared
# memory, though few are wanted. The interpreter knows Triton's only.
INLINE = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@dataclass(frozen=True)
class Sizes:
    """How a part of a prompt is done.

    Attributes:
        tile: sampled keys per maximum.
        maxima: of a row, a power of two.
        expected: sampled keys that should reach the bound.
        room: entries of all lists of a row that are of use, a power of two.
    """

    tile: int
    maxima: int
    expected: float
    room: int

    @property
    def room_of_a_list(self) -> int:
        """With a quarter more than its share, since keys do not fall on lists evenly, and what may not be filled."""
        return self.room * 5 // (4 * LISTS.value) + MOST_AT_ONCE.value

    @classmethod
    def of(cls, pattern: TopK, longest: int) -> "Sizes | None":
        """None where there are too few keys for a useful bound, or too many to be searched for one."""
        if pattern.share != "head" or not least_keys(pattern) <= longest <= MOST:
            return None
        always = pattern.sink + pattern.window
        # How many of some keys are sampled has three quarters of its mean for a variance, and the square root of that number
        # a standard deviation which does not depend on the mean.
        deviation = math.sqrt(1 - 1 / SAMPLED.value) / 2
        wanted = math.sqrt(pattern.k / SAMPLED.value)
        room = triton.next_power_of_2(math.ceil(SAMPLED.value * (wanted + 2 * ROOMY * deviation) ** 2) + always)
        most = math.sqrt((room - always) / SAMPLED.value)
        expected = (wanted + min((most - wanted) / 2, SURE * deviation)) ** 2
        samples = -(-longest // SAMPLED.value)
        maxima = triton.next_power_of_2(max(FEWEST_MAXIMA, math.ceil(4 * expected), -(-samples // MAXIMA.keys)))
        if maxima > kernels.BLOCKS_T[-1] or room > LONGEST_LIST:
            return None
        return cls(triton.next_power_of_2(-(-samples // maxima)), maxima, expected, room)


@dataclass(frozen=True)
class Held:
    """What the parts of a prompt share.

    Attributes:
        keys_KSD, sample_KSD: of the request, channels beyond D zero.
        flags_TH: rows that `_alone` has to do.
        scratch: bytes, for one part after another.
    """

    keys_KSD: Tensor
    sample_KSD: Tensor
    flags_TH: Tensor
    scratch: Tensor


def least_keys(pattern: TopK) -> int:
    """Shorter contexts are not for this file: of so few keys, a bound would let through too many."""
    return 4 * pattern.k + pattern.sink + pattern.window


def serves(query_THD: Tensor, cache_BKNC: Tensor, pattern: TopK, scale: float, plain: bool) -> bool:
    """Whether this file is for prompts of this kind.

    Args:
        query_THD, cache_BKNC, pattern, scale: of the call.
        plain: no bias, decay or softcap: scores are products alone.
    """
    _, heads, size = query_THD.shape
    filled = triton.next_power_of_2(heads // cache_BKNC.shape[1]) <= _rows()
    same = query_THD.dtype == cache_BKNC.dtype and query_THD.element_size() == 2
    # A list has 32 bits for the place of a value.
    places = cache_BKNC.shape[0] * cache_BKNC.shape[2] < 2**31
    return plain and scale > 0 and filled and same and places and 16 <= size <= 128 and pattern.share == "head"


def _rows() -> int:
    """Rows of a program."""
    assert MAXIMA.rows == HITS.rows
    return HITS.rows


def fewest_tokens(heads: int, kv_heads: int) -> int:
    """Tokens of a program: a part of a prompt with fewer is not for this file."""
    return max(1, _rows() // triton.next_power_of_2(heads // kv_heads))


def parts(pattern: TopK, heads: int, kv_heads: int, first: int, last: int, memory: int) -> list[tuple[int, int]]:
    """How the tokens at positions from `first` to before `last` of a request are divided.

    Args:
        memory: bytes of the workspace.

    Returns:
        Ranges of positions, one behind the other. What is before or after them is not for this file: contexts that are
        too short or too long, or too few tokens.
    """
    found: list[tuple[int, int]] = []
    whole = fewest_tokens(heads, kv_heads)
    begin = max(first, least_keys(pattern), whole)
    # Tiles are as large as the last token wants them, at most twice as large as the first one does.
    while (stop := min(last, 2 * begin, MOST)) - begin >= whole and (sizes := Sizes.of(pattern, stop)):
        most = _tokens_at_once(sizes, heads, kv_heads, memory)
        equal = -(-(stop - begin) // -(-(stop - begin) // most))
        end = min(stop, begin + -(-equal // whole) * whole)
        found.append((begin, end))
        begin = end
    return found


def _tokens_at_once(sizes: Sizes, heads: int, kv_heads: int, memory: int) -> int:
    whole = fewest_tokens(heads, kv_heads)
    return max(whole, memory // (heads * (_bytes_of_lists(sizes) + _bytes_of_a_row(sizes))) // whole * whole)


def _bytes_of_lists(sizes: Sizes) -> int:
    """Of the entries of a row in a part of the keys, and how many they are."""
    return LISTS.value * (8 * sizes.room_of_a_list + 4)


def _bytes_of_a_row(sizes: Sizes) -> int:
    """Of its maxima and its bound."""
    return 4 * sizes.maxima + 4


def batches_to_compile(pattern: TopK, longest: int) -> list[tuple[int, int, int]]:
    """Requests, query tokens and context: one for each set of kernels."""
    tokens = _rows()
    found: dict[tuple[int, int], int] = {}
    for length in sorted({least_keys(pattern) + 2 * tokens, *(2**n + 1 for n in range(10, 19))}):
        if least_keys(pattern) + tokens < length <= longest and (sizes := Sizes.of(pattern, length)):
            found.setdefault((sizes.tile, sizes.maxima), length)
    return [(1, tokens, length) for length in found.values()]


def workspace_bytes(pattern: TopK, heads: int, kv_heads: int, size: int, tokens: int, longest: int, memory: int) -> int:
    """What `attention` takes at most, for so many tokens or fewer and contexts up to `longest`; 0 if it is never called."""
    length = min(longest, MOST)
    sizes = Sizes.of(pattern, length)
    if sizes is None or tokens < fewest_tokens(heads, kv_heads) or not 16 <= size <= 128:
        return 0
    block_d = triton.next_power_of_2(size)
    keys = 2 * kv_heads * block_d * (_whole(length) + _whole(-(-length // SAMPLED.value)))
    rows = heads * min(tokens, _tokens_at_once(sizes, heads, kv_heads, memory))
    lists = min(MOST_SPLITS * rows, max(rows, HITS.programs * _rows()))
    listed = lists * _bytes_of_lists(sizes) + rows * _bytes_of_a_row(sizes)
    alone = _alone_bytes(heads, kv_heads, length)
    return keys + tokens * heads + max(listed, alone) + 2 * workspace.SLACK


def _alone_rows(heads: int, kv_heads: int) -> int:
    """Rows of a program of `_alone`: as few as a matrix unit takes."""
    return max(16, triton.next_power_of_2(heads // kv_heads))


def _alone_bytes(heads: int, kv_heads: int, longest: int) -> int:
    program = 4 * (_alone_rows(heads, kv_heads) + 1) * _whole(longest)
    return program * max(1, min(ALONE, ALONE_BYTES // program))


def _whole(keys: int) -> int:
    """As many keys, or a few more, so that no kernel stops in the middle of what it does at a time."""
    step = max(MAXIMA.keys, HITS.keys, COPIED, ALONE_KEYS)
    return -(-keys // step) * step


def attention(
    query_THD: Tensor, cache_BKNC: Tensor, table_RP: Tensor, out_THD: Tensor, *,
    request: int, offset: int, ranges: list[tuple[int, int]], scale: float, pattern: TopK,
) -> None:  # fmt: skip
    """Fill the rows of `out_THD` that `ranges` stand for.

    Args:
        query_THD, cache_BKNC, table_RP, out_THD, scale, pattern: of the whole step; see `paged_attention`.
        request: which one, a row of `table_RP`.
        offset: its token at position p is row p + offset.
        ranges: of positions, by `parts`.
    """
    _, heads, size = query_THD.shape
    kv_heads, page = cache_BKNC.shape[1:3]
    group = heads // kv_heads
    begin, longest = ranges[0][0], ranges[-1][1]
    block_d, block_g = triton.next_power_of_2(size), triton.next_power_of_2(group)
    early = kernels.early_launch(query_THD.device)
    held = _hold(query_THD, cache_BKNC, table_RP, request, ranges, pattern)
    options = {"H": heads, "G": group, "D": size, "BLOCK_D": block_d, **early}
    values = (cache_BKNC, table_RP, request * table_RP.stride(0), *cache_BKNC.stride()[:3])
    for first, last in ranges:
        sizes = Sizes.of(pattern, last)
        assert sizes is not None
        rows = last - first
        splits = _splits(rows, heads, kv_heads, last)
        lists, counts, maxima, bounds = workspace.cut(held.scratch, *_scratch(sizes, rows * heads, splits))
        window = (pattern.sink, pattern.window)
        shared = (first + offset, rows, first, *window, query_THD.stride(0), query_THD.stride(1))
        blocks = -(-rows // (_rows() // block_g))
        sampling = max(1, min(-(-last // (SAMPLED.value * MAXIMA.keys)), MAXIMA.programs // (blocks * kv_heads)))
        _maxima[(blocks, kv_heads, sampling)](
            query_THD, held.sample_KSD, maxima, *shared, held.sample_KSD.stride(0), sizes.maxima,
            TILE=sizes.tile, BLOCK_G=block_g, **options, **_compiled(MAXIMA),
        )  # fmt: skip
        _bounds[(rows, heads)](
            maxima, bounds, first, *window, sizes.tile, sizes.expected,
            BLOCK_T=sizes.maxima, num_warps=max(1, sizes.maxima // 1024), **early,
        )  # fmt: skip
        _hits[(blocks, kv_heads, splits)](
            query_THD, held.keys_KSD, bounds, lists, counts, *shared, held.keys_KSD.stride(0), sizes.room_of_a_list,
            BLOCK_G=block_g, ASM=INLINE, **options, **_compiled(HITS),
        )  # fmt: skip
        _attend[(rows, heads)](
            lists, counts, *values, out_THD, held.flags_TH[first - begin :], first + offset, first, scale, pattern.k,
            *window, splits * LISTS.value, sizes.room_of_a_list, out_THD.stride(0), out_THD.stride(1),
            G=group, D=size, N=page, BLOCK_L=sizes.room, BLOCK_N=ATTEND.values, BLOCK_D=block_d,
            num_warps=ATTEND.warps * max(1, sizes.room // 512), num_stages=2, maxnreg=ATTEND.registers, **early,
        )  # fmt: skip
    block_r = _alone_rows(heads, kv_heads)
    rows, width = longest - begin, _whole(longest)
    programs = min(
        held.scratch.numel() // (4 * (block_r + 1) * width), -(-rows // (block_r // block_g)) * kv_heads, ALONE
    )
    _alone[(programs,)](
        query_THD, held.keys_KSD, *values, out_THD, held.flags_TH, held.scratch.view(torch.float32),
        begin + offset, rows, begin, kv_heads, scale, pattern.k, pattern.sink, pattern.window, width,
        query_THD.stride(0), query_THD.stride(1), held.keys_KSD.stride(0), out_THD.stride(0), out_THD.stride(1),
        N=page, BLOCK_G=block_g, BLOCK_R=block_r, BLOCK_S=ALONE_KEYS, BLOCK_E=8192, BLOCK_C=2048, BLOCK_N=64,
        **options, num_warps=8, num_stages=3,
    )  # fmt: skip


def _hold(
    query_THD: Tensor, cache_BKNC: Tensor, table_RP: Tensor, request: int, ranges: list[tuple[int, int]], pattern: TopK
) -> Held:
    """Copy the keys of a request, and take memory for the parts."""
    kv_heads, page = cache_BKNC.shape[1:3]
    heads, size = query_THD.shape[1:]
    begin, longest = ranges[0][0], ranges[-1][1]
    block_d = triton.next_power_of_2(size)
    wanted = [_alone_bytes(heads, kv_heads, longest)]
    for first, last in ranges:
        sizes = Sizes.of(pattern, last)
        assert sizes is not None
        splits = _splits(last - first, heads, kv_heads, last)
        wanted.append(workspace.bytes_of(*_scratch(sizes, (last - first) * heads, splits)))
    keys, sample = _whole(longest), _whole(-(-longest // SAMPLED.value))
    keys_KSD, sample_KSD, flags_TH, scratch = workspace.take(
        query_THD.device,
        ((kv_heads, keys, block_d), query_THD.dtype),
        ((kv_heads, sample, block_d), query_THD.dtype),
        ((longest - begin, heads), torch.int8),
        ((max(wanted),), torch.uint8),
    )
    for copy, step in ((keys_KSD, 1), (sample_KSD, SAMPLED.value)):
        _contiguous[(copy.shape[1] // COPIED, kv_heads)](
            cache_BKNC, table_RP, copy, request * table_RP.stride(0), longest, copy.stride(0), *cache_BKNC.stride()[:3],
            STEP=step, D=size, N=page, BLOCK_S=COPIED, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
    return Held(keys_KSD, sample_KSD, flags_TH, scratch)


def _scratch(sizes: Sizes, rows: int, splits: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Lists and their lengths; maxima and bounds."""
    return [
        ((rows, splits, LISTS.value, sizes.room_of_a_list), torch.int64),
        ((rows, splits, LISTS.value), torch.int32),
        ((rows, sizes.maxima), torch.float32),
        ((rows,), torch.float32),
    ]


def _splits(tokens: int, heads: int, kv_heads: int, keys: int) -> int:
    """Parts of the keys."""
    blocks = -(-tokens // fewest_tokens(heads, kv_heads))
    return max(1, min(MOST_SPLITS, -(-keys // HITS.keys), HITS.programs // (blocks * kv_heads)))


def _compiled(shape: Shape) -> dict[str, Any]:
    """How a kernel that computes scores is compiled."""
    return {
        "BLOCK_M": shape.rows, "BLOCK_S": shape.keys,
        "num_warps": shape.warps, "num_stages": shape.stages, "maxnreg": shape.registers,
    }  # fmt: skip


VARYING = [
    "first_token", "rows", "first_position", "sink", "window", "k", "tile", "lists", "length", "table_at", "kv_heads",
]  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _contiguous(
    cache_ptr, table_ptr, keys_ptr, table_at, length, stride_kv, stride_cb, stride_ch, stride_cn,
    STEP: tl.constexpr, D: tl.constexpr, N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program = BLOCK_S keys of one key/value head."""
    kv = tl.program_id(1)
    i = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    s = i if STEP == 1 else _sampled(i)
    d = tl.arange(0, BLOCK_D)
    block = tl.load(table_ptr + table_at + s // N, mask=s < length, other=0).to(tl.int64)
    k = tl.load(
        cache_ptr + block[:, None] * stride_cb + kv * stride_ch + (s % N)[:, None] * stride_cn + d[None, :],
        mask=(s < length)[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    tl.store(keys_ptr + kv.to(tl.int64) * stride_kv + i[:, None] * BLOCK_D + d[None, :], k)


@triton.jit
def _sampled(i):
    """The position of the i-th sampled key: in each four another one, lest a text that repeats itself be sampled crookedly."""
    # Multiples of the golden ratio, of which the first two bits behind the point count.
    return i * SAMPLED + (((i * -1640531535) >> 30) & 3)


@triton.jit
def _rows_of(
    q_ptr, block, kv, first_token, rows, first_position, stride_qt, stride_qh,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Queries, rows and positions of a block, and its lowest and highest position.

    What is left over computes and stores again what another row does: nothing then needs a mask.
    """
    lowest = block * (BLOCK_M // BLOCK_G)
    highest = tl.minimum(rows, lowest + BLOCK_M // BLOCK_G) - 1
    m = tl.arange(0, BLOCK_M)
    token = tl.minimum(lowest + m // BLOCK_G, highest)
    head = kv * G + tl.minimum(m % BLOCK_G, G - 1)
    d = tl.arange(0, BLOCK_D)
    q = tl.load(
        q_ptr + ((first_token + token).to(tl.int64) * stride_qt + head * stride_qh)[:, None] + d[None, :],
        mask=(d < D)[None, :], other=0.0,
    )  # fmt: skip
    return q, token.to(tl.int64) * H + head, first_position + token, first_position + lowest, first_position + highest


@triton.jit
def _steps(last, BLOCK_S: tl.constexpr):
    """First step of this program's part of the keys, and the one after its last."""
    total = last // BLOCK_S + 1
    each = tl.cdiv(total, tl.num_programs(2))
    low = tl.program_id(2) * each
    return low, tl.minimum(low + each, total)


@triton.jit(do_not_specialize=VARYING)
def _maxima(
    q_ptr, sample_ptr, maxima_ptr, first_token, rows, first_position, sink, window, stride_qt, stride_qh, stride_kv, width,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program = BLOCK_M rows of one key/value head, and a part of the sample: the largest candidate of each tile."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    kv = tl.program_id(1)
    q, row, position, nearest, last = _rows_of(
        q_ptr,
        tl.program_id(0),
        kv,
        first_token,
        rows,
        first_position,
        stride_qt,
        stride_qh,
        H,
        G,
        D,
        BLOCK_G,
        BLOCK_M,
        BLOCK_D,
    )
    REACH: tl.constexpr = BLOCK_S * SAMPLED
    low, high = _steps(last, REACH)
    s = tl.arange(0, BLOCK_S)
    here = sample_ptr + kv.to(tl.int64) * stride_kv + tl.arange(0, BLOCK_D)[:, None] + s[None, :] * BLOCK_D
    PER_STEP: tl.constexpr = BLOCK_S // TILE
    out = maxima_ptr + (row * width)[:, None] + tl.arange(0, PER_STEP)[None, :]
    for step in range(low, high):
        k = tl.load(here + step * (BLOCK_S * BLOCK_D))
        x = tl.dot(q, k)
        # Only tiles at an edge hold what is no candidate: the sink, the window, keys to come.
        if (step * REACH < sink) | ((step + 1) * REACH > nearest - window + 1):
            there = _sampled(step * BLOCK_S + s)
            candidate = (there >= sink)[None, :] & (there[None, :] <= (position - window)[:, None])
            x = tl.where(candidate, x, float("-inf"))
        best = tl.reduce(tl.reshape(x, (BLOCK_M, PER_STEP, TILE)), 2, kernels._largest)
        tl.store(out + step * PER_STEP, best)


@triton.jit(do_not_specialize=VARYING)
def _bounds(
    maxima_ptr, bounds_ptr, first_position, sink, window, tile, expected, BLOCK_T: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program = one row: a bound that about `expected` sampled keys reach, or all if there are too few."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    position = first_position + tl.program_id(0)
    sampled = tl.maximum(position - window + 1 - sink, 1).to(tl.float32) / SAMPLED
    # Some of the expected keys share a tile: what share of the tiles has any?
    share = 1.0 - tl.exp(tile * tl.log(1.0 - tl.minimum(expected / sampled, 0.99)))
    reached = tl.maximum(1.0, sampled / tile * share + 0.5).to(tl.int32)
    bound, _, _, _, _ = kernels._bound(maxima_ptr + row * BLOCK_T, reached, position, tile * SAMPLED, BLOCK_T)
    bound = kernels._float_of(bound)
    tl.store(bounds_ptr + row, tl.where(bound == bound, bound, LOWEST))


@triton.jit(do_not_specialize=VARYING)
def _hits(
    q_ptr, keys_ptr, bounds_ptr, lists_ptr, counts_ptr, first_token, rows, first_position, sink, window,
    stride_qt, stride_qh, stride_kv, room,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_maxima`, for all keys: lists the candidates that reach the bound of their row, the sink and the window.

    Of every eight keys, each pair has a list of its own: so each thread of a matrix unit, which holds two of every eight
    products of a row, can list what it holds without asking the others. An entry has the product in its lower 32 bits and
    the key in the others.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    kv = tl.program_id(1)
    q, row, position, nearest, last = _rows_of(
        q_ptr,
        tl.program_id(0),
        kv,
        first_token,
        rows,
        first_position,
        stride_qt,
        stride_qh,
        H,
        G,
        D,
        BLOCK_G,
        BLOCK_M,
        BLOCK_D,
    )
    low, high = _steps(last, BLOCK_S)
    s = tl.arange(0, BLOCK_S)
    here = keys_ptr + kv.to(tl.int64) * stride_kv + tl.arange(0, BLOCK_D)[:, None] + s[None, :] * BLOCK_D
    pair = tl.arange(0, LISTS)
    bound = tl.broadcast_to(tl.load(bounds_ptr + row)[:, None], (BLOCK_M, LISTS))
    list_of = (row * tl.num_programs(2) + tl.program_id(2))[:, None] * LISTS + pair[None, :]
    entries = (lists_ptr + list_of * room).to(tl.int64)
    keys = tl.broadcast_to(2 * pair[None, :], (BLOCK_M, LISTS))
    count = tl.zeros((BLOCK_M, LISTS), tl.int32)
    for step in range(low, high):
        k = tl.load(here + step * (BLOCK_S * BLOCK_D))
        x = tl.dot(q, k)
        if (step * BLOCK_S < sink) | ((step + 1) * BLOCK_S > nearest - window + 1):
            there = step * BLOCK_S + s
            candidate = (there >= sink)[None, :] & (there[None, :] <= (position - window)[:, None])
            always = tl.where(candidate | (there[None, :] > position[:, None]), float("-inf"), x)
            count = _append(
                always,
                tl.full((BLOCK_M, LISTS), LOWEST, tl.float32),
                entries,
                keys + step * BLOCK_S,
                count,
                room,
                BLOCK_M,
                ASM,
            )
            x = tl.where(candidate, x, float("-inf"))
        count = _append(x, bound, entries, keys + step * BLOCK_S, count, room, BLOCK_M, ASM)
    tl.store(counts_ptr + list_of, count)


@triton.jit
def _append(x, bound, entries, keys, count, room, BLOCK_M: tl.constexpr, ASM: tl.constexpr):
    """List what reaches the bound of 64 products of each row; returns how many are listed then, more than fit perhaps."""
    # A list that is full goes on at its end, so that nothing else is overwritten.
    before = tl.minimum(count, room - MOST_AT_ONCE)
    x = tl.permute(tl.reshape(x, (BLOCK_M, 2, 2, 2, LISTS, 2)), (0, 4, 5, 3, 2, 1))
    after = _append_each(x, bound, entries, keys, before, 32, ASM)
    return count + after - before


@triton.jit
def _append_each(x, bound, entries, keys, place, STEP: tl.constexpr, ASM: tl.constexpr):
    """One product of each list after the other; those in the two halves of the last axis are STEP keys apart."""
    if STEP == 0:
        if ASM:
            return tl.inline_asm_elementwise(
                """{ .reg .pred p; .reg .b64 a;
                setp.geu.f32 p, $2, $3; mad.wide.s32 a, $5, 8, $1; @p st.global.v2.b32 [a], {$2, $4};
                mov.u32 $0, $5; @p add.u32 $0, $5, 1; }""",
                "=r,l,f,f,r,r", [entries, x, bound, keys, place], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        wanted = (x < bound) == 0  # NaN too
        entry = (keys.to(tl.int64) << 32) | (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
        tl.store((entries + place * 8).to(tl.pointer_type(tl.int64)), entry, mask=wanted)
        return place + wanted.to(tl.int32)
    else:  # noqa: RET505  which one is decided when the kernel is compiled
        # The halves of the axes in turn: 4, 2 and 1 eights, and the two of a pair.
        near, far = tl.split(x)
        NEXT: tl.constexpr = 1 if STEP == 8 else 0 if STEP == 1 else STEP // 2
        place = _append_each(near, bound, entries, keys, place, NEXT, ASM)
        return _append_each(far, bound, entries, keys + STEP, place, NEXT, ASM)


@triton.jit(do_not_specialize=VARYING)
def _attend(
    lists_ptr, counts_ptr, cache_ptr, table_ptr, table_at, stride_cb, stride_ch, stride_cn, out_ptr, flags_ptr,
    first_token, first_position, scale, k, sink, window, lists, room, stride_ot, stride_oh,
    G: tl.constexpr, D: tl.constexpr, N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program = one row: what of its lists is kept, and the weighted sum of its values, unless the row is flagged."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    token, head = tl.program_id(0), tl.program_id(1)
    row = token.to(tl.int64) * tl.num_programs(1) + head
    position = first_position + token
    lists_ptr += row * lists * room
    e = tl.arange(0, BLOCK_L)
    listed = tl.zeros((BLOCK_L,), tl.int64)
    count = tl.full((), 0, tl.int32)
    most = tl.full((), 0, tl.int32)
    for i in range(lists):
        here = tl.load(counts_ptr + row * lists + i)
        inside = (e >= count) & (e < count + here)
        listed = tl.load(lists_ptr + i * room + e - count, mask=inside, other=0) | listed
        count += here
        most = tl.maximum(most, here)
    s = (listed >> 32).to(tl.int32)
    x = listed.to(tl.int32).to(tl.float32, bitcast=True)
    candidate = (e < count) & (s >= sink) & (s <= position - window)
    key = tl.where(candidate, kernels._ordered(x), -2147483648)
    hits = tl.sum(candidate.to(tl.int32))
    wanted = tl.minimum(k, tl.maximum(position - window + 1 - sink, 0))
    bad = (count > BLOCK_L) | (most > room - MOST_AT_ONCE) | (hits < wanted)
    tl.store(flags_ptr + row, bad.to(tl.int8))
    if bad:
        return
    low = tl.min(tl.where(candidate, key, 2147483647))
    threshold = kernels._halved(key, hits, low, tl.max(key), k)
    keep = (e < count) & ((key >= threshold) | (candidate == 0))
    x = tl.where(keep, x * scale, float("-inf"))
    weight = tl.exp(x - tl.max(x))
    total = tl.sum(weight)
    kept = tl.sum(keep.to(tl.int32))
    place = tl.cumsum(keep.to(tl.int32)) - 1
    block = tl.load(table_ptr + table_at + s // N, mask=keep, other=0).to(tl.int64)
    # What is kept, in the place of the first list: weights and where the values are.
    kept_entry = ((block * N + s % N) << 32) | (weight.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    tl.debug_barrier()  # other threads of the program have read the list, and what they store is read next
    tl.store(lists_ptr + place, kept_entry, mask=keep)
    tl.debug_barrier()
    values_ptr = cache_ptr + (head // G) * stride_ch + D
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for begin in range(0, kept, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        entry = tl.load(lists_ptr + n, mask=n < kept, other=0)
        slot = (entry >> 32) & 0xFFFFFFFF
        v = tl.load(
            values_ptr + (slot // N)[:, None] * stride_cb + (slot % N)[:, None] * stride_cn + d[None, :],
            mask=(n < kept)[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        acc += tl.sum(entry.to(tl.int32).to(tl.float32, bitcast=True)[:, None] * v.to(tl.float32), axis=0)
    out = out_ptr + (first_token + token).to(tl.int64) * stride_ot + head * stride_oh + d
    tl.store(out, (acc / total).to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=VARYING)
def _alone(
    q_ptr, keys_ptr, cache_ptr, table_ptr, table_at, stride_cb, stride_ch, stride_cn, out_ptr, flags_ptr, scores_ptr,
    first_token, rows, first_position, kv_heads, scale, k, sink, window, width,
    stride_qt, stride_qh, stride_kv, stride_ot, stride_oh,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program = BLOCK_R rows, and then others, of which it does those that are flagged."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    TOKENS: tl.constexpr = BLOCK_R // BLOCK_G
    scores_ptr += tl.program_id(0).to(tl.int64) * ((BLOCK_R + 1) * width)
    s = tl.arange(0, BLOCK_S)
    m = tl.arange(0, BLOCK_R)
    for i in range(tl.program_id(0), tl.cdiv(rows, TOKENS) * kv_heads, tl.num_programs(0)):
        block, kv = i // kv_heads, i % kv_heads
        q, row, _, nearest, last = _rows_of(
            q_ptr,
            block,
            kv,
            first_token,
            rows,
            first_position,
            stride_qt,
            stride_qh,
            H,
            G,
            D,
            BLOCK_G,
            BLOCK_R,
            BLOCK_D,
        )
        if tl.max(tl.load(flags_ptr + row).to(tl.int32)) > 0:
            here = keys_ptr + kv.to(tl.int64) * stride_kv + tl.arange(0, BLOCK_D)[:, None] + s[None, :] * BLOCK_D
            for step in range(last // BLOCK_S + 1):
                x = tl.dot(q, tl.load(here + step * (BLOCK_S * BLOCK_D))) * scale
                tl.store(scores_ptr + (m * width)[:, None] + (step * BLOCK_S + s)[None, :], x)
            tl.debug_barrier()  # what other threads of the program stored is read next
            for r in range(BLOCK_R):
                token = nearest - first_position + r // BLOCK_G
                head = kv * G + r % BLOCK_G
                mine = (token < rows) & (r % BLOCK_G < G)
                if tl.load(flags_ptr + token.to(tl.int64) * H + head, mask=mine, other=0) > 0:
                    out = out_ptr + (first_token + token).to(tl.int64) * stride_ot + head * stride_oh
                    _one_row(
                        scores_ptr + r * width, (scores_ptr + BLOCK_R * width).to(tl.pointer_type(tl.int32)),
                        cache_ptr + kv * stride_ch + D, table_ptr + table_at, out, stride_cb, stride_cn,
                        k, sink, window, first_position + token, D, N, BLOCK_E, BLOCK_C, BLOCK_N, BLOCK_D,
                    )  # fmt: skip
            tl.debug_barrier()  # what was read may be overwritten now


@triton.jit
def _one_row(
    scores_ptr, places_ptr, values_ptr, table_ptr, out_ptr, stride_cb, stride_cn, k, sink, window, position,
    D: tl.constexpr, N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Top-k attention of a row all of whose scores are stored; those that are kept take the places of the first ones."""
    least, most = tl.full((), 2147483647, tl.int32), tl.full((), -2147483648, tl.int32)
    for begin in range(0, position + 1, BLOCK_E):
        key, candidate = _candidates_of(scores_ptr, begin, sink, window, position, BLOCK_E)
        least = tl.minimum(least, tl.min(tl.where(candidate, key, 2147483647)))
        most = tl.maximum(most, tl.max(key))
    count = tl.maximum(position - window + 1 - sink, 0)
    low, high = least.to(tl.int64), most.to(tl.int64) + 1
    while (count > k) & (high - low > 1):
        middle = (low + high) // 2
        reach = tl.full((), 0, tl.int32)
        for begin in range(0, position + 1, BLOCK_E):
            key, _ = _candidates_of(scores_ptr, begin, sink, window, position, BLOCK_E)
            reach += tl.sum((key >= middle.to(tl.int32)).to(tl.int32))
        enough = reach >= k
        low = tl.where(enough, middle, low)
        count = tl.where(enough, reach, count)
        high = tl.where(enough, high, middle)
    threshold = low.to(tl.int32)
    kept = tl.full((), 0, tl.int32)
    top = tl.full((), float("-inf"), tl.float32)
    for begin in range(0, position + 1, BLOCK_C):
        s = begin + tl.arange(0, BLOCK_C)
        x = tl.load(scores_ptr + s, mask=s <= position, other=0.0)
        always = (s < sink) | (s > position - window)
        keep = (s <= position) & (always | (kernels._ordered(x) >= threshold))
        place = kept + tl.cumsum(keep.to(tl.int32)) - 1
        tl.debug_barrier()  # all have read these scores, some of which are overwritten now
        tl.store(scores_ptr + place, x, mask=keep)
        tl.store(places_ptr + place, s, mask=keep)
        top = tl.maximum(top, tl.max(tl.where(keep, x, float("-inf"))))
        kept += tl.sum(keep.to(tl.int32))
    tl.debug_barrier()
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for begin in range(0, kept, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        s = tl.load(places_ptr + n, mask=n < kept, other=0)
        p = tl.exp(tl.load(scores_ptr + n, mask=n < kept, other=float("-inf")) - top)
        block = tl.load(table_ptr + s // N, mask=n < kept, other=0).to(tl.int64)
        v = tl.load(
            values_ptr + block[:, None] * stride_cb + (s % N)[:, None] * stride_cn + d[None, :],
            mask=(n < kept)[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        acc += tl.sum(p[:, None] * v.to(tl.float32), axis=0)
        total += tl.sum(p)
    tl.store(out_ptr + d, (acc / total).to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _candidates_of(scores_ptr, begin, sink, window, position, BLOCK_E: tl.constexpr):
    """Some scores of a row as integers, the smallest one for what is no candidate, and which are."""
    s = begin + tl.arange(0, BLOCK_E)
    candidate = (s >= sink) & (s <= position - window)
    x = tl.load(scores_ptr + s, mask=candidate, other=0.0)
    return tl.where(candidate, kernels._ordered(x), -2147483648), candidate
