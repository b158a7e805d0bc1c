"""Fill a model from a folder, strictly: every parameter exactly once, every tensor of the folder used.

`weights` is what every loader, the reference model's and vLLM's, gets its tensors from.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiers.reference import fields
from tiers.reference.analysis import guesses
from tiers.reference.checkpoint import Checkpoint, TensorInfo, inside, listed, open_checkpoint
from tiers.reference.config import ModelConfig, read_json
from tiers.reference.errors import CheckpointError, ConfigError
from tiers.reference.family import Family, find_family
from tiers.reference.model import ReferenceModel, parameter_shapes
from tiers.reference.weight_map import WeightMap

# Tensors with one row per token id. More rows than vocab_size are padding (or added tokens that the config does not
# count): no id can reach them, so they are left out.
VOCABULARY_TENSORS = ("embed_tokens.weight", "lm_head.weight", "lm_head.bias", ".gate.table.weight")

# Of a tensor, in characters; the names of models have some 80.
_MAX_NAME = 200


@dataclass(frozen=True)
class Description:
    """What config.json says, in our words.

    Attributes:
        family: how it was read.
        config: the model.
        raw: the model's description as our own config.json would have it.
        unused: path and value of everything in config.json that nothing consumes.
        notes: sentences about what is odd but harmless.
    """

    family: Family
    config: ModelConfig
    raw: Mapping[str, Any]
    unused: Mapping[str, Any]
    notes: tuple[str, ...]


def describe(folder: Path, family: str | None = None) -> Description:
    """Read config.json of a model folder, of ours or of another family.

    Args:
        folder: holds config.json.
        family: name of a family or path of its file; None goes by what the config says.

    Raises:
        ConfigError, FamilyError: see `find_family`, `Family.translate` and `ModelConfig.from_dict`.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; expected a model folder with config.json and *.safetensors")
    return describe_config(read_config(folder), family)


def read_config(folder: Path) -> Any:
    """The parsed config.json of a folder, which must not lead out of it; for a GGUF file alone, its metadata.

    Raises:
        ConfigError, CheckpointError: see `read_json`, `inside` and `gguf_file.describe`.
    """
    if not (folder / "config.json").exists() and any(folder.glob("*.gguf")):
        from tiers.reference import gguf_file

        return gguf_file.describe(folder)
    return read_json(inside(folder, folder / "config.json"))


def describe_config(raw: Any, family: str | None = None) -> Description:
    """As `describe`, from the parsed contents of a config.json."""
    found = find_family(raw, family)
    for path, value in fields.leaves(raw):
        if "quantization_config" in path.split(".") and value is not None:
            raise ConfigError(
                f"config.json: {path} is {fields.shown(value)}; quantised checkpoints are not supported yet. "
                "Export the weights in float32, float16 or bfloat16 and remove quantization_config"
            )
    translation = found.translate(raw)
    config = ModelConfig.from_dict(translation.description)
    return Description(found, config, translation.description, translation.unused, tuple(translation.notes))


@dataclass(frozen=True)
class ModelFolder:
    """A folder whose config and headers agree.

    Attributes:
        folder: where it lies.
        description: of the model.
        checkpoint: the tensors under their own names.
        map: where each of them goes.
        notes: sentences about what is odd but harmless.
    """

    folder: Path
    description: Description
    checkpoint: Checkpoint
    map: WeightMap
    notes: list[str]

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return self.description.config


def open_model(folder: Path, family: str | None = None) -> ModelFolder:
    """Config, headers and their agreement; what can be known of a folder without reading weights.

    Raises:
        ConfigError, FamilyError, CheckpointError: see `describe`, `open_checkpoint` and `check_headers`.
    """
    description = describe(folder, family)
    return open_described(folder, description)


def open_described(folder: Path, description: Description) -> ModelFolder:
    """As `open_model`, with a description that is there already."""
    checkpoint = open_checkpoint(folder)
    _check_names(checkpoint)
    weight_map = WeightMap(description.family, description.config, checkpoint.infos)
    notes = [*description.notes, *checkpoint.notes, *weight_map.notes]
    if description.unused:
        shown = [f"{path} = {fields.shown(value)}" for path, value in description.unused.items()]
        notes.append(f"config.json: nothing reads {listed(shown)}; does the model compute something by it?")
    if weight_map.unmapped:
        raise CheckpointError(
            f"{folder}: unexpected tensor {listed(weight_map.unmapped)}; no rule of family {description.family.name} is about "
            f"it{_grouped(weight_map.unmapped, checkpoint)}. Nothing may be left out in silence: remove it from the file, or add a rule to a family file, with drop and a "
            "reason if it is not needed"
        )
    notes += check_headers(description.config, weight_map.infos(checkpoint.infos), folder)
    return ModelFolder(folder, description, checkpoint, weight_map, notes)


