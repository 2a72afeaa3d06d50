"""The ways in which models lay out samples, tokens and heads in what their modules give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from regard.look._record import Sizes

ROLES = ("query", "key", "value")


@dataclass(frozen=True)
class Cut:
    """How `heads` heads of `head` numbers lie in rows of `width`: from `start` on, or, with `groups`, head by head.

    With `groups` = (Hkv, step, first, count) a row is Hkv groups of `step` heads, of which `count` from `first` on
    are meant.
    """

    width: int
    heads: int
    head: int
    start: int = 0
    groups: tuple[int, int, int, int] | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """(T, width) -> (T, heads, head)."""
        T = rows.shape[0]
        if self.groups is None:
            return rows[:, self.start : self.start + self.heads * self.head].reshape(T, self.heads, self.head)
        Hkv, step, first, count = self.groups
        cells = rows.reshape(T, Hkv, step, self.head)
        return cells[:, :, first : first + count].reshape(T, self.heads, self.head)


def cuts(role: str, sizes: Sizes, heads: int, width: int) -> list[Cut]:
    """A projection of this role alone; of all three, or of keys and values, side by side; of all three head by head."""
    place, own = ROLES.index(role), heads * width
    D, Dv = sizes.D or width, sizes.Dv or width
    parts = (sizes.H * D, sizes.Hkv * D, sizes.Hkv * Dv)
    found = [Cut(own, heads, width), Cut(sum(parts), heads, width, start=sum(parts[:place]))]
    if place:
        found.append(Cut(parts[1] + parts[2], heads, width, start=sum(parts[1:place])))
    if D == Dv and sizes.Hkv:
        group = sizes.H // sizes.Hkv
        first, count = (0, group) if place == 0 else (group + place - 1, 1)
        found.append(Cut(sum(parts), heads, width, groups=(sizes.Hkv, group + 2, first, count)))
    return found


def rows_of(y: Tensor, B: int, length: int, sample: int) -> Iterator[Tensor | None]:
    """(length, width) of one sample, for each layout that is known; None where a tensor cannot be read so.

    The layouts: (B, T, ...), (B, H, T, D), (T, B, ...), (B T, ...).
    """
    deep = y.dim() >= 3 and y.numel() > 0
    yield y[sample].flatten(1) if deep and y.shape[:2] == (B, length) else None
    heads_first = deep and y.dim() == 4 and y.shape[0] == B and y.shape[2] == length
    yield y[sample].transpose(0, 1).flatten(1) if heads_first else None
    yield y[:, sample].flatten(1) if deep and y.shape[:2] == (length, B) else None
    flat = y.dim() >= 2 and y.numel() > 0 and y.shape[0] == B * length
    yield y.reshape(B, length, -1)[sample] if flat else None
