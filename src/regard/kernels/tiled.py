"""Pure torch, any device, forward and backward by recomputation, never a Tq x Tk tensor.

Strip by strip (``_strips``): scores, bias, mask, weights, weighted sum. The backward pass makes each strip's weights
again and walks the stages back (``_stages``).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import _thresholds
from regard._frame import At
from regard.kernels import _stages, _strips
from regard.kernels._stages import Parameters
from regard.kernels._strips import Strip
from regard.kernels.problem import DIFFERENTIABLE, Problem
from regard.kernels.reference import finite_rows, kept

_ROW_NUMBERS = {"softmax": 2, "sparsemax": 1, "entmax15": 1, "entmax": 1}


class Ready(NamedTuple):
    """A problem in the dtype that it is computed in, with what is not finite set aside."""

    problem: Problem
    bad_query: Tensor | None
    bad_key: Tensor | None
    bad_value: Tensor | None
    edges: list[tuple[Tensor, Tensor]]
    careful: bool
    closing: bool


def _ready(problem: Problem, *others: Tensor | None) -> Ready:
    """``others``: what else must be finite for the careful way not to be needed."""
    dtype = torch.float64 if problem.value.dtype == torch.float64 else torch.float32
    query, key, value = (x.to(dtype) for x in (problem.query, problem.key, problem.value))
    bad_query = bad_key = bad_value = None
    careful = not _surely_finite(query, key, value, *others)
    if careful:
        query, bad_query = finite_rows(query)
        key, bad_key = finite_rows(key)
        bad_value = ~torch.isfinite(value)
        value = value.masked_fill(bad_value, 0.0)
    own: dict[str, Any] = {
        name: _to(getattr(problem, name), dtype) for name in ("scale", "weight", "sink", "alpha", "shift")
    }
    if own["alpha"] is not None:
        own["alpha"] = own["alpha"].clamp(min=1 + _thresholds.LEAST_POWER)
    problem = problem._replace(query=query, key=key, value=value, **own)
    return Ready(problem, bad_query, bad_key, bad_value, _strips.edges_of(problem), careful, _closes(problem))


def _closes(problem: Problem) -> bool:
    """Whether a bias has -inf in it."""
    return any(
        tensor is not None and bool((tensor == -torch.inf).any())
        for tensor in (problem.bias, problem.diagonal)
    )


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _surely_finite(*tensors: Tensor | None) -> bool:
    """Whether sums say that all is finite; a sum that overflows only costs the careful way."""
    return all(
        tensor is None or math.isfinite(tensor.sum(dtype=_at_least(tensor)).item()) for tensor in tensors
    )


def _at_least(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def row_numbers(problem: Problem) -> int:
    """How many numbers a row the forward pass leaves for the backward pass."""
    return _ROW_NUMBERS.get(problem.normalize, 0) if problem.rows_wanted else 0


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output (B, H, Tq, Dv), log-sum-exp (B, H, Tq) under softmax, and numbers a row (n, B, H, Tq) for ``backward``."""
    B, H, Tq, _ = problem.query.shape
    Dv = problem.value.shape[-1]
    ready = _ready(problem)
    numbers = row_numbers(problem)
    output = torch.zeros(B, H, Tq, Dv, dtype=ready.problem.value.dtype, device=problem.query.device)
    lse = output.new_full((B, H, Tq) if numbers == 2 else (0,), -torch.inf)
    rows = output.new_zeros(numbers, B, H, Tq)
    for strip in _strips.walk(ready.problem, ready.edges):
        _forward_strip(ready, strip, output, lse, rows)
    return output.to(problem.value.dtype), lse, rows


def _forward_strip(ready: Ready, strip: Strip, output: Tensor, lse: Tensor, rows: Tensor) -> None:
    place = _place(strip)
    if not rows.shape[0] and _simple(ready, strip):
        weights = _stages.plain_softmax(_scores(ready, strip))
        part = _mixed(ready, strip, weights)
        # A row whose scores all overflowed to -inf is an empty row, of which a plain softmax knows nothing.
        if math.isfinite(part.sum().item()):
            output[place] = part
            return
    weighed = _stages.weigh(ready.problem, _scores(ready, strip), _own(ready.problem, strip))
    for n in range(rows.shape[0]):
        rows[n][place] = weighed.rows[n]
    if weighed.lse is not None and lse.ndim == 3:
        lse[place] = weighed.lse
    output[place] = _stages.divide(_mixed(ready, strip, weighed.weights), weighed.total)


