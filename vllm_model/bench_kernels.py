"""Check and time the operators by themselves: every tier, dense attention, and what the device could do at best.

A call is timed only after its result was compared with the exact one, on the inputs that are timed.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tiers.vllm_model.bench_cases import Case, DenseCase, Exact, Limits, Machine, dense_name
from tiers.vllm_model.bench_report import ERROR, FAIL, OK, OUT_OF_MEMORY, KernelResult, Report, Spread
from tiers.vllm_model.plan import Tier
from tiers.vllm_model.self_check import BUDGET

# Seconds that the calls of one implementation on one case may take together, and how many there are at least and most.
SECONDS, LEAST, MOST = 0.3, 5, 50

Timer = Callable[[], float]


def run(
    groups: Sequence[Sequence[Case]],
    tiers: Sequence[Tier],
    machine: Machine,
    report: Report,
    done: Callable[[], Any],
) -> None:
    """Check and time tiers on every case, into `report.kernels`.

    Args:
        groups: cases that share inputs together.
        tiers: which ones; dense attention is always among what is timed.
        machine: where.
        report: also gets a note for each tier that is not timed.
        done: called after each group.
    """
    for group in groups:
        _run_group(group, tiers, machine, report)
        if machine.device == "cuda":
            torch.cuda.empty_cache()
        done()


def _run_group(group: Sequence[Case], tiers: Sequence[Tier], machine: Machine, report: Report) -> None:
    planned = []
    for case in group:
        for tier, reason in case.choices(machine):
            name = dense_name(machine) if tier is None else tier.value
            if tier is not None and tier not in tiers:
                continue
            if reason is None:
                planned.append((case, tier, case.result(name, machine)))
            else:
                report.note(f"tier {name}, not timed: {case.what}: {reason}")
    results = [result for _, _, result in planned]
    report.kernels += results

    inputs: Any = None
    with _recorded(*results):
        inputs = group[0].inputs(machine)
    exact: dict[Case, Exact] = {}
    timers: list[tuple[KernelResult, Timer]] = []
    for case, tier, result in planned:
        if result.status != OK:
            continue
        with _recorded(result):
            call = case.call(tier, inputs, machine)
            if case not in exact:
                exact[case] = case.exact(inputs, machine)
            # What others made is not held to the budget of our tiers: it may round more often.
            strict = not isinstance(case, DenseCase)
            _check(result, call(), exact[case], strict)
            result.how = "host clock"
            if result.status == OK and machine.device == "cuda":
                call, result.how = _captured(call)
                # Again: what is timed is what must be right.
                _check(result, call(), exact[case], strict)
            if result.status == OK:
                timer = partial(_device_time_uncached if machine.device == "cuda" else _host_time, call)
                timer()
                timers.append((result, timer))
    _measure(timers)
    dense = next((r.time.median for case, _, r in planned if isinstance(case, DenseCase) and r.time), None)
    for result in results:
        result.dense = dense


@contextmanager
def _recorded(*results: KernelResult) -> Iterator[None]:
    """Whatever goes wrong inside is written into the results, and the rest of the run goes on."""
    try:
        yield
    except Exception as error:  # of an allocator, a compiler, a driver
        status = OUT_OF_MEMORY if _is_out_of_memory(error) else ERROR
        first = next(iter(str(error).strip().splitlines()), "no message")
        for result in results:
            result.status, result.detail = status, f"{type(error).__name__}: {first}"


def _is_out_of_memory(error: BaseException) -> bool:
    """CUDA's allocator raises a type of its own; the CPU's a RuntimeError that says so."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _check(result: KernelResult, actual: Tensor, exact: Exact, strict: bool) -> None:
    """Compare a result with the exact one.

    Args:
        strict: in 16 bits, allow at most twice the error of eager PyTorch in the same dtype, plus one rounding (as
            tiers.reference.testing.compare does). Else, and in float32, where the order of a sum counts for more than
            that, allow the part of the largest value that self_check.py allows.
    """
    if not torch.isfinite(actual).all():
        result.status, result.detail = FAIL, "the result is not finite"
        return

    def error(of: Tensor) -> float:
        return (of.to(exact.best.dtype) - exact.best).abs()[exact.compared].max().item()

    largest = exact.best.abs().max().item()
    result.error = error(actual[exact.rows])
    if strict and actual.dtype != torch.float32:
        result.budget = 2 * error(exact.eager) + torch.finfo(actual.dtype).eps * largest
    else:
        result.budget = BUDGET[actual.dtype] * largest
    if not result.error <= result.budget:
        result.status = FAIL
        result.detail = f"differs from the exact result by {result.error:.3g} (budget {result.budget:.3g})"


# ---- time -----------------------------------------------------------------------------------------------------------


def _measure(timers: Sequence[tuple[KernelResult, Timer]]) -> None:
    """Time the calls in turn, so that a drift of the clock meets all of them."""
    repeats = [int(min(MOST, max(LEAST, SECONDS * 1e6 / max(1.0, timer())))) for _, timer in timers]
    samples: list[list[float]] = [[] for _ in timers]
    for turn in range(max(repeats, default=0)):
        for (_, timer), own, wanted in zip(timers, samples, repeats, strict=True):
            if turn < wanted:
                own.append(timer())
    for (result, _), own in zip(timers, samples, strict=True):
        result.time = Spread.of(own)


def _host_time(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1e6


@functools.cache
def _flush() -> Tensor:
    """A few times as much as the cache of the device holds."""
    return torch.zeros(torch.cuda.get_device_properties(0).L2_cache_size, device="cuda")


def _device_time(call: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _device_time_uncached(call: Callable[[], Any]) -> float:
    # Read before each call, so that it finds nothing of its inputs in the cache. Not written: lines that have to be
    # written back would take bandwidth from what is timed.
    _flush().sum()
    return _device_time(call)


def _captured(call: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    """The call as a CUDA graph, or itself where it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = call()
    except RuntimeError as error:
        if _is_out_of_memory(error):
            raise
        torch.cuda.synchronize()
        return call, "cuda events"

    # The call is kept: a graph reads what it made beforehand, FlashAttention's schedule for one, and does not own it.
    def replay(_kept: Callable[[], Any] = call) -> Any:
        graph.replay()
        return result

    return replay, "cuda graph"


def measure_limits(device: str, dtype: torch.dtype) -> Limits:
    """Read and copy a buffer that is larger than caches, and multiply large matrices; the best of a few tries each."""
    cuda = device == "cuda"
    buffer = torch.ones(2**29 if cuda else 2**26, device=device)
    target = torch.empty_like(buffer)
    moved = buffer.numel() * buffer.element_size()
    size = 8192 if cuda else 1024
    a, b = torch.randn(2, size, size, device=device).to(dtype)

    def per_second(amount: float, call: Callable[[], Any]) -> float:
        timed = _device_time if cuda else _host_time
        return amount / min(timed(call) for _ in range(10)) * 1e6

    return Limits(
        read=per_second(moved, buffer.sum),
        copy=per_second(2 * moved, lambda: target.copy_(buffer)),
        operations=per_second(2 * size**3, lambda: a @ b),
    )
