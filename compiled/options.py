"""How this tier compiles: the one place that names arguments of torch.compile."""

import os
from collections.abc import Callable, Hashable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor


@cache
def compiled(function: FunctionType, variant: Hashable, **fixed: Any) -> Callable[..., Any]:
    """Compile a function with some of its keyword arguments fixed. Compiles at the first call, for inference or training.

    Each combination of arguments is compiled by itself. For one of them dynamo compiles again only if a size becomes 1 or
    0 that `first_size_varies` was not told of, or something changes that `variant` should have named. It raises when it
    has done so too often, and never turns to eager execution.

    Args:
        function: takes positional arguments, and `fixed` by keyword.
        variant: what tells apart calls that need different code, such as dtypes; see `kinds`.
        fixed: hashable; integers in it become constants of the code.

    Returns:
        Takes the positional arguments. Raises RuntimeError where torch.compile is off and would run the function eagerly.
    """
    # Dynamo keeps integers of default arguments as constants; any other it takes for a dynamic size.
    body = FunctionType(function.__code__, function.__globals__, function.__name__, None, function.__closure__)
    body.__kwdefaults__ = fixed

    def traced(*args: Any) -> Any:
        # Decided while tracing, so this costs nothing afterwards. In eager execution it is false.
        if not torch.compiler.is_compiling():
            raise RuntimeError(_why_eager())
        return body(*args)

    # Dynamo keeps what it compiled, and counts it against its limit, by code object.
    traced.__code__ = traced.__code__.replace(co_name=function.__name__)
    return torch.compile(traced, fullgraph=True, dynamic=True)


def kinds(*tensors: Tensor | None) -> Hashable:
    """What code depends on besides sizes: dtype, device and what autograd wants of each tensor, or that there is none."""
    return (
        torch.is_grad_enabled(),
        *(None if tensor is None else (tensor.dtype, tensor.device.type, tensor.requires_grad) for tensor in tensors),
    )


def first_size_varies(*tensors: Tensor, ones: bool = True) -> list[Tensor]:
    """The same tensors, their first size unknown to the compiler and the others constants of the code.

    Without it dynamo takes sizes that happen to be equal in the first call for one and the same, and compiles again when
    they differ. Inside the function torch._check tells which of these sizes are the same. Where gradients are wanted, a
    first size of 1 is left to dynamo, which compiles for it separately.

    Args:
        tensors: of one call.
        ones: a first size may be 1. Where none is, the compiler is told that, and can do more: torch 2.11 does not know how
            to reshape a product of matrices both of whose sizes are unknown.
    """
    gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    # Marks are attributes, and what these mean other compiled code might not be able to do: it does not see them on tensors
    # that are new. Views would not do, since dynamo compiles for the sizes of what they are views of.
    marked = list(tensors) if gradients else [tensor.data for tensor in tensors]
    for tensor in marked:
        if ones and not gradients:
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        elif len(tensor) > 1:
            torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_static(tensor, list(range(1, tensor.ndim)))
    return marked


def _why_eager() -> str:
    found = [f"{name}=1" for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE") if os.environ.get(name) == "1"]
    cause = " and ".join(found) or "a setting (torch._dynamo.config.disable or torch.compiler.set_stance)"
    return (
        f"an operator of the compiled tier was called, but {cause} turns torch.compile off, so it would run uncompiled; "
        "unset it, or choose another tier"
    )
