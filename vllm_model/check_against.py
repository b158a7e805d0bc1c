"""Other truths than our reference model: transformers, and vLLM's own class for the architecture.

Legend: T tokens of a sequence, V vocabulary.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiers.reference.errors import ServingError
from tiers.vllm_model.check_layers import Expected, Reference

TRANSFORMERS, NATIVE = "transformers", "vllm-native"


@dataclass
class Transformers(Reference):
    """What transformers computes from the same folder stands for the exact result; noise is still our reference's.

    Attributes:
        theirs: the model, in float32.
    """

    theirs: Any = field(kw_only=True)

    def of(self, ids_T: Tensor, step: int | None = None) -> Expected:
        """See `Reference.of`. Hidden states are theirs but for the last layer's, which they give behind the last norm."""
        expected = super().of(ids_T, step)
        with torch.inference_mode():
            out = self.theirs(ids_T[None].to(self.theirs.device), use_cache=False, output_hidden_states=True)
        expected.exact_logits = out.logits[0].cpu()
        for number, hidden in enumerate(out.hidden_states[1:-1]):
            expected.exact.tensors[number, "hidden"] = hidden[0].cpu()
        return expected


def load_transformers(folder: Path, reference: Reference) -> Transformers:
    """Raises:
    ServingError: transformers cannot read the folder; nothing in it is executed.
    """
    from transformers import AutoModelForCausalLM

    try:
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, attn_implementation="eager"
        )
    except Exception as error:  # of many kinds: it does not know the model, or cannot read its files
        raise ServingError(
            f"--against transformers: transformers cannot read {folder} ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'}). Use --against reference"
        ) from None
    # Both see the weights in the dtype that is served.
    for parameter in theirs.parameters():
        parameter.data = parameter.data.to(reference.dtype).float()
    device = reference.noisy.embed_tokens.weight.device
    return Transformers(reference.noisy, reference.exact, theirs=theirs.to(device).eval())


def native_logprobs(folder: Path, sequences: list[list[int]], dtype: str, longest: int) -> list[list[float]]:
    """Log-probability of every token but the first of each sequence, by vLLM's own class, in a process of its own.

    Raises:
        ServingError: vLLM has no class for the folder, or the engine fails.
    """
    job = {"folder": str(folder), "sequences": sequences, "dtype": dtype, "longest": longest}
    # Without dynamo, log-probabilities of a prompt need no kernel to be compiled.
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "tiers.vllm_model.check_against"], input=json.dumps(job), env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise ServingError(
            f"--against vllm-native: vLLM's own class did not run on {folder}: {said[-1] if said else 'it said nothing'}. "
            "`tiers inspect` says whether vLLM has one"
        )
    return json.loads(lines[-1].removeprefix("RESULT "))


def main() -> None:
    """The process: reads the job from standard input, prints one line."""
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    engine = LLM(
        model=job["folder"], dtype=job["dtype"], skip_tokenizer_init=True, enforce_eager=True, max_model_len=job["longest"],
        enable_prefix_caching=False, **({} if torch.cuda.is_available() else {"kv_cache_memory_bytes": 2**30}),
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in job["sequences"]], sampling, use_tqdm=False)
    found = [
        [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        for ids, output in zip(job["sequences"], outputs, strict=True)
    ]
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
