"""Serve one job after another, away from pytest: `engines_process.py JOBS_JSON_FILE`.

For engines that need several processes or torch.compile. As many processes as there are ranks run this together, each with an
engine of its own (vLLM's external launcher), so that processes start once for all jobs. A job:

    folder       what to serve
    options      of vllm.LLM
    environment  variables that hold for this job only
    logits       file with the ids of a prompt and what their logits should be; without it the reference model is asked,
                 about three prompts and what is generated after them
    adapter      folder of a LoRA adapter; `merged` is then the folder that the reference model is made from
    later        folder of the same model with twice the weight of each gate; the running engine then gets that too, and answers
                 once more (all weights cannot be loaded again on the CPU, where vLLM packs those of its layers and empties them)

Prints one line of JSON, for each job the largest difference of a log-probability and what ran on this rank.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.lora.request import LoRARequest

from tiers.compiled.options import compiled
from tiers.reference.load import load_model
from tiers.reference.testing.tiny import random_ids
from tiers.vllm_model.dispatch import COUNTS
from tiers.vllm_model.gate import KnowledgeGate
from tiers.vllm_model.testing import keep_heap, run, worst_error

DEFAULTS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "block_size": 16,
    "kv_cache_memory_bytes": 2**24,
    "additional_config": {"tiers": "reference"},
    "seed": 0,
}


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parallel = {"tensor_parallel_size": ranks, "distributed_executor_backend": "external_launcher"} if ranks > 1 else {}
    keep_heap()
    # The ranks' shared memory would have the names of everybody else's.
    group_name, run_id = _CPUSHMDistributed.make_group_name, os.environ["RUN_ID"]
    _CPUSHMDistributed.make_group_name = staticmethod(
        lambda communicator: run_id + group_name(communicator).replace("/", "")
    )
    results = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        started = time.monotonic()
        before = {name: os.environ.get(name) for name in job.get("environment", {})}
        os.environ.update(job.get("environment", {}))
        compiled.cache_clear()
        COUNTS.clear()
        engine = LLM(model=job["folder"], **{**DEFAULTS, **parallel, **job["options"]})
        error = worst(engine, job)
        if "later" in job:
            error = max(error, with_other_gates(engine, job["later"]))
        results.append({"error": error, "counts": {" ".join(key): calls for key, calls in COUNTS.items()}})
        engine.llm_engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()
        keep_heap()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        print(f"JOB {job['folder']}: {error:.2g}, {time.monotonic() - started:.1f} s", flush=True)
    print("RESULT " + json.dumps(results), flush=True)


def worst(engine: LLM, job: dict[str, Any]) -> float:
    """The largest difference; infinity if something is not finite."""
    if "logits" in job:
        return against_logits(engine, Path(job["logits"]))
    prompts = [{"prompt_token_ids": random_ids(length, 320, seed=length)} for length in (3, 40, 70)]
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=0)
    request = LoRARequest("adapter", 1, job["adapter"]) if "adapter" in job else None
    outputs = engine.generate(prompts, sampling, use_tqdm=False, lora_request=request)
    return worst_error(outputs, load_model(Path(job.get("merged", job["folder"]))))


def with_other_gates(engine: LLM, folder: str) -> float:
    """`worst` with gates that have changed since they were folded, as `load_weights` leaves them."""

    def change(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, KnowledgeGate):
                module.proj.weight.data.mul_(2)
                module.prove()

    engine.apply_model(change)
    engine.reset_prefix_cache()
    return worst(engine, {"folder": folder})


def against_logits(engine: LLM, file: Path) -> float:
    """Of every token of the prompt and one generated."""
    saved = torch.load(file)
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
