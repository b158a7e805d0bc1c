"""Every shipped family against transformers, through the files that transformers wrote."""

import json
from pathlib import Path

import pytest
import torch

from tiers.reference.family import shipped
from tiers.reference.load import load_model, open_model
from tiers.reference.model import Cache, parameter_shapes
from tiers.reference.testing.compare import LOGPROB_BUDGET, assert_close
from tiers.reference.testing.foreign import MODELS, VOCAB, foreign_logits, foreign_model, save_foreign, save_megatron
from tiers.reference.testing.tiny import random_ids


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
def test_a_family_matches_transformers(name: str, tmp_path: Path) -> None:
    theirs = save_foreign(tmp_path, name)
    ids = torch.tensor(random_ids(48, VOCAB, seed=1))
    expected = foreign_logits(theirs, ids)
    assert 1 < expected.abs().max() < 60

    opened = open_model(tmp_path)
    assert opened.description.family.name == name.split()[0]
    assert not opened.description.unused, "everything in the config is read, or known to be without effect"
    filled = {target for entry in opened.map.entries.values() for target in entry.targets}
    assert filled - {"lm_head.weight"} == set(parameter_shapes(opened.config)) - {"lm_head.weight"}

    ours = load_model(tmp_path)
    assert_close(ours(ids), expected, LOGPROB_BUDGET)
    cache = Cache()
    token_by_token = torch.cat([ours(token, cache) for token in ids.split(1)])
    assert_close(token_by_token, expected, LOGPROB_BUDGET)


@torch.inference_mode()
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (2, 3), (4, 3)])
def test_a_megatron_folder_matches_transformers(tp: int, pp: int, tmp_path: Path) -> None:
    """C1, C2, C3, C7: 2 key/value heads on 4 ranks, so that a rank holds parts of heads; gate and up on each rank."""
    theirs = save_megatron(tmp_path, tp, pp)
    ids = torch.tensor(random_ids(48, VOCAB, seed=1))
    opened = open_model(tmp_path)
    assert opened.description.family.name == "megatron"
    assert not opened.description.unused
    assert_close(load_model(tmp_path)(ids), foreign_logits(theirs, ids), LOGPROB_BUDGET)


@torch.inference_mode()
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_matches_transformers(tied: bool, tmp_path: Path) -> None:
    """Without a config.json: the file describes itself. llama.cpp stores q and k with neighbouring channels paired."""
    gguf = pytest.importorskip("gguf")
    theirs = foreign_model("llama tied" if tied else "llama")
    config, state = theirs.config, theirs.state_dict()
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in state.items():
        if name == "lm_head.weight" and tied:
            continue
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = tensor.view(heads, 2, -1, config.hidden_size).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), tensor.numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ids = torch.tensor(random_ids(48, VOCAB, seed=1))
    opened = open_model(tmp_path)
    assert opened.description.family.name == "gguf_llama"
    assert not opened.description.unused
    assert_close(load_model(tmp_path)(ids), foreign_logits(theirs, ids), LOGPROB_BUDGET)


def test_every_shipped_family_is_tested() -> None:
    """myllama in test_myllama.py, those of experts that transformers cannot run as a whole in test_experts.py, nemotron_nas in
    test_nemotron_nas.py."""
    elsewhere = {"myllama", "megatron", "gguf_llama", "deepseek", "deepseek_v3", "nemotron_nas"}
    assert {family.name for family in shipped()} - elsewhere == {name.split()[0] for name in MODELS}


def test_no_two_families_answer_to_one_name() -> None:
    for names in (
        [name for family in shipped() for name in family.architectures],
        [name for family in shipped() for name in family.model_types],
    ):
        assert len(names) == len(set(names))


def test_files_are_what_transformers_writes(tmp_path: Path) -> None:
    """The test above would prove little if the folders were ours: several shards, and a config in its words."""
    save_foreign(tmp_path, "llama")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
