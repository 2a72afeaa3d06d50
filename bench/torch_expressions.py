"""What a PyTorch user writes today for each mechanism: the other side of the cases, in plain torch.

Letters as everywhere: B batch, H heads, Tq and Tk lengths, D width of query and key. Each function that takes
part in a timing takes the Inputs of a case and returns the output (B, H, Tq, Dv).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from .case import Inputs, Shape

DROPOUT_P = 0.1
SOFTCAP = 30.0
WINDOW_LEFT = 255
REACH = 128


def sdpa(inputs: Inputs) -> torch.Tensor:
    return F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value)


def sdpa_causal(inputs: Inputs) -> torch.Tensor:
    return F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, is_causal=True)


def sdpa_masked(inputs: Inputs) -> torch.Tensor:
    return F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, inputs.prepared["mask"])


def sdpa_grouped(inputs: Inputs) -> torch.Tensor:
    return F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, enable_gqa=True)


def sdpa_dropout(inputs: Inputs) -> torch.Tensor:
    return F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, dropout_p=DROPOUT_P)


def _distance(at: Shape) -> torch.Tensor:
    """j - i for every pair, (Tq, Tk)."""
    return torch.arange(at.Tk)[None, :] - torch.arange(at.Tq)[:, None]


def window_mask(inputs: Inputs) -> dict[str, torch.Tensor]:
    distance = _distance(inputs.shape)
    return {"mask": (distance <= 0) & (distance >= -WINDOW_LEFT)}


def alibi_bias(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Causal ALiBi, slopes 2^(-8/H), 2^(-16/H), ... for H a power of two (Press et al., 2022)."""
    at = inputs.shape
    slopes = torch.tensor([2.0 ** (-8.0 * (h + 1) / at.H) for h in range(at.H)])
    distance = _distance(at)
    bias = -slopes[:, None, None] * distance.abs()
    return {"mask": bias.masked_fill(distance > 0, float("-inf"))}


def relative_table(at: Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"table": torch.randn(at.H, 2 * REACH + 1, generator=generator)}


def sdpa_relative(inputs: Inputs) -> torch.Tensor:
    distance = _distance(inputs.shape).clamp(-REACH, REACH) + REACH
    bias = inputs.extra["table"][:, distance]
    return F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, bias)


def _scaled_scores(inputs: Inputs) -> torch.Tensor:
    return inputs.query @ inputs.key.transpose(-2, -1) / math.sqrt(inputs.shape.D)


def softcap_causal(inputs: Inputs) -> torch.Tensor:
    scores = SOFTCAP * torch.tanh(_scaled_scores(inputs) / SOFTCAP)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ inputs.value


def sparsemax(scores: torch.Tensor) -> torch.Tensor:
    """max(scores - tau, 0) with rows that sum to 1; tau from the sorted row (Martins and Astudillo, 2016)."""
    ranked = scores.sort(dim=-1, descending=True).values
    rank = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype)
    cumulated = ranked.cumsum(-1) - 1
    support = (rank * ranked > cumulated).sum(-1, keepdim=True)
    tau = cumulated.gather(-1, support - 1) / support
    return (scores - tau).clamp(min=0)


def entmax15(scores: torch.Tensor) -> torch.Tensor:
    """max(scores / 2 - tau, 0)^2 with rows that sum to 1; tau from the sorted row (Peters et al., 2019)."""
    half = scores / 2
    half = half - half.amax(-1, keepdim=True).detach()
    ranked = half.sort(dim=-1, descending=True).values
    rank = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype)
    mean = ranked.cumsum(-1) / rank
    spread = (ranked * ranked).cumsum(-1) - rank * mean * mean
    candidate = mean - ((1 - spread) / rank).clamp(min=1e-12).sqrt()
    support = (candidate <= ranked).sum(-1, keepdim=True)
    return (half - candidate.gather(-1, support - 1)).clamp(min=0) ** 2


def with_normalizer(normalize: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs], torch.Tensor]:
    """Scaled dot-product attention with another function of whole rows instead of softmax."""

    def call(inputs: Inputs) -> torch.Tensor:
        return normalize(_scaled_scores(inputs)) @ inputs.value

    return call


def additive_vector(at: Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"v": torch.randn(at.D, generator=generator)}


def additive(inputs: Inputs) -> torch.Tensor:
    """v^T tanh(q + k) by broadcasting over (B, H, Tq, Tk, D) (Bahdanau et al., 2015)."""
    summed = inputs.query[..., :, None, :] + inputs.key[..., None, :, :]
    scores = torch.tanh(summed) @ inputs.extra["v"]
    return scores.softmax(-1) @ inputs.value


def additive_bytes(at: Shape) -> float:
    """Peak of `additive` forward and backward in float32, counted, not run.

    Three tensors (B, H, Tq, Tk, D) live at once in the backward (tanh's output, its gradient, the gradient of
    the sum) and four of (B, H, Tq, Tk) (scores, weights, their gradients).
    """
    pairs = at.B * at.H * at.Tq * at.Tk
    return 4.0 * pairs * (3 * at.D + 4)


def observed(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Output and statistics of every row and key, from weights written out in full."""
    scores = _scaled_scores(inputs)
    weights = scores.softmax(-1)
    logs = scores.log_softmax(-1)
    return {
        "output": weights @ inputs.value,
        "lse": scores.logsumexp(-1),
        "max": weights.amax(-1),
        "entropy": -(weights * logs).sum(-1),
        "received": weights.sum(-2),
    }


def dropout_law(inputs: Inputs, ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """How far either side is from what dropout of weights must do to the output.

    The two sides drop different pairs, so they cannot be compared entry by entry. Dropping weights w with
    probability p and dividing by 1 - p leaves the mean of the output as it is and gives it the variance
    p / (1 - p) * sum_j w_j^2 v_j^2: the standardised difference must have mean 0 and standard deviation 1.
    """
    with torch.no_grad():
        weights = _scaled_scores(inputs).softmax(-1)
        mean = weights @ inputs.value
        deviation = (DROPOUT_P / (1 - DROPOUT_P) * (weights**2 @ inputs.value**2)).sqrt()
        worst = 0.0
        for side in (ours, other):
            standard = (side["output"] - mean) / deviation
            worst = max(worst, abs(standard.mean().item()), abs(standard.std().item() - 1))
    return worst
