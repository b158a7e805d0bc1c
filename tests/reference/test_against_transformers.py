"""The reference model against tiny random transformers models, with weights that go through real checkpoint files."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tiers.reference.load import load_model
from tiers.reference.model import Cache
from tiers.reference.testing.compare import LOGPROB_BUDGET, assert_close
from tiers.reference.testing.tiny import random_ids, save_model

VOCAB, LENGTH = 120, 48

# Their names to ours, tried in order on the whole name; {0} is the layer.
LLAMA_NAMES = {
    r"model\.embed_tokens\.weight": "embed_tokens.weight",
    r"model\.norm\.(weight|bias)": "norm.{0}",
    r"lm_head\.weight": "lm_head.weight",
    r"model\.layers\.(\d+)\.self_attn\.(.*)": "layers.{0}.mixer.{1}",
    r"model\.layers\.(\d+)\.mlp\.(.*)": "layers.{0}.ffn.{1}",
    r"model\.layers\.(\d+)\.input_layernorm\.(weight|bias)": "layers.{0}.mixer_norm.{1}",
    r"model\.layers\.(\d+)\.post_attention_layernorm\.(weight|bias)": "layers.{0}.ffn_norm.{1}",
}

NEOX_NAMES = {
    r"gpt_neox\.embed_in\.weight": "embed_tokens.weight",
    r"gpt_neox\.final_layer_norm\.(weight|bias)": "norm.{0}",
    r"(?:embed_out|lm_head)\.weight": "lm_head.weight",
    r"gpt_neox\.layers\.(\d+)\.attention\.query_key_value\.(weight|bias)": "layers.{0}.mixer.qkv.{1}",
    r"gpt_neox\.layers\.(\d+)\.attention\.dense\.(weight|bias)": "layers.{0}.mixer.o_proj.{1}",
    r"gpt_neox\.layers\.(\d+)\.mlp\.dense_h_to_4h\.(weight|bias)": "layers.{0}.ffn.up_proj.{1}",
    r"gpt_neox\.layers\.(\d+)\.mlp\.dense_4h_to_h\.(weight|bias)": "layers.{0}.ffn.down_proj.{1}",
    r"gpt_neox\.layers\.(\d+)\.input_layernorm\.(weight|bias)": "layers.{0}.mixer_norm.{1}",
    r"gpt_neox\.layers\.(\d+)\.post_attention_layernorm\.(weight|bias)": "layers.{0}.ffn_norm.{1}",
}

MPT_NAMES = {
    r"transformer\.wte\.weight": "embed_tokens.weight",
    r"transformer\.norm_f\.weight": "norm.weight",
    r"lm_head\.weight": "lm_head.weight",
    r"transformer\.blocks\.(\d+)\.attn\.Wqkv\.weight": "layers.{0}.mixer.qkv.weight",
    r"transformer\.blocks\.(\d+)\.attn\.out_proj\.weight": "layers.{0}.mixer.o_proj.weight",
    r"transformer\.blocks\.(\d+)\.ffn\.(.*)": "layers.{0}.ffn.{1}",
    r"transformer\.blocks\.(\d+)\.norm_1\.weight": "layers.{0}.mixer_norm.weight",
    r"transformer\.blocks\.(\d+)\.norm_2\.weight": "layers.{0}.ffn_norm.weight",
}

BLOOM_NAMES = {
    r"transformer\.word_embeddings\.weight": "embed_tokens.weight",
    r"transformer\.word_embeddings_layernorm\.(weight|bias)": "embed_norm.{0}",
    r"transformer\.ln_f\.(weight|bias)": "norm.{0}",
    r"lm_head\.weight": "lm_head.weight",
    r"transformer\.h\.(\d+)\.self_attention\.query_key_value\.(weight|bias)": "layers.{0}.mixer.qkv.{1}",
    r"transformer\.h\.(\d+)\.self_attention\.dense\.(weight|bias)": "layers.{0}.mixer.o_proj.{1}",
    r"transformer\.h\.(\d+)\.mlp\.dense_h_to_4h\.(weight|bias)": "layers.{0}.ffn.up_proj.{1}",
    r"transformer\.h\.(\d+)\.mlp\.dense_4h_to_h\.(weight|bias)": "layers.{0}.ffn.down_proj.{1}",
    r"transformer\.h\.(\d+)\.input_layernorm\.(weight|bias)": "layers.{0}.mixer_norm.{1}",
    r"transformer\.h\.(\d+)\.post_attention_layernorm\.(weight|bias)": "layers.{0}.ffn_norm.{1}",
}


def split_in_three(fused: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """All of q, then all of k, then all of v."""
    assert fused.shape[0] % (3 * heads) == 0
    q, k, v = fused.chunk(3)
    return q, k, v


def split_per_head(fused: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the first head, then those of the second, ..."""
    q, k, v = (part.flatten(0, 1) for part in fused.unflatten(0, (heads, 3, -1)).unbind(1))
    return q, k, v


