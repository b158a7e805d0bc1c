"""`tiers inspect` and `tiers map`: what a folder is and what would go wrong, from config.json and headers alone.

Everything that can be said is said, also of a folder that cannot be served: each section is made by itself, an error in
one becomes a reason against serving, and the others go on. docs/inspect.md describes the JSON.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiers.reference import analysis, fields
from tiers.reference.analysis import Coverage, Files, Mapped, Row, Share
from tiers.reference.checkpoint import Checkpoint, listed, open_checkpoint
from tiers.reference.config import ModelConfig, read_json
from tiers.reference.errors import CheckpointError, TiersError
from tiers.reference.family import OURS, Family, find_family, own_families, shipped
from tiers.reference.load import Description, describe_config, open_described
from tiers.reference.weight_map import WeightMap
from tiers.vllm_model.dispatch import Where, resolve, table
from tiers.vllm_model.plan import AUTO, TierPlan

# A family is taken from the names of tensors where its rules take at least this share of them.
LIKELY = 0.5

# Numbers of ranks whose cuts are shown.
SHOWN_SIZES = (1, 2, 4, 8)

SERVABLE, NOT_SERVABLE, NO_CHECKPOINT = 0, 1, 2


@dataclass(frozen=True)
class Remark:
    """A sentence, and the section that it is about."""

    section: str
    text: str


@dataclass
class Opened:
    """What can be known of a folder before anything is computed.

    Attributes:
        raw: the parsed config.json, or None.
        family: how the folder is read; None if nothing tells.
        how: as `analysis.named_by`, or "guessed" from the names of tensors, or "unknown".
        description: None if config.json does not describe a model.
        checkpoint: None if the folder cannot be opened as a whole; `files` then has what can be read of it.
        weight_map, found: None without a family or without tensors.
        reasons: what keeps the folder from being served.
        notes: what is odd but harmless.
    """

    folder: Path
    asked: str | None
    raw: Any = None
    family: Family | None = None
    how: str = "unknown"
    description: Description | None = None
    checkpoint: Checkpoint | None = None
    files: Files = field(default_factory=lambda: Files({}, (), None, (), ()))
    shares: list[Share] = field(default_factory=list)
    weight_map: WeightMap | None = None
    found: Mapped = field(default_factory=lambda: Mapped({}, {}, {}))
    reasons: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)

    @property
    def config(self) -> ModelConfig | None:
        """The model, if config.json describes one."""
        return self.description.config if self.description else None

    @property
    def architectures(self) -> list[str]:
        """As config.json names them."""
        return analysis.named_in(self.raw, "architectures")

    @contextlib.contextmanager
    def guard(self, section: str) -> Iterator[None]:
        """Turn an error into a reason, and go on."""
        try:
            yield
        except TiersError as error:
            self.refuse(section, str(error))
        except OSError as error:
            self.refuse(section, f"{error.filename or self.folder}: cannot be read ({error.strerror or error})")

    def refuse(self, section: str, text: str) -> None:
        """Add a reason, once."""
        remark = Remark(section, " ".join(text.split()))
        if remark.text not in {other.text for other in self.reasons}:
            self.reasons.append(remark)

    def note(self, section: str, text: str) -> None:
        """Add a note, once."""
        remark = Remark(section, " ".join(text.split()))
        if remark.text not in {other.text for other in self.notes}:
            self.notes.append(remark)


def open_leniently(folder: Path, asked: str | None) -> Opened:
    """Read what can be read of a folder; every fault becomes a reason.

    Args:
        folder: config.json and weights, or what is there of them.
        asked: as --family.
    """
    opened = Opened(folder, asked)
    with opened.guard("config"):
        opened.raw = read_json(folder / "config.json")
    with opened.guard("files"):
        opened.checkpoint = open_checkpoint(folder)
    with opened.guard("files"):
        opened.files = analysis.survey(folder, opened.checkpoint)
    _find_family(opened)
    _describe(opened)
    if opened.family is not None and opened.files.infos:
        with opened.guard("coverage"):
            opened.weight_map = WeightMap(opened.family, opened.config or analysis.STAND_IN, opened.files.infos)
            opened.found = analysis.mapped(opened.weight_map, opened.files.infos)
    return opened


def _find_family(opened: Opened) -> None:
    families: tuple[Family, ...] = (OURS, *shipped())
    with opened.guard("family"):
        families = (*own_families(), *families)
    with opened.guard("family"):
        opened.shares = analysis.shares(families, opened.files.infos)
    best = opened.shares[0] if opened.shares and opened.shares[0].share >= LIKELY else None
    hint = (
        f"By their names, {best.taken} of {best.total} tensors fit family {best.family}: try --family {best.family}"
        if best
        else ""
    )
    found: Family | None = None
    try:
        if opened.raw is not None or opened.asked is not None:
            found = find_family({} if opened.raw is None else opened.raw, opened.asked)
            opened.how = analysis.named_by(opened.raw, found, opened.asked)
    except TiersError as error:
        opened.refuse("family", f"{error}. {hint}" if hint else str(error))
    if found is not None and opened.how == "own format" and best and best.family != OURS.name:
        opened.refuse("family", f"config.json: neither architectures nor model_type names a model. {hint}")
        found = None
    if found is None and best is not None:
        found, opened.how = next(family for family in families if family.name == best.family), "guessed"
    if found is not None and found not in families:
        with opened.guard("family"):
            opened.shares = analysis.shares((*families, found), opened.files.infos)
    opened.family = found


def _describe(opened: Opened) -> None:
    if opened.family is None or opened.raw is None:
        return
    asked = opened.family.name if opened.how == "guessed" else opened.asked
    with opened.guard("config"):
        opened.description = describe_config(opened.raw, asked)
    if opened.description is None and _without_quantization(opened.raw) != opened.raw:
        with opened.guard("config"):
            opened.description = describe_config(_without_quantization(opened.raw), asked)


def _without_quantization(raw: Any) -> Any:
    if not isinstance(raw, Mapping):
        return raw
    return {key: _without_quantization(value) for key, value in raw.items() if key != "quantization_config"}


@dataclass(frozen=True)
class Inspection:
    """The result: an exit code, reasons against serving, notes, and the sections by name (None where one is unknown)."""

    folder: Path
    code: int
    reasons: tuple[Remark, ...]
    notes: tuple[Remark, ...]
    sections: Mapping[str, Any]

    def json(self) -> str:
        """One object; docs/inspect.md describes it."""
        found = {
            "format": 1,
            "folder": str(self.folder),
            "exit_code": self.code,
            "servable": self.code == SERVABLE,
            "reasons": [vars(remark) for remark in self.reasons],
            "notes": [vars(remark) for remark in self.notes],
            **self.sections,
        }
        return json.dumps(found, indent=2, default=str)


def inspect(folder: Path, asked: str | None = None, strict: bool = False) -> Inspection:
    """Say what a folder is and what would go wrong; reads headers, no weights.

    Args:
        folder: the model folder.
        asked: name of a family or path of its file; None goes by config.json.
        strict: a value of config.json that nothing reads is a reason against serving.
    """
    if not folder.is_dir():
        return _nothing(folder, f"{folder}: no such folder; expected a model folder with config.json and weights")
    opened = open_leniently(folder, asked)
    if opened.checkpoint is None and not opened.files.files and not (folder / "config.json").exists():
        return _nothing(folder, f"{folder}: neither config.json nor weights; expected a model folder with both")
    sections: dict[str, Any] = {}
    for name, make in SECTIONS.items():
        sections[name] = None
        with opened.guard(name):
            sections[name] = make(opened, strict)
    _as_served(opened)
    order = list(SECTIONS)
    first = ["config", "family", "files"]
    reasons = sorted(
        opened.reasons, key=lambda r: first.index(r.section) if r.section in first else 9 + order.index(r.section)
    )
    return Inspection(folder, NOT_SERVABLE if reasons else SERVABLE, tuple(reasons), tuple(opened.notes), sections)


def _nothing(folder: Path, text: str) -> Inspection:
    return Inspection(folder, NO_CHECKPOINT, (Remark("files", text),), (), dict.fromkeys(SECTIONS))


def _as_served(opened: Opened) -> None:
    """What `tiers serve` asks of a folder, so that both say the same; only where nothing was found so far."""
    if opened.reasons or opened.description is None:
        return
    with opened.guard("files"):
        for note in open_described(opened.folder, opened.description).notes:
            # Unread values and rows beyond the vocabulary are in sections of their own.
            if not note.startswith("config.json: nothing reads") and "rows are not used" not in note:
                opened.note("files", note)


# ---- sections -------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Dataclasses as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _family(opened: Opened, strict: bool) -> Any:
    families = (*shipped(), *((opened.family,) if opened.family else ()))
    known = {architecture for family in families for architecture in family.architectures}
    unknown = [architecture for architecture in opened.architectures if architecture not in known]
    headless = analysis.headless(unknown, known | vllm_architectures(), opened.files.infos)
    if headless is not None and headless.nearest is None and opened.how == "guessed" and opened.family:
        headless = dataclasses.replace(headless, nearest=next(iter(opened.family.architectures), None))
    if headless is not None:
        there = f"{listed(list(headless.heads))} is there" if headless.heads else "no tensor of a head is there"
        what = (
            "so it is a whole language model"
            if headless.heads
            else "so its head has to be its embedding, if it has one"
        )
        near = f"; the nearest known one with a head is {headless.nearest}" if headless.nearest else ""
        opened.note(
            "family", f"architectures names {headless.architecture}, a class without a head{near}. {there}, {what}"
        )
    types = analysis.named_in(opened.raw, "model_type")
    return {
        "name": opened.family.name if opened.family else None,
        "how": opened.how,
        "architectures": opened.architectures,
        "model_type": types[0] if types else None,
        "shares": [{**_plain(share), "share": round(share.share, 4)} for share in opened.shares],
        "headless": _plain(headless),
    }


def _files(opened: Opened, strict: bool) -> Any:
    found = opened.files
    for file in found.files:
        if file.error is not None and not any(file.error == reason.text for reason in opened.reasons):
            opened.refuse("files", file.error)
    if len(found.missing) > 1:
        opened.refuse(
            "files",
            f"{opened.folder}: {len(found.missing)} files that the index names are not there: {listed(list(found.missing))}; "
            f"{len(found.lost)} of {found.indexed} tensors are in no file. Copy them, or write the index anew",
        )
    if found.empty:
        opened.refuse(
            "files",
            f"{opened.folder}: {len(found.empty)} of {len(found.infos)} tensors have no elements: {listed(found.empty)}; expected "
            "whole weights. ZeRO-3 saves such tensors when its shards are not gathered: consolidate the checkpoint first "
            "(zero_to_fp32.py beside it, or stage3_gather_16bit_weights_on_model_save)",
        )
    for note in opened.checkpoint.notes if opened.checkpoint else ():
        opened.note("files", note)
    return {
        "files": [_plain(file) for file in found.files], "tensors": len(found.infos), "indexed": found.indexed,
        "missing": list(found.missing), "lost": list(found.lost), "empty": found.empty,
    }  # fmt: skip


def _geometry(opened: Opened, strict: bool) -> Any:
    if opened.weight_map is None:
        return None
    rows = analysis.geometry(opened.config, opened.weight_map, opened.found, opened.files.infos)
    for sentence in analysis.contradictions(rows):
        # Layers in files that cannot be read are not missing in the config.
        if not (opened.files.damaged and sentence.startswith("num_hidden_layers")):
            opened.refuse("geometry", sentence)
    return [_plain(row) for row in rows]


def _coverage(opened: Opened, strict: bool) -> Any:
    if opened.weight_map is None:
        return None
    found = analysis.coverage(opened.config, opened.weight_map, opened.found, opened.files.infos)
    for note in opened.weight_map.notes:
        opened.note("coverage", note)
    for sentence in _coverage_reasons(opened, found):
        opened.refuse("coverage", sentence)
    return _plain(found)


def _coverage_reasons(opened: Opened, found: Coverage) -> Iterator[str]:
    assert opened.family is not None
    family, folder = opened.family.name, opened.folder
    if found.missing and not opened.files.damaged:
        names = [f"{name} ({near} has its shape)" if near else name for name, near in found.missing.items()]
        head = (
            " tie_word_embeddings is false in config.json: set it to true if the head is the embedding."
            if "lm_head.weight" in found.missing
            else ""
        )
        yield (
            f"{folder}: {len(found.missing)} of {found.parameters} parameters get no tensor: {listed(names)}; expected each to be "
            f"filled once.{head} Export the missing weights, or add a rule to a family file if they have another name"
        )
    for groups, why in (
        (found.unmapped, f"no rule of family {family} is about"),
        (found.surplus, "config.json describes a model that has no place for"),
    ):
        if groups:
            shown = listed([f"{g.count} of {g.module}{f' ({g.guess})' if g.guess else ''}" for g in groups])
            yield (
                f"{folder}: {why} {sum(group.count for group in groups)} of {found.tensors} tensors: {shown}; expected every "
                "tensor to be used. Remove them from the files, describe them in the config, or add a rule to a family "
                "file, with drop and a reason if they are not needed"
            )
    for name, sources in opened.found.twice.items():
        yield f"{' and '.join(sources)} both are {name}; expected it once. Remove one of them"
    # Where sizes of the config are wrong already, shapes say the same again.
    if any(reason.section == "geometry" for reason in opened.reasons):
        return
    for source, message in list(opened.found.failed.items())[:1] if opened.config else ():
        more = len(opened.found.failed) - 1
        yield message if source in message else f"{source}: {message}" + (f" (and {more} more tensors)" if more else "")
    if found.misfits:
        first = found.misfits[0]
        yield (
            f"{folder}: {len(found.misfits)} parameters have another shape than config.json calls for; the first is {first.name}, "
            f"from {first.source}: found {list(first.found)}, expected {list(first.expected)}"
        )


def _unused(opened: Opened, strict: bool) -> Any:
    if opened.description is None:
        return None
    unused = dict(opened.description.unused)
    if unused:
        shown = listed([f"{path} = {fields.shown(value)}" for path, value in unused.items()], 8)
        if strict:
            opened.refuse(
                "unused",
                f"config.json: nothing reads {shown}; does the model compute something by it? Describe it in a family file, or "
                "list it there under ignored",
            )
    for note in opened.description.notes:
        opened.note("config", note)
    return _plain(unused)


def _unusual(opened: Opened, strict: bool) -> Any:
    return analysis.unusual(opened.config) if opened.config else None


def _sizes(opened: Opened, strict: bool) -> Any:
    stored = sum(analysis.bytes_of(info) for info in opened.files.infos.values())
    if opened.config is None:
        return None
    found, dtypes = analysis.sizes(opened.config), analysis.dtypes(opened.files.infos)
    own = dtypes[0] if dtypes else None
    width = own.width if own else 2
    return {
        **_plain(found),
        "weight_bytes": stored,
        "weight_bytes_bf16": 2 * found.parameters,
        "cache": {
            "dtype": own.dtype if own else None,
            "bytes_per_token": width * found.cache_elements,
            "bytes_per_token_bf16": 2 * found.cache_elements,
            "layers": [
                {
                    "layers": layer.layers,
                    "bytes_per_token": width * layer.cache_elements,
                    "bytes_per_token_bf16": 2 * layer.cache_elements,
                }
                for layer in found.layers
            ],
        },
    }


def _dtypes(opened: Opened, strict: bool) -> Any:
    found = analysis.dtypes(opened.files.infos)
    said = [
        str(v).removeprefix("torch.") for key in ("dtype", "torch_dtype") for v in analysis.named_in(opened.raw, key)
    ]
    names = {row.dtype for row in found}
    if "float32" in names and (not said or said[0] in ("float32", "float")):
        opened.note(
            "dtypes",
            "the weights are float32: with --dtype auto vLLM serves them in bfloat16 (in float16 where the device lacks it); "
            "--dtype float32 keeps them as they are",
        )
    elif said and found and said[0] not in names:
        opened.note(
            "dtypes",
            f"dtype is {said[0]} in config.json, the tensors are {', '.join(sorted(names))}; with --dtype auto vLLM serves "
            f"{said[0]}, --dtype {found[0].dtype} keeps the weights as they are",
        )
    odd = [n for n, part in opened.found.parts.items() if not part.dtype.is_floating_point or part.dtype.itemsize < 2]
    if odd:
        first = analysis.dtype_name(opened.found.parts[odd[0]].dtype)
        opened.refuse(
            "dtypes",
            f"{opened.folder}: {len(odd)} parameters are of another kind of number: {listed(odd)}, the first {first}; expected a "
            "floating-point type of 16 bits or more. Quantised checkpoints are not supported yet: export the weights",
        )
    return {"config": said[0] if said else None, "tensors": [_plain(row) for row in found]}


def _vocabulary(opened: Opened, strict: bool) -> Any:
    ids = None
    with opened.guard("vocabulary"):
        ids = analysis.token_ids(opened.folder)
    if ids is None and not (opened.folder / "tokenizer.json").exists():
        others = [n for n in ("tokenizer.model", "vocab.json", "vocab.txt") if (opened.folder / n).exists()]
        found = (
            f"{', '.join(others)} is there and was not read"
            if others
            else "without a tokenizer only token ids can be served"
        )
        opened.note("vocabulary", f"no tokenizer.json; {found}")
    numbers = analysis.vocabulary(opened.config, opened.found, ids)
    problems, notes = analysis.vocabulary_problems(numbers)
    for text in problems:
        opened.refuse("vocabulary", text)
    for text in notes:
        opened.note("vocabulary", text)
    return _plain(numbers)


def _parallel(opened: Opened, strict: bool) -> Any:
    config = opened.config
    if config is None:
        return None
    reasons = {n: analysis.tensor_parallel_misfit(config, n) for n in analysis.RANKS}
    return {
        "tensor_parallel": {
            "works": [n for n, reason in reasons.items() if reason is None],
            "refused": {str(n): reasons[n] for n in SHOWN_SIZES if reasons[n] is not None},
            "cuts": [_plain(cut) for cut in analysis.cuts(config, SHOWN_SIZES)],
        },
        "pipeline_parallel": {
            "most": config.num_hidden_layers,
            "even": [n for n in analysis.RANKS if config.num_hidden_layers % n == 0],
        },
    }


@functools.cache
def vllm_architectures() -> frozenset[str]:
    """Architectures of vLLM's own classes; none without vLLM.

    Read out of the source of its registry: importing that takes longer than all the rest of an inspection.
    """
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # blocked, as tests do
        spec = None
    if spec is None or spec.origin is None:
        return frozenset()
    path = Path(spec.origin).parent / "model_executor" / "models" / "registry.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    tables = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        # "_TEXT_GENERATION_MODELS" and its like: architecture to (module, class).
        if isinstance(target, ast.Name) and target.id.endswith("_MODELS") and "PREVIOUSLY" not in target.id
    ]
    return frozenset(
        key.value
        for table in tables
        for key, value in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and isinstance(value, ast.Tuple)
    )


def _stock(opened: Opened, strict: bool) -> Any:
    """Whether vLLM would take the folder without this plugin."""
    from tiers.vllm_model.compat import vllm_version

    known = vllm_architectures()
    found: dict[str, Any] = {
        "vllm": vllm_version(),
        "architecture": None,
        "native": None,
        "transformers": None,
        "why": [],
    }
    if not known:
        opened.note("stock", "vLLM is not installed here, so it is not known which architectures it has")
    if not opened.architectures:
        found["why"].append("config.json names no architecture")
        return found
    name = found["architecture"] = opened.architectures[0]
    if known:
        found["native"] = name in known
    if found["native"]:
        found["why"].append(
            "vLLM has a class by this name, which makes embeddings, not text"
            if name.endswith("Model") and not name.endswith("LMHeadModel")
            else "vLLM has a class by this name; whether it computes what this config says is not known here"
        )
        return found
    if known:
        found["why"].append(f"vLLM has no class {name}{_near(name, known)}")
    failures = _transformers_failures(name, opened.raw)
    if failures is None:
        return found
    found["transformers"] = not failures
    found["why"] += failures or [f"transformers has {name}, which vLLM's Transformers backend can run"]
    return found


def _near(name: str, known: frozenset[str]) -> str:
    # What names have in common at their end says nothing.
    stems = {other.removesuffix("ForCausalLM"): other for other in sorted(known)}
    close = difflib.get_close_matches(name.removesuffix("ForCausalLM"), stems, n=1, cutoff=0.75)
    return f"; the nearest is {stems[close[0]]}" if close else ""


def _transformers_failures(name: str, raw: Any) -> list[str] | None:
    """Why vLLM's Transformers backend cannot run an architecture; None if transformers is not installed."""
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    except ImportError:
        return None
    failures = []
    auto_map = raw.get("auto_map") if isinstance(raw, Mapping) else None
    if name in dir(transformers):
        # What vLLM's registry asks of the class.
        asked = ("is_backend_compatible", "_can_set_attn_implementation")
        if not any(getattr(getattr(transformers, name), method, bool)() for method in asked):
            failures.append(f"the class {name} of transformers cannot take vLLM's attention")
    else:
        failures.append(f"transformers has no class {name}")
    types = analysis.named_in(raw, "model_type")[:1]
    if types and types[0] not in CONFIG_MAPPING_NAMES:
        failures.append(f"transformers has no config class for model_type {types[0]}")
    if auto_map and failures:
        failures.append(
            "auto_map names Python code in the folder, which needs --trust-remote-code; tiers never passes it"
        )
        if isinstance(auto_map, Mapping) and "AutoModel" not in auto_map:
            failures.append("auto_map has no AutoModel, the class without a head that the Transformers backend builds")
    return failures


