"""The strict parser of config.json: what it reads, and that each wrong input is refused by field, found and expected."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tiers.reference import config as c
from tiers.reference.config import ModelConfig, parse_layer_range, read_json
from tiers.reference.errors import ConfigError
from tiers.reference.testing.tiny import alibi_config, tiny_config

MISSING = object()


def changed(path: str, value: Any) -> dict[str, Any]:
    """The tiny config with one entry replaced; `path` is dotted, MISSING removes the entry."""
    raw = copy.deepcopy(tiny_config())
    *parents, leaf = path.split(".")
    node = raw
    for parent in parents:
        node = node.setdefault(parent, {})
    if value is MISSING:
        del node[leaf]
    else:
        node[leaf] = value
    return raw


def rope(**keys: Any) -> dict[str, Any]:
    return {"kind": "rope", **keys}


def assert_refused(raw: Any, *parts: str) -> None:
    """The parser raises, and its message holds every part: the field, what was found, what was expected."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(raw)
    message = str(caught.value)
    for part in ("config.json", *parts):
        assert part in message, f"{part!r} is not in {message!r}"


def test_reads_every_section() -> None:
    config = ModelConfig.from_dict(tiny_config())
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers, len(config.layers)) == (320, 64, 4, 4)
    assert [layer.mixer.pattern.kind for layer in config.layers] == ["dense", "window", "topk", "topk"]
    assert config.layers[1].mixer.pattern == c.Window(16, 2)
    assert config.layers[2].mixer.pattern == c.TopK(8, 1, 2, "head")
    assert config.layers[3].mixer.pattern == c.TopK(8, 1, 2, "group")
    assert [layer.gate is not None for layer in config.layers] == [False, False, True, True]
    assert config.layers[3].gate == c.Gate("sigmoid", "bank", slots=5)
    assert config.layers[0].mixer.heads == (0, 1, 0, 1)


def test_reads_floats_written_as_integers_and_lists_as_tuples() -> None:
    config = ModelConfig.from_dict(alibi_config(embedding_multiplier=3))
    assert config.embedding_multiplier == 3.0
    assert isinstance(config.embedding_multiplier, float)
    assert config.layers[0].mixer.head_map == (0, 2, 0, 1, 2, 0)
    assert hash(config) == hash(ModelConfig.from_dict(alibi_config(embedding_multiplier=3)))


@pytest.mark.parametrize(
    "scaling",
    [
        c.Linear(4.0),
        c.Dynamic(2.0, 128),
        c.Yarn(4.0, 128, truncate=False, attention_factor=1.5),
        c.Llama3(8.0, 1.0, 4.0, 128),
    ],
    ids=lambda scaling: scaling.kind,
)
def test_reads_every_rope_scaling(scaling: Any) -> None:
    position = rope(theta=5e5, style="interleaved", scaling={"kind": scaling.kind, **vars(scaling)})
    config = ModelConfig.from_dict(changed("mixer.position", position))
    assert config.layers[0].mixer.position == c.Rope(5e5, "interleaved", 1.0, scaling)


def test_keys_of_transformers_are_read_past() -> None:
    raw = tiny_config(use_cache=True, eos_token_id=[1, 2], transformers_version="5.19.0", torch_dtype="float32")
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(tiny_config())


# ---- per-layer overrides --------------------------------------------------------------------------------------------


def test_an_override_keeps_the_keys_it_does_not_name() -> None:
    raw = changed("layers", {"1-2": {"mixer": {"scale": 0.5, "pattern": {"k": 3}}}})
    config = ModelConfig.from_dict(raw)
    base = config.layers[0].mixer
    assert base.pattern == c.TopK(8, 1, 2)
    for layer in config.layers[1:3]:
        assert layer.mixer.pattern == c.TopK(3, 1, 2)
        assert layer.mixer.scale == 0.5
        assert layer.mixer.num_heads == base.num_heads
    assert config.layers[3] == config.layers[0]


def test_a_kind_switch_replaces_the_whole_object() -> None:
    # The k of the base is no field of a window; kept, it would be an unknown key.
    raw = changed("layers", {"0": {"mixer": {"pattern": {"kind": "window", "window": 5}}}})
    config = ModelConfig.from_dict(raw)
    assert config.layers[0].mixer.pattern == c.Window(5, sink=0)
    assert config.layers[1].mixer.pattern == c.TopK(8, 1, 2)


