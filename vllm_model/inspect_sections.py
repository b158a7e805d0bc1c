"""The sections of `tiers inspect`, each made by itself out of an opened folder; docs/inspect.md describes them."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tiers.reference import fields
from tiers.reference.analysis.coverage import Coverage, coverage
from tiers.reference.analysis.families import headless, named_in
from tiers.reference.analysis.files import bytes_of, dtype_name, dtypes
from tiers.reference.analysis.geometry import contradictions, geometry
from tiers.reference.analysis.sizes import sizes
from tiers.reference.analysis.tensor_parallel import RANKS, cuts, tensor_parallel_misfit
from tiers.reference.analysis.unusual import unusual
from tiers.reference.analysis.vocabulary import token_ids, vocabulary, vocabulary_problems
from tiers.reference.checkpoint import listed
from tiers.reference.config import Moe
from tiers.reference.family import shipped
from tiers.vllm_model.dispatch import Where, resolve, table
from tiers.vllm_model.inspect_folder import Opened
from tiers.vllm_model.inspect_stock import stock, vllm_architectures
from tiers.vllm_model.plan import AUTO, TierPlan

# Numbers of ranks whose cuts are shown.
SHOWN_SIZES = (1, 2, 4, 8)


def _plain(value: Any) -> Any:
    """Dataclasses as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _family(opened: Opened, strict: bool) -> Any:
    families = (*shipped(), *((opened.family,) if opened.family else ()))
    known = {architecture for family in families for architecture in family.architectures}
    unknown = [architecture for architecture in opened.architectures if architecture not in known]
    found = headless(unknown, known | vllm_architectures(), opened.files.infos)
    if found is not None and found.nearest is None and opened.how == "guessed" and opened.family:
        found = dataclasses.replace(found, nearest=next(iter(opened.family.architectures), None))
    if found is not None:
        there = f"{listed(list(found.heads))} is there" if found.heads else "no tensor of a head is there"
        what = (
            "so it is a whole language model" if found.heads else "so its head has to be its embedding, if it has one"
        )
        near = f"; the nearest known one with a head is {found.nearest}" if found.nearest else ""
        opened.note(
            "family", f"architectures names {found.architecture}, a class without a head{near}. {there}, {what}"
        )
    types = named_in(opened.raw, "model_type")
    return {
        "name": opened.family.name if opened.family else None,
        "how": opened.how,
        "architectures": opened.architectures,
        "model_type": types[0] if types else None,
        "shares": [{**_plain(share), "share": round(share.share, 4)} for share in opened.shares],
        "headless": _plain(found),
    }


def _files(opened: Opened, strict: bool) -> Any:
    found = opened.files
    for file in found.files:
        if file.error is not None and not any(file.error == reason.text for reason in opened.reasons):
            opened.refuse("files", file.error)
    if len(found.missing) > 1:
        opened.refuse(
            "files",
            f"{opened.folder}: {len(found.missing)} files that the index names are not there: {listed(list(found.missing))}; "
            f"{len(found.lost)} of {found.indexed} tensors are in no file. Copy them, or write the index anew",
        )
    if found.empty:
        opened.refuse(
            "files",
            f"{opened.folder}: {len(found.empty)} of {len(found.infos)} tensors have no elements: {listed(found.empty)}; expected "
            "whole weights. ZeRO-3 saves such tensors when its shards are not gathered: consolidate the checkpoint first "
            "(zero_to_fp32.py beside it, or stage3_gather_16bit_weights_on_model_save)",
        )
    for note in opened.checkpoint.notes if opened.checkpoint else ():
        opened.note("files", note)
    return {
        "files": [_plain(file) for file in found.files], "tensors": len(found.infos), "indexed": found.indexed,
        "missing": list(found.missing), "lost": list(found.lost), "empty": found.empty,
    }  # fmt: skip


def _geometry(opened: Opened, strict: bool) -> Any:
    if opened.weight_map is None:
        return None
    rows = geometry(opened.config, opened.weight_map, opened.found, opened.files.infos)
    for sentence in contradictions(rows):
        # Layers in files that cannot be read are not missing in the config.
        if not (opened.files.damaged and sentence.startswith("num_hidden_layers")):
            opened.refuse("geometry", sentence)
    return [_plain(row) for row in rows]


