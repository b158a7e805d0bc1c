"""The gate inside vLLM, without an engine: a tier is proved before it serves, and what happens where it fails."""

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.reference.config import ModelConfig
from tiers.reference.errors import ConfigError, ServingError
from tiers.reference.ops.knowledge_bank import knowledge_bank
from tiers.reference.ops.knowledge_gate import fold, knowledge_gate
from tiers.reference.testing.compare import assert_close
from tiers.reference.testing.tiny import tiny_config
from tiers.vllm_model import dispatch, gate
from tiers.vllm_model.dispatch import Choice, Where
from tiers.vllm_model.gate import GateTier
from tiers.vllm_model.plan import Tier
from tiers.vllm_model.self_check import TOKENS, check_tokens
from tiers.vllm_model.serving import folds_tables

WIDTH, SLOTS = 20, 5
BOTH = (Tier.FAST, Tier.REFERENCE)


def off_by_a_little(*args: Any) -> Tensor:
    return knowledge_gate(*args) * 1.01


def does_not_compile(*args: Any) -> Tensor:
    raise RuntimeError("out of resource: shared memory")


def wrong_for_many(hidden: Tensor, *args: Any) -> Tensor:
    return knowledge_gate(hidden, *args) * (2 if len(hidden) > 100 else 1)


def leaves_something_out(*args: Any) -> Tensor:
    out = knowledge_gate(*args)
    out[-1, -1] = float("nan")
    return out


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A gate whose tiers other than the reference are these functions, as if they could serve on this machine."""

    def make(named: bool = False, tiers: tuple[Tier, ...] = BOTH, **functions: Any) -> GateTier:
        mine = {
            Tier.REFERENCE: {"knowledge_gate": knowledge_gate, "knowledge_bank": knowledge_bank},
            **{tier: {"knowledge_gate": knowledge_gate, "knowledge_bank": knowledge_bank, **functions} for tier in tiers[:-1]},
        }  # fmt: skip
        monkeypatch.setattr(dispatch, "function", lambda name, tier: mine[tier][name])
        return GateTier(Choice(7, "gate", tiers[0], named=named, tiers=tiers))

    return make


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(gate.logger, "warning", lambda message, *args: found.append(message % args))
    return found


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    shapes = {
        "hidden": (3, WIDTH), "knowledge": (3, WIDTH), "weight": (WIDTH, 2 * WIDTH), "keys": (SLOTS, WIDTH),
        "values": (SLOTS, WIDTH),
    }  # fmt: skip
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def named(served: GateTier, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The name of a layer, by which the operators that vLLM's graph holds find the gate."""
    from vllm.utils.torch_utils import _encode_layer_name

    context = types.SimpleNamespace(no_compile_layers={"layers.7.gate": served})
    monkeypatch.setattr(gate, "get_forward_context", lambda: context)
    return _encode_layer_name("layers.7.gate")