def test_a_kind_that_repeats_the_base_replaces_nothing() -> None:
    raw = changed("layers", {"0": {"mixer": {"kind": "attention", "pattern": {"kind": "topk", "k": 3}}}})
    assert ModelConfig.from_dict(raw).layers[0].mixer.pattern == c.TopK(3, 1, 2)


def test_a_kind_switch_needs_the_keys_of_the_new_kind() -> None:
    assert_refused(
        changed("layers", {"0": {"mixer": {"pattern": {"kind": "window"}}}}),
        "layers['0']", "mixer.pattern.window is missing", "an integer",
    )  # fmt: skip


def test_later_overrides_win() -> None:
    raw = changed("layers", {"0-3": {"mixer": {"pattern": {"k": 3}}}, "2": {"mixer": {"pattern": {"k": 4}}}})
    config = ModelConfig.from_dict(raw)
    assert [layer.mixer.pattern.k for layer in config.layers] == [3, 3, 4, 3]


def test_gate_null_removes_the_gate() -> None:
    raw = tiny_config(gate={"mode": "mix", "source": "token"}, layers={"1-2": {"gate": None}})
    config = ModelConfig.from_dict(raw)
    assert [layer.gate is not None for layer in config.layers] == [True, False, False, True]
    assert [layer.operators for layer in config.layers[:2]] == [("attention", "gate"), ("attention",)]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"4": {}}, ["'4'", "beyond the last layer", "layers 0 to 3"]),
        ({"2-9": {}}, ["'2-9'", "beyond the last layer", "layers 0 to 3"]),
        ({"3-1": {}}, ["'3-1'", "ends before it starts"]),
        ({"": {}}, ["layer range ''", "7 or 0-3"]),
        ({"a": {}}, ["layer range 'a'", "7 or 0-3"]),
        ({"0-": {}}, ["layer range '0-'", "7 or 0-3"]),
        ({"-1": {}}, ["layer range '-1'", "7 or 0-3"]),
        ({"0-1-2": {}}, ["layer range '0-1-2'", "7 or 0-3"]),
        ({"*": {}}, ["layer range '*'", "7 or 0-3"]),
        ({"0": None}, ["layers['0']", "missing", "an object with mixer, ffn or gate"]),
        ({"0": {"mixr": {}}}, ["layers['0']", "unknown key 'mixr'", "did you mean 'mixer'"]),
        ({"0": {"mixer": {"pattern": {"kk": 3}}}}, ["layers['0']", "unknown key 'kk'", "did you mean 'k'"]),
        ({"0-3": {"mixer": {"num_heads": 3}}}, ["layers['0-3']", "num_heads is 3", "num_kv_heads is 2"]),
        ([], ["layers is []", "expected an object"]),
        (None, ["layers is missing", "expected an object"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict | None) else "message",
)
def test_refuses_wrong_layer_overrides(overrides: Any, parts: list[str]) -> None:
    assert_refused(changed("layers", overrides), *parts)


@pytest.mark.parametrize(("text", "expected"), [("7", range(7, 8)), ("0-3", range(4)), ("5-5", range(5, 6))])
def test_layer_ranges_include_both_ends(text: str, expected: range) -> None:
    assert parse_layer_range(text, 8) == expected


