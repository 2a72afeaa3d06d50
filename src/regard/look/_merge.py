"""Attention between words, sentences or lines instead of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.look._record import Record, Site, Sizes, Token
from regard.look._units import Unit, units


def merge_weights(weights: Tensor, queries: Sequence[Sequence[int]], keys: Sequence[Sequence[int]]) -> Tensor:
    """Weights between groups of tokens: the mean over the queries of a group of the sum over the keys of a group.

    ``merged[a, b] = mean_{i in a} sum_{j in b} w_ij``: where rows of `weights` (..., Tq, Tk) sum to 1, so do those of
    the result (..., len(queries), len(keys)). Every query and every key is in one group, or ValueError is raised.
    (After Clark et al., 2019, who merge the pieces of words like this.)
    """
    Tq, Tk = weights.shape[-2:]
    for name, groups, length in (("queries", queries, Tq), ("keys", keys, Tk)):
        if sorted(place for group in groups for place in group) != list(range(length)):
            raise ValueError(f"merge: each of the {length} {name} must be in exactly one group")
        if any(not group for group in groups):
            raise ValueError(f"merge: there is an empty group of {name}")
    wide = weights.float() if weights.dtype in (torch.float16, torch.bfloat16) else weights
    summed = wide.new_zeros(*wide.shape[:-1], len(keys)).index_add_(
        -1, _numbers(keys), wide[..., _order(keys)]
    )
    merged = wide.new_zeros(*wide.shape[:-2], len(queries), len(keys))
    merged.index_add_(-2, _numbers(queries), summed[..., _order(queries), :])
    counts = torch.tensor([len(group) for group in queries], dtype=wide.dtype)
    return merged / counts[:, None]


def _order(groups: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([place for group in groups for place in group], dtype=torch.int64)


def _numbers(groups: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([number for number, group in enumerate(groups) for _ in group], dtype=torch.int64)


def merged(record: Record, unit: str) -> Record:
    """A record of words, sentences or lines: the same sites, with weights between those instead of tokens.

    `unit` is "word", "sentence" or "line". Weights are summed over the keys of a unit and averaged over its queries,
    so that rows still sum to 1; statistics are then those of the merged weights. Words are found by letters and
    marks, each Chinese or Japanese character is one, and text that is written without blanks otherwise (Thai) stays
    whole. Raises ValueError for another unit, and for a site without tokens or without weights.
    """
    notes = [*record.notes, f"tokens were merged into {unit}s: summed over keys, averaged over queries"]
    sites = [_merged(site, record.text, unit) for site in record.sites]
    return Record(sites, record.text, record.model, notes, record.image)


def _merged(site: Site, text: str, unit: str) -> Site:
    if not site.query_tokens or not site.key_tokens:
        raise ValueError(f"{site.title}: its tokens are not known, so they cannot be merged into {unit}s")
    if site.key_grid is not None or site.query_grid is not None:
        raise ValueError(f"{site.title}: its tokens are patches of an image; they do not merge into {unit}s")
    queries, keys = units(site.query_tokens, text, unit), units(site.key_tokens, text, unit)
    weights = merge_weights(site.weights, [each.members for each in queries], [each.members for each in keys])
    sizes = Sizes(site.sizes.B, site.sizes.H, site.sizes.Hkv, len(queries), len(keys), *site.sizes[5:])
    square = site.query_tokens == site.key_tokens and site.kind == "self"
    return dataclasses.replace(
        site,
        **_EMPTY,
        sizes=sizes,
        whole=weights,
        offset=0 if square else None,
        query_tokens=_tokens(queries),
        key_tokens=_tokens(keys),
    )


# What a site of tokens holds and a site of words cannot.
_EMPTY: dict[str, Any] = {
    **dict.fromkeys(("query", "key", "value", "output", "mask", "bias", "top_weights", "top_keys")),
    **dict.fromkeys(("pooled", "pooled_max", "row_weights", "heads_kept", "slots", "given")),
    "statistics": {},
    "rows": (),
    "steps": (),
    "cell": (1, 1),
    "causal": False,
}


def _tokens(found: Sequence[Unit]) -> tuple[Token, ...]:
    return tuple(unit.token for unit in found)
