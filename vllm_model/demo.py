"""`tiers demo`: build a real in-house model, serve it, ask it a question over HTTP, compare its speed with a native model."""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any

from tiers.reference.config import Dense, ModelConfig
from tiers.reference.errors import TiersError
from tiers.vllm_model import demo_model
from tiers.vllm_model.compat import vllm_version

# Tokens of real text that the perplexity is taken over: two windows of 2048.
TEXT_TOKENS = 4096

# Flags of both servers. Eager: compiling takes longer than the demo.
SERVER_FLAGS = ("--max-model-len", "2048", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8")

START_TIMEOUT_S = 240


def run(folder: Path, question: str) -> int:
    """Run the demo.

    Args:
        folder: where the in-house checkpoint goes and stays; what else is written goes to .demo beside it.
        question: asked over the chat API.

    Returns:
        0 if an answer came, else 1.

    Raises:
        TiersError: the model cannot be built, or a server does not start.
    """
    started = time.monotonic()
    work = folder.resolve().parent / ".demo"
    base = work / "base"
    work.mkdir(exist_ok=True)

    def say(message: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {message}", flush=True)

    demo_model.build(folder, base, say)
    _say_perplexity(folder, work / "perplexity.json", say)

    say(f"serving {folder} with vLLM {vllm_version()} and the plugin: tiers serve {folder} --tiers auto")
    command = [sys.executable, "-m", "tiers.vllm_model.cli", "serve", str(folder), "--tiers", "auto"]
    log = work / "server.log"
    with _server(command, "demo", log, say) as url:
        print(f"\n{_tier_table(log)}\n")
        print(f"Question: {question}\nAnswer:   ", end="", flush=True)
        answer = ""
        for piece in _chat(url, "demo", question):
            print(piece, end="", flush=True)
            answer += piece
        print("\n")
        ours = _decode_speed(url, "demo")
        say(f"decode: {ours:.1f} tokens per second")

    say(f"the same weights without the changes in vLLM's own Llama class, for comparison: {base}")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(base)]
    with _server(command, "base", work / "base.log", say) as url:
        native = _decode_speed(url, "base")
    say(f"decode: {native:.1f} tokens per second; the in-house model reaches {ours / native:.2f} of that")
    say(f"done; the checkpoint stays in {folder}, logs in {work}")
    return 0 if answer.strip() else 1


def _say_perplexity(folder: Path, cache: Path, say: Any) -> None:
    """Print the perplexity with top-k and dense; measured once per checkpoint, since it takes longer than the rest."""
    key = f"{(folder / 'model.safetensors').stat().st_mtime_ns}"
    found = json.loads(cache.read_text()) if cache.is_file() else {}
    if found.get("key") != key:
        say(
            f"measuring perplexity over {TEXT_TOKENS} tokens of Python's documentation with the reference model (about a minute)"
        )
        sparse, dense = perplexities(folder)
        found = {"key": key, "topk": sparse, "dense": dense, "date": date.today().isoformat()}
        cache.write_text(json.dumps(found))
    say(
        f"perplexity: {found['topk']:.2f} with top-k attention (k=64), {found['dense']:.2f} dense, "
        f"{found['topk'] / found['dense'] - 1:+.1%} (measured {found['date']})"
    )


def perplexities(folder: Path, tokens: int = TEXT_TOKENS) -> tuple[float, float]:
    """Perplexity of the demo checkpoint over the first tokens of a real text, as it is and with every layer dense."""
    from tiers.reference.load import load_model
    from tiers.reference.text import load_tokenizer

    ids = load_tokenizer(folder).encode(demo_model.real_text())[:tokens]
    model = load_model(folder)
    sparse = demo_model.perplexity(model, ids)
    demo_model.set_pattern(model, Dense())
    return sparse, demo_model.perplexity(model, ids)


def _tier_table(log: Path) -> str:
    """The table that the server logged when it built the model; the plan's own if the log has none."""
    lines = log.read_text(errors="replace").splitlines()
    rows = [line.partition("] ")[2] for line in lines if " [model.py:" in line]
    first = next((i for i, row in enumerate(rows) if row.startswith("layers ")), None)
    if first is not None:
        return "\n".join(rows[first:])
    from tiers.vllm_model.dispatch import Where, resolve, table
    from tiers.vllm_model.plan import TierPlan

    config = ModelConfig.from_dict(demo_model.CONFIG)
    return table(resolve(config, TierPlan.parse("auto", config), Where("cpu")), config)


@contextmanager
def _server(command: list[str], name: str, log: Path, say: Any) -> Iterator[str]:
    """Start an OpenAI server, wait until it is healthy, and stop it and all its processes at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_COLOR": "0", **os.environ}
    flags = [*SERVER_FLAGS, "--host", "127.0.0.1", "--port", str(port), "--served-model-name", name]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, *flags], stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log, say)
        yield f"http://127.0.0.1:{port}"
    finally:
        _stop(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, say: Any) -> None:
    begun = time.monotonic()
    told = begun
    while time.monotonic() - begun < START_TIMEOUT_S:
        if process.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise TiersError(f"the server ended with code {process.returncode} before it was ready; see {log}: {tail}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                say(f"ready after {time.monotonic() - begun:.0f} s")
                return
        except OSError:
            time.sleep(0.3)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            say("still starting ...")
    raise TiersError(f"the server was not ready after {START_TIMEOUT_S} s; see {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, then make its whole process group end."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _stream(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The choices of a streamed answer of the OpenAI API, as they arrive."""
    request = urllib.request.Request(
        url, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                yield from json.loads(data)["choices"]


def _chat(url: str, model: str, question: str) -> Iterator[str]:
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 96}
    for choice in _stream(f"{url}/v1/chat/completions", body):
        yield choice["delta"].get("content") or ""


def _decode_speed(url: str, model: str, tokens: int = 64, runs: int = 3) -> float:
    """Tokens per second of one request after its first token: the median of a few runs on prompts of about 300 tokens."""
    speeds = []
    text = demo_model.real_text()
    for attempt in range(runs):
        prompt = text[attempt * 2000 : attempt * 2000 + 1200]
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
        times = [time.monotonic() for _ in _stream(f"{url}/v1/completions", body)]
        speeds.append((len(times) - 1) / (times[-1] - times[0]))
    return statistics.median(speeds)
