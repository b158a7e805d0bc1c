"""Checkpoints with experts: one tensor per expert or one for all, in either orientation, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tiers.reference.analysis.rules import slices
from tiers.reference.convert import convert
from tiers.reference.errors import CheckpointError, ConfigError
from tiers.reference.family import read_family
from tiers.reference.load import describe_config, load_model, open_model
from tiers.reference.testing.compare import LOGPROB_BUDGET, assert_close
from tiers.reference.testing.foreign import VOCAB, foreign_logits, foreign_model
from tiers.reference.testing.tiny import moe_config, random_ids, save_model, save_tiny, tiny_model
from tiers.reference.weight_map import WeightMap

IDS = torch.tensor(random_ids(32, VOCAB, seed=1))


def save_fused(folder: Path, change: Callable[[str, Tensor], Tensor], name: str = "qwen3_moe", **config: Any) -> Any:
    """A model of transformers as it is in memory: all experts of a layer in one tensor, changed on the way to the file."""
    model = foreign_model(name)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), **config}))
    tensors = {key: change(key, tensor).contiguous() for key, tensor in model.state_dict().items()}
    assert any(key.endswith("experts.gate_up_proj") for key in tensors)
    save_file(tensors, folder / "model.safetensors")
    return model


def as_it_is(key: str, tensor: Tensor) -> Tensor:
    return tensor


def turned(key: str, tensor: Tensor) -> Tensor:
    return tensor.mT if ".experts." in key else tensor


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("change", [as_it_is, turned], ids=["[E, 2F, M]", "[E, M, 2F]"])
def test_fused_experts_are_read_in_both_orientations(
    name: str, change: Callable[[str, Tensor], Tensor], tmp_path: Path
) -> None:
    """J1. In Qwen3-MoE here F = M, so that the down projections are square; the layer is decided by gate_up_proj."""
    theirs = save_fused(tmp_path, change, name)
    if name == "qwen3_moe":
        assert theirs.config.moe_intermediate_size == theirs.config.hidden_size
    assert_close(load_model(tmp_path)(IDS), foreign_logits(theirs, IDS), LOGPROB_BUDGET)


@torch.inference_mode()
def test_a_folder_of_fused_experts_can_be_converted_and_mapped(tmp_path: Path) -> None:
    save_fused(tmp_path / "theirs", turned, "mixtral")
    convert(tmp_path / "theirs", tmp_path / "ours")
    ours, theirs = (load_model(tmp_path / name).state_dict() for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert "layers.0.ffn.experts.3.up_proj.weight" in open_model(tmp_path / "ours").checkpoint.infos

    opened = open_model(tmp_path / "theirs")
    name = "model.layers.2.mlp.experts.gate_up_proj"
    parts = slices(opened.map.entries[name], opened.checkpoint.infos[name], opened.config)
    targets = opened.map.entries[name].targets
    assert (
        dict(zip(targets, parts, strict=True))["layers.2.ffn.experts.3.up_proj.weight"]
        == "expert 3, block 2 of 2 (experts)"
    )


def test_two_orientations_in_one_layer_are_refused(tmp_path: Path) -> None:
    save_fused(tmp_path, lambda key, x: x.mT if key.endswith("experts.down_proj") else x, "mixtral")
    with pytest.raises(CheckpointError, match=r"layer 0: .*down_proj \[4, 96, 64\] and .*gate_up_proj \[4, 192, 64\]"):
        open_model(tmp_path)


def test_an_orientation_that_nothing_decides_is_asked_for(tmp_path: Path) -> None:
    """2F = M makes gate_up_proj square, and here no other tensor of the layer is there to tell."""
    family = tmp_path / "own.toml"
    shipped = Path(__file__).parents[2] / "reference" / "families" / "mixtral.toml"
    family.write_text(shipped.read_text().replace('model.layers.{i}.mlp.experts.down_proj"', 'other.{i}.{all}"'))
    config = {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 32}
    raw = {**foreign_model("mixtral").config.to_dict(), **config, "model_type": "mixtral"}
    weight_map = WeightMap(read_family(family), describe_config(raw).config)
    name, square = "model.layers.1.mlp.experts.gate_up_proj", torch.randn(4, 64, 64)
    with pytest.raises(CheckpointError, match=r"may be \[experts, out, in\] or \[experts, in, out\].*Say transpose"):
        list(weight_map.apply(name, square))
    for said, expected in (("false", square[3, :32]), ("true", square[3].T[:32])):
        told = family.read_text().replace('layout = "experts"', f'layout = "experts", transpose = {said}', 1)
        (tmp_path / "told.toml").write_text(told)
        found = dict(WeightMap(read_family(tmp_path / "told.toml"), weight_map.config).apply(name, square))
        assert torch.equal(found["layers.1.ffn.experts.3.gate_proj.weight"], expected)


def test_fused_experts_of_another_size_are_refused(tmp_path: Path) -> None:
    save_fused(tmp_path, as_it_is, "mixtral", num_local_experts=5)
    with pytest.raises(CheckpointError, match=r"expected all matrices of its experts"):
        open_model(tmp_path)


@pytest.mark.parametrize("name", ["layers.2.ffn.experts.5.up_proj.weight", "layers.2.ffn.correction_bias"])
def test_a_missing_tensor_of_experts_is_refused(name: str, tmp_path: Path) -> None:
    tensors = tiny_model(moe_config()).state_dict()
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        open_model(save_model(tmp_path, moe_config(), tensors))


def test_an_expert_too_many_is_refused(tmp_path: Path) -> None:
    config = moe_config()
    tensors = tiny_model(config).state_dict()
    tensors["layers.1.ffn.experts.8.up_proj.weight"] = torch.randn(64, 64)
    with pytest.raises(CheckpointError, match=r"unexpected tensor layers.1.ffn.experts.8.up_proj.weight"):
        open_model(save_model(tmp_path, config, tensors))


def test_a_router_of_another_number_is_refused(tmp_path: Path) -> None:
    config = moe_config()
    tensors = tiny_model(config).state_dict()
    tensors["layers.1.ffn.router.weight"] = torch.randn(9, 64)
    with pytest.raises(CheckpointError, match=r"layers.1.ffn.router.weight has shape \[9, 64\]"):
        open_model(save_model(tmp_path, config, tensors))


def test_what_was_saved_is_what_is_read(tmp_path: Path) -> None:
    config = moe_config()
    save_tiny(tmp_path, config, shards=3)
    ids = torch.tensor(random_ids(30, 320, 0))
    assert torch.equal(load_model(tmp_path)(ids), tiny_model(config)(ids))


# ---- families that transformers cannot run as a whole ---------------------------------------------------------------


class DeepseekMoe(nn.Module):
    """DeepSeekMoE 16B, in the few lines that its paper (2401.06066) needs: a softmax over experts, the best K with their
    probabilities, and experts that every token uses."""

    def __init__(self, width: int, inner: int, experts: int, chosen: int, shared: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(self._mlp(width, inner) for _ in range(experts))
        self.shared_experts = self._mlp(width, inner * shared)

    @staticmethod
    def _mlp(width: int, inner: int) -> nn.ModuleDict:
        linear = {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
        return nn.ModuleDict({name: nn.Linear(*sizes, bias=False) for name, sizes in linear.items()})

    @staticmethod
    def _run(mlp: nn.ModuleDict, x: Tensor) -> Tensor:
        return mlp["down_proj"](nn.functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))

    def forward(self, x: Tensor) -> Tensor:
        (x,) = x  # a batch of one
        out = self._run(self.shared_experts, x)
        for row, probabilities in enumerate(self.gate(x).softmax(-1)):
            for expert in probabilities.argsort(descending=True)[: self.chosen]:
                out[row] += probabilities[expert] * self._run(self.experts[int(expert)], x[row])
        return out[None]


@torch.inference_mode()
def test_deepseek_moe_16b(tmp_path: Path) -> None:
    """A Llama of transformers whose second and third ffn are those of DeepSeekMoE, under its names."""
    theirs = foreign_model("llama")
    for layer in list(theirs.model.layers)[1:]:
        layer.mlp = DeepseekMoe(64, 24, experts=8, chosen=3, shared=2)
    config = {
        **theirs.config.to_dict(), "architectures": ["DeepseekForCausalLM"], "model_type": "deepseek",
        "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax",
    }  # fmt: skip
    del config["mlp_bias"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({key: tensor.contiguous() for key, tensor in theirs.state_dict().items()}, tmp_path / "model.safetensors")
    opened = open_model(tmp_path)
    assert opened.description.family.name == "deepseek"
    assert not opened.description.unused
    assert_close(load_model(tmp_path)(IDS), foreign_logits(theirs, IDS), LOGPROB_BUDGET)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_the_attention_of_deepseek_v3_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    config = {"deepseek_v2": hf.DeepseekV2Config, "deepseek_v3": hf.DeepseekV3Config}[model_type](num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="kv_lora_rank is set: multi-head latent attention"):
        open_model(tmp_path)