@dataclass
class Case:
    """A transformers model and the same model in our words.

    Attributes:
        theirs: makes it.
        ours: config.json, without the keys that all cases share.
        names: their parameter names to ours.
        split: takes a fused q, k, v apart.
    """

    theirs: Callable[[], transformers.PreTrainedModel]
    ours: dict[str, Any]
    names: dict[str, str]
    split: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]] | None = None


def llama(position: dict[str, Any] | None = None, biases: bool = False, tied: bool = False) -> Case:
    position = position or {"kind": "rope"}
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": position.get("theta", 10000.0)}
    if "scaling" in position:
        scaling = dict(position["scaling"])
        parameters |= {"rope_type": scaling.pop("kind"), **scaling}
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-6, attention_bias=biases, mlp_bias=biases,
        tie_word_embeddings=tied, rope_parameters=parameters,
    )  # fmt: skip
    ours = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "mixer": {
            "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "position": position,
            "pattern": {"kind": "dense"}, "qkv_bias": biases, "o_bias": biases,
        },
        "ffn": {"kind": "swiglu", "intermediate_size": 96, "bias": biases},
        "norm": {"kind": "rms", "eps": 1e-6},
        "tie_word_embeddings": tied,
    }  # fmt: skip
    return Case(lambda: transformers.LlamaForCausalLM(config), ours, LLAMA_NAMES)


def stablelm() -> Case:
    config = transformers.StableLmConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, layer_norm_eps=1e-5, use_qkv_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    ours = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "mixer": {
            "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "qkv_bias": True,
            "position": {"kind": "rope", "partial_rotary_factor": 0.25},
        },
        "ffn": {"kind": "swiglu", "intermediate_size": 96},
        "norm": {"kind": "layer", "eps": 1e-5},
    }  # fmt: skip
    return Case(lambda: transformers.StableLmForCausalLM(config), ours, LLAMA_NAMES)


def gpt_neox(parallel: bool) -> Case:
    config = transformers.GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, use_parallel_residual=parallel, hidden_act="gelu", layer_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    ours = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "mixer": {
            "num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "qkv_bias": True, "o_bias": True,
            "position": {"kind": "rope", "partial_rotary_factor": 0.25},
        },
        "ffn": {"kind": "gelu", "intermediate_size": 128, "bias": True},
        "norm": {"kind": "layer", "eps": 1e-5},
        "residual": "parallel" if parallel else "sequential",
    }  # fmt: skip
    return Case(lambda: transformers.GPTNeoXForCausalLM(config), ours, NEOX_NAMES, split_per_head)


def mpt(heads: int) -> Case:
    config = transformers.MptConfig(
        vocab_size=VOCAB, d_model=8 * heads, n_heads=heads, n_layers=2, max_seq_len=128, layer_norm_epsilon=1e-5
    )
    ours = {
        "hidden_size": 8 * heads,
        "num_hidden_layers": 2,
        "mixer": {"num_heads": heads, "num_kv_heads": heads, "head_dim": 8, "position": {"kind": "alibi"}},
        "ffn": {"kind": "gelu", "intermediate_size": 32 * heads},
        "norm": {"kind": "layer", "eps": 1e-5, "bias": False},
        "tie_word_embeddings": True,
    }
    return Case(lambda: transformers.MptForCausalLM(config), ours, MPT_NAMES, split_in_three)


