"""Model families: what a file says about foreign checkpoints, so that they can be read as models of ours.

A family is one TOML file, docs/families.md explains every key. Those in reference/families are shipped; a user's own is
named by --family or found in TIERS_FAMILIES, and looks the same. A family answers to `architectures` or `model_type`,
translates config.json into our words and names a rule for every tensor.
"""

import functools
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiers.reference import expression, fields
from tiers.reference.config import ARCHITECTURE, MAX_LAYERS, MODEL_TYPE, ModelConfig, is_deep, nearest
from tiers.reference.errors import ConfigError, FamilyError
from tiers.reference.fields import Fields, shown
from tiers.reference.rope_fields import FIELDS as ROPE_FIELDS
from tiers.reference.rope_fields import context, rope
from tiers.reference.weight_rules import Rule, parse_rules

SHIPPED = Path(__file__).parent / "families"
VARIABLE = "TIERS_FAMILIES"

# Families whose files may be larger than this are no families.
_MAX_BYTES = 2**20
_MAX_DEPTH = 8

_TABLES = {
    "aliases": dict, "defaults": dict, "config": dict, "weights": dict, "architectures": list, "model_types": list,
    "optional": list, "ignored": list, "layers": list, "refuse": list, "extends": str, "description": str,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One family, its parent's tables merged in.

    Attributes:
        name: of the file, without .toml.
        architectures, model_types: what it answers to.
        table: everything else, as it was written.
        rules: the tensors of a checkpoint, first match wins.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    table: Mapping[str, Any] = field(repr=False)
    rules: tuple[Rule, ...] = field(repr=False)

    def translate(self, raw: Mapping[str, Any], source: str = "config.json") -> "Translation":
        """Say in our words what a config.json describes.

        Raises:
            ConfigError: a field is missing or contradicts another, or describes what this family's models here cannot do.
        """
        if self.name == MODEL_TYPE:
            return Translation(dict(raw), {}, [])
        found = Fields(
            raw, self.table.get("aliases", {}), self.table.get("defaults", {}), frozenset(self.table.get("optional", ())),
            source,
        )  # fmt: skip
        found.functions = {
            "rope": functools.partial(rope, found), "context": functools.partial(context, found),
            "gated": fields.gated, "experts_activation": fields.experts_activation, "alibi_slopes": fields.slopes, "plain": fields.plain, "sqrt": fields.sqrt, "min": min, "max": max, "len": len,
            "int": int, "float": float, "given": lambda name: found.find(name) is not None,
        }  # fmt: skip
        try:
            for refusal in self.table.get("refuse", ()):
                if found.value(refusal["when"]):
                    raise ConfigError(f"{source}: {refusal['because']}")
            description = _without_none(found.value(self.table.get("config", {})))
            self._layers(found, description, source)
        except ConfigError as error:
            raise ConfigError(f"{error} (read as family {self.name})") from None
        # What an expression names but had no need to ask for is read too.
        for name in _mentioned(self.table):
            found.touch(name)
        return Translation(description, found.unused(frozenset(self.table.get("ignored", ()))), found.notes)

    def _layers(self, found: Fields, description: dict[str, Any], source: str) -> None:
        number = description.get("num_hidden_layers")
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= MAX_LAYERS:
            raise ConfigError(
                f"{source}: num_hidden_layers is {shown(number)}; expected an integer from 1 to {MAX_LAYERS}"
            )
        overrides: dict[str, Any] = {}
        for entry in self.table.get("layers", ()):
            for i in range(number):
                found.variables = {"i": i}
                if found.value(entry["when"]):
                    # None stays here: it takes back what the layers have in common.
                    own = found.value({k: v for k, v in entry.items() if k != "when"})
                    overrides[str(i)] = _merged(overrides.get(str(i), {}), own)
        if overrides:
            description["layers"] = overrides


@dataclass(frozen=True)
class Translation:
    """A config in our words.

    Attributes:
        description: what our own config.json would say, without the keys of transformers.
        unused: path and value of everything in the foreign config that nothing asked for.
        notes: sentences about what was odd but harmless.
    """

    description: dict[str, Any]
    unused: dict[str, Any]
    notes: list[str]

    def model(self, source: str = "config.json") -> ModelConfig:
        """The parsed description."""
        return ModelConfig.from_dict(self.description, source)


# Folders of our own format: names and config are ours already.
OURS = Family(MODEL_TYPE, (ARCHITECTURE,), (MODEL_TYPE,), {}, parse_rules({"{all}": "{all}"}, MODEL_TYPE))


def read_family(path: Path) -> Family:
    """Read one family file.

    Raises:
        FamilyError: not there, not TOML, an unknown key, an expression or a rule that cannot be read.
    """
    table = _read_table(path, 0)
    name = path.stem
    _check_expressions(table, path)
    rules = parse_rules(table.get("weights", {}), str(path))
    return Family(name, tuple(table.get("architectures", ())), tuple(table.get("model_types", ())), table, rules)


def _read_table(path: Path, depth: int) -> dict[str, Any]:
    try:
        # A pipe by this name might never end.
        if path.exists() and not path.is_file() and not path.is_dir():
            raise FamilyError(f"{path}: cannot be read, it is no regular file; expected a family file")
        if path.stat().st_size > _MAX_BYTES:
            raise FamilyError(f"{path}: {path.stat().st_size} bytes; expected a family file of at most {_MAX_BYTES}")
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FamilyError(
            f"{path}: cannot be read ({error.strerror}); expected a family file, see docs/families.md"
        ) from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, FamilyError):
            raise
        raise FamilyError(f"{path}: not valid TOML ({error})") from None
    if is_deep(table):
        raise FamilyError(f"{path}: tables or lists within each other, deeper than any family")
    for key, value in table.items():
        if key not in _TABLES:
            raise FamilyError(
                f"{path}: unknown key {shown(key)}{nearest(key, _TABLES) or '; known: ' + ', '.join(_TABLES)}"
            )
        if not isinstance(value, _TABLES[key]):
            raise FamilyError(f"{path}: {key} is {shown(value)}; expected a {_TABLES[key].__name__}")
    named = [(key, table.get(key, [])) for key in ("architectures", "model_types", "optional", "ignored")]
    named += [(f"aliases.{shown(name)}", names) for name, names in table.get("aliases", {}).items()]
    for key, value in named:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise FamilyError(f"{path}: {key} is {shown(value)}; expected a list of names")
    for key, needed in (("layers", "when"), ("refuse", "when"), ("refuse", "because")):
        for entry in table.get(key, ()):
            if not isinstance(entry, dict) or needed not in entry:
                raise FamilyError(f"{path}: an entry of {key} has no {needed}; every entry needs it")
    parent = table.pop("extends", None)
    if parent is None:
        return table
    # Path("..").name is ".." itself.
    if Path(parent).name != parent or parent in ("", ".", "..") or "\0" in parent:
        raise FamilyError(f"{path}: extends is {shown(parent)}; expected the plain name of a family")
    if depth >= _MAX_DEPTH:
        raise FamilyError(f"{path}: extends goes on for more than {_MAX_DEPTH} files; does a family extend itself?")
    base_path = path.parent / f"{parent}.toml"
    base = _read_table(
        base_path if base_path.is_file() and base_path != path else SHIPPED / f"{parent}.toml", depth + 1
    )
    # What a parent answers to is its own.
    base.pop("architectures", None)
    base.pop("model_types", None)
    rules = {
        **table.get("weights", {}),
        **{k: v for k, v in base.get("weights", {}).items() if k not in table.get("weights", {})},
    }
    lists = {key: [*base.get(key, ()), *table.get(key, ())] for key in ("optional", "ignored", "refuse")}
    return {**_merged(base, table), **lists, "weights": rules}


