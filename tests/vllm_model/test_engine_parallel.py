"""Engines in processes of their own: tensor and pipeline parallel, compiled by vLLM, with a LoRA adapter.

Ranks that vLLM starts itself are in test_check.py, with one process for each.
"""

import json
from collections.abc import Callable
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


Serve = Callable[..., list[dict[str, Any]]]

EAGER = {"enforce_eager": True}
COMPILING = {"TORCHDYNAMO_DISABLE": "0"}
MP = {"distributed_executor_backend": "mp"}


def job(
    folder: Path, config: dict[str, Any], environment: dict[str, str] | None = None, **options: Any
) -> dict[str, Any]:
    return {"folder": str(save_tiny(folder, config)), "environment": environment or {}, "options": options}


# ---- two ranks ------------------------------------------------------------------------------------------------------


def one_group_config() -> dict[str, Any]:
    config = tiny_config()
    return {**config, "mixer": {**config["mixer"], "num_kv_heads": 1, "head_map": "contiguous"}, "layers": {}}


TWO_RANKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # A gate with a table, of which each rank has some rows, and one with a bank.
    "rope and gates": (
        tiny_config(),
        {"additional_config": {"tiers": "reference,*.gate=compiled", "fold_tables": True}},
    ),
    "ALiBi and unequal groups": (unequal_config(), {}),
    "every kind of positions": (positions_config(), {}),
    "uneven layers": (uneven_config(), {}),
    "more ranks than key/value heads": (one_group_config(), {}),
    # Cut along their inner width, or dealt out whole; a layer on each tier.
    "experts cut": (moe_config(), {"additional_config": {"tiers": "reference,1.moe=fast,3.moe=compiled"}}),
    "experts dealt out": (
        moe_config(),
        {"additional_config": {"tiers": "reference,1.moe=compiled,2.moe=fast"}, "enable_expert_parallel": True},
    ),
}


