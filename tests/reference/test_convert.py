"""Writing a folder anew: what comes out, what a run that was stopped leaves behind, and what is refused."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiers.reference import convert as module
from tiers.reference.checkpoint import INDEX_NAME
from tiers.reference.convert import JOURNAL, convert
from tiers.reference.errors import CheckpointError, TiersError
from tiers.reference.load import load_model, open_model
from tiers.reference.testing.foreign import MODELS, VOCAB, save_foreign, save_megatron
from tiers.reference.testing.tiny import alibi_config, random_ids, save_model, save_tiny, tiny_config, tiny_model
from tiers.vllm_model import cli

SMALL = tiny_config(
    vocab_size=24,
    hidden_size=16,
    num_hidden_layers=1,
    max_position_embeddings=32,
    mixer={"num_heads": 2, "num_kv_heads": 1, "head_dim": 8},
    ffn={"kind": "swiglu", "intermediate_size": 24},
    layers={},
    bos_token_id=3,
)


FIRST = "model-00001-of-00001.safetensors"


def logits_of(folder: Path, vocab: int = 24) -> Tensor:
    return load_model(folder)(torch.tensor(random_ids(20, vocab, seed=5)))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def one_paragraph(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    assert len(text) < 1500
    return text


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small model in several files, with some of what lies beside weights."""
    folder = save_tiny(tmp_path / "source", SMALL, shards=2)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    (folder / "README.md").write_text("about the model")
    return folder


# ---- what comes out -------------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_family_computes_the_same(name: str, tmp_path: Path) -> None:
    save_foreign(tmp_path / "theirs", name)
    done = convert(tmp_path / "theirs", tmp_path / "ours", shard_bytes=100_000)
    assert done.family == name.split()[0]
    assert done.shards > 1
    opened = open_model(tmp_path / "ours")
    assert opened.description.family.name == "tiers"
    assert not opened.notes
    assert opened.config == open_model(tmp_path / "theirs").config
    assert torch.equal(logits_of(tmp_path / "ours", VOCAB), logits_of(tmp_path / "theirs", VOCAB))


@pytest.mark.parametrize("config", [tiny_config(), alibi_config()], ids=["tiny", "alibi"])
def test_our_own_format_is_written_as_it_is(config: dict[str, Any], tmp_path: Path) -> None:
    convert(save_tiny(tmp_path / "a", config, shards=3), tmp_path / "b")
    expected = dict(tiny_model(config).state_dict())
    (file,) = (tmp_path / "b").glob("*.safetensors")
    actual = load_file(file)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config


