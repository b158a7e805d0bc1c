"""Checkpoints of Megatron: whatever the number of ranks, the joined tensors are the ones that were cut."""

import argparse
import io
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tiers.reference.checkpoint import open_checkpoint
from tiers.reference.errors import CheckpointError
from tiers.reference.megatron import Join, join
from tiers.reference.testing.megatron import gpt_tensors, save_ranks, split

LAYERS = 4
Ranks = dict[tuple[int, int], dict[str, Any]]


def assert_holds(folder: Path, expected: dict[str, Tensor]) -> list[str]:
    """The notes, if the tensors are right to the bit."""
    checkpoint = open_checkpoint(folder)
    actual = dict(checkpoint.tensors())
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        info = checkpoint.infos[name]
        assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape)), name
        assert torch.equal(actual[name], tensor), name
    assert torch.equal(checkpoint.tensor(name), tensor)
    return checkpoint.notes


def assert_refused(folder: Path, *parts: str) -> None:
    """Refused when opened."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"


def old_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of Megatron before its core."""
    renames = {
        "embedding.": "language_model.embedding.", "decoder.": "language_model.encoder.",
        "output_layer.": "language_model.output_layer.", "linear_qkv": "query_key_value", "linear_proj": "dense",
        "linear_fc1": "dense_h_to_4h", "linear_fc2": "dense_4h_to_h",
    }  # fmt: skip
    renamed = {}
    for name, tensor in tensors.items():
        for ours, theirs in renames.items():
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    return renamed


