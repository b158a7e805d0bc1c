"""Causal attention over the keys that a pattern keeps.

Legend: T query tokens, S key tokens (S >= T), H query heads, KV key/value heads, G query heads per key/value head,
D head size. Query t sits at position i = S - T + t, key j at position j.
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from tiers.reference.config import Dense, TopK, Window
from tiers.reference.ops.bias import Bias
from tiers.reference.ops.xpos import decayed_products

Pattern = Dense | Window | TopK

# Scores held at once, in elements: 64 MiB in float32. Longer prompts are done in blocks of queries, whose rows are
# independent of each other.
MAX_SCORES = 2**24


def attention(
    query_THD: Tensor,
    key_SKD: Tensor,
    value_SKD: Tensor,
    *,
    scale: float,
    pattern: Pattern,
    head_map: Sequence[int] | None = None,
    bias: Bias | None = None,
    decay_D: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend from the last T of S tokens to all tokens up to their own, as far as the pattern keeps them.

    s(h,i,j) = softcap(scale * q_i . k_j) + bias(h, i - j) for j <= i, in float32 (float64 for float64 input);
    softcap(x) = c * tanh(x / c). With xPos, q_i . k_j is sum_c q_c k_c 2 ** (decay_c * (i - j)). Of these scores the pattern keeps some (see `kept`), and
    out(h,i) = sum_j softmax_j(s(h,i,j) over kept j) * v_j, rounded once to the dtype of the query.

    Args:
        query_THD: [T, H, D].
        key_SKD: [S, KV, D], same dtype.
        value_SKD: [S, KV, D], same dtype.
        scale: multiplies q . k; usually D ** -0.5.
        pattern: which keys are kept.
        head_map: the key/value head of each query head; None for contiguous groups of H / KV heads.
        bias: of H heads, from `tiers.reference.ops.bias`; None for none.
        decay_D: [D] from `tiers.reference.ops.xpos`, float32; None for products as they are.
        softcap: c above; None for none.

    Returns:
        [T, H, D] in the dtype of the query.

    Raises:
        ValueError: shapes disagree; names the argument, what was expected and what came.

    Source: Vaswani et al. 2017 (1706.03762) section 3.2.1; ALiBi: Press et al. 2022 (2108.12409) section 3. The order
    "cap, then bias" is vLLM's; the top-k rule with all ties kept is ours (docs/ops/attention.md).
    """
    _check(query_THD, key_SKD, value_SKD, head_map, bias, decay_D)
    if head_map is not None:
        # One key/value head per query head: any map becomes H groups of one.
        index_H = torch.tensor(head_map, device=key_SKD.device)
        key_SKD, value_SKD = key_SKD[:, index_H], value_SKD[:, index_H]
    else:
        index_H = None
    tokens, heads, _ = query_THD.shape
    length = key_SKD.shape[0]
    block = max(1, MAX_SCORES // (heads * length))
    if tokens <= block:
        return _attend(query_THD, key_SKD, value_SKD, length - tokens, scale, pattern, index_H, bias, decay_D, softcap)
    outs = []
    for start in range(0, tokens, block):
        part_THD = query_THD[start : start + block]
        first = length - tokens + start
        end = first + len(part_THD)
        part = (part_THD, key_SKD[:end], value_SKD[:end])
        outs.append(_attend(*part, first, scale, pattern, index_H, bias, decay_D, softcap))
    return torch.cat(outs)


def _attend(
    query_THD: Tensor,
    key_SKD: Tensor,
    value_SKD: Tensor,
    first: int,
    scale: float,
    pattern: Pattern,
    index_H: Tensor | None,
    bias: Bias | None,
    decay_D: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """`attention` for queries at positions first, first + 1, ..., S - 1. Scores are [KV, G, T, S] throughout."""
    exact = torch.float64 if query_THD.dtype == torch.float64 else torch.float32
    kv_heads = key_SKD.shape[1]
    query = rearrange(query_THD.to(exact), "t (kv g) d -> kv (g t) d", kv=kv_heads)
    key = rearrange(key_SKD.to(exact), "s kv d -> kv s d")
    value = rearrange(value_SKD.to(exact), "s kv d -> kv s d")

    if decay_D is None:
        products = rearrange(query @ key.mT, "kv (g t) s -> kv g t s", t=query_THD.shape[0])
    else:
        split = rearrange(query, "kv (g t) d -> kv g t d", t=query_THD.shape[0])
        products = decayed_products(split, key, first, decay_D)
    scores = products * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(key_SKD.shape[0], device=key.device)
    distance_TS = positions[first:, None] - positions
    if bias is not None:
        scores = scores + rearrange(bias.values(distance_TS, exact), "(kv g) t s -> kv g t s", kv=kv_heads)
    scores = scores.masked_fill(~kept(scores, distance_TS, pattern, index_H), float("-inf"))
    probabilities = rearrange(scores.softmax(dim=-1), "kv g t s -> kv (g t) s")
    out = rearrange(probabilities @ value, "kv (g t) d -> t (kv g) d", t=query_THD.shape[0])
    return out.to(query_THD.dtype)


def kept(scores_KGTS: Tensor, distance_TS: Tensor, pattern: Pattern, index_H: Tensor | None = None) -> Tensor:
    """Which keys each query keeps.

    dense keeps all j <= i. window keeps j > i - window and j < sink. topk keeps those of window and sink, and of the
    others (the candidates) all whose score is not below the k-th largest among them: ties at that threshold are all
    kept, so the order in which keys are visited does not matter, and a row with at most k candidates keeps them all.

    Args:
        scores_KGTS: [KV, G, T, S] scores with every bias in.
        distance_TS: [T, S] i - j; negative for keys after the query.
        pattern: see above.
        index_H: [H] the key/value head of each query head when KV = H stand for the heads of a map; for share "group".

    Returns:
        bool, broadcastable to [KV, G, T, S]. No row is empty.
    """
    causal = distance_TS >= 0
    if isinstance(pattern, Dense):
        return causal
    key_positions = torch.arange(distance_TS.shape[1], device=distance_TS.device)
    always = causal & ((distance_TS < pattern.window) | (key_positions < pattern.sink))
    if isinstance(pattern, Window):
        return always
    candidates = causal & ~always
    if distance_TS.shape[1] <= pattern.k:
        return causal
    ranked = scores_KGTS.detach()
    if pattern.share == "group":
        ranked = group_max(ranked, index_H)
    ranked = ranked.masked_fill(~candidates, float("-inf"))
    threshold = ranked.topk(pattern.k, dim=-1).values[..., -1:]
    # "Not below" rather than "at least": a NaN score stays in, so that it shows in the output instead of vanishing.
    return always | (candidates & ~(ranked < threshold))


def group_max(scores_KGTS: Tensor, index_H: Tensor | None) -> Tensor:
    """The largest score over the query heads that read the same key/value head; arguments as in `kept`.

    Returns:
        Broadcastable to [KV, G, T, S].
    """
    if index_H is None:
        return scores_KGTS.amax(dim=1, keepdim=True)
    best = torch.empty_like(scores_KGTS)
    for group in index_H.unique():
        members = index_H == group
        best[members] = scores_KGTS[members].amax(dim=0)
    return best


def _check(
    query_THD: Tensor,
    key_SKD: Tensor,
    value_SKD: Tensor,
    head_map: Sequence[int] | None,
    bias: Bias | None,
    decay_D: Tensor | None,
) -> None:
    tokens, heads, size = query_THD.shape
    length, kv_heads, key_size = key_SKD.shape
    if key_size != size:
        raise ValueError(f"key_SKD has head size {key_size}; expected {size}, that of query_THD")
    if value_SKD.shape[:2] != key_SKD.shape[:2]:
        raise ValueError(f"value_SKD has shape {tuple(value_SKD.shape)}; expected {length} tokens and {kv_heads} heads")
    if length < tokens:
        raise ValueError(f"key_SKD has {length} tokens; expected at least {tokens}, the number of query tokens")
    if head_map is None and heads % kv_heads:
        raise ValueError(f"query_THD has {heads} heads; expected a multiple of {kv_heads}, or a head_map")
    if head_map is not None and len(head_map) != heads:
        raise ValueError(f"head_map has {len(head_map)} entries; expected {heads}, one per query head")
    if head_map is not None and not all(0 <= kv < kv_heads for kv in head_map):
        raise ValueError(f"head_map is {list(head_map)}; expected indices from 0 to {kv_heads - 1}")
    if bias is not None:
        bias.check(heads)
    if decay_D is not None and decay_D.shape != (size,):
        raise ValueError(f"decay_D has shape {tuple(decay_D.shape)}; expected ({size},), one per channel")
