"""Sizes that both the config and the shapes of tensors tell, side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tiers.reference.analysis.layers import LAYER, alike, ranges
from tiers.reference.analysis.parameters import Mapped, targets
from tiers.reference.checkpoint import TensorInfo
from tiers.reference.config import Geglu, Gelu, Layer, ModelConfig, Moe, Swiglu
from tiers.reference.weight_map import WeightMap

Value = int | bool | str | None

HEAD = "a head of its own"


@dataclass(frozen=True)
class Row:
    """One quantity, as the config has it and as the tensors do.

    Attributes:
        field: its name.
        layers: which layers it is about; "" where it is no matter of layers.
        config: None where config.json could not be read.
        tensors: None where no tensor says it; text where tensors say different things.
        agrees: None where one of them is None.
    """

    field: str
    layers: str
    config: Value
    tensors: Value
    agrees: bool | None


def geometry(
    config: ModelConfig | None, weight_map: WeightMap, found: Mapped, infos: Mapping[str, TensorInfo]
) -> list[Row]:
    """Every size that both the config and the shapes of tensors tell.

    Args:
        config: None if it could not be read; then the rows have the tensors' side only.
        weight_map: of the checkpoint.
        found: `mapped` of it.
        infos: headers of the checkpoint.
    """
    shapes = {name: part.shape for name, part in found.parts.items()}
    layers = sorted({int(match[1]) for name in targets(weight_map) if (match := LAYER.fullmatch(name))})
    counted: Value = len(layers) if layers == list(range(len(layers))) else f"layers {ranges(layers)}"
    embedding, head = shapes.get("embed_tokens.weight"), shapes.get("lm_head.weight")
    vocab_size = config.vocab_size if config else None
    rows = [
        _row("hidden_size", "", config.hidden_size if config else None, embedding[-1] if embedding else None),
        _row("vocab_size (embedding rows)", "", vocab_size, embedding[0] if embedding else None),
    ]
    if head:
        rows.append(_row("vocab_size (head rows)", "", vocab_size, head[0]))
    rows.append(
        _row("num_hidden_layers", "", config.num_hidden_layers if config else None, counted if layers else None)
    )
    if positions := shapes.get("embed_positions.weight"):
        learned = config.max_position_embeddings if config and config.learned_positions else None
        rows.append(_row("max_position_embeddings", "", learned, positions[0]))
    if config is not None and shapes:
        own = not config.tie_word_embeddings
        # A head beside a tied embedding is a copy of it, or refused when the weights are read.
        rows.append(Row(HEAD, "", own, bool(head), own == bool(head) or (None if head else False)))
    fused = _fused_rows(weight_map, found, infos)
    by_layer: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if match := LAYER.fullmatch(name):
            by_layer.setdefault(int(match[1]), {})[match[2]] = shape
    number = config.num_hidden_layers if config else len(layers)
    per_layer = [
        _layer_rows(config.layers[i] if config else None, by_layer.get(i, {}), fused.get(i)) for i in range(number)
    ]
    names = list(dict.fromkeys(field for layer in per_layer for field in layer))
    for field in names:
        for pair, where in alike(layer.get(field) for layer in per_layer).items():
            if pair is not None:
                rows.append(_row(field, ranges(where), *pair))
    return rows


def _row(field: str, layers: str, config: Value, tensors: Value) -> Row:
    agrees = None if config is None or tensors is None else config == tensors and type(config) is type(tensors)
    # Rows beyond vocab_size are no contradiction: they are not used.
    if field.startswith("vocab_size") and isinstance(config, int) and isinstance(tensors, int):
        agrees = tensors >= config
    return Row(field, layers, config, tensors, agrees)


def _fused_rows(weight_map: WeightMap, found: Mapped, infos: Mapping[str, TensorInfo]) -> dict[int, int]:
    """Rows of matrices that hold q, k and v of a layer and could not be divided."""
    rows = {}
    for source in found.failed:
        entry = weight_map.entries[source]
        if (
            entry.rule
            and entry.rule.layout in ("qkv", "qkv_per_group")
            and (match := LAYER.fullmatch(entry.targets[0]))
        ):
            shape = infos[source].shape
            rows[int(match[1])] = shape[-1] if entry.rule.transpose else shape[0]
    return rows


def _layer_rows(
    layer: Layer | None, shapes: Mapping[str, tuple[int, ...]], fused: int | None
) -> dict[str, tuple[Value, Value]]:
    """Field to (config, tensors) of one layer."""

    def size(name: str, dimension: int) -> int | None:
        shape = shapes.get(name, ())
        return shape[dimension] if len(shape) == 2 else None

    mixer, ffn = (layer.mixer, layer.ffn) if layer else (None, None)
    q = {"q_proj": size("mixer.q_proj.weight", 0), "o_proj": size("mixer.o_proj.weight", 1)}
    kv = {"k_proj": size("mixer.k_proj.weight", 0), "v_proj": size("mixer.v_proj.weight", 0)}
    names = [name for name in shapes if name.startswith("ffn.")]
    # Of experts the first stands for all; one of another size is refused by name when headers are compared.
    module = "ffn.experts.0" if any(name.startswith("ffn.experts.") for name in names) else "ffn"
    inner = {
        "up_proj": size(f"{module}.up_proj.weight", 0), "gate_proj": size(f"{module}.gate_proj.weight", 0),
        "down_proj": size(f"{module}.down_proj.weight", 1),
    }  # fmt: skip
    rows: dict[str, tuple[Value, Value]] = {
        "num_heads * head_dim": (mixer.num_heads * mixer.head_dim if mixer else None, _one(q)),
        "num_kv_heads * head_dim": (mixer.num_kv_heads * mixer.head_dim if mixer else None, _one(kv)),
        "intermediate_size": (ffn.intermediate_size if ffn else None, _one(inner)),
    }
    if mixer is None or ffn is None or layer is None:
        # Of what a layer is without there is nothing to compare.
        return {name: row for name, row in rows.items() if layer is None or row != (None, None)}
    if fused is not None:
        heads = mixer.num_heads + 2 * mixer.num_kv_heads
        rows["rows of q, k and v"] = (heads * mixer.head_dim, fused)
        rows["head_dim"] = (mixer.head_dim, _quotient(fused, heads))
    else:
        said = {name: n and _quotient(n, mixer.num_heads) for name, n in q.items()}
        said |= {name: n and _quotient(n, mixer.num_kv_heads) for name, n in kv.items()}
        if mixer.qk_norm == "head":
            said |= {name: shapes.get(f"mixer.{name}.weight", (None,))[0] for name in ("q_norm", "k_norm")}
        rows["head_dim"] = (mixer.head_dim, _one(said))
    if isinstance(ffn, Moe) or module != "ffn":
        rows |= _expert_rows(ffn, names, size)
    present = {"qkv_bias": (mixer.qkv_bias, "mixer.q_proj"), "o_bias": (mixer.o_bias, "mixer.o_proj")}
    if not isinstance(ffn, Moe):
        present["ffn.bias"] = (ffn.bias, "ffn.up_proj")
    for field, (wanted, module) in present.items():
        # Without the matrix nothing is known of its bias.
        if f"{module}.weight" in shapes:
            rows[field] = (wanted, f"{module}.bias" in shapes)
    if layer.gate is not None or any(name.startswith("gate.") for name in shapes):
        rows["gate"] = (layer.gate is not None, any(name.startswith("gate.") for name in shapes))
    return rows


def _expert_rows(
    ffn: Swiglu | Geglu | Gelu | Moe, names: Sequence[str], size: Callable[[str, int], int | None]
) -> dict[str, tuple[Value, Value]]:
    """As `_layer_rows`, of a mixture of experts; either side may have none."""
    held = len({name.split(".")[2] for name in names if name.startswith("ffn.experts.")})
    moe = ffn if isinstance(ffn, Moe) else None
    rows: dict[str, tuple[Value, Value]] = {
        "num_experts": (moe.num_experts if moe else 0, held or None),
        "num_experts (router rows)": (moe.num_experts if moe else 0, size("ffn.router.weight", 0)),
        "shared_intermediate_size": (
            (moe.shared_intermediate_size if moe else 0) or 0, size("ffn.shared.up_proj.weight", 0) or (0 if held else None),
        ),
        "correction_bias": (moe.correction_bias if moe else False, "ffn.correction_bias" in names),
        "shared_gate": (moe.shared_gate if moe else False, "ffn.shared_gate.weight" in names),
    }  # fmt: skip
    return {name: row for name, row in rows.items() if row not in ((0, None), (0, 0), (False, False))}


def _quotient(number: int, by: int) -> Value:
    return number // by if number % by == 0 else f"{number}/{by}"


def _one(said: Mapping[str, Value]) -> Value:
    """What all tensors say, or what each says."""
    known = {name: value for name, value in said.items() if value is not None}
    values = list(dict.fromkeys(known.values()))
    if len(values) < 2:
        return values[0] if values else None
    return ", ".join(f"{value} by {' and '.join(n for n, v in known.items() if v == value)}" for value in values)


def contradictions(rows: Sequence[Row]) -> list[str]:
    """A sentence for every row that does not agree; not for products of a head size that is itself wrong."""
    # A missing head is a missing tensor: `coverage` has it.
    wrong = [row for row in rows if row.agrees is False and row.field != HEAD]
    head_size_wrong = any(row.field == "head_dim" and isinstance(row.tensors, int) for row in wrong)
    sentences = []
    for row in wrong:
        if head_size_wrong and ("head_dim" in row.field or row.field.startswith("rows of")) and row.field != "head_dim":
            continue
        where = f" (layers {row.layers})" if row.layers else ""
        fix = (
            f"Set it to {_text(row.tensors)}"
            if isinstance(row.tensors, int) and "*" not in row.field
            else "Correct config.json"
        )
        sentences.append(
            f"{row.field} is {_text(row.config)} by config.json and {_text(row.tensors)} by the tensors{where}; expected one "
            f"value. {fix}, or export the weights that the config describes"
        )
    return sentences


def _text(value: Value) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