def nested(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """language_model and its parts as dicts of their own, as in the files of old."""
    tree: dict[str, Any] = {"language_model": {"embedding": {"word_embeddings": {}}, "encoder": {}, "output_layer": {}}}
    for name, tensor in tensors.items():
        _, part, rest = name.split(".", 2)
        if part == "embedding":
            tree["language_model"][part]["word_embeddings"][rest.removeprefix("word_embeddings.")] = tensor
        else:
            tree["language_model"][part][rest] = tensor
    return tree


# ---- joining --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["pt", "safetensors"])
@pytest.mark.parametrize("swiglu", [True, False], ids=["swiglu", "plain"])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_c7_c2_joined_tensors_are_those_that_were_cut(
    tp: int, pp: int, swiglu: bool, form: str, tmp_path: Path
) -> None:
    """C2: 2 groups of 2 queries, a key and a value are 32 rows; of 4 ranks none holds whole heads of one kind alike."""
    tensors = gpt_tensors(LAYERS, groups=2, swiglu=swiglu)
    assert_holds(save_ranks(tmp_path, split(tensors, tp, pp, LAYERS, swiglu), form), tensors)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_c2_rows_of_a_head_may_be_cut_anywhere(groups: int, tmp_path: Path) -> None:
    # Heads of 6 rows: (4 + 2 * groups) * 6 rows over 4 ranks are 9, 12 or 18 each.
    tensors = gpt_tensors(2, hidden=24, heads=4, groups=groups)
    assert_holds(save_ranks(tmp_path, split(tensors, 4, 1, 2, True)), tensors)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_names_of_old_nested_in_dicts_are_joined(tp: int, pp: int, tmp_path: Path) -> None:
    tensors = old_names(gpt_tensors(LAYERS))
    ranks: Ranks = {rank: nested(part) for rank, part in split(tensors, tp, pp, LAYERS, True).items()}
    assert "language_model.encoder.layers.3.self_attention.query_key_value.weight" in tensors
    assert_holds(save_ranks(tmp_path, ranks), tensors)


def test_c3_halves_of_a_gated_matrix_are_joined_apart(tmp_path: Path) -> None:
    tensors = gpt_tensors(1, swiglu=True)
    notes = assert_holds(save_ranks(tmp_path, split(tensors, 2, 1, 1, True)), tensors)
    assert notes == [
        "training state, so not read: optimizer, rng_state",
        f"joined 2 tensor and 1 pipeline ranks of Megatron from {tmp_path.name}",
        "2 tensors hold [gate; up], twice the width that the next matrix takes in; their halves were joined apart: "
        "decoder.layers.0.mlp.linear_fc1.bias and 1 more",
    ]
    parts = [torch.tensor([[1.0], [2.0], [11.0], [12.0]]), torch.tensor([[3.0], [4.0], [13.0], [14.0]])]
    assert join(Join.GATED, parts).flatten().tolist() == [1, 2, 3, 4, 11, 12, 13, 14]


def test_a_plain_matrix_is_not_taken_for_a_gated_one(tmp_path: Path) -> None:
    tensors = gpt_tensors(1, swiglu=False)
    notes = assert_holds(save_ranks(tmp_path, split(tensors, 2, 1, 1, False)), tensors)
    assert not [note for note in notes if "gate" in note]


def test_stages_share_a_tensor_that_has_no_layer(tmp_path: Path) -> None:
    tensors = gpt_tensors(LAYERS)
    ranks = split(tensors, 2, 2, LAYERS, True)
    for part in ranks.values():
        part["rotary_pos_emb.inv_freq"] = torch.arange(4.0)
    assert_holds(save_ranks(tmp_path, ranks), {**tensors, "rotary_pos_emb.inv_freq": torch.arange(4.0)})
    ranks[1, 1]["rotary_pos_emb.inv_freq"] = torch.arange(4.0) + 1
    ranks[0, 1]["rotary_pos_emb.inv_freq"] = torch.arange(4.0) + 1
    checkpoint = open_checkpoint(save_ranks(tmp_path, ranks))
    with pytest.raises(CheckpointError, match=r"inv_freq is not the same on the pipeline stages"):
        checkpoint.tensor("rotary_pos_emb.inv_freq")


def test_stacks_of_layers_are_counted_apart(tmp_path: Path) -> None:
    tensors = {
        "encoder.layers.0.input_layernorm.weight": torch.ones(2),
        "decoder.layers.0.input_layernorm.weight": torch.ones(2) * 2,
        "decoder.layers.1.input_layernorm.weight": torch.ones(2) * 3,
    }
    first = {name: tensor for name, tensor in tensors.items() if ".1." not in name}
    second = {"decoder.layers.0.input_layernorm.weight": torch.ones(2) * 3}
    assert_holds(save_ranks(tmp_path, {(0, 0): first, (0, 1): second}), tensors)


@pytest.mark.parametrize("how", ["tracker", "release", "only one", "iteration itself"])
def test_the_folder_of_an_iteration_is_found(how: str, tmp_path: Path) -> None:
    tensors = gpt_tensors(2)
    name = "release" if how == "release" else "iter_0000100"
    save_ranks(tmp_path / name, split(tensors, 2, 1, 2, True))
    if how in ("tracker", "release"):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n" if how == "release" else "100\n")
        save_ranks(tmp_path / "iter_0000050", split(gpt_tensors(2, seed=1), 1, 1, 2, True))
    notes = assert_holds(tmp_path / name if how == "iteration itself" else tmp_path, tensors)
    assert f"joined 2 tensor and 1 pipeline ranks of Megatron from {name}" in notes


def test_what_is_no_weight_is_left_out_with_a_note(tmp_path: Path) -> None:
    tensors = gpt_tensors(1)
    ranks: Ranks = {rank: dict(part) for rank, part in split(tensors, 2, 1, 1, True).items()}
    for rank, part in ranks.items():
        part["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.tensor([rank[0]], dtype=torch.uint8)
        part["decoder.layers.0.self_attention.core_attention._extra_state"] = None
        part["version"] = 3
    notes = assert_holds(save_ranks(tmp_path, ranks), tensors)
    assert "_extra_state of Transformer Engine is no weight, so not read" in notes
    assert "no weights, so not read: version" in notes
    assert "training state, so not read: optimizer, rng_state" in notes


def test_extra_state_in_safetensors_is_left_out(tmp_path: Path) -> None:
    tensors = gpt_tensors(1)
    ranks = split(tensors, 2, 1, 1, True)
    for rank, part in ranks.items():
        part["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.tensor([rank[0]], dtype=torch.uint8)
    notes = assert_holds(save_ranks(tmp_path, ranks, "safetensors"), tensors)
    assert "_extra_state of Transformer Engine is no weight, so not read" in notes


@pytest.mark.parametrize("prefix", ["module.", "model.", "model.module."])
def test_names_in_safetensors_may_have_a_prefix(prefix: str, tmp_path: Path) -> None:
    tensors = gpt_tensors(LAYERS)
    ranks = split(tensors, 2, 2, LAYERS, True)
    prefixed = {rank: {prefix + name: tensor for name, tensor in part.items()} for rank, part in ranks.items()}
    assert_holds(save_ranks(tmp_path, prefixed, "safetensors"), tensors)


def test_b7_wrapper_prefixes_are_taken_off_before_the_rules(tmp_path: Path) -> None:
    tensors = gpt_tensors(LAYERS)
    ranks = split(tensors, 2, 2, LAYERS, True)
    wrapped: Ranks = {rank: {"module": {"module": part}} for rank, part in ranks.items()}
    assert_holds(save_ranks(tmp_path, wrapped), tensors)


def test_several_files_of_a_rank_are_read(tmp_path: Path) -> None:
    tensors = gpt_tensors(1)
    for (rank, _), part in split(tensors, 2, 1, 1, True).items():
        folder = tmp_path / f"mp_rank_{rank:02d}"
        folder.mkdir()
        names = sorted(part)
        for number in (0, 1):
            save_file({name: part[name] for name in names[number::2]}, folder / f"model-{number}.safetensors")
    assert_holds(tmp_path, tensors)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_c4_a_bias_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    name = "language_model.encoder.layers.0.self_attention.dense.bias"
    ranks = {(0, 0): {name: torch.tensor([1.0, 2.0])}, (1, 0): {name: torch.tensor([3.0, 4.0])}}
    checkpoint = open_checkpoint(save_ranks(tmp_path, ranks))
    with pytest.raises(
        CheckpointError, match=r"dense\.bias is not the same on the tensor ranks: tensor rank 1 differs"
    ):
        dict(checkpoint.tensors())


def test_c4_a_bias_that_is_equal_on_all_ranks_is_taken_once(tmp_path: Path) -> None:
    name = "language_model.encoder.layers.0.self_attention.dense.bias"
    bias = torch.tensor([1.0, float("nan")])
    actual = open_checkpoint(save_ranks(tmp_path, {(0, 0): {name: bias}, (1, 0): {name: bias}})).tensor(name)
    assert torch.equal(actual, bias) is False
    assert actual[0] == 1
    assert actual.isnan().tolist() == [False, True]


def test_a_tensor_without_a_rule_must_be_equal(tmp_path: Path) -> None:
    ranks = {(rank, 0): {"decoder.layers.0.gate.proj.weight": torch.full((2, 2), float(rank))} for rank in (0, 1)}
    checkpoint = open_checkpoint(save_ranks(tmp_path, ranks))
    with pytest.raises(CheckpointError, match=r"gate\.proj\.weight is not the same .* no joining rule is known for"):
        checkpoint.tensor("decoder.layers.0.gate.proj.weight")


@pytest.mark.parametrize(
    ("tp", "pp", "gone", "message"),
    [
        (4, 1, "mp_rank_02", "no folder mp_rank_02; expected one for each of 4 tensor and 1 pipeline ranks"),
        (2, 2, "mp_rank_00_000", "no folder mp_rank_00_000; expected one for each of 2 tensor and 2 pipeline ranks"),
        (4, 1, "mp_rank_03", "found folders of 3 tensor ranks, but the training's arguments in mp_rank_00 say 4"),
        (
            1,
            2,
            "mp_rank_00_001",
            "found folders of 1 pipeline rank, but the training's arguments in mp_rank_00_000 say 2",
        ),
    ],
)
def test_a_missing_rank_is_named(tp: int, pp: int, gone: str, message: str, tmp_path: Path) -> None:
    save_ranks(tmp_path, split(gpt_tensors(LAYERS), tp, pp, LAYERS, True))
    (tmp_path / gone).rename(tmp_path / "elsewhere")
    assert_refused(tmp_path, message)


def test_ranks_of_another_training_are_refused(tmp_path: Path) -> None:
    save_ranks(tmp_path, split(gpt_tensors(LAYERS), 4, 1, LAYERS, True))
    save_ranks(tmp_path, split(gpt_tensors(LAYERS), 2, 1, LAYERS, True))
    assert_refused(tmp_path, "found folders of 4 tensor ranks", "mp_rank_00 say 2", "remove those of another training")


def test_a_rank_with_a_far_number_is_refused(tmp_path: Path) -> None:
    save_ranks(tmp_path, split(gpt_tensors(1), 1, 1, 1, True))
    (tmp_path / "mp_rank_999999999999").mkdir()
    assert_refused(tmp_path, "no folder mp_rank_01; expected one for each of 1000000000000 tensor")


@pytest.mark.parametrize("name", ["mp_rank_00_000", "mp_rank_0"])
def test_layouts_that_are_mixed_are_refused(name: str, tmp_path: Path) -> None:
    save_ranks(tmp_path, split(gpt_tensors(1), 1, 1, 1, True))
    (tmp_path / name).mkdir()
    assert_refused(tmp_path, "mp_rank_00", name, "named after different layouts")


@pytest.mark.parametrize("name", ["mp_rank_00_000_001", "mp_rank_x"])
def test_ranks_of_expert_parallelism_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    assert_refused(tmp_path, f"{name}: not the folder of a tensor rank", "expert-parallel size 1")


def change(name: str, edit: Callable[[Tensor], Tensor]) -> Callable[[Ranks], None]:
    def apply(ranks: Ranks) -> None:
        ranks[1, 0][name] = edit(ranks[1, 0][name])

    return apply


def drop(name: str) -> Callable[[Ranks], None]:
    return lambda ranks: ranks[1, 0].pop(name)


P = "decoder.layers.0."


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop(P + "input_layernorm.weight"), "mp_rank_00 has decoder.layers.0.input_layernorm.weight, mp_rank_01 does not"),
        (change(P + "input_layernorm.weight", lambda t: t[:-1]), "input_layernorm.weight is [16] torch.float32 in mp_rank_00"),
        (change(P + "self_attention.linear_qkv.weight", lambda t: t[:, :-1]), "expected parts that can be concatenated on dim"),
        (change(P + "self_attention.linear_proj.weight", lambda t: t[:-1]), "concatenated on dimension 1"),
        (change(P + "self_attention.linear_proj.weight", lambda t: t[0]), "linear_proj.weight is [16, 8]"),
        (change(P + "self_attention.linear_qkv.weight", lambda t: t.bfloat16()), "torch.bfloat16 in mp_rank_01"),
        (change(P + "mlp.linear_fc1.weight", lambda t: t[:-1]), "expected as many rows as columns on each rank, or twice"),
        (change(P + "mlp.linear_fc2.weight", lambda t: t[:, :-1]), "expected as many rows as columns on each rank, or twice"),
    ],
    ids=["lacks a tensor", "norm", "qkv width", "proj height", "proj flat", "dtype", "fc1 odd", "fc2 narrow"],
)  # fmt: skip
def test_ranks_that_do_not_fit_each_other_are_refused(
    edit: Callable[[Ranks], None], message: str, tmp_path: Path
) -> None:
    ranks: Ranks = split(gpt_tensors(1), 2, 1, 1, True)
    edit(ranks)
    assert_refused(save_ranks(tmp_path, ranks), message)


