"""How evenly a model spreads tokens over its experts: the reference model on prompts of a user."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tiers.reference.errors import ServingError
from tiers.reference.load import load_model
from tiers.reference.model import MoeFfn, ReferenceModel
from tiers.reference.ops.moe import balance, route
from tiers.reference.text import listed_ids, load_tokenizer

# Of a file of prompts, and tokens of a prompt that are read; the reference takes its time.
_MAX_BYTES, MAX_TOKENS = 16 * 2**20, 4096


@dataclass(frozen=True)
class Balance:
    """A layer with experts.

    Attributes:
        layer: its number.
        tokens: how many were read.
        counts: tokens that each expert got; they sum to top_k times tokens.
        loss: E * sum_e f_e * P_e, see `tiers.reference.ops.moe.balance`; 1 is even, E the worst.
    """

    layer: int
    tokens: int
    counts: tuple[int, ...]
    loss: float


def read_prompts(path: Path, folder: Path, vocab_size: int) -> list[list[int]]:
    """Token ids of a file with a prompt in each line: text, for the tokenizer of the folder, or a JSON list of ids.

    Raises:
        ServingError: the file cannot be read, is empty, or names ids that the model does not have; text without a tokenizer.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ServingError(f"--stats: {path} has {path.stat().st_size} bytes; expected at most {_MAX_BYTES}")
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ServingError(
            f"--stats: {path} cannot be read ({error}); expected a text file, a prompt in each line"
        ) from None
    if not lines:
        raise ServingError(f"--stats: {path} has no prompt; expected one in each line")
    tokenizer, found = None, []
    for number, line in enumerate(lines, 1):
        ids = listed_ids(line)
        if ids is None:
            tokenizer = tokenizer or load_tokenizer(folder)
            ids = tokenizer.encode(line)
        if not ids or not all(0 <= i < vocab_size for i in ids):
            raise ServingError(
                f"--stats: {path}, prompt {number} is no tokens, or has ids beyond the model's; expected ids from 0 to "
                f"{vocab_size - 1}"
            )
        found.append(ids[:MAX_TOKENS])
    return found


@torch.inference_mode()
def load_balance(model: ReferenceModel, prompts: Sequence[Sequence[int]]) -> list[Balance]:
    """Run every prompt, and count what each layer with experts did with its tokens."""
    logits: dict[int, list[Tensor]] = {}
    ffns = {i: layer.ffn for i, layer in enumerate(model.layers) if isinstance(layer.ffn, MoeFfn)}
    handles = []
    for number, ffn in ffns.items():
        seen = logits.setdefault(number, [])
        handles.append(
            ffn.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(module.logits(args[0])))
        )
    try:
        for prompt in prompts:
            model(torch.tensor(prompt))
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for number, ffn in ffns.items():
        all_TE = torch.cat(logits[number])
        counts_E, loss = balance(all_TE, route(all_TE, ffn.correction(all_TE), ffn.config)[1])
        found.append(Balance(number, len(all_TE), tuple(counts_E.tolist()), loss.item()))
    return found


def folder_balance(folder: Path, prompts: Path, family: str | None = None) -> list[Balance]:
    """As `load_balance`, for a model folder and a file.

    Raises:
        ServingError: no layer has experts; see `read_prompts`.
        TiersError: the folder cannot be loaded.
    """
    model = load_model(folder, family=family)
    if not any(isinstance(layer.ffn, MoeFfn) for layer in model.layers):
        raise ServingError(f"--stats: no layer of {folder} has experts, so there is nothing to count")
    return load_balance(model, read_prompts(prompts, folder, model.config.vocab_size))
