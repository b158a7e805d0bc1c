"""Which implementation serves each operator of each layer: the table, the one function that reads it, the counters.

Resolved once, while the model is built. What ran is counted, so that a test, or a user, can see it.
"""

import importlib
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from tiers.reference.config import Attention, Dense, Layer, ModelConfig, Moe, TopK
from tiers.reference.errors import PlanError
from tiers.reference.positions import T5, Alibi, Kerple, Position, Sandwich, Xpos
from tiers.vllm_model.plan import Tier, TierPlan

# Operator of a plan -> the functions it stands for -> tier -> module. The function carries the name of its module.
OPS: Mapping[str, Mapping[str, Mapping[Tier, str]]] = {
    "attention": {
        "paged_attention": {
            Tier.REFERENCE: "tiers.reference.ops.paged_attention",
            Tier.COMPILED: "tiers.compiled.ops.paged_attention",
            # Where vLLM's own dense attention serves instead: see `is_native`.
            Tier.FAST: "tiers.vllm_model.ops.paged_attention",
        }
    },
    "moe": {
        "moe": {
            # The fast tier is vLLM's fused layer, which has its weights inside: see vllm_model/moe.py.
            Tier.REFERENCE: "tiers.reference.ops.moe",
            Tier.COMPILED: "tiers.compiled.ops.moe",
        }
    },
    "gate": {
        "knowledge_gate": {
            Tier.REFERENCE: "tiers.reference.ops.knowledge_gate",
            Tier.COMPILED: "tiers.compiled.ops.knowledge_gate",
            Tier.FAST: "tiers.vllm_model.ops.knowledge_gate",
        },
        "knowledge_bank": {
            Tier.REFERENCE: "tiers.reference.ops.knowledge_bank",
            Tier.COMPILED: "tiers.compiled.ops.knowledge_bank",
            Tier.FAST: "tiers.vllm_model.ops.knowledge_bank",
        },
    },
}

FASTEST_FIRST = tuple(reversed(Tier))

# Head sizes that vLLM's CPU attention was built for.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

# (operator, tier) -> calls in this process.
COUNTS: Counter[tuple[str, str]] = Counter()


@dataclass(frozen=True)
class Where:
    """Where a model is to run, as far as it is known.

    Attributes:
        device: "cpu" or "cuda".
        block_size: tokens per block of the cache; None where vLLM has not chosen it yet.
        dtype: "float32", "bfloat16" or "float16"; None where it is not known.
        width: hidden size of the model; None where it is not known.
    """

    device: str
    block_size: int | None = None
    dtype: str | None = None
    width: int | None = None


@dataclass(frozen=True)
class Choice:
    """The tier that serves one operator of one layer, and why no faster one does.

    Attributes:
        named: the plan asked for this tier by name, so that nothing else may serve instead.
        native: vLLM's own layer serves, not a function of ours.
        tiers: all that can serve here, fastest first.
    """

    layer: int
    operator: str
    tier: Tier
    passed_over: tuple[str, ...] = ()
    named: bool = False
    native: bool = False
    tiers: tuple[Tier, ...] = (Tier.REFERENCE,)

    def slower(self, tier: Tier) -> Tier:
        """The next tier below that can serve here."""
        return next(t for t in self.tiers if FASTEST_FIRST.index(t) > FASTEST_FIRST.index(tier))


def module(name: str, tier: Tier) -> ModuleType:
    """The module of a function of OPS, imported on demand."""
    for functions in OPS.values():
        if name in functions:
            return importlib.import_module(functions[name][tier])
    raise KeyError(name)


def function(name: str, tier: Tier) -> Callable[..., Any]:
    """The implementation of a function of OPS."""
    return getattr(module(name, tier), name)


def unsupported(operator: str, tier: Tier, layer: Layer, where: Where) -> str | None:
    """Why a tier cannot serve an operator of a layer, or None if it can."""
    if operator == "moe" and tier is Tier.FAST:
        return _fast_moe(layer.ffn, where)
    if any(tier not in tiers for tiers in OPS[operator].values()):
        return f"no {tier.value} implementation"
    if tier is Tier.COMPILED and os.environ.get("TORCHDYNAMO_DISABLE", "0") == "1":
        return "torch.compile is switched off (TORCHDYNAMO_DISABLE=1)"
    if operator == "attention" and tier is Tier.FAST:
        assert layer.mixer is not None
        return _fast_attention(layer.mixer, where)
    if operator == "gate" and tier is Tier.FAST:
        return _fast_gate(where)
    return None


def is_native(mixer: Attention, tier: Tier, where: Where) -> bool:
    """Whether vLLM's own attention serves a layer: dense attention of the fast tier, where it computes the same."""
    return tier is Tier.FAST and isinstance(mixer.pattern, Dense) and _native_misfit(mixer, where) is None


def _native_misfit(mixer: Attention, where: Where) -> str | None:
    """Why vLLM's own dense attention cannot serve, or None."""
    size = mixer.head_dim
    if _is_our_own(mixer.position):
        return f"vLLM's own attention cannot apply {_position(mixer.position)} positions"
    if where.device == "cpu":
        if size not in CPU_HEAD_SIZES:
            return f"vLLM's CPU attention has no head size {size}"
        if where.block_size is not None and where.block_size % 32:
            return f"vLLM's CPU attention needs a block size of a multiple of 32, not {where.block_size}"
        return None
    if isinstance(mixer.position, Alibi) or mixer.softcap is not None:
        return "dense attention with ALiBi or softcap is not handed to vLLM's CUDA kernels"
    if where.dtype == "float32":
        return "vLLM's attention on CUDA computes float32 in tf32, which is not exact enough"
    return None if size >= 32 and size % 8 == 0 else f"head size {size} is not a multiple of 8 from 32 on"


