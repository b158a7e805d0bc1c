"""Layers of a running engine against the reference: each fed what the engine's own layer read, and the whole way down.

Legend: T tokens of a sequence, M model width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiers.reference.model import Cache, ReferenceModel
from tiers.reference.ops import moe
from tiers.vllm_model.check_choices import floor, watched
from tiers.vllm_model.check_record import Record, record_reference
from tiers.vllm_model.check_rows import TIMES, Row, Verdict, errors, judge

# Of log-probabilities: what is let through beside the noise, in nats.
LOGPROB_SLACK = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass
class Expected:
    """What the reference says of a sequence.

    Attributes:
        exact, noisy: in a higher precision, and in the dtype served.
        exact_logits, noisy_logits: [T, V].
        split_logits: as noisy, a few tokens at a time.
        first_close: per layer the first token that this layer or one before it chose keys for by a hair.
    """

    exact: Record
    noisy: Record
    exact_logits: Tensor
    noisy_logits: Tensor
    split_logits: Tensor
    first_close: list[float]


@dataclass
class Reference:
    """The reference model twice: in the dtype served, and with the same weights in a higher precision."""

    noisy: ReferenceModel
    exact: ReferenceModel

    @property
    def dtype(self) -> torch.dtype:
        """The dtype served."""
        return self.noisy.embed_tokens.weight.dtype

    @property
    def precise(self) -> torch.dtype:
        """The higher precision."""
        return self.exact.embed_tokens.weight.dtype

    def of(self, ids_T: Tensor, step: int | None = None) -> Expected:
        """Run both over a sequence, the one in the dtype served also `step` tokens at a time, to see what cutting up does."""
        choices: list[int] = []
        with watched(floor(self.dtype)) as close:
            handles = [
                layer.register_forward_hook(lambda *_: choices.append(len(close.choices)))
                for layer in self.exact.layers
            ]
            exact, exact_logits = record_reference(self.exact, ids_T)
            for handle in handles:
                handle.remove()
        with close.again():
            noisy, noisy_logits = record_reference(self.noisy, ids_T)
        first_close = [close.first(n) for n in choices]
        split_logits = noisy_logits if step is None else record_reference(self.noisy, ids_T, step)[1]
        return Expected(exact, noisy, exact_logits, noisy_logits, split_logits, first_close)


def phases(record: Record) -> dict[str, Tensor]:
    """Rows of a record by the kind of step that computed them: prefill (from the start), chunk (goes on), decode."""
    found: dict[str, list[Tensor]] = {}
    start = 0
    for length in record.steps:
        rows = torch.arange(start, start + length)
        name = "decode" if length == 1 and start else "chunk" if start else "prefill"
        found.setdefault(name, []).append(rows)
        start += length
    return {name: torch.cat(rows) for name, rows in found.items()}


def same_input(reference: Reference, record: Record, ids_T: Tensor, tiers: Callable[[int, str], str]) -> list[Row]:
    """Feed each sublayer of the reference what the engine's own read, and compare what they make of it.

    Args:
        reference: on the same weights.
        record: of the engine, a whole sequence from position 0.
        ids_T: its tokens.
        tiers: what serves an operator of a layer.
    """
    rows = []
    positions = torch.arange(len(ids_T))
    for number in range(len(reference.exact.layers)):
        for name in ("attention", "ffn", "gate"):
            x = record.tensors.get((number, f"{name} in"))
            if x is None:
                continue
            actual = record.tensors[number, f"{name} out"]
            with watched(floor(reference.dtype)) as close, torch.inference_mode():
                exact = _sublayer(reference.exact, number, name, x.to(reference.precise), positions, ids_T)
            with close.again(), torch.inference_mode():
                noisy = _sublayer(reference.noisy, number, name, x.to(reference.dtype), positions, ids_T)
            decided = close.decided(len(ids_T))
            for phase, part in phases(record).items():
                row = Row("layer", number, name, tiers(number, name), f"same input, {phase}")
                rows.append(judge(row, actual[part], exact[part], noisy[part], decided[part]))
        if (number, "experts") in record.tensors:
            rows.append(_experts(reference, record, number, tiers(number, "ffn")))
        rows.append(_whole(reference, record, ids_T, number))
    return rows


def _experts(reference: Reference, record: Record, number: int, tier: str) -> Row:
    """Which experts the tokens of a layer get. Sets, since the order of a token's experts does not matter."""
    x, actual_TK = record.tensors[number, "ffn in"], record.tensors[number, "experts"]

    def chosen(model: ReferenceModel) -> Tensor:
        ffn: Any = model.layers[number].ffn
        logits = ffn.logits(x.to(ffn.router.weight))
        return moe.route(logits, ffn.correction(logits), ffn.config)[1].cpu()

    with watched(floor(reference.dtype)) as close, torch.inference_mode():
        exact_TK = chosen(reference.exact)
    with close.again(), torch.inference_mode():
        noisy_TK = chosen(reference.noisy)
    decided = close.decided(len(x))
    other_T, noisy_T = ((ids.sort(-1).values != exact_TK.sort(-1).values).any(-1) for ids in (actual_TK, noisy_TK))
    row = Row("layer", number, "experts", tier, "same input", compared=int(decided.sum()), total=len(x))
    row.error, row.noise = other_T.double().mean().item(), noisy_T.double().mean().item()
    failed = bool((other_T & decided).any())
    row.verdict = Verdict.FAIL if failed else Verdict.PASS if row.compared else Verdict.INCONCLUSIVE
    row.note = "share of tokens with other experts"
    if not decided.all():
        row.note += f"; {int((~decided).sum())} tokens with a close choice left out"
    return row


