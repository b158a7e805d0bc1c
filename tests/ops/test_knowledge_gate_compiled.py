"""The gate and the bank through torch.compile: values, gradients, and how often they are compiled."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tiers.compiled.ops.knowledge_bank import knowledge_bank
from tiers.compiled.ops.knowledge_gate import knowledge_gate
from tiers.compiled.options import compiled
from tiers.reference.ops.knowledge_bank import knowledge_bank as bank_reference
from tiers.reference.ops.knowledge_gate import knowledge_gate as reference
from tiers.reference.testing.compare import assert_close, assert_within_budget

WIDTH, SLOTS = 48, 5


@pytest.fixture(autouse=True)
def _compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The other tests switch torch.compile off, see conftest.py."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    compiled.cache_clear()
    yield
    compiled.cache_clear()


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return randn(tokens, WIDTH), randn(tokens, WIDTH), randn(WIDTH, 2 * WIDTH) / 10, randn(WIDTH)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_session_compiles_the_gate_twice() -> None:
    before = graphs()
    with torch.no_grad():
        for tokens in (1, 2, 17, 1, 64, 3, 200, 5):
            tensors = inputs(tokens)
            assert_close(knowledge_gate(*tensors, "sigmoid"), reference(*tensors, "sigmoid"), 1e-5)
    # One token, and any other number of them.
    assert graphs() - before == 2


@pytest.mark.parametrize("mode", ["linear", "mix"])
@pytest.mark.parametrize("bias", [True, False])
def test_every_mode_matches_the_reference(mode: str, bias: bool) -> None:
    before = graphs()
    h, e, weight, b = inputs(7)
    with torch.no_grad():
        actual = knowledge_gate(h, e, weight, b if bias else None, mode)
    assert_close(actual, reference(h, e, weight, b if bias else None, mode), 1e-5)
    assert graphs() > before


def test_gate_errs_no_more_than_eager_does() -> None:
    tensors = inputs(7, torch.bfloat16)
    exact = reference(*(x.double() for x in tensors), "mix")
    with torch.no_grad():
        assert_within_budget(knowledge_gate(*tensors, "mix"), reference(*tensors, "mix"), exact)


def test_gradients_of_the_gate_match_the_reference() -> None:
    leaves = [x.requires_grad_() for x in inputs(9)]
    grads = [torch.autograd.grad(f(*leaves, "mix").square().sum(), leaves) for f in (knowledge_gate, reference)]
    for actual, expected in zip(*grads, strict=True):
        assert_close(actual, expected, 1e-4)


def test_a_session_compiles_the_bank_twice() -> None:
    before = graphs()
    keys, values = torch.randn(SLOTS, WIDTH), torch.randn(SLOTS, WIDTH)
    with torch.no_grad():
        for tokens in (1, 2, 17, 1, 64):
            h = inputs(tokens)[0]
            assert_close(knowledge_bank(h, keys, values, 0.2), bank_reference(h, keys, values, 0.2), 1e-5)
    assert graphs() - before == 2


def test_gradients_of_the_bank_match_the_reference() -> None:
    leaves = [x.requires_grad_() for x in (inputs(9)[0], torch.randn(SLOTS, WIDTH), torch.randn(SLOTS, WIDTH))]
    grads = [torch.autograd.grad(f(*leaves, 0.2).square().sum(), leaves) for f in (knowledge_bank, bank_reference)]
    for actual, expected in zip(*grads, strict=True):
        assert_close(actual, expected, 1e-4)


def test_no_token_gives_no_result() -> None:
    tensors = inputs(0)
    assert knowledge_gate(*tensors, "mix").shape == (0, WIDTH)
    assert knowledge_bank(tensors[0], torch.randn(2, WIDTH), torch.randn(2, WIDTH), 1.0).shape == (0, WIDTH)


def test_wrong_shapes_are_refused() -> None:
    h, e, weight, b = inputs(3)
    with pytest.raises(ValueError, match="knowledge_TM has shape"):
        knowledge_gate(h, e[:2], weight, b, "mix")
    with pytest.raises(ValueError, match="mode is 'other'"):
        knowledge_gate(h, e, weight, b, "other")
    with pytest.raises(ValueError, match="keys_NM has width"):
        knowledge_bank(h, torch.randn(2, 3), torch.randn(2, 3), 1.0)


def test_where_torch_compile_is_off_nothing_pretends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(RuntimeError, match="TORCHDYNAMO_DISABLE=1 turns"):
        knowledge_gate(*inputs(3), "mix")
