"""`tiers serve` over HTTP, as a client sees it."""

import json
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tiers.reference.load import load_model
from tiers.reference.testing.compare import LOGPROB_BUDGET
from tiers.reference.testing.tiny import random_ids, save_tiny, save_tokenizer, tiny_config
from tiers.vllm_model.testing import Server, answered, serving

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("serve")
    folder = save_tiny(root / "my model.v2", tiny_config(), shards=3)
    save_tokenizer(folder)
    folder.chmod(0o555)
    before = sorted(path.name for path in folder.iterdir())
    with serving(folder, root / "server.log", "--tiers", "auto,0=reference") as server:
        yield server
    # Nothing is left behind: not in the model's folder, not where the command was run.
    assert sorted(path.name for path in folder.iterdir()) == before
    assert sorted(path.name for path in root.iterdir()) == ["my model.v2", "server.log"]


def test_completion_matches_reference(server: Server) -> None:
    prompt = random_ids(30, 256, seed=1)
    choice = server.complete(prompt=prompt, max_tokens=5, logprobs=0, ignore_eos=True)
    tokens, actual = answered(choice)
    logprobs = load_model(server.folder)(torch.tensor(prompt + tokens)).log_softmax(-1)
    expected = torch.stack([logprobs[len(prompt) - 1 + i, token] for i, token in enumerate(tokens)])
    assert (actual - expected).abs().max() <= LOGPROB_BUDGET


def test_chat_streams(server: Server) -> None:
    messages = [{"role": "user", "content": "How are you?"}]
    asked = {"messages": messages, "max_tokens": 8, "ignore_eos": True, "stream_options": {"include_usage": True}}
    with server.post("/v1/chat/completions", stream=True, **asked) as response:
        lines = [line for line in response if line.startswith(b"data: {")]
    *chunks, last = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    # vLLM puts tokens together when the reader is slow, so not one chunk for each of the eight.
    assert len(chunks) >= 3
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 8


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
