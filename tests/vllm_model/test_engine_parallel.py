"""Engines in processes of their own: tensor and pipeline parallel, compiled by vLLM, with a LoRA adapter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tiers.reference.testing.compare import LOGPROB_BUDGET
from tiers.reference.testing.tiny import (
    alibi_config,
    moe_config,
    positions_config,
    save_model,
    save_tiny,
    tiny_config,
    tiny_model,
    uneven_config,
)

pytestmark = pytest.mark.engine

# Unequal groups over 4 key/value heads, so that two ranks can share them.
UNEQUAL = [0, 0, 0, 1, 3, 2, 3, 0]


def unequal_config() -> dict[str, Any]:
    config = alibi_config()
    mixer = {**config["mixer"], "num_heads": 8, "num_kv_heads": 4, "head_map": UNEQUAL}
    layers = {**config["layers"], "1": {"mixer": {"pattern": {"share": "group"}}}}
    return {**config, "mixer": mixer, "layers": layers}


def run_process(folder: Path, environment: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
    env = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # apply_model sends a function to the workers.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        # One core per rank; the default wants one memory node per rank.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **(environment or {}),
    }
    command = [sys.executable, str(Path(__file__).with_name("engine_process.py")), str(folder), json.dumps(options)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        pytest.param(tiny_config(), {"tensor_parallel_size": 2}, id="TP2-rope-gates"),
        pytest.param(unequal_config(), {"tensor_parallel_size": 2}, id="TP2-alibi-unequal-groups"),
        pytest.param(positions_config(), {"tensor_parallel_size": 2}, id="TP2-every-kind-of-positions"),
        pytest.param(uneven_config(), {"tensor_parallel_size": 2}, id="TP2-uneven-layers"),
        pytest.param(tiny_config(), {"pipeline_parallel_size": 2}, id="PP2-gates-on-the-second-stage"),
    ],
)
def test_ranks_match_reference(config: dict[str, Any], ranks: dict[str, int], tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, config)
    # On the CPU vLLM prepares the buffers between pipeline stages only when it compiles; Dynamo alone is the quick way.
    environment: dict[str, str] = {}
    options: dict[str, Any] = {"enforce_eager": True}
    if "pipeline_parallel_size" in ranks:
        environment = {"TORCHDYNAMO_DISABLE": "0", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
        options = {"compilation_config": {"backend": "eager"}}
    result = run_process(folder, environment, distributed_executor_backend="mp", **options, **ranks)
    assert result["error"] <= LOGPROB_BUDGET
    assert len(result["counts"]) == 2
    assert all(counts["attention reference"] > 0 for counts in result["counts"])


def test_more_ranks_than_key_value_heads_match_reference(tmp_path: Path) -> None:
    config = tiny_config()
    folder = save_tiny(
        tmp_path, {**config, "mixer": {**config["mixer"], "num_kv_heads": 1, "head_map": "contiguous"}, "layers": {}}
    )
    result = run_process(folder, enforce_eager=True, distributed_executor_backend="mp", tensor_parallel_size=2)
    assert result["error"] <= LOGPROB_BUDGET


def test_compiled_by_vllm_matches_reference(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", tiny_config())
    cache = {"TORCHDYNAMO_DISABLE": "0", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    result = run_process(folder, cache)
    assert result["error"] <= LOGPROB_BUDGET
    # The reference operators ran as they are: had Inductor looked into them, they would not have been called.
    (counts,) = result["counts"]
    assert counts["attention reference"] > 0
    assert counts["gate reference"] > 0


def small_config() -> dict[str, Any]:
    """A dense layer, whose heads vLLM's CPU attention was built for, and one of top-k attention with a gate: few things
    to compile."""
    layers = {
        "0": {"mixer": {"pattern": {"kind": "dense"}}},
        "1": {"gate": {"mode": "sigmoid", "source": "bank", "slots": 5}},
    }
    return tiny_config(mixer={**tiny_config()["mixer"], "head_dim": 32}, num_hidden_layers=2, layers=layers)


def test_the_compiled_tier_inside_what_vllm_compiles_matches_reference(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", small_config())
    cache = {"TORCHDYNAMO_DISABLE": "0", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    result = run_process(folder, cache, additional_config={"tiers": "compiled"})
    assert result["error"] <= LOGPROB_BUDGET
    (counts,) = result["counts"]
    assert set(counts) == {"attention compiled", "gate compiled"}


def test_the_compiled_tier_serves_other_positions(tmp_path: Path) -> None:
    """auto takes it, as no attention of vLLM's knows them, dense or not."""
    layers = {
        "0": {"mixer": {"position": {"kind": "xpos", "scale_base": 24}, "pattern": {"kind": "dense"}}},
        "1": {"mixer": {"position": {"kind": "t5", "num_buckets": 8, "max_distance": 20, "shared": True}}},
    }
    mixer = {**tiny_config()["mixer"], "head_dim": 32}
    folder = save_tiny(tmp_path / "model", tiny_config(mixer=mixer, num_hidden_layers=2, layers=layers))
    options = {"enforce_eager": True, "block_size": 32, "additional_config": {"tiers": "auto"}}
    result = run_process(folder, {"TORCHDYNAMO_DISABLE": "0"}, **options)
    assert result["error"] <= LOGPROB_BUDGET
    (counts,) = result["counts"]
    assert set(counts) == {"attention compiled"}


