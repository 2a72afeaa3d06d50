"""Drawing a figure: where each part goes, in CSS pixels, and the SVG of it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from html import escape

import numpy as np
from rich.cells import cell_len, set_cell_size

from regard.look import _ramps
from regard.look._figure_png import coloured, data_address, grown
from regard.look._page_facts import facts
from regard.look._page_sources import is_signed
from regard.look._record import Record, Token
from regard.look._shown import Array, Shown, name_of, pool
from regard.look._tokens import visible

Drawing = tuple[str, int, int]

_COLOURS = {
    "light": {"ground": "#ffffff", "ink": "#1b1f24", "soft": "#59636e", "line": "#d3d9e0"},
    "dark": {"ground": "#14171b", "ink": "#e6e9ed", "soft": "#9ca7b3", "line": "#363e48"},
}
# Named one by one: rasterisers know no system font, and need the first name to be there for the others to stand in.
_FAMILY = "DejaVu Sans, Noto Sans, Segoe UI, Helvetica Neue, Arial, Liberation Sans, sans-serif"
_NAMED, _LONGEST, _SIDE = 64, 1024, 640
_CELL, _LABEL, _MARGIN = 22, 16, 20
# The width of a terminal cell of text at 12 pixels, and of a bold one at 14: a little more than most letters take.
_SMALL, _BOLD = 7.6, 9.2


def head(record: Record, site: Shown, number: int, scheme: str) -> Drawing:
    """One head in full. Raises ValueError where its weights were not kept, not even as blocks."""
    weights, pooled = _weights(site, number)
    signed, colours = is_signed([site]), _COLOURS[scheme]
    ramp = (_ramps.SIGNED if signed else _ramps.WEIGHT)[scheme]
    rows, columns = weights.shape
    named = (site.Tq <= _NAMED, site.Tk <= _NAMED)
    down, across = (_CELL if one else max(1, _SIDE // max(rows, columns)) for one in named)
    row_names, column_names = _names(site.queries, site.Tq), _names(site.keys, site.Tk)
    left = _MARGIN + round(_longest(row_names) * _SMALL if named[0] else 44) + 8
    rise = round(_longest(column_names) * _SMALL if named[1] else 16)
    wide, tall = columns * across, rows * down
    width = max(left + max(wide, 370) + _MARGIN, 420)
    title = _wrapped(f"{site.title}, head {number}: {site.said(number)}", width - 2 * _MARGIN, _BOLD)
    about = _wrapped(_about(record, site, pooled), width - 2 * _MARGIN, _SMALL)
    parts, top = _heading(title, about, colours)
    top += rise + 12
    parts.append(_map(weights, ramp, left, top, down, across, signed=signed))
    parts.append(_frame(left, top, wide, tall, colours))
    if named[0]:
        parts += [
            _text(name, left - 7, top + (place + 0.5) * down + 4, colours["soft"], anchor="end")
            for place, name in enumerate(row_names)
        ]
    else:
        parts += _ticks(site.Tq, tall, lambda at: (left - 7, top + at + 4), colours, "end")
    if named[1]:
        parts += [
            _text(name, left + (place + 0.5) * across + 4, top - 7, colours["soft"], turned=True)
            for place, name in enumerate(column_names)
        ]
    else:
        parts += _ticks(site.Tk, wide, lambda at: (left + at, top - 7), colours, "middle")
    parts += _legend(left, top + tall + 16, ramp, colours, signed=signed)
    return _whole(parts, width, top + tall + 46, colours)


def overview(record: Record, sites: list[Shown], scheme: str) -> Drawing:
    """All heads side by side: a row a layer, a column a head."""
    signed, colours = is_signed(sites), _COLOURS[scheme]
    ramp = (_ramps.SIGNED if signed else _ramps.WEIGHT)[scheme]
    heads = max(site.heads for site in sites)
    size = max(24, min(56, 900 // heads))
    left, width = 48, max(48 + heads * (size + 6) + _MARGIN, 440)
    about = _wrapped(facts(record, sites), width - 2 * _MARGIN, _SMALL)
    parts, top = _heading(_wrapped("All heads", width, _BOLD), about, colours)
    top += 24
    for number in range(heads):
        parts.append(
            _text(
                str(number), left + number * (size + 6) + size / 2, top - 6, colours["soft"], anchor="middle"
            )
        )
    for place, site in enumerate(sites):
        y = top + place * (size + 6)
        parts.append(_text(str(site.called), left - 8, y + size / 2 + 4, colours["soft"], anchor="end"))
        for number in range(site.heads):
            x = left + number * (size + 6)
            small = _small(site, number, size)
            if small is not None and small.size:
                pixels = coloured(small, ramp, signed=signed)
                parts.append(_picture(_grown_to(pixels, 2 * size), x, y, size, size))
            parts.append(_frame(x, y, size, size, colours))
    bottom = top + len(sites) * (size + 6)
    parts += _legend(left, bottom + 8, ramp, colours, signed=signed)
    return _whole(parts, width, bottom + 38, colours)


def _weights(site: Shown, number: int) -> tuple[Array, bool]:
    """The weights to draw, and whether they are blocks."""
    if site.has_map(number):
        weights = site.map(number)
        if max(weights.shape) <= _LONGEST:
            return weights, False
        return pool(weights, _LONGEST)[1], True
    blocks = site.pooled(number)
    if blocks is None:
        raise ValueError(
            f"{site.title}, head {number}: there is nothing to draw, since its weights were not kept; watch with "
            "keep=Keep(weights=True), or keep=Keep(pool=1024) for a long text"
        )
    return pool(blocks[1], _LONGEST)[1], True


def _small(site: Shown, number: int, size: int) -> Array | None:
    if site.has_map(number):
        return pool(site.map(number), size)[1]
    blocks = site.pooled(number)
    return None if blocks is None else pool(blocks[1], size)[1]


def _about(record: Record, site: Shown, pooled: bool) -> str:
    text = visible(" ".join(record.text.split()))[:200]
    length = f" {site.Tq:,} x {site.Tk:,} weights: each cell is the largest of its block." if pooled else ""
    broken = " Some weights are NaN or infinite, and drawn as 0." if site.not_numbers else ""
    return f"{record.model + ': ' if record.model else ''}{text}{length}{broken}"


def _names(tokens: tuple[Token, ...], length: int) -> list[str]:
    return (
        [_cut(visible(name_of(tokens, place)), _LABEL) for place in range(length)] if length <= _NAMED else []
    )


def _cut(words: str, cells: int) -> str:
    return words if cell_len(words) <= cells else set_cell_size(words, cells - 1).rstrip() + "…"


def _longest(names: list[str]) -> int:
    return max((cell_len(name) for name in names), default=0)


def _wrapped(words: str, width: float, size: float) -> list[str]:
    """At most three lines of a width; what does not fit is cut."""
    room = max(8, int(width / size))
    lines: list[str] = [""]
    for word in words.split(" "):
        joined = f"{lines[-1]} {word}".strip()
        if cell_len(joined) <= room or not lines[-1]:
            lines[-1] = _cut(joined, room)
        else:
            lines.append(_cut(word, room))
    return lines if len(lines) <= 3 else [*lines[:2], _cut(f"{lines[2]} …", room)]


# ------------------------------------------------------------------ parts of the drawing


def _heading(title: list[str], about: list[str], colours: dict[str, str]) -> tuple[list[str], float]:
    y, parts = 14.0, []
    for line in title:
        y += 18
        parts.append(_text(line, _MARGIN, y, colours["ink"], size=14, bold=True))
    y += 3
    for line in about:
        y += 16
        parts.append(_text(line, _MARGIN, y, colours["soft"]))
    return parts, y


def _text(
    words: str,
    x: float,
    y: float,
    fill: str,
    *,
    anchor: str = "start",
    size: int = 12,
    bold: bool = False,
    turned: bool = False,
) -> str:
    place = f'transform="translate({x:g},{y:g}) rotate(-90)"' if turned else f'x="{x:g}" y="{y:g}"'
    more = f' text-anchor="{anchor}"' if anchor != "start" else ""
    more += f' font-size="{size}"' if size != 12 else ""
    more += ' font-weight="bold"' if bold else ""
    return f'<text {place} fill="{fill}"{more}>{escape(_writable(words))}</text>'


def _writable(words: str) -> str:
    """What XML can hold: controls and halves of pairs cannot be written in it."""
    return "".join("\ufffd" if unicodedata.category(one) in ("Cc", "Cs") else one for one in words)


def _map(
    weights: Array,
    ramp: tuple[_ramps.Colour, ...],
    x: float,
    y: float,
    down: int,
    across: int,
    *,
    signed: bool,
) -> str:
    rows, columns = weights.shape
    if weights.size == 0:
        return ""
    return _picture(
        grown(coloured(weights, ramp, signed=signed), down, across), x, y, columns * across, rows * down
    )


def _picture(pixels: Array, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<image x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="{data_address(pixels)}"/>'
    )


def _grown_to(pixels: Array, size: int) -> Array:
    rows = np.arange(size) * pixels.shape[0] // size
    columns = np.arange(size) * pixels.shape[1] // size
    grown_: Array = pixels[rows][:, columns]
    return grown_


def _frame(x: float, y: float, width: float, height: float, colours: dict[str, str]) -> str:
    return (
        f'<rect x="{x - 0.5:g}" y="{y - 0.5:g}" width="{width + 1:g}" height="{height + 1:g}" fill="none" '
        f'stroke="{colours["line"]}"/>'
    )


def _ticks(
    length: int, size: float, at: Callable[[float], tuple[float, float]], colours: dict[str, str], anchor: str
) -> list[str]:
    """Positions along a side too long for names: five round ones."""
    step = _round_step(length / 5)
    parts = []
    for position in range(0, length, step):
        x, y = at(position * size / length)
        parts.append(_text(f"{position:,}", x, y, colours["soft"], anchor=anchor))
    return parts


def _round_step(rough: float) -> int:
    power = int("1" + "0" * (len(str(int(rough))) - 1))
    return max(1, next(power * one for one in (1, 2, 5, 10) if power * one >= rough))


def _legend(
    x: float, y: float, ramp: tuple[_ramps.Colour, ...], colours: dict[str, str], *, signed: bool
) -> list[str]:
    shares = np.linspace(-1 if signed else 0, 1, 128)
    pixels = coloured((np.sign(shares) * shares**2)[None], ramp, signed=signed)
    low, what = ("−1", "change") if signed else ("0", "weight")
    return [
        _text(low, x + 12, y + 10, colours["soft"], anchor="end"),
        _picture(grown(pixels, 2, 1), x + 18, y, 128, 12),
        _frame(x + 18, y, 128, 12, colours),
        _text(f"1   {what}, on a square-root scale", x + 152, y + 10, colours["soft"]),
    ]


def _whole(parts: list[str], width: float, height: float, colours: dict[str, str]) -> Drawing:
    w, h = round(width), round(height)
    body = "\n".join(part for part in parts if part)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" '
        f'font-family="{_FAMILY}" font-size="12">\n<rect width="{w}" height="{h}" fill="{colours["ground"]}"/>\n'
        f"{body}\n</svg>\n"
    )
    return svg, w, h
