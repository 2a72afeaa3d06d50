"""What `--json` prints: the sites, the numbers of every head, and the lists of one head, for other programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from regard.look._difference import Difference
from regard.look._head_columns import Column
from regard.look._page_sources import sources
from regard.look._record import Record
from regard.look._shown import Shown, name_of
from regard.look.terminal import column_of, row_of

FORMAT, VERSION = "regard-look", 1


def document(source: Record | Difference, layer: int, head: int, tokens: Sequence[int] = ()) -> str:
    """The JSON: `sites`, `heads` (one entry a head), and `head`, the rows of the one that was chosen.

    A row lists the keys with the most weight, the largest first; the rows are those of `tokens`, else all.
    """
    record, sites, columns = sources(source)
    site = sites[layer]
    found = {
        "format": FORMAT,
        "version": VERSION,
        "model": record.model,
        "text": record.text,
        "notes": record.notes,
        "sites": [_site(one) for one in sites],
        "heads": [_head(one, number, columns) for one in sites for number in range(one.heads)],
        "head": {
            "site": site.called,
            "head": head,
            "said": site.said(head),
            "rows": [_row(site, head, query) for query in (tokens or range(site.Tq))],
        },
    }
    return json.dumps(found, ensure_ascii=False, indent=1).encode("utf-8", "replace").decode()


def _site(shown: Shown) -> dict[str, Any]:
    site = shown.site
    plain = ("name", "kind", "layer", "call", "implementation", "dtype")
    return {
        "site": shown.called,
        **{name: getattr(site, name) for name in plain},
        "heads": shown.heads,
        "queries": shown.Tq,
        "keys": shown.Tk,
    }


def _head(site: Shown, head: int, columns: list[Column]) -> dict[str, Any]:
    values = {column.name: column.of(site, head) for column in columns}
    return {"site": site.called, "head": head, **values, "said": site.said(head)}


def _row(site: Shown, head: int, query: int) -> dict[str, Any]:
    found: dict[str, Any] = {"query": query, "token": name_of(site.queries, query)}
    found["attends_to"] = [
        {"key": key, "token": name_of(site.keys, key), "weight": round(weight, 6)}
        for key, weight in row_of(site, head, query)
    ]
    if not site.two_sided:
        found["attended_by"] = [
            {"query": other, "token": name_of(site.queries, other), "weight": round(weight, 6)}
            for other, weight in column_of(site, head, query)
        ]
    return found