def _whole(reference: Reference, record: Record, ids_T: Tensor, number: int) -> Row:
    """A layer on what the layer before it gave: norms, residuals and multipliers too. The first reads the embedding."""
    positions = torch.arange(len(ids_T))

    def through(model: ReferenceModel) -> Tensor:
        device, dtype = model.embed_tokens.weight.device, model.embed_tokens.weight.dtype
        if number:
            h = record.tensors[number - 1, "hidden"].to(device, dtype)
        else:
            h = model.embed(ids_T.to(device), positions.to(device))
        return model.layers[number](h, positions.to(device), ids_T.to(device), Cache()).cpu()

    with watched(floor(reference.dtype)) as close, torch.inference_mode():
        exact = through(reference.exact)
    with close.again(), torch.inference_mode():
        noisy = through(reference.noisy)
    row = Row("layer", number, "layer", "", "same input")
    return judge(row, record.tensors[number, "hidden"], exact, noisy, close.decided(len(ids_T)))


def _sublayer(
    model: ReferenceModel, number: int, name: str, x_TM: Tensor, positions_T: Tensor, ids_T: Tensor
) -> Tensor:
    layer: Any = model.layers[number]
    device = model.embed_tokens.weight.device
    x_TM, positions_T, ids_T = x_TM.to(device), positions_T.to(device), ids_T.to(device)
    if name == "attention":
        return layer.mixer(x_TM, positions_T, Cache()).cpu()
    return (layer.ffn(x_TM) if name == "ffn" else layer.gate(x_TM, ids_T)).cpu()


def accumulated(reference: Reference, expected: Expected, record: Record) -> list[Row]:
    """The residual stream behind each layer, errors of all layers before it included."""
    rows = []
    largest = torch.finfo(reference.dtype).max
    for number in range(len(reference.exact.layers)):
        actual = record.tensors[number, "hidden"]
        length = len(actual)
        decided = torch.arange(length) < expected.first_close[number]
        row = Row("layer", number, "hidden", "", "accumulated")
        judge(
            row, actual, expected.exact.tensors[number, "hidden"][:length],
            expected.noisy.tensors[number, "hidden"][:length], decided,
        )  # fmt: skip
        peak = actual.double().abs().max().item()
        if peak > 0.5 * largest:
            row.note += f"{'; ' if row.note else ''}values up to {peak:.3g}, {reference.dtype} ends at {largest:.3g}"
        rows.append(row)
    return rows


def logprobs(reference: Reference, expected: Expected, logits_TV: Tensor, ids_T: Tensor, case: str) -> list[Row]:
    """Log-probability of every next token, and whether the likeliest token is the same where it is clear which it is.

    Args:
        reference: on the same weights.
        expected: what it says of the sequence.
        logits_TV: the engine's.
        ids_T: [T + 1] the sequence with the token after it.
        case: how the engine was asked.
    """
    exact, noisy, split, actual = (
        x.double().log_softmax(-1)
        for x in (expected.exact_logits, expected.noisy_logits, expected.split_logits, logits_TV)
    )
    length = len(actual)
    chosen = ids_T[1 : length + 1, None]
    row = Row("model", None, "logprobs", "", case, compared=length, total=length)
    error = (actual.gather(1, chosen) - exact[:length].gather(1, chosen)).abs()[:, 0]
    noise = torch.maximum(
        (noisy - exact)[:length].gather(1, chosen).abs()[:, 0], (split - exact)[:length].gather(1, chosen).abs()[:, 0]
    )
    decided = torch.arange(length) < min(expected.first_close, default=float("inf"))
    slack = LOGPROB_SLACK[reference.dtype]
    failed = not bool(torch.isfinite(actual).all())
    if failed:
        row.note = "not finite"
        row.error = float("inf")
    else:
        within = error[decided]
        row.error, row.noise = (
            (within.max().item(), noise[decided].max().item())
            if len(within)
            else (error.median().item(), noise.median().item())
        )
        row.budget = 2 * TIMES * row.noise + slack
        failed = row.error > row.budget or bool(error.median() > TIMES * noise.median() + slack)
        if not decided.all():
            row.note = f"{int((~decided).sum())} tokens behind a close choice of keys judged by the median"
    row.verdict = Verdict.FAIL if failed else Verdict.PASS
    return [row, _greedy(reference.dtype, expected, actual, exact, case)]


