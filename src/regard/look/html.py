"""The page renderer: takes a Record and makes one HTML file that needs nothing else, and may load nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from regard.look import _page_pack, _ramps
from regard.look._difference import Difference
from regard.look._head_columns import Column
from regard.look._opening import opening, telling_query
from regard.look._page_facts import facts, honesty
from regard.look._page_pack import Packer
from regard.look._page_sources import is_signed, sources
from regard.look._record import Grid, Record, Token
from regard.look._shown import Shown
from regard.look._tokens import visible

# What a page may carry of weights, in bytes; what goes beyond is left out by a rule that the page states.
BUDGET = 20_000_000
_SCRIPTS = ("data", "colour", "state", "overview", "map", "tokens", "picture", "needles", "save", "main")
# A longer text is not repeated at the top of the page: it can be read token by token below.
_TEXT_SHOWN = 20_000
_PICTURE = 448
# Halves of surrogate pairs, which no file can hold.
_HALVES = re.compile("[\ud800-\udfff]")
# A longer text is shown in small letters.
_LARGE = 300


def page(
    source: Record | Difference,
    layer: int | None = None,
    head: int | None = None,
    *,
    token: int | None = None,
    budget: int = BUDGET,
) -> str:
    """One self-contained page about a record, or about the difference of two, opened on (layer, head).

    By default on the most telling head, or the most changed one, and there on `token`, by default the most telling.

    `layer` is the place of a site in the record. Weights are carried in 16 bits (to within 1/65535) while they are few,
    beyond that in 8 (along the square root, to within 0.004) beside the 8 largest of each row in 16. `budget`, in
    bytes, bounds what is carried: whole maps first, of the head it opens on, its layer, then the others; then blocks
    of 256 x 256, then lists of the largest weights, then only small pictures. Sites of more than 2,048 tokens are
    carried as blocks (largest and mean) and lists. The page says what it left out. Its policy (`default-src 'none'`)
    keeps the browser from loading or sending anything, and text from the record is inert in it. ValueError for a
    record without sites, one that disagrees with itself, and for a layer, head or token that it does not have.
    """
    record, sites, columns = sources(source)
    layer, head = opening(sites, layer, head)
    if token is None:
        token = telling_query(sites[layer], head)
    elif not 0 <= token < sites[layer].Tq:
        raise ValueError(f"page(token=): there are {sites[layer].Tq} tokens, counted from 0; got {token}")
    packer = Packer(budget, signed=is_signed(sites))
    data = _data(record, sites, packer, (layer, head, token), columns)
    style, script = _part("look.css"), _script()
    title = f"Attention: {visible(record.text)[:60]}" if record.text else f"Attention in {record.model}"
    text = "\n".join(visible(line) for line in record.text[:_TEXT_SHOWN].splitlines())
    made = Template(_part("page.html")).substitute(
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'",
        title=escape(title),
        heading="Attention, compared" if packer.signed else "Attention",
        style=style,
        size="text" if len(record.text) <= _LARGE else "text long",
        missing="" if _all_drawn(data) else " Of the grey ones the record holds no weights.",
        text=escape(text + ("…" if len(record.text) > _TEXT_SHOWN else "")),
        facts=escape(facts(record, sites)),
        footer=honesty(record, sites, packer),
        record=json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        script=script,
    )
    return _HALVES.sub("\ufffd", made)


def notebook(record: Record, height: int = 900) -> str:
    """The page in a frame of its own (`srcdoc`), for notebooks: what `_repr_html_` gives."""
    frame = "width: 100%; border: 1px solid #8884; border-radius: 6px"
    return (
        f'<iframe title="Attention" style="{frame}; height: {height}px" '
        f'srcdoc="{escape(page(record), quote=True)}"></iframe>'
    )


def _part(name: str) -> str:
    return (files("regard.look") / "page" / name).read_text(encoding="utf-8")


def _script() -> str:
    parts = "\n".join(_part(f"{name}.js") for name in _SCRIPTS)
    return f'"use strict";\n(async () => {{\n{parts}}})();\n'


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _all_drawn(data: dict[str, Any]) -> bool:
    return all(head["drawn"] for site in data["sites"] for head in site["heads"])


def _direction(text: str) -> str:
    """The direction of the text: that of its first letter which has one."""
    strong = (unicodedata.bidirectional(character) for character in text)
    first = next((kind for kind in strong if kind in ("L", "R", "AL")), "L")
    return "ltr" if first == "L" else "rtl"


class _Tables:
    """The tables of tokens, each once."""

    def __init__(self, record: Record, packer: Packer) -> None:
        self.record, self.packer = record, packer
        self.found: list[dict[str, Any]] = []
        self._places: dict[Any, int] = {}

    def place(self, tokens: Sequence[Token], length: int, grid: Grid | None) -> int:
        key = (tokens, length, grid)
        if key not in self._places:
            self._places[key] = len(self.found)
            self.found.append(self._table(tokens, length, grid))
        return self._places[key]

    def _table(self, tokens: Sequence[Token], length: int, grid: Grid | None) -> dict[str, Any]:
        named = [[one.text, one.start, one.stop, int(one.special)] for one in tokens]
        return {
            "tokens": named if len(tokens) == length else None,
            "length": length,
            "dir": _direction("".join(one.text for one in tokens[:2000] if not one.special)),
            "grid": None if grid is None else self._grid(grid),
        }

    def _grid(self, grid: Grid) -> dict[str, Any]:
        image = self.record.image
        found: dict[str, Any] = {
            "rows": grid.rows,
            "columns": grid.columns,
            "first": grid.leading,
            "image": None,
        }
        if image is not None:
            step = max(1, -(-max(image.shape[:2]) // _PICTURE))
            small = image[::step, ::step].contiguous().cpu().numpy()
            chunk = self.packer.put(small.tobytes())
            found["image"] = {"width": small.shape[1], "height": small.shape[0], "chunk": chunk}
        return found


def _data(
    record: Record, sites: list[Shown], packer: Packer, opened: tuple[int, int, int], columns: list[Column]
) -> dict[str, Any]:
    chunk, sizes, drawn = _page_pack.thumbs(packer, sites)
    tables = _Tables(record, packer)
    described = [
        {
            "title": site.title,
            "label": str(site.called),
            "option": site.option,
            "facts": site.facts,
            "cross": site.two_sided,
            "queries": tables.place(site.queries, site.Tq, site.site.query_grid),
            "keys": tables.place(site.keys, site.Tk, site.site.key_grid),
            "thumb": size,
        }
        for site, size in zip(sites, sizes, strict=True)
    ]
    carried = _page_pack.heads(packer, sites, opened[:2], drawn)
    for site, one, parts in zip(sites, described, carried, strict=True):
        one["heads"] = [
            {
                **part,
                "drawn": (site.number, head) in drawn,
                "said": site.said(head),
                "cells": [column.of(site, head) for column in columns],
            }
            for head, part in enumerate(parts)
        ]
    return {
        "text": record.text,
        "opened": opened,
        "ramps": {"weight": _ramps.WEIGHT, "signed": _ramps.SIGNED},
        "signed": packer.signed,
        "sorted": 1 if packer.signed else -1,
        "tables": tables.found,
        "sites": described,
        "columns": [{"title": one.title, "hint": one.hint, "form": one.form} for one in columns],
        "thumbs": chunk,
        "chunks": packer.chunks,
    }
