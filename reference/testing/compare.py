"""Error metrics and budgets."""

import torch
from torch import Tensor

# Log-probabilities of vLLM on any tier against the reference model, and logits of the reference model against
# transformers, both in float32, absolute. Sums in another order over some hundred terms of order 1 differ by about 1e-5.
LOGPROB_BUDGET = 1e-4


def assert_close(actual: Tensor, expected: Tensor, budget: float) -> None:
    """Fail unless every element is within `budget`; NaN and infinity never pass. Says where the worst one sits.

    Raises:
        AssertionError: shapes differ, a value is not finite, or the largest absolute difference is over the budget.
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}; expected {tuple(expected.shape)}"
    if not actual.numel():
        return
    for name, tensor in (("actual", actual), ("expected", expected)):
        bad = (~torch.isfinite(tensor)).nonzero()
        assert not len(bad), f"{name} has {len(bad)} values that are not finite, the first at {bad[0].tolist()}"
    error = (actual.double() - expected.double()).abs()
    worst = int(error.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape)]
    values = f"{actual.flatten()[worst].item()} against {expected.flatten()[worst].item()}"
    assert error.max() <= budget, f"off by {error.max().item():.3g} at {place} ({values}); budget {budget:g}"


def assert_within_budget(actual: Tensor, eager_low: Tensor, exact: Tensor) -> None:
    """Fail unless a tier in a low precision errs at most twice as much as eager PyTorch in that precision, plus one
    rounding of the largest value.

    Args:
        actual: the tier's result.
        eager_low: the reference's result in the same dtype.
        exact: the reference's result in float64.
    """
    eager_error = (eager_low.double() - exact).abs().max().item()
    rounding = torch.finfo(actual.dtype).eps * exact.abs().max().item()
    assert_close(actual.double(), exact, 2 * eager_error + rounding)
