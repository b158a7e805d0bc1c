"""The kernels of exact top-k attention for long prompts; topk_prompt.py says what each is for, and calls them.

Legend as there.
"""

import triton
import triton.language as tl

from tiers.vllm_model.ops import topk_kernels as kernels

# One key of so many is sampled.
SAMPLED = tl.constexpr(4)

# Lists of a row and a part of the keys, and entries that are added to one at once.
LISTS, MOST_AT_ONCE = tl.constexpr(4), tl.constexpr(16)

# The smallest number that is finite.
LOWEST = tl.constexpr(-3.4028234663852886e38)

VARYING = [
    "first_token", "rows", "first_position", "sink", "window", "k", "lists", "length", "table_at", "kv_heads",
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
def _first_keys(keys_ptr, kv, stride_kv, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to the first BLOCK_S copied keys of a key/value head, as columns."""
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    return keys_ptr + kv.to(tl.int64) * stride_kv + d[:, None] + s[None, :] * BLOCK_D


@triton.jit
def _share(total):
    """The first of so many things that is this program's, among those of the third axis, and the one after its last."""
    each = tl.cdiv(total, tl.num_programs(2))
    low = tl.program_id(2) * each
    return low, tl.minimum(low + each, total)


@triton.jit(do_not_specialize=VARYING)
def _maxima(
    q_ptr, sample_ptr, maxima_ptr, first_token, rows, first_position, sink, window, stride_qt, stride_qh, stride_kv,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program = BLOCK_M rows of one key/value head, and some of the tiles: the largest candidate of each.

    Every TILES-th sampled key is of the same tile: the keys that a row wants are often neighbours, which thus do not share one.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    kv = tl.program_id(1)
    q, row, position, nearest, last = _rows_of(
        q_ptr, tl.program_id(0), kv, first_token, rows, first_position, stride_qt, stride_qh, H, G, D, BLOCK_G, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    GROUPS: tl.constexpr = TILES // BLOCK_S
    REACH: tl.constexpr = BLOCK_S * SAMPLED
    turns = last // (TILES * SAMPLED) + 1
    low, high = _share(GROUPS)
    s = tl.arange(0, BLOCK_S)
    here = _first_keys(sample_ptr, kv, stride_kv, BLOCK_S, BLOCK_D)
    out = maxima_ptr + (row * TILES)[:, None] + s[None, :]
    best = tl.full((BLOCK_M, BLOCK_S), float("-inf"), tl.float32)
    for i in range(low * turns, high * turns):
        step = i % turns * GROUPS + i // turns
        k = tl.load(here + step * (BLOCK_S * BLOCK_D))
        x = tl.dot(q, k)
        # Only an edge holds what is no candidate: the sink, the window, keys to come.
        if (step * REACH < sink) | ((step + 1) * REACH > nearest - window + 1):
            there = _sampled(step * BLOCK_S + s)
            candidate = kernels._between(there, sink, position - window, 0, 1)
            x = tl.where(candidate, x, float("-inf"))
        best = kernels._largest(best, x)
        if i % turns == turns - 1:
            tl.store(out + i // turns * BLOCK_S, best)
            best = tl.full((BLOCK_M, BLOCK_S), float("-inf"), tl.float32)


@triton.jit(do_not_specialize=VARYING)
def _bounds(
    maxima_ptr, bounds_ptr, first_position, sink, window, expected, TILES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program = one row: a bound that about `expected` sampled keys reach, or all if there are too few."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    position = first_position + tl.program_id(0)
    sampled = tl.maximum(position - window + 1 - sink, 1).to(tl.float32) / SAMPLED
    # Some of the expected keys share a tile: how many tiles have any, if some have one key more than the others?
    missed = 1.0 - tl.minimum(expected / sampled, 0.99)
    fewer = (sampled / TILES).to(tl.int32).to(tl.float32)
    more = sampled - fewer * TILES
    none = tl.exp(fewer * tl.log(missed))
    reached = TILES * (1.0 - none) + more * none * (1.0 - missed)
    reached = tl.maximum(1.0, reached + 0.5).to(tl.int32)
    # Each tile has keys from all over the context: none is beyond the row's position.
    bound, _, _, _, _ = kernels._bound(maxima_ptr + row * TILES, reached, position, 0, TILES)
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
        q_ptr, tl.program_id(0), kv, first_token, rows, first_position, stride_qt, stride_qh, H, G, D, BLOCK_G, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    low, high = _share(last // BLOCK_S + 1)
    s = tl.arange(0, BLOCK_S)
    here = _first_keys(keys_ptr, kv, stride_kv, BLOCK_S, BLOCK_D)
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
            candidate = kernels._between(there, sink, position - window, 0, 1)
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


# The flags of a part begin anywhere.
@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["flags_ptr"])
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
    threshold, _ = kernels._halved(key, hits, low, tl.max(key), k)
    keep = (e < count) & ((key >= threshold) | (candidate == 0))
    x = tl.where(keep, x * scale, float("-inf"))
    weight = tl.exp(x - tl.max(x))
    total = tl.sum(weight)
    kept = tl.sum(keep.to(tl.int32))
    place = tl.cumsum(keep.to(tl.int32)) - 1
    block = tl.load(table_ptr + table_at + s // N, mask=keep, other=0).to(tl.int64)
    # What is kept, in the place of the lists: weights and where the values are.
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
            q_ptr, block, kv, first_token, rows, first_position, stride_qt, stride_qh, H, G, D, BLOCK_G, BLOCK_R, BLOCK_D,
        )  # fmt: skip
        if tl.max(tl.load(flags_ptr + row).to(tl.int32)) > 0:
            here = _first_keys(keys_ptr, kv, stride_kv, BLOCK_S, BLOCK_D)
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
    # Its candidates stand one behind the other.
    count = tl.maximum(position - window + 1 - sink, 0)
    least, most = tl.full((), 2147483647, tl.int32), tl.full((), -2147483648, tl.int32)
    for begin in range(0, count, BLOCK_E):
        e = begin + tl.arange(0, BLOCK_E)
        key = kernels._ordered(tl.load(scores_ptr + sink + e, mask=e < count, other=0.0))
        least = tl.minimum(least, tl.min(tl.where(e < count, key, 2147483647)))
        most = tl.maximum(most, tl.max(tl.where(e < count, key, -2147483648)))
    threshold = kernels._threshold(
        scores_ptr + sink, scores_ptr, places_ptr, count, count, 0, least, most, k, sink, window, position, 16, BLOCK_E
    )
    kept = tl.full((), 0, tl.int32)
    top = tl.full((), float("-inf"), tl.float32)
    for begin in range(0, position + 1, BLOCK_C):
        s = begin + tl.arange(0, BLOCK_C)
        keep, x, _ = kernels._kept_of_all(scores_ptr, table_ptr, s, position + 1, threshold, sink, window, position, N)
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
