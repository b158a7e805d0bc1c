"""The model, described: a tree of frozen dataclasses read from config.json by a strict parser.

A key that nothing consumes is an error that names the nearest known one. Layers that differ from the rest are written
as overrides: `"layers": {"0-1": {"mixer": {"pattern": {"kind": "dense"}}}, "7": {"gate": null}}`.
docs/config.md shows every field with its default.
"""

import dataclasses
import difflib
import json
import types
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from tiers.reference.checks import MAX_SIZE as _MAX_SIZE
from tiers.reference.checks import at_most as _at_most
from tiers.reference.checks import not_negative as _not_negative
from tiers.reference.checks import positive as _positive
from tiers.reference.errors import ConfigError
from tiers.reference.heads import head_map

# Those of a config are all here.
from tiers.reference.positions import (  # noqa: F401
    ROPE,
    T5,
    Alibi,
    DeepseekYarn,
    Dynamic,
    Kerple,
    Linear,
    Llama3,
    LongRope,
    NoPosition,
    Ntk,
    NtkAlpha,
    Position,
    Rope,
    Sandwich,
    Xpos,
    Yarn,
    check_length,
    check_position,
)

MODEL_TYPE = "tiers"
ARCHITECTURE = "TiersForCausalLM"

# Keys of config.json that transformers and vLLM read; they describe the folder, not the mathematics.
HF_KEYS = frozenset(
    {
        "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path",
        "bos_token_id", "eos_token_id", "pad_token_id",
    }
)  # fmt: skip


# Far beyond any model, as the limits of checks.py are.
MAX_LAYERS = 1024
_MAX_OVERRIDDEN = 16 * MAX_LAYERS
_MAX_HEADS, _MAX_HEAD_DIM = 4096, 2**16
# Every expert has tensors of its own, and listing those of all layers takes time.
_MAX_EXPERTS = 1024

# What float32 can still multiply and square.
_LEAST, _LARGEST = 1e-15, 1e15

# A config.json, and how its objects and lists are nested.
_MAX_BYTES, _MAX_DEPTH, _MAX_KEY = 8 * 2**20, 32, 200


# ---- attention patterns: which keys a query keeps -------------------------------------------------------------------


@dataclass(frozen=True)
class Dense:
    """Every key up to the query's own position."""

    kind: ClassVar[str] = "dense"


@dataclass(frozen=True)
class Window:
    """The last `window` keys (the query's own included) and the first `sink` keys."""

    kind: ClassVar[str] = "window"
    window: int
    sink: int = 0

    def __post_init__(self) -> None:
        _positive(window=self.window)
        _not_negative(sink=self.sink)


@dataclass(frozen=True)
class TopK:
    """The sink and window keys, and of the others those whose score is at least the k-th largest among them.

    `share` says at which level keys are chosen: "head", each query head for itself; "group", once per key/value head,
    by the largest score over its query heads.
    """

    kind: ClassVar[str] = "topk"
    k: int
    sink: int = 0
    window: int = 0
    share: Literal["head", "group"] = "head"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"k is {self.k}; expected an integer of 1 or more (keys kept besides sink and window)")
        _not_negative(sink=self.sink, window=self.window)


# ---- layers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """`rms` has a scale only; `layer` subtracts the mean and has a bias unless `bias` is false.

    With `unit_offset` an rms norm scales by 1 + weight, as Gemma's does.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    bias: bool | None = None
    unit_offset: bool = False

    def __post_init__(self) -> None:
        _positive(eps=self.eps)
        if self.kind == "rms" and self.bias:
            raise ConfigError("bias is true; expected false or no key, since kind rms has no bias")
        if self.kind == "layer" and self.unit_offset:
            raise ConfigError("unit_offset is true; expected false or no key, since only kind rms scales by 1 + weight")

    @property
    def has_bias(self) -> bool:
        return self.kind == "layer" and self.bias is not False


