"""Numbers of layers as text, and layers that are alike."""

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T", bound=Hashable)

# A parameter of ours that lies in a layer: its number, its name there.
LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def ranges(numbers: Iterable[int]) -> str:
    """ "0-3, 7"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def in_layers(numbers: Sequence[int]) -> str:
    """ "layer 7" or "layers 0-3, 7"."""
    return f"layer{'s' if len(set(numbers)) > 1 else ''} {ranges(numbers)}"


def alike(values: Iterable[T]) -> dict[T, list[int]]:
    """Each value with the positions that have it."""
    found: dict[T, list[int]] = {}
    for position, value in enumerate(values):
        found.setdefault(value, []).append(position)
    return found
