"""Masks and biases of the variants that are made when the sizes of a call are known."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard import _checks, _fits
from regard._frame import Alignment, Frame, positions, wide
from regard.biases import Bias, Values
from regard.masks import Mask, Prefix


@dataclass(frozen=True, eq=False)
class Sinks(Mask):
    """The first n keys, or all where there are fewer: ``j < n``."""

    n: int

    def bind(self, frame: Frame) -> Mask:
        return Prefix(min(self.n, frame.Tk)).bind(frame)


@dataclass(frozen=True, eq=False)
class Decay(Bias):
    """The sum of the log gates between a key and its query, ``sum_(j < t <= p) log f_t``; 0 where j >= p.

    ``log_gates`` (*batch, H, Tk). The sums run in float64 and are rounded as differences, each as small as its pair is
    near; a gate of -inf blocks the pairs across it. Raises ValueError for gates that do not fit the call.
    """

    log_gates: Tensor
    alignment: Alignment = None
    offset: int | Tensor | None = field(default=None, kw_only=True)

    def bind(self, frame: Frame) -> Bias:
        gates = _fits.four("log_gates", self.log_gates[..., None, :], frame)[:, :, 0]
        if gates.shape[-1] != frame.Tk:
            _checks.wrong_value("forgetting(log_gates=)", f"a gate a key, {frame.Tk}", self.log_gates)
        # Entry t of the sums is what came before key t; the last one is beyond all keys.
        stop = positions(frame, _fits.one_offset(frame, [self])).add(1).clamp(0, frame.Tk)
        stop = stop.expand(*gates.shape[:-1], -1) if stop.ndim == 1 else stop.expand(-1, gates.shape[1], -1)
        shut = gates == -torch.inf
        sums = _before(gates.double().masked_fill(shut, 0.0)).expand(stop.shape[0], -1, -1)
        crossed = _before(shut.long()).expand(stop.shape[0], -1, -1)
        between = sums.gather(-1, stop)[..., None] - sums[..., None, 1:]
        blocked = crossed.gather(-1, stop)[..., None] > crossed[..., None, 1:]
        ahead = torch.arange(1, frame.Tk + 1, device=gates.device) > stop[..., None]
        decay = between.masked_fill(ahead, 0.0).masked_fill(blocked, -torch.inf)
        return Values(decay.to(wide(gates).dtype))


def _before(terms: Tensor) -> Tensor:
    return torch.nn.functional.pad(terms.cumsum(-1), (1, 0))


@dataclass(frozen=True, eq=False)
class SameQuery(Bias):
    """Adds nothing; refuses a call whose query is not of the shape that a score was made for."""

    owner: str
    shape: tuple[int, ...]

    def bind(self, frame: Frame) -> Bias:
        *batch, H, Tq = (1, *self.shape[:-1]) if len(self.shape) == 2 else self.shape[:-1]
        whole = (*frame.batch, frame.H, frame.Tq)[-max(1, frame.rank - 1) :]
        alone = all(size == 1 for size in batch) and (H, Tq) == (frame.H, frame.Tq)
        if not alone and (*batch, H, Tq) != (*frame.batch, frame.H, frame.Tq):
            expected = f"the query of the call, {(*whole, self.shape[-1])}"
            _checks.wrong_value(f"{self.owner}(query=)", expected, _checks.words(f"shape {self.shape}"))
        return Values(torch.zeros(1, 1, 1, 1, device=frame.device))
