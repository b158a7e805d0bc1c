"""Work on the CPU in processes that vLLM may have forked: a hang there says nothing at all."""

import multiprocessing
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.reference.config import Rope
from tiers.vllm_model import model as module
from tiers.vllm_model.forked import apart

# Large enough that PyTorch uses every core for it.
FORKING = """
import multiprocessing, torch
from tiers.vllm_model.forked import apart

def large():
    return torch.ones(2**22).sum().item()

torch.set_num_threads(2)
large()
worker = multiprocessing.get_context("fork").Process(target=lambda: print({call}, flush=True), daemon=True)
worker.start()
worker.join({seconds})
print("hangs" if worker.is_alive() else "ended")
"""


def fork(call: str, seconds: float) -> list[str]:
    code = FORKING.format(call=call, seconds=seconds)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.split()


def test_a_forked_process_computes_on_the_cpu() -> None:
    assert fork("apart(large)", 60) == ["4194304.0", "ended"]


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP is what waits")
def test_without_that_it_would_wait_for_ever() -> None:
    assert fork("large()", 5) == ["hangs"]


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: multiprocessing.current_process())


def here() -> tuple[int, bool, bool]:
    return threading.get_ident(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def test_the_first_process_stays_on_its_thread() -> None:
    assert apart(here)[0] == threading.get_ident()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_modes_of_the_caller_hold_on_the_other_thread(child: None, mode: Any) -> None:
    with mode():
        thread, *modes = apart(here)
        assert modes == list(here()[1:])
    assert thread != threading.get_ident()


def test_errors_reach_the_caller(child: None) -> None:
    def fails() -> None:
        raise ValueError("seen")

    with pytest.raises(ValueError, match="seen"):
        apart(fails)


def test_rotary_tables_are_made_there(child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    threads = []
    original = module.rope_table

    def seen(*arguments: Any) -> Tensor:
        threads.append(threading.get_ident())
        return original(*arguments)

    monkeypatch.setattr(module, "rope_table", seen)
    with set_current_vllm_config(VllmConfig()):
        layer = module._make_rope.__wrapped__(Rope(), 32, 40, torch.device("cpu"), torch.bfloat16)
    assert torch.equal(layer.cos_sin_cache, original(Rope(), 32, 40).bfloat16())
    assert threads != [threading.get_ident()]
