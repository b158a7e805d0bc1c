"""The knowledge gate through torch.compile. Legend: T tokens, M model width."""

import torch
from torch import Tensor

from tiers.compiled.options import compiled, first_size_varies, kinds
from tiers.reference.ops.knowledge_gate import check, combine


def knowledge_gate(
    hidden_TM: Tensor, knowledge_TM: Tensor, weight_M2M: Tensor, bias_M: Tensor | None, mode: str
) -> Tensor:
    """Same contract as the reference, gradients included. Compiles once for all numbers of tokens, with gradients again for one token."""
    check(hidden_TM, knowledge_TM, weight_M2M, mode)
    if not len(hidden_TM):
        return hidden_TM.clone()
    run = compiled(_knowledge_gate, kinds(hidden_TM, knowledge_TM, weight_M2M, bias_M), mode=mode)
    return run(*first_size_varies(hidden_TM, knowledge_TM), weight_M2M, bias_M)


def _knowledge_gate(
    hidden_TM: Tensor, knowledge_TM: Tensor, weight_M2M: Tensor, bias_M: Tensor | None, *, mode: str
) -> Tensor:
    torch._check(len(hidden_TM) == len(knowledge_TM))
    # Two products of half the width instead of the concatenation are not faster (docs/log.md).
    a_TM = torch.nn.functional.linear(torch.cat((hidden_TM, knowledge_TM), dim=-1), weight_M2M, bias_M)
    return combine(hidden_TM, knowledge_TM, a_TM, mode)
