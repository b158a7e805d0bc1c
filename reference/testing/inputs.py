"""Seeded inputs for operators, and the named cases that every tier is tested on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tiers.reference.config import Dense, TopK, Window
from tiers.reference.ops.attention import Pattern
from tiers.reference.ops.bias import bias_of
from tiers.reference.ops.paged_attention import Batch
from tiers.reference.ops.xpos import xpos_decay
from tiers.reference.positions import T5, Alibi, Kerple, NoPosition, Position, Sandwich, Xpos, learned

PATTERNS: dict[str, Pattern] = {
    "dense": Dense(),
    "window": Window(9, 2),
    "topk": TopK(6, 1, 2),
    "topk per group": TopK(6, 1, 2, "group"),
}

# One position of each kind that changes scores inside attention.
POSITIONS: dict[str, Position] = {
    "none": NoPosition(),
    "alibi": Alibi(),
    "alibi sqrt": Alibi(distance="sqrt"),
    "sandwich": Sandwich(16),
    "kerple": Kerple(),
    "t5": T5(num_buckets=8, max_distance=20),
    "xpos": Xpos(scale_base=24.0),
}

# name -> (query tokens, tokens in the cache) of each request
BATCHES: dict[str, list[tuple[int, int]]] = {
    "one decode": [(1, 33)],
    "one prefill": [(33, 33)],
    "decodes": [(1, 1), (1, 16), (1, 17), (1, 63)],
    "mixed": [(1, 40), (7, 7), (13, 60), (1, 1), (32, 32)],
    "padding rows": [(1, 40), (0, 0), (5, 20), (0, 0), (0, 0)],
    "only padding": [(0, 0), (0, 0)],
    "a request without queries": [(1, 5), (0, 31), (2, 8)],
}


def position_options(
    position: Position, heads: int, size: int, length: int, device: str = "cpu", seed: int = 7
) -> dict[str, Any]:
    """`bias` and `decay_D` of attention for one kind of positions; what is learned of them is random.

    Args:
        position: any kind; rope has no part in attention itself.
        heads, size: query heads and channels of a head.
        length: tokens of the longest context.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = learned(position, heads).items()
    drawn = {name: torch.rand(shape, generator=generator).to(device) for name, shape in shapes}
    decay_D = xpos_decay(position, size).to(device) if isinstance(position, Xpos) else None
    return {"bias": bias_of(position, heads, size, length, drawn, device), "decay_D": decay_D}


# Decode, a prompt, a chunk behind what may be pages of another request (`PagedInputs.sharing`), a first token; few rows, for
# what is slow.
FEW_ROWS = [(1, 40), (5, 5), (6, 38), (1, 1)]


@dataclass
class PagedInputs:
    """Requests in a paged cache, and the same requests as plain tensors.

    Attributes:
        queries, keys, values: per request, [T_r, H, D] and [S_r, KV, D].
        query_THD: packed, with two padding rows of NaN.
        cache_BKNC: NaN wherever no request owns a token.
        batch: block table with stale entries outside the cache.
    """

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    query_THD: Tensor
    cache_BKNC: Tensor
    batch: Batch

    def rows(self, request: int) -> slice:
        """Where the query tokens of a request are."""
        starts = self.batch.host[1]
        return slice(starts[request], starts[request + 1])

    def sharing(self) -> "PagedInputs":
        """The same, but request 2 begins with the pages of request 0, as after a hit in the prefix cache."""
        table = self.batch.block_table_RP.clone()
        pages = min(self.batch.host[0][0], self.batch.host[0][2]) // self.cache_BKNC.shape[2]
        table[2, :pages] = table[0, :pages]
        return replace(self, batch=replace(self.batch, block_table_RP=table))

    def to(self, device: str) -> "PagedInputs":
        """The same on another device, with the memory layout of the cache kept."""
        batch = Batch(
            self.batch.block_table_RP.to(device), self.batch.lengths_R.to(device), self.batch.starts_R1.to(device),
            self.batch.max_query, self.batch.max_length,
        )  # fmt: skip
        return replace(self, query_THD=self.query_THD.to(device), cache_BKNC=self.cache_BKNC.to(device), batch=batch)


def make_batch(
    requests: Sequence[tuple[int, int]],
    page: int,
    layout: str,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 20,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedInputs:
    """Scatter random requests over the pages of a cache; whatever no request owns is NaN."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    queries = [randn(tokens, heads, size) for tokens, _ in requests]
    keys = [randn(length, kv_heads, size) for _, length in requests]
    values = [randn(length, kv_heads, size) for _, length in requests]
    needed = [-(-length // page) for _, length in requests]
    blocks = sum(needed) + 3
    if layout == "HND":
        cache = torch.full((blocks, kv_heads, page, 2 * size), float("nan"), dtype=dtype)
    else:
        cache = torch.full((blocks, page, kv_heads, 2 * size), float("nan"), dtype=dtype).permute(0, 2, 1, 3)
    order = iter(torch.randperm(blocks, generator=generator).tolist())
    # Stale entries lie outside the cache: reading one would raise.
    table = torch.full((len(requests), max(needed) + 2), 10**6, dtype=torch.int32)
    table[:, 1::2] *= -1
    for request, number in enumerate(needed):
        for i in range(number):
            block = table[request, i] = next(order)
            part = slice(i * page, (i + 1) * page)
            both = torch.cat((keys[request][part], values[request][part]), dim=-1)
            cache[block, :, : len(both)] = both.transpose(0, 1)
    starts = [0]
    for tokens, _ in requests:
        starts.append(starts[-1] + tokens)
    query = torch.cat([*queries, torch.full((2, heads, size), float("nan"), dtype=dtype)])
    batch = Batch(
        table,
        torch.tensor([length for _, length in requests], dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        max(tokens for tokens, _ in requests),
        max(length for _, length in requests),
    )
    return PagedInputs(queries, keys, values, query, cache, batch)
