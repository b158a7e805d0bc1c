"""xPos: products of turned queries and keys that fall with distance, a rate per pair of channels.

Legend: T query tokens, S key tokens, H query heads, KV key/value heads, G query heads per key/value head, D head size.

The published form multiplies a query at position i by zeta ** (i / base) and a key at j by zeta ** (-j / base). A cache
cannot keep such keys: with zeta_0 = 0.286 they pass the range of float16 near position 4500 and that of float32 near
36000. Only the product zeta ** ((i - j) / base) matters, so keys are cached as they are and scaled where they are
multiplied, relative to an anchor near them: a tile of keys j <= a and its queries i become

    q' = q * zeta ** ((i - a) / base)        k' = k * zeta ** ((a - j) / base)

Both are at most as large as q and k, except for queries inside the tile, where q' is larger by zeta ** (-tile / base) at
most. What underflows to zero is zero in the product, too.
"""

import torch
from torch import Tensor

from tiers.reference.positions import Xpos

# Keys per anchor.
TILE = 64


def xpos_decay(position: Xpos, head_dim: int) -> Tensor:
    """Powers of two by which the product of each channel changes per token of distance.

    zeta_n = (2 n + gamma D) / ((1 + gamma) D) for the pairs n = 0 .. D / 2 - 1, and decay = log2(zeta_n) / scale_base.

    Args:
        position: of the layer's config.
        head_dim: D, even.

    Returns:
        [D] float32, negative: both channels of a pair have the same.

    Source: Sun et al. 2023 (2212.10554) section 3 and its authors' code (gamma 0.4, scale_base 512).
    """
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    zeta = (2 * pairs + position.gamma * head_dim) / ((1 + position.gamma) * head_dim)
    decay = (zeta.log2() / position.scale_base).float()
    return decay.repeat_interleave(2) if position.style == "interleaved" else decay.repeat(2)


def decayed_products(query_KGTD: Tensor, key_KSD: Tensor, first: int, decay_D: Tensor) -> Tensor:
    """sum_c q_c k_c 2 ** (decay_c * (i - j)), the keys of a tile relative to its last position.

    Args:
        query_KGTD: [KV, G, T, D] at positions first, first + 1, ..., float32 or float64.
        key_KSD: [KV, S, D] at positions 0, 1, ..., same dtype.
        first: position of the first query.
        decay_D: from `xpos_decay`.

    Returns:
        [KV, G, T, S]; anything finite where a key stands behind its query.
    """
    decay_D = decay_D.to(query_KGTD.dtype)
    positions = torch.arange(first, first + query_KGTD.shape[2], device=query_KGTD.device)
    parts = []
    for start in range(0, key_KSD.shape[1], TILE):
        tile_KSD = key_KSD[:, start : start + TILE]
        anchor = start + TILE - 1
        before = anchor - torch.arange(start, start + tile_KSD.shape[1], device=positions.device)
        scaled_KSD = tile_KSD * torch.exp2(decay_D * before[:, None])
        # Queries before the tile see none of it.
        beyond = (positions - anchor).clamp(min=-TILE)
        scaled_KGTD = query_KGTD * torch.exp2(decay_D * beyond[:, None])
        parts.append(torch.einsum("kgtd,ksd->kgts", scaled_KGTD, scaled_KSD))
    return torch.cat(parts, dim=-1)
