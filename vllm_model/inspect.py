"""`tiers inspect`: what a folder is and what would go wrong, from config.json and headers alone.

Everything that can be said is said, also of a folder that cannot be served: each section is made by itself, an error in
one becomes a reason against serving, and the others go on. docs/inspect.md describes the JSON.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tiers.reference.analysis.balance import folder_balance
from tiers.reference.load import open_described
from tiers.vllm_model.inspect_folder import Opened, open_leniently
from tiers.vllm_model.inspect_result import NO_CHECKPOINT, NOT_SERVABLE, SERVABLE, Inspection, Remark
from tiers.vllm_model.inspect_sections import SECTIONS
from tiers.vllm_model.inspect_text import balance_text, printable, text


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


def run(folder: Path, asked: str | None, as_json: bool, strict: bool, stats: Path | None = None) -> int:
    """`tiers inspect`; returns the exit code: 0 servable, 1 not servable, 2 not a checkpoint.

    Raises:
        TiersError: `stats` names prompts, and the model cannot be run on them.
    """
    found = inspect(folder, asked, strict)
    counted = None
    if stats is not None and found.code == SERVABLE:
        counted = [vars(layer) for layer in folder_balance(folder, stats, asked)]
    if as_json:
        print(replace(found, sections={**found.sections, "experts": counted}).json())
        return found.code
    print(printable(text(found)))
    if counted is not None:
        print(printable("\n".join(["", "Experts", *balance_text(counted)])))
    return found.code
