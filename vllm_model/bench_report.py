"""What `tiers bench` found: plain data, JSON, a table for the terminal. The page is in bench_html.py.

Times are microseconds per call where nothing else is said.
"""

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tiers.reference.errors import ServingError

# Changes when a field changes its meaning or goes away.
SCHEMA = "tiers-bench/1"

OK, FAIL, OUT_OF_MEMORY, ERROR = "ok", "FAIL", "out of memory", "error"


def percentile(samples: Sequence[float], percent: float) -> float:
    """The nearest sample that has `percent` of all at or below it."""
    ranked = sorted(samples)
    return ranked[min(len(ranked) - 1, max(0, round(percent / 100 * (len(ranked) - 1))))]


@dataclass(frozen=True)
class Spread:
    """A handful of measurements of one thing."""

    median: float
    p10: float
    p90: float
    least: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        return cls(
            statistics.median(samples), percentile(samples, 10), percentile(samples, 90), min(samples), len(samples)
        )


@dataclass
class KernelResult:
    """One implementation on one case.

    Attributes:
        phase: "decode" (one query token per request), "prefill" (the last `tokens` of a prompt), or "gate".
        what: the pattern, or mode and source of a gate.
        batch, context, tokens: requests, tokens of each in the cache, query tokens of each. A gate has tokens only.
        tier: "reference", "compiled", "fast", or the name of the dense attention that is compared with.
        status: OK, FAIL (the check failed, so there is no speed), OUT_OF_MEMORY or ERROR.
        error, budget: largest difference from the exact result, and what is allowed.
        time: of a call; None unless the status is OK.
        how: what was timed: "cuda graph", "cuda events" or "host clock".
        limit: least time that the bytes and operations of the case need on this device.
        bound: which of the two the limit comes from, "bytes" or "operations".
        dense: median time of dense attention on the same shape, in the same run.
    """

    operator: str
    phase: str
    what: str
    batch: int
    context: int
    tokens: int
    tier: str
    status: str = OK
    detail: str = ""
    error: float | None = None
    budget: float | None = None
    time: Spread | None = None
    how: str = ""
    limit: float | None = None
    bound: str = ""
    dense: float | None = None

    @property
    def case(self) -> str:
        if self.phase == "gate":
            return f"{self.tokens} tokens"
        shape = f"{self.phase} {self.batch} x {self.context}"
        return shape if self.phase == "decode" else f"{shape}, last {self.tokens}"

    @property
    def speedup(self) -> float | None:
        """How many times faster than dense attention."""
        return self.dense / self.time.median if self.dense and self.time else None

    @property
    def of_limit(self) -> float | None:
        """The part of the device's limit that is reached; 1 is the limit."""
        return self.limit / self.time.median if self.limit and self.time else None


