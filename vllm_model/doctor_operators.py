"""Every tier of every operator against the reference, on small random data, on the device that is here.

The checks run in a process of their own, which may crash or hang: the check that was running then is the one that failed,
and another process goes on after it.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiers.reference.config import Attention, Gate, Layer, Moe, NoPosition, Swiglu
from tiers.reference.ops.knowledge_gate import MODES
from tiers.reference.testing.inputs import BATCHES, PATTERNS, PagedInputs, make_batch
from tiers.vllm_model import dispatch
from tiers.vllm_model.dispatch import Where
from tiers.vllm_model.doctor_process import ended
from tiers.vllm_model.plan import Tier
from tiers.vllm_model.self_check import BUDGET, check_tokens, folding, self_check

OK, FAILED, NOT_HERE, NOT_CHECKED = "ok", "failed", "not here", "not checked"

# Seconds after which nothing more is compiled; what was compiled is kept on disk, so the next run gets further.
LIMITS = {"cpu": 38.0, "cuda": 150.0}
# Seconds for the checks that compile nothing. They take a few; a busy machine is no fault.
QUICK_LIMIT = 150.0

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}

# Query heads, key/value heads, head size. The tiers that compile get only the first: each costs them seconds.
SHAPES = ((4, 2, 32), (6, 6, 40), (8, 1, 64))
PAGE = 16

# Widths of the gate, and slots of the bank. 72 is no multiple of a kernel's tile.
WIDTHS = (64, 72)
SLOTS = 37
# Experts, of every rule that chooses them.
EXPERTS = Moe(
    8,
    3,
    40,
    score="sigmoid",
    correction_bias=True,
    groups=4,
    top_groups=2,
    group_score="top2",
    routed_scaling_factor=2.0,
)


@dataclass(frozen=True)
class Check:
    """One operator on one tier in one dtype, and how it came out.

    Attributes:
        function: of `dispatch.OPS`.
        what: the pattern of attention, the mode of a gate, or nothing.
        result: OK, FAILED, NOT_HERE (the tier does not serve this here) or NOT_CHECKED (no time was left).
        detail: the largest error, or why not.
    """

    function: str
    what: str
    tier: str
    device: str
    dtype: str
    result: str = NOT_CHECKED
    detail: str = ""


def device() -> str:
    """ "cuda" if torch can use one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def checks(where: str) -> list[Check]:
    """All checks of a device, in the order in which they are made: those that compile nothing, then the most used."""
    whats: dict[str, Sequence[str]] = {"paged_attention": tuple(PATTERNS), "knowledge_gate": MODES}
    tiers = {tier.value: place for place, tier in enumerate((Tier.REFERENCE, Tier.FAST, Tier.COMPILED))}
    found = [
        Check(name, what, tier.value, where, dtype)
        for functions in dispatch.OPS.values()
        for name in functions
        for what in whats.get(name, ("",))
        for tier in Tier
        for dtype in DTYPES[where]
    ]
    first = ("topk", "sigmoid", "")
    return sorted(found, key=lambda c: (compiles(c), tiers[c.tier], c.what not in first, c.dtype != "float32"))


def compiles(check: Check) -> bool:
    """Whether a check has code to compile, so that it takes seconds."""
    return check.tier != Tier.REFERENCE.value and why_not(check) is None


def why_not(check: Check) -> str | None:
    """Why a tier does not serve this here, or None if it does."""
    operator = next(name for name, functions in dispatch.OPS.items() if check.function in functions)
    heads, kv_heads, size = SHAPES[0]
    mixer = Attention(heads, kv_heads, size, pattern=PATTERNS.get(check.what, PATTERNS["dense"]), position=NoPosition())
    layer = Layer(mixer, EXPERTS if operator == "moe" else Swiglu(WIDTHS[0]), Gate("mix", "token"))
    tier, where = Tier(check.tier), Where(check.device, dtype=check.dtype)
    if reason := dispatch.unsupported(operator, tier, layer, where):
        return reason
    if operator == "attention" and dispatch.is_native(mixer, tier, where):
        return "vLLM's own attention serves it"
    return "vLLM's own layer serves it" if operator == "moe" and tier is Tier.FAST else None


