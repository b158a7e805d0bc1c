"""Write a model folder anew in the format of this project: our names, our config.json, safetensors in shards.

Nothing is held but one tensor of the source at a time. A run that was interrupted goes on where it stopped, and until
every bit was compared with the source the new folder does not load: config.json is written last. docs/convert.md says
what is written and in which order.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiers.reference.checkpoint import INDEX_NAME, inside, read_safetensors, require_file
from tiers.reference.config import ARCHITECTURE, HF_KEYS, MODEL_TYPE
from tiers.reference.errors import CheckpointError
from tiers.reference.fields import LANGUAGE_PARTS
from tiers.reference.load import (
    CheckedTensors,
    ModelFolder,
    describe_config,
    mapped,
    open_described,
    open_model,
    read_config,
    weights,
)
from tiers.reference.model import parameter_shapes

# What is done so far, for a run that goes on; its presence marks a folder that is not finished.
JOURNAL = ".tiers-convert.json"
_PART = ".part"

SHARD_BYTES = 4 * 10**9

# What else belongs to a model: tokenizers of every library, the chat template, defaults of sampling.
COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip

# Files whose change makes another source.
_SOURCE_SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json"))

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Slot:
    """Where one of our tensors lies in a shard.

    Attributes:
        name: ours.
        start, stop: bytes, counted from the end of the header.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """One file to be written.

    Attributes:
        file: its name.
        sources: the tensors of the source that fill it.
        slots: its tensors, in the order of their bytes.
    """

    file: str
    sources: tuple[str, ...]
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return self.slots[-1].stop

    @property
    def header(self) -> bytes:
        """What the file begins with."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for slot in self.slots:
            entry = {"dtype": _DTYPES[slot.dtype], "shape": list(slot.shape), "data_offsets": [slot.start, slot.stop]}
            entries[slot.name] = entry
        text = json.dumps(entries, separators=(",", ":")).encode()
        # The format wants the data to begin at a multiple of 8.
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        folder: where it lies.
        family: how the source was read.
        tensors, bytes, shards: how many.
        notes: sentences about what was odd but harmless.
    """

    folder: Path
    family: str
    tensors: int
    bytes: int
    shards: int
    notes: tuple[str, ...]


