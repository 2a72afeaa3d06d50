"""The page renderer: takes a Record and makes one HTML file that needs nothing else, and may load nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import unicodedata
import zlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np

from regard.look._model import visible
from regard.look._patterns import maps_of, pattern_of, pick, telling_query
from regard.look._record import Record, Site, Token

# Bytes of weights in a page, before compression; what goes beyond it is left out by a rule that the page states.
_BUDGET = 14_000_000


def page(record: Record, layer: int | None = None, head: int | None = None) -> str:
    """One self-contained page about a record, opened on (layer, head): by default on the most telling head.

    Every weight is carried to within 1/65535. When all of them would make the page too large (about 20 MB), only the
    layer, and then only the head it opens on is kept, and the page says so. Its policy (`default-src 'none'`) keeps
    the browser from loading or sending anything, and text from the record is inert in it. ValueError for a record
    without sites, and for a layer or head that it does not have.
    """
    if not record.sites:
        raise ValueError("this record holds no attention: there is nothing to draw")
    layer, head = pick(record, layer, head)
    kept, left_out = _kept(record, layer, head)
    style, script = _part("look.css"), _part("look.js")
    site = record.sites[layer]
    return Template(_part("page.html")).substitute(
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'",
        title=escape(f"Attention: {visible(record.text)[:60]}"),
        style=style,
        text=escape("\n".join(visible(line) for line in record.text.splitlines())),
        facts=escape(_facts(record)),
        direction=_direction(record.text),
        footer="".join(f"<p>{escape(note)}</p>" for note in [*_footnotes(), *left_out, *record.notes]),
        record=_data(record, kept, layer, head, telling_query(site, head)),
        script=script,
    )


def _part(name: str) -> str:
    return (files("regard.look") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _facts(record: Record) -> str:
    queries, keys = record.sites[0].lengths
    length = f"{queries} tokens" if queries == keys else f"{queries} queries, {keys} keys"
    return f"{record.model}: {len(record.sites)} layers, {record.sites[0].heads} heads, {length}"


def _footnotes() -> list[str]:
    return [
        "Weights are those of attention itself, for each head, before dropout, to within 1/65535. A weight says where "
        "a head looked; it is no explanation of what the model answered.",
        "This page is complete: it loads nothing and sends nothing.",
    ]


def _direction(text: str) -> str:
    """The direction of the text: that of its first letter which has one."""
    strong = (unicodedata.bidirectional(character) for character in text)
    first = next((kind for kind in strong if kind in ("L", "R", "AL")), "L")
    return "ltr" if first == "L" else "rtl"


def _kept(record: Record, layer: int, head: int) -> tuple[set[tuple[int, int]], list[str]]:
    """Which (layer, head) maps go into the page, and what to say about the ones that do not."""
    every = {(number, one) for number, site in enumerate(record.sites) for one in range(site.heads)}
    of_layer = {place for place in every if place[0] == layer}
    for kept in (every, of_layer):
        if sum(_bytes(record.sites[number]) for number, _ in kept) <= _BUDGET:
            break
    else:
        kept = {(layer, head)}
    if kept == every:
        return kept, []
    what = f"layer {layer}" if kept == of_layer else f"layer {layer}, head {head}"
    return kept, [f"Only {what} is in this page: all {len(every)} maps would have made it too large."]


def _bytes(site: Site) -> int:
    return 2 * site.lengths[0] * site.lengths[1]


def _data(record: Record, kept: set[tuple[int, int]], layer: int, head: int, query: int) -> str:
    chunks: list[bytes] = []
    sites, start = [], 0
    for number, site in enumerate(record.sites):
        maps = maps_of(site)
        starts: list[int | None] = []
        for one in range(site.heads):
            if (number, one) not in kept:
                starts.append(None)
                continue
            starts.append(start)
            start += maps[one].numel()
            chunks.append(np.rint(maps[one].clamp(0, 1).numpy() * 65535.0).astype("<u2").tobytes())
        patterns = [pattern_of(part).said(site.key_tokens) for part in maps]
        sites.append({**_described(site), "starts": starts, "patterns": patterns})
    packed = base64.b64encode(zlib.compress(b"".join(chunks), 6)).decode()
    data = {"layer": layer, "head": head, "query": query, "sites": sites, "weights": packed}
    return json.dumps(data).replace("<", "\\u003c")


def _described(site: Site) -> dict[str, Any]:
    queries, keys = site.lengths
    return {
        "title": site.title,
        "cross": site.kind == "cross" or site.query_tokens != site.key_tokens,
        "queries": _table(site.query_tokens, queries),
        "keys": _table(site.key_tokens, keys),
    }


def _table(tokens: Sequence[Token], length: int) -> list[dict[str, Any]]:
    if len(tokens) != length:
        return [{"text": str(number), "special": False} for number in range(length)]
    return [{"text": token.text, "special": token.special} for token in tokens]