def step(served: GateTier, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """A step of a layer with a bank."""
    layer = named(served, monkeypatch)
    hidden = tensors["hidden"]
    knowledge = torch.ops.tiers.knowledge_bank(hidden, tensors["keys"], tensors["values"], 0.2, layer)
    return torch.ops.tiers.knowledge_gate(hidden, knowledge, None, tensors["weight"], None, "mix", layer)


def looked_up(served: GateTier, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """A step of a layer with a table whose products are known."""
    layer = named(served, monkeypatch)
    hidden, knowledge, weight = tensors["hidden"], tensors["knowledge"], tensors["weight"]
    return torch.ops.tiers.knowledge_gate(hidden, knowledge, fold(knowledge, weight), weight, None, "mix", layer)


def expect(tensors: dict[str, Tensor]) -> Tensor:
    knowledge = knowledge_bank(tensors["hidden"], tensors["keys"], tensors["values"], 0.2)
    return knowledge_gate(tensors["hidden"], knowledge, tensors["weight"], None, "mix")


def test_a_tier_that_agrees_with_the_reference_serves(
    pretend: Any, tensors: dict[str, Tensor], warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counting(hidden: Tensor, *args: Any) -> Tensor:
        calls.append(len(hidden))
        return knowledge_gate(hidden, *args)

    served = pretend(knowledge_gate=counting)
    dispatch.COUNTS.clear()
    for _ in range(2):
        assert torch.equal(step(served, tensors, monkeypatch), expect(tensors))
    # Compared at the first step only, on every number of tokens.
    assert calls == [*TOKENS, 3, 3]
    assert dict(dispatch.COUNTS) == {("gate", "fast"): 2}
    assert not warnings


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (off_by_a_little, "differs from the reference by 0.01"),
        (wrong_for_many, "differs from the reference by 1"),
        (leaves_something_out, "differs from the reference by nan"),
        (does_not_compile, "failed (RuntimeError: out of resource: shared memory)"),
    ],
)
def test_under_auto_a_tier_that_fails_takes_its_layer_down(
    pretend: Any, tensors: dict[str, Tensor], warnings: list[str], function: Any, reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    served = pretend(knowledge_gate=function)
    dispatch.COUNTS.clear()
    assert torch.equal(step(served, tensors, monkeypatch), expect(tensors))
    assert dict(dispatch.COUNTS) == {("gate", "reference"): 1}
    assert len(warnings) == 1
    assert f"layer 7: knowledge_gate of the gate on tier fast {reason}" in warnings[0]
    assert "served by tier reference" in warnings[0]
    step(served, tensors, monkeypatch)
    assert len(warnings) == 1


def test_a_bank_that_fails_takes_the_gate_with_it(
    pretend: Any, tensors: dict[str, Tensor], warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = pretend(knowledge_bank=does_not_compile)
    dispatch.COUNTS.clear()
    assert torch.equal(step(served, tensors, monkeypatch), expect(tensors))
    assert dict(dispatch.COUNTS) == {("gate", "reference"): 1}
    assert "knowledge_bank of the gate on tier fast failed" in warnings[0]


def test_the_next_slower_tier_is_proved_too(
    pretend: Any, tensors: dict[str, Tensor], warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = pretend(knowledge_gate=off_by_a_little, tiers=(Tier.FAST, Tier.COMPILED, Tier.REFERENCE))
    assert torch.equal(step(served, tensors, monkeypatch), expect(tensors))
    assert [w.rpartition(" ")[2] for w in warnings] == ["compiled", "reference"]


@pytest.mark.parametrize("function", [off_by_a_little, does_not_compile])
def test_a_tier_that_was_named_and_fails_stops(
    pretend: Any, tensors: dict[str, Tensor], function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = pretend(named=True, knowledge_gate=function)
    with pytest.raises(ServingError, match=r"layer 7: knowledge_gate of the gate on tier fast.*7.gate=reference"):
        step(served, tensors, monkeypatch)


def test_nothing_is_compared_while_a_graph_is_captured(
    pretend: Any, tensors: dict[str, Tensor], warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = pretend(knowledge_gate=off_by_a_little)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    step(served, tensors, monkeypatch)
    assert not warnings
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert torch.equal(step(served, tensors, monkeypatch), expect(tensors))
    assert len(warnings) == 1


def test_the_reference_is_not_compared_with_itself(tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "check_tokens", lambda *args: pytest.fail("nothing to compare"))
    served = GateTier(Choice(7, "gate", Tier.REFERENCE))
    assert torch.equal(step(served, tensors, monkeypatch), expect(tensors))


def test_the_comparison_uses_the_parameters_of_the_layer() -> None:
    weight = torch.randn(WIDTH, 2 * WIDTH)
    seen = []

    def recording(hidden: Tensor, knowledge: Tensor, *rest: Any) -> Tensor:
        seen.append((hidden, knowledge, rest))
        return knowledge_gate(hidden, knowledge, *rest)

    like = torch.randn(2, WIDTH, dtype=torch.float32)
    assert check_tokens(recording, knowledge_gate, (like, like), (weight, None, "mix")) is None
    assert [len(hidden) for hidden, _, _ in seen] == list(TOKENS)
    assert all(rest[0] is weight for _, _, rest in seen)
    assert not any(torch.equal(hidden, knowledge) for hidden, knowledge, _ in seen)


def test_zeros_agree_with_zeros_only() -> None:
    # A bank whose values start at zero.
    like, rest = (torch.randn(1, WIDTH),), (torch.randn(SLOTS, WIDTH), torch.zeros(SLOTS, WIDTH), 0.2)
    assert check_tokens(knowledge_bank, knowledge_bank, like, rest) is None
    failure = check_tokens(lambda *args: knowledge_bank(*args) + 1e-3, knowledge_bank, like, rest)
    assert failure == "differs from the reference by inf of the largest value (budget 0.0001)"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (Where("cuda"), None),
        (Where("cuda", dtype="bfloat16"), None),
        (Where("cuda", dtype="float32"), None),
        (Where("cuda", dtype="float64"), "dtype is float64"),
        (Where("cpu", dtype="float32"), "needs CUDA"),
    ],
)
def test_the_fast_gate_says_why_it_cannot_serve(where: Where, expected: str | None) -> None:
    layer = ModelConfig.from_dict(tiny_config()).layers[2]
    reason = dispatch.unsupported("gate", Tier.FAST, layer, where)
    assert reason is None if expected is None else expected in str(reason)


def test_what_is_folded_reaches_the_tier(
    pretend: Any, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def counting(*args: Any) -> Tensor:
        given.append(len(args))
        return knowledge_gate(*args)

    served = pretend(knowledge_gate=counting)
    served.folded = True
    dispatch.COUNTS.clear()
    expected = knowledge_gate(tensors["hidden"], tensors["knowledge"], tensors["weight"], None, "mix")
    assert_close(looked_up(served, tensors, monkeypatch), expected, 1e-6)
    # Proved without and with it.
    assert given == [*[5] * len(TOKENS), *[6] * len(TOKENS), 6]
    assert dict(dispatch.COUNTS) == {("gate", "fast"): 1, ("gate folded", "fast"): 1}


def test_on_weights_that_nobody_loaded_the_first_step_folds(
    pretend: Any, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = pretend()
    folds: list[bool] = []

    def now() -> None:
        folds.append(True)
        served.folded = True

    served.fold = now
    dispatch.COUNTS.clear()
    for _ in range(3):
        looked_up(served, tensors, monkeypatch)
    assert folds == [True]
    assert dict(dispatch.COUNTS) == {("gate", "fast"): 3, ("gate folded", "fast"): 2}


def test_a_tier_that_is_wrong_only_where_it_is_folded_takes_its_layer_down(
    pretend: Any, tensors: dict[str, Tensor], warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any) -> Tensor:
        return knowledge_gate(*args) * (1.01 if len(args) == 6 else 1)

    served = pretend(knowledge_gate=wrong)
    served.folded = True
    # What is folded might itself be the cause, so that the reference multiplies by all of W.
    expected = knowledge_gate(tensors["hidden"], tensors["knowledge"], tensors["weight"], None, "mix")
    assert torch.equal(looked_up(served, tensors, monkeypatch), expected)
    assert served.tier is Tier.REFERENCE
    assert "differs from the reference by 0.01" in warnings[0]


@pytest.mark.parametrize("value", [1, "yes", None])
def test_fold_tables_is_true_or_false(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"fold_tables is {value!r}; expected true or false"):
        folds_tables({"fold_tables": value})


def test_tables_are_folded_only_where_the_user_says_so() -> None:
    assert [folds_tables(x) for x in ({}, {"fold_tables": False}, {"fold_tables": True}, None)] == [
        False,
        False,
        True,
        False,
    ]
