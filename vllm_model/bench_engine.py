"""One vLLM engine, checked and timed, in a process of its own: `python -m tiers.vllm_model.bench_engine JOB EVENTS`.

`run` starts that process and stops it with everything that it started, whatever happens. The process reads the job from
a file and writes what happens to another, a line of JSON each: an engine's own output goes to its log.
"""

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tiers.vllm_model import metrics
from tiers.vllm_model.bench_report import ERROR, FAIL, OUT_OF_MEMORY, EngineResult, Spread, percentile

# Tokens generated for the check, after each of its prompts.
CHECK_TOKENS = 8

# Output tokens of the requests that warm the engine up.
WARM_UP_TOKENS = 8

# Seconds that an engine has to end by itself after its work, and after each way of being told to.
END_S, GRACE_S = 30, 5

# How torch and vLLM say that there is not enough memory.
NO_MEMORY = re.compile(
    r"OutOfMemoryError|can't allocate memory|No available memory for the cache|KV cache is needed, which is"
)


# ---- the process that asks ------------------------------------------------------------------------------------------


def run(job: dict[str, Any], work: Path, result: EngineResult, progress: Callable[[], Any]) -> list[dict[str, Any]]:
    """Start an engine, check it, measure it, end it.

    Args:
        job: `engine`, keywords of vLLM's LLM; `check` and `traffic`, see `_check` and `_measure`.
        work: gets the log of the engine.
        result: filled in.
        progress: called at each finished request of a measured round.

    Returns:
        What the engine said to the prompts of the check; empty if it did not get that far.
    """
    stem = re.sub(r"[^a-z0-9]+", "-", result.name.lower()).strip("-")
    log = work / f"engine-{stem}-{result.start + 1}.log"
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_COLOR": "0", **os.environ}
    said: list[dict[str, Any]] = []
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, log.open("w") as stream:
        job_file, events = Path(scratch) / "job.json", Path(scratch) / "events.jsonl"
        job_file.write_text(json.dumps(job))
        events.touch()
        process = subprocess.Popen(
            [sys.executable, "-m", "tiers.vllm_model.bench_engine", str(job_file), str(events)],
            stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            for event in _events(process, events):
                match event.pop("event"):
                    case "ready":
                        result.start_s = event["seconds"]
                    case "check":
                        said = event.pop("said")
                        result.check = event
                        if event["failure"]:
                            result.status, result.detail = FAIL, event["failure"]
                    case "request":
                        progress()
                    case "round":
                        rounds.append(event)
                    case "counts":
                        result.counts = event["counts"]
                    case "end":
                        with suppress(subprocess.TimeoutExpired):
                            process.wait(END_S)
                        break
            else:
                result.status, result.detail = _reason(log, process.wait())
        finally:
            with _undisturbed():
                stop(process)
                metrics.remove_folder(process.pid)
    if not result.detail:
        _summarise(result, rounds, job["traffic"])
    return said


def _events(process: subprocess.Popen[bytes], path: Path) -> Iterator[dict[str, Any]]:
    """The events of a process as they come, until it ends."""
    with path.open() as lines:
        partial = ""
        while True:
            ended = process.poll() is not None
            while line := lines.readline():
                partial += line
                if partial.endswith("\n"):
                    yield json.loads(partial)
                    partial = ""
            if ended:
                return
            time.sleep(0.1)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its process group, and wait until all are gone, so that their memory is free."""
    steps: tuple[tuple[int, Callable[[int, str], bool]], ...] = (
        # As Ctrl-C would: vLLM ends its processes in order.
        (signal.SIGINT, lambda pid, command: pid == process.pid),
        (signal.SIGTERM, lambda pid, command: True),
        # Python's tracker removes the shared memory of the others once they are gone, then it ends.
        (signal.SIGKILL, lambda pid, command: "resource_tracker" not in command),
        (signal.SIGKILL, lambda pid, command: True),
    )
    for how, meant in steps:
        deadline = time.monotonic() + GRACE_S
        for pid, command in _running(process):
            if meant(pid, command):
                with suppress(ProcessLookupError):
                    os.kill(pid, how)
        while _running(process) and time.monotonic() < deadline:
            time.sleep(0.05)


def _running(process: subprocess.Popen[bytes]) -> list[tuple[int, str]]:
    """Process ids and command lines of the group. What has ended but was not asked for its exit code is not running."""
    process.poll()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
            if group == str(process.pid) and state != "Z":
                found.append((int(path.name), (path / "cmdline").read_text()))
    return found


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No second Ctrl-C, or kill, while processes are ended."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reason(log: Path, code: int) -> tuple[str, str]:
    """Why an engine ended, from its log and its exit code: status and a line."""
    text = log.read_text(errors="replace")
    errors = re.findall(r"(?:\w+\.)*(\w*(?:Error|Exception): .+)", text)
    # The last ones say only that another process failed.
    telling = [e for e in errors if "Engine core" not in e and "EngineCore" not in e and "EngineDead" not in e]
    line = (telling or errors or [f"it ended with code {code} and without a message"])[-1]
    return OUT_OF_MEMORY if NO_MEMORY.search(text) else ERROR, f"{line} (see {log})"


def _summarise(result: EngineResult, rounds: Sequence[dict[str, Any]], traffic: dict[str, Any]) -> None:
    if not rounds:
        return
    requests, tokens = traffic["requests"], traffic["requests"] * traffic["output_len"]
    result.requests_per_s = Spread.of([requests / r["seconds"] for r in rounds])
    result.tokens_per_s = Spread.of([tokens / r["seconds"] for r in rounds])
    first = [1000 * s for r in rounds for s in r["first"]]
    result.first_token_ms, result.first_token_p99_ms = Spread.of(first), percentile(first, 99)
    if between := [1000 * s for r in rounds for s in r["between"]]:
        result.between_tokens_ms, result.between_tokens_p99_ms = Spread.of(between), percentile(between, 99)
        flying = min(traffic["concurrency"], requests)
        result.decode_tokens_per_s = 1000 * flying / result.between_tokens_ms.median


# ---- the process of the engine --------------------------------------------------------------------------------------


def main() -> None:
    begun = time.monotonic()
    job = json.loads(Path(sys.argv[1]).read_text())
    with open(sys.argv[2], "a", buffering=1) as events:

        def tell(event: str, **values: Any) -> None:
            events.write(json.dumps({"event": event, **values}) + "\n")

        from vllm import LLM

        engine = LLM(**job["engine"])
        tell("ready", seconds=time.monotonic() - begun)
        verdict = _check(engine, job["check"])
        tell("check", **verdict)
        if not verdict["failure"]:
            _measure(engine, job["traffic"], tell)
        tell("counts", counts=_counts())
        tell("end")
    # Should vLLM hang at the end of this process, as has been seen, `stop` ends it.
    engine.llm_engine.engine_core.shutdown()


def _counts() -> dict[str, int]:
    """Calls by "operator tier", of all processes of the engine."""
    totals: dict[str, int] = {}
    for counts in metrics.published().values():
        for key, calls in counts.items():
            totals[" ".join(key)] = totals.get(" ".join(key), 0) + calls
    return totals


def _check(engine: Any, check: dict[str, Any]) -> dict[str, Any]:
    """Compare log-probabilities of generated tokens with the reference model's, or with those of another engine.

    Args:
        check: `lengths` and `vocab_size` of random prompts; then `model` and `dtype`, the folder of the reference model
            and what the engine computes in, or `said`, the answer of the engine named in `by`, or neither: `why` not.

    Returns:
        `against`, `error` and `budget` in nats, `tokens` compared, `failure` or "", and `said`, the answer.
    """
    from tiers.reference.testing.tiny import random_ids
    from tiers.vllm_model import testing

    prompts = [random_ids(length, check["vocab_size"], seed=length) for length in check["lengths"]]
    outputs = testing.run(engine, prompts, CHECK_TOKENS)
    said = [_said(output) for output in outputs]
    verdict: dict[str, Any] = {"said": said, "error": None, "budget": None, "tokens": 0, "failure": ""}
    if not all(math.isfinite(x) for answer in said for x in answer["logprobs"]):
        return {**verdict, "against": "itself", "failure": "a log-probability is not finite"}
    if check.get("model"):
        found = _against_model(outputs, Path(check["model"]), check["dtype"])
    elif check.get("said"):
        found = _against_engine(said, check["said"], check["dtype"]) | {"against": f"engine {check['by']}"}
    else:
        return {**verdict, "against": f"nothing: {check['why']}"}
    if not found["error"] <= found["budget"]:
        found["failure"] = (
            f"log-probabilities differ from {found['against']} by {found['error']:.3g} nats (budget {found['budget']:.3g})"
        )
    return verdict | found


def _said(output: Any) -> dict[str, Any]:
    tokens = list(output.outputs[0].token_ids)
    entries = zip(tokens, output.outputs[0].logprobs, strict=True)
    return {"tokens": tokens, "logprobs": [entry[token].logprob for token, entry in entries]}


def _against_model(outputs: Sequence[Any], folder: Path, dtype: str) -> dict[str, Any]:
    """Float32: the largest difference. 16 bits: root mean square, at most twice that of the reference model in the same
    dtype plus one rounding of the largest log-probability."""
    import torch

    from tiers.reference.load import load_model
    from tiers.reference.testing.compare import LOGPROB_BUDGET
    from tiers.vllm_model import testing

    # vLLM leaves this process one thread for its own work; the engine waits now.
    torch.set_num_threads(os.cpu_count() or 1)
    model = load_model(folder)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if dtype == "float32":
        try:
            error = testing.worst_error(outputs, model)
        except AssertionError:  # hardly any clear choice of keys: a large model, where one key counts for little
            error = testing.worst_error(outputs, model, margin=0)
        return {"against": "the reference model", "error": error, "budget": LOGPROB_BUDGET, "tokens": tokens}

    def logprobs(model: Any) -> Any:
        rows = []
        for output in outputs:
            prompt, generated = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
            logits = model(torch.tensor(prompt + generated))[len(prompt) - 1 : -1].float()
            rows.append(logits.log_softmax(-1)[torch.arange(len(generated)), torch.tensor(generated)])
        return torch.cat(rows)

    exact = logprobs(model)
    eager = logprobs(model.to(getattr(torch, dtype)))
    actual = torch.tensor([x for output in outputs for x in _said(output)["logprobs"]])
    rounding = torch.finfo(getattr(torch, dtype)).eps * exact.abs().max().item()
    return {
        "against": "the reference model",
        "error": (actual - exact).square().mean().sqrt().item(),
        "budget": 2 * (eager - exact).square().mean().sqrt().item() + rounding,
        "tokens": tokens,
    }


def _against_engine(said: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], dtype: str) -> dict[str, Any]:
    """The largest difference up to and with the first token that differs: there both are the largest of nearly equal
    ones. The budget of 16 bits is one rounding of the largest log-probability."""
    from tiers.reference.testing.compare import LOGPROB_BUDGET

    error, largest, compared = 0.0, 0.0, 0
    for ours, theirs in zip(said, other, strict=True):
        for i, (a, b) in enumerate(zip(ours["logprobs"], theirs["logprobs"], strict=True)):
            error, largest, compared = max(error, abs(a - b)), max(largest, abs(b)), compared + 1
            if ours["tokens"][i] != theirs["tokens"][i]:
                break
    if dtype == "float32":
        return {"error": error, "budget": LOGPROB_BUDGET, "tokens": compared}
    import torch

    return {"error": error, "budget": torch.finfo(getattr(torch, dtype)).eps * largest, "tokens": compared}


def _measure(engine: Any, traffic: dict[str, Any], tell: Callable[..., None]) -> None:
    """Serve rounds of requests, `concurrency` at a time: as one ends, the next one is sent.

    Args:
        traffic: `rounds`, `requests` per round, `concurrency`, `prompt_len`, `output_len` and `vocab_size`.
    """
    flying = min(traffic["concurrency"], traffic["requests"])
    _round(engine, {**traffic, "requests": flying, "output_len": min(WARM_UP_TOKENS, traffic["output_len"])}, 0, None)
    for number in range(1, traffic["rounds"] + 1):
        tell("round", **_round(engine, traffic, number, lambda: tell("request")))


def _round(engine: Any, traffic: dict[str, Any], number: int, done: Callable[[], None] | None) -> dict[str, Any]:
    """One round, stepped by hand: when each token came."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from tiers.reference.testing.tiny import random_ids

    # No two prompts of a run are alike, so that nothing comes out of a cache.
    seeds = range(number * traffic["requests"], (number + 1) * traffic["requests"])
    prompts = [random_ids(traffic["prompt_len"], traffic["vocab_size"], seed=10**6 + seed) for seed in seeds]
    sampling = SamplingParams(
        temperature=0, max_tokens=traffic["output_len"], ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    llm, waiting = engine.llm_engine, list(enumerate(prompts))[::-1]
    sent: dict[str, float] = {}
    came: dict[str, list[float]] = {}
    flying = 0
    begun = time.perf_counter()
    while waiting or flying:
        while waiting and flying < traffic["concurrency"]:
            i, prompt = waiting.pop()
            name = f"{number}-{i}"
            sent[name], came[name] = time.perf_counter(), []
            llm.add_request(name, {"prompt_token_ids": prompt}, sampling)
            flying += 1
        outputs = llm.step()
        now = time.perf_counter()
        for output in outputs:
            came[output.request_id] += [now] * len(output.outputs[0].token_ids)
            if output.finished:
                flying -= 1
                if done is not None:
                    done()
    return {
        "seconds": time.perf_counter() - begun,
        "first": [times[0] - sent[name] for name, times in came.items()],
        "between": [b - a for times in came.values() for a, b in itertools.pairwise(times)],
    }


if __name__ == "__main__":
    main()
