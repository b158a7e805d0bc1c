"""Paged attention through torch.compile: the named cases of all tiers, and how often it is compiled.

Code is made for each combination of pattern, options and layout, which takes 15 to 40 s, so tests share combinations where
they can: plain top-k is that of most, and the other patterns are compiled with other positions, layouts and heads. All
combinations are tested with the functions as they are, not compiled.
"""

import copy
import inspect
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.compiled.ops import paged_attention as module
from tiers.compiled.ops.paged_attention import Piece, Setup, paged_attention
from tiers.reference.config import Dense, TopK
from tiers.reference.ops.attention import attention
from tiers.reference.ops.bias import Bias
from tiers.reference.ops.paged_attention import Batch
from tiers.reference.ops.paged_attention import paged_attention as reference
from tiers.reference.ops.xpos import xpos_decay
from tiers.reference.positions import Position, Xpos
from tiers.reference.testing.compare import assert_close, assert_within_budget
from tiers.reference.testing.inputs import BATCHES, PATTERNS, POSITIONS, PagedInputs, make_batch, position_options

TOPK = {"scale": 0.3, "pattern": PATTERNS["topk"]}


pytestmark = pytest.mark.usefixtures("compiling")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "compiled", lambda function, variant, **fixed: partial(function, **fixed))


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def run(inputs: PagedInputs, **options: Any) -> Tensor:
    return paged_attention(inputs.query_THD, inputs.cache_BKNC, inputs.batch, **options)


def expect(inputs: PagedInputs, **options: Any) -> Tensor:
    return reference(inputs.query_THD, inputs.cache_BKNC, inputs.batch, **options)


def compare(inputs: PagedInputs, **options: Any) -> None:
    assert_close(run(inputs, **options), expect(inputs, **options), 1e-5)


def test_signature_is_that_of_the_reference() -> None:
    assert inspect.signature(paged_attention) == inspect.signature(reference)


@pytest.mark.parametrize("share", ["topk", "topk per group"])
def test_every_batch_matches_the_reference_with_two_compilations(share: str) -> None:
    before = graphs()
    for seed in range(2):
        for requests in BATCHES.values():
            compare(make_batch(requests, 16, "HND", seed=seed), scale=0.3, pattern=PATTERNS[share])
    # One for steps of single tokens, one for prompts.
    assert graphs() - before == 2


def test_a_session_compiles_twice() -> None:
    chance = random.Random(0)
    before = graphs()
    # A scale of its own, so that nothing is there yet. Sizes that are equal in the first batches (2 requests, 2 blocks,
    # 2 key/value heads) differ later. Some contexts are long enough for Inductor to sum in another way.
    for requests in [[(1, 16), (1, 16)], [(2, 20)], [(1, 7000)], [(1, 9000), (1, 9000), (4, 5000)]]:
        compare(make_batch(requests, 16, "HND"), scale=0.31, pattern=PATTERNS["topk"])
    for seed in range(40):
        requests = []
        for _ in range(chance.choice([1, 1, 2, 3, 5, 9])):
            length = chance.choice([1, 2, 15, 16, 17, 33, chance.randint(1, 400)])
            requests.append(
                (chance.choice([1, 1, 1, min(2, length), chance.randint(1, min(40, length)), length]), length)
            )
        compare(make_batch(requests, 16, "HND", seed=seed), scale=0.31, pattern=PATTERNS["topk"])
    assert graphs() - before == 2


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("head_map", [None, (0, 0, 0, 1)], ids=["contiguous", "unequal"])
def test_what_is_compiled_knows_every_kind_of_positions(
    uncompiled: None, head_map: Any, position: Position, pattern: Any
) -> None:
    # Compiling all of these takes many minutes; the next test compiles some.
    options = {"scale": 0.3, "pattern": pattern, "head_map": head_map, **position_options(position, 4, 20, 700)}
    for requests in (BATCHES["decodes"], [(1, 40), (7, 7), (13, 60), (1, 1), (9, 700)]):
        inputs = make_batch(requests, 16, "HND").sharing()
        compare(inputs, **options)


