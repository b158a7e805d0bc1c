"""Values of a foreign config.json under the names that a family uses, and a record of which were asked for.

Names are looked for in the part that describes the language model, if there is one, then at the top; under the name
itself, then under its aliases, then anywhere below. What is found in two places with two values is refused.
"""

import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tiers.reference import expression
from tiers.reference.errors import ConfigError
from tiers.reference.ops.alibi import alibi_slopes

# Other names that teams and libraries give to a field.
ALIASES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("n_vocab", "padded_vocab_size"),
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim", "n_embed"),
    "intermediate_size": ("n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "inner_dim", "hidden_dim", "ffn_size"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_kv_heads", "kv_n_heads", "num_kv_heads", "n_head_kv", "num_query_groups", "n_kv_head"),
    "head_dim": ("kv_channels", "d_head", "attention_head_dim"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "max_seq_length", "n_ctx", "seq_length", "max_position"),
    "rms_norm_eps": ("norm_eps", "rms_norm_epsilon", "layernorm_epsilon", "norm_epsilon"),
    "layer_norm_eps": ("layer_norm_epsilon", "norm_epsilon", "norm_eps", "layernorm_epsilon"),
    "hidden_act": ("activation_function", "hidden_activation", "activation", "act_fn"),
    "rope_theta": ("rotary_emb_base", "rope_base", "rotary_base"),
    "partial_rotary_factor": ("rotary_pct", "rotary_percent"),
    "sliding_window": ("attention_window", "sliding_window_size", "window_size"),
}

# Where multimodal configs keep the language model.
LANGUAGE_PARTS = ("text_config", "llm_config", "language_config", "thinker_config.text_config", "thinker.text_config")

# Keys that change nothing when a model is served: training, generation, bookkeeping.
WITHOUT_EFFECT = frozenset(
    {
        "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path",
        "bos_token_id", "eos_token_id", "pad_token_id", "auto_map", "initializer_range", "gradient_checkpointing",
        "attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "resid_dropout", "embed_dropout",
        "dropout", "classifier_dropout", "attn_dropout", "emb_pdrop", "residual_dropout", "embedding_dropout", "torchscript",
        "output_attentions", "output_hidden_states", "return_dict", "is_decoder", "is_encoder_decoder", "id2label",
        "label2id", "problem_type", "chunk_size_feed_forward", "add_cross_attention", "cross_attention_hidden_size",
        "pruned_heads", "task_specific_params", "finetuning_task", "tokenizer_class", "prefix", "sep_token_id",
        "decoder_start_token_id", "pretraining_tp", "attn_implementation", "_attn_implementation", "use_flash_attn",
        "generation_config", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
        "summary_first_dropout", "router_aux_loss_coef", "output_router_logits", "use_bfloat16", "tie_encoder_decoder",
        "_commit_hash", "unsloth_version", "unsloth_fixed", "init_device", "init_config", "verbose",
    }
)  # fmt: skip


# Names of a config that are compared with one that is missing.
_MAX_CANDIDATES = 1000


