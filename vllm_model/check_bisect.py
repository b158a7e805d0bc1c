"""Which layers and operators, put back on the reference tier, make a wrong model right?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tiers.vllm_model import check
from tiers.vllm_model.check_rows import Row, Verdict, overall
from tiers.vllm_model.dispatch import Where, resolve
from tiers.vllm_model.plan import Tier, TierPlan

# A layer and an operator of it.
Unit = tuple[int, str]


@dataclass(frozen=True)
class Found:
    """The outcome.

    Attributes:
        verdict: of the plan as it was given.
        units: the smallest set that was found; None if even the reference everywhere is wrong.
        plan: the given one with these on the reference.
        runs: engines that were started.
    """

    verdict: Verdict
    units: tuple[Unit, ...] | None
    plan: str
    runs: int


def run(options: check.Options) -> int:
    """Bisect and say what was found.

    Returns:
        0 if the plan is right as it is, 1 if a plan that works was found, 2 if none was.
    """
    found = bisect(options)
    if found.verdict is not Verdict.FAIL:
        print(f"{found.verdict}: plan {options.plan} shows nothing to bisect")
        return check.EXIT[found.verdict]
    if found.units is None:
        print(
            f"FAIL: the model is wrong with every operator on the reference tier too, so no tier is the cause. Look at "
            f"`tiers check {options.folder} --tiers reference`, and whether the weights are mapped as they should be "
            f"(`tiers map {options.folder} --explain`)"
        )
        return 2
    listed = ", ".join(f"layer {layer} {operator}" for layer, operator in found.units)
    print(f"Back on the reference tier, this makes the model right: {listed} ({found.runs} runs)")
    print(f"A plan that works: --tiers '{found.plan}'")
    return 1


def bisect(options: check.Options) -> Found:
    """Find the smallest set of operators that have to go back to the reference.

    Raises:
        TiersError: see `check.check`.
    """
    options = replace(options, operators=False, layers=None)
    reference = check.make_reference(options, check.served_dtype(options))
    report = check.check(options, reference)
    if report.verdict is not Verdict.FAIL:
        return Found(report.verdict, None, options.plan, 1)
    runs = 1

    def right(units: Sequence[Unit]) -> bool:
        nonlocal runs
        runs += 1
        tried = replace(options, plan=with_reference(options.plan, units), answers=True)
        return symptom(check.check(tried, reference).rows) is not Verdict.FAIL

    everything = units_of(options)
    if symptom(report.rows) is not Verdict.FAIL:
        # Only layers differ, and by so little that the answers do not: what differs is what goes back.
        suspects = suspected(report.rows, everything)
        return Found(report.verdict, suspects or None, with_reference(options.plan, suspects), runs)
    suspects = suspected(report.rows, everything)
    if not suspects or not right(suspects):
        suspects = everything
        if not right(everything):
            return Found(report.verdict, None, options.plan, runs)
    units = smallest(suspects, right)
    return Found(report.verdict, units, with_reference(options.plan, units), runs)


def symptom(rows: Sequence[Row]) -> Verdict:
    """The verdict on the model's answers alone."""
    return overall([row for row in rows if row.level == "model"])


def units_of(options: check.Options) -> tuple[Unit, ...]:
    """Everything that the plan does not serve from the reference tier."""
    from tiers.reference.load import describe
    from tiers.vllm_model import compat

    config = describe(options.folder, options.family).config
    where = Where(compat.device_type(), check.PAGE, options.dtype or None)
    choices = resolve(config, TierPlan.parse(options.plan, config), where)
    return tuple((choice.layer, choice.operator) for choice in choices if choice.tier is not Tier.REFERENCE)


def suspected(rows: Sequence[Row], units: Sequence[Unit]) -> tuple[Unit, ...]:
    """What differed from the reference on the same input."""
    wrong = {
        (row.layer, row.what)
        for row in rows
        if row.verdict is Verdict.FAIL and row.level == "layer" and row.how.startswith("same input")
    }
    return tuple(unit for unit in units if unit in wrong)


def with_reference(plan: str, units: Sequence[Unit]) -> str:
    """A plan with some operators on the reference."""
    return ",".join([plan, *(f"{layer}.{operator}=reference" for layer, operator in units)])


def smallest(units: Sequence[Unit], right: Callable[[Sequence[Unit]], bool]) -> tuple[Unit, ...]:
    """A set that is right and of which no part can be left out, by halves, then quarters, and so on.

    Args:
        units: a set that is right.
        right: whether a set is.

    Source: Zeller and Hildebrandt 2002, Simplifying and isolating failure-inducing input, section 3.
    """
    left, parts = list(units), 2
    while len(left) > 1:
        size = -(-len(left) // parts)
        pieces = [left[start : start + size] for start in range(0, len(left), size)]
        for piece in pieces:
            if len(pieces) > 1 and right(piece):
                left, parts = piece, 2
                break
            rest = [unit for unit in left if unit not in piece]
            if len(pieces) > 2 and right(rest):
                left, parts = rest, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(left), 2 * parts)
    return tuple(left)
