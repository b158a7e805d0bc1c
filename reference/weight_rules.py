"""Rules of a family: from the name of a tensor in a checkpoint to our parameters, with what happens to it on the way.

    "model.layers.{i}.self_attn.{m:q_proj|k_proj}.{p}" = "layers.{i}.mixer.{m}.{p}"
    "h.{i}.attn.c_attn.{p}" = { to = ["layers.{i}.mixer.q_proj.{p}", ...], transpose = true, layout = "qkv" }
    "model.layers.{i}.self_attn.rotary_emb.inv_freq" = { drop = "computed from the config" }

In a name `{i}` is the number of a layer, `{e}` that of an expert, `{p}` is weight or bias, `{m:a|b}` is one of what is
listed, and `{all}` is any name. With layout "experts" one tensor fills the parameters of all experts, `{e}` on the right.
Legend: H query heads, KV key/value heads, G query heads per key/value head, D head size, E experts, F inner width of an
expert, M model width.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tiers.reference.config import Attention, ModelConfig, Moe, Rope, nearest
from tiers.reference.errors import CheckpointError, ConfigError, FamilyError
from tiers.reference.expression import evaluate, parse
from tiers.reference.fields import shown

_PLACEHOLDER = re.compile(r"\{([a-z]+)(?::([^{}]+))?\}")
_MAX_ADD = 1e6
_MISSING = object()
# The layout of a tensor [E, ...] that fills parameters of all experts.
EXPERTS = "experts"
_KEYS = ("to", "layout", "transpose", "pairing", "add", "drop", "when")


@dataclass(frozen=True)
class Rule:
    """One line of a family's [weights].

    Attributes:
        template: as written.
        pattern: what it matches.
        to: templates of our parameters; none if the tensor is dropped on purpose.
        layout: how a tensor is divided among them, a key of LAYOUTS; None for one parameter.
        transpose: matrices are stored as [in, out]; with layout "experts" None is for what the shapes say.
        pairing: how rotary channels of q and k pair up in the checkpoint, where ours are to pair in the other way.
        add: a number added to every element.
        drop: why the tensor is not needed.
        when: an expression over the fields of our config at the top, and over mixer and ffn of the first layer; the rule holds where it is true. "" is always.
        experts: how many experts `{e}` stands for; see `sized`.
    """

    template: str
    pattern: re.Pattern[str]
    to: tuple[str, ...] = ()
    layout: str | None = None
    transpose: bool | None = None
    pairing: str | None = None
    add: float = 0.0
    drop: str = ""
    when: str = ""
    experts: int = 0

    def sized(self, config: ModelConfig) -> "Rule":
        """The rule for this model: itself, unless it is about all experts at once."""
        if self.layout != EXPERTS:
            return self
        return replace(
            self, experts=max((x.ffn.num_experts for x in config.layers if isinstance(x.ffn, Moe)), default=0)
        )

    def holds(self, config: ModelConfig) -> bool:
        """Whether the rule is about this model.

        Raises:
            FamilyError: `when` asks for what is no field of the config.
        """

        def field(name: str) -> Any:
            value: Any = config
            for part in name.split("."):
                if part in ("mixer", "ffn", "gate"):
                    # What layers may differ in is asked of the first that has it.
                    value = next((x for x in config.layers if getattr(x, part) is not None), config.layers[0])
                value = getattr(value, part, _MISSING)
            if value is _MISSING:
                raise FamilyError(
                    f"weights: {shown(self.template)}: when asks for {name}, which is no field of our config"
                )
            return value

        return not self.when or bool(evaluate(self.when, field, {}))

    def targets(self, name: str) -> tuple[str, ...] | None:
        """Our parameters for a tensor, or None if the rule is not about it."""
        match = self.pattern.fullmatch(name)
        if match is None:
            return None
        numbers = map(str, range(self.experts)) if self.layout == EXPERTS else [match.groupdict().get("e", "")]
        values = [{**match.groupdict(), "e": e} for e in numbers]
        return tuple(_PLACEHOLDER.sub(lambda part, own=own: own[part[1]], to) for own in values for to in self.to)  # type: ignore[misc]

    def apply(self, name: str, tensor: Tensor, config: ModelConfig) -> tuple[Tensor, ...]:
        """The tensors for `targets`, in order; works on the meta device too.

        Raises:
            CheckpointError: the tensor cannot be divided as the rule says.
        """
        match = self.pattern.fullmatch(name)
        layer = int(match["i"]) if match and "i" in match.groupdict() else None
        mixer = config.layers[layer].mixer if layer is not None and layer < len(config.layers) else None
        if self.layout == EXPERTS:
            return self._experts(name, tensor, config, layer)
        if self.transpose and tensor.ndim == 2:
            tensor = tensor.T
        if self.add:
            # In float32, since a sum of 16 bits would round the number that was added.
            tensor = (tensor.float() + self.add).to(tensor.dtype)
        parts = (tensor,) if self.layout is None else LAYOUTS[self.layout](name, tensor, mixer, len(self.to))
        if self.pairing is None:
            return parts
        if mixer is None:
            raise CheckpointError(f"{name} belongs to no layer of the model, so its heads are unknown")
        return tuple(
            _paired(part, mixer, self.pairing) if ".q_proj." in to or ".k_proj." in to else part
            for to, part in zip(self.targets(name) or (), parts, strict=True)
        )

    def _experts(self, name: str, tensor: Tensor, config: ModelConfig, layer: int | None) -> tuple[Tensor, ...]:
        """Expert by expert, equal blocks of rows for each parameter of it: gate and up, for example."""
        turned = self.orientations(tuple(tensor.shape), config, layer)
        if self.transpose is not None:
            turned &= {self.transpose}
        if len(turned) != 1:
            raise CheckpointError(f"{name} {self.misfit(tuple(tensor.shape), config, layer, turned)}")
        if turned == {True}:
            tensor = tensor.transpose(1, 2)
        return tuple(part for expert in tensor for part in expert.chunk(len(self.to)))

    def orientations(self, shape: tuple[int, ...], config: ModelConfig, layer: int | None) -> set[bool]:
        """Whether matrices of a tensor of all experts may be stored as [in, out]: False, True, both, or neither."""
        sizes = self._expert_sizes(config, layer)
        if sizes is None or len(shape) != 3 or shape[0] != sizes[0]:
            return set()
        _, rows, columns = sizes
        return {turned for turned, stored in ((False, (rows, columns)), (True, (columns, rows))) if shape[1:] == stored}

    def misfit(self, shape: tuple[int, ...], config: ModelConfig, layer: int | None, turned: set[bool]) -> str:
        """What is wrong with a tensor of all experts, or with the two orientations that fit."""
        if turned:
            return (
                f"has shape {list(shape)}, which may be [experts, out, in] or [experts, in, out]; expected other tensors of the "
                "layer to tell. Say transpose = false or true in its rule"
            )
        sizes = self._expert_sizes(config, layer)
        if sizes is None:
            return f"holds experts, but config.json describes layer {layer} without them"
        experts, rows, columns = sizes
        return (
            f"has shape {list(shape)}; expected [{experts}, {rows}, {columns}] or [{experts}, {columns}, {rows}], all experts' "
            "matrices in the same orientation"
        )

    def _expert_sizes(self, config: ModelConfig, layer: int | None) -> tuple[int, int, int] | None:
        """Experts, rows and columns as torch multiplies by them; None for a layer without experts."""
        ffn = config.layers[layer].ffn if layer is not None and layer < len(config.layers) else None
        if not isinstance(ffn, Moe):
            return None
        inner, width = ffn.intermediate_size, config.hidden_size
        down = all(".down_proj." in to for to in self.to)
        return ffn.num_experts, width if down else inner * len(self.to), inner if down else width


def parse_rules(table: Mapping[str, Any], source: str) -> tuple[Rule, ...]:
    """Read [weights] of a family.

    Raises:
        FamilyError: names the line and what is wrong with it.
    """
    lines = [
        (template, value)
        for template, values in table.items()
        for value in (values if _is_table_list(values) else [values])
    ]
    return tuple(_parse_rule(template, value, source) for template, value in lines)


def _is_table_list(value: Any) -> bool:
    """Several rules for one name, of which the first that holds is taken."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _parse_rule(template: str, value: Any, source: str) -> Rule:
    where = f"{source}: weights: {shown(template)}"
    options: Mapping[str, Any] = {"to": value} if isinstance(value, str | list) else value
    if not isinstance(options, Mapping):
        raise FamilyError(f"{where} is {shown(value)}; expected a name, a list of names, or a table")
    for key in options:
        if key not in _KEYS:
            raise FamilyError(
                f"{where}: unknown key {shown(key)}{nearest(key, _KEYS) or '; known: ' + ', '.join(_KEYS)}"
            )
    drop, to = options.get("drop", ""), options.get("to", [])
    to = [to] if isinstance(to, str) else to
    when = options.get("when", "")
    if not isinstance(when, str):
        raise FamilyError(f"{where}: when is {shown(when)}; expected an expression")
    if when:
        try:
            parse(when)
        except ConfigError as error:
            raise FamilyError(f"{where}: {error}") from None
    if not isinstance(drop, str) or not isinstance(to, list) or not all(isinstance(name, str) for name in to):
        raise FamilyError(f"{where}: expected names in to, and in drop the reason why the tensor is not needed")
    if bool(drop) == bool(to):
        raise FamilyError(f"{where}: expected either to, or drop with the reason why the tensor is not needed")
    layout, pairing = options.get("layout"), options.get("pairing")
    layouts = (*LAYOUTS, EXPERTS)
    if layout is not None and (not isinstance(layout, str) or layout not in layouts):
        raise FamilyError(
            f"{where}: layout is {shown(layout)}; expected one of {', '.join(layouts)}{nearest(layout, layouts)}"
        )
    if layout is None and len(to) > 1:
        raise FamilyError(f"{where}: goes to {len(to)} parameters; expected a layout, one of {', '.join(layouts)}")
    if layout == EXPERTS and ("{i}" not in template or not to or not all("{e}" in name for name in to)):
        raise FamilyError(f"{where}: layout experts needs a layer, {{i}}, and {{e}} in every name of to")
    if layout == EXPERTS and (options.get("add") or pairing is not None):
        raise FamilyError(f"{where}: layout experts takes neither add nor pairing")
    if pairing not in (None, "half", "interleaved"):
        raise FamilyError(f"{where}: pairing is {shown(pairing)}; expected half or interleaved")
    if pairing is not None and "{i}" not in template:
        raise FamilyError(f"{where}: pairing needs a layer, {{i}}, whose heads are meant")
    add = options.get("add", 0.0)
    if (
        not isinstance(add, int | float)
        or not abs(add) < _MAX_ADD
        or not isinstance(options.get("transpose"), bool | None)
    ):
        raise FamilyError(f"{where}: expected a number in add, and true or false in transpose")
    pattern = _pattern(template, where)
    for name in to:
        for part in _PLACEHOLDER.finditer(name):
            if part[1] not in pattern.groupindex and not (part[1] == "e" and layout == EXPERTS):
                raise FamilyError(
                    f"{where}: {shown(name)} uses {shown(part[0])}, which the name of the tensor does not have"
                )
    return Rule(
        template,
        pattern,
        tuple(to),
        layout,
        options.get("transpose"),
        pairing,
        float(add),
        drop,
        when,
    )


