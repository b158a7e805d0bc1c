"""Rows of the embedding and of the head, vocab_size, and ids of the tokenizer, side by side."""

import json
from dataclasses import dataclass
from pathlib import Path

from tiers.reference import checkpoint
from tiers.reference.analysis.parameters import Mapped
from tiers.reference.config import ModelConfig
from tiers.reference.errors import CheckpointError

# Larger tokenizers are not read; the largest in use have some 40 MB.
MAX_TOKENIZER_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Vocabulary:
    """The three numbers, and the embedding's.

    Attributes:
        embedding_rows: None if there is none among the tensors.
        head_rows: those of a head of its own; None without one.
        vocab_size: of the config.
        tokenizer: largest token id plus one; None without a tokenizer.json.
        tokens: how many ids have a token.
    """

    embedding_rows: int | None
    head_rows: int | None
    vocab_size: int | None
    tokenizer: int | None
    tokens: int | None


def token_ids(folder: Path) -> set[int] | None:
    """Every id of tokenizer.json, those of added tokens included; None if there is no such file.

    Raises:
        CheckpointError: the file is too large, or is no tokenizer.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    text = checkpoint.read_text(folder, path, MAX_TOKENIZER_BYTES)
    try:
        raw = json.loads(text)
        vocabulary = raw["model"]["vocab"]
        # Unigram models list their tokens; the others have a table of token to id.
        ids = set(range(len(vocabulary))) if isinstance(vocabulary, list) else set(vocabulary.values())
        ids |= {token["id"] for token in raw.get("added_tokens") or ()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not a tokenizer ({type(error).__name__}: {error}); expected an object with model.vocab. Copy it again"
        ) from None
    if not all(type(i) is int and i >= 0 for i in ids):
        raise CheckpointError(f"{path}: a token id is no number of 0 or more; expected integers. Copy it again")
    return ids


def without_token(folder: Path, vocab_size: int) -> list[int]:
    """Ids below `vocab_size` that tokenizer.json of a folder has no token for; none if there is no such file.

    Raises:
        CheckpointError: as `token_ids`.
    """
    ids = token_ids(folder)
    return [] if ids is None else [i for i in range(vocab_size) if i not in ids]


def vocabulary(config: ModelConfig | None, found: Mapped, ids: set[int] | None) -> Vocabulary:
    """Rows of the matrices, vocab_size, and size of the tokenizer side by side."""

    def rows(name: str) -> int | None:
        return found.parts[name].shape[0] if name in found.parts and found.parts[name].shape else None

    return Vocabulary(
        rows("embed_tokens.weight"), rows("lm_head.weight"), config.vocab_size if config else None,
        None if ids is None else max(ids, default=-1) + 1, None if ids is None else len(ids),
    )  # fmt: skip


def vocabulary_problems(found: Vocabulary) -> tuple[list[str], list[str]]:
    """What is wrong with these numbers, and what is odd but harmless."""
    problems, notes = [], []
    size, tokens = found.vocab_size, found.tokenizer
    if size is None:
        return [], []
    if tokens is not None and tokens > size:
        rows = [n for n in (found.embedding_rows, found.head_rows) if n is not None]
        fix = (
            f"The tensors have rows for them: set vocab_size to {tokens}"
            if rows and min(rows) >= tokens
            else "Remove the tokens from tokenizer.json, or export a model whose embedding has rows for them"
        )
        problems.append(
            f"tokenizer.json has ids up to {tokens - 1}, but vocab_size in config.json is {size}; expected ids below it, since "
            f"a larger one has no row of the embedding. {fix}"
        )
    if tokens is not None and tokens < size:
        notes.append(
            f"ids {tokens} to {size - 1} have no token in tokenizer.json, but a row of the head: they are not sampled"
        )
    for name, rows_of in (("embedding", found.embedding_rows), ("head", found.head_rows)):
        if rows_of is not None and rows_of > size:
            notes.append(
                f"the {name} has {rows_of} rows, vocab_size is {size}; the last {rows_of - size} rows are not used"
            )
    return problems, notes
