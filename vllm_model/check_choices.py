"""Where the reference chooses keys, or experts, by so little that rounding decides: either choice is right.

Legend: T tokens, S keys, E experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from tiers.reference.config import Moe, TopK
from tiers.reference.ops import attention, moe

# Two scores nearer than this may be ordered either way by rounding; scores are of order 1 to 10.
MARGIN = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# Where the reference was watched in both precisions: this many times the difference that 9 of 10 choices stay below, for
# rounding falls differently in every implementation. Five standard deviations, if it is normal.
SPREAD = 3.0

# Differences whose quantile torch can take.
_MANY = 2**24


def floor(dtype: torch.dtype) -> float:
    """The least margin where scores are computed from what was rounded to a dtype, and rounding is measured besides."""
    return MARGIN[torch.float32] if dtype == torch.float32 else MARGIN[dtype] / 5


@dataclass
class Choice:
    """One choice of keys by every head (or group) and token of a call, or of experts by every token.

    Attributes:
        positions: [T] of the tokens.
        gap: [.., T] by how much the last that was taken scores more than the first that was not; infinity if all were taken.
        again: the same gaps from scores of another precision.
        noise: how far rounding moves such gaps; 0 while that is not known.
    """

    positions: Tensor
    gap: Tensor
    again: Callable[[Tensor], Tensor]
    noise: float = 0.0

    def close(self, margin: float) -> set[int]:
        """Positions of tokens that any head chose for by less than the margin, or than rounding can make up."""
        rows = (self.gap < max(margin, SPREAD * self.noise)).reshape(-1, len(self.positions)).any(dim=0)
        return set(self.positions[rows].tolist())

    def moved(self, scores: Tensor) -> None:
        """Learn from the scores in another precision."""
        difference = (self.again(scores) - self.gap)[self.gap.isfinite()].abs().float()
        if difference.numel():
            most = difference.quantile(0.9) if difference.numel() < _MANY else difference.max()
            self.noise = most.item()


@dataclass
class Close:
    """Where layers chose between keys, or experts, that score nearly the same."""

    margin: float
    choices: list[Choice] = field(default_factory=list)

    def decided(self, length: int) -> Tensor:
        """[length] true where no such choice was made."""
        positions = self.positions()
        return torch.tensor([i not in positions for i in range(length)])

    def positions(self, choices: int | None = None) -> set[int]:
        """Of tokens with such a choice, among the first so many."""
        return set().union(*(choice.close(self.margin) for choice in self.choices[:choices]))

    def first(self, choices: int | None = None) -> float:
        """The first such position; infinity if there is none."""
        return min(self.positions(choices), default=float("inf"))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Watch the same calls in another precision while the block runs, and learn how far rounding moves scores."""
        remaining = iter(self.choices)
        with _watching(lambda choice, scores: next(remaining).moved(scores)):
            yield


@contextmanager
def watched(margin: float) -> Iterator[Close]:
    """Watch the reference choose keys, and experts, of whole sequences while the block runs."""
    close = Close(margin)
    with _watching(lambda choice, scores: close.choices.append(choice())):
        yield close


@contextmanager
def _watching(seen: Callable[[Callable[[], Choice], Tensor], None]) -> Iterator[None]:
    """Call `seen` at each choice with a function that describes it, and the scores it was made by."""
    original, original_route = attention.kept, moe.route

    def route(logits: Tensor, correction: Tensor | None, routing: Moe) -> tuple[Tensor, Tensor]:
        seen(partial(_of_experts, logits, correction, routing), logits)
        return original_route(logits, correction, routing)

    def kept(scores: Tensor, distance: Tensor, pattern: attention.Pattern, index: Tensor | None = None) -> Tensor:
        keep = original(scores, distance, pattern, index)
        if isinstance(pattern, TopK) and distance.shape[1] > pattern.k:
            ranked = attention.group_max(scores, index) if pattern.share == "group" else scores
            seen(partial(_of_keys, ranked, keep, distance, pattern), ranked)
        return keep

    attention.kept, moe.route = kept, route  # type: ignore[assignment]
    try:
        yield
    finally:
        attention.kept, moe.route = original, original_route


def _of_keys(scores: Tensor, keep: Tensor, distance_TS: Tensor, pattern: TopK) -> Choice:
    positions = torch.arange(distance_TS.shape[1], device=distance_TS.device)
    chosen = keep & ~((distance_TS < pattern.window) | (positions < pattern.sink))
    lowest = scores.masked_fill(~chosen, float("inf")).min(dim=-1)
    highest = scores.masked_fill(keep | (distance_TS < 0), float("-inf")).max(dim=-1)

    def again(other: Tensor) -> Tensor:
        taken, left = (other.gather(-1, place.indices[..., None])[..., 0] for place in (lowest, highest))
        return taken - left

    return Choice(distance_TS[:, 0], lowest.values - highest.values, again)


def _of_experts(logits_TE: Tensor, correction_E: Tensor | None, routing: Moe) -> Choice:
    positions = torch.arange(len(logits_TE), device=logits_TE.device)
    gap = partial(routing_gap, correction_E=correction_E, routing=routing)
    return Choice(positions, gap(logits_TE), gap)


def routing_gap(logits_TE: Tensor, correction_E: Tensor | None, routing: Moe) -> Tensor:
    """[T] how far the choice of experts is from another one: of experts, and of groups, chosen and left out.

    In units of a logit where those alone decide, else as a share of the largest score.
    """
    scores_TE = logits_TE.softmax(dim=-1) if routing.score == "softmax" else logits_TE.sigmoid()
    plain = correction_E is None and routing.score == "softmax"
    unit_T1 = scores_TE.amax(dim=-1, keepdim=True)
    ranked_TE = scores_TE if correction_E is None else scores_TE + correction_E
    gaps = []
    allowed_TE = torch.ones_like(ranked_TE, dtype=torch.bool)
    if routing.groups > 1:
        groups = ranked_TE.unflatten(-1, (routing.groups, -1))
        best = groups.topk(2 if routing.group_score == "top2" else 1, dim=-1).values.sum(dim=-1)
        gaps.append(_gap(best / unit_T1, routing.top_groups))
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter(
            -1, best.topk(routing.top_groups, dim=-1).indices, True
        )
        allowed_TE = chosen.repeat_interleave(groups.shape[-1], dim=-1)
    by = logits_TE if plain else ranked_TE / unit_T1
    gaps.append(_gap(by.masked_fill(~allowed_TE, float("-inf")), routing.top_k))
    return torch.stack(gaps).amin(dim=0)


def _gap(values: Tensor, k: int) -> Tensor:
    """Between the k-th largest of each row and the next; infinity where there is no next."""
    if k >= values.shape[-1]:
        return torch.full_like(values[:, 0], float("inf"))
    best = values.topk(k + 1, dim=-1).values
    return best[:, k - 1] - best[:, k]