def _grouped(names: list[str], checkpoint: Checkpoint) -> str:
    """What tensors without a place probably are, by module, where their names tell: "; vision_tower (12) looks like ..."."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(guesses.top_module(name), []).append(name)
    found = []
    for module, members in groups.items():
        if meaning := guesses.guess(members[0], checkpoint.infos.get(members[0])):
            found.append(f"{module} ({len(members)}) looks like {meaning}")
    return f"; {'; '.join(found[:3])}" if found else ""


def _check_names(checkpoint: Checkpoint) -> None:
    """A damaged file may hold names that no message could show."""
    for name, info in checkpoint.infos.items():
        if len(name) > _MAX_NAME or not name.isprintable():
            raise CheckpointError(
                f"{info.file}: the name of a tensor is {name[:60]!r}, {len(name)} characters; expected at most {_MAX_NAME} that "
                "can be printed. Is the file damaged?"
            )


def check_headers(config: ModelConfig, found: Mapping[str, TensorInfo], folder: Path) -> list[str]:
    """Compare tensors, under our names, with those that the config calls for; reads no data.

    Returns:
        Notes about what is odd but harmless.

    Raises:
        CheckpointError: a tensor is missing, unexpected, has no elements, another shape, or no floating-point dtype.
    """
    # Listing the parameters of a thousand layers takes seconds; this tells at once where a number is wrong.
    if config.num_hidden_layers > len(found):
        raise CheckpointError(
            f"{folder}: {len(found)} tensors, but num_hidden_layers in config.json is {config.num_hidden_layers}; expected "
            "several for each layer"
        )
    expected = parameter_shapes(config)
    notes: list[str] = []
    for name, info in found.items():
        if 0 in info.shape:
            raise CheckpointError(
                f"{info.file}: {name} has shape {list(info.shape)}, so no elements; expected "
                f"{list(expected.get(name, ()))}. ZeRO-3 saves such tensors when its shards are not gathered: "
                "consolidate the checkpoint first"
            )
    missing = sorted(set(expected) - set(found))
    extra = sorted(set(found) - set(expected) - _tied(config))
    if missing:
        hint = f"; the folder has {listed(extra)}, which the model has no place for" if extra else ""
        raise CheckpointError(
            f"{folder}: no tensor {listed(missing)}; config.json calls for {len(expected)} tensors{hint}"
        )
    if extra:
        hint = " (tie_word_embeddings is true, so the head is the embedding)" if "lm_head.weight" in extra else ""
        raise CheckpointError(
            f"{folder}: unexpected tensor {listed(extra)}; config.json describes a model without it{hint}. "
            "Nothing may be left out in silence: remove it from the file or describe it in the config"
        )
    for name, shape in expected.items():
        notes += _check_tensor(name, found[name], shape)
    return notes


def _tied(config: ModelConfig) -> set[str]:
    return {"lm_head.weight"} if config.tie_word_embeddings else set()


def _check_tensor(name: str, info: TensorInfo, shape: torch.Size) -> list[str]:
    if not info.dtype.is_floating_point or info.dtype.itemsize < 2:
        raise CheckpointError(f"{info.file}: {name} is {info.dtype}; expected a floating-point type of 16 bits or more")
    if info.shape == tuple(shape):
        return []
    rows = info.shape[0] if info.shape else 0
    if name.endswith(VOCABULARY_TENSORS) and info.shape[1:] == tuple(shape[1:]):
        if rows > shape[0]:
            return [f"{name} has {rows} rows, vocab_size is {shape[0]}; the last {rows - shape[0]} rows are not used"]
        raise CheckpointError(
            f"{info.file}: {name} has {rows} rows, but vocab_size in config.json is {shape[0]}; expected at least as many "
            f"rows. Set vocab_size to {rows} or export the whole matrix"
        )
    raise CheckpointError(f"{info.file}: {name} has shape {list(info.shape)}; config.json calls for {list(shape)}")


class CheckedTensors:
    """Every parameter of a model exactly once: shapes right, values finite, surplus vocabulary rows cut off.

    Feed it the tensors of a checkpoint in any order, then call `finish`.

    Args:
        config: what the tensors are for.
        source: what to call the place they come from.
        dtype: what they will be converted to; None if they stay as they are.
    """

    def __init__(self, config: ModelConfig, source: str = "checkpoint", dtype: torch.dtype | None = None) -> None:
        self.config, self.source, self.dtype = config, source, dtype
        self.expected = parameter_shapes(config)
        self.seen: set[str] = set()
        self._tied: dict[str, Tensor] = {}

    def check(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor that fills a parameter.

        Raises:
            CheckpointError: a tensor is unknown, comes twice, has a wrong shape, or holds NaN or infinity; a head
                differs from the embedding that it is tied to.
        """
        tied = _tied(self.config)
        for name, tensor in tensors:
            if name in self.seen:
                raise CheckpointError(f"{self.source}: {name} comes twice; expected it once")
            self.seen.add(name)
            if name not in self.expected and name not in tied:
                raise CheckpointError(
                    f"{self.source}: unexpected tensor {name}; config.json describes a model without it"
                )
            if tied and name in ("lm_head.weight", "embed_tokens.weight"):
                self._check_tied(name, tensor)
            if name in self.expected:
                _check_tensor(
                    name, TensorInfo(Path(self.source), tensor.dtype, tuple(tensor.shape)), self.expected[name]
                )
                check_finite(name, tensor, self.source)
                _check_positive(name, tensor, self.source)
                self._check_range(name, tensor)
                yield name, tensor[: self.expected[name][0]]

    def finish(self) -> None:
        """Raises:
        CheckpointError: a parameter got no tensor.
        """
        missing = sorted(set(self.expected) - self.seen)
        if missing:
            raise CheckpointError(
                f"{self.source}: no tensor {listed(missing)}; config.json calls for {len(self.expected)} tensors"
            )

    def _check_range(self, name: str, tensor: Tensor) -> None:
        """A finite value can still be infinite in the dtype that is served."""
        if self.dtype is None or torch.finfo(self.dtype).max >= torch.finfo(tensor.dtype).max:
            return
        largest = tensor.abs().max().item()
        if largest > torch.finfo(self.dtype).max:
            raise CheckpointError(
                f"{self.source}: {name} holds {largest:.4g}, which {self.dtype} cannot; its largest number is "
                f"{torch.finfo(self.dtype).max:.4g}. Serve the model in bfloat16 or float32"
            )

    def _check_tied(self, name: str, tensor: Tensor) -> None:
        self._tied[name] = tensor
        if len(self._tied) == 2 and not torch.equal(self._tied["lm_head.weight"], self._tied["embed_tokens.weight"]):
            raise CheckpointError(
                f"{self.source}: tie_word_embeddings is true, but lm_head.weight differs from embed_tokens.weight. "
                "Set tie_word_embeddings to false to use the head, or remove it from the file"
            )


