"""Stage one: how a query is scored against a key.

Every score is a callable ``score(query, key) -> scores``: query (B, H, Tq, D), key (B, Hkv, Tk, D), scores
(B, H, Tq, Tk). Calling it *is* its definition. A plain callable of yours is a score too; it is given query and
key with the same number of heads.

Letters: B batch, H query heads, Hkv key heads, Tq and Tk lengths, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from regard import _checks

Number = float | Tensor
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

__all__ = ["Additive", "Bilinear", "Concat", "Cosine", "Distance", "Dot", "Modified", "Score"]


class Score(Protocol):
    """Anything that scores a tile: ``score(query, key) -> (B, H, Tq, Tk)``."""

    def __call__(self, query: Tensor, key: Tensor, /) -> Tensor: ...


def products(query: Tensor, key: Tensor) -> Tensor:
    """Inner products (B, H, Tq, Tk) of query (B, H, Tq, D) and key (B, Hkv, Tk, D), keys never expanded."""
    B, H, Tq, D = query.shape
    Hkv = key.shape[1]
    if H == Hkv:
        return query @ key.transpose(-1, -2)
    folded = query.reshape(B, Hkv, H // Hkv * Tq, D) if Hkv else query
    return (folded @ key.transpose(-1, -2)).reshape(B, H, Tq, key.shape[-2])


def spread_heads(key: Tensor, heads: int) -> Tensor:
    """Key heads repeated to the query's: (B, Hkv, Tk, D) -> (B, H, Tk, D); a view where they are equal."""
    groups = heads // key.shape[1] if key.shape[1] else 1
    return key if groups == 1 else key.repeat_interleave(groups, dim=1)


