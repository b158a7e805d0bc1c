"""Text generation with the reference model, one token at a time."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tiers.reference.errors import ServingError
from tiers.reference.generate import generate
from tiers.reference.model import ReferenceModel
from tiers.reference.testing.tiny import alibi_config, random_ids, tiny_config, tiny_model

PROMPT = random_ids(11, 320, seed=5)


# In float64, so that neither a top-k nor an argmax hangs on the order of sums (see test_model.py).
@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    return tiny_model(tiny_config(max_position_embeddings=64)).double()


def greedy(model: ReferenceModel, prompt: Sequence[int], number: int) -> list[int]:
    """Without a cache: the whole sequence anew for every token."""
    ids = list(prompt)
    for _ in range(number):
        ids.append(int(model(torch.tensor(ids))[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("config", [tiny_config(), alibi_config()], ids=["tiny", "alibi"])
@pytest.mark.parametrize("prompt", [PROMPT, [0], [319, 319]], ids=["11 tokens", "1 token", "2 tokens"])
def test_greedy_matches_an_argmax_loop(config: dict[str, Any], prompt: list[int]) -> None:
    model = tiny_model(config).double()
    assert list(generate(model, prompt, 20)) == greedy(model, prompt, 20)


def test_tokens_come_as_they_are_chosen(model: ReferenceModel) -> None:
    stream = generate(model, PROMPT, 20)
    expected = greedy(model, PROMPT, 3)
    assert [next(stream) for _ in range(3)] == expected


def test_a_stop_id_ends_the_text_and_is_not_yielded(model: ReferenceModel) -> None:
    expected = greedy(model, PROMPT, 20)
    # The first id that did not occur before.
    place = next(i for i in range(3, 20) if expected[i] not in expected[:i])
    assert list(generate(model, PROMPT, 20, stop=frozenset({expected[place]}))) == expected[:place]
    assert list(generate(model, PROMPT, 20, stop=frozenset({expected[0]}))) == []


def test_a_stop_id_in_the_prompt_ends_nothing(model: ReferenceModel) -> None:
    expected = greedy(model, PROMPT, 5)
    stop = frozenset(PROMPT) - set(expected)
    assert stop
    assert list(generate(model, PROMPT, 5, stop=stop)) == expected


def test_no_new_tokens_gives_nothing(model: ReferenceModel) -> None:
    assert list(generate(model, PROMPT, 0)) == []


def test_the_last_position_can_be_reached(model: ReferenceModel) -> None:
    assert len(list(generate(model, PROMPT, 64 - len(PROMPT)))) == 64 - len(PROMPT)


@pytest.mark.parametrize(
    ("prompt", "number", "message"),
    [
        ([], 1, "the prompt has no tokens; expected at least one"),
        ([5, 320], 1, "token id 320; expected ids from 0 to 319"),
        ([-1], 1, "token id -1; expected ids from 0 to 319"),
        ([0] * 64, 1, "64 prompt tokens and 1 new ones.*max_position_embeddings = 64.*Shorten the prompt"),
        ([0] * 11, 54, "11 prompt tokens and 54 new ones.*max_position_embeddings = 64"),
        ([0] * 1000, 1, "1000 prompt tokens"),
    ],
    ids=["empty", "beyond the vocabulary", "negative", "no room", "one too many", "much too long"],
)
def test_refuses_prompts_that_cannot_be_run(
    model: ReferenceModel, prompt: list[int], number: int, message: str
) -> None:
    with pytest.raises(ServingError, match=message):
        next(generate(model, prompt, number))


def test_a_seed_reproduces_a_sample(model: ReferenceModel) -> None:
    # Hot enough that samples differ: logits are of order 10.
    first, again, other = (list(generate(model, PROMPT, 20, temperature=10.0, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first != greedy(model, PROMPT, 20)


def test_sampling_leaves_the_global_generator_alone(model: ReferenceModel) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(generate(model, PROMPT, 5, temperature=1.0, seed=7))
    assert torch.equal(torch.rand(3), expected)


def test_a_low_temperature_is_greedy(model: ReferenceModel) -> None:
    assert list(generate(model, PROMPT, 20, temperature=1e-4, seed=3)) == greedy(model, PROMPT, 20)


def test_samples_follow_the_distribution(model: ReferenceModel) -> None:
    probabilities = (model(torch.tensor(PROMPT))[-1] / 8).softmax(-1)
    counts = torch.zeros(320)
    for seed in range(400):
        counts[next(generate(model, PROMPT, 1, temperature=8.0, seed=seed))] += 1
    likely = probabilities.topk(5).indices
    # Five standard deviations of a count.
    deviation = (400 * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - 400 * probabilities).abs()[likely] < 5 * deviation[likely] + 1).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_some_ids_are_never_chosen(model: ReferenceModel, temperature: float) -> None:
    likely = greedy(model, PROMPT, 1)[0]
    never = [likely, *range(100, 320)]
    chosen = list(generate(model, PROMPT, 20, temperature=temperature, never=never))
    assert len(chosen) == 20
    assert not set(chosen) & set(never)
