"""What an inspection ends with: an exit code, remarks, and the sections. docs/inspect.md describes the JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVABLE, NOT_SERVABLE, NO_CHECKPOINT = 0, 1, 2


@dataclass(frozen=True)
class Remark:
    """A sentence, and the section that it is about."""

    section: str
    text: str


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
