"""Variants in how a query is scored against a key.

Letters: H query heads, Tq and Tk lengths, D width of query and key; s a score, w a weight, q and k a query and a key.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from regard import _checks
from regard.masks import Mask
from regard.mechanism import Mechanism
from regard.scores import Additive, Bilinear, Concat, Cosine, Distance, Dot, Modified
from regard.variants import _arguments as arguments

Number = float | Tensor


def scaled_dot() -> Mechanism:
    """The Transformer's attention; the library's default, said aloud."""
    return Mechanism(
        "scaled dot-product",
        formula="s = q . k / sqrt(D); w = softmax(s)",
        paper="Vaswani et al., 2017",
        score=Dot(),
    )


def luong_dot() -> Mechanism:
    """Luong's *dot*: inner products as they are, unscaled."""
    return Mechanism(
        "Luong dot", formula="s = q . k; w = softmax(s)", paper="Luong et al., 2015", score=Dot(scale=1.0)
    )


def luong_general(weight: Tensor) -> Mechanism:
    """Luong's *general*: a learned matrix between query and key, ``weight`` (D, Dk) or (H, D, Dk), Dk the key's."""
    return Mechanism(
        "Luong general",
        formula="s = q . W k; w = softmax(s)",
        paper="Luong et al., 2015",
        score=Bilinear(weight),
    )


def luong_concat(v: Tensor) -> Mechanism:
    """Luong's *concat*, ``v . tanh(W [q; k])``: W split into the halves that meet q and k, it is additive attention.

    ``v`` (D,) or (H, D). Give ``query @ W[:, :Dq].T`` and ``key @ W[:, Dq:].T``, projected once, as query and key.
    """
    return Mechanism(
        "Luong concat",
        formula="s = v . tanh(W_q q + W_k k), W = [W_q, W_k]; w = softmax(s)",
        paper="Luong et al., 2015",
        score=Additive(v),
    )


def bahdanau(v: Tensor) -> Mechanism:
    """Additive attention: ``v`` (D,) or (H, D); query and key are given projected, W q and U k (the decoder's and the
    encoder's states, projected to one width D)."""
    return Mechanism(
        "Bahdanau additive",
        formula="s = v . tanh(W q + U k); w = softmax(s)",
        paper="Bahdanau et al., 2015",
        score=Additive(v),
    )


def linear_concat(w_query: Tensor, w_key: Tensor) -> Mechanism:
    """Concat without a tanh, as a control: every query gets the same weights. ``w_query``, ``w_key`` (D,) or (H, D)."""
    return Mechanism(
        "linear concat",
        formula="s = w_q . q + w_k . k; w = softmax(s), the same for every q",
        paper="a control; Brody et al., 2022, on static attention",
        score=Concat(w_query, w_key),
    )


def graph(w_query: Tensor, w_key: Tensor, mask: Mask | Tensor | None = None, slope: float = 0.2) -> Mechanism:
    """Graph attention (GAT): ``w_query``, ``w_key`` (D,) or (H, D); ``mask`` the adjacency, True = neighbours.

    Nodes are given projected, W h, as query and key. The order of the keys is the same for every query.
    """
    arguments.number("graph", "slope", slope)

    def leaky(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return F.leaky_relu(score, slope)

    return Mechanism(
        "graph attention (GAT)",
        formula="s = LeakyReLU(a_q . q + a_k . k); w = softmax(s) over neighbours",
        paper="Velickovic et al., 2018",
        score=Modified(Concat(w_query, w_key), leaky),
        **given_mask(mask),
    )


def graph_v2(a: Tensor, mask: Mask | Tensor | None = None, slope: float = 0.2) -> Mechanism:
    """Graph attention that can look at its query (GATv2): ``a`` (D,); nodes are given projected to query and key."""
    arguments.shaped("graph_v2", "a", a, "(D,)", (1,))
    arguments.number("graph_v2", "slope", slope)

    def score(query: Tensor, key: Tensor) -> Tensor:
        if a.shape[0] != query.shape[-1] or key.shape[-1] != query.shape[-1]:
            widths = f"query of width {query.shape[-1]} and key of width {key.shape[-1]}"
            _checks.wrong_value("graph_v2(a=)", f"one number a feature, for a {widths}", a)
        return F.leaky_relu(query[..., :, None, :] + key[..., None, :, :], slope) @ a.to(query.dtype)

    return Mechanism(
        "graph attention (GATv2)",
        formula="s = a . LeakyReLU(q + k); w = softmax(s) over neighbours",
        paper="Brody et al., 2022",
        score=score,
        **given_mask(mask),
    )


def cosine(scale: Number = 1.0) -> Mechanism:
    """Content addressing of the neural Turing machine: ``scale`` is its key strength, a number, 0-d or (H,)."""
    return Mechanism(
        "cosine",
        formula="s = scale * q . k / (|q| |k|); w = softmax(s)",
        paper="Graves et al., 2014",
        score=Cosine(scale),
    )


def qk_norm(scale: Number) -> Mechanism:
    """Query-key normalisation: cosine with a learned scale g, 0-d or (H,) with gradient.

    ``qk_norm_scale(L)`` is where the paper starts it, for sentences of length L.
    """
    return Mechanism(
        "QK-norm",
        formula="s = g * q . k / (|q| |k|), g learned; w = softmax(s)",
        paper="Henry et al., 2020",
        score=Cosine(scale),
    )


def qk_norm_scale(length: int) -> float:
    """Where QK-norm's g starts: ``log2(L^2 - L)`` for sentences of length L (Henry et al., 2020)."""
    return math.log2(arguments.whole("qk_norm_scale", "length", length, 2) ** 2 - length)


def distance(width: int) -> Mechanism:
    """L2 attention: the nearer the key, the higher its score; ``width`` is D."""
    return Mechanism(
        "L2 distance",
        formula="s = -|q - k|^2 / sqrt(D); w = softmax(s)",
        paper="Kim et al., 2021",
        score=Distance(1.0 / math.sqrt(arguments.whole("distance", "width", width))),
    )


def soft_capped(softcap: float = 50.0, scale: Number | None = None) -> Mechanism:
    """Scores kept between -softcap and softcap; ``scale=None`` is 1/sqrt(D)."""
    arguments.number("soft_capped", "softcap", softcap)
    return Mechanism(
        "soft-capped",
        formula="s = c * tanh(q . k / (c sqrt(D))); w = softmax(s)",
        paper="Gemma 2: Riviere et al., 2024",
        score=Dot(scale, softcap),
    )


def multi_query() -> Mechanism:
    """All query heads read one key head: give key and value with Hkv = 1, and the tensors say the grouping."""
    return Mechanism(
        "multi-query",
        formula="s = q_h . k / sqrt(D), one key head; w = softmax(s)",
        paper="Shazeer, 2019",
        score=Dot(),
    )


def grouped_query() -> Mechanism:
    """Groups of query heads share a key head: give key and value with Hkv heads, and the tensors say the grouping."""
    return Mechanism(
        "grouped-query",
        formula="s = q_h . k_g / sqrt(D), g = h // (H / Hkv); w = softmax(s)",
        paper="Ainslie et al., 2023",
        score=Dot(),
    )


def given_mask(mask: Mask | Tensor | None) -> dict[str, Any]:
    return {} if mask is None else {"mask": mask}
