"""Files of torch.save: found, unnested, read from headers alone; nothing in them is run."""

import argparse
import contextlib
import io
import json
import os
import pickle
import resource
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tiers.reference.checkpoint import open_checkpoint
from tiers.reference.errors import CheckpointError
from tiers.reference.torch_files import INDEX_NAME, candidates

TENSORS = {f"layer.{i}.weight": torch.arange(12.0).reshape(3, 4) + 100 * i for i in range(6)}


def save(folder: Path, content: Any, name: str = "pytorch_model.bin", legacy: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / name, _use_new_zipfile_serialization=not legacy)
    return folder


def save_sharded(folder: Path, shards: int) -> Path:
    index = {}
    for shard in range(shards):
        name = f"pytorch_model-{shard + 1:05d}-of-{shards:05d}.bin"
        part = dict(list(TENSORS.items())[shard::shards])
        save(folder, part, name)
        index.update(dict.fromkeys(part, name))
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def assert_holds(folder: Path, expected: dict[str, Tensor]) -> list[str]:
    """The notes, if the tensors are right."""
    checkpoint = open_checkpoint(folder)
    actual = dict(checkpoint.tensors())
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        info = checkpoint.infos[name]
        assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape))
        assert actual[name].is_contiguous()
        assert not actual[name].requires_grad
        assert torch.equal(actual[name], tensor), name
        assert torch.equal(checkpoint.tensor(name), tensor), name
    return checkpoint.notes


def assert_refused(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"


# ---- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_single_file_is_read(name: str, legacy: bool, tmp_path: Path) -> None:
    assert assert_holds(save(tmp_path, TENSORS, name, legacy), TENSORS) == []


@pytest.mark.parametrize("with_index", [True, False], ids=["index", "no index"])
def test_shards_are_read(with_index: bool, tmp_path: Path) -> None:
    folder = save_sharded(tmp_path, 3)
    if not with_index:
        (folder / INDEX_NAME).unlink()
    assert assert_holds(folder, TENSORS) == []


def test_d1_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save_sharded(tmp_path, 3)
    (folder / "pytorch_model-00002-of-00003.bin").unlink()
    assert_refused(folder, INDEX_NAME, "names pytorch_model-00002-of-00003.bin", "layer.1.weight, layer.4.weight")


def test_d4_a_stale_index_is_read_past(tmp_path: Path) -> None:
    folder = save_sharded(tmp_path, 3)
    for file in folder.glob("*.bin"):
        file.unlink()
    save(folder, {**TENSORS, "step": 3})
    stale, beside = assert_holds(folder, TENSORS)
    assert f"{INDEX_NAME} is stale" in stale
    assert beside == "pytorch_model.bin: no weights, so not read: step"


@pytest.mark.parametrize("name", ["../x.bin", "/x.bin", "a/b.bin", "..", "x\0.bin"])
def test_an_index_that_points_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    folder = save_sharded(tmp_path, 2)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"layer.0.weight": name}}))
    assert_refused(folder, INDEX_NAME, "layer.0.weight is said to lie in", "plain name of a file")


@pytest.mark.parametrize("path", [(key,) for key in ("model", "state_dict", "module", "model_state_dict")] + [("model", "state_dict")])  # fmt: skip
def test_a_nested_state_dict_is_found(path: tuple[str, ...], tmp_path: Path) -> None:
    content: Any = OrderedDict(TENSORS)
    for key in reversed(path):
        content = {key: content, "epoch": 3}
    notes = assert_holds(save(tmp_path, content, "model.pt"), TENSORS)
    assert notes == ["model.pt: no weights, so not read: epoch"]


def test_optimizer_state_beside_weights_is_left_out_with_a_note(tmp_path: Path) -> None:
    content = {"model": TENSORS, "optimizer": {"state": {}, "param_groups": []}, "lr_scheduler": {}, "epoch": 1, 5: 6}
    assert assert_holds(save(tmp_path, content, "model.pt"), TENSORS) == [
        "model.pt: training state, so not read: optimizer, lr_scheduler",
        "model.pt: no weights, so not read: epoch, a key of type int",
    ]


def test_training_state_in_files_of_its_own_is_left_out_with_a_note(tmp_path: Path) -> None:
    save(tmp_path, TENSORS)
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        (tmp_path / name).write_bytes(b"never opened")
    (tmp_path / "consolidated.00.pth").write_bytes(b"never opened")
    assert assert_holds(tmp_path, TENSORS) == [
        "not read, since the folder has pytorch_model.bin: consolidated.00.pth",
        "training state, so not read: optimizer.pt, rng_state_0.pth, scheduler.pt, training_args.bin",
    ]
    assert candidates(tmp_path) == [tmp_path / "pytorch_model.bin"]