def _is_our_own(position: Position) -> bool:
    """Whether positions enter the scores in a way that no attention of vLLM's knows."""
    linear = isinstance(position, Alibi) and position.distance == "linear"
    return isinstance(position, Xpos | Sandwich | T5 | Kerple | Alibi) and not linear


def _position(position: Position) -> str:
    """Positions in a word or two."""
    return "alibi sqrt" if isinstance(position, Alibi) and position.distance == "sqrt" else position.kind


def _fast_attention(mixer: Attention, where: Where) -> str | None:
    pattern, size = mixer.pattern, mixer.head_dim
    if isinstance(pattern, Dense):
        misfit = _native_misfit(mixer, where)
        if misfit is None or where.device == "cpu":
            return misfit
    if where.device != "cuda":
        return "needs CUDA"
    if size % 8 or not 32 <= size <= 256:
        return f"head size {size} is not a multiple of 8 from 32 to 256"
    return f"k is {pattern.k}, above 8192" if isinstance(pattern, TopK) and pattern.k > 8192 else None


def _fast_moe(ffn: object, where: Where) -> str | None:
    """Why vLLM's fused layer cannot serve, or None."""
    assert isinstance(ffn, Moe)
    if where.device == "cpu" and where.width is not None and where.width % 32:
        return f"vLLM's experts on the CPU need a hidden size of a multiple of 32, not {where.width}"
    if where.device == "cuda" and where.dtype == "float32":
        return "vLLM's experts on CUDA compute float32 in tf32, which is not exact enough"
    return None


def _fast_gate(where: Where) -> str | None:
    if where.device != "cuda":
        return "needs CUDA"
    known = where.dtype in (None, "float32", "bfloat16", "float16")
    return None if known else f"dtype is {where.dtype}, not float32, bfloat16 or float16"


def resolve(config: ModelConfig, plan: TierPlan, where: Where) -> tuple[Choice, ...]:
    """Choose the tier of every operator of every layer.

    Args:
        config: the model.
        plan: the user's wishes.
        where: the machine.

    Returns:
        One choice per operator and layer, in order.

    Raises:
        PlanError: a tier was named that cannot serve; names operator, layer, reason and valid choices.
    """
    choices = []
    where = replace(where, width=config.hidden_size)
    for (index, operator), wish in plan.wishes.items():
        layer = config.layers[index]
        reasons = {tier: unsupported(operator, tier, layer, where) for tier in FASTEST_FIRST}
        valid = [tier for tier, reason in reasons.items() if reason is None]
        if wish is not None and reasons[wish] is not None:
            raise PlanError(
                f"plan {plan.text!r}: layer {index} cannot run {operator} on tier {wish.value}: {reasons[wish]} (on {where.device}). "
                f"Valid for this layer: auto, {', '.join(tier.value for tier in valid)}"
            )
        tier = wish or valid[0]
        faster = FASTEST_FIRST[: FASTEST_FIRST.index(tier)]
        passed_over = tuple(f"{t.value}: {reasons[t] or 'not asked for'}" for t in faster)
        native = operator == "moe" and tier is Tier.FAST
        if operator == "attention":
            assert layer.mixer is not None
            native = is_native(layer.mixer, tier, where)
        choices.append(Choice(index, operator, tier, passed_over, wish is not None, native, tuple(valid)))
    return tuple(choices)


def table(choices: tuple[Choice, ...], config: ModelConfig) -> str:
    """One line per operator and run of layers alike: layers, operator, what it computes, tier, why not a faster one."""
    rows: list[list[Any]] = []
    for operator in OPS:
        for choice in (c for c in choices if c.operator == operator):
            what = describe(config.layers[choice.layer], operator)
            same = rows and rows[-1][1:] == [operator, what, choice.tier.value, "; ".join(choice.passed_over)]
            if same and rows[-1][0][1] == choice.layer - 1:
                rows[-1][0] = (rows[-1][0][0], choice.layer)
            else:
                rows.append(
                    [(choice.layer, choice.layer), operator, what, choice.tier.value, "; ".join(choice.passed_over)]
                )
    text = [["layers", "operator", "what", "tier", "why not faster"]]
    text += [[str(a) if a == b else f"{a}-{b}", *rest] for (a, b), *rest in rows]
    widths = [max(len(row[i]) for row in text) for i in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in text
    )


def describe(layer: Layer, operator: str) -> str:
    """A few words on what an operator computes in a layer, e.g. "topk k=64 sink=4 window=32, rope, 9 heads / 3 kv"."""
    if operator == "gate":
        assert layer.gate is not None
        slots = f" of {layer.gate.slots} slots" if layer.gate.slots else ""
        return f"{layer.gate.mode}, {layer.gate.source}{slots}"
    if operator == "moe":
        assert isinstance(layer.ffn, Moe)
        return _describe_moe(layer.ffn)
    assert layer.mixer is not None
    mixer, pattern = layer.mixer, layer.mixer.pattern
    options = " ".join(f"{name}={value}" for name, value in vars(pattern).items() if value not in (0, "head"))
    grouping = (
        "" if mixer.head_map == "contiguous" else f" {mixer.head_map if isinstance(mixer.head_map, str) else 'listed'}"
    )
    shown = f"{pattern.kind} {options}".strip()
    return f"{shown}, {_position(mixer.position)}, {mixer.num_heads} heads / {mixer.num_kv_heads} kv{grouping}"


def _describe_moe(ffn: Moe) -> str:
    groups = f", {ffn.top_groups} of {ffn.groups} groups" if ffn.groups > 1 else ""
    shared = ", shared experts" if ffn.shared_intermediate_size is not None else ""
    return f"{ffn.top_k} of {ffn.num_experts} experts of {ffn.intermediate_size}, {ffn.score}{groups}{shared}"
