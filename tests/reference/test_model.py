"""The reference model: cut into any chunks it is the same model, it can be trained, and its options do what they say."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tiers.reference.config import ModelConfig
from tiers.reference.model import Cache, ReferenceModel, parameter_shapes
from tiers.reference.testing.compare import LOGPROB_BUDGET, assert_close
from tiers.reference.testing.tiny import (
    alibi_config,
    moe_config,
    positions_config,
    random_ids,
    tiny_config,
    tiny_model,
    uneven_config,
)

# Whole models are compared in float64. In float32 the rounding of another order of sums is enough to move a key across
# the threshold of a top-k now and then, and the logits with it by as much as 0.3: that is a property of the rule.
EXACT = 1e-9

CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": tiny_config(),
    "alibi": alibi_config(),
    "positions": positions_config(),
    "moe": moe_config(),
    "uneven": uneven_config(),
    "uneven, parallel, sandwich": uneven_config(residual="parallel", norm_position="sandwich"),
    "parallel": tiny_config(residual="parallel", norm={"kind": "layer", "bias": False}),
}

every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def exact_model(config: dict[str, Any]) -> ReferenceModel:
    return tiny_model(config).double()


def ids_of(length: int, seed: int = 0) -> Tensor:
    return torch.tensor(random_ids(length, 320, seed))


def in_chunks(model: ReferenceModel, ids: Tensor, sizes: list[int]) -> Tensor:
    """Logits of a prompt that is run in pieces."""
    cache = Cache()
    return torch.cat([model(part, cache) for part in ids.split(sizes)])


# ---- chunks ---------------------------------------------------------------------------------------------------------


@every_config
@pytest.mark.parametrize(
    "sizes",
    [[1] * 75, [74, 1], [1, 74], [16, 16, 16, 16, 11], [7, 31, 2, 35], [64, 11]],
    ids=["token by token", "74 and 1", "1 and 74", "by 16", "7, 31, 2, 35", "64 and 11"],
)
def test_chunked_matches_whole(config: dict[str, Any], sizes: list[int]) -> None:
    model = exact_model(config)
    ids = ids_of(75)
    expected = model(ids)
    # Nearly equal logits would hide a difference.
    assert expected.std() > 1
    assert_close(in_chunks(model, ids, sizes), expected, EXACT)


@pytest.mark.parametrize(
    "pattern", [{"kind": "dense"}, {"kind": "window", "window": 9, "sink": 1}], ids=["dense", "window"]
)
@pytest.mark.parametrize("config", [tiny_config(layers={}), alibi_config(layers={})], ids=["tiny", "alibi"])
def test_chunked_matches_whole_in_float32(config: dict[str, Any], pattern: dict[str, Any]) -> None:
    model = tiny_model({**config, "mixer": {**config["mixer"], "pattern": pattern}})
    ids = ids_of(75)
    expected = model(ids)
    for sizes in ([1] * 75, [16, 16, 16, 16, 11]):
        assert_close(in_chunks(model, ids, sizes), expected, LOGPROB_BUDGET)


@every_config
def test_later_tokens_do_not_change_earlier_logits(config: dict[str, Any]) -> None:
    model = exact_model(config)
    ids = ids_of(40)
    assert_close(model(ids[:25]), model(ids)[:25], EXACT)


@every_config
def test_every_earlier_token_matters_somewhere(config: dict[str, Any]) -> None:
    model = exact_model(config)
    ids = ids_of(12)
    expected = model(ids)[-1]
    for position in range(12):
        other = ids.clone()
        other[position] = (other[position] + 1) % 320
        assert (model(other)[-1] - expected).abs().max() > 1e-3, position


def test_a_cache_holds_keys_and_values_of_every_layer() -> None:
    model = exact_model(tiny_config())
    cache = Cache()
    assert cache.length == 0
    model(ids_of(5), cache)
    model(ids_of(3), cache)
    assert cache.length == 8
    assert sorted(cache.keys) == sorted(cache.values) == [0, 1, 2, 3]
    assert all(tensor.shape == (8, 2, 16) for tensor in (*cache.keys.values(), *cache.values.values()))


def test_without_a_cache_every_call_starts_anew() -> None:
    model = exact_model(tiny_config())
    assert torch.equal(model(ids_of(9)), model(ids_of(9)))


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [tiny_config(), alibi_config(), positions_config()], ids=["tiny", "alibi", "positions"]
)
def test_gradients_reach_every_parameter(config: dict[str, Any]) -> None:
    model = tiny_model(config).requires_grad_(True)
    ids = ids_of(60)
    loss = torch.nn.functional.cross_entropy(model(ids[:-1]), ids[1:])
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        largest = parameter.grad.abs().max()
        if name.endswith("k_proj.bias") and config["mixer"]["position"]["kind"] == "alibi":
            # Adds the same q . b to every score of a row, which a softmax does not see: zero but for rounding.
            assert largest < 1e-6, name
        else:
            assert largest > 1e-6, name


def test_gradients_reach_experts_and_router_but_not_the_correction() -> None:
    model = tiny_model(moe_config()).requires_grad_(True)
    ids = ids_of(100)
    torch.nn.functional.cross_entropy(model(ids[:-1]), ids[1:]).backward()
    for name, parameter in model.named_parameters():
        if name.endswith("correction_bias"):  # it takes part in the choice alone, which has no gradient
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 1e-7, name


@pytest.mark.parametrize("config", [tiny_config(), alibi_config()], ids=["tiny", "alibi"])
def test_a_step_of_training_lowers_the_loss(config: dict[str, Any]) -> None:
    model = tiny_model(config).requires_grad_(True)
    ids = ids_of(40)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(ids[:-1]), ids[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]


def test_gradients_of_a_whole_model_match_differences() -> None:
    config = {
        "vocab_size": 5,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "max_position_embeddings": 8,
        "mixer": {
            "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "qk_norm": "head", "qkv_bias": True, "softcap": 5.0,
            "pattern": {"kind": "topk", "k": 1, "window": 1},
            "position": {"kind": "rope"},
        },
        "ffn": {"kind": "swiglu", "intermediate_size": 3},
        "layers": {
            "0": {"gate": {"mode": "mix", "source": "bank", "slots": 2}},
            "1": {"gate": {"mode": "sigmoid", "source": "token"}, "mixer": {"pattern": {"share": "group"}}},
        },
    }  # fmt: skip
    model = tiny_model(config).double()
    ids = torch.tensor([0, 3, 1, 4])
    names, values = zip(*model.named_parameters(), strict=True)

    def run(*parameters: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (ids,))
        # One number per token is enough to tell the gradients of the logits apart.
        return (logits * torch.arange(1.0, 6.0, dtype=logits.dtype)).sum(-1)

    leaves = tuple(value.detach().clone().requires_grad_() for value in values)
    assert torch.autograd.gradcheck(run, leaves)


# ---- shapes ---------------------------------------------------------------------------------------------------------


@every_config
def test_parameter_shapes_match_the_state_dict(config: dict[str, Any]) -> None:
    expected = {name: tensor.shape for name, tensor in tiny_model(config).state_dict().items()}
    assert dict(parameter_shapes(ModelConfig.from_dict(config))) == expected


class LargestAllocation(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned outside the meta device, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self.elements = max(self.elements, leaf.numel())
        return out


def test_parameter_shapes_allocates_nothing() -> None:
    config = tiny_config(vocab_size=2**16, hidden_size=2**12, max_position_embeddings=2**18)
    with LargestAllocation() as largest:
        shapes = parameter_shapes(ModelConfig.from_dict(config))
    assert shapes["lm_head.weight"] == (2**16, 2**12)
    assert largest.elements < 1000


def test_a_tied_head_is_no_parameter() -> None:
    names = parameter_shapes(ModelConfig.from_dict(tiny_config(tie_word_embeddings=True)))
    assert "lm_head.weight" not in names
    assert parameter_shapes(ModelConfig.from_dict(tiny_config())).keys() - names == {"lm_head.weight"}


def test_tables_and_slopes_are_no_part_of_a_checkpoint() -> None:
    for config in CONFIGS.values():
        assert not [name for name in parameter_shapes(ModelConfig.from_dict(config)) if name.endswith(("_PR", "_H"))]


# ---- options --------------------------------------------------------------------------------------------------------


def with_weights_of(config: dict[str, Any], **changes: Any) -> ReferenceModel:
    """The tiny model of a changed config with the weights of the unchanged one."""
    model = ReferenceModel(ModelConfig.from_dict({**config, **changes})).requires_grad_(False)
    model.load_state_dict(tiny_model(config).state_dict())
    return model.double()


@every_config
def test_doubling_the_logits_multiplier_doubles_logits(config: dict[str, Any]) -> None:
    before = config.get("logits_multiplier", 1.0)
    expected = 2 * exact_model(config)(ids_of(20))
    assert torch.equal(with_weights_of(config, logits_multiplier=2 * before)(ids_of(20)), expected)


@pytest.mark.parametrize("config", [tiny_config(), alibi_config()], ids=["tiny", "alibi"])
def test_the_embedding_multiplier_scales_embeddings(config: dict[str, Any]) -> None:
    model = exact_model(config)
    multiplier = config.get("embedding_multiplier", 1.0)
    expected = with_weights_of(config, embedding_multiplier=3 * multiplier)(ids_of(20))
    scaled = copy.deepcopy(model)
    if config.get("tie_word_embeddings"):
        # The head reads the same matrix, and is not multiplied.
        scaled = with_weights_of(config, logits_multiplier=config["logits_multiplier"] / 3)
    scaled.embed_tokens.weight.data *= 3
    assert_close(scaled(ids_of(20)), expected, EXACT)


def test_the_residual_multiplier_scales_what_each_unit_adds() -> None:
    config = tiny_config()
    expected = exact_model(config)
    for layer in expected.layers:
        layer.mixer.o_proj.weight.data *= 0.25
        layer.ffn.down_proj.weight.data *= 0.25
    actual = with_weights_of(config, residual_multiplier=0.25)
    assert_close(actual(ids_of(20)), expected(ids_of(20)), EXACT)


def test_a_parallel_residual_feeds_both_units_the_same_input() -> None:
    config = tiny_config(
        residual="parallel", residual_multiplier=0.5, layers={"1": {"gate": {"mode": "mix", "source": "token"}}}
    )
    model = exact_model(config)
    ids = ids_of(20)
    cache = Cache()
    h = model.embed_tokens(ids)
    for layer in model.layers:
        mixed = layer.mixer(layer.mixer_norm(h), torch.arange(20), cache)
        h = h + 0.5 * mixed + 0.5 * layer.ffn(layer.ffn_norm(h))
        h = h if layer.gate is None else layer.gate(h, ids)
    assert_close(model(ids), model.lm_head(model.norm(h)), EXACT)
    sequential = with_weights_of(config, residual="sequential")
    assert (sequential(ids) - model(ids)).abs().max() > 0.1


def test_a_layer_without_attention_and_ffn_passes_everything_on() -> None:
    """Its parameters are none, and taking it out changes nothing."""
    config = uneven_config(layers={"2": {"mixer": None, "ffn": None}})
    model = exact_model(config)
    assert not list(model.layers[2].parameters())
    expected = model(ids_of(20))
    del model.layers[2]
    assert_close(model(ids_of(20)), expected, EXACT)


def test_layers_without_one_of_them_compute_the_other_alone() -> None:
    config = uneven_config(num_hidden_layers=2, layers={"0": {"ffn": None}, "1": {"mixer": None}})
    model = exact_model(config)
    ids = ids_of(20)
    names = {name.split(".")[2] for name, _ in model.named_parameters() if name.startswith("layers.1.")}
    assert names == {"ffn_norm", "ffn"}
    h = model.embed_tokens(ids)
    h = h + model.layers[0].mixer(model.layers[0].mixer_norm(h), torch.arange(20), Cache())
    h = h + model.layers[1].ffn(model.layers[1].ffn_norm(h))
    assert_close(model(ids), model.lm_head(model.norm(h)), EXACT)


def test_the_gate_comes_after_the_residual_of_the_ffn() -> None:
    # mix with g = 0 replaces the hidden state by the knowledge vector, whatever came before.
    config = tiny_config(layers={"3": {"gate": {"mode": "mix", "source": "token"}}})
    model = exact_model(config)
    gate = model.layers[3].gate
    gate.proj.weight.data.zero_()
    gate.proj.bias.data.fill_(-1e4)
    ids = ids_of(20)
    assert_close(model(ids), model.lm_head(model.norm(gate.table(ids))), EXACT)


def test_query_and_key_norms_act_per_head() -> None:
    mixer = {**tiny_config()["mixer"], "qk_norm": "head", "pattern": {"kind": "dense"}}
    model = exact_model(tiny_config(mixer=mixer, layers={}))
    assert model.layers[0].mixer.q_norm.weight.shape == (16,)
    expected = model(ids_of(20))
    # But for its eps, a norm does not see the size of what it is given.
    for layer in model.layers:
        layer.mixer.q_proj.weight.data *= 3
        layer.mixer.k_proj.weight.data *= 3
    assert_close(model(ids_of(20)), expected, 1e-3)
    model.layers[0].mixer.q_norm.weight.data *= 2
    assert (model(ids_of(20)) - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 1.0}, {"softcap": 1.0}, {"position": {"kind": "none"}}, {"position": {"kind": "rope", "theta": 100.0}},
        {"position": {"kind": "rope", "style": "interleaved"}}, {"position": {"kind": "alibi"}},
        {"head_map": "contiguous"}, {"head_map": [0, 0, 0, 1]}, {"pattern": {"kind": "topk", "k": 7}},
    ],
    ids=str,
)  # fmt: skip
def test_every_attention_option_changes_the_result(change: dict[str, Any]) -> None:
    config = tiny_config(layers={})
    changed = with_weights_of(config, mixer={**config["mixer"], **change})
    assert (changed(ids_of(40)) - exact_model(config)(ids_of(40))).abs().max() > 1e-2


def test_slopes_given_are_used() -> None:
    mixer = {**alibi_config()["mixer"], "position": {"kind": "alibi", "slopes": [0.5, 0.4, 0.3, 0.2, 0.1, 0.05]}}
    found = tiny_model(alibi_config(mixer=mixer)).layers[0].mixer.bias()
    assert found is not None
    assert found.kind == "linear"
    assert found.factor_H.tolist() == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.05])
    assert tiny_model(tiny_config()).layers[0].mixer.bias() is None


def test_learned_positions_are_parameters_of_a_checkpoint() -> None:
    shapes = parameter_shapes(ModelConfig.from_dict(positions_config(layers={**positions_config()["layers"], "7": {}})))
    found = {name: tuple(shape) for name, shape in shapes.items() if "t5" in name or "kerple" in name}
    assert found == {
        "t5_bias": (8, 8),
        "layers.3.mixer.kerple_r1": (8,),
        "layers.3.mixer.kerple_r2": (8,),
        "layers.7.mixer.t5_bias": (6, 8),
    }


def test_layers_that_share_a_table_read_the_same() -> None:
    model = tiny_model(positions_config())
    first, second = (model.layers[i].mixer.bias() for i in (2, 6))
    assert torch.equal(first.table_RL, second.table_RL)
    copied = copy.deepcopy(model)
    copied.t5_bias.data += 1
    assert torch.equal(copied.layers[6].mixer.bias().table_RL, first.table_RL + 1)
    assert torch.equal(model.layers[6].mixer.bias().table_RL, first.table_RL)


@pytest.mark.parametrize("layer", range(9))
def test_positions_of_every_layer_change_the_output(layer: int) -> None:
    config = positions_config()
    model = exact_model(config)
    ids = ids_of(40)
    expected = model(ids)
    changed = {**config["layers"], str(layer): {"mixer": {**config["layers"][str(layer)]["mixer"]}}}
    other = "none" if layer != 7 else "alibi"
    changed[str(layer)]["mixer"]["position"] = {"kind": other}
    different = ReferenceModel(ModelConfig.from_dict({**config, "layers": changed})).double().requires_grad_(False)
    own = different.state_dict().keys()
    different.load_state_dict({name: value for name, value in model.state_dict().items() if name in own})
    assert (different(ids) - expected).abs().max() > 1e-2


def test_a_model_made_on_meta_still_knows_its_tables() -> None:
    with torch.device("meta"):
        model = ReferenceModel(ModelConfig.from_dict(tiny_config()))
    expected = tiny_model(tiny_config()).layers[0].mixer.table_PR
    assert torch.equal(model.layers[0].mixer.table_PR, expected)
