"""The page of `tiers check` shows every row, and stands whatever numbers and names it is given."""

import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from tiers.vllm_model import check_html
from tiers.vllm_model.check import Report
from tiers.vllm_model.check_rows import Row, Verdict

ABOUT = {
    "model": "some/model", "against": "reference", "plan": "auto", "dtype": "bfloat16", "device": "cpu", "ranks": 1,
    "vllm": "0.32.0", "torch": "2.11", "exact": "float32",
}  # fmt: skip

NAMES = ("attention", "ffn", "gate", "layer")


class Page(HTMLParser):
    """Tags in the order they open, cells of every table row, text; fails where tags do not match."""

    EMPTY = ("meta",)

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def count(self, tag: str, **attributes: str) -> int:
        return sum(name == tag and attributes.items() <= attrs.items() for name, attrs in self.tags)


def a_report(layers: int = 3) -> Report:
    """Passing rows of every level, and tokens."""
    rows = [Row("operator", 0, "attention", "compiled", "T40", 1e-7, 1e-7, 1e-5, 40, 40, Verdict.PASS, "the same keys")]
    for layer in range(layers):
        for what in NAMES:
            for how in ("same input, prefill", "same input, decode"):
                rows.append(
                    Row("layer", layer, what, "reference", how, 1e-6 * (layer + 1), 1e-6, 1e-4, 7, 9, Verdict.PASS)
                )
        rows.append(Row("layer", layer, "hidden", "", "accumulated", 1e-6, 1e-6, 1e-4, 9, 9, Verdict.PASS))
    rows.append(Row("model", None, "greedy", "", "alone", 0, 0, 0, 0, 9, Verdict.INCONCLUSIVE))
    rows.append(Row("dispatch", None, "attention", "reference", "counts", compared=1, total=1, verdict=Verdict.PASS))
    tokens = {layer: [1e-6 * (1 + i) for i in range(9)] for layer in range(layers)}
    return Report(dict(ABOUT), rows, tokens=tokens)


def test_every_row_and_verdict_is_on_the_page() -> None:
    report = a_report()
    page = Page(check_html.page(report))
    for row in report.rows:
        same = [cells for cells in page.rows if cells[:3] == [row.place, row.tier, row.how]]
        assert len(same) == 1
        assert same[0][7:] == [row.verdict, row.note]
    assert "INCONCLUSIVE: 30 comparisons, 0 failed" in page.text
    for word in ("some/model", "plan auto", "bfloat16", "7 of 9"):
        assert word in page.text
    # The residual stream, four operators, and the tokens.
    assert page.count("svg") == 6
    # Crosses in legends only.
    assert page.count("path", **{"class": "failed"}) == 5


def test_the_first_difference_and_its_command_come_first() -> None:
    report = a_report()
    bad = report.rows[5]
    bad.verdict, bad.error, bad.note = Verdict.FAIL, 0.25, "worst at token 3"
    report.first, report.again = bad, "tiers check some/model --tiers 'reference,0.ffn=fast' --layers 0"
    page = Page(check_html.page(report))
    said = f"{bad.place} on tier reference, {bad.how}: off by 0.25, budget 0.0001; worst at token 3"
    assert page.text.index(said) < page.text.index("relative error, noise and budget")
    assert report.again in page.text
    assert page.count("p", **{"class": "verdict FAIL"}) == 1
    # One cross in each legend, and one more for what failed.
    assert page.count("path", **{"class": "failed"}) == 5 + 1


def test_it_needs_nothing_beside_itself() -> None:
    page = check_html.page(a_report())
    assert not re.search(r"https?:|src=|@import|url\(|<script|<link", page)
    assert "prefers-color-scheme: dark" in page


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0, 1e-300, 1e300])
def test_any_number_can_be_shown(value: float) -> None:
    report = a_report()
    for row in report.rows[1:4]:
        row.error, row.noise, row.budget, row.verdict = value, value, value, Verdict.FAIL
    report.tokens[1][4] = value
    text = check_html.page(report)
    page = Page(text)
    # Coordinates and sizes stay numbers.
    for _, attributes in page.tags:
        for name in ("cx", "cy", "x", "y", "width", "height", "points", "d"):
            assert not re.search(r"nan|inf", attributes.get(name) or "")
    shown = {math.inf: "inf", 0.0: "0"}.get(value, f"{value:.3g}")
    assert page.rows[3][3:6] == [shown] * 3
    assert (check_html.NOT_FINITE in [a.get("fill") for tag, a in page.tags if tag == "path"]) == (
        not math.isfinite(value)
    )


def test_a_report_without_rows_is_inconclusive() -> None:
    page = Page(check_html.page(Report({})))
    assert "INCONCLUSIVE: 0 comparisons" in page.text
    assert not page.count("svg")


def test_layers_without_tokens_and_a_single_layer() -> None:
    report = a_report(1)
    report.tokens = {0: [], 1: [1e-3]}
    assert "layer 0: no tokens" in Page(check_html.page(report)).text
    report.tokens = {0: []}
    assert "not finite" not in Page(check_html.page(report)).text


@pytest.mark.parametrize("length", [400, 401, 5000])
def test_a_long_sequence_is_binned_by_its_largest_error(length: int) -> None:
    report = a_report(2)
    report.tokens = {0: [1e-8] * length, 1: [1e-8] * length}
    report.tokens[1][length - 1] = 1.0
    text = check_html.page(report)
    page = Page(text)
    assert f"layer 1: 1 at token {length - 1}" in page.text
    # The one large error is seen, and no row is cut into more than the columns that there are.
    (bright,) = [a["d"] or "" for tag, a in page.tags if tag == "path" and a.get("fill") == check_html.RAMP[-1]]
    assert bright.count("M") == 1
    width = float(re.findall(r"h([0-9.]+)v", bright)[0])
    assert width >= (check_html.WIDTH - check_html.LEFT - check_html.RIGHT) / check_html.COLUMNS - 0.01
    assert ("tokens a column" in page.text) == (length > 400)
    assert len(text) < 60_000


def test_names_cannot_break_the_page() -> None:
    hostile = "<script>alert('x')</script>\"&"
    report = a_report(2)
    report.about |= dict.fromkeys(ABOUT, hostile)
    for row in report.rows:
        row.what = row.tier = row.how = row.note = hostile
    report.rows.append(Row(hostile, 1, hostile, hostile, hostile))
    report.first, report.again = report.rows[2], hostile
    text = check_html.page(report)
    page = Page(text)
    assert "<script" not in text
    assert not page.count("script")
    assert hostile in page.text
    assert sum(cells[1] == hostile for cells in page.rows) >= len(report.rows)
