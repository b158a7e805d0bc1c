"""What users of other servers reported, row by row: each folder here is right, or is refused by its cause.

The letters are the classes of a survey of public issue threads: B names of weights, C layouts of fused matrices, D files
and index, E heads and multipliers, F config.json, H heads, R vocabulary. B7, B8, B10, C2 to C4 and C7 are in
test_wrappers.py and test_megatron.py.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tiers.reference.checkpoint import INDEX_NAME
from tiers.reference.config import ModelConfig
from tiers.reference.convert import convert
from tiers.reference.errors import TiersError
from tiers.reference.family import read_family
from tiers.reference.load import load_model, open_model
from tiers.reference.testing.foreign import foreign_logits, save_foreign
from tiers.reference.testing.tiny import random_ids, save_model, save_tiny, tiny_config
from tiers.reference.weight_map import WeightMap

IDS = torch.tensor(random_ids(24, 120, seed=2))

State = dict[str, Tensor]
Rename = Callable[[str], str]


@dataclasses.dataclass
class Llama:
    """A folder of transformers, to be changed and written anew."""

    config: dict[str, Any]
    state: State
    logits: Tensor
    place: Path

    def save(self, state: State | None = None, *, without: tuple[str, ...] = (), **changes: Any) -> Path:
        """Write it with other tensors, without some keys of the config, with others changed."""
        config = {key: value for key, value in self.config.items() if key not in without} | changes
        return save_model(self.place, config, self.state if state is None else state)

    def renamed(self, rename: Rename) -> State:
        return {rename(name): tensor for name, tensor in self.state.items()}

    def assert_same(self, folder: Path, family: str | None = None) -> None:
        assert torch.equal(load_model(folder, family=family)(IDS), self.logits)


def _made(name: str, factory: pytest.TempPathFactory) -> tuple[dict[str, Any], State, Tensor]:
    folder = factory.mktemp("theirs")
    save_foreign(folder, name, shard_size="1GB")
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors"), load_model(folder)(IDS)


@pytest.fixture(scope="module")
def _llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], State, Tensor]:
    return _made("llama", tmp_path_factory)


@pytest.fixture
def llama(_llama: tuple[dict[str, Any], State, Tensor], tmp_path: Path) -> Llama:
    config, state, logits = _llama
    return Llama(json.loads(json.dumps(config)), {**state}, logits, tmp_path / "model")


def refusal(folder: Path, family: str | None = None) -> str:
    """The message by which a folder is refused."""
    with pytest.raises(TiersError) as caught:
        load_model(folder, family=family)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1500
    return message


def notes(folder: Path) -> str:
    return "; ".join(open_model(folder).notes)


# ---- B: names of weights --------------------------------------------------------------------------------------------


def test_B1_root_prefix_is_found(llama: Llama) -> None:
    folder = llama.save(llama.renamed(lambda name: name.replace("model.", "backbone.")))
    llama.assert_same(folder)
    assert "names that begin with 'backbone.' are read as if they began with 'model.'" in notes(folder)


def test_B1_root_prefix_is_added(llama: Llama) -> None:
    llama.assert_same(llama.save(llama.renamed(lambda name: name.removeprefix("model."))))


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("model.", "model.language_model."),
        lambda name: f"language_model.{name}",
        lambda name: f"model.language_model.{name}",
    ],
    ids=["model.language_model", "language_model.model", "model.language_model.model"],
)
def test_B2_each_spelling_of_a_language_model_is_read(rename: Rename, llama: Llama) -> None:
    llama.assert_same(llama.save(llama.renamed(rename)))


def test_B2_both_spellings_at_once_are_refused(llama: Llama) -> None:
    other = {name.replace("model.", "model.language_model."): tensor.clone() for name, tensor in llama.state.items()}
    assert "unexpected tensor model.language_model" in refusal(llama.save({**llama.state, **other}))
    again = {f"language_model.{name}": tensor.clone() for name, tensor in llama.state.items()}
    assert "Nothing may be left out in silence" in refusal(llama.save({**other, **again}))


def test_B3_an_unmerged_adapter_is_named(llama: Llama) -> None:
    state = llama.renamed(lambda name: f"base_model.model.{name}")
    state["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] = torch.ones(4, 64)
    assert "unmerged adapter" in refusal(llama.save(state))


def test_B3_the_prefix_of_a_merged_adapter_is_taken_off(llama: Llama) -> None:
    llama.assert_same(llama.save(llama.renamed(lambda name: f"base_model.model.{name}")))


@pytest.mark.parametrize(
    "name",
    [
        "mm_whisper_embeddings.proj.weight",
        "vision_tower.layers.0.self_attn.q_proj.weight",
        "vision_tower.encoder.layers.2.self_attn.o_proj.weight",
        "mm_projector.weight",
        "audio.norm.weight",
        "model.layers.0.self_attn.extra.weight",
    ],
)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_B4_a_tower_is_not_taken_for_a_part_of_the_model(name: str, tied: bool, llama: Llama) -> None:
    """Not even where the name ends like one of ours, and the tensor that it could pass for is missing."""
    state = {**llama.state, name: torch.ones(64, 64)}
    if tied:
        del state["lm_head.weight"]
    message = refusal(llama.save(state, tie_word_embeddings=tied))
    assert f"unexpected tensor {name}" in message


def test_B4_a_norm_of_a_tower_does_not_replace_a_norm_of_the_model(llama: Llama) -> None:
    state = {**llama.state, "audio.norm.weight": torch.ones(64)}
    del state["model.norm.weight"]
    assert "unexpected tensor audio.norm.weight" in refusal(llama.save(state))


def test_B5_names_that_no_rule_is_about_fill_nothing_in_silence(llama: Llama) -> None:
    adapter = {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 64)}
    assert "unmerged adapter" in refusal(llama.save(adapter))
    strange = llama.renamed(lambda name: name.replace("self_attn", "mixing"))
    assert "no rule of family llama is about it" in refusal(llama.save(strange))


def test_B6_rules_that_take_nothing_and_rules_in_the_shadow_are_told(llama: Llama, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    # The first rule takes what the second was written for.
    file.write_text(
        'extends = "llama"\narchitectures = ["Mine"]\n[weights]\n"{all}.norm.weight" = "{all}.norm.weight"\n'
        '"never.{p}" = "norm.{p}"\n'
    )
    family = read_family(file)
    folder = llama.save()
    weight_map = WeightMap(family, open_model(folder).config, llama.state)
    assert weight_map.hits()["{all}.norm.weight"] == 1
    assert weight_map.hits()["never.{p}"] == weight_map.hits()["model.norm.{p}"] == 0
    assert weight_map.hits()["model.layers.{i}.input_layernorm.{p}"] == 3
    assert weight_map.shadowed() == {"model.norm.{p}": "{all}.norm.weight"}
    # And the wrong rule cannot load: its target is no parameter, and the right one is missing.
    assert "no tensor norm.weight" in refusal(folder, str(file))


@pytest.mark.parametrize("shape", [(0,), (0, 64), (32, 0)], ids=str)
def test_B9_a_tensor_without_elements_points_to_zero_3(shape: tuple[int, ...], llama: Llama) -> None:
    folder = llama.save({**llama.state, "model.layers.1.self_attn.k_proj.weight": torch.ones(shape)})
    assert "ZeRO-3" in (message := refusal(folder))
    assert str(list(shape)) in message


def test_B11_a_second_scheme_of_names_is_not_read(llama: Llama) -> None:
    folder = llama.save()
    llama.state = {name.replace("self_attn.", "attention."): tensor + 1 for name, tensor in llama.state.items()}
    (llama.save() / "model.safetensors").rename(folder / "consolidated.safetensors")
    llama.state = load_file(folder / "consolidated.safetensors")
    original = {name.replace("attention.", "self_attn."): tensor - 1 for name, tensor in llama.state.items()}
    save_model(folder, llama.config, original, shards=2)
    assert "consolidated.safetensors" in notes(folder)
    filled = load_model(folder).state_dict()
    assert torch.equal(filled["norm.weight"], original["model.norm.weight"])


def test_B12_the_map_says_what_becomes_of_each_tensor(llama: Llama) -> None:
    entries = open_model(llama.save(llama.renamed(lambda name: f"language_model.{name}"))).map.entries
    assert entries.keys() == {f"language_model.{name}" for name in llama.state}
    entry = entries["language_model.model.layers.2.self_attn.q_proj.weight"]
    assert entry.name == "model.layers.2.self_attn.q_proj.weight"
    assert entry.rule is not None
    assert entry.rule.template == "model.layers.{i}.self_attn.{m:q_proj|k_proj|v_proj|o_proj}.{p}"
    assert entry.targets == ("layers.2.mixer.q_proj.weight",)


def test_B13_a_parameter_without_a_tensor_is_named(llama: Llama) -> None:
    for name, ours in (
        ("model.layers.1.input_layernorm.weight", "layers.1.mixer_norm.weight"),
        ("model.norm.weight", "norm.weight"),
        ("model.embed_tokens.weight", "embed_tokens.weight"),
    ):
        state = {key: tensor for key, tensor in llama.state.items() if key != name}
        assert f"no tensor {ours}" in refusal(llama.save(state))


def test_B13_a_tensor_without_a_parameter_is_named(llama: Llama) -> None:
    for name in ("model.embeddings.weight", "model.layers.3.input_layernorm.weight", "model.norm.bias"):
        message = refusal(llama.save({**llama.state, name: torch.ones(64)}))
        assert "unexpected tensor" in message
    assert "layers.3.mixer_norm.weight" in refusal(
        llama.save({**llama.state, "model.layers.3.input_layernorm.weight": torch.ones(64)})
    )


# ---- C: layouts of fused matrices -----------------------------------------------------------------------------------


def _fused_family(tmp_path: Path, layout: str) -> Path:
    file = tmp_path / "fused.toml"
    file.write_text(
        'extends = "llama"\narchitectures = ["Fused"]\n[weights]\n"model.layers.{i}.self_attn.qkv.{p}" = { to = '
        '["layers.{i}.mixer.q_proj.{p}", "layers.{i}.mixer.k_proj.{p}", "layers.{i}.mixer.v_proj.{p}"], '
        f'layout = "{layout}" }}\n'
    )
    return file


def _fused(state: State, join: Callable[[Tensor, Tensor, Tensor], Tensor]) -> State:
    result = {name: tensor for name, tensor in state.items() if not any(f".{p}_proj." in name for p in "qkv")}
    for i in range(3):
        base = f"model.layers.{i}.self_attn"
        result[f"{base}.qkv.weight"] = join(*(state[f"{base}.{p}_proj.weight"] for p in "qkv"))
    return result


def _per_group(q: Tensor, k: Tensor, v: Tensor, head_dim: int = 16) -> Tensor:
    """Row by row, as Megatron stores it: the query heads of a group, its key head, its value head."""
    q_heads, k_heads, v_heads = (part.split(head_dim) for part in (q, k, v))
    size = len(q_heads) // len(k_heads)
    rows = []
    for group in range(len(k_heads)):
        rows += [*q_heads[group * size : (group + 1) * size], k_heads[group], v_heads[group]]
    return torch.cat(rows)


def test_C1_rows_by_group_are_taken_apart_by_group(llama: Llama, tmp_path: Path) -> None:
    """4 query heads on 2 key/value heads."""
    folder = llama.save(_fused(llama.state, _per_group))
    llama.assert_same(folder, str(_fused_family(tmp_path, "qkv_per_group")))
    other = load_model(folder, family=str(_fused_family(tmp_path, "qkv")))(IDS)
    assert not torch.allclose(other, llama.logits), "the layouts differ for grouped heads"


def test_C1_the_layout_matters_without_groups_too(tmp_path: Path) -> None:
    """Labelled rows: 2 heads of 2 channels, each with its own key and value head."""
    config = ModelConfig.from_dict(
        {**_sizes(hidden_size=4), "mixer": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 2, "position": _ROPE}}
    )
    weight_map = WeightMap(read_family(_fused_family(tmp_path, "qkv_per_group")), config)
    rows = torch.arange(12.0)[:, None]
    parts = {
        name: part.flatten().tolist() for name, part in weight_map.apply("model.layers.0.self_attn.qkv.weight", rows)
    }
    assert parts == {
        "layers.0.mixer.q_proj.weight": [0, 1, 6, 7],
        "layers.0.mixer.k_proj.weight": [2, 3, 8, 9],
        "layers.0.mixer.v_proj.weight": [4, 5, 10, 11],
    }


def test_C1_labelled_rows_of_two_groups(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(
        {**_sizes(hidden_size=8), "mixer": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 2, "position": _ROPE}}
    )
    weight_map = WeightMap(read_family(_fused_family(tmp_path, "qkv_per_group")), config)
    labels = [10, 11, 20, 21, 50, 51, 70, 71, 30, 31, 40, 41, 60, 61, 80, 81]
    rows = torch.tensor(labels, dtype=torch.float32)[:, None]
    parts = {
        name[15]: part.flatten().tolist()
        for name, part in weight_map.apply("model.layers.0.self_attn.qkv.weight", rows)
    }
    assert parts == {"q": [10, 11, 20, 21, 30, 31, 40, 41], "k": [50, 51, 60, 61], "v": [70, 71, 80, 81]}


_ROPE = {"kind": "rope"}


def _sizes(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": 8, "hidden_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 16,
        "ffn": {"kind": "swiglu", "intermediate_size": 8}, **changes,
    }  # fmt: skip


def test_C5_fused_rows_are_cut_by_heads_not_in_three(llama: Llama, tmp_path: Path) -> None:
    """128 rows of 4 heads on 2 are 64, 32 and 32."""
    folder = llama.save(_fused(llama.state, lambda q, k, v: torch.cat((q, k, v))))
    family = str(_fused_family(tmp_path, "qkv"))
    llama.assert_same(folder, family)
    entry = open_model(folder, family).map
    parts = dict(entry.apply("model.layers.0.self_attn.qkv.weight", torch.ones(128, 64)))
    assert [len(part) for part in parts.values()] == [64, 32, 32]


@pytest.mark.parametrize("layout", ["qkv", "qkv_per_group"])
def test_C5_rows_that_are_not_those_of_the_heads_are_refused(layout: str, llama: Llama, tmp_path: Path) -> None:
    folder = llama.save(_fused(llama.state, lambda q, k, v: torch.cat((q, k, v, v))))
    message = refusal(folder, str(_fused_family(tmp_path, layout)))
    assert "has 160 rows; q, k and v of 4 and 2 heads of 16 channels have 128" in message


def test_C6_an_explicit_head_size_is_used_everywhere(tmp_path: Path) -> None:
    theirs = save_foreign(tmp_path, "llama with wide heads")
    mixer = open_model(tmp_path).config.layers[0].mixer
    assert mixer.head_dim == 40 != 64 // 4
    model = load_model(tmp_path)
    assert model.layers[0].mixer.q_proj.weight.shape == (160, 64)
    assert model.layers[0].mixer.table_PR.shape[1] == 40
    assert (model(IDS) - foreign_logits(theirs, IDS)).abs().max() < 1e-4


# ---- D: files and index ---------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(llama: Llama, tmp_path: Path) -> Path:
    return save_model(tmp_path / "sharded", llama.config, llama.state, shards=3)


def test_D1_a_missing_shard_is_named_before_anything_is_read(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()

    def empty(*arguments: Any, **options: Any) -> Tensor:
        assert options.get("device") == "meta", "memory was asked for"
        return original(*arguments, **options)

    original = torch.empty
    monkeypatch.setattr(torch, "empty", empty)
    assert "names model-00002-of-00003.safetensors, which is not there" in refusal(sharded)


def test_D2_a_tensor_of_the_index_that_no_shard_holds_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_NAME).read_text())
    index["weight_map"]["model.layers.0.self_attn.q_proj.scale"] = "model-00001-of-00003.safetensors"
    (sharded / INDEX_NAME).write_text(json.dumps(index))
    assert "model.layers.0.self_attn.q_proj.scale" in refusal(sharded)


@pytest.mark.parametrize("cut", [1, 100, 10_000])
def test_D3_a_shard_that_is_shorter_than_its_header_says_is_refused(cut: int, sharded: Path) -> None:
    file = sharded / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    message = refusal(sharded)
    assert file.name in message
    assert "the file is cut short" in message


def test_D4_a_stale_index_is_read_past_if_the_files_hold_everything(llama: Llama, sharded: Path) -> None:
    index = (sharded / INDEX_NAME).read_text().replace("-of-00003", "-of-00006")
    for file in sharded.glob("*.safetensors"):
        file.unlink()
    save_model(sharded, llama.config, llama.state, shards=2)
    (sharded / INDEX_NAME).write_text(index)
    llama.assert_same(sharded)
    assert "is stale" in notes(sharded)


# ---- E: heads, ties and multipliers ---------------------------------------------------------------------------------


def test_E1_a_missing_head_is_refused_unless_the_config_ties_it(llama: Llama) -> None:
    state = {name: tensor for name, tensor in llama.state.items() if name != "lm_head.weight"}
    assert "no tensor lm_head.weight" in refusal(llama.save(state))
    assert "no tensor lm_head.weight" in refusal(llama.save(state, without=("tie_word_embeddings",)))
    model = load_model(llama.save(state, tie_word_embeddings=True))
    untied = load_model(llama.save({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}))
    assert torch.equal(model(IDS), untied(IDS))


def test_E2_the_inner_config_says_whether_the_head_is_tied(llama: Llama) -> None:
    inner, llama.config = llama.config, {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    llama.assert_same(llama.save(text_config=inner))


def test_E2_a_head_that_differs_is_never_dropped(llama: Llama) -> None:
    assert "lm_head.weight differs from embed_tokens.weight" in refusal(llama.save(tie_word_embeddings=True))


def test_E3_a_copy_of_the_embedding_is_accepted_as_tied_head(llama: Llama) -> None:
    state = {**llama.state, "lm_head.weight": llama.state["model.embed_tokens.weight"].clone()}
    tied = load_model(llama.save(state, tie_word_embeddings=True))
    assert "lm_head.weight" not in tied.state_dict()
    assert torch.equal(tied(IDS), load_model(llama.save(state))(IDS))


@pytest.mark.parametrize("name", ["model.lm_head.weight", "lm_head.weight"])
def test_E4_a_head_may_stand_deeper(name: str, llama: Llama) -> None:
    llama.assert_same(llama.save(llama.renamed(lambda old: name if old == "lm_head.weight" else old)))


def test_E4_two_heads_are_refused(llama: Llama) -> None:
    message = refusal(llama.save({**llama.state, "model.lm_head.weight": llama.state["lm_head.weight"].clone()}))
    assert "model.lm_head.weight and lm_head.weight" in message or "lm_head.weight and model.lm_head.weight" in message


def test_E5_a_logits_scale_divides_where_the_family_divides(tmp_path: Path) -> None:
    theirs = save_foreign(tmp_path, "granite")
    model = load_model(tmp_path)
    assert model.config.logits_multiplier == 0.5
    expected, actual = foreign_logits(theirs, IDS).log_softmax(-1), model(IDS).log_softmax(-1)
    assert (actual - expected).abs().max() < 1e-4
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "logits_scaling": 8.0}))
    assert torch.equal(load_model(tmp_path)(IDS), model(IDS) / 4)


def test_E7_a_multiplier_of_the_embedding_is_not_in_the_tied_head(tmp_path: Path) -> None:
    theirs = save_foreign(tmp_path, "gemma2", shard_size="1GB")
    model = load_model(tmp_path)
    assert model.config.embedding_multiplier == 8.0
    assert model.config.tie_word_embeddings
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.embed_tokens.weight, stored)
    expected, actual = foreign_logits(theirs, IDS).log_softmax(-1), model(IDS).log_softmax(-1)
    assert (actual - expected).abs().max() < 1e-4


def test_E8_numbers_that_nothing_reads_are_listed(llama: Llama) -> None:
    folder = llama.save(scale_emb=12, scale_depth=1.4, dim_model_base=256)
    assert "nothing reads scale_emb = 12, scale_depth = 1.4, dim_model_base = 256" in notes(folder)
    assert open_model(folder).description.unused.keys() == {"scale_emb", "scale_depth", "dim_model_base"}


# ---- F: config.json -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{"head_dim": 24}, {"head_dim": 8}, {"num_attention_heads": 8, "head_dim": 16}], ids=str
)
def test_F1_heads_that_do_not_fit_the_weights_are_refused(changes: dict[str, Any], llama: Llama) -> None:
    message = refusal(llama.save(**changes))
    assert "layers.0.mixer.q_proj.weight has shape [64, 64]; config.json calls for" in message


def test_F2_heads_need_not_fill_the_width(tmp_path: Path) -> None:
    """7 * 8 channels of the model, 6 heads of 16 channels: neither number divides the other."""
    config = tiny_config(
        hidden_size=56, mixer={"num_heads": 6, "num_kv_heads": 3, "head_dim": 16}, layers={}, num_hidden_layers=1
    )
    model = load_model(save_tiny(tmp_path, config))
    assert model.layers[0].mixer.q_proj.weight.shape == (96, 56)
    assert model.layers[0].mixer.o_proj.weight.shape == (56, 96)
    assert torch.isfinite(model(IDS)).all()


def test_F2_a_wrong_head_size_is_told_with_both_shapes(tmp_path: Path) -> None:
    mixer = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 16}
    config = tiny_config(hidden_size=56, mixer=mixer, layers={}, num_hidden_layers=1)
    save_tiny(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps({**config, "mixer": {**mixer, "head_dim": 8}}))
    message = refusal(tmp_path)
    assert "[96, 56]" in message
    assert "[48, 56]" in message


def test_F3_other_names_and_nested_ones_are_found(llama: Llama) -> None:
    old = llama.config
    llama.config = {
        "model_type": "llama", "n_heads": 4, "d_model": 64, "attn_config": {"kv_n_heads": 2}, "n_vocab": 120,
        "n_layers": 3, "ffn_hidden_size": 96, "max_seq_len": 128, "norm_eps": old["rms_norm_eps"], "rope_theta": 10000.0,
    }  # fmt: skip
    llama.assert_same(llama.save())


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config", "thinker_config"])
def test_F3_the_part_about_the_language_model_is_found(part: str, llama: Llama) -> None:
    inner = {"text_config": llama.config} if part == "thinker_config" else llama.config
    llama.config = {
        "architectures": ["Multi"],
        "vision_config": {"num_attention_heads": 99, "hidden_size": 7},
        part: inner,
    }
    llama.assert_same(llama.save())


def test_F3_a_missing_field_is_refused_with_candidates_and_what_to_do(llama: Llama) -> None:
    message = refusal(llama.save(without=("num_attention_heads",), n_attn_heads=4))
    assert "num_attention_heads is missing" in message
    assert "Near to it: n_attn_heads" in message
    assert '[aliases] num_attention_heads = ["its_name"]' in message


def test_F3_two_names_with_two_values_are_refused(llama: Llama) -> None:
    message = refusal(llama.save(n_heads=8))
    assert "num_attention_heads is 4 and n_heads is 8" in message


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_F4_quantisation_is_found_at_any_depth(depth: int, llama: Llama) -> None:
    quantised: dict[str, Any] = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    for part in ("text_config", "thinker_config")[:depth]:
        quantised = {part: {**(llama.config if part == "text_config" else {}), **quantised}}
    message = refusal(llama.save(**quantised))
    assert "quantization_config" in message
    assert "not supported yet" in message


_YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


def _positions(folder: Path) -> Any:
    return open_model(folder).config.layers[0].mixer.position


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_F5_both_spellings_of_a_scaling_are_one(key: str, llama: Llama) -> None:
    folder = llama.save(without=("rope_parameters",), rope_theta=1e4, rope_scaling={key: "yarn", **_YARN})
    first = _positions(folder)
    assert first.scaling.kind == "yarn"
    assert first.scaling.factor == 4.0
    assert first == _positions(llama.save(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, **_YARN}))


def test_F5_two_spellings_that_differ_are_refused(llama: Llama) -> None:
    scaling = {"type": "linear", "rope_type": "yarn", **_YARN}
    message = refusal(llama.save(without=("rope_parameters",), rope_theta=1e4, rope_scaling=scaling))
    assert 'rope_scaling.type is "linear" and rope_scaling.rope_type is "yarn"' in message


def test_F5_a_missing_original_length_is_taken_from_the_top_with_a_note(llama: Llama) -> None:
    folder = llama.save(without=("rope_parameters",), rope_theta=1e4, rope_scaling={"type": "yarn", "factor": 4.0})
    assert _positions(folder).scaling.original_max_position_embeddings == 128
    assert "original_max_position_embeddings is not set; max_position_embeddings, 128, is taken" in notes(folder)
    assert "128 positions stretched by 4 to 512" in notes(folder)


def test_F5_a_missing_key_is_named(llama: Llama) -> None:
    assert "rope_parameters.factor is missing; yarn scaling needs it" in refusal(
        llama.save(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4})
    )
    assert 'rope_type is "mrope"; supported are' in refusal(
        llama.save(rope_parameters={"rope_type": "mrope", "rope_theta": 1e4})
    )


def test_F6_an_unknown_key_of_the_positions_is_listed(llama: Llama) -> None:
    scaling = {"rope_type": "yarn", **_YARN, "attn_factor": 0.878}
    folder = llama.save(without=("rope_parameters",), rope_theta=1e4, rope_scaling=scaling)
    assert "nothing reads rope_scaling.attn_factor = 0.878" in notes(folder)
    newer = llama.save(rope_parameters={**scaling, "rope_theta": 1e4})
    assert "nothing reads rope_parameters.attn_factor = 0.878" in notes(newer)


def test_F7_the_base_is_the_same_in_old_and_new_spelling(llama: Llama) -> None:
    old = load_model(llama.save(without=("rope_parameters",), rope_theta=1e6))
    new = load_model(llama.save(rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    bare = load_model(llama.save(rope_parameters={"rope_theta": 1e6}))
    table = old.layers[0].mixer.table_PR
    assert torch.equal(table, new.layers[0].mixer.table_PR)
    assert torch.equal(table, bare.layers[0].mixer.table_PR)
    assert not torch.equal(table, load_model(llama.save()).layers[0].mixer.table_PR)


def test_F7_a_base_that_is_assumed_is_told(llama: Llama) -> None:
    folder = llama.save(without=("rope_parameters",))
    assert _positions(folder).theta == 10000.0
    assert "rope_theta is not in config.json; 10000 is assumed" in notes(folder)


def test_F7_two_bases_are_refused(llama: Llama) -> None:
    assert "rope_theta is 500000.0 at the top and 10000.0 among the rope settings" in refusal(
        llama.save(rope_theta=5e5)
    )


def test_F8_a_factor_is_applied_once(llama: Llama) -> None:
    """2048 positions stretched by 2 are 4096; a config that says more had the factor applied before."""
    scaling = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}
    for longest in (2048, 4096):
        folder = llama.save(max_position_embeddings=longest, rope_parameters=scaling)
        assert open_model(folder).config.max_position_embeddings == 4096
        assert "2048 positions stretched by 2 to 4096 (yarn)" in notes(folder)
    message = refusal(llama.save(max_position_embeddings=8192, rope_parameters=scaling))
    assert "stretches 2048 positions by 2, to 4096" in message
    assert "Was the factor applied twice?" in message


def test_F9_positions_come_from_the_final_config_which_stays(llama: Llama) -> None:
    model = load_model(llama.save())
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.config.layers[0].mixer.position.theta = 5.0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.config.max_position_embeddings = 5  # type: ignore[misc]
    assert model.layers[0].mixer.table_PR.shape[0] == 128
    # A config that is changed on disk makes another model when it is loaded again.
    longer = load_model(llama.save(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}))
    assert torch.equal(longer.layers[0].mixer.table_PR[::2], model.layers[0].mixer.table_PR[:64])


# ---- H and R: heads and vocabulary ----------------------------------------------------------------------------------


def test_H6_query_heads_read_the_key_head_of_their_group(llama: Llama) -> None:
    """Heads 0 and 1 read the first key/value head: h0, h0, h1, h1, not h0, h1, h0, h1."""
    state = {}
    for name, tensor in llama.state.items():
        grouped = ".k_proj." in name or ".v_proj." in name
        state[name] = tensor.unflatten(0, (2, 16)).repeat_interleave(2, 0).flatten(0, 1) if grouped else tensor
    spread = load_model(llama.save(state, num_key_value_heads=4))
    assert (spread(IDS) - llama.logits).abs().max() < 1e-4
    tiled = {
        name: tensor.repeat(2, 1) if ".k_proj." in name or ".v_proj." in name else tensor
        for name, tensor in llama.state.items()
    }
    assert (load_model(llama.save(tiled, num_key_value_heads=4))(IDS) - llama.logits).abs().max() > 0.1


def test_H6_a_head_map_by_name_is_the_map_in_numbers(tmp_path: Path) -> None:
    mixer = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    for name, numbers in (("contiguous", [0, 0, 1, 1]), ("interleaved", [0, 1, 0, 1])):
        logits = [
            load_model(save_tiny(tmp_path, tiny_config(mixer={**mixer, "head_map": heads}, layers={})))(IDS)
            for heads in (name, numbers)
        ]
        assert torch.equal(*logits)


def test_R3_more_rows_than_the_vocabulary_are_left_out_and_fewer_refused(llama: Llama) -> None:
    folder = llama.save(vocab_size=117)
    assert "has 120 rows, vocab_size is 117; the last 3 rows are not used" in notes(folder)
    ids = IDS.clamp(max=116)
    assert torch.equal(load_model(folder)(ids), load_model(llama.save())(ids)[:, :117])
    message = refusal(llama.save(vocab_size=123))
    assert "embed_tokens.weight has 120 rows, but vocab_size in config.json is 123" in message


def test_R4_rows_without_a_token_are_kept(llama: Llama, tmp_path: Path) -> None:
    """A tokenizer of fewer tokens is no reason to cut what was trained, here or in a converted folder."""
    folder = llama.save()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    assert load_model(folder)(IDS).shape[1] == 120
    convert(folder, tmp_path / "ours")
    assert load_model(tmp_path / "ours").embed_tokens.weight.shape == (120, 64)
