"""Weights as text in a page: quantised, deflated, base64; and the rule by which some are left out of it."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.look._shown import LONGEST, POOL, TOP, Array, Shown, Top, pool

# Up to so many weights in all are carried in 16 bits; beyond, in 8, with the largest of each row in 16.
FINE = 400_000
THUMB = 48
# The side of the blocks' map of a head whose whole map did not fit.
SMALL = 256


def eighths(weights: Array, signed: bool) -> Array:
    """Weights in 8 bits along their square root: (b / 255)^2, or signed around 128: +-((b - 128) / 127)^2."""
    if signed:
        size = np.sqrt(np.minimum(np.abs(weights), 1.0)) * np.sign(weights)
        codes: Array = (np.rint(size * 127.0) + 128).astype("u1")
        return codes
    codes = np.rint(np.sqrt(np.clip(weights, 0.0, 1.0)) * 255.0).astype("u1")
    return codes


def from_eighths(codes: Array, signed: bool) -> Array:
    """The weights that 8-bit codes stand for."""
    share = codes.astype(np.float32)
    if signed:
        share = (share - 128.0) / 127.0
        weights: Array = np.sign(share) * share**2
        return weights
    weights = (share / 255.0) ** 2
    return weights


def sixteenths(weights: Array, signed: bool) -> Array:
    """Weights in 16 bits, linear: b / 65535, or b / 32767 where they have a sign."""
    if signed:
        return np.rint(np.clip(weights, -1.0, 1.0) * 32767.0).astype("<i2")
    return np.rint(np.clip(weights, 0.0, 1.0) * 65535.0).astype("<u2")


@dataclass
class Packer:
    """Fills up with chunks until the budget, in characters of base64, is spent."""

    budget: int
    signed: bool = False
    chunks: list[str] = field(default_factory=list)
    spent: int = 0
    error: float = 0.0
    # How each head got in: "whole", "blocks", "lists", or "numbers"; and those of which the record holds no map.
    forms: dict[tuple[int, int], str] = field(default_factory=dict)
    lacking: set[tuple[int, int]] = field(default_factory=set)

    def put(self, data: bytes) -> int:
        """Add a chunk whatever it costs; its number."""
        text = _text(data)
        self.spent += len(text)
        self.chunks.append(text)
        return len(self.chunks) - 1

    def offer(self, data: bytes) -> int | None:
        """Add a chunk if it fits."""
        text = _text(data)
        if self.spent + len(text) > self.budget:
            return None
        self.spent += len(text)
        self.chunks.append(text)
        return len(self.chunks) - 1


def heads(
    packer: Packer, sites: list[Shown], opened: tuple[int, int], drawn: set[tuple[int, int]]
) -> list[list[dict[str, Any]]]:
    """What the page carries of each head, site by site: first the head it opens on, then its layer, then the rest.

    `drawn` are those with a map in the record. Of the others lists are carried only where no head has a map.
    """
    cells = sum(site.Tq * site.Tk * site.heads for site in sites if max(site.Tq, site.Tk) <= LONGEST)
    bits = 16 if cells <= FINE else 8
    every = [(site, head) for site in sites for head in range(site.heads)]
    every.sort(key=lambda one: ((one[0].number, one[1]) != opened, one[0].number != opened[0]))
    found: dict[tuple[int, int], dict[str, Any]] = {}
    room = True
    for site, head in every:
        place = (site.number, head)
        carried: dict[str, Any] = {"map": None, "top": None, "rows": None}
        if place in drawn:
            carried["map"], room = _map(packer, site, head, bits, room)
        else:
            packer.lacking.add(place)
        whole = carried["map"] is not None and carried["map"]["whole"]
        if not (whole and bits == 16) and (place in drawn or not drawn):
            carried["top"] = _top(packer, site, head)
            carried["rows"] = _rows(packer, site, head)
        packer.forms[place] = (
            ("whole" if whole else "blocks") if carried["map"] else "lists" if carried["top"] else "numbers"
        )
        found[place] = carried
    return [[found[site.number, head] for head in range(site.heads)] for site in sites]


def _map(packer: Packer, site: Shown, head: int, bits: int, room: bool) -> tuple[dict[str, Any] | None, bool]:
    """The map of a head, whole while there is room, else as blocks, else none; and whether there still is room."""
    if room and site.has_map(head):
        whole = _whole(packer, site.map(head), bits)
        if whole is not None:
            return whole, True
        room = False
    return _blocks(packer, site, head, SMALL if site.has_map(head) else None), room


def _whole(packer: Packer, weights: Array, bits: int) -> dict[str, Any] | None:
    codes = sixteenths(weights, packer.signed) if bits == 16 else eighths(weights, packer.signed)
    chunk = packer.offer(codes.tobytes())
    if chunk is None:
        return None
    rows, columns = weights.shape
    if weights.size:
        scale = 32767.0 if packer.signed else 65535.0
        back = codes / scale if bits == 16 else from_eighths(codes, packer.signed)
        packer.error = max(packer.error, float(np.abs(back - weights).max()))
    return _described(chunk, None, (rows, columns), (1, 1), bits, whole=True)


def _blocks(packer: Packer, site: Shown, head: int, side: int | None) -> dict[str, Any] | None:
    found = site.pooled(head) if side is None else pool(site.map(head), side)
    if found is None or found[0].size == 0:
        return None
    mean, largest = found
    number = packer.offer(eighths(largest, packer.signed).tobytes())
    if number is None:
        return None
    means = packer.offer(eighths(mean, packer.signed).tobytes())
    cell = site.site.cell
    if side is not None or site.site.pooled is None:
        cell = (max(1, -(-site.Tq // (side or POOL))), max(1, -(-site.Tk // (side or POOL))))
    rows, columns = largest.shape
    return _described(number, means, (rows, columns), cell, 8, whole=False)


def _described(
    chunk: int, mean: int | None, shape: tuple[int, int], cell: tuple[int, int], bits: int, *, whole: bool
) -> dict[str, Any]:
    return {
        "chunk": chunk,
        "mean": mean,
        "rows": shape[0],
        "columns": shape[1],
        "tall": cell[0],
        "wide": cell[1],
        "bits": bits,
        "whole": whole,
    }


def _top(packer: Packer, site: Shown, head: int) -> dict[str, Any] | None:
    top = site.top(head)
    if top is None or top.weights.size == 0:
        return None
    number = packer.offer(packed_top(top, site.Tk, packer.signed))
    return None if number is None else {"chunk": number, "k": min(TOP, top.weights.shape[1])}


def _rows(packer: Packer, site: Shown, head: int) -> dict[str, Any] | None:
    rows = site.rows(head)
    if not rows:
        return None
    number = packer.offer(b"".join(sixteenths(row, packer.signed).tobytes() for row in rows.values()))
    return None if number is None else {"chunk": number, "which": list(rows)}


def packed_top(top: Top, Tk: int, signed: bool) -> bytes:
    """The largest eight of each row as planes of bytes: those of the keys, the lowest first, then both of the weights.

    A key takes 1 byte where there are at most 256 keys, 2 up to 65,536, else 3. Weight 0 stands for "no more".
    """
    keys = np.clip(top.keys[:, :TOP], 0, None).astype("<u4")
    weights = sixteenths(np.where(top.keys[:, :TOP] < 0, 0.0, top.weights[:, :TOP]), signed).view("<u2")
    wide = 1 if Tk <= 1 << 8 else 2 if Tk <= 1 << 16 else 3
    planes = [keys >> 8 * place for place in range(wide)] + [weights & 0xFF, weights >> 8]
    return b"".join(plane.astype("u1").tobytes() for plane in planes)


def _text(data: bytes) -> str:
    # Weights repeat little: spending the effort on the code lengths makes them a tenth smaller than matching does.
    packing = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_FILTERED)
    return base64.b64encode(packing.compress(data) + packing.flush()).decode()


def thumbs(packer: Packer, sites: list[Shown]) -> tuple[int, list[tuple[int, int]], set[tuple[int, int]]]:
    """Every head small, the largest weight of each block: the chunk that holds them, and the size of each site's.

    Also which heads (site, head) there is something to draw of.
    """
    parts: list[bytes] = []
    sizes: list[tuple[int, int]] = []
    drawn: set[tuple[int, int]] = set()
    for site in sites:
        maps = [_thumb(site, head) for head in range(site.heads)]
        known = [one for one in maps if one is not None]
        size = known[0].shape if known else (0, 0)
        sizes.append((int(size[0]), int(size[1])))
        drawn |= {(site.number, head) for head, one in enumerate(maps) if one is not None}
        for one in maps:
            parts.append(eighths(np.zeros(size) if one is None else one, packer.signed).tobytes())
    return packer.put(b"".join(parts)), sizes, drawn


def _thumb(site: Shown, head: int) -> Array | None:
    if site.has_map(head):
        return pool(site.map(head), THUMB)[1]
    found = site.pooled(head)
    return None if found is None else pool(found[1], THUMB)[1]