def _mentioned(value: Any) -> set[str]:
    """Names of fields in all expressions of a table, those that rope() reads included where it is called."""
    if isinstance(value, Mapping):
        return set().union(*(_mentioned(item) for item in value.values()))
    if isinstance(value, list):
        return set().union(*(_mentioned(item) for item in value))
    if not isinstance(value, str) or not value.startswith("="):
        return set()
    return expression.names(expression.parse(value[1:])) | (set(ROPE_FIELDS) if "rope(" in value else set())


def _check_expressions(value: Any, path: Path) -> None:
    """Parse every expression of a file once, so that a mistake is found whatever model comes."""
    if isinstance(value, Mapping):
        for item in value.values():
            _check_expressions(item, path)
    elif isinstance(value, list):
        for item in value:
            _check_expressions(item, path)
    elif isinstance(value, str) and value.startswith("="):
        try:
            expression.parse(value[1:])
        except ConfigError as error:
            raise FamilyError(f"{path}: {error}") from None


@functools.cache
def shipped() -> tuple[Family, ...]:
    """The families that come with this project."""
    return tuple(read_family(path) for path in sorted(SHIPPED.glob("*.toml")))


def own_families() -> tuple[Family, ...]:
    """The user's families: files, or folders of files, named in TIERS_FAMILIES; those of installed packages after them.

    A package names a folder or a file by an entry point of the group `tiers.families` that is a function without
    arguments, returning its path.
    """
    return _own_families(os.environ.get(VARIABLE, ""))


