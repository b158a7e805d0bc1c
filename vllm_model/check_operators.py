"""Operators by themselves, on every tier that this device has, with inputs that the reference recorded from a real prompt.

Legend: T query tokens, S tokens of a context, H query heads, KV key/value heads, D head size, B blocks, N tokens per block.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tiers.reference import model as reference_model
from tiers.reference.config import ModelConfig, TopK
from tiers.reference.heads import HeadLayout
from tiers.reference.ops.attention import attention
from tiers.reference.ops.knowledge_gate import fold
from tiers.reference.ops.paged_attention import Batch
from tiers.vllm_model import dispatch
from tiers.vllm_model.check_choices import MARGIN, watched
from tiers.vllm_model.check_layers import Reference
from tiers.vllm_model.check_record import record_reference
from tiers.vllm_model.check_rows import Row, Verdict, judge
from tiers.vllm_model.dispatch import Choice
from tiers.vllm_model.plan import Tier

PAGE = 16

# Query tokens at the end of the context, by case.
CASES = {"decode": 1, "chunk": 5, "prefill": 0}


def rows(config: ModelConfig, choices: Sequence[Choice], reference: Reference, ids_T: Tensor) -> list[Row]:
    """One layer of each kind, every tier but the reference itself."""
    device = reference.noisy.embed_tokens.weight.device
    inputs = recorded_attention(reference, ids_T.to(device))
    found: list[Row] = []
    seen: set[Any] = set()
    for choice in choices:
        layer = config.layers[choice.layer]
        kind = (choice.operator, {"attention": layer.mixer, "moe": layer.ffn, "gate": layer.gate}[choice.operator])
        if kind in seen:
            continue
        seen.add(kind)
        for tier in choice.tiers:
            # Dense attention and experts of the fast tier are vLLM's own, which only an engine runs.
            native = choice.operator == "moe" and tier is Tier.FAST
            if tier is Tier.REFERENCE or native or (choice.native and tier is choice.tier):
                continue
            guarded = {"attention": attention_rows, "moe": moe_rows, "gate": gate_rows}[choice.operator]
            found += guarded(choice.layer, tier, config, reference, inputs, ids_T)
    return found


def recorded_attention(reference: Reference, ids_T: Tensor) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value of every layer with attention for a sequence, in the dtype served, heads in contiguous groups of one size."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    original = reference_model.attention

    def recording(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        found.append((query, key, value))
        return original(query, key, value, **options)

    reference_model.attention = recording  # type: ignore[assignment]
    try:
        record_reference(reference.noisy, ids_T)
    finally:
        reference_model.attention = original
    config = reference.noisy.config
    numbers = [number for number, layer in enumerate(config.layers) if layer.mixer is not None]
    arranged = {}
    for number, mixer, (query, key, value) in zip(numbers, config.mixers, found, strict=True):
        layout = HeadLayout.of(mixer.heads, mixer.num_kv_heads)
        arranged[number] = (layout.arrange(query, 1, dim=1, copy=True), key, value)
    return arranged


def attention_rows(
    number: int, tier: Tier, config: ModelConfig, reference: Reference, inputs: Any, ids_T: Tensor
) -> Iterator[Row]:
    """The end of the sequence, and all of it, in a paged cache whose pages lie in disorder."""
    mixer = config.layers[number].mixer
    assert mixer is not None
    query, key, value = inputs[number]
    noisy_mixer: Any = reference.noisy.layers[number].mixer
    bias, decay = noisy_mixer.bias(), noisy_mixer.decay_D
    if bias is not None:
        bias = bias.arranged(HeadLayout.of(mixer.heads, mixer.num_kv_heads))
    options: dict[str, Any] = {
        "scale": mixer.softmax_scale, "pattern": mixer.pattern, "bias": bias, "decay_D": decay, "softcap": mixer.softcap,
    }  # fmt: skip
    function = dispatch.function("paged_attention", tier)
    for case, tokens in CASES.items():
        part = query[-tokens:] if tokens else query
        row = Row("operator", number, "attention", tier.value, case)
        cache, batch = paged(key, value, len(part))
        with watched(MARGIN[reference.dtype]) as close:
            exact = _plain(part, key, value, reference.precise, options)
        noisy = _plain(part, key, value, reference.dtype, options)
        decided = close.decided(len(key))[-len(part) :]
        call = functools.partial(function, part, cache, batch, **options)
        yield _guarded(row, call, exact, noisy, decided)
        if isinstance(mixer.pattern, TopK) and case == "decode":
            yield _guarded_set(
                Row("operator", number, "selected keys", tier.value, case), function, part, key, batch, options,
                MARGIN[reference.dtype],
            )  # fmt: skip


def _plain(query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
    return attention(query.to(dtype), key.to(dtype), value.to(dtype), **options).flatten(1).cpu()


def paged(key_SKD: Tensor, value_SKD: Tensor, queries: int) -> tuple[Tensor, Batch]:
    """Keys and values in pages of a cache, the last page first, and the batch of one request."""
    length, kv, size = key_SKD.shape
    pages = -(-length // PAGE)
    both = torch.cat((key_SKD, value_SKD), dim=-1)
    both = torch.nn.functional.pad(both, (0, 0, 0, 0, 0, pages * PAGE - length))
    cache = both.view(pages, PAGE, kv, 2 * size).transpose(1, 2).flip(0).contiguous()
    device = key_SKD.device
    return cache, Batch(
        torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=device)[None],
        torch.tensor([length], dtype=torch.int32, device=device),
        torch.tensor([0, queries], dtype=torch.int32, device=device), queries, length,
    )  # fmt: skip


def _guarded(row: Row, call: Callable[[], Tensor], exact: Tensor, noisy: Tensor, decided: Tensor | None) -> Row:
    try:
        with torch.inference_mode():
            actual = call()
    except Exception as error:  # whatever a compiler or a driver raises: the tier cannot compute this
        row.verdict, row.error = Verdict.FAIL, float("inf")
        row.note = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        return row
    return judge(row, actual.flatten(1).cpu(), exact, noisy, decided)


def _guarded_set(
    row: Row,
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    batch: Batch,
    options: dict[str, Any],
    margin: float,
) -> Row:
    """Which keys a tier keeps, read off by values that are 1 in one channel for one key: the output is their weights.

    A key that only one of tier and reference keeps counts if its score is not within `margin` of the threshold.
    """
    length, _, size = key.shape
    weights = []
    try:
        for start in range(0, length, size):
            value = torch.zeros_like(key)
            channels = torch.arange(min(size, length - start), device=key.device)
            value[start + channels, :, channels] = 1
            cache, _ = paged(key, value, 1)
            with torch.inference_mode():
                weights.append(function(query, cache, batch, **options)[0, :, : len(channels)].float().cpu())
    except Exception as error:  # see `_guarded`
        row.verdict, row.note = Verdict.FAIL, f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        return row
    kept_HS = torch.cat(weights, dim=1) > 0
    expected_HS, distance_HS = _chosen(query, key, options)
    wrong = (kept_HS != expected_HS) & (distance_HS > margin)
    row.compared = row.total = int(expected_HS.sum())
    row.error = float(wrong.sum())
    row.verdict = Verdict.FAIL if wrong.any() else Verdict.PASS
    overlap = (kept_HS & expected_HS).sum().item() / max(1, row.total)
    row.note = f"{overlap:.2%} of the reference's keys" + ("" if row.error else ", others by a hair")
    if overlap == 1 and bool((kept_HS == expected_HS).all()):
        row.note = "the same keys"
    return row


def _chosen(query: Tensor, key: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """[H, S] which keys the reference keeps, in float64, and how far each score is from the lowest that is kept by rank."""
    pattern: TopK = options["pattern"]
    heads, kv = query.shape[1], key.shape[1]
    length = key.shape[0]
    distance = torch.arange(length - 1, -1, -1, device=key.device)
    keys = key.double()
    if options["decay_D"] is not None:
        keys = keys * torch.exp2(options["decay_D"].double() * distance[:, None])[:, None]
    scores = torch.einsum("hd,shd->hs", query[0].double(), keys.repeat_interleave(heads // kv, dim=1))
    scores = scores * options["scale"]
    if options["softcap"] is not None:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if options["bias"] is not None:
        scores = scores + options["bias"].values(distance[None], torch.float64)[:, 0]
    ranked = scores
    if pattern.share == "group":
        ranked = scores.view(kv, -1, length).amax(1).repeat_interleave(heads // kv, dim=0)
    always = (distance < pattern.window) | (torch.arange(length, device=key.device) < pattern.sink)
    candidates = ranked.masked_fill(always, float("-inf"))
    if int((~always).sum()) <= pattern.k:
        return torch.ones(heads, length, dtype=torch.bool), torch.full((heads, length), float("inf"))
    threshold = candidates.topk(pattern.k, dim=-1).values[:, -1:]
    far = (ranked - threshold).abs().masked_fill(always, float("inf"))
    return ((candidates >= threshold) | always).cpu(), far.cpu()


def gate_rows(
    number: int, tier: Tier, config: ModelConfig, reference: Reference, inputs: Any, ids_T: Tensor
) -> Iterator[Row]:
    """The gate, and the bank where it has one, on the residual stream of the sequence."""
    device = reference.noisy.embed_tokens.weight.device
    record, _ = record_reference(reference.noisy, ids_T.to(device))
    hidden = record.tensors[number, "gate in"].to(device)
    noisy_gate: Any = reference.noisy.layers[number].gate
    precise = reference.precise
    if noisy_gate.config.source == "bank":
        arguments = (noisy_gate.bank_keys, noisy_gate.bank_values)
        call = dispatch.function("knowledge_bank", Tier.REFERENCE)
        exact = call(hidden.to(precise), *(a.to(precise) for a in arguments), noisy_gate.scale)
        knowledge = call(hidden, *arguments, noisy_gate.scale)
        function = dispatch.function("knowledge_bank", tier)
        row = Row("operator", number, "gate", tier.value, "knowledge_bank")
        yield _guarded(row, lambda: function(hidden, *arguments, noisy_gate.scale), exact.cpu(), knowledge.cpu(), None)
    else:
        knowledge = noisy_gate.table(ids_T.to(device))
    weight, bias, mode = noisy_gate.proj.weight, noisy_gate.proj.bias, noisy_gate.config.mode
    call = dispatch.function("knowledge_gate", Tier.REFERENCE)
    exact = call(
        hidden.to(precise), knowledge.to(precise), weight.to(precise), None if bias is None else bias.to(precise), mode
    ).cpu()
    function = dispatch.function("knowledge_gate", tier)
    given = (hidden, knowledge, weight, bias, mode)
    noisy = call(*given).cpu()
    row = Row("operator", number, "gate", tier.value, "knowledge_gate")
    yield _guarded(row, lambda: function(*given), exact, noisy, None)
    if tier is not Tier.REFERENCE:
        row = Row("operator", number, "gate", tier.value, "knowledge_gate, folded")
        yield _guarded(row, lambda: function(*given, fold(knowledge, weight)), exact, noisy, None)


def moe_rows(
    number: int, tier: Tier, config: ModelConfig, reference: Reference, inputs: Any, ids_T: Tensor
) -> Iterator[Row]:
    """The experts on what the ffn of the sequence reads, by the same scores."""
    device = reference.noisy.embed_tokens.weight.device
    record, _ = record_reference(reference.noisy, ids_T.to(device))
    hidden = record.tensors[number, "ffn in"].to(device)
    ffn: Any = reference.noisy.layers[number].ffn
    matrices = ffn.matrices()
    with torch.inference_mode():
        logits = ffn.logits(hidden)
        correction = ffn.correction(logits)
        call = dispatch.function("moe", Tier.REFERENCE)
        # The router is in float32 in every tier, so what it says is given.
        exact = call(
            hidden.to(reference.precise), logits, correction,
            *([m.to(reference.precise) for m in ms] for ms in matrices), ffn.config,
        )  # fmt: skip
        noisy = call(hidden, logits, correction, *matrices, ffn.config)
    function = dispatch.function("moe", tier)
    row = Row("operator", number, "moe", tier.value, "experts")
    yield _guarded(
        row, lambda: function(hidden, logits, correction, *matrices, ffn.config), exact.cpu(), noisy.cpu(), None
    )
