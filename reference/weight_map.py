"""Which parameter each tensor of a checkpoint fills: a family's rules, applied to the names that are there."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiers.reference.checkpoint import TensorInfo
from tiers.reference.config import ModelConfig
from tiers.reference.errors import CheckpointError
from tiers.reference.family import Family
from tiers.reference.weight_rules import EXPERTS, Rule

# Components of a prefix that are looked at when the names of a checkpoint have another root than the rules.
_ROOT_DEPTH = 4

# A damaged or hostile file may hold names without number; a root shows in the first of them.
_MAX_NAMES, _MAX_ROOTS = 1024, 12


@dataclass(frozen=True)
class Entry:
    """What happens to one tensor.

    Attributes:
        source: its name in the checkpoint.
        name: the name that the rule was asked about, where the root differs.
        rule: None if there is none for it.
        targets: our parameters; none if it is dropped on purpose or unknown.
    """

    source: str
    name: str
    rule: Rule | None
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Root:
    """Names of the checkpoint begin with `found` where the rules have `expected`."""

    found: str
    expected: str

    def rename(self, name: str) -> str | None:
        """The name as the rules have it, or None if it does not begin so."""
        return self.expected + name.removeprefix(self.found) if name.startswith(self.found) else None


class WeightMap:
    """The map of one checkpoint.

    Args:
        family: whose rules.
        config: the model; splitting a tensor needs its heads.
        names: all names of the checkpoint, best with their headers. Without them names are taken to have the root that the
            rules have.

    Attributes:
        notes: sentences about what was odd but harmless.
        root: how names were changed before rules were asked, or None.
        entries: one per name, in the order given.
        rules: those of the family that hold for this model.
    """

    def __init__(self, family: Family, config: ModelConfig, names: Iterable[str] = ()) -> None:
        self.family, self.config = family, config
        # A model without experts has no place for those of a rule.
        sized = (rule.sized(config) for rule in family.rules if rule.holds(config))
        self.rules = tuple(rule for rule in sized if rule.layout != EXPERTS or rule.experts)
        self._shapes = (
            {n: i.shape for n, i in names.items() if isinstance(i, TensorInfo)} if isinstance(names, Mapping) else {}
        )
        self.notes: list[str] = []
        self.root: Root | None = None
        names = list(names)
        unknown = [name for name in names if self._direct(name)[0] is None]
        if unknown:
            self.root = self._find_root(unknown, sorted(set(names) - set(unknown)))
        if self.root is not None:
            self.notes.append(
                f"names that begin with {self.root.found!r} are read as if they began with {self.root.expected!r}"
                if self.root.found
                else f"names are read as if they began with {self.root.expected!r}"
            )
        self.entries = {name: self.entry(name) for name in names}
        # Layer to whether the matrices of its experts are stored as [in, out], as far as headers tell.
        self._turned: dict[int, set[bool]] = {}

    def entry(self, source: str) -> Entry:
        """What happens to a tensor of this name."""
        rule, targets = self._direct(source)
        if rule is not None or self.root is None:
            return Entry(source, source, rule, targets)
        renamed = self.root.rename(source)
        if renamed is None:
            return Entry(source, source, None, ())
        rule, targets = self._direct(renamed)
        return Entry(source, renamed, rule, targets)

    def apply(self, source: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Our parameters that a tensor of the checkpoint fills.

        Raises:
            CheckpointError: no rule is about it; it cannot be divided as its rule says.
        """
        entry = self.entries.get(source) or self.entry(source)
        if entry.rule is None:
            raise CheckpointError(
                f"{source}: no rule of family {self.family.name} is about this tensor. Nothing may be left out in silence: add "
                "a rule to a family file, with drop and a reason if it is not needed"
            )
        if entry.targets:
            try:
                rule = self._oriented(entry) if entry.rule.layout == EXPERTS else entry.rule
                yield from zip(entry.targets, rule.apply(entry.name, tensor, self.config), strict=True)
            except (RuntimeError, IndexError, ValueError) as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{source}: shape {list(tensor.shape)} does not fit its rule ({error})") from None

    def _oriented(self, entry: Entry) -> Rule:
        """The rule of a tensor of all experts, told the one orientation that fits all such tensors of its layer.

        Raises:
            CheckpointError: none fits all.
        """
        assert entry.rule is not None
        if entry.rule.transpose is not None:
            return entry.rule
        layer = _layer(entry)
        if layer not in self._turned:
            turned, shapes = {False, True}, []
            for source, shape in self._shapes.items():
                other = self.entries[source]
                if other.rule is not None and other.rule.layout == EXPERTS and _layer(other) == layer:
                    turned &= other.rule.orientations(shape, self.config, layer)
                    shapes.append(f"{source} {list(shape)}")
            if not turned and len(shapes) > 1:
                raise CheckpointError(
                    f"layer {layer}: {' and '.join(shapes)}; expected all matrices of its experts as [experts, out, in], or all "
                    f"as [experts, in, out], of the sizes that config.json has"
                )
            self._turned[layer] = turned
        (only,) = self._turned[layer] if len(self._turned[layer]) == 1 else (None,)
        return replace(entry.rule, transpose=only)

    def infos(self, found: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Our parameters with the file, dtype and shape that they would have; reads no data.

        Raises:
            CheckpointError: two tensors fill one parameter; a tensor cannot be divided as its rule says.
        """
        result: dict[str, TensorInfo] = {}
        sources: dict[str, str] = {}
        for source, info in found.items():
            if self.entries[source].rule is None:
                continue
            try:
                shape = torch.empty(info.shape, dtype=info.dtype, device="meta")
            except (RuntimeError, TypeError, OverflowError):
                raise CheckpointError(
                    f"{info.file}: {source} has shape {str(list(info.shape))[:80]}; expected one that memory could hold"
                ) from None
            for target, part in self.apply(source, shape):
                if target in result:
                    raise CheckpointError(
                        f"{sources[target]} and {source} both are {target}; expected it once. The folder holds the same "
                        "weights under two schemes of names: remove one"
                    )
                result[target], sources[target] = TensorInfo(info.file, info.dtype, tuple(part.shape)), source
        return result

    @property
    def unmapped(self) -> list[str]:
        """Names that no rule is about."""
        return [entry.source for entry in self.entries.values() if entry.rule is None]

    def hits(self) -> dict[str, int]:
        """How many tensors each rule took, by template."""
        counts = {rule.template: 0 for rule in self.rules}
        for entry in self.entries.values():
            if entry.rule is not None:
                counts[entry.rule.template] += 1
        return counts

    def shadowed(self) -> dict[str, str]:
        """Rules that match tensors but got none, since an earlier rule took each of them; with that rule."""
        hits, found = self.hits(), {}
        for number, rule in enumerate(self.rules):
            if hits[rule.template]:
                continue
            for entry in self.entries.values():
                if rule.pattern.fullmatch(entry.name):
                    found[rule.template] = next(
                        r.template for r in self.rules[:number] if r.pattern.fullmatch(entry.name)
                    )
                    break
        return found

    def _direct(self, name: str) -> tuple[Rule | None, tuple[str, ...]]:
        for rule in self.rules:
            targets = rule.targets(name)
            if targets is not None:
                return rule, targets
        return None, ()

    def _find_root(self, unknown: list[str], known: list[str]) -> Root | None:
        """The exchange of a prefix that lets rules take most of the names that none is about.

        It has to bring in tensors of layers: else a projector's `proj.weight` could pass for `lm_head.weight`. Where rules
        know the layers as they are, all that may change is that a name stands deeper, under a prefix of those: a head at
        `model.lm_head.weight`.
        """
        unknown = unknown[:_MAX_NAMES]
        expected = {"", *(_prefix(rule.template, d) for rule in self.rules for d in range(1, _ROOT_DEPTH))}
        expected = {text for text in expected if "{" not in text}
        deeper = any(
            "{i}" in rule.template for name in known if (rule := self._direct(name)[0]) is not None and rule.to
        )
        if deeper:
            beside, expected = {_prefix(name, d) for name in known for d in range(1, _ROOT_DEPTH)}, {""}
            named = [text for name in unknown for d in range(1, _ROOT_DEPTH) if (text := _prefix(name, d)) in beside]
        else:
            layered = [name for name in unknown if re.search(r"(^|\.)\d+\.", name)]
            named = ["", *(_prefix(name, d) for name in layered for d in range(1, _ROOT_DEPTH))]
        begins = {"", *(text for text, _ in Counter(named).most_common(_MAX_ROOTS))}
        best, most = None, 0
        for found in sorted(begins, key=lambda text: (len(text), text)):
            for text in sorted(expected, key=lambda text: (len(text), text)):
                root = Root(found, text)
                renamed = [new for name in unknown if (new := root.rename(name)) is not None]
                rules = [rule for new in renamed if (rule := self._direct(new)[0]) is not None]
                if not deeper and not any("{i}" in rule.template for rule in rules):
                    continue
                if found != text and len(rules) > most:
                    best, most = root, len(rules)
        return best


def _layer(entry: Entry) -> int:
    match = entry.rule.pattern.fullmatch(entry.name) if entry.rule else None
    return int(match["i"]) if match else -1


def _prefix(name: str, depth: int) -> str:
    parts = name.split(".")
    return ".".join(parts[:depth]) + "." if depth < len(parts) else ""
