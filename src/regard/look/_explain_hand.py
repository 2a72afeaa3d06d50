"""The arithmetic of a worked example, done again by hand in float64: one head, the rows that are shown.

Nothing here calls a kernel: each function takes the numbers of the step before and the definition of the choice that
was made, so that the numbers of the public API have something independent to agree with. A user's own callable has no
definition to take: there None is returned, and the caller says what it did instead.

Letters: n rows shown, Tk keys, D width of query and key, Dv width of value.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard.normalizers import Entmax, Entmax15, Relu, Sigmoid, Softmax, Sparsemax
from regard.scores import Additive, Bilinear, Concat, Cosine, Distance, Dot

_BISECTIONS = 80


def of_head(value: Any, head: int) -> float:
    """A number, a 0-d or a (H,) tensor: what it is for one head."""
    if not isinstance(value, Tensor):
        return float(value)
    return float(value.detach().reshape(-1)[head if value.numel() > 1 else 0])


def vector(weight: Tensor, head: int, one: int) -> Tensor:
    """A parameter with `one` dimensions, or one more for the heads: what it is for one head, in float64."""
    found = weight.detach().double()
    return found[head if found.shape[0] > 1 else 0] if found.ndim > one else found


def raw_scores(score: Any, query: Tensor, key: Tensor, head: int) -> Tensor | None:
    """Scores before any scale (n, Tk), from query (n, D) and key (Tk, Dk); None for a user's callable."""
    query, key = query.double(), key.double()
    if isinstance(score, Dot):
        return query @ key.T
    if isinstance(score, Bilinear):
        return query @ vector(score.weight, head, 2) @ key.T
    if isinstance(score, Concat):
        along_query = query @ vector(score.w_query, head, 1)
        return along_query[:, None] + key @ vector(score.w_key, head, 1)
    if isinstance(score, Additive):
        return torch.tanh(query[:, None, :] + key[None, :, :]) @ vector(score.v, head, 1)
    if isinstance(score, Cosine):
        return _unit(query) @ _unit(key).T
    if isinstance(score, Distance):
        return -(query[:, None, :] - key[None, :, :]).square().sum(-1)
    return None


def _unit(x: Tensor) -> Tensor:
    length = x.norm(dim=-1, keepdim=True)
    return torch.where(length > 0, x / length, torch.zeros_like(x))


def weights(normalize: Any, scores: Tensor, head: int) -> Tensor | None:
    """Weights (n, Tk) of rows of scores in which blocked keys are -inf; None for a user's callable.

    A row in which every key is blocked has weights 0.
    """
    rule = _weights_of_row(normalize, head)
    if rule is None:
        return None
    rows = []
    for row in scores.double():
        allowed = row > -math.inf
        made = torch.zeros_like(row)
        if bool(allowed.any()):
            made[allowed] = rule(row[allowed])
        rows.append(made)
    return torch.stack(rows)


def _weights_of_row(normalize: Any, head: int) -> Any:
    if isinstance(normalize, Softmax):
        return lambda row: _softmax(row, None if normalize.sink is None else of_head(normalize.sink, head))
    if isinstance(normalize, Sparsemax):
        return lambda row: _entmax(row, 2.0)
    if isinstance(normalize, Entmax15):
        return lambda row: _entmax(row, 1.5)
    if isinstance(normalize, Entmax):
        return lambda row: _entmax(row, of_head(normalize.alpha, head))
    if isinstance(normalize, Sigmoid):
        return lambda row: 1 / (1 + torch.exp(-(row + of_head(normalize.bias, head))))
    if isinstance(normalize, Relu):
        return lambda row: row.clamp(min=0)
    return None


def _softmax(row: Tensor, sink: float | None) -> Tensor:
    largest = float(row.max()) if sink is None else max(float(row.max()), sink)
    exponentials = torch.exp(row - largest)
    return exponentials / (exponentials.sum() + (0.0 if sink is None else math.exp(sink - largest)))


def _entmax(row: Tensor, alpha: float) -> Tensor:
    # The sum of the weights falls as the threshold rises: halve the interval until it is 1.
    x = (alpha - 1) * row
    low, high = float(x.max()) - 1, float(x.max())
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if float((x - middle).clamp(min=0).pow(1 / (alpha - 1)).sum()) > 1:
            low = middle
        else:
            high = middle
    return (x - low).clamp(min=0).pow(1 / (alpha - 1))


def context(weights_: Tensor, value: Tensor) -> Tensor:
    """(n, Dv): the values (Tk, Dv) added up with the weights (n, Tk). A key of weight 0 adds nothing at all."""
    rows = []
    for row in weights_.double():
        used = row != 0
        rows.append((row[used, None] * value.double()[used]).sum(0))
    return torch.stack(rows)
