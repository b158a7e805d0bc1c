"""Engine options that a model cannot follow are refused by flag, before memory is allocated."""

from typing import Any

import pytest

from tiers.reference.analysis.tensor_parallel import VOCAB_PADDING, padded, tensor_parallel_misfit
from tiers.reference.config import ModelConfig
from tiers.reference.errors import ServingError
from tiers.reference.testing.tiny import alibi_config, tiny_config
from tiers.vllm_model import serving
from tiers.vllm_model.dispatch import Where, resolve
from tiers.vllm_model.plan import TierPlan
from tiers.vllm_model.serving import Options, check_options

TINY = ModelConfig.from_dict(tiny_config())
UNEQUAL = ModelConfig.from_dict(alibi_config())


def model(
    heads: int, kv_heads: int, inner: int = 960, head_map: Any = "contiguous", pattern: Any = None, **changes: Any
) -> ModelConfig:
    mixer = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": 8,
        "head_map": head_map,
        "pattern": pattern or {"kind": "dense"},
        "position": {"kind": "rope"},
    }
    ffn = {"kind": "swiglu", "intermediate_size": inner}
    # 1 to 12 ranks divide this vocabulary.
    raw = {"mixer": mixer, "ffn": ffn, "layers": {}, "vocab_size": 64 * 9 * 5 * 7 * 11, **changes}
    return ModelConfig.from_dict(tiny_config(**raw))


def assert_refused(config: ModelConfig, options: Options, *parts: str) -> None:
    with pytest.raises(ServingError) as caught:
        check_options(config, options)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"


def test_factors_of_longrope_that_vllm_would_choose_otherwise_are_named() -> None:
    scaling: dict[str, Any] = {
        "kind": "longrope", "short_factor": [1] * 8, "long_factor": [2] * 8, "original_max_position_embeddings": 64,
    }  # fmt: skip

    def notes(max_model_len: int, **changes: Any) -> list[str]:
        position = {"kind": "rope", "scaling": {**scaling, **changes}}
        config = ModelConfig.from_dict(tiny_config(mixer={**tiny_config()["mixer"], "position": position}))
        return serving._longrope_notes(config, max_model_len)

    (note,) = notes(64)
    assert "--max-model-len is 64, at most the original length 64" in note
    assert "the long factors are used" in note
    assert notes(65) == notes(64, use="short") == notes(64, original_max_position_embeddings=512) == []


@pytest.mark.parametrize("config", [TINY, UNEQUAL], ids=["tiny", "alibi"])
def test_defaults_are_accepted(config: ModelConfig) -> None:
    check_options(config, Options())


