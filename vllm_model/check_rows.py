"""Is a difference a bug or noise? Rows of `tiers check`, and the rule that gives each its verdict.

Legend: T tokens, M width of what is compared.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

# Of the size of a token's vector: what is let through beside the noise. Float32: sums in another order. 16 bits: a rounding.
SLACK = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}

# A tier may err this many times as much as the reference does in the same dtype; on its worst token twice that.
TIMES = 2.0

# Share of the tokens that must have been compared.
COVERAGE = 0.5


class Verdict(StrEnum):
    """PASS: as exact as the reference in this dtype. INCONCLUSIVE: too little could be compared."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass
class Row:
    """One comparison.

    Attributes:
        level: "operator", "layer", "model" or "dispatch".
        layer: its number; None for the whole model.
        what: operator, or what of the layer or model: "hidden", "logprobs", "greedy".
        tier: that ran.
        how: "same input", "accumulated", or the case.
        error, noise: of the tier and of the reference in the same dtype, against the exact result, relative to the size of
            a token's vector (nats for log-probabilities): largest over the tokens.
        budget: what the error may be at most.
        compared, total: tokens.
        verdict: see there.
        note: what is to be said beside.
    """

    level: str
    layer: int | None
    what: str
    tier: str
    how: str
    error: float = 0.0
    noise: float = 0.0
    budget: float = 0.0
    compared: int = 0
    total: int = 0
    verdict: Verdict = Verdict.INCONCLUSIVE
    note: str = ""

    @property
    def place(self) -> str:
        """ "layer 3 attention", or what of the model."""
        return self.what if self.layer is None else f"layer {self.layer} {self.what}"


def overall(rows: Iterable[Row]) -> Verdict:
    """FAIL if any row failed; PASS only if there are rows and every one passed."""
    verdicts = [row.verdict for row in rows]
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    return Verdict.PASS if verdicts and set(verdicts) == {Verdict.PASS} else Verdict.INCONCLUSIVE


def errors(actual_TM: Tensor, exact_TM: Tensor) -> Tensor:
    """[T] difference of each token's vector, relative to the size of the exact one. NaN where either holds a NaN."""
    exact = exact_TM.double()
    size = exact.norm(dim=-1)
    # A token whose vector is nearly nothing is measured against the others.
    return (actual_TM.double() - exact).norm(dim=-1) / size.maximum(0.05 * size.nanmedian())


def judge(
    row: Row, actual_TM: Tensor, exact_TM: Tensor, noisy_TM: Tensor, decided_T: Tensor | None = None, slack: float = 0.0
) -> Row:
    """Compare what a tier computed with the exact result, beside what the reference makes of it in the same dtype.

    Where keys are chosen, rounding may decide between two that score nearly the same; both choices are right. Tokens with
    such a choice are judged by their median alone, the others one by one.

    Args:
        row: gets error, noise, budget, coverage and verdict.
        actual_TM: the tier's, in the dtype served.
        exact_TM: the reference's in a higher precision.
        noisy_TM: the reference's in the dtype served.
        decided_T: tokens without such a choice; None for all.
        slack: instead of the dtype's own.
    """
    row.total = len(exact_TM)
    if actual_TM.shape != exact_TM.shape:
        row.verdict, row.note = Verdict.FAIL, f"shape {list(actual_TM.shape)}; expected {list(exact_TM.shape)}"
        return row
    if not row.total:
        row.note = "no tokens"
        return row
    row.compared = row.total
    error, noise = errors(actual_TM, exact_TM), errors(noisy_TM, exact_TM)
    slack = slack or SLACK[actual_TM.dtype]
    bad = (~torch.isfinite(error)).nonzero()
    if len(bad):
        row.error, row.verdict = float("inf"), Verdict.FAIL
        row.note = f"not finite from token {int(bad[0])} on ({len(bad)} of {row.total} tokens)"
        return row
    decided = torch.ones(row.total, dtype=torch.bool) if decided_T is None else decided_T
    worst = error.argmax() if bool(decided.all()) else error.where(decided, -1).argmax()
    row.error, row.noise = error[worst].item(), noise[decided].max().item() if decided.any() else noise.median().item()
    row.budget = 2 * TIMES * row.noise + slack
    failed = bool(decided.any()) and row.error > row.budget
    if not failed:
        # The typical token, and with it everything that is undecided, by the stricter rule.
        typical, allowed = error.median().item(), TIMES * noise.median().item() + slack
        failed = typical > allowed
        if failed or not decided.any():
            row.error, row.noise, row.budget = typical, noise.median().item(), allowed
            row.note = "median of the tokens"
    if not decided.all():
        row.note += (
            f"{', ' if row.note else ''}{int((~decided).sum())} tokens with a close choice of keys judged together"
        )
    row.verdict = Verdict.FAIL if failed else Verdict.PASS
    if failed and not row.note.startswith("median"):
        row.note = f"worst at token {int(worst)}{'; ' + row.note if row.note else ''}"
    return row
