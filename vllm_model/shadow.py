"""Shadow checks: while serving, the reference computes a sampled share of the steps again, for one layer each.

What the tiers have computed is only read. The reference works on copies, in memory of its own, behind the output, so that
no answer can change; whatever goes wrong here is counted and logged, and serving goes on. docs/shadow.md has the details.

Legend: T query tokens of a call, H query heads, KV key/value heads, D head size, B blocks, N tokens per block, M model width.
"""

import os
import random
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiers.reference.errors import ConfigError
from tiers.reference.ops.attention import Pattern
from tiers.reference.ops.bias import Bias
from tiers.reference.ops.paged_attention import Batch
from tiers.vllm_model import compat, dispatch, metrics
from tiers.vllm_model.check_rows import Row, Verdict, judge
from tiers.vllm_model.plan import Tier

# What one check looks at, at most: a long prompt must not hold up everybody else's tokens for seconds.
MAX_ROWS = 64
MAX_KEYS = 2**16

# Of one process: each may hold all pages of a step, and a tier that is wrong is wrong at every step.
MAX_DUMPS = 8
# Bytes; of a larger step only what was compared is kept.
MAX_DUMP = 2**30

FORMAT = 2

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


# ---- one call of an operator --------------------------------------------------------------------------------------------


@dataclass
class Call:
    """One call of a function of dispatch.OPS, by itself.

    Attributes:
        function: its name.
        tensors: its tensors. Of paged_attention: query, cache (only pages that are used), block_table, lengths, starts.
        options: its other arguments.
        output: what the tier made of it.
    """

    function: str
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    output: Tensor

    def run(self, function: Callable[..., Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Call an implementation, in a dtype other than the one served if one is given."""
        t = self.tensors
        if self.function == "paged_attention":
            lengths, starts = t["lengths"].tolist(), t["starts"].tolist()
            longest = max(stop - start for start, stop in pairwise(starts))
            batch = Batch(t["block_table"], t["lengths"], t["starts"], longest, max(lengths))
            # The reference casts the pages that it gathers itself.
            query = t["query"] if dtype is None else t["query"].to(dtype)
            return function(query, t["cache"], batch, **self.options)
        cast = {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in t.items()}
        if self.function == "knowledge_bank":
            return function(cast["hidden"], cast["keys"], cast["values"], self.options["scale"])
        bias = cast.get("bias")
        return function(cast["hidden"], cast["knowledge"], cast["weight"], bias, self.options["mode"])

    def requests(self) -> list["Call"]:
        """Attention of each request by itself."""
        t, calls = self.tensors, []
        starts = t["starts"].tolist()
        for i, (start, stop) in enumerate(pairwise(starts)):
            own = {
                "query": t["query"][start:stop], "cache": t["cache"], "block_table": t["block_table"][i : i + 1],
                "lengths": t["lengths"][i : i + 1], "starts": t["starts"][i : i + 2] - start,
            }  # fmt: skip
            calls.append(replace(self, tensors=own, output=self.output[start:stop]))
        return calls

    def bytes(self) -> int:
        """Of all tensors."""
        return sum(x.numel() * x.element_size() for x in (*self.tensors.values(), self.output))


Windows = Sequence[tuple[int, int, int]]


def gathered(
    query_THD: Tensor, cache_BKNC: Tensor, batch: Batch, output_THD: Tensor, options: dict[str, Any],
    windows: Windows, lengths: Sequence[int], starts: Sequence[int],
) -> Call:  # fmt: skip
    """A part of a batch in memory of its own: some query tokens, and the pages that they can see, under new numbers.

    Args:
        query_THD, cache_BKNC, batch, options: as of `paged_attention`.
        output_THD: what the tier made of it.
        windows: request, and first and last + 1 of its query tokens. Later tokens of the request are left out of its context.
        lengths, starts: of the batch, on the host.
    """
    device, page = query_THD.device, cache_BKNC.shape[2]
    rows = torch.cat([torch.arange(starts[r] + first, starts[r] + stop) for r, first, stop in windows]).to(device)
    contexts = [lengths[r] - (starts[r + 1] - starts[r]) + stop for r, _, stop in windows]
    used = [batch.block_table_RP[r, : -(-n // page)].long() for (r, _, _), n in zip(windows, contexts, strict=True)]
    blocks, places = torch.cat(used).unique(return_inverse=True)
    table = torch.nn.utils.rnn.pad_sequence(list(places.split([len(ids) for ids in used])), batch_first=True)
    # The order of heads and tokens in memory stays: a tier might be wrong for one of them only.
    tokens_first = cache_BKNC.stride(2) > cache_BKNC.stride(1)
    cache = cache_BKNC.transpose(1, 2)[blocks].transpose(1, 2) if tokens_first else cache_BKNC[blocks]
    sizes = torch.tensor([0, *(stop - first for _, first, stop in windows)])
    return Call(
        "paged_attention",
        {
            "query": query_THD[rows], "cache": cache, "block_table": table.to(torch.int32),
            "lengths": torch.tensor(contexts, dtype=torch.int32, device=device),
            "starts": sizes.cumsum(0).to(device, torch.int32),
        },
        options, output_THD[rows],
    )  # fmt: skip


def gate_call(name: str, tokens: tuple[Tensor, ...], rest: tuple[Any, ...], output_TM: Tensor, rows: slice) -> Call:
    """Some tokens of a call of a function of the gate, with the arguments that `GateTier` has."""
    if name == "knowledge_bank":
        keys, values, scale = rest
        return Call(
            name, {"hidden": tokens[0][rows], "keys": keys, "values": values}, {"scale": scale}, output_TM[rows]
        )
    weight, bias, mode = rest
    tensors = {"hidden": tokens[0][rows], "knowledge": tokens[1][rows], "weight": weight}
    return Call(name, tensors if bias is None else {**tensors, "bias": bias}, {"mode": mode}, output_TM[rows])


def expected(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the reference makes of a call: exact, in the dtype served, and which tokens chose their keys clearly.

    Exact is float32, and float64 where float32 is served: the reference in float32 has errors of its own.
    """
    from tiers.vllm_model.check_choices import MARGIN, watched

    reference, served = dispatch.function(call.function, Tier.REFERENCE), call.output.dtype
    precise = torch.float64 if served == torch.float32 else torch.float32
    noisy = call.run(reference, served)
    if call.function != "paged_attention":
        return call.run(reference, precise), noisy, None
    exact, decided = [], []
    for part in call.requests():
        with watched(MARGIN[served]) as close:
            exact.append(part.run(reference, precise))
        length = int(part.tensors["lengths"])
        decided += [position not in close.positions() for position in range(length - len(exact[-1]), length)]
    return torch.cat(exact), noisy, torch.tensor(decided)


def judged(row: Row, actual: Tensor, exact: Tensor, noisy: Tensor, decided_T: Tensor | None) -> Row:
    """As `judge`, of the tokens that can tell: not where the reference is not finite, nor where both are nothing but zero."""
    actual, exact, noisy = (x.flatten(1).cpu() for x in (actual, exact, noisy))
    if actual.shape != exact.shape:
        return judge(row, actual, exact, noisy)
    zero_T = (exact == 0).all(-1) & (actual == 0).all(-1)
    tells_T = torch.isfinite(exact).all(-1) & torch.isfinite(noisy).all(-1) & ~zero_T
    decided_T = None if decided_T is None else decided_T[tells_T]
    judge(row, actual[tells_T], exact[tells_T], noisy[tells_T], decided_T)
    row.total = len(exact)
    if len(exact) and bool(zero_T.all()):
        row.compared, row.verdict, row.note = row.total, Verdict.PASS, "zero in both"
    elif not tells_T.any():
        row.note = "the reference is not finite either"
    return row


# ---- sampling -----------------------------------------------------------------------------------------------------------


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


# ---- dumps --------------------------------------------------------------------------------------------------------------

_PATTERNS = {kind.kind: kind for kind in Pattern.__args__}


def write(folder: Path, row: Row, call: Call, number: int) -> Path:
    """Keep a call in a file that only this user can read; it is there completely or not at all.

    Args:
        folder: where.
        row: what was found.
        call: the inputs, and the output of the tier.
        number: of this process.
    """
    options = dict(call.options)
    if isinstance(bias := options.get("bias"), Bias):
        options["bias"] = {"kind": bias.kind} | {name: _kept(tensor) for name, tensor in bias.tensors().items()}
    if "pattern" in options:
        options["pattern"] = {"kind": options["pattern"].kind, **asdict(options["pattern"])}
    content = {
        "format": FORMAT, "operator": row.what, "function": call.function, "layer": row.layer, "tier": row.tier,
        "dtype": str(call.output.dtype).removeprefix("torch."),
        "options": {name: _kept(value) for name, value in options.items()},
        "inputs": {name: _kept(tensor) for name, tensor in call.tensors.items()},
        "output": _kept(call.output),
        "found": {"error": row.error, "noise": row.noise, "budget": row.budget, "note": row.note},
        "versions": {"tiers": version("vllm-tiers"), "vllm": str(compat.vllm_version()), "torch": str(torch.__version__)},
        "device": call.output.device.type,
    }  # fmt: skip
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = folder / f"shadow-{stamp}-{os.getpid()}-{number}-layer{row.layer}-{call.function}.pt"
    # Made with mode 0600.
    descriptor, unfinished = tempfile.mkstemp(prefix=".shadow-", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            torch.save(content, stream)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
    return path


def _kept(value: Any) -> Any:
    """A copy on the CPU: saving a view would save all that it is a view of."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def read(path: Path) -> tuple[dict[str, Any], Call]:
    """What `write` has written: everything as plain data, and the call.

    Raises:
        ConfigError: the file is not there, or no dump.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds: whatever can be wrong with a file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"--replay {path}: cannot be read as a dump of a shadow check ({reason})") from None
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise ConfigError(
            f"--replay {path}: format is {found!r}; expected {FORMAT}, a file that tiers serve --shadow wrote"
        )
    try:
        options = dict(content["options"])
        if "pattern" in options:
            pattern = dict(options["pattern"])
            options["pattern"] = _PATTERNS[pattern.pop("kind")](**pattern)
            options["bias"] = None if options["bias"] is None else Bias(**options["bias"])
        call = Call(content["function"], content["inputs"], options, content["output"])
        getattr(torch, content["dtype"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--replay {path}: the dump is damaged ({type(error).__name__}: {error})") from None
    return content, call
