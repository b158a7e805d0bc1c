"""The Triton tier of the bank of slots against the reference: results and gradients.

On a machine without CUDA it needs Triton's interpreter, which has to be chosen before Triton is imported:
test_interpreter.py runs this file in a process of its own.
"""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.reference.ops.knowledge_bank import knowledge_bank as reference
from tiers.reference.testing.compare import assert_close, assert_within_budget

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs CUDA, or the interpreter in a process of its own (see test_interpreter.py)",
)

# tokens, slots, width
SIZES = [
    (1, 1, 20), (1, 5, 33), (1, 64, 100), (3, 65, 20), (17, 5, 100), (17, 200, 33), (64, 33, 20), (65, 64, 33),
    (3, 1100, 20), (200, 5, 33),
]  # fmt: skip


def inputs(tokens: int, slots: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """h, K and V."""
    generator = torch.Generator().manual_seed(0)
    h, keys, values = (torch.randn(rows, width, generator=generator) for rows in (tokens, slots, slots))
    return h.to(DEVICE, dtype), keys.to(DEVICE, dtype), values.to(DEVICE, dtype)


@pytest.fixture
def module() -> ModuleType:
    from tiers.vllm_model.ops import knowledge_bank

    return knowledge_bank


@pytest.fixture
def fast(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """The operator, with NaN in all memory that it allocates: what it does not write shows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(float("nan")))
    return module.knowledge_bank


@pytest.fixture(params=["few", "many"])
def way(request: pytest.FixtureRequest, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> str:
    """Any number of tokens goes this way. Where one way ends and the next begins is a matter of speed."""
    monkeypatch.setattr(module, "FEW_TOKENS", 64 if request.param == "few" else 0)
    return request.param


@pytest.mark.parametrize("scale", [0.2, -0.2])
@pytest.mark.parametrize(("tokens", "slots", "width"), SIZES, ids=[f"T{t}-N{n}-M{m}" for t, n, m in SIZES])
def test_fast_matches_reference(fast: Any, tokens: int, slots: int, width: int, scale: float) -> None:
    tensors = inputs(tokens, slots, width)
    assert_close(fast(*tensors, scale), reference(*tensors, scale), 1e-5)


@pytest.mark.parametrize(("slots", "width"), [(5, 20), (40, 700), (1100, 20)])
@pytest.mark.usefixtures("way")
def test_every_way_matches_reference(fast: Any, slots: int, width: int) -> None:
    tensors = inputs(20, slots, width)
    first = fast(*tensors, width**-0.5)
    assert_close(first, reference(*tensors, width**-0.5), 1e-5)
    assert all(torch.equal(fast(*tensors, width**-0.5), first) for _ in range(2 if INTERPRETED else 20))


@pytest.mark.usefixtures("way")
def test_values_may_be_wider_than_keys(fast: Any) -> None:
    h, keys, values = inputs(20, 40, 100)
    wide = torch.cat((values, values * 2), dim=1)[:, :150]
    assert_close(fast(h, keys, wide, 0.1), reference(h, keys, wide, 0.1), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("way")
def test_fast_errs_no_more_than_eager_does(fast: Any, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 as bit patterns")
    tensors = inputs(17, 100, 100, dtype)
    exact = reference(*(x.double() for x in tensors), 0.1)
    actual = fast(*tensors, 0.1)
    assert actual.dtype == dtype
    assert_within_budget(actual, reference(*tensors, 0.1), exact)


@pytest.mark.usefixtures("way")
def test_large_scores_do_not_overflow(fast: Any) -> None:
    h, keys, values = inputs(7, 40, 20)
    best = (h @ keys.T).argmax(-1)
    assert_close(fast(h * 1e4, keys, values, 1.0), values[best], 1e-6)


@pytest.mark.usefixtures("way")
def test_a_score_of_minus_infinity_has_no_weight(fast: Any) -> None:
    # 40 slots are more than one block; the first block is left out as a whole.
    h, keys, values = inputs(7, 40, 20)
    keys[:33, 4] = float("-inf")
    h[:, 4] = 1.0
    assert_close(fast(h, keys, values, 1.0), reference(h, keys[33:], values[33:], 1.0), 1e-5)


@pytest.mark.parametrize("place", ["h", "keys", "values"])
@pytest.mark.usefixtures("way")
def test_what_is_not_finite_stays_visible(fast: Any, place: str) -> None:
    tensors = dict(zip(("h", "keys", "values"), inputs(7, 40, 20), strict=True))
    tensors[place][3, 4] = float("nan")
    expected, actual = (f(*tensors.values(), 0.2) for f in (reference, fast))
    assert torch.equal(actual.isnan(), expected.isnan())
    assert expected.isnan().any()
    finite = expected.isfinite()
    assert_close(actual[finite], expected[finite], 1e-5)


@pytest.mark.usefixtures("way")
def test_strides_are_followed(fast: Any) -> None:
    h, keys, values = inputs(5, 40, 20)
    wide = torch.full((5, 50), float("nan"), device=DEVICE)
    wide[:, 3:23] = h
    both = torch.cat((keys, values), dim=1)
    views = (wide[:, 3:23], both[:, :20], values.T.contiguous().T)
    assert not any(x.is_contiguous() for x in views)
    assert_close(fast(*views, 0.2), reference(h, keys, values, 0.2), 1e-5)


def test_an_empty_batch_and_an_empty_bank_give_what_the_reference_gives(fast: Any) -> None:
    h, keys, values = inputs(3, 5, 20)
    assert fast(h[:0], keys, values, 0.2).shape == (0, 20)
    assert torch.equal(fast(h, keys[:0], values[:0], 0.2), reference(h, keys[:0], values[:0], 0.2))


@pytest.mark.usefixtures("way")
def test_no_argument_is_modified(fast: Any) -> None:
    tensors = inputs(5, 7, 20)
    before = [x.clone() for x in tensors]
    fast(*tensors, 0.2)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


# ---- gradients ------------------------------------------------------------------------------------------------------


def gradients(function: Callable[..., Tensor], tensors: tuple[Tensor, ...], grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    return list(torch.autograd.grad(function(*leaves, 0.2), leaves, grad))


@pytest.mark.parametrize(("tokens", "slots", "width"), [(1, 1, 20), (3, 5, 33), (17, 64, 100), (3, 1100, 20)])
def test_gradients_match_reference(fast: Any, tokens: int, slots: int, width: int) -> None:
    tensors = inputs(tokens, slots, width)
    grad = torch.randn(tokens, width, device=DEVICE)
    expected = gradients(reference, tensors, grad)
    for actual, right in zip(gradients(fast, tensors, grad), expected, strict=True):
        assert_close(actual, right, 1e-5)


@pytest.mark.parametrize("wanted", range(3), ids=["h", "K", "V"])
def test_a_single_gradient_matches_reference(fast: Any, wanted: int) -> None:
    found = []
    for function in (fast, reference):
        tensors = inputs(3, 7, 20)
        tensors[wanted].requires_grad_()
        # The gradient of a sum is one number, expanded.
        function(*tensors, 0.2).sum().backward()
        found.append([x.grad for x in tensors])
    actual, expected = found
    assert [x is None for x in actual] == [i != wanted for i in range(3)]
    assert_close(actual[wanted], expected[wanted], 1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_err_no_more_than_eager_ones(fast: Any, dtype: torch.dtype) -> None:
    tensors = inputs(40, 12, 33, dtype)
    grad = torch.randn(40, 33, device=DEVICE).to(dtype)
    exact = gradients(reference, tuple(x.double() for x in tensors), grad.double())
    eager = gradients(reference, tensors, grad)
    for actual, low, right in zip(gradients(fast, tensors, grad), eager, exact, strict=True):
        assert_within_budget(actual, low, right)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.usefixtures("module")
def test_the_registered_operator_is_sound(keep: bool) -> None:
    """Schema, shapes without data, gradients under tracing, dynamic sizes."""
    h, keys, values = inputs(3, 5, 20)
    for x in (h, keys, values) if keep else ():
        x.requires_grad_()
    torch.library.opcheck(torch.ops.tiers_fast.knowledge_bank.default, (h, keys, values, 0.2, keep))


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_fast_refuses_what_the_reference_refuses(fast: Any) -> None:
    h, keys, values = inputs(3, 5, 4)
    for arguments in ((h, keys[:, :3], values), (h, keys, values[:4])):
        with pytest.raises(ValueError) as expected:
            reference(*arguments, 0.2)
        with pytest.raises(ValueError) as actual:
            fast(*arguments, 0.2)
        assert str(actual.value) == str(expected.value)


def test_fast_refuses_what_its_kernels_would_misread(fast: Any) -> None:
    h, keys, values = inputs(3, 5, 4)
    with pytest.raises(ValueError, match=r"values_NC is torch.float16; expected torch.float32"):
        fast(h, keys, values.half(), 0.2)
    with pytest.raises(ValueError, match=r"hidden_TM is torch.float64; expected float32, float16 or bfloat16"):
        fast(h.double(), keys.double(), values.double(), 0.2)
    with pytest.raises(ValueError, match=r"hidden_TM has shape \(4,\); expected tokens and width"):
        fast(h[0], keys, values, 0.2)
