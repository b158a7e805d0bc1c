"""Read GGUF files: metadata, headers, and tensors; quantised ones as float32.

The header is parsed here rather than by the package gguf, whose reader walks through every token of the vocabulary and
believes every length that a file states. Only taking quantised blocks apart is left to that package.

Layout (version 2 and 3, little-endian): magic, version, number of tensors, number of metadata entries; the entries
(name, type, value); per tensor its name, dimensions with the fastest first, type, and offset; padding; the data.
"""

import math
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tiers.reference.checkpoint import (
    MAX_HEADER_BYTES,
    Checkpoint,
    Get,
    TensorInfo,
    inside,
    listed,
    require_file,
)
from tiers.reference.errors import CheckpointError

# Longer lists are vocabularies and merges; what a model is fits in a list of one number per layer.
MAX_LIST = 1024

# Tensors, and metadata entries, of one file; real ones have some thousands.
MAX_ENTRIES = 100_000

# Types that need no dequantising, by the format's number.
_PLAIN = {
    0: torch.float32, 1: torch.float16, 30: torch.bfloat16, 28: torch.float64,
    24: torch.int8, 25: torch.int16, 26: torch.int32, 27: torch.int64,
}  # fmt: skip

# Metadata values of one size, by the format's number; 8 is a string, 9 a list.
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _LIST = 8, 9

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies; `shape` in torch order, `kind` the format's number of its type."""

    shape: tuple[int, ...]
    kind: int
    start: int
    bytes: int


@dataclass(frozen=True)
class _Header:
    metadata: dict[str, Any]
    entries: dict[str, _Entry]


def open_gguf(folder: Path, files: list[Path]) -> Checkpoint:
    """Read the header of a folder's GGUF file, or of all files of a split one.

    Args:
        folder: where they lie.
        files: every *.gguf in it.

    Raises:
        CheckpointError: several models, a part that is missing, a damaged header, data that is cut short, or quantised
            tensors without the package that takes them apart.
    """
    infos: dict[str, TensorInfo] = {}
    kinds: dict[int, int] = {}
    for file in _one_model(folder, files):
        for name, entry in read_header(inside(folder, file)).entries.items():
            if name in infos:
                raise CheckpointError(
                    f"{name} lies in both {infos[name].file.name} and {file.name} of {folder}; expected it once. Remove "
                    "the file that does not belong"
                )
            kinds[entry.kind] = kinds.get(entry.kind, 0) + 1
            infos[name] = TensorInfo(file, _PLAIN.get(entry.kind, torch.float32), entry.shape)
    quantised = [f"{count} of {_type_name(kind)}" for kind, count in sorted(kinds.items()) if kind not in _PLAIN]
    notes = [f"quantised tensors are read as float32: {listed(quantised, 8)}"] if quantised else []
    return Checkpoint(folder, infos, notes, read_gguf)


def metadata(folder: Path) -> dict[str, Any]:
    """The metadata of a folder's GGUF file: numbers, truth values, strings, and lists of at most 1024 of them.

    Args:
        folder: holds one GGUF file, or the parts of one; the first part has the metadata.

    Raises:
        CheckpointError: there is none, there are several, or the header is damaged.
    """
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise CheckpointError(f"{folder}: no *.gguf file; expected one")
    return read_header(inside(folder, _one_model(folder, files)[0])).metadata


def describe(folder: Path) -> dict[str, Any]:
    """The metadata of a GGUF file in the shape of a config.json: dotted keys as nested objects, `model_type` for a family
    to answer to (gguf-llama for general.architecture llama), and whether the head is the embedding.

    Raises:
        CheckpointError: as `metadata`.
    """
    described: dict[str, Any] = {}
    for key, value in metadata(folder).items():
        *path, leaf = key.split(".")
        inner = described
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise CheckpointError(
                    f"{folder}: GGUF key {key!r} lies below another that has a value; expected either"
                )
        inner[leaf] = value
    general = described.get("general")
    described["model_type"] = f"gguf-{general.get('architecture') if isinstance(general, dict) else None}"
    described["tied"] = "output.weight" not in open_gguf(folder, sorted(folder.glob("*.gguf"))).infos
    return described


