"""How vLLM cuts a model into tensor-parallel ranks, and which numbers of ranks it refuses."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiers.reference.analysis.layers import alike, ranges
from tiers.reference.config import Layer, ModelConfig, Moe
from tiers.reference.heads import HeadLayout

# Numbers of tensor-parallel ranks that are tried.
RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
REFUSE = "refuse: "

# vLLM pads vocabularies to a multiple of this before it cuts them evenly: VocabParallelEmbedding and its head in 0.32.0.
VOCAB_PADDING = 64


@dataclass(frozen=True)
class Cut:
    """What becomes of a kind of tensor on each tensor-parallel rank.

    Attributes:
        tensors: their names.
        layers: which layers; "" for tensors of no layer.
        by_size: number of ranks to "whole", "shard: ...", "replicate: ..." or "refuse: ...".
        expert_parallel: holds only with --enable-expert-parallel (True) or without it (False); None in both cases.
    """

    tensors: str
    layers: str
    by_size: Mapping[int, str]
    expert_parallel: bool | None = None


def cuts(config: ModelConfig, ranks: Sequence[int]) -> list[Cut]:
    """How vLLM cuts each kind of tensor of this model for these numbers of ranks."""
    found = []
    for parts, where in alike(_cut_of(layer) for layer in config.layers).items():
        for name, number, what, group, expert_parallel in parts:
            cut = (
                functools.partial(_shard_kv, number, group=group)
                if what == _KV
                else functools.partial(_shard, number, what=what)
            )
            found.append(Cut(name, ranges(where), {n: cut(size=n) for n in ranks}, expert_parallel))
    tables = "embedding, head" if not config.tie_word_embeddings else "embedding (and head)"
    if any(layer.gate is not None and layer.gate.source == "token" for layer in config.layers):
        tables += ", gate.table"
    whole = "norms, biases of o and down" + (", gate" if any(layer.gate for layer in config.layers) else "")
    whole += ", router" if any(isinstance(layer.ffn, Moe) for layer in config.layers) else ""
    return [
        *found,
        Cut(tables, "", {n: _shard(padded(config.vocab_size), n, "rows") for n in ranks}),
        Cut(whole, "", {n: "whole" if n == 1 else "replicate" for n in ranks}),
    ]


def padded(vocab_size: int) -> int:
    """Rows of a vocabulary inside vLLM."""
    return -(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING


def tensor_parallel_misfit(config: ModelConfig, size: int, expert_parallel: bool = False) -> str | None:
    """What of a model cannot be cut into `size` tensor-parallel ranks, or None if all of it can.

    Query heads, the inner width of an ffn and the padded vocabulary are cut evenly. Key/value heads are cut evenly too,
    or, with more ranks than heads, each is held by the same number of ranks. Experts are cut along their inner width, or
    with expert parallelism whole experts are dealt out.
    """
    for cut in cuts(config, (size,)):
        if cut.expert_parallel in (None, expert_parallel) and cut.by_size[size].startswith(REFUSE):
            what = cut.by_size[size].removeprefix(REFUSE)
            return (
                f"{what} (layer{'' if cut.layers.isdecimal() else 's'} {cut.layers})"
                if cut.layers
                else f"{what} of the vocabulary, padded to a multiple of {VOCAB_PADDING}"
            )
    return None


_KV = "key/value heads"
# Tensors, how many there are of what is cut, its name, whether groups of heads choose keys together, and whether it is cut
# so with expert parallelism.
_Part = tuple[str, int, str, bool, bool | None]


def _cut_of(layer: Layer) -> tuple[_Part, ...]:
    mixer, ffn = layer.mixer, layer.ffn
    parts: list[_Part] = []
    if mixer is not None:
        heads = HeadLayout.of(mixer.heads, mixer.num_kv_heads).num_heads
        share = getattr(mixer.pattern, "share", None) == "group"
        parts.append(("q_proj, o_proj", heads, "query heads", False, None))
        parts.append(("k_proj, v_proj", mixer.num_kv_heads, _KV, share, None))
    if ffn is None:
        return tuple(parts)
    if not isinstance(ffn, Moe):
        return (*parts, ("ffn", ffn.intermediate_size, "ffn channels", False, None))
    parts.append(("experts", ffn.intermediate_size, "channels of an expert", False, False))
    parts.append(("experts (--enable-expert-parallel)", ffn.num_experts, "experts", False, True))
    if ffn.shared_intermediate_size is not None:
        parts.append(("shared experts", ffn.shared_intermediate_size, "channels of shared experts", False, None))
    return tuple(parts)


def _shard(number: int, size: int, what: str) -> str:
    if size == 1:
        return "whole"
    part = number // size
    one = what.replace("channels", "channel") if "channels" in what else what.removesuffix("s")
    return f"{REFUSE}{number} {what}" if number % size else f"shard: {part} {one if part == 1 else what}"


def _shard_kv(kv: int, size: int, group: bool) -> str:
    if size <= kv or size % kv:
        return _shard(kv, size, _KV)
    if group:
        return f"{REFUSE}{kv} groups of query heads that choose keys together"
    return f"replicate: 1 head on {size // kv} ranks"