# ---- unknown and missing keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("vocab_sise", "vocab_size"),
        ("mixer.num_head", "num_heads"),
        ("mixer.pattern.sinks", "sink"),
        ("mixer.position.thetas", "theta"),
        ("ffn.intermediate", "intermediate_size"),
        ("layers.2.gate.scource", "source"),
        ("norm.epsi", "eps"),
        ("tie_word_embedding", "tie_word_embeddings"),
        ("max_positions_embeddings", "max_position_embeddings"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(path: str, nearest: str) -> None:
    leaf = path.rpartition(".")[2]
    assert_refused(changed(path, 1), f"unknown key {leaf!r}", f"did you mean {nearest!r}?")


def test_an_unknown_key_like_no_other_lists_the_known_ones() -> None:
    assert_refused(
        changed("ffn.zzz", 1), "ffn of kind swiglu", "unknown key 'zzz'", "known keys: intermediate_size, bias"
    )
    assert_refused(
        changed("mixer.pattern", {"kind": "dense", "zzz": 1}), "mixer.pattern of kind dense", "none but kind"
    )


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("vocab_size", "an integer"),
        ("hidden_size", "an integer"),
        ("max_position_embeddings", "an integer"),
        ("num_hidden_layers", "an integer of 1 or more"),
        ("mixer", "an object"),
        ("ffn", "an object"),
        ("mixer.num_heads", "an integer"),
        ("mixer.num_kv_heads", "an integer"),
        ("mixer.head_dim", "an integer"),
        ("mixer.pattern.k", "an integer"),
        ("ffn.intermediate_size", "an integer"),
        ("layers.2.gate.mode", '"linear" or "sigmoid" or "mix"'),
        ("layers.2.gate.source", '"token" or "bank"'),
        ("mixer.position.kind", "one of rope, xpos, alibi, sandwich, t5, kerple, none"),
        ("mixer.pattern.kind", "one of dense, window, topk"),
        ("ffn.kind", "one of swiglu, geglu, gelu"),
    ],
)
def test_names_a_missing_required_key(path: str, expected: str) -> None:
    leaf = ".".join(path.removeprefix("layers.2.").split("."))
    raw = changed(path, MISSING)
    if path.startswith("mixer.pattern"):
        raw["layers"] = {}  # the overrides of the tiny config depend on the base pattern
    assert_refused(raw, leaf, "missing", expected)


@pytest.mark.parametrize("slots", [None, MISSING], ids=["null", "no key"])
def test_a_bank_needs_slots(slots: Any) -> None:
    gate = {"mode": "mix", "source": "bank"} | ({} if slots is MISSING else {"slots": slots})
    assert_refused(changed("layers.3.gate", gate), "layers['3']", "slots is missing", "source bank needs the number")


# ---- wrong types ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "shown", "expected"),
    [
        ("vocab_size", True, "true", "an integer"),
        ("vocab_size", "320", '"320"', "an integer"),
        ("vocab_size", 320.0, "320.0", "an integer"),
        ("vocab_size", None, "missing", "an integer"),
        ("num_hidden_layers", True, "true", "an integer of 1 or more"),
        ("num_hidden_layers", 4.0, "4.0", "an integer of 1 or more"),
        ("num_hidden_layers", 0, "0", "an integer of 1 or more"),
        ("mixer.num_heads", True, "true", "an integer"),
        ("mixer.head_dim", [16], "[16]", "an integer"),
        ("mixer.pattern.k", False, "false", "an integer"),
        ("mixer.pattern.k", 8.5, "8.5", "an integer"),
        ("mixer.qkv_bias", 1, "1", "true or false"),
        ("mixer.qkv_bias", "true", '"true"', "true or false"),
        ("mixer.qk_norm", True, "true", '"none" or "head" or "full"'),
        ("mixer.scale", "0.1", '"0.1"', "a number or null"),
        ("mixer.scale", True, "true", "a number or null"),
        ("mixer.head_map", 3, "3", "a list of integers"),
        ("mixer.head_map", "contigous", '"contigous"', '"contiguous" or "interleaved"'),
        ("mixer.head_map", [0, 1, 0, True], "[0, 1, 0, true]", "a list of integers"),
        ("mixer.head_map", [0, 1, 0.0, 1], "[0, 1, 0.0, 1]", "a list of integers"),
        ("mixer.pattern", "topk", '"topk"', "an object with kind dense, window, topk"),
        ("mixer.pattern.kind", "topK", '"topK"', "did you mean 'topk'?"),
        ("mixer.pattern.kind", ["topk"], '["topk"]', "one of dense, window, topk"),
        ("mixer.pattern.share", "heads", '"heads"', '"head" or "group"; did you mean \'head\'?'),
        ("mixer.position", None, "missing", "an object with kind rope, xpos, alibi, sandwich, t5, kerple, none"),
        ("mixer.position.kind", "cope", '"cope"', "one of rope, xpos, alibi, sandwich, t5, kerple, none"),
        ("mixer.position.style", "neox", '"neox"', '"half" or "interleaved"'),
        ("mixer.position.scaling", 2.0, "2.0", "an object with kind linear, dynamic, ntk_alpha, ntk, yarn, deepseek_yarn, llama3, longrope"),
        ("mixer.position.scaling", {"kind": "mrope", "factor": 2}, '"mrope"', "one of linear, dynamic, ntk_alpha, ntk, yarn"),
        ("mixer.kind", "mamba", '"mamba"', "one of attention"),
        ("ffn", [], "[]", "an object with kind swiglu, geglu, gelu"),
        ("ffn.bias", 0, "0", "true or false"),
        ("norm", "rms", '"rms"', "an object"),
        ("norm.kind", "batch", '"batch"', '"rms" or "layer"'),
        ("norm.eps", "1e-5", '"1e-5"', "a number"),
        ("residual", "paralel", '"paralel"', "did you mean 'parallel'?"),
        ("residual", True, "true", '"sequential" or "parallel"'),
        ("tie_word_embeddings", 1, "1", "true or false"),
        ("embedding_norm", "yes", '"yes"', "true or false"),
        ("embedding_multiplier", True, "true", "a number"),
        ("layers.2.gate", True, "true", "an object"),
        ("layers.2.gate.mode", "add", '"add"', '"linear" or "sigmoid" or "mix"'),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value),
)  # fmt: skip
def test_refuses_wrong_types(path: str, value: Any, shown: str, expected: str) -> None:
    raw = changed(path, value)
    if path.startswith("mixer.p"):
        raw["layers"] = {}  # the overrides of the tiny config depend on the base
    assert_refused(raw, path.removeprefix("layers.2."), shown, expected)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf"), 10**400], ids=["nan", "inf", "minus inf", "beyond floats"]
)
@pytest.mark.parametrize("path", ["logits_multiplier", "mixer.position.theta", "norm.eps", "mixer.softcap"])
def test_refuses_numbers_that_are_not_finite(path: str, value: float) -> None:
    assert_refused(changed(path, value), path, "expected a number")


