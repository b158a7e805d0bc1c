"""Scratch memory of the Triton tier: one buffer per step, cut into tensors."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Each tensor starts at a multiple of this many bytes.
ALIGNMENT = 256

# What alignment can add to a sum of sizes: a little for each of at most 16 tensors.
SLACK = 16 * ALIGNMENT


def _allocate(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


# Where the bytes come from. Inside vLLM, backend.py puts vLLM's own workspace here, which all layers share and which is
# part of its memory profile.
provide: Callable[[int, torch.device], Tensor] = _allocate


def take(device: torch.device, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    """Uninitialised tensors of these shapes, valid until the next call."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    buffer = provide(offsets[-1], device)
    return [
        buffer[offset : offset + size].view(dtype).view(shape)
        for (shape, dtype), size, offset in zip(wanted, sizes, offsets, strict=False)
    ]