def _simple(ready: Ready, strip: Strip) -> bool:
    """Whether a plain softmax will do: every row surely sees a key."""
    problem = ready.problem
    plain = problem.normalize == "softmax" and problem.sink is None and strip.filled and not ready.careful
    return plain and problem.bias is None and problem.diagonal is None


def _scores(ready: Ready, strip: Strip) -> Tensor:
    """Stage one on a strip: scores (b, heads, rows, W), -inf where a pair may not meet."""
    q, k, _ = _inputs(ready.problem, strip)
    scored = _stages.score(ready.problem, q, k, _own(ready.problem, strip), _shape(strip), keep=False)
    _biased(ready, strip, scored.scores, _strips.closed(ready.problem, ready.edges, strip))
    return scored.scores


def _mixed(ready: Ready, strip: Strip, weights: Tensor) -> Tensor:
    """Stage three on a strip, after dropout: weighted sums (b, heads, rows, Dv)."""
    problem, v = ready.problem, _flat_keys(ready.problem.value, strip)
    if problem.seed is not None:
        weights.mul_(_kept(problem, strip)).mul_(_raised(problem))
    flat = weights.view(v.shape[0], -1, v.shape[1])
    part = torch.bmm(flat, v).view(*_shape(strip)[:3], -1)
    if ready.bad_value is not None:
        bad = _flat_keys(ready.bad_value, strip).to(v.dtype)
        part.masked_fill_((torch.bmm((flat != 0).to(v.dtype), bad) > 0).view(part.shape), torch.nan)
    return part


def backward(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    output_rows: Tensor,
    problem: Problem,
    needs: list[bool],
) -> list[Tensor]:
    """Gradients of the differentiable arguments that ``needs`` asks for, in their own shapes and dtypes."""
    ready = _ready(problem, grad_output, grad_lse, output_rows)
    sums = {
        name: _sum_room(ready.problem, name)
        for name, need in zip(DIFFERENTIABLE, needs, strict=True)
        if need and getattr(problem, name) is not None
    }
    dtype = ready.problem.value.dtype
    if grad_output is None:
        grad_output = ready.problem.value.new_zeros(1, 1, 1, 1).expand(
            *problem.query.shape[:3], problem.value.shape[-1]
        )
    for strip in _strips.walk(ready.problem, ready.edges):
        _backward_strip(ready, strip, grad_output.to(dtype), _to(grad_lse, dtype), output_rows, sums)
    return [_own_shape(getattr(problem, name), total) for name, total in sums.items()]


def _backward_strip(
    ready: Ready,
    strip: Strip,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    rows: Tensor,
    sums: dict[str, Tensor],
) -> None:
    problem, place = ready.problem, _place(strip)
    q, k, v = _inputs(problem, strip)
    own = _own(problem, strip)
    scored = _stages.score(problem, q, k, own, _shape(strip), keep=True)
    _biased(ready, strip, scored.scores, _strips.closed(problem, ready.edges, strip))
    blocked = scored.scores == -torch.inf if ready.careful else None
    before = scored.scores.clone() if "alpha" in sums else None
    numbers = tuple(rows[n][place] for n in range(rows.shape[0]))
    if _simple(ready, strip) and bool((numbers[1] > 0).all()):
        weights = _stages.plain_softmax(scored.scores)
    else:
        weights = _cleared(_stages.weigh_again(problem, scored.scores, own, numbers), blocked)
    dout = grad_output[place].reshape(q.shape[0], q.shape[1], -1)
    dweights = torch.bmm(dout, v.mT).view(weights.shape)
    dropped = weights
    if problem.seed is not None:
        keep = _kept(problem, strip).to(weights.dtype).mul_(_raised(problem))
        dropped = weights * keep
        dweights.mul_(keep)
    if "value" in sums:
        _add_keys(sums["value"], strip, torch.bmm(dropped.view(q.shape[0], q.shape[1], -1).mT, dout))
    dlse = None if grad_lse is None else grad_lse[place]
    by_score = _stages.weight_gradients(problem, weights, dweights, own, numbers, dlse, before)
    _cleared(by_score.scores, blocked)
    for name in ("sink", "alpha", "shift"):
        if name in sums:
            sums[name][strip.b, strip.heads] += getattr(by_score, name)
    _bias_gradients(problem, strip, by_score.scores, sums)
    if not sums.keys().isdisjoint(("query", "key", "scale", "weight")):
        found = _stages.score_gradients(problem, q, k, own, scored, by_score.scores)
        _add_score_gradients(strip, found, sums)


