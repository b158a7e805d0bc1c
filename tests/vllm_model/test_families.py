"""Foreign folders on vLLM: every shipped family against transformers, a user's own family in every process."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from tiers.reference.convert import convert
from tiers.reference.family import SHIPPED
from tiers.reference.testing.compare import LOGPROB_BUDGET
from tiers.reference.testing.foreign import MODELS, VOCAB, foreign_logits, save_foreign, save_megatron
from tiers.reference.testing.myllama import CONFIG, save_myllama
from tiers.reference.testing.tiny import random_ids
from tiers.vllm_model.compat import FAMILY

pytestmark = pytest.mark.engine

# Tensor and pipeline ranks of the training.
MEGATRON = {"megatron on 2 ranks": (2, 1), "megatron on 4 ranks in 3 stages": (4, 3)}

# One model of each family, and those that differ in what a rank holds.
ONE_RANK = [*{name.split()[0]: name for name in reversed(MODELS)}.values(), *MEGATRON]
TWO_RANKS = [*ONE_RANK, "falcon with a new decoder", "falcon with alibi"]
FOUR_RANKS = list(MEGATRON)
# Served again from what `tiers convert` makes of them.
CONVERTED = ["gemma2", "falcon of one key/value head", "megatron on 4 ranks in 3 stages"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each model, and beside it what transformers says."""
    root = tmp_path_factory.mktemp("families")
    found = {}
    ids = torch.tensor(random_ids(48, VOCAB, seed=1))
    for name in dict.fromkeys(ONE_RANK + TWO_RANKS):
        found[name] = root / name.replace(" ", "-").replace("/", "-")
        model = save_megatron(found[name], *MEGATRON[name]) if name in MEGATRON else save_foreign(found[name], name)
        expect(found[name], ids, foreign_logits(model, ids))
    for name in CONVERTED:
        found[f"{name}, converted"] = folder = root / f"{found[name].name}-converted"
        convert(found[name], folder)
        expect(folder, ids, torch.load(root / f"{found[name].name}.pt")["logits"])
    return found


def expect(folder: Path, ids: torch.Tensor, logits: torch.Tensor) -> None:
    torch.save({"ids": ids, "logits": logits}, folder.with_name(f"{folder.name}.pt"))


def serve_all(
    folders: list[Path], ranks: int, environment: dict[str, str] | None = None, **options: Any
) -> dict[str, Any]:
    """Run families_process.py on all of them, one process per rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        str(Path(__file__).with_name("families_process.py")),
        json.dumps([str(f) for f in folders]),
    ]
    common = {
        **os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        # Names the shared memory of the ranks; what a run that was killed left behind must not be found.
        "VLLM_DIST_IDENT": f"tiers-{uuid.uuid4().hex}", "TIERS_TEST_OPTIONS": json.dumps(options), **(environment or {}),
    }  # fmt: skip
    processes = []
    with tempfile.TemporaryDirectory() as logs:
        # Files rather than pipes: a rank whose pipe is full would stop, and the others with it.
        for rank in range(ranks):
            env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with Path(logs, str(rank)).open("w") as log:
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        try:
            for process in processes:
                process.wait(timeout=400)
        finally:
            for process in processes:
                process.kill()
            outputs = [Path(logs, str(rank)).read_text() for rank in range(ranks)]
    lines = [line for line in outputs[0].splitlines() if line.startswith("RESULT ")]
    assert lines, outputs[0][-6000:] + "".join(output[-2000:] for output in outputs[1:])
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.mark.parametrize(
    ("ranks", "names"), [(1, ONE_RANK), (2, TWO_RANKS), (4, FOUR_RANKS)], ids=["TP1", "TP2", "TP4"]
)
def test_every_family_on_vllm_matches_transformers(ranks: int, names: list[str], folders: dict[str, Path]) -> None:
    names = [*names, *(f"{name}, converted" for name in CONVERTED if ranks == 1)]
    errors = serve_all([folders[name] for name in names], ranks, config_format="tiers")
    assert len(errors) == len(names)
    if ranks == 1:  # the same weights through the same kernels
        for name in CONVERTED:
            assert errors[folders[f"{name}, converted"].name] == errors[folders[name].name], name
    wrong = {name: error for name, error in errors.items() if not error <= LOGPROB_BUDGET}
    assert not wrong, f"off by more than {LOGPROB_BUDGET}: {wrong}"


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with a user's family, and a folder of a model that only this family knows."""
    families = tmp_path / "families"
    families.mkdir()
    text = (SHIPPED / "myllama.toml").read_text()
    text = text.replace('"MyLlamaForCausalLM"', '"OurLlamaForCausalLM", "OurOtherForCausalLM"').replace(
        '"myllama"', '"ourllama"'
    )
    (families / "ourllama.toml").write_text(text)
    folder = tmp_path / "model"
    ids = torch.tensor(random_ids(60, CONFIG["vocab_size"], seed=2))
    model = save_myllama(folder, model_type="ourllama", architectures=["OurLlamaForCausalLM"])
    expect(folder, ids, model(ids))
    return families, folder


def test_a_users_family_is_known_to_every_process_of_vllm(own: tuple[Path, Path]) -> None:
    """Nothing but the variable: model type unknown to transformers, architecture unknown to vLLM, engine in a process
    of its own."""
    families, folder = own
    environment = {"TIERS_FAMILIES": str(families), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    errors = serve_all([folder], 1, environment)
    assert errors["model"] <= LOGPROB_BUDGET


def test_a_users_architecture_on_a_known_model_type(own: tuple[Path, Path]) -> None:
    """transformers reads such a config with a class of its own, which knows nothing of the family."""
    families, folder = own
    config = {**CONFIG, "model_type": "llama", "architectures": ["OurOtherForCausalLM"]}
    # The names that transformers insists on for this type.
    config |= {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 3, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    errors = serve_all([folder], 1, {"TIERS_FAMILIES": str(families)})
    assert errors["model"] <= LOGPROB_BUDGET


def test_a_family_that_only_the_command_line_names(own: tuple[Path, Path]) -> None:
    """What `tiers serve --family FILE` does: nothing in config.json names the family, no folder of families is set."""
    families, folder = own
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "nobody", "architectures": ["NobodyLM"]}))
    environment = {FAMILY: str(families / "ourllama.toml"), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    errors = serve_all([folder], 1, environment, config_format="tiers")
    assert errors["model"] <= LOGPROB_BUDGET