@dataclass(frozen=True)
class Attention:
    kind: ClassVar[str] = "attention"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_map: Literal["contiguous", "interleaved"] | tuple[int, ...] = "contiguous"
    pattern: Dense | Window | TopK = Dense()
    position: Position = ROPE
    scale: float | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"

    def __post_init__(self) -> None:
        _positive(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        _at_most(_MAX_HEADS, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        _at_most(_MAX_HEAD_DIM, head_dim=self.head_dim)
        _positive(scale=self.scale, softcap=self.softcap)
        heads = self.heads  # raises if heads, key/value heads and map do not fit
        if self.qk_norm == "full" and len(set(Counter(heads).values())) > 1:
            raise ConfigError(
                "qk_norm is full and head_map makes groups of unequal size; expected groups of one size, since empty heads "
                "fill up the smaller ones and would count in the norm"
            )
        check_position(self.position, self.num_heads, self.head_dim)

    @property
    def heads(self) -> tuple[int, ...]:
        """The key/value head of each query head."""
        return head_map(self.head_map, self.num_heads, self.num_kv_heads)

    @property
    def softmax_scale(self) -> float:
        return self.scale if self.scale is not None else self.head_dim**-0.5


@dataclass(frozen=True)
class Swiglu:
    """down(silu(gate x) * up x)."""

    kind: ClassVar[str] = "swiglu"
    intermediate_size: int
    bias: bool = False

    def __post_init__(self) -> None:
        _positive(intermediate_size=self.intermediate_size)
        _at_most(_MAX_SIZE, intermediate_size=self.intermediate_size)


@dataclass(frozen=True)
class Geglu:
    """down(gelu(gate x) * up x); `approximate` as in torch.nn.functional.gelu."""

    kind: ClassVar[str] = "geglu"
    intermediate_size: int
    bias: bool = False
    approximate: Literal["none", "tanh"] = "none"

    def __post_init__(self) -> None:
        _positive(intermediate_size=self.intermediate_size)
        _at_most(_MAX_SIZE, intermediate_size=self.intermediate_size)


@dataclass(frozen=True)
class Gelu:
    """down(gelu(up x)); `approximate` as in torch.nn.functional.gelu."""

    kind: ClassVar[str] = "gelu"
    intermediate_size: int
    bias: bool = False
    approximate: Literal["none", "tanh"] = "none"

    def __post_init__(self) -> None:
        _positive(intermediate_size=self.intermediate_size)
        _at_most(_MAX_SIZE, intermediate_size=self.intermediate_size)


@dataclass(frozen=True)
class Moe:
    """Experts, of which every token uses `top_k`; see ops/moe.py for the formulas.

    With `groups` above 1 only experts of the best `top_groups` groups are chosen from. A group scores as its best expert
    ("max") or as the sum of its best two ("top2"). Shared experts, which every token uses, are one ffn of
    `shared_intermediate_size`; with `shared_gate` each token scales what it takes of it by a sigmoid.
    """

    kind: ClassVar[str] = "moe"
    num_experts: int
    top_k: int
    intermediate_size: int
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    correction_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    routed_scaling_factor: float = 1.0
    shared_intermediate_size: int | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        _positive(num_experts=self.num_experts, top_k=self.top_k, intermediate_size=self.intermediate_size)
        _positive(groups=self.groups, top_groups=self.top_groups, routed_scaling_factor=self.routed_scaling_factor)
        _positive(shared_intermediate_size=self.shared_intermediate_size)
        _at_most(_MAX_EXPERTS, num_experts=self.num_experts)
        _at_most(_MAX_SIZE, intermediate_size=self.intermediate_size)
        _at_most(_MAX_SIZE, shared_intermediate_size=self.shared_intermediate_size)
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k is {self.top_k}; expected at most num_experts = {self.num_experts}")
        if self.num_experts % self.groups:
            raise ConfigError(
                f"num_experts is {self.num_experts} and groups is {self.groups}; expected groups of one size, so a multiple "
                f"of {self.groups} experts"
            )
        if self.top_groups > self.groups:
            raise ConfigError(f"top_groups is {self.top_groups}; expected at most groups = {self.groups}")
        reachable = self.num_experts // self.groups * self.top_groups
        if self.top_k > reachable:
            raise ConfigError(
                f"top_k is {self.top_k}, but {self.top_groups} of {self.groups} groups hold {reachable} experts; expected at "
                "most that"
            )
        if self.group_score == "top2" and self.num_experts // self.groups < 2:
            raise ConfigError(
                f"group_score is top2, but a group has {self.num_experts // self.groups} expert; expected groups of 2 or more"
            )
        if self.shared_gate and self.shared_intermediate_size is None:
            raise ConfigError("shared_gate is true, but there are no shared experts; set shared_intermediate_size")


@dataclass(frozen=True)
class Gate:
    """A knowledge gate after the ffn; see ops/knowledge_gate.py for the formulas.

    `source` "token": a table row per token id. "bank": attention over `slots` learned key/value pairs.
    """

    mode: Literal["linear", "sigmoid", "mix"]
    source: Literal["token", "bank"]
    slots: int | None = None
    scale: float | None = None
    bias: bool = True

    def __post_init__(self) -> None:
        _positive(slots=self.slots, scale=self.scale)
        _at_most(_MAX_SIZE, slots=self.slots)
        if self.source == "bank" and self.slots is None:
            raise ConfigError("slots is missing; source bank needs the number of slots in the bank")
        if self.source == "token":
            for name in ("slots", "scale"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} is set, but source token has no bank; remove the key or use source bank")


@dataclass(frozen=True)
class Layer:
    """A layer; one without mixer or ffn, or either, passes the residual stream on in its place."""

    mixer: Attention | None
    ffn: Swiglu | Geglu | Gelu | Moe | None
    gate: Gate | None = None

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators of this layer that a tier is chosen for."""
        has = {"attention": self.mixer is not None, "moe": isinstance(self.ffn, Moe), "gate": self.gate is not None}
        return tuple(operator for operator, here in has.items() if here)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: embedding, layers, norm, head. `docs/config.md` lists every field."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    layers: tuple[Layer, ...]
    norm: Norm = Norm()
    norm_position: Literal["pre", "post", "sandwich"] = "pre"
    embedding_norm: bool = False
    learned_positions: bool = False
    residual: Literal["sequential", "parallel"] = "sequential"
    tie_word_embeddings: bool = False
    lm_head_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None

    def __post_init__(self) -> None:
        _positive(logits_softcap=self.logits_softcap)
        if self.tie_word_embeddings and self.lm_head_bias:
            raise ConfigError("lm_head_bias is true, but tie_word_embeddings too; an embedding has no bias to share")
        _positive(vocab_size=self.vocab_size, hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers)
        _positive(max_position_embeddings=self.max_position_embeddings)
        _at_most(_MAX_SIZE, vocab_size=self.vocab_size, hidden_size=self.hidden_size)
        _at_most(_MAX_SIZE, max_position_embeddings=self.max_position_embeddings)
        if not self.mixers:
            raise ConfigError("mixer is null in every layer; expected attention in one of them at least")
        for mixer in self.mixers:
            check_length(mixer.position, mixer.head_dim, self.max_position_embeddings)
        tables = {(m.position, m.num_heads) for m in self._sharing}
        if len(tables) > 1:
            (one, heads), (other, others) = sorted(tables, key=str)[:2]
            raise ConfigError(
                f"layers share a table of positions of kind t5, but one has {heads} heads and {_buckets(one)}, another "
                f"{others} heads and {_buckets(other)}; expected one table for all, or shared false"
            )

    @property
    def _sharing(self) -> list["Attention"]:
        return [mixer for mixer in self.mixers if isinstance(mixer.position, T5) and mixer.position.shared]

    @property
    def t5_table(self) -> tuple[int, int] | None:
        """Buckets and heads of the table that layers share, or None where none do."""
        for mixer in self._sharing:
            assert isinstance(mixer.position, T5)
            return mixer.position.num_buckets, mixer.num_heads
        return None

    @property
    def mixers(self) -> tuple[Attention, ...]:
        """Of the layers that have one, in order."""
        return tuple(layer.mixer for layer in self.layers if layer.mixer is not None)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> "ModelConfig":
        """Read the model from the contents of a config.json.

        Args:
            raw: the parsed JSON object. `mixer`, `ffn` and `gate` describe every layer; `layers` overrides some.
            source: what to call it in messages.

        Raises:
            ConfigError: names the field, what was found, what was expected.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{source}: found {_shown(raw)} at the top; expected a JSON object")
        found_type = raw.get("model_type", MODEL_TYPE)
        if found_type != MODEL_TYPE:
            raise ConfigError(
                f"{source}: model_type is {_shown(found_type)}; expected {MODEL_TYPE!r}. Only folders in the format of "
                "this project can be read so far; docs/config.md describes it"
            )
        if "quantization_config" in raw:
            raise ConfigError(
                f"{source}: quantization_config is set; quantised checkpoints are not supported yet. "
                "Export the weights in float32, float16 or bfloat16 and remove the key"
            )
        per_layer = {"layers", *(f.name for f in dataclasses.fields(Layer))}
        top = {key: value for key, value in raw.items() if key not in HF_KEYS | per_layer}
        fields = [f.name for f in dataclasses.fields(cls) if f.name != "layers"]
        _reject_unknown(top, [*fields, *per_layer, *HF_KEYS], source, ignored="layers")
        number = raw.get("num_hidden_layers")
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_LAYERS:
            raise ConfigError(
                f"{source}: num_hidden_layers is {_shown(number)}; expected an integer of 1 or more, and at most {MAX_LAYERS}"
            )
        layers = _parse_layers(raw, number, source)
        return _build(cls, {**top, "layers": layers}, source, ready={"layers"})

    @classmethod
    def from_json(cls, path: Path) -> "ModelConfig":
        """Read `config.json`, or the folder that holds it."""
        return cls.from_dict(read_json(path / "config.json" if path.is_dir() else path), "config.json")


def _buckets(position: Any) -> str:
    return f"{position.num_buckets} buckets up to {position.max_distance}"


def read_json(path: Path) -> Any:
    """Parse a small JSON file, or say in one sentence why not."""
    try:
        # A pipe by this name might never end.
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"{path}: cannot be read, it is no regular file")
        if path.exists() and path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path}: {path.stat().st_size} bytes; expected at most {_MAX_BYTES}")
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=lambda pairs: _no_twins(pairs, path))
    except ConfigError:  # itself a ValueError
        raise
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a model folder with {path.name}") from None
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python converts
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if is_deep(raw):
        raise ConfigError(f"{path}: objects within objects, more than {_MAX_DEPTH} deep; expected a config")
    return raw