def _pattern(template: str, where: str) -> re.Pattern[str]:
    text, end = "", 0
    seen: set[str] = set()
    for part in _PLACEHOLDER.finditer(template):
        name, choices = part[1], part[2]
        number = "0|[1-9][0-9]{0,4}"
        known = {"i": number, "e": number, "p": "weight|bias", "all": ".+"}
        if choices is None and name not in known:
            raise FamilyError(f"{where}: {shown(part[0])} says nothing of what it stands for; expected {{{name}:a|b}}")
        options = known[name] if choices is None else "|".join(re.escape(choice) for choice in choices.split("|"))
        text += re.escape(template[end : part.start()])
        text += f"(?P={name})" if name in seen else f"(?P<{name}>{options})"
        seen.add(name)
        end = part.end()
    return re.compile(text + re.escape(template[end:]))


# ---- layouts --------------------------------------------------------------------------------------------------------


def _qkv_sizes(name: str, rows: int, mixer: Attention | None) -> tuple[Attention, int, int]:
    if mixer is None:
        raise CheckpointError(f"{name} belongs to no layer of the model, so its heads are unknown")
    heads, kv = mixer.num_heads, mixer.num_kv_heads
    expected = (heads + 2 * kv) * mixer.head_dim
    if rows != expected:
        raise CheckpointError(
            f"{name} has {rows} rows; q, k and v of {heads} and {kv} heads of {mixer.head_dim} channels have {expected}. "
            "Check the numbers of heads and the head size in config.json"
        )
    return mixer, heads * mixer.head_dim, kv * mixer.head_dim