def perform(check: Check) -> Check:
    """Make a check; whatever goes wrong is its result."""
    try:
        if reason := why_not(check):
            return replace(check, result=NOT_HERE, detail=reason)
        failure = _attention(check) if check.function == "paged_attention" else _tokens(check)
    except Exception as error:  # whatever a compiler or driver raises
        line = (str(error).splitlines() or ["no message"])[0]
        failure = f"{type(error).__name__}: {line}"
    return replace(check, result=FAILED, detail=failure) if failure else replace(check, result=OK)


def _functions(check: Check) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The tier's function, and what it is compared with: the reference, or for the reference itself float64 on the CPU."""
    reference = dispatch.function(check.function, Tier.REFERENCE)
    tier = Tier(check.tier)
    return dispatch.function(check.function, tier), _exact(reference) if tier is Tier.REFERENCE else reference


def _exact(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def exact(*args: Any, **options: Any) -> Tensor:
        first = args[0]
        return function(*(_double(arg) for arg in args), **{k: _double(v) for k, v in options.items()}).to(first.device)

    return exact


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu().double() if value.is_floating_point() else value.cpu()
    if hasattr(value, "block_table_RP"):
        return replace(
            value, block_table_RP=value.block_table_RP.cpu(), lengths_R=value.lengths_R.cpu(),
            starts_R1=value.starts_R1.cpu(),
        )  # fmt: skip
    return value


def _attention(check: Check) -> str | None:
    """Named batches over caches of both layouts; then a longer context, as a layer checks itself when it starts."""
    function, expected = _functions(check)
    dtype, pattern = getattr(torch, check.dtype), PATTERNS[check.what]
    options = {"scale": 0.3, "pattern": pattern}
    compiles = check.tier != Tier.REFERENCE.value
    for heads, kv_heads, size in SHAPES[:1] if compiles else SHAPES:
        for layout in ("HND",) if check.tier == Tier.COMPILED.value else ("HND", "NHD"):
            for name, requests in BATCHES.items():
                inputs = make_batch(requests, PAGE, layout, heads, kv_heads, size, dtype).to(check.device)
                if failure := _differs(function, expected, inputs, dtype, options):
                    return f"{failure}, in batch {name!r} with cache layout {layout}"
    if compiles:
        heads, kv_heads, size = SHAPES[0]
        cache = torch.zeros(5, kv_heads, PAGE, 2 * size, dtype=dtype, device=check.device)
        return self_check(function, cache, heads, 512, 256, **options)
    return None


def _differs(
    function: Callable[..., Tensor], expected: Callable[..., Tensor], inputs: PagedInputs, dtype: torch.dtype,
    options: dict[str, Any],
) -> str | None:  # fmt: skip
    right = expected(inputs.query_THD, inputs.cache_BKNC, inputs.batch, **options).float()
    actual = function(inputs.query_THD, inputs.cache_BKNC, inputs.batch, **options).float()
    difference, largest = (actual - right).abs().max(), right.abs().max()
    if difference <= BUDGET[dtype] * largest:  # so NaN is no agreement, and zeros only of zeros are
        return None
    error = (difference / largest).item()
    return f"differs from the reference by {error:.3g} of the largest value (budget {BUDGET[dtype]:g})"


def _tokens(check: Check) -> str | None:
    """Operators of single tokens, as a layer checks itself, in several widths."""
    function, expected = _functions(check)
    dtype = getattr(torch, check.dtype)
    experts = check.function == "moe"
    # Experts are compiled for each width, which takes them longest.
    for width in WIDTHS[:1] if experts and check.tier == Tier.COMPILED.value else WIDTHS:
        for rest in _parameters(check, width, dtype):
            like = [torch.empty(0, width, dtype=dtype, device=check.device)]
            like *= 2 if check.function == "knowledge_gate" else 1
            if experts:
                like.append(torch.empty(0, EXPERTS.num_experts, device=check.device))
            failure = check_tokens(function, expected, like, rest)
            if failure is None and check.function == "knowledge_gate":
                failure = check_tokens(folding(function, rest[0]), expected, like, rest)
            if failure is not None:
                return f"{failure}, with width {width}"
    return None


def _parameters(check: Check, width: int, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(check.device, dtype)

    if check.function == "knowledge_bank":
        yield randn(SLOTS, width), randn(SLOTS, width), width**-0.5
        return
    if check.function == "moe":
        count, inner = EXPERTS.num_experts, EXPERTS.intermediate_size
        into = [randn(count, inner, width) * width**-0.5 for _ in range(2)]
        out = randn(count, width, inner) * inner**-0.5
        yield torch.linspace(-0.2, 0.2, count, device=check.device), *into, out, EXPERTS
        return
    weight = randn(width, 2 * width) * width**-0.5
    yield weight, randn(width), check.what
    if check.tier != Tier.COMPILED.value:
        yield weight, None, check.what


def check_all(limit: float | None = None) -> list[Check]:
    """Make all checks, in processes that may die.

    Args:
        limit: seconds for those that compile; None for what `LIMITS` says. What is not done by then is NOT_CHECKED.
    """
    where = device()
    todo = checks(where)
    now, quick = time.monotonic(), sum(not compiles(check) for check in todo)
    done: list[Check] = []
    for stop, end in ((quick, now + QUICK_LIMIT), (len(todo), now + (LIMITS[where] if limit is None else limit))):
        while len(done) < stop and time.monotonic() < end:
            found, how = _in_process(range(len(done), stop), end)
            done += found
            if how is None:
                break
            if len(done) < stop:
                done.append(replace(todo[len(done)], result=FAILED, detail=f"ended its process ({how})"))
        if len(done) < stop:
            break
    late = "no time was left; what was compiled is kept on disk, so the next run gets further"
    return done + [replace(check, detail=late) for check in todo[len(done) :]]


def _in_process(numbers: range, end: float) -> tuple[list[Check], str | None]:
    """Those of the numbered checks that a process made, and how it died; None if it did not, or was out of time."""
    with tempfile.TemporaryDirectory(prefix="tiers-doctor-") as name:
        out, log = Path(name) / "checks", Path(name) / "log"
        which = [str(out), str(numbers.start), str(numbers.stop)]
        # -P: the current folder has no say in what is imported.
        command = [sys.executable, "-P", "-m", "tiers.vllm_model.doctor_operators", *which]
        with open(log, "wb") as stream:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
            )
        try:
            code: int | None = process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Compilers that it started are of its session.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = out.read_text().splitlines() if out.is_file() else []
        found = []
        for line in lines:
            with suppress(ValueError):
                found.append(Check(**json.loads(line)))
        return found, None if code in (0, None) else ended(code, log)


def rows(done: Sequence[Check]) -> list[tuple[str, str, str, str, str, str]]:
    """For the table: operator, what, tier, device, dtypes, result; checks that came out alike share a row."""
    dtypes: dict[tuple[str, ...], list[str]] = {}
    for check in done:
        result = ": ".join(filter(None, (check.result, check.detail)))
        dtypes.setdefault((check.function, check.what, check.tier, check.device, result), []).append(check.dtype)
    whats: dict[tuple[str, ...], list[str]] = {}
    for (function, what, tier, where, result), names in dtypes.items():
        whats.setdefault((function, tier, where, ", ".join(names), result), []).append(what)
    table = [
        (function, ", ".join(filter(None, names)), tier, where, dtype, result)
        for (function, tier, where, dtype, result), names in whats.items()
    ]
    order = [name for functions in dispatch.OPS.values() for name in functions]
    return sorted(table, key=lambda row: order.index(row[0]))


def main(out: Path, numbers: slice) -> None:
    """Make the numbered checks, a line for each as soon as it is done."""
    threads = torch.get_num_threads()
    with open(out, "w") as stream:
        for check in checks(device())[numbers]:
            # On tensors this small, threads mostly wait for each other, for seconds if the machine is busy. What is
            # compiled is compiled for a number of threads, so that has to be the one of serving.
            torch.set_num_threads(1 if check.tier == Tier.REFERENCE.value else threads)
            print(json.dumps(asdict(perform(check))), file=stream, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), slice(int(sys.argv[2]), int(sys.argv[3])))
