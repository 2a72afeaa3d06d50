"""What can be drawn: a record, or the difference of two, as sites with the columns that list their heads."""

from __future__ import annotations

from regard.look._compared import COLUMNS, Compared, compared
from regard.look._difference import Difference
from regard.look._head_columns import Column, columns_of
from regard.look._record import Record
from regard.look._shown import Shown, shown


def sources(source: Record | Difference) -> tuple[Record, list[Shown], list[Column]]:
    """(record, sites, columns). Raises ValueError for a record without sites, or one that disagrees with itself."""
    if isinstance(source, Difference):
        record, pairs = compared(source)
        return record, list(pairs), COLUMNS
    sites = shown(source)
    return source, sites, columns_of(sites)


def is_signed(sites: list[Shown]) -> bool:
    """Whether these are differences of weights."""
    return any(isinstance(site, Compared) or _negative(site) for site in sites)


def _negative(site: Shown) -> bool:
    whole = site.site.whole
    return whole is not None and bool((whole < 0).any())
