"""The gate through torch.compile: values, gradients, and how often it is compiled."""

import inspect

import pytest
import torch
from torch import Tensor

from tiers.compiled.ops.knowledge_gate import knowledge_gate
from tiers.reference.ops.knowledge_gate import MODES, fold
from tiers.reference.ops.knowledge_gate import knowledge_gate as reference
from tiers.reference.testing.compare import assert_close, assert_within_budget

WIDTH = 48


pytestmark = pytest.mark.usefixtures("compiling")


def inputs(
    tokens: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, e, W and b."""
    generator = torch.Generator().manual_seed(tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    return randn(tokens, WIDTH), randn(tokens, WIDTH), randn(WIDTH, 2 * WIDTH) / 10, randn(WIDTH)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_signature_is_that_of_the_reference() -> None:
    assert inspect.signature(knowledge_gate) == inspect.signature(reference)


@pytest.mark.parametrize("mode", MODES)
def test_a_session_compiles_once(mode: str) -> None:
    before = graphs()
    with torch.inference_mode():
        for tokens in (WIDTH, 1, 2, 2 * WIDTH, 17, 1, 0, *range(3, 30), 64, 5000):
            tensors = inputs(tokens)
            assert_close(knowledge_gate(*tensors, mode), reference(*tensors, mode), 1e-5)
    assert graphs() - before == 1


@pytest.mark.parametrize("mode", MODES)
def test_what_is_folded_stands_for_the_product_and_compiles_once(mode: str) -> None:
    before = graphs()
    with torch.inference_mode():
        for tokens in (1, 17, WIDTH, 0, 64):
            h, e, weight, bias = inputs(tokens)
            half = weight.clone()
            half[:, WIDTH:] = float("nan")  # not read
            # As a bank gives them, and as a table does.
            for given in (torch.cat((e, fold(e, weight)), dim=1).split(WIDTH, dim=1), (e, fold(e, weight))):
                actual = knowledge_gate(h, given[0], half, bias, mode, given[1])
                assert_close(actual, reference(h, e, weight, bias, mode), 1e-5)
    assert graphs() - before == 1


def test_only_the_weight_may_want_a_gradient() -> None:
    for tokens in (5, 1):
        h, e, weight, bias = inputs(tokens, torch.float64)
        weight.requires_grad_()
        grads = [
            torch.autograd.grad(f(h, e, weight, bias, "mix").sum(), weight)[0] for f in (knowledge_gate, reference)
        ]
        assert_close(grads[0], grads[1], 1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_values_and_gradients_match_the_reference(mode: str, has_bias: bool) -> None:
    before = graphs()
    for tokens in (9, 1, 4):
        leaves = [x.requires_grad_() for x in inputs(tokens, torch.float64)[: 4 if has_bias else 3]]
        bias = leaves[3] if has_bias else None
        outs = [f(*leaves[:3], bias, mode) for f in (knowledge_gate, reference)]
        assert_close(outs[0], outs[1], 1e-12)
        actual, expected = (torch.autograd.grad(out.square().sum(), leaves) for out in outs)
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e, 1e-10)
    assert graphs() - before == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_compiled_errs_no_more_than_eager_does(mode: str, dtype: torch.dtype) -> None:
    _, e, weight, _ = tensors = inputs(70, dtype)
    exact = reference(*(x.double() for x in tensors), mode)
    eager = reference(*tensors, mode)
    with torch.inference_mode():
        assert_within_budget(knowledge_gate(*tensors, mode), eager, exact)
        assert_within_budget(knowledge_gate(*tensors, mode, fold(e, weight)), eager, exact)


def test_no_argument_is_modified_or_returned() -> None:
    for tokens in (0, 7):
        tensors = inputs(tokens)
        before = [tensor.clone() for tensor in tensors]
        with torch.inference_mode():
            actual = knowledge_gate(*tensors, "linear")
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
        assert all(actual is not tensor for tensor in tensors)


def test_wrong_arguments_are_refused() -> None:
    h, e, weight, b = inputs(3)
    with pytest.raises(ValueError, match="knowledge_TM has shape"):
        knowledge_gate(h, e[:2], weight, b, "mix")
    with pytest.raises(ValueError, match="weight_M2M has shape"):
        knowledge_gate(h, e, weight.T, b, "mix")
    with pytest.raises(ValueError, match="mode is 'other'"):
        knowledge_gate(h, e, weight, b, "other")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_can_be_captured_once_it_is_compiled() -> None:
    tensors = inputs(7, device="cuda")
    with torch.inference_mode():
        knowledge_gate(*tensors, "mix")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = knowledge_gate(*tensors, "mix")
        tensors[0].mul_(2)
        graph.replay()
        assert_close(actual, reference(*tensors, "mix"), 1e-4)
