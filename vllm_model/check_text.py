"""The report of `tiers check` in a terminal."""

from typing import Any

from tiers.vllm_model.check_rows import Row, Verdict


def text(report: Any) -> str:
    """A table of layers, what failed, where it begins, and the verdict."""
    about = report.about
    lines = [
        f"{about['model']}: plan {about['plan']} against {about['against']}, {about['dtype']} on {about['device']}"
        f"{', ' + str(about['ranks']) + ' ranks' if about['ranks'] > 1 else ''} (vLLM {about['vllm']}, torch {about['torch']}); "
        f"noise: the reference in {about['dtype']} against {about['exact']}",
        "",
    ]
    for level, title in (
        ("operator", "Operators, on inputs of a real prompt"),
        ("layer", "Layers: on the same input, and accumulated"),
        ("model", "The model"),
        ("dispatch", "What ran"),
    ):
        rows = [row for row in report.rows if row.level == level]
        if rows:
            lines += [title, *table(rows if level != "layer" else shortened(rows)), ""]
    if report.first is not None:
        lines.append(f"First difference: {_where(report.first)}: {_what(report.first)}")
        if report.again:
            lines.append(f"Only that: {report.again}")
    compared, total = (sum(getattr(row, name) for row in report.rows) for name in ("compared", "total"))
    lines.append(f"{report.verdict}: {len(report.rows)} comparisons, {compared} of {total} tokens compared")
    return "\n".join(lines)


def shortened(rows: list[Row]) -> list[Row]:
    """Every row that did not pass, and of the others the one nearest to its budget per layer and operator."""
    best: dict[Any, Row] = {}
    for row in rows:
        key = (row.layer, row.what, row.how if row.verdict is not Verdict.PASS else "")
        if key not in best or _share(row) > _share(best[key]):
            best[key] = row
    return list(best.values())


def table(rows: list[Row]) -> list[str]:
    """Aligned columns."""
    cells = [["", "tier", "how", "error", "noise", "budget", "tokens", "", ""]]
    for row in rows:
        tokens = str(row.total) if row.compared == row.total else f"{row.compared} of {row.total}"
        cells.append(
            [row.place, row.tier, row.how, *map(_number, (row.error, row.noise, row.budget)), tokens, row.verdict, row.note]
        )  # fmt: skip
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    ]


def _share(row: Row) -> float:
    return row.error / row.budget if row.budget else row.error


def _number(value: float) -> str:
    return f"{value:.2g}" if value else "0"


def _where(row: Row) -> str:
    return f"{row.place}{' on tier ' + row.tier if row.tier else ''}, {row.how}"


def _what(row: Row) -> str:
    return f"off by {row.error:.3g}, budget {row.budget:.3g}{'; ' + row.note if row.note else ''}"
