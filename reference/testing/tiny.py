"""Small models with random weights, and folders that hold them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tiers.reference.config import ModelConfig
from tiers.reference.model import ReferenceModel


def tiny_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a model of 4 small layers: dense, window, top-k per head, top-k per group; two gates.

    Args:
        changes: keys to replace at the top.
    """
    config: dict[str, Any] = {
        "architectures": ["TiersForCausalLM"],
        "model_type": "tiers",
        "dtype": "float32",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "max_position_embeddings": 512,
        "mixer": {
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "head_map": "interleaved",
            "pattern": {"kind": "topk", "k": 8, "sink": 1, "window": 2},
            "position": {"kind": "rope"},
        },
        "ffn": {"kind": "swiglu", "intermediate_size": 96},
        "layers": {
            "0": {"mixer": {"pattern": {"kind": "dense"}}},
            "1": {"mixer": {"pattern": {"kind": "window", "window": 16, "sink": 2}}},
            "2": {"gate": {"mode": "mix", "source": "token"}},
            "3": {"mixer": {"pattern": {"share": "group"}}, "gate": {"mode": "sigmoid", "source": "bank", "slots": 5}},
        },
    }
    return {**config, **changes}


def alibi_config(**changes: Any) -> dict[str, Any]:
    """The config.json of 3 layers with unequal head groups [3, 1, 2], ALiBi, layer norm, biases, gelu, tied head."""
    config = tiny_config(
        hidden_size=48,
        num_hidden_layers=3,
        mixer={
            "num_heads": 6,
            "num_kv_heads": 3,
            "head_dim": 16,
            "head_map": [0, 2, 0, 1, 2, 0],
            "pattern": {"kind": "topk", "k": 6, "sink": 0, "window": 1},
            "position": {"kind": "alibi"},
            "qkv_bias": True,
            "o_bias": True,
        },
        ffn={"kind": "gelu", "intermediate_size": 80, "bias": True, "approximate": "tanh"},
        norm={"kind": "layer", "eps": 1e-5},
        embedding_norm=True,
        tie_word_embeddings=True,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        logits_multiplier=0.5,
        layers={
            "0": {"mixer": {"pattern": {"kind": "dense"}}},
            "1": {"mixer": {"pattern": {"share": "group"}}},
            "2": {"gate": {"mode": "linear", "source": "token", "bias": False}},
        },
    )
    return {**config, **changes}


def positions_config(**changes: Any) -> dict[str, Any]:
    """The config.json of 9 layers with unequal head groups [4, 1, 1, 2], each with other positions and patterns."""
    layers: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"kind": "xpos", "scale_base": 24}, {"kind": "dense"}),
        ({"kind": "sandwich"}, {"kind": "window", "window": 12, "sink": 2}),
        ({"kind": "t5", "num_buckets": 8, "max_distance": 20, "shared": True}, {}),
        ({"kind": "kerple"}, {"share": "group"}),
        ({"kind": "alibi", "distance": "sqrt"}, {"kind": "dense"}),
        ({"kind": "rope", "style": "interleaved", "partial_rotary_factor": 0.5}, {"kind": "window", "window": 9}),
        ({"kind": "t5", "num_buckets": 8, "max_distance": 20, "shared": True}, {"kind": "dense"}),
        ({"kind": "none"}, {"kind": "dense"}),
        ({"kind": "xpos", "style": "half"}, {"share": "group"}),
    ]
    config = tiny_config(
        hidden_size=48,
        num_hidden_layers=len(layers),
        mixer={
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 16,
            "head_map": [0, 0, 0, 1, 3, 2, 3, 0],
            "pattern": {"kind": "topk", "k": 6, "sink": 1, "window": 2},
            "position": {"kind": "t5", "num_buckets": 6, "max_distance": 30},
        },
        layers={
            str(i): {"mixer": {"position": position} | ({"pattern": pattern} if pattern else {})}
            for i, (position, pattern) in enumerate(layers)
        },
    )
    return {**config, **changes}


def moe_config(**changes: Any) -> dict[str, Any]:
    """The config.json of 4 layers with experts: a dense one first, softmax, sigmoid in groups with shared experts, gated ones."""
    config = tiny_config(
        hidden_size=64,
        mixer={"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "position": {"kind": "rope"}},
        ffn={"kind": "moe", "num_experts": 8, "top_k": 2, "intermediate_size": 64},
        layers={
            "0": {"ffn": {"kind": "swiglu", "intermediate_size": 96}},
            "2": {
                "ffn": {
                    "top_k": 3, "score": "sigmoid", "correction_bias": True, "groups": 4, "top_groups": 2,
                    "group_score": "top2", "routed_scaling_factor": 1.5, "shared_intermediate_size": 48,
                },
                "gate": {"mode": "sigmoid", "source": "bank", "slots": 5},
            },
            "3": {
                "ffn": {
                    "renormalize": False, "shared_intermediate_size": 40, "shared_gate": True, "activation": "gelu_tanh",
                    "groups": 2, "routed_scaling_factor": 2.0,
                },
            },
        },
    )  # fmt: skip
    return {**config, **changes}


def uneven_config(**changes: Any) -> dict[str, Any]:
    """The config.json of 6 layers that differ in key/value heads and inner width; some without attention, ffn, or both."""
    config = tiny_config(
        num_hidden_layers=6,
        mixer={"num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "position": {"kind": "rope"}},
        layers={
            "0": {"mixer": None},
            "1": {"mixer": {"num_kv_heads": 2}, "ffn": {"intermediate_size": 32}},
            "2": {"ffn": None},
            "3": {"mixer": None, "ffn": None, "gate": {"mode": "sigmoid", "source": "bank", "slots": 5}},
            "4": {"mixer": {"num_heads": 8, "pattern": {"kind": "window", "window": 9}}, "ffn": {"kind": "gelu", "intermediate_size": 160}},
        },
    )  # fmt: skip
    return {**config, **changes}


def tiny_model(config: dict[str, Any], seed: int = 0) -> ReferenceModel:
    """A reference model with random weights, spread widely enough that its logits are of order 10."""
    generator = torch.Generator().manual_seed(seed)
    model = ReferenceModel(ModelConfig.from_dict(config))
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif name.endswith("bias"):
            values = 0.1 * values
        elif "kerple" in name:
            values = values.abs()
        elif name.endswith("t5_bias"):
            pass
        elif name.endswith("router.weight"):
            # Scores so far apart that rounding seldom decides which experts a token gets.
            values = values * 3 * parameter.shape[1] ** -0.5
        elif parameter.dim() == 2 and not name.startswith("embed_tokens"):
            values = values * 1.5 * parameter.shape[1] ** -0.5
        parameter.data = values
    return model.requires_grad_(False).eval()


def save_model(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], shards: int = 1) -> Path:
    """Write config.json and safetensors files, with an index if there is more than one shard."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    names = sorted(tensors)
    if shards == 1:
        save_file({name: tensors[name].contiguous() for name in names}, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def save_tiny(folder: Path, config: dict[str, Any], seed: int = 0, shards: int = 1) -> Path:
    """A folder with a tiny model in it."""
    return save_model(folder, config, tiny_model(config, seed).state_dict(), shards)


def random_ids(length: int, vocab_size: int, seed: int) -> list[int]:
    """A prompt of random token ids."""
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one token per byte, with a chat template, for tiny models that are served over HTTP."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