def _coverage(opened: Opened, strict: bool) -> Any:
    if opened.weight_map is None:
        return None
    found = coverage(opened.config, opened.weight_map, opened.found, opened.files.infos)
    for note in opened.weight_map.notes:
        opened.note("coverage", note)
    for sentence in _coverage_reasons(opened, found):
        opened.refuse("coverage", sentence)
    return _plain(found)


def _coverage_reasons(opened: Opened, found: Coverage) -> Iterator[str]:
    assert opened.family is not None
    family, folder = opened.family.name, opened.folder
    if found.missing and not opened.files.damaged:
        names = [f"{name} ({near} has its shape)" if near else name for name, near in found.missing.items()]
        head = (
            " tie_word_embeddings is false in config.json: set it to true if the head is the embedding."
            if "lm_head.weight" in found.missing
            else ""
        )
        yield (
            f"{folder}: {len(found.missing)} of {found.parameters} parameters get no tensor: {listed(names)}; expected each to be "
            f"filled once.{head} Export the missing weights, or add a rule to a family file if they have another name"
        )
    for groups, why in (
        (found.unmapped, f"no rule of family {family} is about"),
        (found.surplus, "config.json describes a model that has no place for"),
    ):
        if groups:
            shown = listed([f"{g.count} of {g.module}{f' ({g.guess})' if g.guess else ''}" for g in groups])
            yield (
                f"{folder}: {why} {sum(group.count for group in groups)} of {found.tensors} tensors: {shown}; expected every "
                "tensor to be used. Remove them from the files, describe them in the config, or add a rule to a family "
                "file, with drop and a reason if they are not needed"
            )
    for name, sources in opened.found.twice.items():
        yield f"{' and '.join(sources)} both are {name}; expected it once. Remove one of them"
    # Where sizes of the config are wrong already, shapes say the same again.
    if any(reason.section == "geometry" for reason in opened.reasons):
        return
    for source, message in list(opened.found.failed.items())[:1] if opened.config else ():
        more = len(opened.found.failed) - 1
        yield message if source in message else f"{source}: {message}" + (f" (and {more} more tensors)" if more else "")
    if found.misfits:
        first = found.misfits[0]
        yield (
            f"{folder}: {len(found.misfits)} parameters have another shape than config.json calls for; the first is {first.name}, "
            f"from {first.source}: found {list(first.found)}, expected {list(first.expected)}"
        )


def _unused(opened: Opened, strict: bool) -> Any:
    if opened.description is None:
        return None
    unused = dict(opened.description.unused)
    if unused:
        shown = listed([f"{path} = {fields.shown(value)}" for path, value in unused.items()], 8)
        if strict:
            opened.refuse(
                "unused",
                f"config.json: nothing reads {shown}; does the model compute something by it? Describe it in a family file, or "
                "list it there under ignored",
            )
    for note in opened.description.notes:
        opened.note("config", note)
    return _plain(unused)


def _unusual(opened: Opened, strict: bool) -> Any:
    return unusual(opened.config) if opened.config else None


def _sizes(opened: Opened, strict: bool) -> Any:
    stored = sum(bytes_of(info) for info in opened.files.infos.values())
    if opened.config is None:
        return None
    found, stored_in = sizes(opened.config), dtypes(opened.files.infos)
    own = stored_in[0] if stored_in else None
    width = own.width if own else 2
    return {
        **_plain(found),
        "weight_bytes": stored,
        "weight_bytes_bf16": 2 * found.parameters,
        "cache": {
            "dtype": own.dtype if own else None,
            "bytes_per_token": width * found.cache_elements,
            "bytes_per_token_bf16": 2 * found.cache_elements,
            "layers": [
                {
                    "layers": layer.layers,
                    "bytes_per_token": width * layer.cache_elements,
                    "bytes_per_token_bf16": 2 * layer.cache_elements,
                }
                for layer in found.layers
            ],
        },
    }


