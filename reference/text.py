"""Text to token ids and back, with the tokenizer of a model folder."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tiers.reference.config import read_json
from tiers.reference.errors import ServingError


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, through transformers; nothing in the folder is executed.

    Raises:
        ServingError: there is none, or it cannot be read.
    """
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        raise ServingError(f"{folder}: no tokenizer.json; expected one, since text has to become token ids")
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # whatever the tokenizers library raises on a damaged file
        raise ServingError(f"{folder / 'tokenizer.json'}: cannot be read ({error})") from None


def encode_chat(tokenizer: Any, text: str) -> list[int]:
    """Token ids of the chat template with `text` as the user's turn.

    Raises:
        ServingError: the folder has no chat template.
    """
    if not tokenizer.chat_template:
        raise ServingError("the folder has no chat template (chat_template.jinja); leave out --chat for plain text")
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def stop_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Ids that end a text: eos of the tokenizer, of config.json and of generation_config.json."""
    ids = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            eos = read_json(folder / name).get("eos_token_id")
            ids.update(eos if isinstance(eos, list) else [eos])
    return frozenset(i for i in ids if isinstance(i, int))


def stream_text(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Turn token ids into text as they come, holding back what is not yet a whole character."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(ids, skip_special_tokens=True)[len(shown) :]


def listed_ids(line: str) -> list[int] | None:
    """The token ids that a line of a file of prompts lists as JSON, or None if it is text."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    listed = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    return value if listed else None
