"""Exact top-k attention over a paged cache, in Triton: the function that strings the kernels of topk_kernels.py together.

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

Nothing depends on the lengths on the host where every request has one query token, so the step can be captured. Long prompts
whose heads choose for themselves go another way, where few scores are stored: topk_prompt.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tiers.reference.config import TopK
from tiers.reference.ops.bias import Bias
from tiers.reference.ops.paged_attention import Batch
from tiers.vllm_model.ops import topk_prompt as prompt
from tiers.vllm_model.ops import workspace
from tiers.vllm_model.ops.positions import arguments
from tiers.vllm_model.ops.positions import precision as precision_of
from tiers.vllm_model.ops.topk_kernels import (
    BLOCKS_T,
    MERGE_PARTS,
    SPARE,
    TARGET_PROGRAMS,
    TILE,
    _choose,
    _gather,
    _gather_group,
    _merge,
    _scores,
    early_launch,
)

# Bytes held at once at most; longer work is done in parts.
WORKSPACE_BYTES = 2**30

# The best of those tried (docs/log.md). Keys per step and warps of `_gather`, with few rows and with many.
FEW, MANY = (128, 4), (64, 2)

# Query rows, keys per step, warps, steps in flight and registers of `_scores` for prompts in 16 bits, for single tokens in 16
# bits, and for what takes more memory.
PROMPT, DECODE, WIDE = (128, 64, 8, 3, 128), (64, 64, 2, 4, None), (64, 64, 4, 3, None)

# Programs that `_scores` is cut into, as long as each has a few steps: many short ones leave the fewest multiprocessors idle at
# the end.
SCORE_PROGRAMS, FEWEST_STEPS = 64 * 132, 4

# Kept keys of a part, whose values are added up by one program.
KEPT_PER_PART = 256


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
    token = _bytes_per_token(pattern, heads, longest)
    rows = min(tokens * token, max(WORKSPACE_BYTES, token)) + partial_bytes(heads, kv_heads, size) + workspace.SLACK
    # One after the other, in the same memory.
    return max(rows, prompt.workspace_bytes(pattern, heads, kv_heads, size, tokens, longest, WORKSPACE_BYTES))


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
    return batches + prompt.batches_to_compile(pattern, longest)


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
    plain = bias is None and decay_D is None and softcap is None
    for first, last in _ranges(starts):
        begin, stop = starts[first], starts[last]
        longest = max(lengths[first:last])
        joined = last - first > 1
        rest = [(begin, stop)]
        if not joined and prompt.serves(query_THD, cache_BKNC, pattern, scale, plain):
            offset = stop - longest  # of the token at position p in the step
            ranges = prompt.parts(pattern, heads, cache_BKNC.shape[1], begin - offset, longest, WORKSPACE_BYTES)
            if ranges:
                prompt.attention(
                    query_THD, cache_BKNC, batch.block_table_RP, out_THD,
                    request=first, offset=offset, ranges=ranges, scale=scale, pattern=pattern,
                )  # fmt: skip
                rest = [(begin, ranges[0][0] + offset), (ranges[-1][1] + offset, stop)]
        for low, high in rest:
            part = _rows_at_once(pattern, heads, longest - (stop - high))
            for start in range(low, high, part):
                end = min(start + part, high)
                # A part of a prompt sees the keys up to its own last token only.
                per_request, seen = (1, longest) if joined else (end - start, longest - (stop - end))
                _run(query_THD, cache_BKNC, batch, out_THD, first, last, start, end, per_request, seen, *options)


def _rows_at_once(pattern: TopK, heads: int, longest: int) -> int:
    """Query tokens whose scores and lists fit into the workspace."""
    return max(1, WORKSPACE_BYTES // _bytes_per_token(pattern, heads, max(1, longest)))


def _bytes_per_token(pattern: TopK, heads: int, longest: int) -> int:
    return heads * Sizes.of(pattern, longest).bytes_per_row


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
    block_m, block_s, warps, stages, registers = WIDE if wide else PROMPT if per_request > 1 else DECODE
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
    splits = max(1, min(width // (FEWEST_STEPS * block_s), SCORE_PROGRAMS // max(1, requests * blocks * kv_heads)))
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
        num_warps=warps, num_stages=stages, maxnreg=registers, **early,
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
