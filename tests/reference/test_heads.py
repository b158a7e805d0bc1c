"""Head maps, and laying out any of them as contiguous groups of one size."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from tiers.reference.config import Dense, TopK, Window
from tiers.reference.errors import ConfigError
from tiers.reference.heads import HeadLayout, head_map
from tiers.reference.ops.attention import attention
from tiers.reference.ops.bias import Bias
from tiers.reference.testing.compare import assert_close


class Case(NamedTuple):
    """A map as written, the heads it is for, the map spelled out, and the slots of its layout."""

    kind: str | Sequence[int]
    num_heads: int
    num_kv_heads: int
    spelled: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def layout(self) -> HeadLayout:
        return HeadLayout.of(self.spelled, self.num_kv_heads)


CASES = {
    "contiguous": Case("contiguous", 6, 3, (0, 0, 1, 1, 2, 2), (0, 1, 2, 3, 4, 5)),
    "interleaved": Case("interleaved", 6, 3, (0, 1, 2, 0, 1, 2), (0, 3, 1, 4, 2, 5)),
    "equal list": Case([2, 0, 0, 1, 2, 1], 6, 3, (2, 0, 0, 1, 2, 1), (1, 2, 3, 5, 0, 4)),
    "contiguous list": Case([0, 0, 1, 1], 4, 2, (0, 0, 1, 1), (0, 1, 2, 3)),
    "groups of 3, 1 and 2": Case([0, 2, 0, 1, 2, 0], 6, 3, (0, 2, 0, 1, 2, 0), (0, 2, 5, 3, -1, -1, 1, 4, -1)),
    "one head per group": Case("contiguous", 3, 3, (0, 1, 2), (0, 1, 2)),
    "one group": Case("interleaved", 4, 1, (0, 0, 0, 0), (0, 1, 2, 3)),
}

every_map = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_map
def test_a_map_is_spelled_out(case: Case) -> None:
    assert head_map(case.kind, case.num_heads, case.num_kv_heads) == case.spelled


@every_map
def test_a_layout_lists_the_heads_group_by_group(case: Case) -> None:
    assert case.layout.slots == case.slots
    assert case.layout.num_heads == len(case.slots)
    assert case.layout.num_heads % case.num_kv_heads == 0
    assert case.layout.is_identity == (case.spelled == tuple(sorted(case.spelled)))


@pytest.mark.parametrize(
    ("kind", "num_heads", "num_kv_heads", "message"),
    [
        ("contiguous", 5, 2, "num_heads is 5 and num_kv_heads is 2"),
        ("interleaved", 2, 4, "an interleaved head_map|a interleaved head_map"),
        ([0, 1], 3, 2, r"head_map has 2 entries; expected num_heads = 3"),
        ([0, 1, 2], 3, 2, r"head_map\[2\] is 2; expected an index from 0 to num_kv_heads - 1 = 1"),
        ([1, 1, 1], 3, 2, "head_map never names key/value head 0"),
    ],
    ids=["no multiple", "more groups than heads", "wrong length", "out of range", "unread group"],
)
def test_refuses_maps_that_do_not_fit(kind: Any, num_heads: int, num_kv_heads: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        head_map(kind, num_heads, num_kv_heads)


# ---- arrange --------------------------------------------------------------------------------------------------------


def naive_arrange(tensor: torch.Tensor, case: Case, head_size: int, dim: int, copy: bool) -> torch.Tensor:
    """The slots one by one; an empty one gets zeros, or a copy of the first head that reads the same key/value head."""
    heads = tensor.split(head_size, dim)
    group_size = len(case.slots) // case.num_kv_heads
    parts = []
    for place, slot in enumerate(case.slots):
        first = case.spelled.index(place // group_size)
        empty = heads[first] if copy else torch.zeros_like(heads[0])
        parts.append(heads[slot] if slot >= 0 else empty)
    return torch.cat(parts, dim)


@every_map
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((-1, 10), 0), ((10, -1), 1), ((-1,), 0), ((2, -1, 3), 1)],
    ids=["rows", "columns", "bias", "middle"],
)
@pytest.mark.parametrize("head_size", [1, 4])
@pytest.mark.parametrize("copy", [True, False], ids=["copies", "zeros"])
def test_arrange_moves_whole_heads(case: Case, shape: tuple[int, ...], dim: int, head_size: int, copy: bool) -> None:
    torch.manual_seed(0)
    tensor = torch.randn([case.num_heads * head_size if n == -1 else n for n in shape])
    before = tensor.clone()
    expected = naive_arrange(tensor, case, head_size, dim, copy)
    actual = case.layout.arrange(tensor, head_size, dim, copy=copy)
    assert torch.equal(actual, expected)
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("copy", [True, False], ids=["copies", "zeros"])
def test_arrange_returns_the_same_tensor_if_nothing_moves(copy: bool) -> None:
    tensor = torch.randn(8, 3)
    assert HeadLayout.of((0, 0, 1, 1), 2).arrange(tensor, 2, 0, copy=copy) is tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_arrange_keeps_the_dtype(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype)
    layout = HeadLayout.of((0, 2, 0, 1, 2, 0), 3)
    zeros, copies = (layout.arrange(tensor, 1, 0, copy=copy) for copy in (False, True))
    assert zeros.dtype == copies.dtype == dtype
    assert zeros.tolist() == [0, 2, 5, 3, 0, 0, 1, 4, 0]
    assert copies.tolist() == [0, 2, 5, 3, 3, 3, 1, 4, 1]


# ---- regrouped attention --------------------------------------------------------------------------------------------


@every_map
@pytest.mark.parametrize(
    "pattern",
    [Dense(), Window(5, 1), TopK(4, 1, 2), TopK(4, 1, 2, "group")],
    ids=["dense", "window", "topk", "topk-group"],
)
def test_regrouped_attention_matches_head_map(case: Case, pattern: Any) -> None:
    torch.manual_seed(0)
    tokens, size, width = 23, 8, 32
    x = torch.randn(tokens, width)
    q_weight, q_bias = torch.randn(case.num_heads * size, width) / 4, torch.randn(case.num_heads * size)
    o_weight = torch.randn(width, case.num_heads * size) / 4
    bias = Bias("linear", torch.rand(case.num_heads))
    key, value = torch.randn(2, tokens, case.num_kv_heads, size)

    query = torch.nn.functional.linear(x, q_weight, q_bias).unflatten(1, (-1, size))
    out = attention(query, key, value, scale=0.3, pattern=pattern, head_map=case.spelled, bias=bias)
    expected = out.flatten(1) @ o_weight.T

    layout = case.layout
    arranged = torch.nn.functional.linear(
        x, layout.arrange(q_weight, size, 0, copy=True), layout.arrange(q_bias, size, 0, copy=True)
    )
    slots_out = attention(
        arranged.unflatten(1, (-1, size)), key, value,
        scale=0.3, pattern=pattern, bias=bias.arranged(layout),
    )  # fmt: skip
    # Empty slots are multiplied by columns of zeros.
    actual = slots_out.flatten(1) @ layout.arrange(o_weight, size, 1, copy=False).T
    assert_close(actual, expected, 1e-5)
    used = [i for i, slot in enumerate(case.slots) if slot >= 0]
    assert_close(slots_out[:, used], out[:, [case.slots[i] for i in used]], 1e-5)
