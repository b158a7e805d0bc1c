"""What a report of `tiers bench` was measured on and with."""

import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tiers.vllm_model import compat

# What nvidia-smi calls it, and what the report does.
GPU_FACTS = {
    "driver_version": "driver",
    "clocks.sm": "clock under load, MHz",
    "clocks.max.sm": "highest clock, MHz",
    "clocks.mem": "memory clock, MHz",
    "power.limit": "power limit, W",
}


def environment(device: str) -> dict[str, Any]:
    """Device, clocks and versions, as they are now.

    Args:
        device: "cpu" or "cuda".
    """
    found: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    found |= _gpu() if device == "cuda" else _cpu()
    found["python"] = platform.python_version()
    found["torch"] = torch.__version__
    found["vllm"] = compat.vllm_version() or "not installed"
    for name in ("triton", "transformers", "vllm-tiers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    found["system"] = f"{platform.system()} {platform.release()}"
    return found


def _cpu() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {
        "device": facts.get("model name", platform.machine()),
        "cores": os.cpu_count(),
        "threads of torch": torch.get_num_threads(),
        "clock, MHz": facts.get("cpu MHz", "unknown"),
    }


def _gpu() -> dict[str, Any]:
    """The clocks are read while the device has work to do: an idle one shows others."""
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(500):
        a @ a
    # nvidia-smi counts all devices, torch those that it may see; the UUID is the same for both.
    device = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = ["nvidia-smi", f"--id={device}", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader,nounits"]
    try:
        values = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split(",")
        found |= {name: value.strip() for name, value in zip(GPU_FACTS.values(), values, strict=True)}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        found["clocks"] = f"unknown (nvidia-smi: {type(error).__name__})"
    torch.cuda.synchronize()
    del a
    torch.cuda.empty_cache()
    return found