def bloom(heads: int) -> Case:
    config = transformers.BloomConfig(
        vocab_size=VOCAB, hidden_size=8 * heads, n_layer=2, n_head=heads, layer_norm_epsilon=1e-5
    )
    ours = {
        "hidden_size": 8 * heads,
        "num_hidden_layers": 2,
        "mixer": {
            "num_heads": heads, "num_kv_heads": heads, "head_dim": 8, "position": {"kind": "alibi"},
            "qkv_bias": True, "o_bias": True,
        },
        "ffn": {"kind": "gelu", "intermediate_size": 32 * heads, "bias": True, "approximate": "tanh"},
        "norm": {"kind": "layer", "eps": 1e-5},
        "embedding_norm": True,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return Case(lambda: transformers.BloomForCausalLM(config), ours, BLOOM_NAMES, split_per_head)


def scaled(kind: str, **keys: Any) -> dict[str, Any]:
    return {"kind": "rope", "theta": 10000.0, "scaling": {"kind": kind, **keys}}


CASES: dict[str, Case] = {
    "llama": llama(),
    "llama with biases": llama(biases=True),
    "llama tied": llama(tied=True),
    "llama theta 500000": llama({"kind": "rope", "theta": 5e5}),
    "llama linear rope": llama(scaled("linear", factor=4.0)),
    "llama llama3 rope": llama(
        scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
    ),
    "llama yarn rope": llama(scaled("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama yarn rope with attention factor": llama(
        scaled("yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.3, beta_fast=16.0)
    ),
    "stablelm": stablelm(),
    "gpt-neox parallel": gpt_neox(parallel=True),
    "gpt-neox sequential": gpt_neox(parallel=False),
    "mpt of 12 heads": mpt(12),
    "mpt of 8 heads": mpt(8),
    "bloom of 8 heads": bloom(8),
    "bloom of 6 heads": bloom(6),
}


def spread_weights(model: torch.nn.Module) -> None:
    """Random weights, spread so widely that logits are of order 10 and every bias and norm matters."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            values *= 0.3
        elif parameter.dim() == 1:
            values = 1 + 0.2 * values
        else:
            # Vocabularies are narrower than the rest because the head, often the same matrix, makes the logits.
            values *= 0.4 if parameter.shape[0] == VOCAB else 1.5 * parameter.shape[1] ** -0.5
        parameter.data = values


def renamed(case: Case, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names; each must match exactly one pattern."""
    ours: dict[str, Tensor] = {}
    for name, tensor in state.items():
        matches = [(re.fullmatch(pattern, name), target) for pattern, target in case.names.items()]
        (found,) = [target.format(*match.groups()) for match, target in matches if match is not None]
        if ".qkv." in found:
            assert case.split is not None
            for part, piece in zip("qkv", case.split(tensor, case.ours["mixer"]["num_heads"]), strict=True):
                ours[found.replace(".qkv.", f".{part}_proj.")] = piece.clone()
        elif not (case.ours.get("tie_word_embeddings") and found == "lm_head.weight"):
            ours[found] = tensor.clone()
    return ours


@torch.inference_mode()
@pytest.mark.parametrize("name", CASES)
def test_matches_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    theirs = case.theirs().eval()
    spread_weights(theirs)
    ids = torch.tensor(random_ids(LENGTH, VOCAB, seed=1))
    expected = theirs(ids[None], use_cache=False).logits[0]
    assert 8 < expected.abs().max() < 25

    common = {"model_type": "tiers", "vocab_size": VOCAB, "max_position_embeddings": 128}
    folder = save_model(tmp_path, {**common, **case.ours}, renamed(case, theirs.state_dict()), shards=2)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "tiers"
    ours = load_model(folder)
    assert_close(ours(ids), expected, LOGPROB_BUDGET)

    cache = Cache()
    token_by_token = torch.cat([ours(token, cache) for token in ids.split(1)])
    assert_close(token_by_token, expected, LOGPROB_BUDGET)
