"""Family files and the language of their expressions: what they may say, and what a foreign config becomes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tiers.reference.config import ModelConfig
from tiers.reference.errors import CheckpointError, ConfigError, FamilyError
from tiers.reference.expression import evaluate, names, parse
from tiers.reference.family import VARIABLE, Family, _own_families, find_family, own_families, read_family, shipped
from tiers.reference.load import describe, open_model
from tiers.reference.positions import DeepseekYarn, LongRope, Ntk, NtkAlpha, Yarn
from tiers.reference.testing.tiny import save_tiny, tiny_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip


def family(name: str) -> Family:
    (found,) = [family for family in shipped() if family.name == name]
    return found


def translate(name: str = "llama", /, **changes: Any) -> ModelConfig:
    return family(name).translate({**LLAMA, **changes}).model()


def value(text: str, **fields: Any) -> Any:
    return evaluate(text, fields.__getitem__, {"max": max})


# ---- expressions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a // b", 3), ("a / b", 3.5), ("-a + 1", -6), ("a % b", 1), ("a or b", 7), ("none or b", 2), ("a and none", None),
        ("not none", True), ("a if b > 2 else 'x'", "x"), ("1 < b < 3", True), ("1 < b < 2", False), ("b in [1, 2]", True),
        ("{'k': a}", {"k": 7}), ("{'k': a}['k']", 7), ("[a, b][1]", 2), ("max(a, b)", 7), ("none is None", True),
        ("b != 2 or a == 7", True),
    ],
)  # fmt: skip
def test_an_expression_has_a_value(text: str, expected: Any) -> None:
    assert value(text, a=7, b=2, none=None) == expected


def test_what_is_not_needed_is_not_asked_for() -> None:
    assert value("a or missing", a=1) == 1
    assert value("1 if a else missing", a=1) == 1


def test_the_names_of_an_expression() -> None:
    assert names(parse("max(a, b.c.d) if e[0] else 'f'")) == {"a", "b.c.d", "e"}


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "().__class__", "a.__class__", "lambda: 1", "[x for x in a]", "(x := 1)", "a ** 9", "a @ a", "f'{a}'",
        "*a", "a;b", "", "import os", "a[1:2]", "{**a}", "print(a)", "a.b()", "1 << 9",
    ],
)  # fmt: skip
def test_nothing_else_is_part_of_the_language(text: str) -> None:
    with pytest.raises((ConfigError, KeyError)):
        value(text, a=[1])


@pytest.mark.parametrize("text", ["'x' * 9", "a * 2", "t + 1", "n * 2"])
def test_arithmetic_is_for_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number"):
        value(text, a=[1], t=True, n=1 << 70)


def test_division_by_zero_and_deep_nesting_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no value here"):
        value("1 // 0")
    with pytest.raises(ConfigError, match=r"cannot be read|characters; expected at most"):
        value("(" * 500 + "1" + ")" * 500)


# ---- files ----------------------------------------------------------------------------------------------------------


def write(folder: Path, text: str, name: str = "mine") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "not valid TOML"),
        ("wieghts = {}", "unknown key .wieghts.; did you mean 'weights'"),
        ("weights = 5", "weights is 5; expected a dict"),
        ("[[layers]]\nmixer = {}", "an entry of layers has no when"),
        ("[[refuse]]\nwhen = '= a'", "an entry of refuse has no because"),
        ("[config]\nx = '= a +'", "expression ' a .' cannot be read"),
        ("[config]\nx = '= a ** 2'", "Pow is not part of the language"),
        ("extends = 'mine'", "does a family extend itself|cannot be read"),
        ("extends = 'nothing'", "cannot be read"),
    ],
)
def test_a_file_that_means_nothing_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match=message):
        read_family(write(tmp_path, text))


def test_families_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "extends = 'b'", "a")
    with pytest.raises(FamilyError, match="extends goes on for more than"):
        read_family(write(tmp_path, "extends = 'a'", "b"))


def test_a_family_extends_another(tmp_path: Path) -> None:
    """Its own rules come first, the parent's tables stay where it says nothing, the parent's names are not its own."""
    path = write(
        tmp_path,
        "extends = 'llama'\narchitectures = ['Mine']\n[config.mixer]\nposition = {kind = 'alibi'}\n[weights]\n"
        "'model.embed_tokens.weight' = 'embed_norm.weight'\n'extra' = 'x'",
    )
    mine = read_family(path)
    assert (mine.architectures, mine.model_types) == (("Mine",), ())
    assert mine.rules[0].to == ("embed_norm.weight",)
    assert len(mine.rules) == len(family("llama").rules) + 1
    config = mine.translate(LLAMA).model()
    assert config.layers[0].mixer.position.kind == "alibi"
    assert config.layers[0].mixer.num_kv_heads == 2


def test_who_answers_to_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_family({"architectures": ["GPT2LMHeadModel"], "model_type": "llama"}).name == "gpt2"
    assert find_family({"model_type": "bloom"}).name == "bloom"
    assert find_family({"vocab_size": 5}).name == "tiers"
    assert find_family({"text_config": {"model_type": "gemma3_text"}}).name == "gemma3"
    # A user's family comes before a shipped one.
    folder = tmp_path / "families"
    folder.mkdir()
    write(folder, "extends = 'llama'\narchitectures = ['LlamaForCausalLM']")
    monkeypatch.setenv(VARIABLE, str(folder))
    assert find_family(LLAMA).name == "mine"
    assert find_family(LLAMA, "llama").name == "llama"
    assert find_family({}, "mine").name == "mine"
    assert find_family({}, str(folder / "mine.toml")).name == "mine"
    monkeypatch.setenv(VARIABLE, str(folder / "mine.toml"))
    assert [found.name for found in own_families()] == ["mine"]


def test_a_package_brings_its_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point of the group tiers.families: a function that returns a path."""
    write(tmp_path, "extends = 'llama'\nmodel_types = ['packaged']", "packaged")
    (tmp_path / "a_package_with_families.py").write_text(
        f"def where():\n    return {str(tmp_path)!r}\n\ndef broken():\n    raise OSError('gone')\n"
    )
    info = tmp_path / "a_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-package\nVersion: 1.0\n")
    points = info / "entry_points.txt"
    points.write_text("[tiers.families]\nmine = a_package_with_families:where\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    _own_families.cache_clear()
    try:
        assert find_family({"model_type": "packaged"}).name == "packaged"
        points.write_text("[tiers.families]\nmine = a_package_with_families:broken\n")
        _own_families.cache_clear()
        with pytest.raises(
            FamilyError, match="entry point mine = a_package_with_families:broken failed: OSError: gone"
        ):
            find_family(LLAMA)
    finally:
        _own_families.cache_clear()


def test_nothing_in_a_folder_is_executed(tmp_path: Path) -> None:
    """A config that names remote code beside it, as trust_remote_code would run it."""
    save_tiny(tmp_path, tiny_config())
    trap = f"open({str(tmp_path / 'executed')!r}, 'w')\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py", "conftest.py"):
        (tmp_path / name).write_text(trap)
    config = tiny_config() | {
        "auto_map": {"AutoConfig": "configuration_evil.E", "AutoModelForCausalLM": "modeling_evil.E"}
    }
    del config["architectures"]
    llama = {**LLAMA, "auto_map": config["auto_map"]}
    for raw, family_name in ((llama, "llama"), ({**llama, "model_type": "evil", "architectures": ["E"]}, "llama")):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert describe(tmp_path, family_name).config.num_hidden_layers == 2
        with pytest.raises(CheckpointError):
            open_model(tmp_path, family_name)
    assert not (tmp_path / "executed").exists()