def _qkv(name: str, tensor: Tensor, mixer: Attention | None, parts: int) -> tuple[Tensor, ...]:
    """All of q, all of k, all of v."""
    _, q, kv = _qkv_sizes(name, tensor.shape[0], mixer)
    return tensor.split([q, kv, kv])


def _qkv_per_group(name: str, tensor: Tensor, mixer: Attention | None, parts: int) -> tuple[Tensor, ...]:
    """For each key/value head: its G query heads, then k, then v. With G of 1 this is q, k, v head by head."""
    mixer, q, kv = _qkv_sizes(name, tensor.shape[0], mixer)
    if q % kv:
        raise CheckpointError(
            f"{name} is laid out by groups, but {mixer.num_heads} heads make no {mixer.num_kv_heads} equal groups"
        )
    groups = tensor.unflatten(0, (mixer.num_kv_heads, -1, mixer.head_dim))
    q_part, k_part, v_part = groups.split([q // kv, 1, 1], dim=1)
    return tuple(part.flatten(0, 2) for part in (q_part, k_part, v_part))


def _halves(name: str, tensor: Tensor, mixer: Attention | None, parts: int) -> tuple[Tensor, ...]:
    """Equal blocks of rows, one for each parameter: gate and up, for example."""
    if tensor.shape[0] % parts:
        raise CheckpointError(f"{name} has {tensor.shape[0]} rows, which do not divide into {parts} equal blocks")
    return tensor.chunk(parts)


def _alternating(name: str, tensor: Tensor, mixer: Attention | None, parts: int) -> tuple[Tensor, ...]:
    """Row 0 for the first parameter, row 1 for the second, and so on in turn."""
    if tensor.shape[0] % parts:
        raise CheckpointError(
            f"{name} has {tensor.shape[0]} rows, which do not divide among {parts} parameters in turn"
        )
    return tensor.unflatten(0, (-1, parts)).unbind(1)


def _copies(name: str, tensor: Tensor, mixer: Attention | None, parts: int) -> tuple[Tensor, ...]:
    """The whole tensor for each: a norm that two sublayers share."""
    return (tensor,) * parts


Layout = Callable[[str, Tensor, Attention | None, int], tuple[Tensor, ...]]
LAYOUTS: Mapping[str, Layout] = {
    "qkv": _qkv, "qkv_per_group": _qkv_per_group, "halves": _halves, "alternating": _alternating, "copies": _copies,
}  # fmt: skip


def _paired(tensor: Tensor, mixer: Attention, pairing: str) -> Tensor:
    """Rows of each head moved so that rotary channels which pair up as `pairing` pair up the other way.

    Interleaved pairs are (0, 1), (2, 3), ...; half pairs are (0, d/2), (1, d/2 + 1), ...
    """
    if not isinstance(mixer.position, Rope):
        return tensor
    rotary = mixer.position.rotary_dim(mixer.head_dim)
    if pairing == "interleaved":
        order = [*range(0, rotary, 2), *range(1, rotary, 2)]
    else:
        order = [i // 2 + (i % 2) * (rotary // 2) for i in range(rotary)]
    order += range(rotary, mixer.head_dim)
    heads = tensor.unflatten(0, (-1, mixer.head_dim))
    return heads.index_select(1, torch.tensor(order, device=tensor.device)).flatten(0, 1)
