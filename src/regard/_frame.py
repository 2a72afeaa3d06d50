"""What one call is about: its sizes, where its queries stand, and the coordinates of a tile of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Frame(NamedTuple):
    """Sizes of a call after its batch dimensions were flattened into one.

    ``batch`` is the shape of the batch dimensions, ``rank`` the number of dimensions of the query.
    """

    batch: tuple[int, ...]
    rank: int
    B: int
    H: int
    Hkv: int
    Tq: int
    Tk: int
    device: torch.device


class At(NamedTuple):
    """Coordinates of a tile, as tensors that broadcast to (B, H, rows, keys).

    b, h: sample and query head; i: query row; j: key; p: absolute position of the query, ``i + offset``.
    """

    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    p: Tensor


Offset = int | Tensor
Alignment = str | None


def positions(frame: Frame, offset: Offset, start: int = 0, stop: int | None = None) -> Tensor:
    """Absolute positions of the queries ``start`` to ``stop``: (rows,), or (B, 1, rows) where samples differ."""
    rows = torch.arange(start, frame.Tq if stop is None else stop, device=frame.device)
    if isinstance(offset, Tensor):
        return rows + offset.to(rows)[:, None, None]
    return rows + offset


def coordinates(frame: Frame, offset: Offset, rows: tuple[int, int], keys: tuple[int, int] | Tensor) -> At:
    """Coordinates of the tile of query rows ``rows`` and of keys ``keys`` (a range, or the keys themselves)."""
    device = frame.device
    i = torch.arange(*rows, device=device)[:, None]
    j = keys if isinstance(keys, Tensor) else torch.arange(*keys, device=device)
    b = torch.arange(frame.B, device=device)[:, None, None, None]
    h = torch.arange(frame.H, device=device)[:, None, None]
    p = positions(frame, offset, *rows)[..., None]
    return At(b, h, i, j, p)


def wide(x: Tensor) -> Tensor:
    """float32 for the half precisions, in which nothing is accumulated."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
