"""Compare a vLLM engine with the reference model by log-probabilities. Imports vLLM inside functions."""

from collections.abc import Sequence
from typing import Any

import torch

from tiers.reference.model import ReferenceModel

# Tokens generated after each prompt.
NEW_TOKENS = 6


def run(engine: Any, prompts: Sequence[list[int]], new_tokens: int = NEW_TOKENS, **options: Any) -> list[Any]:
    """Generate greedily with log-probabilities of prompt and output; returns vLLM's RequestOutputs."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=0, **options
    )
    return engine.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)


def worst_error(outputs: Sequence[Any], model: ReferenceModel) -> float:
    """The largest difference of any log-probability that vLLM reported from the reference model's.

    Args:
        outputs: from `run`.
        model: the reference on the same weights.

    Returns:
        Absolute, in nats; infinity if vLLM reported one that is not finite.
    """
    worst = 0.0
    for output in outputs:
        prompt, generated = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        expected = model(torch.tensor(prompt + generated)).log_softmax(-1)
        reported = [(i, prompt[i], entry) for i, entry in enumerate(output.prompt_logprobs or []) if entry]
        reported += [
            (len(prompt) + i, token, entry)
            for i, (token, entry) in enumerate(zip(generated, output.outputs[0].logprobs, strict=True))
        ]
        for position, token, entry in reported:
            error = abs(entry[token].logprob - expected[position - 1, token].item())
            worst = max(worst, error) if error == error else float("inf")
    return worst


def dispatch_counts(_model: Any) -> dict[str, int]:
    """What ran in the process that this is called in, for `engine.apply_model`: "operator tier" to calls."""
    from tiers.vllm_model.dispatch import COUNTS

    return {" ".join(key): calls for key, calls in COUNTS.items()}
