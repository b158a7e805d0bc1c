"""Compare a vLLM engine, or a server, with the reference model by log-probabilities. Imports vLLM inside functions."""

import atexit
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiers.reference.model import ReferenceModel
from tiers.vllm_model import compat
from tiers.vllm_model.check_choices import watched

# Tokens generated after each prompt.
NEW_TOKENS = 6


def run(engine: Any, prompts: Sequence[list[int]], new_tokens: int = NEW_TOKENS, **options: Any) -> list[Any]:
    """Generate greedily with log-probabilities of prompt and output; returns vLLM's RequestOutputs."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=0, **options
    )
    return engine.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)


def worst_error(outputs: Sequence[Any], model: ReferenceModel, margin: float = 5e-5) -> float:
    """The largest difference of any log-probability that vLLM reported from the reference model's.

    Where two keys score so nearly the same that rounding decides which of them top-k keeps, both choices are right and
    their results differ; a sequence is compared up to the first such token. At least half of all must remain.

    Args:
        outputs: from `run`.
        model: the reference on the same weights.
        margin: see `decided_rows`; 0 compares everything, for a large model, where one key of many counts for little.

    Returns:
        Absolute, in nats; infinity if vLLM reported one that is not finite.
    """
    worst, compared, total = 0.0, 0, 0
    for output in outputs:
        prompt, generated = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        with decided_rows(margin) as decided:
            expected = model(torch.tensor(prompt + generated)).log_softmax(-1)
        reported = [(i, prompt[i], entry) for i, entry in enumerate(output.prompt_logprobs or []) if entry]
        reported += [
            (len(prompt) + i, token, entry)
            for i, (token, entry) in enumerate(zip(generated, output.outputs[0].logprobs, strict=True))
        ]
        total += len(reported)
        for position, token, entry in reported:
            if position > decided():
                break
            compared += 1
            error = abs(entry[token].logprob - expected[position - 1, token].item())
            worst = max(worst, error) if error == error else float("inf")
    assert compared >= 0.5 * total, f"only {compared} of {total} tokens have a clear choice of keys"
    return worst


@contextmanager
def decided_rows(margin: float) -> Iterator[Callable[[], float]]:
    """Watch the reference choose keys; the result tells how many leading rows of the sequence were clear choices.

    A row is clear if, in every top-k layer and head, no rejected candidate scores within `margin` of the threshold.
    """
    with watched(margin) as close:
        yield close.first


# To the end: what stays frozen then is reported as leaked by extension modules.
_kept = ExitStack()
atexit.register(_kept.close)


def keep_heap() -> None:
    """As `compat.heap_aside`, for good; may be called again after more was imported."""
    _kept.enter_context(compat.heap_aside())


def dispatch_counts(_model: Any) -> dict[str, int]:
    """What ran in the process that this is called in, for `engine.apply_model`: "operator tier" to calls."""
    from tiers.vllm_model.dispatch import COUNTS

    return {" ".join(key): calls for key, calls in COUNTS.items()}


@dataclass
class Server:
    """A running `tiers serve`, the folder it serves, and its log."""

    url: str
    folder: Path
    log: Path

    def post(self, path: str, **body: Any) -> Any:
        """The open response to a request."""
        request = urllib.request.Request(
            self.url + path, json.dumps({"model": "tiny", **body}).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=60)

    def complete(self, **body: Any) -> dict[str, Any]:
        """The only choice of a completion."""
        with self.post("/v1/completions", temperature=0, **body) as response:
            return json.load(response)["choices"][0]

    def is_alive(self) -> bool:
        """Whether the server says that it is well."""
        with urllib.request.urlopen(self.url + "/health", timeout=5) as response:
            return response.status == 200


@contextmanager
def serving(folder: Path, log: Path, *flags: str, command: Sequence[str] = (), **environment: str) -> Iterator[Server]:
    """Serve a folder of a tiny model in float32, eager, until the block ends.

    Args:
        folder: the model.
        log: file for what the server prints; the server runs in its folder.
        flags: more of them.
        command: what starts it; None is `tiers serve`.
        environment: more variables.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*(command or (sys.executable, "-m", "tiers.vllm_model.cli", "serve")), str(folder), *flags]
    command += ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", "tiny", "--enforce-eager"]
    command += ["--dtype", "float32", "--max-model-len", "128", "--return-tokens-as-token-ids"]
    # Tests read the log, whatever a check in this process has set for its own engine.
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO", **environment}
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=env, cwd=log.parent, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", folder, log)
    try:
        for _ in range(400):
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                server.is_alive()
                break
            except OSError:
                time.sleep(0.3)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)


def answered(choice: dict[str, Any]) -> tuple[list[int], Tensor]:
    """Token ids and log-probabilities of a completion that was asked for with logprobs=0."""
    tokens = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
    return tokens, torch.tensor(choice["logprobs"]["token_logprobs"])
