"""`paged_attention` against `attention` request by request: shuffled pages, stale entries, both memory layouts."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tiers.reference.config import Dense, TopK, Window
from tiers.reference.ops.attention import Pattern, attention
from tiers.reference.ops.bias import Bias
from tiers.reference.ops.paged_attention import Batch, paged_attention
from tiers.reference.positions import Position
from tiers.reference.testing.compare import assert_close
from tiers.reference.testing.inputs import BATCHES, FEW_ROWS, PATTERNS, POSITIONS, make_batch, position_options


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page", [16, 32], ids="page {}".format)
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_matches_attention_per_request(requests: Any, page: int, layout: str, pattern: Pattern) -> None:
    inputs = make_batch(requests, page, layout)
    options = {"scale": 20**-0.5, "pattern": pattern}
    actual = paged_attention(inputs.query_THD, inputs.cache_BKNC, inputs.batch, **options)
    assert actual.shape == inputs.query_THD.shape
    for request, (tokens, _) in enumerate(requests):
        if tokens:
            expected = attention(inputs.queries[request], inputs.keys[request], inputs.values[request], **options)
            assert_close(actual[inputs.rows(request)], expected, 1e-6)
    assert (actual[inputs.batch.host[1][-1] :] == 0).all()


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)
def test_every_kind_of_positions_matches_a_whole_prompt(position: Position, pattern: Pattern) -> None:
    # What a token gets does not depend on whether it came alone, in a chunk, or behind pages of another request.
    options = {"scale": 0.3, "pattern": pattern, **position_options(position, 4, 20, 64)}
    inputs = make_batch(FEW_ROWS, 16, "NHD").sharing()
    actual = paged_attention(inputs.query_THD, inputs.cache_BKNC, inputs.batch, **options)
    for request, (tokens, length) in enumerate(FEW_ROWS):
        blocks = inputs.batch.block_table_RP[request, : -(-length // 16)].long()
        both = inputs.cache_BKNC[blocks].transpose(1, 2).flatten(0, 1)[:length]
        query = torch.cat((torch.randn(length - tokens, 4, 20), inputs.queries[request]))
        expected = attention(query, both[..., :20], both[..., 20:], **options)[length - tokens :]
        assert_close(actual[inputs.rows(request)], expected, 2e-6)


@pytest.mark.parametrize("share", ["head", "group"])
def test_every_option_reaches_attention(share: Any) -> None:
    requests = [(1, 40), (7, 30)]
    inputs = make_batch(requests, 16, "NHD", heads=6, kv_heads=3)
    options = {
        "scale": 0.4,
        "pattern": TopK(5, 1, 2, share),
        "head_map": (0, 2, 0, 1, 2, 0),
        "bias": Bias("linear", torch.tensor([0.5, 0.25, 0.1, 0.05, 0.02, 0.01])),
        "decay_D": -torch.linspace(0.1, 0.01, 20),
        "softcap": 3.0,
    }
    actual = paged_attention(inputs.query_THD, inputs.cache_BKNC, inputs.batch, **options)
    for request in range(len(requests)):
        expected = attention(inputs.queries[request], inputs.keys[request], inputs.values[request], **options)
        assert_close(actual[inputs.rows(request)], expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_is_batch_invariant(pattern: Pattern, dtype: torch.dtype) -> None:
    requests = BATCHES["mixed"]
    inputs = make_batch(requests, 16, "NHD", dtype=dtype)
    options = {"scale": 20**-0.5, "pattern": pattern}
    together = paged_attention(inputs.query_THD, inputs.cache_BKNC, inputs.batch, **options)
    for request, (tokens, length) in enumerate(requests):
        rows = inputs.rows(request)
        table = inputs.batch.block_table_RP[request : request + 1]
        batch = Batch(table, torch.tensor([length]), torch.tensor([0, tokens]), tokens, length)
        alone = paged_attention(inputs.query_THD[rows], inputs.cache_BKNC, batch, **options)
        assert torch.equal(alone, together[rows])


def test_the_layout_in_memory_does_not_matter() -> None:
    hnd, nhd = (make_batch(BATCHES["mixed"], 16, layout) for layout in ("HND", "NHD"))
    assert hnd.cache_BKNC.stride() != nhd.cache_BKNC.stride()
    options = {"scale": 20**-0.5, "pattern": TopK(6, 1, 2)}
    a, b = (paged_attention(inputs.query_THD, inputs.cache_BKNC, inputs.batch, **options) for inputs in (hnd, nhd))
    assert torch.equal(a, b)


def test_pages_may_be_shared() -> None:
    # A prefix cache hands the same pages to several requests.
    inputs = make_batch([(1, 48), (1, 48)], 16, "HND")
    table = inputs.batch.block_table_RP
    table[1, :2] = table[0, :2]
    actual = paged_attention(inputs.query_THD, inputs.cache_BKNC, inputs.batch, scale=0.3, pattern=Dense())
    key, value = (torch.cat((part[0][:32], part[1][32:])) for part in (inputs.keys, inputs.values))
    assert_close(actual[1:2], attention(inputs.queries[1], key, value, scale=0.3, pattern=Dense()), 1e-6)


def test_block_ids_may_be_of_either_width() -> None:
    inputs = make_batch(BATCHES["mixed"], 16, "HND")
    options = {"scale": 0.3, "pattern": TopK(6, 1, 2)}
    wide = replace(inputs.batch, block_table_RP=inputs.batch.block_table_RP.long())
    narrow_out, wide_out = (
        paged_attention(inputs.query_THD, inputs.cache_BKNC, batch, **options) for batch in (inputs.batch, wide)
    )
    assert torch.equal(narrow_out, wide_out)


def test_nothing_is_modified() -> None:
    inputs = make_batch(BATCHES["mixed"], 16, "HND")
    tensors = (inputs.query_THD, inputs.cache_BKNC, inputs.batch.block_table_RP)
    before = [tensor.clone() for tensor in tensors]
    paged_attention(inputs.query_THD, inputs.cache_BKNC, inputs.batch, scale=0.3, pattern=Window(4))
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("length", [0, 2], ids=["no tokens", "too few tokens"])
def test_rejects_more_queries_than_tokens(length: int) -> None:
    inputs = make_batch([(3, 16)], 16, "HND")
    batch = replace(inputs.batch, lengths_R=torch.tensor([length]))
    with pytest.raises(ValueError, match=f"key_SKD has {length} tokens; expected at least 3"):
        paged_attention(inputs.query_THD, inputs.cache_BKNC, batch, scale=1.0, pattern=Dense())
