"""Run an engine that guesses tokens from the prompt: `ngram_process.py FOLDER PLAN`; prints one line of JSON."""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM

from tiers.reference.load import load_model
from tiers.reference.testing.tiny import random_ids
from tiers.vllm_model.testing import run, worst_error


def main() -> None:
    folder, plan = Path(sys.argv[1]), sys.argv[2]
    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    engine = LLM(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=256, block_size=16,
        max_num_batched_tokens=256, max_num_seqs=16, speculative_config=guess, additional_config={"tiers": plan},
    )  # fmt: skip
    steps: list[int] = []
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def recording(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        steps.extend(output.num_scheduled_tokens.values())
        return output

    scheduler.schedule = recording
    # A prompt that repeats itself, so that there is something to guess.
    outputs = run(engine, [random_ids(12, 320, seed=1000) * 4], new_tokens=40)
    print("RESULT " + json.dumps({"steps": steps, "error": worst_error(outputs, load_model(folder))}), flush=True)


if __name__ == "__main__":
    main()
