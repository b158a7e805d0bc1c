"""Registration: in fresh processes, twice, and on a vLLM that this project does not know."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tiers.reference.testing.tiny import save_tiny, tiny_config
from tiers.vllm_model import compat, register


def test_registering_twice_is_the_same_as_once() -> None:
    register()
    register()
    from transformers import AutoConfig
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert "TiersForCausalLM" in ModelRegistry.get_supported_archs()
    assert AttentionBackendEnum["TIERS"].get_class().get_name() == "TIERS"
    assert AutoConfig.for_model("tiers").model_type == "tiers"


@pytest.mark.parametrize("found", ["0.26.0", "0.33.1", None])
def test_an_unknown_vllm_gets_one_line_and_nothing_else(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: found)
    # Whatever registration would import must not be touched: it may not exist in that version.
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.tiers")
    logger.addHandler(handler)
    try:
        register()
    finally:
        logger.removeHandler(handler)
    (record,) = records
    assert record.getMessage() == f"vllm-tiers registers nothing: {compat.unsupported_version()}"
    assert (found or "not installed") in record.getMessage()


def test_a_fresh_vllm_process_finds_the_plugin_and_the_model(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", tiny_config())
    code = (
        "import sys, json; from vllm.plugins import load_general_plugins; load_general_plugins();"
        "from transformers import AutoConfig; c = AutoConfig.from_pretrained(sys.argv[1]);"
        "print(json.dumps([c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.architectures]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [4, 2, 16, ["TiersForCausalLM"]]


def test_the_config_survives_saving(tmp_path: Path) -> None:
    register()
    from transformers import AutoConfig

    folder = save_tiny(tmp_path / "model", tiny_config())
    config = AutoConfig.from_pretrained(folder)
    config.save_pretrained(tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").model == config.model
