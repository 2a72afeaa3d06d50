"""Variants in how scores become weights.

Letters: H query heads, Tk keys, D width; s a score, w a weight.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard import _checks
from regard.mechanism import Mechanism
from regard.normalizers import Entmax, Entmax15, Relu, Sigmoid, Softmax, Sparsemax
from regard.scores import Dot
from regard.variants import _arguments as arguments

Number = float | Tensor


def sink(logits: Number) -> Mechanism:
    """A learned place for weight that no key should get: ``logits`` a number, 0-d or (H,), one a head in gpt-oss."""
    _checks.number_or_tensor("sink", "logits", logits)
    return Mechanism(
        "sink",
        formula="w_j = exp(s_j) / (exp(sink) + sum_k exp(s_k))",
        paper="gpt-oss: OpenAI, 2025",
        normalize=Softmax(logits),
    )


def off_by_one() -> Mechanism:
    """Softmax with one in its denominator: a head may attend to nothing."""
    return Mechanism(
        "softmax off by one",
        formula="w_j = exp(s_j) / (1 + sum_k exp(s_k))",
        paper="Miller, 2023",
        normalize=Softmax(sink=0.0),
    )


def sparsemax() -> Mechanism:
    """The scores projected onto the simplex: most weights are exactly 0."""
    return Mechanism(
        "sparsemax",
        formula="w_j = max(s_j - tau, 0), sum_j w_j = 1",
        paper="Martins and Astudillo, 2016",
        normalize=Sparsemax(),
    )


def entmax15() -> Mechanism:
    """Half way between softmax and sparsemax."""
    return Mechanism(
        "entmax 1.5",
        formula="w_j = max(s_j / 2 - tau, 0)^2, sum_j w_j = 1",
        paper="Peters et al., 2019",
        normalize=Entmax15(),
    )


def entmax(alpha: Number) -> Mechanism:
    """Sparse to a degree: ``alpha`` > 1, a number, 0-d or (H,); learned, each head finds its own."""
    return Mechanism(
        "entmax (adaptively sparse)",
        formula="w_j = max((a - 1) s_j - tau, 0)^(1 / (a - 1)), sum_j w_j = 1",
        paper="Correia et al., 2019",
        normalize=Entmax(alpha),
    )


def sigmoid(length: int) -> Mechanism:
    """Each key for itself, with bias -log n for n = ``length`` keys."""
    bias = -math.log(arguments.whole("sigmoid", "length", length))
    return Mechanism(
        "sigmoid",
        formula="w_j = 1 / (1 + exp(log n - s_j))",
        paper="Ramapuram et al., 2024",
        normalize=Sigmoid(bias),
    )


def relu(width: int, length: int) -> Mechanism:
    """ReLU in the place of softmax, divided by the number of keys: ``width`` is D, ``length`` is L."""
    divisor = math.sqrt(arguments.whole("relu", "width", width)) * arguments.whole("relu", "length", length)
    return Mechanism(
        "ReLU",
        formula="w_j = max(s_j, 0) / L, s = q . k / sqrt(D)",
        paper="Wortsman et al., 2023",
        score=Dot(1.0 / divisor),
        normalize=Relu(),
    )


def squared_relu(length: int) -> Mechanism:
    """The gated attention unit's weights: ``length`` is n."""
    return Mechanism(
        "squared ReLU (GAU)",
        formula="w_j = max(q . k_j / n, 0)^2",
        paper="Hua et al., 2022",
        score=Dot(1.0 / arguments.whole("squared_relu", "length", length)),
        normalize=_squared,
    )


def _squared(scores: Tensor) -> Tensor:
    return torch.relu(scores).square()


def top_k(k: int) -> Mechanism:
    """Softmax over the k highest scores of a row; where scores tie for the last place, all of them stay."""
    arguments.whole("top_k", "k", k)

    def normalize(scores: Tensor) -> Tensor:
        least = scores.detach().topk(min(k, scores.shape[-1]), -1).values[..., -1:]
        return torch.softmax(scores.masked_fill(scores < least, -torch.inf), -1)

    return Mechanism(
        "top-k",
        formula="w = softmax(s) over the k highest s of a row",
        paper="Gupta et al., 2021",
        normalize=normalize,
    )
