"""One call of an operator by itself: in memory of its own, computed again by the reference, judged, and kept in a file.

Legend: T query tokens of a call, H query heads, KV key/value heads, D head size, B blocks, N tokens per block, M model width.
"""

import os
import tempfile
import time
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
from tiers.vllm_model import compat, dispatch
from tiers.vllm_model.check_rows import Row, Verdict, judge
from tiers.vllm_model.plan import Tier

FORMAT = 2


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
