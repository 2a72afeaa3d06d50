"""Attention over several layers as one map, under an assumption that is stated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.look._record import Record, Site


@dataclass(frozen=True)
class Rollout:
    """How much of each token of the first layer's input is in each token of a later layer's output, if one assumes so.

    `weights` (layers, B, T, T): entry l, row i, how the output of layer l at i is made of the inputs j; rows sum to 1
    where rows of the weights do. `sites` are the titles of the layers, `assumption` what the numbers rest on.
    """

    weights: Tensor
    sites: tuple[str, ...]
    assumption: str


def rollout(
    record: Record,
    *,
    residual: float = 0.5,
    heads: Sequence[int] | None = None,
    sites: Sequence[int] | None = None,
) -> Rollout:
    """Attention rollout: the product over the layers of ``residual I + (1 - residual) mean_h W``.

    It assumes that a layer's output is its input, in the share `residual`, and the average of its heads over the
    inputs, in the rest; that values, output projections, norms and feed-forward layers change nothing of this, and
    that heads count alike. `heads` are the ones that are averaged (all), `sites` the places of attention by their
    number in the record (all of kind "self"). (Abnar and Zuidema, Quantifying Attention Flow in Transformers, 2020,
    where the residual is 0.5.) Raises ValueError for a residual outside 0 to 1, no such head or site, and sites of
    different lengths.
    """
    if not 0 <= residual <= 1:
        raise ValueError(f"rollout(residual=): expected a share from 0 to 1; got {residual}")
    chosen = _chosen(record, sites)
    lengths = {site.lengths for site in chosen}
    if len(lengths) > 1 or any(queries != keys for queries, keys in lengths):
        found = ", ".join(f"{queries} x {keys}" for queries, keys in sorted(lengths))
        raise ValueError(
            f"rollout: needs layers over one text, as many queries as keys; these are of {found}. "
            "Choose some with sites="
        )
    T = chosen[0].lengths[0]
    identity = torch.eye(T, dtype=torch.float64)
    whole, layers = identity.expand(chosen[0].sizes.B, T, T), []
    for site in chosen:
        mixed = residual * identity + (1 - residual) * _mean(site, heads)
        whole = mixed @ whole
        layers.append(whole)
    which = "all heads" if heads is None else f"heads {', '.join(map(str, heads))}"
    assumption = (
        f"each layer passes on {residual:.0%} of its input and {1 - residual:.0%} of the average of {which}; values, "
        "projections, norms and feed-forward layers are taken to change nothing"
    )
    return Rollout(torch.stack(layers).float(), tuple(site.title for site in chosen), assumption)


def _chosen(record: Record, sites: Sequence[int] | None) -> list[Site]:
    if sites is None:
        chosen = [site for site in record.sites if site.kind == "self"]
    else:
        for number in sites:
            if not 0 <= number < len(record.sites):
                raise ValueError(
                    f"rollout(sites=): there are {len(record.sites)} sites, counted from 0; got {number}"
                )
        chosen = [record.sites[number] for number in sites]
    if not chosen:
        raise ValueError("rollout: there is no self-attention in this record to go through")
    return chosen


def _mean(site: Site, heads: Sequence[int] | None) -> Tensor:
    """(B, T, T) in float64: the average of the heads."""
    weights = site.weights.double()
    if heads is None:
        return weights.mean(1)
    if not heads or not all(0 <= head < site.heads for head in heads):
        raise ValueError(f"rollout(heads=): {site.title} has heads 0 to {site.heads - 1}; got {list(heads)}")
    return weights[:, list(heads)].mean(1)
