"""Stage two: how the scores of one query become weights over its keys.

Every normaliser is a callable on whole rows, ``normalizer(scores) -> weights``, both (B, H, rows, Tk). Blocked keys
are -inf and get weight 0; rows that may attend to nothing never reach it. A callable of yours is a normaliser too (a
parameter that multiplies the scores belongs into the score: 0 times -inf has no gradient).
Calling a built-in *is* its definition, differentiable twice.

Letters: H query heads, Tk keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from regard import _checks, _thresholds

Number = float | Tensor

__all__ = ["Entmax", "Entmax15", "Normalizer", "Relu", "Sigmoid", "Softmax", "Sparsemax"]


class Normalizer(Protocol):
    """Anything that turns rows of scores into rows of weights."""

    def __call__(self, scores: Tensor, /) -> Tensor: ...


def by_row(value: Number, scores: Tensor) -> Tensor:
    """A number, or a 0-d, (H,) or (B, H) tensor, shaped to combine with rows (B, H, rows, 1), in the rows' dtype."""
    if not isinstance(value, Tensor):
        return torch.full((1, 1), value, dtype=scores.dtype, device=scores.device)
    return value.to(scores.dtype) if value.ndim == 0 else value.to(scores.dtype)[..., None, None]


@dataclass(frozen=True, eq=False)
class Softmax:
    """``w_j = exp(s_j) / (exp(sink) + sum_k exp(s_k))``; without a sink the weights sum to 1.

    ``sink`` is a number or a tensor (H,) or 0-d with gradient: a key that takes weight and has value 0 (gpt-oss,
    2025; ``sink=0`` is softmax-off-by-one, Miller 2023).
    """

    sink: Number | None = None

    def __post_init__(self) -> None:
        _checks.number_or_tensor("Softmax", "sink", self.sink, none=True)

    def __call__(self, scores: Tensor, /) -> Tensor:
        if self.sink is None:
            return torch.softmax(scores, -1)
        sink = by_row(self.sink, scores).expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]

    def log_sum_exp(self, scores: Tensor) -> Tensor:
        """log(exp(sink) + sum_j exp(s_j)): (B, H, rows)."""
        if self.sink is None:
            return torch.logsumexp(scores, -1)
        sink = by_row(self.sink, scores).expand(*scores.shape[:-1], 1)
        return torch.logsumexp(torch.cat([scores, sink], -1), -1)


@dataclass(frozen=True, eq=False)
class Sparsemax:
    """``argmin_w |w - s|^2`` on the simplex: ``w_j = max(s_j - tau, 0)``, sums to 1 (Martins and Astudillo, 2016)."""

    def __call__(self, scores: Tensor, /) -> Tensor:
        x = scores - scores.detach().amax(-1, keepdim=True)
        support = x > _thresholds.sparsemax(x.detach())
        x = x.masked_fill(~support, 0.0)
        tau = (x.sum(-1, keepdim=True) - 1) / support.sum(-1, keepdim=True)
        return ((x - tau) * support).clamp(min=0)


@dataclass(frozen=True, eq=False)
class Entmax15:
    """``w_j = max(s_j / 2 - tau, 0)^2``, sums to 1: entmax with alpha = 1.5 (Peters, Niculae and Martins, 2019)."""

    def __call__(self, scores: Tensor, /) -> Tensor:
        x = (scores - scores.detach().amax(-1, keepdim=True)) / 2
        support = x > _thresholds.entmax15(x.detach())
        x = x.masked_fill(~support, 0.0)
        count = support.sum(-1, keepdim=True)
        mean = x.sum(-1, keepdim=True) / count
        spread = ((x - mean) * support).square().sum(-1, keepdim=True)
        tau = mean - ((1 - spread).clamp(min=0) / count).sqrt()
        return (((x - tau) * support).clamp(min=0)).square()


@dataclass(frozen=True, eq=False)
class Entmax:
    """``w_j = max((alpha - 1) s_j - tau, 0)^(1 / (alpha - 1))``, sums to 1 (Peters, Niculae and Martins, 2019).

    ``alpha`` > 1 is a number or a tensor (H,) or 0-d with gradient (Correia, Niculae and Martins, 2019);
    alpha towards 1 is softmax, 2 is sparsemax.
    """

    alpha: Number

    def __post_init__(self) -> None:
        _checks.entmax_alpha(self.alpha)

    def __call__(self, scores: Tensor, /) -> Tensor:
        power = (by_row(self.alpha, scores) - 1).clamp(min=_thresholds.LEAST_POWER)
        blocked = scores == -torch.inf
        below = (scores - scores.detach().amax(-1, keepdim=True)).masked_fill(blocked, 0.0)
        x = (power * below).masked_fill(blocked, -torch.inf)
        found = d = _thresholds.entmax(x.detach(), power.detach())
        support = x - d > -1
        # The threshold is found without gradient; two Newton steps from it carry first and second derivatives.
        for _ in range(2):
            gap = self._gap(x, d, support)
            weights = (gap.log1p() / power).exp() * support
            slope = (weights / (1 + gap)).sum(-1, keepdim=True) / power
            d = d + (weights.sum(-1, keepdim=True) - 1) / slope
        d = found + (d - d.detach())
        weights = (self._gap(x, d, support).log1p() / power).exp() * support
        weights = weights / weights.sum(-1, keepdim=True)
        return weights.masked_fill(x.isnan().any(-1, keepdim=True), torch.nan)

    def _gap(self, x: Tensor, d: Tensor, support: Tensor) -> Tensor:
        least = torch.finfo(x.dtype).eps / 2 - 1
        return torch.where(support, x - d, 0.0).clamp(min=least)


@dataclass(frozen=True, eq=False)
class Sigmoid:
    """``w_j = 1 / (1 + exp(-(s_j + bias)))``, each key for itself (Ramapuram et al., 2024, who set bias = -log Tk).

    ``bias`` is a number or a tensor (H,) or 0-d with gradient.
    """

    bias: Number = 0.0

    def __post_init__(self) -> None:
        _checks.number_or_tensor("Sigmoid", "bias", self.bias)

    def __call__(self, scores: Tensor, /) -> Tensor:
        return torch.sigmoid(scores + by_row(self.bias, scores))


@dataclass(frozen=True, eq=False)
class Relu:
    """``w_j = max(s_j, 0)``, each key for itself (Wortsman et al., 2023, who divide by the length)."""

    def __call__(self, scores: Tensor, /) -> Tensor:
        return torch.relu(scores)


BUILT_IN = (Softmax, Sparsemax, Entmax15, Entmax, Sigmoid, Relu)
