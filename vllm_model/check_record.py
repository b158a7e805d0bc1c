"""Record what the layers of a model read and write: of a model inside vLLM (in its workers), and of the reference.

One request runs at a time, so that the rows of a step are consecutive tokens of one sequence; rows are put in order by
their positions. Names of what is recorded, per layer:

    attention in, attention out    of the mixer, after its norm and before the residual
    ffn in, ffn out
    experts                        [T, K] chosen by the router, where the ffn has experts
    gate in, gate out
    hidden                         the residual stream behind the layer

and once, behind the last layer, `final`: what the head reads.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tiers.reference.ops.moe import route as _route

# The recorder of this process; a worker has one model.
_recorder: Any = None


@dataclass
class Record:
    """What one sequence did.

    Attributes:
        tensors: (layer, name) to [T, width], on the CPU; `final` is of layer -1.
        positions: [T] of the rows.
        steps: tokens of each step, in order.
    """

    tensors: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    steps: list[int] = field(default_factory=list)


class Recorder:
    """Hooks on the layers of a model.

    Args:
        layers: number to module; each has `mixer`, `ffn` and, maybe, `gate`.
        norm: the last one.
        inside_vllm: modules have vLLM's signatures rather than the reference's.
    """

    def __init__(self, layers: dict[int, Any], norm: Any, inside_vllm: bool) -> None:
        self.parts: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
        self.positions: list[Tensor] = []
        self.handles: list[Any] = []
        first = min(layers)
        x_at = 1 if inside_vllm else 0
        for number, layer in layers.items():
            if layer.mixer is not None:
                self._hook(layer.mixer, number, "attention", lambda args: args[x_at])
            if layer.ffn is not None:
                self._hook(layer.ffn, number, "ffn", lambda args: args[0])
                if hasattr(layer.ffn, "router"):
                    self._choices(layer.ffn, number)
            if layer.gate is not None:
                self._hook(layer.gate, number, "gate", lambda args: args[0])

            def behind(_module: nn.Module, args: Any, out: Any, number: int = number) -> None:
                if number == first:
                    self.positions.append((args[0] if inside_vllm else args[1]).detach().to("cpu", copy=True))
                if inside_vllm:
                    delta, h = out
                    out = h if delta is None else h + delta
                self._keep(number, "hidden", out)

            self.handles.append(layer.register_forward_hook(behind))

        def last(_module: nn.Module, args: Any, out: Any) -> None:
            self._keep(-1, "final", out[0] if isinstance(out, tuple) else out)

        self.handles.append(norm.register_forward_hook(last))

    def _hook(self, module: nn.Module, number: int, name: str, read: Callable[[Any], Tensor]) -> None:
        def hook(_module: nn.Module, args: Any, out: Tensor) -> None:
            self._keep(number, f"{name} in", read(args))
            self._keep(number, f"{name} out", out)

        self.handles.append(module.register_forward_hook(hook))

    def _choices(self, ffn: Any, number: int) -> None:
        def hook(_module: nn.Module, args: Any, _out: Tensor) -> None:
            weight, correction = ffn.router.weight, ffn.correction_bias
            exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
            logits = nn.functional.linear(args[0].to(exact), weight.to(exact))
            # As the function that is not watched: who watches the reference does not count these.
            ids = _route(logits, None if correction is None else correction.to(exact), ffn.config)[1]
            self._keep(number, "experts", ids)

        self.handles.append(ffn.register_forward_hook(hook))

    def _keep(self, number: int, name: str, tensor: Tensor) -> None:
        # A copy: vLLM's norms and buffers are written again.
        self.parts[number, name].append(tensor.detach().to("cpu", copy=True))

    def take(self) -> Record:
        """What was recorded since the last call, as one sequence."""
        if not self.positions:
            return Record()
        positions = torch.cat(self.positions)
        order = positions.argsort(stable=True)
        record = Record(
            {key: torch.cat(parts)[order] for key, parts in self.parts.items()},
            positions[order],
            [len(part) for part in self.positions],
        )
        self.parts.clear()
        self.positions.clear()
        return record

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()


# ---- in the workers of vLLM; called through LLM.apply_model -----------------------------------------------------------


def start_in_worker(model: Any) -> None:
    """Record every layer of this rank."""
    global _recorder
    inner = model.model
    layers = {i: inner.layers[i] for i in range(inner.start_layer, inner.end_layer)}
    _recorder = Recorder(layers, inner.norm, inside_vllm=True)


def take_in_worker(model: nn.Module) -> Record:
    """What this rank recorded since the last call. Outputs are whole: ranks have added up theirs."""
    return _recorder.take()


def logits_in_worker(model: Any, final_TM: Tensor) -> Tensor | None:
    """[T, V] what the head makes of what it reads; None on ranks that gather nothing."""
    weight = next(model.parameters())
    rows = [model.compute_logits(part.to(weight.device, weight.dtype)) for part in final_TM.split(256)]
    return None if rows[0] is None else torch.cat([part.float().cpu() for part in rows])


def counts_in_worker(model: nn.Module) -> dict[tuple[str, str], int]:
    """Calls by operator and tier in this process."""
    from tiers.vllm_model.dispatch import COUNTS

    return dict(COUNTS)


# ---- of the reference -------------------------------------------------------------------------------------------------


def record_reference(model: Any, ids_T: Tensor, step: int | None = None) -> tuple[Record, Tensor]:
    """Run the reference model over a sequence.

    Args:
        model: a `tiers.reference.model.ReferenceModel`.
        ids_T: the sequence.
        step: tokens at a time; None for all at once.

    Returns:
        What it recorded, and logits [T, V].
    """
    from tiers.reference.model import Cache

    recorder = Recorder(dict(enumerate(model.layers)), model.norm, inside_vllm=False)
    try:
        cache = Cache()
        with torch.inference_mode():
            logits = [model(part, cache) for part in ids_T.split(step or len(ids_T))]
        return recorder.take(), torch.cat(logits)
    finally:
        recorder.remove()
