"""The demo's model: a real one, changed as an in-house model would be, and still the same function."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiers.reference.config import TopK
from tiers.reference.errors import TiersError
from tiers.reference.load import load_model
from tiers.reference.testing.compare import LOGPROB_BUDGET
from tiers.reference.text import load_tokenizer
from tiers.vllm_model import demo, demo_model
from tiers.vllm_model.testing import run, worst_error

pytestmark = pytest.mark.engine

# Longer than k, sink and window of the demo together.
TOKENS = 300


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The in-house checkpoint and the unmodified model."""
    root = tmp_path_factory.mktemp("demo")
    demo_model.build(root / "demo-model", root / "base", lambda message: None)
    return root / "demo-model", root / "base"


@pytest.fixture(scope="module")
def ids(folders: tuple[Path, Path]) -> list[int]:
    return load_tokenizer(folders[0]).encode(demo_model.real_text())[:TOKENS]


@pytest.fixture(scope="module")
def base_logprobs(folders: tuple[Path, Path], ids: list[int]) -> torch.Tensor:
    """What transformers says of the unmodified model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


@torch.inference_mode()
def test_the_gguf_file_is_read_as_it_is(ids: list[int], base_logprobs: torch.Tensor) -> None:
    """4 bits per weight, no config.json, read by the family gguf_llama; transformers reads it in a way of its own."""
    model = load_model(demo_model.gguf_folder())
    actual = model(torch.tensor(ids)).log_softmax(-1)
    assert (actual - base_logprobs).abs().max() <= LOGPROB_BUDGET


@torch.inference_mode()
def test_the_base_model_is_read_as_transformers_wrote_it(
    folders: tuple[Path, Path], ids: list[int], base_logprobs: torch.Tensor
) -> None:
    actual = load_model(folders[1])(torch.tensor(ids)).log_softmax(-1)
    assert (actual - base_logprobs).abs().max() <= LOGPROB_BUDGET


def test_with_k_beyond_the_context_the_reference_equals_the_base_model(
    folders: tuple[Path, Path], ids: list[int], base_logprobs: torch.Tensor
) -> None:
    model = load_model(folders[0])
    demo_model.set_pattern(model, TopK(k=TOKENS, sink=4, window=32))
    with torch.inference_mode():
        actual = model(torch.tensor(ids)).log_softmax(-1)
    assert (actual - base_logprobs).abs().max() <= LOGPROB_BUDGET


def test_with_k_beyond_the_context_vllm_equals_the_base_model(
    folders: tuple[Path, Path], ids: list[int], base_logprobs: torch.Tensor, start_engine: Callable[..., Any]
) -> None:
    mixer = {**demo_model.CONFIG["mixer"], "pattern": {"kind": "topk", "k": TOKENS, "sink": 4, "window": 32}}
    engine = start_engine(folders[0], hf_overrides={"mixer": mixer}, max_model_len=512, max_num_batched_tokens=512)
    (output,) = run(engine, [ids], new_tokens=1, prompt_logprobs=0)
    actual = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    expected = base_logprobs[torch.arange(TOKENS - 1), torch.tensor(ids[1:])]
    assert (torch.tensor(actual) - expected).abs().max() <= LOGPROB_BUDGET


def test_the_demo_checkpoint_on_vllm_equals_the_reference(
    folders: tuple[Path, Path], ids: list[int], start_engine: Callable[..., Any]
) -> None:
    # A block size that vLLM's own CPU attention takes, so that the two dense layers run on it under auto.
    options = {"block_size": 32, "additional_config": {"tiers": "auto"}}
    engine = start_engine(folders[0], max_model_len=512, max_num_batched_tokens=512, **options)
    impls = engine.apply_model(lambda model: [type(layer.mixer.attn.impl).__name__ for layer in model.model.layers])[0]
    assert impls == ["CPUAttentionBackendImpl"] * 2 + ["TiersAttentionImpl"] * 28
    outputs = run(engine, [ids], prompt_logprobs=0)
    assert worst_error(outputs, load_model(folders[0]), margin=0) <= LOGPROB_BUDGET


def test_perplexity_stays_within_three_percent_of_dense(folders: tuple[Path, Path]) -> None:
    # Half of what `make demo` measures.
    sparse, dense = demo.perplexities(folders[0], tokens=2048)
    assert dense == pytest.approx(11.88, abs=0.05)
    assert dense < sparse <= 1.03 * dense


def test_stock_vllm_refuses_the_checkpoint(folders: tuple[Path, Path]) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert "tiers" not in CONFIG_MAPPING._mapping
    known = CONFIG_MAPPING._extra_content.pop("tiers", None)  # as if the plugin were not installed
    try:
        with pytest.raises(ValueError, match="tiers"):
            AutoConfig.from_pretrained(folders[0])
    finally:
        if known is not None:
            CONFIG_MAPPING._extra_content["tiers"] = known


def test_a_folder_with_another_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(TiersError, match="another model"):
        demo_model.build(tmp_path / "mine", tmp_path / "base", lambda message: None)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.json"]
