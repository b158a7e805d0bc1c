"""Mixture of experts through torch.compile: tokens sorted by expert, and products of all experts at once.

Legend: T tokens, M model width, E experts, K experts per token, F inner width, L experts that are held here, R = T * K rows,
N blocks of B rows, each of one expert.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tiers.compiled.options import compiled, first_size_varies, kinds
from tiers.reference.config import Moe
from tiers.reference.ops.moe import ACTIVATIONS, check, route

# Rows per block at least; smaller ones would waste products of matrices.
SMALLEST_BLOCK = 16


def moe(
    hidden_TM: Tensor,
    logits_TE: Tensor,
    correction_E: Tensor | None,
    gate_LFM: Tensor | Sequence[Tensor],
    up_LFM: Tensor | Sequence[Tensor],
    down_LMF: Tensor | Sequence[Tensor],
    routing: Moe,
    first: int = 0,
) -> Tensor:
    """Same contract as the reference. Compiles once for all numbers of tokens.

    In bfloat16 torch's grouped product takes the sorted rows as they are, if M and F are multiples of 8. It has no other
    dtypes under torch.compile; there the rows of each expert are filled up to whole blocks, at most 2 L of them (or one per
    row), and the blocks are multiplied as a batch, each by a copy of its expert's matrix.
    """
    check(hidden_TM, logits_TE, correction_E, gate_LFM, up_LFM, down_LMF, routing, first)
    if not len(hidden_TM):
        return hidden_TM.clone()
    gate, up, down = (w if isinstance(w, Tensor) else torch.stack(tuple(w)) for w in (gate_LFM, up_LFM, down_LMF))
    tokens = first_size_varies(hidden_TM, logits_TE)
    scaling, routing = routing.routed_scaling_factor, _unscaled(routing)
    variant = kinds(hidden_TM, logits_TE, correction_E, gate)
    if hidden_TM.dtype == torch.bfloat16 and not hidden_TM.shape[1] % 8 and not down.shape[2] % 8:
        function = compiled(_grouped, variant, routing=routing, first=first)
        return function(*tokens, correction_E, gate, up, down, scaling)
    block, blocks = block_sizes(len(hidden_TM) * routing.top_k, len(down))
    # Its shape tells the code how many blocks there may be; both sizes vary.
    places_NB = torch.arange(blocks * block, device=hidden_TM.device).view(blocks, block)
    torch._dynamo.decorators.mark_unbacked(places_NB, 0)
    torch._dynamo.mark_dynamic(places_NB, 1)  # never 1
    function = compiled(_blocked, variant, routing=routing, first=first)
    return function(*tokens, correction_E, gate, up, down, scaling, places_NB)


@cache
def _unscaled(routing: Moe) -> Moe:
    """A number that is not whole would be an input of the code, of a kind that torch 2.11 cannot read from the disk."""
    return replace(routing, routed_scaling_factor=1)


def block_sizes(rows: int, experts: int) -> tuple[int, int]:
    """Rows of a block, and blocks that are enough however the rows fall on the experts: each may have one that is not full."""
    block = max(SMALLEST_BLOCK, -(-rows // experts))
    return block, rows // block + min(rows, experts)


def _sorted(
    logits_TE: Tensor, correction_E: Tensor | None, held: int, scaling: float, routing: Moe, first: int
) -> tuple[Tensor, ...]:
    """[R] weights by token and choice, the order that sorts rows by expert, [R] experts in that order (`held` for those
    that are not held here), and the [L] numbers of rows of each."""
    weights_TK, ids_TK = route(logits_TE, correction_E, routing)
    ids_R = ids_TK.flatten() - first
    ids_R = torch.where((ids_R >= 0) & (ids_R < held), ids_R, held)
    sorted_R, order_R = ids_R.sort(stable=True)
    counts_L = (ids_R[:, None] == torch.arange(held, device=ids_R.device)).sum(dim=0)
    return (weights_TK * scaling).flatten(), order_R, sorted_R, counts_L


def _combined(y_RM: Tensor, weights_R: Tensor, order_R: Tensor, hidden_TM: Tensor, routing: Moe) -> Tensor:
    """Rows back in the order of tokens and choices, mixed by their weights."""
    exact = weights_R.dtype
    back_R = torch.empty_like(order_R).scatter(0, order_R, torch.arange(len(order_R), device=order_R.device))
    rows_RM = y_RM[back_R].to(exact) * weights_R[:, None]
    return rows_RM.unflatten(0, (-1, routing.top_k)).sum(dim=1).to(hidden_TM.dtype)


def _grouped(
    hidden_TM: Tensor, logits_TE: Tensor, correction_E: Tensor | None, gate_LFM: Tensor, up_LFM: Tensor, down_LMF: Tensor,
    scaling: float, *, routing: Moe, first: int,
) -> Tensor:  # fmt: skip
    weights_R, order_R, sorted_R, counts_L = _sorted(
        logits_TE, correction_E, down_LMF.shape[0], scaling, routing, first
    )
    ends_L = counts_L.cumsum(0).to(torch.int32)
    x_RM = hidden_TM[order_R // routing.top_k]
    gate_RF = F.grouped_mm(x_RM, gate_LFM.mT, offs=ends_L)
    inner_RF = ACTIVATIONS[routing.activation](gate_RF) * F.grouped_mm(x_RM, up_LFM.mT, offs=ends_L)
    y_RM = F.grouped_mm(inner_RF, down_LMF.mT, offs=ends_L)
    # Rows of experts that are held elsewhere come last and were not written.
    y_RM = torch.where((sorted_R < down_LMF.shape[0])[:, None], y_RM, 0)
    return _combined(y_RM, weights_R, order_R, hidden_TM, routing)


def _blocked(
    hidden_TM: Tensor, logits_TE: Tensor, correction_E: Tensor | None, gate_LFM: Tensor, up_LFM: Tensor, down_LMF: Tensor,
    scaling: float, places_NB: Tensor, *, routing: Moe, first: int,
) -> Tensor:  # fmt: skip
    held, block = down_LMF.shape[0], places_NB.shape[1]
    weights_R, order_R, sorted_R, counts_L = _sorted(logits_TE, correction_E, held, scaling, routing, first)
    blocks_L = (counts_L + block - 1) // block
    ends_L = blocks_L.cumsum(0)
    # Where the rows of each expert begin, among the sorted rows and among the places of all blocks.
    expert_R = sorted_R.clamp(max=held - 1)
    row_R = torch.arange(len(sorted_R), device=sorted_R.device)
    place_R = ((ends_L - blocks_L) * block - (counts_L.cumsum(0) - counts_L))[expert_R] + row_R
    # Rows of experts that are held elsewhere go to a place behind all others.
    here_R = sorted_R < held
    place_R = torch.where(here_R, place_R, places_NB.numel())
    # An unused place reads the last token, and nobody reads it.
    token = hidden_TM.shape[0] - 1
    tokens = torch.full((places_NB.numel() + 1,), token, device=place_R.device).scatter(
        0, place_R, order_R // routing.top_k
    )
    x_NBM = hidden_TM[tokens[:-1]].view(places_NB.shape[0], block, hidden_TM.shape[1])
    expert_N = torch.searchsorted(ends_L, places_NB[:, 0] // block, right=True).clamp(max=held - 1)
    gate_NBF = ACTIVATIONS[routing.activation](x_NBM @ gate_LFM[expert_N].mT)
    y_NBM = (gate_NBF * (x_NBM @ up_LFM[expert_N].mT)) @ down_LMF[expert_N].mT
    y_RM = torch.where(here_R[:, None], y_NBM.flatten(0, 1)[place_R.clamp(max=places_NB.numel() - 1)], 0)
    return _combined(y_RM, weights_R, order_R, hidden_TM, routing)
