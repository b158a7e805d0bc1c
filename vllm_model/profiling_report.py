"""What `tiers profile` found: times out of the events of torch's profiler, tables, JSON."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tiers.reference.config import ModelConfig
from tiers.vllm_model.bench_cases import Limits
from tiers.vllm_model.dispatch import describe
from tiers.vllm_model.profiling_memory import Memory
from tiers.vllm_model.profiling_ranges import NAME, PHASES, Watched, work

# Rows of the table of what costs most.
COSTLIEST = 10


@dataclass
class Time:
    """Calls of a range in one phase, and their time: on the device on CUDA, else the host's.

    Attributes:
        inside: the profiler's own operators in it and in no range within it, with their microseconds.
    """

    calls: int = 0
    us: float = 0.0
    host_us: float = 0.0
    inside: dict[str, float] = field(default_factory=dict)


@dataclass
class Operator:
    """A row of the first table: an operator of a layer (None: of the whole model) on its tier in one phase.

    Attributes:
        ms, host_ms: of all calls; `ms` is the device's on CUDA.
        share: of the time of all steps of the phase, 0 to 1.
    """

    phase: str
    layer: int | None
    operator: str
    tier: str
    calls: int
    ms: float
    host_ms: float
    share: float


@dataclass
class Cost:
    """A row of the third table: a part of an operator, of all layers that compute the same.

    Attributes:
        what: which; `attention, the rest` is what is neither a linear layer nor the attention itself.
        bytes, operations: that it had to move and do at least; None where that is not known.
        bandwidth, rate: achieved, per second.
        of_bandwidth, of_rate: the same over the limits of the device.
        inside: the profiler's operators that took most of it, with their share.
    """

    phase: str
    what: str
    tier: str
    calls: int
    ms: float
    share: float
    bytes: float | None = None
    operations: float | None = None
    bandwidth: float | None = None
    rate: float | None = None
    of_bandwidth: float | None = None
    of_rate: float | None = None
    inside: list[tuple[str, float]] = field(default_factory=list)


@dataclass
class Report:
    """Everything that was found. `phases`: of each phase steps, tokens, and milliseconds in all."""

    environment: dict[str, Any]
    options: dict[str, Any]
    limits: dict[str, float] = field(default_factory=dict)
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    memory: list[Memory] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps({"schema": "tiers-profile/1", **asdict(self)}, indent=1) + "\n", encoding="utf-8")


# ---- out of events ---------------------------------------------------------------------------------------------------


def times(events: Iterable[Any], cuda: bool) -> dict[tuple[str, str], Time]:
    """By phase and range; the range of a whole step is called by its phase.

    Args:
        events: `torch.profiler.profile.events()`, whose events know their children.
        cuda: whether the device's time counts.
    """
    found: dict[tuple[str, str], Time] = {}

    def visit(event: Any, phase: str, name: str) -> None:
        for child in event.cpu_children:
            inner = name
            if NAME.fullmatch(child.name):
                inner = child.name
                _add(found.setdefault((phase, inner), Time()), child, cuda)
            else:
                own: float = _kernels_us(child) if cuda else child.self_cpu_time_total
                inside, short = found[phase, name].inside, _short(child.name)
                inside[short] = inside.get(short, 0.0) + own
            visit(child, phase, inner)

    for event in events:
        phase = event.name.removeprefix("tiers/")
        # CUDA has a second event of each range, on the device's own timeline.
        if event.name != phase and phase in PHASES and str(event.device_type).endswith("CPU"):
            _add(found.setdefault((phase, phase), Time()), event, cuda)
            visit(event, phase, phase)
    return found


def _short(name: str) -> str:
    """Graphs that Inductor has made are told apart by nothing but hashes."""
    return "compiled graph" if name.startswith("## Call CompiledFxGraph") else name


def _add(time: Time, event: Any, cuda: bool) -> None:
    time.calls += 1
    time.host_us += event.cpu_time_total
    time.us += _device_us(event) if cuda else event.cpu_time_total


def _kernels_us(event: Any) -> float:
    """Microseconds of what an event itself has launched. A range on the host has one on the device, which spans all of its
    kernels and is listed as one more under the same name; it would count them twice. Inductor names the event of a kernel
    of its own like the kernel, which counts."""
    return sum(k.duration for k in event.kernels if k.name != event.name or not event.is_user_annotation)


def _device_us(event: Any) -> float:
    return _kernels_us(event) + sum(map(_device_us, event.cpu_children))


def fill(
    report: Report, found: dict[tuple[str, str], Time], watched: Watched, config: ModelConfig, itemsize: int, limits: Limits,
) -> None:  # fmt: skip
    """Put phases, operators and costs into the report."""
    requests = watched.requests()
    for phase in PHASES:
        if (phase, phase) not in found:
            continue
        whole = found[phase, phase]
        steps = [batch for name, batch in requests if name == phase]
        own = {name: time for (p, name), time in found.items() if p == phase and name != phase}
        report.phases[phase] = {
            "steps": whole.calls, "tokens": sum(count for batch in steps for count, _ in batch),
            "ms": whole.us / 1e3, "host_ms": whole.host_us / 1e3,
        }  # fmt: skip
        report.operators += _operators(phase, whole, own)
        report.costs += _costs(phase, whole, own, watched, config, steps, itemsize, limits)
    report.costs.sort(key=lambda cost: -cost.ms)


def _operators(phase: str, whole: Time, own: dict[str, Time]) -> list[Operator]:
    rows = []
    for name, time in own.items():
        match = NAME.fullmatch(name)
        if match is not None and not match["part"]:
            layer = None if match["layer"] is None else int(match["layer"])
            rows.append(_operator(phase, layer, match["operator"], match["tier"], time, whole))
    rest = Time(
        whole.calls,
        max(0.0, whole.us - 1e3 * sum(row.ms for row in rows)),
        max(0.0, whole.host_us - 1e3 * sum(row.host_ms for row in rows)),
    )
    return [*rows, _operator(phase, None, "other", "vllm", rest, whole)]


def _operator(phase: str, layer: int | None, operator: str, tier: str, time: Time, whole: Time) -> Operator:
    share = time.us / whole.us if whole.us else 0.0
    return Operator(phase, layer, operator, tier, time.calls, time.us / 1e3, time.host_us / 1e3, share)


def _costs(
    phase: str, whole: Time, own: dict[str, Time], watched: Watched, config: ModelConfig,
    steps: Sequence[list[tuple[int, int]]], itemsize: int, limits: Limits,
) -> list[Cost]:  # fmt: skip
    found: dict[tuple[str, str], Cost] = {}
    inside: dict[tuple[str, str], dict[str, float]] = {}
    for name, time in own.items():
        match = NAME.fullmatch(name)
        assert match is not None
        parts = sum(other.us for key, other in own.items() if key.startswith(f"{name}/"))
        has_parts = any(key.startswith(f"{name}/") for key in own)
        what = _what(match, config) + (", the rest" if has_parts else "")
        key = what, match["tier"]
        cost = found.setdefault(key, Cost(phase, what, match["tier"], 0, 0.0, 0.0))
        cost.calls += time.calls
        cost.ms += max(0.0, time.us - parts) / 1e3
        for op, us in time.inside.items():
            of_key = inside.setdefault(key, {})
            of_key[op] = of_key.get(op, 0.0) + us
        needs = [None if has_parts else work(name, watched.linears, config, batch, itemsize) for batch in steps]
        for moved, operations in (need for need in needs if need is not None):
            cost.bytes, cost.operations = (cost.bytes or 0) + moved, (cost.operations or 0) + operations
    for key, cost in found.items():
        cost.share = cost.ms * 1e3 / whole.us if whole.us else 0.0
        total = cost.ms * 1e3
        most = sorted(inside.get(key, {}).items(), key=lambda item: -item[1])[:3]
        cost.inside = [(op, us / total) for op, us in most if total and us > 0]
        if cost.bytes is not None and cost.operations is not None and cost.ms:
            cost.bandwidth, cost.rate = cost.bytes / cost.ms * 1e3, cost.operations / cost.ms * 1e3
            cost.of_bandwidth = cost.bandwidth / max(limits.read, limits.copy)
            cost.of_rate = cost.rate / limits.operations
    return list(found.values())


def _what(match: Any, config: ModelConfig) -> str:
    operator, part = match["operator"], match["part"]
    name = operator if part is None else f"{operator}/{part}"
    if match["layer"] is not None and (part == "attn" or operator == "gate"):
        name += f" ({describe(config.layers[int(match['layer'])], operator)})"
    return name


# ---- text ------------------------------------------------------------------------------------------------------------


def text(report: Report) -> str:
    """The three tables for a terminal."""
    lines = []
    for phase, facts in report.phases.items():
        host = "" if report.environment["kind"] == "cpu" else f" on the device, {facts['host_ms']:.1f} ms on the host"
        lines.append(f"{phase}: {facts['steps']} steps, {facts['tokens']} tokens, {facts['ms']:.1f} ms{host}")
        rows = [row for row in report.operators if row.phase == phase]
        lines += [*table(_grouped(rows), right=(3, 4, 5, 6)), ""]
    lines += ["Memory", *table([["", "MiB", "how"], *map(_memory, report.memory)], right=(1,)), ""]
    if report.costs:
        lines += ["What costs most", *table(_cost_rows(report.costs[:COSTLIEST]), right=(3, 4, 5, 6, 7)), ""]
        lines += [", ".join(f"{name} {value:g}" for name, value in report.limits.items()), ""]
    return "\n".join([*lines, *report.notes]).rstrip()


def _grouped(rows: Sequence[Operator]) -> list[list[str]]:
    """A line for each operator and tier, layers together; those of the whole model last."""
    found: dict[tuple[str, str, bool], list[Operator]] = {}
    for row in sorted(rows, key=lambda row: (row.operator == "other", row.layer is None)):
        found.setdefault((row.operator, row.tier, row.layer is None), []).append(row)
    lines = [["operator", "layers", "tier", "calls", "ms", "ms/call", "share"]]
    for (operator, tier, _), own in found.items():
        calls, ms, share = (sum(getattr(row, name) for row in own) for name in ("calls", "ms", "share"))
        layers = ranges_of([row.layer for row in own if row.layer is not None])
        lines.append([operator, layers or "-", tier, str(calls), f"{ms:.2f}", f"{ms / calls:.3f}", f"{share:.1%}"])
    return lines


def ranges_of(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    ordered = sorted(set(numbers))
    starts = [n for n in ordered if n - 1 not in ordered]
    ends = [n for n in ordered if n + 1 not in ordered]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _memory(row: Memory) -> list[str]:
    return [row.what, f"{row.bytes / 2**20:,.2f}", row.how]


def _cost_rows(costs: Sequence[Cost]) -> list[list[str]]:
    lines = [["", "tier", "phase", "calls", "ms", "share", "GB/s (of limit)", "TFLOP/s (of limit)", "mostly"]]
    for cost in costs:
        mostly = ", ".join(f"{name} {share:.0%}" for name, share in cost.inside[:2])
        lines.append(
            [
                cost.what, cost.tier, cost.phase, str(cost.calls), f"{cost.ms:.2f}", f"{cost.share:.1%}",
                _achieved(cost.bandwidth, 1e9, cost.of_bandwidth), _achieved(cost.rate, 1e12, cost.of_rate), mostly,
            ]
        )  # fmt: skip
    return lines


def _achieved(value: float | None, unit: float, share: float | None) -> str:
    return "-" if value is None or share is None else f"{value / unit:.3g} ({share:.0%})"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Aligned columns; those of numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