def _tiers(opened: Opened, strict: bool) -> Any:
    config = opened.config
    if config is None:
        return None
    found = {}
    for where in WHERES:
        choices = resolve(config, TierPlan.parse(AUTO, config), where)
        found[where.device] = {
            "dtype": where.dtype,
            "table": table(choices, config).splitlines(),
            "choices": [
                {
                    "layer": choice.layer, "operator": choice.operator, "tier": choice.tier.value, "native": choice.native,
                    "passed_over": list(choice.passed_over),
                }
                for choice in choices
            ],
        }  # fmt: skip
    return found


WHERES = (Where("cpu"), Where("cuda", dtype="bfloat16"))

# In the order of the text.
SECTIONS: Mapping[str, Callable[[Opened, bool], Any]] = {
    "family": _family, "files": _files, "geometry": _geometry, "coverage": _coverage, "unused": _unused, "unusual": _unusual,
    "sizes": _sizes, "dtypes": _dtypes, "vocabulary": _vocabulary, "parallel": _parallel, "tiers": _tiers, "stock": _stock,
}  # fmt: skip


# ---- text -----------------------------------------------------------------------------------------------------------


def columns(rows: Sequence[Sequence[Any]], indent: int = 2) -> list[str]:
    """Lines with aligned columns."""
    text = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)] if text else []
    return [
        (" " * indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in text
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _size(number: int) -> str:
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number >= 2**power:
            return f"{number / 2**power:.4g} {unit}"
    return f"{number} B"


def text(found: Inspection) -> str:
    """The inspection for people: the verdict and its reasons, then a section for each thing."""
    verdict = {SERVABLE: "servable", NOT_SERVABLE: "not servable", NO_CHECKPOINT: "not a checkpoint"}[found.code]
    lines = [f"{found.folder}: {verdict}"]
    lines += [f"  {number}. {reason.text}" for number, reason in enumerate(found.reasons, 1)]
    if found.code == NO_CHECKPOINT:
        return "\n".join(lines)
    for name, (heading, render) in _TEXTS.items():
        section = found.sections[name]
        about = [remark.text for remark in found.notes if remark.section in (name, *_SHOWN_WITH.get(name, ()))]
        body = ["  not known: see the reasons above"] if section is None and not about else []
        body += render(section) if section is not None else []
        body += [f"  note: {note}" for note in about]
        if body:
            lines += ["", heading, *body]
    return "\n".join(lines)


# Remarks about what has no section of its own.
_SHOWN_WITH = {"unused": ("config",)}

_HOW = {
    "asked": "asked for by --family", "architectures": "named by architectures", "model_type": "named by model_type",
    "own format": "this project's own format", "guessed": "guessed from the names of tensors", "unknown": "not known",
}  # fmt: skip


def _family_text(found: Any) -> list[str]:
    rows = [
        ("family", f"{found['name'] or 'unknown'}, {_HOW[found['how']]}"),
        ("architectures", ", ".join(found["architectures"]) or "-"),
        ("model_type", found["model_type"]),
    ]
    shares = [share for share in found["shares"] if share["taken"]]
    own = [share for share in shares if share["family"] == found["name"]]
    near = [share for share in shares if share not in own][: 5 - len(own)]
    sure = own and own[0]["taken"] == own[0]["total"] and found["how"] != "guessed"
    for name, some in (("its rules take", own), ("nearest", [] if sure else near)):
        if some:
            rows.append((name, ", ".join(f"{s['family']} {s['taken']} of {s['total']} tensors" for s in some)))
    return columns(rows)


def _geometry_text(found: Any) -> list[str]:
    rows = [("field", "layers", "config", "tensors", "")]
    for row in (Row(**row) for row in found):
        mark = {True: "", False: "<- differs", None: ""}[row.agrees]
        if row.agrees and row.config != row.tensors:
            mark = "more rows than used"
        rows.append((row.field, row.layers, _cell(row.config), _cell(row.tensors), mark))
    return columns(rows)


def _coverage_text(found: Any) -> list[str]:
    lines = [
        f"  {found['tensors']} tensors, {found['dropped']} of them dropped on purpose; {found['parameters']} parameters, "
        f"{len(found['missing'])} of them not filled"
    ]
    lines += columns(
        [("rule", "tensors", "state"), *((rule["template"], rule["hits"], rule["state"]) for rule in found["rules"])]
    )
    for key, heading in (("unmapped", "no rule"), ("surplus", "no place")):
        if found[key]:
            rows = [
                (g["module"], g["count"], _size(g["bytes"]), g["guess"] or f"e.g. {g['example']}") for g in found[key]
            ]
            lines += columns([(heading, "tensors", "bytes", "looks like"), *rows])
    missing = list(found["missing"].items())
    lines += [f"  not filled: {name}{f' ({near} has its shape)' if near else ''}" for name, near in missing[:10]]
    lines += [f"  not filled: {len(missing) - 10} more"] if len(missing) > 10 else []
    shown = [f"{m['name']}: found {m['found']}, expected {m['expected']}" for m in found["misfits"]]
    lines += [f"  other shape: {line}" for line in shown[:10]]
    return lines + ([f"  other shape: {len(shown) - 10} more"] if len(shown) > 10 else [])


def _files_text(found: Any) -> list[str]:
    files = found["files"]
    total = sum(file["bytes"] for file in files)
    indexed = "no index" if found["indexed"] is None else f"an index of {found['indexed']} tensors"
    lines = [f"  {len(files)} file{'s' * (len(files) != 1)}, {_size(total)}, {found['tensors']} tensors; {indexed}"]
    bad = [file for file in files if file["error"] is not None]
    lines += [f"  cannot be read: {file['name']}" for file in bad]
    lines += [f"  not there: {name}" for name in found["missing"]]
    if found["lost"]:
        lines.append(f"  in no file: {listed(found['lost'])}")
    if found["empty"]:
        lines.append(f"  without elements: {listed(found['empty'])}")
    return lines


def _unused_text(found: Any) -> list[str]:
    if not found:
        return ["  everything in config.json is read, or known to be without effect"]
    rows = [(path, "=", fields.shown(value)) for path, value in found.items()]
    return [*columns(rows), "  does the model compute something by them?"]


def _unusual_text(found: Any) -> list[str]:
    return [f"  {line}" for line in found] or ["  nothing"]


def _sizes_text(found: Any) -> list[str]:
    cache = found["cache"]
    rows = [
        ("parameters", f"{found['parameters']:,}"),
        ("embedding, head", f"{found['embedding']:,}, {found['head']:,}"),
        ("weights", f"{_size(found['weight_bytes'])} as stored, {_size(found['weight_bytes_bf16'])} in bfloat16"),
        (
            "cache per token",
            f"{cache['bytes_per_token']:,} B in {cache['dtype'] or 'bfloat16'}, {cache['bytes_per_token_bf16']:,} B in bfloat16",
        ),
    ]
    names = ("layers", "parameters", "mixer", "ffn", "gate", "norms")
    layers = [
        (*(layer[name] for name in names), own["bytes_per_token"], own["bytes_per_token_bf16"])
        for layer, own in zip(found["layers"], cache["layers"], strict=True)
    ]
    stored = cache["dtype"] or "bfloat16"
    heading = ("layers", "parameters", "attention", "ffn", "gate", "norms", f"cache B/token {stored}", "bfloat16")
    return [*columns(rows), "  each layer of:", *columns([heading, *layers])]


def _dtypes_text(found: Any) -> list[str]:
    rows = [(row["dtype"], row["tensors"], _size(row["bytes"])) for row in found["tensors"]]
    return columns([("dtype", "tensors", "bytes"), *rows]) + columns([("config.json says", found["config"])])


def _vocabulary_text(found: Any) -> list[str]:
    names = {
        "embedding_rows": "rows of the embedding", "head_rows": "rows of the head", "vocab_size": "vocab_size",
        "tokenizer": "tokenizer: largest id + 1", "tokens": "tokenizer: tokens",
    }  # fmt: skip
    return columns([(text, found[name]) for name, text in names.items()])


def _parallel_text(found: Any) -> list[str]:
    tensor, pipeline = found["tensor_parallel"], found["pipeline_parallel"]
    lines = [f"  tensor-parallel sizes that work: {', '.join(map(str, tensor['works']))}"]
    lines += [f"  refused at {size}: {reason}" for size, reason in tensor["refused"].items()]
    rows = [("tensors", "layers", *(f"TP {size}" for size in SHOWN_SIZES))]
    rows += [(cut["tensors"], cut["layers"], *cut["by_size"].values()) for cut in tensor["cuts"]]
    lines += columns(rows)
    even = ", ".join(map(str, pipeline["even"]))
    return [*lines, f"  pipeline-parallel sizes that work: 1 to {pipeline['most']}; stages of equal length: {even}"]


def _tiers_text(found: Any) -> list[str]:
    lines = []
    for device, part in found.items():
        lines.append(f"  {device}" + (f", {part['dtype']}" if part["dtype"] else ""))
        lines += [f"    {line}" for line in part["table"]]
    return lines


def _stock_text(found: Any) -> list[str]:
    rows = [
        ("vLLM", found["vllm"] or "not installed"),
        ("architecture", found["architecture"]),
        ("a class of vLLM's own", found["native"]),
        ("its Transformers backend", found["transformers"]),
    ]
    return columns(rows) + [f"  {why}" for why in found["why"]]


_TEXTS: Mapping[str, tuple[str, Callable[[Any], list[str]]]] = {
    "family": ("Family", _family_text),
    "geometry": ("Config against tensors", _geometry_text),
    "unused": ("Values of config.json that nothing reads", _unused_text),
    "unusual": ("Unusual", _unusual_text),
    "sizes": ("Sizes", _sizes_text),
    "stock": ("Without this plugin", _stock_text),
    "coverage": ("Tensors and parameters", _coverage_text),
    "files": ("Files", _files_text),
    "dtypes": ("Dtypes", _dtypes_text),
    "vocabulary": ("Vocabulary", _vocabulary_text),
    "parallel": ("Several GPUs", _parallel_text),
    "tiers": ("Tiers under plan auto", _tiers_text),
}


def run(folder: Path, asked: str | None, as_json: bool, strict: bool) -> int:
    """`tiers inspect`; returns the exit code: 0 servable, 1 not servable, 2 not a checkpoint."""
    found = inspect(folder, asked, strict)
    print(found.json() if as_json else _printable(text(found)))
    return found.code


def _printable(text: str) -> str:
    """Names in a folder are anybody's: what would move the cursor, or has no encoding, is shown as a question mark."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


# ---- tiers map ------------------------------------------------------------------------------------------------------

# Up to this many tensors are described one by one.
DETAILED = 20


def run_map(folder: Path, asked: str | None, key: str | None) -> int:
    """`tiers map`; returns the exit code: 0 if every tensor has a rule, 1 if not.

    Args:
        folder: the model folder.
        asked: as --family.
        key: None for a line per rule, "" for a line per tensor, or the name of a tensor or parameter, or a part of it.

    Raises:
        TiersError: there is nothing to map, or nothing has that name.
    """
    opened = open_leniently(folder, asked)
    for reason in opened.reasons:
        print(f"tiers: {reason.text}", file=sys.stderr)
    if opened.weight_map is None or opened.family is None:
        raise CheckpointError(f"{folder}: nothing to map: no tensor could be read, or no family is about them")
    for note in opened.weight_map.notes:
        print(f"tiers: {note}", file=sys.stderr)
    if unmapped := opened.weight_map.unmapped:
        print(f"tiers: no rule is about {len(unmapped)} tensors: {listed(unmapped)}", file=sys.stderr)
    lines = _map_lines(opened, opened.weight_map, key)
    print(f"{folder}: {len(opened.files.infos)} tensors, family {opened.family.name}, {_HOW[opened.how]}")
    print(_printable("\n".join(lines)))
    return NOT_SERVABLE if opened.weight_map.unmapped else SERVABLE


def _map_lines(opened: Opened, weight_map: WeightMap, key: str | None) -> list[str]:
    if key is None:
        found = analysis.coverage(opened.config, weight_map, opened.found, opened.files.infos)
        rows: list[tuple[Any, ...]] = [(r.template, ", ".join(r.to) or "-", r.hits, r.state) for r in found.rules]
        rows += [
            (group.module, "-", group.count, f"no rule: {group.guess or group.example}") for group in found.unmapped
        ]
        return columns([("rule", "parameters", "tensors", "state"), *rows])
    names = list(weight_map.entries)
    if key:
        names = _matching(weight_map, key)
        if len(names) <= DETAILED:
            return [line for name in names for line in _details(opened, weight_map, name)]
    lines = [row for name in names for row in _map_rows(opened, weight_map, name)]
    return columns([("tensor", "rule", "parameter", "which part", "shape", "dtype"), *lines])


def _matching(weight_map: WeightMap, key: str) -> list[str]:
    entries = weight_map.entries.values()
    exact = [e.source for e in entries if key in (e.source, e.name, *e.targets)]
    found = exact or [e.source for e in entries if any(key in name for name in (e.source, e.name, *e.targets))]
    if not found:
        known = [name for entry in entries for name in (entry.source, *entry.targets)]
        close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
        near = f"; near to it: {', '.join(close)}" if close else ""
        raise CheckpointError(f"no tensor and no parameter has {key!r} in its name{near}")
    return found


def _map_rows(opened: Opened, weight_map: WeightMap, name: str) -> list[tuple[str, ...]]:
    """Tensor, rule, parameter, which part of the tensor, shape of the parameter, dtype; one for each parameter."""
    entry, info = weight_map.entries[name], opened.files.infos[name]
    dtype, shape = analysis.dtype_name(info.dtype), str(list(info.shape))
    if entry.rule is None:
        return [(name, "no rule", "-", analysis.guess(name, info) or "-", shape, dtype)]
    rule = entry.rule.template
    if not entry.targets:
        return [(name, rule, "dropped", entry.rule.drop, shape, dtype)]
    if name in opened.found.failed:
        return [(name, rule, target, "cannot be divided", shape, dtype) for target in entry.targets]
    parts = analysis.slices(entry, info, opened.config or analysis.STAND_IN)
    shapes = [opened.found.parts[t].shape if t in opened.found.parts else info.shape for t in entry.targets]
    return [
        (name, rule, target, part, str(list(s)), dtype)
        for target, part, s in zip(entry.targets, parts, shapes, strict=True)
    ]


def _details(opened: Opened, weight_map: WeightMap, name: str) -> list[str]:
    entry, info = weight_map.entries[name], opened.files.infos[name]
    rows = [("file", info.file.name), ("shape", f"{list(info.shape)} {analysis.dtype_name(info.dtype)}")]
    if entry.name != name:
        rows.append(("read as", entry.name))
    rows.append(("rule", entry.rule.template if entry.rule else "none"))
    for _, _, target, part, shape, _ in _map_rows(opened, weight_map, name):
        rows.append(("dropped", part) if target == "dropped" else ("parameter", f"{target}: {part}, {shape}"))
    if name in opened.found.failed:
        rows.append(("fails", opened.found.failed[name]))
    return ["", name, *columns(rows)]
