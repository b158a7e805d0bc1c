"""Exact top-k attention for long prompts whose heads choose for themselves: the function that calls topk_prompt_kernels.py.

Storing every score of a prompt takes longer than computing it. A bound for each row, guessed from a sample of the keys, tells
which can matter:

1. `_contiguous`: the keys of the request, copied out of its pages, and again one of every SAMPLED.
2. `_maxima`: the largest candidate score of each tile of sampled keys, for every row.
3. `_bounds`: the bound that by these scores somewhat more keys reach than are wanted, but fewer than a list has room for.
4. `_hits`: all scores; those that reach the bound are listed with their keys, and the sink and the window.
5. `_attend`: the exact threshold among what is listed, the softmax weights, and the weighted sum of the values.
6. `_alone`: rows whose guess was bad, because too few keys reach the bound or too many. All their scores are stored and searched.

What is listed are all keys that reach the bound, so wherever they are enough they hold the k largest: a guess decides how
fast a row is, not what it is. If keys are drawn independently, 2 or 3 rows of 10,000 are guessed badly (docs/log.md).

Legend: T packed query tokens, H query heads, KV key/value heads, G query heads per key/value head, D head size, N tokens
per block, S keys of the request, rounded up. A row is a token and a query head.
"""

import math
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiers.reference.config import TopK
from tiers.vllm_model.ops import topk_kernels as kernels
from tiers.vllm_model.ops import workspace
from tiers.vllm_model.ops.topk_prompt_kernels import (
    LISTS,
    MOST_AT_ONCE,
    SAMPLED,
    _alone,
    _attend,
    _bounds,
    _contiguous,
    _hits,
    _maxima,
)


