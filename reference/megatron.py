"""Join the checkpoint of a Megatron training: a folder per rank, each with its part of every layer.

    FOLDER/latest_checkpointed_iteration.txt      100, or release; may be missing
    FOLDER/iter_0000100/mp_rank_00/model_optim_rng.pt           tensor rank 0
    FOLDER/iter_0000100/mp_rank_01_002/model_optim_rng.pt       tensor rank 1, pipeline rank 2
    FOLDER/mp_rank_00/model.safetensors                         the same layout with other files

Names stay Megatron's own, with the layers of all pipeline stages counted through. Rows of a fused QKV matrix are joined
in their order and not looked at: a rank may hold any part of a head.
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiers.reference import torch_files, wrappers
from tiers.reference.checkpoint import (
    INDEX_NAME,
    Checkpoint,
    Get,
    Reader,
    TensorInfo,
    collect,
    inside,
    listed,
    read_header,
    read_text,
)
from tiers.reference.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"


class Join(Enum):
    """How the parts of a parameter on the tensor ranks become one tensor."""

    ROWS = "concatenated on dimension 0"
    COLUMNS = "concatenated on dimension 1"
    GATED = "[gate; up] of each rank taken apart, all gates and then all ups"
    SAME = "equal on all ranks, taken once"


# First match on the end of the name counts. Column-parallel layers are cut in rows, row-parallel ones in columns; the
# bias of a row-parallel layer is added after the sum over ranks, so every rank holds all of it. No match: SAME.
RULES: tuple[tuple[str, Join], ...] = (
    (r"(word_embeddings|word_embeddings_for_head)\.weight", Join.ROWS),
    (r"(output_layer|lm_head)\.(weight|bias)", Join.ROWS),
    (r"(linear_qkv|linear_q|linear_kv|linear_q_up_proj|linear_kv_up_proj)\.(weight|bias)", Join.ROWS),
    (r"(query_key_value|query|key_value)\.(weight|bias)", Join.ROWS),
    (r"(linear_fc1|dense_h_to_4h)\.(weight|bias)", Join.GATED),  # ROWS if it is not gated: `_join_of` looks
    (r"(linear_proj|\w*attention\.dense)\.weight", Join.COLUMNS),
    (r"(linear_fc2|dense_4h_to_h)\.weight", Join.COLUMNS),
)

# The matrix that takes in what the gated one gives out.
_NEXT = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}

# What Transformer Engine keeps beside its weights: scales of float8, nothing that a model in 16 bits needs.
_EXTRA_STATE = "_extra_state"

# Megatron puts its command line beside the weights, and the state of NumPy's generator; nothing else is let through.
_ALLOWED = (argparse.Namespace, *torch_files.NUMPY_ARRAYS)

_RANK_NAME = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_LAYER = re.compile(r"(?:^|(.*?)\.)layers\.(0|[1-9]\d{0,5})\.(.*)")
# Deeper nesting than any Megatron's; a file can nest the same dict without end.
_MAX_DEPTH, _MAX_NAMES = 8, 1_000_000


@dataclass(frozen=True)
class _Rank:
    """The weights of one rank, and how many ranks its arguments say there are (None: they do not say)."""

    checkpoint: Checkpoint
    tensor_ranks: int | None
    pipeline_ranks: int | None


@dataclass(frozen=True)
class _Part:
    """Where a parameter lies: its pipeline stages (more than one if they share it) and its name there; how it joins."""

    places: tuple[tuple[int, str], ...]
    join: Join


def is_megatron(folder: Path) -> bool:
    """Whether a folder has folders for ranks, or for iterations that have them."""
    return (folder / TRACKER).exists() or any(folder.glob("mp_rank_*/")) or any(folder.glob("iter_*/mp_rank_*/"))


def open_megatron(folder: Path) -> Checkpoint:
    """Read the headers of all ranks and say how their tensors become one model's.

    Raises:
        CheckpointError: a rank is missing or one too many; ranks hold different tensors, or shapes that do not fit each
            other; a file cannot be read.
    """
    where = _iteration(folder)
    paths, tp, pp = _rank_folders(where)
    opened = {rank: _open_rank(folder, path) for rank, path in paths.items()}
    for path, part in zip(paths.values(), opened.values(), strict=True):
        for what, said, there in (("tensor", part.tensor_ranks, tp), ("pipeline", part.pipeline_ranks, pp)):
            if said is not None and said != there:
                raise CheckpointError(
                    f"{where}: found folders of {there} {what} rank{'s' * (there > 1)}, but the training's arguments in "
                    f"{path.name} say {said}; expected {said}. Copy the folders that are missing, or remove those of "
                    "another training"
                )
    ranks = {rank: part.checkpoint for rank, part in opened.items()}
    for stage in range(pp):
        _check_same_names(where, [ranks[rank, stage] for rank in range(tp)], [paths[rank, stage] for rank in range(tp)])
    places = _number_layers(where, [sorted(ranks[0, stage].infos) for stage in range(pp)])
    parts, infos = {}, {}
    for name, at in places.items():
        parts[name], infos[name] = _plan(where, name, at, ranks, tp)
    notes = [note for rank in ranks.values() for note in rank.notes]
    notes += _describe(where, parts, tp, pp)
    return Checkpoint(folder, infos, list(dict.fromkeys(notes)), _reader(where, ranks, parts, infos, tp))


# ---- folders --------------------------------------------------------------------------------------------------------


def _iteration(folder: Path) -> Path:
    if not (folder / TRACKER).exists():
        if any(folder.glob("mp_rank_*/")):
            return folder
        iterations = sorted(path for path in folder.glob("iter_*/") if any(path.glob("mp_rank_*/")))
        if len(iterations) > 1:
            raise CheckpointError(
                f"{folder}: {listed([path.name for path in iterations])}, and no {TRACKER} that says which; expected one "
                "iteration. Name the folder of the one to read"
            )
        return iterations[0]
    text = read_text(folder, folder / TRACKER, 100).strip()
    if text != "release" and not re.fullmatch(r"[0-9]+", text):
        raise CheckpointError(f"{folder / TRACKER}: {text!r}; expected the number of an iteration, or release")
    where = folder / (text if text == "release" else f"iter_{int(text):07d}")
    if not where.is_dir():
        raise CheckpointError(
            f"{folder / TRACKER} says {text}, but there is no folder {where.name}; expected the ranks of that iteration "
            "there. Copy it, or name the folder of another iteration"
        )
    torch_files.refuse_pieces(inside(folder, where))
    return where


def _rank_folders(where: Path) -> tuple[dict[tuple[int, int], Path], int, int]:
    """Folder by (tensor rank, pipeline rank), tensor ranks fastest; and the number of each."""
    paths: dict[tuple[int, int], Path] = {}
    forms = set()
    for path in sorted(where.glob("mp_rank_*/")):
        match = _RANK_NAME.fullmatch(path.name)
        if match is None:
            raise CheckpointError(
                f"{path}: not the folder of a tensor rank and a pipeline rank; expected a name like mp_rank_00 or "
                "mp_rank_00_000. Ranks of expert parallelism cannot be joined: convert to expert-parallel size 1 first"
            )
        rank = int(match[1]), int(match[2] or 0)
        forms.add(match[2] is None)
        if rank in paths or len(forms) > 1:
            other = paths.get(rank) or next(iter(paths.values()))
            raise CheckpointError(
                f"{where}: {other.name} and {path.name} are named after different layouts; expected the ranks of one "
                "training. Remove those of the other"
            )
        paths[rank] = path
    if not paths:
        raise CheckpointError(f"{where}: no folder mp_rank_*; expected one per rank")
    tp, pp = (1 + max(rank[axis] for rank in paths) for axis in (0, 1))
    # Names, not the product: a folder called mp_rank_999999999 must not make a list of that length.
    if len(paths) != tp * pp:
        wanted = ((t, p) for p in range(pp) for t in range(tp))
        missing = next(rank for rank in wanted if rank not in paths)
        name = f"mp_rank_{missing[0]:02d}" + ("" if True in forms else f"_{missing[1]:03d}")
        raise CheckpointError(
            f"{where}: no folder {name}; expected one for each of {tp} tensor and {pp} pipeline ranks, as the highest "
            f"numbers say, and found {len(paths)}. Copy the rest"
        )
    return {(t, p): paths[t, p] for p in range(pp) for t in range(tp)}, tp, pp


def _open_rank(root: Path, path: Path) -> _Rank:
    safetensors = sorted(path.glob("*.safetensors"))
    if safetensors:
        infos, notes = collect(path, safetensors, INDEX_NAME, read_header, root)
        checkpoint = Checkpoint(path, infos, notes)
        # A nested dict that was flattened with the key that the files of torch have it under.
        prefix = "model." if all(name.startswith("model.") for name in infos) else ""
        bare = {name.removeprefix(prefix): name for name in infos}
        return _Rank(_unwrapped(checkpoint.renamed(bare)), None, None)
    declared: list[Any] = []

    def find(loaded: Any, file: Path) -> tuple[dict[str, Tensor], list[str]]:
        declared[:] = [loaded.get("args") if isinstance(loaded, Mapping) else None]
        return find_model(loaded, file)

    infos, notes = torch_files.gather(path, [_rank_file(path)], root, find, _ALLOWED)
    checkpoint = Checkpoint(path, infos, notes, lambda file: torch_files.opened(file, find_model, _ALLOWED))
    sizes = [getattr(declared[0], f"{kind}_model_parallel_size", None) for kind in ("tensor", "pipeline")]
    tensor, pipeline = (size if type(size) is int else None for size in sizes)
    return _Rank(_unwrapped(checkpoint), tensor, pipeline)


def _unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """Without wrappers and without what is no weight, so that the rules see Megatron's own names."""
    old = wrappers.unwrap(checkpoint.infos, str(checkpoint.folder))
    kept = {new: name for new, name in old.items() if not _is_extra_state(new)}
    notes = wrappers.describe(old)
    if len(kept) < len(old):
        notes.append(f"{_EXTRA_STATE} of Transformer Engine is no weight, so not read")
    return checkpoint.renamed(kept, notes)


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2].startswith(_EXTRA_STATE)