@functools.cache
def _own_families(paths: str) -> tuple[Family, ...]:
    from importlib.metadata import entry_points

    found = []
    for text in (part for part in paths.split(os.pathsep) if part):
        found += _families_at(Path(text), VARIABLE)
    for entry in entry_points(group="tiers.families"):
        try:
            path = Path(entry.load()())
        except Exception as error:  # a package of somebody else
            raise FamilyError(
                f"entry point {entry.name} = {entry.value} failed: {type(error).__name__}: {error}"
            ) from None
        found += _families_at(path, f"entry point {entry.name}")
    return tuple(found)


def _families_at(path: Path, origin: str) -> list[Family]:
    if path.is_dir():
        return [read_family(file) for file in sorted(path.glob("*.toml"))]
    if not path.is_file():
        raise FamilyError(f"{origin} names {path}, which is not there; expected a family file or a folder of them")
    return [read_family(path)]


def find_family(raw: Any, asked: str | None = None, source: str = "config.json") -> Family:
    """The family of a config.json.

    Args:
        raw: the parsed file.
        asked: name of a family, or path of a family file; None goes by what the config says of itself.
        source: what to call the config in messages.

    Raises:
        ConfigError: the config names nothing that is known.
        FamilyError: no such family; a file of the user's cannot be read.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source}: found {shown(raw)} at the top; expected a JSON object")
    if asked is not None:
        return _asked(asked)
    everywhere = (*own_families(), OURS, *shipped())
    parts = [raw, *(part for path in fields.LANGUAGE_PARTS if isinstance(part := _part(raw, path), Mapping))]
    architectures = [a for part in parts for a in _texts(part.get("architectures"))]
    types = [t for part in parts for t in _texts(part.get("model_type"))]
    for family in everywhere:
        if set(architectures) & set(family.architectures):
            return family
    for family in everywhere:
        if set(types) & set(family.model_types):
            return family
    if not architectures and not types:
        # Our own format needs neither.
        return OURS
    named = [("architectures", a) for a in architectures] + [("model_type", t) for t in types]
    key, name = named[0]
    known = [
        a for family in everywhere for a in (family.architectures if key == "architectures" else family.model_types)
    ]
    raise ConfigError(
        f"{source}: {key} names {shown(name)}, which no family answers to{nearest(name, known)}. Known families: "
        f"{', '.join(sorted(f.name for f in everywhere))}. Choose one with --family NAME, or describe the model in a "
        "family file of your own (docs/families.md)"
    )


def _asked(asked: str) -> Family:
    for family in (*own_families(), OURS, *shipped()):
        if family.name == asked:
            return family
    path = Path(asked)
    if path.suffix == ".toml" or path.is_file():
        return read_family(path)
    names = sorted(family.name for family in (*own_families(), *shipped()))
    raise FamilyError(
        f"--family is {asked!r}; expected a family file, or one of {', '.join(names)}{nearest(asked, names)}"
    )


def _texts(value: Any) -> Sequence[str]:
    if isinstance(value, str):
        return [value]
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _part(raw: Any, path: str) -> Any:
    for name in path.split("."):
        raw = raw.get(name) if isinstance(raw, Mapping) else None
    return raw


def _without_none(value: Any) -> Any:
    """Fields without a value are left to our own defaults."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def _merged(base: Any, override: Any) -> Any:
    """Tables merged key by key; one of another kind replaces the base, since it has other fields."""
    if not isinstance(base, Mapping) or not isinstance(override, Mapping):
        return override
    if "kind" in override and "kind" in base and override["kind"] != base["kind"]:
        return override
    return {**base, **{key: _merged(base.get(key), value) for key, value in override.items()}}
