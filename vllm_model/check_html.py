"""The report of `tiers check` as one page that needs nothing beside itself: tables, and plots drawn as inline SVG."""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from tiers.vllm_model.bench_html import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, STYLE, TOP, WIDTH
from tiers.vllm_model.check import Report
from tiers.vllm_model.check_rows import Row, Verdict

# Beside the style of bench's page: verdicts, and other colours where the reader's screen is dark.
OWN_STYLE = """
:root { color-scheme: light dark; --line: #ddd; --bad: #b00020; --good: #1b7a3d; --open: #8a5a00; }
code, pre { background: #8882; padding: .1em .3em; white-space: pre-wrap; overflow-wrap: anywhere; }
td.PASS { color: var(--good); } td.FAIL, p.FAIL { color: var(--bad); font-weight: 600; }
td.INCONCLUSIVE { color: var(--open); } p.verdict { font-size: 1.2em; }
th, td { border-bottom-color: var(--line); }
svg { color: #222; } svg text { fill: currentColor; }
@media (prefers-color-scheme: dark) {
  :root { --line: #444; --bad: #ff6b7d; --good: #6fcf8e; --open: #e8b64c; }
  body { background: #181a1b; color: #ddd; } svg { color: #ddd; }
}
"""

LEVELS = {
    "operator": "Operators, on inputs of a real prompt",
    "layer": "Layers: on the same input, and accumulated",
    "model": "The model",
    "dispatch": "What ran",
}

# Columns of the heat map at most; longer sequences share them.
COLUMNS = 400

# From small to large errors, dark to bright, readable with impaired colour vision (after viridis); then what is not a number.
RAMP = ("#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725")
NOT_FINITE = "#e6007e"

# Powers of ten that a scale spans at most: a token that is right to the last bit would stretch it to no use.
SPAN = 10

Point = tuple[float, float]


