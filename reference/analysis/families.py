"""Which family a folder is of: by what its config names, and by what the names of its tensors fit."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tiers.reference import fields
from tiers.reference.analysis.parameters import STAND_IN
from tiers.reference.family import OURS, Family
from tiers.reference.weight_map import WeightMap

_OWN_NAME = re.compile(
    r"(embed_tokens|embed_positions|embed_norm|norm|lm_head)\.(weight|bias)"
    r"|layers\.\d+\.(mixer|mixer_norm|mixer_post_norm|ffn|ffn_norm|ffn_post_norm|gate)\..+"
)
_HEAD = re.compile(r"(.*\.)?(lm_head|embed_out|output|head)\.(weight|bias)")


@dataclass(frozen=True)
class Share:
    """How many tensors the rules of a family take.

    Attributes:
        idle: rules that took none.
    """

    family: str
    taken: int
    total: int
    idle: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.taken / self.total if self.total else 0.0


def shares(families: Iterable[Family], names: Iterable[str]) -> list[Share]:
    """What the rules of each family take of a checkpoint's names, the largest share first.

    Of equal shares the family comes first that has fewest idle rules, then the plainest: it changes least.
    """
    # Layers have the same names but for their number, so one stands for all.
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "0", name) for name in names)
    total = sum(counts.values())
    found: list[tuple[Share, int]] = []
    for family in families:
        if family is OURS:
            taken = sum(count for name, count in counts.items() if _OWN_NAME.fullmatch(name))
            found.append((Share(family.name, taken, total, 0), 0))
            continue
        weight_map = WeightMap(family, STAND_IN, counts)
        taken = total - sum(counts[name] for name in weight_map.unmapped)
        idle = sum(not hits for hits in weight_map.hits().values())
        found.append((Share(family.name, taken, total, idle), len(str(family.table))))
    found.sort(key=lambda pair: (-pair[0].taken, pair[0].idle, pair[1], pair[0].family))
    return [share for share, _ in found]


def named_in(raw: Any, key: str) -> list[str]:
    """What a config says under `architectures`, `model_type` or `dtype`, at the top and then where the language model is."""
    found: list[str] = []
    places = ("", *fields.LANGUAGE_PARTS)
    values = {path: value for path, value in fields.leaves(raw) if path.rpartition(".")[2] == key}
    for path in sorted(
        (path for path in values if path.rpartition(".")[0] in places), key=lambda path: path.count(".")
    ):
        value = values[path]
        found += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]
    return found


def named_by(raw: Any, family: Family, asked: str | None) -> str:
    """How a family was found: "asked", "architectures", "model_type", or "own format" for a config that names nothing."""
    if asked is not None:
        return "asked"
    if set(named_in(raw, "architectures")) & set(family.architectures):
        return "architectures"
    return "model_type" if set(named_in(raw, "model_type")) & set(family.model_types) else "own format"


@dataclass(frozen=True)
class Headless:
    """An architecture that names a class without a head.

    Attributes:
        nearest: the known architecture that it probably stands for.
        heads: tensors of a head that are there nevertheless.
    """

    architecture: str
    nearest: str | None
    heads: tuple[str, ...]


def headless(architectures: Sequence[str], known: Iterable[str], names: Iterable[str]) -> Headless | None:
    """The first architecture called `...Model`, which training libraries write for what was trained with a head.

    Args:
        architectures: of the config, but for those that a family answers to.
        known: architectures that there are.
        names: of the tensors.
    """
    known = sorted(set(known))
    for architecture in architectures:
        stem = architecture.removesuffix("Model")
        if not stem or stem == architecture or stem.endswith("Head"):
            continue
        with_head = [name for name in known if name in (f"{stem}ForCausalLM", f"{stem}LMHeadModel")]
        return Headless(
            architecture, next(iter(with_head), None), tuple(name for name in names if _HEAD.fullmatch(name))
        )
    return None