def test_a_gated_matrix_without_the_next_one_is_refused(tmp_path: Path) -> None:
    ranks = split(gpt_tensors(1), 2, 1, 1, True)
    for part in ranks.values():
        del part[P + "mlp.linear_fc2.weight"]
    assert_refused(save_ranks(tmp_path, ranks), "linear_fc1.bias without decoder.layers.0.mlp.linear_fc2.weight")


def test_a_stage_that_lacks_a_layer_is_refused(tmp_path: Path) -> None:
    ranks = split(gpt_tensors(LAYERS), 1, 2, LAYERS, True)
    ranks[0, 1] = {re.sub(r"layers\.0", "layers.2", name): tensor for name, tensor in ranks[0, 1].items()}
    assert_refused(
        save_ranks(tmp_path, ranks), "stage 1 of the pipeline has layers 1, 2 of decoder; expected 0 to 1", "from 0"
    )


def test_an_interleaved_pipeline_is_refused(tmp_path: Path) -> None:
    save_ranks(tmp_path, split(gpt_tensors(1), 1, 1, 1, True), model0={}, model1={})
    assert_refused(tmp_path, "model_optim_rng.pt: model0: the layers of an interleaved (virtual) pipeline")


@pytest.mark.parametrize("model", [None, {}, {"a": 1}], ids=["none", "empty", "numbers"])
def test_a_rank_without_weights_is_refused(model: Any, tmp_path: Path) -> None:
    save_ranks(tmp_path, {(0, 0): {}}, model=model)
    assert_refused(tmp_path, "mp_rank_00/model_optim_rng.pt: no ")


