"""Folders of safetensors files: single, sharded, stale, damaged, hostile; told apart from headers alone."""

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tiers.reference.checkpoint import (
    INDEX_NAME,
    MAX_HEADER_BYTES,
    inside,
    open_checkpoint,
    read_header,
    read_text,
)
from tiers.reference.errors import CheckpointError
from tiers.reference.testing.tiny import save_model

TENSORS = {f"layer.{i}.weight": torch.arange(12.0).reshape(3, 4) + 100 * i for i in range(6)}
SHARDS = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Three shards with an index."""
    return save_model(tmp_path / "model", {}, TENSORS, shards=3)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """One file, no index."""
    return save_model(tmp_path / "model", {}, TENSORS)


def write_raw(file: Path, header: Any, data: bytes = b"") -> Path:
    """A file whose header is any JSON."""
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def assert_holds(folder: Path, expected: dict[str, Tensor]) -> None:
    actual = dict(open_checkpoint(folder).tensors())
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def assert_refused(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"


def test_a_single_file_is_read(single: Path) -> None:
    assert_holds(single, TENSORS)
    assert open_checkpoint(single).notes == []


def test_shards_are_read_through_their_index(sharded: Path) -> None:
    assert_holds(sharded, TENSORS)
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.notes == []
    assert {info.file.name for info in checkpoint.infos.values()} == set(SHARDS)


def test_shards_are_read_without_an_index(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    assert_holds(sharded, TENSORS)


def test_tensors_come_file_by_file_in_a_fixed_order(sharded: Path) -> None:
    first = [name for name, _ in open_checkpoint(sharded).tensors()]
    assert first == [name for name, _ in open_checkpoint(sharded).tensors()]
    files = [open_checkpoint(sharded).infos[name].file for name in first]
    assert files == sorted(files)


def test_size_counts_every_tensor(single: Path) -> None:
    assert open_checkpoint(single).bytes == 6 * 12 * 4


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (3, 4)), (torch.bfloat16, (5,)), (torch.float16, (2, 3, 4)), (torch.float64, ()),
        (torch.int64, (2,)), (torch.uint8, (7,)), (torch.bool, (2, 2)), (torch.float8_e4m3fn, (4,)),
        (torch.float32, (0, 4)),
    ],
    ids=str,
)  # fmt: skip
def test_headers_tell_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    save_file({"x": torch.zeros(shape, dtype=dtype)}, tmp_path / "model.safetensors")
    info = open_checkpoint(tmp_path).infos["x"]
    assert (info.dtype, info.shape, info.file) == (dtype, shape, tmp_path / "model.safetensors")


def test_file_metadata_is_no_tensor(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_holds(tmp_path, TENSORS)


# ---- the index and the files disagree -------------------------------------------------------------------------------


def test_a_stale_index_is_read_past_if_the_files_hold_everything(sharded: Path) -> None:
    # Saved again with another number of shards: the old index stays behind.
    for name in SHARDS:
        (sharded / name).unlink()
    save_file(TENSORS, sharded / "model.safetensors")
    assert_holds(sharded, TENSORS)
    (note,) = open_checkpoint(sharded).notes
    assert f"{INDEX_NAME} is stale" in note
    assert "6 tensors were found in the 1 files" in note


def test_an_index_that_names_the_wrong_one_of_two_shards_still_finds_its_tensors(sharded: Path) -> None:
    edit_index(sharded, lambda index: index.update({"layer.0.weight": SHARDS[2]}))
    assert_holds(sharded, TENSORS)


def test_a_missing_shard_is_named_with_its_tensors(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    assert_refused(
        sharded, INDEX_NAME, f"names {SHARDS[1]}, which is not there", "layer.1.weight, layer.4.weight",
        "Copy the missing shards",
    )  # fmt: skip


def test_a_missing_shard_with_many_tensors_is_cut_in_the_message(tmp_path: Path) -> None:
    tensors = {f"layer.{i:02d}.weight": torch.zeros(1) for i in range(40)}
    folder = save_model(tmp_path / "model", {}, tensors, shards=2)
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert_refused(folder, "layer.00.weight", "and 16 more")


def test_all_shards_missing_is_refused(sharded: Path) -> None:
    for name in SHARDS:
        (sharded / name).unlink()
    assert_refused(sharded, f"names {SHARDS[0]}, which is not there")


def test_a_tensor_that_no_shard_has_is_refused(sharded: Path) -> None:
    edit_index(sharded, lambda index: index.update({"ghost.weight": SHARDS[0]}))
    assert_refused(sharded, f"says {SHARDS[0]} holds ghost.weight", "no file in the folder holds ghost.weight")


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.safetensors/", 3, "x\0"]
)
def test_an_index_that_points_elsewhere_is_refused(sharded: Path, file: Any) -> None:
    # The file exists, so only the rule keeps it from being read.
    save_file(TENSORS, sharded.parent / "x.safetensors")
    edit_index(sharded, lambda index: index.update({"layer.0.weight": file}))
    assert_refused(sharded, INDEX_NAME, f"layer.0.weight is said to lie in {file!r}", "plain name of a file")


@pytest.mark.parametrize("file", ["..", "", "."])
def test_an_index_that_points_to_a_folder_is_refused(sharded: Path, file: str) -> None:
    edit_index(sharded, lambda index: index.update({"ghost.weight": file}))
    assert_refused(sharded, INDEX_NAME, f"ghost.weight is said to lie in {file!r}", "plain name of a file")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', "null", "{", "[" * 100_000],
    ids=["empty", "list", "no weight_map", "weight_map a list", "weight_map null", "null", "cut", "too deep"],
)  # fmt: skip
def test_a_file_that_is_no_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / INDEX_NAME).write_text(text)
    assert_refused(sharded, INDEX_NAME, "not a weight index", "expected an object weight_map")


def test_files_that_are_not_in_the_index_are_left_out_with_a_note(sharded: Path) -> None:
    save_file({"layer.0.weight": torch.ones(1), "other": torch.ones(1)}, sharded / "consolidated.safetensors")
    assert_holds(sharded, TENSORS)
    assert open_checkpoint(sharded).notes == [f"not in {INDEX_NAME}, so not read: consolidated.safetensors"]


def test_damage_in_a_file_that_is_not_in_the_index_does_not_matter(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").write_bytes(b"")
    assert_holds(sharded, TENSORS)


def test_a_tensor_in_two_files_without_index_is_refused(single: Path) -> None:
    save_file({"layer.0.weight": torch.ones(3, 4)}, single / "copy.safetensors")
    assert_refused(
        single, "layer.0.weight lies in both copy.safetensors and model.safetensors", "expected it once", INDEX_NAME
    )


# ---- damaged files --------------------------------------------------------------------------------------------------


def test_no_folder_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "nowhere: no such folder", "expected a model folder")


def test_no_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert_refused(tmp_path, "no *.safetensors file", "beside config.json")


@pytest.mark.parametrize("cut", [1, 100, 287], ids="without the last {} bytes".format)
def test_a_truncated_file_is_refused(single: Path, cut: int) -> None:
    file = single / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    assert_refused(
        single, f"model.safetensors: {len(whole) - cut} bytes", f"end at byte {len(whole)}", "the file is cut short"
    )


def test_a_file_that_is_too_long_is_refused(single: Path) -> None:
    # The library refuses it too, but only when the tensors are read.
    file = single / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole + b"xx")
    assert_refused(single, f"{len(whole) + 2} bytes", f"end at byte {len(whole)}", "nothing behind them")


@pytest.mark.parametrize("content", [b"", b"1234567"], ids=["empty", "7 bytes"])
def test_a_file_without_a_header_is_refused(single: Path, content: bytes) -> None:
    (single / "model.safetensors").write_bytes(content)
    assert_refused(single, f"model.safetensors: {len(content)} bytes, but its header alone needs 8", "cut short")


def test_a_file_cut_within_its_header_is_refused(single: Path) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])
    assert_refused(single, "50 bytes, but its header alone needs", "cut short")


@pytest.mark.parametrize("length", [2**64 - 1, 2**40, MAX_HEADER_BYTES + 1], ids=["2^64 - 1", "2^40", "over the limit"])
def test_a_huge_header_is_refused_without_reading_it(single: Path, length: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + b"{}")
    # Sparse, and long enough to hold the header of the last case.
    os.truncate(file, 2 * MAX_HEADER_BYTES)
    assert_refused(single, f"its header would be {length} bytes long; expected at most {MAX_HEADER_BYTES}")


@pytest.mark.parametrize(
    "text",
    ["version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "<!DOCTYPE html>"],
    ids=["LFS pointer", "page"],
)
def test_a_text_in_place_of_weights_is_refused(single: Path, text: str) -> None:
    (single / "model.safetensors").write_text(text)
    assert_refused(single, "model.safetensors: not a safetensors file", "Is it a Git LFS pointer or a web page?")


@pytest.mark.parametrize(
    "header", [b"not json at all", b"\xff\xfe\x00\x01", b'{"a": ', b"[" * 100_000],
    ids=["text", "bytes", "cut", "too deep"],
)  # fmt: skip
def test_a_header_that_is_no_json_is_refused(single: Path, header: bytes) -> None:
    (single / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert_refused(single, "model.safetensors: not a safetensors file, its header is no JSON")


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": None},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": None, "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}},
    ],
    ids=["list", "null", "no offsets", "unknown dtype", "dtype a list", "no shape", "one offset", "shape of text"],
)
def test_a_header_entry_that_cannot_be_read_is_refused(tmp_path: Path, header: Any) -> None:
    write_raw(tmp_path / "model.safetensors", header, b"1234")
    assert_refused(tmp_path, "model.safetensors: header entry cannot be read")


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [([2], [0, 4]), ([-1], [0, 4]), ([2**62, 4], [0, 0]), ([1], [4, 0]), ([1], [-4, 0]), ([2**70], [0, 4])],
    ids=["too few bytes", "negative size", "size overflows", "ends before it starts", "negative start", "huge size"],
)
def test_a_shape_that_does_not_fit_its_bytes_is_refused(tmp_path: Path, shape: Any, offsets: Any) -> None:
    write_raw(tmp_path / "model.safetensors", {"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}, b"1234")
    assert_refused(tmp_path, "model.safetensors: a has shape", "F32")


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([0, 4], [0, 4], "b starts at byte 0 of the data; expected 4"),
        ([0, 4], [8, 12], "b starts at byte 8 of the data; expected 4"),
        ([4, 8], [8, 12], "a starts at byte 4 of the data; expected 0"),
    ],
    ids=["overlap", "gap between", "gap in front"],
)
def test_tensors_that_do_not_follow_each_other_are_refused(tmp_path: Path, a: Any, b: Any, message: str) -> None:
    entry = {"dtype": "F32", "shape": [1]}
    write_raw(
        tmp_path / "model.safetensors",
        {"a": {**entry, "data_offsets": a}, "b": {**entry, "data_offsets": b}},
        b"123456789012",
    )
    assert_refused(tmp_path, "model.safetensors", message)


def test_a_damaged_shard_is_named(sharded: Path) -> None:
    file = sharded / SHARDS[2]
    file.write_bytes(file.read_bytes()[:-1])
    assert_refused(sharded, SHARDS[2], "cut short")


def test_a_broken_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "nowhere")
    assert_refused(tmp_path, "model.safetensors: cannot be read")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert_refused(tmp_path, "model.safetensors: cannot be read")


def test_a_header_says_nothing_of_other_files(sharded: Path) -> None:
    assert read_header(sharded / SHARDS[0]).keys() == {"layer.0.weight", "layer.3.weight"}


# ---- one tensor, many tensors, other weights beside them -------------------------------------------------------------


def test_one_tensor_is_read_by_itself(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.tensor(name), tensor)


def test_a_tensor_that_is_not_there_is_named(single: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor ghost; the folder holds layer.0.weight, .* and 2 more"):
        open_checkpoint(single).tensor("ghost")


def test_renamed_tensors_are_read_by_their_new_names(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded).renamed({"b": "layer.1.weight", "a": "layer.4.weight"}, ["renamed"])
    assert [name for name, _ in checkpoint.tensors()] == ["a", "b"]
    assert torch.equal(checkpoint.tensor("b"), TENSORS["layer.1.weight"])
    assert torch.equal(dict(checkpoint.tensors())["a"], TENSORS["layer.4.weight"])
    assert checkpoint.notes == ["renamed"]


def test_b11_a_second_naming_scheme_without_an_index_is_left_out_with_a_note(single: Path) -> None:
    save_file({"layers.0.attention.wk.weight": torch.ones(1)}, single / "consolidated.safetensors")
    assert_holds(single, TENSORS)
    (note,) = open_checkpoint(single).notes
    assert note == "not read, since the folder has model.safetensors: consolidated.safetensors"


def test_a_consolidated_file_by_itself_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "consolidated.safetensors")
    assert_holds(tmp_path, TENSORS)


def test_b11_weights_in_another_form_beside_safetensors_are_left_out_with_a_note(single: Path) -> None:
    for name in ("pytorch_model.bin", "model.gguf", "training_args.bin", "optimizer.pt"):
        (single / name).write_bytes(b"damaged")
    (single / "mp_rank_00").mkdir()
    (single / "global_step10").mkdir()
    assert_holds(single, TENSORS)
    assert open_checkpoint(single).notes == [
        "not read, since the folder has *.safetensors: pytorch_model.bin, model.gguf, mp_rank_00"
    ]


def test_b7_wrapper_prefixes_are_taken_off(tmp_path: Path) -> None:
    wrapped = {f"_orig_mod.module.{name}" if i else name: tensor for i, (name, tensor) in enumerate(TENSORS.items())}
    folder = save_model(tmp_path / "model", {}, wrapped, shards=2)
    assert_holds(folder, TENSORS)
    assert open_checkpoint(folder).notes == ["took the wrapper prefix module, _orig_mod off 5 of 6 names"]


def test_b3_an_unmerged_adapter_is_refused(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    assert_refused(tmp_path, "unmerged adapter", name, "merge_and_unload")


def test_headers_of_a_70b_model_are_read_in_no_time(tmp_path: Path) -> None:
    # Holes in place of data; anything that read tensors would take minutes.
    shapes = [
        [8192, 8192],
        [1024, 8192],
        [1024, 8192],
        [8192, 8192],
        [28672, 8192],
        [28672, 8192],
        [8192, 28672],
        [8192],
    ]
    names: list[list[str]] = [[] for _ in range(30)]
    for layer in range(80):
        names[layer % 30] += [f"model.layers.{layer}.{i}.weight" for i in range(len(shapes))]
    index = {}
    for shard, part in enumerate(names):
        file = tmp_path / f"model-{shard + 1:05d}-of-00030.safetensors"
        header, end = {}, 0
        for name in part:
            shape = shapes[int(name.split(".")[3])]
            start, end = end, end + 2 * torch.Size(shape).numel()
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        write_raw(file, header)
        os.truncate(file, file.stat().st_size + end)
        index.update(dict.fromkeys(part, file.name))
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": index}))
    start_s = time.perf_counter()
    checkpoint = open_checkpoint(tmp_path)
    assert time.perf_counter() - start_s < 2
    assert checkpoint.bytes == 80 * 2 * sum(torch.Size(shape).numel() for shape in shapes)


# ---- nothing outside of the folder, and nothing that never ends ------------------------------------------------------


def hub_cache(tmp_path: Path) -> Path:
    """A snapshot in the cache of the Hugging Face hub: links into blobs."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0f"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file(TENSORS, blobs / "1234abcd")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234abcd")
    return snapshot


