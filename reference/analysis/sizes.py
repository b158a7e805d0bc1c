"""Numbers of parameters, and what a token costs in the cache."""

from collections import Counter
from dataclasses import dataclass

from tiers.reference.analysis.layers import LAYER, alike, ranges
from tiers.reference.analysis.parameters import parameter_shapes
from tiers.reference.config import Attention, ModelConfig, Moe


@dataclass(frozen=True)
class LayerSize:
    """Layers alike: parameters of one of them, by part, and elements of its cache per token (keys and values).

    Of the parameters of the ffn `experts` are those of experts that tokens choose; `active` of all are those that one token
    uses.
    """

    layers: str
    parameters: int
    mixer: int
    ffn: int
    gate: int
    norms: int
    cache_elements: int
    experts: int
    active: int


@dataclass(frozen=True)
class Sizes:
    """Parameters and cache of a model.

    Attributes:
        parameters: in total; a tied head counts once.
        embedding: of the embedding and of learned positions.
        head: of a head of its own.
        layers: runs of layers alike.
        cache_elements: per token, all layers together.
        active: parameters that one token uses, embedding and head included.
    """

    parameters: int
    embedding: int
    head: int
    layers: tuple[LayerSize, ...]
    cache_elements: int
    active: int


def sizes(config: ModelConfig) -> Sizes:
    """Parameters that config.json calls for, and what a token costs in the cache, in elements."""
    counts = {name: shape.numel() for name, shape in parameter_shapes(config).items()}
    by_layer: list[Counter[str]] = [Counter() for _ in config.layers]
    for name, count in counts.items():
        if match := LAYER.fullmatch(name):
            part = match[2].partition(".")[0]
            by_layer[int(match[1])]["experts"] += count if match[2].startswith("ffn.experts.") else 0
            by_layer[int(match[1])][part if part in ("mixer", "ffn", "gate") else "norms"] += count
    rows = []
    for parts, layer in zip(by_layer, config.layers, strict=True):
        four = tuple(parts[part] for part in ("mixer", "ffn", "gate", "norms"))
        idle = 0
        if isinstance(layer.ffn, Moe):
            idle = parts["experts"] // layer.ffn.num_experts * (layer.ffn.num_experts - layer.ffn.top_k)
        rows.append((sum(four), *four, cache_elements(layer.mixer), parts["experts"], sum(four) - idle))
    total = sum(counts.values())
    return Sizes(
        total,
        sum(count for name, count in counts.items() if name.startswith("embed_")),
        sum(count for name, count in counts.items() if name.startswith("lm_head.")),
        tuple(LayerSize(ranges(where), *row) for row, where in alike(rows).items()),
        sum(row[5] for row in rows),
        total - sum(row[0] - row[7] for row in rows),
    )


def cache_elements(mixer: Attention | None) -> int:
    """Elements that a layer caches per token: a key and a value for each key/value head."""
    return 0 if mixer is None else 2 * mixer.num_kv_heads * mixer.head_dim
