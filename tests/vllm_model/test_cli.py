"""What the command line refuses, and how it says so: one paragraph, an exit code, no traceback, before serving."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tiers.reference.testing.tiny import save_model, save_tiny, save_tokenizer, tiny_config, tiny_model
from tiers.vllm_model import cli


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command, run in this process."""
    try:
        cli.main(arguments)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensor(folder: Path, name: str, value: torch.Tensor | None) -> None:
    tensors = tiny_model(tiny_config()).state_dict()
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    save_model(folder, tiny_config(), tensors)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "a model.v1 (copy)", tiny_config())


BAD_CONFIGS = {
    "unknown-key": ({"hiden_size": 64}, ["hiden_size", "did you mean 'hidden_size'"]),
    "heads-do-not-fit": ({"mixer": {"num_heads": 5, "num_kv_heads": 2, "head_dim": 16}}, ["num_heads is 5", "num_kv_heads is 2"]),
    "k-below-1": (
        {"mixer": {**tiny_config()["mixer"], "pattern": {"kind": "topk", "k": 0}}},
        ["mixer.pattern", "k is 0", "1 or more"],
    ),
    "head-map-index": ({"mixer": {**tiny_config()["mixer"], "head_map": [0, 1, 2, 0]}}, ["head_map[2] is 2", "0 to num_kv_heads - 1"]),
    "head-map-length": ({"mixer": {**tiny_config()["mixer"], "head_map": [0, 1, 0]}}, ["head_map has 3 entries", "num_heads = 4"]),
    "fewer-rows-than-vocabulary": ({"vocab_size": 400}, ["embed_tokens.weight", "320 rows", "vocab_size in config.json is 400"]),
    "another-model-type": ({"model_type": "llama"}, ["model_type", "llama", "tiers"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_bad_config_is_refused(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, expected = BAD_CONFIGS[case]
    edit_config(folder, **changes)
    code, _, errors = run(capsys, "serve", str(folder))
    assert code == 1
    assert errors.startswith("tiers: error: ")
    assert errors.count("\n") == 1
    for text in expected:
        assert text in errors


BAD_TENSORS = {
    "missing": (None, ["no tensor layers.2.ffn.up_proj.weight"]),
    "misshapen": (torch.ones(96, 65), ["layers.2.ffn.up_proj.weight", "[96, 65]", "[96, 64]"]),
    "no-elements": (torch.ones(0), ["layers.2.ffn.up_proj.weight", "[0]", "ZeRO-3"]),
    "nan": (torch.full((96, 64), float("nan")), ["layers.2.ffn.up_proj.weight", "6144 of 6144 values", "nan at [0, 0]"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_bad_tensor_is_refused(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value, expected = BAD_TENSORS[case]
    edit_tensor(folder, "layers.2.ffn.up_proj.weight", value)
    code, _, errors = run(capsys, "serve", str(folder))
    assert code == 1
    for text in expected:
        assert text in errors


def test_an_extra_tensor_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_tensor(folder, "layers.2.ffn.extra.weight", torch.ones(3))
    code, _, errors = run(capsys, "serve", str(folder))
    assert code == 1
    assert "unexpected tensor layers.2.ffn.extra.weight" in errors


def test_a_file_cut_short_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    code, _, errors = run(capsys, "serve", str(folder))
    assert code == 1
    assert "model.safetensors" in errors
    assert "cut short" in errors


def test_a_missing_shard_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny(tmp_path / "m", tiny_config(), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    code, _, errors = run(capsys, "serve", str(folder))
    assert code == 1
    assert "model-00002-of-00003.safetensors" in errors


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("fsat", "unknown tier 'fsat' (did you mean 'fast'?)"),
        ("0.gtae=reference", "unknown operator 'gtae' (did you mean 'gate'?)"),
        ("7=reference", "goes beyond the last layer; the model has layers 0 to 3"),
        ("0.gate=reference", "layer 0 has no operator 'gate'"),
        ("auto,,", "unknown tier ''"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "plan"])
def test_a_bad_plan_is_refused(
    command: str, plan: str, expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = run(capsys, command, str(folder), "--tiers", plan)
    assert code == 1
    assert expected in errors


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--tensor-parallel-size", "3"], ["--tensor-parallel-size is 3", "the model has 4 query heads (layers 0-2)", "Sizes that work: 1, 2"]),
        (["-tp", "4"], ["--tensor-parallel-size is 4", "2 groups of query heads that choose keys together (layer 3)"]),
        (["-pp", "5"], ["--pipeline-parallel-size is 5", "4 layers"]),
        (["-pp", "2", "--enforce-eager"], ["--pipeline-parallel-size is 2 and --enforce-eager", "CPU"]),
        (["--kv-cache-dtype", "fp8"], ["--kv-cache-dtype is fp8", "not supported yet"]),
        (["--decode-context-parallel-size", "2", "-tp", "2"], ["--decode-context-parallel-size is 2", "expected 1"]),
        (["--max-model-len", "9999"], ["--max-model-len is 9999", "512"]),
        (["--enable-lora"], ["--enable-lora", "head_map"]),
        (["--enable-prompt-embeds"], ["--enable-prompt-embeds", "layer 2"]),
    ],
    ids=lambda value: value[0].strip("-") if isinstance(value, list) else None,
)  # fmt: skip
def test_a_flag_that_the_model_cannot_follow_is_refused(
    flags: list[str], expected: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = run(capsys, "serve", str(folder), *flags)
    assert code == 1
    for text in expected:
        assert text in errors


def test_vllm_plugins_without_ours_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    code, _, errors = run(capsys, "serve", str(folder))
    assert code == 1
    assert "VLLM_PLUGINS" in errors


def test_plan_prints_a_line_per_range_of_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors").unlink()  # weights are not needed
    code, out, _ = run(capsys, "plan", str(folder), "--tiers", "auto,*.gate=reference")
    assert code == 0
    lines = out.splitlines()
    assert lines[1].split() == ["layers", "operator", "what", "tier", "why", "not", "faster"]
    assert [line.split()[:2] for line in lines[2:]] == [
        ["0", "attention"], ["1", "attention"], ["2", "attention"], ["3", "attention"], ["2", "gate"], ["3", "gate"],
    ]  # fmt: skip


def test_generate_streams_what_the_reference_model_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tokenizer(folder)
    code, out, _ = run(capsys, "generate", str(folder), "--prompt", "hello", "--max-tokens", "12")
    again = run(capsys, "generate", str(folder), "--prompt", "hello", "--max-tokens", "12", "--chat")
    assert code == 0
    assert out.strip()
    assert again[1] == out  # the template of this folder adds nothing


def test_generate_without_a_tokenizer_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = run(capsys, "generate", str(folder), "--prompt", "hello")
    assert code == 1
    assert "no tokenizer.json" in errors


@pytest.mark.parametrize("flags", [["--max-tokens", "0"], ["--temperature", "-1"], ["--nonsense"]])
def test_wrong_usage_exits_with_2(flags: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = run(capsys, "generate", str(folder), "--prompt", "x", *flags)
    assert code == 2
    assert flags[0] in errors


def test_a_process_ends_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tiers.vllm_model.cli", "serve", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no such folder" in done.stderr
    assert "Traceback" not in done.stderr
    debug = subprocess.run([*command, "--debug"], capture_output=True, text=True, check=False)
    assert "Traceback" in debug.stderr


@pytest.mark.parametrize(
    "command", ["serve", "inspect", "map", "convert", "plan", "generate", "check", "doctor", "profile", "bench", "demo"]
)
def test_help_of_every_command_names_its_arguments(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"usage: tiers {command}" in out
