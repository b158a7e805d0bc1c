"""vLLM on any tier gives the log-probabilities of the reference model, however the work is cut up.

In one process, where torch.compile is off: the compiled tier is tested in test_engine_parallel.py.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tiers.reference.load import load_model
from tiers.reference.model import ReferenceModel
from tiers.reference.testing.compare import LOGPROB_BUDGET
from tiers.reference.testing.tiny import (
    alibi_config,
    positions_config,
    random_ids,
    save_model,
    save_tiny,
    tiny_config,
    tiny_model,
)
from tiers.vllm_model import dispatch, serving
from tiers.vllm_model.plan import Tier
from tiers.vllm_model.testing import NEW_TOKENS, run, worst_error

pytestmark = pytest.mark.engine

# Heads that are wide enough for the fast tier.
CONFIGS = {
    "rope-topk-gates": tiny_config(mixer={**tiny_config()["mixer"], "head_dim": 32}),
    "alibi-unequal-groups": alibi_config(mixer={**alibi_config()["mixer"], "head_dim": 32}),
    "every-kind-of-positions": positions_config(mixer={**positions_config()["mixer"], "head_dim": 32}),
}
PLANS = ["reference", "fast", "reference,*.attention=fast"] if torch.cuda.is_available() else ["reference"]


@pytest.fixture(scope="module", params=[(name, plan) for plan in PLANS for name in CONFIGS], ids=str)
def served(
    request: pytest.FixtureRequest, start_engine: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, ReferenceModel]:
    """An engine and the reference model on the same folder."""
    name, plan = request.param
    folder = save_tiny(tmp_path_factory.mktemp("model") / "in house v1.5", CONFIGS[name], shards=2)
    return start_engine(folder, additional_config={"tiers": plan}), load_model(folder)


@pytest.fixture
def scheduler(served: tuple[Any, ReferenceModel]) -> Iterator[Any]:
    """The scheduler of the engine; its token budget per step is put back after a test."""
    scheduler = served[0].llm_engine.engine_core.engine_core.scheduler
    before = scheduler.max_num_scheduled_tokens
    yield scheduler
    scheduler.max_num_scheduled_tokens = before


def test_one_prompt_matches_reference(served: tuple[Any, ReferenceModel]) -> None:
    engine, model = served
    outputs = run(engine, [random_ids(37, 320, seed=1)], prompt_logprobs=0)
    assert worst_error(outputs, model) <= LOGPROB_BUDGET


def test_sixteen_prompts_at_once_match_reference(served: tuple[Any, ReferenceModel]) -> None:
    engine, model = served
    prompts = [
        random_ids(length, 320, seed=100 + length)
        for length in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 47, 64, 65, 100)
    ]
    outputs = run(engine, prompts, prompt_logprobs=0)
    assert worst_error(outputs, model) <= LOGPROB_BUDGET


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_matches_reference(served: tuple[Any, ReferenceModel], scheduler: Any, chunk: int) -> None:
    engine, model = served
    scheduler.max_num_scheduled_tokens = chunk
    lengths: list[int] = []
    schedule = scheduler.schedule

    def recording(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        lengths.extend(output.num_scheduled_tokens.values())
        return output

    scheduler.schedule = recording
    try:
        outputs = run(
            engine, [random_ids(110, 320, seed=210 + chunk), random_ids(67, 320, seed=310 + chunk)], prompt_logprobs=0
        )
    finally:
        del scheduler.schedule
    assert max(lengths) == chunk
    assert worst_error(outputs, model) <= LOGPROB_BUDGET


def test_prefix_cache_hit_matches_reference(served: tuple[Any, ReferenceModel]) -> None:
    engine, model = served
    shared = random_ids(100, 320, seed=400)
    run(engine, [shared])
    outputs = run(engine, [[*shared, 5, 6, 7], [*shared[:70], 9]])
    assert [output.num_cached_tokens for output in outputs] == [96, 64]
    assert worst_error(outputs, model) <= LOGPROB_BUDGET


@pytest.mark.parametrize("length", [7, 8, 9, 10, 11, 12, 13])
def test_contexts_around_k_match_reference(served: tuple[Any, ReferenceModel], length: int) -> None:
    # k is 8 (6 in the other models), besides 3 (1) tokens of sink and window.
    engine, model = served
    outputs = run(engine, [random_ids(length, 320, seed=500 + length)], new_tokens=1, prompt_logprobs=0)
    assert worst_error(outputs, model) <= LOGPROB_BUDGET


def test_mixed_batch_gives_each_request_its_own_answer(served: tuple[Any, ReferenceModel]) -> None:
    engine, _ = served
    prompts = [random_ids(length, 320, seed=600 + length) for length in (20, 50, 90)]
    together = run(engine, prompts, new_tokens=12)
    alone = [run(engine, [prompt], new_tokens=12)[0] for prompt in prompts]
    for a, b in zip(together, alone, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids


def test_every_layer_ran_on_the_tier_of_the_plan(served: tuple[Any, ReferenceModel]) -> None:
    engine, model = served
    dispatch.COUNTS.clear()
    run(engine, [random_ids(9, 320, seed=700)])
    expected: Counter[tuple[str, str]] = Counter()
    for choice in serving.choose_tiers(engine.llm_engine.vllm_config):
        assert not choice.native
        # One prefill, which yields the first token, and one step for each other.
        expected[choice.operator, choice.tier.value] += NEW_TOKENS
    assert expected.total() == NEW_TOKENS * sum(len(layer.operators) for layer in model.config.layers)
    for choice in serving.choose_tiers(engine.llm_engine.vllm_config):
        gate = model.config.layers[choice.layer].gate
        if (
            choice.operator == "gate"
            and choice.tier is not Tier.REFERENCE
            and gate is not None
            and gate.source == "bank"
        ):
            expected["gate folded", choice.tier.value] += NEW_TOKENS
    assert expected == dispatch.COUNTS


def test_preempted_requests_match_reference(start_engine: Callable[..., Any], tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tiny_config())
    # 14 blocks of 16 tokens: three requests that grow to 100 tokens each do not fit together.
    engine = start_engine(folder, num_gpu_blocks_override=14, enable_prefix_caching=False, max_model_len=128)
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request

    def recording(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = recording
    prompts = [random_ids(50, 320, seed=800 + i) for i in range(3)]
    outputs = run(engine, prompts, new_tokens=50)
    assert preempted, "the cache was meant to be too small for all requests"
    assert worst_error(outputs, load_model(folder)) <= LOGPROB_BUDGET


def test_a_stale_index_and_surplus_rows_are_served(start_engine: Callable[..., Any], tmp_path: Path) -> None:
    tensors = tiny_model(tiny_config()).state_dict()
    surplus = torch.full((7, 64), 100.0)  # would win every argmax if they were reachable
    for name in ("embed_tokens.weight", "lm_head.weight", "layers.2.gate.table.weight"):
        tensors[name] = torch.cat((tensors[name], surplus))
    folder = save_model(tmp_path, tiny_config(), tensors, shards=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("-of-00002", "-of-00030"))
    engine = start_engine(folder)
    outputs = run(engine, [random_ids(37, 320, seed=900)], prompt_logprobs=0)
    assert worst_error(outputs, tiny_model(tiny_config())) <= LOGPROB_BUDGET
    assert all(token < 320 for token in outputs[0].outputs[0].token_ids)


def test_tokens_guessed_from_the_prompt_change_nothing(tmp_path: Path) -> None:
    """In a process of its own: guessing imports numba, beside which vLLM cannot start another engine in one process."""
    folder = save_tiny(tmp_path, CONFIGS["rope-topk-gates"])
    command = [sys.executable, str(Path(__file__).with_name("ngram_process.py")), str(folder), PLANS[-1]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-5000:]
    result = json.loads(lines[-1].removeprefix("RESULT "))
    assert 4 in result["steps"], "no step had three guessed tokens to check"
    assert result["error"] <= LOGPROB_BUDGET
