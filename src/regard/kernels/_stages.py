"""The stages on a strip and their gradients, written by hand.

Scores of a strip are s (b, heads, rows, W); the same memory seen as (n, groups * rows, W), n = b x key heads, is what
matrix products work on, so that grouped heads share their keys. "Gradient of x" below is dx, of the loss by x.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard import _thresholds
from regard.kernels.problem import Problem

_PAIRS_AT_ONCE = {"cpu": 1 << 20}
_PAIRS_ELSEWHERE = 1 << 25


class Parameters(NamedTuple):
    """A strip's share of the per-head parameters, (b|1, heads|1, 1, 1) each; weight (b|1, heads|1, D)."""

    scale: Tensor | None
    weight: Tensor | None
    sink: Tensor | None
    alpha: Tensor | None
    shift: Tensor | None


# ---------------------------------------------------------------------------- stage one: scores


class Scored(NamedTuple):
    """Scores, and what their gradient needs: before the scale tensor (raw), after the soft-cap (capped)."""

    scores: Tensor
    raw: Tensor | None
    capped: Tensor | None


def score(
    problem: Problem, q: Tensor, k: Tensor, own: Parameters, shape: tuple[int, ...], keep: bool
) -> Scored:
    """Scores (b, heads, rows, W) of q (n, groups * rows, D) and k (n, W, D), before bias and mask."""
    raw = _raw(problem, q, k, own, shape)
    s, before = raw, None
    if own.scale is not None:
        before = raw.clone() if keep else None
        s = raw.mul_(own.scale)
    if not problem.softcap:
        return Scored(s, before, None)
    s.div_(problem.softcap).tanh_().mul_(problem.softcap)
    return Scored(s, before, s.clone() if keep else None)


def _raw(problem: Problem, q: Tensor, k: Tensor, own: Parameters, shape: tuple[int, ...]) -> Tensor:
    if problem.score == "dot":
        room = q.new_empty(q.shape[0], q.shape[1], k.shape[1])
        return torch.baddbmm(room, q, k.mT, beta=0, alpha=problem.factor).view(shape)
    if problem.score == "distance":
        apart = torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist")
        return apart.square_().mul_(-problem.factor).view(shape)
    assert own.weight is not None
    out = q.new_empty(q.shape[0], q.shape[1], k.shape[1])
    weight = _weights(own.weight, shape, q)
    for start, stop in _portions(q, k):
        torch.matmul(_half_tanh(q, k[:, start:stop]), weight, out=out[:, :, start:stop, None])
    return out.mul_(2).sub_(weight.sum(2)).view(shape)


def _half_tanh(q: Tensor, k: Tensor) -> Tensor:
    """h = sigmoid(2 (q + k)) of every pair, (n, rows, keys, D): tanh is 2 h - 1, at a third of the time."""
    return (q[:, :, None, :] + k[:, None, :, :]).mul_(2).sigmoid_()


def _weights(weight: Tensor, shape: tuple[int, ...], q: Tensor) -> Tensor:
    """Additive weights as a column for each row of q: (n, groups * rows, D, 1), a view where heads share them."""
    b, heads, rows, _ = shape
    spread = weight[:, :, None, :].expand(b, heads, rows, weight.shape[-1])
    return spread.reshape(q.shape[0], q.shape[1], -1)[..., None]