def test_who_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"architectures names .LlamaForCasualLM., .*did you mean 'LlamaForCausalLM'"):
        find_family({"architectures": ["LlamaForCasualLM"]})
    with pytest.raises(
        ConfigError, match=r"model_type names .new., which no family answers to.*family file of your own"
    ):
        find_family({"model_type": "new"})
    with pytest.raises(FamilyError, match=r"--family is .lama..*did you mean 'llama'"):
        find_family({}, "lama")
    with pytest.raises(FamilyError, match=r"--family is .5.; expected a family file, or one of bloom"):
        find_family({}, "5")
    with pytest.raises(ConfigError, match="at the top; expected a JSON object"):
        find_family([1])
    monkeypatch.setenv(VARIABLE, "nowhere")
    with pytest.raises(FamilyError, match="TIERS_FAMILIES names nowhere, which is not there"):
        find_family(LLAMA)


# ---- fields ---------------------------------------------------------------------------------------------------------


def test_usual_names_of_fields_are_known() -> None:
    """F3."""
    raw = {
        key: value
        for key, value in LLAMA.items()
        if key not in ("num_attention_heads", "hidden_size", "num_key_value_heads")
    }
    config = family("llama").translate({**raw, "n_heads": 4, "d_model": 64, "attn_config": {"kv_n_heads": 2}}).model()
    assert (config.layers[0].mixer.num_heads, config.hidden_size, config.layers[0].mixer.num_kv_heads) == (4, 64, 2)


