"""`tiers inspect` and `tiers map` on folders with the faults that users reported: all of them are named, none stops it."""

import json
import math
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tiers.reference.load import open_model
from tiers.reference.testing.foreign import save_foreign
from tiers.reference.testing.tiny import save_tiny, save_tokenizer, tiny_config
from tiers.vllm_model import cli
from tiers.vllm_model.inspect import inspect
from tiers.vllm_model.inspect_result import Inspection
from tiers.vllm_model.inspect_stock import vllm_architectures
from tiers.vllm_model.inspect_text import text

Shapes = Mapping[str, tuple[int, ...]]

WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4}

# A Llama in numbers: hidden size 64, 4 heads of 16 channels, 2 key/value heads.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 128,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "dtype": "bfloat16",
}  # fmt: skip


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama with this config.json."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return {**found, "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def save(
    folder: Path, config: Mapping[str, Any] | None, tensors: Shapes | None = None, shards: int = 1, dtype: str = "BF16"
) -> Path:
    """Write config.json and safetensors files whose data is a hole in the file: any size, no bytes on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    found = dict(shapes(config) if tensors is None and config is not None else tensors or {})
    names, index = list(found), {}
    for shard in range(shards if names else 0):
        header, end = {}, 0
        for name in names[shard * len(names) // shards : (shard + 1) * len(names) // shards]:
            own = "I32" if name.endswith(("qweight", "qzeros")) else dtype
            size = WIDTHS[own] * math.prod(found[name])
            header[name] = {"dtype": own, "shape": list(found[name]), "data_offsets": [end, end + size]}
            end += size
        data = json.dumps(header).encode()
        file = folder / (f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors")
        with file.open("wb") as stream:
            stream.write(struct.pack("<Q", len(data)) + data)
            stream.truncate(8 + len(data) + end)
        index.update(dict.fromkeys(header, file.name))
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def save_ids(folder: Path, ids: Iterable[int], added: Iterable[int] = ()) -> None:
    """A tokenizer.json with these ids."""
    raw = {"model": {"type": "BPE", "vocab": {f"t{i}": i for i in ids}}, "added_tokens": [{"id": i} for i in added]}
    (folder / "tokenizer.json").write_text(json.dumps(raw))


def because(found: Inspection) -> str:
    """All reasons."""
    return "\n".join(reason.text for reason in found.reasons)


def noted(found: Inspection) -> str:
    """All notes."""
    return "\n".join(note.text for note in found.notes)


def row(found: Inspection, field: str) -> dict[str, Any]:
    """A row of the table of config against tensors."""
    return next(row for row in found.sections["geometry"] if row["field"] == field)


def groups(found: Inspection, key: str = "unmapped") -> dict[str, tuple[int, str]]:
    """Module to (tensors, guess)."""
    return {group["module"]: (group["count"], group["guess"]) for group in found.sections["coverage"][key]}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command, run in this process."""
    try:
        cli.main(arguments)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---- sound folders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["granite", "falcon with a new decoder", "gemma3", "gpt2", "mpt of 12 heads", "phi3"])
def test_a_folder_of_transformers_is_servable(name: str, tmp_path: Path) -> None:
    save_foreign(tmp_path, name)
    found = inspect(tmp_path)
    assert (found.code, because(found)) == (0, "")
    assert found.sections["family"]["name"] == name.split()[0]
    assert found.sections["family"]["how"] == "architectures"
    assert found.sections["unused"] == {}
    assert not [row for row in found.sections["geometry"] if row["agrees"] is False]
    assert found.sections["coverage"]["missing"] == {}
    assert all(section is not None for section in found.sections.values())


def test_our_own_format_is_servable(tmp_path: Path) -> None:
    save_tokenizer(save_tiny(tmp_path, tiny_config(), shards=3))
    found = inspect(tmp_path)
    assert (found.code, because(found)) == (0, "")
    assert found.sections["family"]["name"] == "tiers"
    assert found.sections["files"]["indexed"] == len(open_model(tmp_path).checkpoint.infos) == 46
    assert len(found.sections["files"]["files"]) == 3
    assert found.sections["vocabulary"]["tokenizer"] == 258
    assert found.sections["stock"]["native"] is False
    tiers = {(c["layer"], c["operator"]): c["tier"] for c in found.sections["tiers"]["cuda"]["choices"]}
    assert tiers[(3, "gate")] == "fast"
    assert tiers[(0, "attention")] != "fast"  # a head size of 16 is too small for Triton


