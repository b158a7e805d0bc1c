"""The bank through torch.compile: values, gradients, and how often it is compiled."""

import inspect

import pytest
import torch
from torch import Tensor

from tiers.compiled.ops.knowledge_bank import knowledge_bank
from tiers.reference.ops.knowledge_bank import knowledge_bank as reference
from tiers.reference.testing.compare import assert_close, assert_within_budget

WIDTH, SLOTS = 48, 5


pytestmark = pytest.mark.usefixtures("compiling")


def inputs(
    tokens: int, slots: int = SLOTS, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """h, K and V."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, WIDTH), (slots, WIDTH), (slots, WIDTH))
    h, keys, values = (torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes)
    return h, keys, values


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_signature_is_that_of_the_reference() -> None:
    assert inspect.signature(knowledge_bank) == inspect.signature(reference)


def test_a_session_compiles_once() -> None:
    before = graphs()
    with torch.inference_mode():
        for tokens in (SLOTS, 1, 2, WIDTH, 17, 1, 0, *range(3, 30), 64, 5000):
            tensors = inputs(tokens)
            assert_close(knowledge_bank(*tensors, 0.2), reference(*tensors, 0.2), 1e-5)
        # Layers may differ in their scale.
        assert_close(knowledge_bank(*tensors, 0.7), reference(*tensors, 0.7), 1e-5)
    assert graphs() - before == 1


def test_values_and_gradients_match_the_reference() -> None:
    before = graphs()
    for tokens in (9, 1, 4):
        leaves = [x.requires_grad_() for x in inputs(tokens, dtype=torch.float64)]
        outs = [f(*leaves, 0.2) for f in (knowledge_bank, reference)]
        assert_close(outs[0], outs[1], 1e-12)
        actual, expected = (torch.autograd.grad(out.square().sum(), leaves) for out in outs)
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e, 1e-10)
    assert graphs() - before == 2


def test_values_may_be_wider_than_keys() -> None:
    before = graphs()
    with torch.inference_mode():
        for tokens in (3, 1, 0, 70):
            h, keys, values = inputs(tokens)
            wide = torch.cat((values, values * 2), dim=1)
            assert_close(knowledge_bank(h, keys, wide, 0.2), reference(h, keys, wide, 0.2), 1e-5)
    assert graphs() - before == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compiled_errs_no_more_than_eager_does(dtype: torch.dtype) -> None:
    tensors = inputs(7, 4096, dtype)
    exact = reference(*(x.double() for x in tensors), 0.05)
    with torch.inference_mode():
        assert_within_budget(knowledge_bank(*tensors, 0.05), reference(*tensors, 0.05), exact)


def test_wrong_arguments_are_refused() -> None:
    h, keys, values = inputs(3)
    with pytest.raises(ValueError, match="keys_NM has width 3; expected 48"):
        knowledge_bank(h, keys[:, :3], values, 1.0)
    with pytest.raises(ValueError, match="values_NC has 3 rows"):
        knowledge_bank(h, keys, values[:3], 1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_can_be_captured_once_it_is_compiled() -> None:
    tensors = inputs(7, device="cuda")
    with torch.inference_mode():
        knowledge_bank(*tensors, 0.2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = knowledge_bank(*tensors, 0.2)
        tensors[0].mul_(2)
        graph.replay()
        assert_close(actual, reference(*tensors, 0.2), 1e-4)
