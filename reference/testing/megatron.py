"""Write what a Megatron training would: the tensors of a model cut over tensor and pipeline ranks.

Independent of `tiers.reference.megatron`, which joins them: it shares no rule with it.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# Endings of names, new and old spelling.
_CUT_ROWS = (
    "word_embeddings.weight", "word_embeddings_for_head.weight", "output_layer.weight",
    "linear_qkv.weight", "linear_qkv.bias", "query_key_value.weight", "query_key_value.bias",
)  # fmt: skip
_CUT_GATED = ("linear_fc1.weight", "linear_fc1.bias", "dense_h_to_4h.weight", "dense_h_to_4h.bias")
_CUT_COLUMNS = ("linear_proj.weight", "attention.dense.weight", "linear_fc2.weight", "dense_4h_to_h.weight")
_FIRST_STAGE = ("embedding.",)


def gpt_tensors(
    layers: int = 4,
    hidden: int = 16,
    heads: int = 4,
    groups: int = 2,
    ffn: int = 24,
    swiglu: bool = True,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random weights by the names of Megatron core, layers numbered through.

    Args:
        layers: number of layers.
        hidden: width of the model.
        heads: query heads, of hidden / heads numbers each.
        groups: key/value heads; the rows of a fused matrix are heads / groups queries, a key and a value per group.
        ffn: width inside the ffn.
        swiglu: whether fc1 is [gate; up].
        seed: of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = (heads + 2 * groups) * (hidden // heads)
    wide = ffn * (2 if swiglu else 1)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (32, hidden),
        "decoder.final_layernorm.weight": (hidden,),
        "output_layer.weight": (32, hidden),
    }
    for layer in range(layers):
        prefix = f"decoder.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attention.linear_qkv.weight": (rows, hidden),
            prefix + "self_attention.linear_qkv.bias": (rows,),
            prefix + "self_attention.linear_proj.weight": (hidden, hidden),
            prefix + "self_attention.linear_proj.bias": (hidden,),
            prefix + "mlp.linear_fc1.layer_norm_weight": (hidden,),
            prefix + "mlp.linear_fc1.weight": (wide, hidden),
            prefix + "mlp.linear_fc1.bias": (wide,),
            prefix + "mlp.linear_fc2.weight": (hidden, ffn),
            prefix + "mlp.linear_fc2.bias": (hidden,),
        }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def llama_tensors(state: dict[str, Tensor], heads: int, groups: int) -> dict[str, Tensor]:
    """The tensors of a transformers Llama under the names and in the layout of Megatron core.

    Args:
        state: its state_dict.
        heads, groups: query and key/value heads; rows of a fused matrix come group by group.
    """
    found: dict[str, Tensor] = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for i in range(sum(name.endswith("input_layernorm.weight") for name in state)):
        theirs, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        q, k, v = (state[f"{theirs}self_attn.{part}_proj.weight"] for part in "qkv")
        size = len(q) // heads
        rows = []
        for group in range(groups):
            each = heads // groups * size
            rows += [q[group * each : (group + 1) * each], k[group * size : (group + 1) * size]]
            rows.append(v[group * size : (group + 1) * size])
        found |= {
            ours + "self_attention.linear_qkv.layer_norm_weight": state[f"{theirs}input_layernorm.weight"],
            ours + "self_attention.linear_qkv.weight": torch.cat(rows),
            ours + "self_attention.linear_proj.weight": state[f"{theirs}self_attn.o_proj.weight"],
            ours + "mlp.linear_fc1.layer_norm_weight": state[f"{theirs}post_attention_layernorm.weight"],
            ours + "mlp.linear_fc1.weight": torch.cat(
                [state[f"{theirs}mlp.gate_proj.weight"], state[f"{theirs}mlp.up_proj.weight"]]
            ),
            ours + "mlp.linear_fc2.weight": state[f"{theirs}mlp.down_proj.weight"],
        }
    return found


def split(
    tensors: dict[str, Tensor], tp: int, pp: int, layers: int, swiglu: bool
) -> dict[tuple[int, int], dict[str, Tensor]]:
    """Cut tensors as Megatron does.

    Args:
        tensors: by Megatron's names, layers numbered through.
        tp: tensor ranks; cuts rows of a fused QKV matrix wherever the number comes out.
        pp: pipeline ranks; divides `layers`. The first has the embeddings, the last what comes behind the layers.
        layers: number of layers.
        swiglu: whether fc1 is [gate; up], each half of which is cut by itself.

    Returns:
        Per (tensor rank, pipeline rank) its tensors, layers numbered from 0 on each.
    """
    per_stage = layers // pp
    ranks: dict[tuple[int, int], dict[str, Tensor]] = {(t, p): {} for t in range(tp) for p in range(pp)}
    for name, tensor in tensors.items():
        stage, local = pp - 1, name
        numbered = re.search(r"layers\.(\d+)\.", name)
        if numbered:
            stage, number = divmod(int(numbered[1]), per_stage)
            local = name.replace(numbered[0], f"layers.{number}.")
        elif any(part in name for part in _FIRST_STAGE):
            stage = 0
        for rank in range(tp):
            ranks[rank, stage][local] = _piece(name, tensor, rank, tp, swiglu).clone()
    return ranks


def _piece(name: str, tensor: Tensor, rank: int, tp: int, swiglu: bool) -> Tensor:
    if name.endswith(_CUT_GATED) and swiglu:
        gate, up = tensor[: len(tensor) // 2], tensor[len(tensor) // 2 :]
        size = len(gate) // tp
        return torch.cat([gate[rank * size : (rank + 1) * size], up[rank * size : (rank + 1) * size]])
    if name.endswith(_CUT_ROWS + _CUT_GATED):
        size = len(tensor) // tp
        return tensor[rank * size : (rank + 1) * size]
    if name.endswith(_CUT_COLUMNS):
        size = tensor.shape[1] // tp
        return tensor[:, rank * size : (rank + 1) * size]
    return tensor


def save_ranks(folder: Path, ranks: dict[tuple[int, int], dict[str, Tensor]], form: str = "pt", **beside: Any) -> Path:
    """Write a folder per rank: mp_rank_00, or mp_rank_00_000 if there is more than one pipeline rank.

    Args:
        folder: receives them.
        ranks: as `split` returns them.
        form: "pt" for model_optim_rng.pt with arguments and optimizer state; "safetensors".
        beside: entries to add to, or replace in, every model_optim_rng.pt.
    """
    tp, pp = (1 + max(rank[axis] for rank in ranks) for axis in (0, 1))
    for (t, p), tensors in ranks.items():
        path = folder / (f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}")
        path.mkdir(parents=True, exist_ok=True)
        if form == "safetensors":
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
            continue
        args = argparse.Namespace(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, padded_vocab_size=32)
        state = {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": 100,
            "model": tensors,
            "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []},
            "rng_state": [{"random_rng_state": (3, (1, 2), None)}],
        }
        torch.save({**state, **beside}, path / "model_optim_rng.pt")
    return folder
