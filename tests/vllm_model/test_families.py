"""Foreign folders on vLLM: every shipped family against transformers, a user's own family in every process."""

import json
from collections.abc import Callable
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


Serve = Callable[..., list[dict[str, Any]]]


def job(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "folder": str(folder), "logits": str(folder.with_name(f"{folder.name}.pt")),
        "options": {"enforce_eager": True, **options},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "names"), [(1, ONE_RANK), (2, TWO_RANKS), (4, FOUR_RANKS)], ids=["TP1", "TP2", "TP4"]
)
def test_every_family_on_vllm_matches_transformers(
    ranks: int, names: list[str], folders: dict[str, Path], serve_jobs: Serve
) -> None:
    names = [*names, *(f"{name}, converted" for name in CONVERTED if ranks == 1)]
    results = serve_jobs([job(folders[name], config_format="tiers") for name in names], ranks)
    errors = {name: result["error"] for name, result in zip(names, results, strict=True)}
    if ranks == 1:  # the same weights through the same kernels
        for name in CONVERTED:
            assert errors[f"{name}, converted"] == errors[name], name
    wrong = {name: error for name, error in errors.items() if not error <= LOGPROB_BUDGET}
    assert not wrong, f"off by more than {LOGPROB_BUDGET}: {wrong}"


@pytest.fixture
def families(tmp_path: Path) -> Path:
    """A folder with a user's family."""
    folder = tmp_path / "families"
    folder.mkdir()
    text = (SHIPPED / "myllama.toml").read_text()
    text = text.replace('"MyLlamaForCausalLM"', '"OurLlamaForCausalLM", "OurOtherForCausalLM"').replace(
        '"myllama"', '"ourllama"'
    )
    (folder / "ourllama.toml").write_text(text)
    return folder


def save_own(folder: Path, **config: Any) -> Path:
    """A model that only the user's family knows."""
    ids = torch.tensor(random_ids(60, CONFIG["vocab_size"], seed=2))
    expect(folder, ids, save_myllama(folder, **config)(ids))
    return folder


def test_a_users_family_is_known_to_every_process_of_vllm(families: Path, tmp_path: Path, serve_jobs: Serve) -> None:
    """Nothing but the variable: model type unknown to transformers, architecture unknown to vLLM, engine in a process
    of its own; then an architecture whose model type transformers reads with a class of its own, which knows nothing of the
    family."""
    first = job(save_own(tmp_path / "first", model_type="ourllama", architectures=["OurLlamaForCausalLM"]))
    first["environment"] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    second = job(save_own(tmp_path / "second"))
    config = {**CONFIG, "model_type": "llama", "architectures": ["OurOtherForCausalLM"]}
    # The names that transformers insists on for this type.
    config |= {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 3, "max_position_embeddings": 512}
    Path(second["folder"], "config.json").write_text(json.dumps(config))
    results = serve_jobs([first, second], TIERS_FAMILIES=str(families))
    assert all(result["error"] <= LOGPROB_BUDGET for result in results)


def test_a_family_that_only_the_command_line_names(families: Path, tmp_path: Path, serve_jobs: Serve) -> None:
    """What `tiers serve --family FILE` does: nothing in config.json names the family, no folder of families is set."""
    folder = save_own(tmp_path / "model", model_type="nobody", architectures=["NobodyLM"])
    (result,) = serve_jobs([job(folder, config_format="tiers")], **{FAMILY: str(families / "ourllama.toml")})
    assert result["error"] <= LOGPROB_BUDGET
