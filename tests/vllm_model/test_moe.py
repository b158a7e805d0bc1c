"""Experts inside vLLM: every tier gives the log-probabilities of the reference model, and what ran is what was planned.

In one process, where torch.compile is off; several ranks and the compiled tier are in test_engine_parallel.py.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiers.reference.analysis.balance import load_balance
from tiers.reference.errors import ConfigError
from tiers.reference.load import load_model
from tiers.reference.model import ReferenceModel
from tiers.reference.testing.compare import LOGPROB_BUDGET
from tiers.reference.testing.tiny import moe_config, random_ids, save_tiny
from tiers.vllm_model import dispatch, metrics
from tiers.vllm_model.metrics import balance_rate
from tiers.vllm_model.testing import NEW_TOKENS, run, worst_error

pytestmark = pytest.mark.engine

# float32 on CUDA is not served by vLLM's layer; see the bfloat16 test.
PLANS = ["reference"] if torch.cuda.is_available() else ["reference", "reference,*.moe=fast"]


@pytest.fixture(scope="module", params=PLANS)
def served(
    request: pytest.FixtureRequest, start_engine: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, ReferenceModel, str]:
    folder = save_tiny(tmp_path_factory.mktemp("moe") / "model", moe_config(), shards=2)
    return start_engine(folder, additional_config={"tiers": request.param}), load_model(folder), request.param


def test_prompts_at_once_match_the_reference(served: tuple[Any, ReferenceModel, str]) -> None:
    engine, model, _ = served
    prompts = [random_ids(length, 320, seed=100 + length) for length in (1, 2, 5, 16, 17, 64, 100)]
    outputs = run(engine, prompts, prompt_logprobs=0)
    assert worst_error(outputs, model) <= LOGPROB_BUDGET


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunked_prefill_matches_the_reference(served: tuple[Any, ReferenceModel, str], chunk: int) -> None:
    engine, model, _ = served
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    before, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, chunk
    try:
        outputs = run(engine, [random_ids(41, 320, seed=210 + chunk)], prompt_logprobs=0)
    finally:
        scheduler.max_num_scheduled_tokens = before
    assert worst_error(outputs, model) <= LOGPROB_BUDGET


def test_what_ran_is_what_was_planned(served: tuple[Any, ReferenceModel, str], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, plan = served
    calls: Counter[str] = Counter()
    if not torch.cuda.is_available():
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe

        kernel = cpu_moe.cpu_fused_moe

        def counting(*args: Any) -> Any:
            calls["kernel"] += 1
            return kernel(*args)

        monkeypatch.setattr(cpu_moe, "cpu_fused_moe", counting)
    before = Counter(dispatch.COUNTS)
    run(engine, [random_ids(20, 320, seed=3)])
    ran = Counter(dispatch.COUNTS) - before
    tier = "fast" if plan.endswith("fast") else "reference"
    # Layers 1 to 3 have experts; one step for the prompt and one for every further token.
    assert {key: count for key, count in ran.items() if key[0] == "moe"} == {("moe", tier): 3 * NEW_TOKENS}
    assert calls["kernel"] == (3 * NEW_TOKENS if tier == "fast" else 0)


def test_sampled_steps_say_how_tokens_fall_on_experts(start_engine: Callable[..., Any], tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", moe_config())
    engine = start_engine(folder, additional_config={"tiers": "reference", "expert_balance": 1.0})
    metrics.EXPERTS.clear()
    prompt = random_ids(30, 320, seed=9)
    (output,) = run(engine, [prompt])
    # What was read: the prompt and all that was generated but the last.
    read = [*prompt, *output.outputs[0].token_ids[:-1]]
    expected = load_balance(load_model(folder), [read])
    assert {layer: tuple(counts) for layer, (counts, _, _) in metrics.EXPERTS.items()} == {
        row.layer: row.counts for row in expected
    }
    for _, losses, samples in metrics.EXPERTS.values():
        assert samples == NEW_TOKENS
        assert 0.9 * samples < losses < 8 * samples


@pytest.mark.parametrize("rate", [0, 1.5, True, "often"])
def test_a_rate_that_is_none_is_refused(rate: Any) -> None:
    with pytest.raises(ConfigError, match=r"expert_balance is .*; expected a number above 0 and at most 1"):
        balance_rate({"expert_balance": rate})


def test_without_a_rate_nothing_is_sampled() -> None:
    assert balance_rate({}) == balance_rate(None) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's layer does not serve float32 on CUDA")
def test_auto_takes_the_layer_of_vllm(start_engine: Callable[..., Any], tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", moe_config())
    engine = start_engine(folder, additional_config={"tiers": "auto,*.attention=reference"})
    before = dispatch.COUNTS["moe", "fast"]
    outputs = run(engine, [random_ids(20, 320, seed=3)], prompt_logprobs=0)
    assert dispatch.COUNTS["moe", "fast"] > before
    assert worst_error(outputs, load_model(folder)) <= LOGPROB_BUDGET


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("plan", ["fast", "reference"])
def test_bfloat16_on_a_gpu_matches_the_reference(plan: str, start_engine: Callable[..., Any], tmp_path: Path) -> None:
    """By the typical token: bfloat16 may choose other experts for a few."""
    folder = save_tiny(tmp_path / "model", moe_config())
    engine = start_engine(folder, dtype="bfloat16", additional_config={"tiers": f"reference,*.moe={plan}"})
    before = dispatch.COUNTS["moe", plan]
    (output,) = run(engine, [random_ids(100, 320, seed=5)], prompt_logprobs=0)
    assert dispatch.COUNTS["moe", plan] > before
    ids = list(output.prompt_token_ids)
    found = torch.tensor(
        [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
    )
    rows, tokens = torch.arange(len(ids) - 1), torch.tensor(ids[1:])
    exact = load_model(folder)(torch.tensor(ids)).log_softmax(-1)[rows, tokens]
    noisy = load_model(folder, torch.bfloat16)(torch.tensor(ids)).float().log_softmax(-1)[rows, tokens]
    assert (found - exact).abs().median() <= 2 * (noisy - exact).abs().median() + 0.02
