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
from typing import Any

from tiers.vllm_model.dispatch import COUNTS

Counts = Counter[tuple[str, str]]

NAME = "tiers_dispatch"
HELP = "Calls of an operator by the tier that served it."

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
    file = _file()
    if file is not None:
        file.write_value(_key(operator, tier), COUNTS[operator, tier], 0.0)


def published() -> dict[int, Counts]:
    """What each process that was started from here has counted so far, by process id; nothing before `publish`."""
    folder = os.environ.get(FOLDER)
    found: dict[int, Counts] = {}
    if folder is None:
        return found
    from prometheus_client.multiprocess import MultiProcessCollector

    for path in sorted(glob.glob(os.path.join(folder, "counter_tiers-*.db"))):
        counts = found[int(re.findall(r"\d+", os.path.basename(path))[0])] = Counter()
        for metric in MultiProcessCollector.merge([path]):
            for sample in metric.samples:
                counts[sample.labels["operator"], sample.labels["tier"]] += int(sample.value)
    return found


@functools.cache
def _file() -> Any:
    """The file of this process; None if nobody reads it."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return None
    from prometheus_client.mmap_dict import MmapedDict

    try:
        # The collector takes the kind of metric from the start of the name.
        return MmapedDict(os.path.join(folder, f"counter_tiers-{os.getpid()}.db"))
    except OSError as error:
        logger.warning("what runs in this process will not be on /metrics: %s", error)
        return None


@functools.cache
def _key(operator: str, tier: str) -> str:
    from prometheus_client.mmap_dict import mmap_key

    return mmap_key(NAME, f"{NAME}_total", ["operator", "tier"], [operator, tier], HELP)


def _log() -> None:
    # At the end of a process its output may be closed already; then there is nobody to tell.
    logging.raiseExceptions = False
    for process, counts in published().items():
        listed = ", ".join(f"{operator} {tier} {calls}" for (operator, tier), calls in sorted(counts.items()))
        logger.info("What ran in process %d, in calls by operator and tier: %s", process, listed)


def _forget() -> None:
    """A forked process counts for itself."""
    _file.cache_clear()
    COUNTS.clear()


os.register_at_fork(after_in_child=_forget)
