"""Causal attention of a batch of requests over a paged key/value cache.

Legend: T packed query tokens of all requests, R requests, H query heads, KV key/value heads, D head size, B blocks in
the cache, N tokens per block, P blocks per request at most.
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from tiers.reference.ops.attention import Pattern, attention


def paged_attention(
    query_THD: Tensor,
    cache_BKNC: Tensor,
    block_table_RP: Tensor,
    lengths_R: Sequence[int],
    starts_R1: Sequence[int],
    *,
    scale: float,
    pattern: Pattern,
    head_map: Sequence[int] | None = None,
    slopes_H: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Gather the pages of each request and call `attention` on them.

    Args:
        query_THD: [T, H, D]; the queries of request r are rows starts_R1[r] to starts_R1[r + 1].
        cache_BKNC: [B, KV, N, 2 * D], keys in the first D channels and values in the rest, any strides. The keys and
            values of the query tokens are already in it.
        block_table_RP: [R, P] integer block ids; entries past ceil(length / N) are stale and are not read.
        lengths_R: tokens of each request in the cache, its query tokens included; 0 for a padding row.
        starts_R1: R + 1 offsets into the packed query tokens. Rows of query_THD past the last are padding.
        scale, pattern, head_map, slopes_H, softcap: as in `attention`.

    Returns:
        [T, H, D] in the dtype of the query; zero in padding rows.

    Raises:
        ValueError: as `attention`; or a request with more query tokens than tokens.

    Source: the paged layout is vLLM's (Kwon et al. 2023, 2309.06180).
    """
    out_THD = torch.zeros_like(query_THD)
    size, page = query_THD.shape[2], cache_BKNC.shape[2]
    for request, length in enumerate(lengths_R):
        start, stop = starts_R1[request], starts_R1[request + 1]
        if start == stop:
            continue
        blocks = block_table_RP[request, : -(-length // page)]
        tokens = rearrange(cache_BKNC[blocks], "p kv n c -> (p n) kv c")[:length]
        out_THD[start:stop] = attention(
            query_THD[start:stop], tokens[..., :size], tokens[..., size:],
            scale=scale, pattern=pattern, head_map=head_map, slopes_H=slopes_H, softcap=softcap,
        )  # fmt: skip
    return out_THD
