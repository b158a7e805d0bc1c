"""A checkpoint under our names: which parameters its tensors fill, and their shapes."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tiers.reference import model
from tiers.reference.checkpoint import TensorInfo
from tiers.reference.config import ModelConfig
from tiers.reference.errors import TiersError
from tiers.reference.weight_map import WeightMap

# Asked for several times about one model.
parameter_shapes = functools.lru_cache(maxsize=1)(model.parameter_shapes)

# Rules are asked about names with this config where the real one cannot be read: it has every part that they look at.
STAND_IN = ModelConfig.from_dict(
    {
        "vocab_size": 1, "hidden_size": 2, "num_hidden_layers": 1, "max_position_embeddings": 1,
        "mixer": {"num_heads": 1, "num_kv_heads": 1, "head_dim": 2}, "ffn": {"kind": "swiglu", "intermediate_size": 1},
    }
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One of our parameters as the checkpoint has it: the tensor that it comes from, its shape after its rule, its dtype."""

    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Mapped:
    """A checkpoint under our names.

    Attributes:
        parts: our parameters.
        failed: tensors that a rule takes and cannot divide; why.
        twice: parameters that more than one tensor fills.
    """

    parts: Mapping[str, Part]
    failed: Mapping[str, str]
    twice: Mapping[str, tuple[str, ...]]


def mapped(weight_map: WeightMap, infos: Mapping[str, TensorInfo]) -> Mapped:
    """Shapes of our parameters in a checkpoint, without an error where a tensor cannot be divided; reads no data."""
    parts: dict[str, Part] = {}
    failed: dict[str, str] = {}
    twice: dict[str, tuple[str, ...]] = {}
    for source, info in infos.items():
        if weight_map.entries[source].rule is None or 0 in info.shape:
            continue
        try:
            results = list(weight_map.apply(source, torch.empty(info.shape, dtype=info.dtype, device="meta")))
        except (TiersError, RuntimeError, IndexError, ValueError, AssertionError) as error:
            failed[source] = str(error)
            continue
        for target, tensor in results:
            if target in parts:
                twice[target] = (*twice.get(target, (parts[target].source,)), source)
                continue
            parts[target] = Part(source, tuple(tensor.shape), tensor.dtype)
    return Mapped(parts, failed, twice)


def targets(weight_map: WeightMap) -> Iterator[str]:
    """Every parameter that a tensor is to fill, in the order of the tensors."""
    for entry in weight_map.entries.values():
        yield from entry.targets
