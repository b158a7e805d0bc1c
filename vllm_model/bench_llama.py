"""The same model, as far as vLLM's own Llama class can express it: for comparing with vLLM and with transformers.

A model whose layers all have experts is made a Mixtral, which is a Llama but for these. Patterns and gates are left out, the rest is kept: so it is the same work but for what makes the model one of ours.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tiers.reference.config import Dense, Linear, Llama3, ModelConfig, Moe, Rope, Swiglu, Yarn
from tiers.reference.errors import ServingError
from tiers.reference.heads import HeadLayout
from tiers.reference.load import open_model, weights

# Our name of a tensor in a layer, and Llama's.
NAMES = {
    "mixer_norm": "input_layernorm",
    "mixer.q_proj": "self_attn.q_proj",
    "mixer.k_proj": "self_attn.k_proj",
    "mixer.v_proj": "self_attn.v_proj",
    "mixer.o_proj": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate_proj": "mlp.gate_proj",
    "ffn.up_proj": "mlp.up_proj",
    "ffn.down_proj": "mlp.down_proj",
}

# The same in a Mixtral, beside those.
EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
ROUTER = "block_sparse_moe.gate"

# Bytes of one weight file.
SHARD = 2 * 2**30


@dataclass(frozen=True)
class LlamaModel:
    """What a Llama of the same shape is to a model.

    Attributes:
        name: what it is, "Llama" or "Mixtral".
        config: its config.json.
        weights_differ: why it cannot have the same weights; empty if it can.
        function_differs: why it computes something else even with the same weights; empty if it does not.
    """

    name: str
    config: dict[str, Any]
    weights_differ: str
    function_differs: str


def as_llama(config: ModelConfig) -> LlamaModel:
    """Describe a Llama of the same shape, or where there are experts a Mixtral.

    Raises:
        ServingError: the layers differ in shape, which those of a Llama cannot.
    """
    pairs = [(x.mixer, x.ffn) for x in config.layers if x.mixer is not None and x.ffn is not None]
    shapes: set[Any] = {
        (
            HeadLayout.of(m.heads, m.num_kv_heads).num_heads,
            m.num_kv_heads,
            m.head_dim,
            ffn.intermediate_size,
            _experts(ffn),
        )
        for m, ffn in pairs
    }
    # A layer without one of them is of another shape too.
    shapes |= {None} if len(pairs) < len(config.layers) else set()
    if len(shapes) > 1:
        raise ServingError(
            f"--native and --transformers compare with a Llama, whose layers are all of one shape; this model has {len(shapes)} "
            "shapes of heads and ffn. Leave these flags out"
        )
    ((heads, kv_heads, size, inner, experts),) = shapes
    rope: dict[str, Any] = {"rope_type": "default"}
    position = pairs[0][0].position
    if isinstance(position, Rope):
        rope["rope_theta"] = position.theta
        if isinstance(position.scaling, Linear | Llama3 | Yarn):
            rope.update(rope_type=position.scaling.kind, **vars(position.scaling))
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "intermediate_size": inner,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm.eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if experts is not None:
        described |= {
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": experts[0],
            "num_experts_per_tok": experts[1], "sliding_window": None,
        }  # fmt: skip
    name = "Llama" if experts is None else "Mixtral"
    return LlamaModel(name, described, next(_other_weights(config, name), ""), next(_other_function(config, name), ""))


def _experts(ffn: object) -> tuple[int, int] | None:
    """Experts, and how many a token uses."""
    return (ffn.num_experts, ffn.top_k) if isinstance(ffn, Moe) else None


def _is_mixtral(ffn: object) -> bool:
    """Whether a Mixtral's experts can have the weights and compute the same."""
    return isinstance(ffn, Moe) and ffn == Moe(ffn.num_experts, ffn.top_k, ffn.intermediate_size)


