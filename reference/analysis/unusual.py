"""What a plain Llama does not have, in short lines."""

import math
from typing import Any

from tiers.reference import fields
from tiers.reference.analysis.layers import alike, in_layers, ranges
from tiers.reference.config import Geglu, Gelu, Layer, ModelConfig, Moe, TopK, Window
from tiers.reference.heads import HeadLayout
from tiers.reference.positions import T5, Alibi, Kerple, Rope, Sandwich, Xpos


def unusual(config: ModelConfig) -> list[str]:
    """Short lines about everything that a plain Llama with one head size does not have, and with which layers."""
    lines = []
    for describe in (_absent, _heads, _scores, _positions, _pattern, _biases, _experts, _gate):
        for text, where in alike(describe(layer, config) for layer in config.layers).items():
            everywhere = len(where) == len(config.layers)
            lines += [part if everywhere else f"{part} ({in_layers(where)})" for part in text]
    lines += _whole_model(config)
    kinds = alike(config.layers)
    if len(kinds) > 1:
        lines.append("layers are of " + f"{len(kinds)} kinds: " + "; ".join(ranges(where) for where in kinds.values()))
    return lines


def _absent(layer: Layer, config: ModelConfig) -> tuple[str, ...]:
    names = [name for name, part in (("attention", layer.mixer), ("ffn", layer.ffn)) if part is None]
    return (f"no {' and no '.join(names)}",) if names else ()


def _heads(layer: Layer, config: ModelConfig) -> tuple[str, ...]:
    mixer, lines = layer.mixer, []
    if mixer is None:
        return ()
    sizes = sorted({mixer.heads.count(kv) for kv in mixer.heads})
    layout = HeadLayout.of(mixer.heads, mixer.num_kv_heads)
    if len(sizes) > 1:
        lines.append(
            f"groups of unequal size: {' or '.join(map(str, sizes))} of {mixer.num_heads} query heads read one of "
            f"{mixer.num_kv_heads} key/value heads; served with {layout.num_heads} heads, "
            f"{layout.num_heads - mixer.num_heads} of them empty"
        )
    elif sizes[0] > 1:
        shared = "multi-query attention" if mixer.num_kv_heads == 1 else "grouped attention"
        lines.append(f"{shared}: {sizes[0]} query heads for each of {mixer.num_kv_heads} key/value heads")
    if not layout.is_identity:
        name = mixer.head_map if isinstance(mixer.head_map, str) else "a list"
        lines.append(f"head_map is {name}, not contiguous: query heads are rearranged when weights load")
    if mixer.num_heads * mixer.head_dim != config.hidden_size:
        product = mixer.num_heads * mixer.head_dim
        lines.append(
            f"{mixer.num_heads} heads of {mixer.head_dim} channels are {product}, hidden_size is {config.hidden_size}"
        )
    if mixer.qk_norm != "none":
        lines.append(f"a norm on q and k, {'on each head' if mixer.qk_norm == 'head' else 'over all heads'}")
    return tuple(lines)


def _scores(layer: Layer, config: ModelConfig) -> tuple[str, ...]:
    mixer, lines = layer.mixer, []
    if mixer is None:
        return ()
    if mixer.scale is not None and not math.isclose(mixer.scale, mixer.head_dim**-0.5):
        lines.append(f"scores are scaled by {mixer.scale:.6g}, not by 1 / sqrt(head_dim) = {mixer.head_dim**-0.5:.6g}")
    if mixer.softcap is not None:
        lines.append(f"scores are capped at {mixer.softcap:g}")
    return tuple(lines)


def _positions(layer: Layer, config: ModelConfig) -> tuple[str, ...]:
    if layer.mixer is None:
        return ()
    position, size, lines = layer.mixer.position, layer.mixer.head_dim, []
    if isinstance(position, Rope):
        rotary = position.rotary_dim(size)
        if rotary != size:
            lines.append(f"rope turns {rotary} of {size} channels of a head")
        if position.style == "interleaved":
            lines.append("rope pairs neighbouring channels (interleaved), not halves")
        if position.scaling is not None:
            shown = {k: v for k, v in vars(position.scaling).items() if v is not None}
            settings = ", ".join(f"{k} {_setting(v)}" for k, v in shown.items())
            lines.append(
                f"rope is stretched: {position.scaling.kind}, {settings}; longest context {config.max_position_embeddings}"
            )
    elif isinstance(position, Alibi):
        root = " on the square root of the distance" if position.distance == "sqrt" else ""
        lines.append(f"ALiBi with {'the published' if position.slopes is None else 'its own'} slopes{root}, no rope")
    elif isinstance(position, Xpos):
        pairs = "neighbouring channels" if position.style == "interleaved" else "halves"
        lines.append(
            f"xpos: rope over {pairs} whose products fall with distance, gamma {position.gamma:g}, scale_base "
            f"{position.scale_base:g}; keys are cached unscaled"
        )
    elif isinstance(position, Sandwich):
        lines.append(f"sandwich positions of {position.dim or layer.mixer.head_dim} channels added to scores, no rope")
    elif isinstance(position, T5):
        owner = "one table for all such layers" if position.shared else "a table per layer"
        lines.append(
            f"a learned bias per range of distances (T5): {position.num_buckets} buckets up to {position.max_distance}, "
            f"{owner}, no rope"
        )
    elif isinstance(position, Kerple):
        whence = "learned" if position.r1 is None else "given"
        lines.append(f"kerple: scores fall with the logarithm of the distance, r1 and r2 {whence}, no rope")
    elif not config.learned_positions:
        lines.append("no positions at all")
    return tuple(lines)


