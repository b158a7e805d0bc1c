"""Rotary positions out of a foreign config.json, in every spelling that libraries write.

Old: `rope_theta` and `rope_scaling` {type | rope_type, factor, ...} at the top. New: `rope_parameters` {rope_theta,
rope_type, ...}, or one such object per layer type.
"""

import math
from collections.abc import Mapping
from typing import Any

from tiers.reference.errors import ConfigError
from tiers.reference.fields import Fields, shown

DEFAULT_THETA = 10000.0

# What may be left unread at the top without being overlooked: these functions know it.
FIELDS = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")

# Scalings of ours: their keys, those that must be there first.
_KEYS = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "ntk": (("factor",), ("mixed_b",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
            "truncate",
        ),
    ),
    "deepseek_yarn": (
        ("factor",), ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "longrope": (
        ("short_factor", "long_factor"), ("original_max_position_embeddings", "short_mscale", "long_mscale")
    ),
    # Written as dynamic with an alpha.
    "ntk_alpha": (("alpha",), ()),
}  # fmt: skip
_SPELLED = tuple(kind for kind in _KEYS if kind != "ntk_alpha")

# Older names that vLLM reads too.
_OLD_KINDS = {"su": "longrope"}


def rope(
    fields: Fields,
    style: str = "half",
    partial: float | None = None,
    layer_type: str | None = None,
    theta: Any = None,
    scaled: bool = True,
) -> dict[str, Any]:
    """`position` of a mixer in our words.

    Args:
        style: how channels pair up, "half" or "interleaved"; a fact about the family's code, not in its config.
        partial: share of the channels that turn, where the family has its own way to say it.
        layer_type: which object of `rope_parameters` to read, if there are several.
        theta: base for these layers where the config has a key of its own for it.
        scaled: whether one object for all layers is about these layers too.

    Raises:
        ConfigError: two spellings disagree; a scaling is unknown or lacks a key.
    """
    settings, path = _settings(fields, layer_type)
    if not scaled and "." not in path:
        settings = {}
    base = _theta(fields, settings, theta)
    share = partial if partial is not None else _first(fields, settings, "partial_rotary_factor")
    position: dict[str, Any] = {"kind": "rope", "style": style, "theta": base}
    if share is not None:
        position["partial_rotary_factor"] = share
    kind = _kind(settings, path, fields)
    position["scaling"] = None if kind is None else _scaling(kind, settings, path, fields)
    return position


def context(fields: Fields) -> int:
    """The longest context: max_position_embeddings, or what yarn and dynamic scaling stretch the original length to.

    llama3 has no such end: its factor is that of slow channels only, and Llama 3.1 is longer than 8 times its original.

    Raises:
        ConfigError: max_position_embeddings is longer than the stretched length: it was stretched twice.
    """
    longest = fields.get("max_position_embeddings")
    settings, path = _settings(fields, "full_attention")
    kind = _kind(settings, path, fields)
    if kind not in ("yarn", "deepseek_yarn", "dynamic", "linear"):
        return longest
    original, factor = settings.get("original_max_position_embeddings"), settings.get("factor")
    if not isinstance(factor, int | float) or not isinstance(longest, int):
        return longest  # named where the scaling is read
    if original is not None and longest > original * factor:
        raise ConfigError(
            f"{fields.source}: max_position_embeddings is {longest}, but {path} stretches {original} positions by "
            f"{factor:g}, to {original * factor:g}; expected at most that. Was the factor applied twice?"
        )
    if kind == "linear":
        return longest
    original = original or longest
    result = int(original * factor)
    fields.notes.append(f"{path}: {original} positions stretched by {factor:g} to {result} ({kind})")
    return result


def _settings(fields: Fields, layer_type: str | None) -> tuple[Mapping[str, Any], str]:
    """The object with the scaling, and its path."""
    new, old = fields.find("rope_parameters"), fields.find("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{fields.source}: {name} is {shown(value)}; expected an object")
    path, found = ("rope_parameters", new) if new is not None else ("rope_scaling", old)
    # Only what is asked for below counts as used, so that an unknown key of the object is reported.
    fields.used -= {p for p in fields.used if p.rpartition(".")[2] in ("rope_parameters", "rope_scaling")}
    if found is None:
        return {}, "rope_parameters"
    nested = {key: value for key, value in found.items() if isinstance(value, Mapping)}
    if nested:
        if layer_type not in nested:
            raise ConfigError(
                f"{fields.source}: {path} has parts {', '.join(nested)}; the family asks for {layer_type or 'none of them'}"
            )
        path, found = f"{path}.{layer_type}", nested[layer_type]
    if new is not None and old is not None and not nested and dict(old) != dict(new):
        for key in set(old) & set(new):
            if old[key] != new[key]:
                raise ConfigError(
                    f"{fields.source}: rope_scaling.{key} is {shown(old[key])} and rope_parameters.{key} is "
                    f"{shown(new[key])}; expected one value. Remove the one that is wrong"
                )
    return found, path


