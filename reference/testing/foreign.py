"""Tiny random models of transformers, one or more for each family, and folders that transformers itself wrote."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import transformers as hf
except ImportError:  # a machine with torch alone can import every other module of this package
    hf = None

VOCAB = 120

# Common sizes: 4 heads of 16 channels (32 or more for what vLLM's own attention shall serve is not needed here).
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_GROUPED = {**_SIZES, "intermediate_size": 96, "num_key_value_heads": 2}


def _rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **settings}}


def _llama(**changes: Any) -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**_GROUPED, "rms_norm_eps": 1e-6, **changes}))


def _gpt_neox(parallel: bool) -> Any:
    config = hf.GPTNeoXConfig(
        **_SIZES,
        intermediate_size=128,
        use_parallel_residual=parallel,
        hidden_act="gelu",
        **_rope(partial_rotary_factor=0.25),
    )
    return hf.GPTNeoXForCausalLM(config)


def _gemma2(**changes: Any) -> Any:
    return hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**{**_GROUPED, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8, **changes})
    )


def _gemma3() -> Any:
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = hf.Gemma3TextConfig(
        **{**_GROUPED, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8, "layer_types": layer_types},
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    return hf.Gemma3ForCausalLM(config)


def _falcon(**changes: Any) -> Any:
    return hf.FalconForCausalLM(hf.FalconConfig(**{**_SIZES, **changes}))


def _stablelm(**changes: Any) -> Any:
    return hf.StableLmForCausalLM(
        hf.StableLmConfig(**{**_GROUPED, "use_qkv_bias": True, **_rope(partial_rotary_factor=0.25), **changes})
    )


def _qwen2(**changes: Any) -> Any:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**{**_GROUPED, **changes}))


def _bloom(heads: int) -> Any:
    return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=VOCAB, hidden_size=8 * heads, n_layer=2, n_head=heads))


def _mpt(heads: int) -> Any:
    return hf.MptForCausalLM(
        hf.MptConfig(vocab_size=VOCAB, d_model=8 * heads, n_heads=heads, n_layers=2, max_seq_len=128)
    )


_EXPERTS = {**_GROUPED, "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def _qwen2_moe(**changes: Any) -> Any:
    sizes = {**_EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0], **changes}
    del sizes["head_dim"]
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**sizes))


def _glm4_moe() -> Any:
    """Sigmoid, correction, groups, shared experts, a dense layer first: the experts of DeepSeek-V3."""
    sizes = {**_EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    del sizes["num_experts"]
    config = hf.Glm4MoeConfig(
        **sizes, n_shared_experts=2, routed_scaling_factor=2.5, use_qk_norm=True, attention_bias=True,
        **_rope(partial_rotary_factor=0.5),
    )  # fmt: skip
    model = hf.Glm4MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(7)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = 0.3 * torch.randn(buffer.shape, generator=generator)
    return model


_STRETCHED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip

# The first word is the family.
MODELS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama with biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama tied": lambda: _llama(tie_word_embeddings=True),
    "llama with wide heads": lambda: _llama(head_dim=40, **_rope(rope_theta=5e5)),
    "llama with linear rope": lambda: _llama(**_rope(rope_type="linear", **_STRETCHED["linear"])),
    "llama with llama3 rope": lambda: _llama(**_rope(rope_type="llama3", **_STRETCHED["llama3"])),
    "llama with yarn rope": lambda: _llama(**_rope(rope_type="yarn", **_STRETCHED["yarn"])),
    "llama with yarn rope and attention factor": lambda: _llama(
        **_rope(rope_type="yarn", **_STRETCHED["yarn"], attention_factor=1.3, beta_fast=16.0)
    ),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_GROUPED, sliding_window=8)),
    "qwen2": lambda: _qwen2(),
    "qwen2 with windows": lambda: _qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GROUPED, head_dim=32)),
    "gemma2": _gemma2,
    "gemma2 with gelu": lambda: _gemma2(hidden_activation="gelu", final_logit_softcapping=5.0),
    "gemma3": _gemma3,
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_GROUPED, sliding_window=16)),
    "phi3 with longrope": lambda: hf.Phi3ForCausalLM(
        hf.Phi3Config(
            **_GROUPED,
            original_max_position_embeddings=8,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0 + 0.5 * i for i in range(8)],
                "original_max_position_embeddings": 8,
            },
        )
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**_SIZES)),
    "gpt_neox parallel": lambda: _gpt_neox(True),
    "gpt_neox sequential": lambda: _gpt_neox(False),
    "gptj": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**_SIZES, rotary_dim=8)),
    "bloom of 8 heads": lambda: _bloom(8),
    "bloom of 6 heads": lambda: _bloom(6),
    "mpt of 8 heads": lambda: _mpt(8),
    "mpt of 12 heads": lambda: _mpt(12),
    "falcon of one key/value head": _falcon,
    "falcon with a new decoder": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon with one norm": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "falcon with alibi": lambda: _falcon(alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "stablelm": _stablelm,
    "stablelm parallel": lambda: _stablelm(use_parallel_residual=True),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**_GROUPED)),
    "starcoder2": lambda: hf.Starcoder2ForCausalLM(hf.Starcoder2Config(**_GROUPED, sliding_window=8)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_GROUPED, num_local_experts=4)),
    "qwen2_moe": _qwen2_moe,
    "qwen2_moe renormalised": lambda: _qwen2_moe(norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[]),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_EXPERTS, norm_topk_prob=True)),
    "olmoe": lambda: hf.OlmoeForCausalLM(hf.OlmoeConfig(**{**_GROUPED, "num_experts": 6, "num_experts_per_tok": 2})),
    "glm4_moe": _glm4_moe,
    "granite": lambda: hf.GraniteForCausalLM(
        hf.GraniteConfig(
            **_GROUPED, embedding_multiplier=3.0, residual_multiplier=0.7, attention_multiplier=0.2, logits_scaling=2.0
        )
    ),
}


def foreign_model(name: str) -> Any:
    """A model of MODELS in float32, its weights spread so widely that every bias and norm matters."""
    model = MODELS[name]().eval()
    # The other implementations leave out the cap on scores.
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if key.endswith("bias"):
            values *= 0.3
        elif parameter.dim() == 1:
            values = 1 + 0.2 * values
        elif parameter.dim() == 3:  # all experts of a layer
            values *= 1.2 * min(parameter.shape[1:]) ** -0.5
        elif key.endswith(".gate.weight"):  # a router, whose scores shall lie apart
            values *= 3 * parameter.shape[1] ** -0.5
        else:
            # Vocabularies are narrower than the rest because the head, often the same matrix, makes the logits.
            values *= 0.4 if parameter.shape[0] == VOCAB else 1.2 * min(parameter.shape) ** -0.5
        parameter.data = values
    return model


def save_foreign(folder: Path, name: str, shard_size: str = "100KB") -> Any:
    """Write a model of MODELS as transformers does, in shards; returns it."""
    model = foreign_model(name)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def save_megatron(folder: Path, tp: int, pp: int = 1) -> Any:
    """Write the llama of MODELS as a Megatron training on tp tensor and pp pipeline ranks would; returns it."""
    from tiers.reference.testing.megatron import llama_tensors, save_ranks, split

    model = foreign_model("llama")
    config = model.config
    tensors = llama_tensors(model.state_dict(), config.num_attention_heads, config.num_key_value_heads)
    save_ranks(folder, split(tensors, tp, pp, config.num_hidden_layers, swiglu=True), form="safetensors")
    arguments = {
        "model_type": "megatron", "padded_vocab_size": VOCAB, "hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 3,
        "num_attention_heads": 4, "num_query_groups": 2, "max_position_embeddings": 128, "swiglu": True,
        "normalization": "RMSNorm", "norm_epsilon": 1e-6, "position_embedding_type": "rope", "rotary_base": 10000,
        "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(arguments))
    return model


@torch.inference_mode()
def foreign_logits(model: Any, ids_T: Tensor) -> Tensor:
    """[T, V] logits of a whole sequence."""
    return model(ids_T[None], use_cache=False).logits[0]
