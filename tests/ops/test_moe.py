"""`moe` against the formula, one token and one choice at a time, and against the modules of transformers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tiers.reference.config import Moe
from tiers.reference.errors import ConfigError
from tiers.reference.ops.moe import balance, mix, moe, route
from tiers.reference.testing.compare import assert_close

SIZES = {"num_experts": 8, "top_k": 3, "intermediate_size": 11}

ROUTINGS: dict[str, Moe] = {
    "softmax": Moe(**SIZES, renormalize=False),
    "softmax, renormalised": Moe(**SIZES),
    "one expert per token": Moe(8, 1, 11, renormalize=False),
    "all experts": Moe(8, 8, 11),
    "sigmoid with a correction": Moe(**SIZES, score="sigmoid", correction_bias=True),
    "best groups by their best": Moe(**SIZES, groups=4, top_groups=2, renormalize=False, routed_scaling_factor=16.0),
    "best groups by their best two": Moe(
        **SIZES, score="sigmoid", correction_bias=True, groups=4, top_groups=2, group_score="top2", routed_scaling_factor=2.5
    ),
    "gelu": Moe(**SIZES, activation="gelu"),
    "gelu by tanh": Moe(**SIZES, activation="gelu_tanh"),
}  # fmt: skip

every_routing = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)


def inputs(routing: Moe, tokens: int, width: int = 6, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of `moe`; negative corrections make scores below zero."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5).to(dtype)

    experts, inner = routing.num_experts, routing.intermediate_size
    exact = torch.promote_types(dtype, torch.float32)
    return {
        "hidden_TM": randn(tokens, width) * width**0.5,
        "logits_TE": (randn(tokens, experts) * 4).to(exact),
        "correction_E": randn(experts).to(exact) - 0.5 if routing.correction_bias else None,
        "gate_LFM": randn(experts, inner, width) * 3,
        "up_LFM": randn(experts, inner, width),
        "down_LMF": randn(experts, width, inner),
        "routing": routing,
    }


def activated(x: float, name: str) -> float:
    if name == "silu":
        return x / (1 + math.exp(-x))
    if name == "gelu":
        return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def chosen(logits: list[float], correction: list[float], routing: Moe) -> dict[int, float]:
    """Experts of one token and their weights, in plain Python."""
    if routing.score == "softmax":
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    ranked = [s + b for s, b in zip(scores, correction, strict=True)]
    size = len(logits) // routing.groups
    members = [range(g * size, (g + 1) * size) for g in range(routing.groups)]
    count = 2 if routing.group_score == "top2" else 1
    worth = [sum(sorted((ranked[e] for e in group), reverse=True)[:count]) for group in members]
    best = sorted(range(routing.groups), key=lambda g: -worth[g])[: routing.top_groups]
    allowed = [e for g in best for e in members[g]]
    ids = sorted(allowed, key=lambda e: -ranked[e])[: routing.top_k]
    total = sum(scores[e] for e in ids) if routing.renormalize else 1.0
    return {e: scores[e] / total * routing.routed_scaling_factor for e in ids}


def by_hand(hidden_TM: Tensor, logits_TE: Tensor, correction_E: Tensor | None, gate_LFM: Tensor, up_LFM: Tensor,
            down_LMF: Tensor, routing: Moe) -> Tensor:  # fmt: skip
    out = torch.zeros_like(hidden_TM)
    correction = [0.0] * routing.num_experts if correction_E is None else correction_E.tolist()
    for t, logits in enumerate(logits_TE.tolist()):
        for e, weight in chosen(logits, correction, routing).items():
            for f in range(routing.intermediate_size):
                a = activated(float(gate_LFM[e, f] @ hidden_TM[t]), routing.activation)
                out[t] += weight * a * float(up_LFM[e, f] @ hidden_TM[t]) * down_LMF[e, :, f]
    return out


@every_routing
@pytest.mark.parametrize("tokens", [1, 7], ids=["T1", "T7"])
def test_moe_matches_the_formula(routing: Moe, tokens: int) -> None:
    given = inputs(routing, tokens)
    assert_close(moe(**given), by_hand(**given), 1e-12)


@every_routing
def test_routing_decides_something(routing: Moe) -> None:
    """Tokens go different ways, and where there are rules beyond the largest logits they change the choice."""
    given = inputs(routing, 40)
    _, ids = route(given["logits_TE"], given["correction_E"], routing)
    plain = given["logits_TE"].topk(routing.top_k).indices
    if routing.top_k < routing.num_experts:
        assert len({tuple(sorted(row)) for row in ids.tolist()}) > 1
    if routing.groups > 1 or routing.correction_bias:
        assert (ids.sort(-1).values != plain.sort(-1).values).any()


def test_parts_of_the_experts_sum_to_the_whole() -> None:
    """As on the ranks of expert parallelism: 3, 1 and 4 experts."""
    given = inputs(ROUTINGS["best groups by their best two"], 9)
    whole = moe(**given)
    parts = torch.zeros_like(whole)
    for first, stop in ((0, 3), (3, 4), (4, 8)):
        own = {name: given[name][first:stop] for name in ("gate_LFM", "up_LFM", "down_LMF")}
        parts += moe(**{**given, **own}, first=first)
    assert_close(parts, whole, 1e-12)


def test_parts_of_the_inner_width_sum_to_the_whole() -> None:
    """As on the ranks of tensor parallelism."""
    given = inputs(ROUTINGS["softmax"], 9)
    whole = moe(**given)
    parts = torch.zeros_like(whole)
    for columns in (slice(0, 4), slice(4, 11)):
        own = {"gate_LFM": given["gate_LFM"][:, columns], "up_LFM": given["up_LFM"][:, columns]}
        parts += moe(**{**given, **own, "down_LMF": given["down_LMF"][..., columns]})
    assert_close(parts, whole, 1e-12)


def test_a_list_of_experts_is_the_same_as_one_tensor() -> None:
    given = inputs(ROUTINGS["softmax"], 5)
    lists = {name: list(given[name]) for name in ("gate_LFM", "up_LFM", "down_LMF")}
    assert torch.equal(moe(**{**given, **lists}), moe(**given))


def test_an_expert_that_is_named_twice_counts_twice() -> None:
    """J2: T 3, K 2, ids [[0, 1], [2, 2], [3, 0]]."""
    given = inputs(Moe(4, 2, 11), 3)
    weights = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.2, 0.8]], dtype=torch.float64)
    ids = torch.tensor([[0, 1], [2, 2], [3, 0]])
    matrices = [given[name] for name in ("gate_LFM", "up_LFM", "down_LMF")]
    actual = mix(given["hidden_TM"], weights, ids, *matrices, "silu")

    def expert(t: int, e: int) -> Tensor:
        gate, up, down = (matrix[e] for matrix in matrices)
        x = given["hidden_TM"][t]
        return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))

    expected = [0.7 * expert(0, 0) + 0.3 * expert(0, 1), expert(1, 2), 0.2 * expert(2, 3) + 0.8 * expert(2, 0)]
    assert_close(actual, torch.stack(expected), 1e-12)


def test_tokens_do_not_influence_each_other() -> None:
    given = inputs(ROUTINGS["softmax, renormalised"], 12)
    whole = moe(**given)
    alone = [
        moe(**{**given, "hidden_TM": given["hidden_TM"][t : t + 1], "logits_TE": given["logits_TE"][t : t + 1]})
        for t in range(12)
    ]
    assert_close(torch.cat(alone), whole, 1e-12)


def test_an_infinity_stays_with_its_token() -> None:
    given = inputs(ROUTINGS["softmax"], 4, dtype=torch.float32)
    expected = moe(**given)
    given["hidden_TM"] = given["hidden_TM"].clone()
    given["hidden_TM"][2] = float("inf")
    actual = moe(**given)
    assert not torch.isfinite(actual[2]).all()
    rest = [0, 1, 3]
    assert torch.equal(actual[rest], expected[rest])


def test_no_tokens() -> None:
    given = inputs(ROUTINGS["softmax"], 3)
    none = {"hidden_TM": given["hidden_TM"][:0], "logits_TE": given["logits_TE"][:0]}
    assert moe(**{**given, **none}).shape == (0, 6)


@every_routing
def test_gradients(routing: Moe) -> None:
    given = inputs(routing, 3)
    names = ("hidden_TM", "logits_TE", "gate_LFM", "up_LFM", "down_LMF")
    tensors = [given[name].requires_grad_(True) for name in names]
    assert torch.autograd.gradcheck(lambda *args: moe(**{**given, **dict(zip(names, args, strict=True))}), tensors)


def test_rounds_once() -> None:
    given = inputs(ROUTINGS["all experts"], 5, dtype=torch.bfloat16)
    exact = {name: value.double() if isinstance(value, Tensor) else value for name, value in given.items()}
    error = (moe(**given).double() - moe(**exact)).abs().max()
    assert error < 4 * torch.finfo(torch.bfloat16).eps * moe(**exact).abs().max()


# ---- against transformers -------------------------------------------------------------------------------------------


def randomise(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5


def ours(module: Any, x: Tensor, routing: Moe, correction: Tensor | None) -> Tensor:
    """`moe` and shared experts with the weights of a module of transformers."""
    logits = torch.nn.functional.linear(x, module.gate.weight)
    gate, up = module.experts.gate_up_proj.chunk(2, dim=1)
    return moe(x, logits, correction, gate, up, module.experts.down_proj, routing) + module.shared_experts(x)


@torch.inference_mode()
@pytest.mark.parametrize("renormalize", [True, False])
def test_matches_the_module_of_deepseek_v3(renormalize: bool) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(
        hidden_size=32, moe_intermediate_size=24, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
        n_shared_experts=2, routed_scaling_factor=2.5, norm_topk_prob=renormalize,
    )  # fmt: skip
    module = modeling.DeepseekV3MoE(config)
    randomise(module)
    routing = Moe(
        16, 4, 24, score="sigmoid", correction_bias=True, groups=4, top_groups=2, group_score="top2",
        renormalize=renormalize, routed_scaling_factor=2.5,
    )  # fmt: skip
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(2))
    assert_close(ours(module, x, routing, module.gate.e_score_correction_bias), module(x[None])[0], 1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_matches_the_module_of_deepseek_v2(method: str) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
    config = modeling.DeepseekV2Config(
        hidden_size=32, moe_intermediate_size=24, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
        n_shared_experts=2, routed_scaling_factor=16.0, topk_method=method,
    )  # fmt: skip
    module = modeling.DeepseekV2Moe(config)
    randomise(module)
    limits = {"groups": 4, "top_groups": 2} if method == "group_limited_greedy" else {}
    routing = Moe(16, 4, 24, renormalize=False, routed_scaling_factor=16.0, **limits)
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(2))
    assert_close(ours(module, x, routing, None), module(x[None])[0], 1e-4)


# ---- load balance ---------------------------------------------------------------------------------------------------


def test_balance_by_hand() -> None:
    """Two experts, three tokens: probabilities 3/4, 1/4; 3/4, 1/4; 1/4, 3/4, each going to its best."""
    logits = torch.tensor([[3.0, 1.0], [3.0, 1.0], [1.0, 3.0]]).log()
    counts, loss = balance(logits, torch.tensor([[0], [0], [1]]))
    assert counts.tolist() == [2, 1]
    # f = 2/3, 1/3; P = (3/4 + 3/4 + 1/4) / 3 = 7/12, 5/12; E sum f P = 2 (14/36 + 5/36) = 19/18
    assert loss.item() == pytest.approx(19 / 18)


def test_balance_is_one_where_all_is_even_and_experts_where_one_gets_everything() -> None:
    even = torch.zeros(4, 4)
    assert balance(even, torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]]))[1].item() == pytest.approx(1)
    one = torch.zeros(5, 4)
    one[:, 2] = 100
    counts, loss = balance(one, torch.full((5, 1), 2))
    assert counts.tolist() == [0, 0, 5, 0]
    assert loss.item() == pytest.approx(4)


# ---- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("logits_TE", lambda x: x[:, :5], r"logits_TE has shape \(4, 5\); expected \(4, 8\)"),
        ("logits_TE", lambda x: x[:3], r"logits_TE has shape \(3, 8\); expected \(4, 8\)"),
        ("correction_E", lambda x: x[:5], r"correction_E has shape \(5,\); expected \(8,\)"),
        ("correction_E", lambda x: None, "correction_E is None; routing.correction_bias is True"),
        ("gate_LFM", lambda x: x[:5], "gate_LFM has 5 experts; expected 8"),
        ("up_LFM", lambda x: x.mT, r"up_LFM has experts of shape \(6, 11\); expected \(11, 6\)"),
        ("down_LMF", lambda x: x.mT, r"up_LFM|gate_LFM"),
    ],
)
def test_rejects_shapes(name: str, change: Any, words: str) -> None:
    given = inputs(ROUTINGS["sigmoid with a correction"], 4)
    with pytest.raises(ValueError, match=words):
        moe(**{**given, name: change(given[name])})


def test_rejects_experts_beyond_the_last() -> None:
    given = inputs(ROUTINGS["softmax"], 4)
    with pytest.raises(ValueError, match="down_LMF has 8 experts from 1 on; expected some of the 8"):
        moe(**given, first=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 9}, "top_k is 9; expected at most num_experts = 8"),
        ({"top_k": 0}, "top_k is 0; expected a number above 0"),
        ({"groups": 3}, "num_experts is 8 and groups is 3; expected groups of one size"),
        ({"groups": 4, "top_groups": 5}, "top_groups is 5; expected at most groups = 4"),
        ({"groups": 8, "top_groups": 2}, "top_k is 3, but 2 of 8 groups hold 2 experts"),
        ({"groups": 8, "top_groups": 8, "group_score": "top2"}, "group_score is top2, but a group has 1 expert"),
        ({"shared_gate": True}, "shared_gate is true, but there are no shared experts"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0.0; expected a number above 0"),
        ({"num_experts": 5000}, "num_experts is 5000; expected at most"),
    ],
)
def test_rejects_configs(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Moe(**{**SIZES, **change})