def test_shards_keep_to_their_size_and_the_index_names_each_tensor(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "out", shard_bytes=3000)
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == done.shards > 2
    total, found = 0, {}
    for file in files:
        tensors = load_file(file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 3000 or len(tensors) == 1
        total += size
        found.update(dict.fromkeys(tensors, file.name))
    assert index == {"metadata": {"total_size": total}, "weight_map": found}
    assert (done.bytes, done.tensors) == (total, len(found))


def test_what_belongs_to_the_model_is_copied_and_nothing_else(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    assert contents(tmp_path / "out").keys() == {
        "config.json", INDEX_NAME, "model-00001-of-00001.safetensors", "tokenizer.json", "generation_config.json",
    }  # fmt: skip
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_token_ids_and_dtype_come_along(tmp_path: Path) -> None:
    save_foreign(tmp_path / "theirs", "llama")
    convert(tmp_path / "theirs", tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == ["TiersForCausalLM"]
    assert config["model_type"] == "tiers"
    assert config["dtype"] == "float32"
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, 1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_another_dtype_may_be_asked_for(dtype: torch.dtype, source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", dtype=dtype)
    state = tiny_model(SMALL).state_dict()
    actual = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert all(torch.equal(actual[name], tensor.to(dtype)) for name, tensor in state.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_each_tensor_keeps_its_dtype_and_lies_where_it_can_be_mapped(tmp_path: Path) -> None:
    state = dict(tiny_model(SMALL).state_dict())
    kinds = [torch.float16, torch.float64, torch.bfloat16, torch.float32]
    state = {name: tensor.to(kinds[i % 4]) for i, (name, tensor) in enumerate(state.items())}
    convert(save_model(tmp_path / "a", SMALL, state), tmp_path / "b")
    with safe_open(tmp_path / "b" / "model-00001-of-00001.safetensors", framework="pt") as reader:
        for name, tensor in state.items():
            assert torch.equal(reader.get_tensor(name), tensor)
            assert reader.get_tensor(name).dtype == tensor.dtype


def test_surplus_vocabulary_rows_are_not_written(tmp_path: Path) -> None:
    state = dict(tiny_model(SMALL).state_dict())
    state["embed_tokens.weight"] = torch.cat((state["embed_tokens.weight"], torch.ones(8, 16)))
    convert(save_model(tmp_path / "a", SMALL, state), tmp_path / "b")
    assert load_file(tmp_path / "b" / "model-00001-of-00001.safetensors")["embed_tokens.weight"].shape == (24, 16)


def test_a_tied_head_is_not_written(tmp_path: Path) -> None:
    config = {**SMALL, "tie_word_embeddings": True}
    state = dict(tiny_model(config).state_dict())
    state["lm_head.weight"] = state["embed_tokens.weight"].clone()
    convert(save_model(tmp_path / "a", config, state), tmp_path / "b", shard_bytes=1)
    assert "lm_head.weight" not in json.loads((tmp_path / "b" / INDEX_NAME).read_text())["weight_map"]
    assert torch.equal(logits_of(tmp_path / "b"), logits_of(tmp_path / "a"))


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    config = {**SMALL, "tie_word_embeddings": True}
    state = dict(tiny_model(config).state_dict())
    state["lm_head.weight"] = state["embed_tokens.weight"] + 1
    with pytest.raises(CheckpointError, match="differs from embed_tokens"):
        convert(save_model(tmp_path / "a", config, state), tmp_path / "b", shard_bytes=1)
    assert_does_not_load(tmp_path / "b")


def test_files_of_torch_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    torch.save(dict(tiny_model(SMALL).state_dict()), folder / "pytorch_model.bin")
    convert(folder, tmp_path / "b")
    assert torch.equal(logits_of(tmp_path / "b"), logits_of(folder))


def test_the_same_source_makes_the_same_bytes(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "a", shard_bytes=3000)
    convert(source, tmp_path / "b", shard_bytes=3000)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_memory_is_that_of_a_tensor_not_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anonymous memory: pages of mapped files are the kernel's to take back."""

    def anonymous() -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc to measure memory")
    # Ten tensors of 4 MiB among others; one shard holds them all, and bfloat16 makes a copy of each.
    config = {**SMALL, "vocab_size": 65536, "num_hidden_layers": 8, "ffn": {"kind": "gelu", "intermediate_size": 65536}}
    folder = save_tiny(tmp_path / "a", config)
    peak, write = [0], os.pwrite

    def measured(*arguments: Any) -> int:
        peak[0] = max(peak[0], anonymous())
        return write(*arguments)

    monkeypatch.setattr(module.os, "pwrite", measured)
    before = anonymous()
    convert(folder, tmp_path / "b", dtype=torch.bfloat16)
    assert (folder / "model.safetensors").stat().st_size > 64 * 2**20
    assert peak[0] - before < 20 * 2**20


# ---- stopped at any point -------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone: nothing that it would do afterwards happens."""


class Dying:
    """`os` whose `number`-th call that changes something is the last one; a write stops half way."""

    def __init__(self, number: int, error: Callable[[], BaseException] = Killed, stays_dead: bool = True) -> None:
        self.left, self.error, self.stays_dead = number, error, stays_dead

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        if name not in ("pwrite", "fsync", "replace", "unlink", "open"):
            return function

        def call(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0 or (self.left < 0 and self.stays_dead):
                if self.left == 0 and name == "pwrite":
                    os.pwrite(arguments[0], arguments[1][: len(arguments[1]) // 2], arguments[2])
                raise self.error()
            return function(*arguments, **options)

        return call


def assert_does_not_load(folder: Path) -> None:
    with pytest.raises(TiersError) as caught:
        open_model(folder)
    one_paragraph(caught.value)


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_a_run_killed_at_any_step_leaves_nothing_that_loads_and_goes_on(
    twice: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_require_room", lambda *arguments: None)
    convert(source, tmp_path / "whole", shard_bytes=6000)
    expected = contents(tmp_path / "whole")
    assert sum(name.endswith(".safetensors") for name in expected) > 1
    finished, loading, step = False, 0, 0
    # Killed twice, only every third step is tried, and the second time comes soon after.
    while not finished:
        step += 3 if twice else 1
        out = tmp_path / f"{step}"
        for number in (step, 5) if twice else (step,):
            monkeypatch.setattr(module, "os", Dying(number))
            try:
                convert(source, out, shard_bytes=6000)
                finished = True
            except Killed:
                pass
            finally:
                monkeypatch.setattr(module, "os", os)
            if out.exists() and "config.json" in contents(out):
                # It is the last file: all else is there and was verified.
                assert contents(out).items() >= expected.items()
                loading += 1
                if JOURNAL not in contents(out):
                    break
            elif out.exists():
                assert_does_not_load(out)
        # The journal goes last; without it there is nothing to go on with.
        if not finished and (not out.exists() or contents(out) != expected):
            convert(source, out, shard_bytes=6000)
        assert contents(out) == expected
        shutil.rmtree(out)
    assert step > 30
    assert loading < 10


def test_shards_that_are_whole_are_not_written_again(source: Path, tmp_path: Path) -> None:
    stop(source, tmp_path / "out", after=2)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(before) == 2
    convert(source, tmp_path / "out", shard_bytes=3000)
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == time for name, time in before.items())
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(source))


def stop(source: Path, out: Path, after: int) -> None:
    """Run a conversion until some shards are written."""
    write, count = module._write_shard, [0]

    def limited(*arguments: Any) -> str:
        if count[0] == after:
            raise Killed
        count[0] += 1
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_write_shard", limited)
        with pytest.raises(Killed):
            convert(source, out, shard_bytes=3000)


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_a_shard_that_was_damaged_meanwhile_is_written_again(damage: str, source: Path, tmp_path: Path) -> None:
    stop(source, tmp_path / "out", after=2)
    file = tmp_path / "out" / sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()
    if damage != "gone":
        file.write_bytes(data if damage == "flipped" else data[:-3])
    convert(source, tmp_path / "out", shard_bytes=3000)
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(source))


@pytest.mark.parametrize(
    ("options", "named"),
    [({"shard_bytes": 4000}, "options shard_size"), ({"dtype": torch.float16}, "options dtype")],
    ids=["shard size", "dtype"],
)
def test_other_options_than_those_begun_with_are_refused(
    options: dict[str, Any], named: str, source: Path, tmp_path: Path
) -> None:
    stop(source, tmp_path / "out", after=1)
    with pytest.raises(CheckpointError, match="Repeat the command as it was, or remove") as caught:
        convert(source, tmp_path / "out", **{"shard_bytes": 3000, **options})
    assert named in one_paragraph(caught.value)


@pytest.mark.parametrize("change", ["time", "tensor", "config", "tokenizer"])
def test_another_source_than_that_begun_with_is_refused(change: str, source: Path, tmp_path: Path) -> None:
    stop(source, tmp_path / "out", after=1)
    file = source / "model-00002-of-00002.safetensors"
    if change == "time":
        os.utime(file, (1, 1))
    elif change == "tensor":
        save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)
    elif change == "config":
        config = {**SMALL, "logits_multiplier": 2.0}
        (source / "config.json").write_text(json.dumps(config))
    else:
        (source / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"was begun with something else \(source") as caught:
        convert(source, tmp_path / "out", shard_bytes=3000)
    one_paragraph(caught.value)
    assert_does_not_load(tmp_path / "out")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"job": {}, "done": {}}', '{"job": 1, "done": 2}', "[" * 5000])
def test_a_journal_that_cannot_be_read_is_refused(text: str, source: Path, tmp_path: Path) -> None:
    stop(source, tmp_path / "out", after=1)
    (tmp_path / "out" / JOURNAL).write_text(text)
    with pytest.raises(CheckpointError, match="start anew") as caught:
        convert(source, tmp_path / "out", shard_bytes=3000)
    one_paragraph(caught.value)


def test_a_bit_that_does_not_read_back_is_found(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that forgets: one bit changes after the checksum was taken."""
    checksum = module._checksum

    def forgetful(file: Path) -> str:
        found = checksum(file)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        return found

    monkeypatch.setattr(module, "_checksum", forgetful)
    with pytest.raises(CheckpointError, match="does not read back as it was written") as caught:
        convert(source, tmp_path / "out")
    one_paragraph(caught.value)
    assert_does_not_load(tmp_path / "out")


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    state = dict(tiny_model(SMALL).state_dict())
    state["norm.weight"][3] = float("nan")
    with pytest.raises(CheckpointError, match=r"norm.weight has 1 of 16 values that are not finite"):
        convert(save_model(tmp_path / "a", SMALL, state), tmp_path / "b")
    assert_does_not_load(tmp_path / "b")


# ---- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [".", "inside", "a/b", "../source", "../link/inside"])
def test_a_place_in_the_source_is_refused(out: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    before = contents(source).keys()
    with pytest.raises(CheckpointError, match="expected a place outside"):
        convert(source, source / out)
    assert contents(source).keys() == before


def test_a_folder_that_holds_something_is_refused(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(CheckpointError, match="is not empty"):
        convert(source, tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_a_file_in_the_way_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        convert(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(source, tmp_path / "out" / "deeper")


def test_a_name_that_cannot_be_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        convert(source, tmp_path / ("x" * 300))
    with pytest.raises(CheckpointError):
        convert(source, tmp_path / "a\0b")


def test_a_second_run_at_the_same_time_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    refused: list[str] = []

    def second() -> None:
        try:
            convert(source, tmp_path / "out")
        except CheckpointError as error:
            refused.append(one_paragraph(error))

    with module._locked(tmp_path / "out"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert "another tiers convert" in refused[0]
    convert(source, tmp_path / "out")


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_link_out_of_the_folder_is_not_followed(name: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="outside of"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_refuses_leaves_no_half_checkpoint(
    number: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 4, 9, 14, 20):
        out = tmp_path / f"{number}-{step}"
        error = OSError(number, os.strerror(number))
        monkeypatch.setattr(module, "os", Dying(step, lambda error=error: error, stays_dead=False))
        with pytest.raises(CheckpointError, match="cannot be written") as caught:
            convert(source, out, shard_bytes=6000)
        monkeypatch.setattr(module, "os", os)
        assert os.strerror(number) in one_paragraph(caught.value)
        assert_does_not_load(out)
        assert not list(out.glob("*.part"))
        convert(source, out, shard_bytes=6000)
        assert torch.equal(logits_of(out), logits_of(source))


def test_a_disk_with_too_little_room_is_refused_before_writing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match="but the disk has 1000 left") as caught:
        convert(source, tmp_path / "out")
    one_paragraph(caught.value)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert_does_not_load(tmp_path / "out")


# ---- command --------------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_did(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["convert", str(source), str(tmp_path / "out"), "--shard-size", "3KB", "--dtype", "bfloat16"])
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{tmp_path / 'out'}: 12 tensors")
    assert "family tiers" in captured.out
    assert not captured.err, "no bar where nobody is watching"


def test_the_command_refuses_in_one_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", str(source), str(source / "out")])
    assert ended.value.code == 1
    errors = capsys.readouterr().err
    assert errors.startswith("tiers: error: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1), ("7B", 7), ("3KB", 3000), ("500MB", 5 * 10**8), ("4GB", 4 * 10**9), ("2GiB", 2**31), ("1TB", 10**12)],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert cli._size(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "4.5GB", "GB", "4 GB", "4gb", "1e9", "9" * 50, "4XB"])
def test_what_is_no_size_is_refused(text: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", str(source), str(tmp_path / "out"), f"--shard-size={text}"])
    assert ended.value.code == 2


def test_a_bar_is_shown_on_a_terminal(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.sys.stderr, "isatty", lambda: True)
    convert(source, tmp_path / "out")
    errors = capsys.readouterr().err
    assert "writing: 100%" in errors
    assert "verifying: 100%" in errors


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 3)])
def test_shards_of_a_megatron_training_become_one_model(tp: int, pp: int, tmp_path: Path) -> None:
    """C7: whatever the ranks of the training, the same bytes."""
    save_megatron(tmp_path / "source", tp, pp)
    convert(tmp_path / "source", tmp_path / "out")
    assert torch.equal(logits_of(tmp_path / "out", VOCAB), logits_of(tmp_path / "source", VOCAB))
    save_megatron(tmp_path / "one", 1)
    convert(tmp_path / "one", tmp_path / "other")
    assert load_file(tmp_path / "out" / FIRST).keys() == load_file(tmp_path / "other" / FIRST).keys()
    for name, tensor in load_file(tmp_path / "other" / FIRST).items():
        assert torch.equal(load_file(tmp_path / "out" / FIRST)[name], tensor)