def is_deep(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether lists and objects are nested deeper than any description of a model."""
    if not isinstance(value, Mapping | list):
        return False
    return not depth or any(
        is_deep(item, depth - 1) for item in (value.values() if isinstance(value, Mapping) else value)
    )


def _no_twins(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    """A JSON object; Python would let the last of two equal keys win in silence."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if len(key) > _MAX_KEY:
            raise ConfigError(f"{path}: a key has {len(key)} characters ({_shown(key)}); expected at most {_MAX_KEY}")
        if key in found:
            raise ConfigError(f"{path}: key {key!r} comes twice in one object; expected it once")
        found[key] = value
    return found


def parse_layer_range(text: str, num_layers: int) -> range:
    """ "7" or "0-3" as the range of layers it names, both ends included.

    Raises:
        ConfigError: not of that form, or beyond the last layer.
    """
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ConfigError(f"layer range {text!r} is not of the form 7 or 0-3")
    start, stop = int(first), int(last) if dash else int(first)
    if start > stop:
        raise ConfigError(f"layer range {text!r} ends before it starts")
    if stop >= num_layers:
        raise ConfigError(
            f"layer range {text!r} goes beyond the last layer; the model has layers 0 to {num_layers - 1}"
        )
    return range(start, stop + 1)


def _parse_layers(raw: Mapping[str, Any], number: int, source: str) -> tuple[Layer, ...]:
    base = {key: raw[key] for key in (f.name for f in dataclasses.fields(Layer)) if key in raw}
    overrides = raw.get("layers", {})
    if not isinstance(overrides, Mapping):
        raise ConfigError(f'{source}: layers is {_shown(overrides)}; expected an object such as {{"0-3": {{...}}}}')
    base_layer = _build(Layer, base, source)
    left = _MAX_OVERRIDDEN
    merged: list[Any] = [base] * number
    touched: list[str] = [""] * number
    for key, override in overrides.items():
        where = f"{source}: layers[{key!r}]"
        if not isinstance(override, Mapping):
            raise ConfigError(f"{where} is {_shown(override)}; expected an object with mixer, ffn or gate")
        _reject_unknown(override, [f.name for f in dataclasses.fields(Layer)], where)
        try:
            layers = parse_layer_range(key, number)
        except ConfigError as error:
            raise ConfigError(f"{source}: layers: {error}") from None
        left -= len(layers)
        if left < 0:
            raise ConfigError(
                f"{source}: layers overrides more than {_MAX_OVERRIDDEN} layers; expected each a few times"
            )
        for i in layers:
            merged[i] = _merge(merged[i], override)
            touched[i] = where
    return tuple(_build(Layer, merged[i], touched[i]) if touched[i] else base_layer for i in range(number))


def _merge(base: Any, override: Any) -> Any:
    """Override key by key; an object of another `kind` replaces the base object whole, since it has other fields."""
    if not isinstance(base, Mapping) or not isinstance(override, Mapping):
        return override
    # Where the base names no kind, there is only one.
    if "kind" in override and override["kind"] != base.get("kind", override["kind"]):
        return override
    return {**base, **{key: _merge(base.get(key), value) for key, value in override.items()}}


def _build(cls: type, data: Any, where: str, ready: frozenset[str] | set[str] = frozenset()) -> Any:
    """Make a dataclass from JSON: every key known, every type right, every required key there."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} is {_shown(data)}; expected an object")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    kind = getattr(cls, "kind", None) if "kind" not in fields else None
    given = {key: value for key, value in data.items() if not (kind is not None and key == "kind")}
    _reject_unknown(given, list(fields), f"{where} of kind {kind}" if kind else where)
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        if name in ready:
            values[name] = given[name]
        elif name in given:
            values[name] = _convert(given[name], hints[name], _join(where, name))
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{_join(where, name)} is missing; {cls.__name__} needs it ({_type_name(hints[name])})")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _convert(value: Any, hint: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        classes = [option for option in options if dataclasses.is_dataclass(option)]
        if classes:
            return _convert_kind(value, classes, where)
        for option in options:
            try:
                return _convert(value, option, where)
            except ConfigError:
                continue
        raise ConfigError(f"{where} is {_shown(value)}; expected {_type_name(hint)}")
    if dataclasses.is_dataclass(hint):
        return (
            _convert_kind(value, [hint], where)
            if hasattr(hint, "kind")
            else _build(typing.cast(type, hint), value, where)
        )
    origin = typing.get_origin(hint)
    if origin is Literal:
        if value not in typing.get_args(hint) or isinstance(value, bool):
            raise ConfigError(
                f"{where} is {_shown(value)}; expected {_type_name(hint)}{nearest(value, typing.get_args(hint))}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} is {_shown(value)}; expected {_type_name(hint)}")
        return tuple(_convert(item, typing.get_args(hint)[0], f"{where}[{i}]") for i, item in enumerate(value))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared rather than asked with isfinite, which cannot take an integer beyond the floats.
    if hint is float and is_number and (value == 0 or _LEAST <= abs(value) <= _LARGEST):
        return float(value)
    if hint in (int, bool, str) and type(value) is hint and not (hint is int and abs(value) >= 2**31):
        return value
    limits = f" of size {_LEAST:g} to {_LARGEST:g}" if hint is float and is_number else ""
    raise ConfigError(f"{where} is {_shown(value)}; expected {_type_name(hint)}{limits}")


def _convert_kind(value: Any, classes: list[Any], where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {_shown(value)}; expected an object{_kinds(classes)}")
    kinded = {cls.kind: cls for cls in classes if isinstance(getattr(cls, "kind", None), str)}
    if not kinded or "kind" in {f.name for f in dataclasses.fields(classes[0])}:
        return _build(classes[0], value, where)
    kind = value.get("kind", classes[0].kind if len(kinded) == 1 else None)
    if not isinstance(kind, str) or kind not in kinded:
        raise ConfigError(f"{where}.kind is {_shown(kind)}; expected one of {', '.join(kinded)}{nearest(kind, kinded)}")
    return _build(kinded[kind], value, where)


def _kinds(classes: list[Any]) -> str:
    names = [cls.kind for cls in classes if isinstance(getattr(cls, "kind", None), str)]
    return f" with kind {', '.join(names)}" if names else ""


def _reject_unknown(data: Mapping[str, Any], known: list[str], where: str, ignored: str = "") -> None:
    for key in data:
        if key not in known or key == ignored:
            suggestion = nearest(key, known) or f"; known keys: {', '.join(known) or 'none but kind'}"
            raise ConfigError(f"{where}: unknown key {key!r}{suggestion}")


def nearest(found: Any, known: typing.Iterable[Any]) -> str:
    """ "; did you mean 'x'?", or nothing where no name is near."""
    close = difflib.get_close_matches(str(found), [str(k) for k in known], n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _join(where: str, name: str) -> str:
    return f"{where}: {name}" if where.endswith((".json", "]")) else f"{where}.{name}"


def _shown(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _type_name(hint: Any) -> str:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_type_name(option) for option in typing.get_args(hint))
    origin = typing.get_origin(hint)
    if origin is Literal:
        return " or ".join(json.dumps(option) for option in typing.get_args(hint))
    if origin is tuple:
        return {int: "a list of integers", float: "a list of numbers"}[typing.get_args(hint)[0]]
    if dataclasses.is_dataclass(hint):
        return f"an object ({typing.cast(type, hint).__name__})"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "null"}.get(
        hint, str(hint)
    )
