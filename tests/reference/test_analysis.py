"""Numbers and sentences about a model: from configs and headers written down here, against numbers worked out by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tiers.reference.analysis.coverage import Misfit, coverage
from tiers.reference.analysis.families import headless, named_by, shares
from tiers.reference.analysis.files import dtypes, survey
from tiers.reference.analysis.geometry import HEAD, Row, contradictions, geometry
from tiers.reference.analysis.guesses import guess, top_module
from tiers.reference.analysis.layers import alike, in_layers, ranges
from tiers.reference.analysis.parameters import STAND_IN, Mapped, Part, mapped
from tiers.reference.analysis.rules import slices
from tiers.reference.analysis.sizes import sizes
from tiers.reference.analysis.tensor_parallel import RANKS, cuts, padded, tensor_parallel_misfit
from tiers.reference.analysis.unusual import unusual
from tiers.reference.analysis.vocabulary import (
    MAX_TOKENIZER_BYTES,
    Vocabulary,
    token_ids,
    vocabulary,
    vocabulary_problems,
)
from tiers.reference.checkpoint import TensorInfo, open_checkpoint
from tiers.reference.config import ModelConfig
from tiers.reference.errors import CheckpointError
from tiers.reference.family import OURS, find_family, read_family, shipped
from tiers.reference.load import open_model
from tiers.reference.testing.foreign import foreign_model
from tiers.reference.testing.tiny import alibi_config, positions_config, save_tiny, tiny_config, tiny_model
from tiers.reference.weight_map import WeightMap

FAMILIES = {family.name: family for family in (OURS, *shipped())}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config(**changes))


def mixer(**changes: Any) -> ModelConfig:
    """Tiny layers, all alike, with another mixer."""
    return config(mixer={"num_heads": 4, "num_kv_heads": 4, "head_dim": 16, **changes}, layers={})


def infos(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> dict[str, TensorInfo]:
    return {name: TensorInfo(Path("model.safetensors"), dtype, shape) for name, shape in shapes.items()}


def test_ranges_of_layers() -> None:
    assert ranges([7, 0, 1, 2, 3, 3]) == "0-3, 7"
    assert ranges([]) == ""
    assert in_layers([5]) == "layer 5"
    assert in_layers([5, 6]) == "layers 5-6"
    assert alike("abba") == {"a": [0, 3], "b": [1, 2]}


# ---- families -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["phi3", "gpt2", "gpt_neox parallel", "mpt of 8 heads", "gemma2", "starcoder2"])
def test_the_names_of_a_model_are_of_its_family(name: str) -> None:
    found = shares(FAMILIES.values(), foreign_model(name).state_dict())
    assert found[0].family == name.split()[0]
    assert found[0].share == 1
    assert [share.share for share in found] == sorted((share.share for share in found), reverse=True)
    assert next(share for share in found if share.family == "tiers").taken <= 1  # a head is called the same


def test_of_equal_families_the_plainest_comes_first() -> None:
    found = shares(FAMILIES.values(), foreign_model("mistral").state_dict())
    best = [share.family for share in found if share.share == 1]
    assert best[0] == "llama"
    assert {"mistral", "qwen2", "granite"} < set(best)


def test_shares_count_every_layer() -> None:
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(9)] + ["model.layers.0.mlp.other.weight"]
    (share,) = shares([FAMILIES["llama"]], names)
    assert (share.taken, share.total, share.share) == (9, 10, 0.9)
    assert shares([FAMILIES["llama"]], [])[0].share == 0


def test_our_own_names_are_known() -> None:
    found = shares(FAMILIES.values(), tiny_model(tiny_config()).state_dict())
    assert (found[0].family, found[0].share) == ("tiers", 1)


@pytest.mark.parametrize(
    ("raw", "asked", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, None, "architectures"),
        ({"architectures": ["LlamaModel"], "model_type": "llama"}, None, "model_type"),
        ({"text_config": {"architectures": ["LlamaForCausalLM"]}}, None, "architectures"),
        ({"model_type": "foo"}, "llama", "asked"),
        ({"vocab_size": 3}, None, "own format"),
    ],
)
def test_how_a_family_was_found(raw: dict[str, Any], asked: str | None, expected: str) -> None:
    assert named_by(raw, find_family(raw, asked), asked) == expected


def test_a_headless_class_name() -> None:
    """A6."""
    known = ["LlamaForCausalLM", "LlamaForSequenceClassification", "GPT2LMHeadModel"]
    found = headless(["LlamaModel"], known, ["model.norm.weight", "model.lm_head.weight"])
    assert found is not None
    assert (found.architecture, found.nearest, found.heads) == (
        "LlamaModel",
        "LlamaForCausalLM",
        ("model.lm_head.weight",),
    )
    assert headless(["GPT2Model"], known, []).nearest == "GPT2LMHeadModel"  # type: ignore[union-attr]
    assert headless(["FooModel"], known, []).nearest is None  # type: ignore[union-attr]
    assert headless(["LlamaForCausalLM", "GPT2LMHeadModel"], known, []) is None


# ---- geometry -------------------------------------------------------------------------------------------------------


def rows_of(described: ModelConfig | None, family: str, found: dict[str, TensorInfo]) -> dict[tuple[str, str], Row]:
    weight_map = WeightMap(FAMILIES[family], described or STAND_IN, found)
    rows = geometry(described, weight_map, mapped(weight_map, found), found)
    return {(row.field, row.layers): row for row in rows}


def tiny_infos(**changes: Any) -> dict[str, TensorInfo]:
    return infos({name: tuple(t.shape) for name, t in tiny_model(tiny_config(**changes)).state_dict().items()})


def test_sizes_of_config_and_tensors_agree() -> None:
    rows = rows_of(config(), "tiers", tiny_infos())
    assert all(row.agrees for row in rows.values())
    assert rows[("num_heads * head_dim", "0-3")].tensors == 64
    assert rows[("gate", "2-3")].tensors is True


def test_a_wrong_head_size_gives_both_numbers_and_one_sentence() -> None:
    """F1, F2, C6."""
    wide = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    rows = rows_of(mixer(num_kv_heads=2), "tiers", tiny_infos(mixer=wide, layers={}))
    assert (rows[("head_dim", "0-3")].config, rows[("head_dim", "0-3")].tensors) == (16, 32)
    assert rows[("num_heads * head_dim", "0-3")].tensors == 128
    (sentence,) = contradictions(list(rows.values()))
    assert sentence.startswith("head_dim is 16 by config.json and 32 by the tensors (layers 0-3)")
    assert "Set it to 32" in sentence


def test_a_wrong_number_of_heads_is_no_head_size() -> None:
    """F2: q says one size, k another."""
    rows = rows_of(
        mixer(num_heads=8, num_kv_heads=2),
        "tiers",
        tiny_infos(layers={}, mixer={"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}),
    )
    assert rows[("head_dim", "0-3")].tensors == "8 by q_proj and o_proj, 16 by k_proj and v_proj"
    sentences = contradictions(list(rows.values()))
    assert any("num_heads * head_dim is 128 by config.json and 64 by the tensors" in sentence for sentence in sentences)


def test_layers_that_differ_have_rows_of_their_own() -> None:
    found = tiny_infos()
    name = "layers.2.ffn.up_proj.weight"
    found[name] = TensorInfo(found[name].file, found[name].dtype, (100, 64))
    del found["layers.1.mixer.q_proj.weight"]
    rows = rows_of(config(), "tiers", found)
    assert rows[("intermediate_size", "0-1, 3")].agrees is True
    assert rows[("intermediate_size", "2")].tensors == "100 by up_proj, 96 by gate_proj and down_proj"
    assert rows[("intermediate_size", "2")].agrees is False
    assert ("qkv_bias", "0, 2-3") in rows, "without the matrix nothing is known of its bias"


def test_biases_and_gates_that_are_not_described_are_seen() -> None:
    found = tiny_infos(mixer={**tiny_config()["mixer"], "num_kv_heads": 4, "qkv_bias": True})
    rows = rows_of(mixer(), "tiers", found)
    assert (rows[("qkv_bias", "0-3")].config, rows[("qkv_bias", "0-3")].tensors) == (False, True)
    assert (rows[("gate", "2-3")].config, rows[("gate", "2-3")].tensors) == (False, True)


def test_layers_are_counted_from_names() -> None:
    found = {name: info for name, info in tiny_infos().items() if not name.startswith("layers.1.")}
    row = rows_of(config(), "tiers", found)[("num_hidden_layers", "")]
    assert (row.config, row.tensors, row.agrees) == (4, "layers 0, 2-3", False)


def test_rows_beyond_vocab_size_are_no_contradiction() -> None:
    """R3; fewer rows are one."""
    more = rows_of(config(vocab_size=300), "tiers", tiny_infos())[("vocab_size (head rows)", "")]
    fewer = rows_of(config(vocab_size=400), "tiers", tiny_infos())[("vocab_size (head rows)", "")]
    assert (more.agrees, fewer.agrees) == (True, False)


def test_a_head_beside_a_tied_embedding_is_no_contradiction() -> None:
    tied = rows_of(config(tie_word_embeddings=True), "tiers", tiny_infos())[(HEAD, "")]
    assert (tied.config, tied.tensors, tied.agrees) == (False, True, None)


def test_learned_positions_are_compared() -> None:
    learned = {
        "learned_positions": True,
        "layers": {},
        "mixer": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "position": {"kind": "none"}},
    }
    rows = rows_of(config(**learned, max_position_embeddings=99), "tiers", tiny_infos(**learned))
    assert (rows[("max_position_embeddings", "")].config, rows[("max_position_embeddings", "")].tensors) == (99, 512)


# ---- what is unusual ------------------------------------------------------------------------------------------------

UNUSUAL: dict[str, tuple[ModelConfig, str]] = {
    "grouped": (mixer(num_kv_heads=2), "grouped attention: 2 query heads for each of 2 key/value heads"),
    "multi-query": (mixer(num_kv_heads=1), "multi-query attention: 4 query heads for each of 1 key/value heads"),
    "interleaved map": (mixer(num_kv_heads=2, head_map="interleaved"), "head_map is interleaved, not contiguous"),
    "unequal groups": (
        mixer(num_kv_heads=2, head_map=[0, 0, 0, 1]),
        "groups of unequal size: 1 or 3 of 4 query heads read one of 2 key/value heads; served with 6 heads, 2 of them empty",
    ),
    "wide heads": (mixer(head_dim=32), "4 heads of 32 channels are 128, hidden_size is 64"),
    "norms on heads": (mixer(qk_norm="head"), "a norm on q and k, on each head"),
    "scale": (mixer(scale=0.5), "scores are scaled by 0.5, not by 1 / sqrt(head_dim) = 0.25"),
    "cap": (mixer(softcap=50.0), "scores are capped at 50"),
    "partial": (mixer(position={"kind": "rope", "partial_rotary_factor": 0.25}), "rope turns 4 of 16 channels of a head"),
    "style": (mixer(position={"kind": "rope", "style": "interleaved"}), "rope pairs neighbouring channels (interleaved), not halves"),
    "scaling": (
        mixer(position={"kind": "rope", "scaling": {"kind": "linear", "factor": 4.0}}),
        "rope is stretched: linear, factor 4; longest context 512",
    ),
    "alibi": (mixer(position={"kind": "alibi"}), "ALiBi with the published slopes, no rope"),
    "own slopes": (mixer(position={"kind": "alibi", "slopes": [1, 2, 3, 4]}), "ALiBi with its own slopes, no rope"),
    "roots": (mixer(position={"kind": "alibi", "distance": "sqrt"}), "ALiBi with the published slopes on the square root of the distance"),
    "xpos": (mixer(position={"kind": "xpos"}), "xpos: rope over neighbouring channels whose products fall with distance, gamma 0.4"),
    "sandwich positions": (mixer(position={"kind": "sandwich"}), "sandwich positions of 16 channels added to scores, no rope"),
    "t5": (mixer(position={"kind": "t5"}), "a learned bias per range of distances (T5): 32 buckets up to 128, a table per layer"),
    "kerple": (mixer(position={"kind": "kerple"}), "kerple: scores fall with the logarithm of the distance, r1 and r2 learned"),
    "longrope": (
        mixer(
            position={
                "kind": "rope",
                "scaling": {
                    "kind": "longrope", "short_factor": [1] * 8, "long_factor": [1, 2, 3, 4, 5, 6, 7, 8],
                    "original_max_position_embeddings": 64,
                },
            }
        ),
        "rope is stretched: longrope, short_factor 1 to 1 for 8 pairs, long_factor 1 to 8 for 8 pairs, "
        "original_max_position_embeddings 64, use \"auto\"; longest context 512",
    ),
    "no positions": (mixer(position={"kind": "none"}), "no positions at all"),
    "window": (mixer(pattern={"kind": "window", "window": 8}), "a window: each token sees the last 8 tokens"),
    "topk": (mixer(pattern={"kind": "topk", "k": 8}), "top-k: each query head keeps 8 keys, and 0 first and 0 last ones"),
    "biases": (mixer(qkv_bias=True, o_bias=True), "biases on q, k, v, o"),
    "gelu": (config(ffn={"kind": "gelu", "intermediate_size": 96}), "ffn without a gate (gelu)"),
    "gate": (config(), "a knowledge gate, sigmoid, from a bank of 5 slots (layer 3)"),
    "multiplier": (config(logits_multiplier=0.25), "logits_multiplier is 0.25"),
    "logits": (config(logits_softcap=30.0), "logits are capped at 30"),
    "layer norm": (config(norm={"kind": "layer"}), "layer norms with bias"),
    "offset": (config(norm={"kind": "rms", "unit_offset": True}), "norms scale by 1 + weight"),
    "sandwich": (config(norm_position="sandwich"), "norms stand before and behind the sublayers (sandwich)"),
    "parallel": (config(residual="parallel"), "attention and ffn read the same input (parallel residual)"),
    "embedding norm": (config(embedding_norm=True), "a norm behind the embedding"),
    "learned": (config(learned_positions=True), "learned positions: 512 rows, and no longer context"),
    "tied": (config(tie_word_embeddings=True), "the head is the embedding (tie_word_embeddings)"),
    "head bias": (config(lm_head_bias=True), "the head has a bias"),
    "kinds": (config(), "layers are of 4 kinds: 0; 1; 2; 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSUAL)
def test_what_is_unusual_is_said(case: str) -> None:
    described, expected = UNUSUAL[case]
    assert any(line.startswith(expected) for line in unusual(described)), unusual(described)


def test_a_plain_model_is_not_unusual() -> None:
    assert unusual(mixer()) == []


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [tiny_config(), alibi_config(), positions_config()], ids=["tiny", "alibi", "positions"])
def test_parameters_are_those_of_the_model(raw: dict[str, Any]) -> None:
    found = sizes(ModelConfig.from_dict(raw))
    model = tiny_model(raw)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.head == (0 if raw.get("tie_word_embeddings") else 320 * raw["hidden_size"])
    for size in found.layers:
        layer = model.layers[int(size.layers.partition("-")[0])]
        assert size.parameters == sum(parameter.numel() for parameter in layer.parameters())
        assert size.parameters == size.mixer + size.ffn + size.gate + size.norms


def test_a_token_of_the_cache_has_a_key_and_a_value_per_head() -> None:
    """80 layers of 8 key/value heads of 128 channels are 320 KiB in 16 bits."""
    described = config(
        num_hidden_layers=80, mixer={"num_heads": 64, "num_kv_heads": 8, "head_dim": 128}, layers={"3": {"mixer": {"num_kv_heads": 4}}}
    )  # fmt: skip
    found = sizes(described)
    assert found.cache_elements == (79 * 8 + 4) * 2 * 128
    assert {size.layers: size.cache_elements for size in found.layers} == {"0-2, 4-79": 2048, "3": 1024}


def test_dtypes_are_counted() -> None:
    """K1."""
    found = dtypes({**infos({"a": (3, 4)}), **infos({"b": (5,), "c": (7,)}, torch.float32)})
    assert [(row.dtype, row.tensors, row.bytes, row.width) for row in found] == [
        ("float32", 2, 48, 4),
        ("bfloat16", 1, 24, 2),
    ]


# ---- coverage -------------------------------------------------------------------------------------------------------

GUESSES = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": "an unmerged LoRA adapter",
    "_fsdp_wrapped_module._flat_param": "flat parameters of FSDP",
    "model.layers.0.mlp.up_proj.qweight": "quantised weights",
    "model.layers.0.mlp.up_proj.weight_scale_inv": "quantised weights",
    "model.layers.0.mlp.up_proj.weight_zero_point": "quantised weights",
    "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": "a vision tower",
    "visual.patch_embed.proj.weight": "a vision tower",
    "mm_whisper_embeddings.conv1.weight": "an audio tower",
    "multi_modal_projector.linear_1.weight": "a projector",
    "model.mm_projector.0.weight": "a projector",
    "optimizer.state.exp_avg": "optimiser state",
    "model.layers.0.self_attn.rotary_emb.inv_freq": "rotary buffers",
    "mtp.0.weight": "an MTP or EAGLE head",
    "model.layers.80.eh_proj.weight": "an MTP or EAGLE head",
    "model.layers.0.mlp.experts.3.up_proj.weight": "a mixture of experts",
    "score.weight": "a head for scores",
    "model.layers.0.activity.weight": "",
    "model.layers.0.mlp.other.weight": "",
}


@pytest.mark.parametrize("name", GUESSES)
def test_guesses_go_by_words_of_names(name: str) -> None:
    """B3, B4, B10."""
    found = guess(name)
    assert found.startswith(GUESSES[name])
    assert bool(found) == bool(GUESSES[name])


def test_a_tensor_without_elements_is_of_zero3() -> None:
    """B9."""
    (info,) = infos({"x": (0,)}).values()
    assert "ZeRO-3" in guess("model.layers.0.mlp.up_proj.weight", info)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.*"),
        ("vision_tower.encoder.layers.0.weight", "vision_tower"),
        ("model.language_model.projector.0.weight", "model.language_model.projector.*"),
        ("weight", "weight"),
        ("model.weight", "model"),
    ],
)
def test_the_top_module_of_a_name(name: str, expected: str) -> None:
    assert top_module(name) == expected


def test_coverage_goes_both_ways() -> None:
    """B4, B6, B13: tensors without a place by module; parameters without a tensor, and what has their shape."""
    found = infos({name: tuple(t.shape) for name, t in foreign_model("llama").state_dict().items()})
    found["model.other_norm.weight"] = found.pop("model.norm.weight")
    found |= infos({"vision.0.weight": (3, 5), "vision.1.weight": (3, 5)})
    described = foreign_config("llama")
    weight_map = WeightMap(FAMILIES["llama"], described, found)
    seen = coverage(described, weight_map, mapped(weight_map, found), found)
    assert seen.missing == {"norm.weight": "model.other_norm.weight"}
    assert [(group.module, group.count, group.bytes) for group in seen.unmapped] == [
        ("model.other_norm", 1, 128),
        ("vision.*", 2, 60),
    ]
    assert seen.unmapped[1].guess.startswith("a vision tower")
    assert (seen.tensors, seen.parameters, seen.dropped) == (32, 30, 0)
    states = {rule.template: (rule.hits, rule.state) for rule in seen.rules}
    assert states["model.norm.{p}"] == (0, "dead")
    assert states["lm_head.{p}"] == (1, "used")


def test_shapes_that_do_not_fit_are_listed() -> None:
    found = tiny_infos()
    found["layers.1.ffn_norm.weight"] = TensorInfo(Path("f"), torch.float32, (65,))
    weight_map = WeightMap(OURS, config(), found)
    seen = coverage(config(), weight_map, mapped(weight_map, found), found)
    assert seen.misfits == (Misfit("layers.1.ffn_norm.weight", "layers.1.ffn_norm.weight", (65,), (64,)),)


def test_a_parameter_that_is_filled_twice_is_seen() -> None:
    """B11: one weight under two names."""
    found = infos({"embed_out.weight": (120, 64), "lm_head.weight": (120, 64)})
    described = foreign_config("gpt_neox parallel")
    seen = mapped(WeightMap(FAMILIES["gpt_neox"], described, found), found)
    assert seen.twice == {"lm_head.weight": ("embed_out.weight", "lm_head.weight")}


def test_several_rules_for_one_name_are_counted_apart() -> None:
    found = infos(
        {name: tuple(t.shape) for name, t in foreign_model("falcon of one key/value head").state_dict().items()}
    )
    described = foreign_config("falcon of one key/value head")
    weight_map = WeightMap(FAMILIES["falcon"], described, found)
    seen = coverage(described, weight_map, mapped(weight_map, found), found)
    both = [(rule.hits, rule.state) for rule in seen.rules if rule.template == "transformer.h.{i}.input_layernorm.{p}"]
    assert both == [(6, "used"), (0, "not needed: the line above holds")]


def foreign_config(name: str) -> ModelConfig:
    raw = foreign_model(name).config.to_dict()
    return find_family(raw).translate(raw).model()


# ---- files ----------------------------------------------------------------------------------------------------------


def test_files_are_read_one_by_one_where_the_whole_is_refused(tmp_path: Path) -> None:
    """D1, D3."""
    save_tiny(tmp_path, tiny_config(), shards=3)
    whole = survey(tmp_path, open_checkpoint(tmp_path))
    assert [(file.tensors, file.error) for file in whole.files] == [(16, None), (15, None), (15, None)]
    assert (whole.indexed, whole.missing, whole.lost, whole.empty) == (46, (), (), [])
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    last = tmp_path / "model-00003-of-00003.safetensors"
    last.write_bytes(last.read_bytes()[:-10])
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)
    rest = survey(tmp_path, None)
    assert len(rest.infos) == 16
    assert rest.missing == ("model-00002-of-00003.safetensors",)
    assert len(rest.lost) == 30
    assert [file.error is None for file in rest.files] == [True, False]


def test_files_of_torch_are_read_one_by_one_too(tmp_path: Path) -> None:
    """B3: an adapter saved by torch.save."""
    torch.save(
        {"model.lora_A.weight": torch.ones(2, 3), "model.w.weight": torch.ones(2)}, tmp_path / "pytorch_model.bin"
    )
    with pytest.raises(CheckpointError, match="unmerged adapter"):
        open_checkpoint(tmp_path)
    assert survey(tmp_path, None).infos["model.lora_A.weight"].shape == (2, 3)


# ---- vocabulary -----------------------------------------------------------------------------------------------------


def save_tokenizer_json(folder: Path, raw: Any) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(raw))


def test_ids_of_every_kind_of_tokenizer_are_counted(tmp_path: Path) -> None:
    """R1."""
    assert token_ids(tmp_path) is None
    save_tokenizer_json(tmp_path, {"model": {"vocab": {"a": 0, "b": 5}}, "added_tokens": [{"id": 7}, {"id": 0}]})
    assert token_ids(tmp_path) == {0, 5, 7}
    save_tokenizer_json(
        tmp_path, {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": None}
    )
    assert token_ids(tmp_path) == {0, 1}


@pytest.mark.parametrize(
    "raw",
    [[], {}, {"model": {"vocab": 3}}, {"model": {"vocab": {"a": "x"}}}, {"model": {"vocab": {}}, "added_tokens": [3]}],
)
def test_what_is_no_tokenizer_is_refused(raw: Any, tmp_path: Path) -> None:
    save_tokenizer_json(tmp_path, raw)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        token_ids(tmp_path)


def test_a_tokenizer_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as stream:
        stream.truncate(MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(CheckpointError, match="expected at most"):
        token_ids(tmp_path)


@pytest.mark.parametrize(
    ("numbers", "problem", "notes"),
    [
        (Vocabulary(104, 104, 104, 104, 104), "", []),
        (Vocabulary(128, 128, 104, 100, 100), "", ["ids 100 to 103", "embedding has 128", "head has 128"]),  # R1
        (Vocabulary(32003, None, 32000, 32003, 32003), "set vocab_size to 32003", ["embedding has 32003"]),  # R3
        (Vocabulary(32000, 32000, 32000, 32003, 32003), "Remove the tokens", []),  # R3
        (Vocabulary(262208, None, 262208, 262145, 262145), "", ["ids 262145 to 262207"]),  # R4
        (Vocabulary(104, 104, 104, None, None), "", []),
        (Vocabulary(None, None, None, 5, 5), "", []),
    ],
)
def test_numbers_of_the_vocabulary(numbers: Vocabulary, problem: str, notes: list[str]) -> None:
    problems, found = vocabulary_problems(numbers)
    assert len(problems) == bool(problem)
    assert problem in "".join(problems)
    assert len(found) == len(notes)
    for part, note in zip(notes, found, strict=True):
        assert part in note


def test_a_vocabulary_without_parts_has_no_rows() -> None:
    parts = {"embed_tokens.weight": Part("x", (9, 4), torch.float32)}
    assert vocabulary(config(), Mapped(parts, {}, {}), {3}) == Vocabulary(9, None, 320, 4, 1)


# ---- tensor parallel ------------------------------------------------------------------------------------------------


def sizes_that_work(described: ModelConfig) -> list[int]:
    return [n for n in RANKS if tensor_parallel_misfit(described, n) is None]


def parallel(heads: int, kv: int, inner: int, vocab: int, **changes: Any) -> ModelConfig:
    raw = {"num_heads": heads, "num_kv_heads": kv, "head_dim": 16, **changes}
    return config(mixer=raw, ffn={"kind": "swiglu", "intermediate_size": inner}, vocab_size=vocab, layers={})


def test_sizes_that_work_for_40_heads_and_10_key_value_heads() -> None:
    """H1."""
    described = parallel(40, 10, 1280, 64 * 5)
    assert sizes_that_work(described) == [1, 2, 5, 10, 20, 40]
    by_size = {cut.tensors: cut.by_size for cut in cuts(described, (1, 4, 10, 20))}
    assert list(by_size["k_proj, v_proj"].values()) == [
        "whole", "refuse: 10 key/value heads", "shard: 1 key/value head", "replicate: 1 head on 2 ranks",
    ]  # fmt: skip
    assert tensor_parallel_misfit(described, 4) == "10 key/value heads (layers 0-3)"


def test_52_heads_do_not_fit_on_3_ranks() -> None:
    """H2."""
    described = parallel(52, 4, 52 * 3, 64 * 3)
    assert tensor_parallel_misfit(described, 3) == "52 query heads (layers 0-3)"
    assert sizes_that_work(described) == [1, 2, 4]


def test_a_vocabulary_is_cut_too() -> None:
    """H2: vLLM pads 32000 rows to a multiple of 64, which 3 ranks do not divide."""
    described = parallel(48, 3, 96, 32000)
    assert tensor_parallel_misfit(described, 3) == "32000 rows of the vocabulary, padded to a multiple of 64"
    assert tensor_parallel_misfit(parallel(48, 3, 96, 31999), 2) == "3 key/value heads (layers 0-3)"
    assert padded(31999) == 32000


def test_empty_heads_of_unequal_groups_are_cut_with_the_others() -> None:
    """H6: 5 query heads in groups of 3 and 2 are served as 6."""
    found = cuts(parallel(5, 2, 96, 320, head_map=[0, 0, 0, 1, 1]), (1, 2))
    assert found[0].by_size == {1: "whole", 2: "shard: 3 query heads"}


# ---- which part of a tensor -----------------------------------------------------------------------------------------


def slices_of(name: str, source: str) -> list[str]:
    model, described = foreign_model(name), foreign_config(name)
    found = infos({n: tuple(t.shape) for n, t in model.state_dict().items()})
    weight_map = WeightMap(FAMILIES[name.split()[0]], described, found)
    return slices(weight_map.entries[source], found[source], described)


def test_slices_name_rows_and_layouts() -> None:
    """B12, C1, C5."""
    assert slices_of("phi3", "model.layers.0.self_attn.qkv_proj.weight") == [
        "rows 0-63 (qkv)", "rows 64-95 (qkv)", "rows 96-127 (qkv)",
    ]  # fmt: skip
    assert slices_of("phi3", "model.layers.0.mlp.gate_up_proj.weight") == ["rows 0-95 (halves)", "rows 96-191 (halves)"]
    assert slices_of("gpt2", "transformer.h.0.attn.c_attn.bias")[2] == "rows 128-191 (qkv)"
    assert slices_of("gpt2", "transformer.h.0.mlp.c_fc.weight") == ["whole, transposed"]
    assert slices_of("gptj", "transformer.h.0.ln_1.weight") == ["whole (copies)", "whole (copies)"]
    assert slices_of("bloom of 8 heads", "transformer.h.0.self_attention.query_key_value.weight")[1] == (
        "rows 8-15, 32-39, ... (8 blocks) (qkv_per_group)"
    )


def test_slices_of_other_rules(tmp_path: Path) -> None:
    """C3, G8: rows in turn, channels paired another way, a number added."""
    family = tmp_path / "mine.toml"
    family.write_text(
        '[weights]\n"{i}.gu" = { to = ["layers.{i}.ffn.gate_proj.weight", "layers.{i}.ffn.up_proj.weight"], layout = "alternating" }\n'
        '"{i}.q" = { to = "layers.{i}.mixer.q_proj.weight", pairing = "interleaved" }\n"{i}.n" = { to = "norm.weight", add = 1 }\n'
    )
    found = infos({"0.gu": (192, 64), "0.q": (64, 64), "0.n": (64,)})
    weight_map = WeightMap(read_family(family), config(), found)
    assert [slices(weight_map.entries[name], found[name], config()) for name in found] == [
        ["rows 0, 2, 4, ... (alternating)", "rows 1, 3, 5, ... (alternating)"],
        ["whole, channels re-paired from interleaved"],
        ["whole, plus 1"],
    ]


def test_parts_of_a_real_folder_have_the_shapes_of_the_model(tmp_path: Path) -> None:
    opened = open_model(save_tiny(tmp_path, tiny_config()))
    parts = mapped(opened.map, opened.checkpoint.infos).parts
    assert sum(math.prod(part.shape) for part in parts.values()) == sizes(opened.config).parameters
