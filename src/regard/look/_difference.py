"""What differs between two records: two prompts, two models, two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.look._record import Record, Site, Token


@dataclass(frozen=True)
class SiteDifference:
    """Two sites side by side, over the tokens that both have.

    `queries` and `keys`: pairs (place in the first, place in the second). `change` (H, n, m): the second's weights
    minus the first's between them. `distance` (H,): the mean over the queries of the Jensen-Shannon distance, 0 (the
    same) to 1 (nothing in common); weight on tokens that only one side has is one key more. `row_distance` (H, n) is
    each query's.
    """

    first: int
    second: int
    title: str
    layer: int
    kind: str
    queries: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int], ...]
    query_tokens: tuple[Token, ...]
    key_tokens: tuple[Token, ...]
    change: Tensor
    distance: Tensor
    row_distance: Tensor


@dataclass(frozen=True)
class Difference:
    """Every pair of sites that fit each other, and `notes` on what does not."""

    first: str
    second: str
    sites: list[SiteDifference]
    notes: list[str] = field(default_factory=list)

    def heads(self) -> list[dict[str, Any]]:
        """One row a head, the most changed first (NaN before all): plain numbers and words."""
        rows = [
            {
                "layer": pair.layer,
                "head": head,
                "kind": pair.kind,
                "name": pair.title,
                "distance": float(distance),
            }
            for pair in self.sites
            for head, distance in enumerate(pair.distance)
        ]
        return sorted(
            rows, key=lambda row: -row["distance"] if row["distance"] == row["distance"] else -math.inf
        )


def difference(first: Record, second: Record, *, sample: int = 0) -> Difference:
    """Compare two records head by head, on the tokens that they have in common.

    Sites are paired in order, within each kind ("self", "cross"); a pair with different numbers of heads is left out
    with a note, and so is one of which not all weights were kept. Tokens are aligned as the longest common
    subsequences of their texts (special tokens too), so that of two prompts the words that stayed are compared; sites
    without tokens are aligned by position when their lengths are the same. The distance of two rows is the
    square root of their Jensen-Shannon divergence in bits (Lin, 1991; Endres and Schindelin, 2003). Raises
    ValueError where no pair of sites fits.
    """
    notes: list[str] = []
    found, unkept = [], []
    for kind in ("self", "cross"):
        ours, theirs = _of_kind(first, kind), _of_kind(second, kind)
        if len(ours) != len(theirs):
            notes.append(
                f"{len(ours)} and {len(theirs)} sites of {kind}-attention: only the first of them are paired"
            )
        for (a, mine), (b, other) in zip(ours, theirs, strict=False):
            if mine.heads != other.heads:
                notes.append(
                    f"{mine.title}: {mine.heads} heads in one and {other.heads} in the other; left out"
                )
                continue
            if not (mine.has_weights and other.has_weights):
                unkept.append(mine.title)
                continue
            made = _pair((a, mine), (b, other), sample)
            if made is None:
                notes.append(f"{mine.title}: the two have no tokens in common; left out")
            else:
                found.append(made)
    if unkept:
        notes.append(
            f"{', '.join(unkept)}: the weights of all heads were not kept in both; left out. "
            "Make both with keep=Keep(weights=True)"
        )
    if not found:
        raise ValueError(
            f"the two records have nothing to compare: {'; '.join(notes) or 'there are no sites'}"
        )
    return Difference(_name(first), _name(second), found, notes)


def _name(record: Record) -> str:
    return f"{record.model}: {record.text}" if record.text else record.model


def _of_kind(record: Record, kind: str) -> list[tuple[int, Site]]:
    return [(number, site) for number, site in enumerate(record.sites) if site.kind == kind]


def _pair(first: tuple[int, Site], second: tuple[int, Site], sample: int) -> SiteDifference | None:
    (a, mine), (b, other) = first, second
    queries = align(mine.query_tokens, other.query_tokens, (mine.lengths[0], other.lengths[0]))
    keys = align(mine.key_tokens, other.key_tokens, (mine.lengths[1], other.lengths[1]))
    if not queries or not keys:
        return None
    one = _common(mine, queries, keys, 0, sample)
    two = _common(other, queries, keys, 1, sample)
    rows = _distance(_with_rest(one), _with_rest(two))
    return SiteDifference(
        a,
        b,
        mine.title,
        mine.layer,
        mine.kind,
        tuple(queries),
        tuple(keys),
        tuple(mine.query_tokens[place] for place, _ in queries) if mine.query_tokens else (),
        tuple(mine.key_tokens[place] for place, _ in keys) if mine.key_tokens else (),
        (two - one).float(),
        rows.mean(-1),
        rows,
    )


def align(first: Sequence[Token], second: Sequence[Token], lengths: tuple[int, int]) -> list[tuple[int, int]]:
    """Pairs of places with the same token, in order. Without tokens, the same places of two sides of one length."""
    if not first or not second:
        return [(place, place) for place in range(lengths[0])] if lengths[0] == lengths[1] else []
    one, two = (tuple((token.text, token.special) for token in side) for side in (first, second))
    return list(_alignment(one, two))


@lru_cache(maxsize=8)
def _alignment(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[tuple[int, int], ...]:
    """Of all sites of a pair of records, most have the same tokens: they are aligned once."""
    if first == second:
        return tuple((place, place) for place in range(len(first)))
    blocks = SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    return tuple((block.a + step, block.b + step) for block in blocks for step in range(block.size))


def _common(
    site: Site, queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]], side: int, sample: int
) -> Tensor:
    """(H, n, m) in float64: the weights between the tokens that both have."""
    weights = site.weights
    if not 0 <= sample < weights.shape[0]:
        raise ValueError(f"difference(sample=): {site.title} has {weights.shape[0]} samples; got {sample}")
    rows = torch.tensor([pair[side] for pair in queries])
    columns = torch.tensor([pair[side] for pair in keys])
    return weights[sample].detach().double().cpu()[:, rows][:, :, columns]


def _with_rest(weights: Tensor) -> Tensor:
    """One key more: the weight that goes to tokens of this side alone (or to a sink), so that rows sum to 1."""
    return torch.cat([weights, (1 - weights.sum(-1, keepdim=True)).clamp(min=0)], -1)


def _distance(one: Tensor, two: Tensor) -> Tensor:
    middle = (one + two) / 2
    bits = (torch.special.entr(middle) - (torch.special.entr(one) + torch.special.entr(two)) / 2).sum(-1)
    distance: Tensor = (bits / math.log(2)).clamp(0, 1).sqrt()
    return distance
