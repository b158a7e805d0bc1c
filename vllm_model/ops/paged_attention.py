"""Attention over a paged cache, in Triton. Same contract as the reference; dispatch.py knows its limits.

Top-k in topk_attention.py; windows, and what vLLM's own dense attention cannot do, in flash_attention.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tiers.reference.config import TopK
from tiers.reference.ops.attention import Pattern
from tiers.reference.ops.bias import Bias
from tiers.reference.ops.paged_attention import Batch
from tiers.vllm_model.ops import flash_attention as flash
from tiers.vllm_model.ops import topk_attention as topk
from tiers.vllm_model.ops.workspace import SLACK

# What `warm_up` has seen.
_warm: set[Any] = set()


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
    """Same contract as the reference; needs contiguous head groups of one size."""
    if head_map is not None:
        raise ValueError(f"head_map is {head_map}; expected contiguous groups")
    out_THD = torch.empty_like(query_THD)
    fill(
        query_THD, cache_BKNC, batch, out_THD, scale=scale, pattern=pattern, bias=bias, decay_D=decay_D, softcap=softcap
    )
    return out_THD


def fill(
    query_THD: Tensor, cache_BKNC: Tensor, batch: Batch, out_THD: Tensor, *,
    scale: float, pattern: Pattern, bias: Bias | None, decay_D: Tensor | None, softcap: float | None,
) -> None:  # fmt: skip
    """As `paged_attention`, into memory that is there already: vLLM hands it over, and a copy would be a launch more."""
    attend: Callable[..., None] = topk.topk_attention if isinstance(pattern, TopK) else flash.flash_attention
    # With one token per request top-k writes every row; else rows past all requests are not written.
    if not isinstance(pattern, TopK) or batch.max_query != 1 or len(query_THD) != len(batch.lengths_R):
        out_THD.zero_()
    attend(
        query_THD, cache_BKNC, batch, out_THD, scale=scale, pattern=pattern, bias=bias, decay_D=decay_D, softcap=softcap
    )


def workspace_bytes(pattern: Pattern, heads: int, kv_heads: int, size: int, tokens: int, longest: int) -> int:
    """Bytes that a step holds beside its arguments.

    Args:
        pattern, heads, kv_heads, size: of the layer.
        tokens: query tokens of a step at most.
        longest: context at most.
    """
    if isinstance(pattern, TopK):
        return topk.workspace_bytes(pattern, heads, kv_heads, size, tokens, longest)
    return topk.partial_bytes(heads, kv_heads, size) + SLACK


def _kind(bias: Bias | None) -> Any:
    """What kernels are compiled for of a bias."""
    return None if bias is None else (bias.kind, None if bias.table_RL is None else len(bias.table_RL))


def warm_up(cache_BKNC: Tensor, heads: int, tokens: int, longest: int, **options: Any) -> None:
    """Compile every kernel that serving can ask for, by running it on the first block of the cache.

    Compiled kernels are kept on disk, so that a second start takes no time.

    Args:
        cache_BKNC: the live cache of a layer; only read.
        heads: query heads.
        tokens: query tokens of a step at most; what was reserved holds no more.
        longest: context at most.
        options: scale, pattern, bias, decay_D, softcap as of `paged_attention`.
    """
    pattern, size = options["pattern"], cache_BKNC.shape[3] // 2
    if isinstance(pattern, TopK):
        choosers = cache_BKNC.shape[1] if pattern.share == "group" else heads
        batches = topk.batches_to_compile(pattern, choosers, longest)
    else:
        batches = [(1, 1, 1), (1, 1, longest), (1, min(2, longest), longest)]
    key = (
        tokens, tuple(batches), pattern, heads, cache_BKNC.shape[1:], cache_BKNC.dtype,
        _kind(options["bias"]), options["decay_D"] is None, options["softcap"] is None,
    )  # fmt: skip
    if key in _warm:
        return
    _warm.add(key)
    for requests, queries, length in (b for b in batches if b[0] * b[1] <= tokens):
        query = torch.zeros(requests * queries, heads, size, dtype=cache_BKNC.dtype, device=cache_BKNC.device)
        pages = -(-length // cache_BKNC.shape[2])
        batch = Batch(
            torch.zeros(requests, pages, dtype=torch.int32, device=query.device),
            torch.full((requests,), length, dtype=torch.int32, device=query.device),
            torch.arange(requests + 1, dtype=torch.int32, device=query.device) * queries,
            queries, length,
        )  # fmt: skip
        paged_attention(query, cache_BKNC, batch, **options)
