"""The knowledge gate: a unit after the ffn that mixes a knowledge vector into the hidden state.

What does not change while a model is served can be multiplied once: `fold` makes W_e e of known vectors e, which
`knowledge_gate` then takes in place of the product.

Legend: T tokens, M model width, N known vectors.
"""

import torch
from torch import Tensor

MODES = ("linear", "sigmoid", "mix")


def knowledge_gate(
    hidden_TM: Tensor, knowledge_TM: Tensor, weight_M2M: Tensor, bias_M: Tensor | None, mode: str,
    folded_TM: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Mix e, one knowledge vector per token, into h.

    a = W [h; e] + b = W_h h + W_e e + b, where [h; e] is the concatenation, h first; then by mode
        linear:   h + a
        sigmoid:  h + sigmoid(a) * e
        mix:      sigmoid(a) * h + (1 - sigmoid(a)) * e

    Args:
        hidden_TM: [T, M] h, the residual stream after the ffn.
        knowledge_TM: [T, M] e, same dtype: rows of a table, or `knowledge_bank`.
        weight_M2M: [M, 2 M] W, as of a Linear(2 M, M).
        bias_M: [M] b, or None for zero.
        mode: "linear", "sigmoid" or "mix".
        folded_TM: [T, M] W_e e from `fold`, to be added instead of the product; the columns of W_e are not read then.

    Returns:
        [T, M] in the dtype of hidden_TM, newly allocated.

    Raises:
        ValueError: shapes disagree or the mode is none of the three; names the argument, expected and found.

    Source: the unit of this project's users (a Linear(2 dim, dim) on [hidden; knowledge]); the nearest published ones
    are the per-layer embedding gate of Gemma 3n and the memory gate of Engram, which differ in the gate's form.
    """
    check(hidden_TM, knowledge_TM, weight_M2M, mode, folded_TM)
    return combine(hidden_TM, knowledge_TM, products(hidden_TM, knowledge_TM, weight_M2M, bias_M, folded_TM), mode)


def fold(vectors_NM: Tensor, weight_M2M: Tensor) -> Tensor:
    """[N, M] W_e e of knowledge vectors: rows of a table, or values of a bank, whose weights sum to 1."""
    return vectors_NM @ weight_M2M[:, weight_M2M.shape[0] :].T


def beside(vectors_NM: Tensor, weight_M2M: Tensor) -> Tensor:
    """[N, 2 M] knowledge vectors, and what `fold` makes of them, as values of a bank that looks up both."""
    return torch.cat((vectors_NM, fold(vectors_NM, weight_M2M)), dim=1)


def check(
    hidden_TM: Tensor, knowledge_TM: Tensor, weight_M2M: Tensor, mode: str, folded_TM: Tensor | None = None
) -> None:
    """Raises:
    ValueError: see `knowledge_gate`.
    """
    width = hidden_TM.shape[-1]
    for name, tensor in (("knowledge_TM", knowledge_TM), ("folded_TM", folded_TM)):
        if tensor is not None and tensor.shape != hidden_TM.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(hidden_TM.shape)}")
    if weight_M2M.shape != (width, 2 * width):
        raise ValueError(f"weight_M2M has shape {tuple(weight_M2M.shape)}; expected ({width}, {2 * width})")
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; expected 'linear', 'sigmoid' or 'mix'")


def products(
    hidden_TM: Tensor, knowledge_TM: Tensor, weight_M2M: Tensor, bias_M: Tensor | None, folded_TM: Tensor | None
) -> Tensor:
    """[T, M] a of `knowledge_gate`."""
    if folded_TM is not None:
        return torch.nn.functional.linear(hidden_TM, weight_M2M[:, : weight_M2M.shape[0]], bias_M) + folded_TM
    return torch.nn.functional.linear(torch.cat((hidden_TM, knowledge_TM), dim=-1), weight_M2M, bias_M)


def combine(hidden_TM: Tensor, knowledge_TM: Tensor, a_TM: Tensor, mode: str) -> Tensor:
    """The element-wise part of `knowledge_gate`, given a = W [h; e] + b."""
    if mode == "linear":
        return hidden_TM + a_TM
    gate = torch.sigmoid(a_TM)
    if mode == "sigmoid":
        return hidden_TM + gate * knowledge_TM
    return gate * hidden_TM + (1 - gate) * knowledge_TM
