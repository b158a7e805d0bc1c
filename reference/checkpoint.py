"""Read a folder of safetensors files: what is in it, whether it is whole, and its tensors one by one.

Knows nothing of any model. Headers are read by `open_checkpoint`; no tensor is touched before `Checkpoint.tensors`.
"""

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from tiers.reference.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"

# A header larger than this is refused by the safetensors library too.
MAX_HEADER_BYTES = 100 * 2**20

_DTYPES = {
    "F64": (torch.float64, 8), "F32": (torch.float32, 4), "F16": (torch.float16, 2), "BF16": (torch.bfloat16, 2),
    "I64": (torch.int64, 8), "I32": (torch.int32, 4), "I16": (torch.int16, 2), "I8": (torch.int8, 1),
    "U8": (torch.uint8, 1), "BOOL": (torch.bool, 1),
    "F8_E4M3": (torch.float8_e4m3fn, 1), "F8_E5M2": (torch.float8_e5m2, 1),
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder.

    Attributes:
        folder: where it lies.
        infos: name to header entry.
        notes: sentences about what was odd but harmless, for the user to read.
    """

    folder: Path
    infos: dict[str, TensorInfo]
    notes: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(info.dtype.itemsize * torch.Size(info.shape).numel() for info in self.infos.values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) on the CPU, one file at a time, in a fixed order."""
        for file in sorted({info.file for info in self.infos.values()}):
            names = sorted(name for name, info in self.infos.items() if info.file == file)
            with safe_open(file, framework="pt") as reader:
                for name in names:
                    yield name, reader.get_tensor(name)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the index and every header of a folder of safetensors files.

    Raises:
        CheckpointError: no weight file; a file that is shorter than its header says or has no readable header; an index
            that names a missing file, or a tensor that its file does not hold, unless the files that are there hold
            together every tensor of the index.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; expected a model folder with config.json and *.safetensors")
    present = sorted(folder.glob("*.safetensors"))
    index = _read_index(folder)
    if index is None:
        if not present:
            raise CheckpointError(
                f"{folder}: no *.safetensors file; expected the weights of the model beside config.json"
            )
        return Checkpoint(folder, _merge_headers(present))
    named = {folder / file for file in index.values()}
    missing = sorted(file.name for file in named if not file.is_file())
    infos = _merge_headers(sorted(named & set(present)))
    notes: list[str] = []
    if missing or set(index) - set(infos):
        # Stale after a re-save with another number of shards? Then the files that are there hold everything.
        union = _merge_headers(present)
        absent = sorted(set(index) - set(union))
        if absent:
            what = (
                f"names {missing[0]}, which is not there" if missing else f"says {index[absent[0]]} holds {absent[0]}"
            )
            raise CheckpointError(
                f"{folder / INDEX_NAME} {what}, and no file in the folder holds {listed(absent)}. Copy the missing "
                "shards, or write the index anew if the model was saved again"
            )
        infos = {name: union[name] for name in index}
        notes.append(
            f"{INDEX_NAME} is stale; its {len(index)} tensors were found in the {len(present)} files that are there"
        )
    unused = sorted(file.name for file in set(present) - {info.file for info in infos.values()})
    if unused:
        notes.append(f"not in {INDEX_NAME}, so not read: {', '.join(unused)}")
    return Checkpoint(folder, infos, notes)


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        index = {str(name): file for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not a weight index ({error}); expected an object weight_map of name to file"
        ) from None
    for name, file in index.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{path}: {name} is said to lie in {file!r}; expected the plain name of a file in the folder"
            )
    return index


def _merge_headers(files: list[Path]) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if name in infos:
                raise CheckpointError(
                    f"{name} lies in both {infos[name].file.name} and {file.name} of {file.parent}; expected it once. "
                    f"Remove the file that does not belong, or add {INDEX_NAME}"
                )
            infos[name] = info
    return infos


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, and whether the file is as long as they need.

    Raises:
        CheckpointError: the file is truncated, or its header cannot be read.
    """
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{file}: not a safetensors file, its header would be {length} bytes long; expected at most "
                    f"{MAX_HEADER_BYTES}. Is it a Git LFS pointer or a web page? Download it again"
                )
            if len(prefix) < 8 or 8 + length > size:
                raise CheckpointError(
                    f"{file}: {size} bytes, but its header alone needs {8 + length}; the file is cut short"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    except CheckpointError:  # itself a ValueError
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a safetensors file, its header is no JSON ({error})") from None
    infos = {}
    spans = []
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, width = _DTYPES[entry["dtype"]]
            shape = tuple(int(n) for n in entry["shape"])
            start, stop = (int(n) for n in entry["data_offsets"])
            if stop - start != width * math.prod(shape) or start < 0 or min(shape, default=0) < 0:
                raise CheckpointError(
                    f"{file}: {name} has shape {list(shape)} {entry['dtype']} but {stop - start} bytes"
                )
            infos[name] = TensorInfo(file, dtype, shape)
            spans.append((start, stop, name))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: header entry cannot be read ({type(error).__name__}: {error})") from None
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise CheckpointError(
                f"{file}: {name} starts at byte {start} of the data; expected {end}, without gap or overlap"
            )
        end = stop
    end += 8 + length
    if end > size:
        raise CheckpointError(
            f"{file}: {size} bytes, but its tensors end at byte {end}; the file is cut short. Copy or download it again"
        )
    if end < size:
        raise CheckpointError(
            f"{file}: {size} bytes, but its tensors end at byte {end}; expected nothing behind them. Copy or download it again"
        )
    return infos


def listed(names: list[str], limit: int = 4) -> str:
    """ "a, b and 12 more"."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