@dataclass
class EngineResult:
    """One start of one engine.

    Attributes:
        name: the plan, or "native" or "transformers".
        model: what it ran, in words.
        check: what it was compared with and how far it was off, in nats; see docs/bench.md.
        start_s: seconds from starting the process to an engine that takes requests.
        requests_per_s, tokens_per_s: over the measured rounds; tokens are generated ones.
        first_token_ms, between_tokens_ms: over all requests of all measured rounds.
        between_tokens_p99_ms, first_token_p99_ms: 99 of 100 are at or below it.
        decode_tokens_per_s: requests in flight over the median time between two tokens.
        counts: calls by "operator tier" in the engine's processes, from its start to its end.
    """

    name: str
    model: str
    start: int = 0
    status: str = OK
    detail: str = ""
    check: dict[str, Any] = field(default_factory=dict)
    start_s: float | None = None
    requests_per_s: Spread | None = None
    tokens_per_s: Spread | None = None
    first_token_ms: Spread | None = None
    first_token_p99_ms: float | None = None
    between_tokens_ms: Spread | None = None
    between_tokens_p99_ms: float | None = None
    decode_tokens_per_s: float | None = None
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class Report:
    """Everything, in the order in which it came.

    Attributes:
        complete: False while the run goes on; stays so if it was broken off.
        limits: what the device was measured to do, see bench_kernels.Limits.
        notes: what was left out and why.
    """

    environment: dict[str, Any]
    options: dict[str, Any]
    limits: dict[str, Any] = field(default_factory=dict)
    kernels: list[KernelResult] = field(default_factory=list)
    engines: list[EngineResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    schema: str = SCHEMA

    def write(self, path: Path) -> None:
        """Write JSON; a reader never sees half a file."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(partial, path)

    @property
    def failed(self) -> bool:
        """Whether some check failed."""
        results: list[KernelResult | EngineResult] = [*self.kernels, *self.engines]
        return any(result.status == FAIL for result in results)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def time_text(microseconds: float) -> str:
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1000:.2f} ms"


def outcome(result: KernelResult | EngineResult) -> str:
    """A word or two for the check of a result; the whole story is in `detail` and `check`."""
    if isinstance(result, EngineResult) and result.status == OK and not result.check.get("tokens"):
        return "none"
    return result.status


def kernel_rows(results: Sequence[KernelResult]) -> list[list[str]]:
    """A table of kernels, head row first. A case whose check failed shows no speed."""
    rows = [["operator", "case", "what", "tier", "check", "median", "10-90%", "vs dense", "of limit"]]
    for result in results:
        row = [result.operator, result.case, result.what, result.tier, outcome(result)]
        if result.time is not None:
            spread = f"{time_text(result.time.p10)} - {time_text(result.time.p90)}"
            speedup = "" if result.speedup is None else f"{result.speedup:.2f}x"
            reached = "" if result.of_limit is None else f"{result.of_limit:.0%}"
            row += [time_text(result.time.median), spread, speedup, reached]
        rows.append([*row, *[""] * (len(rows[0]) - len(row))])
    return rows


def engine_rows(results: Sequence[EngineResult]) -> list[list[str]]:
    """A table of engines, head row first."""
    head = ["engine", "start", "check", "requests/s", "tokens/s", "10-90%", "decode tokens/s"]
    rows = [[*head, "first token, ms", "p99", "between tokens, ms", "p99"]]
    for result in results:
        row = [result.name, str(result.start + 1), outcome(result)]
        if result.tokens_per_s and result.requests_per_s and result.first_token_ms and result.between_tokens_ms:
            tokens = result.tokens_per_s
            row += [
                f"{result.requests_per_s.median:.2f}", f"{tokens.median:.1f}", f"{tokens.p10:.1f} - {tokens.p90:.1f}",
                f"{result.decode_tokens_per_s:.1f}", f"{result.first_token_ms.median:.1f}",
                f"{result.first_token_p99_ms:.1f}", f"{result.between_tokens_ms.median:.2f}",
                f"{result.between_tokens_p99_ms:.2f}",
            ]  # fmt: skip
        rows.append([*row, *[""] * (len(rows[0]) - len(row))])
    return rows


def details(report: Report) -> list[str]:
    """A line for each result that has no speed, for each engine what it ran and was compared with, and the notes."""
    lines = [f"{r.operator}, {r.case}, {r.what}, {r.tier}: {r.status}: {r.detail}" for r in report.kernels if r.detail]
    for result in report.engines:
        name, check = f"engine {result.name}, start {result.start + 1}", result.check
        if result.detail:
            lines.append(f"{name}: {result.status}: {result.detail}")
        elif check:
            compared = f", {check['error']:.2g} nats off (budget {check['budget']:.2g})" if check["tokens"] else ""
            counted = ", ".join(f"{key} {calls}" for key, calls in sorted(result.counts.items()))
            ran = f"; calls: {counted}" if counted else ""
            lines.append(f"{name}: {result.model}; compared with {check['against']}{compared}{ran}")
    return lines + report.notes


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines of columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def facts(report: Report) -> list[tuple[str, str]]:
    """Environment, limits and options as names and values."""
    options = {f"--{name.replace('_', '-')}": value for name, value in report.options.items()}
    found = [*report.environment.items(), *report.limits.items(), *options.items()]
    return [(name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)) for name, value in found]


def text(report: Report) -> str:
    """The whole report for a terminal."""
    parts = [align([[name, value] for name, value in facts(report)])]
    if report.kernels:
        parts.append(align(kernel_rows(report.kernels)))
    if report.engines:
        parts.append(align(engine_rows(report.engines)))
    if lines := details(report):
        parts.append("\n".join(lines))
    if not report.complete:
        parts.append("This report is partial: the run was broken off.")
    return "\n\n".join(parts)


def make_folder(out: Path | None, command: str) -> Path:
    """The folder of a report: the one that was asked for, or a new one named by the command and the time.

    Raises:
        ServingError: it holds something, or cannot be made.
    """
    work = out if out is not None else Path(f"{command}-{datetime.now():%Y-%m-%d-%H%M%S}")
    if work.exists() and (not work.is_dir() or any(work.iterdir())):
        raise ServingError(f"--out is {work}, which holds something already; name another folder")
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServingError(f"--out is {work}, which cannot be made ({error.strerror}); name another folder") from None
    return work