def test_a_missing_field_names_what_was_looked_for() -> None:
    raw = {key: value for key, value in LLAMA.items() if key != "num_attention_heads"}
    with pytest.raises(
        ConfigError, match=r"num_attention_heads is missing; looked for .*n_heads.*\[aliases\]"
    ) as caught:
        family("llama").translate({**raw, "num_attention_headz": 4})
    assert "Near to it: num_attention_headz" in str(caught.value)


def test_one_field_with_two_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_size is 64 and n_embd is 32; expected one value"):
        translate(n_embd=32)


def test_the_language_model_of_a_multimodal_config_comes_first() -> None:
    """E2, F3: what stands at the top may be about another part."""
    inner = {**LLAMA, "tie_word_embeddings": True}
    del inner["architectures"]
    raw = {
        "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "hidden_size": 8, "text_config": inner,
        "vision_config": {"hidden_size": 16},
    }  # fmt: skip
    translation = family("llama").translate(raw)
    config = translation.model()
    assert config.tie_word_embeddings
    assert config.hidden_size == 64
    assert not any(path.startswith("vision_config") for path in translation.unused)


def test_what_nothing_reads_is_listed() -> None:
    """E8."""
    scales = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
    assert family("llama").translate({**LLAMA, **scales}).unused == scales
    assert family("llama").translate({**LLAMA, "initializer_range": 0.02, "use_cache": True}).unused == {}


# ---- rotary positions -----------------------------------------------------------------------------------------------


def position(**changes: Any) -> Any:
    raw = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    return family("llama").translate({**raw, **changes})


