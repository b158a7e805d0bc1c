"""R1: ids without a token are not sampled, and log-probabilities are those of the whole head all the same."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiers.reference.load import load_model
from tiers.reference.testing.tiny import random_ids, save_tiny, save_tokenizer, tiny_config
from tiers.vllm_model import sampling
from tiers.vllm_model.testing import worst_error

TOKENS, ROWS = 258, 320


def save(folder: Path, raised: int) -> Path:
    """A model whose likeliest token is always `raised`, with a tokenizer of fewer tokens than the head has rows."""
    from safetensors.torch import load_file, save_file

    save_tiny(folder, tiny_config(tie_word_embeddings=False, lm_head_bias=True))
    save_tokenizer(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.bias"][raised] = 40.0
    save_file(tensors, file)
    return folder


@pytest.mark.engine
def test_ids_without_a_token_are_not_sampled(start_engine: Callable[..., Any], tmp_path: Path) -> None:
    from vllm import SamplingParams

    folder = save(tmp_path / "padded", raised=300)
    engine = start_engine(folder, skip_tokenizer_init=False)
    model = load_model(folder)
    prompts = [random_ids(n, TOKENS, seed=n) for n in (5, 21)]
    for temperature in (0.0, 1.0):
        options = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True, logprobs=0, seed=1)
        outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], options, use_tqdm=False)
        for output in outputs:
            assert max(output.outputs[0].token_ids) < TOKENS
        assert worst_error(outputs, model) <= 1e-4
    # The likeliest of all is what the head says it is.
    assert int(model(torch.tensor(prompts[0]))[-1].argmax()) == 300


@pytest.mark.engine
def test_who_brings_no_tokenizer_samples_every_id(start_engine: Callable[..., Any], tmp_path: Path) -> None:
    from vllm import SamplingParams

    engine = start_engine(save(tmp_path / "padded", raised=300))
    options = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    (output,) = engine.generate([{"prompt_token_ids": random_ids(9, TOKENS, seed=3)}], options, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == [300, 300, 300]


def fake_config(folder: Path, second_runner: bool, drafts: bool = False) -> Any:
    model = SimpleNamespace(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=False, logits_processors=["other:Processor"]
    )
    speculative = SimpleNamespace() if drafts else None
    return SimpleNamespace(model_config=model, use_v2_model_runner=second_runner, speculative_config=speculative)


@pytest.mark.parametrize(("second", "name"), [(False, "TokensOnly"), (True, "TokensOnlyV2")])
def test_each_model_runner_gets_its_own(second: bool, name: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config = fake_config(tmp_path, second)
    for _ in range(2):  # checked in every process
        sampling.mask_ids_without_token(config, ROWS)
    assert config.model_config.logits_processors == ["other:Processor", f"tiers.vllm_model.sampling:{name}"]
    sampling.mask_ids_without_token(full := fake_config(tmp_path, second), TOKENS)
    assert full.model_config.logits_processors == ["other:Processor"]


def test_beside_drafts_only_the_second_runner_can(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    sampling.mask_ids_without_token(first := fake_config(tmp_path, False, drafts=True), ROWS)
    assert first.model_config.logits_processors == ["other:Processor"]
    sampling.mask_ids_without_token(second := fake_config(tmp_path, True, drafts=True), ROWS)
    assert len(second.model_config.logits_processors) == 2


def test_the_second_runner_masks_every_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    monkeypatch.setattr("tiers.vllm_model.serving.model_config_of", lambda _: SimpleNamespace(vocab_size=ROWS))
    masks = sampling.TokensOnlyV2(fake_config(tmp_path, True), SimpleNamespace(device=torch.device("cpu")))
    assert masks.add_request(0, SimpleNamespace())
    logits = masks.apply(torch.zeros(3, ROWS), None)
    assert (logits[:, :TOKENS] == 0).all()
    assert (logits[:, TOKENS:] == float("-inf")).all()
