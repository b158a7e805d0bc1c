"""Names of training wrappers: taken off where they stand; what is no parameter of a whole model is refused."""

from pathlib import Path

import pytest

from tiers.reference.errors import CheckpointError
from tiers.reference.wrappers import describe, refuse_unmappable, unwrap


@pytest.mark.parametrize(
    ("wrapped", "bare"),
    [
        ("module.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.module.model.norm.weight", "model.norm.weight"),
        ("module._orig_mod.model.norm.weight", "model.norm.weight"),
        (
            "_orig_mod.module.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
        ),
        (
            "_fsdp_wrapped_module.model.layers.3._fsdp_wrapped_module.mlp._orig_mod.up_proj.weight",
            "model.layers.3.mlp.up_proj.weight",
        ),
        ("layers.0.module.weight", "layers.0.weight"),
        ("base_model.model.model.norm.weight", "model.norm.weight"),
        ("module.base_model.model.model.norm.weight", "model.norm.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("modules.0.my_module.weight", "modules.0.my_module.weight"),
        ("module", "module"),
        ("norm.module", "norm.module"),
        ("", ""),
    ],
)
def test_b7_wrappers_are_taken_off_wherever_they_stand(wrapped: str, bare: str) -> None:
    assert unwrap([wrapped]) == {bare: wrapped}


def test_b8_names_are_unwrapped_only_where_a_prefix_is() -> None:
    assert unwrap(["_forward_module.model.a", "model.b"]) == {
        "model.a": "_forward_module.model.a",
        "model.b": "model.b",
    }


def test_the_order_of_names_is_kept() -> None:
    assert list(unwrap(["module.b", "a", "module.c"])) == ["b", "a", "c"]


def test_two_names_that_become_the_same_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"here: a\.b and module\.a\.b are both a\.b once .* expected each"):
        unwrap(["a.b", "module.a.b"], "here")


def test_the_prefix_of_an_adapter_stays_beside_its_tensors() -> None:
    names = ["base_model.model.q.base_layer.weight", "base_model.model.q.lora_A.weight"]
    assert unwrap(names) == {name: name for name in names}


def test_what_was_taken_off_is_told() -> None:
    assert describe(unwrap(["a.b", "c"])) == []
    assert describe(unwrap(["module.a", "b._orig_mod.c", "d"])) == [
        "took the wrapper prefix module, _orig_mod off 2 of 3 names"
    ]
    assert describe(unwrap(["base_model.model.a"])) == ["took the wrapper prefix base_model.model off 1 of 1 names"]


def test_b3_an_unmerged_adapter_is_refused() -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    with pytest.raises(CheckpointError, match=r"x: unmerged adapter: .*lora_A\.weight; expected .* merge_and_unload"):
        refuse_unmappable(Path("x"), ["model.norm.weight", name])


@pytest.mark.parametrize("name", ["_fsdp_wrapped_module._flat_param", "_flat_param", "layers.0._flat_param_0"])
def test_b10_flat_parameters_of_fsdp_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"_flat_param.* is a flat parameter of FSDP.*full_state_dict"):
        refuse_unmappable(Path("x"), [name])


def test_a_whole_model_is_not_refused() -> None:
    refuse_unmappable(Path("x"), ["model.explore_a.weight", "model.norm.weight"])
