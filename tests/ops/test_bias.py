"""What distance adds to a score: published values, transformers, independent formulas, and cutting it among ranks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.reference.heads import HeadLayout
from tiers.reference.ops.bias import KINDS, Bias, bias_of, sandwich_bias, t5_bias, t5_bucket
from tiers.reference.positions import T5, Alibi, Kerple, NoPosition, Position, Rope, Sandwich, Xpos
from tiers.reference.testing.compare import assert_close
from tiers.reference.testing.inputs import POSITIONS, position_options

BIASED = {name: position for name, position in POSITIONS.items() if name not in ("none", "xpos")}


def at(bias: Bias | None, *distances: int) -> Tensor:
    """[H, distances] in float64."""
    assert bias is not None
    return bias.values(torch.tensor([distances]), torch.float64)[:, 0]


def test_alibi_falls_by_a_slope_per_token() -> None:
    actual = at(bias_of(Alibi(), 8, 64, 16, {}), 0, 1, 10)
    slopes = 2.0 ** -torch.arange(1, 9).double()
    assert_close(actual, -slopes[:, None] * torch.tensor([0.0, 1.0, 10.0]), 1e-12)


def test_alibi_of_the_square_root() -> None:
    actual = at(bias_of(Alibi((0.5, 2.0), "sqrt"), 2, 64, 16, {}), 0, 1, 2, 100)
    expected = [[0, -0.5, -0.5 * math.sqrt(2), -5], [0, -2, -2 * math.sqrt(2), -20]]
    assert_close(actual, torch.tensor(expected, dtype=torch.float64), 1e-12)


# d = 128 of 8 heads; the last row is head 8.
SANDWICH = {
    1: [0, -1.44662, -5.20199, -19.34091, -33.31891, -53.38965],
    8: [0, -0.18083, -0.65025, -2.41761, -4.16486, -6.67371],
}


@pytest.mark.parametrize("head", SANDWICH)
def test_sandwich_has_the_published_values(head: int) -> None:
    actual = at(sandwich_bias(8, 128, 1024), 0, 1, 2, 10, 100, 1000)[head - 1]
    assert_close(actual, torch.tensor(SANDWICH[head], dtype=torch.float64), 5e-6)


@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (5, 6), (12, 64)])
def test_sandwich_matches_the_formula(heads: int, dim: int) -> None:
    actual = at(sandwich_bias(heads, dim, 300), *range(300))
    for head in range(1, heads + 1):
        for distance in (0, 1, 7, 299):
            total = sum(math.cos(distance / 10000 ** (2 * i / dim)) for i in range(1, dim // 2 + 1))
            expected = (total - dim / 2) / (head * 8 / heads)
            assert float(actual[head - 1, distance]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_sandwich_without_dim_has_the_channels_of_a_head() -> None:
    assert_close(at(bias_of(Sandwich(), 4, 32, 50, {}), 49), at(bias_of(Sandwich(32), 4, 8, 50, {}), 49), 0)


def test_t5_has_the_published_buckets() -> None:
    distances = torch.tensor([0, 1, 15, 16, 20, 32, 64, 127, 1000])
    assert t5_bucket(distances, 32, 128).tolist() == [0, 1, 15, 16, 17, 21, 26, 31, 31]


@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (32, 1000), (8, 20), (7, 60), (2, 2), (64, 4096)])
def test_t5_buckets_are_those_of_transformers(buckets: int, longest: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(5000)
    expected = T5Attention._relative_position_bucket(
        -distances, bidirectional=False, num_buckets=buckets, max_distance=longest
    )
    assert torch.equal(t5_bucket(distances, buckets, longest), expected)
    # A table up to the longest distance says the same of every longer one.
    weight = torch.randn(buckets, 3)
    table = t5_bias(weight, longest)
    assert torch.equal(table.values(distances[None])[:, 0], weight[expected].T)


def test_t5_matches_the_bias_of_transformers() -> None:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=12, d_kv=4, num_heads=3, is_decoder=True, relative_attention_max_distance=50)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    expected = theirs.compute_bias(90, 90)[0].detach()
    bias = t5_bias(theirs.relative_attention_bias.weight.detach(), 50)
    distance = torch.arange(90)[:, None] - torch.arange(90)
    causal = distance >= 0
    assert_close(bias.values(distance)[:, causal], expected[:, causal], 0)


def test_kerple_is_a_logarithm_of_the_distance() -> None:
    bias = bias_of(Kerple((1.0, 0.25), (2.0, 0.01)), 2, 64, 16, {})
    for head, (r1, r2) in enumerate([(1.0, 2.0), (0.25, 0.01)]):
        for distance in (0, 1, 17, 100000):
            expected = -r1 * math.log(1 + r2 * distance)
            assert float(at(bias, distance)[head, 0]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("position", [Rope(), Xpos(), NoPosition()], ids=lambda p: p.kind)
def test_other_positions_are_no_bias(position: Position) -> None:
    assert bias_of(position, 4, 8, 16, {}) is None


@pytest.mark.parametrize("position", BIASED.values(), ids=BIASED)
def test_keys_behind_the_query_have_numbers_that_are_finite(position: Position) -> None:
    bias = position_options(position, 3, 16, 8)["bias"]
    assert_close(bias.values(torch.tensor([[-5, -1]])), bias.values(torch.tensor([[0, 0]])), 0)


@pytest.mark.parametrize("position", BIASED.values(), ids=BIASED)
@pytest.mark.parametrize("mapping", [(0, 1, 0, 1, 0, 1), (0, 2, 0, 1, 2, 0)], ids=["equal groups", "unequal groups"])
def test_a_rank_has_the_bias_of_its_own_heads(mapping: tuple[int, ...], position: Position) -> None:
    whole = position_options(position, 6, 16, 40)["bias"]
    layout = HeadLayout.of(mapping, max(mapping) + 1)
    distance = torch.arange(40)[None]
    found, each = [], layout.num_heads // layout.num_kv_heads
    for rank in range(layout.num_kv_heads):
        part = whole.arranged(layout).part(rank * each, (rank + 1) * each)
        part.check(each)
        found.append(part.values(distance))
    actual = torch.cat(found)
    for slot, head in enumerate(layout.slots):
        if head >= 0:
            assert torch.equal(actual[slot], whole.values(distance)[head])


@pytest.mark.parametrize("position", BIASED.values(), ids=BIASED)
def test_kernels_read_the_same_numbers(position: Position) -> None:
    bias = position_options(position, 3, 16, 8)["bias"]
    packed = bias.packed
    assert packed.dtype == torch.float32
    assert torch.equal(packed[:3], bias.factor_H)
    assert torch.equal(packed[3:6], torch.zeros(3) if bias.rate_H is None else bias.rate_H)
    assert torch.equal(packed[6:], torch.empty(0) if bias.table_RL is None else bias.table_RL.flatten())


def test_values_taken_in_place_reach_what_was_packed() -> None:
    bias, other = (position_options(POSITIONS["t5"], 3, 16, 8, seed=seed)["bias"] for seed in (1, 2))
    packed, before = bias.packed, bias.packed.clone()
    bias.fill(other)
    assert packed is bias.packed
    assert torch.equal(packed, other.packed)
    assert not torch.equal(packed, before)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_match_differences(kind: Any) -> None:
    factor, rate = torch.rand(2, 3, dtype=torch.float64).requires_grad_(True)
    table = torch.rand(3, 4, dtype=torch.float64).requires_grad_(True)
    distance = torch.tensor([[0, 1, 2], [1, 5, 9]])
    more = {"log": {"rate_H": rate}, "table": {"table_RL": table}}.get(kind, {})

    def values(factor: Tensor, rest: Tensor) -> Tensor:
        return Bias(kind, factor, **dict.fromkeys(more, rest)).values(distance, torch.float64)

    assert torch.autograd.gradcheck(values, (factor, next(iter(more.values()), rate)))


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        (Bias("linear", torch.ones(3)), r"factor_H has shape \(3,\); expected \(4,\)"),
        (Bias("log", torch.ones(4), torch.ones(2)), r"rate_H has shape \(2,\); expected \(4,\)"),
        (Bias("log", torch.ones(4)), "kind log has no rate_H"),
        (Bias("sqrt", torch.ones(4), table_RL=torch.ones(1, 5)), "kind sqrt has a table_RL"),
        (Bias("table", torch.ones(4), table_RL=torch.ones(2, 5)), r"table_RL has shape \(2, 5\); expected 1 or 4 rows"),
        (Bias("cubic", torch.ones(4)), "kind 'cubic'; expected one of linear, sqrt, log, table"),  # type: ignore[arg-type]
    ],
    ids=["heads", "rates", "no rates", "surplus table", "rows", "kind"],
)
def test_rejects_what_does_not_fit(bias: Bias, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        bias.check(4)
    Bias("table", torch.ones(4), table_RL=torch.ones(1, 5)).check(4)


def test_t5_config_and_table_agree() -> None:
    weight = torch.rand(8, 2)
    bias = bias_of(T5(8, 20, shared=True), 2, 16, 99, {"t5_bias": weight})
    assert_close(at(bias, 10**6), weight[-1].double()[:, None], 0)
