"""The terminal renderer: takes a Record and draws it, in colour where there is colour, in plain signs elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.style import Style
from rich.text import Text
from torch import Tensor

from regard.look._model import visible
from regard.look._patterns import LEGEND, maps_of, pattern_of
from regard.look._record import Record, Site, Token

_LABEL = 12
_ROWS = 48
_KEYS_SHOWN = 3
_RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


def console() -> Console:
    """The console to draw on: standard output, as wide as the terminal, 100 columns when it is piped."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=100)


def show(record: Record, layer: int, head: int, console: Console) -> None:
    """Print the record: all heads at a glance, one head in full, and what each of its tokens attends to."""
    colour = console.is_terminal and not console.no_color and console.color_system is not None
    site = record.sites[layer]
    weights = maps_of(site)[head]
    parts = [
        _heading(record),
        _glance(record, console.width) if colour else _plain_glance(record, console.width),
        _head_title(site, layer, head, weights),
        _matrix(site, weights, console.width, colour),
        _links(site, weights),
    ]
    for part in parts:
        for line in part:
            if not colour:
                line.rstrip()
            console.print(line, soft_wrap=True)
        console.print()


def _heading(record: Record) -> list[Text]:
    site = record.sites[0]
    shape = f"{len(record.sites)} layers, {site.heads} heads, {site.lengths[0]} tokens"
    lines = [Text(_cut(visible(record.text), 300), style="bold"), Text(f"{record.model}: {shape}")]
    return lines + [Text(f"note: {note}") for note in record.notes]