def test_the_text_names_every_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_foreign(tmp_path, "granite")
    code, out, _ = run(capsys, "inspect", str(tmp_path))
    assert code == 0
    assert out.startswith(f"{tmp_path}: servable\n")
    for heading in (
        "Family", "Config against tensors", "Values of config.json that nothing reads", "Unusual", "Sizes",
        "Without this plugin", "Tensors and parameters", "Files", "Dtypes", "Vocabulary", "Several GPUs", "Tiers under plan auto",
    ):  # fmt: skip
        assert f"\n\n{heading}\n  " in out
    for line in ("embedding_multiplier is 3", "residual_multiplier is 0.7", "logits_multiplier is 0.5"):
        assert f"  {line}\n" in out
    assert max(map(len, out.splitlines())) < 250
    assert not [line for line in out.splitlines() if line != line.rstrip()]


def test_json_is_one_object_with_stable_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", str(save(tmp_path, LLAMA)), "--json")
    found = json.loads(out)
    assert code == found["exit_code"] == 0
    assert list(found) == [
        "format", "folder", "exit_code", "servable", "reasons", "notes", "family", "files", "geometry", "coverage", "unused",
        "unusual", "sizes", "dtypes", "vocabulary", "parallel", "tiers", "stock",
        "experts",
    ]  # fmt: skip
    assert found["servable"] is True
    assert found["sizes"]["cache"] == {
        "dtype": "bfloat16", "bytes_per_token": 384, "bytes_per_token_bf16": 384,
        "layers": [{"layers": "0-2", "bytes_per_token": 128, "bytes_per_token_bf16": 128}],
    }  # fmt: skip
    assert found["sizes"]["parameters"] == sum(map(math.prod, shapes(LLAMA).values()))
    assert {"template": "lm_head.{p}", "to": ["lm_head.{p}"], "hits": 1, "state": "used"} in found["coverage"]["rules"]
    documented = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text()
    for key in (*found, *found["sizes"], *found["coverage"], *found["vocabulary"], *found["family"], *found["files"]):
        assert f"`{key}`" in documented


def test_a_folder_of_70b_takes_little_time_and_memory(tmp_path: Path) -> None:
    large = {
        **LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 28672, "vocab_size": 128256,
    }  # fmt: skip
    save(tmp_path, large, shards=30)
    inspect(save(tmp_path / "warm", LLAMA))  # imports are no part of the measurement
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    found = inspect(tmp_path)
    text(found)
    assert time.monotonic() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB
    assert found.code == 0
    sizes = found.sections["sizes"]
    assert sizes["parameters"] == 70_553_706_496
    assert sizes["weight_bytes"] == 2 * sizes["parameters"]
    assert sizes["cache"]["bytes_per_token"] == 80 * 2 * 8 * 128 * 2
    assert found.sections["parallel"]["tensor_parallel"]["works"] == [1, 2, 4, 8, 16, 32, 64]


