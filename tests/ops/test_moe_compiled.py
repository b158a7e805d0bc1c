"""Experts through torch.compile: values, and how often it is compiled."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.compiled.ops.moe import block_sizes, moe
from tiers.reference.config import Moe
from tiers.reference.ops.moe import moe as reference
from tiers.reference.testing.compare import assert_close, assert_within_budget

WIDTH, INNER, EXPERTS = 48, 40, 6

ROUTINGS = {
    "softmax": Moe(EXPERTS, 2, INNER),
    "sigmoid in groups": Moe(
        EXPERTS, 3, INNER, score="sigmoid", correction_bias=True, groups=3, top_groups=2, group_score="top2",
        renormalize=False, routed_scaling_factor=2.5, activation="gelu_tanh",
    ),
    "one expert per token": Moe(EXPERTS, 1, INNER, activation="gelu"),
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("compiling")


def inputs(
    tokens: int, routing: Moe, dtype: torch.dtype = torch.float32, device: str = "cpu", held: slice = slice(None)
) -> dict[str, Any]:
    """Arguments of `moe`; the first and second matrix are views of one tensor, as inside vLLM."""
    generator = torch.Generator().manual_seed(tokens)

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    w13, w2 = randn(EXPERTS, 2 * INNER, WIDTH) / 7, randn(EXPERTS, WIDTH, INNER) / 6
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "hidden_TM": randn(tokens, WIDTH), "logits_TE": 3 * randn(tokens, EXPERTS, dtype=exact),
        "correction_E": randn(EXPERTS, dtype=exact) if routing.correction_bias else None,
        "gate_LFM": w13[held, :INNER], "up_LFM": w13[held, INNER:], "down_LMF": w2[held], "routing": routing,
        "first": held.start or 0,
    }  # fmt: skip


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_signature_is_that_of_the_reference() -> None:
    assert inspect.signature(moe) == inspect.signature(reference)


@pytest.mark.parametrize(
    ("name", "dtype"), [("softmax", torch.float32), ("softmax", torch.bfloat16), ("sigmoid in groups", torch.float32)]
)
def test_a_session_compiles_once(name: str, dtype: torch.dtype) -> None:
    before, routing = graphs(), ROUTINGS[name]
    budget = 2e-5 if dtype == torch.float32 else 0.1
    with torch.inference_mode():
        for tokens in (WIDTH, 1, 2, INNER, 17, 1, 0, *range(3, 20), 64, 1000):
            given = inputs(tokens, routing, dtype)
            assert_close(moe(**given), reference(**given), budget)
    assert graphs() - before == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compiled_errs_no_more_than_eager_does(dtype: torch.dtype) -> None:
    given = inputs(33, ROUTINGS["sigmoid in groups"], dtype)
    exact = {name: value.double() if isinstance(value, Tensor) else value for name, value in given.items()}
    with torch.inference_mode():
        assert_within_budget(moe(**given), reference(**given), reference(**exact))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_the_experts_sum_to_the_whole(dtype: torch.dtype) -> None:
    routing = ROUTINGS["softmax"]
    expected = reference(**inputs(29, routing, dtype)).float()
    with torch.inference_mode():
        parts = [moe(**inputs(29, routing, dtype, held=held)).float() for held in (slice(0, 3), slice(3, 6))]
    assert_close(sum(parts), expected, 1e-5 if dtype == torch.float32 else 0.1)  # type: ignore[arg-type]


def test_every_token_on_one_expert() -> None:
    given = inputs(50, ROUTINGS["one expert per token"])
    given["logits_TE"][:, 4] = 50
    with torch.inference_mode():
        assert_close(moe(**given), reference(**given), 2e-5)


def test_an_infinity_stays_with_its_token() -> None:
    given = inputs(20, ROUTINGS["softmax"])
    expected = reference(**given)
    given["hidden_TM"][19] = float("inf")
    with torch.inference_mode():
        actual = moe(**given)
    assert not torch.isfinite(actual[19]).all()
    assert_close(actual[:19], expected[:19], 2e-5)


@pytest.mark.parametrize("experts", [1, 3, 8, 128])
def test_blocks_are_enough_however_rows_fall_on_experts(experts: int) -> None:
    for rows in (1, 2, 15, 16, 17, 100, 1000, 4096):
        block, blocks = block_sizes(rows, experts)
        used = min(rows, experts)
        # The worst case: all experts but one have a single row each.
        worst = used - 1 + -(-(rows - used + 1) // block)
        assert worst <= blocks <= 2 * experts + 1


def test_no_argument_is_modified_or_returned() -> None:
    for tokens in (0, 7):
        given = inputs(tokens, ROUTINGS["softmax"])
        before = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
        with torch.inference_mode():
            actual = moe(**given)
        assert all(torch.equal(given[name], value) for name, value in before.items())
        assert actual is not given["hidden_TM"]


def test_wrong_arguments_are_refused() -> None:
    given = inputs(3, ROUTINGS["softmax"])
    with pytest.raises(ValueError, match="logits_TE has shape"):
        moe(**{**given, "logits_TE": given["logits_TE"][:2]})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_can_be_captured_once_it_is_compiled(tokens: int) -> None:
    given = inputs(tokens, ROUTINGS["softmax"], torch.bfloat16, "cuda")
    with torch.inference_mode():
        moe(**given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = moe(**given)
        given["hidden_TM"].mul_(2)
        graph.replay()
        assert_close(actual.float(), reference(**given).float(), 0.2)
