"""What a tensor without a place in the model probably is, by its name."""

import re

from tiers.reference.checkpoint import TensorInfo

# Words in names, and what they are signs of; the first that is found counts.
_SIGNS: tuple[tuple[str, str], ...] = (
    (r"lora_[ab]|lora_embedding|lora_magnitude", "an unmerged LoRA adapter: merge it with merge_and_unload() of peft"),
    (r"_flat_param", "flat parameters of FSDP: save the model with a full state dict"),
    (r"exp_avg|momentum_buffer|optimizer|fp32_from_fp16|param_groups", "optimiser state: not part of the model"),
    (
        r"qweight|qzeros|g_idx|scales?$|_scale(_inv|_2)?$|zero_points?$|weight_packed|weight_shape|absmax|quant_(map|state)",
        "quantised weights (scales, zero points): not supported yet, export in 16 or 32 bits",
    ),
    (r"audio|whisper|speech|(^|[._])mel([._]|$)", "an audio tower: is the architecture that of a multimodal model?"),
    (
        r"vision|visual|image|siglip|clip|patch_embed|(^|[._])vit([._]|$)",
        "a vision tower: is the architecture that of a multimodal model?",
    ),
    (
        r"projector|multi_modal|(^|[._])mm_|connector|resampler",
        "a projector: is the architecture that of a multimodal model?",
    ),
    (r"inv_freq|rotary|cos_cached|sin_cached|rope", "rotary buffers: computed from the config; add a rule with drop"),
    (r"(^|[._])mtp|nextn|eagle|medusa|eh_proj|[._][eh]norm|draft", "an MTP or EAGLE head for speculative decoding"),
    (r"experts|router|block_sparse_moe", "a mixture of experts: not supported yet"),
    (r"attn\.(masked_)?bias$|causal_mask", "a causal mask: add a rule with drop"),
    (r"(^|\.)(score|v_head|value_head|classifier|reward)", "a head for scores, not for text"),
)


def guess(name: str, info: TensorInfo | None = None) -> str:
    """What a tensor without a place probably is; "" if nothing in its name tells."""
    if info is not None and 0 in info.shape:
        return "a piece of a ZeRO-3 checkpoint that was not gathered: consolidate it first"
    for pattern, meaning in _SIGNS:
        if re.search(pattern, name.lower()):
            return meaning
    return ""


# Modules that only hold others: the one below says more.
_HOLDERS = frozenset({"model", "transformer", "base_model", "language_model", "module", "decoder", "backbone"})


def top_module(name: str) -> str:
    """ "vision_tower", "model.projector", "model.layers.*": the part of a name that says which part of a model it is of."""
    parts = name.split(".")
    end = 0
    while end < len(parts) - 2 and parts[end] in _HOLDERS:
        end += 1
    top = ".".join(parts[: end + 1])
    return f"{top}.*" if end + 1 < len(parts) and parts[end + 1].isdecimal() else top
