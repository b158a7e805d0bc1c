"""What ran, where a user can read it: on /metrics of a server, and in the log when it ends.

vLLM runs the model in other processes than the one that answers /metrics, and kills them when it shuts down, so they can
neither be asked nor log anything at their end. So the process that starts an engine makes a folder and names it in the
environment, and every process that runs operators keeps its counts in a file there. Files and collector are those of
prometheus_client's multiprocess mode, for our counts alone: with one API server vLLM does not use that mode, and putting
the server into it would take the server's own process metrics away. With several API servers vLLM does use it; then our
files go into vLLM's folder.
"""

import atexit
import functools
import glob
import logging
import multiprocessing
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tiers.reference.errors import ConfigError
from tiers.vllm_model.dispatch import COUNTS

Counts = Counter[tuple[str, str]]

NAME = "tiers_dispatch"
HELP = "Calls of an operator by the tier that served it."

# What `shadow.py` finds; counters but for the largest error.
SHADOW = {
    "tiers_shadow_checks": "Calls of an operator that the reference computed again.",
    "tiers_shadow_failures": "Of these, calls that differed from the reference by more than the budget.",
    "tiers_shadow_exceptions": "Calls that were to be computed again, but something went wrong.",
}
SHADOW_ERROR = "tiers_shadow_error_max"
SHADOW_ERROR_HELP = "Largest error that was seen there, relative to the size of a token's vector."

# How tokens fall on experts, of the sampled calls (`moe.py`). The loss of a layer is its sum over its number of samples.
EXPERT_TOKENS = "tiers_expert_tokens"
EXPERT_TOKENS_HELP = "Tokens that an expert got in sampled steps, by layer and expert."
EXPERT_LOSS = {
    "tiers_expert_balance_loss_sum": "Sum of the balance losses of sampled steps, by layer.",
    "tiers_expert_balance_samples": "Steps in which the balance of a layer was sampled.",
}

# Set by `publish` for the processes that vLLM starts; nothing for users to set.
FOLDER = "TIERS_METRICS_FOLDER"
# prometheus_client's own.
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"

# vLLM prints loggers below its own name.
logger = logging.getLogger("vllm.tiers")

# What `publish` holds on to: the temporary folder lives as long as this does.
_published: Any = None


def publish() -> None:
    """Put the counts of all processes that vLLM will start onto /metrics of this one, and log them when it ends.

    May run any number of times; does nothing in a process that vLLM has started.
    """
    global _published
    if _published is not None or multiprocessing.parent_process() is not None:
        return
    if SHARED_FOLDER in os.environ:
        _published = os.environ[SHARED_FOLDER]
        os.environ[FOLDER] = _published
    else:
        from prometheus_client import REGISTRY
        from prometheus_client.multiprocess import MultiProcessCollector

        _published = tempfile.TemporaryDirectory(prefix=_prefix(os.getpid()))
        os.environ[FOLDER] = _published.name
        MultiProcessCollector(REGISTRY, _published.name)
    atexit.register(_log)


def _prefix(process: int) -> str:
    return f"tiers-metrics-{process}-"


def remove_folder(process: int) -> None:
    """Remove what a process on this machine that was killed after `publish` has left behind."""
    for path in glob.glob(os.path.join(tempfile.gettempdir(), f"{_prefix(process)}*")):
        shutil.rmtree(path, ignore_errors=True)


def count(operator: str, tier: str) -> None:
    """Count a call in this process. Runs in every layer and step, so it has to cost next to nothing."""
    COUNTS[operator, tier] += 1
    file = _file("counter")
    if file is not None:
        file.write_value(_key(NAME, f"{NAME}_total", operator, tier, HELP), COUNTS[operator, tier], 0.0)


@dataclass
class Shadowed:
    """Shadow checks in this process: how many there were, how many failed or could not be made, and the largest error."""

    checks: int = 0
    failures: int = 0
    exceptions: int = 0
    worst: float = 0.0


# (operator, tier) -> what its shadow checks found in this process.
SHADOWED: dict[tuple[str, str], Shadowed] = {}


def count_shadow(operator: str, tier: str, error: float | None, failed: bool = False) -> None:
    """Count a shadow check in this process; one without an error could not be made."""
    found = SHADOWED.setdefault((operator, tier), Shadowed())
    if error is None:
        found.exceptions += 1
    else:
        found.checks += 1
        found.failures += failed
        found.worst = max(found.worst, error)
    counts, largest = _file("counter"), _file("gauge_max")
    if counts is None or largest is None:
        return
    for (name, text), value in zip(SHADOW.items(), (found.checks, found.failures, found.exceptions), strict=True):
        counts.write_value(_key(name, f"{name}_total", operator, tier, text), value, 0.0)
    largest.write_value(_key(SHADOW_ERROR, SHADOW_ERROR, operator, tier, SHADOW_ERROR_HELP), found.worst, 0.0)


# Layer -> tokens of each expert, sum of losses, samples; in this process.
EXPERTS: dict[int, tuple[list[int], float, int]] = {}


