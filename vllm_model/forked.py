"""Work on the CPU in a process that vLLM may have forked."""

import contextvars
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that computes on the CPU, in a child process on a thread of its own.

    After a fork, a thread that had computed on several cores still waits for helpers that exist in the parent only (GNU
    OpenMP), so that the first large tensor on the CPU never returns. vLLM forks its workers on CUDA, unless told otherwise
    by VLLM_WORKER_MULTIPROC_METHOD=spawn. A thread that is new has no such helpers yet.

    Args:
        function: called once, with the device, gradient mode and context variables of the caller, but not its
            torch.device block.
        arguments: for it.

    Raises:
        Exception: whatever the function raises.
    """
    if multiprocessing.parent_process() is None:
        return function(*arguments)
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    context = contextvars.copy_context()

    def call() -> T:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            return context.run(function, *arguments)

    with ThreadPoolExecutor(1, "tiers-cpu") as pool:
        return pool.submit(call).result()
