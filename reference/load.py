"""Fill a model from a folder, strictly: every parameter exactly once, every tensor of the folder used.

`weights` is what every loader, the reference model's and vLLM's, gets its tensors from.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from tiers.reference.checkpoint import Checkpoint, TensorInfo, listed, open_checkpoint
from tiers.reference.config import ModelConfig
from tiers.reference.errors import CheckpointError
from tiers.reference.model import ReferenceModel, parameter_shapes

# Tensors with one row per token id. More rows than vocab_size are padding (or added tokens that the config does not
# count): no id can reach them, so they are left out.
VOCABULARY_TENSORS = ("embed_tokens.weight", "lm_head.weight", ".gate.table.weight")


def check_headers(config: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Compare the tensors of a folder with those that the config calls for; reads no data.

    Returns:
        Notes about what is odd but harmless.

    Raises:
        CheckpointError: a tensor is missing, unexpected, has no elements, another shape, or no floating-point dtype.
    """
    expected = parameter_shapes(config)
    found = checkpoint.infos
    notes = list(checkpoint.notes)
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
            f"{checkpoint.folder}: no tensor {listed(missing)}; config.json calls for {len(expected)} tensors{hint}"
        )
    if extra:
        hint = " (tie_word_embeddings is true, so the head is the embedding)" if "lm_head.weight" in extra else ""
        raise CheckpointError(
            f"{checkpoint.folder}: unexpected tensor {listed(extra)}; config.json describes a model without it{hint}. "
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


def weights(
    config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of the model once, on the CPU, checked; `dtype` is what the caller will convert them to.

    Raises:
        CheckpointError: as `check_headers` and `CheckedTensors`.
    """
    check_headers(config, checkpoint)
    checked = CheckedTensors(config, str(checkpoint.folder), dtype)
    yield from checked.check(checkpoint.tensors())
    checked.finish()


def check_folder(folder: Path) -> tuple[ModelConfig, Checkpoint, list[str]]:
    """Config, headers and their agreement; what can be known of a folder without reading weights.

    Returns:
        The config, the checkpoint, and notes about what is odd but harmless.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; expected a model folder with config.json and *.safetensors")
    config = ModelConfig.from_json(folder)
    checkpoint = open_checkpoint(folder)
    return config, checkpoint, check_headers(config, checkpoint)


def load_model(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> ReferenceModel:
    """Build the reference model of a folder and fill it.

    Raises:
        ConfigError, CheckpointError: see `check_folder` and `weights`.
    """
    config, checkpoint, _ = check_folder(folder)
    with torch.device("meta"):
        model = ReferenceModel(config)
    # Layers share tables; each table moves once.
    moved: dict[int, Tensor] = {}
    buffers = {
        name: moved.setdefault(id(buffer), buffer.to(device))
        for name, buffer in model.named_buffers(remove_duplicate=False)
    }
    state: Mapping[str, Tensor] = {
        name: tensor.to(device, dtype) for name, tensor in weights(config, checkpoint, dtype)
    }
    model.load_state_dict(state, strict=True, assign=True)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    return model.requires_grad_(False).eval()
