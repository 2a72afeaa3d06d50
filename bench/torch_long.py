"""What a careful PyTorch user writes for windows, documents, cached decoding, sinks and full observation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .case import Inputs, Shape, SideFailed
from .ours import CELLS, TOP
from .torch_expressions import WINDOW_LEFT

Prepare = Callable[[Inputs], dict[str, Any]]
BLOCK = WINDOW_LEFT + 1
DOCUMENTS = 16


def block_mask(inputs: Inputs) -> dict[str, Any]:
    """The window inside a block of 256 queries and the 512 keys that they may see; the first block has no past."""
    i = torch.arange(BLOCK)[:, None] + BLOCK
    j = torch.arange(2 * BLOCK)[None, :]
    inside = (j <= i) & (j >= i - WINDOW_LEFT)
    masks = inside.expand(inputs.shape.Tq // BLOCK, -1, -1).clone()
    masks[0, :, :BLOCK] = False
    return {"blocks": masks[None]}


def sdpa_blocks(inputs: Inputs) -> torch.Tensor:
    """`Window(255, 0)` by blocks: each block of queries beside its own keys and those of the block before."""
    at = inputs.shape
    many = at.Tq // BLOCK

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(at.B * at.H, many, BLOCK, x.shape[-1])

    def with_past(x: torch.Tensor) -> torch.Tensor:
        own = split(x)
        return torch.cat([F.pad(own, (0, 0, 0, 0, 1, 0))[:, :-1], own], 2)

    mask = inputs.prepared["blocks"]
    output = F.scaled_dot_product_attention(
        split(inputs.query), with_past(inputs.key), with_past(inputs.value), mask
    )
    return output.reshape(at.B, at.H, at.Tq, at.Dv)


def _ends(length: int) -> list[int]:
    """The ends of sixteen documents of uneven lengths that fill `length`."""
    shares = [1 + (5 * n) % 7 for n in range(DOCUMENTS)]
    return [length * part // sum(shares) for part in itertools.accumulate(shares)]


def document_ids(at: Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Which document each position belongs to, (T,)."""
    return {"ids": torch.bucketize(torch.arange(at.Tq), torch.tensor(_ends(at.Tq)), right=True)}


def document_mask(inputs: Inputs) -> dict[str, Any]:
    ids = inputs.extra["ids"]
    same = ids[:, None] == ids[None, :]
    return {"mask": same & torch.ones_like(same).tril()}


def document_bounds(inputs: Inputs) -> dict[str, Any]:
    counts = torch.bincount(inputs.extra["ids"]).tolist()
    ends = list(itertools.accumulate(counts))
    return {"bounds": list(zip([0, *ends[:-1]], ends, strict=True))}


def sdpa_documents(inputs: Inputs) -> torch.Tensor:
    parts = [
        F.scaled_dot_product_attention(
            inputs.query[:, :, a:b], inputs.key[:, :, a:b], inputs.value[:, :, a:b], is_causal=True
        )
        for a, b in inputs.prepared["bounds"]
    ]
    return torch.cat(parts, 2)


def sdpa_folded(inputs: Inputs) -> torch.Tensor:
    """The query heads of a group as rows beside their one key head: nothing is expanded."""
    at = inputs.shape
    rows = inputs.query.reshape(at.B, at.Hkv, at.H // at.Hkv * at.Tq, at.D)
    output = F.scaled_dot_product_attention(rows, inputs.key, inputs.value)
    return output.reshape(at.B, at.H, at.Tq, at.Dv)


def sinks(at: Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"sink": torch.randn(at.H, generator=generator)}


def sdpa_sink(inputs: Inputs) -> torch.Tensor:
    """A sink is one more key and value of zeros, with a bias of its own; the bias is one row for all queries."""
    at = inputs.shape
    bias = torch.cat([inputs.query.new_zeros(at.H, at.Tk), inputs.extra["sink"][:, None]], 1)
    key, value = (F.pad(x, (0, 0, 0, 1)) for x in (inputs.key, inputs.value))
    return F.scaled_dot_product_attention(
        inputs.query, key, value, bias.to(inputs.query.dtype)[None, :, None].expand(at.B, -1, at.Tq, -1)
    )


def observed_all(inputs: Inputs) -> dict[str, torch.Tensor]:
    """`observed`, the largest weights of each row and maps of means and maxima over 256 x 256 cells."""
    scores = inputs.query @ inputs.key.transpose(-2, -1) / math.sqrt(inputs.shape.D)
    weights = scores.softmax(-1)
    cell = (inputs.shape.Tq // CELLS, inputs.shape.Tk // CELLS)
    return {
        "output": weights @ inputs.value,
        "lse": scores.logsumexp(-1),
        "max": weights.amax(-1),
        "entropy": torch.special.entr(weights).sum(-1),
        "received": weights.sum(-2),
        "top": weights.topk(TOP, -1).values,
        "pooled": F.avg_pool2d(weights, cell) * cell[1],
        "pooled_max": F.max_pool2d(weights, cell),
    }


def package_entmax(name: str, k: int | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """A mapping of the entmax package; `k` is how many of the largest scores it sorts at first."""

    def call(scores: torch.Tensor) -> torch.Tensor:
        try:
            import entmax
        except ImportError:
            raise SideFailed("the package entmax is not installed (scripts/install brings it)") from None
        mapped: torch.Tensor = getattr(entmax, name)(scores, dim=-1, k=k)
        return mapped

    return call
