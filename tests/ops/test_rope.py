"""Rotary positions: tables against vLLM and transformers, rotation against complex numbers."""

import cmath
import math
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.reference.config import DeepseekYarn, Dynamic, Linear, Llama3, LongRope, Ntk, NtkAlpha, Rope, Yarn
from tiers.reference.ops.rope import rope, rope_table
from tiers.reference.testing.compare import assert_close

HEAD, POSITIONS = 32, 256

# vLLM and this project do the same float32 operations in another order. An angle of 256 is off by up to 256 * 2 ** -24,
# so that sines are by about 2e-5.
TABLE_BUDGET = 3e-5

SHORT = tuple(1.0 + 0.05 * i for i in range(HEAD // 2))
LONG = tuple(1.5 + 0.5 * i for i in range(HEAD // 2))

SCALINGS: dict[str, Rope] = {
    "default": Rope(),
    "another theta": Rope(theta=5e5),
    "partial": Rope(partial_rotary_factor=0.25),
    "linear": Rope(scaling=Linear(4.0)),
    "linear partial": Rope(partial_rotary_factor=0.5, scaling=Linear(2.0)),
    "llama3": Rope(theta=5e5, scaling=Llama3(8.0, 1.0, 4.0, 64)),
    "llama3 of equal factors": Rope(scaling=Llama3(8.0, 2.0, 2.0, 64)),
    "yarn": Rope(scaling=Yarn(4.0, 64)),
    "yarn partial": Rope(partial_rotary_factor=0.5, scaling=Yarn(4.0, 64)),
    "yarn not truncated": Rope(scaling=Yarn(4.0, 64, truncate=False)),
    "yarn with attention factor": Rope(scaling=Yarn(4.0, 64, attention_factor=1.25)),
    "yarn with other betas": Rope(scaling=Yarn(4.0, 64, beta_fast=16.0, beta_slow=2.0)),
    "yarn of factor 1": Rope(scaling=Yarn(1.0, 256)),
    "dynamic": Rope(scaling=Dynamic(2.0, 64)),
    "dynamic at its original length": Rope(scaling=Dynamic(2.0, 256)),
    "ntk alpha": Rope(scaling=NtkAlpha(1000.0)),
    "ntk": Rope(scaling=Ntk(4.0)),
    "ntk mixed": Rope(partial_rotary_factor=0.5, scaling=Ntk(8.0, 0.625)),
    "yarn with mscale": Rope(scaling=Yarn(4.0, 64, mscale=0.7, mscale_all_dim=1.3)),
    "yarn with mscale alone": Rope(scaling=Yarn(4.0, 64, mscale=0.7)),
    "deepseek yarn": Rope(scaling=DeepseekYarn(4.0, 64)),
    "deepseek yarn of equal mscales": Rope(scaling=DeepseekYarn(40.0, 64, mscale=0.707, mscale_all_dim=0.707)),
    "deepseek yarn of other mscales": Rope(theta=5e5, scaling=DeepseekYarn(4.0, 64, 16.0, 2.0, 1.4, 0.6)),
    "longrope": Rope(scaling=LongRope(SHORT, LONG, 64)),
    "longrope partial": Rope(partial_rotary_factor=0.5, scaling=LongRope(SHORT[:8], LONG[:8], 100)),
    "longrope at its original length": Rope(scaling=LongRope(SHORT, LONG, 256)),
    "longrope with mscales": Rope(scaling=LongRope(SHORT, LONG, 64, 1.1, 1.3)),
}


def rope_parameters(position: Rope) -> dict[str, Any]:
    """The same section in the words of transformers and vLLM."""
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": position.theta,
        "partial_rotary_factor": position.partial_rotary_factor,
    }
    if position.scaling is not None:
        given = {key: value for key, value in vars(position.scaling).items() if value is not None and key != "use"}
        kind = "dynamic" if isinstance(position.scaling, NtkAlpha) else position.scaling.kind
        parameters |= {"rope_type": kind, **{k: list(v) if isinstance(v, tuple) else v for k, v in given.items()}}
    return parameters


needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def vllm_table(position: Rope, style: str) -> Tensor:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    parameters = rope_parameters(position)
    length = POSITIONS
    if isinstance(position.scaling, Linear):
        # vLLM counts the table's rows from the length before scaling.
        length = int(POSITIONS / position.scaling.factor)
    if isinstance(position.scaling, Dynamic):
        parameters["max_trained_positions"] = parameters.pop("original_max_position_embeddings")
    current = VllmConfig()
    if isinstance(position.scaling, LongRope):
        current.model_config = SimpleNamespace(max_model_len=POSITIONS)  # type: ignore[assignment]
    with set_current_vllm_config(current):
        layer = get_rope(HEAD, length, style == "half", parameters, torch.float32)
    if not isinstance(position.scaling, LongRope):
        return layer.cos_sin_cache[:POSITIONS]
    both = layer.long_short_cos_sin_cache
    return both[position.scaling.original_max_position_embeddings :] if layer.use_long_rope else both[:POSITIONS]


@needs_vllm
@pytest.mark.parametrize("position", SCALINGS.values(), ids=SCALINGS)
def test_table_matches_vllm(position: Rope) -> None:
    actual = rope_table(position, HEAD, POSITIONS)
    assert actual.dtype == torch.float32
    assert actual.shape == (POSITIONS, position.rotary_dim(HEAD))
    assert_close(actual, vllm_table(position, "half"), TABLE_BUDGET)


# "llama3 of equal factors": transformers divides by their difference. The others it does not know, but for longrope with
# factors on cosines and sines of its own.
UNKNOWN_THERE = ("llama3 of equal factors", "ntk", "deepseek", "longrope with mscales")


@pytest.mark.parametrize("name", [name for name in SCALINGS if not name.startswith(UNKNOWN_THERE)])
def test_table_matches_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    position = SCALINGS[name]
    scaling = position.scaling
    config = LlamaConfig(
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        # What "dynamic" takes for the original length.
        max_position_embeddings=scaling.original_max_position_embeddings if isinstance(scaling, Dynamic) else POSITIONS,
        rope_parameters=rope_parameters(position),
    )
    if scaling is None:
        width = position.rotary_dim(HEAD)
        inv_freq, factor = 1.0 / position.theta ** (torch.arange(0, width, 2).float() / width), 1.0
    else:
        # "dynamic" depends on the length of the request; it agrees at that of the table.
        inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, "cpu", seq_len=POSITIONS)
    angles = torch.arange(POSITIONS).float()[:, None] * inv_freq
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
    assert_close(rope_table(position, HEAD, POSITIONS), expected, TABLE_BUDGET)


def test_longrope_can_be_told_which_factors_to_use() -> None:
    for length in (32, POSITIONS):
        for use, factors in (("short", SHORT), ("long", LONG)):
            scaling = LongRope(SHORT, LONG, 64, 1.0, 1.0, use=use)  # type: ignore[arg-type]
            angle = 31 / (torch.tensor(factors) * 10000 ** (torch.arange(0, HEAD, 2) / HEAD))
            actual = rope_table(Rope(scaling=scaling), HEAD, length)[31]
            assert_close(actual, torch.cat((angle.cos(), angle.sin())), TABLE_BUDGET)


def test_transformers_changes_longrope_with_the_length_of_a_request() -> None:
    """Where it differs: up to the original length it takes the short factors, even in a model that is longer."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    position = SCALINGS["longrope"]
    config = LlamaConfig(
        hidden_size=4 * HEAD, num_attention_heads=4, max_position_embeddings=POSITIONS,
        rope_parameters=rope_parameters(position),
    )  # fmt: skip
    theirs, _ = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=60)
    plain = 10000 ** -(torch.arange(0, HEAD, 2) / HEAD)
    assert_close(theirs, plain / torch.tensor(SHORT), 1e-6)
    ours = rope_table(position, HEAD, POSITIONS)[1]
    expected = torch.cat(((plain / torch.tensor(LONG)).cos(), (plain / torch.tensor(LONG)).sin()))
    assert_close(ours, expected * math.sqrt(1 + math.log(4) / math.log(64)), 1e-6)


def test_dynamic_stretches_nothing_below_its_original_length() -> None:
    expected = rope_table(Rope(), HEAD, 32)
    assert torch.equal(rope_table(Rope(scaling=Dynamic(4.0, 64)), HEAD, 32), expected)


def test_linear_divides_positions() -> None:
    whole = rope_table(Rope(), HEAD, POSITIONS)
    scaled = rope_table(Rope(scaling=Linear(4.0)), HEAD, POSITIONS)
    assert_close(scaled[::4], whole[: POSITIONS // 4], TABLE_BUDGET)


def test_position_zero_turns_nothing() -> None:
    for position in SCALINGS.values():
        table = rope_table(position, HEAD, 4)
        cos, sin = table[0].chunk(2)
        assert (sin == 0).all()
        assert (cos == cos[0]).all()


# ---- rotation -------------------------------------------------------------------------------------------------------


def naive_rope(x: Tensor, positions: list[int], theta: float, rotary: int, style: str) -> Tensor:
    """Each pair of channels as a complex number, times e to the i times angle."""
    out = x.clone()
    for t, position in enumerate(positions):
        for h in range(x.shape[1]):
            for pair in range(rotary // 2):
                a, b = (pair, pair + rotary // 2) if style == "half" else (2 * pair, 2 * pair + 1)
                angle = position * theta ** (-2 * pair / rotary)
                turned = complex(x[t, h, a], x[t, h, b]) * cmath.exp(1j * angle)
                out[t, h, a], out[t, h, b] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("factor", [1.0, 0.5, 0.25], ids="factor {}".format)
@pytest.mark.parametrize("size", [8, 24], ids="D{}".format)
def test_matches_complex_rotation(size: int, factor: float, style: Any) -> None:
    position = Rope(theta=100.0, style=style, partial_rotary_factor=factor)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, size, generator=generator, dtype=torch.float64)
    positions = [0, 1, 7, 63, 7]
    expected = naive_rope(x, positions, 100.0, position.rotary_dim(size), style)
    actual = rope(x, torch.tensor(positions), rope_table(position, size, 64), style)
    # The table is float32.
    assert_close(actual, expected, 2e-5)
    assert torch.equal(actual[..., position.rotary_dim(size) :], x[..., position.rotary_dim(size) :])


@needs_vllm
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("factor", [1.0, 0.5], ids="factor {}".format)
def test_rotation_matches_vllm(style: Any, factor: float) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    position = Rope(style=style, partial_rotary_factor=factor)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 9, 4, HEAD, generator=generator)
    positions = torch.randint(POSITIONS, (9,), generator=generator)
    table = rope_table(position, HEAD, POSITIONS)
    with set_current_vllm_config(VllmConfig()):
        layer = get_rope(HEAD, POSITIONS, style == "half", rope_parameters(position), torch.float32)
        expected = layer.forward_native(positions, query.flatten(1).clone(), key.flatten(1).clone())
    for x, theirs in zip((query, key), expected, strict=True):
        assert_close(rope(x, positions, table, style).flatten(1), theirs, 1e-4)


@pytest.mark.parametrize("position", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_products_depend_on_the_distance_only(position: Rope, style: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, HEAD, generator=generator)
    table = rope_table(position, HEAD, POSITIONS)

    def product(i: int, j: int) -> float:
        turned = (rope(x, torch.tensor([p]), table, style) for x, p in ((query, i), (key, j)))
        return float(torch.dot(*(x.flatten() for x in turned)))

    for distance in (0, 1, 17, 100):
        products = [product(j + distance, j) for j in (0, 3, 50, 155)]
        assert max(products) - min(products) < 1e-3
    assert not math.isclose(product(5, 5), product(6, 5), abs_tol=1e-2)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rotation_keeps_lengths(style: str) -> None:
    x = torch.randn(9, 3, HEAD, generator=torch.Generator().manual_seed(0))
    actual = rope(x, torch.arange(9) * 20, rope_table(Rope(), HEAD, POSITIONS), style)
    assert_close(actual.norm(dim=-1), x.norm(dim=-1), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_low_precision_is_rounded_once(style: str, dtype: torch.dtype) -> None:
    x = torch.randn(9, 3, HEAD, generator=torch.Generator().manual_seed(0)).to(dtype)
    table = rope_table(Rope(partial_rotary_factor=0.5), HEAD, POSITIONS)
    positions = torch.arange(100, 109)
    exact = rope(x.float(), positions, table, style)
    assert torch.equal(rope(x, positions, table, style), exact.to(dtype))


def test_no_argument_is_modified() -> None:
    x = torch.randn(9, 3, HEAD, generator=torch.Generator().manual_seed(0))
    table = rope_table(Rope(), HEAD, 16)
    before = x.clone(), table.clone()
    rope(x, torch.arange(9), table, "half")
    assert torch.equal(x, before[0])
    assert torch.equal(table, before[1])


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_gradients_match_differences(style: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    table = rope_table(Rope(partial_rotary_factor=0.5), 8, 16)
    assert torch.autograd.gradcheck(lambda x: rope(x, torch.tensor([0, 5, 15]), table, style), (x,))


def test_rejects_an_unknown_style() -> None:
    with pytest.raises(ValueError, match="style is 'neox'; expected 'half' or 'interleaved'"):
        rope(torch.zeros(1, 1, 8), torch.zeros(1, dtype=torch.long), rope_table(Rope(), 8, 4), "neox")
