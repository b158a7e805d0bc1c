"""Layers that lack attention or ffn: a Llama of transformers from which they were taken, under the names of Llama-Nemotron."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tiers.reference.errors import ConfigError
from tiers.reference.load import load_model, open_model
from tiers.reference.testing.compare import LOGPROB_BUDGET, assert_close
from tiers.reference.testing.foreign import VOCAB, foreign_logits, foreign_model
from tiers.reference.testing.tiny import random_ids

# Query heads per key/value head, and the multiple that makes the inner width; None where a layer lacks that half. 64
# channels times 3 times 2/3 are 128, rounded up to 256; times 9, 384, rounded up to 512.
BLOCKS: list[tuple[int | None, float | None]] = [(2, 3.0), (None, 9.0), (4, None), (1, 9.0)]


class Nothing(nn.Module):
    """In place of attention, whose output is added."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class NoFfn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def block(group: int | None, multiple: float | None) -> dict[str, Any]:
    return {
        "attention": {"no_op": group is None, "n_heads_in_group": group, "replace_with_linear": False},
        "ffn": {"no_op": multiple is None, "ffn_mult": multiple, "replace_with_linear": False},
    }


def save(folder: Path, blocks: list[dict[str, Any]]) -> Any:
    theirs = foreign_model("llama")
    layer_class = type(theirs.model.layers[0])
    generator = torch.Generator().manual_seed(3)
    layers = []
    for number, (group, multiple) in enumerate(BLOCKS):
        config = copy.deepcopy(theirs.config)
        config.num_key_value_heads = 4 // (group or 1)
        config.intermediate_size = {None: 1, 3.0: 256, 9.0: 512}[multiple]
        layer = layer_class(config, number)
        for parameter in layer.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.data = 1 + 0.2 * values if parameter.dim() == 1 else values * parameter.shape[1] ** -0.5
        if group is None:
            layer.self_attn, layer.input_layernorm = Nothing(), nn.Identity()
        if multiple is None:
            layer.mlp, layer.post_attention_layernorm = NoFfn(), nn.Identity()
        layers.append(layer)
    theirs.model.layers = nn.ModuleList(layers)
    theirs.config.num_hidden_layers = len(BLOCKS)
    theirs.set_attn_implementation("eager")
    config = {
        **theirs.config.to_dict(), "architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas",
        "block_configs": blocks, "num_key_value_heads": None, "intermediate_size": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: tensor.contiguous() for key, tensor in theirs.state_dict().items()}, folder / "model.safetensors")
    return theirs.eval()


@torch.inference_mode()
def test_layers_without_attention_or_ffn_match_transformers(tmp_path: Path) -> None:
    theirs = save(tmp_path, [block(*pair) for pair in BLOCKS])
    opened = open_model(tmp_path)
    assert opened.description.family.name == "nemotron_nas"
    assert not opened.description.unused
    assert [layer.mixer and layer.mixer.num_kv_heads for layer in opened.config.layers] == [2, None, 1, 4]
    assert [layer.ffn and layer.ffn.intermediate_size for layer in opened.config.layers] == [256, 512, None, 512]
    ids = torch.tensor(random_ids(32, VOCAB, seed=1))
    assert_close(load_model(tmp_path)(ids), foreign_logits(theirs, ids), LOGPROB_BUDGET)


@pytest.mark.parametrize("half", ["attention", "ffn"])
def test_a_linear_map_in_place_of_a_half_is_refused(half: str, tmp_path: Path) -> None:
    blocks = [block(*pair) for pair in BLOCKS]
    blocks[3][half]["replace_with_linear"] = True
    save(tmp_path, blocks)
    with pytest.raises(ConfigError, match=r"layers\['3'\].*linear map"):
        open_model(tmp_path)
