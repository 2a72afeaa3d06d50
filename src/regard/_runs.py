"""Masks as runs: row i may see at most two runs of keys.

A run of row i is ``[max(start, p - left), min(stop, p + right + 1))`` with p = i + offset: left and right plain numbers
(None: unlimited), start and stop absent or integer tensors (B|1, H|1, Tq|1). ``&``, ``|`` and ``~`` stay in this
form while two runs suffice; what does not fit is a bool tensor beside them (FlashMask, Wang et al., 2024, has
such column runs on GPUs).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from regard import _checks
from regard._frame import Frame, Offset, coordinates, positions
from regard.masks import And, Causal, Dense, Documents, Keys, Mask, Not, Or, Padding, Prefix, Rows, Window

MOST_RUNS = 2


class Run(NamedTuple):
    left: int | None = None
    right: int | None = None
    start: Tensor | None = None
    stop: Tensor | None = None


class Visible(NamedTuple):
    """Which pairs may meet: in one of ``runs`` (None: all of them) and where ``dense`` (None: everywhere) says so.

    dense says so where it is true, or where it is false if ``negated``.
    """

    runs: tuple[Run, ...] | None = None
    dense: Tensor | None = None
    negated: bool = False

    @property
    def everything(self) -> bool:
        return self.runs is None and self.dense is None

    def describe(self) -> str:
        """The form in words, for ``plan``."""
        if self.everything:
            return "all pairs"
        kinds = []
        if self.runs is not None:
            kinds.append({0: "nothing", 1: "1 run a row"}.get(len(self.runs), f"{len(self.runs)} runs a row"))
        if self.dense is not None:
            kinds.append("bool keys" if self.dense.shape[-2] == 1 else "bool tensor with skipped tiles")
        return " and ".join(kinds)


def lower(mask: Mask | None, frame: Frame, offset: Offset, *, at_most: bool = False) -> Visible:
    """A bound mask as runs and, where those do not suffice, a bool tensor.

    With ``at_most`` the answer may hold more pairs than the mask, and no bool tensor is written for it: what to
    skip, for a caller that evaluates the mask itself, tile by tile.
    """
    return Visible() if mask is None else _Lowering(frame, offset, at_most).of(mask)


class _Lowering:
    def __init__(self, frame: Frame, offset: Offset, at_most: bool) -> None:
        self.frame = frame
        self.offset = offset
        self.at_most = at_most

    def of(self, mask: Mask) -> Visible:
        if isinstance(mask, Causal):
            return Visible((Run(right=0),))
        if isinstance(mask, Window):
            return Visible((Run(mask.left, mask.right),))
        if isinstance(mask, Prefix):
            return Visible((Run(stop=self._rows(mask.n)),))
        if isinstance(mask, Padding):
            return Visible((Run(None, None, self._rows(mask.start), self._rows(mask.stop)),))
        if isinstance(mask, Documents):
            return self._documents(mask)
        if isinstance(mask, Rows):
            return Visible((Run(start=mask.start, stop=mask.stop),))
        if isinstance(mask, Keys):
            return self._bool(mask.keep[:, None, None, :], None)
        if isinstance(mask, Dense):
            return self._bool(mask.mask, mask)
        if isinstance(mask, And):
            return self._both(mask, self.of(mask.left), self.of(mask.right))
        if isinstance(mask, Or):
            return self._either(mask, self.of(mask.left), self.of(mask.right))
        if isinstance(mask, Not):
            if self.at_most and not _exact(mask.inner):
                return Visible()
            return self._other(mask, self.of(mask.inner))
        return self._written(mask)

    def _written(self, mask: Mask) -> Visible:
        if self.at_most:
            return Visible()
        frame = self.frame
        tile = coordinates(frame, self.offset, (0, frame.Tq), (0, frame.Tk))
        allowed = mask.allowed(tile)
        while allowed.ndim < 4:
            allowed = allowed[None]
        return Visible(None, allowed)

    def _rows(self, value: int | Tensor | None) -> Tensor | None:
        """A number or (B,) as a tensor that broadcasts to (B, H, Tq)."""
        if value is None:
            return None
        if isinstance(value, Tensor):
            return value.reshape(-1, 1, 1)
        return torch.full((1, 1, 1), value, dtype=torch.int64, device=self.frame.device)

    # ------------------------------------------------------------------ leaves

    def _documents(self, mask: Documents) -> Visible:
        assert mask.key_ids is not None
        if torch._C._are_functorch_transforms_active():
            return self._written(mask)
        traced = torch.compiler.is_compiling()
        start, stop = torch.ops.regard.document_runs(mask.query_ids, mask.key_ids, traced)
        if not (traced or start.is_meta) and start.numel() and int(start.flatten()[0]) == _INTERLEAVED:
            return self._written(mask)
        return Visible((Run(start=start[:, None], stop=stop[:, None]),))

    def _bool(self, mask: Tensor, owner: Dense | None) -> Visible:
        if not _checks.can_look(mask) or mask.numel() < _WORTH_A_SCAN:
            return Visible(None, mask)
        if owner is None or owner.source is None or owner.source.is_inference():
            return scan(mask)
        key = (tuple(mask.shape), owner.source._version)
        if key not in owner.found:
            owner.found.clear()
            owner.found[key] = scan(mask)
        return Visible(*owner.found[key])

    # ------------------------------------------------------------------ combinations

    def _both(self, mask: Mask, one: Visible, two: Visible) -> Visible:
        if one.dense is None or two.dense is None:
            dense = two[1:] if one.dense is None else one[1:]
        else:
            dense = (_plain(one) & _plain(two), False)
        if one.runs is None or two.runs is None:
            return Visible(two.runs if one.runs is None else one.runs, *dense)
        runs = _without_idle([_meet(a, b) for a, b in itertools.product(one.runs, two.runs)])
        return Visible(runs, *dense) if len(runs) <= MOST_RUNS else self._written(mask)

    def _either(self, mask: Mask, one: Visible, two: Visible) -> Visible:
        if one.everything or two.everything:
            return Visible()
        if one.runs is None or two.runs is None or one.dense is not None or two.dense is not None:
            return self._written(mask)
        runs = _without_idle([*one.runs, *two.runs])
        return Visible(runs) if len(runs) <= MOST_RUNS else self._written(mask)

    def _other(self, mask: Not, inner: Visible) -> Visible:
        if inner.everything:
            return Visible(())
        if inner.runs is None:
            return Visible(None, inner.dense, not inner.negated)
        if inner.dense is not None:
            return self._written(mask)
        found: list[Run] = [Run()]
        for run in inner.runs:
            beside = self._beside(run)
            found = list(_without_idle([_meet(a, b) for a, b in itertools.product(found, beside)]))
        if len(found) <= MOST_RUNS:
            return Visible(tuple(found))
        if isinstance(mask.inner, Dense):
            return Visible(None, mask.inner.mask, True)
        return self._written(mask)

    def _beside(self, run: Run) -> list[Run]:
        """The keys outside one run, as at most two runs."""
        before = [Run(right=-run.left - 1)] if run.left is not None else []
        before += [Run(stop=run.start)] if run.start is not None else []
        behind = [Run(left=-run.right - 1)] if run.right is not None else []
        behind += [Run(start=run.stop)] if run.stop is not None else []
        low, high = edges(run, self.frame, self.offset)
        if len(before) == 2:
            before = [Run(stop=low)]
        if len(behind) == 2:
            behind = [Run(start=high)]
        return before + behind


def _exact(mask: Mask) -> bool:
    """Whether ``at_most`` lowering loses nothing: simple masks of plain runs only."""
    return isinstance(mask, (Causal, Window, Prefix, Padding, Rows, Keys, Dense))


_WORTH_A_SCAN = 4096
_SCANNED_AT_ONCE = 1 << 22
_INTERLEAVED = -1


def edges(run: Run, frame: Frame, offset: Offset) -> tuple[Tensor, Tensor]:
    """First key and end of a run, row by row, within [0, Tk]: two (B|1, H|1, Tq)."""
    p = positions(frame, offset)
    p = p[None, None] if p.ndim == 1 else p
    low = torch.zeros_like(p) if run.left is None else p - run.left
    high = torch.full_like(p, frame.Tk) if run.right is None else p + (run.right + 1)
    if run.start is not None:
        low = torch.maximum(low, run.start)
    if run.stop is not None:
        high = torch.minimum(high, run.stop)
    low, high = torch.broadcast_tensors(low.clamp(0, frame.Tk), high.clamp(0, frame.Tk))
    return low, high


def _plain(visible: Visible) -> Tensor:
    assert visible.dense is not None
    return ~visible.dense if visible.negated else visible.dense


def _least(one: int | None, two: int | None) -> int | None:
    return one if two is None else two if one is None else min(one, two)


def _meet(one: Run, two: Run) -> Run:
    start = (
        one.start
        if two.start is None
        else two.start
        if one.start is None
        else torch.maximum(one.start, two.start)
    )
    stop = (
        one.stop if two.stop is None else two.stop if one.stop is None else torch.minimum(one.stop, two.stop)
    )
    return Run(_least(one.left, two.left), _least(one.right, two.right), start, stop)


def _idle(run: Run) -> bool:
    return run.left is not None and run.right is not None and run.left + run.right < 0


def _holds(big: Run, small: Run) -> bool:
    """Whether one run surely holds another (by its plain numbers)."""
    if (big.start is not None and big.start is not small.start) or (
        big.stop is not None and big.stop is not small.stop
    ):
        return False
    left = big.left is None or (small.left is not None and small.left <= big.left)
    return left and (big.right is None or (small.right is not None and small.right <= big.right))


def _without_idle(runs: list[Run]) -> tuple[Run, ...]:
    kept: list[Run] = []
    for run in runs:
        if _idle(run) or any(_holds(other, run) for other in kept):
            continue
        kept = [other for other in kept if not _holds(run, other)]
        kept.append(run)
    return tuple(kept)


def scan(mask: Tensor) -> Visible:
    """The runs of a bool tensor (B|1, H|1, Tq|1, Tk|1), or the tensor itself where a row has more than two."""
    if mask.shape[-1] == 1:
        return Visible((Run(stop=torch.where(mask[..., 0], torch.iinfo(torch.int32).max, 0)),))
    rows = max(1, _SCANNED_AT_ONCE // max(1, mask[:, :, :1].numel()))
    pieces = []
    for piece in mask.split(rows, dim=2):
        found = _turns(piece)
        if found is None:
            return Visible(None, mask)
        pieces.append(found)
    start, stop, again, end = (torch.cat(parts, -1) for parts in zip(*pieces, strict=True))
    if bool((end <= again).all()):
        return Visible((Run(start=start, stop=stop),))
    return Visible((Run(start=start, stop=stop), Run(start=again, stop=end)))


def _turns(mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """First run and last run of each row (start, stop, start, stop; the last one empty where there is but one)."""
    edge = mask.new_zeros(*mask.shape[:-1], 1)
    before, after = torch.cat([edge, mask], -1), torch.cat([mask, edge], -1)
    turns = before != after
    many = turns.sum(-1)
    if int(many.amax()) > 2 * MOST_RUNS:
        return None
    rises, falls = (turns & after).view(torch.uint8), (turns & before).view(torch.uint8)
    some, two = many > 0, many > 2
    start, stop = rises.argmax(-1) * some, falls.argmax(-1) * some
    last = mask.shape[-1]
    again = (last - rises.flip(-1).argmax(-1)) * two
    end = (last - falls.flip(-1).argmax(-1)) * two
    return start, stop, again, end


def document_runs(query_ids: Tensor, key_ids: Tensor, must: bool) -> tuple[Tensor, Tensor]:
    """Where each query's document lies among the keys: start and stop (B|1, Tq).

    Where documents interleave: -1 everywhere, or ValueError if they ``must`` not.
    """
    B = max(query_ids.shape[0], key_ids.shape[0])
    query_ids, key_ids = query_ids.expand(B, -1), key_ids.expand(B, -1)
    Tk = key_ids.shape[1]
    new = torch.ones_like(key_ids, dtype=torch.bool)
    new[:, 1:] = key_ids[:, 1:] != key_ids[:, :-1]
    order = torch.sort(key_ids, dim=1, stable=True)
    low = torch.searchsorted(order.values, query_ids.contiguous())
    high = torch.searchsorted(order.values, query_ids.contiguous(), right=True)
    blocks = new.sum(1)
    kinds = (order.values[:, 1:] != order.values[:, :-1]).sum(1) + (1 if Tk else 0)
    if bool((blocks != kinds).any()):
        if must:
            _checks.interleaved_documents()
        return torch.full_like(low, _INTERLEAVED), torch.full_like(low, _INTERLEAVED)
    if Tk == 0:
        return low, high
    start = order.indices.gather(1, low.clamp(max=Tk - 1))
    return torch.where(high > low, start, 0), torch.where(high > low, start + high - low, 0)
