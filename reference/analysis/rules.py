"""Which part of a tensor a rule gives to each parameter."""

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from tiers.reference.analysis.layers import ranges
from tiers.reference.checkpoint import TensorInfo
from tiers.reference.config import ModelConfig
from tiers.reference.weight_map import Entry
from tiers.reference.weight_rules import EXPERTS


def slices(entry: Entry, info: TensorInfo, config: ModelConfig) -> list[str]:
    """For each target of an entry, which part of the tensor it is: "whole", "rows 0-63 (qkv)", "columns ..., transposed".

    Raises:
        CheckpointError: the tensor cannot be divided as its rule says.
    """
    rule = entry.rule
    if rule is None or not entry.targets:
        return []
    if rule.layout == EXPERTS:
        blocks = len(rule.to)
        which = [f", block {i % blocks + 1} of {blocks}" if blocks > 1 else "" for i in range(len(entry.targets))]
        return [f"expert {i // blocks}{text} (experts)" for i, text in enumerate(which)]
    turned = bool(rule.transpose) and len(info.shape) == 2
    word, number = ("columns", info.shape[1]) if turned else ("rows", info.shape[0] if info.shape else 1)
    extra = [text for text, wanted in (("transposed", turned), (f"plus {rule.add:g}", rule.add)) if wanted]
    if rule.layout in (None, "copies"):
        texts = ["whole" if rule.layout is None else "whole (copies)"] * len(entry.targets)
    else:
        # Numbers of rows take the way of the rows themselves.
        numbers = torch.arange(number)
        numbers = numbers[None, :] if turned else numbers[:, None] if len(info.shape) == 2 else numbers
        plain = dataclasses.replace(rule, pairing=None, add=0.0)
        parts = plain.apply(entry.name, numbers, config)
        texts = [f"{word} {_runs(part.flatten().tolist())} ({rule.layout})" for part in parts]
    result = []
    for target, text in zip(entry.targets, texts, strict=True):
        paired = rule.pairing is not None and (".q_proj." in target or ".k_proj." in target)
        more = [*extra, f"channels re-paired from {rule.pairing}"] if paired else extra
        result.append(", ".join([text, *more]))
    return result


def _runs(numbers: Sequence[int]) -> str:
    """ "0-63", "0-63, 128-191, ... (8 blocks)" or "0, 2, 4, ..."."""
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    if len(steps) == 1 and steps != {1}:
        return ", ".join(map(str, numbers[:3])) + (", ..." if len(numbers) > 3 else "")
    runs = ranges(numbers).split(", ")
    return ", ".join(runs) if len(runs) < 4 else f"{runs[0]}, {runs[1]}, ... ({len(runs)} blocks)"