def test_refuses_nan_where_an_integer_is_due() -> None:
    assert_refused(changed("vocab_size", float("nan")), "vocab_size is NaN", "an integer")


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(changed("vocab_size", "x" * 5000))
    assert len(str(caught.value)) < 200


# ---- wrong values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("vocab_size", 0, ["vocab_size is 0", "above 0"]),
        ("hidden_size", -64, ["hidden_size is -64", "above 0"]),
        ("max_position_embeddings", 0, ["max_position_embeddings is 0", "above 0"]),
        ("mixer.num_heads", 0, ["mixer: num_heads is 0", "above 0"]),
        ("mixer.num_kv_heads", 0, ["mixer: num_kv_heads is 0", "above 0"]),
        ("mixer.head_dim", -1, ["mixer: head_dim is -1", "above 0"]),
        ("mixer.scale", 0.0, ["mixer: scale is 0.0", "above 0"]),
        ("mixer.softcap", -5.0, ["mixer: softcap is -5.0", "above 0"]),
        ("mixer.num_heads", 5, ["num_heads is 5 and num_kv_heads is 2", "multiple", "list of 5 indices"]),
        ("mixer.num_kv_heads", 8, ["num_heads is 4 and num_kv_heads is 8", "multiple"]),
        ("mixer.head_map", [0, 1, 0], ["head_map has 3 entries", "num_heads = 4"]),
        ("mixer.head_map", [0, 1, 0, 2], ["head_map[3] is 2", "num_kv_heads - 1 = 1"]),
        ("mixer.head_map", [0, 1, -1, 1], ["head_map[2] is -1", "from 0 to"]),
        ("mixer.head_map", [0, 0, 0, 0], ["head_map never names key/value head 1", "must be read"]),
        ("mixer.pattern", {"kind": "topk", "k": 0}, ["pattern: k is 0", "1 or more"]),
        ("mixer.pattern", {"kind": "topk", "k": -3}, ["pattern: k is -3", "1 or more"]),
        ("mixer.pattern", {"kind": "topk", "k": 1, "sink": -1}, ["pattern: sink is -1", "0 or more"]),
        ("mixer.pattern", {"kind": "topk", "k": 1, "window": -2}, ["pattern: window is -2", "0 or more"]),
        ("mixer.pattern", {"kind": "window", "window": 0}, ["pattern: window is 0", "above 0"]),
        ("mixer.pattern", {"kind": "window", "window": 4, "sink": -1}, ["pattern: sink is -1", "0 or more"]),
        ("mixer.position", rope(theta=0), ["position: theta is 0", "above 0"]),
        ("mixer.position", rope(partial_rotary_factor=0), ["partial_rotary_factor is 0", "(0, 1]"]),
        ("mixer.position", rope(partial_rotary_factor=1.5), ["partial_rotary_factor is 1.5", "(0, 1]"]),
        ("mixer.position", rope(partial_rotary_factor=0.2), ["partial_rotary_factor 0.2", "3 channels", "even number"]),
        ("mixer.position", rope(partial_rotary_factor=0.01), ["partial_rotary_factor 0.01", "0 channels", "above 0"]),
        ("mixer.head_dim", 15, ["head_dim 15", "15 channels", "even number"]),
        ("mixer.position", rope(scaling={"kind": "linear", "factor": 0}), ["scaling: factor is 0", "above 0"]),
        (
            "mixer.position",
            rope(scaling={"kind": "yarn", "factor": 2, "original_max_position_embeddings": 0}),
            ["scaling: original_max_position_embeddings is 0", "above 0"],
        ),
        (
            "mixer.position",
            rope(theta=1, scaling={"kind": "yarn", "factor": 2, "original_max_position_embeddings": 8}),
            ["position: theta is 1", "expected another number", "yarn"],
        ),
        (
            "mixer.position",
            rope(
                partial_rotary_factor=0.125,
                scaling={"kind": "dynamic", "factor": 2, "original_max_position_embeddings": 8},
            ),
            ["position.scaling of kind dynamic", "2 rotary channels", "at least 4"],
        ),
        (
            "mixer.position",
            rope(scaling={"kind": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}),
            ["mixer.position.scaling.original_max_position_embeddings is missing", "an integer"],
        ),
        ("mixer.position", {"kind": "alibi", "slopes": [0.5, 0.25]}, ["slopes has 2 entries", "num_heads = 4"]),
        ("mixer.position", {"kind": "alibi", "distance": "log"}, ['distance is "log"', '"linear" or "sqrt"']),
        (
            "mixer.position",
            {"kind": "alibi", "slope": [1]},
            ["position of kind alibi: unknown key 'slope'; did you mean 'slopes'"],
        ),
        ("mixer.position", {"kind": "xpos", "scale_base": 4}, ["scale_base 4", "falls by 2 ** 116", "at most 2 ** 60"]),
        ("mixer.position", {"kind": "xpos", "gamma": 0}, ["gamma is 0", "above 0"]),
        ("mixer.position", {"kind": "xpos", "scaling": None}, ["position of kind xpos: unknown key 'scaling'"]),
        ("mixer.position", {"kind": "sandwich", "dim": 7}, ["dim is 7", "an even number"]),
        ("mixer.position", {"kind": "sandwich", "dim": 2**17}, ["dim is 131072", "at most 65536"]),
        ("mixer.position", {"kind": "t5", "num_buckets": 1}, ["num_buckets is 1", "at least 2"]),
        ("mixer.position", {"kind": "t5", "max_distance": 16}, ["max_distance is 16 and num_buckets 32", "above 16"]),
        ("mixer.position", {"kind": "t5", "max_distance": 2**25}, ["max_distance is 33554432", "at most 16777216"]),
        ("mixer.position", {"kind": "kerple", "r1": [1, 1, 1, 1]}, ["r2 is missing and r1 is there", "expected both"]),
        ("mixer.position", {"kind": "kerple", "r1": [1, 1], "r2": [1, 1]}, ["r1 has 2 entries", "num_heads = 4"]),
        ("mixer.position", {"kind": "kerple", "r1": [1, 1, 1, 1], "r2": [1, 1, 1, 0]}, ["r2[3] is 0", "above 0"]),
        (
            "mixer.position",
            rope(scaling={"kind": "yarn", "factor": 2, "original_max_position_embeddings": 128}),
            ["max_position_embeddings is 512", "stretches 128 positions by 2, to 256", "Was the factor applied twice"],
        ),
        (
            "mixer.position",
            rope(
                scaling={
                    "kind": "longrope",
                    "short_factor": [1],
                    "long_factor": [1],
                    "original_max_position_embeddings": 9,
                }
            ),
            ["scaling.short_factor has 1 entries", "expected 8, one per pair of the 16 rotary channels"],
        ),
        (
            "mixer.position",
            rope(
                scaling={
                    "kind": "longrope",
                    "short_factor": [0],
                    "long_factor": [1],
                    "original_max_position_embeddings": 9,
                }
            ),
            ["short_factor[0] is 0", "above 0"],
        ),
        (
            "mixer.position",
            rope(
                scaling={
                    "kind": "longrope",
                    "short_factor": [1],
                    "long_factor": [1],
                    "original_max_position_embeddings": 1,
                }
            ),
            ["original_max_position_embeddings is 1", "at least 2"],
        ),
        ("mixer.position", rope(scaling={"kind": "ntk", "factor": 2, "mixed_b": 11}), ["mixed_b is 11", "at most 10"]),
        ("mixer.position", rope(scaling={"kind": "ntk_alpha", "alpha": 0}), ["alpha is 0", "above 0"]),
        ("mixer.position", {"kind": "none", "theta": 1e4}, ["position of kind none", "unknown key 'theta'"]),
        ("norm", {"kind": "rms", "bias": True}, ["norm: bias is true", "kind rms has no bias"]),
        ("norm", {"eps": 0}, ["norm: eps is 0", "above 0"]),
        ("ffn.intermediate_size", 0, ["ffn: intermediate_size is 0", "above 0"]),
        ("layers.2.gate.slots", 4, ["slots is set", "source token has no bank"]),
        ("layers.2.gate.scale", 0.5, ["scale is set", "source token has no bank"]),
        ("layers.3.gate.slots", 0, ["slots is 0", "above 0"]),
        ("model_type", "llama", ['model_type is "llama"', "'tiers'"]),
        ("model_type", None, ["model_type is missing", "'tiers'"]),
        ("quantization_config", {"quant_method": "fp8"}, ["quantization_config is set", "not supported yet"]),
        ("quantization_config", None, ["quantization_config is set", "remove the key"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "message" if isinstance(value, list) else json.dumps(value),
)
def test_refuses_wrong_values(path: str, value: Any, parts: list[str]) -> None:
    raw = changed(path, value)
    if path.startswith("mixer.p"):
        raw["layers"] = {}  # the overrides of the tiny config depend on the base pattern
    assert_refused(raw, *parts)


@pytest.mark.parametrize("kind", ["xpos", "sandwich"])
def test_odd_heads_have_no_pairs(kind: str) -> None:
    raw = tiny_config(mixer={**tiny_config()["mixer"], "head_dim": 15, "position": {"kind": kind}}, layers={})
    assert_refused(raw, f"position is {kind}", "15", "an even")


def test_refuses_two_tables_to_share() -> None:
    shared = {"kind": "t5", "shared": True}
    mixer = {**tiny_config()["mixer"], "position": shared}
    raw = tiny_config(mixer=mixer, layers={"1": {"mixer": {"position": {**shared, "max_distance": 64}}}})
    assert_refused(raw, "layers share a table", "4 heads and 32 buckets up to 64", "shared false")
    alone = tiny_config(mixer=mixer, layers={"1": {"mixer": {"position": {"max_distance": 64, "shared": False}}}})
    assert ModelConfig.from_dict(alone).t5_table == (32, 4)


def test_rms_norm_may_say_that_it_has_no_bias() -> None:
    assert not ModelConfig.from_dict(tiny_config(norm={"kind": "rms", "bias": False})).norm.has_bias


@pytest.mark.parametrize("bias", [None, True, False])
def test_layer_norm_has_a_bias_unless_told_otherwise(bias: bool | None) -> None:
    config = ModelConfig.from_dict(tiny_config(norm={"kind": "layer", "bias": bias}))
    assert config.norm.has_bias == (bias is not False)


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [[], "tiers", 3, None], ids=["list", "string", "number", "null"])
def test_refuses_json_that_is_no_object(raw: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"config\.json: found .* at the top; expected a JSON object"):
        ModelConfig.from_json(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"a": }', "\N{SNOWMAN}", "[" * 100_000, '{"a": ' + "1" * 5000 + "}"],
    ids=["empty", "cut", "no value", "no json", "too deep", "too many digits"],
)
def test_refuses_a_file_that_is_no_json(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json: not valid JSON \("):
        ModelConfig.from_json(path)


def test_refuses_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"config\.json: not valid JSON"):
        ModelConfig.from_json(tmp_path)


def test_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file; expected a model folder with config\.json"):
        ModelConfig.from_json(tmp_path)


def test_refuses_a_folder_where_a_file_is_due(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read \(Is a directory\)"):
        read_json(tmp_path / "config.json")


def test_reads_the_same_from_a_folder_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(alibi_config()))
    expected = ModelConfig.from_dict(alibi_config())
    assert ModelConfig.from_json(tmp_path) == expected
    assert ModelConfig.from_json(path) == expected
