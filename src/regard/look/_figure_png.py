"""A PNG of pixels, written by hand: what a figure embeds, and no dependency for it."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

from regard.look._ramps import Colour, colour
from regard.look._shown import Array

_STEPS = 512


def png(pixels: Array) -> bytes:
    """(height, width, 3) in uint8 as a PNG file (ISO/IEC 15948: 8-bit RGB, no filter)."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def data_address(pixels: Array) -> str:
    """The PNG as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def coloured(weights: Array, ramp: tuple[Colour, ...], *, signed: bool = False) -> Array:
    """(rows, columns) of weights in [0, 1], or differences in [-1, 1], as (rows, columns, 3) in uint8."""
    table = np.array([colour(ramp, step / _STEPS) for step in range(_STEPS + 1)], dtype=np.uint8)
    size = np.sqrt(np.minimum(np.abs(weights), 1.0))
    place = (np.where(weights < 0, -size, size) + 1) / 2 if signed else np.where(weights < 0, 0.0, size)
    found: Array = table[np.rint(place * _STEPS).astype(int)]
    return found


def grown(pixels: Array, down: int, across: int) -> Array:
    """Each pixel as a block: viewers blur a small picture that they enlarge."""
    return pixels.repeat(down, axis=0).repeat(across, axis=1)
