"""What position adds to the scores. Biases add with ``+``; gradients flow to slopes, tables and tensors.

Each is defined by one value a pair, ``value(b, h, i, j, p)``; those that depend on the distance j - p alone are
diagonals (``diagonal``): one number a diagonal and head, linear in the length.

Letters: H query heads, Tq and Tk lengths, p = i + offset the query's absolute position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard import _checks, _fits
from regard._frame import Alignment, At, Frame, Offset, wide

__all__ = ["Alibi", "Bias", "Relative"]


class Bias:
    """Base of all biases."""

    def __add__(self, other: Bias | Tensor) -> Bias:
        return Sum(self, as_bias(other))

    def __radd__(self, other: Tensor) -> Bias:
        return Sum(as_bias(other), self)

    def parts(self) -> tuple[Bias, ...]:
        """The biases that this one is made of (none for a simple one)."""
        return ()

    def bind(self, frame: Frame) -> Bias:
        """The same bias with its tensors checked against a call."""
        return self

    def value(self, at: At) -> Tensor:
        """The definition: what is added to each score, broadcastable to (B, H, rows, keys)."""
        raise NotImplementedError

    def diagonal(self, frame: Frame, offset: Offset) -> Tensor | None:
        """The bias as one number a diagonal, (B or 1, H or 1, Tq + Tk - 1): entry ``j - i + Tq - 1``."""
        return None


def as_bias(bias: Bias | Tensor) -> Bias:
    """A bias as it is, a floating-point tensor as ``Values``."""
    return bias if isinstance(bias, Bias) else Values(_checks.bias_tensor(bias))


def slopes_for(heads: int) -> list[float]:
    """ALiBi's slopes: 2^(-8h/H) for a power of two, otherwise interleaved as in the original (Press et al., 2022)."""
    power = 2 ** math.floor(math.log2(heads)) if heads else 1
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    between = [2.0 ** (-8.0 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return (slopes + between)[:heads]


def distances(frame: Frame, offset: Offset) -> Tensor:
    """j - p of every diagonal: (Tq + Tk - 1,), or (B, 1, Tq + Tk - 1) where samples differ."""
    along = torch.arange(max(0, frame.Tq + frame.Tk - 1), device=frame.device) + (1 - frame.Tq)
    if isinstance(offset, Tensor):
        return along - offset.to(along)[:, None, None]
    return along - offset


@dataclass(frozen=True, eq=False)
class Alibi(Bias):
    """Attention with linear biases: ``-slopes[h] * |p - j|`` (Press et al., 2022).

    ``slopes`` is None (the paper's, interleaved for head counts that are no power of two), a number or a
    tensor (H,) or 0-d, with gradient. The alignment is that of ``masks.Causal``.
    """

    slopes: float | Tensor | None = None
    alignment: Alignment = None
    offset: int | Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _checks.number_or_tensor("Alibi", "slopes", self.slopes, none=True)
        _checks.alignment("Alibi", self.alignment, self.offset)

    def bind(self, frame: Frame) -> Bias:
        slopes: Any = slopes_for(frame.H) if self.slopes is None else self.slopes
        if not isinstance(slopes, Tensor):
            slopes = torch.tensor(slopes, dtype=torch.float32, device=frame.device)
        return replace(self, slopes=_fits.per_head("Alibi", "slopes", slopes, frame))

    def value(self, at: At) -> Tensor:
        assert isinstance(self.slopes, Tensor)  # bind() filled it
        return -wide(self.slopes)[:, None, None] * (at.j - at.p).abs()

    def diagonal(self, frame: Frame, offset: Offset) -> Tensor | None:
        assert isinstance(self.slopes, Tensor)
        return _full(-wide(self.slopes)[:, None] * distances(frame, offset).abs())


@dataclass(frozen=True, eq=False)
class Relative(Bias):
    """A learned bias by distance: ``table[h, clip(j - p, -R, R) + R]``, R the reach.

    ``table`` is (2R + 1,) or (H, 2R + 1), with gradient (T5's buckets expand to it; Raffel et al., 2020; clipped
    distances: Shaw et al., 2018). The alignment is that of ``masks.Causal``.
    """

    table: Tensor
    alignment: Alignment = None
    offset: int | Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _checks.relative_table(self.table)
        _checks.alignment("Relative", self.alignment, self.offset)

    def bind(self, frame: Frame) -> Bias:
        return replace(self, table=_fits.table_heads(self.table, frame))

    def _entry(self, distance: Tensor) -> Tensor:
        reach = self.table.shape[-1] // 2
        return distance.clamp(-reach, reach) + reach

    def value(self, at: At) -> Tensor:
        entry = self._entry(at.j - at.p)
        return wide(self.table)[at.h if self.table.shape[0] > 1 else at.h * 0, entry]

    def diagonal(self, frame: Frame, offset: Offset) -> Tensor | None:
        entry = self._entry(distances(frame, offset))
        if entry.ndim == 1:
            return wide(self.table)[:, entry][None]
        return wide(self.table)[:, entry[:, 0]].transpose(0, 1)


@dataclass(frozen=True, eq=False)
class Values(Bias):
    """A tensor added to the scores: what a bare tensor becomes. -inf blocks a pair as a mask does."""

    tensor: Tensor

    def bind(self, frame: Frame) -> Bias:
        return Values(_fits.four("bias", self.tensor, frame))

    def value(self, at: At) -> Tensor:
        B, H, Tq, Tk = self.tensor.shape
        index = (at.b if B > 1 else at.b * 0, at.h if H > 1 else at.h * 0)
        return wide(self.tensor)[(*index, at.i if Tq > 1 else at.i * 0, at.j if Tk > 1 else at.j * 0)]


@dataclass(frozen=True, eq=False)
class Sum(Bias):
    left: Bias
    right: Bias

    def parts(self) -> tuple[Bias, ...]:
        return (self.left, self.right)

    def bind(self, frame: Frame) -> Bias:
        return Sum(self.left.bind(frame), self.right.bind(frame))

    def value(self, at: At) -> Tensor:
        return self.left.value(at) + self.right.value(at)


def _full(diagonal: Tensor) -> Tensor:
    return diagonal[None] if diagonal.ndim == 2 else diagonal


def walk(bias: Bias | None) -> list[Bias]:
    """The simple biases that a bias is the sum of."""
    if bias is None:
        return []
    parts = bias.parts()
    return [leaf for part in parts for leaf in walk(part)] if parts else [bias]


def lower(bias: Bias | None, frame: Frame, offset: Offset) -> tuple[Tensor | None, Tensor | None]:
    """A bound bias as one strided tensor (B|1, H|1, Tq|1, Tk|1) and one diagonal (B|1, H|1, Tq + Tk - 1)."""
    strided: Tensor | None = None
    diagonal: Tensor | None = None
    for leaf in walk(bias):
        along = leaf.diagonal(frame, offset)
        if along is None:
            assert isinstance(leaf, Values)
            strided = leaf.tensor if strided is None else strided + leaf.tensor
        else:
            diagonal = along if diagonal is None else diagonal + along
    return strided, diagonal
