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
from torch import Tensor

from regard.look._model import visible
from regard.look._patterns import maps_of, pattern_of, pick, telling_query
from regard.look._record import Record, Site, Token

# Bytes of weights in a page, before compression; what goes beyond it is left out by a rule that the page states.
_BUDGET = 20_000_000


def page(record: Record, layer: int | None = None, head: int | None = None) -> str:
    """One self-contained page about a record, opened on (layer, head): by default on the most telling head.

    Weights are carried in 16 bits (to within 1/65535); where that would make the page too large (about 20 MB), in 8
    bits (to within 0.004); then only those of the layer, then only those of the head it opens on. The page says which.
    Its policy (`default-src 'none'`) keeps
    the browser from loading or sending anything, and text from the record is inert in it. ValueError for a record
    without sites, and for a layer or head that it does not have.
    """
    if not record.sites:
        raise ValueError("this record holds no attention: there is nothing to draw")
    layer, head = pick(record, layer, head)
    kept, bits, stated = _kept(record, layer, head)
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
        footer="".join(f"<p>{escape(note)}</p>" for note in [*stated, *_FOOTNOTES, *record.notes]),
        record=_data(record, kept, bits, (layer, head, telling_query(site, head))),
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


_FOOTNOTES = (
    "They are the weights of attention itself, before dropout. A weight says where a head looked; it is no explanation "
    "of what the model answered.",
    "This page is complete: it loads nothing and sends nothing.",
)


def _direction(text: str) -> str:
    """The direction of the text: that of its first letter which has one."""
    strong = (unicodedata.bidirectional(character) for character in text)
    first = next((kind for kind in strong if kind in ("L", "R", "AL")), "L")
    return "ltr" if first == "L" else "rtl"


def _kept(record: Record, layer: int, head: int) -> tuple[set[tuple[int, int]], int, list[str]]:
    """Which (layer, head) maps go into the page, in how many bits, and what the page says about that."""
    every = {(number, one) for number, site in enumerate(record.sites) for one in range(site.heads)}
    of_layer = {place for place in every if place[0] == layer}
    for kept, bits in ((every, 16), (every, 8), (of_layer, 16), (of_layer, 8)):
        if sum(_cells(record.sites[number]) for number, _ in kept) * bits // 8 <= _BUDGET:
            break
    else:
        kept, bits = {(layer, head)}, 16
    stated = [f"Weights are shown for each head, to within {'1/65535' if bits == 16 else '0.004'}."]
    if kept != every:
        what = f"layer {layer}" if kept == of_layer else f"layer {layer}, head {head}"
        stated.append(f"Only {what} is in this page: all {len(every)} maps would have made it too large.")
    return kept, bits, stated


def _cells(site: Site) -> int:
    return site.lengths[0] * site.lengths[1]


def _packed(weights: Tensor, bits: int) -> bytes:
    """Weights as whole numbers: 16 bits are linear, 8 bits follow the square root so that small weights survive."""
    shares: np.ndarray[Any, np.dtype[np.float32]] = weights.clamp(0, 1).numpy()
    whole = (
        np.rint(np.sqrt(shares) * 255.0).astype("u1")
        if bits == 8
        else np.rint(shares * 65535.0).astype("<u2")
    )
    packed: bytes = whole.tobytes()
    return packed


def _data(record: Record, kept: set[tuple[int, int]], bits: int, opened: tuple[int, int, int]) -> str:
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
            chunks.append(_packed(maps[one], bits))
        patterns = [pattern_of(part).said(site.key_tokens) for part in maps]
        sites.append({**_described(site), "starts": starts, "patterns": patterns})
    weights = base64.b64encode(zlib.compress(b"".join(chunks), 6)).decode()
    layer, head, query = opened
    data = {"layer": layer, "head": head, "query": query, "sites": sites, "bits": bits, "weights": weights}
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
