"""Engines that do not fit into the process of the tests."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiers.vllm_model.testing import keep_heap


@pytest.fixture(scope="session", autouse=True)
def _heap() -> None:
    from vllm import LLM

    assert LLM  # imported, that is what matters
    keep_heap()


@pytest.fixture(scope="session")
def serve_jobs() -> Callable[..., list[dict[str, Any]]]:
    """`serve_jobs(jobs, ranks=1, **environment)`: run engines_process.py on them, one process per rank.

    Gives for each job its "error", and "counts" of what ran, one dict for each rank.
    """

    def serve(jobs: list[dict[str, Any]], ranks: int = 1, **environment: str) -> list[dict[str, Any]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {
            **os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            # One core per rank; the default wants one memory node per rank.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
            "RUN_ID": (run_id := f"tiers-{uuid.uuid4().hex}"), **environment,
        }  # fmt: skip
        processes = []
        with tempfile.TemporaryDirectory() as scratch:
            (file := Path(scratch, "jobs")).write_text(json.dumps(jobs))
            command = [sys.executable, str(Path(__file__).with_name("engines_process.py")), str(file)]
            # Files rather than pipes: a rank whose pipe is full would stop, and the others with it.
            for rank in range(ranks):
                env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with Path(scratch, str(rank)).open("w") as log:
                    processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
            try:
                for process in processes:
                    process.wait(timeout=500)
            finally:
                for process in processes:
                    process.kill()
                for left in Path("/dev/shm").glob(f"{run_id}*"):
                    left.unlink(missing_ok=True)
                outputs = [Path(scratch, str(rank)).read_text() for rank in range(ranks)]
        print("\n".join(line for line in outputs[0].splitlines() if line.startswith("JOB ")))
        lines = [[line for line in output.splitlines() if line.startswith("RESULT ")] for output in outputs]
        assert all(lines), "\n".join(output[-6000:] for output in outputs)
        of_ranks = [json.loads(found[-1].removeprefix("RESULT ")) for found in lines]
        return [
            {"error": max(result["error"] for result in results), "counts": [result["counts"] for result in results]}
            for results in zip(*of_ranks, strict=True)
        ]

    return serve
