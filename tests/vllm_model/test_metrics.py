"""Dispatch counts where users read them: /metrics of a server, and the log at its end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tiers.reference.testing.tiny import save_tiny, tiny_config
from tiers.vllm_model import metrics

PREAMBLE = """
import logging, os, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from tiers.vllm_model import metrics

def shown(registry):
    return sorted(line for line in generate_latest(registry).decode().splitlines() if line.startswith("tiers"))
"""


def run(code: str, **environment: str) -> str:
    """Output of a fresh process, errors included."""
    # The process of the tests may have an engine of its own.
    inherited = {name: value for name, value in os.environ.items() if name != metrics.FOLDER}
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code],
        capture_output=True, text=True, timeout=120, check=False, env={**inherited, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_other_processes_show_on_metrics_and_in_the_log_even_if_killed() -> None:
    code = """
import signal, subprocess
metrics.publish()
metrics.publish()
metrics.count("gate", "reference")
child = "import os, signal; from tiers.vllm_model.metrics import count; [count('attention', 'fast') for _ in range(3)]; "
for _ in range(2):
    subprocess.run([sys.executable, "-c", child + "os.kill(os.getpid(), signal.SIGKILL)"])
print(*shown(REGISTRY), sep="\\n")
"""
    output = run(code)
    assert 'tiers_dispatch_total{operator="attention",tier="fast"} 6.0' in output
    assert 'tiers_dispatch_total{operator="gate",tier="reference"} 1.0' in output
    logged = re.findall(r"What ran in process \d+, in calls by operator and tier: (.*)", output)
    assert sorted(logged) == ["attention fast 3", "attention fast 3", "gate reference 1"]


def test_tokens_of_experts_are_on_metrics() -> None:
    code = """
metrics.publish()
metrics.count("moe", "fast")
metrics.count_experts(3, [5, 0, 7], 1.5)
metrics.count_experts(3, [1, 0, 1], 1.25)
print(*shown(REGISTRY), sep="\\n")
"""
    output = run(code)
    for line in (
        'tiers_expert_tokens_total{expert="0",layer="3"} 6.0', 'tiers_expert_tokens_total{expert="1",layer="3"} 0.0',
        'tiers_expert_tokens_total{expert="2",layer="3"} 8.0', 'tiers_expert_balance_loss_sum_total{layer="3"} 2.75',
        'tiers_expert_balance_samples_total{layer="3"} 2.0', 'tiers_dispatch_total{operator="moe",tier="fast"} 1.0',
    ):  # fmt: skip
        assert line in output
    assert "calls by operator and tier: moe fast 1" in output


def test_a_forked_process_counts_for_itself() -> None:
    code = """
metrics.publish()
metrics.count("attention", "fast")
if os.fork() == 0:
    metrics.count("attention", "fast")
    os._exit(0)
os.wait()
print(*shown(REGISTRY))
"""
    output = run(code)
    assert 'tiers_dispatch_total{operator="attention",tier="fast"} 2.0' in output
    assert output.count("attention fast 1") == 2


def test_with_several_api_servers_counts_go_where_vllm_collects(tmp_path: Path) -> None:
    # vLLM sets this variable before it starts anything.
    code = """
from prometheus_client.multiprocess import MultiProcessCollector
metrics.publish()
metrics.count("attention", "compiled")
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(*shown(registry))
"""
    output = run(code, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert 'tiers_dispatch_total{operator="attention",tier="compiled"} 1.0' in output
    assert "attention compiled 1" in output


def test_nothing_is_written_or_logged_without_an_engine(tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path)}
    assert run('metrics.count("attention", "fast"); print(metrics.published())', **environment) == "{}\n"
    assert run("metrics.publish()", **environment) == ""
    assert list(tmp_path.iterdir()) == []


def test_an_inherited_folder_is_not_a_servers_own() -> None:
    # A server that was started by a process that has an engine of its own.
    code = 'metrics.publish(); print(os.environ[metrics.FOLDER] != "/elsewhere")'
    assert run(code, TIERS_METRICS_FOLDER="/elsewhere").startswith("True")


@pytest.mark.engine
def test_a_server_says_what_ran(tmp_path: Path) -> None:
    folder, log = save_tiny(tmp_path / "m", tiny_config()), tmp_path / "log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tiers.vllm_model.cli", "serve", str(folder), "--tiers", "reference"]
    flags = ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", "tiny", "--enforce-eager"]
    flags += ["--dtype", "float32", "--max-model-len", "64", "--skip-tokenizer-init"]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, *flags], stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def read(path: str) -> str:
        with urllib.request.urlopen(url + path, timeout=30) as response:
            return response.read().decode()

    try:
        wait_until_healthy(process, lambda: read("/health"), log)
        before = read("/metrics")
        assert "tiers_dispatch" not in before
        # What vLLM has there stays there.
        assert "process_resident_memory_bytes" in before
        assert "vllm:num_requests_running" in before
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).close()
        after = read("/metrics")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    # Five steps through four layers, two of which have a gate.
    assert 'tiers_dispatch_total{operator="attention",tier="reference"} 20.0' in after
    assert 'tiers_dispatch_total{operator="gate",tier="reference"} 10.0' in after
    logged = re.findall(r"What ran in process \d+, in calls by operator and tier: (.*)", log.read_text())
    assert logged == ["attention reference 20, gate reference 10"]


def wait_until_healthy(process: subprocess.Popen[bytes], ask: Callable[[], str], log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            ask()
            return
        except OSError:
            time.sleep(0.3)
    raise AssertionError("not healthy in time")
