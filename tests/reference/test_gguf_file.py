"""GGUF files: headers parsed here, quantised tensors taken apart by the package gguf."""

import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.reference.checkpoint import open_checkpoint
from tiers.reference.errors import CheckpointError
from tiers.reference.gguf_file import MAX_ENTRIES, metadata

F32, F16, Q4_0, Q8_0, Q8_1, BF16 = 0, 1, 2, 8, 9, 30
KINDS = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16, torch.int32: 26}
TENSORS = {
    "token_embd.weight": torch.arange(24.0).reshape(6, 4),
    "blk.0.attn_q.weight": torch.arange(16.0).reshape(4, 4).to(torch.bfloat16),
    "blk.0.ffn_up.weight": torch.arange(40.0).reshape(10, 4).to(torch.float16),
    "output_norm.weight": torch.ones(4),
    "stacked": torch.arange(24.0).reshape(2, 3, 4),
}


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(item: Any) -> bytes:
    """Type and value."""
    if isinstance(item, list):
        parts = [value(part) for part in item]
        return struct.pack("<I", 9) + parts[0][:4] + struct.pack("<Q", len(item)) + b"".join(p[4:] for p in parts)
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    return struct.pack("<If", 6, item) if isinstance(item, float) else struct.pack("<II", 4, item)


def entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def write(file: Path, tensors: dict[str, Tensor], alignment: int = 32, **settings: Any) -> Path:
    """An independent writer, of types that are not quantised."""
    settings = {"general.architecture": "llama", "general.alignment": alignment, **settings}
    entries, data = b"", b""
    for name, tensor in tensors.items():
        data += bytes(-len(data) % alignment)
        entries += entry(name, tuple(tensor.shape), KINDS[tensor.dtype], len(data))
        data += tensor.contiguous().view(torch.uint8).numpy().tobytes()
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings))
    header += b"".join(string(name) + value(item) for name, item in settings.items()) + entries
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(header + bytes(-len(header) % alignment) + data)
    return file.parent


def write_header(folder: Path, tensors: bytes, data: bytes = bytes(64), count: int = 1, version: int = 3) -> Path:
    """A file with these entries and no metadata."""
    header = b"GGUF" + struct.pack("<IQQ", version, count, 0) + tensors
    (folder / "model.gguf").write_bytes(header + bytes(-len(header) % 32) + data)
    return folder


def assert_holds(folder: Path, expected: dict[str, Tensor]) -> None:
    checkpoint = open_checkpoint(folder)
    actual = dict(checkpoint.tensors())
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        info = checkpoint.infos[name]
        assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(actual[name], tensor), name
        assert torch.equal(checkpoint.tensor(name), tensor), name


def assert_refused(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"


@pytest.mark.parametrize("alignment", [32, 64])
def test_a_file_is_read(alignment: int, tmp_path: Path) -> None:
    assert_holds(write(tmp_path / "model.gguf", TENSORS, alignment), TENSORS)
    assert open_checkpoint(tmp_path).notes == []


def test_a_file_that_is_not_quantised_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert_holds(write(tmp_path / "model.gguf", TENSORS), TENSORS)


def test_a_split_file_is_read(tmp_path: Path) -> None:
    for part in range(3):
        write(tmp_path / f"m-{part + 1:05d}-of-00003.gguf", dict(list(TENSORS.items())[part::3]), part=part)
    assert_holds(tmp_path, TENSORS)
    assert metadata(tmp_path)["part"] == 0


def test_metadata_leaves_out_the_vocabulary(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "llama.block_count": 2,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ x }}",
        "llama.attention.head_count_kv": [2, 4],
        "tags": ["a", "b"],
        "tokenizer.ggml.tokens": [f"token {i}" for i in range(2000)],
        "tokenizer.ggml.scores": [0.5] * 2000,
        "lists": [[1, 2], [3, 4]],
        "last": 7,
    }
    write(tmp_path / "model.gguf", TENSORS, **settings)
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "lists"):
        del settings[name]
    assert metadata(tmp_path) == {"general.architecture": "llama", "general.alignment": 32, **settings}
    assert_holds(tmp_path, TENSORS)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q5_1"])
def test_quantised_tensors_are_read_as_float32(name: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="quantised types are written and read with the package gguf")
    kind = gguf.GGMLQuantizationType[name]
    exact = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    data = gguf.quants.quantize(exact.numpy(), kind)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(2)
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", exact[0, 0].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    assert (expected - exact).abs().max() < 0.6
    assert_holds(tmp_path, {"blk.0.ffn_up.weight": expected, "output_norm.weight": exact[0, 0]})
    assert open_checkpoint(tmp_path).notes == [f"quantised tensors are read as float32: 1 of {name}"]
    assert metadata(tmp_path)["llama.block_count"] == 2


def test_a_quantised_file_without_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    write_header(tmp_path, entry("x", (2, 32), Q8_0, 0), bytes(68))
    assert_refused(tmp_path, "model.gguf: x is quantised", "pip install 'vllm-tiers[demo]'")