# ---- tensor parallelism ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fits"),
    [
        (8, 8, {1, 2, 4, 8}),
        (8, 4, {1, 2, 4, 8}),
        (8, 2, {1, 2, 4, 8}),
        (8, 1, {1, 2, 4, 8}),
        (12, 4, {1, 2, 4, 12}),
        (12, 3, {1, 3, 6, 12}),
        (12, 2, {1, 2, 4, 6, 12}),
        (9, 3, {1, 3, 9}),
        (7, 7, {1, 7}),
        (1, 1, {1}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "sizes",
)
def test_heads_are_cut_evenly_or_replicated(heads: int, kv_heads: int, fits: set[int]) -> None:
    # 4 ranks of 12 heads over 3 key/value heads would need one and a third of them each.
    config = model(heads, kv_heads, inner=12 * 9 * 8 * 7)
    assert {size for size in range(1, 13) if tensor_parallel_misfit(config, size) is None} == fits


def test_unequal_groups_count_with_their_empty_slots() -> None:
    # Groups of 3, 1 and 2 are laid out as three groups of 3: nine query heads.
    config = model(6, 3, head_map=[0, 2, 0, 1, 2, 0], inner=9 * 8)
    assert {size for size in range(1, 13) if tensor_parallel_misfit(config, size) is None} == {1, 3, 9}
    assert tensor_parallel_misfit(config, 2) == "9 query heads (layers 0-3)"
    assert tensor_parallel_misfit(config, 6) == "9 query heads (layers 0-3)"


def test_a_misfit_names_what_does_not_fit() -> None:
    assert tensor_parallel_misfit(model(8, 4, inner=6), 4) == "6 ffn channels (layers 0-3)"
    assert tensor_parallel_misfit(model(12, 3), 4) == "3 key/value heads (layers 0-3)"
    assert tensor_parallel_misfit(model(12, 3), 5) == "12 query heads (layers 0-3)"


def test_every_layer_must_fit() -> None:
    config = model(8, 4, layers={"2": {"ffn": {"intermediate_size": 6}}})
    assert tensor_parallel_misfit(config, 2) is None
    assert tensor_parallel_misfit(config, 4) == "6 ffn channels (layer 2)"


def test_a_group_that_selects_together_stays_on_one_rank() -> None:
    shared = model(8, 2, pattern={"kind": "topk", "k": 4, "share": "group"})
    alone = model(8, 2, pattern={"kind": "topk", "k": 4})
    assert tensor_parallel_misfit(alone, 4) is None
    assert tensor_parallel_misfit(shared, 2) is None
    assert tensor_parallel_misfit(shared, 4) == "2 groups of query heads that choose keys together (layers 0-3)"


def test_a_tensor_parallel_size_that_does_not_fit_lists_those_that_do() -> None:
    assert_refused(
        model(12, 3), Options(tensor_parallel_size=4),
        "--tensor-parallel-size is 4", "the model has 3 key/value heads (layers 0-3), which do not fit", "Sizes that work: 1, 3, 6, 12",
    )  # fmt: skip
    check_options(model(12, 3), Options(tensor_parallel_size=6))


def test_a_vocabulary_that_does_not_fit_is_refused() -> None:
    """vLLM pads 32000 rows to 500 * 64, which 3 ranks do not divide; it would end with a bare assertion."""
    config = model(12, 3, vocab_size=32000)
    for size in (3, 6):
        assert_refused(
            config, Options(tensor_parallel_size=size), f"--tensor-parallel-size is {size}",
            "the model has 32000 rows of the vocabulary, padded to a multiple of 64", "Sizes that work: 1",
        )  # fmt: skip
    assert_refused(model(12, 6, vocab_size=32000), Options(tensor_parallel_size=3), "Sizes that work: 1, 2")
    check_options(model(12, 6, vocab_size=32000), Options(tensor_parallel_size=2))
    # One token more is padded to 501 * 64.
    check_options(model(12, 3, vocab_size=32001), Options(tensor_parallel_size=3))


def test_the_vocabulary_is_padded_as_vllm_pads_it() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import DEFAULT_VOCAB_PADDING_SIZE, pad_vocab_size

    assert VOCAB_PADDING == DEFAULT_VOCAB_PADDING_SIZE
    assert [padded(size) for size in range(1, 200)] == [pad_vocab_size(size) for size in range(1, 200)]


# ---- the other options ----------------------------------------------------------------------------------------------


def test_more_stages_than_layers_are_refused() -> None:
    assert_refused(TINY, Options(pipeline_parallel_size=5), "--pipeline-parallel-size is 5", "4 layers", "at most")
    check_options(TINY, Options(pipeline_parallel_size=4))


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "int8", "nvfp4"])
def test_quantised_caches_are_refused(dtype: str) -> None:
    assert_refused(
        TINY, Options(kv_cache_dtype=dtype), f"--kv-cache-dtype is {dtype}", "expected auto, float16, bfloat16"
    )


@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16"])
def test_plain_caches_are_accepted(dtype: str) -> None:
    check_options(TINY, Options(kv_cache_dtype=dtype))


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(name: str) -> None:
    assert_refused(TINY, Options(**{name: 2}), f"--{name.replace('_', '-')} is 2", "expected 1", "not supported yet")


def test_lora_is_refused_where_heads_move() -> None:
    assert_refused(
        model(8, 4, head_map="interleaved"), Options(enable_lora=True),
        "--enable-lora is set", "layer 0 has a head_map that is not contiguous", "Merge the adapter",
    )  # fmt: skip
    assert_refused(UNEQUAL, Options(enable_lora=True), "layer 0 has a head_map that is not contiguous")


@pytest.mark.parametrize(
    "head_map", ["contiguous", [0, 0, 1, 1, 2, 2, 3, 3]], ids=["contiguous", "a list that is contiguous"]
)
def test_lora_is_accepted_where_heads_stay(head_map: Any) -> None:
    check_options(model(8, 4, head_map=head_map), Options(enable_lora=True))


def test_lora_names_the_layer_whose_heads_move() -> None:
    config = model(8, 4, layers={"3": {"mixer": {"head_map": "interleaved"}}})
    assert_refused(config, Options(enable_lora=True), "layer 3 has a head_map")


def test_prompt_embeds_are_refused_with_a_token_gate() -> None:
    assert_refused(
        TINY,
        Options(enable_prompt_embeds=True),
        "--enable-prompt-embeds is set",
        "layer 2 has a gate with source token",
    )


