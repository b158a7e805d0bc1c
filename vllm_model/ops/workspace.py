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
    return cut(provide(bytes_of(*wanted), device), *wanted)


def bytes_of(*wanted: tuple[tuple[int, ...], torch.dtype]) -> int:
    """What `cut` needs for these shapes."""
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in wanted)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def cut(buffer: Tensor, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    """Tensors of these shapes, one after another in a buffer of bytes."""
    tensors, offset = [], 0
    for shape, dtype in wanted:
        size = math.prod(shape) * dtype.itemsize
        tensors.append(buffer[offset : offset + size].view(dtype).view(shape))
        offset += _aligned(size)
    return tensors
