"""Whether every tensor is used and every parameter filled."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tiers.reference.analysis.files import bytes_of
from tiers.reference.analysis.guesses import guess, top_module
from tiers.reference.analysis.layers import LAYER
from tiers.reference.analysis.parameters import Mapped, parameter_shapes, targets
from tiers.reference.checkpoint import TensorInfo
from tiers.reference.config import ModelConfig
from tiers.reference.load import VOCABULARY_TENSORS
from tiers.reference.weight_map import Entry, WeightMap


@dataclass(frozen=True)
class RuleUse:
    """A rule and what it did.

    Attributes:
        template, to: as the family has them.
        hits: tensors that it took.
        state: "used"; "dropped", if it leaves them out; "dead", if it took none; "shadowed by ...", if an earlier rule took
            all that it is about; "not needed: ...", if an earlier rule for the same name holds for this model.
    """

    template: str
    to: tuple[str, ...]
    hits: int
    state: str


@dataclass(frozen=True)
class Group:
    """Tensors without a place in the model that lie in one module and look like one thing."""

    module: str
    count: int
    bytes: int
    guess: str
    example: str


@dataclass(frozen=True)
class Misfit:
    """A parameter that has another shape in the checkpoint."""

    name: str
    source: str
    found: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True)
class Coverage:
    """What rules did with tensors, in both directions.

    Attributes:
        rules: in order.
        missing: parameters that no tensor fills, and a tensor without a place that has its shape, if there is one.
        unmapped: groups of tensors that no rule is about.
        surplus: groups of tensors that a rule gives a place which this model does not have.
        misfits: parameters of another shape.
        tensors, parameters: how many of each there are.
        dropped: tensors that a rule leaves out on purpose.
    """

    rules: tuple[RuleUse, ...]
    missing: Mapping[str, str | None]
    unmapped: tuple[Group, ...]
    surplus: tuple[Group, ...]
    misfits: tuple[Misfit, ...]
    tensors: int
    parameters: int
    dropped: int


def coverage(
    config: ModelConfig | None, weight_map: WeightMap, found: Mapped, infos: Mapping[str, TensorInfo]
) -> Coverage:
    """What the rules of a family do with the tensors of a checkpoint.

    Args:
        config: None if it could not be read; then nothing is known of parameters.
        weight_map: of the checkpoint.
        found: `mapped` of it.
        infos: headers of the checkpoint.
    """
    expected = {name: tuple(shape) for name, shape in parameter_shapes(config).items()} if config else {}
    unmapped = weight_map.unmapped
    places = set(targets(weight_map))
    allowed = set(expected) | ({"lm_head.weight"} if config and config.tie_word_embeddings else set())
    surplus = [e.source for e in weight_map.entries.values() if config and e.targets and not set(e.targets) & allowed]
    misfits = [
        Misfit(name, part.source, part.shape, expected[name])
        for name, part in found.parts.items()
        if name in expected and part.shape != expected[name] and not _surplus_rows(name, part.shape, expected[name])
    ]
    free = {infos[name].shape: name for name in reversed([*unmapped, *surplus])}
    missing = {name: free.get(shape) for name, shape in expected.items() if name not in places}
    number = config.num_hidden_layers if config else None
    return Coverage(
        tuple(_uses(weight_map)), missing, tuple(groups(unmapped, infos)),
        tuple(groups(surplus, infos, lambda name: _surplus_guess(weight_map.entries[name], number))),
        tuple(misfits), len(infos), len(expected),
        sum(entry.rule is not None and bool(entry.rule.drop) for entry in weight_map.entries.values()),
    )  # fmt: skip


def _uses(weight_map: WeightMap) -> Iterator[RuleUse]:
    # By rule, not by template: a name may have several rules, for models of several kinds.
    hits = Counter(id(entry.rule) for entry in weight_map.entries.values())
    shadowed, used = weight_map.shadowed(), set()
    for rule in weight_map.rules:
        count = hits[id(rule)]
        if count:
            state = "dropped" if rule.drop else "used"
            used.add(rule.template)
        elif rule.template in used:
            state = "not needed: the line above holds"
        else:
            state = f"shadowed by {shadowed[rule.template]}" if rule.template in shadowed else "dead"
        yield RuleUse(rule.template, rule.to, count, state)


def _surplus_rows(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Padding of the vocabulary, which is cut off."""
    return name.endswith(VOCABULARY_TENSORS) and found[1:] == expected[1:] and found[:1] > expected[:1]


def _surplus_guess(entry: Entry, number: int | None) -> str:
    match = LAYER.fullmatch(entry.targets[0])
    if match and number is not None and int(match[1]) >= number:
        return (
            f"beyond the {number} layers of config.json: num_hidden_layers is too small, or it is an MTP layer for "
            "speculative decoding"
        )
    return guess(entry.source) or "config.json describes a model without it"


def groups(
    names: Iterable[str], infos: Mapping[str, TensorInfo], meaning: Callable[[str], str] | None = None
) -> list[Group]:
    """Tensors by module and guess, in the order of their names."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names):
        what = meaning(name) if meaning else guess(name, infos[name])
        found.setdefault((top_module(name), what), []).append(name)
    return [
        Group(module, len(members), sum(bytes_of(infos[n]) for n in members), what, members[0])
        for (module, what), members in found.items()
    ]