def pairs(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Views (B, Hkv, H / Hkv, Tq, 1, D) and (B, Hkv, 1, 1, Tk, D) that broadcast to every pair."""
    groups = query.shape[1] // key.shape[1] if key.shape[1] else 1
    grouped = query.unflatten(1, (key.shape[1], groups))
    return grouped[..., :, None, :], key[:, :, None, None, :, :]


def by_head(value: Number, scores: Tensor) -> Number:
    """A number or a (H,) or (B, H) tensor, shaped to multiply scores (B, H, Tq, Tk) and in their dtype."""
    if not isinstance(value, Tensor):
        return value
    return value.to(scores.dtype) if value.ndim == 0 else value.to(scores.dtype)[..., None, None]


@dataclass(frozen=True, eq=False)
class Dot:
    """Scaled inner product: ``s = scale * q . k``, then ``softcap * tanh(s / softcap)`` where a soft-cap is set.

    ``scale=None`` is 1/sqrt(D) (Vaswani et al., 2017); 0 means zero, negative is legal, a tensor (0-d or (H,))
    has a gradient. ``scale=1`` is Luong's dot (2015). Soft-capped scores: Gemma 2 (2024).
    Raises ValueError for a scale that is not finite, a soft-cap that is not positive and finite.
    """

    scale: Number | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        _checks.number_or_tensor("Dot", "scale", self.scale, none=True)
        _checks.softcap(self.softcap)

    def factor(self, width: int) -> Number:
        """The scale, 1/sqrt(D) where none was given."""
        if self.scale is not None:
            return self.scale
        return 1.0 / math.sqrt(width) if width else 1.0

    def __call__(self, query: Tensor, key: Tensor, /) -> Tensor:
        raw = products(query, key)
        scores = raw * by_head(self.factor(query.shape[-1]), raw)
        if self.softcap is None:
            return scores
        return self.softcap * torch.tanh(scores / self.softcap)


@dataclass(frozen=True, eq=False)
class Bilinear:
    """``s = scale * q^T W k`` (Luong's *general*, 2015): weight (D, Dk) or (H, D, Dk), the key's width free.

    Unscaled unless told.
    """

    weight: Tensor
    scale: Number = 1.0

    def __post_init__(self) -> None:
        _checks.score_weight("Bilinear", "weight", self.weight, (2, 3))
        _checks.number_or_tensor("Bilinear", "scale", self.scale)

    def project(self, query: Tensor) -> Tensor:
        """q^T W: (B, H, Tq, D) -> (B, H, Tq, Dk)."""
        return query @ self.weight.to(query.dtype)

    def __call__(self, query: Tensor, key: Tensor, /) -> Tensor:
        raw = products(self.project(query), key)
        return raw * by_head(self.scale, raw)


@dataclass(frozen=True, eq=False)
class Concat:
    """Linear concat: ``s = w_query . q + w_key . k``, the two halves of w . [q; k] (w (D,) or (H, D) each).

    The query's half is the same for every key, so **under softmax every query gets the same weights**: this score
    cannot look at its query. What Luong et al. (2015) call *concat* has a tanh: that is ``Additive``.
    """

    w_query: Tensor
    w_key: Tensor

    def __post_init__(self) -> None:
        _checks.score_weight("Concat", "w_query", self.w_query, (1, 2))
        _checks.score_weight("Concat", "w_key", self.w_key, (1, 2))

    def query_half(self, query: Tensor) -> Tensor:
        """w_query . q: (B, H, Tq, D) -> (B, H, Tq, 1)."""
        return query @ _column(self.w_query, query)

    def __call__(self, query: Tensor, key: Tensor, /) -> Tensor:
        key = spread_heads(key, query.shape[1]) if self.w_key.ndim == 2 else key
        along_key = spread_heads(key @ _column(self.w_key, key), query.shape[1])
        return self.query_half(query) + along_key.mT


def _column(weight: Tensor, like: Tensor) -> Tensor:
    return weight.to(like.dtype)[..., None]


@dataclass(frozen=True, eq=False)
class Additive:
    """``s = v^T tanh(q + k)`` (Bahdanau et al., 2015): v (D,) or (H, D); the projections W q and U k are the module's.

    As a tensor of the definition this is (B, H, Tq, Tk, D); the kernels never build it.
    """

    v: Tensor

    def __post_init__(self) -> None:
        _checks.score_weight("Additive", "v", self.v, (1, 2))

    def __call__(self, query: Tensor, key: Tensor, /) -> Tensor:
        query, key = pairs(query, key)
        hidden = torch.tanh(query + key).flatten(1, 2)
        v = self.v.to(hidden.dtype)
        return (hidden * (v if v.ndim == 1 else v[..., None, None, :])).sum(-1)


@dataclass(frozen=True, eq=False)
class Cosine:
    """``s = scale * q . k / (|q| |k|)``; a zero vector scores 0. Unscaled unless told (QK-norm: Henry et al., 2020)."""

    scale: Number = 1.0

    def __post_init__(self) -> None:
        _checks.number_or_tensor("Cosine", "scale", self.scale)

    def __call__(self, query: Tensor, key: Tensor, /) -> Tensor:
        raw = products(unit(query), unit(key))
        return raw * by_head(self.scale, raw)


def unit(x: Tensor) -> Tensor:
    """x / |x| along the last dimension, without overflow; 0 (with gradient 0) where x is 0."""
    if x.shape[-1] == 0:
        return x
    largest = x.detach().abs().amax(-1, keepdim=True)
    x = x / torch.where(largest > 0, largest, torch.ones_like(largest))
    squares = x.square().sum(-1, keepdim=True)
    norm = torch.where(largest > 0, squares, torch.ones_like(squares)).sqrt()
    return (x / norm).masked_fill(largest == 0, 0.0)


@dataclass(frozen=True, eq=False)
class Distance:
    """``s = -scale * |q - k|^2``: the nearer, the higher. Unscaled unless told; computed from differences."""

    scale: Number = 1.0

    def __post_init__(self) -> None:
        _checks.number_or_tensor("Distance", "scale", self.scale)

    def __call__(self, query: Tensor, key: Tensor, /) -> Tensor:
        query, key = pairs(query, key)
        squared = (query - key).square().sum(-1).flatten(1, 2)
        return squared * -by_head(self.scale, squared)


@dataclass(frozen=True, eq=False)
class Modified:
    """A score changed pair by pair: ``score_mod(score, b, h, q, k)``, FlexAttention's signature.

    ``score`` is any score; b, h, q, k are integer tensors that broadcast with the scores (B, H, rows, keys):
    sample, query head, query row, key. A result of -inf blocks the pair. Tensors that the function closes over
    get their gradients.
    """

    score: Any
    score_mod: ScoreMod

    def __post_init__(self) -> None:
        if not isinstance(self.score, Modified):
            _checks.is_callable("Modified", "score(query, key)", self.score)
        _checks.is_callable("Modified", "score_mod(score, b, h, q, k)", self.score_mod)


BUILT_IN = (Dot, Bilinear, Concat, Additive, Cosine, Distance)
