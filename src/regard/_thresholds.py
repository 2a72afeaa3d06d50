"""Thresholds of the sparse normalisers, row by row, without gradient.

Each takes rows x <= 0 whose largest entry is 0 (blocked entries -inf) and returns tau (..., 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_STEPS = 100
LEAST_POWER = 1e-6


@torch.no_grad()
def sparsemax(x: Tensor) -> Tensor:
    """tau with sum_j max(x_j - tau, 0) = 1. From tau = -1 each step is exact on its support, so few are needed."""
    tau = torch.full_like(x[..., :1], -1.0)
    for _ in range(_MOST_STEPS):
        support = x > tau
        total = x.masked_fill(~support, 0.0).sum(-1, keepdim=True)
        better = ((total - 1) / support.sum(-1, keepdim=True).clamp(min=1)).maximum(tau)
        if _settled(better, tau):
            break
        tau = better
    return tau


@torch.no_grad()
def entmax15(x: Tensor) -> Tensor:
    """tau with sum_j max(x_j - tau, 0)^2 = 1: Newton from the left (convex), then the root on the support."""
    tau = torch.full_like(x[..., :1], -1.0)
    for _ in range(_MOST_STEPS):
        gap = (x - tau).clamp(min=0)
        slope = gap.sum(-1, keepdim=True)
        excess = gap.square_().sum(-1, keepdim=True) - 1
        better = (tau + excess / (2 * slope)).maximum(tau)
        if _settled(better, tau):
            break
        tau = better
    support = x > tau
    count = support.sum(-1, keepdim=True).clamp(min=1)
    inside = x.masked_fill(~support, 0.0)
    mean = inside.sum(-1, keepdim=True) / count
    spread = (inside - mean).masked_fill_(~support, 0.0).square_().sum(-1, keepdim=True)
    return mean - ((1 - spread).clamp(min=0) / count).sqrt()


@torch.no_grad()
def entmax(x: Tensor, power: Tensor) -> Tensor:
    """d >= 0 with sum_j max(1 + x_j - d, 0)^(1 / power) = 1, power = alpha - 1 (tau is d - 1).

    Newton inside a shrinking bracket. d, not tau: for alpha near 1 it is small, and must be known to its own precision.
    """
    low = torch.zeros_like(x[..., :1])
    high = torch.ones_like(low)
    d = low
    for _ in range(_MOST_STEPS):
        weights = entmax_weights(x, d, power)
        excess = weights.sum(-1, keepdim=True) - 1
        inside = weights > 0
        slope = weights.div_((1 + x - d).masked_fill_(~inside, 1.0)).sum(-1, keepdim=True) / power
        low = torch.where(excess >= 0, d, low)
        high = torch.where(excess >= 0, high, d)
        newton = d + excess / slope
        better = torch.where((newton > low) & (newton < high), newton, (low + high) / 2)
        settled = _settled(better, d, better)
        d = better
        if settled:
            break
    return d


def entmax_weights(x: Tensor, d: Tensor, power: Tensor) -> Tensor:
    """max(1 + x - d, 0)^(1 / power), accurate where power is small and where the sum under it is."""
    y = (x - d).clamp_(min=-1)
    return y.log1p_().div_(power).exp_()


def _settled(better: Tensor, tau: Tensor, size: Tensor | None = None) -> bool:
    """Whether no row moves any more by more than its rounding (asked only where values may be looked at)."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    finest = torch.finfo(tau.dtype).eps
    bound = finest if size is None else 4 * finest * size.abs()
    return bool((((better - tau).abs() <= bound) | better.isnan()).all())
