"""ALiBi slopes: one positive number per query head, by which attention scores fall per token of distance."""

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """The published slopes for any number of heads.

    For a power of two n: 2 ** (-8 * i / n), i = 1..n. Otherwise those of the largest power of two n below num_heads,
    then every other one (the 1st, 3rd, ...) of those for 2 n.

    Args:
        num_heads: query heads of the whole model, not of one tensor-parallel rank.

    Returns:
        [num_heads] float32.

    Source: Press et al. 2022 (2108.12409) section 3, and its authors' code for other numbers of heads.
    """
    power = 2 ** (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-8.0 * i / (2 * power)) for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32)
