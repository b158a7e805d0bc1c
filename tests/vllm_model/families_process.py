"""Serve one folder after another, in as many processes as there are ranks: `families_process.py FOLDERS_JSON`.

Prints one line of JSON: for each folder the largest difference of a log-probability from what the file FOLDER.pt says.
Every rank runs this program with an engine of its own (vLLM's external launcher), so that processes start only once.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path

import torch
from vllm import LLM
from vllm.distributed import cleanup_dist_env_and_memory

from tiers.vllm_model.testing import run


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parallel = {"tensor_parallel_size": ranks, "distributed_executor_backend": "external_launcher"} if ranks > 1 else {}
    options = json.loads(os.environ.get("TIERS_TEST_OPTIONS", "{}"))
    errors = {}
    for folder in map(Path, json.loads(sys.argv[1])):
        started = time.monotonic()
        engine = LLM(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=128,
            max_num_seqs=4, block_size=16, kv_cache_memory_bytes=2**26, additional_config={"tiers": "reference"}, seed=0,
            **parallel, **options,
        )  # fmt: skip
        errors[folder.name] = error(engine, folder)
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()
        print(f"{folder.name}: {errors[folder.name]:.2g}, {time.monotonic() - started:.1f} s", file=sys.stderr)
    if os.environ.get("RANK", "0") == "0":
        print("RESULT " + json.dumps(errors), flush=True)


def error(engine: LLM, folder: Path) -> float:
    """Of every token of the prompt and one generated."""
    saved = torch.load(folder.with_name(f"{folder.name}.pt"))
    expected = saved["logits"].log_softmax(-1)
    prompt = saved["ids"].tolist()
    (output,) = run(engine, [prompt], new_tokens=1, prompt_logprobs=0)
    found = [entry[token].logprob for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
    (token,) = output.outputs[0].token_ids
    found.append(output.outputs[0].logprobs[0][token].logprob)
    rows = torch.arange(len(prompt))
    worst = (torch.tensor(found) - expected[rows, torch.tensor([*prompt[1:], token])]).abs().max().item()
    return worst if worst == worst else float("inf")


if __name__ == "__main__":
    main()
