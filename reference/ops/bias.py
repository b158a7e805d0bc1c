"""What is added to a score for the distance between query and key: one function of head and distance, for every tier.

Legend: T query tokens, S key tokens, H query heads, L distances that a table lists, R its rows (H, or 1 for all heads), B
buckets.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from tiers.reference.heads import HeadLayout
from tiers.reference.ops.alibi import alibi_slopes
from tiers.reference.positions import T5, Alibi, Kerple, Position, Sandwich

# In the order of the numbers by which kernels know them, from 1 on.
KINDS = ("linear", "sqrt", "log", "table")


@dataclass(frozen=True, eq=False)
class Bias:
    """A bias per head and distance d = i - j >= 0.

        linear  -factor_h * d
        sqrt    -factor_h * sqrt(d)
        log     -factor_h * log(1 + rate_h * d)
        table    factor_h * table[h, min(d, L - 1)]

    Attributes:
        kind: see above.
        factor_H: [H] one per query head.
        rate_H: [H] of kind log; else None.
        table_RL: [R, L] of kind table, its only row for all heads if R is 1; else None.
    """

    kind: Literal["linear", "sqrt", "log", "table"]
    factor_H: Tensor
    rate_H: Tensor | None = None
    table_RL: Tensor | None = None

    def values(self, distance_TS: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """[H, T, S] in float32 or float64; at negative distances what stands at 0, as no query sees those keys."""
        return bias_values(self.kind, self.factor_H, self.rate_H, self.table_RL, distance_TS, dtype)

    def check(self, heads: int) -> None:
        """Raises:
        ValueError: not one entry per query head, or not what the kind needs.
        """
        needed = {"log": "rate_H", "table": "table_RL"}.get(self.kind)
        if self.kind not in KINDS:
            raise ValueError(f"bias has kind {self.kind!r}; expected one of {', '.join(KINDS)}")
        for name in ("rate_H", "table_RL"):
            if (getattr(self, name) is not None) != (name == needed):
                raise ValueError(f"bias of kind {self.kind} {'has no' if name == needed else 'has a'} {name}")
        for name in ("factor_H", "rate_H"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != (heads,):
                raise ValueError(
                    f"bias.{name} has shape {tuple(tensor.shape)}; expected ({heads},), one per query head"
                )
        if self.table_RL is not None and (self.table_RL.dim() != 2 or self.table_RL.shape[0] not in (1, heads)):
            raise ValueError(f"bias.table_RL has shape {tuple(self.table_RL.shape)}; expected 1 or {heads} rows")

    def to(self, device: torch.device | str) -> "Bias":
        """The same on another device; itself if it is there."""
        if self.factor_H.device == torch.device(device):
            return self
        return self._with(lambda name, tensor: tensor.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def arranged(self, layout: HeadLayout) -> "Bias":
        """With heads laid out as the query heads are; an empty slot gets what the first head of its group has."""
        return self._heads(lambda tensor: layout.arrange(tensor, 1, dim=0, copy=True))

    def part(self, start: int, stop: int) -> "Bias":
        """Of some heads. A tensor-parallel rank's are cut from those of the whole model, laid out."""
        return self._heads(lambda tensor: tensor[start:stop])

    def _heads(self, change: Callable[[Tensor], Tensor]) -> "Bias":
        shared = self.table_RL is not None and len(self.table_RL) == 1
        return self._with(lambda name, tensor: tensor if shared and name == "table_RL" else change(tensor))

    def _with(self, change: Callable[[str, Tensor], Tensor]) -> "Bias":
        changed: dict[str, Any] = {name: change(name, tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)

    def fill(self, other: "Bias") -> None:
        """Take the values of another one of the same shapes, in place."""
        for name, tensor in other.tensors().items():
            getattr(self, name).copy_(tensor)
        if "packed" in self.__dict__:
            self.packed.copy_(other.packed)

    @cached_property
    def packed(self) -> Tensor:
        """All in one vector, float32, as kernels read it: factors [H], rates [H], then the table; zeros if there is none."""
        rates_H = torch.zeros_like(self.factor_H) if self.rate_H is None else self.rate_H
        parts = [self.factor_H, rates_H] + ([] if self.table_RL is None else [self.table_RL.flatten()])
        return torch.cat([part.detach().float() for part in parts])


def bias_values(
    kind: str,
    factor_H: Tensor,
    rate_H: Tensor | None,
    table_RL: Tensor | None,
    distance_TS: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """As `Bias.values`, of its attributes."""
    distance_TS = distance_TS.clamp(min=0)
    factor_H11 = factor_H.to(dtype)[:, None, None]
    if table_RL is not None:
        return factor_H11 * table_RL.to(dtype)[:, distance_TS.clamp(max=table_RL.shape[1] - 1)]
    far_TS = distance_TS.to(dtype)
    if kind == "sqrt":
        return -factor_H11 * far_TS.sqrt()
    if rate_H is not None:
        return -factor_H11 * torch.log1p(rate_H.to(dtype)[:, None, None] * far_TS)
    return -factor_H11 * far_TS


def bias_of(
    position: Position,
    num_heads: int,
    head_dim: int,
    max_positions: int,
    learned: Mapping[str, Tensor],
    device: torch.device | str = "cpu",
) -> Bias | None:
    """The bias of a layer, for the query heads of the whole model in the order of the checkpoint.

    Args:
        position: of the layer's config.
        num_heads: query heads of the whole model, not of one tensor-parallel rank.
        head_dim: channels of a head.
        max_positions: distances that can come up.
        learned: parameters by the names of `tiers.reference.positions.learned`, and a shared table as t5_bias.
        device: where it is wanted.

    Returns:
        float32, but what is learned in the dtype of its parameters; None where positions are no bias.
    """
    if isinstance(position, T5):
        return t5_bias(learned["t5_bias"], position.max_distance)
    if isinstance(position, Kerple) and position.r1 is None:
        return Bias("log", learned["kerple_r1"], learned["kerple_r2"])
    if isinstance(position, Alibi | Kerple | Sandwich):
        return _fixed(position, num_heads, head_dim, max_positions, torch.device(device))
    return None


# Layers alike share one: a table may be longer than their weights are.
@lru_cache(maxsize=16)
def _fixed(
    position: Alibi | Kerple | Sandwich, num_heads: int, head_dim: int, max_positions: int, device: torch.device
) -> Bias:
    # Real numbers also where a model is only described (on the meta device).
    with torch.device("cpu"):
        if isinstance(position, Sandwich):
            return sandwich_bias(num_heads, position.dim or head_dim, max_positions).to(device)
        if isinstance(position, Kerple):
            assert position.r1 is not None
            assert position.r2 is not None
            return Bias("log", torch.tensor(position.r1), torch.tensor(position.r2)).to(device)
        slopes_H = alibi_slopes(num_heads) if position.slopes is None else torch.tensor(position.slopes)
        return Bias(position.distance, slopes_H).to(device)


def sandwich_bias(num_heads: int, dim: int, length: int) -> Bias:
    """(sum_m cos(d / 10000 ** (2 m / dim)) - dim / 2) * H / (8 h) for heads h = 1..H, m = 1 .. dim / 2.

    Args:
        num_heads: H, of the whole model.
        dim: channels of the sinusoidal positions, even.
        length: distances in the table.

    Source: Chi et al. 2022 (2212.10356) section 5, with the compression ratio 8 h / H and the shift by dim / 2 of their
    code and of NeMo, so that distance 0 has bias 0.
    """
    distance_L = torch.arange(length, dtype=torch.float64)
    table_L = torch.full((length,), -dim / 2, dtype=torch.float64)
    for m in range(1, dim // 2 + 1):
        table_L += torch.cos(distance_L / 10000 ** (2 * m / dim))
    factor_H = num_heads / (8 * torch.arange(1, num_heads + 1, dtype=torch.float64))
    return Bias("table", factor_H.float(), table_RL=table_L.float()[None])


def t5_bias(weight_BH: Tensor, max_distance: int) -> Bias:
    """A learned number per bucket of distances and head.

    Args:
        weight_BH: [B, H] the table, as T5 has it.
        max_distance: from there on every distance is in the last bucket.

    Source: Raffel et al. 2020 (1910.10683) section 2.1.
    """
    distance_L = torch.arange(max_distance + 1, device=weight_BH.device)
    table_HL = weight_BH[t5_bucket(distance_L, len(weight_BH), max_distance)].T
    return Bias("table", torch.ones_like(weight_BH[0]), table_RL=table_HL)


def t5_bucket(distance_L: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """[L] which bucket a distance is in: one each for the first half of the buckets, then ever wider ones.

    Args:
        distance_L: integers from 0 on.
        num_buckets: B.
        max_distance: all from there on are in bucket B - 1.
    """
    exact = num_buckets // 2
    # In float32, since T5 was trained on buckets whose edges are rounded so.
    share_L = torch.log(distance_L.float() / exact) / math.log(max_distance / exact)
    wide_L = exact + (share_L * (num_buckets - exact)).clamp(min=0, max=num_buckets).long()
    return torch.where(distance_L < exact, distance_L, wide_L.clamp(max=num_buckets - 1))