def _rank_file(path: Path) -> Path:
    for name in ("model_optim_rng.pt", "model_rng.pt"):
        if (path / name).exists():
            return path / name
    files = torch_files.candidates(path)
    if len(files) != 1:
        found = f"found {listed([file.name for file in files])}" if files else "found none"
        raise CheckpointError(
            f"{path}: expected one file with the weights of this rank, model_optim_rng.pt or *.safetensors; {found}"
        )
    return files[0]


def find_model(loaded: Any, file: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors below "model" of what a rank's file held, nested names joined by dots, and notes.

    Raises:
        CheckpointError: there is none; it is that of an interleaved pipeline.
    """
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{file}: holds {type(loaded).__name__}; expected a dict with the entry model")
    if "model0" in loaded:
        raise CheckpointError(
            f"{file}: model0: the layers of an interleaved (virtual) pipeline; expected the entry model. Convert to a "
            "pipeline without virtual stages first"
        )
    if not isinstance(loaded.get("model"), Mapping):
        raise CheckpointError(
            f"{file}: no entry model, only {torch_files.shown(list(loaded))}; expected what Megatron saves"
        )
    tensors: dict[str, Tensor] = {}
    rest: list[str] = []
    extra = False
    for name, value in _leaves(loaded["model"], file):
        if _is_extra_state(name):
            extra = True
        elif isinstance(value, Tensor):
            tensors[name] = value
        else:
            rest.append(name)
    if not tensors:
        raise CheckpointError(f"{file}: no tensor below model; expected the weights of this rank")
    notes = [f"{_EXTRA_STATE} of Transformer Engine is no weight, so not read"] if extra else []
    if rest:
        notes.append(f"no weights, so not read: {listed(sorted(rest))}")
    training = [key for key in loaded if torch_files.is_training_state(key)]
    if training:
        notes.append(f"training state, so not read: {torch_files.shown(training)}")
    return tensors, notes


def _leaves(tree: Mapping[Any, Any], file: Path) -> Iterator[tuple[str, Any]]:
    count = 0
    stack: list[tuple[str, Any, int]] = [("", tree, 0)]
    while stack:
        name, value, depth = stack.pop()
        count += 1
        if depth > _MAX_DEPTH or count > _MAX_NAMES:
            raise CheckpointError(
                f"{file}: dicts below model are nested deeper than {_MAX_DEPTH} or hold more than {_MAX_NAMES} names; "
                "expected the weights of one rank"
            )
        if isinstance(value, Mapping):
            stack += [
                (f"{name}.{key}" if name else f"{key}", v, depth + 1) for key, v in value.items() if type(key) is str
            ]
        else:
            yield name, value


# ---- names and shapes -----------------------------------------------------------------------------------------------


def _check_same_names(where: Path, ranks: Sequence[Checkpoint], paths: Sequence[Path]) -> None:
    for rank, path in zip(ranks[1:], paths[1:], strict=True):
        different = sorted(rank.infos.keys() ^ ranks[0].infos.keys())
        if different:
            has, lacks = (path, paths[0]) if different[0] in rank.infos else (paths[0], path)
            raise CheckpointError(
                f"{where}: {has.name} has {listed(different[:1])}, {lacks.name} does not; expected the same tensors on "
                "all tensor ranks of a stage. Are the folders of one training?"
            )


def _number_layers(where: Path, stages: Sequence[Sequence[str]]) -> dict[str, tuple[tuple[int, str], ...]]:
    """Global name to (stage, name there); layers are counted through, each stack of layers by itself."""
    places: dict[str, tuple[tuple[int, str], ...]] = {}
    offsets: dict[str, int] = {}
    for stage, names in enumerate(stages):
        numbers: dict[str, set[int]] = {}
        for name in names:
            match = _LAYER.fullmatch(name)
            if match is None:
                new = name
            else:
                number = int(match[2])
                numbers.setdefault(match[1] or "", set()).add(number)
                stack = f"{match[1]}.layers" if match[1] else "layers"
                new = f"{stack}.{offsets.get(match[1] or '', 0) + number}.{match[3]}"
            places[new] = (*places.get(new, ()), (stage, name))
        for stack, found in numbers.items():
            if max(found) != len(found) - 1:
                raise CheckpointError(
                    f"{where}: stage {stage} of the pipeline has layers {listed([str(n) for n in sorted(found)], 8)} of "
                    f"{stack or 'layers'}; expected 0 to {len(found) - 1}, since every stage counts its own from 0"
                )
            offsets[stack] = offsets.get(stack, 0) + len(found)
    return places


def _plan(
    where: Path,
    name: str,
    places: tuple[tuple[int, str], ...],
    ranks: Mapping[tuple[int, int], Checkpoint],
    tp: int,
) -> tuple[_Part, TensorInfo]:
    found = []
    join = Join.SAME
    for stage, local in places:
        infos = [ranks[rank, stage].infos for rank in range(tp)]
        join = _join_of(where, local, infos)
        found.append(_joined_info(where, local, join, [info[local] for info in infos]))
    for info in found[1:]:
        if (info.dtype, info.shape) != (found[0].dtype, found[0].shape):
            raise CheckpointError(
                f"{where}: {name} is {list(found[0].shape)} {found[0].dtype} on stage {places[0][0]} of the pipeline and "
                f"{list(info.shape)} {info.dtype} on another; expected a tensor that stages share to be the same"
            )
    return _Part(places, join), found[0]


def _join_of(where: Path, name: str, ranks: Sequence[Mapping[str, TensorInfo]]) -> Join:
    join = next((join for pattern, join in RULES if re.search(rf"(?:^|\.){pattern}$", name)), Join.SAME)
    if join is not Join.GATED or len(ranks) == 1:
        return join
    # [gate; up] is twice as long as what the next matrix takes in; a plain one is as long.
    head = name.rpartition(".")[0]
    own = next(own for own in _NEXT if head.endswith(own))
    behind = f"{head.removesuffix(own)}{_NEXT[own]}.weight"
    if behind not in ranks[0]:
        raise CheckpointError(
            f"{where}: {name} without {behind}, so it cannot be told whether it is gated; expected both in one stage"
        )
    widths = [(rank[name].shape[:1], rank[behind].shape[1:]) for rank in ranks]
    if all(len(rows) == len(columns) == 1 and rows[0] == 2 * columns[0] for rows, columns in widths):
        return Join.GATED
    if all(len(rows) == len(columns) == 1 and rows[0] == columns[0] for rows, columns in widths):
        return Join.ROWS
    raise CheckpointError(
        f"{where}: {name} has {[list(rows) for rows, _ in widths]} rows on its ranks, and {behind} has "
        f"{[list(columns) for _, columns in widths]} columns; expected as many rows as columns on each rank, or twice as "
        "many if it is gated"
    )


def _joined_info(where: Path, name: str, join: Join, infos: Sequence[TensorInfo]) -> TensorInfo:
    first = infos[0]
    axis = {Join.ROWS: 0, Join.GATED: 0, Join.COLUMNS: 1, Join.SAME: None}[join]
    for info in infos:
        same = info.dtype == first.dtype and len(info.shape) == len(first.shape)
        if axis is None:
            same = same and info.shape == first.shape
        else:
            same = same and len(info.shape) > axis
            same = same and info.shape[:axis] + info.shape[axis + 1 :] == first.shape[:axis] + first.shape[axis + 1 :]
        if not same:
            raise CheckpointError(
                f"{where}: {name} is {list(first.shape)} {first.dtype} in {first.file.parent.name} and "
                f"{list(info.shape)} {info.dtype} in {info.file.parent.name}; expected parts that can be "
                f"{join.value}. Are the folders of one training?"
            )
    shape = list(first.shape)
    if axis is not None:
        shape[axis] = sum(info.shape[axis] for info in infos)
    return TensorInfo(first.file, first.dtype, tuple(shape))


def _describe(where: Path, parts: Mapping[str, _Part], tp: int, pp: int) -> list[str]:
    notes = [f"joined {tp} tensor and {pp} pipeline ranks of Megatron from {where.name}"] if tp * pp > 1 else []
    gated = [name for name, part in parts.items() if part.join is Join.GATED and tp > 1]
    if gated:
        notes.append(
            f"{len(gated)} tensors hold [gate; up], twice the width that the next matrix takes in; their halves were "
            f"joined apart: {listed(gated, 1)}"
        )
    return notes


# ---- tensors --------------------------------------------------------------------------------------------------------


def join(how: Join, parts: Sequence[Tensor]) -> Tensor:
    """One tensor from those of the tensor ranks, in their order; of SAME the first, unchecked."""
    if how is Join.SAME or len(parts) == 1:
        return parts[0]
    if how is Join.GATED:
        halves = [part.chunk(2, dim=0) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(list(parts), dim=1 if how is Join.COLUMNS else 0)


def _reader(
    where: Path,
    ranks: Mapping[tuple[int, int], Checkpoint],
    parts: Mapping[str, _Part],
    infos: Mapping[str, TensorInfo],
    tp: int,
) -> Reader:
    @contextmanager
    def read(file: Path) -> Iterator[Get]:
        # `file` is that of tensor rank 0; the others of its stage are opened when the first tensor asks for them.
        with ExitStack() as stack:
            opened: dict[Path, Get] = {}

            def take(rank: int, stage: int, name: str) -> Tensor:
                checkpoint = ranks[rank, stage]
                source = checkpoint.infos[name].file
                if source not in opened:
                    opened[source] = stack.enter_context(checkpoint.read(source))
                return opened[source](name)

            def get(name: str) -> Tensor:
                part = parts[name]
                stages = []
                for stage, local in part.places:
                    pieces = [take(rank, stage, local) for rank in range(tp)]
                    if part.join is Join.SAME:
                        _check_equal(where, name, pieces, "tensor ranks")
                    stages.append(join(part.join, pieces))
                _check_equal(where, name, stages, "pipeline stages")
                return stages[0]

            yield get

    return read


def _check_equal(where: Path, name: str, tensors: Sequence[Tensor], what: str) -> None:
    for number, tensor in enumerate(tensors[1:], start=1):
        if not _equal(tensors[0], tensor):
            raise CheckpointError(
                f"{where}: {name} is not the same on the {what}: {what[:-1]} {number} differs from 0; expected equal "
                "copies, since Megatron keeps all of this tensor on each of them. The files are of different steps or "
                "trainings, or it is a tensor that no joining rule is known for"
            )


def _equal(a: Tensor, b: Tensor) -> bool:
    # NaN equals no NaN; that the tensor holds one is for the loader to report.
    return torch.equal(a, b) or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
