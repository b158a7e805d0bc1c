"""Named ranges around the modules of a model inside vLLM, and what each of them has to do at least.

Ranges come from hooks that are there only while a model is profiled; they are ranges of torch's profiler, and NVTX ranges
on CUDA:

    tiers/prefill, tiers/decode                       a step of the engine
    tiers/layer 3/attention/compiled                  an operator of a layer, and the tier that serves it
    tiers/layer 3/attention/compiled/qkv_proj         a part of it: a linear layer, or the attention itself (attn)
    tiers/embedding/vllm, tiers/norm/vllm, tiers/head/vllm

What has no tiers is served by vLLM's own layers: tier "vllm".
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tiers.reference.config import ModelConfig
from tiers.vllm_model.bench_cases import AttentionCase, GateCase

PREFILL, DECODE = "prefill", "decode"
PHASES = (PREFILL, DECODE)

NAME = re.compile(r"tiers/(?:layer (?P<layer>\d+)/)?(?P<operator>[a-z]+)/(?P<tier>[a-z]+)(?:/(?P<part>\w+))?")

NORMS = ("mixer_norm", "ffn_norm", "mixer_post_norm", "ffn_post_norm")


@dataclass(frozen=True)
class Linear:
    """A linear layer of this rank: channels read and written, and bytes of its weights."""

    read: int
    written: int
    weights: int

    def work(self, tokens: int, itemsize: int) -> tuple[float, float]:
        """The bytes that have to move and the operations for so many tokens."""
        moved = self.weights + tokens * (self.read + self.written) * itemsize
        return moved, 2 * tokens * self.read * self.written


@dataclass
class Watched:
    """What the hooks have seen.

    Attributes:
        linears: by range.
        steps: phase, and positions [T] of the tokens of all requests, one after another.
        phase: of the step that runs.
    """

    linears: dict[str, Linear] = field(default_factory=dict)
    steps: list[tuple[str, Tensor]] = field(default_factory=list)
    phase: str = PREFILL

    def requests(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """Per step its phase, and of each request how many tokens it brought and how many there were with them."""
        return [(phase, requests_of(positions.tolist())) for phase, positions in self.steps]


def requests_of(positions: list[int]) -> list[tuple[int, int]]:
    """Cut a batch where positions do not go on: tokens and context of each request.

    Requests of a decode step are equally long here, so that two neighbours never look like one.
    """
    starts = [i for i in range(len(positions)) if not i or positions[i] != positions[i - 1] + 1]
    ends = [*starts, len(positions)][1:]
    return [(end - start, positions[end - 1] + 1) for start, end in zip(starts, ends, strict=True)]


def attention_tier(mixer: Any) -> str:
    """The tier that serves a layer's attention now; vLLM's own attention is of the fast one."""
    tier = getattr(mixer.attn.impl, "tier", None)
    return "fast" if tier is None else tier.value


def modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that get a range, with its name.

    Args:
        model: a TiersForCausalLM with all layers.
    """
    inner = model.model
    yield "tiers/embedding/vllm", inner.embed_tokens
    for number, layer in enumerate(inner.layers):
        for norm in (getattr(layer, name) for name in NORMS):
            if norm is not None:
                yield f"tiers/layer {number}/norm/vllm", norm
        served = getattr(layer.ffn, "served", None)
        ffn = "ffn/vllm" if served is None else f"moe/{served.tier.value}"
        sublayers = [] if layer.mixer is None else [(f"attention/{attention_tier(layer.mixer)}", layer.mixer)]
        sublayers += [] if layer.ffn is None else [(ffn, layer.ffn)]
        if layer.gate is not None:
            sublayers.append((f"gate/{layer.gate.served.tier.value}", layer.gate))
        for name, module in sublayers:
            yield f"tiers/layer {number}/{name}", module
            if module is not layer.gate:
                yield from ((f"tiers/layer {number}/{name}/{part}", child) for part, child in _parts(module))
    yield "tiers/norm/vllm", inner.norm
    yield "tiers/head/vllm", model.logits_processor


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if name == "attn" or as_linear(child) is not None:
            yield name, child


def as_linear(module: Any) -> Linear | None:
    """Shape of one of vLLM's linear layers; None of another module."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if isinstance(module, ParallelLMHead):
        return Linear(module.embedding_dim, module.num_embeddings_per_partition, _weight_bytes(module))
    if not isinstance(module, LinearBase):
        return None
    read = getattr(module, "input_size_per_partition", module.input_size)
    written = getattr(module, "output_size_per_partition", module.output_size)
    return Linear(read, written, _weight_bytes(module))


def packed_bytes(module: Any) -> int:
    """Bytes of a weight that vLLM's CPU build has packed, which leaves its parameter empty; 0 of another module."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.numel() or not hasattr(module, "input_size"):
        return 0
    read = getattr(module, "input_size_per_partition", module.input_size)
    written = getattr(module, "output_size_per_partition", module.output_size)
    return read * written * weight.itemsize


def _weight_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters(recurse=False)) + packed_bytes(module)


@contextmanager
def ranges(model: Any) -> Iterator[Watched]:
    """Put ranges around the modules while the block runs; afterwards there is no hook left."""
    watched = Watched()
    handles: list[Any] = []
    try:
        for name, module in modules(model):
            handles += _hook(name, module)
            linear = as_linear(model.lm_head if name.startswith("tiers/head") else module)
            if linear is not None:
                watched.linears[name] = linear

        def begin(_module: nn.Module, args: Any) -> None:
            # A copy, since vLLM writes its buffer again; read when all is done, since reading waits for the device.
            watched.steps.append((watched.phase, args[0].clone()))

        # Not of the model as a whole: vLLM's decorator for torch.compile calls its forward past its hooks.
        handles.append(model.model.layers[0].register_forward_pre_hook(begin))
        yield watched
    finally:
        for handle in handles:
            handle.remove()


def _hook(name: str, module: nn.Module) -> list[Any]:
    running: list[Any] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        running.append(marked(name))
        running[-1].__enter__()

    def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
        running.pop().__exit__(None, None, None)

    # Also when the module raises, so that ranges stay nested.
    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


@contextmanager
def marked(name: str) -> Iterator[None]:
    """A range of torch's profiler and, on CUDA, of NVTX, which Nsight Systems and Nsight Compute show."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if cuda:
            torch.cuda.nvtx.range_pop()


def work(
    name: str, linears: dict[str, Linear], config: ModelConfig, requests: list[tuple[int, int]], itemsize: int
) -> tuple[float, float] | None:
    """The least bytes and operations of one range in one step; None where they are not known.

    Args:
        name: of the range.
        linears: see Watched.
        config: the model.
        requests: tokens and context of each request of the step.
        itemsize: bytes of an activation, and of an entry of the cache.
    """
    match = NAME.fullmatch(name)
    assert match is not None
    tokens = sum(count for count, _ in requests)
    if name in linears:
        # The head reads the last token of each request only.
        return linears[name].work(len(requests) if match["operator"] == "head" else tokens, itemsize)
    if match["operator"] == "embedding":
        return 2 * tokens * config.hidden_size * itemsize, 0
    if match["layer"] is None:
        return None
    layer = config.layers[int(match["layer"])]
    if match["part"] == "attn" and layer.mixer is not None:
        needs = [AttentionCase(layer.mixer, 1, context, count).needed(itemsize) for count, context in requests]
        return sum(moved for moved, _ in needs), sum(operations for _, operations in needs)
    if match["operator"] == "gate" and layer.gate is not None:
        return GateCase(layer.gate, config.hidden_size, tokens).needed(itemsize)
    return None