def test_auto_on_the_cpu_is_the_compiled_tier_unless_vllm_has_a_kernel(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", small_config())
    options = {"enforce_eager": True, "block_size": 32, "additional_config": {"tiers": "auto"}}
    result = run_process(folder, {"TORCHDYNAMO_DISABLE": "0"}, **options)
    assert result["error"] <= LOGPROB_BUDGET
    (counts,) = result["counts"]
    assert set(counts) == {"attention compiled", "gate compiled"}
    assert counts["attention compiled"] == counts["gate compiled"]


@pytest.mark.parametrize("spread", [False, True], ids=["TP2", "EP2"])
def test_experts_on_two_ranks_match_reference(spread: bool, tmp_path: Path) -> None:
    """Cut along their inner width, or dealt out whole; a layer on each tier."""
    folder = save_tiny(tmp_path, moe_config())
    plan = "reference,1.moe=compiled,2.moe=fast" if spread else "reference,1.moe=fast,3.moe=compiled"
    result = run_process(
        folder, {"TORCHDYNAMO_DISABLE": "0"}, enforce_eager=True, distributed_executor_backend="mp",
        tensor_parallel_size=2, enable_expert_parallel=spread, additional_config={"tiers": plan},
    )  # fmt: skip
    assert result["error"] <= LOGPROB_BUDGET
    assert len(result["counts"]) == 2
    for counts in result["counts"]:
        assert counts["moe compiled"] == counts["moe fast"] == counts["moe reference"] > 0


def test_experts_inside_what_vllm_compiles_match_reference(tmp_path: Path) -> None:
    """One layer on each tier; had Inductor looked into the operator, they would not have been called."""
    folder = save_tiny(tmp_path / "model", moe_config())
    cache = {"TORCHDYNAMO_DISABLE": "0", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    plan = "reference,1.moe=compiled,2.moe=fast"
    result = run_process(folder, cache, additional_config={"tiers": plan})
    assert result["error"] <= LOGPROB_BUDGET
    (counts,) = result["counts"]
    assert counts["moe compiled"] == counts["moe fast"] == counts["moe reference"] > 0


def test_lora_adapter_equals_merged_weights(tmp_path: Path) -> None:
    config = tiny_config()
    config["mixer"] = {**config["mixer"], "head_map": "contiguous"}
    state = tiny_model(config).state_dict()
    folder = save_model(tmp_path / "model", config, state)
    generator = torch.Generator().manual_seed(1)
    rank, alpha = 4, 8
    adapter = {}
    for module in (
        "layers.1.mixer.q_proj",
        "layers.2.mixer.v_proj",
        "layers.0.mixer.o_proj",
        "layers.3.ffn.gate_proj",
        "layers.3.ffn.down_proj",
    ):
        rows, columns = state[f"{module}.weight"].shape
        a = torch.randn(rank, columns, generator=generator) * 0.1
        b = torch.randn(rows, rank, generator=generator) * 0.1
        adapter[f"base_model.model.{module}.lora_A.weight"] = a
        adapter[f"base_model.model.{module}.lora_B.weight"] = b
        state[f"{module}.weight"] = state[f"{module}.weight"] + alpha / rank * b @ a
    merged = save_model(tmp_path / "merged", config, state)
    lora = tmp_path / "adapter"
    lora.mkdir()
    save_file(adapter, lora / "adapter_model.safetensors")
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    (lora / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets})
    )
    result = run_process(
        folder, enforce_eager=True, enable_lora=True, max_lora_rank=8, adapter=str(lora), merged=str(merged)
    )
    assert result["error"] <= LOGPROB_BUDGET
