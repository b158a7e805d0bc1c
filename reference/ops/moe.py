"""Mixture of experts: which experts each token uses, and what they compute.

Legend: T tokens, M model width, E experts, K experts per token, F inner width of an expert, L experts that are held here.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tiers.reference.config import Moe

# DeepSeek's: keeps the sum of the chosen scores away from 0, which sigmoids of very negative logits round to.
_TINY = 1e-20


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
    """The sum over a token's experts of weight * down(act(gate x) * up x).

    Experts and weights are those of `route`. Sums over experts are in float32 (float64 for float64 input), rounded once.

    Args:
        hidden_TM: [T, M].
        logits_TE: [T, E] what the router says, float32.
        correction_E: [E] float32, or None; see `route`.
        gate_LFM, up_LFM: [F, M] weights of each expert that is held here: a list of them, or one tensor.
        down_LMF: [M, F] of each.
        routing: how experts are chosen, and the activation.
        first: the expert that the first of these weights belongs to. Experts that are not held here add nothing, so the
            sum over all ranks that each hold some is the whole.

    Returns:
        [T, M] in the dtype of hidden_TM, newly allocated.

    Raises:
        ValueError: shapes disagree; names the argument, what was expected and what came.

    Source: Shazeer et al. 2017 (1701.06538) section 2; Mixtral (2401.04088) section 2.1.
    """
    check(hidden_TM, logits_TE, correction_E, gate_LFM, up_LFM, down_LMF, routing, first)
    weights_TK, ids_TK = route(logits_TE, correction_E, routing)
    return mix(hidden_TM, weights_TK, ids_TK - first, gate_LFM, up_LFM, down_LMF, routing.activation)


def route(logits_TE: Tensor, correction_E: Tensor | None, routing: Moe) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token.

    Scores s are softmax(logits) or sigmoid(logits). Chosen are the K largest s + correction; with groups, of the experts in
    the best groups only (the groups being consecutive experts). The correction takes part in the choice alone: weights are
    the s of the chosen, divided by their sum if `renormalize`, times routed_scaling_factor.

    Args:
        logits_TE: [T, E] float32.
        correction_E: [E] float32 added to the scores for the choice; None for zero.
        routing: the rule.

    Returns:
        [T, K] weights in the dtype of the logits, and [T, K] ids, largest score first. Of equal scores any may be taken.

    Source: DeepSeek-V2 (2405.04434) section 2.2.2 for groups (score "max"); DeepSeek-V3 (2412.19437) section 2.1.2 for
    sigmoid, correction and group score "top2".
    """
    scores_TE = logits_TE.softmax(dim=-1) if routing.score == "softmax" else logits_TE.sigmoid()
    ranked_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if routing.groups > 1:
        groups = ranked_TE.unflatten(-1, (routing.groups, -1))
        best = groups.topk(2 if routing.group_score == "top2" else 1, dim=-1).values.sum(dim=-1)
        chosen = best.topk(routing.top_groups, dim=-1).indices
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True)
        ranked_TE = groups.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
    ids_TK = ranked_TE.topk(routing.top_k, dim=-1).indices
    weights_TK = scores_TE.gather(-1, ids_TK)
    if routing.renormalize:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + _TINY)
    return weights_TK * routing.routed_scaling_factor, ids_TK