@pytest.fixture(scope="module")
def on_two_ranks(serve_jobs: Serve, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("two-ranks")
    jobs = [
        job(root / str(i), config, COMPILING, **EAGER, **options)
        for i, (config, options) in enumerate(TWO_RANKS.values())
    ]
    # What is folded has to follow the weights.
    config = TWO_RANKS["rope and gates"][0]
    weights = {n: w * 2 if n.endswith(".gate.proj.weight") else w for n, w in tiny_model(config).state_dict().items()}
    jobs[list(TWO_RANKS).index("rope and gates")]["later"] = str(save_model(root / "later", config, weights))
    return dict(zip(TWO_RANKS, serve_jobs(jobs, ranks=2), strict=True))


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_match_the_reference(name: str, on_two_ranks: dict[str, dict[str, Any]]) -> None:
    result = on_two_ranks[name]
    assert result["error"] <= LOGPROB_BUDGET
    assert len(result["counts"]) == 2
    for counts in result["counts"]:
        assert counts["attention reference"] > 0
        if "gates" in name:
            assert counts["gate compiled"] == counts["gate folded compiled"] > 0
        if "experts" in name:
            assert counts["moe compiled"] == counts["moe fast"] == counts["moe reference"] > 0


def test_pipeline_stages_match_the_reference(serve_jobs: Serve, tmp_path: Path) -> None:
    # On the CPU vLLM prepares the buffers between stages only when it compiles; Dynamo alone is the quick way.
    options = {"compilation_config": {"backend": "eager"}, "pipeline_parallel_size": 2, **MP}
    # A gate on the second stage only.
    layers = {"1": {"gate": {"mode": "mix", "source": "token"}}}
    own = job(tmp_path / "model", tiny_config(num_hidden_layers=2, layers=layers), **options)
    (result,) = serve_jobs([own], VLLM_DISABLE_COMPILE_CACHE="1", **COMPILING)
    assert result["error"] <= LOGPROB_BUDGET


# ---- one rank, with torch.compile ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_one_rank(serve_jobs: Serve, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("one-rank")
    layer = {
        "ffn": {"kind": "moe", "num_experts": 4, "top_k": 2, "intermediate_size": 32},
        "gate": {"mode": "sigmoid", "source": "bank", "slots": 5},
    }
    looking_up = {**layer, "gate": {"mode": "mix", "source": "token"}}
    every = tiny_config(num_hidden_layers=2, layers={"0": layer, "1": looking_up})
    plan = {"tiers": "reference,1.attention=compiled,1.gate=compiled,1.moe=fast", "fold_tables": True}
    small = tiny_config(
        # Heads of a size that vLLM's attention for the CPU was built for.
        mixer={**tiny_config()["mixer"], "head_dim": 32}, num_hidden_layers=2,
        layers={
            "0": {"mixer": {"pattern": {"kind": "dense"}}},
            "1": {"gate": {"mode": "sigmoid", "source": "bank", "slots": 5}},
        },
    )  # fmt: skip
    positions = {
        **small,
        "layers": {
            "0": {"mixer": {"position": {"kind": "xpos", "scale_base": 24}, "pattern": {"kind": "dense"}}},
            "1": {"mixer": {"position": {"kind": "t5", "num_buckets": 8, "max_distance": 20, "shared": True}}},
        },
    }
    auto = {**EAGER, "block_size": 32, "additional_config": {"tiers": "auto"}}
    jobs = {
        "adapter": adapter_job(root),
        "auto": job(root / "auto", small, **auto),
        "auto, other positions": job(root / "positions", positions, **auto),
        "compiled by vLLM": job(root / "every", every, additional_config=plan),
    }
    # Nothing that an earlier run has compiled.
    results = serve_jobs(list(jobs.values()), VLLM_DISABLE_COMPILE_CACHE="1", **COMPILING)
    return dict(zip(jobs, results, strict=True))


def test_every_operator_inside_what_vllm_compiles_matches_the_reference(on_one_rank: dict[str, dict[str, Any]]) -> None:
    """One layer on the reference, one on faster tiers. Had Inductor looked into the operators, they would not have been
    called."""
    result = on_one_rank["compiled by vLLM"]
    assert result["error"] <= LOGPROB_BUDGET
    (counts,) = result["counts"]
    assert set(counts) == {f"{name} reference" for name in ("attention", "gate", "moe")} | {
        "attention compiled", "gate compiled", "gate folded compiled", "moe fast",
    }  # fmt: skip
    for name, tier in (("attention", "compiled"), ("gate", "compiled"), ("moe", "fast")):
        assert counts[f"{name} reference"] == counts[f"{name} {tier}"] > 0


def test_auto_on_the_cpu_is_the_compiled_tier_unless_vllm_has_a_kernel(on_one_rank: dict[str, dict[str, Any]]) -> None:
    result = on_one_rank["auto"]
    assert result["error"] <= LOGPROB_BUDGET
    (counts,) = result["counts"]
    # The products of a bank's values are kept without being asked for.
    assert set(counts) == {"attention compiled", "gate compiled", "gate folded compiled"}
    assert counts["attention compiled"] == counts["gate compiled"] == counts["gate folded compiled"]


def test_auto_takes_the_compiled_tier_for_positions_that_vllm_does_not_know(
    on_one_rank: dict[str, dict[str, Any]],
) -> None:
    """Dense or not."""
    result = on_one_rank["auto, other positions"]
    assert result["error"] <= LOGPROB_BUDGET
    assert [set(counts) for counts in result["counts"]] == [{"attention compiled"}]


def test_lora_adapter_equals_merged_weights(on_one_rank: dict[str, dict[str, Any]]) -> None:
    assert on_one_rank["adapter"]["error"] <= LOGPROB_BUDGET


def adapter_job(root: Path) -> dict[str, Any]:
    """A model with an adapter, and the same with the adapter merged into its weights."""
    config = tiny_config()
    config["mixer"] = {**config["mixer"], "head_map": "contiguous"}
    state = tiny_model(config).state_dict()
    folder = save_model(root / "model", config, state)
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
    merged = save_model(root / "merged", config, state)
    lora = root / "adapter"
    lora.mkdir()
    save_file(adapter, lora / "adapter_model.safetensors")
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    (lora / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets})
    )
    options = {**EAGER, "enable_lora": True, "max_lora_rank": 8}
    return {"folder": str(folder), "options": options, "adapter": str(lora), "merged": str(merged)}
