"""Compare a tier with the reference before it serves.

Attention is compared on the cache that it is about to serve from. A wrong offset shows only at the block ids of a real,
large cache, so the check borrows its first, middle and last blocks and puts back what was in them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tiers.reference.config import TopK, Window
from tiers.reference.ops.attention import Pattern
from tiers.reference.ops.knowledge_gate import beside
from tiers.reference.ops.paged_attention import Batch, paged_attention

# Largest difference that rounding explains, relative to the largest value. Float32: sums in another order.
# 16 bits: the reference rounds once, a tier may round the weights too.
BUDGET = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# Numbers of tokens on which an operator of single tokens is compared: a tier may go different ways for one token, for few
# and for many.
TOKENS = (1, 17, 64, 100, 257)

# Scores that the reference holds at most for the sake of a check.
MOST_SCORES = 2**24


def self_check(
    function: Callable[..., Tensor], cache_BKNC: Tensor, heads: int, longest: int, tokens: int, **options: Any
) -> str | None:
    """Run a decode batch, a prefill batch, and for top-k a part of a prompt on both implementations.

    Args:
        function: the tier's `paged_attention`.
        cache_BKNC: the live cache of a layer; the same after the call as before.
        heads: query heads.
        longest: context at most.
        tokens: query tokens of a step at most.
        options: as of `paged_attention`.

    Returns:
        None if they agree, else what went wrong, e.g. "differs from the reference by 0.3 (budget 0.01)".
    """
    count = len(cache_BKNC)
    blocks = torch.tensor(sorted({0, count // 2, count - 1}), device=cache_BKNC.device)
    if len(blocks) < 3:
        return None  # nothing to borrow
    saved = cache_BKNC[blocks].clone()
    try:
        return _compare(function, cache_BKNC, blocks, heads, longest, tokens, options)
    except Exception as error:  # whatever a compiler or driver raises: the tier cannot serve
        return f"failed ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"
    finally:
        cache_BKNC[blocks] = saved


def check_tokens(
    function: Callable[..., Tensor], reference: Callable[..., Tensor], like: Sequence[Tensor], rest: Sequence[Any]
) -> str | None:
    """Run an operator that treats every token by itself on random tokens, on a tier and on the reference.

    Args:
        function: the tier's.
        reference: the same of the reference.
        like: its first arguments, [T, width] each; only their width, dtype and device count.
        rest: its other arguments, used as they are: the layer's own parameters.

    Returns:
        None if they agree, else what went wrong, as `self_check`.
    """
    device, budget = like[0].device, BUDGET[like[0].dtype]
    generator = torch.Generator(device).manual_seed(0)
    try:
        for count in TOKENS:
            tokens = [
                torch.randn(count, x.shape[1], generator=generator, device=device, dtype=torch.float32).to(x.dtype)
                for x in like
            ]
            expected, actual = reference(*tokens, *rest).float(), function(*tokens, *rest).float()
            difference, largest = (actual - expected).abs().max(), expected.abs().max()
            if not difference <= budget * largest:  # so NaN is no agreement, and zeros only of zeros are
                error = (difference / largest).item()
                return f"differs from the reference by {error:.3g} of the largest value (budget {budget:g})"
    except Exception as error:  # whatever a compiler or driver raises: the tier cannot serve
        return f"failed ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"
    return None


def folding(function: Callable[..., Tensor], weight_M2M: Tensor) -> Callable[..., Tensor]:
    """A tier's `knowledge_gate` with the arguments that its reference has, called with the known product in place of the other."""

    def folded(hidden_TM: Tensor, knowledge_TM: Tensor, *rest: Any) -> Tensor:
        # Halves of a wider tensor, as from a bank.
        knowledge_TM, folded_TM = beside(knowledge_TM, weight_M2M).chunk(2, dim=1)
        return function(hidden_TM, knowledge_TM, *rest, folded_TM)

    return folded


def _compare(
    function: Callable[..., Tensor],
    cache_BKNC: Tensor,
    blocks: Tensor,
    heads: int,
    longest: int,
    most_tokens: int,
    options: dict[str, Any],
) -> str | None:
    _, _, page, width = cache_BKNC.shape
    generator = torch.Generator(cache_BKNC.device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=cache_BKNC.device).to(cache_BKNC.dtype)

    cache_BKNC[blocks] = randn(*cache_BKNC[blocks].shape)
    # Long enough for a selection to leave something out. The three blocks are repeated, so that many keys tie.
    pattern = options["pattern"]
    pages = max(3, -(-min(_candidates(pattern) + 2 * page, longest) // page))
    batches = [([1, 1], pages), ([5, 1], pages)]
    # Top-k has other kernels for as many rows as the matrix unit takes at once, if all see four times the keys that are kept.
    rows = 128 * cache_BKNC.shape[1] // heads + 8
    many = max(pages, -(-min(2 * _candidates(pattern) + rows + page, longest) // page))
    rows = min(rows, most_tokens - 1, many * page - 3)
    if isinstance(pattern, TopK) and rows > 5 and rows * heads * many * page <= MOST_SCORES:
        batches.append(([rows, 1], many))
    for queries, pages in batches:
        length = pages * page - 3
        starts = torch.tensor([0, queries[0], sum(queries)], dtype=torch.int32, device=cache_BKNC.device)
        lengths = torch.tensor([length, page + 1], dtype=torch.int32, device=cache_BKNC.device)
        order = torch.arange(pages, device=blocks.device) % len(blocks)
        table = torch.stack((blocks[order], blocks.flip(0)[order])).to(torch.int32)
        batch = Batch(table, lengths, starts, max(queries), length)
        query = randn(sum(queries), heads, width // 2)
        expected = paged_attention(query, cache_BKNC, batch, **options).float()
        actual = function(query, cache_BKNC, batch, **options).float()
        error = ((actual - expected).abs().max() / expected.abs().max()).item()
        if not error <= BUDGET[cache_BKNC.dtype]:
            return (
                f"differs from the reference by {error:.3g} of the largest value (budget {BUDGET[cache_BKNC.dtype]:g})"
            )
    return None


def _candidates(pattern: Pattern) -> int:
    """A context of which the pattern leaves about half out."""
    if isinstance(pattern, TopK):
        return 2 * pattern.k + pattern.sink + pattern.window
    return 2 * (pattern.window + pattern.sink) if isinstance(pattern, Window) else 0
