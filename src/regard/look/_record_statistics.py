"""Statistics of weights that are at hand as a whole. The watch computes the same without ever holding them.

Letters: B samples, H heads, Tq queries, Tk keys; p = i + offset, where query i stands among the keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STATISTICS = ("lse", "max", "entropy", "received", "mass", "first", "self", "previous", "distance")
# What speaks of positions of queries and keys in one text.
POSITIONED = ("self", "previous", "distance")


def of_weights(
    weights: Tensor, offset: int | Tensor | None, names: Sequence[str], rows: Tensor | None = None
) -> dict[str, Tensor]:
    """Statistics by name of weights (B, H, Tq, Tk); "lse" is not among what weights can tell.

    `rows`: which queries these are, where they are not all from the first on.
    """
    wide = weights.detach().double() if weights.dtype == torch.float64 else weights.detach().float()
    found = {}
    for name in names:
        if name == "lse" or (offset is None and name in POSITIONED):
            continue
        at = None if offset is None else positions(offset, weights.shape[-2], weights.device, rows)
        found[name] = _one(name, wide, at).float()
    return found


def _one(name: str, weights: Tensor, at: Tensor | None) -> Tensor:
    if name == "max":
        largest: Tensor = weights.amax(-1) if weights.shape[-1] else weights.sum(-1)
        return largest
    if name == "entropy":
        entropy: Tensor = torch.special.entr(weights).sum(-1)
        return entropy
    if name == "received":
        return weights.sum(-2)
    if name == "mass":
        return weights.sum(-1)
    if name == "first":
        return at_keys(weights, first_keys(weights.sum(-2))[:, None, None])
    assert at is not None
    if name == "distance":
        apart = (at[..., None] - torch.arange(weights.shape[-1], device=weights.device)).abs()
        mass = weights.sum(-1)
        return (weights * apart).sum(-1) / torch.where(mass == 0, 1.0, mass)
    return at_keys(weights, at if name == "self" else at - 1)


def positions(offset: int | Tensor, Tq: int, device: torch.device, rows: Tensor | None = None) -> Tensor:
    """Where the queries stand: (1, 1, Tq), or (B, 1, Tq) where samples differ."""
    along = (torch.arange(Tq, device=device) if rows is None else rows)[None, None]
    return along + (offset.to(device)[:, None, None] if isinstance(offset, Tensor) else offset)


def first_keys(received: Tensor) -> Tensor:
    """(B,): the first key of each sample that received anything, of what keys received (B, H, Tk)."""
    return (
        (received.sum(1) > 0).to(torch.uint8).argmax(-1)
        if received.shape[-1]
        else received.new_zeros(received.shape[0], dtype=torch.int64)
    )


def at_keys(weights: Tensor, keys: Tensor) -> Tensor:
    """(B, H, Tq): the weight of one key of each row, 0 where there is no such key."""
    B, H, Tq, Tk = weights.shape
    if not Tk:
        return weights.new_zeros(B, H, Tq)
    inside = (keys >= 0) & (keys < Tk)
    index = keys.clamp(0, Tk - 1).expand(B, H, Tq)[..., None]
    return weights.gather(-1, index)[..., 0] * inside