@pytest.mark.parametrize(("kind", "name"), [(Q8_1, "Q8_1"), (4, "unknown"), (2**32 - 1, "unknown")])
def test_a_type_that_cannot_be_taken_apart_is_refused(kind: int, name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="it knows the types")
    write_header(tmp_path, entry("x", (2, 32), kind, 0), bytes(1000))
    assert_refused(tmp_path, f"x is of type {kind} ({name})", "convert the model to Q8_0")


def test_several_models_are_refused(tmp_path: Path) -> None:
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf"):
        write(tmp_path / name, TENSORS)
    assert_refused(tmp_path, "m-Q4_0.gguf, m-Q8_0.gguf are different models", "expected one")
    with pytest.raises(CheckpointError, match="different models"):
        metadata(tmp_path)


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_d1_a_missing_part_is_named(gone: int, tmp_path: Path) -> None:
    for part in {1, 2, 3} - {gone}:
        write(tmp_path / f"m-{part:05d}-of-00003.gguf", {f"x{part}": torch.ones(1)})
    assert_refused(
        tmp_path, "2 files, but their names say 3", f"no m-{gone:05d}-of-00003.gguf", "Copy the missing parts"
    )


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    for part in (1, 2):
        write(tmp_path / f"m-{part:05d}-of-00002.gguf", TENSORS)
    assert_refused(tmp_path, "token_embd.weight lies in both m-00001-of-00002.gguf and m-00002-of-00002.gguf")


def test_a_folder_without_a_file_has_no_metadata(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.gguf file"):
        metadata(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF file"),
        (b"GGUF", "not a GGUF file"),
        (b"<!DOCTYPE html>", "not a GGUF file, it starts with b'<!DO'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF of version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF of big-endian"),
        (b"GGUF" + struct.pack("<IQ", 3, 0), "its header goes on for 8 bytes after byte 16"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), f"expected at most {MAX_ENTRIES}"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), f"expected at most {MAX_ENTRIES}"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), f"its header goes on for {2**63} bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<I", 99), "metadata of type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<IIQ", 9, 0, 2**60), "its header goes on"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<IIQ", 9, 8, 2**60), "its header goes on"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9,
            "metadata with lists in lists in lists",
        ),
    ],
)
def test_a_damaged_header_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(data)
    assert_refused(tmp_path, "model.gguf: ", message)


@pytest.mark.parametrize(
    ("entries", "count", "message"),
    [
        (entry("x", (16,), F32, 4), 1, "x ends at byte 132; the file is cut short"),
        (entry("x", (2**60, 2**60), F32, 0), 1, "the file is cut short"),
        (entry("x", (1,), F32, 2**64 - 1), 1, "the file is cut short"),
        (entry("x", (1,) * 9, F32, 0), 1, "x has 9 dimensions; expected at most 8"),
        (entry("x", (1,), F32, 0) * 2, 2, "x is there twice"),
        (entry("x", (1, 33), Q8_0, 0), 1, "x has rows of 33; expected a multiple of 32"),
        (entry("x", (), Q8_0, 0), 1, "x has rows of 1; expected a multiple of 32"),
    ],
    ids=["one row", "huge", "far", "dimensions", "twice", "part of a block", "scalar"],
)
def test_tensors_that_the_file_cannot_hold_are_refused(
    entries: bytes, count: int, message: str, tmp_path: Path
) -> None:
    if "multiple" in message:
        pytest.importorskip("gguf", reason="it knows the types")
    assert_refused(write_header(tmp_path, entries, count=count), "model.gguf: ", message)


@pytest.mark.parametrize("alignment", [0, "x"])
def test_an_alignment_that_is_none_is_refused(alignment: Any, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", {}, **{"general.alignment": 32})
    data = (tmp_path / "model.gguf").read_bytes()
    data = data.replace(string("general.alignment") + value(32), string("general.alignment") + value(alignment))
    (tmp_path / "model.gguf").write_bytes(data)
    assert_refused(tmp_path, "model.gguf: general.alignment is", "expected a positive number")


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_file_is_refused_or_read(seed: int, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", TENSORS, tokens=["a"] * 40) / "model.gguf"
    data = bytearray(file.read_bytes())
    generator = torch.Generator().manual_seed(seed)
    for at in torch.randint(500, (6,), generator=generator).tolist():
        data[at] = int(torch.randint(256, (1,), generator=generator))
    file.write_bytes(data)
    try:
        checkpoint = open_checkpoint(tmp_path)
    except CheckpointError:
        return
    assert dict(checkpoint.tensors()).keys() == checkpoint.infos.keys()


@pytest.mark.parametrize("cut", [1, 100, 400])
def test_d3_a_truncated_file_is_refused(cut: int, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", TENSORS) / "model.gguf"
    file.write_bytes(file.read_bytes()[:-cut])
    assert_refused(tmp_path, "cut short", "Copy or download it again")


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "other" / "model.gguf", TENSORS)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.gguf").symlink_to("../other/model.gguf")
    assert_refused(tmp_path / "mine", "model.gguf leads to", "outside of")
    with pytest.raises(CheckpointError, match="outside of"):
        metadata(tmp_path / "mine")
