"""ALiBi slopes: the published numbers, and those of vLLM and transformers."""

import math

import pytest
import torch

from tiers.reference.ops.alibi import alibi_slopes
from tiers.reference.testing.compare import assert_close

EIGHT = [2.0**-i for i in range(1, 9)]

PUBLISHED = {
    1: [2.0**-8],
    2: [2.0**-4, 2.0**-8],
    4: [0.25, 0.0625, 0.015625, 0.00390625],
    8: EIGHT,
    12: [*EIGHT, 0.707107, 0.353553, 0.176777, 0.088388],
    16: [2.0 ** (-i / 2) for i in range(1, 17)],
}


@pytest.mark.parametrize("heads", PUBLISHED, ids="H{}".format)
def test_matches_the_published_slopes(heads: int) -> None:
    actual = alibi_slopes(heads)
    assert actual.dtype == torch.float32
    assert_close(actual, torch.tensor(PUBLISHED[heads]), 5e-7)


def test_powers_of_two_are_exact() -> None:
    assert alibi_slopes(8).tolist() == EIGHT


@pytest.mark.parametrize("heads", [*range(1, 34), 71, 112], ids="H{}".format)
def test_matches_the_authors_recursion(heads: int) -> None:
    def get_slopes(n: int) -> list[float]:
        """As in the authors' code."""
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        closest = 2 ** math.floor(math.log2(n))
        return get_slopes(closest) + get_slopes(2 * closest)[0::2][: n - closest]

    actual = alibi_slopes(heads)
    assert actual.shape == (heads,)
    assert_close(actual, torch.tensor(get_slopes(heads)), 1e-6)
    assert ((actual > 0) & (actual < 1)).all()


@pytest.mark.parametrize("heads", [8, 12, 20], ids="H{}".format)
def test_matches_transformers(heads: int) -> None:
    from transformers.models.bloom import modeling_bloom as bloom
    from transformers.models.mpt import modeling_mpt as mpt

    # One token of distance: the bias at the last but one key, relative to the last one's.
    table = bloom.build_alibi_tensor(torch.ones(1, 4), heads, torch.float32).view(heads, 4)
    assert_close(alibi_slopes(heads), table[:, 3] - table[:, 2], 1e-6)
    table = mpt.build_mpt_alibi_tensor(heads, 4).view(heads, 4)
    assert_close(alibi_slopes(heads), table[:, 3] - table[:, 2], 1e-6)


@pytest.mark.parametrize("heads", [8, 12, 20], ids="H{}".format)
def test_matches_vllm(heads: int) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.model_executor.models.bloom import _get_alibi_slopes

    assert_close(alibi_slopes(heads), _get_alibi_slopes(heads), 1e-6)
