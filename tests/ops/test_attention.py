"""`attention` against a loop over heads, queries and keys in float64, and the properties that its rules promise."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.reference.config import Dense, TopK, Window
from tiers.reference.ops import attention as attention_module
from tiers.reference.ops.attention import Pattern, attention, kept
from tiers.reference.ops.bias import Bias
from tiers.reference.positions import Position
from tiers.reference.testing.compare import assert_close
from tiers.reference.testing.inputs import POSITIONS, position_options

PATTERNS: dict[str, Pattern] = {
    "dense": Dense(),
    "window 5": Window(5),
    "window 1": Window(1),
    "window 4 sink 3": Window(4, 3),
    "window 100": Window(100),
    "topk 1": TopK(1),
    "topk 5": TopK(5),
    "topk 4 sink 2": TopK(4, sink=2),
    "topk 4 window 3": TopK(4, window=3),
    "topk 3 sink 2 window 4": TopK(3, 2, 4),
    "topk 5 per group": TopK(5, share="group"),
    "topk 3 sink 1 window 2 per group": TopK(3, 1, 2, "group"),
    "topk 1000": TopK(1000, 1, 2),
}

# (T, S, H, KV, D, head_map)
SHAPES: dict[str, tuple[int, int, int, int, int, Sequence[int] | None]] = {
    "T1-S1-H2-KV1-D8": (1, 1, 2, 1, 8, None),
    "T7-S7-H4-KV2-D20": (7, 7, 4, 2, 20, None),
    "T63-S63-H2-KV2-D60": (63, 63, 2, 2, 60, None),
    "T1-S63-H4-KV2-D20": (1, 63, 4, 2, 20, None),
    "T7-S20-H4-KV2-D8-interleaved": (7, 20, 4, 2, 8, (0, 1, 0, 1)),
    "T7-S31-H6-KV3-D8-groups of 3, 1 and 2": (7, 31, 6, 3, 8, (0, 2, 0, 1, 2, 0)),
    "T2-S17-H3-KV1-D8": (2, 17, 3, 1, 8, None),
}


def inputs(
    tokens: int, length: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with scores of order 1 at scale size ** -0.5."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, heads, size), (length, kv_heads, size), (length, kv_heads, size))
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def naive_bias(bias: Bias, head: int, distance: int) -> float:
    """One number of a bias."""
    factor = float(bias.factor_H[head])
    if bias.kind == "table":
        assert bias.table_RL is not None
        row = bias.table_RL[head] if len(bias.table_RL) > 1 else bias.table_RL[0]
        return factor * float(row[min(distance, len(row) - 1)])
    if bias.kind == "log":
        assert bias.rate_H is not None
        return -factor * math.log(1 + float(bias.rate_H[head]) * distance)
    return -factor * (distance if bias.kind == "linear" else math.sqrt(distance))


def naive_attention(
    query: Tensor, key: Tensor, value: Tensor, *,
    scale: float, pattern: Pattern, head_map: Sequence[int] | None = None,
    bias: Bias | None = None, decay_D: Tensor | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """The definition, one query of one head at a time, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    tokens, heads, _ = query.shape
    length, kv_heads = key.shape[:2]
    reads = head_map if head_map is not None else [h // (heads // kv_heads) for h in range(heads)]
    out = torch.zeros_like(query)

    def scores(h: int, i: int) -> list[float]:
        """Of query position i against keys 0 to i."""
        found = []
        for j in range(i + 1):
            products = query[i - (length - tokens), h] * key[j, reads[h]]
            if decay_D is not None:
                products = products * 2 ** (decay_D.double() * (i - j))
            score = scale * float(products.sum())
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            if bias is not None:
                score += naive_bias(bias, h, i - j)
            found.append(score)
        return found

    for t in range(tokens):
        i = length - tokens + t
        by_head = [scores(h, i) for h in range(heads)]
        for h in range(heads):
            group = [g for g in range(heads) if reads[g] == reads[h]]
            shared = getattr(pattern, "share", "head") == "group"
            ranked = [max(by_head[g][j] for g in group) for j in range(i + 1)] if shared else by_head[h]
            chosen = naive_kept(pattern, i, ranked)
            weights = [math.exp(by_head[h][j]) for j in chosen]
            for j, weight in zip(chosen, weights, strict=True):
                out[t, h] += weight / sum(weights) * value[j, reads[h]]
    return out


def naive_kept(pattern: Pattern, i: int, ranked: list[float]) -> list[int]:
    """The keys that query position i keeps, given the scores that it ranks them by."""
    keys = range(i + 1)
    if isinstance(pattern, Dense):
        return list(keys)
    always = [j for j in keys if i - j < pattern.window or j < pattern.sink]
    if isinstance(pattern, Window):
        return always
    candidates = [j for j in keys if j not in always]
    if len(candidates) > pattern.k:
        threshold = sorted((ranked[j] for j in candidates), reverse=True)[pattern.k - 1]
        candidates = [j for j in candidates if ranked[j] >= threshold]
    return sorted(always + candidates)


# ---- against the loop -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matches_the_naive_loop(shape: Any, pattern: Pattern) -> None:
    *sizes, head_map = shape
    query, key, value = inputs(*sizes)
    options = {"scale": sizes[-1] ** -0.5, "pattern": pattern, "head_map": head_map}
    expected = naive_attention(query, key, value, **options)
    assert_close(attention(query, key, value, **options), expected, 1e-12)


@pytest.mark.parametrize(
    "pattern",
    [Dense(), Window(4, 2), TopK(4, 1, 2), TopK(4, 1, 2, "group")],
    ids=["dense", "window", "topk", "topk per group"],
)
@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("softcap", [None, 0.7, 30.0], ids=["no softcap", "softcap 0.7", "softcap 30"])
@pytest.mark.parametrize("head_map", [None, (0, 1, 0, 1), (1, 0, 1, 1)], ids=["contiguous", "interleaved", "unequal"])
def test_biases_enter_before_the_selection(
    pattern: Pattern, position: Position, softcap: float | None, head_map: Any
) -> None:
    query, key, value = inputs(9, 23, 4, 2, 8, seed=1)
    options = {"scale": 0.9, "pattern": pattern, "head_map": head_map, "softcap": softcap}
    options |= position_options(position, 4, 8, 23)
    expected = naive_attention(query, key, value, **options)
    # Slopes, tables and rates are float32 numbers, and exact as such.
    assert_close(attention(query, key, value, **options), expected, 1e-12)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_float32_matches_the_naive_loop(pattern: Pattern) -> None:
    query, key, value = inputs(7, 31, 6, 3, 20, torch.float32, seed=2)
    options = {"scale": 20**-0.5, "pattern": pattern, "head_map": (0, 2, 0, 1, 2, 0)}
    actual = attention(query, key, value, **options)
    assert actual.dtype == torch.float32
    assert_close(actual, naive_attention(query, key, value, **options), 1e-5)


def test_bfloat16_is_rounded_once() -> None:
    query, key, value = inputs(7, 31, 4, 2, 20, torch.bfloat16)
    options = {"scale": 20**-0.5, "pattern": TopK(5, 1, 2)}
    actual = attention(query, key, value, **options)
    exact = attention(query.float(), key.float(), value.float(), **options)
    assert torch.equal(actual, exact.bfloat16())


def test_no_argument_is_modified() -> None:
    tensors = inputs(7, 20, 4, 2, 8, torch.float32)
    bias, decay = Bias("log", torch.rand(4), torch.rand(4)), -torch.rand(8)
    everything = (*tensors, *bias.tensors().values(), decay)
    before = [tensor.clone() for tensor in everything]
    attention(*tensors, scale=1.0, pattern=TopK(3), head_map=(0, 1, 0, 1), bias=bias, decay_D=decay, softcap=5.0)
    assert all(torch.equal(a, b) for a, b in zip(everything, before, strict=True))


def test_a_contiguous_map_spelled_out_matches_none() -> None:
    query, key, value = inputs(9, 23, 4, 2, 8)
    for share in ("head", "group"):
        options = {"scale": 0.5, "pattern": TopK(3, 1, 2, share)}
        expected = attention(query, key, value, **options)
        assert_close(attention(query, key, value, head_map=(0, 0, 1, 1), **options), expected, 1e-12)


# ---- how many keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize("extra", [-1, 0, 1], ids=["one too few", "as many as candidates", "one more"])
def test_k_around_the_number_of_candidates(extra: int, share: Any) -> None:
    query, key, value = inputs(1, 20, 4, 2, 8)
    pattern = TopK(20 - 2 - 3 + extra, sink=2, window=3, share=share)
    actual = attention(query, key, value, scale=0.5, pattern=pattern)
    dense = attention(query, key, value, scale=0.5, pattern=Dense())
    assert_close(actual, naive_attention(query, key, value, scale=0.5, pattern=pattern), 1e-12)
    assert torch.equal(actual, dense) == (extra >= 0)


@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize("k", [30, 31, 32, 10**6])
def test_k_of_the_whole_context_equals_dense(k: int, share: Any) -> None:
    query, key, value = inputs(31, 31, 4, 2, 8)
    dense = attention(query, key, value, scale=0.5, pattern=Dense())
    assert torch.equal(attention(query, key, value, scale=0.5, pattern=TopK(k, 0, 1, share)), dense)


def test_rows_with_at_most_k_candidates_equal_dense() -> None:
    query, key, value = inputs(40, 40, 2, 2, 8)
    dense = attention(query, key, value, scale=0.5, pattern=Dense())
    actual = attention(query, key, value, scale=0.5, pattern=TopK(10, sink=2, window=3))
    assert torch.equal(actual[:15], dense[:15])
    assert not torch.isclose(actual[15], dense[15]).all()


@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_no_row_is_ever_empty(share: Any, length: int) -> None:
    query, key, value = inputs(length, length, 4, 2, 8)
    scores = torch.randn(2, 2, length, length)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    count = kept(scores, distance, TopK(1, share=share)).expand(2, 2, length, length).sum(-1)
    assert (count == 1).all()
    actual = attention(query, key, value, scale=0.5, pattern=TopK(1, share=share))
    assert torch.isfinite(actual).all()
    # One key kept: its value comes out as it is.
    assert all((value[:, h // 2] == actual[t, h]).all(-1).any() for t in range(length) for h in range(4))


# ---- ties -----------------------------------------------------------------------------------------------------------


def tied_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """One query over 24 keys with only four distinct scores, all exact in float32."""
    query = torch.tensor([[[2.0, 0.0, 0.0, 0.0]] * 2])
    key = torch.zeros(24, 1, 4)
    key[:, 0, 0] = torch.tensor([3.0, 1.0, 2.0, 0.0] * 6)
    value = torch.randn(24, 1, 4, generator=torch.Generator().manual_seed(0))
    return query, key, value


@pytest.mark.parametrize(
    ("k", "number"), [(1, 6), (5, 6), (6, 6), (7, 12), (12, 12), (13, 18), (18, 18), (19, 24), (24, 24)]
)
@pytest.mark.parametrize("share", ["head", "group"])
def test_ties_at_the_threshold_are_all_kept(k: int, number: int, share: Any) -> None:
    query, key, value = tied_inputs()
    scores = (query[0] @ key[:, 0].T)[None, :, None]  # [KV, G, T, S]
    distance = 23 - torch.arange(24)[None]
    assert (kept(scores, distance, TopK(k, share=share)).sum(-1) == number).all()
    actual = attention(query, key, value, scale=0.5, pattern=TopK(k, share=share))
    assert_close(actual, naive_attention(query, key, value, scale=0.5, pattern=TopK(k, share=share)), 1e-6)


@pytest.mark.parametrize("k", [1, 3, 7, 20])
@pytest.mark.parametrize("share", ["head", "group"])
def test_the_order_of_keys_does_not_matter(k: int, share: Any) -> None:
    query, key, value = tied_inputs()
    expected = attention(query, key, value, scale=0.5, pattern=TopK(k, share=share))
    for seed in range(5):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(seed))
        actual = attention(query, key[order], value[order], scale=0.5, pattern=TopK(k, share=share))
        assert_close(actual, expected, 1e-6)


def test_all_scores_equal_keeps_everything() -> None:
    _, key, value = inputs(1, 30, 1, 1, 8)
    query = torch.zeros(1, 1, 8, dtype=torch.float64)
    assert_close(attention(query, key, value, scale=1.0, pattern=TopK(2)), value.mean(0, keepdim=True), 1e-12)


# ---- values that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [Dense(), Window(30), TopK(3), TopK(3, 1, 2), TopK(3, share="group"), TopK(100)],
    ids=["dense", "window", "topk", "topk sink window", "topk per group", "topk 100"],
)
@pytest.mark.parametrize("head_map", [None, (1, 0, 1, 0)], ids=["contiguous", "listed"])
def test_a_nan_key_shows_in_every_row_that_may_see_it(pattern: Pattern, head_map: Any) -> None:
    query, key, value = inputs(30, 30, 4, 2, 8, torch.float32)
    key[11, 1, 3] = float("nan")
    actual = attention(query, key, value, scale=0.5, pattern=pattern, head_map=head_map)
    reads = head_map or (0, 0, 1, 1)
    for h in range(4):
        assert torch.isfinite(actual[:11, h]).all(), h
        assert torch.isnan(actual[11:, h]).all() == (reads[h] == 1), h
        assert torch.isfinite(actual[11:, h]).all() == (reads[h] == 0), h


def test_a_nan_key_behind_the_window_is_not_read() -> None:
    query, key, value = inputs(30, 30, 2, 1, 8, torch.float32)
    expected = attention(query, key, value, scale=0.5, pattern=Window(5))
    key[11] = float("nan")
    actual = attention(query, key, value, scale=0.5, pattern=Window(5))
    assert torch.isnan(actual[11:16]).all()
    assert torch.equal(actual[16:], expected[16:])


@pytest.mark.parametrize("share", ["head", "group"])
def test_an_infinite_query_shows(share: Any) -> None:
    query, key, value = inputs(30, 30, 2, 1, 8, torch.float32)
    query[17, 1] = float("inf")
    actual = attention(query, key, value, scale=0.5, pattern=TopK(3, share=share))
    assert torch.isnan(actual[17, 1]).all()
    assert torch.isfinite(actual[:17]).all()
    assert torch.isfinite(actual[18:]).all()


# ---- cut into pieces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("scores", [1, 500, 1500], ids="at most {} scores at once".format)
def test_blocks_match_the_whole(pattern: Pattern, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = inputs(21, 40, 4, 2, 8)
    options = {
        "scale": 0.5,
        "pattern": pattern,
        "bias": Bias("linear", torch.tensor([0.5, 0.25, 0.1, 0.01])),
        "softcap": 4.0,
    }
    expected = attention(query, key, value, **options)
    mapped = attention(query, key, value, head_map=(1, 0, 0, 0), **options)
    monkeypatch.setattr(attention_module, "MAX_SCORES", scores)
    assert_close(attention(query, key, value, **options), expected, 1e-12)
    assert_close(attention(query, key, value, head_map=(1, 0, 0, 0), **options), mapped, 1e-12)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("step", [1, 5], ids=["token by token", "five tokens at a time"])
def test_chunked_matches_whole(pattern: Pattern, step: int) -> None:
    query, key, value = inputs(21, 21, 4, 2, 8)
    options = {"scale": 0.5, "pattern": pattern, "bias": Bias("linear", torch.tensor([0.5, 0.25, 0.1, 0.01]))}
    expected = attention(query, key, value, **options)
    parts = [attention(query[t : t + step], key[: t + step], value[: t + step], **options) for t in range(0, 21, step)]
    assert_close(torch.cat(parts), expected, 1e-12)


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": torch.zeros(9, 2, 7)}, "key_SKD has head size 7; expected 8"),
        ({"value": torch.zeros(8, 2, 8)}, r"value_SKD has shape \(8, 2, 8\); expected 9 tokens and 2 heads"),
        ({"value": torch.zeros(9, 1, 8)}, r"value_SKD has shape \(9, 1, 8\); expected 9 tokens and 2 heads"),
        ({"query": torch.zeros(10, 4, 8)}, "key_SKD has 9 tokens; expected at least 10"),
        ({"query": torch.zeros(5, 3, 8)}, "query_THD has 3 heads; expected a multiple of 2, or a head_map"),
        ({"head_map": (0, 1, 0)}, "head_map has 3 entries; expected 4"),
        ({"bias": Bias("linear", torch.zeros(2))}, r"bias.factor_H has shape \(2,\); expected \(4,\)"),
        ({"bias": Bias("linear", torch.zeros(4, 1))}, r"bias.factor_H has shape \(4, 1\); expected \(4,\)"),
        ({"decay_D": torch.zeros(4)}, r"decay_D has shape \(4,\); expected \(8,\)"),
    ],
    ids=[
        "head size",
        "value tokens",
        "value heads",
        "too many queries",
        "heads",
        "head_map",
        "slopes",
        "slopes rank",
        "decay",
    ],
)
def test_rejects_mismatched_arguments(changes: dict[str, Any], message: str) -> None:
    tensors = {"query": torch.zeros(5, 4, 8), "key": torch.zeros(9, 2, 8), "value": torch.zeros(9, 2, 8)}
    options = {key: value for key, value in changes.items() if key not in tensors}
    tensors |= {key: value for key, value in changes.items() if key in tensors}
    with pytest.raises(ValueError, match=message):
        attention(*tensors.values(), scale=1.0, pattern=Dense(), **options)


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        (Dense(), {}),
        (Window(3, 1), {}),
        (TopK(2, 1, 1), {}),
        (TopK(2, 0, 1, "group"), {}),
        (TopK(2, 0, 1, "group"), {"head_map": (0, 1, 1, 1)}),
        (TopK(2), {"softcap": 2.0}),
        (TopK(2), {"bias": Bias("linear", torch.tensor([0.5, 0.25, 0.1, 0.05]))}),
        (
            Window(4),
            {"softcap": 2.0, "bias": Bias("linear", torch.tensor([0.5, 0.25, 0.1, 0.05])), "head_map": (1, 0, 1, 0)},
        ),
    ],
    ids=["dense", "window", "topk", "group", "group of a map", "softcap", "slopes", "all"],
)
def test_gradients_match_differences(pattern: Pattern, options: dict[str, Any]) -> None:
    tensors = tuple(tensor.requires_grad_() for tensor in inputs(2, 6, 4, 2, 2))
    assert torch.autograd.gradcheck(
        lambda query, key, value: attention(query, key, value, scale=0.7, pattern=pattern, **options), tensors
    )
