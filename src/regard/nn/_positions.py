"""Where a token stands: positions added to the input (sinusoidal, learned) or turned into query and key (rotary).

Positions are 0, 1, ... from ``offset`` on, or given: an integer tensor (T,) or (*batch, T). Nothing here keeps a table
that a change of dtype could blur: angles are computed in float64 where the device has it, in float32 elsewhere.

Letters: B batch, T length, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard import _checks
from regard._checks import words, wrong_type, wrong_value
from regard._frame import wide
from regard.nn import _given


def places(batch: tuple[int, ...], length: int, positions: Any, offset: Any, like: Tensor) -> Tensor:
    """Positions of ``length`` rows: (T,) or (*batch, T)."""
    if not _checks.is_int(offset):
        wrong_type("offset", "a whole number", offset, "One a sample goes into positions=.")
    if positions is None:
        return torch.arange(offset, offset + length, device=like.device)
    if not isinstance(positions, Tensor) or positions.dtype not in _checks.INTEGERS:
        wrong_type("positions", "an integer tensor (T,) or (*batch, T)", positions)
    if offset:
        wrong_value("positions", "positions or an offset", words("both"), "Leave one of them out.")
    if tuple(positions.shape) not in ((length,), (*batch, length)):
        wrong_value("positions", f"shape {(length,)} or {(*batch, length)}", positions)
    if positions.device != like.device:
        wrong_value("positions", f"a tensor on {like.device}", words(f"one on {positions.device}"))
    return positions


def angles(positions: Tensor, width: int, base: float) -> Tensor:
    """``position * base^(-2i / width)`` for i < width / 2: (..., T, ceil(width / 2)), in float64 where there is one."""
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    steps = torch.arange(0, width, 2, dtype=exact, device=positions.device)
    frequencies = torch.pow(torch.full_like(steps, base), -steps / width)
    return positions[..., None].to(exact) * frequencies


def _base(base: Any) -> float:
    if not _checks.is_number(base):
        wrong_type("base", "a number above 1", base)
    if not 1 < base < float("inf"):
        wrong_value("base", "a finite number above 1", base)
    return float(base)


class SinusoidalPositions(nn.Module):
    """Adds ``sin(p / base^(2i/D))`` to column 2i and the cosine to column 2i + 1 (Vaswani et al., 2017).

    x (*batch, T, D) -> (*batch, T, D), D the ``width``, for any length. Raises ValueError for another width, TypeError
    for an input that is not of a floating-point dtype.
    """

    def __init__(self, width: int, *, base: float = 10_000.0) -> None:
        super().__init__()
        self.width = _given.size("width", width)
        self.base = _base(base)

    def table(self, positions: Tensor) -> Tensor:
        """The encoding of integer positions (...): (..., D), in float64 where the device has it."""
        _checks.dense("positions", positions, "an integer tensor", _checks.INTEGERS)
        turned = angles(positions, self.width, self.base)
        return torch.stack([turned.sin(), turned.cos()], -1).flatten(-2)[..., : self.width]

    def forward(self, x: Tensor, positions: Tensor | None = None, *, offset: int = 0) -> Tensor:
        _given.rows("x", x, self.width, None, "width")
        where = places(tuple(x.shape[:-2]), x.shape[-2], positions, offset, x)
        return x + self.table(where).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, base={self.base:g}"


class LearnedPositions(nn.Module):
    """Adds a learned row a position: owns ``weight`` (length, D), normal with deviation 0.02 at first.

    x (*batch, T, D) -> (*batch, T, D). Raises ValueError for a position from ``length`` on, TypeError for an input
    that is not of a floating-point dtype.
    """

    def __init__(self, length: int, width: int, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        _given.fitting_state(self)
        shape = (_given.size("length", length), _given.size("width", width))
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal, deviation 0.02 (GPT-2)."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, positions: Tensor | None = None, *, offset: int = 0) -> Tensor:
        length, width = self.weight.shape
        _given.rows("x", x, width, None, "width")
        where = places(tuple(x.shape[:-2]), x.shape[-2], positions, offset, x)
        return x + self.weight[self._known(where, length)].to(x.dtype)

    def _known(self, where: Tensor, length: int) -> Tensor:
        if not _checks.can_look(where):
            return where.long().clamp(0, length - 1)
        if where.numel() and (int(where.min()) < 0 or int(where.max()) >= length):
            got = words(f"{int(where.min())} to {int(where.max())}")
            wrong_value("positions", f"from 0 to {length - 1}, as many as were learned", got)
        return where.long()

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


class RotaryPositions(nn.Module):
    """Turns pairs of columns of query or key by ``p * base^(-2i/width)`` (RoFormer, Su et al., 2021).

    x (*batch, heads, T, D) or (T, D) -> the same shape and dtype; only the first ``width`` columns are turned. Dot
    products of turned rows depend on the distance of their positions alone. ``pairing``: ``"halves"`` pairs column i
    with i + width/2 (GPT-NeoX, Llama), ``"interleaved"`` 2i with 2i + 1 (the paper, GPT-J). ``positions``: (T,) or
    (*batch, T). Raises ValueError for an odd width or one beyond D.
    """

    def __init__(self, width: int, *, base: float = 10_000.0, pairing: str = "halves") -> None:
        super().__init__()
        if _given.size("width", width) % 2:
            wrong_value("width", "an even number: columns are turned in pairs", width)
        if pairing not in ("halves", "interleaved"):
            wrong_value("pairing", '"halves" or "interleaved"', pairing)
        self.width = width
        self.base = _base(base)
        self.pairing = pairing

    def forward(self, x: Tensor, positions: Tensor | None = None, *, offset: int = 0) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            wrong_type("x", "a floating-point tensor (*batch, heads, T, D)", x)
        if x.ndim < 2 or x.shape[-1] < self.width:
            wrong_value("x", f"(*batch, heads, T, D) with D at least {self.width}", x)
        where = places(tuple(x.shape[:-3]), x.shape[-2], positions, offset, x)
        if where.ndim > 1:
            where = where[..., None, :]
        turned = angles(where, self.width, self.base)
        head = wide(x[..., : self.width])
        rotated = self._turn(head, turned.cos().to(head.dtype), turned.sin().to(head.dtype)).to(x.dtype)
        return rotated if self.width == x.shape[-1] else torch.cat([rotated, x[..., self.width :]], -1)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.pairing == "halves":
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def extra_repr(self) -> str:
        return f"{self.width}, base={self.base:g}, pairing={self.pairing!r}"
