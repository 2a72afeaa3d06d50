"""The terminal renderer: takes a Record and draws it, in colour where there is colour, in plain signs elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from regard.look._difference import Difference
from regard.look._page_facts import facts
from regard.look._page_sources import is_signed, sources
from regard.look._patterns import refuse
from regard.look._record import Record
from regard.look._shown import Array, Shown
from regard.look._terminal_draw import (
    LABEL,
    bar,
    cell,
    column_heads,
    cut,
    labels,
    legend,
    padded,
    pooled,
    spread,
    strip,
)
from regard.look._tokens import visible

_ROWS = 48
_KEYS_SHOWN = 3
_LISTED = 10
# What a head does in one letter, for terminals without colour.
LETTERS = {
    "induction": "i",
    "previous-token": "p",
    "next-token": "n",
    "same-token": "s",
    "first-token": "f",
    "separator": "e",
    "local": "l",
    "uniform": "u",
    "mixed": "-",
    "not kept": "?",
    "hardly changed": "-",
    "changed": "c",
    "changed much": "C",
}


def console() -> Console:
    """The console to draw on: standard output, as wide as the terminal, 100 columns when it is piped."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=100)


def show(
    source: Record | Difference, layer: int, head: int, console: Console, tokens: Sequence[int] = ()
) -> None:
    """Print all heads at a glance, one head in full, and what its tokens attend to.

    With `tokens`, instead of the list of all tokens, each of those: what it attends to and what attends to it.
    """
    record, sites, _ = sources(source)
    coloured = console.is_terminal and not console.no_color and console.color_system is not None
    signed, site = is_signed(sites), sites[layer]
    parts = [
        _heading(record, sites),
        _glance(sites, console.width, signed=signed) if coloured else _plain_glance(sites, console.width),
        _head_title(site, head),
        _matrix(site, head, console.width, coloured=coloured, signed=signed),
        *(_token(site, head, token) for token in tokens),
    ]
    if not tokens:
        parts.append(_links(site, head))
    for part in parts:
        for line in part:
            if not coloured:
                line.rstrip()
            console.print(line, soft_wrap=True)
        if part:
            console.print()


def _heading(record: Record, sites: list[Shown]) -> list[Text]:
    texts = [cut(visible(line), 300) for line in record.text.splitlines()[:4] if line.strip()]
    lines = [Text(text, style="bold") for text in texts]
    return [*lines, Text(facts(record, sites)), *(Text(f"note: {note}") for note in record.notes)]