def test_old_and_new_spellings_give_the_same() -> None:
    """F5, F7."""
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32}
    spellings = [
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **yarn}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", **yarn}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "type": "yarn", **yarn}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **yarn}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **yarn}},
    ]
    found = [position(**spelling) for spelling in spellings]
    assert all(item.model() == found[0].model() and not item.unused for item in found)
    assert found[0].model().layers[0].mixer.position.theta == 1e6


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2}}, "type is \"yarn\" and .*rope_type is \"linear\""),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 10000.0 at the top and 1000000.0"),
        ({"rope_scaling": {"type": "mrope", "factor": 2}}, "rope_type is \"mrope\"; supported are default, linear"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "rope_scaling.short_factor is missing; longrope scaling needs it"),
        (
            {"original_max_position_embeddings": 32, "rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 64}},
            "original_max_position_embeddings is 32 at the top and 64 in rope_scaling",
        ),
        ({"rope_scaling": {"factor": 2}}, "has a factor but no rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing; linear scaling needs it"),
        ({"rope_scaling": 5}, "rope_scaling is 5; expected an object"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "original_max_position_embeddings": 32}},
            "stretches 32 positions by 2, to 64; expected at most that. Was the factor applied twice",
        ),
    ],
)  # fmt: skip
def test_rope_settings_that_contradict_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        position(**changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_type": "ntk", "factor": 4.0}, Ntk(4.0)),
        ({"type": "ntk", "factor": 4.0, "mixed_b": 0.5}, Ntk(4.0, 0.5)),
        ({"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, NtkAlpha(1000.0)),
        (
            {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 0.7,
                "mscale_all_dim": 1.2,
            },
            Yarn(4.0, 32, mscale=0.7, mscale_all_dim=1.2),
        ),
        (
            {"type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7},
            DeepseekYarn(4.0, 32, mscale=0.7),
        ),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_every_scaling_of_vllm_is_read(changes: dict[str, Any], expected: Any) -> None:
    found = position(rope_theta=1e4, rope_scaling=changes)
    assert found.model().layers[0].mixer.position.scaling == expected
    assert not found.unused


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_is_read_in_both_spellings(kind: str) -> None:
    size = position().model().layers[0].mixer.head_dim // 2
    lists = {"short_factor": [1.0] * size, "long_factor": [2.0] * size}
    inner = position(
        rope_theta=1e4, rope_scaling={"type": kind, **lists, "original_max_position_embeddings": 32, "factor": 4.0}
    )
    top = position(rope_theta=1e4, original_max_position_embeddings=32, rope_scaling={"type": kind, **lists})
    expected = LongRope((1.0,) * size, (2.0,) * size, 32)
    assert inner.model().layers[0].mixer.position.scaling == expected
    assert top.model().layers[0].mixer.position.scaling == expected
    assert not inner.unused
    assert not top.unused
    # The context is not stretched: it is written.
    assert top.model().max_position_embeddings == LLAMA["max_position_embeddings"]


def test_a_factor_of_longrope_that_vllm_does_not_use_is_noted() -> None:
    size = position().model().layers[0].mixer.head_dim // 2
    lists = {"short_factor": [1.0] * size, "long_factor": [2.0] * size, "original_max_position_embeddings": 32}
    found = position(rope_theta=1e4, rope_scaling={"type": "longrope", **lists, "factor": 32.0})
    assert any("factor is 32.0, but" in note and "as in vLLM" in note for note in found.notes)
    told = position(rope_theta=1e4, rope_scaling={"type": "longrope", **lists, "attention_factor": 1.19})
    scaling = told.model().layers[0].mixer.position.scaling
    assert (scaling.short_mscale, scaling.long_mscale) == (1.19, 1.19)


def test_llama_3_1_is_longer_than_its_factor_says() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    found = position(rope_theta=5e5, max_position_embeddings=131072, rope_scaling=scaling)
    assert found.model().max_position_embeddings == 131072


def test_an_alpha_beside_a_factor_is_noted() -> None:
    found = position(rope_theta=1e4, rope_scaling={"type": "dynamic", "alpha": 8.0, "factor": 2.0})
    assert any("alpha is used and factor 2.0 is not" in note for note in found.notes)


def test_an_unknown_rope_key_is_listed() -> None:
    """F6."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attn_factor": 0.878}
    assert position(rope_theta=1e4, rope_scaling=scaling).unused == {"rope_scaling.attn_factor": 0.878}


def test_an_assumed_base_is_noted() -> None:
    assert any("rope_theta is not in config.json; 10000 is assumed" in note for note in position().notes)


def test_a_stretched_context_is_noted() -> None:
    found = position(
        rope_theta=1e4, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    )
    assert found.model().max_position_embeddings == 512
    assert any("128 positions stretched by 4 to 512 (yarn)" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("llama", {"hidden_act": "relu"}, 'the activation is "relu"; expected silu'),
        ("llama", {"num_hidden_layers": "2"}, 'num_hidden_layers is "2"; expected an integer from 1 to'),
        ("llama", {"num_hidden_layers": 10**9}, "expected an integer from 1 to"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm is true"),
        ("gpt2", {"scale_attn_weights": False}, "scores are not scaled"),
        ("qwen2", {"layer_types": ["full_attention"]}, "i is 1; expected one of 0 to 0"),
    ],
)
def test_a_model_that_the_family_cannot_do_is_refused(name: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        translate(name, **changes)
    assert f"(read as family {name})" in str(caught.value)


def test_every_shipped_family_parses_and_says_what_it_is() -> None:
    for found in shipped():
        assert found.table.get("description"), found.name
        assert found.model_types, found.name
        json.dumps(found.table)