def _one_model(folder: Path, files: list[Path]) -> list[Path]:
    """The files in order, if they are one model."""
    parts = {file: _SPLIT.fullmatch(file.name) for file in files}
    if len(files) == 1 and not parts[files[0]]:
        return files
    names = {(match[1], match[3]) if match else (file.name, "") for file, match in parts.items()}
    if len(names) > 1:
        raise CheckpointError(
            f"{folder}: {listed([file.name for file in files])} are different models, or one quantised in different ways; "
            "expected one. Put the one to serve in a folder by itself"
        )
    (stem, total), found = next(iter(names)), {int(match[2]): file for file, match in parts.items() if match}
    # What is there decides how far to look: the name may say 99999.
    missing = next((part for part in range(1, int(total) + 1) if part not in found), None)
    if missing is not None or len(found) != int(total):
        name = f"{stem}-{missing or max(found):05d}-of-{total}.gguf"
        raise CheckpointError(
            f"{folder}: {len(found)} files, but their names say {int(total)}; expected parts 1 to {int(total)}, "
            f"{'no' if missing else 'not'} {name}. Copy the missing parts"
        )
    return [found[part] for part in sorted(found)]


# ---- header ---------------------------------------------------------------------------------------------------------


class _Cursor:
    """Reads the header; whatever a file states, no further than it reaches."""

    def __init__(self, file: Path, stream: BinaryIO, size: int) -> None:
        self.file, self.stream, self.at, self.end = file, stream, stream.tell(), min(size, MAX_HEADER_BYTES)

    def take(self, count: int) -> bytes:
        if count > self.end - self.at:
            raise CheckpointError(
                f"{self.file}: its header goes on for {count} bytes after byte {self.at}, but the file (or the "
                f"{MAX_HEADER_BYTES} bytes that a header may have) ends at {self.end}; the file is cut short or damaged. "
                "Copy or download it again"
            )
        self.at += count
        return self.stream.read(count)

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """A metadata value; None for a list that is too long or holds lists."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _LIST:
            raise CheckpointError(f"{self.file}: metadata of type {kind}; expected one from 0 to 12. Is it damaged?")
        if depth > 1:
            raise CheckpointError(f"{self.file}: metadata with lists in lists in lists; expected two levels at most")
        inner, count = self.number("<I"), self.number("<Q")
        if count <= MAX_LIST:
            values = [self.value(inner, depth + 1) for _ in range(count)]
            return None if inner == _LIST else values
        if inner in _SCALARS:
            self.take(count * struct.calcsize(_SCALARS[inner]))
        else:
            # Every element takes bytes, so this ends where the header does.
            for _ in range(count):
                if inner == _STRING:
                    self.take(self.number("<Q"))
                else:
                    self.value(inner, depth + 1)
        return None


def read_header(file: Path) -> _Header:
    """Metadata and tensors of one file, and whether it is as long as they need.

    Raises:
        CheckpointError: it is no GGUF file, another version of it, damaged or cut short.
    """
    size = require_file(file)
    try:
        with file.open("rb") as stream:
            start = stream.read(8)
            if start[:4] != b"GGUF" or len(start) < 8:
                raise CheckpointError(
                    f"{file}: not a GGUF file, it starts with {start[:4]!r}; expected b'GGUF'. Is it a Git LFS pointer or a "
                    "web page? Download it again"
                )
            version = struct.unpack("<I", start[4:])[0]
            if version not in (2, 3):
                what = "big-endian, or version" if version & 0xFFFF == 0 else "version"
                raise CheckpointError(
                    f"{file}: GGUF of {what} {version}; expected version 2 or 3, little-endian. Convert it with a newer "
                    "llama.cpp"
                )
            return _parse(_Cursor(file, stream, size), size)
    except (OSError, struct.error) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from None


def _parse(cursor: _Cursor, size: int) -> _Header:
    """What follows the version."""
    file = cursor.file
    tensors, entries = cursor.number("<Q"), cursor.number("<Q")
    if max(tensors, entries) > MAX_ENTRIES:
        raise CheckpointError(
            f"{file}: {tensors} tensors and {entries} metadata entries; expected at most {MAX_ENTRIES}. Is it damaged?"
        )
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        name = cursor.string()
        value = cursor.value(cursor.number("<I"))
        if value is not None:
            metadata[name] = value
    found: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(tensors):
        name, dimensions = cursor.string(), cursor.number("<I")
        if dimensions > 8:
            raise CheckpointError(f"{file}: {listed([name])} has {dimensions} dimensions; expected at most 8")
        shape = tuple(reversed([cursor.number("<Q") for _ in range(dimensions)]))
        found.append((name, shape, cursor.number("<I"), cursor.number("<Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise CheckpointError(
            f"{file}: general.alignment is {str(alignment)[:50]}; expected a positive number of bytes"
        )
    data = -(-cursor.at // alignment) * alignment
    return _Header(metadata, _entries(file, size, data, found))


def _entries(file: Path, size: int, data: int, found: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for name, shape, kind, offset in found:
        if name in entries:
            raise CheckpointError(f"{file}: {listed([name])} is there twice; expected it once. Convert the model again")
        block, block_bytes = _block(file, name, kind)
        row = shape[-1] if shape else 1
        if row % block:
            raise CheckpointError(
                f"{file}: {listed([name])} has rows of {row}; expected a multiple of {block}, the block of "
                f"{_type_name(kind)}"
            )
        length = math.prod(shape) // block * block_bytes
        if data + offset + length > size:
            raise CheckpointError(
                f"{file}: {size} bytes, but {listed([name])} ends at byte {data + offset + length}; the file is cut short. "
                "Copy or download it again"
            )
        entries[name] = _Entry(shape, kind, data + offset, length)
    return entries


def _block(file: Path, name: str, kind: int) -> tuple[int, int]:
    """Elements and bytes of one block of a type."""
    if kind in _PLAIN:
        return 1, _PLAIN[kind].itemsize
    _gguf(f"{file}: {listed([name])} is quantised")
    block = _quantised_block(kind)
    if block is None:
        raise CheckpointError(
            f"{file}: {listed([name])} is of type {kind} ({_type_name(kind)}), which the package gguf cannot turn into "
            "numbers; expected F32, F16, BF16 or a type that it can. A newer version may, or convert the model to Q8_0"
        )
    return block


@cache
def _quantised_block(kind: int) -> tuple[int, int] | None:
    """Elements and bytes of one block; None if gguf does not know the type or cannot take it apart."""
    import numpy as np

    gguf = _gguf("the weights are quantised")
    try:
        elements, length = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        _dequantised(np.zeros((1, length), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return int(elements), int(length)


def _type_name(kind: int) -> str:
    try:
        return _gguf("the weights are quantised").GGMLQuantizationType(kind).name
    except ValueError:
        return "unknown"


def _gguf(why: str) -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise CheckpointError(
            f"{why}, and the package that takes it apart is not there ({error}); expected gguf. Install it with "
            "pip install 'vllm-tiers[demo]' or pip install gguf, or convert the model to f16 or bf16"
        ) from None
    return gguf


# ---- tensors --------------------------------------------------------------------------------------------------------


@contextmanager
def read_gguf(file: Path) -> Iterator[Get]:
    """Open a GGUF file to take tensors from it by name."""
    entries = read_header(file).entries
    try:
        with file.open("rb") as stream:

            def get(name: str) -> Tensor:
                data = bytearray(entries[name].bytes)
                stream.seek(entries[name].start)
                if stream.readinto(data) != len(data):
                    raise CheckpointError(
                        f"{file}: {listed([name])} is cut short. Was it changed while it was being read?"
                    )
                return _tensor(entries[name], data)

            yield get
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None


def _tensor(entry: _Entry, data: bytearray) -> Tensor:
    if not data:
        return torch.empty(entry.shape, dtype=_PLAIN.get(entry.kind, torch.float32))
    if entry.kind in _PLAIN:
        return torch.frombuffer(data, dtype=_PLAIN[entry.kind]).reshape(entry.shape)
    import numpy as np

    rows = np.frombuffer(data, dtype=np.uint8).reshape(math.prod(entry.shape[:-1]), -1)
    return torch.from_numpy(_dequantised(rows, entry.kind)).reshape(entry.shape)


def _dequantised(rows: Any, kind: int) -> Any:
    gguf = _gguf("the weights are quantised")
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(kind))
