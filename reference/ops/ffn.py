"""Feed-forward units. Legend: T tokens, M model width, F inner width."""

import torch.nn.functional as F
from torch import Tensor


def swiglu(
    x_TM: Tensor, gate_FM: Tensor, up_FM: Tensor, down_MF: Tensor,
    gate_bias_F: Tensor | None = None, up_bias_F: Tensor | None = None, down_bias_M: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """down(silu(gate x) * up x).

    Args:
        x_TM: [T, M].
        gate_FM, up_FM: [F, M] weights; gate_bias_F, up_bias_F: [F] or None.
        down_MF: [M, F] weight; down_bias_M: [M] or None.

    Returns:
        [T, M].

    Source: Shazeer 2020 (2002.05202).
    """
    inner_TF = F.silu(F.linear(x_TM, gate_FM, gate_bias_F)) * F.linear(x_TM, up_FM, up_bias_F)
    return F.linear(inner_TF, down_MF, down_bias_M)


def geglu(
    x_TM: Tensor, gate_FM: Tensor, up_FM: Tensor, down_MF: Tensor,
    gate_bias_F: Tensor | None = None, up_bias_F: Tensor | None = None, down_bias_M: Tensor | None = None,
    approximate: str = "none",
) -> Tensor:  # fmt: skip
    """down(gelu(gate x) * up x). Arguments as of `swiglu`; `approximate` as of `gelu`.

    Returns:
        [T, M].

    Source: Shazeer 2020 (2002.05202).
    """
    gate_TF = F.gelu(F.linear(x_TM, gate_FM, gate_bias_F), approximate=approximate)
    return F.linear(gate_TF * F.linear(x_TM, up_FM, up_bias_F), down_MF, down_bias_M)


def gelu(
    x_TM: Tensor, up_FM: Tensor, down_MF: Tensor,
    up_bias_F: Tensor | None = None, down_bias_M: Tensor | None = None, approximate: str = "none",
) -> Tensor:  # fmt: skip
    """down(gelu(up x)).

    Args:
        x_TM: [T, M].
        up_FM: [F, M] weight; up_bias_F: [F] or None.
        down_MF: [M, F] weight; down_bias_M: [M] or None.
        approximate: "none" for the error function, "tanh" for its approximation.

    Returns:
        [T, M].

    Source: Hendrycks and Gimpel 2016 (1606.08415).
    """
    return F.linear(F.gelu(F.linear(x_TM, up_FM, up_bias_F), approximate=approximate), down_MF, down_bias_M)
