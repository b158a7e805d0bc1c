"""xPos: published exponents, the published form in float64, and long contexts in 16 bits."""

import math

import pytest
import torch
from torch import Tensor

from tiers.reference.config import Dense, TopK, Window
from tiers.reference.ops.attention import Pattern, attention
from tiers.reference.ops.rope import rope, rope_table
from tiers.reference.ops.xpos import TILE, decayed_products, xpos_decay
from tiers.reference.positions import Xpos
from tiers.reference.testing.compare import assert_close, assert_within_budget


def published(x_THD: Tensor, positions: list[int], position: Xpos, sign: float) -> Tensor:
    """Queries (sign 1) or keys (sign -1) as the paper turns and scales them, one pair at a time, in float64."""
    size = x_THD.shape[-1]
    out = x_THD.double().clone()
    for t, p in enumerate(positions):
        for n in range(size // 2):
            a, b = (2 * n, 2 * n + 1) if position.style == "interleaved" else (n, n + size // 2)
            angle = p * position.theta ** (-2 * n / size)
            zeta = (2 * n + position.gamma * size) / ((1 + position.gamma) * size)
            scale = zeta ** (sign * p / position.scale_base)
            x, y = x_THD[t, :, a].double(), x_THD[t, :, b].double()
            out[t, :, a] = scale * (x * math.cos(angle) - y * math.sin(angle))
            out[t, :, b] = scale * (y * math.cos(angle) + x * math.sin(angle))
    return out


def test_decay_has_the_published_exponents() -> None:
    # zeta_0 = 0.4 / 1.4 and zeta of the last pair (d - 2 + 0.4 d) / (1.4 d); one power per 512 tokens.
    zeta = torch.exp2(xpos_decay(Xpos(), 64).double() * 512)
    assert float(zeta[0]) == pytest.approx(0.2857, abs=5e-5)
    assert float(zeta[-1]) == pytest.approx((62 + 0.4 * 64) / (1.4 * 64), rel=1e-6)
    assert torch.equal(zeta[::2], zeta[1::2])
    # What keys scaled by their absolute position would have to hold.
    lowest = xpos_decay(Xpos(), 64)[0].double()
    powers = [float(lowest * n * math.log10(2)) for n in (4096, 8192, 32768, 131072)]
    assert powers == pytest.approx([-4.35, -8.7, -34.8, -139.3], abs=0.05)


def test_pairs_of_halves_share_a_decay() -> None:
    decay = xpos_decay(Xpos(style="half"), 16)
    assert torch.equal(decay[:8], decay[8:])
    assert torch.equal(decay[:8], xpos_decay(Xpos(), 16)[::2])


@pytest.mark.parametrize("pattern", [Dense(), Window(30, 2), TopK(9, 1, 3), TopK(9, 1, 3, "group")], ids=str)
@pytest.mark.parametrize("style", ["interleaved", "half"])
def test_matches_the_published_form(style: str, pattern: Pattern) -> None:
    position = Xpos(style=style, theta=100.0, gamma=0.3, scale_base=40.0)  # type: ignore[arg-type]
    tokens, length, heads, kv, size = 20, 3 * TILE + 5, 4, 2, 8
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(tokens, heads, size, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, length, kv, size, generator=generator, dtype=torch.float64)
    positions = list(range(length))
    # Scores of the published form are products of what it makes of queries and keys.
    expected = attention(
        published(query, positions[-tokens:], position, 1), published(key, positions, position, -1), value,
        scale=0.5, pattern=pattern,
    )  # fmt: skip
    table = rope_table(position.rope, size, length)
    turned = (
        rope(x, torch.tensor(p), table, position.style) for x, p in ((query, positions[-tokens:]), (key, positions))
    )
    actual = attention(*turned, value, scale=0.5, pattern=pattern, decay_D=xpos_decay(position, size))
    # The rotary table and the decay are float32.
    assert_close(actual, expected, 1e-4)


def test_products_depend_on_the_distance_only() -> None:
    decay = xpos_decay(Xpos(), 16)
    query, key = torch.randn(2, 16, dtype=torch.float64)
    for distance in (0, 1, 63, 64, 1000):
        found = []
        for first in (0, 5, 63, 64, 9000):
            keys = torch.zeros(1, first + distance + 1, 16, dtype=torch.float64)
            keys[0, first] = key
            products = decayed_products(query[None, None, None], keys, first + distance, decay)
            found.append(float(products[0, 0, 0, first]))
        assert max(found) - min(found) < 1e-12
        assert found[0] == pytest.approx(float((query * key * 2 ** (decay.double() * distance)).sum()), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_is_finite_and_exact_at_128k_positions(dtype: torch.dtype) -> None:
    # The published form cannot do this: its keys reach 10 ** 139.
    position, size, length = Xpos(), 16, 2**17
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, size, generator=generator).to(dtype)
    key, value = torch.randn(2, length, 1, size, generator=generator).to(dtype)
    decay = xpos_decay(position, size)
    # Scores of near keys are large enough to matter beside so many far ones.
    options = {"scale": 1.0, "pattern": Dense()}
    actual = attention(query, key, value, decay_D=decay, **options)
    # An independent float64: every product by its own distance.
    distance = torch.arange(length - 1, -1, -1, dtype=torch.float64)
    factor = torch.exp2(decay.double() * distance[:, None])
    scores = torch.einsum("hd,sd,sd->hs", query[0].double(), key[:, 0].double(), factor)
    exact = (scores.softmax(-1) @ value[:, 0].double())[None]
    assert_within_budget(actual, exact.to(dtype), exact)


def test_chunked_matches_whole() -> None:
    query, key, value = torch.randn(3, 200, 2, 16)
    options = {"scale": 0.25, "pattern": TopK(9, 1, 2), "decay_D": xpos_decay(Xpos(scale_base=50.0), 16)}
    whole = attention(query, key, value, **options)
    for start, stop in ((0, 1), (1, 64), (64, 65), (65, 190), (190, 200)):
        part = attention(query[start:stop], key[:stop], value[:stop], **options)
        assert_close(part, whole[start:stop], 1e-5)


def test_gradients_match_differences() -> None:
    query = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    key = torch.randn(TILE + 3, 1, 4, dtype=torch.float64, requires_grad=True)
    decay = xpos_decay(Xpos(scale_base=30.0), 4)

    value = torch.randn(TILE + 3, 1, 4, dtype=torch.float64)

    def run(query: Tensor, key: Tensor) -> Tensor:
        return attention(query, key, value, scale=0.5, pattern=Dense(), decay_D=decay)

    assert torch.autograd.gradcheck(run, (query, key))