class Fields:
    """What a family's expressions look names up in.

    Args:
        raw: the parsed config.json.
        aliases: more names for a field; they come before ALIASES.
        defaults: values of fields that are absent; text that begins with "=" is an expression.
        optional: fields that may be absent, and then have no value.
        source: what to call the config in messages.

    Attributes:
        notes: sentences for the user about what was odd but harmless.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        aliases: Mapping[str, Sequence[str]],
        defaults: Mapping[str, Any],
        optional: frozenset[str],
        source: str,
    ) -> None:
        self.raw, self.source, self.optional, self.defaults = raw, source, optional, defaults
        self.aliases = {**ALIASES, **{name: (*more, *ALIASES.get(name, ())) for name, more in aliases.items()}}
        self.notes: list[str] = []
        self.used: set[str] = set()
        self.parts = [path for path in LANGUAGE_PARTS if isinstance(_at(raw, path), Mapping)]
        # Asked once for each layer and name, so no look-up may walk through the whole config.
        self._paths: dict[str, list[str]] = {}
        for path, _ in leaves(raw):
            self._paths.setdefault(path.rpartition(".")[2], []).append(path)
        self._pending: set[str] = set()
        # Names that are no fields, such as the number of a layer.
        self.variables: dict[str, Any] = {}
        self.functions: Mapping[str, Callable[..., Any]] = {}

    def value(self, text: Any) -> Any:
        """The value of what a family file says: text that begins with "=" is an expression, in lists and tables too."""
        if isinstance(text, str) and text.startswith("="):
            return expression.evaluate(text[1:], self.get, self.functions)
        if isinstance(text, Mapping):
            return {key: self.value(item) for key, item in text.items()}
        return [self.value(item) for item in text] if isinstance(text, list) else text

    def get(self, name: str) -> Any:
        """The value of a field, None for an optional one that is absent.

        Raises:
            ConfigError: the field is missing, or is there twice with different values.
        """
        if name in self.variables:
            return self.variables[name]
        found = self.find(name)
        if found is not None:
            return found
        if name in self.defaults:
            if name in self._pending:
                raise ConfigError(f"the default of {name} is defined by itself")
            self._pending.add(name)
            value = self.value(self.defaults[name])
            self._pending.discard(name)
            return value
        if name in self.optional or name.partition(".")[0] in self.optional:
            return None
        raise ConfigError(f"{self.source}: {name} is missing{self._candidates(name)}")

    def find(self, name: str) -> Any:
        """As `get`, but None wherever there is no value in the config itself; null counts as none."""
        names = (name, *self.aliases.get(name, ()))
        # The part about the language model first: what stands beside it may describe another part.
        for base in (*self.parts, ""):
            found = {path: value for path in (_join(base, n) for n in names) if (value := self._take(path)) is not None}
            if found:
                return self._one(name, found)
        if "." in name:
            return None
        paths = [path for n in names for path in self._paths.get(n, ()) if path.count(".") == 1]
        found = {path: self._take(path) for path in paths if _at(self.raw, path) is not None}
        return self._one(name, found) if found else None

    def touch(self, name: str) -> None:
        """Count a field as asked for, wherever it is."""
        for n in (name, *self.aliases.get(name, ())):
            paths = self._paths.get(n.rpartition(".")[2], ())
            self.used.update(path for path in paths if "." not in n or path == n)

    def _take(self, path: str) -> Any:
        value = _at(self.raw, path)
        if value is not None or _has(self.raw, path):
            self.used.add(path)
        return value

    def _one(self, name: str, found: dict[str, Any]) -> Any:
        first, *others = found.items()
        for path, value in others:
            if value != first[1]:
                raise ConfigError(
                    f"{self.source}: {first[0]} is {shown(first[1])} and {path} is {shown(value)}; expected one value, since "
                    f"both mean {name}. Remove the one that is wrong"
                )
        return first[1]

    def _candidates(self, name: str) -> str:
        known = [path for paths in self._paths.values() for path in paths][:_MAX_CANDIDATES]
        names = ", ".join(self.aliases.get(name, ()))
        close = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
        return (
            (f"; looked for {name}{', ' if names else ''}{names} at the top and one level below")
            + (f". Near to it: {', '.join(close)}" if close else "")
            + f'. If it has another name, say so in a family file: [aliases] {name} = ["its_name"]'
        )

    def unused(self, ignored: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Path and value of everything that no expression asked for and that is not known to be without effect."""
        found = {}
        for path, value in leaves(self.raw):
            leaf = path.rpartition(".")[2]
            if {path, leaf} & (WITHOUT_EFFECT | ignored) or path.partition(".")[0] in WITHOUT_EFFECT | ignored:
                continue
            parts = path.split(".")
            if value is None or any(".".join(parts[: i + 1]) in self.used for i in range(len(parts))):
                continue
            # Other towers of a multimodal model are not this model's.
            if self.parts and not any(path.startswith(f"{part}.") for part in self.parts) and "." in path:
                continue
            found[path] = value
        return found


def leaves(raw: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything that is not an object; lists count as one value."""
    if isinstance(raw, Mapping) and depth < 16:
        for key, value in raw.items():
            yield from leaves(value, _join(path, str(key)), depth + 1)
    elif path:
        yield path, raw


def _join(base: str, name: str) -> str:
    return f"{base}.{name}" if base else name


def _at(raw: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(raw, Mapping) or part not in raw:
            return None
        raw = raw[part]
    return raw


def _has(raw: Any, path: str) -> bool:
    base, _, leaf = path.rpartition(".")
    container = _at(raw, base) if base else raw
    return isinstance(container, Mapping) and leaf in container


def shown(value: Any) -> str:
    """A value as JSON, cut to a length that fits into a message."""
    try:
        text = json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that JSON does not have, or nested without end
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


# ---- functions of expressions ---------------------------------------------------------------------------------------

_GELU = {
    "gelu": "none", "gelu_python": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh",
    "gelu_tanh": "tanh", "gelu_10": None,
}  # fmt: skip


def gated(act: str, inner: int, bias: bool = False) -> dict[str, Any]:
    """An ffn whose up-projection is multiplied by an activated gate; `act` as transformers names it."""
    if act in ("silu", "swish", "swiglu"):
        return {"kind": "swiglu", "intermediate_size": inner, "bias": bias}
    if _GELU.get(act):
        return {"kind": "geglu", "intermediate_size": inner, "bias": bias, "approximate": _GELU[act]}
    raise ConfigError(f"the activation is {shown(act)}; expected silu, gelu or gelu_pytorch_tanh for a gated ffn")


def plain(act: str, inner: int, bias: bool = False) -> dict[str, Any]:
    """An ffn of two projections with an activation between them."""
    if _GELU.get(act):
        return {"kind": "gelu", "intermediate_size": inner, "bias": bias, "approximate": _GELU[act]}
    raise ConfigError(f"the activation is {shown(act)}; expected gelu, gelu_new or gelu_pytorch_tanh")


def experts_activation(act: str) -> str:
    """The activation of a gated expert, as transformers names it, in our words."""
    if act in ("silu", "swish", "swiglu"):
        return "silu"
    if _GELU.get(act):
        return "gelu_tanh" if _GELU[act] == "tanh" else "gelu"
    raise ConfigError(f"the activation is {shown(act)}; expected silu, gelu or gelu_pytorch_tanh for experts")


def slopes(heads: int, factor: float = 1.0) -> list[float]:
    """The published ALiBi slopes for a number of heads, times a factor."""
    if isinstance(heads, bool) or not isinstance(heads, int) or not 0 < heads <= 4096:
        raise ConfigError(f"the number of heads is {shown(heads)}; expected an integer from 1 to 4096")
    return (alibi_slopes(heads).double() * factor).tolist()


def sqrt(value: float) -> float:
    """The square root."""
    return math.sqrt(value)