def mix(
    hidden_TM: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    gate_LFM: Tensor | Sequence[Tensor],
    up_LFM: Tensor | Sequence[Tensor],
    down_LMF: Tensor | Sequence[Tensor],
    activation: str,
) -> Tensor:
    """What the chosen experts compute, mixed by their weights; arguments as of `moe`.

    An id outside of 0 to L - 1 is of an expert that is not held here. An expert that a token names twice counts twice.
    """
    exact = torch.float64 if hidden_TM.dtype == torch.float64 else torch.float32
    out_TM = torch.zeros_like(hidden_TM, dtype=exact)
    # A CUDA graph cannot ask how many tokens an expert has; there every expert is given all of them.
    all_rows = hidden_TM.is_cuda and torch.cuda.is_current_stream_capturing()
    for expert in range(len(down_LMF)):
        chosen_TK = ids_TK == expert
        weight_T = torch.where(chosen_TK, weights_TK, 0).sum(dim=-1).to(exact)
        if all_rows:
            y = _expert(hidden_TM, gate_LFM[expert], up_LFM[expert], down_LMF[expert], activation).to(exact)
            # Not by a weight of 0: what an expert makes of tokens that it was not given may be infinite.
            out_TM = out_TM + torch.where(chosen_TK.any(dim=-1)[:, None], weight_T[:, None] * y, 0)
            continue
        rows = chosen_TK.any(dim=-1).nonzero().squeeze(-1)
        if len(rows):
            y = _expert(hidden_TM[rows], gate_LFM[expert], up_LFM[expert], down_LMF[expert], activation).to(exact)
            out_TM = out_TM.index_add(0, rows, weight_T[rows, None] * y)
    return out_TM.to(hidden_TM.dtype)


def _expert(x_TM: Tensor, gate_FM: Tensor, up_FM: Tensor, down_MF: Tensor, activation: str) -> Tensor:
    return F.linear(ACTIVATIONS[activation](F.linear(x_TM, gate_FM)) * F.linear(x_TM, up_FM), down_MF)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def balance(logits_TE: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
    """How evenly tokens are spread over experts.

    loss = E * sum_e f_e * P_e, where f_e is the share of the T * K choices that fell on expert e and P_e the mean over
    tokens of softmax(logits)_e: 1 where both are even, up to E where one expert gets everything.

    Args:
        logits_TE: [T, E], T at least 1.
        ids_TK: [T, K] chosen experts.

    Returns:
        [E] tokens per expert (int64), and the loss (a number in the dtype of the logits).

    Source: Switch Transformer (2101.03961) equations 4 to 6, which choose one expert per token; f_e over all K choices is
    the usual extension. Without its factor alpha.
    """
    experts = logits_TE.shape[1]
    counts_E = torch.bincount(ids_TK.flatten(), minlength=experts)
    share_E = counts_E.to(logits_TE.dtype) / ids_TK.numel()
    return counts_E, experts * (share_E * logits_TE.softmax(dim=-1).mean(dim=0)).sum()


def check(
    hidden_TM: Tensor,
    logits_TE: Tensor,
    correction_E: Tensor | None,
    gate_LFM: Tensor | Sequence[Tensor],
    up_LFM: Tensor | Sequence[Tensor],
    down_LMF: Tensor | Sequence[Tensor],
    routing: Moe,
    first: int,
) -> None:
    """Raises:
    ValueError: see `moe`.
    """
    tokens, width = hidden_TM.shape
    experts, held = routing.num_experts, len(down_LMF)
    if logits_TE.shape != (tokens, experts):
        raise ValueError(f"logits_TE has shape {tuple(logits_TE.shape)}; expected ({tokens}, {experts})")
    if correction_E is not None and correction_E.shape != (experts,):
        raise ValueError(f"correction_E has shape {tuple(correction_E.shape)}; expected ({experts},)")
    if (correction_E is not None) != routing.correction_bias:
        raise ValueError(
            f"correction_E is {'given' if correction_E is not None else 'None'}; routing.correction_bias is "
            f"{routing.correction_bias}"
        )
    if not 0 < held <= experts or not 0 <= first <= experts - held:
        raise ValueError(f"down_LMF has {held} experts from {first} on; expected some of the {experts}")
    inner = down_LMF[0].shape[-1]
    for name, weights, shape in (
        ("gate_LFM", gate_LFM, (inner, width)), ("up_LFM", up_LFM, (inner, width)), ("down_LMF", down_LMF, (width, inner)),
    ):  # fmt: skip
        if len(weights) != held:
            raise ValueError(f"{name} has {len(weights)} experts; expected {held}, as down_LMF")
        if weights[0].shape != shape:
            raise ValueError(f"{name} has experts of shape {tuple(weights[0].shape)}; expected {shape}")
