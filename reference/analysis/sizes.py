"""Numbers of parameters, and what a token costs in the cache."""

from collections import Counter
from dataclasses import dataclass

from tiers.reference.analysis.layers import LAYER, alike, ranges
from tiers.reference.analysis.parameters import parameter_shapes
from tiers.reference.config import Attention, ModelConfig


@dataclass(frozen=True)
class LayerSize:
    """Layers alike: parameters of one of them, by part, and elements of its cache per token (keys and values)."""

    layers: str
    parameters: int
    mixer: int
    ffn: int
    gate: int
    norms: int
    cache_elements: int


@dataclass(frozen=True)
class Sizes:
    """Parameters and cache of a model.

    Attributes:
        parameters: in total; a tied head counts once.
        embedding: of the embedding and of learned positions.
        head: of a head of its own.
        layers: runs of layers alike.
        cache_elements: per token, all layers together.
    """

    parameters: int
    embedding: int
    head: int
    layers: tuple[LayerSize, ...]
    cache_elements: int


def sizes(config: ModelConfig) -> Sizes:
    """Parameters that config.json calls for, and what a token costs in the cache, in elements."""
    counts = {name: shape.numel() for name, shape in parameter_shapes(config).items()}
    by_layer: list[Counter[str]] = [Counter() for _ in config.layers]
    for name, count in counts.items():
        if match := LAYER.fullmatch(name):
            part = match[2].partition(".")[0]
            by_layer[int(match[1])][part if part in ("mixer", "ffn", "gate") else "norms"] += count
    rows = [
        (sum(parts.values()), parts["mixer"], parts["ffn"], parts["gate"], parts["norms"], cache_elements(layer.mixer))
        for parts, layer in zip(by_layer, config.layers, strict=True)
    ]
    return Sizes(
        sum(counts.values()),
        sum(count for name, count in counts.items() if name.startswith("embed_")),
        sum(count for name, count in counts.items() if name.startswith("lm_head.")),
        tuple(LayerSize(ranges(where), *row) for row, where in alike(rows).items()),
        sum(row[-1] for row in rows),
    )


def cache_elements(mixer: Attention | None) -> int:
    """Elements that a layer caches per token: a key and a value for each key/value head."""
    return 0 if mixer is None else 2 * mixer.num_kv_heads * mixer.head_dim
