"""Which key/value head each query head reads.

Legend: H query heads, KV key/value heads, G query heads per key/value head.

vLLM, and every attention kernel it ships, gives query head i the key/value head i // G. A model may group its heads in
another way, even in groups of unequal size. `HeadLayout` says how to lay such heads out so that they become contiguous
groups of one size: a permutation of the query heads, with empty slots where a group is smaller than the largest. It is
applied once, to weights, so nothing is paid for it at run time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiers.reference.errors import ConfigError


def head_map(kind: str | Sequence[int], num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Spell out a head map as one key/value head index per query head.

    Args:
        kind: "contiguous" (head i reads i // G), "interleaved" (i % KV), or the list itself.
        num_heads: H.
        num_kv_heads: KV.

    Returns:
        H indices in [0, KV).

    Raises:
        ConfigError: H is not a multiple of KV for the two named maps; the list has another length than H, an index
            out of range, or leaves a key/value head unread.
    """
    if isinstance(kind, str):
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"num_heads is {num_heads} and num_kv_heads is {num_kv_heads}: a {kind} head_map needs num_heads to be "
                f"a multiple of num_kv_heads; for unequal groups write head_map as a list of {num_heads} indices"
            )
        if kind == "contiguous":
            return tuple(i // (num_heads // num_kv_heads) for i in range(num_heads))
        return tuple(i % num_kv_heads for i in range(num_heads))
    if len(kind) != num_heads:
        raise ConfigError(f"head_map has {len(kind)} entries; expected num_heads = {num_heads}, one per query head")
    for i, kv in enumerate(kind):
        if not 0 <= kv < num_kv_heads:
            raise ConfigError(
                f"head_map[{i}] is {kv}; expected an index from 0 to num_kv_heads - 1 = {num_kv_heads - 1}"
            )
    unread = sorted(set(range(num_kv_heads)) - set(kind))
    if unread:
        raise ConfigError(
            f"head_map never names key/value head {unread[0]}; every one of 0 to {num_kv_heads - 1} must be read"
        )
    return tuple(kind)


@dataclass(frozen=True)
class HeadLayout:
    """Query heads rearranged into contiguous groups of equal size.

    Attributes:
        slots: for each of the KV * G slots the query head that sits there, or -1 for an empty slot.
        num_kv_heads: KV.
    """

    slots: tuple[int, ...]
    num_kv_heads: int

    @classmethod
    def of(cls, mapping: Sequence[int], num_kv_heads: int) -> "HeadLayout":
        """Lay out the heads of `mapping` (one key/value head index per query head), in order within each group."""
        groups = [[i for i, kv in enumerate(mapping) if kv == group] for group in range(num_kv_heads)]
        size = max(len(group) for group in groups)
        slots = tuple(head for group in groups for head in group + [-1] * (size - len(group)))
        return cls(slots, num_kv_heads)

    @property
    def num_heads(self) -> int:
        """Number of slots, empty ones included: what the engine sees as the number of query heads."""
        return len(self.slots)

    @property
    def is_identity(self) -> bool:
        return self.slots == tuple(range(self.num_heads))

    def arrange(self, tensor: Tensor, head_size: int, dim: int, *, copy: bool) -> Tensor:
        """Reorder the heads along one dimension of a weight.

        Args:
            tensor: a weight or bias whose dimension `dim` is H * head_size long, head-major.
            head_size: elements per head along that dimension (1 for one value per head).
            dim: the dimension to rearrange.
            copy: what an empty slot gets. True, a copy of the first head of its group: for queries, so that the slot
                changes nothing where a whole group chooses its keys together. False, zeros: for what reads the output
                of the heads, so that the slot counts for nothing.

        Returns:
            The same tensor if nothing moves, else a new one with num_heads * head_size elements along `dim`.
        """
        if self.is_identity:
            return tensor
        heads = tensor.unflatten(dim, (-1, head_size))
        size = self.num_heads // self.num_kv_heads
        # The first slot of a group is never empty.
        sources = [head if head >= 0 else self.slots[slot - slot % size] for slot, head in enumerate(self.slots)]
        out = heads.index_select(dim, torch.tensor(sources, device=tensor.device))
        if not copy:
            for slot, head in enumerate(self.slots):
                if head < 0:
                    out.select(dim, slot).zero_()
        return out.flatten(dim, dim + 1)
