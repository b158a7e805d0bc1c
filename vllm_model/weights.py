"""From the tensors of a checkpoint to the parameters of the vLLM model, strictly in both directions."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import is_pp_missing_parameter

from tiers.reference.config import Geglu, ModelConfig, Swiglu
from tiers.reference.errors import CheckpointError
from tiers.reference.heads import HeadLayout
from tiers.reference.load import CheckedTensors

# Parameters that vLLM stacks into one: our name to its name and the name of the part.
STACKED: dict[str, tuple[str, str | int]] = {
    ".mixer.q_proj.": (".mixer.qkv_proj.", "q"),
    ".mixer.k_proj.": (".mixer.qkv_proj.", "k"),
    ".mixer.v_proj.": (".mixer.qkv_proj.", "v"),
    ".ffn.gate_proj.": (".ffn.gate_up_proj.", 0),
    ".ffn.up_proj.": (".ffn.gate_up_proj.", 1),
    ".ffn.shared.gate_proj.": (".ffn.shared.gate_up_proj.", 0),
    ".ffn.shared.up_proj.": (".ffn.shared.gate_up_proj.", 1),
}

_EXPERT = re.compile(r"(model\.layers\.\d+\.ffn)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_LAYER = re.compile(r"layers\.(\d+)\.(.*)")


def target(name: str, gated: bool) -> tuple[str, str | int | None]:
    """The parameter of the vLLM model that a checkpoint tensor goes into, and which part of it.

    Args:
        name: as in `tiers.reference.model`.
        gated: the layer's ffn has a gate_proj, so that up_proj is the second part of a stack.
    """
    full = name if name.startswith("lm_head.") else f"model.{name}"
    for ours, (theirs, part) in STACKED.items():
        if ours in full and (gated or ours != ".ffn.up_proj."):
            return full.replace(ours, theirs), part
    return full, None


def arrange(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Bring query heads into contiguous groups of one size (see HeadLayout); other tensors pass through."""
    match = _LAYER.fullmatch(name)
    if match is None or not match[2].startswith(("mixer.q_proj.", "mixer.q_norm.", "mixer.o_proj.weight")):
        return tensor
    mixer = config.layers[int(match[1])].mixer
    assert mixer is not None
    if match[2] == "mixer.q_norm.weight" and mixer.qk_norm != "full":
        return tensor  # one weight for all heads
    layout = HeadLayout.of(mixer.heads, mixer.num_kv_heads)
    if match[2] == "mixer.o_proj.weight":
        return layout.arrange(tensor, mixer.head_dim, dim=1, copy=False)
    return layout.arrange(tensor, mixer.head_dim, dim=0, copy=True)


def load(model: nn.Module, config: ModelConfig, tensors: Iterable[tuple[str, Tensor]], strict: bool) -> set[str]:
    """Fill this rank's part of the model.

    Args:
        model: the TiersForCausalLM.
        config: what it was built from.
        tensors: names as in `tiers.reference.model`, full size, on the CPU or the device.
        strict: also demand that every parameter of the model was filled; off where a quantisation method adds its own.

    Returns:
        Names of the parameters that were filled.

    Raises:
        CheckpointError: a tensor is unknown, comes twice, is missing, has a wrong shape, or is not finite; a parameter
            was not filled.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    filled: set[str] = set()
    checked = CheckedTensors(config, dtype=torch.get_default_dtype())
    for name, tensor in checked.check(tensors):
        full, part = target(name, _is_gated(config, name))
        if is_pp_missing_parameter(full, model):
            continue
        if expert := _EXPERT.fullmatch(full):
            # All experts of a layer are one parameter, of which each rank has its own part.
            experts: Any = model.get_submodule(f"{expert[1]}.experts")
            experts.load(int(expert[2]), expert[3], tensor)
            filled.update(f"{expert[1]}.experts.{own}" for own, _ in experts.named_parameters())
            continue
        if full not in parameters:
            raise CheckpointError(
                f"{name}: the model on this rank has no parameter {full}; this is a bug in vllm-tiers"
            )
        parameter: Any = parameters[full]
        loader = getattr(parameter, "weight_loader", default_weight_loader)
        arranged = arrange(name, tensor, config)
        loader(parameter, arranged) if part is None else loader(parameter, arranged, part)
        filled.add(full)
    checked.finish()
    if config.tie_word_embeddings:
        filled.add("lm_head.weight")
    empty = sorted(set(parameters) - filled)
    if strict and empty:
        raise CheckpointError(
            f"parameter {empty[0]} and {len(empty) - 1} more were not filled; this is a bug in vllm-tiers"
        )
    return filled & set(parameters)


def _is_gated(config: ModelConfig, name: str) -> bool:
    match = _LAYER.fullmatch(name)
    return match is not None and isinstance(config.layers[int(match[1])].ffn, Swiglu | Geglu)