def _dtypes(opened: Opened, strict: bool) -> Any:
    found = dtypes(opened.files.infos)
    said = [str(v).removeprefix("torch.") for key in ("dtype", "torch_dtype") for v in named_in(opened.raw, key)]
    names = {row.dtype for row in found}
    if "float32" in names and (not said or said[0] in ("float32", "float")):
        opened.note(
            "dtypes",
            "the weights are float32: with --dtype auto vLLM serves them in bfloat16 (in float16 where the device lacks it); "
            "--dtype float32 keeps them as they are",
        )
    elif said and found and said[0] not in names:
        opened.note(
            "dtypes",
            f"dtype is {said[0]} in config.json, the tensors are {', '.join(sorted(names))}; with --dtype auto vLLM serves "
            f"{said[0]}, --dtype {found[0].dtype} keeps the weights as they are",
        )
    odd = [n for n, part in opened.found.parts.items() if not part.dtype.is_floating_point or part.dtype.itemsize < 2]
    if odd:
        first = dtype_name(opened.found.parts[odd[0]].dtype)
        opened.refuse(
            "dtypes",
            f"{opened.folder}: {len(odd)} parameters are of another kind of number: {listed(odd)}, the first {first}; expected a "
            "floating-point type of 16 bits or more. Quantised checkpoints are not supported yet: export the weights",
        )
    return {"config": said[0] if said else None, "tensors": [_plain(row) for row in found]}


def _vocabulary(opened: Opened, strict: bool) -> Any:
    ids = None
    with opened.guard("vocabulary"):
        ids = token_ids(opened.folder)
    if ids is None and not (opened.folder / "tokenizer.json").exists():
        others = [n for n in ("tokenizer.model", "vocab.json", "vocab.txt") if (opened.folder / n).exists()]
        found = (
            f"{', '.join(others)} is there and was not read"
            if others
            else "without a tokenizer only token ids can be served"
        )
        opened.note("vocabulary", f"no tokenizer.json; {found}")
    numbers = vocabulary(opened.config, opened.found, ids)
    problems, notes = vocabulary_problems(numbers)
    for text in problems:
        opened.refuse("vocabulary", text)
    for text in notes:
        opened.note("vocabulary", text)
    return _plain(numbers)


def _parallel(opened: Opened, strict: bool) -> Any:
    config = opened.config
    if config is None:
        return None
    reasons = {n: tensor_parallel_misfit(config, n) for n in RANKS}
    return {
        "tensor_parallel": {
            "works": [n for n, reason in reasons.items() if reason is None],
            "refused": {str(n): reasons[n] for n in SHOWN_SIZES if reasons[n] is not None},
            "cuts": [_plain(cut) for cut in cuts(config, SHOWN_SIZES)],
        },
        "expert_parallel": {"works": [n for n in RANKS if tensor_parallel_misfit(config, n, True) is None]}
        if any(isinstance(layer.ffn, Moe) for layer in config.layers)
        else None,
        "pipeline_parallel": {
            "most": config.num_hidden_layers,
            "even": [n for n in RANKS if config.num_hidden_layers % n == 0],
        },
    }


def _tiers(opened: Opened, strict: bool) -> Any:
    config = opened.config
    if config is None:
        return None
    found = {}
    for where in WHERES:
        choices = resolve(config, TierPlan.parse(AUTO, config), where)
        found[where.device] = {
            "dtype": where.dtype,
            "table": table(choices, config).splitlines(),
            "choices": [
                {
                    "layer": choice.layer, "operator": choice.operator, "tier": choice.tier.value, "native": choice.native,
                    "passed_over": list(choice.passed_over),
                }
                for choice in choices
            ],
        }  # fmt: skip
    return found


WHERES = (Where("cpu"), Where("cuda", dtype="bfloat16"))

# In the order of the text.
SECTIONS: Mapping[str, Callable[[Opened, bool], Any]] = {
    "family": _family, "files": _files, "geometry": _geometry, "coverage": _coverage, "unused": _unused, "unusual": _unusual,
    "sizes": _sizes, "dtypes": _dtypes, "vocabulary": _vocabulary, "parallel": _parallel, "tiers": _tiers, "stock": stock,
}  # fmt: skip
