"""The knowledge gate: a unit after the ffn that mixes a knowledge vector into the hidden state.

Legend: T tokens, M model width, N slots of a bank.
"""

import torch
from torch import Tensor

MODES = ("linear", "sigmoid", "mix")


def knowledge_gate(
    hidden_TM: Tensor, knowledge_TM: Tensor, weight_M2M: Tensor, bias_M: Tensor | None, mode: str
) -> Tensor:
    """Mix e, one knowledge vector per token, into h.

    a = W [h; e] + b, where [h; e] is the concatenation, h first; then by mode
        linear:   h + a
        sigmoid:  h + sigmoid(a) * e
        mix:      sigmoid(a) * h + (1 - sigmoid(a)) * e

    Args:
        hidden_TM: [T, M] h, the residual stream after the ffn.
        knowledge_TM: [T, M] e, same dtype: rows of a table, or `knowledge_bank`.
        weight_M2M: [M, 2 M] W, as of a Linear(2 M, M).
        bias_M: [M] b, or None for zero.
        mode: "linear", "sigmoid" or "mix".

    Returns:
        [T, M] in the dtype of hidden_TM, newly allocated.

    Raises:
        ValueError: shapes disagree or the mode is none of the three; names the argument, expected and found.

    Source: the unit of this project's users (a Linear(2 dim, dim) on [hidden; knowledge]); the nearest published ones
    are the per-layer embedding gate of Gemma 3n and the memory gate of Engram, which differ in the gate's form.
    """
    check(hidden_TM, knowledge_TM, weight_M2M, mode)
    a = torch.nn.functional.linear(torch.cat((hidden_TM, knowledge_TM), dim=-1), weight_M2M, bias_M)
    return combine(hidden_TM, knowledge_TM, a, mode)


def check(hidden_TM: Tensor, knowledge_TM: Tensor, weight_M2M: Tensor, mode: str) -> None:
    """Raises:
    ValueError: see `knowledge_gate`.
    """
    width = hidden_TM.shape[-1]
    if knowledge_TM.shape != hidden_TM.shape:
        raise ValueError(f"knowledge_TM has shape {tuple(knowledge_TM.shape)}; expected {tuple(hidden_TM.shape)}")
    if weight_M2M.shape != (width, 2 * width):
        raise ValueError(f"weight_M2M has shape {tuple(weight_M2M.shape)}; expected ({width}, {2 * width})")
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; expected 'linear', 'sigmoid' or 'mix'")


def combine(hidden_TM: Tensor, knowledge_TM: Tensor, a_TM: Tensor, mode: str) -> Tensor:
    """The element-wise part of `knowledge_gate`, given a = W [h; e] + b."""
    if mode == "linear":
        return hidden_TM + a_TM
    gate = torch.sigmoid(a_TM)
    if mode == "sigmoid":
        return hidden_TM + gate * knowledge_TM
    return gate * hidden_TM + (1 - gate) * knowledge_TM
