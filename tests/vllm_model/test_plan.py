"""Tier plans: the grammar, its messages, and how a plan becomes a tier for every operator of every layer."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tiers.reference.config import ModelConfig
from tiers.reference.errors import PlanError
from tiers.reference.testing.tiny import moe_config, tiny_config
from tiers.vllm_model import dispatch
from tiers.vllm_model.dispatch import OPS, Choice, Where, is_native, resolve, table, unsupported
from tiers.vllm_model.plan import OPERATORS, Tier, TierPlan

# Four layers; gates in the last two.
CONFIG = ModelConfig.from_dict(tiny_config())

KEYS = [*((layer, "attention") for layer in range(4)), (2, "gate"), (3, "gate")]

R, C, F = Tier.REFERENCE, Tier.COMPILED, Tier.FAST


def wishes(text: str) -> dict[tuple[int, str], Tier | None]:
    return TierPlan.parse(text, CONFIG).wishes


# ---- the grammar ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", {}),
        ("reference", dict.fromkeys(KEYS, R)),
        ("compiled", dict.fromkeys(KEYS, C)),
        ("fast", dict.fromkeys(KEYS, F)),
        ("0=fast", {(0, "attention"): F}),
        ("1-2=compiled", {(1, "attention"): C, (2, "attention"): C, (2, "gate"): C}),
        ("3.gate=reference", {(3, "gate"): R}),
        ("0-3.gate=reference", {(2, "gate"): R, (3, "gate"): R}),
        ("*.gate=fast", {(2, "gate"): F, (3, "gate"): F}),
        ("*=reference", dict.fromkeys(KEYS, R)),
        ("reference,*.gate=auto", dict.fromkeys(KEYS[:4], R)),
        ("auto,0-3=reference,2.attention=compiled,*.gate=fast", {
            **dict.fromkeys(KEYS[:4], R), (2, "attention"): C, (2, "gate"): F, (3, "gate"): F,
        }),
        (" reference , 1 = fast ", {**dict.fromkeys(KEYS, R), (1, "attention"): F}),
    ],
)  # fmt: skip
def test_rules_are_read(text: str, expected: dict[tuple[int, str], Tier]) -> None:
    actual = wishes(text)
    assert sorted(actual) == sorted(KEYS)
    assert {key: tier for key, tier in actual.items() if tier is not None} == expected


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("fast,reference", R),
        ("reference,fast", F),
        ("0=fast,0=reference", R),
        ("0=fast,reference", R),
        ("0=fast,auto", None),
    ],
)
def test_later_rules_win(text: str, last: Tier | None) -> None:
    assert wishes(text)[0, "attention"] is last


def test_a_plan_remembers_its_text() -> None:
    assert TierPlan.parse("auto,0=reference", CONFIG).text == "auto,0=reference"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("refrence", ["'refrence'", "unknown tier", "did you mean 'reference'?", "auto, reference, compiled, fast"]),
        ("auto,0-1=fats", ["'0-1=fats'", "unknown tier 'fats'", "did you mean 'fast'?"]),
        ("Reference", ["unknown tier 'Reference'", "did you mean 'reference'?"]),
        ("", ["unknown tier ''", "0-3=reference"]),
        ("auto,", ["unknown tier ''"]),
        ("0=", ["'0='", "unknown tier ''"]),
        ("0.atention=fast", ["'0.atention=fast'", "unknown operator 'atention'", "did you mean 'attention'?"]),
        ("*.ffn=fast", ["unknown operator 'ffn'", "attention, moe, gate"]),
        ("0.=fast", ["unknown operator ''"]),
        ("4=fast", ["'4=fast'", "beyond the last layer", "layers 0 to 3"]),
        ("2-7.gate=fast", ["'2-7'", "beyond the last layer"]),
        ("3-1=fast", ["'3-1'", "ends before it starts"]),
        ("a=fast", ["layer range 'a'", "7 or 0-3"]),
        ("=fast", ["layer range ''", "7 or 0-3"]),
        ("0=1=fast", ["layer range '0=1'"]),
        ("0.gate=fast", ["'0.gate=fast' fits nothing", "layer 0 has no operator 'gate'"]),
        ("0-1.gate=fast", ["'0-1.gate=fast' fits nothing", "layers 0-1 have no operator 'gate'"]),
    ],
)
def test_wrong_rules_are_refused(text: str, parts: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        TierPlan.parse(text, CONFIG)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"


# ---- from wishes to choices -----------------------------------------------------------------------------------------


def plan_and_resolve(text: str) -> dict[tuple[int, str], Choice]:
    choices = resolve(CONFIG, TierPlan.parse(text, CONFIG), Where("cpu"))
    assert sorted((choice.layer, choice.operator) for choice in choices) == sorted(KEYS)
    return {(choice.layer, choice.operator): choice for choice in choices}


@pytest.fixture
def serve_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, set[Tier]]], None]:
    """Pretend that an operator has only these tiers, whatever this machine has."""

    def pretend(tiers: dict[str, set[Tier]]) -> None:
        monkeypatch.setattr(
            dispatch,
            "unsupported",
            lambda operator, tier, layer, where: None if tier in tiers[operator] else f"no {tier.value} today",
        )

    return pretend


def test_the_reference_always_serves() -> None:
    choices = plan_and_resolve("reference")
    assert {choice.tier for choice in choices.values()} == {R}
    # One reason for each of the two faster tiers.
    assert {len(choice.passed_over) for choice in choices.values()} == {2}


def test_every_operator_of_every_layer_gets_a_tier() -> None:
    assert sorted(plan_and_resolve("auto")) == sorted(KEYS)


def test_auto_takes_the_fastest_that_serves(serve_only: Any) -> None:
    serve_only({"attention": {R, C, F}, "gate": {R, C}})
    choices = plan_and_resolve("auto")
    assert choices[1, "attention"] == Choice(1, "attention", F, (), tiers=(F, C, R))
    assert choices[2, "gate"] == Choice(2, "gate", C, ("fast: no fast today",), tiers=(C, R))
    assert choices[1, "attention"].slower(F) is C
    assert choices[2, "gate"].slower(C) is R


def test_a_slower_tier_asked_for_is_taken(serve_only: Any) -> None:
    serve_only({"attention": {R, C, F}, "gate": {R, F}})
    choices = plan_and_resolve("auto,1=reference,3.gate=reference")
    assert choices[1, "attention"] == Choice(
        1, "attention", R, ("fast: not asked for", "compiled: not asked for"), named=True, tiers=(F, C, R)
    )
    assert choices[3, "gate"].passed_over == ("fast: not asked for", "compiled: no compiled today")
    assert choices[2, "gate"].tier is F


def test_a_tier_that_cannot_serve_lists_the_valid_ones(serve_only: Any) -> None:
    serve_only({"attention": {R, C, F}, "gate": {R, C}})
    with pytest.raises(PlanError) as caught:
        plan_and_resolve("auto,*.gate=fast")
    assert str(caught.value) == (
        "plan 'auto,*.gate=fast': layer 2 cannot run gate on tier fast: no fast today (on cpu). "
        "Valid for this layer: auto, compiled, reference"
    )


def test_a_tier_that_is_missing_from_the_table_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    only_reference = {
        operator: {name: {R: modules[R]} for name, modules in functions.items()} for operator, functions in OPS.items()
    }
    monkeypatch.setattr(dispatch, "OPS", only_reference)
    with pytest.raises(PlanError, match="cannot run attention on tier compiled: no compiled implementation"):
        plan_and_resolve("compiled")
    assert {choice.tier for choice in plan_and_resolve("auto").values()} == {R}


def test_the_table_has_a_line_per_run_of_layers(serve_only: Any) -> None:
    serve_only({"attention": {R, F}, "gate": {R}})
    config = ModelConfig.from_dict(tiny_config(num_hidden_layers=6))
    text = table(resolve(config, TierPlan.parse("auto,5=reference", config), Where("cpu")), config)
    assert text.splitlines()[0].split() == ["layers", "operator", "what", "tier", "why", "not", "faster"]
    names = [line.split()[:2] for line in text.splitlines()[1:]]
    assert names == [
        ["0", "attention"], ["1", "attention"], ["2", "attention"], ["3", "attention"], ["4", "attention"],
        ["5", "attention"], ["2", "gate"], ["3", "gate"],
    ]  # fmt: skip


def test_the_table_joins_layers_that_are_alike(serve_only: Any) -> None:
    serve_only({"attention": {R, F}})
    alike = ModelConfig.from_dict(tiny_config(layers={}))
    text = table(resolve(alike, TierPlan.parse("auto,3=reference", alike), Where("cpu")), alike)
    assert [line.split()[:2] for line in text.splitlines()[1:]] == [["0-2", "attention"], ["3", "attention"]]
    assert "topk k=8 sink=1 window=2, rope, 4 heads / 2 kv interleaved" in text
    assert text.splitlines()[2].endswith("fast: not asked for; compiled: no compiled today")


def test_the_table_does_not_join_across_a_gap(serve_only: Any) -> None:
    serve_only({"attention": {R}, "gate": {R}})
    gate = {"gate": {"mode": "mix", "source": "token"}}
    config = ModelConfig.from_dict(tiny_config(layers={"0-1": gate, "3": gate}))
    text = table(resolve(config, TierPlan.parse("auto", config), Where("cpu")), config)
    assert [line.split()[:2] for line in text.splitlines()[1:]] == [
        ["0-3", "attention"],
        ["0-1", "gate"],
        ["3", "gate"],
    ]


# ---- the table against the tree -------------------------------------------------------------------------------------


FUNCTIONS = [
    (name, tier, module)
    for functions in OPS.values()
    for name, tiers in functions.items()
    for tier, module in tiers.items()
]


def load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("triton", "vllm"):
            raise
        pytest.skip(f"{module} needs {error.name}, which is not installed")


def test_the_table_knows_every_operator() -> None:
    assert tuple(OPS) == OPERATORS
    layers = (*CONFIG.layers, *ModelConfig.from_dict(moe_config()).layers)
    assert {operator for layer in layers for operator in layer.operators} == set(OPERATORS)


def test_experts_are_an_operator_of_the_layers_that_have_them() -> None:
    config = ModelConfig.from_dict(moe_config())
    plan = TierPlan.parse("reference,2.moe=fast", config)
    assert [layer for layer, operator in plan.wishes if operator == "moe"] == [1, 2, 3]
    found = dispatch.resolve(config, plan, Where("cpu"))
    assert {c.layer: (c.tier, c.native) for c in found if c.operator == "moe"} == {
        1: (R, False),
        2: (F, True),
        3: (R, False),
    }
    assert "3 of 8 experts of 64, sigmoid, 2 of 4 groups, shared experts" in dispatch.table(found, config)
    with pytest.raises(PlanError, match=r"layer 0 has no operator .moe."):
        TierPlan.parse("0.moe=fast", config)


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (Where("cpu", width=48), "need a hidden size of a multiple of 32, not 48"),
        (Where("cuda", dtype="float32"), "compute float32 in tf32"),
        (Where("cuda", dtype="bfloat16"), None),
        (Where("cpu", width=64), None),
    ],
)
def test_where_the_layer_of_vllm_serves_experts(where: Where, reason: str | None) -> None:
    found = dispatch.unsupported("moe", F, ModelConfig.from_dict(moe_config()).layers[1], where)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(("name", "tier", "module"), FUNCTIONS, ids=[f"{n}-{t.value}" for n, t, _ in FUNCTIONS])
def test_every_module_exports_its_function(name: str, tier: Tier, module: str) -> None:
    package = {R: "tiers.reference.ops", C: "tiers.compiled.ops", F: "tiers.vllm_model.ops"}[tier]
    assert module == f"{package}.{name}"
    assert callable(getattr(load(module), name))
    assert dispatch.function(name, tier) is getattr(load(module), name)


@pytest.mark.parametrize("name", [name for functions in OPS.values() for name in functions])
def test_signatures_agree_across_tiers(name: str) -> None:
    def parameters(tier: Tier, module: str) -> list[tuple[str, Any, Any]]:
        signature = inspect.signature(getattr(load(module), name))
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    tiers = next(functions[name] for functions in OPS.values() if name in functions)
    expected = parameters(R, tiers[R])
    for tier, module in tiers.items():
        assert parameters(tier, module) == expected, f"{name} on tier {tier.value}"


def test_every_operator_has_a_reference() -> None:
    assert all(R in tiers for functions in OPS.values() for tiers in functions.values())


def test_an_unknown_function_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="ffn"):
        dispatch.function("ffn", R)


def fast_reason(where: Where, **changes: Any) -> str | None:
    """Why the fast tier cannot serve the attention of a layer with these changes; None if it can."""
    mixer = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "pattern": {"kind": "topk", "k": 32}, **changes}
    config = ModelConfig.from_dict(tiny_config(mixer=mixer, layers={}))
    return unsupported("attention", Tier.FAST, config.layers[0], where)


DENSE = {"kind": "dense"}


@pytest.mark.parametrize(
    ("where", "changes", "expected"),
    [
        (Where("cuda"), {}, None),
        (Where("cpu"), {}, "needs CUDA"),
        (Where("cuda"), {"head_dim": 36}, "head size 36 is not a multiple of 8"),
        (Where("cuda"), {"head_dim": 24}, "head size 24"),
        (Where("cuda"), {"head_dim": 264}, "head size 264"),
        (Where("cuda"), {"pattern": {"kind": "topk", "k": 8193}}, "k is 8193"),
        (Where("cuda"), {"pattern": {"kind": "window", "window": 9}}, None),
        (Where("cpu"), {"pattern": {"kind": "window", "window": 9}}, "needs CUDA"),
        (Where("cuda", dtype="bfloat16"), {"pattern": DENSE}, None),
        (Where("cuda", dtype="bfloat16"), {"pattern": DENSE, "head_dim": 272}, None),
        (Where("cuda", dtype="float32"), {"pattern": DENSE}, None),
        (Where("cuda", dtype="float32"), {"pattern": DENSE, "head_dim": 272}, "head size 272"),
        (Where("cuda"), {"pattern": DENSE, "position": {"kind": "alibi"}}, None),
        (Where("cuda"), {"pattern": DENSE, "position": {"kind": "xpos"}}, None),
        (Where("cuda"), {"position": {"kind": "t5"}}, None),
        (
            Where("cpu"),
            {"pattern": DENSE, "position": {"kind": "xpos"}},
            "vLLM's own attention cannot apply xpos positions",
        ),
        (Where("cpu"), {"pattern": DENSE, "position": {"kind": "t5"}}, "cannot apply t5 positions"),
        (Where("cpu"), {"pattern": DENSE, "position": {"kind": "kerple"}}, "cannot apply kerple positions"),
        (Where("cpu"), {"pattern": DENSE, "position": {"kind": "sandwich"}}, "cannot apply sandwich positions"),
        (
            Where("cpu"),
            {"pattern": DENSE, "position": {"kind": "alibi", "distance": "sqrt"}},
            "cannot apply alibi sqrt positions",
        ),
        (Where("cpu"), {"pattern": DENSE, "position": {"kind": "none"}}, None),
        (Where("cpu"), {"pattern": DENSE}, None),
        (Where("cpu", block_size=128), {"pattern": DENSE}, None),
        (Where("cpu", block_size=48), {"pattern": DENSE}, "block size of a multiple of 32, not 48"),
        (Where("cpu"), {"pattern": DENSE, "head_dim": 40}, "no head size 40"),
    ],
)
def test_the_fast_tier_says_why_it_cannot_serve(where: Where, changes: dict[str, Any], expected: str | None) -> None:
    reason = fast_reason(where, **changes)
    assert reason is None if expected is None else expected in str(reason)


@pytest.mark.parametrize(
    ("where", "changes", "expected"),
    [
        (Where("cuda", dtype="bfloat16"), {}, True),
        (Where("cuda", dtype="bfloat16"), {"head_dim": 72}, True),
        (Where("cuda", dtype="float32"), {}, False),  # tf32
        (Where("cuda", dtype="bfloat16"), {"position": {"kind": "alibi"}}, False),
        (Where("cuda", dtype="bfloat16"), {"position": {"kind": "xpos"}}, False),
        (Where("cuda", dtype="bfloat16"), {"position": {"kind": "t5"}}, False),
        (Where("cuda", dtype="bfloat16"), {"softcap": 30.0}, False),
        (Where("cuda", dtype="bfloat16"), {"pattern": {"kind": "window", "window": 9}}, False),
        (Where("cpu", dtype="float32"), {}, True),
        (Where("cpu", dtype="float32"), {"position": {"kind": "alibi"}}, True),
        (Where("cpu", dtype="float32"), {"head_dim": 40}, False),
    ],
)
def test_dense_attention_of_the_fast_tier_is_vllms_own_where_it_computes_the_same(
    where: Where, changes: dict[str, Any], expected: bool
) -> None:
    mixer = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "pattern": DENSE, **changes}
    layer = ModelConfig.from_dict(tiny_config(mixer=mixer, layers={})).layers[0]
    assert is_native(layer.mixer, Tier.FAST, where) is expected
    assert not is_native(layer.mixer, Tier.REFERENCE, where)
