"""Attention by plain torch, row by row, written from the papers and not from this library.

Slow and literal on purpose: each row is scored against the keys that it may see and no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

ScoreRow = Callable[[Tensor, Tensor, int], Tensor]
NormalizeRow = Callable[[Tensor, int], Tensor]
Pair = Callable[[int, int, int, int], object]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: ScoreRow,
    normalize: NormalizeRow,
    allowed: Pair = lambda b, h, i, j: True,
    bias: Pair = lambda b, h, i, j: 0.0,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, Tq, Dv) and weights (B, H, Tq, Tk) of (B, H, T, D) tensors with grouped heads."""
    B, H, Tq, _ = query.shape
    groups = H // key.shape[1]
    outputs, weights = [], []
    for b in range(B):
        for h in range(H):
            for i in range(Tq):
                row, keys = query[b, h, i], key[b, h // groups]
                seen = [j for j in range(len(keys)) if allowed(b, h, i, j)]
                whole = row.new_zeros(len(keys))
                if seen:
                    added = torch.stack([torch.as_tensor(bias(b, h, i, j), dtype=row.dtype) for j in seen])
                    whole = whole.index_add(
                        0, torch.tensor(seen), normalize(score(row, keys[seen], h) + added, h)
                    )
                weights.append(whole)
                outputs.append((whole[seen, None] * value[b, h // groups][seen]).sum(0))
    shape = (B, H, Tq)
    return torch.stack(outputs).view(*shape, value.shape[-1]), torch.stack(weights).view(*shape, key.shape[2])


# ------------------------------------------------------------------ one row of scores to one row of weights


def softmax(s: Tensor, sink: Tensor | float | None = None) -> Tensor:
    """exp(s_j) / (exp(sink) + sum_k exp(s_k))."""
    powers = s.exp()
    return powers / (powers.sum() + (0.0 if sink is None else torch.as_tensor(sink, dtype=s.dtype).exp()))


def sparsemax(s: Tensor) -> Tensor:
    """Martins and Astudillo (2016), algorithm 1: sort, find the support, take the threshold."""
    ordered = s.sort(descending=True).values
    k = torch.arange(1, len(s) + 1, dtype=s.dtype)
    size = int((1 + k * ordered > ordered.cumsum(0)).sum())
    return (s - (ordered[:size].sum() - 1) / size).clamp(min=0)


def entmax15(s: Tensor) -> Tensor:
    """Peters, Niculae and Martins (2019), algorithm 2: sort, then the last threshold below its own entry."""
    ordered = (s / 2).sort(descending=True).values
    k = torch.arange(1, len(s) + 1, dtype=s.dtype)
    mean = ordered.cumsum(0) / k
    spread = k * ((ordered.square().cumsum(0) / k) - mean.square())
    taus = mean - ((1 - spread).clamp(min=0) / k).sqrt()
    size = int((taus <= ordered).sum())
    return (s / 2 - taus[size - 1]).clamp(min=0).square()


def entmax(s: Tensor, alpha: float) -> Tensor:
    """The threshold by bisection; values only."""
    x = (alpha - 1) * s.detach()
    low, high = x.max() - 1, x.max()
    for _ in range(200):
        tau = (low + high) / 2
        enough = (x - tau).clamp(min=0).pow(1 / (alpha - 1)).sum() >= 1
        low, high = (tau, high) if enough else (low, tau)
    return (x - low).clamp(min=0).pow(1 / (alpha - 1))


# ------------------------------------------------------------------ what position adds


def alibi_slopes(heads: int) -> list[float]:
    """Press, Smith and Lewis (2022), their own rule: for no power of two, every second slope of twice as many heads."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**h for h in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(closest) + alibi_slopes(2 * closest)[0::2][: heads - closest]


def t5_bucket(distance: int, buckets: int, reach: int, bidirectional: bool) -> int:
    """Raffel et al. (2020): exact buckets near by, logarithmic ones up to ``reach``; distance is j - p."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        far = abs(distance)
    else:
        far = max(-distance, 0)
    exact = buckets // 2
    if far < exact:
        return first + far
    log = exact + int(math.log(far / exact) / math.log(reach / exact) * (buckets - exact))
    return first + min(log, buckets - 1)