def _portions(q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    budget = _PAIRS_AT_ONCE.get(q.device.type, _PAIRS_ELSEWHERE)
    step = max(1, budget // max(1, q.numel()))
    return [(start, min(start + step, k.shape[1])) for start in range(0, k.shape[1], step)]


class ScoreGradients(NamedTuple):
    query: Tensor
    key: Tensor
    scale: Tensor | None
    weight: Tensor | None


def score_gradients(
    problem: Problem, q: Tensor, k: Tensor, own: Parameters, scored: Scored, ds: Tensor
) -> ScoreGradients:
    """From the gradient of the scores (b, heads, rows, W), which is overwritten, to those of q and k and parameters."""
    if scored.capped is not None:
        ds.addcmul_(ds * scored.capped, scored.capped, value=-1.0 / problem.softcap**2)
    scale = None
    if own.scale is not None:
        assert scored.raw is not None
        # Where a blocked pair's product overflowed, 0 times infinity must not reach the scale.
        scale = (ds * scored.raw).masked_fill_(ds == 0, 0.0).sum((-1, -2))
        ds.mul_(own.scale)
    flat = ds.view(q.shape[0], q.shape[1], k.shape[1])
    if problem.score == "dot":
        return ScoreGradients(
            _product(flat, k, problem.factor), _product(flat.mT, q, problem.factor), scale, None
        )
    if problem.score == "distance":
        return ScoreGradients(*_distance_gradients(q, k, flat.mul_(-2 * problem.factor)), scale, None)
    return _additive_gradients(q, k, own, flat, tuple(ds.shape), scale)


def _distance_gradients(q: Tensor, k: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
    """sum_j ds_ij (q_i - k_j), and minus the same over i: from differences, which do not cancel."""
    dq, dk = torch.zeros_like(q), torch.empty_like(k)
    for start, stop in _portions(q, k):
        apart = (q[:, :, None, :] - k[:, None, start:stop, :]).mul_(ds[:, :, start:stop, None])
        dq += apart.sum(2)
        dk[:, start:stop] = apart.sum(1).neg_()
    return dq, dk


def _product(a: Tensor, b: Tensor, factor: float) -> Tensor:
    room = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    return torch.baddbmm(room, a, b, beta=0, alpha=factor)


def _additive_gradients(
    q: Tensor, k: Tensor, own: Parameters, ds: Tensor, shape: tuple[int, ...], scale: Tensor | None
) -> ScoreGradients:
    assert own.weight is not None
    weight = _weights(own.weight, shape, q)[..., 0]
    dq, dk, dw = torch.zeros_like(q), torch.empty_like(k), torch.zeros_like(q)
    for start, stop in _portions(q, k):
        part = ds[:, :, start:stop]
        half = _half_tanh(q, k[:, start:stop])
        dw += (part[:, :, None, :] @ half).squeeze(2).mul_(2).sub_(part.sum(2, keepdim=True))
        # The slope of tanh is 4 h (1 - h).
        slope = half.addcmul_(half, half, value=-1).mul_(part[..., None])
        dq += slope.sum(2)
        dk[:, start:stop] = slope.mul_(weight[:, :, None, :]).sum(1)
    dk *= 4
    dq *= 4
    b, heads, rows, _ = shape
    return ScoreGradients(dq * weight, dk, scale, dw.view(b, heads, rows, -1).sum(2))


# ---------------------------------------------------------------------------- stage two: weights


class Weighed(NamedTuple):
    """Weights (not yet divided where ``total`` is given), log-sum-exp, numbers of each row for the gradient."""

    weights: Tensor
    total: Tensor | None
    lse: Tensor | None
    rows: tuple[Tensor, ...]


def weigh(problem: Problem, s: Tensor, own: Parameters) -> Weighed:
    """Stage two in place: blocked entries of s (b, heads, rows, W) are -inf and get weight 0."""
    if problem.normalize == "softmax":
        return _softmax(s, own.sink)
    if problem.normalize == "sigmoid":
        assert own.shift is not None
        return Weighed(s.add_(own.shift).sigmoid_(), None, None, ())
    if problem.normalize == "relu":
        return Weighed(s.relu_(), None, None, ())
    s.sub_(_top(s))
    tau = _threshold(problem.normalize, s, own)
    return Weighed(_above(problem.normalize, s, tau, own), None, None, (tau[..., 0],))


def weigh_again(problem: Problem, s: Tensor, own: Parameters, rows: tuple[Tensor, ...]) -> Tensor:
    """The weights once more, in place, from the numbers that ``weigh`` left."""
    if problem.normalize in ("sigmoid", "relu"):
        return weigh(problem, s, own).weights
    if problem.normalize == "softmax":
        peak, total = rows
        return s.sub_(peak[..., None]).exp_().mul_(_reciprocal(total)[..., None])
    s.sub_(_top(s))
    return _above(problem.normalize, s, rows[0][..., None], own)


def plain_softmax(s: Tensor) -> Tensor:
    """Softmax of rows that all see some key, in place and in one pass."""
    return torch.softmax(s, -1, out=s)


def _top(s: Tensor) -> Tensor:
    top = s.amax(-1, keepdim=True)
    return top.masked_fill_(top == -torch.inf, 0.0)


def _softmax(s: Tensor, sink: Tensor | None) -> Weighed:
    peak = s.amax(-1, keepdim=True)
    empty = peak == -torch.inf
    if sink is not None:
        peak = torch.maximum(peak, sink)
    peak.masked_fill_(empty, 0.0)
    weights = s.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total += (sink - peak).exp().masked_fill(empty, 0.0)
    lse = (peak + total.log())[..., 0]
    return Weighed(weights, total, lse, (peak[..., 0], total[..., 0]))


def _reciprocal(total: Tensor) -> Tensor:
    return total.masked_fill(total == 0, 1.0).reciprocal_()


def divide(output: Tensor, total: Tensor | None) -> Tensor:
    """Weighted sums by their total weight; rows without any stay 0."""
    return output if total is None else output.mul_(_reciprocal(total))


def _threshold(kind: str, x: Tensor, own: Parameters) -> Tensor:
    if kind == "sparsemax":
        return _thresholds.sparsemax(x)
    if kind == "entmax15":
        return _thresholds.entmax15(x.div(2))
    assert own.alpha is not None
    power = own.alpha - 1
    return _thresholds.entmax(x * power, power)


def _above(kind: str, x: Tensor, tau: Tensor, own: Parameters) -> Tensor:
    if kind == "sparsemax":
        return x.sub_(tau).clamp_(min=0)
    if kind == "entmax15":
        return x.div_(2).sub_(tau).clamp_(min=0).square_()
    assert own.alpha is not None
    power = own.alpha - 1
    weights = _thresholds.entmax_weights(x.mul_(power), tau, power)
    total = weights.sum(-1, keepdim=True)
    return weights.div_(total.masked_fill_(total == 0, 1.0))


class WeightGradients(NamedTuple):
    scores: Tensor
    sink: Tensor | None
    alpha: Tensor | None
    shift: Tensor | None


def weight_gradients(
    problem: Problem,
    w: Tensor,
    dw: Tensor,
    own: Parameters,
    rows: tuple[Tensor, ...],
    dlse: Tensor | None,
    s: Tensor | None,
) -> WeightGradients:
    """From the gradient of the weights, which is overwritten, to that of the scores and of parameters (b, heads)."""
    kind = problem.normalize
    if kind == "softmax":
        sink = None if own.sink is None else _sink_gradient(w, dw, own.sink[..., 0], rows, dlse)
        ds = torch.ops.aten._softmax_backward_data.default(dw, w, -1, w.dtype)
        if dlse is not None:
            ds.addcmul_(w, dlse[..., None])
        return WeightGradients(ds, sink, None, None)
    if kind == "sigmoid":
        ds = dw.mul_(w).mul_(1 - w)
        return WeightGradients(ds, None, None, ds.sum((-1, -2)))
    if kind == "relu":
        return WeightGradients(dw.mul_(w > 0), None, None, None)
    slope = _slope(kind, w, own)
    total = slope.sum(-1, keepdim=True)
    mean = torch.linalg.vecdot(slope, dw)[..., None] / total.masked_fill(total == 0, 1.0)
    alpha = None if s is None else _alpha_gradient(w, dw, slope, total, own, s)
    return WeightGradients(dw.sub_(mean).mul_(slope), None, alpha, None)


def _sink_gradient(
    w: Tensor, dw: Tensor, sink: Tensor, rows: tuple[Tensor, ...], dlse: Tensor | None
) -> Tensor:
    """The sink is a key of value 0: with weight w_s, d sink = w_s (dlse - sum_j w_j dw_j), summed over the rows."""
    peak, total = rows
    mean: Tensor = torch.linalg.vecdot(w, dw)
    share = (sink - peak).exp().mul_(_reciprocal(total)).masked_fill_(total == 0, 0.0)
    return ((-mean if dlse is None else dlse - mean) * share).sum(-1)


def _slope(kind: str, w: Tensor, own: Parameters) -> Tensor:
    """dw_j / ds_j at fixed threshold: w^(2 - alpha) on the support."""
    if kind == "entmax15":
        return w.sqrt()
    if kind == "sparsemax":
        return (w > 0).to(w.dtype).masked_fill_(w.isnan(), torch.nan)
    assert own.alpha is not None
    return w.pow(2 - own.alpha).masked_fill_(w == 0, 0.0)


def _alpha_gradient(
    w: Tensor, dw: Tensor, slope: Tensor, total: Tensor, own: Parameters, s: Tensor
) -> Tensor:
    """d loss / d alpha. With z = (alpha - 1) s - tau: dw = -w ln z / (alpha - 1)^2 + slope (s - tau') / (alpha - 1),

    and tau' such that the weights keep their sum (ln z = (alpha - 1) ln w).
    """
    assert own.alpha is not None
    power = own.alpha - 1
    inside = w > 0
    s = (s - _top(s)).masked_fill_(~inside, 0.0)
    entropy = torch.where(inside, w, 1.0).log_().mul_(w)
    tau = ((slope * s).sum(-1, keepdim=True) - entropy.sum(-1, keepdim=True)) / total.masked_fill(
        total == 0, 1.0
    )
    change = (slope * (s - tau) - entropy) / power
    return (change * dw).sum((-1, -2))
