"""`tiers map`: which parameter each tensor of a folder fills, and by which rule."""

import difflib
import sys
from pathlib import Path
from typing import Any

from tiers.reference.analysis.coverage import coverage
from tiers.reference.analysis.files import dtype_name
from tiers.reference.analysis.guesses import guess
from tiers.reference.analysis.parameters import STAND_IN
from tiers.reference.analysis.rules import slices
from tiers.reference.checkpoint import listed
from tiers.reference.errors import CheckpointError
from tiers.reference.weight_map import WeightMap
from tiers.vllm_model.inspect_folder import Opened, open_leniently
from tiers.vllm_model.inspect_result import NOT_SERVABLE, SERVABLE
from tiers.vllm_model.inspect_text import HOW, columns, printable

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
    print(f"{folder}: {len(opened.files.infos)} tensors, family {opened.family.name}, {HOW[opened.how]}")
    print(printable("\n".join(lines)))
    return NOT_SERVABLE if opened.weight_map.unmapped else SERVABLE


def _map_lines(opened: Opened, weight_map: WeightMap, key: str | None) -> list[str]:
    if key is None:
        found = coverage(opened.config, weight_map, opened.found, opened.files.infos)
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
    dtype, shape = dtype_name(info.dtype), str(list(info.shape))
    if entry.rule is None:
        return [(name, "no rule", "-", guess(name, info) or "-", shape, dtype)]
    rule = entry.rule.template
    if not entry.targets:
        return [(name, rule, "dropped", entry.rule.drop, shape, dtype)]
    if name in opened.found.failed:
        return [(name, rule, target, "cannot be divided", shape, dtype) for target in entry.targets]
    parts = slices(entry, info, opened.config or STAND_IN)
    shapes = [opened.found.parts[t].shape if t in opened.found.parts else info.shape for t in entry.targets]
    return [
        (name, rule, target, part, str(list(s)), dtype)
        for target, part, s in zip(entry.targets, parts, shapes, strict=True)
    ]


def _details(opened: Opened, weight_map: WeightMap, name: str) -> list[str]:
    entry, info = weight_map.entries[name], opened.files.infos[name]
    rows = [("file", info.file.name), ("shape", f"{list(info.shape)} {dtype_name(info.dtype)}")]
    if entry.name != name:
        rows.append(("read as", entry.name))
    rows.append(("rule", entry.rule.template if entry.rule else "none"))
    for _, _, target, part, shape, _ in _map_rows(opened, weight_map, name):
        rows.append(("dropped", part) if target == "dropped" else ("parameter", f"{target}: {part}, {shape}"))
    if name in opened.found.failed:
        rows.append(("fails", opened.found.failed[name]))
    return ["", name, *columns(rows)]
