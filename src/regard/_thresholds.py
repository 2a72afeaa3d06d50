"""Thresholds of the sparse normalisers, row by row, without gradient.

Each takes rows x <= 0 whose largest entry is 0 (blocked entries -inf) and returns tau (..., 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_STEPS = 100


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
    """tau with sum_j max(x_j - tau, 0)^(1 / power) = 1, power = alpha - 1: Newton inside a shrinking bracket."""
    low = torch.full_like(x[..., :1], -1.0)
    high = torch.zeros_like(low)
    tau = low
    for _ in range(_MOST_STEPS):
        gap = (x - tau).clamp_(min=0)
        inside = gap > 0
        excess = gap.pow(1 / power).masked_fill_(~inside, 0.0).sum(-1, keepdim=True) - 1
        slope = gap.pow(1 / power - 1).masked_fill_(~inside, 0.0).sum(-1, keepdim=True) / power
        low = torch.where(excess >= 0, tau, low)
        high = torch.where(excess >= 0, high, tau)
        newton = tau + excess / slope
        good = (newton > low) & (newton < high)
        better = torch.where(good, newton, (low + high) / 2)
        settled = _settled(better, tau)
        tau = better
        if settled:
            break
    return tau


def _settled(better: Tensor, tau: Tensor) -> bool:
    """Whether no row moves any more by more than its rounding (asked only where values may be looked at)."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    finest = torch.finfo(tau.dtype).eps
    return bool((((better - tau).abs() <= finest) | better.isnan()).all())
