"""Generate text with the reference model, one token at a time."""

from collections.abc import Iterator, Sequence

import torch

from tiers.reference.errors import ServingError
from tiers.reference.model import Cache, ReferenceModel


@torch.inference_mode()
def generate(
    model: ReferenceModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    stop: frozenset[int] = frozenset(),
    never: Sequence[int] = (),
) -> Iterator[int]:
    """Yield token ids as they are chosen.

    Args:
        model: the model.
        prompt: token ids, at least one.
        max_new_tokens: stop after this many.
        temperature: 0 takes the likeliest token; above 0 samples from softmax(logits / temperature).
        seed: of the sampling.
        stop: ids that end the text; not yielded.
        never: ids that are not chosen, such as those that the tokenizer has no token for.

    Raises:
        ServingError: the prompt is empty, holds an id outside the vocabulary, or does not fit into
            max_position_embeddings together with max_new_tokens.
    """
    config = model.config
    if not prompt:
        raise ServingError("the prompt has no tokens; expected at least one")
    outside = [i for i in prompt if not 0 <= i < config.vocab_size]
    if outside:
        raise ServingError(f"the prompt holds token id {outside[0]}; expected ids from 0 to {config.vocab_size - 1}")
    if len(prompt) + max_new_tokens > config.max_position_embeddings:
        raise ServingError(
            f"{len(prompt)} prompt tokens and {max_new_tokens} new ones; the model has room for "
            f"max_position_embeddings = {config.max_position_embeddings}. Shorten the prompt or ask for fewer tokens"
        )
    device = model.embed_tokens.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    cache = Cache()
    ids = torch.tensor(list(prompt), device=device)
    passed_over = torch.tensor(list(never), dtype=torch.long, device=device)
    for _ in range(max_new_tokens):
        logits = model(ids, cache)[-1].float().index_fill(0, passed_over, float("-inf"))
        if temperature > 0:
            ids = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            ids = logits.argmax(-1, keepdim=True)
        if int(ids) in stop:
            return
        yield int(ids)