@pytest.mark.parametrize(
    ("name", "pattern", "layout", "options"),
    [
        ("xpos", "dense", "NHD", {}),
        ("sandwich", "window", "HND", {"head_map": (0, 1, 0, 1)}),
        ("kerple", "topk", "NHD", {"head_map": (0, 1, 0, 1), "softcap": 3.0}),
        ("t5", "topk per group", "HND", {"head_map": (0, 0, 0, 1)}),
    ],
)
def test_compiled_matches_the_reference_with_other_positions(
    name: str, pattern: str, layout: str, options: dict[str, Any]
) -> None:
    before = graphs()
    # Tables of two lengths: one code serves both.
    for length in (700, 900):
        own = {
            "scale": 0.3,
            "pattern": PATTERNS[pattern],
            **options,
            **position_options(POSITIONS[name], 4, 20, length),
        }
        for requests in (BATCHES["decodes"], BATCHES["mixed"], [(1, 640), (9, 600)]):
            compare(make_batch(requests, 16, layout), **own)
    assert graphs() - before == 2


def test_xpos_in_16_bits_errs_no_more_than_eager_does(uncompiled: None) -> None:
    inputs = make_batch([(1, 40), (20, 300)], 16, "HND", dtype=torch.bfloat16)
    options = {**TOPK, **position_options(POSITIONS["xpos"], 4, 20, 300)}
    exact = reference(inputs.query_THD.double(), inputs.cache_BKNC.double(), inputs.batch, **options)
    assert_within_budget(run(inputs, **options), expect(inputs, **options), exact)


def test_xpos_is_exact_behind_128k_tokens(uncompiled: None) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        inputs = make_batch([(3, 2**17)], 128, "HND", 1, 1, 16, dtype)
        options = {"scale": 1.0, "pattern": Dense(), "decay_D": xpos_decay(Xpos(), 16)}
        exact = reference(inputs.query_THD[:3].double(), inputs.cache_BKNC.double(), inputs.batch, **options)
        assert_within_budget(run(inputs, **options)[:3], expect(inputs, **options)[:3], exact)


def test_a_head_size_and_groups_that_are_not_powers_of_two_match_the_reference() -> None:
    # Keys of 64 tokens a block, as vLLM has them beside other kinds of layers; more blocks than k needs.
    compare(make_batch([(1, 200), (9, 70), (1, 1)], 64, "NHD", 9, 3, 40), scale=0.2, pattern=TopK(65, 3, 5))


def test_compiled_errs_no_more_than_eager_does() -> None:
    inputs = make_batch(BATCHES["mixed"], 16, "HND", dtype=torch.bfloat16)
    exact = reference(inputs.query_THD.double(), inputs.cache_BKNC.double(), inputs.batch, **TOPK)
    assert_within_budget(run(inputs, **TOPK), expect(inputs, **TOPK), exact)


