"""Two thousand damaged or hostile folders: each loads as the model it is, or is refused in one paragraph.

The tries run in two processes of their own (`python test_fuzz.py FOLDER FIRST LAST`), where every file that Python opens
is seen, the memory of each try is measured, and one that hangs ends the process with a traceback. A try is made from its
number alone: `python test_fuzz.py FOLDER 17 18` repeats the seventeenth, with what happened.
"""

import collections
import copy
import faulthandler
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiers.reference.checkpoint import INDEX_NAME
from tiers.reference.errors import TiersError
from tiers.reference.family import SHIPPED, shipped
from tiers.reference.load import load_model, open_model
from tiers.reference.testing.tiny import save_model, tiny_config, tiny_model

TRIES, WORKERS = 2000, 2
SECONDS = 10
# Beside twice the folder: what Python and torch take for themselves.
ALLOWANCE = 48 * 2**20
LONGEST_MESSAGE = 1500
IDS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8)

# Does something to a folder; says whether another model may be the right result.
Mutation = Callable[[random.Random, Path], bool]


# ---- folders --------------------------------------------------------------------------------------------------------


def small_config() -> dict[str, Any]:
    """Our format: a gate, a window, top-k, unequal groups, in a few kilobytes."""
    return tiny_config(
        vocab_size=24,
        hidden_size=16,
        num_hidden_layers=2,
        max_position_embeddings=64,
        mixer={
            "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "head_map": [0, 1, 0, 0],
            "pattern": {"kind": "topk", "k": 2, "sink": 1, "window": 2},
            "position": {"kind": "rope", "theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        ffn={"kind": "swiglu", "intermediate_size": 24},
        norm={"kind": "rms", "eps": 1e-5},
        layers={
            "0": {"mixer": {"pattern": {"kind": "window", "window": 4, "sink": 1}}},
            "1": {"gate": {"mode": "sigmoid", "source": "bank", "slots": 3}},
        },
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
        logits_multiplier=0.5,
    )  # fmt: skip


def llama_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 24, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32,
        },
    }  # fmt: skip


def llama_state() -> dict[str, Tensor]:
    """Weights under the names of transformers."""
    config = tiny_config(
        vocab_size=24, hidden_size=16, num_hidden_layers=2, layers={}, ffn={"kind": "swiglu", "intermediate_size": 24},
        mixer={"num_heads": 4, "num_kv_heads": 2, "head_dim": 4},
    )  # fmt: skip
    names = {
        ".mixer_norm.": ".input_layernorm.", ".ffn_norm.": ".post_attention_layernorm.", ".mixer.": ".self_attn.",
        ".ffn.": ".mlp.",
    }  # fmt: skip
    state = {}
    for name, tensor in tiny_model(config).state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        state[name if name.startswith("lm_head") else f"model.{name}"] = tensor
    return state


def make_folders(root: Path) -> None:
    """The folders that tries begin with, and one that nothing may read."""
    from tiers.reference.testing.foreign import MODELS, save_foreign

    save_model(root / "own", small_config(), dict(tiny_model(small_config()).state_dict()), shards=2)
    save_model(root / "llama", llama_config(), llama_state(), shards=2)
    for name in ("own", "llama"):
        shutil.copytree(root / name, root / "outside" / name)
        for file in (root / "outside" / name).glob("*.safetensors"):
            save_file({key: tensor + 0.5 for key, tensor in load_file(file).items()}, file)
    for family in shipped():
        name = next((model for model in MODELS if model.split()[0] == family.name), None)
        if name is not None:
            save_foreign(root / "families" / family.name, name, shard_size="1GB")


# ---- values ---------------------------------------------------------------------------------------------------------

DEEP = "@deep@"
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 16, 1.5, -0.5, 0.0, -0.0, 1e-300, 1e-20, 1e-15, 1e-9, 1e9, 1e15, 1e20, 1e308, float("inf"), float("nan"),
    2**31 - 1, 2**31, 2**53, 2**63, 10**30, 10**400, "", "x", "16", "silu", "a" * 5000, "\n", "\0", "\ud800", "../../etc/passwd",
    "=", "= 1 / 0", [], [1], [[]], [None], ["x"], ["full_attention"], [0] * 1000, {}, {"a": 1}, {"kind": "rope"},
    {"kind": []}, {"rope_type": "yarn"}, {"factor": float("inf")}, {"full_attention": {}}, [{"a": {"b": {}}}], DEEP,
]  # fmt: skip