def _check_positive(name: str, tensor: Tensor, source: str) -> None:
    """A logarithm of 1 + r2 * distance is no number where r2 is negative; training clamps r1 and r2 above 0."""
    if name.rpartition(".")[2] not in ("kerple_r1", "kerple_r2") or bool((tensor >= 0).all()):
        return
    first = int((tensor < 0).nonzero()[0])
    raise CheckpointError(
        f"{source}: {name}[{first}] is {tensor[first].item():.4g}; expected 0 or more. If training clamps these numbers when "
        "they are used, clamp them in the file"
    )


def check_finite(name: str, tensor: Tensor, source: str) -> None:
    """Raises:
    CheckpointError: the tensor holds NaN or infinity; says how many and where the first is.
    """
    # One pass over memory in the good case: a sum is finite unless an element is not (or it overflows, seen below).
    if torch.isfinite(tensor.sum(dtype=torch.float32)):
        return
    bad = (~torch.isfinite(tensor)).nonzero()
    if len(bad):
        where = bad[0].tolist()
        raise CheckpointError(
            f"{source}: {name} has {len(bad)} of {tensor.numel()} values that are not finite, the first "
            f"{tensor[tuple(where)].item()} at {where}; expected numbers. The export overflowed, or the file is damaged"
        )


def weights(model: ModelFolder, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of the model once, on the CPU, checked; `dtype` is what the caller will convert them to.

    Raises:
        CheckpointError: as `CheckedTensors`.
    """
    checked = CheckedTensors(model.config, str(model.folder), dtype)
    yield from checked.check(mapped(model.map, model.checkpoint.tensors()))
    checked.finish()


def mapped(weight_map: WeightMap, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint under our names, taken apart where a family's rules say so."""
    for name, tensor in tensors:
        yield from weight_map.apply(name, tensor)


def load_model(
    folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", family: str | None = None
) -> ReferenceModel:
    """Build the reference model of a folder and fill it.

    Raises:
        ConfigError, FamilyError, CheckpointError: see `open_model` and `weights`.
    """
    opened = open_model(folder, family)
    config = opened.config
    with torch.device("meta"):
        model = ReferenceModel(config)
    # Layers share tables; each table moves once.
    moved: dict[int, Tensor] = {}
    buffers = {
        name: moved.setdefault(id(buffer), buffer.to(device))
        for name, buffer in model.named_buffers(remove_duplicate=False)
    }
    state: Mapping[str, Tensor] = {name: tensor.to(device, dtype) for name, tensor in weights(opened, dtype)}
    model.load_state_dict(state, strict=True, assign=True)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    return model.requires_grad_(False).eval()