def test_the_whole_command_ends_soon(tmp_path: Path) -> None:
    """Importing vLLM alone would take longer; the time allowed leaves room for a busy machine."""
    save(tmp_path, LLAMA)
    code = (
        "import sys\nfrom tiers.vllm_model import cli\n"
        f"try:\n    cli.main(['inspect', {str(tmp_path)!r}, '--json'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('vllm' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert json.loads(done.stdout)["servable"] is True
    assert done.stderr.splitlines()[-1] == "False"


# ---- not a checkpoint -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_what_is_no_checkpoint_exits_with_2(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        code, out, _ = run(capsys, "inspect", str(folder), *flags)
        assert code == 2
        assert ("no such folder" in out) == (folder != tmp_path)
        if flags:
            assert json.loads(out)["geometry"] is None


def test_weights_without_a_config_are_described(tmp_path: Path) -> None:
    found = inspect(save(tmp_path, None, shapes(LLAMA)))
    assert found.code == 1
    assert "config.json: no such file" in because(found)
    assert found.sections["family"]["how"] == "guessed"
    assert found.sections["family"]["name"] == "llama"
    assert row(found, "num_heads * head_dim") == {
        "field": "num_heads * head_dim", "layers": "0-2", "config": None, "tensors": 64, "agrees": None,
    }  # fmt: skip
    assert row(found, "num_hidden_layers")["tensors"] == 3
    assert found.sections["sizes"] is None
    assert "Config against tensors" in text(found)


def test_a_config_without_weights_is_described(tmp_path: Path) -> None:
    found = inspect(save(tmp_path, LLAMA, {}))
    assert found.code == 1
    assert "no *.safetensors file" in because(found)
    assert found.sections["unusual"] == ["grouped attention: 2 query heads for each of 2 key/value heads"]
    assert found.sections["parallel"]["tensor_parallel"]["works"] == [1, 2, 4]
    assert found.sections["geometry"] is None
    assert "not known: see the reasons above" in text(found)


# ---- A: which model -------------------------------------------------------------------------------------------------


def test_a_headless_class_name_is_explained(tmp_path: Path) -> None:
    """A6: a fine-tune tool wrote LlamaModel, and the head is there."""
    found = inspect(save(tmp_path, {**LLAMA, "architectures": ["LlamaModel"]}))
    assert found.code == 0
    assert found.sections["family"]["how"] == "model_type"
    assert found.sections["family"]["headless"] == {
        "architecture": "LlamaModel", "nearest": "LlamaForCausalLM", "heads": ["lm_head.weight"],
    }  # fmt: skip
    assert "names LlamaModel, a class without a head; the nearest known one with a head is LlamaForCausalLM" in noted(
        found
    )
    assert "lm_head.weight is there, so it is a whole language model" in noted(found)


def test_an_unknown_architecture_is_guessed_from_its_tensors(tmp_path: Path) -> None:
    """A6, A7: everything else is still said, read as the family that fits."""
    raw = {**LLAMA, "architectures": ["FooModel"], "model_type": "foo", "auto_map": {"AutoModelForCausalLM": "foo.Foo"}}
    found = inspect(save(tmp_path, {**raw, "scale_emb": 12}))
    assert found.code == 1
    assert "FooModel" in because(found)
    assert "which no family answers to" in because(found)
    assert "30 of 30 tensors fit family llama: try --family llama" in because(found)
    assert found.sections["family"]["name"] == "llama"
    assert found.sections["family"]["how"] == "guessed"
    assert "FooModel, a class without a head; the nearest known one with a head is LlamaForCausalLM" in noted(found)
    assert not [row for row in found.sections["geometry"] if row["agrees"] is False]
    stock = found.sections["stock"]
    assert (stock["native"], stock["transformers"]) == (False, False)
    assert "transformers has no class FooModel" in stock["why"]
    assert any("needs --trust-remote-code; tiers never passes it" in why for why in stock["why"])
    assert any("auto_map has no AutoModel" in why for why in stock["why"])
    asked = inspect(tmp_path, "llama")
    assert asked.code == 0
    assert asked.sections["family"]["how"] == "asked"
    assert asked.sections["unused"] == {"scale_emb": 12}


def test_a_config_that_names_nothing_is_guessed(tmp_path: Path) -> None:
    raw = {key: value for key, value in LLAMA.items() if key not in ("architectures", "model_type")}
    found = inspect(save(tmp_path, raw))
    assert "neither architectures nor model_type names a model" in because(found)
    assert "try --family llama" in because(found)
    assert inspect(tmp_path, "llama").code == 0


def test_what_stock_vllm_takes_is_told(tmp_path: Path) -> None:
    """A7: a class of vLLM's own; one of transformers only; neither."""
    assert inspect(save(tmp_path / "a", LLAMA)).sections["stock"]["native"] is True
    for name, takes in (("HeliumForCausalLM", True), ("MptForCausalLM", False), ("NoSuchForCausalLM", False)):
        stock = inspect(save(tmp_path / name, {**LLAMA, "architectures": [name]}), "llama").sections["stock"]
        assert (stock["native"], stock["transformers"]) == (False, takes)
    embedding = inspect(save(tmp_path / "b", {**LLAMA, "architectures": ["LlamaModel"]})).sections["stock"]
    assert embedding["why"] == ["vLLM has a class by this name, which makes embeddings, not text"]


# ---- F, E8: the config ----------------------------------------------------------------------------------------------


def test_a_head_size_that_is_left_out_gives_both_numbers(tmp_path: Path) -> None:
    """F1: hidden 3072, 16 heads of 256; a config without head_dim means heads of 192."""
    raw = {**LLAMA, "hidden_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256}
    assert inspect(save(tmp_path, raw)).code == 0
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != "head_dim"}))
    found = inspect(tmp_path)
    assert found.code == 1
    assert row(found, "head_dim") == {
        "field": "head_dim",
        "layers": "0-2",
        "config": 192,
        "tensors": 256,
        "agrees": False,
    }
    assert because(found) == (
        "head_dim is 192 by config.json and 256 by the tensors (layers 0-2); expected one value. Set it to 256, or export the "
        "weights that the config describes"
    )
    assert "<- differs" in text(found)