def test_b11_safetensors_come_first(tmp_path: Path) -> None:
    save(tmp_path, {"other": torch.ones(1)})
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert assert_holds(tmp_path, TENSORS) == ["not read, since the folder has *.safetensors: pytorch_model.bin"]


def test_tied_and_strided_tensors_and_parameters_are_read(tmp_path: Path) -> None:
    table = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    content = {"embed.weight": table, "head.weight": table, "turned": table.T, "row": table[1], "scalar": table.sum()}
    expected = {name: tensor.detach().clone() for name, tensor in content.items()}
    assert_holds(save(tmp_path, content), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.float8_e4m3fn])
def test_headers_tell_dtype_and_shape(dtype: torch.dtype, tmp_path: Path) -> None:
    info = open_checkpoint(save(tmp_path, {"x": torch.zeros(2, 3, dtype=dtype)})).infos["x"]
    assert (info.dtype, info.shape, info.file) == (dtype, (2, 3), tmp_path / "pytorch_model.bin")


def test_b7_wrapper_prefixes_are_taken_off(tmp_path: Path) -> None:
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in TENSORS.items()}
    assert assert_holds(save(tmp_path, {"model": wrapped}), TENSORS) == [
        "took the wrapper prefix module, _orig_mod off 6 of 6 names"
    ]


def test_headers_take_no_memory(tmp_path: Path) -> None:
    # A file with a hole of 4 GiB, from a tensor that no memory was touched for.
    with torch.serialization.skip_data():
        save(tmp_path, {"x": torch.empty(2**20, 2**10)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.infos["x"].shape, checkpoint.bytes) == ((2**20, 2**10), 2**32)
    assert checkpoint.tensor("x")[12345, 67] == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024, "KiB"


# ---- what is refused ------------------------------------------------------------------------------------------------


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.file),)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_code_in_a_file_is_not_run(legacy: bool, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", {"x": torch.ones(1), "trap": Trap(tmp_path / "sprung")}, legacy=legacy)
    assert_refused(folder, "pytorch_model.bin: asks for posix.mknod", "nothing of it was read", "save_file")
    assert not (tmp_path / "sprung").exists()


def test_code_in_a_plain_pickle_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Trap(tmp_path / "sprung"), protocol=2))
    assert_refused(tmp_path, "model.pt")
    assert not (tmp_path / "sprung").exists()


def test_every_class_that_a_file_wants_is_named(tmp_path: Path) -> None:
    content = {"x": torch.ones(1), "args": argparse.Namespace(a=1), "stream": io.BytesIO(b"1")}
    assert_refused(save(tmp_path, content), "asks for _io.BytesIO, argparse.Namespace to be imported")


def test_b9_a_partition_of_zero_is_refused(tmp_path: Path) -> None:
    save(
        tmp_path,
        {"module": {"k_proj.weight": torch.empty(0), "norm.weight": torch.ones(2)}},
        "mp_rank_00_model_states.pt",
    )
    assert_refused(tmp_path, "mp_rank_00_model_states.pt: k_proj.weight has no elements", "ZeRO-3", "zero_to_fp32.py")


