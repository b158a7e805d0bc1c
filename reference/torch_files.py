"""Read what torch.save wrote (pytorch_model.bin, *.pt, *.pth) without running anything that lies in it.

`torch.load` with weights_only=True builds tensors, containers and numbers, and nothing else; mmap=True leaves the data
in the file until it is used, so that headers cost no memory. A file that asks for more is refused.
"""

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiers.reference.checkpoint import (
    MAX_HEADER_BYTES,
    Checkpoint,
    Get,
    TensorInfo,
    collect,
    listed,
    require_file,
)
from tiers.reference.errors import CheckpointError

INDEX_NAME = "pytorch_model.bin.index.json"
SUFFIXES = (".bin", ".pt", ".pth")

# Where training programs put the state dict, at most two of them deep.
NESTS = ("model", "state_dict", "module", "model_state_dict")

# Files that lie beside weights and hold none, by the beginning of their names.
_AUXILIARY = re.compile(r"training_args|(distrib_)?optim|(lr_)?scheduler|scaler|rng_state|random_states|dataloader")
# The first is how DeepSpeed calls its partitions, the second torch.distributed.checkpoint.
_PIECES = ("*zero_pp_rank_*_optim_states.pt", "*.distcp")

# A class, or a function by the name that a file calls it.
Allowed = type | tuple[Callable[..., Any], str]


def _empty_array(kind: type, shape: tuple[int, ...], dtype: bytes) -> np.ndarray[Any, Any]:
    """What a pickle makes before it fills it. A size of its own would take memory that the file does not have."""
    if kind is not np.ndarray or shape != (0,):
        raise ValueError(f"an array of NumPy begins as {kind} of shape {shape}; expected an empty one")
    return np.ndarray(shape, np.int8)


# Arrays of NumPy of every plain dtype, by the names that NumPy 1 and 2 have for what makes them.
NUMPY_ARRAYS: tuple[Allowed, ...] = (
    (_empty_array, "numpy.core.multiarray._reconstruct"), (_empty_array, "numpy._core.multiarray._reconstruct"),
    np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in "?bhilqBHILQefd"),
)  # fmt: skip

# Takes what was in a file; returns its tensors by name, and notes.
Find = Callable[[Any, Path], tuple[dict[str, Tensor], list[str]]]


def candidates(folder: Path) -> list[Path]:
    """The files of torch.save in a folder that may hold weights: pytorch_model*.bin, or if there is none, all."""
    files = sorted(
        file
        for file in folder.iterdir()
        if file.suffix in SUFFIXES and not _AUXILIARY.match(file.name.lower()) and not file.is_dir()
    )
    return [file for file in files if file.match("pytorch_model*.bin")] or files


def open_torch(folder: Path, files: list[Path]) -> Checkpoint:
    """Read the index and the headers of a folder's files.

    Args:
        folder: where they lie.
        files: as `candidates` gives them.

    Raises:
        CheckpointError: see `tiers.reference.checkpoint.open_checkpoint`; and a file asks for objects that are no
            tensors, or holds optimizer state only.
    """
    infos, notes = gather(folder, files, folder, find_state)
    rest = sorted(
        file.name for file in folder.iterdir() if file.suffix in SUFFIXES and file not in files and file.is_file()
    )
    unread = [name for name in rest if not _AUXILIARY.match(name.lower())]
    if unread:
        notes.append(f"not read, since the folder has {files[0].name}: {listed(unread)}")
    if len(unread) < len(rest):
        notes.append(f"training state, so not read: {listed([name for name in rest if name not in unread])}")
    return Checkpoint(folder, infos, notes, lambda file: opened(file, find_state))


def gather(
    folder: Path, files: list[Path], root: Path, find: Find, allowed: Sequence[Allowed] = ()
) -> tuple[dict[str, TensorInfo], list[str]]:
    """The headers of files, and notes.

    Args:
        folder: where they lie.
        files: the files.
        root: the folder that no file may lead out of.
        find: picks the tensors out of what a file holds.
        allowed: see `load`.
    """
    # A stale index has every file read twice; its notes are wanted once.
    found: dict[str, None] = {}

    def header(file: Path) -> dict[str, TensorInfo]:
        infos, notes = read_torch_header(file, find, allowed)
        found.update(dict.fromkeys(notes))
        return infos

    infos, notes = collect(folder, files, INDEX_NAME, header, root)
    return infos, notes + list(found)


@contextmanager
def opened(file: Path, find: Find, allowed: Sequence[Allowed] = ()) -> Iterator[Get]:
    """Open a file to take tensors from it by name."""
    tensors, _ = find(load(file, allowed), file)
    yield lambda name: tensors[name].detach().contiguous()