@pytest.mark.parametrize("share", ["head", "group"])
def test_all_ties_are_kept(share: Any) -> None:
    # Keys of three kinds only: every threshold is a tie of many. Small integers, so that equal keys have equal scores
    # whatever the order of the sums.
    inputs = make_batch([(1, 63), (4, 30)], 16, "HND")
    for request in range(2):
        blocks = inputs.batch.block_table_RP[request, : -(-inputs.batch.host[0][request] // 16)].long()
        kinds = torch.randint(-1, 2, (3, 20)).float()
        tokens = kinds[torch.arange(len(blocks) * 16) % 3].view(len(blocks), 1, 16, 20)
        inputs.cache_BKNC[blocks, :, :, :20] = tokens.expand(-1, 2, -1, -1)
    inputs.query_THD = torch.randint(-2, 3, inputs.query_THD.shape).float()
    options = {"scale": 0.3, "pattern": TopK(6, 1, 2, share)}
    assert_close(run(inputs, **options)[:5], expect(inputs, **options)[:5], 1e-5)


def test_nan_scores_show_where_they_do_in_the_reference() -> None:
    inputs = make_batch([(1, 40), (1, 40), (5, 40), (3, 20)], 16, "HND")
    for request, place in ((0, 7), (2, 37)):
        block = inputs.batch.block_table_RP[request, place // 16].long()
        inputs.cache_BKNC[block, 1, place % 16, :20] = float("nan")
    expected = expect(inputs, **TOPK)
    # Two heads of the first request, and of the queries of the third that see the key.
    assert expected.isnan().any(-1).sum() == 2 + 2 * 3
    torch.testing.assert_close(run(inputs, **TOPK), expected, rtol=0, atol=1e-5, equal_nan=True)


def test_padding_rows_are_zero_and_the_result_is_new() -> None:
    for requests in ([(1, 40), (1, 20)], [(7, 40)]):
        inputs = make_batch(requests, 16, "HND")
        arguments = (inputs.query_THD, inputs.cache_BKNC, inputs.batch.block_table_RP)
        before = [tensor.clone() for tensor in arguments]
        actual = run(inputs, **TOPK)
        assert (actual[-2:] == 0).all()
        assert actual.data_ptr() != inputs.query_THD.data_ptr()
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(arguments, before, strict=True))


def test_a_request_alone_matches_the_same_in_a_batch() -> None:
    requests = BATCHES["mixed"]
    inputs = make_batch(requests, 16, "HND")
    together = run(inputs, **TOPK)
    for request, (tokens, length) in enumerate(requests):
        rows = inputs.rows(request)
        table = inputs.batch.block_table_RP[request : request + 1]
        batch = Batch(table, torch.tensor([length]), torch.tensor([0, tokens]), tokens, length)
        alone = paged_attention(inputs.query_THD[rows], inputs.cache_BKNC, batch, **TOPK)
        assert_close(alone, together[rows], 1e-6)


def test_layers_that_are_alike_share_what_the_first_works_out(
    uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    lists = module._lists
    monkeypatch.setattr(module, "_lists", lambda *args: made.append(args) or lists(*args))
    # Decode steps beside a prompt, and alone.
    for requests in ([(1, 30), (5, 20), (1, 17)], [(1, 30), (1, 20)]):
        inputs = make_batch(requests, 16, "HND")
        made.clear()
        for _ in range(3):
            compare(inputs, **TOPK)
        assert len(made) == 1
        # Wider rows of scores, for more keys than there are; and other heads.
        compare(inputs, scale=0.3, pattern=TopK(100))
        query = inputs.query_THD.repeat(1, 2, 1)
        actual = paged_attention(query, inputs.cache_BKNC, inputs.batch, **TOPK)
        assert_close(actual, reference(query, inputs.cache_BKNC, inputs.batch, **TOPK), 1e-5)
        assert len(made) == 3


def test_a_copy_of_a_batch_with_another_table_is_another_batch(uncompiled: None) -> None:
    inputs = make_batch([(1, 30), (1, 30)], 16, "HND")
    before = run(inputs, **TOPK)
    other = copy.copy(inputs.batch)
    other.block_table_RP = inputs.batch.block_table_RP.flip(0)
    assert other.memo is inputs.batch.memo
    actual = paged_attention(inputs.query_THD, inputs.cache_BKNC, other, **TOPK)
    assert_close(actual, reference(inputs.query_THD, inputs.cache_BKNC, other, **TOPK), 1e-5)
    assert not torch.equal(actual, before)


def test_a_long_prompt_is_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Room for the scores of 5 tokens, and then of 1 token.
    for room in (4 * 60 * 5, 1):
        monkeypatch.setattr(module, "MAX_SCORES", room)
        compare(make_batch([(60, 60), (1, 33), (1, 60)], 16, "HND"), **TOPK)


def test_scores_held_at_once_are_bounded() -> None:
    setup = Setup(32, 8, 128, 16, "1.0", Dense(), None, None)
    length = 200_000
    pieces = module._pieces(_batch([(length, length)]), setup)
    assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].stop, pieces[-1].length) == (0, length, length)
    assert max((p.stop - p.start) * 32 * p.length for p in pieces) <= module.MAX_SCORES


def test_contexts_of_very_different_length_are_not_padded_to_the_longest() -> None:
    setup = Setup(32, 8, 128, 16, "1.0", Dense(), None, None)
    rows = [Piece(i, i + 1, i, 100_000 if i == 5 else 64) for i in range(20)]
    assert [len(group) for group in module._groups(rows, setup)] == [19, 1]
    rows = [Piece(i, i + 1, i, 2000 + i) for i in range(200)]
    groups = list(module._groups(rows, setup))
    assert [row for group in groups for row in group] == rows
    assert all(sum(setup.blocks(r.length) for r in group) * 32 * 128 <= module.MAX_SCORES for group in groups)


def test_the_reference_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Tensor:
        raise AssertionError("the reference was called")

    monkeypatch.setattr("tiers.reference.ops.paged_attention.attention", refuse)
    inputs = make_batch(BATCHES["mixed"], 16, "HND")
    with pytest.raises(AssertionError, match="was called"):
        expect(inputs, **TOPK)
    actual = run(inputs, **TOPK)
    expected = attention(inputs.queries[2], inputs.keys[2], inputs.values[2], **TOPK)
    assert_close(actual[inputs.rows(2)], expected, 1e-5)


def _batch(requests: list[tuple[int, int]]) -> Batch:
    """Only the sizes; no cache."""
    starts = [0]
    for tokens, _ in requests:
        starts.append(starts[-1] + tokens)
    lengths = torch.tensor([length for _, length in requests])
    return Batch(torch.zeros(len(requests), 1), lengths, torch.tensor(starts), max(starts), int(lengths.max()))


def test_rejects_wrong_arguments() -> None:
    inputs = make_batch([(3, 16)], 16, "HND")
    with pytest.raises(ValueError, match="cache_BKNC has 40 channels; expected 60"):
        paged_attention(torch.zeros(3, 4, 30), inputs.cache_BKNC, inputs.batch, **TOPK)
    with pytest.raises(ValueError, match="query_THD has 3 heads; expected a multiple of 2"):
        paged_attention(torch.zeros(3, 3, 20), inputs.cache_BKNC, inputs.batch, **TOPK)
    with pytest.raises(ValueError, match="head_map has 2 entries; expected 4"):
        run(inputs, **TOPK, head_map=(0, 1))
    with pytest.raises(ValueError, match="expected indices from 0 to 1"):
        run(inputs, **TOPK, head_map=(0, 1, 2, 0))
    with pytest.raises(ValueError, match=r"bias.factor_H has shape \(3,\); expected \(4,\)"):
        run(inputs, **TOPK, bias=Bias("linear", torch.ones(3)))
    inputs.batch.lengths_R = torch.tensor([2])
    with pytest.raises(ValueError, match="request 0 has 2 tokens; expected at least 3"):
        paged_attention(inputs.query_THD, inputs.cache_BKNC, _batch([(3, 2)]), **TOPK)


SECOND = """
import torch
from torch._dynamo.utils import counters
from tiers.compiled.ops.paged_attention import paged_attention
from tiers.reference.testing.inputs import PATTERNS, make_batch
inputs = make_batch([(1, 33), (1, 20)], 16, "HND")
paged_attention(inputs.query_THD[:2], inputs.cache_BKNC, inputs.batch, scale=0.3, pattern=PATTERNS["topk"])
print("HITS", counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


def test_compiled_code_is_kept_on_disk(tmp_path: Path) -> None:
    env = {**os.environ, "TORCHDYNAMO_DISABLE": "0", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", SECOND], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(tuple(int(number) for number in done.stdout.split("HITS")[1].split()))
    assert found == [(0, 1), (1, 0)]
    # torch 2.11 writes this kind of input, and cannot read it.
    kept = [file for file in (tmp_path / "aotautograd").rglob("*") if file.is_file()]
    assert kept
    assert not any(b"DefaultsSource" in file.read_bytes() for file in kept)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", ["head", "group"])
def test_matches_the_reference_on_cuda(share: Any, dtype: torch.dtype) -> None:
    inputs = make_batch(BATCHES["mixed"], 16, "NHD", 4, 2, 32, dtype).to("cuda")
    options = {"scale": 0.3, "pattern": TopK(6, 1, 2, share), "head_map": (0, 1, 1, 1)}
    before = graphs()
    actual, eager = run(inputs, **options), expect(inputs, **options)
    assert graphs() - before == 2
    exact = reference(inputs.query_THD.double(), inputs.cache_BKNC.double(), inputs.batch, **options)
    assert_within_budget(actual, eager, exact)
