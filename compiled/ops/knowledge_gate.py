"""The knowledge gate through torch.compile. Legend: T tokens, M model width."""

import torch
from torch import Tensor

from tiers.compiled.options import compiled, first_size_varies, kinds
from tiers.reference.ops.knowledge_gate import check, combine


def knowledge_gate(
    hidden_TM: Tensor, knowledge_TM: Tensor, weight_M2M: Tensor, bias_M: Tensor | None, mode: str
) -> Tensor:
    """Same contract as the reference, gradients included. One code for one token and one for any other number."""
    check(hidden_TM, knowledge_TM, weight_M2M, mode)
    if not len(hidden_TM):
        return hidden_TM.clone()
    first_size_varies(hidden_TM, knowledge_TM)
    variant = kinds(hidden_TM, knowledge_TM, weight_M2M, bias_M)
    return compiled(_knowledge_gate, variant, mode=mode)(hidden_TM, knowledge_TM, weight_M2M, bias_M)


def _knowledge_gate(
    hidden_TM: Tensor, knowledge_TM: Tensor, weight_M2M: Tensor, bias_M: Tensor | None, *, mode: str
) -> Tensor:
    # Two products of half the width instead of the concatenation are not faster (docs/log.md).
    a_TM = torch.nn.functional.linear(torch.cat((hidden_TM, knowledge_TM), dim=-1), weight_M2M, bias_M)
    return combine(hidden_TM, knowledge_TM, a_TM, mode)