class Shape(NamedTuple):
    """Of a kernel that computes scores: query rows and keys at a time, how it is compiled, and programs at most."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int
    programs: int


class Attend(NamedTuple):
    """Of `_attend`: values at a time and warps for lists of 512, and registers."""

    values: int
    warps: int
    registers: int


# The best of those tried (docs/log.md), for `_maxima` and `_hits`. Two programs on each multiprocessor of an H200, twice.
SHAPE = Shape(128, 64, 8, 3, 128, 528)
ATTEND = Attend(32, 1, 96)

# Tiles of a row, at least: as many as `_bounds` searches in hardly more time than fewer. Entries of a list, at most: one program
# has them in registers.
FEWEST_TILES, LONGEST_LIST = 512, 8192

# How far the guess keeps away from too few keys, and a list from being too short, in standard deviations.
SURE, ROOMY = 4.2, 3.5

# Keys that a program of `_contiguous` copies.
COPIED = 64

# Parts of the keys that a row has lists of its own for, at most: with few rows, one after another would take long.
MOST_SPLITS = 16

# Programs of `_alone`, each with all scores of a few rows, and keys that one multiplies at a time.
ALONE, ALONE_KEYS = 264, 128

# What more programs than needed, of `_alone` and with lists of their own, may take of the workspace.
SPARED_BYTES = 2**28

# The longest context: more keys are not copied.
MOST = 2**19

# Entries are stored by an instruction of our own: Triton would first bring all products into another order, by way of shared
# memory, though few are wanted. The interpreter knows Triton's only.
INLINE = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@dataclass(frozen=True)
class Sizes:
    """How the rows of a prompt are done.

    Attributes:
        tiles: of a row, a power of two, each with a maximum.
        expected: sampled keys that should reach the bound.
        room: entries of all lists of a row that are of use, a power of two.
    """

    tiles: int
    expected: float
    room: int

    @property
    def room_of_a_list(self) -> int:
        """With a quarter more than its share, since keys do not fall on lists evenly, and what may not be filled."""
        return self.room * 5 // (4 * LISTS.value) + MOST_AT_ONCE.value

    @classmethod
    def of(cls, pattern: TopK) -> "Sizes | None":
        """None for patterns that are not for this file."""
        if pattern.share != "head":
            return None
        always = pattern.sink + pattern.window
        # How many of some keys are sampled has three quarters of its mean for a variance, and the square root of that number
        # a standard deviation which does not depend on the mean.
        deviation = math.sqrt(1 - 1 / SAMPLED.value) / 2
        wanted = math.sqrt(pattern.k / SAMPLED.value)
        room = triton.next_power_of_2(math.ceil(SAMPLED.value * (wanted + 2 * ROOMY * deviation) ** 2) + always)
        most = math.sqrt((room - always) / SAMPLED.value)
        expected = (wanted + min((most - wanted) / 2, SURE * deviation)) ** 2
        tiles = triton.next_power_of_2(max(FEWEST_TILES, math.ceil(4 * expected)))
        return cls(tiles, expected, room) if tiles <= kernels.BLOCKS_T[-1] and room <= LONGEST_LIST else None


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
    filled = triton.next_power_of_2(heads // cache_BKNC.shape[1]) <= SHAPE.rows
    same = query_THD.dtype == cache_BKNC.dtype and query_THD.element_size() == 2
    # A list has 32 bits for the place of a value.
    places = cache_BKNC.shape[0] * cache_BKNC.shape[2] < 2**31
    return plain and scale > 0 and filled and same and places and 16 <= size <= 128 and Sizes.of(pattern) is not None


def fewest_tokens(heads: int, kv_heads: int) -> int:
    """Tokens of a program: a part of a prompt with fewer is not for this file."""
    return max(1, SHAPE.rows // triton.next_power_of_2(heads // kv_heads))


def parts(pattern: TopK, heads: int, kv_heads: int, first: int, last: int, memory: int) -> list[tuple[int, int]]:
    """How the tokens at positions from `first` to before `last` of a request are divided.

    Args:
        memory: bytes of the workspace.

    Returns:
        Ranges of positions, one behind the other. What is before or after them is not for this file: contexts that are
        too short or too long, or too few tokens.
    """
    whole = fewest_tokens(heads, kv_heads)
    begin, stop = max(first, least_keys(pattern), whole), min(last, MOST)
    sizes = Sizes.of(pattern)
    if sizes is None or stop - begin < whole:
        return []
    most = _tokens_at_once(sizes, heads, kv_heads, memory)
    equal = -(-(stop - begin) // -(-(stop - begin) // most))
    size = -(-equal // whole) * whole
    found = [(at, min(at + size, stop)) for at in range(begin, stop, size)]
    return found if found[-1][1] - found[-1][0] >= whole else found[:-1]


def _tokens_at_once(sizes: Sizes, heads: int, kv_heads: int, memory: int) -> int:
    whole = fewest_tokens(heads, kv_heads)
    return max(whole, memory // (heads * (_bytes_of_lists(sizes) + _bytes_of_a_row(sizes))) // whole * whole)


def _bytes_of_lists(sizes: Sizes) -> int:
    """Of the entries of a row in a part of the keys, and how many they are."""
    return LISTS.value * (8 * sizes.room_of_a_list + 4)


def _bytes_of_a_row(sizes: Sizes) -> int:
    """Of its maxima and its bound."""
    return 4 * sizes.tiles + 4


def batches_to_compile(pattern: TopK, longest: int) -> list[tuple[int, int, int]]:
    """Requests, query tokens and context that all kernels serve."""
    length = least_keys(pattern) + 2 * SHAPE.rows
    return [(1, SHAPE.rows, length)] if length <= longest and Sizes.of(pattern) else []


def workspace_bytes(pattern: TopK, heads: int, kv_heads: int, size: int, tokens: int, longest: int, memory: int) -> int:
    """What `attention` takes at most, for so many tokens or fewer and contexts up to `longest`; 0 if it is never called."""
    length = min(longest, MOST)
    sizes = Sizes.of(pattern)
    never = length < least_keys(pattern) or tokens < fewest_tokens(heads, kv_heads) or not 16 <= size <= 128
    if sizes is None or never:
        return 0
    block_d = triton.next_power_of_2(size)
    keys = 2 * kv_heads * block_d * (_whole(length) + _sample(sizes, length))
    rows = heads * min(tokens, _tokens_at_once(sizes, heads, kv_heads, memory))
    lists = rows * _bytes_of_lists(sizes)
    listed = max(lists, min(MOST_SPLITS * lists, SPARED_BYTES)) + rows * _bytes_of_a_row(sizes)
    # Shorter contexts may have more programs that take more together.
    program = _alone_bytes(heads, kv_heads, length)
    alone = max(program, min(ALONE * program, SPARED_BYTES))
    return keys + tokens * heads + max(listed, alone) + 2 * workspace.SLACK


def _alone_rows(heads: int, kv_heads: int) -> int:
    """Rows of a program of `_alone`: as few as a matrix unit takes."""
    return max(16, triton.next_power_of_2(heads // kv_heads))


def _alone_bytes(heads: int, kv_heads: int, longest: int) -> int:
    """Of a program of `_alone`: scores of its rows, and which keys are kept of one."""
    return 4 * (_alone_rows(heads, kv_heads) + 1) * _whole(longest)


def _whole(keys: int) -> int:
    """As many keys, or a few more, so that no kernel stops in the middle of what it does at a time."""
    step = max(SHAPE.keys, COPIED, ALONE_KEYS)
    return -(-keys // step) * step


def _sample(sizes: Sizes, keys: int) -> int:
    """Sampled keys, rounded up to as many for every tile."""
    return -(-keys // (SAMPLED.value * sizes.tiles)) * sizes.tiles


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
    sizes = Sizes.of(pattern)
    assert sizes is not None
    # Each warp has values of its own to add up: their sums are put together once for all that are read at a time.
    longer = max(1, sizes.room // 512)
    held = _hold(query_THD, cache_BKNC, table_RP, request, ranges, sizes)
    options = {"H": heads, "G": group, "D": size, "BLOCK_D": block_d, "BLOCK_G": block_g, **early}
    compiled = {
        "BLOCK_M": SHAPE.rows, "BLOCK_S": SHAPE.keys,
        "num_warps": SHAPE.warps, "num_stages": SHAPE.stages, "maxnreg": SHAPE.registers,
    }  # fmt: skip
    values = (cache_BKNC, table_RP, request * table_RP.stride(0), *cache_BKNC.stride()[:3])
    for first, last in ranges:
        rows = last - first
        splits = _splits(sizes, rows, heads, kv_heads, last)
        lists, counts, maxima, bounds = workspace.cut(held.scratch, *_scratch(sizes, rows * heads, splits))
        window = (pattern.sink, pattern.window)
        shared = (first + offset, rows, first, *window, query_THD.stride(0), query_THD.stride(1))
        blocks = -(-rows // fewest_tokens(heads, kv_heads))
        groups = max(1, min(sizes.tiles // SHAPE.keys, SHAPE.programs // (blocks * kv_heads)))
        _maxima[(blocks, kv_heads, groups)](
            query_THD, held.sample_KSD, maxima, *shared, held.sample_KSD.stride(0),
            TILES=sizes.tiles, **options, **compiled,
        )  # fmt: skip
        _bounds[(rows, heads)](
            maxima, bounds, first, *window, sizes.expected,
            TILES=sizes.tiles, num_warps=max(1, sizes.tiles // 1024), **early,
        )  # fmt: skip
        _hits[(blocks, kv_heads, splits)](
            query_THD, held.keys_KSD, bounds, lists, counts, *shared, held.keys_KSD.stride(0), sizes.room_of_a_list,
            ASM=INLINE, **options, **compiled,
        )  # fmt: skip
        _attend[(rows, heads)](
            lists, counts, *values, out_THD, held.flags_TH[first - begin :], first + offset, first, scale, pattern.k,
            *window, splits * LISTS.value, sizes.room_of_a_list, out_THD.stride(0), out_THD.stride(1),
            G=group, D=size, N=page, BLOCK_L=sizes.room, BLOCK_N=ATTEND.values * longer, BLOCK_D=block_d,
            num_warps=ATTEND.warps * longer, num_stages=2, maxnreg=ATTEND.registers, **early,
        )  # fmt: skip
    block_r = _alone_rows(heads, kv_heads)
    rows, width = longest - begin, _whole(longest)
    room = held.scratch.numel() // _alone_bytes(heads, kv_heads, longest)
    programs = min(room, -(-rows // (block_r // block_g)) * kv_heads, ALONE)
    _alone[(programs,)](
        query_THD, held.keys_KSD, *values, out_THD, held.flags_TH, held.scratch.view(torch.float32),
        begin + offset, rows, begin, kv_heads, scale, pattern.k, pattern.sink, pattern.window, width,
        query_THD.stride(0), query_THD.stride(1), held.keys_KSD.stride(0), out_THD.stride(0), out_THD.stride(1),
        N=page, BLOCK_R=block_r, BLOCK_S=ALONE_KEYS, BLOCK_E=8192, BLOCK_C=2048, BLOCK_N=64,
        **options, num_warps=8, num_stages=3,
    )  # fmt: skip


def _hold(
    query_THD: Tensor, cache_BKNC: Tensor, table_RP: Tensor, request: int, ranges: list[tuple[int, int]], sizes: Sizes
) -> Held:
    """Copy the keys of a request, and take memory for the parts."""
    kv_heads, page = cache_BKNC.shape[1:3]
    heads, size = query_THD.shape[1:]
    begin, longest = ranges[0][0], ranges[-1][1]
    block_d = triton.next_power_of_2(size)
    program = _alone_bytes(heads, kv_heads, longest)
    wanted = [program * max(1, min(ALONE, SPARED_BYTES // program))]
    for first, last in ranges:
        splits = _splits(sizes, last - first, heads, kv_heads, last)
        wanted.append(workspace.bytes_of(*_scratch(sizes, (last - first) * heads, splits)))
    keys_KSD, sample_KSD, flags_TH, scratch = workspace.take(
        query_THD.device,
        ((kv_heads, _whole(longest), block_d), query_THD.dtype),
        ((kv_heads, _sample(sizes, longest), block_d), query_THD.dtype),
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
        ((rows, sizes.tiles), torch.float32),
        ((rows,), torch.float32),
    ]


def _splits(sizes: Sizes, tokens: int, heads: int, kv_heads: int, keys: int) -> int:
    """Parts of the keys."""
    blocks = -(-tokens // fewest_tokens(heads, kv_heads))
    room = SPARED_BYTES // (tokens * heads * _bytes_of_lists(sizes))
    return max(1, min(MOST_SPLITS, -(-keys // SHAPE.keys), SHAPE.programs // (blocks * kv_heads), room))