def read_torch_header(
    file: Path, find: Find, allowed: Sequence[Allowed] = ()
) -> tuple[dict[str, TensorInfo], list[str]]:
    """The tensors of one file, and notes.

    Raises:
        CheckpointError: the file cannot be read, or holds tensors without plain data in it.
    """
    size = require_file(file)
    tensors, notes = find(load(file, allowed), file)
    for name, tensor in tensors.items():
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.is_quantized or tensor.device.type != "cpu":
            kind = f"{type(tensor).__name__}, {tensor.layout}, {tensor.dtype}, on {tensor.device}"
            raise CheckpointError(
                f"{file}: {listed([name])} is no plain tensor ({kind}); expected a dense one with its data in the file"
            )
        # Strides can make a few bytes look like any number of them.
        if tensor.nbytes > size:
            raise CheckpointError(
                f"{file}: {listed([name])} has shape {list(tensor.shape)}, so {tensor.nbytes} bytes, but the file has "
                f"{size}; expected the data of every element. Save it again with .contiguous()"
            )
    empty = sorted(name for name, tensor in tensors.items() if not tensor.numel())
    if empty and file.name.endswith("_model_states.pt"):
        raise CheckpointError(
            f"{file}: {listed(empty, 2)} has no elements: ZeRO-3 keeps its parameters in the other files; expected whole "
            f"tensors. {_ZERO_TO_FP32}"
        )
    return {name: TensorInfo(file, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}, notes


def find_state(loaded: Any, file: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The state dict in what a file held, and notes on what was beside it.

    Raises:
        CheckpointError: there is none, or more than one.
    """
    notes: list[str] = []
    for _ in range(2):
        nests = [key for key in NESTS if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping)]
        nests = [key for key in nests if loaded[key]]
        if len(nests) > 1:
            raise CheckpointError(
                f"{file}: {nests[0]} and {nests[1]} both look like the weights; expected one of them. Save the right one "
                "by itself"
            )
        if not nests:
            break
        notes += _ignored(file, [key for key in loaded if key != nests[0]])
        loaded = loaded[nests[0]]
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{file}: holds {type(loaded).__name__}; expected a state dict of name to tensor")
    tensors = {name: value for name, value in loaded.items() if isinstance(name, str) and isinstance(value, Tensor)}
    rest = [key for key in loaded if key not in tensors]
    if not tensors and rest and all(is_training_state(key) for key in rest):
        raise CheckpointError(
            f"{file}: optimizer state only ({shown(rest)}); expected weights. Name the folder or file that the model "
            "was saved to"
        )
    if not tensors:
        raise CheckpointError(
            f"{file}: no tensor in it{f', only {shown(rest)}' if rest else ''}; expected a state dict of name to tensor, "
            f"by itself or under {', '.join(NESTS)}"
        )
    return tensors, notes + _ignored(file, rest)


def _ignored(file: Path, keys: Sequence[Any]) -> list[str]:
    training = [key for key in keys if is_training_state(key)]
    others = [key for key in keys if not is_training_state(key)]
    notes = [f"{file.name}: training state, so not read: {shown(training)}"] if training else []
    return notes + ([f"{file.name}: no weights, so not read: {shown(others)}"] if others else [])


def is_training_state(key: Any) -> bool:
    """Whether an entry by this key belongs to the optimizer, the schedule or the random number generators."""
    return isinstance(key, str) and bool(re.search(r"optim|scheduler|rng_state|scaler|^(state|param_groups)$", key))


def shown(keys: Sequence[Any]) -> str:
    """Keys of a file for a message."""
    # The text of a key that is no string can be of exponential length.
    return listed([key if isinstance(key, str) else f"a key of type {type(key).__name__}" for key in keys])


# ---- one file -------------------------------------------------------------------------------------------------------


def load(file: Path, allowed: Sequence[Allowed] = ()) -> Any:
    """What torch.save wrote to a file; tensors of a file in the format of torch 1.6 and later stay in the file.

    Args:
        file: a regular file.
        allowed: what the file may ask for, besides what torch allows.

    Raises:
        CheckpointError: the file is damaged, is something else, or asks for other classes or functions.
    """
    require_file(file)
    zipped = _is_zip(file)
    if zipped:
        _check_zip(file)
    names = {one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in allowed}
    granted: Sequence[Allowed] = ()
    while True:
        try:
            with torch.serialization.safe_globals(list(granted)):
                return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
        # Out of a damaged file come exceptions of every kind, MemoryError and AssertionError included.
        except Exception as error:
            wanted = unsafe_globals(file, str(error))
            if wanted and names.issuperset(wanted) and not granted:
                granted = allowed
                continue
            raise _refusal(file, error, wanted) from None


def _refusal(file: Path, error: Exception, wanted: list[str]) -> CheckpointError:
    if wanted:
        return CheckpointError(
            f"{file}: asks for {listed(wanted, 8)} to be imported and called while it is read; expected tensors, "
            "containers and numbers, so nothing of it was read. Load it where you trust it, and save the weights alone: "
            "safetensors.torch.save_file(state_dict, 'model.safetensors')"
        )
    reason = (str(error).splitlines() or [""])[0][:200]
    return CheckpointError(
        f"{file}: not a file of torch.save that can be read ({type(error).__name__}: {reason}). Is it cut short, a Git "
        "LFS pointer or a web page? Copy or download it again, or save the weights as safetensors"
    )


def unsafe_globals(file: Path, message: str) -> list[str]:
    """The classes and functions that a file asks for and torch does not allow.

    Args:
        file: a file of torch.save.
        message: what torch.load said of it; if it is about one of them, it names it.
    """
    names = set(re.findall(r"GLOBAL (\S+)", message))
    if names:
        # It knows only files that are zip archives; the first name is known in any case.
        with suppress(Exception):
            names |= set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    return sorted(names)


def _is_zip(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(4) == b"PK\x03\x04"


def _check_zip(file: Path) -> None:
    """A mapped file is read where its entries lie, so they must lie there as they are, and in whole."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, OSError, EOFError) as error:
        raise CheckpointError(
            f"{file}: its table of contents cannot be read ({error}); the file is cut short or damaged. Copy or download "
            "it again"
        ) from None
    if any(entry.filename.endswith("/constants.pkl") for entry in entries):
        raise CheckpointError(
            f"{file}: a program of TorchScript; expected a state dict. Load it with torch.jit.load where you trust it, and "
            "save its state_dict() as safetensors"
        )
    size = file.stat().st_size
    for entry in entries:
        whole = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
        if not whole or entry.header_offset + entry.file_size > size:
            raise CheckpointError(
                f"{file}: entry {listed([entry.filename])} is compressed or lies outside of the file; expected it stored "
                "in whole, as torch.save does. Save the weights again"
            )
        if entry.filename.endswith(".pkl") and entry.file_size > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file}: entry {listed([entry.filename])} has {entry.file_size} bytes; expected at most "
                f"{MAX_HEADER_BYTES} beside the tensors. Save the weights alone"
            )


