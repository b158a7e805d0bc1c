"""The report of `tiers bench` as one page that needs nothing beside itself: tables, and plots drawn as inline SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tiers.vllm_model.bench_report import EngineResult, KernelResult, Report, details, engine_rows, facts, kernel_rows
from tiers.vllm_model.plan import Tier

# Distinguishable with impaired colour vision (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2em .8em .2em 0; text-align: left; vertical-align: top; border-bottom: 1px solid #ddd; }
td.bad { color: #b00020; font-weight: 600; }
.partial { background: #fff3cd; padding: .5em 1em; }
svg { display: block; margin: 1em 0; max-width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: #222; }
"""

TIERS = {tier.value for tier in Tier}

# Size of a plot and its margins, in pixels.
WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 36, 44


@dataclass(frozen=True)
class Series:
    """A line of a plot: points (x, y), and for each the y of the limit, or None."""

    name: str
    points: tuple[tuple[float, float, float | None], ...]


def page(report: Report) -> str:
    """The whole document."""
    title = f"tiers bench: {report.environment.get('device', '')}"
    parts = [f"<h1>{escape(title)}</h1>"]
    if not report.complete:
        parts.append('<p class="partial">This report is partial: the run was broken off.</p>')
    if report.engines:
        parts += ["<h2>Engines</h2>", *_engine_plot(report.engines), _table(engine_rows(report.engines))]
    if report.kernels:
        parts.append("<h2>Operators</h2>")
        parts += [*_kernel_plots(report.kernels), _table(kernel_rows(report.kernels))]
    if lines := details(report):
        parts += ["<h2>Notes</h2>", "<ul>", *(f"<li>{escape(line)}</li>" for line in lines), "</ul>"]
    parts += ["<h2>Measured on and with</h2>", _table([["name", "value"], *map(list, facts(report))])]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    lines = [f"<tr>{head}</tr>"]
    for row in rows[1:]:
        cells = (f"<td{' class=bad' if cell == 'FAIL' else ''}>{escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _kernel_plots(results: Sequence[KernelResult]) -> list[str]:
    """Speed-up over dense attention against the context: a plot for each phase and batch, a line for each tier and pattern."""
    plots: dict[str, dict[str, list[tuple[float, float, float | None]]]] = {}
    for result in results:
        # The dense attention that is compared with is 1 by definition.
        if result.dense is None or result.speedup is None or result.tier not in TIERS:
            continue
        lines = plots.setdefault(f"{result.phase}, batch {result.batch}", {})
        limit = None if result.limit is None else result.dense / result.limit
        lines.setdefault(f"{result.tier}, {result.what}", []).append((result.context, result.speedup, limit))
    title = "times faster than dense attention; dashed: the device's limit"
    return [
        lines_plot(f"{name}: {title}", [Series(line, tuple(sorted(points))) for line, points in lines.items()])
        for name, lines in plots.items()
    ]


def _engine_plot(results: Sequence[EngineResult]) -> list[str]:
    """Generated tokens per second, one bar per engine and start."""
    bars = [
        (f"{r.name}, start {r.start + 1}", r.tokens_per_s.median, r.tokens_per_s.p10, r.tokens_per_s.p90)
        for r in results
        if r.tokens_per_s is not None
    ]
    return [bars_plot("generated tokens per second", bars)] if bars else []


def lines_plot(title: str, series: Sequence[Series]) -> str:
    """Lines over two logarithmic axes, their limits dashed."""
    xs = sorted({x for line in series for x, _, _ in line.points})
    ys = [y for line in series for _, *both in line.points for y in both if y is not None]
    low, high = math.floor(math.log2(min(*ys, 1))), math.ceil(math.log2(max(*ys, 1.01)))
    first, last = math.log2(xs[0]), math.log2(xs[-1])
    legend = 18 * len(series) + 8
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = 0.5 if last == first else (math.log2(x) - first) / (last - first)
        up = (math.log2(y) - low) / (high - low)
        # A little room at both ends, so that points do not sit on the frame.
        return LEFT + inner_w * (0.04 + 0.92 * across), TOP + inner_h * (1 - up)

    parts = [_axis(power, place(xs[0], 2.0**power)[1]) for power in range(low, high + 1)]
    for x in xs:
        parts.append(_text(place(x, 1)[0], HEIGHT - BOTTOM + 18, f"{x:g}", "middle"))
    parts.append(_text(LEFT + inner_w / 2, HEIGHT - 8, "tokens in the cache", "middle"))
    for index, line in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        reached = [place(x, y) for x, y, _ in line.points]
        limits = [place(x, limit) for x, _, limit in line.points if limit is not None]
        parts.append(_polyline(reached, colour))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in reached]
        parts.append(_polyline(limits, colour, dashed=True))
        parts += [f'<path d="M{x - 5:.1f} {y:.1f}h10" stroke="{colour}"/>' for x, y in limits]
        y = HEIGHT + 18 * index + 12
        parts.append(f'<rect x="{LEFT}" y="{y - 9}" width="14" height="10" fill="{colour}"/>')
        parts.append(_text(LEFT + 20, y, line.name))
    return _svg(title, HEIGHT + legend, parts)


def bars_plot(title: str, bars: Sequence[tuple[str, float, float, float]]) -> str:
    """Horizontal bars (name, value, low, high) with their spread."""
    left, step = 20 + 7 * max(len(name) for name, *_ in bars), 30
    top = 1.1 * max(high for _, _, _, high in bars)
    scale = (WIDTH - left - 90) / top
    parts = []
    for index, (name, value, low, high) in enumerate(bars):
        y, colour = TOP + step * index, COLOURS[index % len(COLOURS)]
        parts.append(_text(left - 8, y + 15, name, "end"))
        parts.append(f'<rect x="{left}" y="{y}" width="{value * scale:.1f}" height="20" fill="{colour}"/>')
        parts.append(f'<path d="M{left + low * scale:.1f} {y + 10}H{left + high * scale:.1f}" stroke="#222"/>')
        parts.append(_text(left + high * scale + 8, y + 15, f"{value:,.1f}"))
    return _svg(title, TOP + step * len(bars) + 8, parts)


def _axis(power: int, y: float) -> str:
    """A line at a power of two, with its name; the one at 1 stands out."""
    line = f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{"#ddd" if power else "#222"}"/>'
    return line + _text(LEFT - 8, y + 4, f"{2**power}" if power >= 0 else f"1/{2**-power}", "end")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _polyline(points: Sequence[tuple[float, float]], colour: str, dashed: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>'


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    body = "\n".join([_text(LEFT, 18, title), *parts])
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">\n{body}\n</svg>'
