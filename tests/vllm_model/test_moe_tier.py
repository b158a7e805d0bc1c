"""The experts of a layer without an engine: a tier is proved before it serves, and what happens where it fails."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.reference.config import Moe
from tiers.reference.errors import ServingError
from tiers.reference.ops.moe import moe as reference
from tiers.vllm_model import dispatch, moe
from tiers.vllm_model.dispatch import Choice
from tiers.vllm_model.moe import Experts, MoeTier
from tiers.vllm_model.plan import Tier

CONFIG = Moe(6, 2, 24)
WIDTH = 32


class Fused(Experts):
    """Stands for vLLM's layer: the weights of `Experts`, and a result that is off by a factor."""

    factor = 1.0

    def forward(self, hidden: Tensor, logits: Tensor) -> Tensor:
        return self.factor * reference(hidden, logits, None, *self.matrices(), CONFIG)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(moe.logger, "warning", lambda message, *args: found.append(message % args))
    return found


def experts(kind: type[Experts] = Fused, ranks: int = 1, rank: int = 0, split: str = "inner") -> Any:
    """Filled from the same tensors on every rank."""
    generator = torch.Generator().manual_seed(0)
    held = kind(CONFIG, WIDTH, ranks, rank, split)
    for expert in range(6):
        for name in ("gate_proj", "up_proj", "down_proj"):
            shape = (WIDTH, 24) if name == "down_proj" else (24, WIDTH)
            held.load(expert, name, torch.randn(shape, generator=generator) * shape[1] ** -0.5)
    return held


def tier(held: Experts, named: bool = False, first: Tier = Tier.FAST) -> MoeTier:
    tiers = (first, Tier.REFERENCE) if first is not Tier.REFERENCE else (first,)
    return MoeTier(Choice(3, "moe", first, named=named, native=first is Tier.FAST, tiers=tiers), CONFIG, held, None)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(9, WIDTH), 3 * torch.randn(9, 6)


def expected(hidden: Tensor, logits: Tensor) -> Tensor:
    return reference(hidden, logits, None, *experts().matrices(), CONFIG)


def test_a_tier_that_agrees_serves(warnings: list[str]) -> None:
    served = tier(experts())
    served.remember()
    given = inputs()
    assert torch.equal(served(*given), expected(*given))
    assert served.tier is Tier.FAST
    assert not warnings
    assert not served.expected, "what the proof needed is let go"


def test_a_tier_that_differs_gives_way_to_a_slower_one(warnings: list[str]) -> None:
    held = experts()
    held.factor = 1.01
    served = tier(held)
    served.remember()
    given = inputs()
    assert torch.equal(served(*given), expected(*given))
    assert served.tier is Tier.REFERENCE
    assert len(warnings) == 1
    assert "layer 3: the experts on tier fast differ from the reference by 0.01" in warnings[0]


def test_a_tier_that_was_named_stops_instead() -> None:
    held = experts()
    held.factor = float("nan")
    served = tier(held, named=True)
    served.remember()
    with pytest.raises(ServingError, match=r"--tiers 'auto,3.moe=reference'"):
        served(*inputs())


def test_weights_that_lie_in_another_way_stop_instead_of_being_read() -> None:
    """As on the CPU, where vLLM packs them after loading."""
    held = experts()
    held.factor = 2.0
    served = tier(held)
    served.remember()
    held.w2.data = held.w2.data.flip(1)
    with pytest.raises(ServingError, match="layer 3: the experts on tier fast"):
        served(*inputs())


def test_a_tier_of_ours_is_proved_when_the_weights_are_there(
    monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    def broken(*args: Any) -> Tensor:
        raise RuntimeError("no such kernel")

    functions = {Tier.REFERENCE: reference, Tier.COMPILED: broken}
    monkeypatch.setattr(dispatch, "function", lambda name, tier: functions[tier])
    served = tier(experts(Experts), first=Tier.COMPILED)
    served.remember()
    assert served.tier is Tier.REFERENCE
    assert "failed (RuntimeError: no such kernel)" in warnings[0]


@pytest.mark.parametrize("split", ["inner", "experts"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_the_ranks_sum_to_the_whole(split: str, ranks: int) -> None:
    given = inputs()
    parts = [tier(experts(Experts, ranks, rank, split), first=Tier.REFERENCE)(*given) for rank in range(ranks)]
    assert (sum(parts) - expected(*given)).abs().max() < 1e-5


# ---- experts that move between ranks --------------------------------------------------------------------------------


def test_experts_that_move_stop_instead_of_giving_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other tier would know where they are. Ranks are compared by their sums."""
    summed = []
    monkeypatch.setattr(moe, "tensor_model_parallel_all_reduce", lambda part: summed.append(part) or part)
    for factor in (1.0, 1.01):
        held = experts()
        held.moves, held.factor = True, factor
        served = tier(held)
        served.remember()
        if factor == 1.0:
            served(*inputs())
            assert len(summed) == 2 * len(moe.PROOF)
        else:
            with pytest.raises(ServingError, match=r"differ from the reference by 0.01.*leave --enable-eplb out"):
                served(*inputs())


@pytest.mark.parametrize("first", [0, 2, 4, 6, 8])
def test_copies_count_once_in_what_the_reference_computes(first: int) -> None:
    """Places of experts on ranks of 4: six experts, and behind them copies of the first ones, which others compute."""
    held, whole = experts(), experts()
    places = torch.arange(first, first + 4) % 6
    held.w13, held.w2 = (torch.nn.Parameter(w[places], requires_grad=False) for w in (whole.w13, whole.w2))
    held.first = first
    served = tier(held)
    served.remember()
    weight = whole.matrices()[2]
    for count, actual in zip(moe.PROOF, served.expected, strict=True):
        hidden, logits = served._inputs(count, weight)
        own = [matrix[first:6][:4] for matrix in whole.matrices()]
        part = reference(hidden, logits, None, *own, CONFIG, first) if len(own[0]) else torch.zeros_like(hidden)
        assert torch.equal(actual, part)


def test_copies_of_experts_are_loaded_behind_them() -> None:
    loaded = []

    class Parameter:
        def weight_loader(self, parameter: Any, tensor: Any, name: str, part: str, place: int) -> None:
            loaded.append((name, part, place))

    held = moe.FusedExperts.__new__(moe.FusedExperts)
    parameters = type("Own", (), {"w13_weight": Parameter(), "w2_weight": Parameter()})
    vars(held).update(config=CONFIG, copies=8, experts=type("Layer", (), {"routed_experts": parameters}))
    for expert in (1, 5):
        held.load(expert, "down_proj", torch.zeros(1))
    # 6 experts and 8 copies: those of all six, and of the first two once more.
    assert loaded == [("w2_weight", "w2", place) for place in (1, 7, 13, 5, 11)]