def count_experts(layer: int, counts: list[int], loss: float) -> None:
    """Count a sampled call of a layer's experts in this process."""
    before, losses, samples = EXPERTS.get(layer, ([0] * len(counts), 0.0, 0))
    total = [a + b for a, b in zip(before, counts, strict=True)]
    EXPERTS[layer] = (total, losses + loss, samples + 1)
    file = _file("counter")
    if file is None:
        return
    for expert, value in enumerate(total):
        labels = (("layer", str(layer)), ("expert", str(expert)))
        file.write_value(_labelled(EXPERT_TOKENS, f"{EXPERT_TOKENS}_total", labels, EXPERT_TOKENS_HELP), value, 0.0)
    for (name, text), number in zip(EXPERT_LOSS.items(), (losses + loss, float(samples + 1)), strict=True):
        file.write_value(_labelled(name, f"{name}_total", (("layer", str(layer)),), text), number, 0.0)


def balance_rate(additional: Any) -> float:
    """The share of calls that `--additional-config '{"expert_balance": R}'` asks to be sampled; 0 without it.

    Raises:
        ConfigError: no number above 0 and at most 1.
    """
    rate = additional.get("expert_balance") if isinstance(additional, dict) else None
    if rate is None:
        return 0.0
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1:
        raise ConfigError(
            f"additional-config: expert_balance is {rate!r}; expected a number above 0 and at most 1, the share of the steps in "
            "which tokens per expert are counted"
        )
    return float(rate)


def published() -> dict[int, Counts]:
    """What each process that was started from here has counted so far, by process id; nothing before `publish`."""
    found: dict[int, Counts] = {}
    for process, name, key, value in _samples("counter"):
        counts = found.setdefault(process, Counter())
        if name == f"{NAME}_total":
            counts[key] += int(value)
    return found


def published_shadow() -> dict[int, dict[tuple[str, str], Shadowed]]:
    """As `published`, what the shadow checks of each process have found."""
    found: dict[int, dict[tuple[str, str], Shadowed]] = {}
    fields = dict(zip((f"{name}_total" for name in SHADOW), ("checks", "failures", "exceptions"), strict=True))
    for process, name, key, value in _samples("counter"):
        if name in fields:
            setattr(found.setdefault(process, {}).setdefault(key, Shadowed()), fields[name], int(value))
    for process, name, key, value in _samples("gauge_max"):
        if name == SHADOW_ERROR and key in found.get(process, {}):
            found[process][key].worst = value
    return found


def _samples(kind: str) -> Iterator[tuple[int, str, tuple[str, str], float]]:
    """Process id, name, operator and tier, and value of all that is in our files of a kind of metric."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return
    from prometheus_client.multiprocess import MultiProcessCollector

    for path in sorted(glob.glob(os.path.join(folder, f"{kind}_tiers-*.db"))):
        process = int(re.findall(r"\d+", os.path.basename(path))[0])
        for metric in MultiProcessCollector.merge([path]):
            for sample in metric.samples:
                if "operator" not in sample.labels:  # of experts
                    continue
                yield process, sample.name, (sample.labels["operator"], sample.labels["tier"]), sample.value


@functools.cache
def _file(kind: str) -> Any:
    """The file of this process for a kind of metric; None if nobody reads it."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return None
    from prometheus_client.mmap_dict import MmapedDict

    try:
        # The collector takes the kind of metric from the start of the name; a gauge's next word says how to merge it.
        return MmapedDict(os.path.join(folder, f"{kind}_tiers-{os.getpid()}.db"))
    except OSError as error:
        logger.warning("what runs in this process will not be on /metrics: %s", error)
        return None


@functools.cache
def _key(metric: str, sample: str, operator: str, tier: str, text: str) -> str:
    return _labelled(metric, sample, (("operator", operator), ("tier", tier)), text)


@functools.cache
def _labelled(metric: str, sample: str, labels: tuple[tuple[str, str], ...], text: str) -> str:
    from prometheus_client.mmap_dict import mmap_key

    return mmap_key(metric, sample, [name for name, _ in labels], [value for _, value in labels], text)


def _log() -> None:
    # At the end of a process its output may be closed already; then there is nobody to tell.
    logging.raiseExceptions = False
    for process, counts in published().items():
        listed = ", ".join(f"{operator} {tier} {calls}" for (operator, tier), calls in sorted(counts.items()))
        logger.info("What ran in process %d, in calls by operator and tier: %s", process, listed)
    for process, shadowed in published_shadow().items():
        listed = ", ".join(
            f"{operator} {tier} {x.checks} ({x.failures} failed, {x.exceptions} not made, error at most {x.worst:.2g})"
            for (operator, tier), x in sorted(shadowed.items())
        )
        logger.info("Shadow checks in process %d, by operator and tier: %s", process, listed)


def _forget() -> None:
    """A forked process counts for itself."""
    _file.cache_clear()
    COUNTS.clear()
    SHADOWED.clear()
    EXPERTS.clear()


os.register_at_fork(after_in_child=_forget)
