"""The knowledge gate inside vLLM: its parameters, and operators that torch.compile does not look into.

Legend: T tokens, M model width, N slots.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name

from tiers.reference import config as c
from tiers.reference.errors import ServingError
from tiers.reference.ops.knowledge_gate import combine
from tiers.vllm_model import compat, dispatch, metrics, shadow
from tiers.vllm_model.dispatch import Choice
from tiers.vllm_model.plan import Tier
from tiers.vllm_model.self_check import check_tokens

logger = init_logger("vllm.tiers")


class GateTier:
    """The functions of one layer's gate, on the tier that was chosen for it; each is proved when it is first called.

    Attributes:
        tier: what serves: the choice, or a slower one if the choice failed its proof.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._use(choice.tier)
        self.shadow = shadow.join(self)

    def _use(self, tier: Tier) -> None:
        self.tier = tier
        self.functions = {name: dispatch.function(name, tier) for name in dispatch.OPS["gate"]}
        # The reference needs no proof; any other tier is compared with it once.
        self.unproved = set() if tier is Tier.REFERENCE else set(self.functions)

    def __call__(self, name: str, tokens: tuple[Tensor, ...], *rest: Any) -> Tensor:
        """Call a function of the operator on `tokens`, [T, M] each, and its other arguments.

        Raises:
            ServingError: the tier failed its proof and the plan asked for it by name.
        """
        if name in self.unproved and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self.prove(name, tokens, rest)
        out = self.functions[name](*tokens, *rest)
        if self.shadow is not None:
            self.shadow.gate(self, name, tokens, rest, out)
        return out

    def prove(self, name: str, tokens: tuple[Tensor, ...], rest: tuple[Any, ...]) -> None:
        """Compare a function with the reference; on failure the whole gate takes the next slower tier, or stops."""
        reference = dispatch.function(name, Tier.REFERENCE)
        while name in self.unproved:
            failure = check_tokens(self.functions[name], reference, tokens, rest)
            if failure is None:
                self.unproved.remove(name)
                return
            where = f"layer {self.choice.layer}: {name} of the gate on tier {self.tier.value} {failure}"
            if self.choice.named:
                raise ServingError(
                    f"{where}. Use another tier for it: --tiers 'auto,{self.choice.layer}.gate=reference'"
                )
            self._use(self.choice.slower(self.tier))
            logger.warning("%s; this layer is served by tier %s", where, self.tier.value)


def _served_by(layer: LayerNameType) -> GateTier:
    return get_forward_context().no_compile_layers[_resolve_layer_name(layer)]


# The name of the layer is the only argument that differs between layers, and vLLM makes it an input of the compiled
# graph. So layers share a graph, and which tier serves is decided at every call.
def _knowledge_gate(
    hidden: Tensor, knowledge: Tensor, weight: Tensor, bias: Tensor | None, mode: str, layer: LayerNameType
) -> Tensor:
    served = _served_by(layer)
    out = served("knowledge_gate", (hidden, knowledge), weight, bias, mode)
    metrics.count("gate", served.tier.value)
    return out


def _knowledge_gate_fake(
    hidden: Tensor, knowledge: Tensor, weight: Tensor, bias: Tensor | None, mode: str, layer: LayerNameType
) -> Tensor:
    return torch.empty_like(hidden)


def _knowledge_bank(hidden: Tensor, keys: Tensor, values: Tensor, scale: float, layer: LayerNameType) -> Tensor:
    return _served_by(layer)("knowledge_bank", (hidden,), keys, values, scale)


def _knowledge_bank_fake(hidden: Tensor, keys: Tensor, values: Tensor, scale: float, layer: LayerNameType) -> Tensor:
    return torch.empty_like(hidden)


compat.register_op("knowledge_gate", _knowledge_gate, _knowledge_gate_fake)
compat.register_op("knowledge_bank", _knowledge_bank, _knowledge_bank_fake)


class KnowledgeGate(nn.Module):
    """`proj`, and either `table` or `bank_keys` and `bank_values`. Replicated on every tensor-parallel rank but the table.

    Args:
        config: mode and source.
        width: M.
        vocab_size: rows of the table.
        choice: which implementation to call.
        quant_config: of the model.
        prefix: full name of this module.
    """

    def __init__(
        self, config: c.Gate, width: int, vocab_size: int, choice: Choice, quant_config: object, prefix: str
    ) -> None:
        super().__init__()
        self.mode, self.source, self.width, self.prefix = config.mode, config.source, width, prefix
        # Where the operators find it, as vLLM's own layers are found.
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"two layers are named {prefix}")
        self.served = layers[prefix] = GateTier(choice)
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

    def prove(self) -> None:
        """Compare the tier with the reference, and compile it, before the first request; needs the weights."""
        like = self.proj.weight.new_empty(0, self.width)
        if self.source == "bank":
            self.served.prove("knowledge_bank", (like,), (self.bank_keys, self.bank_values, self.scale))
        if self._plain():
            self.served.prove("knowledge_gate", (like, like), (self.proj.weight, self.proj.bias, self.mode))

    def _plain(self) -> bool:
        """Whether the weight is a plain matrix; a quantised one or a LoRA adapter only the layer itself can multiply."""
        return type(self.proj) is ReplicatedLinear and isinstance(self.proj.quant_method, UnquantizedLinearMethod)

    def forward(self, hidden: Tensor, token_ids: Tensor | None) -> Tensor:
        """[T, M] to [T, M]; `token_ids` [T] is read only by source "token"."""
        layer = _encode_layer_name(self.prefix)
        if self.source == "token":
            knowledge = self.table(token_ids)
        else:
            knowledge = torch.ops.tiers.knowledge_bank(hidden, self.bank_keys, self.bank_values, self.scale, layer)
        proj = self.proj
        if self._plain():
            return torch.ops.tiers.knowledge_gate(hidden, knowledge, proj.weight, proj.bias, self.mode, layer)
        a, _ = proj(torch.cat((hidden, knowledge), dim=-1))
        return combine(hidden, knowledge, a, self.mode)
