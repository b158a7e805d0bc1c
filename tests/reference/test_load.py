"""Filling a model from a folder: what is refused, what is read past, and that the result is the model that was saved."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.reference.checkpoint import INDEX_NAME, open_checkpoint
from tiers.reference.config import ModelConfig
from tiers.reference.errors import CheckpointError, ConfigError
from tiers.reference.load import CheckedTensors, check_headers, load_model, open_model, weights
from tiers.reference.testing.tiny import (
    alibi_config,
    positions_config,
    random_ids,
    save_model,
    save_tiny,
    tiny_config,
    tiny_model,
)

TABLES = ("embed_tokens.weight", "lm_head.weight", "layers.2.gate.table.weight")


def logits_of(model: Any) -> Tensor:
    return model(torch.tensor(random_ids(37, 320, seed=3)))


def tiny_state(config: dict[str, Any]) -> dict[str, Tensor]:
    return dict(tiny_model(config).state_dict())


@pytest.fixture
def state() -> dict[str, Tensor]:
    return tiny_state(tiny_config())


def assert_refused(folder: Path, *parts: str, error: type[Exception] = CheckpointError) -> None:
    """Loading raises, with every part in the message."""
    with pytest.raises(error) as caught:
        load_model(folder)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"


# ---- what loads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3], ids=["one file", "three shards"])
@pytest.mark.parametrize("config", [tiny_config(), alibi_config()], ids=["tiny", "alibi"])
def test_loaded_matches_saved(config: dict[str, Any], shards: int, tmp_path: Path) -> None:
    expected = logits_of(tiny_model(config))
    model = load_model(save_tiny(tmp_path, config, shards=shards))
    assert torch.equal(logits_of(model), expected)
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_a_stale_index_loads_with_a_note(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tiny_config(), shards=3)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_tiny(folder, tiny_config())
    assert torch.equal(logits_of(load_model(folder)), logits_of(tiny_model(tiny_config())))
    notes = open_model(folder).notes
    assert any(f"{INDEX_NAME} is stale" in note for note in notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_checkpoint_of_another_dtype_loads(dtype: torch.dtype, state: dict[str, Tensor], tmp_path: Path) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in state.items()}
    folder = save_model(tmp_path, tiny_config(), stored)
    model = load_model(folder)
    reference = tiny_model(tiny_config())
    reference.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(logits_of(model), logits_of(reference))


def test_the_dtype_asked_for_is_given(tmp_path: Path) -> None:
    model = load_model(save_tiny(tmp_path, tiny_config()), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    # Rotary tables stay in float32: in bfloat16, positions above 256 would fall together.
    assert {name: buffer.dtype for name, buffer in model.named_buffers()}["layers.0.mixer.table_PR"] == torch.float32
    assert torch.isfinite(logits_of(model)).all()


@pytest.mark.parametrize("name", TABLES)
def test_surplus_vocabulary_rows_are_left_out(name: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    padding = torch.full((13, state[name].shape[1]), 1e3)
    folder = save_model(tmp_path, tiny_config(), {**state, name: torch.cat((state[name], padding))})
    assert torch.equal(logits_of(load_model(folder)), logits_of(tiny_model(tiny_config())))
    notes = open_model(folder).notes
    assert notes == [f"{name} has 333 rows, vocab_size is 320; the last 13 rows are not used"]


def test_a_tied_head_equal_to_the_embedding_is_accepted(tmp_path: Path) -> None:
    tied = tiny_state(alibi_config())
    folder = save_model(tmp_path, alibi_config(), {**tied, "lm_head.weight": tied["embed_tokens.weight"].clone()})
    assert torch.equal(logits_of(load_model(folder)), logits_of(tiny_model(alibi_config())))


@pytest.mark.parametrize("name", ["my model v1.0 (final)", "a.b.c", ".hidden", "model.safetensors", "naïve 模型"])
def test_folder_names_do_not_matter(name: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / name, tiny_config(), shards=2)
    assert torch.equal(logits_of(load_model(folder)), logits_of(tiny_model(tiny_config())))


def test_a_read_only_folder_loads(tmp_path: Path) -> None:
    # Root ignores these bits; for everybody else this shows that loading writes nothing beside the weights.
    folder = save_tiny(tmp_path / "model", tiny_config(), shards=2)
    before = sorted(path.name for path in folder.iterdir())
    for path in (*folder.iterdir(), folder):
        os.chmod(path, 0o555 if path.is_dir() else 0o444)
    try:
        load_model(folder)
        assert sorted(path.name for path in folder.iterdir()) == before
    finally:
        os.chmod(folder, 0o755)


def test_a_relative_path_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "model", tiny_config(), shards=2)
    monkeypatch.chdir(tmp_path)
    load_model(Path("model"))
    monkeypatch.chdir(tmp_path / "model")
    load_model(Path("."))


def test_checking_a_folder_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(tmp_path, tiny_config())
    monkeypatch.setattr("tiers.reference.checkpoint.safe_open", None)
    opened = open_model(folder)
    assert opened.config == ModelConfig.from_dict(tiny_config())
    assert len(opened.checkpoint.infos) == len(tiny_state(tiny_config()))
    assert opened.notes == []


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_no_folder_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "nowhere: no such folder", "config.json and *.safetensors")


def test_no_config_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tiny_config())
    (folder / "config.json").unlink()
    assert_refused(folder, "config.json: no such file", error=ConfigError)


def test_a_missing_tensor_is_named(state: dict[str, Tensor], tmp_path: Path) -> None:
    del state["layers.1.mixer.q_proj.weight"]
    folder = save_model(tmp_path, tiny_config(), state)
    assert_refused(folder, "no tensor layers.1.mixer.q_proj.weight", f"config.json calls for {len(state) + 1} tensors")


def test_a_tensor_under_another_name_is_hinted_at(state: dict[str, Tensor], tmp_path: Path) -> None:
    state["layers.1.self_attn.q_proj.weight"] = state.pop("layers.1.mixer.q_proj.weight")
    assert_refused(
        save_model(tmp_path, tiny_config(), state),
        "no tensor layers.1.mixer.q_proj.weight",
        "the folder has layers.1.self_attn.q_proj.weight, which the model has no place for",
    )


@pytest.mark.parametrize("name", ["layers.1.mixer.q_proj.bias", "layers.4.ffn_norm.weight", "rotary.inv_freq"])
def test_an_extra_tensor_is_named(name: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    folder = save_model(tmp_path, tiny_config(), {**state, name: torch.zeros(64)})
    assert_refused(folder, f"unexpected tensor {name}", "remove it from the file or describe it in the config")


def test_a_misshapen_tensor_is_named(state: dict[str, Tensor], tmp_path: Path) -> None:
    state["layers.0.ffn.down_proj.weight"] = state["layers.0.ffn.down_proj.weight"].T
    folder = save_model(tmp_path, tiny_config(), state)
    assert_refused(
        folder, "model.safetensors: layers.0.ffn.down_proj.weight has shape [96, 64]", "config.json calls for [64, 96]"
    )


@pytest.mark.parametrize("shape", [(0,), (0, 64)], ids=str)
def test_a_tensor_without_elements_points_to_zero_3(
    shape: tuple[int, ...], state: dict[str, Tensor], tmp_path: Path
) -> None:
    state["layers.0.mixer.q_proj.weight"] = torch.empty(shape)
    folder = save_model(tmp_path, tiny_config(), state)
    assert_refused(
        folder, f"layers.0.mixer.q_proj.weight has shape {list(shape)}", "expected [64, 64]", "ZeRO-3", "consolidate"
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn], ids=str)
def test_a_tensor_of_integers_or_bytes_is_refused(dtype: torch.dtype, state: dict[str, Tensor], tmp_path: Path) -> None:
    state["layers.3.mixer.o_proj.weight"] = torch.zeros(64, 64).to(dtype)
    folder = save_model(tmp_path, tiny_config(), state)
    assert_refused(
        folder,
        f"model.safetensors: layers.3.mixer.o_proj.weight is {dtype}",
        "expected a floating-point type of 16 bits or more",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_that_are_not_finite_are_counted_and_located(
    value: float, dtype: torch.dtype, state: dict[str, Tensor], tmp_path: Path
) -> None:
    weight = state["layers.1.ffn.up_proj.weight"].to(dtype)
    weight[5, 7] = weight[90, 0] = weight[95, 63] = value
    folder = save_model(tmp_path, tiny_config(), {**state, "layers.1.ffn.up_proj.weight": weight})
    assert_refused(
        folder, f"layers.1.ffn.up_proj.weight has 3 of {96 * 64} values that are not finite", f"{value} at [5, 7]"
    )


def test_infinities_that_cancel_are_found(state: dict[str, Tensor], tmp_path: Path) -> None:
    state["norm.weight"][0], state["norm.weight"][1] = float("inf"), float("-inf")
    assert_refused(save_model(tmp_path, tiny_config(), state), "norm.weight has 2 of 64 values", "inf at [0]")


def test_large_finite_values_are_accepted(state: dict[str, Tensor], tmp_path: Path) -> None:
    # Their sum overflows float32, each by itself does not.
    state["norm.weight"][:] = 3e38
    load_model(save_model(tmp_path, tiny_config(), state))


@pytest.mark.parametrize("name", TABLES)
def test_too_few_vocabulary_rows_are_refused(name: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    folder = save_model(tmp_path, tiny_config(), {**state, name: state[name][:300]})
    assert_refused(
        folder, f"{name} has 300 rows", "vocab_size in config.json is 320", "Set vocab_size to 300 or export the whole"
    )


def test_surplus_rows_of_another_tensor_are_refused(state: dict[str, Tensor], tmp_path: Path) -> None:
    state["layers.3.gate.bank_keys"] = torch.zeros(6, 64)
    assert_refused(save_model(tmp_path, tiny_config(), state), "layers.3.gate.bank_keys has shape [6, 64]", "[5, 64]")


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    tied = tiny_state(alibi_config())
    head = tied["embed_tokens.weight"].clone()
    head[319, 47] += 1e-3
    folder = save_model(tmp_path, alibi_config(), {**tied, "lm_head.weight": head})
    assert_refused(
        folder, "tie_word_embeddings is true, but lm_head.weight differs from embed_tokens.weight", "Set tie_word"
    )


def test_a_head_where_none_is_tied_is_called_for(state: dict[str, Tensor], tmp_path: Path) -> None:
    del state["lm_head.weight"]
    assert_refused(save_model(tmp_path, tiny_config(), state), "no tensor lm_head.weight")


@pytest.mark.parametrize("shards", [1, 2], ids=["one file", "two shards"])
def test_a_truncated_file_is_refused(shards: int, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tiny_config(), shards=shards)
    file = max(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert_refused(folder, file.name, "the file is cut short")


def test_a_config_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tiny_config())
    (folder / "config.json").write_text(json.dumps(tiny_config(hidden_size=32)))
    assert_refused(folder, "has shape", "config.json calls for")


# ---- one tensor at a time -------------------------------------------------------------------------------------------


def test_weights_yields_each_parameter_once(tmp_path: Path, state: dict[str, Tensor]) -> None:
    folder = save_tiny(tmp_path, tiny_config(), shards=3)
    names = [name for name, _ in weights(open_model(folder))]
    assert sorted(names) == sorted(state)


def test_a_tensor_that_comes_twice_is_refused(state: dict[str, Tensor]) -> None:
    checked = CheckedTensors(ModelConfig.from_dict(tiny_config()), "somewhere")
    pairs = [("norm.weight", state["norm.weight"])] * 2
    with pytest.raises(CheckpointError, match=r"somewhere: norm\.weight comes twice; expected it once"):
        list(checked.check(pairs))


def test_an_unknown_tensor_is_refused(state: dict[str, Tensor]) -> None:
    checked = CheckedTensors(ModelConfig.from_dict(tiny_config()), "somewhere")
    with pytest.raises(CheckpointError, match=r"somewhere: unexpected tensor norms\.weight"):
        list(checked.check([("norms.weight", state["norm.weight"])]))


def test_finish_names_what_never_came(state: dict[str, Tensor]) -> None:
    checked = CheckedTensors(ModelConfig.from_dict(tiny_config()), "somewhere")
    last = state.popitem()[0]
    assert dict(checked.check(state.items())).keys() == state.keys()
    with pytest.raises(CheckpointError, match=f"somewhere: no tensor {last}"):
        checked.finish()


@pytest.mark.parametrize("order", [1, -1], ids=["embedding first", "head first"])
def test_a_tied_head_is_compared_in_either_order(order: int) -> None:
    tied = tiny_state(alibi_config())
    embedding = tied["embed_tokens.weight"]
    pairs = [("embed_tokens.weight", embedding), ("lm_head.weight", embedding + 1)][::order]
    checked = CheckedTensors(ModelConfig.from_dict(alibi_config()))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        list(checked.check(pairs))


def test_headers_are_checked_against_another_config(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny(tmp_path, tiny_config()))
    with pytest.raises(
        CheckpointError, match=r"no tensor embed_norm\.bias, .*the folder has .*, which the model has no place for"
    ):
        check_headers(ModelConfig.from_dict(alibi_config()), checkpoint.infos, checkpoint.folder)


def test_rates_below_zero_are_refused(tmp_path: Path) -> None:
    state = tiny_state(positions_config())
    state["layers.3.mixer.kerple_r2"][5] = -0.25
    folder = save_model(tmp_path, positions_config(), state)
    with pytest.raises(CheckpointError, match=r"layers\.3\.mixer\.kerple_r2\[5\] is -0\.25; expected 0 or more"):
        load_model(folder)