def test_a_rank_folder_without_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    assert_refused(tmp_path, "mp_rank_00: expected one file with the weights of this rank", "found none")


@pytest.mark.parametrize("text", ["", "../x", "1e3", "9" * 200, "iter_1"])
def test_a_tracker_that_names_no_iteration_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    assert_refused(tmp_path, "latest_checkpointed_iteration.txt: ")


def test_an_iteration_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    assert_refused(tmp_path, "says 100, but there is no folder iter_0000100")


def test_several_iterations_without_a_tracker_are_refused(tmp_path: Path) -> None:
    for name in ("iter_0000050", "iter_0000100"):
        save_ranks(tmp_path / name, split(gpt_tensors(1), 1, 1, 1, True))
    assert_refused(tmp_path, "iter_0000050, iter_0000100, and no latest_checkpointed_iteration.txt that says which")


def test_a_distributed_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    (tmp_path / "iter_0000100").mkdir()
    (tmp_path / "iter_0000100" / "__0_0.distcp").write_bytes(b"")
    assert_refused(tmp_path, "__0_0.distcp: pieces of a distributed checkpoint", "--ckpt-format torch")


def test_the_state_of_numpys_generator_is_let_through(tmp_path: Path) -> None:
    """As Megatron saves it: arrays that torch alone would refuse."""
    rng = [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(), "cuda": torch.zeros(16)}]
    tensors = gpt_tensors(1)
    save_ranks(tmp_path, split(tensors, 2, 1, 1, True), rng_state=rng)
    with torch.serialization.safe_globals([argparse.Namespace]), pytest.raises(pickle.UnpicklingError, match="numpy"):
        torch.load(tmp_path / "mp_rank_00" / "model_optim_rng.pt", weights_only=True)
    checkpoint = open_checkpoint(tmp_path)
    assert any("rng_state" in note for note in checkpoint.notes)
    assert np.ndarray not in torch.serialization.get_safe_globals()


