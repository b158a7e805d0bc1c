"""The knowledge gate through torch.compile. Legend: T tokens, M model width."""

import torch
from torch import Tensor

from tiers.compiled.options import compiled, first_size_varies, kinds
from tiers.reference.ops.knowledge_gate import check, combine, products


def knowledge_gate(
    hidden_TM: Tensor, knowledge_TM: Tensor, weight_M2M: Tensor, bias_M: Tensor | None, mode: str,
    folded_TM: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same contract as the reference, gradients included. Compiles once for all numbers of tokens, with gradients again for one token."""
    check(hidden_TM, knowledge_TM, weight_M2M, mode, folded_TM)
    if not len(hidden_TM):
        return hidden_TM.clone()
    given = [tensor for tensor in (hidden_TM, knowledge_TM, folded_TM) if tensor is not None]
    # Other strides would be compiled for apart, even where there is one token and they mean nothing.
    tokens = [tensor.reshape(-1).view(tensor.shape) for tensor in given]
    run = compiled(_knowledge_gate, kinds(*tokens, weight_M2M, bias_M), mode=mode)
    return run(weight_M2M, bias_M, *first_size_varies(*tokens))


def _knowledge_gate(
    weight_M2M: Tensor, bias_M: Tensor | None, hidden_TM: Tensor, knowledge_TM: Tensor, *folded_TM: Tensor, mode: str
) -> Tensor:
    for tensor in (knowledge_TM, *folded_TM):
        torch._check(len(hidden_TM) == len(tensor))
    # Two products of half the width instead of that of the concatenation are not faster (docs/log.md).
    a_TM = products(hidden_TM, knowledge_TM, weight_M2M, bias_M, *folded_TM or (None,))
    return combine(hidden_TM, knowledge_TM, a_TM, mode)
