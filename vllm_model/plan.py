"""Which tier each operator of each layer shall use: parsing the user's text, nothing else. Plain data, no torch."""

import difflib
from dataclasses import dataclass
from enum import Enum

from tiers.reference.config import ModelConfig, parse_layer_range
from tiers.reference.errors import ConfigError, PlanError

OPERATORS = ("attention", "moe", "gate")


class Tier(Enum):
    """From slowest to fastest."""

    REFERENCE = "reference"
    COMPILED = "compiled"
    FAST = "fast"


AUTO = "auto"
CHOICES = (AUTO, *(tier.value for tier in Tier))

GRAMMAR = "rules separated by commas, later ones winning: auto | reference | 0-3=reference | 7.attention=compiled | *.gate=fast"


@dataclass(frozen=True)
class TierPlan:
    """The wish for every operator of a model.

    Attributes:
        text: what the user wrote.
        wishes: (layer, operator) to the tier named for it, or None where the fastest one that works shall serve.
    """

    text: str
    wishes: dict[tuple[int, str], Tier | None]

    @classmethod
    def parse(cls, text: str, config: ModelConfig) -> "TierPlan":
        """Read a plan against the model that it is for.

        Args:
            text: see GRAMMAR. Operators that no rule names are on auto.
            config: says which layers exist and which operators they have.

        Raises:
            PlanError: an unknown tier or operator, a layer beyond the last, or a rule that fits no operator at all.
        """
        wishes: dict[tuple[int, str], Tier | None] = {
            (i, operator): None for i, layer in enumerate(config.layers) for operator in layer.operators
        }
        for rule in text.split(","):
            target, equals, name = (part.strip() for part in rule.rpartition("="))
            layers, operators = _target(target, rule, config) if equals else (range(len(config.layers)), OPERATORS)
            tier = _tier(name, rule)
            hits = [key for key in wishes if key[0] in layers and key[1] in operators]
            if not hits:
                raise PlanError(
                    f"plan rule {rule.strip()!r} fits nothing: {_layers(layers)} "
                    f"{'has' if len(layers) == 1 else 'have'} no operator {operators[0]!r}"
                )
            wishes.update(dict.fromkeys(hits, tier))
        return cls(text, wishes)


def _tier(name: str, rule: str) -> Tier | None:
    if name == AUTO:
        return None
    try:
        return Tier(name)
    except ValueError:
        raise PlanError(
            f"plan rule {rule.strip()!r}: unknown tier {name!r}{_nearest(name, CHOICES)}; "
            f"expected one of {', '.join(CHOICES)}. A plan is {GRAMMAR}"
        ) from None


def _target(target: str, rule: str, config: ModelConfig) -> tuple[range, tuple[str, ...]]:
    """ "0-3", "7.attention" or "*.gate" as layers and operators."""
    where, dot, operator = target.partition(".")
    if dot and operator not in OPERATORS:
        raise PlanError(
            f"plan rule {rule.strip()!r}: unknown operator {operator!r}{_nearest(operator, OPERATORS)}; "
            f"expected one of {', '.join(OPERATORS)}"
        )
    if where == "*":
        layers = range(len(config.layers))
    else:
        try:
            layers = parse_layer_range(where, len(config.layers))
        except ConfigError as error:
            raise PlanError(f"plan rule {rule.strip()!r}: {error}") from None
    return layers, (operator,) if dot else OPERATORS


def _nearest(found: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(found, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _layers(layers: range) -> str:
    return f"layer {layers.start}" if len(layers) == 1 else f"layers {layers.start}-{layers.stop - 1}"