def convert(
    folder: Path,
    out: Path,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Converted:
    """Write the model of a folder to another folder, in our format; or go on with that where it was interrupted.

    Args:
        folder: the source, in any form that `open_model` reads.
        out: a folder that is empty, not there yet, or left by an interrupted run with the same source and options.
        family: as for `open_model`.
        dtype: of all tensors; None leaves each as it is.
        shard_bytes: what a shard holds at most; a tensor of the source that is larger has a shard by itself.

    Raises:
        ConfigError, FamilyError, CheckpointError: as `open_model` and `weights`; `out` cannot be written, holds something
            else, lies in the source, or does not read back as it was written.
    """
    _check_place(folder, out)
    opened = open_model(folder, family)
    copied = [folder / name for name in COPIED if os.path.lexists(folder / name)]
    for file in copied:
        require_file(inside(folder, file))
    shards = plan_shards(opened, dtype, shard_bytes)
    config = our_config(opened, read_config(folder), dtype)
    job = _job(opened, config, shards, dtype, shard_bytes)
    try:
        _make_folder(out)
        with _locked(out):
            _write(opened, out, dtype, shards, config, copied, job)
    except OSError as error:
        raise CheckpointError(
            f"{out}: cannot be written ({error.strerror or error}). The folder is not finished and does not load; with that "
            "put right, the same command goes on where it stopped"
        ) from None
    total = sum(shard.size for shard in shards)
    number = sum(len(shard.slots) for shard in shards)
    return Converted(out, opened.description.family.name, number, total, len(shards), tuple(opened.notes))


# ---- what is going to be written ------------------------------------------------------------------------------------


def plan_shards(opened: ModelFolder, dtype: torch.dtype | None, shard_bytes: int) -> tuple[Shard, ...]:
    """Which tensor goes where: a function of the source and the options alone, so that every run plans the same."""
    if shard_bytes < 1:
        raise CheckpointError(f"the size of a shard is {shard_bytes} bytes; expected 1 or more")
    expected = parameter_shapes(opened.config)
    infos = opened.checkpoint.infos
    groups: list[tuple[list[str], list[tuple[str, torch.dtype]]]] = []
    size = 0
    # As Checkpoint.tensors has them, so that each file of the source is opened once for each shard.
    for source in sorted(infos, key=lambda name: (infos[name].file, name)):
        targets = opened.map.entries[source].targets
        kept = [(name, dtype or infos[source].dtype) for name in targets if name in expected]
        more = sum(math.prod(expected[name]) * kind.itemsize for name, kind in kept)
        if not groups or (more and size and size + more > shard_bytes):
            groups.append(([], []))
            size = 0
        # A tied head has targets and no slot: it is read to be compared with the embedding.
        if targets:
            groups[-1][0].append(source)
        groups[-1][1].extend(kept)
        size += more
    shards = []
    for number, (sources, kept) in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        shards.append(Shard(file, tuple(sources), _slots(kept, expected)))
    return tuple(shards)


def _slots(kept: list[tuple[str, torch.dtype]], expected: Mapping[str, torch.Size]) -> tuple[Slot, ...]:
    slots, end = [], 0
    # Wider types first: a reader that maps the file can only use tensors that lie at multiples of their width.
    for name, dtype in sorted(kept, key=lambda item: -item[1].itemsize):
        stop = end + math.prod(expected[name]) * dtype.itemsize
        slots.append(Slot(name, dtype, tuple(expected[name]), end, stop))
        end = stop
    return tuple(slots)


def our_config(opened: ModelFolder, raw: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """The config.json to be written: the model in our words, and what else the source's says of tokens and dtype."""
    head: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE}
    if dtype is not None:
        head["dtype"] = str(dtype).removeprefix("torch.")
    elif (found := _found(raw, "dtype") or _found(raw, "torch_dtype")) is not None:
        head["dtype"] = str(found).removeprefix("torch.")
    head |= {name: value for name in _TOKEN_IDS if (value := _found(raw, name)) is not None}
    return head | {key: value for key, value in opened.description.raw.items() if key not in HF_KEYS}


def _found(raw: Mapping[str, Any], name: str) -> Any:
    """A key of config.json, or of its part about the language model."""
    for path in LANGUAGE_PARTS:
        part: Any = raw
        for step in path.split("."):
            part = part.get(step) if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and part.get(name) is not None:
            return part[name]
    return raw.get(name)


def _job(
    opened: ModelFolder,
    config: Mapping[str, Any],
    shards: tuple[Shard, ...],
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> dict[str, Any]:
    """All that the bytes of the result depend on, as JSON."""
    files = [path for path in sorted(opened.folder.rglob("*")) if path.suffix in _SOURCE_SUFFIXES and path.is_file()]
    job = {
        "source": {
            "files": [
                [str(path.relative_to(opened.folder)), path.stat().st_size, path.stat().st_mtime_ns] for path in files
            ],
            "tensors": {
                name: [str(info.dtype), list(info.shape)] for name, info in sorted(opened.checkpoint.infos.items())
            },
            "config": config,
        },
        "options": {
            "dtype": str(dtype),
            "shard_size": shard_bytes,
            "family": opened.description.family.name,
            "rules": hashlib.sha256(repr(opened.map.rules).encode()).hexdigest(),
        },
        "shards": [[shard.file, [[slot.name, slot.start, slot.stop] for slot in shard.slots]] for shard in shards],
    }
    # As it comes back from the file, to be compared with that.
    return json.loads(json.dumps(job))


# ---- writing --------------------------------------------------------------------------------------------------------


def _write(
    opened: ModelFolder,
    out: Path,
    dtype: torch.dtype | None,
    shards: tuple[Shard, ...],
    config: Mapping[str, Any],
    copied: list[Path],
    job: dict[str, Any],
) -> None:
    done = _begin(out, job)
    # First of all, so that the folder cannot be loaded while it changes.
    for name in ("config.json", INDEX_NAME):
        (out / name).unlink(missing_ok=True)
    todo = [shard for shard in shards if not _is_whole(out / shard.file, done.get(shard.file))]
    done = {shard.file: done[shard.file] for shard in shards if shard not in todo}
    _remove_parts(out, shards, copied)
    _require_room(out, todo, copied)
    checked = CheckedTensors(opened.config, str(opened.folder), dtype)
    total = sum(shard.size for shard in shards)
    with _bar("writing", total) as advance:
        advance(total - sum(shard.size for shard in todo))
        for shard in todo:
            done[shard.file] = _write_shard(opened, out, shard, checked, advance)
            _write_json(out / JOURNAL, {"job": job, "done": done})
    for file in copied:
        _replace(out / file.name, lambda stream, file=file: _copy(file, stream))
    with _bar("verifying", total) as advance:
        _verify(opened, out, dtype, shards, advance)
    _finish(out, shards, config)


def _begin(out: Path, job: dict[str, Any]) -> dict[str, str]:
    """The shards that an earlier run finished, with their checksums; begins a journal if there is none.

    Raises:
        CheckpointError: the folder holds something else, or an earlier run was about something else.
    """
    path = out / JOURNAL
    if not path.exists():
        if others := sorted(set(os.listdir(out)) - {JOURNAL + _PART}):
            raise CheckpointError(
                f"{out} is not empty (it holds {others[0]!r}); expected an empty folder, or a path that is not there yet. "
                "Choose another, or remove it first"
            )
        _write_json(path, {"job": job, "done": {}})
        return {}
    try:
        journal = json.loads(path.read_bytes())
        found, done = journal["job"], dict(journal["done"])
        changed = [
            f"{key} {name}" for key in ("options", "source") for name in job[key] if found[key][name] != job[key][name]
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({type(error).__name__}); expected the journal of an interrupted conversion. "
            f"Remove {out} and start anew"
        ) from None
    if changed or found != job:
        raise CheckpointError(
            f"{out} was begun with something else ({', '.join(changed) or 'plan'} differ); expected the same source and "
            f"options as before. Repeat the command as it was, or remove {out} to start anew"
        )
    return done


def _is_whole(file: Path, checksum: Any) -> bool:
    return isinstance(checksum, str) and file.is_file() and _checksum(file) == checksum


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _remove_parts(out: Path, shards: tuple[Shard, ...], copied: list[Path]) -> None:
    for name in (JOURNAL, INDEX_NAME, "config.json", *(s.file for s in shards), *(file.name for file in copied)):
        (out / (name + _PART)).unlink(missing_ok=True)


def _require_room(out: Path, todo: list[Shard], copied: list[Path]) -> None:
    needed = sum(len(shard.header) + shard.size for shard in todo) + sum(file.stat().st_size for file in copied)
    free = shutil.disk_usage(out).free
    if free < needed:
        raise CheckpointError(
            f"{out}: {needed} bytes are to be written, but the disk has {free} left. Make room, or choose a place on another "
            "disk; the same command goes on where this one stopped"
        )


def _write_shard(opened: ModelFolder, out: Path, shard: Shard, checked: CheckedTensors, advance: Any) -> str:
    """Write one shard; returns its checksum."""
    wanted = opened.checkpoint.renamed({name: name for name in shard.sources})
    slots = {slot.name: slot for slot in shard.slots}

    def fill(stream: int) -> None:
        header = shard.header
        _put(stream, memoryview(header), 0)
        for name, tensor in checked.check(mapped(opened.map, wanted.tensors())):
            slot = slots[name]
            _put(stream, _raw(tensor.to(slot.dtype)).numpy().data, len(header) + slot.start)
            advance(slot.stop - slot.start)

    _replace(out / shard.file, fill)
    return _checksum(out / shard.file)


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in a row."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _put(stream: int, data: memoryview, offset: int) -> None:
    # One call writes 2 GiB at most.
    while len(data):
        written = os.pwrite(stream, data[: 2**30], offset)
        data, offset = data[written:], offset + written


def _copy(file: Path, stream: int) -> None:
    offset = 0
    with file.open("rb") as source:
        while data := source.read(2**20):
            _put(stream, memoryview(data), offset)
            offset += len(data)


def _write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=2) + "\n"
    _replace(path, lambda stream: _put(stream, memoryview(text.encode()), 0))


def _replace(path: Path, fill: Any) -> None:
    """Write a file so that by its name there is all of it or nothing, whenever the machine stops."""
    part = path.with_name(path.name + _PART)
    stream = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        try:
            fill(stream)
            os.fsync(stream)
        finally:
            os.close(stream)
        os.replace(part, path)
    except BaseException:
        # A full disk is why we may be here: leave nothing that is of no use.
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Names of files are on the disk only when their folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- proof ----------------------------------------------------------------------------------------------------------


def _verify(opened: ModelFolder, out: Path, dtype: torch.dtype | None, shards: tuple[Shard, ...], advance: Any) -> None:
    """Read both folders side by side.

    Raises:
        CheckpointError: a tensor is not what the source makes of it, bit for bit.
    """
    places = {slot.name: (shard, slot) for shard in shards for slot in shard.slots}
    with contextlib.ExitStack() as stack:
        current, get = None, None
        for name, tensor in weights(opened, dtype):
            shard, slot = places[name]
            # Both come in the order of the plan, so that each shard is opened once.
            if current != shard.file:
                stack.close()
                current, get = shard.file, stack.enter_context(read_safetensors(out / shard.file))
            assert get is not None
            read = get(name)
            wanted = tensor.to(slot.dtype)
            if read.dtype != wanted.dtype or read.shape != wanted.shape or not torch.equal(_raw(read), _raw(wanted)):
                raise CheckpointError(
                    f"{out / shard.file}: {name} does not read back as it was written. Is the disk sound, or was the source "
                    f"changed meanwhile? Remove {out} and start anew"
                )
            advance(slot.stop - slot.start)


def _finish(out: Path, shards: tuple[Shard, ...], config: Mapping[str, Any]) -> None:
    weight_map = {slot.name: shard.file for shard in shards for slot in shard.slots}
    total = sum(shard.size for shard in shards)
    _write_json(out / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    # The last doubt is to be gone before the folder can be loaded.
    open_described(out, describe_config(json.loads(json.dumps(config))))
    _write_json(out / "config.json", config)
    try:
        open_model(out)
    except BaseException:
        (out / "config.json").unlink(missing_ok=True)
        raise
    os.unlink(out / JOURNAL)
    _sync(out)


# ---- the folder -----------------------------------------------------------------------------------------------------


def _check_place(folder: Path, out: Path) -> None:
    try:
        home, target = folder.resolve(), out.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{out}: no place for a folder ({error})") from None
    if target.is_relative_to(home):
        raise CheckpointError(f"{out} lies in {folder}, which is read; expected a place outside of it")
    if os.path.exists(out) and not os.path.isdir(out):
        raise CheckpointError(f"{out} is a file; expected an empty folder, or a path that is not there yet")


def _make_folder(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keep a second run away from the folder; the lock ends with the process, however that ends."""
    handle = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{out}: another tiers convert is writing to it; wait until it has ended") from None
        except OSError:
            # Some network file systems have no locks.
            pass
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _bar(title: str, total: int) -> Iterator[Any]:
    """A progress bar on standard error, if that is a terminal; gives the function that moves it on by bytes."""
    if not sys.stderr.isatty():
        yield lambda number: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=title, unit="B", unit_scale=True, unit_divisor=1000) as bar:
        yield bar.update
