"""Rotary positions (Su et al., RoFormer, 2021), in the layouts that models use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# (part (T, heads, D), cosine (T, r), sine (T, r)) -> the turned part; None where the widths do not fit.
Turn = Callable[[Tensor, Tensor, Tensor], "Tensor | None"]


def table_of(table: Tensor, sample: int) -> Tensor:
    """A module's cosines or sines as (T, r), of one sample."""
    while table.dim() > 2:
        table = table[min(sample, table.shape[0] - 1)]
    return table


def _halves(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def _neighbours(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def _turn(quarter: Callable[[Tensor], Tensor], widen: Callable[[Tensor], Tensor] | None) -> Turn:
    """The first r numbers of each head turn: x cos + quarter(x) sin; the others stay."""

    def turn(part: Tensor, cosine: Tensor, sine: Tensor) -> Tensor | None:
        if widen is not None:
            cosine, sine = widen(cosine), widen(sine)
        r = cosine.shape[-1] if cosine.dim() == 2 else 0
        if r == 0 or r % 2 or r > part.shape[-1]:
            return None
        moved = part[..., :r]
        return torch.cat([moved * cosine[:, None] + quarter(moved) * sine[:, None], part[..., r:]], -1)

    return turn


def _beside(table: Tensor) -> Tensor:
    return torch.cat([table, table], -1)


def _twice(table: Tensor) -> Tensor:
    return table.repeat_interleave(2, -1)


TURNS: dict[str, Turn] = {
    "which turns pairs (j, j + r/2)": _turn(_halves, None),
    "which turns pairs (2j, 2j + 1)": _turn(_neighbours, None),
    "which turns pairs (j, j + r/2) by one angle each": _turn(_halves, _beside),
    "which turns pairs (2j, 2j + 1) by one angle each": _turn(_neighbours, _twice),
}
