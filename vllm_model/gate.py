"""The knowledge gate inside vLLM: its parameters, and operators that torch.compile does not look into.

Legend: T tokens, M model width, N slots.
"""

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from tiers.reference import config as c
from tiers.reference.ops.knowledge_gate import combine
from tiers.vllm_model import compat, dispatch
from tiers.vllm_model.plan import Tier


def _knowledge_gate(
    hidden: Tensor, knowledge: Tensor, weight: Tensor, bias: Tensor | None, mode: str, tier: str
) -> Tensor:
    dispatch.COUNTS["gate", tier] += 1
    return dispatch.function("knowledge_gate", Tier(tier))(hidden, knowledge, weight, bias, mode)


def _knowledge_gate_fake(
    hidden: Tensor, knowledge: Tensor, weight: Tensor, bias: Tensor | None, mode: str, tier: str
) -> Tensor:
    return torch.empty_like(hidden)


def _knowledge_bank(hidden: Tensor, keys: Tensor, values: Tensor, scale: float, tier: str) -> Tensor:
    return dispatch.function("knowledge_bank", Tier(tier))(hidden, keys, values, scale)


def _knowledge_bank_fake(hidden: Tensor, keys: Tensor, values: Tensor, scale: float, tier: str) -> Tensor:
    return torch.empty_like(hidden)


compat.register_op("knowledge_gate", _knowledge_gate, _knowledge_gate_fake)
compat.register_op("knowledge_bank", _knowledge_bank, _knowledge_bank_fake)


class KnowledgeGate(nn.Module):
    """`proj`, and either `table` or `bank_keys` and `bank_values`. Replicated on every tensor-parallel rank but the table.

    Args:
        config: mode and source.
        width: M.
        vocab_size: rows of the table.
        tier: which implementation to call.
        quant_config: of the model.
        prefix: full name of this module.
    """

    def __init__(
        self, config: c.Gate, width: int, vocab_size: int, tier: Tier, quant_config: object, prefix: str
    ) -> None:
        super().__init__()
        self.mode, self.source, self.tier = config.mode, config.source, tier
        self.proj = ReplicatedLinear(
            2 * width, width, bias=config.bias, quant_config=quant_config, prefix=f"{prefix}.proj"
        )
        compat.set_keep_weight(self.proj)
        if config.source == "token":
            self.table = VocabParallelEmbedding(vocab_size, width, prefix=f"{prefix}.table")
        else:
            self.scale = config.scale if config.scale is not None else width**-0.5
            self.bank_keys = nn.Parameter(torch.empty(config.slots or 0, width), requires_grad=False)
            self.bank_values = nn.Parameter(torch.empty(config.slots or 0, width), requires_grad=False)

    def forward(self, hidden: Tensor, token_ids: Tensor | None) -> Tensor:
        """[T, M] to [T, M]; `token_ids` [T] is read only by source "token"."""
        if self.source == "token":
            knowledge = self.table(token_ids)
        else:
            knowledge = torch.ops.tiers.knowledge_bank(
                hidden, self.bank_keys, self.bank_values, self.scale, self.tier.value
            )
        proj = self.proj
        if type(proj) is ReplicatedLinear and isinstance(proj.quant_method, UnquantizedLinearMethod):
            return torch.ops.tiers.knowledge_gate(hidden, knowledge, proj.weight, proj.bias, self.mode, self.tier.value)
        # A quantised weight or a LoRA adapter: only the layer itself knows what to multiply with.
        a, _ = proj(torch.cat((hidden, knowledge), dim=-1))
        return combine(hidden, knowledge, a, self.mode)