def _add_score_gradients(strip: Strip, found: _stages.ScoreGradients, sums: dict[str, Tensor]) -> None:
    if "query" in sums:
        room = sums["query"][_place(strip)]
        room += found.query.view(room.shape)
    if "key" in sums:
        _add_keys(sums["key"], strip, found.key)
    for name in ("scale", "weight"):
        if name in sums:
            sums[name][strip.b, strip.heads] += getattr(found, name)


# ---------------------------------------------------------------------------- a strip's share of things


def _place(strip: Strip) -> tuple[slice, slice, slice]:
    return strip.b, strip.heads, slice(*strip.rows)


def _shape(strip: Strip) -> tuple[int, int, int, int]:
    b, heads = strip.b.stop - strip.b.start, strip.heads.stop - strip.heads.start
    return b, heads, strip.rows[1] - strip.rows[0], strip.width


def _inputs(problem: Problem, strip: Strip) -> tuple[Tensor, Tensor, Tensor]:
    """q (n, groups * rows, D), k (n, W, D), v (n, W, Dv), n = samples x key heads."""
    n = (strip.b.stop - strip.b.start) * (strip.h.stop - strip.h.start)
    query = problem.query[_place(strip)]
    folded = query.shape[0] * query.shape[1] * query.shape[2] // n
    return (
        query.reshape(n, folded, query.shape[-1]),
        _flat_keys(problem.key, strip),
        _flat_keys(problem.value, strip),
    )


def _flat_keys(tensor: Tensor, strip: Strip) -> Tensor:
    return _strips.rows_of(tensor[strip.b, strip.h], strip.keys).flatten(0, 1)


