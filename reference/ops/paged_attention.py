"""Causal attention of a batch of requests over a paged key/value cache.

Legend: T packed query tokens of all requests, R requests, H query heads, KV key/value heads, D head size, B blocks in
the cache, N tokens per block, P blocks per request at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from tiers.reference.ops.attention import Pattern, attention
from tiers.reference.ops.bias import Bias


@dataclass
class Batch:
    """Which tokens belong to which request, and where their keys and values lie. One per step, shared by all layers.

    Attributes:
        block_table_RP: [R, P] integer block ids; entries past ceil(length / N) are stale and must not be read.
        lengths_R: [R] integer, tokens of each request in the cache, its query tokens included; 0 for a padding row.
        starts_R1: [R + 1] integer, offsets into the packed query tokens; tokens past the last are padding.
        max_query: at least the query tokens of every request.
        max_length: at least the length of every request.
        memo: what an implementation works out from the others, for the layers that follow.
    """

    block_table_RP: Tensor
    lengths_R: Tensor
    starts_R1: Tensor
    max_query: int
    max_length: int
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False, kw_only=True)

    @cached_property
    def host(self) -> tuple[list[int], list[int]]:
        """Lengths and starts as Python numbers. Waits for the device, once; not for use while a graph is captured."""
        return self.lengths_R.tolist(), self.starts_R1.tolist()

    @property
    def bounds(self) -> tuple[list[int], list[int]]:
        """As `host`, but the lengths may be too large: for sizes of buffers, where waiting for the device is to be avoided."""
        return self.host


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
    """Gather the pages of each request and call `attention` on them.

    Args:
        query_THD: [T, H, D]; the queries of request r are rows starts[r] to starts[r + 1].
        cache_BKNC: [B, KV, N, 2 * D], keys in the first D channels and values in the rest, any strides. The keys and
            values of the query tokens are already in it.
        batch: see there.
        scale, pattern, head_map, bias, decay_D, softcap: as in `attention`.

    Returns:
        [T, H, D] in the dtype of the query; zero in padding rows.

    Raises:
        ValueError: as `attention`; or a request with more query tokens than tokens.

    Source: the paged layout is vLLM's (Kwon et al. 2023, 2309.06180).
    """
    out_THD = torch.zeros_like(query_THD)
    size, page = query_THD.shape[2], cache_BKNC.shape[2]
    lengths, starts = batch.host
    for request, length in enumerate(lengths):
        start, stop = starts[request], starts[request + 1]
        if start == stop:
            continue
        blocks = batch.block_table_RP[request, : -(-length // page)]
        tokens = rearrange(cache_BKNC[blocks], "p kv n c -> (p n) kv c")[:length]
        out_THD[start:stop] = attention(
            query_THD[start:stop], tokens[..., :size], tokens[..., size:],
            scale=scale, pattern=pattern, head_map=head_map, bias=bias, decay_D=decay_D, softcap=softcap,
        )  # fmt: skip
    return out_THD