def page(report: Report) -> str:
    """The whole document."""
    about = report.about
    title = f"tiers check: {about.get('model', '')}"
    parts = [f"<h1>{escape(title)}</h1>", *_headline(report)]
    for what, rows in _plots(report.rows):
        parts.append(_plot(what, rows))
    if any(report.tokens.values()):
        parts += ["<h2>Every token: accumulated error behind each layer</h2>", _heat_map(report.tokens)]
    levels = [*LEVELS, *dict.fromkeys(row.level for row in report.rows if row.level not in LEVELS)]
    for level in levels:
        if rows := [row for row in report.rows if row.level == level]:
            parts += [f"<h2>{escape(LEVELS.get(level, level))}</h2>", _table(rows)]
    parts += ["<h2>Checked with</h2>", _facts(about)]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{OWN_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _headline(report: Report) -> list[str]:
    about, rows = report.about, report.rows
    compared, total = (sum(getattr(row, name) for row in rows) for name in ("compared", "total"))
    failed = sum(row.verdict is Verdict.FAIL for row in rows)
    words = f"{report.verdict}: {len(rows)} comparisons, {failed} failed, {compared} of {total} tokens compared"
    asked = ", ".join(f"{name} {about[name]}" for name in ("plan", "against", "dtype", "device") if name in about)
    lines = [f'<p class="verdict {report.verdict}">{escape(words)}</p>', f"<p>{escape(asked)}</p>"]
    first = report.first
    if first is not None:
        tier = f" on tier {first.tier}" if first.tier else ""
        note = f"; {first.note}" if first.note else ""
        said = f"{first.place}{tier}, {first.how}: off by {_number(first.error)}, budget {_number(first.budget)}{note}"
        lines.append(f"<p><b>First difference:</b> {escape(said)}</p>")
    if report.again:
        lines.append(f"<p>Only that:</p>\n<pre>{escape(report.again)}</pre>")
    return lines


def _table(rows: Sequence[Row]) -> str:
    """Every row, whatever its verdict."""
    names = ("", "tier", "how", "error", "noise", "budget", "tokens", "verdict", "note")
    lines = ["<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for row in rows:
        tokens = str(row.total) if row.compared == row.total else f"{row.compared} of {row.total}"
        numbers = map(_number, (row.error, row.noise, row.budget))
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in (row.place, row.tier, row.how, *numbers, tokens))
        verdict = f'<td class="{row.verdict}">{row.verdict}</td>'
        lines.append(f"<tr>{cells}{verdict}<td>{escape(row.note)}</td></tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _facts(about: dict[str, object]) -> str:
    lines = (f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>" for name, value in about.items())
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _number(value: float) -> str:
    return f"{value:.3g}" if value else "0"


# ---- error, noise and budget of each layer ---------------------------------------------------------------------------


def _plots(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """What is plotted: the residual stream, then each operator on the same input; of each layer its worst row."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.level != "layer" or row.layer is None:
            continue
        own = found.setdefault(f"{row.what}, {row.how.split(',')[0]}", {})
        if row.layer not in own or _badness(row) > _badness(own[row.layer]):
            own[row.layer] = row
    ordered = sorted(found.items(), key=lambda item: not item[0].endswith("accumulated"))
    return [(name, [own[layer] for layer in sorted(own)]) for name, own in ordered]


def _badness(row: Row) -> tuple[bool, float]:
    share = row.error / row.budget if row.budget else row.error
    return row.verdict is Verdict.FAIL, math.inf if math.isnan(share) else share


def _plot(name: str, rows: Sequence[Row]) -> str:
    """Three lines over the layers on a logarithmic scale; what is not finite sits on the upper edge, 0 on the lower."""
    low, high = _powers(value for row in rows for value in (row.error, row.noise, row.budget))
    first, last = rows[0].layer or 0, rows[-1].layer or 0
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(layer: int, value: float) -> Point:
        across = 0.5 if last == first else (layer - first) / (last - first)
        # A little room at both ends, so that points do not sit on the frame.
        return LEFT + width * (0.03 + 0.94 * across), TOP + height * (1 - _up(value, low, high))

    step = max(1, math.ceil((high - low) / 8))
    parts = [_rule(power, place(first, 10.0**power)[1]) for power in range(low, high + 1, step)]
    layers = [row.layer or 0 for row in rows]
    for layer in layers[:: max(1, math.ceil(len(layers) / 16))]:
        parts.append(_text(place(layer, 1)[0], HEIGHT - BOTTOM + 18, str(layer), "middle"))
    parts.append(_text(LEFT + width / 2, HEIGHT - 8, "layer", "middle"))
    lines: dict[str, tuple[str, Callable[[Row], float]]] = {
        "error": ("", lambda row: row.error),
        "noise": ("2 4", lambda row: row.noise),
        "budget": ("7 4", lambda row: row.budget),
    }
    for index, (word, (dashes, value)) in enumerate(lines.items()):
        points = [place(layer, value(row)) for layer, row in zip(layers, rows, strict=True)]
        parts.append(_line(points, COLOURS[index], dashes))
        x = LEFT + 90 * index
        parts.append(_line([(x, HEIGHT + 8), (x + 24, HEIGHT + 8)], COLOURS[index], dashes))
        parts.append(_text(x + 30, HEIGHT + 12, word))
    parts.append(_cross(LEFT + 285, HEIGHT + 8) + _text(LEFT + 297, HEIGHT + 12, "failed"))
    for layer, row in zip(layers, rows, strict=True):
        parts.append(_mark(row, *place(layer, row.error)))
    return _svg(f"{name}: relative error, noise and budget", HEIGHT + 24, parts)


def _mark(row: Row, x: float, y: float) -> str:
    """A point that says what it is when the pointer rests on it; a cross where the row failed."""
    tier = f" {row.tier}" if row.tier else ""
    numbers = ", ".join(f"{name} {_number(getattr(row, name))}" for name in ("error", "noise", "budget"))
    said = f"<title>{escape(f'{row.place}{tier}, {row.how}: {row.verdict}, {numbers}')}</title>"
    shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLOURS[0]}"/>'
    beside = "" if math.isfinite(row.error) else _text(x + 8, y + 4, _number(row.error))
    return f"<g>{said}{shape}{_cross(x, y) if row.verdict is Verdict.FAIL else ''}{beside}</g>"


def _powers(values: Iterable[float]) -> tuple[int, int]:
    """The powers of ten that hold all that a logarithmic scale can show."""
    logs = [math.log10(value) for value in values if math.isfinite(value) and value > 0]
    if not logs:
        return -1, 0
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    high = max(high, low + 1)
    return max(low, high - SPAN), high


def _up(value: float, low: int, high: int) -> float:
    """How far up a scale a value is: 0 to 1."""
    if not math.isfinite(value):
        return 1.0
    return 0.0 if value <= 0 else min(1.0, max(0.0, (math.log10(value) - low) / (high - low)))


# ---- every token -----------------------------------------------------------------------------------------------------


def _heat_map(tokens: dict[int, list[float]]) -> str:
    """Layers downwards, tokens across; neighbours of one colour are one piece of a path, so that the page stays small."""
    layers = sorted(tokens)
    length = max(map(len, tokens.values()))
    together = max(1, math.ceil(length / COLUMNS))
    rows = {layer: [_worst(tokens[layer][i : i + together]) for i in range(0, length, together)] for layer in layers}
    low, high = _powers(value for row in rows.values() for value in row if value is not None)
    cell = max(4.0, min(18.0, 360 / len(layers)))
    width = (WIDTH - LEFT - RIGHT) / math.ceil(length / together)
    paths: dict[str, list[str]] = {}
    parts = []
    for index, layer in enumerate(layers):
        top = TOP + cell * index
        for colour, start, end in _runs([_colour(value, low, high) for value in rows[layer]]):
            across = f"M{LEFT + start * width:.2f} {top:.1f}h{(end - start) * width:.2f}v{cell:.1f}"
            paths.setdefault(colour, []).append(f"{across}h-{(end - start) * width:.2f}z")
        if index % max(1, math.ceil(14 / cell)) == 0:
            parts.append(_text(LEFT - 8, top + cell / 2 + 4, str(layer), "end"))
    drawn = [f'<path fill="{colour}" d="{"".join(pieces)}"/>' for colour, pieces in paths.items()]
    hover = [_layer_title(layer, tokens[layer], TOP + cell * i, cell) for i, layer in enumerate(layers)]
    bottom = TOP + cell * len(layers)
    for i in range(5):
        token = round(i * (length - 1) / 4)
        parts.append(_text(LEFT + (token // together + 0.5) * width, bottom + 16, str(token), "middle"))
    parts += _legend(low, high, bottom + 48)
    binned = f"; {together} tokens a column, the largest of them" if together > 1 else ""
    title = f"layer (down) and token (across): relative error{binned}"
    return _svg(title, math.ceil(bottom + 84), [*drawn, *hover, *parts])


def _worst(values: Sequence[float]) -> float | None:
    """The largest; one that is no number counts as largest. None where a shorter layer has no token."""
    return next((v for v in values if not math.isfinite(v)), max(values, default=None))


def _colour(value: float | None, low: int, high: int) -> str:
    if value is None:
        return "none"
    if not math.isfinite(value):
        return NOT_FINITE
    return RAMP[min(len(RAMP) - 1, int(_up(value, low, high) * len(RAMP)))]


def _runs(colours: Sequence[str]) -> Iterable[tuple[str, int, int]]:
    """Colour, first column and the one behind the last, of neighbours alike."""
    start = 0
    for i in range(1, len(colours) + 1):
        if i == len(colours) or colours[i] != colours[start]:
            yield colours[start], start, i
            start = i


def _layer_title(layer: int, values: Sequence[float], top: float, height: float) -> str:
    """Says where the layer is worst when the pointer rests on it."""
    worst = max(range(len(values)), key=lambda i: values[i] if math.isfinite(values[i]) else math.inf, default=None)
    said = f"layer {layer}: " + ("no tokens" if worst is None else f"{_number(values[worst])} at token {worst}")
    area = f'<rect x="{LEFT}" y="{top:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{height:.1f}" fill-opacity="0">'
    return f"{area}<title>{said}</title></rect>"


def _legend(low: int, high: int, y: float) -> list[str]:
    size = 24
    parts = [
        f'<rect x="{LEFT + size * i}" y="{y}" width="{size}" height="12" fill="{colour}"/>'
        for i, colour in enumerate(RAMP)
    ]
    end = LEFT + size * len(RAMP)
    parts += [_text(LEFT, y + 28, f"1e{low}", "middle"), _text(end, y + 28, f"1e{high}", "middle")]
    parts.append(f'<rect x="{end + 40}" y="{y}" width="{size}" height="12" fill="{NOT_FINITE}"/>')
    return [*parts, _text(end + 70, y + 11, "not finite")]


# ---- SVG -------------------------------------------------------------------------------------------------------------


def _rule(power: int, y: float) -> str:
    return f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="var(--line)"/>' + _text(
        LEFT - 8, y + 4, f"1e{power}", "end"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(points: Sequence[Point], colour: str, dashes: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashed}/>'


def _cross(x: float, y: float) -> str:
    return (
        f'<path class="failed" d="M{x - 6:.1f} {y - 6:.1f}l12 12m0 -12l-12 12" stroke="var(--bad)" stroke-width="2.5"/>'
    )


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    body = "\n".join([_text(LEFT, 18, title), *parts])
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">\n{body}\n</svg>'
