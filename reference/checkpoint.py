"""Read the weights of a folder: what is in it, whether it is whole, and its tensors one by one.

Knows nothing of any model. `open_checkpoint` finds out how the folder stores its weights (safetensors; files of
torch.save; Megatron's folder per rank; GGUF) and reads headers; no tensor is touched before `Checkpoint.tensors`.
What the forms have in common is here, and safetensors; the other forms have a file each, imported when met.
"""

import dataclasses
import json
import math
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tiers.reference.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"

# A header larger than this is refused by the safetensors library too.
MAX_HEADER_BYTES = 100 * 2**20

# Files that some vendors add: the same weights by other names.
SECOND_SCHEME = "consolidated"

_DTYPES = {
    "F64": (torch.float64, 8), "F32": (torch.float32, 4), "F16": (torch.float16, 2), "BF16": (torch.bfloat16, 2),
    "I64": (torch.int64, 8), "I32": (torch.int32, 4), "I16": (torch.int16, 2), "I8": (torch.int8, 1),
    "U8": (torch.uint8, 1), "BOOL": (torch.bool, 1),
    "F8_E4M3": (torch.float8_e4m3fn, 1), "F8_E5M2": (torch.float8_e5m2, 1),
}  # fmt: skip

# Opens one file; what the context gives returns the tensor of a name, on the CPU.
Get = Callable[[str], Tensor]
Reader = Callable[[Path], AbstractContextManager[Get]]


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


# Reads the header of one file.
Header = Callable[[Path], dict[str, TensorInfo]]


