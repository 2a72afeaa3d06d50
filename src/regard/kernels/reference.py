"""The definition. Everything else in this library is an optimisation of this file and is tested against it.

    scores  = score(query, key) + bias                     stage 1   (B, H, Tq, Tk)
    weights = normalize(scores) over the allowed keys      stage 2   (B, H, Tq, Tk)
    output  = sum_j weights_ij value_j over those keys     stage 3   (B, H, Tq, Dv)

Pairs that may not meet are left out, not multiplied by zero: whatever is in them, nothing of it shows. A row that sees
a non-finite key, or a non-finite value at a weight that is not 0, is not finite; no other row is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard import _checks
from regard._call import Call
from regard._frame import At, coordinates, wide
from regard.normalizers import Softmax
from regard.scores import BUILT_IN, Modified, spread_heads


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """The whole definition: output (B, H, Tq, Dv) in the query's dtype, and log-sum-exp (B, H, Tq) under softmax."""
    at = coordinates(call.frame, call.offset, (0, call.frame.Tq), (0, call.frame.Tk))
    return attend_tile(call, at, call.query, call.key, call.value)


def attend_tile(call: Call, at: At, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The definition on the rows and keys of ``at``: all the keys that these rows may attend to."""
    scores, blocked = scored(call, at, query, key)
    weights = normalized(call.normalize, scores, blocked)
    if call.seed is not None:
        scale = 1.0 / (1.0 - call.dropout_p) if call.dropout_p < 1 else 0.0
        weights = weights * kept(call.seed, at, call.frame.H, call.dropout_p) * scale
    output = mixed(weights, wide(value))
    return output.to(value.dtype), log_sum_exp(call.normalize, scores, blocked)


def weigh(call: Call) -> Tensor:
    """Stages one and two: weights (B, H, Tq, Tk) before dropout, in the query's dtype."""
    at = coordinates(call.frame, call.offset, (0, call.frame.Tq), (0, call.frame.Tk))
    scores, blocked = scored(call, at, call.query, call.key)
    return normalized(call.normalize, scores, blocked).to(call.query.dtype)


# ---------------------------------------------------------------------------- the stages


def scored(call: Call, at: At, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Stage one: scores with -inf where a pair may not meet, and those pairs as a bool tensor."""
    allowed = None if call.mask is None else call.mask.allowed(at)
    query, bad_query = finite_rows(wide(query))
    key, bad_key = finite_rows(wide(key))
    if allowed is not None:
        query, key = without_unseen(query, key, allowed)
    scores = _score_of(call.score, call, at, query, key)
    blocked = scores == -torch.inf
    if call.bias is not None:
        bias = call.bias.value(at).to(scores.dtype)
        # Asked of the bias itself: an overflowed score plus -inf is no longer -inf.
        scores, blocked = scores + bias, blocked | (bias == -torch.inf)
        blocked = blocked | (scores == -torch.inf)
    if allowed is not None:
        blocked = blocked | ~allowed
    if bad_query is not None:
        scores = scores.masked_fill(bad_query[..., :, None], torch.nan)
    if bad_key is not None:
        scores = scores.masked_fill(spread_heads(bad_key[..., None], call.frame.H).mT, torch.nan)
    return scores.masked_fill(blocked, -torch.inf), blocked


def _score_of(score: object, call: Call, at: At, query: Tensor, key: Tensor) -> Tensor:
    shape = (*query.shape[:3], key.shape[-2])
    if isinstance(score, Modified):
        inner = _score_of(score.score, call, at, query, key)
        changed = score.score_mod(inner, at.b, at.h, at.i, at.j)
        return _checks.tile_scores("score_mod(score, b, h, q, k)", changed, shape, broadcast=True)
    if not isinstance(score, BUILT_IN):
        key = spread_heads(key, query.shape[1])
    assert callable(score)
    return _checks.tile_scores("score(query, key)", score(query, key), shape)


def normalized(normalize: object, scores: Tensor, blocked: Tensor) -> Tensor:
    """Stage two: weights, 0 for blocked pairs and for rows that may attend to nothing."""
    assert callable(normalize)
    if scores.shape[-1] == 0:
        return scores
    empty = blocked.all(-1, keepdim=True)
    weights = normalize(scores.masked_fill(empty, 0.0))
    weights = _checks.tile_scores("normalize(scores)", weights, tuple(scores.shape))
    return weights.masked_fill(blocked, 0.0)


def mixed(weights: Tensor, value: Tensor) -> Tensor:
    """Stage three: the weighted sum (B, H, rows, Dv) of value (B, Hkv, keys, Dv), grouped heads never expanded."""
    bad = ~torch.isfinite(value)
    if _checks.can_look(value) and not bool(bad.any()):
        return _folded(weights, value)
    output = _folded(weights, value.masked_fill(bad, 0.0))
    touched = _folded((weights != 0).to(value.dtype), bad.to(value.dtype)) > 0
    return output.masked_fill(touched, torch.nan)


def _folded(weights: Tensor, value: Tensor) -> Tensor:
    B, H, rows, keys = weights.shape
    Hkv = value.shape[1]
    if H == Hkv or Hkv == 0:
        return weights.to(value.dtype) @ value
    folded = weights.to(value.dtype).reshape(B, Hkv, H // Hkv * rows, keys)
    return (folded @ value).reshape(B, H, rows, value.shape[-1])


def log_sum_exp(normalize: object, scores: Tensor, blocked: Tensor) -> Tensor:
    """log sum_j exp(s_j) of every row (with the sink, where there is one), -inf for empty rows; softmax only."""
    if not isinstance(normalize, Softmax):
        return scores.new_empty(0)
    empty = blocked.all(-1)
    whole = (
        normalize.log_sum_exp(scores.masked_fill(empty[..., None], 0.0))
        if scores.shape[-1]
        else scores.sum(-1)
    )
    return whole.masked_fill(empty, -torch.inf)


def finite_rows(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x with the rows that are not finite set to 0, and which those are; (x, None) where all are seen to be finite."""
    bad = ~torch.isfinite(x).all(-1)
    if _checks.can_look(x) and not bool(bad.any()):
        return x, None
    return x.masked_fill(bad[..., None], 0.0), bad


def without_unseen(query: Tensor, key: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Queries that see no key, and keys that no query sees, set to 0: numbers in padding cannot even overflow."""
    B, H, rows, _ = query.shape
    Hkv, keys = key.shape[1:3]
    seen = allowed.expand(B, H, rows, keys)
    of_key = seen.any(-2).reshape(B, Hkv, H // max(1, Hkv), keys).any(2)
    return query.masked_fill(~seen.any(-1)[..., None], 0.0), key.masked_fill(~of_key[..., None], 0.0)


# ---------------------------------------------------------------------------- dropout


def kept(seed: Tensor, at: At, heads: int, p: float) -> Tensor:
    """Which pairs of a tile dropout keeps, as bool; their weights are then divided by 1 - p.

    Pair (b, h, i, j) is kept when mix(mix(mix(mix(seed) + b H + h) + i) + j) >= p 2^32: a fixed counter hash, so
    that every kernel drops the same pairs whatever its tiles.
    """
    row = mix(mix(mix(seed) + at.b * heads + at.h) + at.i)
    return mix(row + at.j) >= round(p * 2**32)


def mix(x: Tensor) -> Tensor:
    """A 32-bit mixing hash, in int64 arithmetic: x ^= x >> 16, x *= m, x ^= x >> 15, x *= n, x ^= x >> 16."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
