"""Top-k for long prompts in Triton, against the reference; see test_paged_attention_fast.py."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tiers.reference.config import TopK
from tiers.reference.ops.paged_attention import paged_attention as reference
from tiers.reference.testing.compare import assert_within_budget
from tiers.reference.testing.inputs import PagedInputs, make_batch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs CUDA, or the interpreter in a process of its own (see test_interpreter.py)",
)

# What the interpreter multiplies.
DTYPE = torch.float16

# Query tokens: a few more than a program has of one key/value head of four heads. Fewer in the interpreter, which is slow.
ROWS = 16 if INTERPRETED else 128
TOKENS = ROWS // 4 + 1


@pytest.fixture(autouse=True)
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiers.vllm_model.ops import topk_prompt as module

    monkeypatch.setattr(module, "MAXIMA", module.MAXIMA._replace(rows=ROWS))
    monkeypatch.setattr(module, "HITS", module.HITS._replace(rows=ROWS))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tile of each part of a prompt that was served here."""
    from tiers.vllm_model.ops import topk_prompt as module

    seen: list[int] = []
    original: Callable[..., Any] = module.choose

    def choose(*arguments: Any, **options: Any) -> Any:
        sizes = module.Sizes.of(options["pattern"], arguments[4])
        assert sizes is not None
        seen.append(sizes.tile)
        return original(*arguments, **options)

    monkeypatch.setattr(module, "choose", choose)
    return seen


def compare(inputs: PagedInputs, pattern: TopK, **options: Any) -> None:
    from tiers.vllm_model.ops.paged_attention import paged_attention

    options = {"scale": 0.3, "pattern": pattern, **options}
    batch = inputs.batch
    actual = paged_attention(inputs.query_THD, inputs.cache_BKNC, batch, **options)
    eager = reference(inputs.query_THD, inputs.cache_BKNC, batch, **options)
    exact = reference(inputs.query_THD.double(), inputs.cache_BKNC.double(), batch, **options)
    assert_within_budget(actual, eager, exact)
    if not INTERPRETED:
        for _ in range(5):
            assert torch.equal(actual, paged_attention(inputs.query_THD, inputs.cache_BKNC, batch, **options))


@pytest.mark.parametrize(
    ("context", "pattern", "tiles"),
    [
        (12, TopK(2), [2]),
        (20, TopK(2, 1, 0), [4]),
        (40, TopK(2, 0, 3), [8]),
        (70, TopK(2), [16]),
        (150, TopK(2, 1, 5), [32]),
        (300, TopK(2, 70, 3), [64]),
        (270, TopK(3, 0, 1), [32]),
        (300, TopK(4, 3, 90), [32]),
        (257, TopK(1), [64]),
    ],
    ids=str,
)
@pytest.mark.parametrize("group", [4, 3])
def test_a_prompt_matches_the_reference(
    context: int, pattern: TopK, tiles: list[int], group: int, parts: list[int]
) -> None:
    context = max(context, TOKENS)
    inputs = make_batch([(TOKENS, context)], 16, "HND", 2 * group, 2, 32, DTYPE).to(DEVICE)
    compare(inputs, pattern)
    assert set(parts) == set(tiles) or context == TOKENS


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page", "layout"), [(1, 1, 24, 16, "NHD"), (5, 1, 40, 32, "HND")]
)
def test_any_shape_of_heads(heads: int, kv_heads: int, size: int, page: int, layout: Any, parts: list[int]) -> None:
    inputs = make_batch([(ROWS + 2, 140)], page, layout, heads, kv_heads, size, DTYPE).to(DEVICE)
    compare(inputs, TopK(2, 1, 1))
    assert parts


def test_other_requests_of_the_step_are_served_too(parts: list[int]) -> None:
    inputs = make_batch([(1, 90), (TOKENS, 200), (2, 80), (TOKENS, 100), (1, 5)], 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    compare(inputs, TopK(2, 1, 2))
    assert len(parts) >= 2


def test_a_prompt_is_done_in_parts(monkeypatch: pytest.MonkeyPatch, parts: list[int]) -> None:
    from tiers.vllm_model.ops import topk_attention as module

    # The first part sees too few keys, and the last one has too few tokens.
    monkeypatch.setattr(module, "_rows_at_once", lambda *arguments: ROWS // 4)
    tokens = 3 * ROWS // 4 + 1
    inputs = make_batch([(tokens, 63 - ROWS // 4 + tokens)], 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    compare(inputs, TopK(16, 1, 2))
    assert len(parts) == (2 if INTERPRETED else 12)


@pytest.mark.parametrize(("candidates", "kept"), [(4, 30), (60, 5), (3, 4)])
def test_lists_that_are_too_short(
    candidates: int, kept: int, monkeypatch: pytest.MonkeyPatch, parts: list[int]
) -> None:
    from tiers.vllm_model.ops import topk_prompt as module

    full = module.Sizes.of
    short = {"candidates": candidates, "kept": kept}
    monkeypatch.setattr(module.Sizes, "of", lambda *arguments: (s := full(*arguments)) and replace(s, **short))
    inputs = make_batch([(TOKENS, 150)], 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    compare(inputs, TopK(4, 1, 3))
    assert parts


def test_more_candidates_than_registers_hold(parts: list[int]) -> None:
    # The same few keys again and again: all of them tie.
    inputs = make_batch([(TOKENS, 1400)], 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    inputs.cache_BKNC[:] = inputs.cache_BKNC[:1]
    compare(inputs, TopK(4))
    assert parts


def test_nan_shows(parts: list[int]) -> None:
    inputs = make_batch([(TOKENS, 140)], 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    # In a block of the request behind the others.
    inputs.cache_BKNC[inputs.batch.block_table_RP[0, 2].item(), 0, 3, 5] = float("nan")
    from tiers.vllm_model.ops.paged_attention import paged_attention

    out = paged_attention(inputs.query_THD, inputs.cache_BKNC, inputs.batch, scale=0.3, pattern=TopK(2))
    expected = reference(inputs.query_THD, inputs.cache_BKNC, inputs.batch, scale=0.3, pattern=TopK(2))
    assert torch.equal(out.isnan(), expected.isnan())
    assert out.isnan().any()
    assert parts


@pytest.mark.parametrize(
    "options",
    [{"softcap": 2.0}, {"pattern": TopK(2, 0, 0, "group")}, {"pattern": TopK(40)}],
    ids=["softcap", "group", "k"],
)
def test_what_it_does_not_compute_goes_the_other_way(options: dict[str, Any], parts: list[int]) -> None:
    inputs = make_batch([(TOKENS, 140)], 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    compare(inputs, **{"pattern": TopK(2), **options})
    assert not parts


def test_the_workspace_covers_it(monkeypatch: pytest.MonkeyPatch, parts: list[int]) -> None:
    from tiers.vllm_model.ops import workspace
    from tiers.vllm_model.ops.paged_attention import paged_attention, workspace_bytes

    asked: list[int] = []

    def provide(size: int, device: torch.device) -> torch.Tensor:
        asked.append(size)
        return torch.empty(size, dtype=torch.uint8, device=device)

    monkeypatch.setattr(workspace, "provide", provide)
    inputs = make_batch([(TOKENS, 150)], 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    paged_attention(inputs.query_THD, inputs.cache_BKNC, inputs.batch, scale=0.3, pattern=TopK(2))
    assert parts
    assert max(asked) <= workspace_bytes(TopK(2), 4, 1, 32, TOKENS, 150)
