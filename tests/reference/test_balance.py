"""How evenly a model spreads tokens over its experts, from prompts of a file."""

import json
from pathlib import Path

import pytest
import torch

from tiers.reference.analysis.balance import folder_balance, load_balance, read_prompts
from tiers.reference.analysis.sizes import sizes
from tiers.reference.config import ModelConfig
from tiers.reference.errors import ServingError
from tiers.reference.testing.tiny import moe_config, random_ids, save_tiny, save_tokenizer, tiny_config, tiny_model


def test_every_choice_of_every_layer_is_counted() -> None:
    prompts = [random_ids(length, 320, seed=length) for length in (1, 20, 33)]
    found = load_balance(tiny_model(moe_config()), prompts)
    assert [row.layer for row in found] == [1, 2, 3]
    assert [row.tokens for row in found] == [54] * 3
    assert [sum(row.counts) for row in found] == [2 * 54, 3 * 54, 2 * 54]
    assert all(len(row.counts) == 8 and 1 <= row.loss < 8 for row in found)


def test_a_router_that_knows_one_answer_has_the_worst_loss() -> None:
    """All weights of its rows zero but one that follows the first channel, which the norm is made to keep at 8."""
    model = tiny_model(moe_config(num_hidden_layers=1, layers={}))
    (layer,) = model.layers
    layer.ffn.router.weight.data.zero_()
    even = load_balance(model, [random_ids(50, 320, seed=0)])[0]
    assert even.loss == pytest.approx(1)
    # Every token's hidden state is the same vector, whatever it attends to.
    layer.mixer.o_proj.weight.data.zero_()
    model.embed_tokens.weight.data[:] = torch.randn(64, generator=torch.Generator().manual_seed(0))
    x = layer.ffn_norm(model.embed_tokens.weight[:1])[0]
    layer.ffn.router.weight.data[5] = 100 * x / x.square().sum()
    layer.ffn.router.weight.data[6] = 99 * x / x.square().sum()
    worst = load_balance(model, [random_ids(50, 320, seed=0)])[0]
    assert worst.counts == (0, 0, 0, 0, 0, 50, 50, 0)
    # Half of the choices and nearly three quarters of the probability on expert 5: 8 (1/2 p + 1/2 (1 - p)) = 4.
    assert worst.loss == pytest.approx(4, abs=1e-3)


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m", moe_config())
    save_tokenizer(folder)
    file = tmp_path / "prompts.txt"
    file.write_text("Once upon a time\n\n[1, 2, 3]\n")
    assert read_prompts(file, folder, 320)[1] == [1, 2, 3]
    found = folder_balance(folder, file)
    assert [row.tokens for row in found] == [16 + 3] * 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no prompt"),
        ("[1, 2]\n[400]\n", "prompt 2 is no tokens, or has ids beyond"),
        ("text", "no tokenizer.json"),
    ],
)
def test_prompts_that_are_none_are_refused(content: str, words: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m", moe_config())
    (tmp_path / "p").write_text(content)
    with pytest.raises(ServingError, match=words):
        folder_balance(folder, tmp_path / "p")
    with pytest.raises(ServingError, match="cannot be read"):
        folder_balance(folder, tmp_path / "other")


def test_a_model_without_experts_has_nothing_to_count(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m", tiny_config())
    (tmp_path / "p").write_text(json.dumps([1, 2]))
    with pytest.raises(ServingError, match=r"no layer of .* has experts"):
        folder_balance(folder, tmp_path / "p")


def test_parameters_that_a_token_uses() -> None:
    config = moe_config()
    found = sizes(ModelConfig.from_dict(config))
    one = 3 * 64 * 64  # gate, up and down of an expert
    assert {row.layers: (row.experts, row.parameters - row.active) for row in found.layers} == {
        "0": (0, 0), "1": (8 * one, 6 * one), "2": (8 * one, 5 * one), "3": (8 * one, 6 * one),
    }  # fmt: skip
    assert found.parameters - found.active == (6 + 5 + 6) * one
