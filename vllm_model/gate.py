"""The knowledge gate inside vLLM: its parameters, and operators that torch.compile does not look into.

Half of W is multiplied by knowledge vectors, which do not change while a model is served. Where the gate is not on the
reference, the products of a bank's values are kept beside the values, and those of a table's rows, if the user gives the
memory for it, in a table of their own.

Legend: T tokens, M model width, N slots.
"""

from collections.abc import Callable
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
from tiers.reference.ops.knowledge_gate import beside, combine, fold
from tiers.vllm_model import compat, dispatch, metrics, shadow
from tiers.vllm_model.dispatch import Choice
from tiers.vllm_model.plan import Tier
from tiers.vllm_model.self_check import check_tokens, folding
from tiers.vllm_model.serving import folds_tables

logger = init_logger("vllm.tiers")

# Rows of a table that are folded at once.
_ROWS = 2**14


class GateTier:
    """The functions of one layer's gate, on the tier that was chosen for it; each is proved when it is first called.

    Attributes:
        tier: what serves: the choice, or a slower one if the choice failed its proof.
        fold: computes what is folded; None where nothing is.
        folded: it has been, with the weights that are loaded now.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._use(choice.tier)
        self.fold: Callable[[], None] | None = None
        self.folded = False
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
        folded = rest[3:]
        if name in self.unproved and not _capturing():
            self.prove(name, tokens, rest[:3], bool(folded))
        if folded and self.tier is Tier.REFERENCE:  # a faster one failed its proof, perhaps by what is folded
            rest = rest[:3]
        out = self.functions[name](*tokens, *rest)
        if self.shadow is not None:
            # The reference then multiplies by the whole of W.
            self.shadow.gate(self, name, tokens, rest[:3], out)
        return out

    def prove(self, name: str, tokens: tuple[Tensor, ...], rest: tuple[Any, ...], folded: bool = False) -> None:
        """Compare a function with the reference; on failure the whole gate takes the next slower tier, or stops.

        Args:
            name: of the function.
            tokens: its first arguments, of which only width, dtype and device count.
            rest: its others.
            folded: also as it is called where W_e e is known.
        """
        reference = dispatch.function(name, Tier.REFERENCE)
        while name in self.unproved:
            function = self.functions[name]
            failure = check_tokens(function, reference, tokens, rest)
            if failure is None and folded:
                failure = check_tokens(folding(function, rest[0]), reference, tokens, rest)
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


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _served_by(layer: LayerNameType) -> GateTier:
    return get_forward_context().no_compile_layers[_resolve_layer_name(layer)]


# The name of the layer is the only argument that differs between layers, and vLLM makes it an input of the compiled
# graph. So layers share a graph, and which tier serves is decided at every call.
def _knowledge_gate(
    hidden: Tensor, knowledge: Tensor, folded: Tensor | None, weight: Tensor, bias: Tensor | None, mode: str,
    layer: LayerNameType,
) -> Tensor:  # fmt: skip
    served = _served_by(layer)
    rest: tuple[Any, ...] = (weight, bias, mode)
    if folded is not None and _was_folded(served):
        rest = (*rest, folded)
    out = served("knowledge_gate", (hidden, knowledge), *rest)
    metrics.count("gate", served.tier.value)
    if len(rest) > 3 and served.tier is not Tier.REFERENCE:
        metrics.count("gate folded", served.tier.value)
    return out


def _knowledge_gate_fake(
    hidden: Tensor, knowledge: Tensor, folded: Tensor | None, weight: Tensor, bias: Tensor | None, mode: str,
    layer: LayerNameType,
) -> Tensor:  # fmt: skip
    return torch.empty_like(hidden)


def _was_folded(served: GateTier) -> bool:
    """Whether what was looked up was made of the weights that are there.

    It was not in the first step on weights that nobody loaded (`--load-format dummy`). It is from the next one on.
    """
    before = served.folded
    if not before and served.fold is not None and not _capturing():
        served.fold()
    return before


def _knowledge_bank(hidden: Tensor, keys: Tensor, values: Tensor, scale: float, layer: LayerNameType) -> Tensor:
    served = _served_by(layer)
    _was_folded(served)
    return served("knowledge_bank", (hidden,), keys, values, scale)


def _knowledge_bank_fake(hidden: Tensor, keys: Tensor, values: Tensor, scale: float, layer: LayerNameType) -> Tensor:
    return hidden.new_empty(hidden.shape[0], values.shape[1])


compat.register_op("knowledge_gate", _knowledge_gate, _knowledge_gate_fake)
compat.register_op("knowledge_bank", _knowledge_bank, _knowledge_bank_fake)


class KnowledgeGate(nn.Module):
    """`proj`, and either `table` or `bank_keys` and `bank_values`. Replicated on every tensor-parallel rank but the table.

    What is folded are buffers, since no checkpoint has it: a table of its own, or the values with their products beside them.

    Args:
        config: mode and source.
        width: M.
        vocab_size: rows of the table.
        choice: which implementation to call.
        quant_config: of the model.
        prefix: full name of this module.
    """

    folded_table: VocabParallelEmbedding
    folded_values: Tensor

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
        vllm_config = get_current_vllm_config()
        self.folds = choice.tier is not Tier.REFERENCE and quant_config is None and vllm_config.lora_config is None
        if config.source == "token":
            self.table = VocabParallelEmbedding(vocab_size, width, prefix=f"{prefix}.table")
            self.folds = self.folds and folds_tables(vllm_config.additional_config)
            if self.folds:
                self.folded_table = VocabParallelEmbedding(vocab_size, width, prefix=f"{prefix}.folded_table")
                logger.info(
                    "%s: the products of its table with half of the gate's weight are kept, %.0f MiB on this rank", prefix,
                    self.folded_table.weight.nbytes / 2**20,
                )  # fmt: skip
                rows = self.folded_table.weight.data
                del self.folded_table.weight
                self.folded_table.register_buffer("weight", rows, persistent=False)
        else:
            self.scale = config.scale if config.scale is not None else width**-0.5
            self.bank_keys = nn.Parameter(torch.empty(config.slots or 0, width), requires_grad=False)
            self.bank_values = nn.Parameter(torch.empty(config.slots or 0, width), requires_grad=False)
            if self.folds:
                self.register_buffer("folded_values", torch.empty(config.slots or 0, 2 * width), persistent=False)
        self.served.fold = self.fold if self.folds else None

    @torch.no_grad()
    def fold(self) -> None:
        """Multiply half of W by the vectors that e is made of; needs the weights."""
        weight = self.proj.weight
        if self.source == "token":
            # In parts, since the table may be larger than what memory is left.
            for part, rows in zip(self.folded_table.weight.split(_ROWS), self.table.weight.split(_ROWS), strict=True):
                part.copy_(fold(rows, weight))
        else:
            self.folded_values.copy_(beside(self.bank_values, weight))
        self.served.folded = True

    def prove(self) -> None:
        """Fold, compare the tier with the reference, and compile it, before the first request; needs the weights."""
        if self.folds:
            self.fold()
        like = self.proj.weight.new_empty(0, self.width)
        if self.source == "bank":
            self.served.prove("knowledge_bank", (like,), (self.bank_keys, self._values(), self.scale))
        if self._plain():
            self.served.prove("knowledge_gate", (like, like), (self.proj.weight, self.proj.bias, self.mode), self.folds)

    def _values(self) -> Tensor:
        return self.folded_values if self.folds else self.bank_values

    def _plain(self) -> bool:
        """Whether the weight is a plain matrix; a quantised one or a LoRA adapter only the layer itself can multiply."""
        return type(self.proj) is ReplicatedLinear and isinstance(self.proj.quant_method, UnquantizedLinearMethod)

    def forward(self, hidden: Tensor, token_ids: Tensor | None) -> Tensor:
        """[T, M] to [T, M]; `token_ids` [T] is read only by source "token"."""
        layer = _encode_layer_name(self.prefix)
        folded = None
        if self.source == "token":
            knowledge = self.table(token_ids)
            if self.folds:
                folded = self.folded_table(token_ids)
        else:
            knowledge = torch.ops.tiers.knowledge_bank(hidden, self.bank_keys, self._values(), self.scale, layer)
            if self.folds:
                knowledge, folded = knowledge.chunk(2, dim=1)
        proj = self.proj
        if self._plain():
            return torch.ops.tiers.knowledge_gate(hidden, knowledge, folded, proj.weight, proj.bias, self.mode, layer)
        a, _ = proj(torch.cat((hidden, knowledge), dim=-1))
        return combine(hidden, knowledge, a, self.mode)
