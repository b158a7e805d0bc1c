"""Exact top-k attention for long prompts whose heads choose for themselves, in Triton: scores are computed twice.

Storing every score of a prompt takes longer than computing it, so only those that can matter are stored:

1. `_contiguous`: the keys of the request, copied out of its pages.
2. `_maxima`: the largest candidate score of each tile of keys, for every row.
3. `_bounds`: the k-th largest of those, below which no key is chosen (see topk_attention.py).
4. `_hits`: the scores again; those that reach the bound are stored where all would be, with a bit for each. There are at
   least two tiles for each key that is wanted, so about 1.4 k of them if scores are independent.
5. `_choose_hits`: lists what the bits mark and goes on as `_choose` does; `_gather` reads the values.

Legend: T packed query tokens, H query heads, KV key/value heads, G query heads per key/value head, D head size, N tokens
per block, S keys of the request, rounded up. A row is a token and a query head.
"""

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


# The best of those tried (docs/log.md). Two programs on each multiprocessor of an H200, twice.
MAXIMA = Shape(128, 64, 8, 3, 128, 528)
HITS = Shape(128, 64, 8, 3, 128, 528)

# Keys per maximum; the kernels are compiled for each.
TILES = (2, 4, 8, 16, 32, 64)

# Warps and registers of `_choose_hits` for lists of 512.
CHOOSE_WARPS, CHOOSE_REGISTERS = 2, 80

# Tiles for each key that is wanted, at least.
RATIO = 2

# Keys that a program of `_contiguous` copies.
COPIED = 64

# The longest context.
MOST = kernels.BLOCKS_T[-1] * TILES[-1]

# Bits in a word.
WORD = tl.constexpr(32)

