"""One table of what can be described, for every test that holds a kernel to the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import biases, masks, normalizers, scores

B, H, HKV, TQ, TK, D, DV = 2, 4, 2, 7, 9, 4, 3


@dataclass
class Case:
    """A made mechanism and the tensors in it that learn."""

    keywords: dict[str, Any]
    learned: list[Tensor]


Maker = Callable[[Callable[..., Tensor]], Any]


def leaf(seed: int, dtype: torch.dtype = torch.float64) -> Callable[..., Tensor]:
    """A maker of leaves of one dtype, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        made = torch.randn(shape, dtype=torch.float64, generator=generator) * scale + shift
        return made.to(dtype).requires_grad_()

    return make


SCORES: dict[str, Maker] = {
    "dot": lambda new: scores.Dot(),
    "dot scale": lambda new: scores.Dot(new(scale=0.3, shift=0.7)),
    "dot scale a head, soft-cap": lambda new: scores.Dot(new(H), softcap=2.0),
    "bilinear": lambda new: scores.Bilinear(new(D, D)),
    "bilinear a head": lambda new: scores.Bilinear(new(H, D, D, scale=0.5), scale=0.5),
    "concat": lambda new: scores.Concat(new(D), new(D)),
    "concat a head": lambda new: scores.Concat(new(H, D), new(H, D)),
    "additive": lambda new: scores.Additive(new(D)),
    "additive a head": lambda new: scores.Additive(new(H, D)),
    "cosine": lambda new: scores.Cosine(new(H)),
    "distance": lambda new: scores.Distance(new(H, scale=0.1, shift=0.3)),
}

NORMALIZERS: dict[str, Maker] = {
    "softmax": lambda new: normalizers.Softmax(),
    "softmax sink": lambda new: normalizers.Softmax(new(H)),
    "sparsemax": lambda new: normalizers.Sparsemax(),
    "entmax15": lambda new: normalizers.Entmax15(),
    "entmax": lambda new: normalizers.Entmax(new(scale=0.1, shift=1.4)),
    "entmax a head": lambda new: normalizers.Entmax(new(H, scale=0.1, shift=1.7)),
    "sigmoid": lambda new: normalizers.Sigmoid(new(H)),
    "relu": lambda new: normalizers.Relu(),
}


def _half(new: Callable[..., Tensor], *shape: int) -> Tensor:
    return new(*shape).detach() > 0


MASKS: dict[str, Maker] = {
    "none": lambda new: None,
    "causal": lambda new: masks.Causal("lower_right"),
    "window": lambda new: masks.Window(3, 1, "lower_right"),
    "window or prefix": lambda new: masks.Window(2, -1, "lower_right") | masks.Prefix(2),
    "causal and documents": lambda new: (
        masks.Causal("lower_right") & masks.Documents(torch.arange(TQ) // 3, torch.arange(TK) // 4)
    ),
    "not window": lambda new: ~masks.Window(1, 1, "lower_right"),
    "padding": lambda new: masks.Padding(torch.tensor([4, 0])),
    "offset a sample": lambda new: masks.Causal(offset=torch.tensor([-3, 4])),
    "tokens": lambda new: masks.Padding.of(_half(new, B, TK)) & masks.Causal("lower_right"),
    "dense a head": lambda new: _half(new, B, H, TQ, TK),
    "not dense": lambda new: ~masks.Dense(_half(new, TQ, TK)),
    "rows": lambda new: masks.Rows(torch.arange(TQ) // 2, torch.arange(TQ) + 2),
}

BIASES: dict[str, Maker] = {
    "none": lambda new: None,
    "alibi": lambda new: biases.Alibi(new(H), "lower_right"),
    "relative": lambda new: biases.Relative(new(H, 5), "lower_right"),
    "tensor": lambda new: new(H, TQ, TK)[None],
    "per key and relative": lambda new: biases.Relative(new(7), "lower_right") + new(B, 1, 1, TK),
}


def alignment_free(name: str) -> bool:
    """Whether a mask says nothing that could disagree with "lower_right"."""
    return name != "offset a sample"


def make(
    score: str, normalize: str, mask: str, bias: str, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Case:
    """The mechanism of these four names, and its learned tensors."""
    learned: list[Tensor] = []
    fresh = leaf(seed, dtype)

    def new(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        learned.append(fresh(*shape, scale=scale, shift=shift))
        return learned[-1]

    keywords = {
        "score": SCORES[score](new),
        "normalize": NORMALIZERS[normalize](new),
        "bias": BIASES[bias](new),
    }
    return Case(keywords | {"mask": MASKS[mask](fresh)}, learned)


def inputs(
    seed: int = 1, grouped: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """query (B, H, Tq, D), key (B, Hkv, Tk, D), value (B, Hkv, Tk, Dv), leaves."""
    new = leaf(seed, dtype)
    heads = HKV if grouped else H
    return new(B, H, TQ, D), new(B, heads, TK, D), new(B, heads, TK, DV)