def _glance(sites: list[Shown], width: int, *, signed: bool) -> list[Text]:
    """Every head as a small map, two pixels a character, the strongest weight of each pixel kept."""
    heads = max(site.heads for site in sites)
    size = max(4, min(8, (width - 4) // heads - 1))
    lines = [Text("all heads, a row a layer: in each map, who looks (down) and at what (across)")]
    for start, stop in _runs(heads, max(1, (width - 4) // (size + 1))):
        names = "".join(str(head).center(size + 1) for head in range(start, stop))
        lines.append(Text("    " + names, style="dim"))
        for site in sites:
            maps = [_small(site, head, size) for head in range(start, min(stop, site.heads))]
            lines += strip(f"{site.called:>3} ", maps, signed=signed)
    return lines


def _small(site: Shown, head: int, size: int) -> Array:
    weights = _weights(site, head)
    even = size + size % 2
    return np.zeros((even, size)) if weights is None else pooled(weights, size, even)


def _weights(site: Shown, head: int) -> Array | None:
    """The map of a head, or its blocks; None where there is neither, and where it is empty."""
    if site.has_map(head):
        weights = site.map(head)
        return weights if weights.size else None
    blocks = site.pooled(head)
    return None if blocks is None else blocks[1]


def _plain_glance(sites: list[Shown], width: int) -> list[Text]:
    """Every head as a letter (what it does) and a digit (the share of its weight that does, in tenths)."""
    heads = max(site.heads for site in sites)
    lines = [
        Text("all heads, a row a layer: what each mostly does, and with how much of its weight, in tenths")
    ]
    for start, stop in _runs(heads, max(1, (width - 9) // 4)):
        lines.append(Text("   head " + "".join(f"{head:>4}" for head in range(start, stop))))
        for site in sites:
            marks = [
                f"  {LETTERS[site.kind(head)]}{_tenths(site.share(head))}"
                for head in range(start, min(stop, site.heads))
            ]
            lines.append(Text(f"layer {site.called:>2}{''.join(marks)}"))
    used = {site.kind(head) for site in sites for head in range(site.heads)}
    lines += [
        Text("   " + line)
        for line in _folded([f"{LETTERS[kind]} {kind}" for kind in LETTERS if kind in used], width - 3)
    ]
    return lines


def _tenths(share: float | None) -> str:
    return " " if share is None or not math.isfinite(share) else str(min(9, int(share * 10 + 1e-6)))


def _folded(words: list[str], width: int) -> list[str]:
    lines = [""]
    for word in words:
        joined = f"{lines[-1]}, {word}" if lines[-1] else word
        if len(joined) > width and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = joined
    return lines


def _head_title(site: Shown, head: int) -> list[Text]:
    _weights(site, head)
    said = f"{site.title[0].lower()}{site.title[1:]}, head {head}: {site.said(head)}"
    lines = [Text(visible(said), style="bold"), Text(visible(site.facts), style="dim")]
    if head in site.not_numbers:
        lines.append(Text("some of its weights are NaN or infinite; they are drawn as 0"))
    return lines


def _matrix(site: Shown, head: int, width: int, *, coloured: bool, signed: bool) -> list[Text]:
    """One head in full: a row a query, a column a key; pooled, and said so, where it does not fit."""
    weights = _weights(site, head)
    if weights is None:
        return [Text("there is no map of this head: its weights were not kept, or there are no tokens")]
    rows = min(_ROWS, weights.shape[0])
    columns = min(max(1, (width - LABEL - 2) // 2), weights.shape[1])
    small = pooled(weights, columns, rows)
    lines = []
    if small.shape != (site.Tq, site.Tk):
        lines.append(Text(f"{site.Tq} x {site.Tk} weights do not fit: each cell is the largest of its block"))
    lines += column_heads(spread(labels(site.keys, site.Tk), columns))
    names = spread(labels(site.queries, site.Tq), rows)
    for label, row in zip(names, small.tolist(), strict=True):
        line = Text(padded(label, LABEL) + " ")
        for weight in row:
            line.append(*cell(weight, coloured=coloured, signed=signed))
        lines.append(line)
    return [*lines, legend(coloured=coloured, signed=signed)]


def _links(site: Shown, head: int) -> list[Text]:
    """For each query, the keys with the most weight."""
    top = site.top(head, _KEYS_SHOWN)
    if top is None or top.weights.size == 0:
        return []
    queries, keys = labels(site.queries, site.Tq), labels(site.keys, site.Tk)
    lines = [Text("which tokens attend to which", style="bold")]
    for number in range(min(_ROWS, len(queries))):
        line = Text(padded(queries[number], LABEL) + " → ")
        for weight, key in zip(top.weights[number].tolist(), top.keys[number].tolist(), strict=True):
            if key >= 0:
                line.append(f"{padded(keys[key], LABEL)} {weight:.2f}   ")
        lines.append(line)
    if len(queries) > _ROWS:
        lines.append(Text(f"... and {len(queries) - _ROWS} more tokens: see the page"))
    return lines


def _token(site: Shown, head: int, token: int) -> list[Text]:
    """One token: what it attends to and, where queries and keys are the same tokens, what attends to it."""
    queries, keys = labels(site.queries, site.Tq), labels(site.keys, site.Tk)
    if not 0 <= token < site.Tq:
        refuse("token", token, list(range(site.Tq)))
    lines = [Text(f"token {token}, {queries[token]}, attends to", style="bold")]
    lines += [_listed(keys[key], key, share) for key, share in row_of(site, head, token)]
    if not site.two_sided:
        lines.append(Text(f"token {token}, {queries[token]}, is attended to by", style="bold"))
        lines += [_listed(queries[query], query, share) for query, share in column_of(site, head, token)]
    return lines


def _listed(name: str, place: int, share: float) -> Text:
    return Text(f"{padded(name, LABEL)} {place:>6}  {share:6.3f} {bar(share, 30)}")


def row_of(site: Shown, head: int, query: int) -> list[tuple[int, float]]:
    """(key, weight) of the largest weights of a query."""
    whole = site.row(head, query)
    if whole is not None:
        order = np.argsort(-np.abs(whole), kind="stable")[:_LISTED]
        return [(int(key), float(whole[key])) for key in order if abs(whole[key]) >= 0.0005]
    top = site.top(head, _LISTED)
    if top is None:
        return []
    pairs = zip(top.keys[query].tolist(), top.weights[query].tolist(), strict=True)
    return [(key, weight) for key, weight in pairs if key >= 0 and abs(weight) >= 0.0005]


def column_of(site: Shown, head: int, key: int) -> list[tuple[int, float]]:
    """(query, weight) of the largest weights that a key gets, as far as the record tells."""
    if site.has_map(head):
        shares = site.map(head)[:, key]
    else:
        top = site.top(head, _LISTED)
        if top is None:
            return []
        shares = (top.weights * (top.keys == key)).sum(-1)
    order = np.argsort(-np.abs(shares), kind="stable")[:_LISTED]
    return [(int(query), float(shares[query])) for query in order if abs(shares[query]) >= 0.0005]


def _runs(count: int, most: int) -> list[tuple[int, int]]:
    return [(start, min(count, start + most)) for start in range(0, count, most)]


@contextmanager
def download_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr for a download; call what it gives with (bytes done, bytes in all)."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