@contextmanager
def read_safetensors(file: Path) -> Iterator[Get]:
    """Open a safetensors file to take tensors from it by name."""
    try:
        with safe_open(file, framework="pt") as reader:
            yield reader.get_tensor
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}). Was it changed while it was being read?") from None


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder.

    Attributes:
        folder: where it lies.
        infos: name to header entry. An entry's file is where the reader finds the tensor; a tensor that is put together
            from several files names the first of them.
        notes: sentences about what was odd but harmless, for the user to read.
        read: opens one of those files, to take tensors from it by the names of `infos`.
    """

    folder: Path
    infos: dict[str, TensorInfo]
    notes: list[str] = field(default_factory=list)
    read: Reader = field(default=read_safetensors, compare=False)

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(info.dtype.itemsize * math.prod(info.shape) for info in self.infos.values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) on the CPU, one file at a time, in a fixed order."""
        by_file: dict[Path, list[str]] = {}
        for name in sorted(self.infos):
            by_file.setdefault(self.infos[name].file, []).append(name)
        for file in sorted(by_file):
            with self.read(file) as get:
                for name in by_file[file]:
                    yield name, get(name)

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU. Opens its file anew: to read many, `tensors` is faster.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self.infos:
            raise CheckpointError(f"{self.folder}: no tensor {name}; the folder holds {listed(sorted(self.infos))}")
        with self.read(self.infos[name].file) as get:
            return get(name)

    def renamed(self, old: Mapping[str, str], notes: Iterable[str] = ()) -> "Checkpoint":
        """The same tensors by other names.

        Args:
            old: new name to the present one; a tensor that it leaves out is not in the result.
            notes: sentences to add.
        """
        notes = [*self.notes, *notes]
        if len(old) == len(self.infos) and all(new == name for new, name in old.items()):
            return dataclasses.replace(self, notes=notes)

        @contextmanager
        def read(file: Path) -> Iterator[Get]:
            with self.read(file) as get:
                yield lambda name: get(old[name])

        return Checkpoint(self.folder, {new: self.infos[name] for new, name in old.items()}, notes, read)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Find the weights of a folder and read every header, whatever the form they are stored in.

    Safetensors files come first; weights in another form beside them are not read, and a note says so. Prefixes that
    training wrappers put in front of names are taken off, see `tiers.reference.wrappers`.

    Raises:
        CheckpointError: no weights; a file that is shorter than its header says or has no readable header; an index
            that names a missing file, or a tensor that its file does not hold, unless the files that are there hold
            together every tensor of the index; a file that leads out of the folder; tensors that belong to no whole
            model (adapters, flat parameters, the pieces of a partitioned optimizer).
    """
    from tiers.reference import wrappers

    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; expected a model folder with config.json and *.safetensors")
    try:
        checkpoint = _open_any(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror or error})") from None
    wrappers.refuse_unmappable(folder, checkpoint.infos)
    old = wrappers.unwrap(checkpoint.infos, str(folder))
    return checkpoint.renamed(old, wrappers.describe(old))


def _open_any(folder: Path) -> Checkpoint:
    import tiers.reference.gguf_file as gguf_file
    import tiers.reference.megatron as megatron
    import tiers.reference.torch_files as torch_files

    safetensors = sorted(folder.glob("*.safetensors"))
    pickled = torch_files.candidates(folder)
    gguf = sorted(folder.glob("*.gguf"))
    ranks = sorted(folder.glob("mp_rank_*/"))
    if safetensors or (folder / INDEX_NAME).exists():
        infos, notes = collect(folder, safetensors, INDEX_NAME, read_header)
        return Checkpoint(folder, infos, notes + _unread("*.safetensors", [*pickled, *gguf, *ranks]))
    torch_files.refuse_pieces(folder)
    if pickled or (folder / torch_files.INDEX_NAME).exists():
        checkpoint = torch_files.open_torch(folder, pickled)
        return checkpoint.renamed({name: name for name in checkpoint.infos}, _unread("*.bin, *.pt", [*gguf, *ranks]))
    if megatron.is_megatron(folder):
        return megatron.open_megatron(folder)
    if gguf:
        return gguf_file.open_gguf(folder, gguf)
    torch_files.refuse_training_folder(folder)
    raise CheckpointError(
        f"{folder}: no *.safetensors file, and no weights in another form (pytorch_model.bin, *.pt, mp_rank_*/ of "
        "Megatron, *.gguf); expected the weights of the model beside config.json"
    )


def _unread(read: str, others: list[Path]) -> list[str]:
    names = [path.name for path in others]
    return [f"not read, since the folder has {read}: {listed(names)}"] if names else []


def collect(
    folder: Path, present: list[Path], index_name: str, header: Header, root: Path | None = None
) -> tuple[dict[str, TensorInfo], list[str]]:
    """The headers of a folder's files, checked against the index if there is one.

    Args:
        folder: where the files lie.
        present: the files that may hold weights.
        index_name: what the index would be called.
        header: reads the header of one file.
        root: the folder that no file may lead out of, if that is not `folder`.

    Returns:
        Every tensor, and notes.

    Raises:
        CheckpointError: see `open_checkpoint`.
    """
    root = root or folder
    index = _read_index(root, folder / index_name)
    if index is None:
        second = [file for file in present if file.name.startswith(SECOND_SCHEME)]
        first = [file for file in present if file not in second] or second
        infos = _merge_headers(root, first, index_name, header)
        return infos, _unread(f"{first[0].name}", second if first != second else [])
    named = {folder / file for file in index.values()}
    missing = sorted(file.name for file in named if not file.is_file())
    infos = _merge_headers(root, sorted(named & set(present)), index_name, header)
    notes: list[str] = []
    if missing or set(index) - set(infos):
        # Stale after a re-save with another number of shards? Then the files that are there hold everything.
        union = _merge_headers(root, present, index_name, header)
        absent = sorted(set(index) - set(union))
        if absent:
            what = (
                f"names {missing[0]}, which is not there" if missing else f"says {index[absent[0]]} holds {absent[0]}"
            )
            raise CheckpointError(
                f"{folder / index_name} {what}, and no file in the folder holds {listed(absent)}. Copy the missing "
                "shards, or write the index anew if the model was saved again"
            )
        infos = {name: union[name] for name in index}
        notes.append(
            f"{index_name} is stale; its {len(index)} tensors were found in the {len(present)} files that are there"
        )
    unused = sorted(file.name for file in set(present) - {info.file for info in infos.values()})
    if unused:
        notes.append(f"not in {index_name}, so not read: {', '.join(unused)}")
    return infos, notes


def _read_index(root: Path, path: Path) -> dict[str, str] | None:
    if not path.exists():
        return None
    try:
        weight_map = json.loads(read_text(root, path))["weight_map"]
        index = {str(name): file for name, file in weight_map.items()}
    except CheckpointError:  # itself a ValueError
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not a weight index ({error}); expected an object weight_map of name to file"
        ) from None
    for name, file in index.items():
        # Path("..").name is ".." itself.
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", "..") or "\0" in file:
            raise CheckpointError(
                f"{path}: {name} is said to lie in {file!r}; expected the plain name of a file in the folder"
            )
    return index


def _merge_headers(root: Path, files: list[Path], index_name: str, header: Header) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in header(inside(root, file)).items():
            if name in infos:
                raise CheckpointError(
                    f"{name} lies in both {infos[name].file.name} and {file.name} of {file.parent}; expected it once. "
                    f"Remove the file that does not belong, or add {index_name}"
                )
            infos[name] = info
    return infos


def inside(folder: Path, path: Path) -> Path:
    """The path, if the file that it leads to lies in the folder; a link must not make us read anything else.

    The cache of the Hugging Face hub is made of links, `snapshots/<revision>/file` to `blobs/<hash>`: if the folder is
    such a snapshot, its `blobs` folder counts as inside.

    Raises:
        CheckpointError: it leads out of the folder, or around in a circle.
    """
    try:
        home, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    is_blob = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if target.is_relative_to(home) or is_blob:
        return path
    raise CheckpointError(
        f"{path} leads to {target}, outside of {folder}; expected a file within the folder, or a link into the blobs of "
        "the Hugging Face cache. Copy the file here, or name the folder that it lies in"
    )


def require_file(file: Path) -> int:
    """The size of a regular file in bytes; reading anything else (a pipe, a device) might never end.

    Raises:
        CheckpointError: it is none.
    """
    try:
        status = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file}: cannot be read, it is no regular file")
    return status.st_size


def read_text(folder: Path, path: Path, limit: int = MAX_HEADER_BYTES) -> str:
    """The text of a small file of the folder (an index, a config).

    Args:
        folder: what the file must not lead out of.
        path: the file.
        limit: bytes it may have.

    Raises:
        CheckpointError: it leads out of the folder, is no regular file, is longer than `limit`, or is not UTF-8.
    """
    size = require_file(inside(folder, path))
    if size > limit:
        raise CheckpointError(f"{path}: {size} bytes; expected at most {limit}. Is it another file by this name?")
    try:
        return path.read_bytes()[:limit].decode("utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: no UTF-8 text ({error.reason} at byte {error.start}); expected text") from None


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, and whether the file is as long as they need.

    Raises:
        CheckpointError: the file is truncated, or its header cannot be read.
    """
    size = require_file(file)
    try:
        with file.open("rb") as stream:
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
    # A damaged or hostile file may hold names of any length.
    shown = ", ".join(name if len(name) <= 200 else f"{name[:200]}..." for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