def _greedy(dtype: torch.dtype, expected: Expected, actual_TV: Tensor, exact_TV: Tensor, case: str) -> Row:
    length = len(actual_TV)
    exact, noisy = expected.exact_logits[:length].double(), expected.noisy_logits[:length].double()
    top, two = exact.topk(2, dim=-1)
    gap, rounded = top[:, 0] - top[:, 1], noisy.argmax(-1) != exact.argmax(-1)
    moved = noisy.gather(1, two).diff(dim=-1)[:, 0].neg() - gap
    # A flip counts where the gap between the first two is more than rounding closes at this token, twice what it closes at
    # any, and four standard deviations of what it does to such gaps: it falls differently in every implementation.
    common = max(2 * gap.where(rounded, 0).max().item(), 4 * 1.48 * moved.abs().median().item()) + LOGPROB_SLACK[dtype]
    clear = gap > (2 * (noisy - exact).abs().amax(-1)).clamp(min=common)
    if dtype == torch.float32:
        # In 16 bits the noise holds what another choice of keys does; here it is too seldom for that.
        clear &= torch.arange(length) < min(expected.first_close, default=float("inf"))
    flips = (actual_TV.argmax(-1) != exact_TV[:length].argmax(-1)) & clear
    row = Row("model", None, "greedy", "", case, error=float(flips.sum()), compared=int(clear.sum()), total=length)
    row.verdict = Verdict.FAIL if flips.any() else Verdict.PASS if clear.any() else Verdict.INCONCLUSIVE
    if flips.any():
        row.note = f"another token is likeliest from token {int(flips.nonzero()[0])} on"
    return row


def chosen(reference: Reference, expected: Expected, logprobs_N: Tensor, ids_T: Tensor, prompt: int) -> Row:
    """Log-probabilities that the engine gave for the tokens it generated behind a prompt.

    Args:
        reference: on the same weights.
        expected: what it says of all tokens but the last.
        logprobs_N: of the generated tokens.
        ids_T: prompt and generated tokens.
        prompt: tokens of the prompt.
    """
    # Of the prompt's tokens too: the few generated ones say little of how far rounding can go.
    exact, noisy, split = (
        x[: len(ids_T) - 1].double().log_softmax(-1).gather(1, ids_T[1:, None])[:, 0].cpu()
        for x in (expected.exact_logits, expected.noisy_logits, expected.split_logits)
    )
    all_noise = torch.maximum((noisy - exact).abs(), (split - exact).abs())
    exact = exact[prompt - 1 :]
    decided = torch.arange(prompt - 1, len(ids_T) - 1) < min(expected.first_close, default=float("inf"))
    row = Row("model", None, "logprobs", "", "", compared=int(decided.sum()), total=len(exact))
    error = (logprobs_N.double() - exact).abs()
    some = decided if decided.any() else torch.ones_like(decided)
    # Of tokens behind a close choice of keys only a wild difference tells.
    row.error, row.noise = error[some].max().item(), all_noise.max().item()
    row.budget = TIMES * row.noise + LOGPROB_SLACK[reference.dtype] * (1 if decided.any() else 1000)
    row.verdict = Verdict.PASS if row.error <= row.budget else Verdict.FAIL
    return row


def given(
    reference: Reference, expected: Expected, logits_TV: Tensor, theirs_T: Tensor, ids_T: Tensor, case: str
) -> Row:
    """Log-probability of every next token, against those that another program gives; noise is the reference's.

    Args:
        reference: on the same weights.
        expected: what it says of the sequence.
        logits_TV: the engine's, of all tokens that have a next one in `theirs_T`.
        theirs_T: [T] log-probabilities of the next tokens.
        ids_T: [T + 1] the sequence, or more.
        case: how the engine was asked.
    """
    length = len(theirs_T)
    picked = ids_T[1 : length + 1, None]
    exact, noisy, actual = (
        x[:length].double().log_softmax(-1).gather(1, picked)[:, 0].cpu()
        for x in (expected.exact_logits, expected.noisy_logits, logits_TV)
    )
    decided = torch.arange(length) < min(expected.first_close, default=float("inf"))
    row = Row("model", None, "logprobs", "", case, compared=int(decided.sum()), total=length)
    error, noise = (actual - theirs_T.double()).abs()[decided], (noisy - exact).abs()[decided]
    if len(error):
        row.error, row.noise = error.max().item(), noise.max().item()
        row.budget = 4 * row.noise + LOGPROB_SLACK[reference.dtype]  # both sides err
        row.verdict = Verdict.PASS if row.error <= row.budget else Verdict.FAIL
    if row.verdict is Verdict.PASS and row.compared < 0.5 * row.total:
        row.verdict, row.note = Verdict.INCONCLUSIVE, "too many close choices of keys"
    return row


def token_errors(expected: Expected, record: Record) -> dict[int, list[float]]:
    """Per layer the accumulated error of each token."""
    return {
        number: errors(tensor, expected.exact.tensors[number, "hidden"][: len(tensor)]).tolist()
        for (number, name), tensor in record.tensors.items()
        if name == "hidden"
    }
