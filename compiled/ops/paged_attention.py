"""Attention over the paged cache through torch.compile.

Legend: T packed query tokens of all requests, R query tokens done together, H query heads, KV key/value heads, D head
size, B blocks in the cache, N tokens per block, P blocks of the longest context, L = P * N tokens, X blocks of all
contexts, one after another; M queries: the rows of a matrix of scores.

Two functions are compiled, since one token per context and many want different loops:

- `_decode`: one query token each of R contexts. Keys and values are multiplied where they lie in the cache: Inductor puts
  the look-up of a block into the loops over [X, H, N, D], so that nothing is copied, and as X counts only blocks that
  exist, contexts of different lengths waste nothing. Just the scores, small beside the keys, are put into rows
  [H, R, L], where pattern and softmax work; the weights are read from there again block by block.
- `_prefill`: several query tokens of one context. Its blocks are gathered once, as matrices in float32, and multiplied.

What stays the same while a model is served is compiled in (`Setup`); numbers of tokens, contexts and blocks are not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from einops import rearrange
from torch import Tensor

from tiers.compiled.options import compiled, first_size_varies, kinds
from tiers.reference.config import Dense, TopK, Window, Xpos
from tiers.reference.ops.attention import Pattern
from tiers.reference.ops.bias import Bias, bias_values
from tiers.reference.ops.paged_attention import Batch

# Elements held at once of scores, and of what `_decode` adds up: 64 MiB in float32. More is done in parts, down to one
# query token.
MAX_SCORES = 2**24

# Rows of scores are as long as the longest context. Contexts of other lengths are not joined if that more than doubles
# the rows, unless they have no more elements than this.
SMALL = 2**18


# The tensors of a bias: factor_H, rate_H, table_RL.
Parts = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Setup:
    """What is compiled in: sizes and arguments that are the same in every step.

    Numbers that are not whole are text: dynamo takes them for inputs otherwise, and torch 2.11 cannot read from the disk
    code that has inputs which come from here.
    """

    heads: int
    kv_heads: int
    size: int
    page: int
    scale: str
    pattern: Pattern
    head_map: tuple[int, ...] | None
    softcap: str | None
    bias: str | None = None

    def blocks(self, length: int) -> int:
        """Blocks of a context."""
        return -(-length // self.page)

    @property
    def least_blocks(self) -> int:
        """Rows of scores have at least so many blocks: topk wants k elements, and 1 would be compiled in."""
        return max(2, self.blocks(self.pattern.k)) if isinstance(self.pattern, TopK) else 2

    @property
    def tile_blocks(self) -> int:
        """Blocks of keys that share an anchor of xPos."""
        return max(1, Xpos.longest_tile // self.page)


@dataclass(frozen=True)
class Piece:
    """Query tokens `start` to `stop` of the batch, the last ones of the first `length` tokens of a request."""

    start: int
    stop: int
    request: int
    length: int


@dataclass(frozen=True)
class Steps:
    """Query tokens that are done together, one of each request.

    Attributes:
        tokens_R: where they are in the batch, in ascending order.
        lists: of `_lists`.
        widest: blocks of a row of scores.
    """

    tokens_R: Tensor
    lists: tuple[Tensor, ...]
    widest: int


@torch.no_grad()
def paged_attention(
    query_THD: Tensor,
    cache_BKNC: Tensor,
    batch: Batch,
    *,
    scale: float,
    pattern: Pattern,
    head_map: Sequence[int] | None = None,
    bias: Bias | None = None,
    decay_D: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Same contract as the reference; no gradients. Compiles once for decode steps and once for prompts."""
    heads, size = query_THD.shape[1:]
    kv_heads, page = cache_BKNC.shape[1:3]
    head_map = None if head_map is None else tuple(head_map)
    kind = None if bias is None else bias.kind
    cap = None if softcap is None else repr(softcap)
    setup = Setup(heads, kv_heads, size, page, repr(scale), pattern, head_map, cap, kind)
    _check(cache_BKNC, batch, setup, bias, decay_D)
    parts = () if bias is None else (bias.factor_H, bias.rate_H, bias.table_RL)
    # A table's length differs from model to model only, but is no constant of the code.
    table_rows = None if bias is None or bias.table_RL is None else len(bias.table_RL)
    variant = (kinds(query_THD, cache_BKNC, decay_D, *parts), cache_BKNC.stride(), table_rows)
    kv_H = None if head_map is None else _on_device(head_map, query_THD.device)
    added = (parts or (None, None, None), decay_D)
    steps, prompts = _work(batch, setup)

    decode = compiled(_decode, variant, setup=setup)
    if len(steps) == 1 and not prompts and len(steps[0].tokens_R) == len(query_THD):
        varying = first_size_varies(query_THD.contiguous(), cache_BKNC)
        return decode(*varying, *steps[0].lists, steps[0].widest, kv_H, *added)

    out_THD = torch.zeros_like(query_THD)
    for step in steps:
        varying = first_size_varies(query_THD[step.tokens_R], cache_BKNC)
        out_THD[step.tokens_R] = decode(*varying, *step.lists, step.widest, kv_H, *added)

    prefill = compiled(_prefill, variant, setup=setup)
    for piece in prompts:
        part = slice(piece.start, piece.stop)
        blocks_P = batch.block_table_RP[piece.request, : setup.blocks(piece.length)]
        # Blocks beyond the context stand behind every query; any that exists will do.
        wanted = max(len(blocks_P), setup.least_blocks)
        if decay_D is not None:  # whole tiles, and never one alone
            wanted = max(2, -(-wanted // setup.tile_blocks)) * setup.tile_blocks
        blocks_P = torch.cat((blocks_P, blocks_P[:1].expand(wanted - len(blocks_P))))
        if decay_D is not None:
            blocks_P = blocks_P.view(-1, setup.tile_blocks)
        positions_T = torch.arange(piece.length - (piece.stop - piece.start), piece.length, device=query_THD.device)
        tensors = (query_THD[part].contiguous(), cache_BKNC, blocks_P, positions_T.int())
        varying = first_size_varies(*tensors, ones=False)
        out_THD[part] = prefill(*varying, kv_H, *added)
    return out_THD


def _work(batch: Batch, setup: Setup) -> tuple[list[Steps], list[Piece]]:
    """Single query tokens in groups, and parts of prompts. Worked out by the first of all layers that are alike."""
    tensors = (batch.block_table_RP, batch.lengths_R, batch.starts_R1)
    key = ("compiled", setup.heads, setup.size, setup.page, setup.least_blocks)
    if key in batch.memo:
        found, known = batch.memo[key]
        # A copy of the batch with another table has the same memo.
        if all(a is b for a, b in zip(known, tensors, strict=True)):
            return found
    pieces = _pieces(batch, setup)
    steps = []
    for group in _groups([piece for piece in pieces if piece.stop - piece.start == 1], setup):
        rows = [[row.start, row.request, row.length] for row in group]
        tokens_R, requests_R, lengths_R = torch.tensor(rows, device=batch.lengths_R.device).T
        lists = _lists(batch.block_table_RP[requests_R], lengths_R, group, setup)
        steps.append(Steps(tokens_R, tuple(first_size_varies(*lists)), _widest(group, setup)))
    found = steps, [piece for piece in pieces if piece.stop - piece.start > 1]
    batch.memo[key] = found, tensors
    return found


def _pieces(batch: Batch, setup: Setup) -> list[Piece]:
    """The query tokens of every request, long prompts in parts whose scores fit."""
    lengths, starts = batch.host
    pieces = []
    for request, length in enumerate(lengths):
        start, end = starts[request], starts[request + 1]
        most = max(1, MAX_SCORES // (setup.heads * max(1, length)))
        for first in range(start, end, most):
            stop = min(first + most, end)
            pieces.append(Piece(first, stop, request, length - (end - stop)))
    return pieces


def _groups(rows: list[Piece], setup: Setup) -> Iterator[list[Piece]]:
    """Single query tokens that are done together: what fits, and does not differ too much in length."""
    group: list[Piece] = []
    total = 0
    for row in sorted(rows, key=lambda row: row.length):
        blocks = setup.blocks(row.length)
        padded = (len(group) + 1) * max(blocks, setup.least_blocks) * setup.page * setup.heads
        actual = (total + blocks) * setup.page * setup.heads
        products = (total + blocks) * setup.size * setup.heads
        if group and (max(padded, products) > MAX_SCORES or padded > max(2 * actual, SMALL)):
            yield sorted(group, key=lambda row: row.start)
            group, total = [], 0
        group.append(row)
        total += blocks
    if group:
        yield sorted(group, key=lambda row: row.start)


def _widest(rows: list[Piece], setup: Setup) -> int:
    return max(setup.least_blocks, *(setup.blocks(row.length) for row in rows))


def _lists(table_RP: Tensor, lengths_R: Tensor, rows: list[Piece], setup: Setup) -> tuple[Tensor, Tensor]:
    """The contexts, and their blocks, one after another.

    Not compiled, as Inductor would work these out again wherever they are read.

    Returns:
        Of each context its length and where its blocks begin [R, 2]; of each block its context, its place in there and
        its id [X, 3].
    """
    lengths_R = lengths_R.long()
    blocks_R = (lengths_R + (setup.page - 1)) // setup.page
    first_R = blocks_R.cumsum(0) - blocks_R
    # The sum is known here, so that a device need not be asked for it.
    total = sum(setup.blocks(row.length) for row in rows)
    context_X = torch.repeat_interleave(blocks_R, output_size=total)
    place_X = torch.arange(total, device=first_R.device) - first_R[context_X]
    id_X = table_RP[context_X, place_X].long()
    return torch.stack((lengths_R, first_R), 1), torch.stack((context_X, place_X, id_X), 1)


def _decode(
    query_RHD: Tensor,
    cache_BKNC: Tensor,
    contexts_R2: Tensor,
    blocks_X3: Tensor,
    widest: int,
    kv_H: Tensor | None,
    parts: Parts,
    decay_D: Tensor | None,
    *,
    setup: Setup,
) -> Tensor:
    """Query r is the last token of context r; `_lists` says what the lists are."""
    size, page, device = setup.size, setup.page, query_RHD.device
    exact = _exact(query_RHD)
    torch._check(len(query_RHD) == len(contexts_R2))
    length_R, first_R = contexts_R2.unbind(1)
    context_X, place_X, id_X = blocks_X3.unbind(1)
    if kv_H is None:
        kv_H = torch.arange(setup.heads, device=device) // (setup.heads // setup.kv_heads)
    # Keys and values are cut apart before the look-up: one look-up for both would be a copy of the blocks.
    key_XHND = cache_BKNC[..., :size][id_X[:, None], kv_H].to(exact)
    products_XHND = query_RHD.to(exact)[context_X][:, :, None] * key_XHND
    if decay_D is not None:
        position_XN = place_X[:, None] * page + torch.arange(page, device=device)
        distance_XN = (length_R[context_X][:, None] - 1 - position_XN).clamp(min=0)
        products_XHND = products_XHND * torch.exp2(decay_D.to(exact) * distance_XN[:, None, :, None])
    scores_XHN = products_XHND.sum(-1)

    # Behind the last block of a context stands one of the next, which no query sees.
    index_RP = (first_R[:, None] + torch.arange(widest, device=device)).clamp(max=len(id_X) - 1)
    scores_HRL = rearrange(scores_XHN[index_RP], "r p h n -> h r (p n)")
    weights_HRL = _weights(scores_HRL, length_R.int() - 1, parts, setup)
    weights_XHN = rearrange(weights_HRL, "h r (p n) -> r p h n", n=page)[context_X, place_X]

    value_XHND = cache_BKNC[..., size:][id_X[:, None], kv_H].to(exact)
    # The rest of a last block may hold NaN, which a weight of zero does not remove.
    owned_XN = place_X[:, None] * page + torch.arange(page, device=device) < length_R[context_X][:, None]
    part_XHD = torch.where(owned_XN[:, None, :, None], weights_XHN[..., None] * value_XHND, 0).sum(-2)
    owned_RP = torch.arange(widest, device=device) * page < length_R[:, None]
    # Heads first: Inductor divides the outermost loop among threads, and there may be one context.
    parts_HRPD = rearrange(part_XHD[index_RP], "r p h d -> h r p d")
    out_HRD = _sum(torch.where(owned_RP[..., None], parts_HRPD, 0), 2) / _sum(weights_HRL, -1)[..., None]
    return rearrange(out_HRD, "h r d -> r h d").to(query_RHD.dtype)


def _prefill(
    query_THD: Tensor,
    cache_BKNC: Tensor,
    blocks_P: Tensor,
    positions_T: Tensor,
    kv_H: Tensor | None,
    parts: Parts,
    decay_D: Tensor | None,
    *,
    setup: Setup,
) -> Tensor:
    """The queries stand at ascending positions of one context, which consists of the blocks."""
    size, tiles = setup.size, blocks_P.shape[0]
    blocks_P = blocks_P.flatten()  # with xPos they come by tiles
    exact = _exact(query_THD)
    # A head map is done with a copy of keys and values for each query head.
    both_PKNC = cache_BKNC[blocks_P] if kv_H is None else cache_BKNC[blocks_P[:, None], kv_H]
    kv, g = both_PKNC.shape[1], setup.heads // both_PKNC.shape[1]
    key_KLD, value_KLD = rearrange(both_PKNC.to(exact), "p kv n c -> kv (p n) c").split(size, dim=-1)
    # Behind the last query may stand NaN, which a weight of zero does not remove.
    owned_L = torch.arange(value_KLD.shape[1], device=value_KLD.device) <= positions_T[-1]
    value_KLD = torch.where(owned_L[:, None], value_KLD, 0)
    query_KMD = rearrange(query_THD.to(exact), "t (kv g) d -> kv (g t) d", kv=kv)
    if decay_D is None:
        scores_HTL = rearrange(query_KMD @ key_KLD.mT, "kv (g t) l -> (kv g) t l", g=g)
    else:
        scores_HTL = rearrange(
            _decayed(query_KMD, key_KLD, positions_T.repeat(g), decay_D.to(exact), tiles),
            "kv (g t) l -> (kv g) t l",
            g=g,
        )
    weights_HTL = _weights(scores_HTL, positions_T, parts, setup)
    out_KMD = rearrange(weights_HTL, "(kv g) t l -> kv (g t) l", kv=kv) @ value_KLD
    out_THD = rearrange(out_KMD, "kv (g t) d -> t (kv g) d", g=g)
    return (out_THD / rearrange(_sum(weights_HTL, -1), "h t -> t h 1")).to(query_THD.dtype)


def _decayed(query_KMD: Tensor, key_KLD: Tensor, positions_M: Tensor, decay_D: Tensor, tiles: int) -> Tensor:
    """[KV, M, L] products of xPos, as `decayed_products` of the reference makes them, all tiles at once."""
    key_KXSD = rearrange(key_KLD, "kv (x s) d -> kv x s d", x=tiles)
    tile = key_KXSD.shape[2]
    before_S = tile - 1 - torch.arange(tile, device=key_KLD.device)
    anchor_X = torch.arange(tiles, device=key_KLD.device) * tile + (tile - 1)
    # Queries before a tile see none of it.
    beyond_XM = (positions_M - anchor_X[:, None]).clamp(min=-tile)
    scaled_KXSD = key_KXSD * torch.exp2(decay_D * before_S[:, None])
    scaled_KXMD = query_KMD[:, None] * torch.exp2(decay_D * beyond_XM[..., None])
    return rearrange(scaled_KXMD @ scaled_KXSD.mT, "kv x m s -> kv m (x s)")


def _weights(scores_HML: Tensor, positions_M: Tensor, parts: Parts, setup: Setup) -> Tensor:
    """What each value counts, before the division by their sum; zero where a key is not kept.

    Args:
        scores_HML: q . k of key j in column j; columns behind a query's position may hold anything.
        positions_M: of the queries, int32.
        parts, setup: as elsewhere.
    """
    pattern, lowest = setup.pattern, float("-inf")
    scores_HML = scores_HML * float(setup.scale)
    if setup.softcap is not None:
        scores_HML = float(setup.softcap) * torch.tanh(scores_HML / float(setup.softcap))
    key_L = torch.arange(scores_HML.shape[-1], device=scores_HML.device, dtype=torch.int32)
    distance_ML = positions_M[:, None] - key_L
    if setup.bias is not None:
        scores_HML = scores_HML + bias_values(setup.bias, *parts, distance_ML, scores_HML.dtype)  # type: ignore[arg-type]
    scores_HML = torch.where(distance_ML >= 0, scores_HML, lowest)
    if not isinstance(pattern, Dense):
        always_ML = (distance_ML < pattern.window) | (key_L < pattern.sink)
        if isinstance(pattern, Window):
            kept_HML = always_ML
        else:
            ranked_HML = _group_max(scores_HML, setup) if pattern.share == "group" else scores_HML
            candidates_HML = ranked_HML
            if pattern.window or pattern.sink:
                candidates_HML = torch.where(always_ML, lowest, ranked_HML)
            best_HMk = candidates_HML.topk(pattern.k, dim=-1, sorted=False).values
            # NaN ranks highest, as in the reference, and stays in ("not below"), so that it shows in the output.
            threshold_HM1 = torch.where(best_HMk.isnan(), float("inf"), best_HMk).amin(-1, keepdim=True)
            kept_HML = always_ML | ~(ranked_HML < threshold_HM1)
        scores_HML = torch.where(kept_HML, scores_HML, lowest)
    return (scores_HML - scores_HML.amax(-1, keepdim=True)).exp()


def _group_max(scores_HML: Tensor, setup: Setup) -> Tensor:
    """[H, M, L]: the largest score over the query heads that read the same key/value head."""
    if setup.head_map is None:
        best_KML = rearrange(scores_HML, "(kv g) m l -> kv g m l", kv=setup.kv_heads).amax(1)
        return best_KML.repeat_interleave(setup.heads // setup.kv_heads, dim=0)
    best: dict[int, Tensor] = {}
    for head, kv in enumerate(setup.head_map):
        best[kv] = torch.maximum(best[kv], scores_HML[head]) if kv in best else scores_HML[head]
    return torch.stack([best[kv] for kv in setup.head_map])


def _sum(tensor: Tensor, dim: int) -> Tensor:
    """In float64: Inductor sums float32 in one of two ways by length, so that it would compile again for long contexts."""
    return tensor.sum(dim, dtype=torch.float64)


def _exact(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@cache
def _on_device(head_map: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(head_map, device=device)


def _check(cache_BKNC: Tensor, batch: Batch, setup: Setup, bias: Bias | None, decay_D: Tensor | None) -> None:
    heads, kv_heads, head_map = setup.heads, setup.kv_heads, setup.head_map
    if cache_BKNC.shape[3] != 2 * setup.size:
        raise ValueError(f"cache_BKNC has {cache_BKNC.shape[3]} channels; expected {2 * setup.size}, 2 * head size")
    if head_map is None and heads % kv_heads:
        raise ValueError(f"query_THD has {heads} heads; expected a multiple of {kv_heads}, or a head_map")
    if head_map is not None and len(head_map) != heads:
        raise ValueError(f"head_map has {len(head_map)} entries; expected {heads}, one per query head")
    if head_map is not None and not all(0 <= kv < kv_heads for kv in head_map):
        raise ValueError(f"head_map is {list(head_map)}; expected indices from 0 to {kv_heads - 1}")
    if bias is not None:
        bias.check(heads)
    if decay_D is not None and decay_D.shape != (setup.size,):
        raise ValueError(f"decay_D has shape {tuple(decay_D.shape)}; expected ({setup.size},), one per channel")
    lengths, starts = batch.host
    for request, length in enumerate(lengths):
        tokens = starts[request + 1] - starts[request]
        if length < tokens:
            raise ValueError(f"request {request} has {length} tokens; expected at least {tokens}, its query tokens")