def _used(fields: Fields, path: str, key: str) -> None:
    for base in (*fields.parts, ""):
        fields.used.add(f"{base}.{path}.{key}" if base else f"{path}.{key}")


def _first(fields: Fields, settings: Mapping[str, Any], name: str) -> Any:
    """A field that newer configs keep among the rope settings and older ones at the top."""
    top = fields.find(name)
    own = settings.get(name)
    for path in ("rope_parameters", "rope_scaling"):
        _used(fields, path, name)
        for layer_type in ("full_attention", "sliding_attention"):
            _used(fields, f"{path}.{layer_type}", name)
    if top is not None and own is not None and top != own:
        raise ConfigError(
            f"{fields.source}: {name} is {shown(top)} at the top and {shown(own)} among the rope settings; expected one "
            "value. Remove the one that is wrong"
        )
    return own if own is not None else top


def _theta(fields: Fields, settings: Mapping[str, Any], theta: Any) -> Any:
    own = settings.get("rope_theta")
    if theta is not None and own is None:
        return theta
    if theta is not None:
        _first(fields, {}, "rope_theta")
        return own
    found = _first(fields, settings, "rope_theta")
    if found is None:
        found = fields.defaults.get("rope_theta")
        if found is None:
            found = DEFAULT_THETA
        fields.notes.append(f"rope_theta is not in {fields.source}; {found:g} is assumed, this family's default")
    return found


def _kind(settings: Mapping[str, Any], path: str, fields: Fields) -> str | None:
    kinds = {settings[key] for key in ("type", "rope_type") if isinstance(settings.get(key), str)}
    for key in ("type", "rope_type"):
        _used(fields, path, key)
    if len(kinds) > 1:
        raise ConfigError(
            f"{fields.source}: {path}.type is {shown(settings['type'])} and {path}.rope_type is "
            f"{shown(settings['rope_type'])}; expected one of them, or both alike"
        )
    kind = next(iter(kinds), None)
    if kind in (None, "default"):
        if kind is None and settings.get("factor") is not None:
            raise ConfigError(f"{fields.source}: {path} has a factor but no rope_type; expected {', '.join(_SPELLED)}")
        return None
    kind = _OLD_KINDS.get(kind, kind)
    if kind not in _SPELLED:
        raise ConfigError(
            f"{fields.source}: {path}.rope_type is {shown(kind)}; supported are default, {', '.join(_SPELLED)}"
        )
    return "ntk_alpha" if kind == "dynamic" and settings.get("alpha") is not None else kind


def _scaling(kind: str, settings: Mapping[str, Any], path: str, fields: Fields) -> dict[str, Any]:
    needed, others = _KEYS[kind]
    scaling: dict[str, Any] = {"kind": kind}
    for key in (*needed, *others):
        _used(fields, path, key)
        if settings.get(key) is not None:
            scaling[key] = settings[key]
        elif key in needed:
            raise ConfigError(f"{fields.source}: {path}.{key} is missing; {kind} scaling needs it")
    top = fields.find("original_max_position_embeddings")
    inner = scaling.get("original_max_position_embeddings")
    if top is not None and inner is not None and top != inner:
        raise ConfigError(
            f"{fields.source}: original_max_position_embeddings is {shown(top)} at the top and {shown(inner)} in {path}; "
            "expected one value. Remove the one that is wrong"
        )
    if "original_max_position_embeddings" in others and inner is None:
        original = top if top is not None else fields.get("max_position_embeddings")
        scaling["original_max_position_embeddings"] = original
        if top is None:
            fields.notes.append(
                f"{path}.original_max_position_embeddings is not set; max_position_embeddings, {original}, is taken for it"
            )
    if kind == "longrope":
        _longrope_attention(scaling, settings, path, fields)
    elif kind == "ntk_alpha" and settings.get("factor") is not None:
        _used(fields, path, "factor")
        if settings["factor"] != 1:
            fields.notes.append(f"{path}: alpha is used and factor {shown(settings['factor'])} is not, as in vLLM")
    return scaling


def _longrope_attention(scaling: dict[str, Any], settings: Mapping[str, Any], path: str, fields: Fields) -> None:
    """What multiplies cosines and sines, where a config says it in the words of transformers."""
    for key in ("factor", "attention_factor"):
        _used(fields, path, key)
    magnitude, factor = settings.get("attention_factor"), settings.get("factor")
    if magnitude is not None:
        for key in ("short_mscale", "long_mscale"):
            scaling.setdefault(key, magnitude)
        return
    longest, original = fields.get("max_position_embeddings"), scaling["original_max_position_embeddings"]
    numbers = all(isinstance(value, int | float) for value in (factor, longest, original))
    if factor is not None and numbers and original and not math.isclose(factor, longest / original, rel_tol=1e-3):
        fields.notes.append(
            f"{path}.factor is {shown(factor)}, but {longest} positions are {longest / original:g} times {original}; the "
            "lengths are used, as in vLLM, where transformers uses the factor"
        )