def test_the_cache_of_the_hub_is_read_through_its_links(tmp_path: Path) -> None:
    assert_holds(hub_cache(tmp_path), TENSORS)


def test_a_link_to_a_snapshot_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(hub_cache(tmp_path))
    assert_holds(tmp_path / "mine", TENSORS)


def test_a_link_within_the_folder_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "weights")
    (tmp_path / "model.safetensors").symlink_to("weights")
    assert_holds(tmp_path, TENSORS)


@pytest.mark.parametrize("target", ["../../../elsewhere", "../../elsewhere", "../../blobs/../../elsewhere", "../1f/x"])
def test_a_link_out_of_a_snapshot_is_refused(target: str, tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    file = snapshot / "model.safetensors"
    file.unlink()
    file.symlink_to(target)
    (snapshot.parent / "1f").mkdir()
    save_file(TENSORS, (snapshot / target).resolve())
    assert_refused(snapshot, "model.safetensors leads to", "outside of", "Copy the file here")


def test_a_blob_that_leads_on_is_refused(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    blob = tmp_path / "models--a--b" / "blobs" / "1234abcd"
    blob.rename(tmp_path / "elsewhere")
    blob.symlink_to(tmp_path / "elsewhere")
    assert_refused(snapshot, "model.safetensors leads to", "outside of")


def test_a_link_out_of_the_folder_is_refused(single: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(single / "model.safetensors")
    assert_refused(folder, "model.safetensors leads to", "outside of", "Copy the file here")


def test_an_index_that_is_a_link_out_of_the_folder_is_refused(sharded: Path, tmp_path: Path) -> None:
    (sharded / INDEX_NAME).rename(tmp_path / "index")
    (sharded / INDEX_NAME).symlink_to(tmp_path / "index")
    assert_refused(sharded, f"{INDEX_NAME} leads to", "outside of")


def test_a_link_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    assert_refused(tmp_path, "model.safetensors: cannot be read")


@pytest.mark.parametrize("name", ["model.safetensors", INDEX_NAME, "pytorch_model.bin", "model.gguf"])
def test_a_pipe_is_refused_rather_than_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    assert_refused(tmp_path, f"{name}: cannot be read, it is no regular file")


def test_inside_returns_a_path_that_stays(single: Path) -> None:
    assert inside(single, single / "config.json") == single / "config.json"
    with pytest.raises(CheckpointError, match="outside of"):
        inside(single, single / ".." / "config.json")


def test_a_text_is_read_within_bounds(single: Path) -> None:
    assert read_text(single, single / "config.json") == "{}"
    with pytest.raises(CheckpointError, match=r"config.json: 2 bytes; expected at most 1"):
        read_text(single, single / "config.json", limit=1)
    (single / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"config.json: no UTF-8 text"):
        read_text(single, single / "config.json")


def test_a_name_of_any_length_makes_a_short_message(single: Path) -> None:
    save_file({"a" * 100_000: torch.ones(1)}, single / "copy.safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(single).tensor("ghost")
    assert len(str(caught.value)) < 2000
