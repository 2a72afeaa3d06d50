"""The numbers of a head that renderers list: the columns of the catalogue on the page, in the terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from regard.look._shown import Shown


@dataclass(frozen=True)
class Column:
    """A column: its heading, what it means, its form ("words", "share" or "number"), and its value for a head."""

    title: str
    name: str
    hint: str
    form: str
    of: Callable[[Shown, int], str | float | None]


_COLUMNS = (
    Column("kind", "kind", "where the head mostly looks", "words", lambda site, head: site.kind(head)),
    Column(
        "eff. keys",
        "effective_keys",
        "effective number of keys: e to the entropy of a row, the mean over the rows",
        "number",
        lambda site, head: _round(site.effective(head)),
    ),
    Column(
        "distance",
        "distance",
        "mean distance from a token to what it attends to, in tokens",
        "number",
        lambda site, head: _round(site.mean("distance", head)),
    ),
    Column(
        "largest",
        "largest",
        "the largest weight of a row, the mean over the rows",
        "share",
        lambda site, head: _round(site.mean("max", head)),
    ),
    Column(
        "previous",
        "previous",
        "the share of all weight on the token before",
        "share",
        lambda site, head: _round(site.mean("previous", head)),
    ),
    Column(
        "itself",
        "self",
        "the share of all weight on the token itself",
        "share",
        lambda site, head: _round(site.mean("self", head)),
    ),
    Column(
        "first",
        "first",
        "the share of all weight on the first token",
        "share",
        lambda site, head: _round(site.mean("first", head)),
    ),
    Column(
        "special",
        "special",
        "the share of all weight on special tokens",
        "share",
        lambda site, head: _round(site.mean("special", head)),
    ),
)


def columns_of(sites: list[Shown]) -> list[Column]:
    """The columns that have a value somewhere in these sites; the first, the kind, always."""
    return [
        column
        for column in _COLUMNS
        if column.form == "words"
        or any(column.of(site, head) is not None for site in sites for head in range(site.heads))
    ]


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)
