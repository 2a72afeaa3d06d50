"""Small multiples of line charts as one SVG that reads in light and in dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 310, 240, 48, 40, 44, 14
_STYLE = """\
svg { background: #fff; color: #222; font: 11px system-ui, sans-serif }
.c0 { color: #0072b2 } .c1 { color: #b84c00 } .c2 { color: #007d5a } .c3 { color: #a8527f }
.line { fill: none; stroke: currentColor; stroke-width: 2 } .grid { stroke: #ddd } .title { font-weight: 600 }
text, tspan { fill: currentColor }
@media (prefers-color-scheme: dark) { svg { background: #161616; color: #ddd } .grid { stroke: #3a3a3a }
.c0 { color: #56b4e9 } .c1 { color: #e69f00 } .c2 { color: #2cc295 } .c3 { color: #e79fc8 } }"""


@dataclass(frozen=True)
class Line:
    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """One chart. ``low`` and ``high`` are the ends of the y axis; what lies outside is drawn at the edge."""

    title: str
    x_label: str
    lines: Sequence[Line]
    low: float
    high: float
    log_x: bool = False
    log_y: bool = False


def svg(panels: Sequence[Panel], columns: int, description: str) -> str:
    """The panels, row by row, each with its own legend in the colours of its lines."""
    rows = -(-len(panels) // columns)
    width, height = columns * WIDTH, rows * HEIGHT
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    parts = [head, f"<title>{escape(description)}</title>", f"<style>{_STYLE}</style>"]
    for number, panel in enumerate(panels):
        x, y = number % columns * WIDTH, number // columns * HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    xs = [x for line in panel.lines for x in line.xs]
    across = _axis(min(xs), max(xs), panel.log_x, LEFT, WIDTH - RIGHT)
    up = _axis(panel.low, panel.high, panel.log_y, HEIGHT - BOTTOM, TOP)
    parts = [f'<text class="title" x="{LEFT}" y="18">{escape(panel.title)}</text>']
    names = [
        f'<tspan class="c{place}" dx="8">{escape(line.name)}</tspan>'
        for place, line in enumerate(panel.lines)
    ]
    parts.append(f'<text x="{LEFT - 8}" y="34">{"".join(names)}</text>')
    for tick in _ticks(panel.low, panel.high, panel.log_y):
        y = up(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_said(tick)}</text>')
    for tick in _ticks(min(xs), max(xs), panel.log_x):
        parts.append(
            f'<text x="{across(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_said(tick)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(panel.x_label)}</text>')
    for number, line in enumerate(panel.lines):
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in zip(line.xs, line.ys, strict=True))
        parts.append(f'<polyline class="line c{number}" points="{points}"/>')
    return parts


def _axis(low: float, high: float, log: bool, start: float, stop: float) -> Callable[[float], float]:
    def place(value: float) -> float:
        value = min(max(value, low), high)
        share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        return start + share * (stop - start)

    return place


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if not log and 2 <= high - low <= 10 and float(low).is_integer() and float(high).is_integer():
        return [low + step for step in range(int(high - low) + 1)]
    if not log:
        return [low + (high - low) * part / 4 for part in range(5)]
    base = 10 if high / low > 3000 else 4
    powers = range(math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9) + 1)
    return [float(base) ** power for power in powers]


def _said(number: float) -> str:
    return f"{number:g}" if number >= 0.001 or number == 0 else f"{number:.0e}"
