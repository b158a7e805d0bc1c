"""Top-k for long prompts in Triton, against the reference; see test_paged_attention_fast.py."""

import itertools
import os
from dataclasses import dataclass, field, replace
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
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which short contexts take the ways of long ones."""
    from tiers.vllm_model.ops import topk_prompt as module

    monkeypatch.setattr(module, "SHAPE", module.SHAPE._replace(rows=ROWS))
    monkeypatch.setattr(module, "FEWEST_TILES", 64)


@dataclass
class Served:
    """What went this way.

    Attributes:
        splits: of each part of a prompt.
        held: of each prompt.
    """

    splits: list[int] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)

    @property
    def flagged(self) -> float:
        """The share of rows whose bound was guessed badly."""
        flags = torch.cat([held.flags_TH.flatten() for held in self.held])
        return flags.float().mean().item()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    from tiers.vllm_model.ops import topk_prompt as module

    seen = Served()
    scratch, hold = module._scratch, module._hold

    def cut(sizes: Any, rows: int, splits: int) -> Any:
        seen.splits.append(splits)
        return scratch(sizes, rows, splits)

    def holding(*arguments: Any) -> Any:
        seen.held.append(hold(*arguments))
        return seen.held[-1]

    monkeypatch.setattr(module, "_scratch", cut)
    monkeypatch.setattr(module, "_hold", holding)
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
        for _ in range(20):
            assert torch.equal(actual, paged_attention(inputs.query_THD, inputs.cache_BKNC, batch, **options))


@pytest.mark.parametrize(
    ("context", "pattern"),
    [
        (60, TopK(2)),
        (150, TopK(2, 1, 5)),
        (300, TopK(2, 70, 3)),
        (300, TopK(2, 3, 90)),
        (257, TopK(1)),
        (700, TopK(3, 0, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("group", [4, 3])
def test_a_prompt_matches_the_reference(context: int, pattern: TopK, group: int, served: Served) -> None:
    context = max(context, 2 * TOKENS)
    inputs = make_batch([(TOKENS, context)], 16, "HND", 2 * group, 2, 32, DTYPE).to(DEVICE)
    compare(inputs, pattern)
    assert served.flagged < 0.05


@pytest.mark.parametrize("programs", [1, 1000])
def test_more_tiles_than_are_done_at_once(programs: int, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiers.vllm_model.ops import topk_prompt as module

    monkeypatch.setattr(module, "FEWEST_TILES", 128)
    monkeypatch.setattr(module, "SHAPE", module.SHAPE._replace(programs=programs))
    inputs = make_batch([(TOKENS, 600)], 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    compare(inputs, TopK(4, 1, 2))
    assert served.flagged < 0.05


def test_neighbours_that_score_alike(served: Served) -> None:
    """As in a text, where what is of interest stands together."""
    inputs = make_batch([(TOKENS, 900)], 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    # All keys of a page are nearly the same.
    keys = inputs.cache_BKNC[..., :32]
    keys[:] = keys[:, :, :1] + 0.1 * keys
    compare(inputs, TopK(24))
    assert served.flagged < 0.05


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page", "layout"), [(1, 1, 24, 16, "NHD"), (5, 1, 40, 32, "HND")]
)
def test_any_shape_of_heads(heads: int, kv_heads: int, size: int, page: int, layout: Any, served: Served) -> None:
    inputs = make_batch([(ROWS + 2, 2 * ROWS + 70)], page, layout, heads, kv_heads, size, DTYPE).to(DEVICE)
    compare(inputs, TopK(2, 1, 1))
    assert served.held


@pytest.mark.parametrize(("programs", "splits"), [(1, 1), (1000, 4)])
def test_lists_in_parts(programs: int, splits: int, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiers.vllm_model.ops import topk_prompt as module

    monkeypatch.setattr(module, "SHAPE", module.SHAPE._replace(programs=programs))
    inputs = make_batch([(TOKENS, 256)], 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    compare(inputs, TopK(2, 1, 2))
    assert set(served.splits) == {splits}


def test_other_requests_of_the_step_are_served_too(served: Served) -> None:
    lengths = [(1, 90), (TOKENS, 200), (2, 80), (TOKENS, 100), (1, 5)]
    inputs = make_batch(lengths, 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    compare(inputs, TopK(2, 1, 2))
    assert len(served.held) >= 2


def test_a_prompt_is_done_in_parts(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    from tiers.vllm_model.ops import topk_attention as module

    # So few bytes are enough for the tokens of one program only. What comes before sees too few keys, the rest is too short.
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 1)
    tokens = 3 * ROWS // 4 + 1
    inputs = make_batch([(tokens, 67 - ROWS // 4 + tokens)], 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    compare(inputs, TopK(16, 1, 2))
    assert served.held[0].flags_TH.shape[0] == 2 * ROWS // 4 if INTERPRETED else served.held


@pytest.mark.parametrize("change", [{"expected": 0.01}, {"room": 16}, {"expected": 40.0}], ids=str)
def test_rows_whose_bound_was_guessed_badly(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    from tiers.vllm_model.ops import topk_prompt as module

    full = module.Sizes.of
    monkeypatch.setattr(module.Sizes, "of", lambda pattern: replace(full(pattern), **change))
    inputs = make_batch([(TOKENS, 400)], 16, "NHD", 6, 2, 32, DTYPE).to(DEVICE)
    compare(inputs, TopK(4, 1, 3))
    assert served.flagged > 0.3


def test_scores_that_tie(served: Served) -> None:
    # The same key again and again: no list holds as many.
    inputs = make_batch([(TOKENS, 400)], 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    inputs.cache_BKNC[..., :32] = inputs.cache_BKNC[:1, :, :1, :32]
    compare(inputs, TopK(4))
    assert served.flagged == 1


def test_nan_shows(served: Served) -> None:
    inputs = make_batch([(TOKENS, 140)], 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    # In a block of the request behind the others.
    inputs.cache_BKNC[inputs.batch.block_table_RP[0, 2].item(), 0, 3, 5] = float("nan")
    from tiers.vllm_model.ops.paged_attention import paged_attention

    out = paged_attention(inputs.query_THD, inputs.cache_BKNC, inputs.batch, scale=0.3, pattern=TopK(2))
    expected = reference(inputs.query_THD, inputs.cache_BKNC, inputs.batch, scale=0.3, pattern=TopK(2))
    assert torch.equal(out.isnan(), expected.isnan())
    assert out.isnan().any()
    assert served.held


def test_the_copies_of_the_keys(served: Served) -> None:
    inputs = make_batch([(TOKENS, 300)], 16, "NHD", 8, 2, 24, DTYPE).to(DEVICE)
    compare(inputs, TopK(2))
    held = served.held[0]
    blocks = inputs.cache_BKNC[inputs.batch.block_table_RP[0, :19].long()]  # [P, K, N, C]
    keys_KSD = blocks.permute(1, 0, 2, 3).flatten(1, 2)[:, :300, :24]
    assert torch.equal(held.keys_KSD[:, :300, :24], keys_KSD)
    assert not held.keys_KSD[:, :, 24:].any()
    # One of every four, and not always the same.
    of_four = (held.sample_KSD[:, :75, None, :24] == keys_KSD.unflatten(1, (75, 4))).all(-1)
    assert (of_four.sum(-1) == 1).all()
    assert (of_four.sum(1) >= 15).all()


@pytest.mark.parametrize(
    "options",
    [{"softcap": 2.0}, {"pattern": TopK(2, 0, 0, "group")}, {"pattern": TopK(40)}, {"scale": -0.3}],
    ids=["softcap", "group", "k", "scale"],
)
def test_what_it_does_not_compute_goes_the_other_way(options: dict[str, Any], served: Served) -> None:
    inputs = make_batch([(TOKENS, 140)], 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    compare(inputs, **{"pattern": TopK(2), **options})
    assert not served.held


def test_a_layer_proves_itself_on_a_part_of_a_prompt(served: Served) -> None:
    from tiers.vllm_model.ops.paged_attention import paged_attention
    from tiers.vllm_model.self_check import self_check

    cache_BKNC = torch.randn(20, 2, 16, 64).to(DTYPE).to(DEVICE)
    before = cache_BKNC.clone()
    assert self_check(paged_attention, cache_BKNC, 8, 4096, 512, scale=0.3, pattern=TopK(3, 1, 2)) is None
    assert served.flagged < 0.5
    assert torch.equal(cache_BKNC, before)


@pytest.mark.parametrize(("tokens", "context"), [(TOKENS, 150), (4 * TOKENS, 1000)])
def test_the_workspace_covers_it(tokens: int, context: int, monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    from tiers.vllm_model.ops import workspace
    from tiers.vllm_model.ops.paged_attention import paged_attention, workspace_bytes

    asked: list[int] = []

    def provide(size: int, device: torch.device) -> torch.Tensor:
        asked.append(size)
        return torch.empty(size, dtype=torch.uint8, device=device)

    monkeypatch.setattr(workspace, "provide", provide)
    inputs = make_batch([(tokens, context)], 16, "NHD", 4, 1, 32, DTYPE).to(DEVICE)
    paged_attention(inputs.query_THD, inputs.cache_BKNC, inputs.batch, scale=0.3, pattern=TopK(2))
    assert served.held
    assert max(asked) <= workspace_bytes(TopK(2), 4, 1, 32, tokens, context)


@pytest.mark.parametrize("k", [1, 8, 64, 256, 1024, 2048])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (9, 3), (1, 1)])
@pytest.mark.parametrize(("first", "last"), [(0, 100), (0, 32768), (30000, 40000), (7, 600000), (600000, 700000)])
def test_ranges_of_a_prompt(k: int, heads: int, kv_heads: int, first: int, last: int) -> None:
    from tiers.vllm_model.ops import topk_prompt as module
    from tiers.vllm_model.ops.workspace import bytes_of

    found = module.parts(TopK(k, 4, 100), heads, kv_heads, first, last, 2**30)
    for (a, b), (c, _) in itertools.pairwise(found):
        assert a < b == c
    least = max(module.least_keys(TopK(k, 4, 100)), module.fewest_tokens(heads, kv_heads))
    if not found:
        assert min(last, module.MOST) - max(first, least) < ROWS
        return
    begin, end = found[0][0], found[-1][1]
    assert first <= begin
    assert end <= min(last, module.MOST)
    # Little is left over.
    assert begin == max(first, least)
    assert min(last, module.MOST) - end < ROWS
    sizes = module.Sizes.of(TopK(k, 4, 100))
    assert sizes is not None
    parts = [((b - a) * heads, module._splits(sizes, b - a, heads, kv_heads, b)) for a, b in found]
    asked = max(bytes_of(*module._scratch(sizes, *part)) for part in parts)
    room = module.workspace_bytes(TopK(k, 4, 100), heads, kv_heads, 128, last - first, last, 2**30)
    assert asked <= room <= 3 * 2**30


@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [(8, 2, 300), (32, 8, 8192), (3, 1, 64)])
@pytest.mark.parametrize("longest", [20_000, 131_072, 500_000])
def test_shorter_contexts_need_no_more(
    heads: int, kv_heads: int, tokens: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's workspace does not grow any more once it serves."""
    from tiers.vllm_model.ops import topk_prompt as module
    from tiers.vllm_model.ops import workspace

    pattern = TopK(64)
    sizes = module.Sizes.of(pattern)
    asked: list[int] = []

    def take(_device: Any, *wanted: Any) -> list[torch.Tensor]:
        asked.append(workspace.bytes_of(*wanted))
        return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in wanted]

    class Nothing:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_arguments, **_options: None

    monkeypatch.setattr(module.workspace, "take", take)
    monkeypatch.setattr(module, "_contiguous", Nothing())
    query = torch.empty(tokens, heads, 64, dtype=DTYPE, device="meta")
    cache = torch.empty(10, kv_heads, 16, 128, dtype=DTYPE, device="meta")
    table = torch.empty(1, 10, dtype=torch.int32, device="meta")
    for length in range(max(tokens, 1000), longest, 1999):
        for some in (tokens, tokens // 2):
            if ranges := module.parts(pattern, heads, kv_heads, length - some, length, 2**30):
                module._hold(query, cache, table, 0, ranges, sizes)
    assert max(asked) <= module.workspace_bytes(pattern, heads, kv_heads, 64, tokens, longest, 2**30)