def test_a_folder_of_zero_partitions_is_refused(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, "mp_rank_00_model_states.pt")
    save(tmp_path, TENSORS, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert_refused(tmp_path, "partitions of DeepSpeed ZeRO", "zero_to_fp32.py")


def test_a_folder_of_a_deepspeed_training_is_refused(tmp_path: Path) -> None:
    (tmp_path / "global_step100").mkdir()
    (tmp_path / "latest").write_text("global_step100")
    (tmp_path / "zero_to_fp32.py").write_text("")
    assert_refused(tmp_path, "global_step100 holds the state of a DeepSpeed training", "zero_to_fp32.py")


def test_weights_beside_the_state_of_a_deepspeed_training_are_read(tmp_path: Path) -> None:
    (tmp_path / "global_step100").mkdir()
    assert_holds(save(tmp_path, TENSORS), TENSORS)


def test_a_distributed_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    save(tmp_path, {"args": 1}, "common.pt")
    assert_refused(tmp_path, "__0_0.distcp: pieces of a distributed checkpoint", "dcp_to_torch")


@pytest.mark.parametrize("name", ["optimizer.pt", "model.pt"])
def test_optimizer_state_by_itself_is_refused(name: str, tmp_path: Path) -> None:
    state = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict()
    assert_refused(save(tmp_path, state, name), "optimizer", "only", "expected weights")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.ones(2), "holds Tensor; expected a state dict"),
        ([torch.ones(2)], "holds list; expected a state dict"),
        ({}, "no tensor in it; expected"),
        ({"epoch": 1}, "no tensor in it, only epoch"),
        ({"a": {"x": torch.ones(1)}}, "no tensor in it, only a; expected a state dict of name to tensor, by itself or"),
        ({"model": TENSORS, "state_dict": TENSORS}, "model and state_dict both look like the weights"),
        ({"x": torch.ones(2, 2).to_sparse()}, "x is no plain tensor (Tensor, torch.sparse_coo"),
        ({"x": torch.empty(2, device="meta")}, "x is no plain tensor"),
        ({"x": torch.ones(1).expand(10**9)}, "x has shape [1000000000], so 4000000000 bytes, but the file has"),
    ],
    ids=["tensor", "list", "empty", "numbers", "unknown nest", "two nests", "sparse", "meta", "expanded"],
)
def test_a_file_without_a_state_dict_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    assert_refused(save(tmp_path, content), f"pytorch_model.bin: {message}")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, "step1.pt")
    save(tmp_path, TENSORS, "step2.pt")
    assert_refused(tmp_path, "layer.0.weight lies in both step1.pt and step2.pt", "expected it once")


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_a_truncated_file_is_refused(cut: int, tmp_path: Path) -> None:
    file = save(tmp_path, TENSORS) / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-cut])
    assert_refused(tmp_path, "pytorch_model.bin: its table of contents cannot be read", "cut short")


@pytest.mark.parametrize("cut", [1, 100, 400])
def test_a_truncated_legacy_file_is_refused(cut: int, tmp_path: Path) -> None:
    file = save(tmp_path, TENSORS, legacy=True) / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-cut])
    assert_refused(tmp_path, "pytorch_model.bin: not a file of torch.save that can be read")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        b"\x80\x02.",
        b"version https://git-lfs.github.com/spec/v1\n",
        b"<!DOCTYPE html>",
        b"\xff" * 99,
    ],
    ids=["empty", "zip magic", "empty pickle", "LFS pointer", "page", "bytes"],
)
def test_a_file_that_is_something_else_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    assert_refused(tmp_path, "pytorch_model.bin")


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_damaged_file_is_refused_or_read(seed: int, legacy: bool, tmp_path: Path) -> None:
    file = save(tmp_path, {"model": TENSORS, "epoch": 3}, legacy=legacy) / "pytorch_model.bin"
    data = bytearray(file.read_bytes())
    generator = torch.Generator().manual_seed(seed)
    for at in torch.randint(len(data), (8,), generator=generator).tolist():
        data[at] = int(torch.randint(256, (1,), generator=generator))
    file.write_bytes(data)
    # Any other error fails the test.
    with contextlib.suppress(CheckpointError):
        assert dict(open_checkpoint(tmp_path).tensors())


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    # torch would map the compressed bytes as if they were numbers.
    file = save(tmp_path, {"x": torch.zeros(10_000)}) / "pytorch_model.bin"
    with zipfile.ZipFile(file) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    assert_refused(tmp_path, "pytorch_model.bin: entry", "is compressed", "Save the weights again")


def test_an_archive_that_torch_did_not_write_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("readme", "hello")
    assert_refused(tmp_path, "pytorch_model.bin: not a file of torch.save that can be read")


def test_a_torchscript_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", b"\x80\x02}.")
        archive.writestr("model/constants.pkl", b"\x80\x02).")
    assert_refused(tmp_path, "model.pt: a program of TorchScript; expected a state dict", "torch.jit.load")


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "other", TENSORS)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "pytorch_model.bin").symlink_to("../other/pytorch_model.bin")
    assert_refused(tmp_path / "model", "pytorch_model.bin leads to", "outside of")


def test_the_cache_of_the_hub_is_read_through_its_links(tmp_path: Path) -> None:
    save(tmp_path / "blobs", TENSORS, "1234abcd")
    snapshot = tmp_path / "snapshots" / "0f"
    snapshot.mkdir(parents=True)
    (snapshot / "pytorch_model.bin").symlink_to("../../blobs/1234abcd")
    assert_holds(snapshot, TENSORS)