# ---- folders that hold pieces of training state ----------------------------------------------------------------------

_ZERO_TO_FP32 = (
    "Run `python zero_to_fp32.py . OUTPUT`, which DeepSpeed left in the folder above global_step*, and name OUTPUT"
)


def refuse_pieces(folder: Path) -> None:
    """Refuse a folder whose weights are cut into pieces that only the trainer can put together.

    Raises:
        CheckpointError: partitions of DeepSpeed ZeRO or of torch.distributed.checkpoint.
    """
    partitions, distributed = (sorted(path.name for path in folder.glob(pattern)) for pattern in _PIECES)
    if partitions:
        raise CheckpointError(
            f"{folder}: {listed(partitions, 2)}: partitions of DeepSpeed ZeRO; expected the weights as whole tensors. "
            f"{_ZERO_TO_FP32}"
        )
    if distributed:
        raise CheckpointError(
            f"{folder}: {listed(distributed, 2)}: pieces of a distributed checkpoint; expected the weights as whole "
            "tensors. Run `python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER model.pt`; Megatron "
            "writes a folder per rank with --ckpt-format torch"
        )


def refuse_training_folder(folder: Path) -> None:
    """Refuse a folder without weights that a trainer wrote.

    Raises:
        CheckpointError: a folder of DeepSpeed; or only optimizer state.
    """
    steps = sorted(path.name for path in folder.glob("global_step*/"))
    if steps:
        raise CheckpointError(
            f"{folder}: {listed(steps, 2)} holds the state of a DeepSpeed training, and there are no weights beside it; "
            f"expected whole tensors. {_ZERO_TO_FP32}"
        )
    training = sorted(path.name for path in folder.iterdir() if path.suffix in SUFFIXES)
    if training:
        raise CheckpointError(
            f"{folder}: {listed(training)}: optimizer or other training state only; expected weights, as *.safetensors "
            "or pytorch_model.bin. Name the folder that the model was saved to"
        )
