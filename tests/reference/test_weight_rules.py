"""Rules of a family: what a line may say, and where every row of a tensor goes. Rows carry labels, so that an order that
only has the right shape is seen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.reference.checkpoint import TensorInfo
from tiers.reference.config import ModelConfig
from tiers.reference.errors import CheckpointError, FamilyError
from tiers.reference.family import Family
from tiers.reference.testing.tiny import tiny_config
from tiers.reference.weight_map import WeightMap
from tiers.reference.weight_rules import parse_rules

QKV = ["layers.{i}.mixer.q_proj.{p}", "layers.{i}.mixer.k_proj.{p}", "layers.{i}.mixer.v_proj.{p}"]


def model(heads: int = 4, kv: int = 2, size: int = 2, **mixer: Any) -> ModelConfig:
    return ModelConfig.from_dict(
        tiny_config(
            mixer={"num_heads": heads, "num_kv_heads": kv, "head_dim": size, "position": {"kind": "rope"}, **mixer},
            layers={},
        )
    )


def apply(rule: Any, tensor: Tensor, config: ModelConfig, name: str = "h.1.qkv.weight") -> list[list[float]]:
    """First column of every part."""
    (parsed,) = parse_rules({"h.{i}.qkv.{p}": rule}, "file")
    return [part.reshape(len(part), -1)[:, 0].tolist() for part in parsed.apply(name, tensor, config)]


def labelled(text: str) -> tuple[Tensor, Callable[[str], list[float]]]:
    """Rows with names, e.g. "q0a q0b k0a": the tensor, and a function from names to their labels."""
    names = text.split()
    return torch.arange(float(len(names)))[:, None].expand(-1, 3), lambda part: [
        float(names.index(n)) for n in part.split()
    ]


def test_qkv_is_cut_by_the_sizes_of_the_heads() -> None:
    """C5: three equal parts of 16 rows would be 6, 6 and 4."""
    tensor, rows = labelled("q0a q0b q1a q1b q2a q2b q3a q3b k0a k0b k1a k1b v0a v0b v1a v1b")
    q, k, v = apply({"to": QKV, "layout": "qkv"}, tensor, model())
    assert q == rows("q0a q0b q1a q1b q2a q2b q3a q3b")
    assert (k, v) == (rows("k0a k0b k1a k1b"), rows("v0a v0b v1a v1b"))


def test_groups_are_taken_apart() -> None:
    """C1: query heads 0 and 1 with key head 0 and value head 0, then the next group."""
    tensor, rows = labelled("q0a q0b q1a q1b k0a k0b v0a v0b q2a q2b q3a q3b k1a k1b v1a v1b")
    q, k, v = apply({"to": QKV, "layout": "qkv_per_group"}, tensor, model())
    assert q == rows("q0a q0b q1a q1b q2a q2b q3a q3b")
    assert (k, v) == (rows("k0a k0b k1a k1b"), rows("v0a v0b v1a v1b"))


def test_groups_of_one_are_head_by_head() -> None:
    tensor, rows = labelled("q0 k0 v0 q1 k1 v1")
    parts = apply({"to": QKV, "layout": "qkv_per_group"}, tensor, model(2, 2, 1, position={"kind": "none"}))
    assert parts == [rows("q0 q1"), rows("k0 k1"), rows("v0 v1")]


def test_one_key_head_for_all() -> None:
    tensor, rows = labelled("q0 q1 q2 k v")
    parts = apply({"to": QKV, "layout": "qkv_per_group"}, tensor, model(3, 1, 1, position={"kind": "none"}))
    assert parts == [rows("q0 q1 q2"), rows("k"), rows("v")]


def test_a_transposed_matrix_is_turned_before_it_is_cut_and_a_bias_is_not() -> None:
    tensor, rows = labelled("q0 k0 v0")
    rule, config = {"to": QKV, "layout": "qkv", "transpose": True}, model(1, 1, 1, position={"kind": "none"})
    assert apply(rule, tensor.T.contiguous(), config) == [rows("q0"), rows("k0"), rows("v0")]
    assert apply(rule, tensor[:, 0], config, "h.1.qkv.bias") == [rows("q0"), rows("k0"), rows("v0")]


def test_halves_and_alternating_rows() -> None:
    tensor, rows = labelled("a b c d e f")
    to = ["layers.{i}.ffn.gate_proj.{p}", "layers.{i}.ffn.up_proj.{p}"]
    assert apply({"to": to, "layout": "halves"}, tensor, model()) == [rows("a b c"), rows("d e f")]
    assert apply({"to": to, "layout": "alternating"}, tensor, model()) == [rows("a c e"), rows("b d f")]
    assert apply({"to": to, "layout": "copies"}, tensor, model()) == [rows("a b c d e f")] * 2


def test_rotary_channels_pair_up_the_other_way_and_the_rest_stays() -> None:
    """Of 6 channels 4 turn. Interleaved pairs (0 1) (2 3) become half pairs (0 2) (1 3)."""
    config = model(1, 1, 6, position={"kind": "rope", "partial_rotary_factor": 0.67})
    tensor, rows = labelled("a0 b0 a1 b1 c d")
    (found,) = apply({"to": QKV[0], "pairing": "interleaved"}, tensor, config)
    assert found == rows("a0 a1 b0 b1 c d")
    back, rows = labelled("a0 a1 b0 b1 c d")
    (found,) = apply({"to": QKV[0], "pairing": "half"}, back, config)
    assert found == rows("a0 b0 a1 b1 c d")
    # Values do not turn.
    assert apply({"to": QKV[2], "pairing": "half"}, back, config) == [rows("a0 a1 b0 b1 c d")]


def test_a_number_is_added() -> None:
    assert apply({"to": "norm.weight", "add": -1.0}, torch.full((3, 1), 1.5, dtype=torch.bfloat16), model()) == [
        [0.5] * 3
    ]


@pytest.mark.parametrize(
    ("rows", "layout", "text"),
    [
        (15, "qkv", "h.1.qkv.weight has 15 rows; q, k and v of 4 and 2 heads of 2 channels have 16"),
        (24, "qkv_per_group", "has 24 rows; q, k and v of 4 and 2 heads"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: int, layout: str, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        apply({"to": QKV, "layout": layout}, torch.zeros(rows, 3), model())


def test_halves_of_an_odd_number_are_refused() -> None:
    with pytest.raises(CheckpointError, match="7 rows, which do not divide into 2 equal blocks"):
        apply({"to": QKV[:2], "layout": "halves"}, torch.zeros(7, 1), model())


@pytest.mark.parametrize(
    ("template", "value", "text"),
    [
        ("a", 5, "is 5; expected a name, a list of names, or a table"),
        ("a", {"too": "b"}, "unknown key .too.; did you mean 'to'"),
        ("a", {}, "expected either to, or drop"),
        ("a", {"to": "b", "drop": "why"}, "expected either to, or drop"),
        ("a", {"drop": ""}, "expected either to, or drop"),
        ("a", {"to": ["b", "c"]}, "goes to 2 parameters; expected a layout"),
        ("a", {"to": "b", "layout": "qvk"}, "layout is .qvk.; expected one of .*did you mean 'qkv'"),
        ("a", {"to": "b", "pairing": "neox"}, "pairing is .neox.; expected half or interleaved"),
        ("a", {"to": "b", "pairing": "half"}, "pairing needs a layer"),
        ("a", {"to": "b", "add": "1"}, "expected a number in add"),
        ("a.{m}", "b", "says nothing of what it stands for"),
        ("a.{i}", "b.{p}", r"uses .*which the name of the tensor does not have"),
        ("a", {"to": "b", "when": "x ="}, "cannot be read"),
        ("a", {"to": "b", "when": 5}, "when is 5; expected an expression"),
    ],
)
def test_a_line_that_means_nothing_is_refused(template: str, value: Any, text: str) -> None:
    with pytest.raises(FamilyError, match=text):
        parse_rules({template: value}, "file")


# ---- the map of a checkpoint ----------------------------------------------------------------------------------------


def mapped(rules: dict[str, Any], names: list[str], config: ModelConfig | None = None) -> WeightMap:
    return WeightMap(Family("test", (), (), {}, parse_rules(rules, "file")), config or model(), names)


def test_the_first_rule_wins_and_the_shadowed_one_is_named() -> None:
    """B6."""
    found = mapped({"{all}": "x.{all}", "a.weight": "y", "b.weight": "z"}, ["a.weight", "c.weight"])
    assert found.entries["a.weight"].targets == ("x.a.weight",)
    assert found.hits() == {"{all}": 2, "a.weight": 0, "b.weight": 0}
    assert found.shadowed() == {"a.weight": "{all}"}


def test_layers_are_numbers_without_leading_zeros() -> None:
    found = mapped({"h.{i}.w": "layers.{i}.w"}, ["h.10.w", "h.01.w", "h.x.w"])
    assert found.entries["h.10.w"].targets == ("layers.10.w",)
    assert found.unmapped == ["h.01.w", "h.x.w"]


def test_a_rule_is_asked_whether_it_holds() -> None:
    rules = {"n": [{"when": "residual == 'parallel'", "to": "a"}, {"to": "b"}]}
    assert mapped(rules, ["n"]).entries["n"].targets == ("b",)
    parallel = ModelConfig.from_dict(tiny_config(residual="parallel"))
    assert mapped(rules, ["n"], parallel).entries["n"].targets == ("a",)
    with pytest.raises(FamilyError, match="when asks for nonsense"):
        mapped({"n": {"when": "nonsense", "to": "a"}}, ["n"])


@pytest.mark.parametrize(
    ("names", "root", "expected"),
    [
        (["backbone.layers.0.w", "backbone.layers.1.w", "lm_head.w"], "backbone.", "model."),
        (["layers.0.w", "layers.1.w"], "", "model."),
        (["language_model.model.layers.0.w", "lm_head.w"], "language_model.", ""),
    ],
)
def test_another_root_is_found_and_noted(names: list[str], root: str, expected: str) -> None:
    """B1, B2."""
    found = mapped({"model.layers.{i}.w": "layers.{i}.w", "lm_head.w": "lm_head.w"}, names)
    assert not found.unmapped
    assert found.root is not None
    assert (found.root.found, found.root.expected) == (root, expected)
    assert "are read as if they began with" in found.notes[0]


def test_two_names_for_one_parameter_are_refused() -> None:
    """B2: both spellings at once. Where rules know the layers as they are, no other root is looked for."""
    found = mapped({"model.layers.{i}.w": "layers.{i}.w"}, ["model.layers.0.w", "language_model.model.layers.0.w"])
    assert found.unmapped == ["language_model.model.layers.0.w"]
    found = mapped({"{m:a|b}.layers.{i}.w": "layers.{i}.w"}, ["a.layers.0.w", "b.layers.0.w"])
    infos = {name: TensorInfo(Path("f"), torch.float32, (2, 2)) for name in found.entries}
    with pytest.raises(CheckpointError, match=r"both are layers\.0\.w; expected it once"):
        found.infos(infos)


def test_the_shapes_of_parts_are_known_without_data() -> None:
    found = mapped({"h.{i}.qkv.{p}": {"to": QKV, "layout": "qkv"}}, ["h.0.qkv.weight"])
    infos = found.infos({"h.0.qkv.weight": TensorInfo(Path("f"), torch.bfloat16, (16, 64))})
    assert {name: info.shape for name, info in infos.items()} == {
        "layers.0.mixer.q_proj.weight": (8, 64),
        "layers.0.mixer.k_proj.weight": (4, 64),
        "layers.0.mixer.v_proj.weight": (4, 64),
    }
