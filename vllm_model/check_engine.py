"""A vLLM engine in this process (or its workers) whose layers are recorded, for `tiers check`."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiers.reference.errors import ServingError
from tiers.reference.generate import generate
from tiers.vllm_model import check_record, compat
from tiers.vllm_model.check_record import Record

# Tokens of a step at most, so that a prompt of more is cut up; pages of the cache.
STEP, PAGE = 96, 16


@dataclass
class Ran:
    """One request that ran alone.

    Attributes:
        ids: prompt and generated tokens.
        prompt: tokens of the prompt.
        record: of all rows but the last token's, which was never read.
        logits_TV: what the engine's head made of them.
        cached: tokens that were not computed, since the cache had them.
    """

    ids: list[int]
    prompt: int
    record: Record
    logits_TV: Tensor
    cached: int


class CheckedEngine:
    """An engine, and what its layers did.

    Args:
        engine: vLLM's LLM.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._call(check_record.start_in_worker)

    def run(self, prompt: Sequence[int], new_tokens: int) -> Ran:
        """Run one request, greedily."""
        (output,) = self._generate([prompt], new_tokens)
        record = merged(self._call(check_record.take_in_worker))
        ids = [*prompt, *output.outputs[0].token_ids]
        final = record.tensors[-1, "final"]
        (logits,) = [x for x in self._call(check_record.logits_in_worker, final) if x is not None][:1]
        return Ran(ids, len(prompt), record, logits, output.num_cached_tokens or 0)

    def together(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[tuple[list[int], list[float]]]:
        """Run requests at once: of each the tokens generated and their log-probabilities."""
        outputs = self._generate(prompts, new_tokens)
        self._call(check_record.take_in_worker)
        found = []
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            entries = zip(tokens, output.outputs[0].logprobs, strict=True)
            found.append((tokens, [entry[token].logprob for token, entry in entries]))
        return found

    def counts(self) -> Counter[tuple[str, str]]:
        """Calls by operator and tier, of all ranks."""
        return sum((Counter(counts) for counts in self._call(check_record.counts_in_worker)), Counter())

    def _generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=0)
        return self.engine.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)

    def _call(self, function: Any, *arguments: Any) -> list[Any]:
        if not arguments:
            return self.engine.apply_model(function)
        return self.engine.apply_model(_Bound(function, arguments))


class _Bound:
    """A function with arguments that can be sent to a worker, which calls it with the model."""

    def __init__(self, function: Any, arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __call__(self, model: Any) -> Any:
        return self.function(model, *self.arguments)


class ReferenceEngine:
    """The reference model in the place of an engine, for checks without vLLM.

    Args:
        model: in the dtype that would be served.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, prompt: Sequence[int], new_tokens: int) -> Ran:
        """As `CheckedEngine.run`; nothing is ever cached."""
        ids = [*prompt, *generate(self.model, prompt, new_tokens)]
        record, logits = check_record.record_reference(self.model, torch.tensor(ids[:-1]), STEP)
        return Ran(ids, len(prompt), record, logits.float().cpu(), 0)

    def together(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[tuple[list[int], list[float]]]:
        """As `CheckedEngine.together`, one after another."""
        found = []
        for prompt in prompts:
            ran = self.run(prompt, new_tokens)
            rows, tokens = (
                ran.logits_TV[len(prompt) - 1 :].double().log_softmax(-1),
                torch.tensor(ran.ids[len(prompt) :]),
            )
            found.append((tokens.tolist(), rows.gather(1, tokens[:, None])[:, 0].tolist()))
        return found

    def counts(self) -> Counter[tuple[str, str]]:
        """Nothing is dispatched."""
        return Counter()


def merged(records: list[Record]) -> Record:
    """Of all ranks: with tensor parallelism each has everything, with pipeline parallelism its own layers."""
    whole = Record(positions=records[0].positions, steps=records[0].steps)
    for record in records:
        whole.tensors |= record.tensors
    return whole


@contextmanager
def running(
    folder: Path, plan: str, dtype: str, longest: int, ranks: int = 1, **options: Any
) -> Iterator[CheckedEngine]:
    """Start an engine, eager, so that hooks run; it ends with the block.

    Args:
        folder: the model.
        plan: the tiers.
        dtype: name of a torch dtype.
        longest: tokens of a request at most.
        ranks: tensor-parallel size.
        options: more keywords of vLLM's LLM.

    Raises:
        TiersError: the engine refused to start.
    """
    if reason := compat.unsupported_version():
        raise ServingError(f"cannot check inside vLLM: {reason}")
    environment = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_COLOR": "0"}
    # In this process where that is possible: hooks then need not be sent anywhere.
    environment |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if ranks == 1 else "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        # This process has computed on the CPU; see `forked.apart`.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    arguments: dict[str, Any] = {
        "model": str(folder), "config_format": compat.CONFIG_FORMAT, "additional_config": {"tiers": plan}, "dtype": dtype,
        "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": longest, "max_num_batched_tokens": STEP,
        "max_num_seqs": 16, "block_size": PAGE, "tensor_parallel_size": ranks, "seed": 0,
    }  # fmt: skip
    if not torch.cuda.is_available():
        arguments["kv_cache_memory_bytes"] = 2**30
    with compat.engine(**{**arguments, **options}) as engine:
        yield CheckedEngine(engine)
