"""`tiers serve` over HTTP, as a client sees it."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tiers.reference.load import load_model
from tiers.reference.testing.compare import LOGPROB_BUDGET
from tiers.reference.testing.tiny import random_ids, save_tiny, save_tokenizer, tiny_config

pytestmark = pytest.mark.engine


class Server:
    """A running `tiers serve` and the folder it serves."""

    def __init__(self, url: str, folder: Path, log: Path) -> None:
        self.url, self.folder, self.log = url, folder, log

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps({"model": "tiny", **body}).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=60)

    def complete(self, **body: Any) -> dict[str, Any]:
        with self.post("/v1/completions", temperature=0, **body) as response:
            return json.load(response)["choices"][0]

    def is_alive(self) -> bool:
        with urllib.request.urlopen(self.url + "/health", timeout=5) as response:
            return response.status == 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("serve")
    folder = save_tiny(root / "my model.v2", tiny_config(), shards=3)
    save_tokenizer(folder)
    folder.chmod(0o555)
    log = root / "server.log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tiers.vllm_model.cli", "serve", str(folder), "--tiers", "auto,0=reference"]
    flags = ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", "tiny", "--enforce-eager"]
    flags += ["--dtype", "float32", "--max-model-len", "128", "--return-tokens-as-token-ids"]
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    before = sorted(path.name for path in folder.iterdir())
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, *flags], stdout=stream, stderr=subprocess.STDOUT, env=env, cwd=root, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(400):
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(url + "/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.3)
        yield Server(url, folder, log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
    # Nothing is left behind: not in the model's folder, not where the command was run.
    assert sorted(path.name for path in folder.iterdir()) == before
    assert sorted(path.name for path in root.iterdir()) == ["my model.v2", "server.log"]


def test_completion_matches_reference(server: Server) -> None:
    prompt = random_ids(30, 256, seed=1)
    choice = server.complete(prompt=prompt, max_tokens=5, logprobs=0, ignore_eos=True)
    tokens = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
    actual = torch.tensor(choice["logprobs"]["token_logprobs"])
    logprobs = load_model(server.folder)(torch.tensor(prompt + tokens)).log_softmax(-1)
    expected = torch.stack([logprobs[len(prompt) - 1 + i, token] for i, token in enumerate(tokens)])
    assert (actual - expected).abs().max() <= LOGPROB_BUDGET


def test_chat_streams(server: Server) -> None:
    messages = [{"role": "user", "content": "How are you?"}]
    with server.post("/v1/chat/completions", messages=messages, max_tokens=8, stream=True, ignore_eos=True) as response:
        chunks = [line for line in response if line.startswith(b"data: {")]
    assert len(chunks) >= 8
    assert json.loads(chunks[-1].removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"


def test_two_requests_at_once_get_their_own_answers(server: Server) -> None:
    prompts = [random_ids(40, 256, seed=2), random_ids(25, 256, seed=3)]

    def ask(prompt: list[int]) -> str:
        return server.complete(prompt=prompt, max_tokens=20, ignore_eos=True)["text"]

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(ask, prompts))
    assert together == [ask(prompt) for prompt in prompts]


def test_too_long_a_prompt_is_refused_and_the_server_lives(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.complete(prompt=random_ids(200, 256, seed=4), max_tokens=5)
    assert refusal.value.code == 400
    assert "128" in refusal.value.read().decode()
    assert server.is_alive()


def test_a_client_that_hangs_up_leaves_the_server_alive(server: Server) -> None:
    response = server.post(
        "/v1/completions", prompt=random_ids(9, 256, seed=5), max_tokens=110, stream=True, ignore_eos=True
    )
    response.readline()
    response.close()
    assert server.is_alive()
    assert server.complete(prompt=random_ids(9, 256, seed=6), max_tokens=3, ignore_eos=True)["text"] is not None


def test_the_log_says_which_tier_serves_what(server: Server) -> None:
    log = server.log.read_text()
    assert "Tiers of this model" in log
    assert "topk k=8 sink=1 window=2" in log
    # Layers 2 and 3 differ in `share`, so they get a line each.
    assert "share=group" in log