def _own(problem: Problem, strip: Strip) -> Parameters:
    def share(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        one = slice(0, 1)
        return tensor[strip.b if tensor.shape[0] > 1 else one, strip.heads if tensor.shape[1] > 1 else one]

    def column(tensor: Tensor | None) -> Tensor | None:
        part = share(tensor)
        return None if part is None else part[:, :, None, None]

    return Parameters(
        column(problem.scale),
        share(problem.weight),
        column(problem.sink),
        column(problem.alpha),
        column(problem.shift),
    )


def _biased(ready: Ready, strip: Strip, s: Tensor, closed: list[_strips.Closed]) -> None:
    """Add bias and diagonal, then close what may not meet with -inf, in place; mark what is not finite with NaN."""
    problem = ready.problem
    if problem.bias is not None:
        tile = _strips.columns(_strips.part(problem.bias, strip.b, strip.heads, strip.rows), strip.keys)
        _add(s, tile, ready.closing)
    if problem.diagonal is not None:
        for low, high, piece in _diagonals(problem.diagonal, problem, strip):
            _add(s[..., low:high], piece.unfold(-1, high - low, 1).flip(-2), ready.closing)
    if ready.careful:
        blocked = s == -torch.inf
        if ready.bad_query is not None:
            s.masked_fill_(ready.bad_query[_place(strip)][..., None], torch.nan)
        if ready.bad_key is not None:
            groups = (strip.heads.stop - strip.heads.start) // (strip.h.stop - strip.h.start)
            bad = _strips.columns(ready.bad_key[strip.b, strip.h], strip.keys)
            s.masked_fill_(bad.repeat_interleave(groups, 1)[:, :, None, :], torch.nan)
        s.masked_fill_(blocked, -torch.inf)
    for low, high, pairs in closed:
        s[..., low:high].masked_fill_(pairs, -torch.inf)


def _add(s: Tensor, tile: Tensor, closing: bool) -> None:
    """Add a bias in place; one of -inf blocks also where the score itself has overflowed."""
    s.add_(tile)
    if closing:
        s.masked_fill_(tile == -torch.inf, -torch.inf)


def _cleared(x: Tensor, blocked: Tensor | None) -> Tensor:
    """Blocked pairs set to 0: rows that are not finite would otherwise reach keys that they may not see."""
    return x if blocked is None else x.masked_fill_(blocked, 0.0)


def _diagonals(diagonal: Tensor, problem: Problem, strip: Strip) -> list[tuple[int, int, Tensor]]:
    """For each range of keys: its columns, and its diagonals (b|1, heads|1, rows + columns - 1), lowest first."""
    one = slice(0, 1)
    part = diagonal[strip.b if diagonal.shape[0] > 1 else one, strip.heads if diagonal.shape[1] > 1 else one]
    found, column = [], 0
    zero = problem.query.shape[2] - 1
    for start, stop in strip.keys:
        piece = part[..., start - (strip.rows[1] - 1) + zero : stop - strip.rows[0] + zero]
        found.append((column, column + stop - start, piece))
        column += stop - start
    return found


def _bias_gradients(problem: Problem, strip: Strip, ds: Tensor, sums: dict[str, Tensor]) -> None:
    if "bias" in sums:
        room = _strips.part(sums["bias"], strip.b, strip.heads, strip.rows)
        column = 0
        for start, stop in strip.keys:
            piece = ds[..., column : column + stop - start]
            target = room[..., start:stop] if room.shape[-1] > 1 else room
            target += piece.sum_to_size(target.shape)
            column += stop - start
    if "diagonal" in sums:
        for low, high, room in _diagonals(sums["diagonal"], problem, strip):
            room += _along_diagonals(ds[..., low:high])


def _along_diagonals(ds: Tensor) -> Tensor:
    """Sums of ds (..., rows, columns) along its diagonals, lowest first: (..., rows + columns - 1)."""
    rows, columns = ds.shape[-2:]
    sheared = torch.nn.functional.pad(ds.flip(-2), (0, rows)).flatten(-2)[..., : rows * (rows + columns - 1)]
    return sheared.reshape(*ds.shape[:-2], rows, rows + columns - 1).sum(-2)


def _kept(problem: Problem, strip: Strip) -> Tensor:
    device = problem.query.device
    b = torch.arange(strip.b.start, strip.b.stop, device=device)[:, None, None, None]
    h = torch.arange(strip.heads.start, strip.heads.stop, device=device)[:, None, None]
    i = torch.arange(*strip.rows, device=device)[:, None]
    j = torch.cat([torch.arange(*span, device=device) for span in strip.keys])
    assert problem.seed is not None
    return kept(problem.seed, At(b, h, i, j, i), problem.query.shape[1], problem.dropout_p)


def _raised(problem: Problem) -> float:
    return 1.0 / (1.0 - problem.dropout_p) if problem.dropout_p < 1 else 0.0


# ---------------------------------------------------------------------------- sums of gradients


def _sum_room(problem: Problem, name: str) -> Tensor:
    """Zeros to add a gradient into: per head (B, H, ...) for parameters and diagonals, own shape for the rest."""
    tensor = getattr(problem, name)
    B, H = problem.query.shape[:2]
    if name in ("scale", "sink", "alpha", "shift", "weight", "diagonal"):
        return problem.value.new_zeros(B, H, *tensor.shape[2:])
    return torch.zeros(tensor.shape, dtype=problem.value.dtype, device=tensor.device)


def _add_keys(total: Tensor, strip: Strip, found: Tensor) -> None:
    b, h = strip.b.stop - strip.b.start, strip.h.stop - strip.h.start
    found = found.unflatten(0, (b, h))
    column = 0
    for start, stop in strip.keys:
        total[strip.b, strip.h, start:stop] += found[:, :, column : column + stop - start]
        column += stop - start


def _own_shape(tensor: Tensor, total: Tensor) -> Tensor:
    return total.sum_to_size(tensor.shape).to(tensor.dtype)