def test_heads_wider_or_narrower_than_hidden_are_accepted(tmp_path: Path) -> None:
    """F2: hidden 1792, 24 heads of 128; and with a wrong head_dim both numbers."""
    raw = {**LLAMA, "hidden_size": 1792, "num_attention_heads": 24, "num_key_value_heads": 24, "head_dim": 128}
    found = inspect(save(tmp_path, raw))
    assert found.code == 0
    assert "24 heads of 128 channels are 3072, hidden_size is 1792" in found.sections["unusual"]
    (tmp_path / "config.json").write_text(json.dumps({**raw, "head_dim": 64}))
    assert "head_dim is 64 by config.json and 128 by the tensors" in because(inspect(tmp_path))


def test_a_fused_matrix_of_another_head_size_gives_both_numbers(tmp_path: Path) -> None:
    """F1, C5: q, k and v in one matrix, which cannot be divided by the config's sizes."""
    save_foreign(tmp_path, "phi3")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "head_dim": 24}))
    found = inspect(tmp_path)
    assert found.code == 1
    assert (row(found, "head_dim")["config"], row(found, "head_dim")["tensors"]) == (24, 16)
    assert row(found, "rows of q, k and v")["tensors"] == 128
    assert because(found).count("\n") == 0


def test_every_size_is_checked(tmp_path: Path) -> None:
    """F1: one wrong number at a time, each with both values; all at once, and all are named."""
    save(tmp_path, LLAMA)
    wrong = {
        "hidden_size": (96, "hidden_size", 64), "num_hidden_layers": (4, "num_hidden_layers", 3),
        "intermediate_size": (100, "intermediate_size", 96), "vocab_size": (200, "vocab_size (embedding rows)", 128),
        "num_key_value_heads": (1, "num_kv_heads * head_dim", 32),
    }  # fmt: skip
    for key, (value, field, actual) in wrong.items():
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, key: value}))
        found = inspect(tmp_path)
        assert found.code == 1
        assert row(found, field)["tensors"] == actual
        assert row(found, field)["agrees"] is False
        assert field in because(found)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **{key: value[0] for key, value in wrong.items()}}))
    everything = because(inspect(tmp_path))
    assert all(field in everything for _, field, _ in wrong.values())


