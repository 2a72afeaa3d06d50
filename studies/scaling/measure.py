"""What scores of a given width do to the softmax and to the gradient through it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard import attention, attention_weights, observe
from regard.scores import Dot

Figures = dict[str, float]


def figures(query: Tensor, key: Tensor, value: Tensor, scale: float | None, seed: int = 0) -> Figures:
    """Six numbers about attention of query (B, H, Tq, D) over key (B, H, Tk, D), value (B, H, Tk, Dv).

    variance: of a row's scores over its keys, mean over rows. entropy: of a row's weights, as a share of log Tk, mean.
    largest: the largest weight of a row, mean. jacobian: Frobenius norm of the derivative of a row's weights by its
    scores, median over rows. gradient: root mean square of an entry of the gradient to the query, for a standard normal
    gradient to the output; typical_gradient: the same within a row, median over rows.
    """
    query, key, value = (tensor.detach().double() for tensor in (query, key, value))
    score = Dot(scale)
    seen = observe(query, key, value, score=score, statistics=("entropy", "max"))
    assert seen.entropy is not None and seen.max is not None
    weights = attention_weights(query, key, score=score)
    squares = _gradient(query, key, value, score, seed).square()
    return {
        "variance": float(score(query, key).var(-1).mean()),
        "entropy": float(seen.entropy.mean()) / math.log(key.shape[-2]),
        "largest": float(seen.max.mean()),
        "jacobian": float(_jacobian(weights).median()),
        "gradient": float(squares.mean().sqrt()),
        "typical_gradient": float(squares.mean(-1).median().sqrt()),
    }


def _jacobian(weights: Tensor) -> Tensor:
    """|diag(w) - w w^T| of every row, in the Frobenius norm, without the matrix."""
    second, third = weights.square().sum(-1), weights.pow(3).sum(-1)
    return (second - 2 * third + second.square()).clamp(min=0).sqrt()


def _gradient(query: Tensor, key: Tensor, value: Tensor, score: Dot, seed: int) -> Tensor:
    query = query.detach().requires_grad_()
    with torch.enable_grad():
        output = attention(query, key, value, score=score)
        upstream = torch.randn(
            output.shape, generator=torch.Generator().manual_seed(seed), dtype=output.dtype
        )
        (gradient,) = torch.autograd.grad(output, query, upstream)
    return gradient


def both(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Figures]:
    """The figures with the factor 1/sqrt(d_k) and without it."""
    return {"scaled": figures(query, key, value, None), "unscaled": figures(query, key, value, 1.0)}


def mean(of: list[Figures]) -> Figures:
    return {name: sum(one[name] for one in of) / len(of) for name in of[0]}


def random_projections(widths: list[int], keys: int, queries: int, seed: int) -> list[dict[str, object]]:
    """Standard normal queries, keys and values (Dv = 64): the textbook's assumption."""
    rows: list[dict[str, object]] = []
    for width in widths:
        generator = torch.Generator().manual_seed(seed)
        query = torch.randn(1, 1, queries, width, generator=generator)
        key = torch.randn(1, 1, keys, width, generator=generator)
        value = torch.randn(1, 1, keys, 64, generator=generator)
        rows.append({"d_k": width, **both(query, key, value)})
    return rows
