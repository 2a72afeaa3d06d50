"""Pieces of a drawing in cells of a terminal: labels measured as they are shown, maps in colour or in plain signs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.style import Style
from rich.text import Text

from regard.look import _ramps
from regard.look._record import Token
from regard.look._shown import Array, name_of
from regard.look._tokens import visible

LABEL = 12


def labels(tokens: tuple[Token, ...], length: int) -> list[str]:
    """What to write for each token of a side."""
    return [visible(name_of(tokens, place)) for place in range(length)]


def glyphs(label: str) -> list[str]:
    """The characters of a label, each with the marks and joiners that take no room of their own."""
    found: list[str] = []
    joined = False
    for character in label:
        if found and (joined or cell_len(character) == 0):
            found[-1] += character
        else:
            found.append(character)
        joined = character == "\u200d"
    return found


def padded(label: str, width: int, *, right: bool = False) -> str:
    """A label in exactly so many cells."""
    short = cut(label, width)
    blank = " " * (width - cell_len(short))
    return blank + short if right else short + blank


def cut(label: str, width: int) -> str:
    """A label in at most so many cells."""
    return label if cell_len(label) <= width else set_cell_size(label, width - 1).rstrip() + "…"


def column_heads(keys: Sequence[str]) -> list[Text]:
    """Key labels written downwards, so that each stands over its column of two cells."""
    height = min(8, max((len(glyphs(key)) for key in keys), default=0))
    lines = []
    for row in range(height):
        line = " " * (LABEL + 1)
        for key in keys:
            signs = glyphs(key)[:height]
            shift = row - (height - len(signs))
            line += padded(signs[shift], 2, right=True) if shift >= 0 else "  "
        lines.append(Text(line, style="dim"))
    return lines


def spread(names: Sequence[str], count: int) -> list[str]:
    """The labels of `count` blocks: each the first of its block."""
    return [names[start] for start, _ in blocks(len(names), count)]


def pooled(weights: Array, columns: int, rows: int) -> Array:
    """The weight of largest size in each of rows x columns blocks; a map smaller than that is stretched."""
    tall = np.stack([_largest(weights[start:stop], 0) for start, stop in blocks(weights.shape[0], rows)])
    wide = [_largest(tall[:, start:stop], 1) for start, stop in blocks(weights.shape[1], columns)]
    found: Array = np.stack(wide, axis=1)
    return found


def _largest(weights: Array, axis: int) -> Array:
    most, least = weights.max(axis), weights.min(axis)
    found: Array = np.where(-least > most, least, most)
    return found


def blocks(length: int, count: int) -> list[tuple[int, int]]:
    """So many ranges that cover a length, as even as they can be; of one place where the length is less."""
    edges = [(number * length // count, -(-(number + 1) * length // count)) for number in range(count)]
    return [(start, max(start + 1, stop)) for start, stop in edges]


def strip(label: str, maps: Sequence[Array], *, signed: bool) -> list[Text]:
    """Small maps side by side, two rows of pixels in a row of cells."""
    lines = []
    for row in range(0, maps[0].shape[0], 2) if maps else ():
        line = Text().append(label if row == 0 else " " * len(label), "dim")
        for part in maps:
            for top, bottom in zip(part[row].tolist(), part[row + 1].tolist(), strict=True):
                line.append("▀", Style(color=colour(top, signed), bgcolor=colour(bottom, signed)))
            line.append(" ")
        lines.append(line)
    return [*lines, Text("")]


def cell(weight: float, *, coloured: bool, signed: bool) -> tuple[str, Style | None]:
    """One weight in two cells: a colour, or a digit of tenths."""
    if coloured:
        return "  ", Style(bgcolor=colour(weight, signed))
    size, sign = abs(weight), "-" if weight < 0 else " "
    if size >= 0.9995:
        return f"{sign}+" if sign == " " else "-X", None
    return (f"{sign}{int(size * 10)}" if size >= 0.1 else f"{sign}." if size >= 0.01 else "  "), None


def legend(*, coloured: bool, signed: bool) -> Text:
    """What the colours or signs mean."""
    if not coloured:
        said = "a digit is tenths of the weight, + is all of it, . is 0.01 to 0.1, blank is less"
        if signed:
            said = "a digit is tenths, . is 0.01 to 0.1, blank is less, -X is all of it less; what has no sign is more"
        return Text(said)
    line = Text("-1 " if signed else "0 ▏")
    for step in range(11):
        line.append("  ", Style(bgcolor=colour(step / 5 - 1 if signed else step / 10, signed)))
    return line.append(" 1")


def colour(weight: float, signed: bool) -> Color:
    """The colour of a weight, or of a difference."""
    if signed:
        return Color.from_rgb(*_ramps.of_signed(weight, _ramps.SIGNED["dark"]))
    return Color.from_rgb(*_ramps.of_weight(weight, _ramps.TERMINAL))


def bar(share: float, width: int) -> str:
    """A share as a bar of at most `width` cells, in eighths of a cell."""
    eighths = round(min(1.0, abs(share)) * width * 8)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