def test_prompt_embeds_are_accepted_without_a_token_gate() -> None:
    bank = {"mode": "mix", "source": "bank", "slots": 4}
    check_options(model(8, 4), Options(enable_prompt_embeds=True))
    check_options(model(8, 4, gate=bank), Options(enable_prompt_embeds=True))


def test_a_context_beyond_the_rotary_table_is_refused() -> None:
    assert_refused(
        TINY, Options(max_model_len=513), "--max-model-len is 513", "max_position_embeddings in config.json is 512",
        "Expected at most 512",
    )  # fmt: skip
    check_options(TINY, Options(max_model_len=512))


# ---- experts --------------------------------------------------------------------------------------------------------


def experts(**changes: Any) -> ModelConfig:
    ffn = {"kind": "moe", "num_experts": 6, "top_k": 2, "intermediate_size": 40, **changes}
    return ModelConfig.from_dict(tiny_config(ffn=ffn, layers={"0": {"ffn": {"kind": "gelu", "intermediate_size": 80}}}))


def test_the_inner_width_of_experts_must_fit() -> None:
    config = experts(intermediate_size=41)
    with pytest.raises(
        ServingError, match=r"size is 2, but the model has 41 channels of an expert \(layers 1-3\).*: 1$"
    ):
        check_options(config, Options(tensor_parallel_size=2))
    check_options(config, Options(tensor_parallel_size=2, enable_expert_parallel=True))


def test_the_number_of_experts_must_fit_where_they_are_dealt_out() -> None:
    config = experts(num_experts=7)
    check_options(config, Options(tensor_parallel_size=2))
    with pytest.raises(ServingError, match=r"size is 2 with --enable-expert-parallel, but the model has 7 experts"):
        check_options(config, Options(tensor_parallel_size=2, enable_expert_parallel=True))


def test_shared_experts_must_fit_in_either_case() -> None:
    config = experts(shared_intermediate_size=51)
    for spread in (False, True):
        with pytest.raises(ServingError, match="51 channels of shared experts"):
            check_options(config, Options(tensor_parallel_size=2, enable_expert_parallel=spread))


def test_expert_parallelism_without_experts_is_refused() -> None:
    with pytest.raises(ServingError, match="no layer of the model has experts"):
        check_options(ModelConfig.from_dict(tiny_config()), Options(enable_expert_parallel=True))


@pytest.mark.parametrize(
    ("options", "words"), [({"data_parallel_size": 2}, "--data-parallel-size is 2, but layer 1 has experts"),
                           ({"enable_lora": True}, "--enable-lora is set, but layer 1 has experts"),
                           ({"enable_eplb": True}, "vLLM moves experts between GPUs only")],
)  # fmt: skip
def test_what_experts_cannot_follow_is_refused(options: dict[str, Any], words: str) -> None:
    mixers = {"mixer": {**tiny_config()["mixer"], "head_map": "contiguous"}}
    config = ModelConfig.from_dict(tiny_config(**mixers, ffn={"kind": "moe", "num_experts": 6, "top_k": 2, "intermediate_size": 40},
                                               layers={"0": {"ffn": {"kind": "gelu", "intermediate_size": 80}}}))  # fmt: skip
    with pytest.raises(ServingError, match=words):
        check_options(config, Options(**options))


def test_experts_move_where_vllm_can_move_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.compat, "device_type", lambda: "cuda")
    spread = {"enable_eplb": True, "enable_expert_parallel": True, "tensor_parallel_size": 2}
    check_options(experts(), Options(**spread))
    check_options(experts(), Options(**spread, num_redundant_experts=4))
    assert_refused(
        experts(), Options(**spread, num_redundant_experts=3), "3 redundant experts beside 6", "a multiple of 2"
    )
    assert_refused(experts(), Options(enable_eplb=True), "nothing to move")
    assert_refused(experts(), Options(enable_eplb=True, tensor_parallel_size=2), "nothing to move")
    ffn = {"kind": "moe", "num_experts": 6, "top_k": 2, "intermediate_size": 40}
    uneven = ModelConfig.from_dict(tiny_config(ffn=ffn, layers={"1": {"ffn": {"num_experts": 8}}}))
    assert_refused(uneven, Options(**spread), "the same number of experts in all layers", "6 in layer 3, 8 in layer 1")


def test_only_experts_of_vllms_own_layer_move() -> None:
    config = experts()
    cuda = Where("cuda", 16, "bfloat16", width=64)
    serving._check_moved_tiers(resolve(config, TierPlan.parse("reference,*.moe=fast", config), cuda))
    with pytest.raises(ServingError, match="experts of layer 2 are on tier reference"):
        serving._check_moved_tiers(resolve(config, TierPlan.parse("*.moe=fast,2.moe=reference", config), cuda))