def _other_weights(config: ModelConfig, name: str) -> Iterator[str]:
    norm = config.norm
    if norm.kind != "rms" or norm.unit_offset or config.norm_position != "pre" or config.embedding_norm:
        yield f"its norms are not those of a {name}"
    if config.learned_positions or config.lm_head_bias:
        yield "it has learned positions or a head with a bias"
    for index, layer in enumerate(config.layers):
        mixer = layer.mixer
        same = _is_mixtral(layer.ffn) if name == "Mixtral" else isinstance(layer.ffn, Swiglu) and not layer.ffn.bias
        if not same:
            yield f"layer {index} has {'other experts' if name == 'Mixtral' else 'another ffn'} than a {name}"
        if mixer is not None and (mixer.qkv_bias or mixer.o_bias or mixer.qk_norm != "none"):
            yield f"layer {index} has biases or q/k norms"


def _other_function(config: ModelConfig, name: str) -> Iterator[str]:
    multipliers = (config.embedding_multiplier, config.residual_multiplier, config.logits_multiplier)
    if config.residual != "sequential" or multipliers != (1.0, 1.0, 1.0) or config.logits_softcap is not None:
        yield f"its residuals, multipliers or cap on logits are not those of a {name}"
    for index, (mixer, layer) in enumerate(zip(config.mixers, config.layers, strict=True)):
        position = mixer.position
        if not isinstance(mixer.pattern, Dense):
            yield f"layer {index} has pattern {mixer.pattern.kind}; a {name} is dense"
        if layer.gate is not None:
            yield f"layer {index} has a gate, which a {name} leaves out"
        if not _is_rotary(position) or position != config.mixers[0].position:
            yield f"layer {index} has other positions than a {name}"
        if mixer.scale is not None or mixer.softcap is not None:
            yield f"layer {index} has a scale or a softcap"


def _is_rotary(position: object) -> bool:
    """As a Llama has it. The others change with a request in transformers, or are not known there."""
    return (
        isinstance(position, Rope)
        and position.style == "half"
        and position.partial_rotary_factor == 1
        and isinstance(position.scaling, Linear | Llama3 | Yarn | None)
    )


def write(folder: Path, model: ModelConfig, source: Path | None, family: str | None = None) -> None:
    """Write the Llama: config.json, and weight files unless `source` is None.

    Args:
        folder: made here.
        model: our config.
        source: our model folder, if a Llama can have its weights; tensors are renamed and query heads laid out in
            contiguous groups.
        family: of `source`, see `tiers.reference.load.describe`.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(as_llama(model).config, indent=1))
    if source is None:
        return
    shard: dict[str, Tensor] = {}
    index: dict[str, str] = {}

    def save() -> None:
        name = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name)
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in _renamed(model, source, family):
        shard[name] = tensor.contiguous()
        if sum(part.nbytes for part in shard.values()) > SHARD:
            save()
    save()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _renamed(model: ModelConfig, source: Path, family: str | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights(open_model(source, family)):
        if not name.startswith("layers."):
            yield (name if name.startswith("lm_head.") else f"model.{name}"), tensor
            continue
        _, number, rest = name.split(".", 2)
        part = rest.removesuffix(".weight")
        if part.startswith("ffn.experts."):
            _, _, expert, matrix = part.split(".")
            yield f"model.layers.{number}.block_sparse_moe.experts.{expert}.{EXPERT_NAMES[matrix]}.weight", tensor
            continue
        if part == "ffn.router":
            yield f"model.layers.{number}.{ROUTER}.weight", tensor
            continue
        if part not in NAMES:  # a gate's
            continue
        mixer = model.mixers[int(number)]
        layout = HeadLayout.of(mixer.heads, mixer.num_kv_heads)
        if part == "mixer.q_proj":
            tensor = layout.arrange(tensor, mixer.head_dim, dim=0, copy=True)
        elif part == "mixer.o_proj":
            tensor = layout.arrange(tensor, mixer.head_dim, dim=1, copy=False)
        yield f"model.layers.{number}.{NAMES[part]}.weight", tensor
