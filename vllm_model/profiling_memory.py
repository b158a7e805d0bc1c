"""What an engine in this process holds, and what a step takes beside it."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from tiers.vllm_model.profiling_ranges import PHASES, packed_bytes

Around = Callable[[str], AbstractContextManager[Any]]

# How the memory of a step is measured.
HOW = {
    "cuda": "torch.cuda.memory_stats: highest in a step, less what was allocated before it",
    "cpu": "allocations that torch's profiler saw: highest in a step, less what was allocated before it",
}


@dataclass
class Memory:
    """One row: what, bytes, and how they were found."""

    what: str
    bytes: int
    how: str


def held(model: Any, before: int) -> list[Memory]:
    """What the engine holds between two steps.

    Args:
        model: a TiersForCausalLM with a cache.
        before: bytes allocated on the device before the engine started; 0 on the CPU.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    packed = sum(map(packed_bytes, model.modules()))
    rows = [
        Memory("weights", weights + packed, f"sizes of all parameters{', packed ones by their shapes' * bool(packed)}"),
        Memory("tables", _storages(model.buffers()), "sizes of all buffers: positions, scales of the cache"),
        Memory("KV cache", _storages(kv_caches(model)), "sizes of the tensors of all layers"),
        Memory("workspace", workspace(), "vLLM's workspace, which kernels of all layers share"),
        Memory("CUDA graphs", 0, "none: the engine runs eager, so that ranges are seen"),
    ]
    if torch.cuda.is_available():
        known = sum(row.bytes for row in rows)
        allocated = torch.cuda.memory_stats()["allocated_bytes.all.current"] - before
        rows.append(Memory("other", allocated - known, "torch.cuda.memory_stats: allocated, less the rows above"))
        reserved = torch.cuda.memory_stats()["reserved_bytes.all.current"]
        rows.append(Memory("reserved", reserved, "torch.cuda.memory_stats: what the allocator keeps, in all"))
    return rows


def kv_caches(model: Any) -> Iterator[Any]:
    """The cache of each layer."""
    for layer in model.model.layers:
        if layer.mixer is None:
            continue
        cache = layer.mixer.attn.kv_cache
        # Some runners keep a list with a cache for each virtual engine.
        yield from cache if isinstance(cache, list | tuple) else (cache,)


def _storages(tensors: Any) -> int:
    """Bytes that tensors keep allocated; what they share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def workspace() -> int:
    """Bytes of vLLM's workspace; 0 where it has none."""
    from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

    if not is_workspace_manager_initialized():
        return 0
    spaces = current_workspace_manager()._current_workspaces
    return sum(space.nbytes for space in spaces if space is not None)


def allocated() -> int:
    """Bytes that torch has allocated on the device; 0 without one."""
    return torch.cuda.memory_stats().get("allocated_bytes.all.current", 0) if torch.cuda.is_available() else 0


def activations(run: Callable[[Around], Any]) -> dict[str, int]:
    """By phase, how much torch has allocated at most during a step, beside what it had before.

    Args:
        run: runs steps; its argument wraps each of them and gets its phase.
    """
    if torch.cuda.is_available():
        found: dict[str, int] = {}

        @contextmanager
        def around(phase: str) -> Iterator[None]:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = allocated()
            yield
            torch.cuda.synchronize()
            highest = torch.cuda.memory_stats()["allocated_bytes.all.peak"]
            found[phase] = max(found.get(phase, 0), highest - before)

        run(around)
        return found
    # The CPU's allocator keeps no account of its own, and the resident memory of the process hardly changes, since freed
    # memory is kept; the profiler sees every allocation.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(torch.profiler.record_function)
    assert profiler.profiler is not None
    return _highest(profiler.profiler.kineto_results.events())


def _highest(events: Any) -> dict[str, int]:
    """From the profiler's raw events: those of its allocator, and the ranges that are named by a phase."""
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    times = [time for time, _ in changes]
    held = list(accumulate((size for _, size in changes), initial=0))
    found: dict[str, int] = {}
    for event in events:
        if event.name() in PHASES:
            first, last = bisect_left(times, event.start_ns()), bisect_left(times, event.end_ns())
            found[event.name()] = max(found.get(event.name(), 0), max(held[first : last + 1]) - held[first])
    return found
