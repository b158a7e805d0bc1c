"""Layers that differ in heads and widths, or lack attention or ffn, inside vLLM: the log-probabilities of the reference model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiers.reference.load import load_model
from tiers.reference.testing.compare import LOGPROB_BUDGET
from tiers.reference.testing.tiny import random_ids, save_tiny, uneven_config
from tiers.vllm_model.testing import run, worst_error

pytestmark = pytest.mark.engine

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reference": (uneven_config(), {"additional_config": {"tiers": "reference"}}),
    "parallel residual, sandwich norms": (
        uneven_config(residual="parallel", norm_position="sandwich"), {"additional_config": {"tiers": "reference"}},
    ),
    # Full attention of 2 and of 4 key/value heads by vLLM's own, a window by ours.
    "vLLM's own attention": (
        uneven_config(), {"additional_config": {"tiers": "reference,1-2.attention=fast,5.attention=fast"}, "block_size": 32},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_uneven_layers_match_the_reference(name: str, start_engine: Callable[..., Any], tmp_path: Path) -> None:
    config, options = CASES[name]
    if torch.cuda.is_available() and "fast" in options["additional_config"]["tiers"]:
        pytest.skip("vLLM's attention does not serve float32 on CUDA")
    folder = save_tiny(tmp_path / "model", config)
    engine = start_engine(folder, **options)
    (caches,) = engine.apply_model(cached_layers)
    # Layers without attention cache nothing; the others their own heads.
    assert caches == {1: 2, 2: 4, 4: 4, 5: 4}
    prompts = [random_ids(length, 320, seed=length) for length in (1, 7, 33, 100)]
    outputs = run(engine, prompts, prompt_logprobs=0)
    assert worst_error(outputs, load_model(folder)) <= LOGPROB_BUDGET


def cached_layers(model: Any) -> dict[int, int]:
    """Key/value heads in the cache of each layer that has one."""
    layers = enumerate(model.model.layers)
    return {i: layer.mixer.attn.kv_cache.shape[1] for i, layer in layers if layer.mixer is not None}
