"""The kernels of exact top-k attention; topk_attention.py says what each is for, and strings them together.

Legend as there.
"""

import functools

import torch
import triton
import triton.language as tl

from tiers.vllm_model.ops.positions import biased, decayed, heads_of_bias

# Programs that fill the largest devices: a few per multiprocessor.
TARGET_PROGRAMS = 1024

# Keys per tile maximum, unless a row would then have more maxima than one program can search, and the sizes for which
# that program is compiled.
TILE, BLOCKS_T = 16, (512, 2048, 8192)

# Kept keys beyond k + sink + window that a list has room for: ties at the threshold.
SPARE = 64

# Parts that `_merge` reads at once.
MERGE_PARTS = 8


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
def _bound(maxima_ptr, k, position, tile, BLOCK_T: tl.constexpr):
    """A lower bound of the k-th largest rank of a row, how many tiles reach it, the largest, and which and what they are.

    The search halves the range of integers between smallest and largest maximum until the tiles that reach the middle
    are k, so that they can be read at once; with ties they may be more.
    """
    # In rows of 16: places in a list are then counted within a few lanes, and for whole rows once.
    t = tl.arange(0, BLOCK_T // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    best = tl.load(maxima_ptr + t, mask=t * tile <= position, other=float("-inf"))
    key = _ordered(best)
    nothing = _ordered(tl.full((), float("-inf"), tl.float32))  # a tile without candidates
    some = key > nothing
    count = tl.sum(some.to(tl.int32))
    highest = tl.max(key)
    low, count = _halved(key, count, tl.min(tl.where(some, key, 2147483647)), highest, k)
    reached = some & (key >= low)
    # Fewer than k tiles do not hold k scores as large as their maxima.
    bound = tl.where(count < k, -2147483647, low)
    return bound, count, highest, t, reached


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
    """The k-th largest of `key`, or any integer above the one after it: what reaches either is the same; and how many do.

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
    return low.to(tl.int32), count


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
    bound, reached, highest, t, reaches = _bound(maxima_ptr + row * tiles, k, position, TILE, BLOCK_T)
    tl.store(ids_ptr + _places(reaches)[0], t, mask=reaches)
    tl.debug_barrier()  # what other threads of the program stored is read next, here and below
    listed_ptr += row * room
    keys_ptr += row * room
    ranks_ptr += row * width
    entries = reached * TILE
    count = _candidates(
        ranks_ptr, ids_ptr, listed_ptr, keys_ptr, bound, reached, room, sink, window, position, TILE, BLOCK_C
    )
    tl.debug_barrier()

    weights_ptr += row * kept_room
    slots_ptr += row * kept_room
    positions_ptr += row * kept_room
    table_ptr += request.to(tl.int64) * stride_table
    _keep(
        ranks_ptr, table_ptr, ids_ptr, listed_ptr, keys_ptr, weights_ptr, slots_ptr, positions_ptr, summary_ptr,
        bound, highest, count, room, entries, k, sink, window, position, kept_room, GROUP, N, TILE, BLOCK_L, BLOCK_E,
    )  # fmt: skip


@triton.jit
def _keep(
    ranks_ptr, table_ptr, ids_ptr, listed_ptr, keys_ptr, weights_ptr, slots_ptr, positions_ptr, summary_ptr,
    bound, highest, count, room, entries, k, sink, window, position, kept_room,
    GROUP: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The last stage of `_choose`: the threshold of the row, and what reaches it with the slots of its values."""
    # The list goes on with the sink tokens and the window; a window that reaches into the sink starts behind it.
    listed = count <= room
    candidates = tl.where(listed, count, entries)
    sinks = tl.minimum(sink, position + 1)
    recent = tl.maximum(sinks, position - window + 1)
    total_entries = candidates + sinks + (position + 1 - recent)
    if listed & (total_entries <= BLOCK_L):
        # All at once, in registers.
        e = tl.arange(0, BLOCK_L)
        s = tl.load(listed_ptr + e, mask=e < count, other=0)
        rank = tl.load(keys_ptr + e, mask=e < count, other=float("-inf"))
        key = tl.where(e < count, _ordered(rank), -2147483648)
        threshold, _ = _halved(key, count, bound, highest, k)
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
    """As `_keep`, for rows with more entries than fit into registers."""
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
