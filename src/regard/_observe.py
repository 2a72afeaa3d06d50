"""Statistics of the weights in linear memory, beside the output that ``attention`` gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import _checks, _plan, _short
from regard._call import Call, prepare
from regard._frame import coordinates, wide
from regard.biases import Bias
from regard.kernels import _ops, inline, native_observe, reference
from regard.kernels.native_observe import Wanted
from regard.kernels.problem import lower
from regard.masks import Mask
from regard.normalizers import Normalizer, Softmax
from regard.scores import Dot, Score

_DOT = Dot()
_SOFTMAX = Softmax()
STATISTICS = ("lse", "max", "entropy", "received")


@dataclass(frozen=True, eq=False)
class Observation:
    """The output of a call and what was seen of its weights (per head, before dropout, detached).

    output (*batch, H, Tq, Dv), differentiable, bit for bit what ``attention`` gives. lse (*batch, H, Tq): log-sum-exp
    (softmax; else None). max (*batch, H, Tq): the largest weight of a row. entropy (*batch, H, Tq), in nats:
    ``-sum_j w_ij log w_ij``. received (*batch, H, Tk): ``sum_i w_ij``, the attention that each key got.
    top_weights, top_keys (*batch, H, Tq, k): the k largest weights of a row and their keys (weight 0, key -1 where a
    row sees fewer). pooled, pooled_max (*batch, H, rows, columns): the mean over the rows of a cell of their weight in
    it (so that a row of cells sums to what a row of weights does), and the largest weight in it. row_weights
    (*batch, H, len(rows), Tk): the weights of the chosen rows. None for what was not asked for.
    """

    output: Tensor
    lse: Tensor | None = None
    max: Tensor | None = None
    entropy: Tensor | None = None
    received: Tensor | None = None
    top_weights: Tensor | None = None
    top_keys: Tensor | None = None
    pooled: Tensor | None = None
    pooled_max: Tensor | None = None
    row_weights: Tensor | None = None


def observe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    score: Score | Any = _DOT,
    normalize: Normalizer = _SOFTMAX,
    bias: Bias | Tensor | None = None,
    dropout_p: float = 0.0,
    statistics: Sequence[str] = STATISTICS,
    topk: int = 0,
    pool: int = 0,
    rows: Sequence[int] | None = None,
) -> Observation:
    """``attention``, watched: the same output and statistics of the weights, never the weights themselves.

    statistics: any of "lse", "max", "entropy", "received"; topk: how many of the largest weights of each row to keep;
    pool: the side of a pooled map, at most ``pool`` x ``pool`` cells; rows: numbers of rows (from the end where
    negative) whose weights are wanted as they are. See ``Observation`` for what comes back. Memory is linear in Tq and
    Tk. Raises as ``attention`` does, ValueError for an unknown statistic and for a row that there is not.

    Compiled (softmax, sigmoid, relu; float32 and half precisions, on the CPU, topk up to 64) the statistics are taken
    while the output is computed, in one pass; elsewhere from blocks of weights that are made once more.
    """
    asked = _checks.statistics(statistics, STATISTICS)
    _checks.count("topk", topk)
    _checks.count("pool", pool)
    call = prepare(query, key, value, mask, score, normalize, bias, dropout_p)
    wanted = Wanted(frozenset(asked), topk, pool, _checks.rows(rows, call.frame.Tq))
    kernel = _plan.choose(call)
    output, results = _compiled(call, kernel, wanted)
    if output is None and not torch.compiler.is_compiling():
        output = _short.attend(query, key, value, mask, score, normalize, bias, dropout_p)
    if output is None:
        output = call.shaped(kernel.run(call, False)[0])
    if results is None:
        with torch.no_grad(), _plan.without_autocast(query.device):
            seen = _Seen(call, wanted)
            for span, keys in _strips(call):
                seen.add(span, keys)
        results = seen.results()
    return Observation(output, **{name: call.shaped(tensor) for name, tensor in results.items()})


def _compiled(
    call: Call, kernel: _plan.Kernel, wanted: Wanted
) -> tuple[Tensor | None, dict[str, Tensor] | None]:
    """Statistics by the compiled observer, and its output where ``attention`` would give that; else None."""
    forced = _plan.forced()
    if _ops.watched() or (forced or "native") != "native" or native_observe.refuses(call, wanted) is not None:
        return None, None
    with _plan.without_autocast(call.query.device):
        problem = lower(call, False, "native")
        alike = kernel.name == "native" and call.frame.Tq > native_observe.FEW_QUERIES
        alike = alike and not _plan._needs_gradient(problem)
        with torch.no_grad():
            seen = native_observe.observe(problem, wanted)
    if seen is None:
        return None, None
    return call.shaped(seen.output) if alike else None, seen.statistics


def _strips(call: Call) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    spans = inline.blocks(call)
    return list(zip(spans, inline.visible(call, spans), strict=True)) if call.frame.Tk else []


class _Seen:
    """Statistics that fill up, block of rows by block of rows."""

    def __init__(self, call: Call, asked: Wanted) -> None:
        self.call, self.rows = call, asked.rows
        wanted, topk, pool = asked.statistics, asked.topk, asked.pool
        frame, dtype = call.frame, wide(call.query[..., :0]).dtype
        zeros = torch.zeros(frame.B, frame.H, frame.Tq, dtype=dtype, device=frame.device)
        self.lse = (
            torch.full_like(zeros, -torch.inf)
            if "lse" in wanted and isinstance(call.normalize, Softmax)
            else None
        )
        self.max = torch.zeros_like(zeros) if "max" in wanted else None
        self.entropy = torch.zeros_like(zeros) if "entropy" in wanted else None
        self.received = zeros.new_zeros(frame.B, frame.H, frame.Tk) if "received" in wanted else None
        self.topk = min(topk, frame.Tk)
        shape = (frame.B, frame.H, frame.Tq, self.topk)
        self.top_weights = zeros.new_zeros(shape) if topk else None
        self.top_keys = torch.full(shape, -1, device=frame.device) if topk else None
        self.tall, self.across = -(-frame.Tq // max(1, pool)), -(-frame.Tk // max(1, pool))
        cells = (frame.B, frame.H, -(-frame.Tq // max(1, self.tall)), -(-frame.Tk // max(1, self.across)))
        self.pooled = zeros.new_zeros(cells) if pool else None
        self.pooled_max = zeros.new_zeros(cells) if pool else None
        self.row_weights = None
        if self.rows is not None:
            self.row_weights = zeros.new_zeros(frame.B, frame.H, len(self.rows), frame.Tk)

    def add(self, span: tuple[int, int], keys: tuple[int, int]) -> None:
        call, rows, seen = self.call, slice(*span), slice(*keys)
        if keys[0] >= keys[1]:
            return
        at = coordinates(call.frame, call.offset, span, keys)
        scores, blocked = reference.scored(call, at, call.query[:, :, rows], call.key[:, :, seen])
        if self.lse is not None:
            self.lse[:, :, rows] = reference.log_sum_exp(call.normalize, scores, blocked)
        weights = reference.normalized(call.normalize, scores, blocked)
        if self.max is not None:
            self.max[:, :, rows] = weights.amax(-1)
        if self.entropy is not None:
            self.entropy[:, :, rows] = torch.special.entr(weights).sum(-1)
        if self.received is not None:
            self.received[:, :, seen] += weights.sum(-2)
        if self.top_weights is not None:
            self._add_top(weights, rows, keys)
        if self.pooled is not None:
            self._add_pooled(weights, span, keys)
        if self.rows is not None and self.row_weights is not None:
            here = [n for n, row in enumerate(self.rows) if span[0] <= row < span[1]]
            self.row_weights[:, :, here, seen] = weights[:, :, [self.rows[n] - span[0] for n in here]]

    def _add_top(self, weights: Tensor, rows: slice, keys: tuple[int, int]) -> None:
        assert self.top_weights is not None and self.top_keys is not None
        most = min(self.topk, weights.shape[-1])
        found = weights.topk(most, -1)
        self.top_weights[:, :, rows, :most] = found.values
        self.top_keys[:, :, rows, :most] = torch.where(found.values == 0, -1, found.indices + keys[0])

    def _add_pooled(self, weights: Tensor, span: tuple[int, int], keys: tuple[int, int]) -> None:
        assert self.pooled is not None and self.pooled_max is not None
        rows, columns = _cells(span, self.tall), _cells(keys, self.across)
        edges = (*_missing(keys, self.across), *_missing(span, self.tall))
        whole = torch.nn.functional.pad(weights, edges)
        shape = (
            *weights.shape[:2],
            rows.stop - rows.start,
            self.tall,
            columns.stop - columns.start,
            self.across,
        )
        cells = whole.reshape(shape)
        self.pooled[:, :, rows, columns] += cells.sum((3, 5))
        room = self.pooled_max[:, :, rows, columns]
        torch.maximum(room, cells.amax((3, 5)), out=room)

    def results(self) -> dict[str, Tensor]:
        if self.pooled is not None:
            rows = torch.arange(self.pooled.shape[2], device=self.pooled.device)
            heights = (self.call.frame.Tq - rows * self.tall).clamp(max=self.tall)
            self.pooled /= heights[:, None]
        names = (*STATISTICS, "top_weights", "top_keys", "pooled", "pooled_max", "row_weights")
        found = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def _cells(span: tuple[int, int], size: int) -> slice:
    """The cells that a range touches."""
    return slice(span[0] // size, -(-span[1] // size))


def _missing(span: tuple[int, int], size: int) -> tuple[int, int]:
    """How far a range is from the outer edges of its cells."""
    return span[0] % size, -span[1] % size