def hostile(rng: random.Random) -> Any:
    """One of HOSTILE; a copy, since what is done to it later must not change the tries that follow."""
    return copy.deepcopy(rng.choice(HOSTILE))


def to_json(value: Any, rng: random.Random) -> str:
    depth = rng.choice((30, 100, 900, 100_000))
    return json.dumps(value).replace(f'"{DEEP}"', "[" * depth + "]" * depth)


def containers(value: Any) -> Iterator[Any]:
    """Every object and list within a value, itself included."""
    if isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers(item)


def mutate_value(rng: random.Random, value: Any) -> None:
    """Change one thing somewhere in a JSON value."""
    inner = [item for item in containers(value) if item]
    if not inner:
        return
    place = rng.choice(inner)
    key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
    what = rng.randrange(8)
    if what == 0:
        del place[key]
    elif what == 1 and isinstance(place, dict):
        place[rng.choice([f"{key}s", key[:-1], key.upper(), f"x.{key}", "", "\n" * 3, "k" * 5000, f"n_{key}"])] = (
            place.pop(key)
        )
    elif what == 2 and isinstance(place, dict):
        place[
            rng.choice(["n_layers", "n_heads", "dim", "rope_scaling", "text_config", "layers", "quantization_config"])
        ] = hostile(rng)
    elif what == 3 and isinstance(place[key], int | float) and not isinstance(place[key], bool):
        place[key] = rng.choice(
            [place[key] * 2, place[key] + 1, place[key] - 1, -place[key], place[key] / 3, str(place[key])]
        )
    elif what == 4:
        place[key] = [place[key]]
    elif what == 5:
        place[key] = {"": place[key]}
    else:
        place[key] = hostile(rng)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut, repeat or insert a few bytes."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if not result:
            break
        at = rng.randrange(len(result))
        what = rng.randrange(5)
        if what == 0:
            result[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del result[at : at + rng.randrange(1, 20)]
        elif what == 2:
            result[at:at] = result[at : at + rng.randrange(1, 200)]
        elif what == 3:
            result[at:at] = rng.randbytes(rng.randrange(1, 9))
        else:
            result[at] = rng.choice(b'0"{}[],:\\-9e. \n\x00\xff')
    return bytes(result)


# ---- mutations of files ---------------------------------------------------------------------------------------------


def any_file(rng: random.Random, folder: Path, pattern: str = "*") -> Path:
    return rng.choice(sorted(path for path in folder.glob(pattern) if path.is_file()))


def truncate(rng: random.Random, folder: Path) -> bool:
    file = any_file(rng, folder)
    size = file.stat().st_size
    os.truncate(file, rng.choice((0, 1, 7, 8, 9, size // 2, size - 1, rng.randrange(size))))
    # A config of a few bytes less may be another one.
    return file.name == "config.json"


def extend(rng: random.Random, folder: Path) -> bool:
    file = any_file(rng, folder)
    with file.open("ab") as stream:
        stream.write(rng.choice((b"\0", b" ", b"\n{}", rng.randbytes(9), b"\0" * 100_000)))
    if rng.random() < 0.2:
        os.truncate(file, 2**40)
    return False


def damage(rng: random.Random, folder: Path) -> bool:
    """Bytes of a file: what is flipped in a tensor is another tensor."""
    file = any_file(rng, folder)
    file.write_bytes(mutate_bytes(rng, file.read_bytes()))
    return True


def damage_header(rng: random.Random, folder: Path) -> bool:
    file = any_file(rng, folder, "*.safetensors")
    data = file.read_bytes()
    length = 8 + struct.unpack("<Q", data[:8])[0]
    file.write_bytes(mutate_bytes(rng, data[:length]) + data[length:])
    return True


def rename(rng: random.Random, folder: Path) -> bool:
    file = any_file(rng, folder)
    other = [
        "x",
        "x.safetensors",
        "consolidated.safetensors",
        ".safetensors",
        "model.bin",
        "model.gguf",
        "x.pt",
        "Config.json",
    ]
    file.rename(folder / rng.choice([*other, INDEX_NAME, "config.json", f"{file.name}.bak"]))
    return False


def drop(rng: random.Random, folder: Path) -> bool:
    any_file(rng, folder).unlink()
    return False


def duplicate(rng: random.Random, folder: Path) -> bool:
    file = any_file(rng, folder)
    names = ["copy.safetensors", "a.safetensors", "consolidated.safetensors", "pytorch_model.bin", "x.gguf", "z.json"]
    shutil.copyfile(file, folder / rng.choice(names))
    if rng.random() < 0.5:
        (folder / INDEX_NAME).unlink(missing_ok=True)
    return False


def exchange(rng: random.Random, folder: Path) -> bool:
    """Two files under each other's name."""
    a, b = any_file(rng, folder), any_file(rng, folder)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    return False


def replace_file(rng: random.Random, folder: Path) -> bool:
    """Something that is no file, or lies elsewhere, by the name of a file."""
    file = any_file(rng, folder)
    content = file.read_bytes()
    file.unlink()
    outside = folder.parents[1] / "outside" / ("own" if "mixer" in content.decode("latin1") else "llama") / file.name
    what = rng.randrange(9)
    if what == 0:
        file.mkdir()
    elif what == 1:
        os.mkfifo(file)
    elif what == 2:
        file.symlink_to(file.name)
    elif what == 3:
        file.symlink_to("nothing")
    elif what == 4:
        file.symlink_to(outside)
    elif what == 5:
        file.symlink_to(os.path.relpath(outside, folder))
    elif what == 6:
        (folder / "in").symlink_to(outside.parent)
        file.symlink_to(Path("in") / file.name)
    elif what == 7:
        # A link that stays in the folder is fine.
        (folder / "deeper").mkdir()
        (folder / "deeper" / "file").write_bytes(content)
        file.symlink_to(Path("deeper") / "file")
    else:
        file.symlink_to(rng.choice(("/dev/zero", "/dev/stdin", "/etc/passwd", "/proc/self/mem")))
    return False


def mutate_index(rng: random.Random, folder: Path) -> bool:
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    outside = folder.parents[1] / "outside" / "own" / "model-00001-of-00002.safetensors"
    names = list(index["weight_map"])
    what = rng.randrange(4)
    if what == 0:
        elsewhere = [
            "..",
            ".",
            "/",
            "",
            "\0",
            "../outside/own/model-00001-of-00002.safetensors",
            str(outside),
            "a/b",
            "a\\b",
        ]
        index["weight_map"][rng.choice(names)] = rng.choice(
            [*elsewhere, "config.json", "x" * 300, "~", "model.safetensors"]
        )
    elif what == 1:
        index["weight_map"][rng.choice(names)] = rng.choice(sorted(set(index["weight_map"].values())))
    elif what == 2:
        index["weight_map"][rng.choice(["extra", "model.norm.bias", "", "x" * 5000])] = rng.choice(
            list(index["weight_map"].values())
        )
    else:
        mutate_value(rng, index)
    path.write_text(to_json(index, rng), errors="surrogatepass")
    return False


# ---- mutations of tensors -------------------------------------------------------------------------------------------


def mutate_tensors(rng: random.Random, folder: Path) -> bool:
    """One tensor of a file: gone, renamed, twice, of another shape or dtype, with other values."""
    file = any_file(rng, folder, "*.safetensors")
    state = load_file(file)
    name, other = rng.choice(sorted(state)), rng.choice(sorted(state))
    tensor, changed = state[name].clone(), False
    what = rng.randrange(15)
    if what == 0:
        del state[name]
    elif what == 1:
        new = [
            f"module.{name}",
            f"{name}s",
            name.upper(),
            name.replace("0", "1"),
            name.replace("0", "99"),
            name.partition(".")[2],
        ]
        strange = [
            "",
            "x" * 10_000,
            "a\nb",
            "..",
            "lm_head.weight",
            "model.lm_head.weight",
            "__metadata",
            "0",
            f"{name}.lora_A",
        ]
        state[rng.choice([*new, *strange, f"vision.{name}", f"x.{name}.weight"])] = state.pop(name)
        changed = True
    elif what == 2:
        state[rng.choice([f"copy.{name}", f"{name}.0", f"module.{name}", f"a.b.{name}"])] = tensor
    elif what == 3:
        state = {
            f"{rng.choice(('module.', 'base.', 'model.', '_orig_mod.'))}{key}": value for key, value in state.items()
        }
    elif what == 4:
        state[name] = tensor.reshape(tensor.shape[::-1]).contiguous()
    elif what == 5:
        shapes = [(-1,), (1, *tensor.shape), (*tensor.shape, 1)]
        state[name] = tensor.reshape(rng.choice(shapes)).contiguous()
    elif what == 6:
        state[name] = rng.choice(
            [tensor[:0], tensor[:1], tensor[..., :-1], torch.tensor(1.0), torch.ones(3, 0, 2)]
        ).contiguous()
    elif what == 7:
        state[name] = torch.cat((tensor, tensor))
    elif what == 8:
        bad = rng.choice((float("nan"), float("inf"), -float("inf")))
        tensor.view(-1)[rng.randrange(tensor.numel())] = bad
        state[name] = tensor
    elif what == 9:
        state[name], changed = tensor * rng.choice((0.0, -1.0, 1e3, 1e30, 1e-30)), True
    elif what == 10:
        state[name], state[other] = state[other], state[name]
        changed = True
    elif what == 11:
        kinds = (torch.int8, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
        state[name] = tensor.to(rng.choice(kinds))
    elif what == 12:
        # Rounded numbers are other numbers.
        state[name], changed = tensor.to(rng.choice((torch.float16, torch.bfloat16, torch.float64))), True
    elif what == 13:
        state[f"{name}_scale"] = torch.ones(1)
    else:
        state[rng.choice(["model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq"])] = torch.ones(2)
    save_file(state, file)
    if rng.random() < 0.7:
        (folder / INDEX_NAME).unlink(missing_ok=True)
    return changed


def mutate_header(rng: random.Random, folder: Path) -> bool:
    """JSON values of a header, with lengths that fit."""
    file = any_file(rng, folder, "*.safetensors")
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    entry = rng.choice(entries)
    what = rng.randrange(6)
    if what == 0:
        entry["shape"] = rng.choice(
            [
                [2**62, 2],
                [-1],
                [0, 2**70],
                [0, 2**62, 2**62],
                [1.5],
                ["4"],
                [True],
                "16",
                [10**400],
                entry["shape"][::-1],
            ]
        )
    elif what == 1:
        entry["data_offsets"] = rng.choice(
            [[0, 2**63], [-4, 0], [0], [0, 0], [8, 4], "01", [0, 10**30], [0.0, 4.0], [None, 1]]
        )
    elif what == 2:
        entry["dtype"] = rng.choice(
            ["F32", "F64", "I32", "F16", "BF16", "F8_E4M3", "BOOL", "f32", "", 7, None, [], "C64", "F4"]
        )
    elif what == 3:
        a, b = rng.choice(entries), rng.choice(entries)
        a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]
    else:
        mutate_value(rng, header)
    text = to_json(header, rng).encode(errors="surrogatepass")
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return True


# ---- mutations of config.json and family files ----------------------------------------------------------------------


def mutate_config(rng: random.Random, folder: Path) -> bool:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutate_value(rng, config)
    path.write_text(to_json(config, rng))
    return True


def mutate_config_text(rng: random.Random, folder: Path) -> bool:
    path = folder / "config.json"
    text = path.read_text()
    what = rng.randrange(6)
    if what == 0:
        path.write_text("[" * 100_000)
    elif what == 1:
        # A key that comes twice.
        lines = text.splitlines()
        lines.insert(1, rng.choice([line for line in lines[1:-1] if ":" in line and line.rstrip().endswith(",")]))
        path.write_text("\n".join(lines))
    elif what == 2:
        path.write_bytes(
            rng.choice(
                (b"", b"null", b"[]", b"{}", b"7", b'"x"', b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf" + text.encode())
            )
        )
    elif what == 3:
        path.write_text(text.rstrip()[:-1] + "," + ",".join(f'"k{i}": {i}' for i in range(20_000)) + "}")
    else:
        path.write_bytes(mutate_bytes(rng, text.encode()))
    return True


def mutate_field(rng: random.Random, folder: Path) -> bool:
    """A hostile value for a field that a family reads, by its own name or by one of its others."""
    from tiers.reference.family import _mentioned, find_family
    from tiers.reference.fields import ALIASES

    path = folder / "config.json"
    config = json.loads(path.read_text())
    names = sorted(_mentioned(find_family(config).table) - {"i"})
    name = rng.choice([*names, *config])
    place, leaf = config, name
    if "." in name and isinstance(config.get(name.partition(".")[0]), dict):
        place, leaf = config[name.partition(".")[0]], name.partition(".")[2]
    if rng.random() < 0.2:
        leaf = rng.choice([leaf, *ALIASES.get(leaf, ())])
    place[leaf] = hostile(rng)
    path.write_text(to_json(config, rng))
    return True


TOML_VALUES = (
    "0", "-1", "1e400", "nan", "inf", "true", "''", "[]", "{}", "[[1]]", "[1, 'a']", "{ a = 1 }", "1979-05-27", "07:32:00", "9" * 500,
    "[" * 40 + "]" * 40, "'''\n'''", "{ to = 'norm.weight', layout = [] }", "{ drop = 1 }", "{ to = [], drop = '' }", "{ to = 'x', add = nan }",
    "{ to = ['norm.{p}', 'norm.{q}'], layout = 'copies' }", "{ to = 'norm.weight', pairing = 'half' }", "{ to = 'a', when = 'x.y.z' }",
    "{ to = 'a', when = 'layers' }", "'= hidden_size'", "'= missing_field'",
)  # fmt: skip
EXPRESSIONS = (
    "", "1", "None", "'x'", "1 / 0", "9 ** 9", "9" * 300, "1e308 * 1e308", "-" * 400 + "1", "(" * 150 + "1" + ")" * 150, "a" + ".a" * 200,
    "not " * 100 + "1", "[" * 80 + "]" * 80, "{[]: 1}", "{'a': 1}['b']", "[1][5]", "[1]['x']", "b'x'", "1j", "...", "f'{1}'", "__import__('os')",
    "().__class__", "(lambda: 1)()", "[i for i in [1]]", "rope(1)", "rope(style=[])", "rope(layer_type={})", "rope(partial=1e308)", "context(1)",
    "gated([], 1)", "gated('silu', 'x')", "plain('gelu', None)", "alibi_slopes(10**9)", "alibi_slopes(-1)", "sqrt(-1)", "sqrt('x')", "len(1)",
    "min()", "max([])", "int('x')", "int(1e308)", "int('9' )", "float('nan')", "float(10)", "given(1)", "given('hidden_size')", "hidden_size",
    "hidden_size.x", "layer_types", "layer_types[i]", "i", "vocab_size // 0", "vocab_size < 'x'", "1 in 2", "'a' in 'abc'", "*[1]", "rope(**{})",
    "hidden_size * 10 ** 9", "rope(theta=-1)", "rope(theta='x')", "1 if", "'\\ud800'", "num_attention_heads and {}", "'a' * 9", "'a' + 'b'",
)  # fmt: skip
TEMPLATES = (
    "{i}",
    "{p}",
    "{all}",
    "{x}",
    "{m:}",
    "{m:a|b}",
    "{i:a}",
    "{",
    "}",
    "{i}{i}",
    "{all}{all}",
    ".",
    "",
    "(",
    ".*",
    "\\\\",
    "é",
    "x" * 3000,
)


def mutate_family(rng: random.Random, folder: Path) -> bool:
    """A user's own family file, made of the shipped one for this model."""
    family = next(name for name in (folder / "family").read_text().split())
    lines = (SHIPPED / f"{family}.toml").read_text().splitlines()
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(lines))
        what = rng.randrange(9)
        if what == 0:
            del lines[at]
        elif what == 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif what == 2 and " = " in lines[at]:
            lines[at] = f"{lines[at].partition(' = ')[0]} = {rng.choice(TOML_VALUES)}"
        elif what == 3:
            lines[at] = mutate_bytes(rng, lines[at].encode()).decode(errors="replace")
        elif what == 4:
            extra = [
                "extends = '../llama'",
                "extends = 'mine'",
                "extends = '/etc/passwd'",
                "extends = 7",
                "unknown = 1",
                "layers = 7",
            ]
            lists = [
                "optional = [[]]",
                "architectures = [[1]]",
                "aliases = 5",
                "refuse = [1]",
                "[[layers]]",
                "[[refuse]]\nwhen = '='",
            ]
            lines.insert(
                0,
                rng.choice([*extra, *lists, "aliases = { vocab_size = 'n_vocab' }", "aliases = { vocab_size = [1] }"]),
            )
        elif what in (5, 6):
            fields = [i for i, line in enumerate(lines) if '"= ' in line]
            if fields:
                at = rng.choice(fields)
                new = rng.choice(EXPRESSIONS).replace("\\", "\\\\").replace('"', "'")
                lines[at] = re.sub(r'"= [^"]*"', lambda found, new=new: f'"= {new}"', lines[at], count=1)
        elif what == 7:
            lines[at] = re.sub(r"\{[a-z]+[^{}=]*\}", lambda found: rng.choice(TEMPLATES), lines[at], count=1)
        else:
            lines[at] = re.sub(
                r"mixer|ffn|qkv_per_group|qkv|copies|q_proj|norm|weight|half|true|false",
                lambda found: rng.choice(
                    ("mixer", "qkv", "halves", "alternating", "k_proj", "norm", "interleaved", "true", "x")
                ),
                lines[at],
                count=1,
            )
    (folder / "mine.toml").write_text("\n".join(lines), errors="replace")
    return True


FILES: tuple[Mutation, ...] = (
    truncate, extend, damage, damage_header, rename, drop, duplicate, exchange, replace_file, replace_file, mutate_index,
    mutate_tensors, mutate_tensors, mutate_tensors, mutate_tensors, mutate_header, mutate_header, mutate_config, mutate_config,
    mutate_config, mutate_config_text,
)  # fmt: skip


# ---- one try --------------------------------------------------------------------------------------------------------


class Watch:
    """Files that Python opens while a folder is in use."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.outside: list[str] = []
        here = Path(__file__).resolve().parents[2]
        self.allowed = [
            os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, here, os.path.dirname(os.__file__))
        ]
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or self.folder is None or not isinstance(arguments[0], str | bytes):
            return
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not any(
            path == base or path.startswith(f"{base}/") for base in (os.path.realpath(self.folder), *self.allowed)
        ):
            self.outside.append(path)


def memory(what: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since `forget_peak`."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(what))


def forget_peak() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def logits_of(model: Any) -> Tensor:
    vocabulary = model.config.vocab_size
    length = min(len(IDS), model.config.max_position_embeddings)
    return model(torch.tensor([i % vocabulary for i in IDS[:length]]))


def attempt(root: Path, number: int, watch: Watch, expected: dict[str, Tensor]) -> tuple[str, str]:
    """Make a folder, damage it, load it; returns what happened and, if it should not have, a report."""
    rng = random.Random(number)
    kind = rng.random()
    families = sorted(path.name for path in (root / "families").iterdir())
    base = rng.choice(("own", "llama")) if kind < 0.6 else f"families/{rng.choice(families)}"
    mutation = rng.choice(FILES) if kind < 0.6 else mutate_field if kind < 0.8 else mutate_family
    work = root / f"work-{os.getpid()}" / "model"
    shutil.copytree(root / base, work)
    own_family = mutation is mutate_family
    if own_family:
        (work / "family").write_text(base.partition("/")[2])
    title = f"try {number}: {mutation.__name__} of {base}"
    try:
        changed = mutation(rng, work)
        size = sum(path.lstat().st_size for path in work.rglob("*"))
        measured = forget_peak()
        before = memory("VmRSS")
        watch.folder, watch.outside = work, []
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        begun = time.monotonic()
        try:
            outcome, report = _load(work, str(work / "mine.toml") if own_family else None, expected[base], changed)
        finally:
            faulthandler.cancel_dump_traceback_later()
            watch.folder = None
        if watch.outside:
            report += f" opened {watch.outside}"
        peak = memory("VmHWM") - before
        if measured and peak > 2 * size + ALLOWANCE:
            report += f" took {peak} bytes for a folder of {size}"
        if time.monotonic() - begun > SECONDS:
            report += " took too long"
        return outcome, f"{title}: {outcome}: {report}" if report else ""
    finally:
        shutil.rmtree(work)


def _load(work: Path, family: str | None, expected: Tensor, changed: bool) -> tuple[str, str]:
    try:
        model = load_model(work, family=family)
    except TiersError as error:
        message = str(error)
        fine = 20 < len(message) < LONGEST_MESSAGE and message.isprintable()
        return "refused", "" if fine else f"message of {len(message)} characters: {message[:300]!r}"
    except Exception:
        return "broken", traceback.format_exc()[-2500:]
    try:
        logits = logits_of(model)
    except Exception:
        return "broken", f"loaded, then {traceback.format_exc()[-1500:]}"
    if torch.equal(logits, expected):
        return "the same", ""
    if not changed:
        return "another model", "but the folder holds the same"
    largest = max(float(parameter.abs().max()) for parameter in model.parameters())
    # Weights may be finite and their products not.
    if logits.isfinite().all() or largest > 1e6:
        return "another model", ""
    return "another model", f"whose logits are not finite, weights up to {largest}"


def main(root: Path, first: int, last: int) -> None:
    """Run some tries; prints a line of JSON for each that went wrong and one with counts."""
    torch.set_num_threads(1)
    watch, counts = Watch(), collections.Counter[str]()
    bases = ["own", "llama", *(f"families/{path.name}" for path in sorted((root / "families").iterdir()))]
    expected = {base: logits_of(load_model(root / base)) for base in bases}
    with torch.inference_mode():
        for number in range(first, last):
            print(json.dumps({"try": number}), flush=True)
            outcome, report = attempt(root, number, watch, expected)
            counts[outcome] += 1
            if report:
                print(json.dumps({"report": report}), flush=True)
            elif last - first == 1:
                print(outcome, file=sys.stderr)
    print(json.dumps({"counts": counts}), flush=True)


# ---- tests ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    make_folders(folder)
    return folder


def test_the_folders_load_without_a_note(root: Path) -> None:
    for name in ("own", "llama"):
        assert not [note for note in open_model(root / name).notes if "stretched" not in note]
        assert not torch.equal(logits_of(load_model(root / name)), logits_of(load_model(root / "outside" / name)))


def refusal(folder: Path, family: Path | None = None) -> str:
    begun = time.monotonic()
    with pytest.raises(TiersError) as caught:
        load_model(folder, family=family and str(family))
    assert time.monotonic() - begun < SECONDS / 2
    return str(caught.value)


@pytest.fixture
def copy_of(root: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: shutil.copytree(root / name, tmp_path / name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000; expected an integer of 1 or more, and at most",
        ),
        ({"num_hidden_layers": 1000}, "25 tensors, but num_hidden_layers in config.json is 1000"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings is 1000000000; expected at most"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000; expected at most"),
        ({"logits_multiplier": 1e30}, "logits_multiplier is 1e+30; expected a number of size 1e-15 to 1e+15"),
        ({"embedding_multiplier": 1e-30}, "embedding_multiplier is 1e-30; expected a number of size 1e-15 to 1e+15"),
        ({"num_hidden_layers": 1000, "layers": {f"{i}-999": {} for i in range(100)}}, "layers overrides more than"),
        ({"x" * 300: 1}, "a key has 300 characters"),
        ({"text": "x" * 9_000_000}, "expected at most 8388608"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_sizes_that_no_model_has_are_refused_at_once(
    changes: dict[str, Any], message: str, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of("own")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    assert message in refusal(folder)


@pytest.mark.parametrize("number", [1e-15, 1e-9, 1e9, 1e15])
def test_any_number_that_is_accepted_keeps_logits_finite(number: float, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("own")
    config = json.loads((folder / "config.json").read_text())
    mixer, loaded = config["mixer"], 0
    rope = {"kind": "rope", "theta": number}
    scalings = [
        {"kind": "linear", "factor": number},
        {"kind": "dynamic", "factor": number, "original_max_position_embeddings": 16},
        {"kind": "yarn", "factor": number, "original_max_position_embeddings": 16},
        {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "attention_factor": number},
        {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "beta_fast": number},
        {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "beta_slow": number},
        {
            "kind": "llama3", "factor": number, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {
            "kind": "llama3", "factor": 2.0, "low_freq_factor": number, "high_freq_factor": number,
            "original_max_position_embeddings": 16,
        },
        {"kind": "ntk", "factor": number},
        {"kind": "ntk", "factor": number, "mixed_b": 0.6},
        {"kind": "ntk", "factor": 4.0, "mixed_b": number},
        {"kind": "ntk_alpha", "alpha": number},
        {"kind": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": number, "mscale_all_dim": 1.0},
        {"kind": "deepseek_yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale_all_dim": number},
        {
            "kind": "longrope", "short_factor": [1.0] * 8, "long_factor": [number] * 8, "original_max_position_embeddings": 16,
        },
        {
            "kind": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "original_max_position_embeddings": 16,
            "long_mscale": number,
        },
    ]  # fmt: skip
    others = [
        {"kind": "alibi", "slopes": [number] * 4, "distance": "sqrt"},
        {"kind": "kerple", "r1": [number] * 4, "r2": [1.0] * 4},
        {"kind": "kerple", "r1": [1.0] * 4, "r2": [number] * 4},
        {"kind": "xpos", "gamma": number},
        {"kind": "xpos", "scale_base": number},
        {"kind": "xpos", "theta": number},
    ]
    names = ("embedding_multiplier", "residual_multiplier", "logits_multiplier", "logits_softcap")
    changes = [{name: sign * number} for name in names for sign in (1, -1)]
    changes += [{"norm": {"kind": "rms", "eps": number}}]
    changes += [{"mixer": {**mixer, name: number}} for name in ("scale", "softcap")]
    changes += [{"mixer": {**mixer, "position": {"kind": "alibi", "slopes": [number] * 4}}}]
    changes += [
        {"mixer": {**mixer, "position": position}}
        for position in (rope, *({**rope, "theta": 1e4, "scaling": s} for s in scalings), *others)
    ]
    for change in changes:
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        try:
            model = load_model(folder)
        except TiersError:
            continue
        assert logits_of(model).isfinite().all(), change
        loaded += 1
    assert loaded > len(changes) // 2


def test_no_pipe_and_no_link_is_read_for_a_family(root: Path, copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy_of("llama")
    os.mkfifo(tmp_path / "pipe.toml")
    assert "no regular file" in refusal(folder, tmp_path / "pipe.toml")
    for parent in ("../llama", "/etc/passwd", "..", ""):
        (tmp_path / "mine.toml").write_text(f"extends = '{parent}'")
        assert "expected the plain name of a family" in refusal(folder, tmp_path / "mine.toml")


def test_damaged_folders_load_as_what_they_are_or_are_refused(root: Path) -> None:
    share = TRIES // WORKERS
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, str(root), str(i * share), str((i + 1) * share)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root,
        )
        for i in range(WORKERS)
    ]  # fmt: skip
    counts, reports = collections.Counter[str](), []
    try:
        for worker in workers:
            out, errors = worker.communicate(timeout=300)
            lines = [json.loads(line) for line in out.splitlines()]
            reports += [line["report"] for line in lines if "report" in line]
            if worker.returncode:
                reports.append(
                    f"{lines[-1] if lines else 'start'}: process ended with {worker.returncode}: {errors[-3000:]}"
                )
            counts.update(*(line["counts"] for line in lines if "counts" in line))
    finally:
        for worker in workers:
            worker.kill()
    assert not reports, f"{len(reports)} tries went wrong:\n" + "\n".join(reports[:20])
    assert counts.total() == TRIES
    # Tries that are all refused, or all load, would show little.
    assert counts["refused"] > TRIES // 3
    assert counts["the same"] > TRIES // 20
    assert counts["another model"] > TRIES // 50


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
