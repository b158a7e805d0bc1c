"""The weight files of a folder, as far as they can be read, and the dtypes in them."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tiers.reference import checkpoint, torch_files, wrappers
from tiers.reference.checkpoint import Checkpoint, TensorInfo
from tiers.reference.errors import TiersError


@dataclass(frozen=True)
class File:
    """One file of weights; `error` says why it cannot be read."""

    name: str
    bytes: int
    tensors: int
    error: str | None = None


@dataclass(frozen=True)
class Files:
    """The weight files of a folder, as far as they can be read.

    Attributes:
        infos: every tensor of every header that can be read, without the prefixes of training wrappers.
        files: all of them.
        indexed: how many tensors the index names; None without one.
        missing: files that the index names and that are not there.
        lost: tensors of the index that no readable file holds.
    """

    infos: Mapping[str, TensorInfo]
    files: tuple[File, ...]
    indexed: int | None
    missing: tuple[str, ...]
    lost: tuple[str, ...]

    @property
    def damaged(self) -> bool:
        """Whether a file is missing or cannot be read, so that tensors are missing for that reason."""
        return bool(self.missing) or any(file.error is not None for file in self.files)

    @property
    def empty(self) -> list[str]:
        """Tensors without elements."""
        return sorted(name for name, info in self.infos.items() if 0 in info.shape)


def survey(folder: Path, opened: Checkpoint | None) -> Files:
    """The weight files of a folder.

    Args:
        folder: where they lie.
        opened: the checkpoint; None if it cannot be opened as a whole, and then each file is tried by itself.
    """
    if opened is not None:
        counts = Counter(info.file for info in opened.infos.values())
        files = tuple(
            File(str(path.relative_to(folder) if path.is_relative_to(folder) else path), _size(path), n)
            for path, n in sorted(counts.items())
        )
        index = _index(folder)
        return Files(opened.infos, files, None if index is None else len(index), (), ())
    infos: dict[str, TensorInfo] = {}
    reports = []
    for path, header in _readable(folder):
        try:
            found = header(checkpoint.inside(folder, path))
        except TiersError as error:
            reports.append(File(path.name, _size(path), 0, str(error)))
            continue
        infos.update(found)
        reports.append(File(path.name, _size(path), len(found)))
    index = _index(folder) or {}
    missing = tuple(sorted({file for file in index.values() if not (folder / file).is_file()}))
    lost = tuple(sorted(set(index) - set(infos)))
    try:
        old = wrappers.unwrap(infos)
    except TiersError:
        old = {name: name for name in infos}
    bare = {new: infos[name] for new, name in old.items()}
    return Files(bare, tuple(reports), len(index) or None, missing, lost)


def _readable(folder: Path) -> Iterator[tuple[Path, Callable[[Path], dict[str, TensorInfo]]]]:
    """Files that have a header, and what reads it."""
    safetensors = sorted(folder.glob("*.safetensors"))
    for path in safetensors:
        yield path, checkpoint.read_header
    if not safetensors:
        for path in torch_files.candidates(folder):
            yield path, lambda file: torch_files.read_torch_header(file, torch_files.find_state)[0]


def _index(folder: Path) -> dict[str, str] | None:
    """Tensor to file, of whichever index there is; {} for one that cannot be read."""
    for name in (checkpoint.INDEX_NAME, torch_files.INDEX_NAME):
        if (folder / name).is_file():
            try:
                found = json.loads(checkpoint.read_text(folder, folder / name))["weight_map"]
                return {str(tensor): Path(str(file)).name for tensor, file in found.items()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return {}
    return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def bytes_of(info: TensorInfo) -> int:
    """Size of a tensor's data."""
    return info.dtype.itemsize * math.prod(info.shape)


@dataclass(frozen=True)
class Dtype:
    """How many tensors have a dtype, and their bytes; `width` is the bytes of one element."""

    dtype: str
    tensors: int
    bytes: int
    width: int


def dtypes(infos: Mapping[str, TensorInfo]) -> list[Dtype]:
    """Every dtype of a checkpoint, the one with most bytes first."""
    counts = Counter(info.dtype for info in infos.values())
    sizes = {dtype: sum(bytes_of(info) for info in infos.values() if info.dtype == dtype) for dtype in counts}
    found = [Dtype(dtype_name(dtype), counts[dtype], sizes[dtype], dtype.itemsize) for dtype in counts]
    return sorted(found, key=lambda row: (-row.bytes, row.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16"."""
    return str(dtype).removeprefix("torch.")
