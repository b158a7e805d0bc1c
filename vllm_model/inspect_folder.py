"""Open a folder for `tiers inspect` and `tiers map`: read what can be read, and turn every fault into a reason."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiers.reference.analysis.families import Share, named_by, named_in, shares
from tiers.reference.analysis.files import Files, survey
from tiers.reference.analysis.parameters import STAND_IN, Mapped, mapped
from tiers.reference.checkpoint import Checkpoint, open_checkpoint
from tiers.reference.config import ModelConfig, read_json
from tiers.reference.errors import TiersError
from tiers.reference.family import OURS, Family, find_family, own_families, shipped
from tiers.reference.load import Description, describe_config
from tiers.reference.weight_map import WeightMap
from tiers.vllm_model.inspect_result import Remark

# A family is taken from the names of tensors where its rules take at least this share of them.
LIKELY = 0.5


@dataclass
class Opened:
    """What can be known of a folder before anything is computed.

    Attributes:
        raw: the parsed config.json, or None.
        family: how the folder is read; None if nothing tells.
        how: as `tiers.reference.analysis.families.named_by`, or "guessed" from the names of tensors, or "unknown".
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
        return named_in(self.raw, "architectures")

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
        opened.files = survey(folder, opened.checkpoint)
    _find_family(opened)
    _describe(opened)
    if opened.family is not None and opened.files.infos:
        with opened.guard("coverage"):
            opened.weight_map = WeightMap(opened.family, opened.config or STAND_IN, opened.files.infos)
            opened.found = mapped(opened.weight_map, opened.files.infos)
    return opened


def _find_family(opened: Opened) -> None:
    families: tuple[Family, ...] = (OURS, *shipped())
    with opened.guard("family"):
        families = (*own_families(), *families)
    with opened.guard("family"):
        opened.shares = shares(families, opened.files.infos)
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
            opened.how = named_by(opened.raw, found, opened.asked)
    except TiersError as error:
        opened.refuse("family", f"{error}. {hint}" if hint else str(error))
    if found is not None and opened.how == "own format" and best and best.family != OURS.name:
        opened.refuse("family", f"config.json: neither architectures nor model_type names a model. {hint}")
        found = None
    if found is None and best is not None:
        found, opened.how = next(family for family in families if family.name == best.family), "guessed"
    if found is not None and found not in families:
        with opened.guard("family"):
            opened.shares = shares((*families, found), opened.files.infos)
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
