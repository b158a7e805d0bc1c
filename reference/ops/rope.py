"""Rotary positions: each pair of channels of a head turns by an angle that grows with the token's position.

Legend: T tokens, H heads, D head size, R rotary channels (R <= D), P positions.
"""

import math

import torch
from torch import Tensor

from tiers.reference.positions import DeepseekYarn, Dynamic, Linear, Llama3, LongRope, Ntk, NtkAlpha, Rope, Yarn


def rope_table(position: Rope, head_dim: int, max_positions: int) -> Tensor:
    """Cosines and sines of every position, with the scaling of `position` in them.

    Args:
        position: the rope section of the config.
        head_dim: D; R is its partial_rotary_factor.
        max_positions: P, the longest context that is served.

    Returns:
        [P, R] float32: R / 2 cosines, then R / 2 sines. This is the layout of vLLM's `cos_sin_cache`.

    Source: Su et al. 2021 (2104.09864). linear: Chen et al. 2023 (2306.15595). yarn: Peng et al. 2023 (2309.00071)
    section 3. llama3: the Llama 3.1 release. dynamic: the NTK base for P positions, fixed, as in vLLM; transformers
    recomputes it as a request grows, so that cached keys and new queries disagree, and equals this only at P tokens.
    ntk_alpha: the Hunyuan release. ntk: Su 2023 (kexue.fm/archives/9706). deepseek_yarn: the DeepSeek-V2 release.
    longrope: Ding et al. 2024 (2402.13753), with one list of factors for all lengths, as in vLLM.
    """
    inv_freq, magnitude = _frequencies(position, position.rotary_dim(head_dim), max_positions)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude


def rope(x_THD: Tensor, positions_T: Tensor, table_PR: Tensor, style: str) -> Tensor:
    """Turn the first R channels of every head; the other D - R pass through.

    (a, b) -> (a cos - b sin, b cos + a sin) for each pair: channels (i, i + R/2) in style "half", (2i, 2i + 1) in
    style "interleaved". In float32 (float64 for float64 input), rounded once.

    Args:
        x_THD: [T, H, D] queries or keys.
        positions_T: [T] integer positions.
        table_PR: from `rope_table`.
        style: "half" or "interleaved".

    Returns:
        [T, H, D] in the dtype of x_THD.

    Raises:
        ValueError: style is neither of the two.
    """
    rotary = table_PR.shape[1]
    exact = torch.float64 if x_THD.dtype == torch.float64 else torch.float32
    cos, sin = table_PR[positions_T].to(exact)[:, None].chunk(2, dim=-1)
    turned = x_THD[..., :rotary].to(exact)
    if style == "half":
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    elif style == "interleaved":
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        raise ValueError(f"style is {style!r}; expected 'half' or 'interleaved'")
    return torch.cat((turned.to(x_THD.dtype), x_THD[..., rotary:]), dim=-1)


def _frequencies(position: Rope, rotary: int, max_positions: int) -> tuple[Tensor, float]:
    """[R / 2] angles per position in float32, and the factor on cosines and sines."""
    scaling = position.scaling
    theta = position.theta
    if isinstance(scaling, Dynamic):
        growth = scaling.factor * max_positions / scaling.original_max_position_embeddings - (scaling.factor - 1)
        # At or below the original length there is nothing to stretch.
        theta *= max(growth, 1.0) ** (rotary / (rotary - 2))
    if isinstance(scaling, NtkAlpha):
        theta *= scaling.alpha ** (rotary / (rotary - 2))
    wavelengths = theta ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary)
    inv_freq = 1.0 / wavelengths
    if isinstance(scaling, Linear):
        return inv_freq / scaling.factor, 1.0
    if isinstance(scaling, Ntk):
        return inv_freq / _ntk(scaling, rotary), 1.0
    if isinstance(scaling, Yarn | DeepseekYarn):
        return _yarn(scaling, theta, rotary, wavelengths), _yarn_magnitude(scaling)
    if isinstance(scaling, Llama3):
        return _llama3(scaling, inv_freq), 1.0
    if isinstance(scaling, LongRope):
        factors, magnitude = _longrope(scaling, max_positions)
        return inv_freq / torch.tensor(factors, dtype=torch.float32), magnitude
    return inv_freq, 1.0


def _ntk(scaling: Ntk, rotary: int) -> Tensor:
    """[R / 2] by how much each pair slows down."""
    pair = torch.arange(1, rotary // 2 + 1, dtype=torch.float64)
    # The slowest pair by the factor. Without mixed_b it is what a base times the factor, and all pairs by factor ** (2 / R)
    # besides, make of it.
    exponent = (2 * pair / rotary) ** (1.0 if scaling.mixed_b is None else scaling.mixed_b)
    return (scaling.factor**exponent).float()


def _yarn(scaling: Yarn | DeepseekYarn, theta: float, rotary: int, wavelengths: Tensor) -> Tensor:
    def channel(rotations: float) -> float:
        """The channel pair that makes this many turns within the original length."""
        length = scaling.original_max_position_embeddings
        return rotary * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if isinstance(scaling, DeepseekYarn) or scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    ramp = (torch.arange(rotary // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    interpolated = ramp.clamp(0, 1)
    return interpolated / (scaling.factor * wavelengths) + (1 - interpolated) / wavelengths


def _yarn_magnitude(scaling: Yarn | DeepseekYarn) -> float:
    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if isinstance(scaling, Yarn):
        if scaling.attention_factor is not None:
            return scaling.attention_factor
        if not (scaling.mscale and scaling.mscale_all_dim):
            return growth(1.0)
        return growth(scaling.mscale) / growth(scaling.mscale_all_dim)
    return growth(scaling.mscale) / growth(scaling.mscale_all_dim)


def _longrope(scaling: LongRope, max_positions: int) -> tuple[tuple[float, ...], float]:
    """The factors of all channel pairs, and the factor on cosines and sines."""
    original = scaling.original_max_position_embeddings
    long = scaling.use == "long" or (scaling.use == "auto" and max_positions > original)
    magnitude = scaling.long_mscale if long else scaling.short_mscale
    if magnitude is None:
        stretch = max(1.0, max_positions / original)
        magnitude = math.sqrt(1 + math.log(stretch) / math.log(original))
    return scaling.long_factor if long else scaling.short_factor, magnitude


def _llama3(scaling: Llama3, inv_freq: Tensor) -> Tensor:
    length = scaling.original_max_position_embeddings
    turns = length * inv_freq / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    # 0 where a channel turns slowly (interpolate), 1 where it turns fast (leave alone).
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1) if span else (turns > scaling.low_freq_factor).float()
    return keep * inv_freq + (1 - keep) * inv_freq / scaling.factor
