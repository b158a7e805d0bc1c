"""Shadow checks: while serving, the reference computes a sampled share of the steps again, for one layer each.

What the tiers have computed is only read. The reference works on copies, in memory of its own, behind the output, so that
no answer can change; whatever goes wrong here is counted and logged, and serving goes on. docs/shadow.md has the details.

Legend: T query tokens of a call, H query heads, KV key/value heads, D head size, B blocks, N tokens per block, M model width.
"""

import os
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiers.reference.errors import ConfigError
from tiers.reference.ops.paged_attention import Batch
from tiers.vllm_model import metrics
from tiers.vllm_model.check_rows import Row, Verdict
from tiers.vllm_model.plan import Tier
from tiers.vllm_model.shadow_call import Call, Windows, expected, gate_call, gathered, judged, write

# What one check looks at, at most: a long prompt must not hold up everybody else's tokens for seconds.
MAX_ROWS = 64
MAX_KEYS = 2**16

# Of one process: each may hold all pages of a step, and a tier that is wrong is wrong at every step.
MAX_DUMPS = 8
# Bytes; of a larger step only what was compared is kept.
MAX_DUMP = 2**30

# Rates as the messages and docs/shadow.md have them.
_EXPECTED = "expected a number above 0 and at most 1, the share of the steps to check"


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        rate: share of the steps.
        dumps: folder for the inputs of checks that failed; None keeps none.
    """

    rate: float
    dumps: Path | None = None


def from_flags(rate: str | None, dumps: Path | None) -> dict[str, Any]:
    """The flags of `tiers serve` as a part of additional_config.

    Raises:
        ConfigError: names the flag, what was found, what would work.
    """
    if rate is None:
        if dumps is not None:
            raise ConfigError(
                f"--shadow-dumps is {dumps}, but nothing is checked without --shadow; give --shadow 0.01 too"
            )
        return {}
    try:
        number: Any = float(rate)
    except ValueError:
        number = rate
    found: dict[str, Any] = {"shadow": _rate(number, "--shadow")}
    # Workers may run elsewhere.
    return found if dumps is None else {**found, "shadow_dumps": str(dumps.resolve())}


def options_of(additional: Any) -> Options | None:
    """What `--additional-config '{"shadow": R, "shadow_dumps": FOLDER}'` asks for; makes the folder. None: no checks.

    Raises:
        ConfigError: as `from_flags`; or the folder cannot be written.
    """
    given = additional if isinstance(additional, dict) else {}
    rate, folder = given.get("shadow"), given.get("shadow_dumps")
    if rate is None:
        if folder is not None:
            raise ConfigError(
                "additional-config: shadow_dumps is set without shadow; expected shadow, such as 0.01, too"
            )
        return None
    rate = _rate(rate, "additional-config: shadow")
    if folder is None:
        return Options(rate)
    if not isinstance(folder, str):
        raise ConfigError(f"additional-config: shadow_dumps is {folder!r}; expected the name of a folder")
    path = Path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"shadow dumps: {folder} is no folder and cannot be made ({error})") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"shadow dumps: {folder} cannot be written; expected a folder for files of this user")
    return Options(rate, path)


def _rate(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{name} is {value!r}; {_EXPECTED}")
    return float(value)


class Shadow:
    """The checks of one worker.

    Attributes:
        options: see there.
        members: the layers that can be checked, as `TiersAttentionImpl` and `GateTier`.
    """

    def __init__(self, options: Options, seed: int = 0) -> None:
        self.options = options
        self.members: weakref.WeakSet[Any] = weakref.WeakSet()
        # Of its own, so that no other generator moves; the same on every rank, so that ranks are held up together.
        self._random = random.Random(seed)
        self._step: Callable[[], Any] = lambda: None
        self._layer: int | None = None
        self._told: set[Any] = set()
        self._dumps = 0

    def attention(
        self, member: Any, query_THD: Tensor, cache_BKNC: Tensor, batch: Batch, output_THD: Tensor, options: dict[str, Any]
    ) -> None:  # fmt: skip
        """Look at what a layer's attention has just computed, if it is its turn."""
        self._guarded(
            member, "attention", lambda: self._attention(member, query_THD, cache_BKNC, batch, output_THD, options)
        )

    def gate(
        self, member: Any, name: str, tokens: tuple[Tensor, ...], rest: tuple[Any, ...], output_TM: Tensor
    ) -> None:
        """As `attention`, of a function of the gate."""
        self._guarded(member, "gate", lambda: self._gate(member, name, tokens, rest, output_TM))

    def _guarded(self, member: Any, operator: str, look: Callable[[], None]) -> None:
        try:
            if self._due(member):
                with torch.inference_mode():
                    look()
        except Exception as error:  # whatever it is: a check is worth no answer
            metrics.count_shadow(operator, member.tier.value, None)
            if "exception" not in self._told:
                self._told.add("exception")
                metrics.logger.warning(
                    "a shadow check of layer %d (%s on tier %s) could not be made; serving goes on, further ones are only "
                    "counted: %s: %s", member.choice.layer, operator, member.tier.value, type(error).__name__, error,
                )  # fmt: skip

    def _due(self, member: Any) -> bool:
        """Whether this layer is the one to check in this step; decided at the first call of a step."""
        from vllm.forward_context import get_forward_context, is_forward_context_available

        context = get_forward_context() if is_forward_context_available() else None
        # Without metadata vLLM is measuring memory or compiling.
        if context is None or not context.attn_metadata or _capturing():
            return False
        # vLLM makes a new context for every step. A weak reference, since a new object can get the old one's address.
        if self._step() is not context:
            self._step = weakref.ref(context)
            self._layer = self._drawn()
            if self._layer is not None and _is_dummy(context):
                self._layer = None
        return member.choice.layer == self._layer and member in self._candidates()

    def _drawn(self) -> int | None:
        if self._random.random() >= self.options.rate:
            return None
        layers = sorted({member.choice.layer for member in self._candidates()})
        return self._random.choice(layers) if layers else None

    def _candidates(self) -> list[Any]:
        """The reference need not be compared with itself, unless there is nothing else."""
        everything = list(self.members)
        return [member for member in everything if member.tier is not Tier.REFERENCE] or everything

    def _attention(
        self, member: Any, query: Tensor, cache: Tensor, batch: Batch, output: Tensor, options: dict[str, Any]
    ) -> None:
        # Not `batch.host`: that would be kept in the batch, which is the tiers'.
        lengths, starts = batch.lengths_R.tolist(), batch.starts_R1.tolist()

        def of(windows: Windows) -> Call:
            return gathered(query, cache, batch, output, options, windows, lengths, starts)

        def whole() -> Call:
            pages = sum(-(-length // cache.shape[2]) for length in lengths)
            if pages * cache[0].numel() * cache.element_size() > MAX_DUMP:
                return part
            counts = [stop - start for start, stop in pairwise(starts)]
            return of([(request, 0, count) for request, count in enumerate(counts) if count])

        windows = self._windows(lengths, starts)
        if windows:
            part = of(windows)
            self._compare(member, "attention", part, whole)

    def _windows(self, lengths: Sequence[int], starts: Sequence[int]) -> list[tuple[int, int, int]]:
        """Requests at random, of each a run of its query tokens, until there are enough tokens or keys; at least one."""
        found: list[tuple[int, int, int]] = []
        rows, keys = MAX_ROWS, MAX_KEYS
        requests = [r for r in range(len(lengths)) if starts[r + 1] > starts[r]]
        for request in self._random.sample(requests, len(requests)):
            count = starts[request + 1] - starts[request]
            taken = min(count, rows)
            first = self._random.randint(0, count - taken)
            context = lengths[request] - count + first + taken
            if not taken or (found and context > keys):
                break
            found.append((request, first, first + taken))
            rows, keys = rows - taken, keys - context
        return found

    def _gate(self, member: Any, name: str, tokens: tuple[Tensor, ...], rest: tuple[Any, ...], output: Tensor) -> None:
        first = self._random.randint(0, max(0, len(output) - MAX_ROWS))
        part = gate_call(name, tokens, rest, output, slice(first, first + MAX_ROWS))

        def whole() -> Call:
            everything = gate_call(name, tokens, rest, output, slice(None))
            return part if everything.bytes() > MAX_DUMP else everything

        self._compare(member, "gate", part, whole)

    def _compare(self, member: Any, operator: str, part: Call, whole: Callable[[], Call]) -> None:
        """Judge a part of what was computed; if it fails, keep as much of the step as fits."""
        row = Row("shadow", member.choice.layer, operator, member.tier.value, part.function)
        judged(row, part.output, *expected(part))
        if row.verdict is Verdict.INCONCLUSIVE:
            return
        failed = row.verdict is Verdict.FAIL
        metrics.count_shadow(operator, row.tier, row.error, failed)
        if failed:
            self._report(row, whole)

    def _report(self, row: Row, whole: Callable[[], Call]) -> None:
        key = (row.layer, row.how, row.tier)
        keeps = self.options.dumps is not None and self._dumps < MAX_DUMPS
        if key not in self._told:
            self._told.add(key)
            metrics.logger.error(
                "layer %d: %s on tier %s differs from the reference by %.3g of a token's vector (budget %.3g; %s). The answers "
                "are the tier's; further failures of this layer are only counted, on /metrics",
                row.layer, row.how, row.tier, row.error, row.budget, row.note,
            )  # fmt: skip
        if keeps:
            assert self.options.dumps is not None
            # Counted first: a folder that cannot be written is not tried for ever.
            self._dumps += 1
            path = write(self.options.dumps, row, whole(), self._dumps)
            metrics.logger.error("the inputs of layer %d are kept: tiers check --replay %s", row.layer, path)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _is_dummy(context: Any) -> bool:
    """Whether a step is one of vLLM's warm-ups: none of its tokens has a place in the cache."""
    mapping = context.slot_mapping
    slots = next(iter(mapping.values()), None) if isinstance(mapping, dict) else None
    return slots is not None and bool((slots < 0).all())


# The configuration of the model that was built last in this process, and its checks.
_current: tuple[Callable[[], Any], Shadow] | None = None


def join(member: Any) -> Shadow | None:
    """Make a layer of the model that is being built one that can be checked.

    Returns:
        The checks of this worker; None where none were asked for.
    """
    global _current
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    options = None if config is None else options_of(config.additional_config)
    if options is None:
        return None
    if _current is None or _current[0]() is not config:
        _current = weakref.ref(config), Shadow(options)
    _current[1].members.add(member)
    return _current[1]
