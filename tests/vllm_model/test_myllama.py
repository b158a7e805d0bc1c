"""docs/myllama.md, followed: a folder from a team's own code, inspected, mapped and served as it is."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from tiers.reference.family import SHIPPED
from tiers.reference.load import load_model
from tiers.reference.testing.compare import LOGPROB_BUDGET, assert_close
from tiers.reference.testing.myllama import CONFIG, save_myllama
from tiers.reference.testing.tiny import random_ids, save_tokenizer
from tiers.vllm_model.testing import answered, serving

PAGE = Path(__file__).parents[2] / "docs" / "myllama.md"


def test_the_page_shows_the_family_as_it_is_shipped() -> None:
    blocks = [block.partition("\n")[2] for block in PAGE.read_text().split("```")[1::2] if block.startswith("toml")]
    shown = tomllib.loads("\n".join(blocks))
    shipped = tomllib.loads((SHIPPED / "myllama.toml").read_text())
    for key, value in shown.items():
        whole = {name: shipped[key][name] for name in value} if isinstance(value, dict) else shipped[key]
        assert value == whole, key
    assert shown["weights"] == shipped["weights"]


def test_the_command_of_the_page_writes_the_folder(tmp_path: Path) -> None:
    (command,) = [line for line in PAGE.read_text().splitlines() if line.startswith("python -c ")]
    code = command.removeprefix('python -c "').removesuffix('"')
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert sorted(path.name for path in (tmp_path / "myllama").iterdir()) == ["config.json", "model.safetensors"]


@torch.inference_mode()
def test_the_reference_equals_their_code(tmp_path: Path) -> None:
    theirs = save_myllama(tmp_path)
    ids = torch.tensor(random_ids(70, CONFIG["vocab_size"], seed=1))
    expected = theirs(ids)
    assert 5 < expected.abs().max() < 60
    assert_close(load_model(tmp_path)(ids), expected, LOGPROB_BUDGET)


def test_another_layout_would_be_another_model(tmp_path: Path) -> None:
    """What the page warns of: all shapes fit and the output is wrong."""
    theirs = save_myllama(tmp_path / "model")
    family = tmp_path / "wrong.toml"
    family.write_text((SHIPPED / "myllama.toml").read_text().replace('"qkv_per_group"', '"qkv"'))
    ids = torch.tensor(random_ids(70, CONFIG["vocab_size"], seed=1))
    difference = (load_model(tmp_path / "model", family=str(family))(ids) - theirs(ids)).abs().max()
    assert difference > 1


@pytest.mark.engine
@torch.inference_mode()
def test_the_server_answers_as_their_code_does(tmp_path: Path) -> None:
    folder = tmp_path / "myllama"
    theirs = save_myllama(folder)
    save_tokenizer(folder)
    prompt = random_ids(60, 256, seed=3)
    with serving(folder, tmp_path / "log", "--tiers", "auto") as server:
        choice = server.complete(prompt=prompt, max_tokens=8, logprobs=0, ignore_eos=True)
        log = server.log.read_text()
    tokens, actual = answered(choice)
    assert len(tokens) == 8
    logprobs = theirs(torch.tensor(prompt + tokens)).log_softmax(-1)
    expected = torch.stack([logprobs[len(prompt) - 1 + i, token] for i, token in enumerate(tokens)])
    assert (actual - expected).abs().max() <= LOGPROB_BUDGET
    assert "dense, alibi, 8 heads / 4 kv" in log