def _glance(record: Record, width: int) -> list[Text]:
    """Every head as a small map, two pixels a character, the strongest weight of each pixel kept."""
    heads = max(site.heads for site in record.sites)
    size = max(4, min(8, (width - 4) // heads - 1))
    lines = [Text("all heads, a row a layer: in each map, who looks (down) and at what (across)")]
    for start, stop in _runs(heads, max(1, (width - 4) // (size + 1))):
        names = "".join(str(head).center(size + 1) for head in range(start, stop))
        lines.append(Text("    " + names, style="dim"))
        for layer, site in enumerate(record.sites):
            pixels = [_pooled(part, size, size + size % 2) for part in maps_of(site)[start:stop]]
            lines += _strip(f"{layer:>3} ", pixels)
    return lines


def _strip(label: str, maps: Sequence[Tensor]) -> list[Text]:
    lines = []
    for row in range(0, maps[0].shape[0], 2) if maps else ():
        line = Text().append(label if row == 0 else " " * len(label), "dim")
        for part in maps:
            for top, bottom in zip(part[row].tolist(), part[row + 1].tolist(), strict=True):
                line.append("▀", Style(color=_colour(top), bgcolor=_colour(bottom)))
            line.append(" ")
        lines.append(line)
    return [*lines, Text("")]


def _plain_glance(record: Record, width: int) -> list[Text]:
    """Every head as a letter (where it mostly looks) and a digit (the share of its weight there, in tenths)."""
    heads = max(site.heads for site in record.sites)
    lines = [Text("all heads, a row a layer: where each mostly looks, and how much, in tenths")]
    for start, stop in _runs(heads, max(1, (width - 9) // 4)):
        lines.append(Text("   head " + "".join(f"{head:>4}" for head in range(start, stop))))
        for layer, site in enumerate(record.sites):
            found = [pattern_of(part) for part in maps_of(site)[start:stop]]
            cells = "".join(f"  {one.letter}{min(9, int(one.share * 10))}" for one in found)
            lines.append(Text(f"layer {layer:>2}{cells}"))
    meanings = [f"{letter} {words}" for letter, words in LEGEND.items()]
    return [*lines, Text("   " + ", ".join(meanings[:4])), Text("   " + ", ".join(meanings[4:]))]


def _head_title(site: Site, layer: int, head: int, weights: Tensor) -> list[Text]:
    said = f"layer {layer}, head {head} {pattern_of(weights).said(site.key_tokens)}"
    return [Text(said, style="bold"), Text(site.title, style="dim")]


def _matrix(site: Site, weights: Tensor, width: int, colour: bool) -> list[Text]:
    """One head in full: a row a query, a column a key; pooled, and said so, where it does not fit."""
    rows, columns = min(_ROWS, weights.shape[0]), min((width - _LABEL - 2) // 2, weights.shape[1])
    small = _pooled(weights, columns, rows)
    queries, keys = _labels(site.query_tokens, weights.shape[0]), _labels(site.key_tokens, weights.shape[1])
    lines = []
    if small.shape != weights.shape:
        lines.append(
            Text(
                f"{weights.shape[0]} x {weights.shape[1]} weights do not fit: each cell is the largest of its block"
            )
        )
    lines += _column_heads(_spread(keys, columns))
    for label, row in zip(_spread(queries, rows), small.tolist(), strict=True):
        line = Text(_padded(label, _LABEL) + " ")
        for weight in row:
            line.append(*_cell(weight, colour))
        lines.append(line)
    scale = (
        "0 ▏"
        if colour
        else "a digit is tenths of the weight, + is all of it, . is 0.01 to 0.1, blank is less"
    )
    legend = Text(scale)
    for step in range(11) if colour else ():
        legend.append("  ", Style(bgcolor=_colour(step / 10)))
    return [*lines, legend.append(" 1") if colour else legend]


def _cell(weight: float, colour: bool) -> tuple[str, Style | None]:
    if colour:
        return "  ", Style(bgcolor=_colour(weight))
    if weight >= 0.9995:
        return " +", None
    return (f" {int(weight * 10)}" if weight >= 0.1 else " ." if weight >= 0.01 else "  "), None


def _column_heads(keys: Sequence[str]) -> list[Text]:
    """Key labels written downwards, so that each stands over its column of two cells."""
    height = min(8, max((len(_glyphs(key)) for key in keys), default=0))
    lines = []
    for row in range(height):
        line = " " * (_LABEL + 1)
        for key in keys:
            glyphs = _glyphs(key)[:height]
            shift = row - (height - len(glyphs))
            line += _padded(glyphs[shift], 2, right=True) if shift >= 0 else "  "
        lines.append(Text(line, style="dim"))
    return lines


def _glyphs(label: str) -> list[str]:
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


def _links(site: Site, weights: Tensor) -> list[Text]:
    """For each query, the keys with the most weight."""
    queries, keys = _labels(site.query_tokens, weights.shape[0]), _labels(site.key_tokens, weights.shape[1])
    lines = [Text("which tokens attend to which", style="bold")]
    order = weights.argsort(dim=-1, descending=True, stable=True)[:, :_KEYS_SHOWN]
    for number in range(min(_ROWS, len(queries))):
        line = Text(_padded(queries[number], _LABEL) + " → ")
        for key in order[number].tolist():
            line.append(f"{_padded(keys[key], _LABEL)} {float(weights[number, key]):.2f}   ")
        lines.append(line)
    if len(queries) > _ROWS:
        lines.append(Text(f"... and {len(queries) - _ROWS} more tokens: see the page"))
    return lines


def _labels(tokens: Sequence[Token], length: int) -> list[str]:
    return (
        [token.text for token in tokens]
        if len(tokens) == length
        else [str(number) for number in range(length)]
    )


def _spread(labels: Sequence[str], count: int) -> list[str]:
    """The labels of `count` blocks: each the first of its block."""
    return [labels[start] for start, _ in _blocks(len(labels), count)]


def _pooled(weights: Tensor, columns: int, rows: int) -> Tensor:
    """The largest weight of each of rows x columns blocks; a map smaller than that is stretched."""
    tall = torch.stack([weights[start:stop].amax(0) for start, stop in _blocks(weights.shape[0], rows)])
    return torch.stack(
        [tall[:, start:stop].amax(1) for start, stop in _blocks(weights.shape[1], columns)], dim=1
    )


def _blocks(length: int, count: int) -> list[tuple[int, int]]:
    edges = [(number * length // count, -(-(number + 1) * length // count)) for number in range(count)]
    return [(start, max(start + 1, stop)) for start, stop in edges]


def _runs(count: int, most: int) -> list[tuple[int, int]]:
    return [(start, min(count, start + most)) for start in range(0, count, most)]


def _padded(label: str, width: int, *, right: bool = False) -> str:
    cut = _cut(label, width)
    blank = " " * (width - cell_len(cut))
    return blank + cut if right else cut + blank


def _cut(label: str, width: int) -> str:
    return label if cell_len(label) <= width else set_cell_size(label, width - 1).rstrip() + "…"


def _colour(weight: float) -> Color:
    place = min(1.0, max(0.0, weight)) ** 0.5 * (len(_RAMP) - 1)
    lower = min(int(place), len(_RAMP) - 2)
    low, high, part = _RAMP[lower], _RAMP[lower + 1], place - lower
    return Color.from_rgb(*(a + (b - a) * part for a, b in zip(low, high, strict=True)))


@contextmanager
def download_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr for a download; call what it gives with (bytes done, bytes in all)."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