def _setting(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{value[0]:g} to {value[-1]:g} for {len(value)} pairs" if value else "[]"
    return f"{value:g}" if isinstance(value, float) else fields.shown(value)


def _pattern(layer: Layer, config: ModelConfig) -> tuple[str, ...]:
    pattern = layer.mixer.pattern if layer.mixer is not None else None
    if isinstance(pattern, Window):
        sink = f" and the first {pattern.sink}" if pattern.sink else ""
        return (f"a window: each token sees the last {pattern.window} tokens{sink}",)
    if isinstance(pattern, TopK):
        each = "key/value head" if pattern.share == "group" else "query head"
        return (f"top-k: each {each} keeps {pattern.k} keys, and {pattern.sink} first and {pattern.window} last ones",)
    return ()


def _biases(layer: Layer, config: ModelConfig) -> tuple[str, ...]:
    mixer, ffn = layer.mixer, layer.ffn
    biases = {
        "q, k, v": mixer is not None and mixer.qkv_bias, "o": mixer is not None and mixer.o_bias,
        "ffn": ffn is not None and not isinstance(ffn, Moe) and ffn.bias,
    }  # fmt: skip
    names = [name for name, has in biases.items() if has]
    lines = [f"biases on {', '.join(names)}"] if names else []
    if isinstance(ffn, Gelu | Geglu):
        lines.append("ffn without a gate (gelu)" if isinstance(ffn, Gelu) else "ffn gated by gelu")
    return tuple(lines)


def _experts(layer: Layer, config: ModelConfig) -> tuple[str, ...]:
    ffn = layer.ffn
    if not isinstance(ffn, Moe):
        return ()
    lines = [f"a mixture of {ffn.num_experts} experts, {ffn.top_k} for each token"]
    if ffn.score == "sigmoid" or ffn.correction_bias:
        corrected = ", with a correction for the choice" if ffn.correction_bias else ""
        lines.append(f"experts are scored by a {ffn.score}{corrected}")
    if ffn.groups > 1:
        best = "best expert" if ffn.group_score == "max" else "best two experts"
        lines.append(f"experts of {ffn.top_groups} of {ffn.groups} groups are chosen from, those with the {best}")
    if not ffn.renormalize:
        lines.append("weights of the chosen experts are not renormalised")
    if ffn.routed_scaling_factor != 1:
        lines.append(f"what experts add is multiplied by {ffn.routed_scaling_factor:g}")
    if ffn.shared_intermediate_size is not None:
        gated = ", scaled by a sigmoid of the token" if ffn.shared_gate else ""
        lines.append(f"shared experts of {ffn.shared_intermediate_size} channels for every token{gated}")
    if ffn.activation != "silu":
        lines.append(f"experts gated by {ffn.activation}")
    return tuple(lines)


def _gate(layer: Layer, config: ModelConfig) -> tuple[str, ...]:
    if layer.gate is None:
        return ()
    source = f"a bank of {layer.gate.slots} slots" if layer.gate.source == "bank" else "a table row per token id"
    return (f"a knowledge gate, {layer.gate.mode}, from {source}",)


def _whole_model(config: ModelConfig) -> list[str]:
    lines = []
    for name in ("embedding_multiplier", "residual_multiplier", "logits_multiplier"):
        if getattr(config, name) != 1:
            lines.append(f"{name} is {getattr(config, name):.6g}")
    if config.logits_softcap is not None:
        lines.append(f"logits are capped at {config.logits_softcap:g}")
    if config.norm.kind == "layer":
        lines.append(f"layer norms {'with' if config.norm.has_bias else 'without'} bias")
    if config.norm.unit_offset:
        lines.append("norms scale by 1 + weight")
    if config.norm_position != "pre":
        where = "behind the sublayers" if config.norm_position == "post" else "before and behind the sublayers"
        lines.append(f"norms stand {where} ({config.norm_position})")
    if config.residual == "parallel":
        lines.append("attention and ffn read the same input (parallel residual)")
    if config.embedding_norm:
        lines.append("a norm behind the embedding")
    if config.learned_positions:
        lines.append(f"learned positions: {config.max_position_embeddings} rows, and no longer context")
    if config.tie_word_embeddings:
        lines.append("the head is the embedding (tie_word_embeddings)")
    if config.lm_head_bias:
        lines.append("the head has a bias")
    return lines