class Large:
    """Pickles as an array of NumPy that begins with a size of its own."""

    def __reduce__(self) -> Any:
        return np._core.multiarray._reconstruct, (np.ndarray, (2**40,), b"b")


def test_an_array_that_begins_large_is_refused(tmp_path: Path) -> None:
    save_ranks(tmp_path, split(gpt_tensors(1), 1, 1, 1, True), rng_state=Large())
    assert_refused(tmp_path, "model_optim_rng.pt", "expected an empty one")


def test_only_the_command_line_is_let_through(tmp_path: Path) -> None:
    save_ranks(tmp_path, split(gpt_tensors(1), 1, 1, 1, True), args=argparse.Namespace(stream=io.BytesIO(b"1")))
    assert_refused(tmp_path, "model_optim_rng.pt: asks for _io.BytesIO", "nothing of it was read")
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


def test_dicts_nested_without_end_are_refused(tmp_path: Path) -> None:
    wide: Any = torch.ones(1)
    for _ in range(7):
        wide = {f"{i}": wide for i in range(10)}
    deep: Any = torch.ones(1)
    for _ in range(50):
        deep = {"a": deep}
    for number, model in enumerate([wide, deep]):
        save_ranks(tmp_path / str(number), {(0, 0): {}}, model=model)
        assert_refused(tmp_path / str(number), "dicts below model are nested deeper than")


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    save_ranks(tmp_path / "other", split(gpt_tensors(1), 1, 1, 1, True), "safetensors")
    save_ranks(tmp_path / "other", split(gpt_tensors(1), 1, 1, 1, True), "pt")
    for name in ("model.safetensors", "model_optim_rng.pt"):
        folder = tmp_path / name
        (folder / "mp_rank_00").mkdir(parents=True)
        (folder / "mp_rank_00" / name).symlink_to(tmp_path / "other" / "mp_rank_00" / name)
        assert_refused(folder, f"mp_rank_00/{name} leads to", "outside of")
    folder = tmp_path / "whole"
    folder.mkdir()
    (folder / "mp_rank_00").symlink_to(tmp_path / "other" / "mp_rank_00")
    assert_refused(folder, "leads to", "outside of")
