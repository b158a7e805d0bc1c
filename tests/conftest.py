"""Settings that must be there before vLLM is imported, and engines for tests that need one."""

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The engine runs in this process, so that a test can look at its scheduler and count what was dispatched.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Prompt log-probabilities compile a helper of 20 s on first use, even with enforce_eager.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_LOGGING_COLOR", "0")
# Else a check would set it for every engine that comes after it in this process.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Files run side by side. Threads of both on every core wait for each other: small models took 2 to 7 times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Every process that compiles would start helpers, which import torch; the core is busy as it is.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Files that take minutes. Begun first, so that none of them is left over when all others are done.
LONG = ("test_interpreter.py", "test_families.py", "test_engine_parallel.py", "test_moe_compiled.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture(scope="session")
def start_engine() -> Iterator[Callable[..., Any]]:
    """Start a vLLM engine on a folder, without tokenizer, eager, float32, on the reference tier; ended when another one
    starts or at the end."""
    running: list[Any] = []

    def start(folder: Path, **options: Any) -> Any:
        from vllm import LLM

        stop()
        defaults = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 16,
            "block_size": 16,
            "kv_cache_memory_bytes": 2**26,
            "additional_config": {"tiers": "reference"},
        }
        running.append(LLM(model=str(folder), **{**defaults, **options}))
        return running[-1]

    def stop() -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        from tiers.vllm_model.testing import keep_heap

        while running:
            running.pop().llm_engine.engine_core.shutdown()
            cleanup_dist_env_and_memory()
            keep_heap()

    yield start
    stop()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)