# Scores are stored by an instruction of our own: Triton's store would first bring all of them into another order, by way
# of shared memory, though few are wanted. The interpreter knows Triton's only.
INLINE = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@dataclass(frozen=True)
class Sizes:
    """Of the tensors of a part of a prompt.

    Attributes:
        tile: keys per maximum.
        width: scores of a row, a multiple of what a kernel does at a time.
        candidates, kept: as of topk_attention.Sizes.
    """

    tile: int
    width: int
    candidates: int
    kept: int

    @classmethod
    def of(cls, pattern: TopK, longest: int) -> "Sizes | None":
        """None where there are too few keys for a useful bound, or too many to be searched for one."""
        width = _whole(longest)
        tile = next((tile for tile in reversed(TILES) if longest >= RATIO * pattern.k * tile), None)
        if pattern.share != "head" or tile is None or width // tile > kernels.BLOCKS_T[-1]:
            return None
        # More than elsewhere: a tile that reaches the bound may hold that many keys that do, and a list costs little here.
        candidates = min(width, 8 * triton.next_power_of_2(max(pattern.k, 128)))
        return cls(tile, width, candidates, min(width, pattern.k + pattern.sink + pattern.window + kernels.SPARE))

    def bytes_per_row(self, pattern: TopK) -> int:
        """Scores, maxima, bounds; words of bits, ids of tiles; lists as of topk_attention.Sizes. Never less for more keys."""
        most = max(self.width // TILES[-1], min(self.width, 2 * RATIO * pattern.k) + TILES[-1])
        words, ids = 4 * (self.width // 32), 4 * (self.width // kernels.TILE)
        return 4 * self.width + 4 * most + 8 + words + ids + 8 * self.candidates + 16 * self.kept + 32

    @property
    def block_t(self) -> int:
        """Maxima that `_bounds` is compiled for."""
        return triton.next_power_of_2(max(512, self.width // self.tile + 1))


@dataclass(frozen=True)
class Held:
    """What the parts of a prompt share.

    Attributes:
        keys_KSD: of the request, channels beyond D zero.
        table_RP, request: blocks of all requests, and which one this is.
        page: N.
        scratch: bytes, for one part after another.
    """

    keys_KSD: Tensor
    table_RP: Tensor
    request: int
    page: int
    scratch: Tensor


def serves(query_THD: Tensor, cache_BKNC: Tensor, pattern: TopK, tokens: int, seen: int, plain: bool) -> bool:
    """Whether this file is for a part of a prompt.

    Args:
        query_THD, cache_BKNC, pattern: of the call.
        tokens: query tokens of the part.
        seen: keys that its last token sees.
        plain: no bias, decay or softcap: scores are products alone.
    """
    _, heads, size = query_THD.shape
    block_g = triton.next_power_of_2(heads // cache_BKNC.shape[1])
    filled = block_g <= min(MAXIMA.rows, HITS.rows) and tokens * block_g >= most_rows()
    same = query_THD.dtype == cache_BKNC.dtype and query_THD.element_size() == 2
    return plain and filled and same and 16 <= size <= 128 and Sizes.of(pattern, seen) is not None


def most_rows() -> int:
    """Rows of a program: a part of a prompt with fewer is not for this file."""
    return max(MAXIMA.rows, HITS.rows)


def _whole(keys: int) -> int:
    """As many keys, or a few more, so that no kernel stops in the middle of what it does at a time."""
    step = max(MAXIMA.keys, HITS.keys, COPIED)
    return -(-keys // step) * step


def tokens_per_program(heads: int, kv_heads: int) -> int:
    """Parts of a prompt are multiples of this."""
    return max(1, most_rows() // triton.next_power_of_2(heads // kv_heads))


def lengths_to_compile(pattern: TopK, longest: int) -> list[int]:
    """Contexts, one for each set of kernels."""
    first = [RATIO * pattern.k * tile for tile in TILES]
    more = [2**n * tile + 1 for n in range(9, 13) for tile in TILES]
    found: dict[tuple[int, int], int] = {}
    for length in sorted(n for n in (*first, *more) if n <= longest):
        if sizes := Sizes.of(pattern, length):
            found.setdefault((sizes.tile, sizes.block_t), length)
    return list(found.values())


def bytes_per_row(pattern: TopK, longest: int) -> int:
    """Bytes of a row at most; 0 where `serves` is never true."""
    sizes = Sizes.of(pattern, longest)
    return sizes.bytes_per_row(pattern) if sizes else 0


def keys_bytes(pattern: TopK, kv_heads: int, size: int, tokens: int, longest: int) -> int:
    """Bytes of the copied keys; 0 where `serves` is never true."""
    length = min(longest, MOST)
    if tokens < 2 or size > 128 or Sizes.of(pattern, length) is None:
        return 0
    return 2 * kv_heads * _whole(length) * triton.next_power_of_2(size) + workspace.SLACK


def hold(
    query_THD: Tensor, cache_BKNC: Tensor, table_RP: Tensor, request: int, pattern: TopK, rows: int, longest: int
) -> Held:
    """Copy the keys of a request, and take memory for parts of so many tokens at most."""
    kv_heads, page = cache_BKNC.shape[1:3]
    heads, size = query_THD.shape[1:]
    length = min(longest, MOST)
    block_d = triton.next_power_of_2(size)
    shape = (kv_heads, _whole(length), block_d)
    part = rows * heads * bytes_per_row(pattern, length) + workspace.SLACK
    keys_KSD, scratch = workspace.take(query_THD.device, (shape, query_THD.dtype), ((part,), torch.uint8))
    _contiguous[(shape[1] // COPIED, kv_heads)](
        cache_BKNC, table_RP, keys_KSD, request * table_RP.stride(0), length, keys_KSD.stride(0), *cache_BKNC.stride()[:3],
        D=size, N=page, BLOCK_S=COPIED, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return Held(keys_KSD, table_RP, request, page, scratch)


def choose(
    query_THD: Tensor, held: Held, start: int, end: int, seen: int, *, scale: float, pattern: TopK
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which keys a part of a prompt keeps.

    Args:
        query_THD: of the whole step.
        held: of the request.
        start, end: the query tokens of the part.
        seen: keys that the last of them sees.
        scale, pattern: as of `paged_attention`.

    Returns:
        ranks [T, H, S], of which few are written, and lists of weights, of slots and what is known of each row: see
        topk_kernels.py; valid until the next call.
    """
    sizes = Sizes.of(pattern, seen)
    assert sizes is not None
    rows, (heads, size) = end - start, query_THD.shape[1:]
    kv_heads, _, block_d = held.keys_KSD.shape
    width, tiles = sizes.width, sizes.width // sizes.tile
    ranks, maxima, bounds, words, ids, listed, keys, weights, slots, summary = workspace.cut(
        held.scratch,
        ((rows, heads, width), torch.float32),
        ((rows, heads, tiles), torch.float32),
        ((rows, heads, 2), torch.int32),
        ((rows, heads, width // 32), torch.int32),
        ((rows, heads, width // kernels.TILE), torch.int32),
        ((rows, heads, sizes.candidates), torch.int32),
        ((rows, heads, sizes.candidates), torch.float32),
        ((rows, heads, sizes.kept), torch.float32),
        ((rows, heads, sizes.kept), torch.int64),
        ((rows, heads, 4), torch.int32),
    )
    group = heads // kv_heads
    early = kernels.early_launch(query_THD.device)
    position = seen - rows
    given = (query_THD, held.keys_KSD)
    shared = (
        start, rows, position, scale, pattern.sink, pattern.window,
        query_THD.stride(0), query_THD.stride(1), held.keys_KSD.stride(0), width,
    )  # fmt: skip
    options = {"H": heads, "G": group, "D": size, "BLOCK_G": triton.next_power_of_2(group), "BLOCK_D": block_d, **early}
    grid, own = _launch(MAXIMA, rows, group, kv_heads, width)
    _maxima[grid](*given, maxima, *shared, TILE=sizes.tile, **options, **own)
    _bounds[(rows, heads)](
        maxima, bounds, pattern.k, position, tiles, sizes.tile,
        BLOCK_T=sizes.block_t, num_warps=max(1, sizes.block_t // 2048), **early,
    )  # fmt: skip
    grid, own = _launch(HITS, rows, group, kv_heads, width)
    _hits[grid](*given, bounds, ranks, words, *shared, ASM=INLINE, **options, **own)
    block_l = min(4096, max(512, triton.next_power_of_2(2 * pattern.k)))
    _choose_hits[(rows, heads)](
        ranks, words, bounds, held.table_RP, ids, listed, keys, weights, slots, summary,
        held.request * held.table_RP.stride(0), position, pattern.k, pattern.sink, pattern.window, width, sizes.candidates, sizes.kept,
        N=held.page, TILE=kernels.TILE, BLOCK_W=256, BLOCK_L=block_l, BLOCK_E=256, ASM=INLINE,
        num_warps=CHOOSE_WARPS * max(1, block_l // 512), num_stages=1, maxnreg=CHOOSE_REGISTERS, **early,
    )  # fmt: skip
    return ranks, weights, slots, summary


def _launch(
    shape: Shape, rows: int, group: int, kv_heads: int, width: int
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Programs of a kernel that computes scores, and how it is compiled."""
    blocks = -(-rows // (shape.rows // triton.next_power_of_2(group)))
    splits = max(1, min(width // shape.keys, shape.programs // (blocks * kv_heads)))
    compiled = {
        "BLOCK_M": shape.rows, "BLOCK_S": shape.keys,
        "num_warps": shape.warps, "num_stages": shape.stages, "maxnreg": shape.registers,
    }  # fmt: skip
    return (blocks, kv_heads, splits), compiled


VARYING = [
    "first_token", "rows", "first_position", "sink", "window", "k", "tiles", "tile", "room", "kept_room", "length", "table_at",
]  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _contiguous(
    cache_ptr, table_ptr, keys_ptr, table_at, length, stride_kv, stride_cb, stride_ch, stride_cn,
    D: tl.constexpr, N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program = BLOCK_S keys of one key/value head."""
    kv = tl.program_id(1)
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    block = tl.load(table_ptr + table_at + s // N, mask=s < length, other=0).to(tl.int64)
    k = tl.load(
        cache_ptr + block[:, None] * stride_cb + kv * stride_ch + (s % N)[:, None] * stride_cn + d[None, :],
        mask=(s < length)[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    tl.store(keys_ptr + kv.to(tl.int64) * stride_kv + s[:, None] * BLOCK_D + d[None, :], k)


@triton.jit
def _rows_of(
    q_ptr, first_token, rows, first_position, stride_qt, stride_qh,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Queries, rows and positions of a program, and its lowest and highest token among the part's.

    What is left over computes and stores again what another row does: nothing then needs a mask.
    """
    lowest = tl.program_id(0) * (BLOCK_M // BLOCK_G)
    highest = tl.minimum(rows, lowest + BLOCK_M // BLOCK_G) - 1
    m = tl.arange(0, BLOCK_M)
    token = tl.minimum(lowest + m // BLOCK_G, highest)
    head = tl.program_id(1) * G + tl.minimum(m % BLOCK_G, G - 1)
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
    q_ptr, keys_ptr, maxima_ptr, first_token, rows, first_position, scale, sink, window,
    stride_qt, stride_qh, stride_kv, width,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program = BLOCK_M rows of one key/value head, and a part of the keys: the largest candidate of each tile."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    q, row, position, nearest, last = _rows_of(
        q_ptr, first_token, rows, first_position, stride_qt, stride_qh, H, G, D, BLOCK_G, BLOCK_M, BLOCK_D
    )
    low, high = _steps(last, BLOCK_S)
    s = tl.arange(0, BLOCK_S)
    here = keys_ptr + tl.program_id(1).to(tl.int64) * stride_kv + tl.arange(0, BLOCK_D)[:, None] + s[None, :] * BLOCK_D
    PER_STEP: tl.constexpr = BLOCK_S // TILE
    out = maxima_ptr + (row * (width // TILE))[:, None] + tl.arange(0, PER_STEP)[None, :]
    for step in range(low, high):
        k = tl.load(here + step * (BLOCK_S * BLOCK_D))
        x = tl.dot(q, k)
        # Only tiles at an edge hold what is no candidate: the sink, the window, keys to come.
        if (step * BLOCK_S < sink) | ((step + 1) * BLOCK_S > nearest - window + 1):
            there = step * BLOCK_S + s
            candidate = (there >= sink)[None, :] & (there[None, :] <= (position - window)[:, None])
            x = tl.where(candidate, x, float("-inf"))
        best = tl.reduce(tl.reshape(x, (BLOCK_M, PER_STEP, TILE)), 2, kernels._largest)
        tl.store(out + step * PER_STEP, best * scale)


@triton.jit(do_not_specialize=VARYING)
def _bounds(
    maxima_ptr, bounds_ptr, k, first_position, tiles, tile, BLOCK_T: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program = one row: the lower bound of its threshold, and its largest score, as integers."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    position = first_position + tl.program_id(0)
    bound, _, highest, _, _ = kernels._bound(maxima_ptr + row * tiles, k, position, tile, BLOCK_T)
    tl.store(bounds_ptr + row * 2, bound)
    tl.store(bounds_ptr + row * 2 + 1, highest)


@triton.jit(do_not_specialize=VARYING)
def _hits(
    q_ptr, keys_ptr, bounds_ptr, ranks_ptr, words_ptr, first_token, rows, first_position, scale, sink, window,
    stride_qt, stride_qh, stride_kv, width,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_maxima`: the candidates that reach the bound of their row, and a bit for each.

    In tiles at an edge all scores are stored, those of the sink and the window among them.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    q, row, position, nearest, last = _rows_of(
        q_ptr, first_token, rows, first_position, stride_qt, stride_qh, H, G, D, BLOCK_G, BLOCK_M, BLOCK_D
    )
    low, high = _steps(last, BLOCK_S)
    s = tl.arange(0, BLOCK_S)
    here = keys_ptr + tl.program_id(1).to(tl.int64) * stride_kv + tl.arange(0, BLOCK_D)[:, None] + s[None, :] * BLOCK_D
    # NaN where every score is wanted: nothing is below it.
    bound = kernels._float_of(tl.load(bounds_ptr + row * 2))
    WORDS: tl.constexpr = BLOCK_S // WORD
    words_out = words_ptr + (row * (width // WORD))[:, None] + tl.arange(0, WORDS)[None, :]
    bits = tl.broadcast_to((1 << (s % WORD)).to(tl.int32)[None, :], (BLOCK_M, BLOCK_S))
    for step in range(low, high):
        k = tl.load(here + step * (BLOCK_S * BLOCK_D))
        x = tl.dot(q, k) * scale
        marked = tl.where(x < bound[:, None], 0, bits)
        edge = (step * BLOCK_S < sink) | ((step + 1) * BLOCK_S > nearest - window + 1)
        if edge:
            there = step * BLOCK_S + s
            candidate = (there >= sink)[None, :] & (there[None, :] <= (position - window)[:, None])
            marked = tl.where(candidate, marked, 0)
        words = tl.sum(tl.reshape(marked, (BLOCK_M, WORDS, WORD)), 2)
        tl.store(words_out + step * WORDS, words)
        # Of each 32 bytes all or nothing.
        words = tl.where(edge, -1, words)[:, :, None]
        words = tl.reshape(tl.broadcast_to(words, (BLOCK_M, WORDS, WORD)), (BLOCK_M, BLOCK_S))
        wanted = words & (255 << (s % WORD // 8 * 8))[None, :]
        # The part of the address that differs within a row comes last and is the same in every step.
        out = (ranks_ptr + (row * width + step * BLOCK_S))[:, None] + s.to(tl.int64)[None, :]
        if ASM:
            # Two scores at a time: a thread of the matrix unit holds neighbours, one after the other.
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.global.v2.f32 [$2], {$4, $5}; mov.u32 $0, 0; mov.u32 $1, 0; }",
                "=r,=r,l,l,f,f,r,r", [out.to(tl.int64), x, wanted], dtype=tl.int32, is_pure=False, pack=2,
            )  # fmt: skip
        else:
            tl.store(out, x, mask=wanted != 0)


@triton.jit(do_not_specialize=VARYING)
def _choose_hits(
    ranks_ptr, words_ptr, bounds_ptr, table_ptr, ids_ptr, listed_ptr, keys_ptr, weights_ptr, slots_ptr,
    summary_ptr, table_at, first_position, k, sink, window, width, room, kept_room,
    N: tl.constexpr, TILE: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_E: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program = one row: as `topk_kernels._choose`, from the bits of `_hits`."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    position = first_position + tl.program_id(0)
    words_ptr += row * (width // WORD)
    ids_ptr += row * (width // TILE)
    ranks_ptr += row * width
    listed_ptr += row * room
    keys_ptr += row * room
    count = _listed(words_ptr, listed_ptr, position, room, BLOCK_W, ASM)
    entries = (position // TILE + 1) * TILE
    if count > room:
        _complete(words_ptr, ranks_ptr, ids_ptr, sink, window, position, TILE, BLOCK_L)
    tl.debug_barrier()  # what other threads of the program stored is read next
    found = kernels._keep(
        ranks_ptr, table_ptr + table_at, ids_ptr, listed_ptr, keys_ptr, weights_ptr + row * kept_room, slots_ptr + row * kept_room,
        slots_ptr, summary_ptr + row * 4, tl.load(bounds_ptr + row * 2), tl.load(bounds_ptr + row * 2 + 1), count, room,
        entries, k, sink, window, position, kept_room, False, N, TILE, BLOCK_L, BLOCK_E, False,
    )  # fmt: skip
    if (found > kept_room) & (count <= room):  # then `_gather` reads all scores
        _complete(words_ptr, ranks_ptr, ids_ptr, sink, window, position, TILE, BLOCK_L)


@triton.jit
def _listed(words_ptr, listed_ptr, position, room, BLOCK_W: tl.constexpr, ASM: tl.constexpr):
    """List the keys that bits stand for, in order, while there is room; returns how many there are."""
    found = tl.full((), 0, tl.int32)
    for begin in range(0, position // WORD + 1, BLOCK_W):
        i = begin + tl.arange(0, BLOCK_W)
        word = tl.load(words_ptr + i, mask=i * WORD <= position, other=0)
        bits = _bits(word, ASM)
        place = found + tl.cumsum(bits) - bits
        found += tl.sum(bits)
        # The lowest bit of every word, then the next.
        for _ in range(tl.max(bits)):
            lowest = word & -word
            # A power of two as a float has its logarithm in the exponent.
            exponent = tl.abs(lowest.to(tl.float32)).to(tl.int32, bitcast=True) >> 23
            tl.store(listed_ptr + place, i * WORD + exponent - 127, mask=(word != 0) & (place < room))
            place += 1
            word = word ^ lowest
    return found


@triton.jit
def _bits(word, ASM: tl.constexpr):
    """How many bits of a word are set."""
    if ASM:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
    total = word * 0
    for i in tl.static_range(32):
        total += (word >> i) & 1
    return total


@triton.jit
def _complete(words_ptr, ranks_ptr, ids_ptr, sink, window, position, TILE: tl.constexpr, BLOCK_W: tl.constexpr):
    """For a row whose candidates no list holds: make all its scores readable, and list all its tiles."""
    for begin in range(0, position + 1, BLOCK_W):
        s = begin + tl.arange(0, BLOCK_W)
        word = tl.load(words_ptr + s // WORD, mask=s <= position, other=0)
        absent = ((word >> (s % WORD)) & 1) == 0
        tl.store(ranks_ptr + s, float("-inf"), mask=absent & (s >= sink) & (s <= position - window))
    for begin in range(0, position // TILE + 1, BLOCK_W):
        t = begin + tl.arange(0, BLOCK_W)
        tl.store(ids_ptr + t, t, mask=t * TILE <= position)