def test_what_nothing_reads_is_listed_and_strict_refuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """E8 and F6: muP constants, and a key of rope_scaling that its library calls attention_factor."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "attn_factor": 0.878}
    save(tmp_path, {**LLAMA, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "rope_scaling": scaling})
    code, out, _ = run(capsys, "inspect", str(tmp_path), "--json")
    found = json.loads(out)
    assert code == 0
    assert found["unused"] == {
        "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "rope_scaling.attn_factor": 0.878,
    }  # fmt: skip
    assert any("rope is stretched: yarn, factor 4" in line for line in found["unusual"])
    code, out, _ = run(capsys, "inspect", str(tmp_path), "--strict")
    assert code == 1
    assert "1. config.json: nothing reads scale_emb = 12" in out
    assert "rope_scaling.attn_factor = 0.878" in out


def test_a_quantised_folder_is_still_described(tmp_path: Path) -> None:
    """F4, B4: refused, and config, tensors and scales are told all the same."""
    tensors = shapes(LLAMA)
    for i in range(3):
        del tensors[f"model.layers.{i}.mlp.up_proj.weight"]
        tensors |= {f"model.layers.{i}.mlp.up_proj.{name}": (8, 96) for name in ("qweight", "qzeros", "scales")}
    found = inspect(save(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "awq"}}, tensors))
    assert found.code == 1
    assert "quantised checkpoints are not supported yet" in because(found)
    assert groups(found)["model.layers.*"] == (
        9, "quantised weights (scales, zero points): not supported yet, export in 16 or 32 bits",
    )  # fmt: skip
    assert sorted(found.sections["coverage"]["missing"]) == [f"layers.{i}.ffn.up_proj.weight" for i in range(3)]
    assert found.sections["unusual"] == ["grouped attention: 2 query heads for each of 2 key/value heads"]
    assert found.sections["dtypes"]["tensors"][1]["dtype"] == "int32"


# ---- B: names -------------------------------------------------------------------------------------------------------

STRAY = {
    "lora": ({"model.layers.0.self_attn.q_proj.lora_A.weight": (8, 64)}, "unmerged adapter", "an unmerged LoRA adapter"),
    "projector": ({"multi_modal_projector.linear_1.weight": (64, 32)}, "no rule of family llama", "a projector"),
    "audio": ({"mm_whisper_embeddings.conv1.weight": (64, 32)}, "no rule of family llama", "an audio tower"),
    "vision": ({"vision_tower.layers.0.mlp.weight": (64, 32)}, "no rule of family llama", "a vision tower"),
    "mtp": ({"mtp.layers.0.eh_proj.weight": (64, 128)}, "no rule of family llama", "an MTP or EAGLE head"),
    "optimizer": ({"exp_avg.0": (64,)}, "no rule of family llama", "optimiser state"),
    "rotary": ({"model.layers.0.attn.rotary.cos_cached": (64,)}, "no rule of family llama", "rotary buffers"),
}  # fmt: skip


@pytest.mark.parametrize("case", STRAY)
def test_tensors_without_a_place_are_grouped_and_guessed(case: str, tmp_path: Path) -> None:
    """B3, B4: what they are, how many, in which module."""
    extra, reason, guess = STRAY[case]
    found = inspect(save(tmp_path, LLAMA, {**shapes(LLAMA), **extra}))
    assert found.code == 1
    assert reason in because(found)
    (group,) = found.sections["coverage"]["unmapped"]
    assert (group["count"], group["example"]) == (1, next(iter(extra)))
    assert group["bytes"] == 2 * math.prod(next(iter(extra.values())))
    assert group["guess"].startswith(guess)
    assert not [row for row in found.sections["geometry"] if row["agrees"] is False], "the rest is still checked"


def test_tensors_of_zero3_are_named(tmp_path: Path) -> None:
    """B9: a weight of shape [0], beside normal ones."""
    found = inspect(save(tmp_path, LLAMA, {**shapes(LLAMA), "model.layers.1.self_attn.k_proj.weight": (0,)}))
    assert found.code == 1
    assert found.sections["files"]["empty"] == ["model.layers.1.self_attn.k_proj.weight"]
    assert "1 of 30 tensors have no elements" in because(found)
    assert "ZeRO-3" in because(found)


def test_flat_parameters_of_fsdp_are_named(tmp_path: Path) -> None:
    """B10: one key only, and nothing can be mapped."""
    found = inspect(save(tmp_path, LLAMA, {"_fsdp_wrapped_module._flat_param": (5000,)}))
    assert found.code == 1
    assert "flat parameter of FSDP" in because(found)
    assert groups(found) == {"_flat_param": (1, "flat parameters of FSDP: save the model with a full state dict")}


def test_another_root_is_found_and_told(tmp_path: Path) -> None:
    """B1: `backbone.` where the rules have `model.`."""
    tensors = {name.replace("model.", "backbone."): shape for name, shape in shapes(LLAMA).items()}
    found = inspect(save(tmp_path, LLAMA, tensors))
    assert found.code == 0
    assert noted(found).count("names that begin with 'backbone.' are read as if they began with 'model.'") == 1


def test_a_parameter_that_is_not_filled_is_named_with_what_fits(tmp_path: Path) -> None:
    """B13: a writer emitted `embedding` for `embed_tokens`; E1: a head is called for and not there."""
    tensors = shapes(LLAMA)
    tensors["model.embedding.weight"] = tensors.pop("model.embed_tokens.weight")
    del tensors["lm_head.weight"]
    found = inspect(save(tmp_path, LLAMA, tensors))
    assert found.code == 1
    missing = found.sections["coverage"]["missing"]
    assert missing["embed_tokens.weight"] == "model.embedding.weight"
    assert "2 of 30 parameters get no tensor" in because(found)
    assert "embed_tokens.weight (model.embedding.weight has its shape)" in because(found)
    assert "tie_word_embeddings is false in config.json: set it to true if the head is the embedding" in because(found)


def test_dead_and_shadowed_rules_are_told(tmp_path: Path) -> None:
    """B6: a rule that another one before it leaves nothing for."""
    family = tmp_path / "mine.toml"
    lines = [
        'extends = "llama"',
        "[weights]",
        '"model.layers.{i}.mlp.{m:gate_proj|up_proj|down_proj}.weight" = "layers.{i}.ffn.{m}.weight"',
    ]
    family.write_text("\n".join(lines))
    found = inspect(save(tmp_path / "m", LLAMA), str(family))
    assert found.code == 0
    states = {rule["template"]: (rule["hits"], rule["state"]) for rule in found.sections["coverage"]["rules"]}
    first, second = (f"model.layers.{{i}}.mlp.{{m:gate_proj|up_proj|down_proj}}.{end}" for end in ("weight", "{p}"))
    assert states[first] == (9, "used")
    assert states[second] == (0, f"shadowed by {first}")
    assert states["model.rotary_emb.inv_freq"] == (0, "dead")
    own = next(share for share in found.sections["family"]["shares"] if share["family"] == "mine")
    assert own["taken"] == own["total"] == 30


def test_names_of_anybody_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, {**LLAMA, "\ud800\x1b[2J": math.nan}, {**shapes(LLAMA), "\x1b[31mred.weight": (3,)})
    code, out, _ = run(capsys, "inspect", str(tmp_path))
    assert code == 1
    assert "?[31mred" in out
    assert "\x1b" not in out
    _, out, _ = run(capsys, "inspect", str(tmp_path), "--json")
    assert json.loads(out, parse_constant=pytest.fail)["unused"] == {"\ud800\x1b[2J": "nan"}


def test_layers_beyond_the_last_are_told(tmp_path: Path) -> None:
    found = inspect(save(tmp_path, {**LLAMA, "num_hidden_layers": 2}, shapes(LLAMA)))
    assert found.code == 1
    assert groups(found, "surplus") == {
        "model.layers.*": (9, "beyond the 2 layers of config.json: num_hidden_layers is too small, or it is an MTP layer for speculative decoding"),
    }  # fmt: skip


# ---- D: files -------------------------------------------------------------------------------------------------------


def test_every_missing_and_damaged_shard_is_named(tmp_path: Path) -> None:
    """D1, D3: two files gone, two cut short; all four are named, and the rest is described."""
    save(tmp_path, LLAMA, shards=6)
    for gone in (2, 3):
        (tmp_path / f"model-{gone:05d}-of-00006.safetensors").unlink()
    for short in (4, 5):
        file = tmp_path / f"model-{short:05d}-of-00006.safetensors"
        with file.open("rb+") as stream:
            stream.truncate(file.stat().st_size - 100)
    found = inspect(tmp_path)
    assert found.code == 1
    files = found.sections["files"]
    assert files["missing"] == ["model-00002-of-00006.safetensors", "model-00003-of-00006.safetensors"]
    assert [file["name"][:11] for file in files["files"] if file["error"]] == ["model-00004", "model-00005"]
    assert len(files["lost"]) == 20
    assert because(found).count("cut short") == 2
    assert "2 files that the index names are not there" in because(found)
    assert len(found.reasons) == 3, "that their tensors are missing too is no news"
    assert found.sections["family"]["name"] == "llama"
    assert row(found, "hidden_size")["agrees"] is True
    assert "  not there: model-00002-of-00006.safetensors" in text(found)


def test_an_index_that_promises_too_much_is_told(tmp_path: Path) -> None:
    """D2: it lists a tensor that no shard contains."""
    save(tmp_path, LLAMA, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = {**json.loads(path.read_text())["weight_map"], "model.layers.0.scale": "model-00001-of-00002.safetensors"}
    path.write_text(json.dumps({"weight_map": index}))
    found = inspect(tmp_path)
    assert found.code == 1
    assert found.sections["files"]["lost"] == ["model.layers.0.scale"]
    assert "says model-00001-of-00002.safetensors holds model.layers.0.scale" in because(found)
    assert found.sections["coverage"]["missing"] == {}


def test_a_stale_index_is_told(tmp_path: Path) -> None:
    """D4: the index names other shards, and the files that are there hold everything."""
    save(tmp_path, LLAMA, shards=3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    save(tmp_path, LLAMA, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for file in tmp_path.glob("*-of-00003.safetensors"):
        file.unlink()
    found = inspect(tmp_path)
    assert found.code == 0
    assert "model.safetensors.index.json is stale" in noted(found)


# ---- K1: dtypes -----------------------------------------------------------------------------------------------------


def test_a_float32_checkpoint_says_what_auto_does(tmp_path: Path) -> None:
    """K1: served in 16 bits without being asked; and a config that says another type than the tensors."""
    found = inspect(save(tmp_path, {**LLAMA, "dtype": "float32"}, dtype="F32"))
    assert found.sections["dtypes"] == {
        "config": "float32",
        "tensors": [{"dtype": "float32", "tensors": 30, "bytes": 4 * sum(map(math.prod, shapes(LLAMA).values())), "width": 4}],
    }  # fmt: skip
    assert "with --dtype auto vLLM serves them in bfloat16" in noted(found)
    assert (
        found.sections["sizes"]["cache"]["bytes_per_token"]
        == 2 * found.sections["sizes"]["cache"]["bytes_per_token_bf16"]
    )
    found = inspect(save(tmp_path, {**LLAMA, "dtype": "float16"}))
    assert "dtype is float16 in config.json, the tensors are bfloat16" in noted(found)


# ---- R: vocabulary --------------------------------------------------------------------------------------------------


def test_the_three_numbers_of_the_vocabulary(tmp_path: Path) -> None:
    """R1: 128 rows, vocab_size 104, 100 tokens: served, with notes."""
    save(tmp_path, {**LLAMA, "vocab_size": 104}, shapes(LLAMA))
    save_ids(tmp_path, range(96), added=range(96, 100))
    found = inspect(tmp_path)
    assert found.code == 0
    assert found.sections["vocabulary"] == {
        "embedding_rows": 128, "head_rows": 128, "vocab_size": 104, "tokenizer": 100, "tokens": 100,
    }  # fmt: skip
    assert "the head has 128 rows, vocab_size is 104; the last 24 rows are not used" in noted(found)
    assert "ids 100 to 103 have no token in tokenizer.json, but a row of the head: they are not sampled" in noted(found)
    assert row(found, "vocab_size (head rows)")["agrees"] is True


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """R3: tokens were added, the embedding has rows for them, vocab_size was not updated."""
    save(tmp_path, {**LLAMA, "vocab_size": 125}, shapes(LLAMA))
    save_ids(tmp_path, range(125), added=range(125, 128))
    found = inspect(tmp_path)
    assert found.code == 1
    assert because(found) == (
        "tokenizer.json has ids up to 127, but vocab_size in config.json is 125; expected ids below it, since a larger one has "
        "no row of the embedding. The tensors have rows for them: set vocab_size to 128"
    )


def test_a_damaged_tokenizer_is_a_reason(tmp_path: Path) -> None:
    save(tmp_path, LLAMA)
    (tmp_path / "tokenizer.json").write_text("[]")
    found = inspect(tmp_path)
    assert found.code == 1
    assert "tokenizer.json: not a tokenizer" in because(found)
    assert found.sections["vocabulary"]["head_rows"] == 128


# ---- H: several GPUs ------------------------------------------------------------------------------------------------


def test_how_tensors_are_cut_is_told_for_each_size(tmp_path: Path) -> None:
    """H1: 40 query heads, 10 key/value heads."""
    raw = {
        **LLAMA, "num_attention_heads": 40, "num_key_value_heads": 10, "intermediate_size": 1280, "vocab_size": 6400,
    }  # fmt: skip
    found = inspect(save(tmp_path, raw)).sections["parallel"]["tensor_parallel"]
    assert found["works"] == [1, 2, 5, 10, 20, 40]
    assert found["refused"] == {"4": "10 key/value heads (layers 0-2)", "8": "10 key/value heads (layers 0-2)"}
    cuts = {cut["tensors"]: cut["by_size"] for cut in found["cuts"]}
    assert cuts["q_proj, o_proj"] == {
        "1": "whole", "2": "shard: 20 query heads", "4": "shard: 10 query heads", "8": "shard: 5 query heads",
    }  # fmt: skip
    assert cuts["k_proj, v_proj"]["2"] == "shard: 5 key/value heads"
    assert cuts["k_proj, v_proj"]["4"] == "refuse: 10 key/value heads"
    assert cuts["norms, biases of o and down"]["8"] == "replicate"


def test_architectures_of_vllm_are_known_without_importing_it() -> None:
    from vllm.model_executor.models import ModelRegistry

    registered = {
        a for a, model in ModelRegistry.models.items() if not getattr(model, "module_name", "").startswith("tiers.")
    }
    assert vllm_architectures() == registered


# ---- without vLLM ---------------------------------------------------------------------------------------------------


def test_without_vllm_all_but_its_architectures_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    vllm_architectures.cache_clear()
    try:
        found = inspect(save(tmp_path, LLAMA))
    finally:
        vllm_architectures.cache_clear()
    assert found.code == 0
    assert (found.sections["stock"]["native"], found.sections["stock"]["transformers"]) == (None, None)
    assert "vLLM is not installed here" in noted(found)
    assert found.sections["parallel"]["tensor_parallel"]["works"] == [1, 2, 4]


# ---- tiers map ------------------------------------------------------------------------------------------------------


def test_map_explains_every_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B12: source key, rule, target, slice, shape, dtype."""
    save_foreign(tmp_path, "gpt2")
    code, out, _ = run(capsys, "map", str(tmp_path), "--explain")
    assert code == 0
    rows = [line.split("  ") for line in out.splitlines()[1:]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[0] == ["tensor", "rule", "parameter", "which part", "shape", "dtype"]
    rule = "transformer.h.{i}.attn.c_attn.{p}"
    for letter, columns in (("q", "0-63"), ("k", "64-127"), ("v", "128-191")):
        assert [
            "transformer.h.1.attn.c_attn.weight", rule, f"layers.1.mixer.{letter}_proj.weight",
            f"columns {columns} (qkv), transposed", "[64, 64]", "float32",
        ] in cells  # fmt: skip
    assert len(cells) == 1 + len(open_model(tmp_path).map.entries) + 2 * 3 * 2  # q, k, v: weight and bias, 3 layers


def test_map_explains_a_key_in_detail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B12: by the name of a tensor, by ours, and by a part of one."""
    save_foreign(tmp_path, "falcon with a new decoder")
    name = "transformer.h.2.self_attention.query_key_value.weight"
    for key in (name, "layers.2.mixer.k_proj.weight", "h.2.self_attention.query"):
        code, out, _ = run(capsys, "map", str(tmp_path), "--explain", key)
        assert code == 0
        assert [line for line in out.splitlines()[1:] if line and not line.startswith(" ")] == [name]
        assert "parameter  layers.2.mixer.k_proj.weight: rows 32-47, 96-111 (qkv_per_group), [32, 64]" in out
    code, _, errors = run(capsys, "map", str(tmp_path), "--explain", "query_key_valeu")
    assert code == 1
    assert "no tensor and no parameter has 'query_key_valeu' in its name" in errors


def test_map_shows_why_a_tensor_is_dropped_or_has_no_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = {"model.rotary_emb.inv_freq": (8,), "mm_projector.0.weight": (64, 64)}
    save(tmp_path, LLAMA, {**shapes(LLAMA), **extra})
    code, out, errors = run(capsys, "map", str(tmp_path), "--explain", "inv_freq")
    assert code == 1
    assert "dropped  computed from the config" in out
    assert "mm_projector" in errors
    code, out, _ = run(capsys, "map", str(tmp_path), "--explain", "mm_projector")
    assert "a projector" in out
    code, out, _ = run(capsys, "map", str(tmp_path))
    assert code == 1
    assert "no rule: a projector" in out
    assert "model.norm.{p}" in out


def test_map_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = run(capsys, "map", str(tmp_path))
    assert code == 1
    assert "nothing to map" in errors
