"""`paged_attention` against `attention` request by request: shuffled pages, stale entries, both memory layouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.reference.config import Dense, TopK, Window
from tiers.reference.ops.attention import Pattern, attention
from tiers.reference.ops.paged_attention import paged_attention
from tiers.reference.testing.compare import assert_close

PATTERNS: dict[str, Pattern] = {
    "dense": Dense(),
    "window": Window(9, 2),
    "topk": TopK(6, 1, 2),
    "topk per group": TopK(6, 1, 2, "group"),
}

# name -> (query tokens, tokens in the cache) of each request
BATCHES: dict[str, list[tuple[int, int]]] = {
    "one decode": [(1, 33)],
    "one prefill": [(33, 33)],
    "decodes": [(1, 1), (1, 16), (1, 17), (1, 63)],
    "mixed": [(1, 40), (7, 7), (13, 60), (1, 1), (32, 32)],
    "padding rows": [(1, 40), (0, 0), (5, 20), (0, 0), (0, 0)],
    "only padding": [(0, 0), (0, 0)],
    "a request without queries": [(1, 5), (0, 31), (2, 8)],
}


@dataclass
class Batch:
    """Requests in a paged cache, and the same requests as plain tensors.

    Attributes:
        queries, keys, values: per request, [T_r, H, D] and [S_r, KV, D].
        query_THD: packed, with two padding rows.
    """

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    query_THD: Tensor
    cache_BKNC: Tensor
    block_table_RP: Tensor
    lengths_R: list[int]
    starts_R1: list[int]

    def run(self, **options: Any) -> Tensor:
        return paged_attention(
            self.query_THD, self.cache_BKNC, self.block_table_RP, self.lengths_R, self.starts_R1, **options
        )


def make_batch(
    requests: Sequence[tuple[int, int]],
    page: int,
    layout: str,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 20,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """Scatter random requests over the pages of a cache; whatever no request owns is NaN."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    queries = [randn(tokens, heads, size) for tokens, _ in requests]
    keys = [randn(length, kv_heads, size) for _, length in requests]
    values = [randn(length, kv_heads, size) for _, length in requests]
    needed = [-(-length // page) for _, length in requests]
    blocks = sum(needed) + 3
    if layout == "HND":
        cache = torch.full((blocks, kv_heads, page, 2 * size), float("nan"), dtype=dtype)
    else:
        cache = torch.full((blocks, page, kv_heads, 2 * size), float("nan"), dtype=dtype).permute(0, 2, 1, 3)
    order = iter(torch.randperm(blocks, generator=generator).tolist())
    # Stale entries lie outside the cache: reading one would raise.
    table = torch.tensor([10**6, -(10**6)]).repeat(len(requests), 4)[:, : max(needed) + 2].to(torch.int32)
    for request, number in enumerate(needed):
        for i in range(number):
            block = table[request, i] = next(order)
            part = slice(i * page, (i + 1) * page)
            both = torch.cat((keys[request][part], values[request][part]), dim=-1)
            cache[block, :, : len(both)] = both.transpose(0, 1)
    starts = [0]
    for tokens, _ in requests:
        starts.append(starts[-1] + tokens)
    query = torch.cat([*queries, torch.full((2, heads, size), float("nan"), dtype=dtype)])
    return Batch(queries, keys, values, query, cache, table, [length for _, length in requests], starts)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page", [16, 32], ids="page {}".format)
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_matches_attention_per_request(requests: Any, page: int, layout: str, pattern: Pattern) -> None:
    batch = make_batch(requests, page, layout)
    options = {"scale": 20**-0.5, "pattern": pattern}
    actual = batch.run(**options)
    assert actual.shape == batch.query_THD.shape
    for request, (tokens, _) in enumerate(requests):
        if tokens:
            expected = attention(batch.queries[request], batch.keys[request], batch.values[request], **options)
            start = batch.starts_R1[request]
            assert_close(actual[start : start + tokens], expected, 1e-6)
    assert (actual[batch.starts_R1[-1] :] == 0).all()


@pytest.mark.parametrize("share", ["head", "group"])
def test_every_option_reaches_attention(share: Any) -> None:
    requests = [(1, 40), (7, 30)]
    batch = make_batch(requests, 16, "NHD", heads=6, kv_heads=3)
    options = {
        "scale": 0.4,
        "pattern": TopK(5, 1, 2, share),
        "head_map": (0, 2, 0, 1, 2, 0),
        "slopes_H": torch.tensor([0.5, 0.25, 0.1, 0.05, 0.02, 0.01]),
        "softcap": 3.0,
    }
    actual = batch.run(**options)
    for request, (tokens, _) in enumerate(requests):
        expected = attention(batch.queries[request], batch.keys[request], batch.values[request], **options)
        start = batch.starts_R1[request]
        assert_close(actual[start : start + tokens], expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_is_batch_invariant(pattern: Pattern, dtype: torch.dtype) -> None:
    requests = BATCHES["mixed"]
    batch = make_batch(requests, 16, "NHD", dtype=dtype)
    options = {"scale": 20**-0.5, "pattern": pattern}
    together = batch.run(**options)
    for request, (tokens, length) in enumerate(requests):
        start = batch.starts_R1[request]
        rows = slice(start, start + tokens)
        alone = paged_attention(
            batch.query_THD[rows], batch.cache_BKNC, batch.block_table_RP[request : request + 1], [length], [0, tokens],
            **options,
        )  # fmt: skip
        assert torch.equal(alone, together[rows])


def test_the_layout_in_memory_does_not_matter() -> None:
    hnd, nhd = (make_batch(BATCHES["mixed"], 16, layout) for layout in ("HND", "NHD"))
    assert hnd.cache_BKNC.stride() != nhd.cache_BKNC.stride()
    options = {"scale": 20**-0.5, "pattern": TopK(6, 1, 2)}
    assert torch.equal(hnd.run(**options), nhd.run(**options))


def test_pages_may_be_shared() -> None:
    # A prefix cache hands the same pages to several requests.
    batch = make_batch([(1, 48), (1, 48)], 16, "HND")
    batch.block_table_RP[1, :2] = batch.block_table_RP[0, :2]
    actual = batch.run(scale=0.3, pattern=Dense())
    key, value = (torch.cat((part[0][:32], part[1][32:])) for part in (batch.keys, batch.values))
    assert_close(actual[1:2], attention(batch.queries[1], key, value, scale=0.3, pattern=Dense()), 1e-6)


def test_block_ids_may_be_of_either_width() -> None:
    batch = make_batch(BATCHES["mixed"], 16, "HND")
    assert batch.block_table_RP.dtype == torch.int32
    expected = batch.run(scale=0.3, pattern=TopK(6))
    batch.block_table_RP = batch.block_table_RP.long()
    assert torch.equal(batch.run(scale=0.3, pattern=TopK(6)), expected)


def test_nothing_is_modified() -> None:
    batch = make_batch(BATCHES["mixed"], 16, "HND")
    tensors = (batch.query_THD, batch.cache_BKNC, batch.block_table_RP)
    before = [tensor.clone() for tensor in tensors]
    batch.run(scale=0.3, pattern=Window(4))
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("length", [0, 2], ids=["no tokens", "too few tokens"])
def test_rejects_more_queries_than_tokens(length: int) -> None:
    batch = make_batch([(3, 16)], 16, "HND")
    batch.lengths_R = [length]
    with pytest.raises(ValueError, match=f"key_SKD has {length} tokens; expected at least 3"):
        batch.run(scale=1.0, pattern=Dense())
