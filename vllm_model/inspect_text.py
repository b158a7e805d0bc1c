"""The text of `tiers inspect`, a function for each section."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiers.reference import fields
from tiers.reference.analysis.geometry import Row
from tiers.reference.checkpoint import listed
from tiers.vllm_model.inspect_result import NO_CHECKPOINT, NOT_SERVABLE, SERVABLE, Inspection
from tiers.vllm_model.inspect_sections import SHOWN_SIZES


def columns(rows: Sequence[Sequence[Any]], indent: int = 2) -> list[str]:
    """Lines with aligned columns."""
    text = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)] if text else []
    return [
        (" " * indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in text
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _size(number: int) -> str:
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number >= 2**power:
            return f"{number / 2**power:.4g} {unit}"
    return f"{number} B"


def text(found: Inspection) -> str:
    """The inspection for people: the verdict and its reasons, then a section for each thing."""
    verdict = {SERVABLE: "servable", NOT_SERVABLE: "not servable", NO_CHECKPOINT: "not a checkpoint"}[found.code]
    lines = [f"{found.folder}: {verdict}"]
    lines += [f"  {number}. {reason.text}" for number, reason in enumerate(found.reasons, 1)]
    if found.code == NO_CHECKPOINT:
        return "\n".join(lines)
    for name, (heading, render) in _TEXTS.items():
        section = found.sections[name]
        about = [remark.text for remark in found.notes if remark.section in (name, *_SHOWN_WITH.get(name, ()))]
        body = ["  not known: see the reasons above"] if section is None and not about else []
        body += render(section) if section is not None else []
        body += [f"  note: {note}" for note in about]
        if body:
            lines += ["", heading, *body]
    return "\n".join(lines)


# Remarks about what has no section of its own.
_SHOWN_WITH = {"unused": ("config",)}

HOW = {
    "asked": "asked for by --family", "architectures": "named by architectures", "model_type": "named by model_type",
    "own format": "this project's own format", "guessed": "guessed from the names of tensors", "unknown": "not known",
}  # fmt: skip


def _family_text(found: Any) -> list[str]:
    rows = [
        ("family", f"{found['name'] or 'unknown'}, {HOW[found['how']]}"),
        ("architectures", ", ".join(found["architectures"]) or "-"),
        ("model_type", found["model_type"]),
    ]
    shares = [share for share in found["shares"] if share["taken"]]
    own = [share for share in shares if share["family"] == found["name"]]
    near = [share for share in shares if share not in own][: 5 - len(own)]
    sure = own and own[0]["taken"] == own[0]["total"] and found["how"] != "guessed"
    for name, some in (("its rules take", own), ("nearest", [] if sure else near)):
        if some:
            rows.append((name, ", ".join(f"{s['family']} {s['taken']} of {s['total']} tensors" for s in some)))
    return columns(rows)


def _geometry_text(found: Any) -> list[str]:
    rows = [("field", "layers", "config", "tensors", "")]
    for row in (Row(**row) for row in found):
        mark = {True: "", False: "<- differs", None: ""}[row.agrees]
        if row.agrees and row.config != row.tensors:
            mark = "more rows than used"
        rows.append((row.field, row.layers, _cell(row.config), _cell(row.tensors), mark))
    return columns(rows)


def _coverage_text(found: Any) -> list[str]:
    lines = [
        f"  {found['tensors']} tensors, {found['dropped']} of them dropped on purpose; {found['parameters']} parameters, "
        f"{len(found['missing'])} of them not filled"
    ]
    lines += columns(
        [("rule", "tensors", "state"), *((rule["template"], rule["hits"], rule["state"]) for rule in found["rules"])]
    )
    for key, heading in (("unmapped", "no rule"), ("surplus", "no place")):
        if found[key]:
            rows = [
                (g["module"], g["count"], _size(g["bytes"]), g["guess"] or f"e.g. {g['example']}") for g in found[key]
            ]
            lines += columns([(heading, "tensors", "bytes", "looks like"), *rows])
    missing = list(found["missing"].items())
    lines += [f"  not filled: {name}{f' ({near} has its shape)' if near else ''}" for name, near in missing[:10]]
    lines += [f"  not filled: {len(missing) - 10} more"] if len(missing) > 10 else []
    shown = [f"{m['name']}: found {m['found']}, expected {m['expected']}" for m in found["misfits"]]
    lines += [f"  other shape: {line}" for line in shown[:10]]
    return lines + ([f"  other shape: {len(shown) - 10} more"] if len(shown) > 10 else [])


def _files_text(found: Any) -> list[str]:
    files = found["files"]
    total = sum(file["bytes"] for file in files)
    indexed = "no index" if found["indexed"] is None else f"an index of {found['indexed']} tensors"
    lines = [f"  {len(files)} file{'s' * (len(files) != 1)}, {_size(total)}, {found['tensors']} tensors; {indexed}"]
    bad = [file for file in files if file["error"] is not None]
    lines += [f"  cannot be read: {file['name']}" for file in bad]
    lines += [f"  not there: {name}" for name in found["missing"]]
    if found["lost"]:
        lines.append(f"  in no file: {listed(found['lost'])}")
    if found["empty"]:
        lines.append(f"  without elements: {listed(found['empty'])}")
    return lines


def _unused_text(found: Any) -> list[str]:
    if not found:
        return ["  everything in config.json is read, or known to be without effect"]
    rows = [(path, "=", fields.shown(value)) for path, value in found.items()]
    return [*columns(rows), "  does the model compute something by them?"]


def _unusual_text(found: Any) -> list[str]:
    return [f"  {line}" for line in found] or ["  nothing"]


def _sizes_text(found: Any) -> list[str]:
    cache = found["cache"]
    rows = [
        ("parameters", f"{found['parameters']:,}"),
        ("embedding, head", f"{found['embedding']:,}, {found['head']:,}"),
        *((("used by a token", f"{found['active']:,}"),) if found["active"] != found["parameters"] else ()),
        ("weights", f"{_size(found['weight_bytes'])} as stored, {_size(found['weight_bytes_bf16'])} in bfloat16"),
        (
            "cache per token",
            f"{cache['bytes_per_token']:,} B in {cache['dtype'] or 'bfloat16'}, {cache['bytes_per_token_bf16']:,} B in bfloat16",
        ),
    ]
    experts = any(layer["experts"] for layer in found["layers"])
    names = ("layers", "parameters", "mixer", "ffn", *(("experts", "active") if experts else ()), "gate", "norms")
    layers = [
        (*(layer[name] for name in names), own["bytes_per_token"], own["bytes_per_token_bf16"])
        for layer, own in zip(found["layers"], cache["layers"], strict=True)
    ]
    stored = cache["dtype"] or "bfloat16"
    more = ("of it experts", "used by a token") if experts else ()
    heading = (
        "layers",
        "parameters",
        "attention",
        "ffn",
        *more,
        "gate",
        "norms",
        f"cache B/token {stored}",
        "bfloat16",
    )
    return [*columns(rows), "  each layer of:", *columns([heading, *layers])]


def _dtypes_text(found: Any) -> list[str]:
    rows = [(row["dtype"], row["tensors"], _size(row["bytes"])) for row in found["tensors"]]
    return columns([("dtype", "tensors", "bytes"), *rows]) + columns([("config.json says", found["config"])])


def _vocabulary_text(found: Any) -> list[str]:
    names = {
        "embedding_rows": "rows of the embedding", "head_rows": "rows of the head", "vocab_size": "vocab_size",
        "tokenizer": "tokenizer: largest id + 1", "tokens": "tokenizer: tokens",
    }  # fmt: skip
    return columns([(text, found[name]) for name, text in names.items()])


def _parallel_text(found: Any) -> list[str]:
    tensor, pipeline = found["tensor_parallel"], found["pipeline_parallel"]
    lines = [f"  tensor-parallel sizes that work: {', '.join(map(str, tensor['works']))}"]
    lines += [f"  refused at {size}: {reason}" for size, reason in tensor["refused"].items()]
    if (spread := found["expert_parallel"]) is not None:
        lines.append(f"  with --enable-expert-parallel: {', '.join(map(str, spread['works']))}")
    rows = [("tensors", "layers", *(f"TP {size}" for size in SHOWN_SIZES))]
    rows += [(cut["tensors"], cut["layers"], *cut["by_size"].values()) for cut in tensor["cuts"]]
    lines += columns(rows)
    even = ", ".join(map(str, pipeline["even"]))
    return [*lines, f"  pipeline-parallel sizes that work: 1 to {pipeline['most']}; stages of equal length: {even}"]


def _tiers_text(found: Any) -> list[str]:
    lines = []
    for device, part in found.items():
        lines.append(f"  {device}" + (f", {part['dtype']}" if part["dtype"] else ""))
        lines += [f"    {line}" for line in part["table"]]
    return lines


def balance_text(found: list[dict[str, Any]]) -> list[str]:
    """Lines about `tiers.reference.analysis.balance`."""
    rows: list[tuple[Any, ...]] = [("layer", "balance loss", "tokens of experts", "least", "most", "without any")]
    for row in found:
        counts = row["counts"]
        mean = sum(counts) / len(counts)
        shown = " ".join(map(str, counts[:16])) + (" ..." if len(counts) > 16 else "")
        least, most = f"{min(counts) / mean:.2f} of the mean", f"{max(counts) / mean:.2f}"
        rows.append((row["layer"], f"{row['loss']:.3f}", shown, least, most, sum(not count for count in counts)))
    tokens = found[0]["tokens"] if found else 0
    return [
        *columns(rows),
        f"  of {tokens} tokens; the loss is 1 where all is even, the number of experts where one gets all",
    ]


def _stock_text(found: Any) -> list[str]:
    rows = [
        ("vLLM", found["vllm"] or "not installed"),
        ("architecture", found["architecture"]),
        ("a class of vLLM's own", found["native"]),
        ("its Transformers backend", found["transformers"]),
    ]
    return columns(rows) + [f"  {why}" for why in found["why"]]


_TEXTS: Mapping[str, tuple[str, Callable[[Any], list[str]]]] = {
    "family": ("Family", _family_text),
    "geometry": ("Config against tensors", _geometry_text),
    "unused": ("Values of config.json that nothing reads", _unused_text),
    "unusual": ("Unusual", _unusual_text),
    "sizes": ("Sizes", _sizes_text),
    "stock": ("Without this plugin", _stock_text),
    "coverage": ("Tensors and parameters", _coverage_text),
    "files": ("Files", _files_text),
    "dtypes": ("Dtypes", _dtypes_text),
    "vocabulary": ("Vocabulary", _vocabulary_text),
    "parallel": ("Several GPUs", _parallel_text),
    "tiers": ("Tiers under plan auto", _tiers_text),
}


def printable(text: str) -> str:
    """Names in a folder are anybody's: what would move the cursor, or has no encoding, is shown as a question mark."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
