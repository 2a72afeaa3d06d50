"""What each head does, by name, read off its statistics and weights with thresholds that are stated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.look._record import Record, Site
from regard.look._units import separators

# The share of a head's weight from which it has a name, in the order in which names are tried: the rarer comes first.
THRESHOLDS: dict[str, float] = {
    "induction": 0.3,
    "previous-token": 0.5,
    "next-token": 0.5,
    "same-token": 0.5,
    "first-token": 0.5,
    "separator": 0.5,
    "local": 0.6,
    "uniform": 0.9,
}
# Keys at most this far from the query are near.
NEAR = 4
# An induction score from fewer queries than this says nothing.
_REPEATS = 4

SAID = {
    "induction": "looks at what followed the same token earlier",
    "previous-token": "looks at the token before",
    "next-token": "looks at the token after",
    "same-token": "looks at the token itself",
    "first-token": "rests on the first token",
    "separator": "rests on separators: special tokens, punctuation, line ends",
    "local": f"looks at most {NEAR} tokens away",
    "uniform": "looks everywhere alike",
    "mixed": "looks at no one kind of place",
}


@dataclass(frozen=True)
class Head:
    """A head of a site: its name in the catalogue, the share that earned it, and the numbers it was read off.

    `pattern` is a key of SAID; `share` of the weight goes there (for "uniform", the entropy as a share of the largest
    possible, for "mixed" the largest share of any pattern). `scores`: every pattern that could be measured. Means over
    the queries: `entropy` in nats, `effective_keys` exp(entropy), `distance` in tokens (None across two texts), `first`
    and `special` the shares of weight on the first key and on special tokens (None where tokens are not known).
    """

    site: int
    layer: int
    head: int
    name: str
    kind: str
    pattern: str
    share: float
    entropy: float | None
    effective_keys: float | None
    distance: float | None
    first: float | None
    special: float | None
    scores: Mapping[str, float] = field(default_factory=dict)

    def said(self) -> str:
        """In one sentence, for a person."""
        if self.pattern == "uniform":
            return f"{SAID[self.pattern]} ({self.share:.0%} of the largest entropy)"
        if self.pattern == "mixed":
            return f"{SAID[self.pattern]} (at most {self.share:.0%} of its weight at any)"
        return f"{SAID[self.pattern]} ({self.share:.0%} of its weight)"

    def row(self) -> dict[str, Any]:
        """As one row of a table: plain numbers and words."""
        plain = {name: value for name, value in vars(self).items() if name != "scores"}
        return {
            **plain,
            "said": self.said(),
            **{f"score_{name}": self.scores.get(name) for name in THRESHOLDS},
        }


def catalogue(record: Record, thresholds: Mapping[str, float] = THRESHOLDS, *, sample: int = 0) -> list[Head]:
    """Every head of a record, named by the first pattern of THRESHOLDS that it reaches, else "mixed".

    Over the queries of one sample that have a choice (all but the first where later keys are hidden), the mean of:
    previous-token w_i,p-1; same-token w_i,p; next-token w_i,p+1; first-token w_i,0; separator, the weight on special
    tokens (but the first token), punctuation and line ends; local, the weight at most NEAR tokens away, where at
    least 4 times as many keys are further; uniform, entropy over log(keys with weight). induction, over queries whose
    token stood before (its number, at least two places back): the weight on the tokens that followed it (Olsson et
    al., 2022; needs weights or top weights, of which it is a lower bound, and token ids). Patterns that were found in
    many models by Clark et al., 2019. Read off kept statistics where there are no weights; what cannot be measured
    has no score.
    """
    for name in thresholds:
        if name not in THRESHOLDS:
            raise ValueError(f"there is no pattern {name!r}; the catalogue has: {', '.join(THRESHOLDS)}")
    found = []
    for number, site in enumerate(record.sites):
        if not 0 <= sample < max(1, site.sizes.B):
            raise ValueError(
                f"catalogue(sample=): {site.title} has {site.sizes.B}, counted from 0; got {sample}"
            )
        empty = 0 in site.lengths
        scores, means = ({}, {}) if empty else (_scores(site, sample), _means(site, sample))
        for head in range(site.heads):
            found.append(_named(number, site, head, scores, means, {**THRESHOLDS, **thresholds}))
    return found


def _named(
    number: int,
    site: Site,
    head: int,
    scores: Mapping[str, Tensor],
    means: Mapping[str, Tensor],
    thresholds: Mapping[str, float],
) -> Head:
    own = {name: float(score[head]) for name, score in scores.items() if math.isfinite(float(score[head]))}
    reached = [name for name in THRESHOLDS if own.get(name, -1.0) >= thresholds[name]]
    pattern = reached[0] if reached else "mixed"
    shares = [share for name, share in own.items() if name != "uniform"]
    share = own[pattern] if reached else max(shares, default=0.0)
    numbers = {name: float(mean[head]) for name, mean in means.items()}
    wanted = ("entropy", "effective_keys", "distance", "first", "special")
    return Head(
        number,
        site.layer,
        head,
        site.title,
        site.kind,
        pattern,
        share,
        **{n: numbers.get(n) for n in wanted},
        scores=own,
    )


# ------------------------------------------------------------------ numbers, each (H,)


def _means(site: Site, sample: int) -> dict[str, Tensor]:
    found = {}
    for name in ("entropy", "distance", "first"):
        rows = _statistic(site, name, sample)
        if rows is not None:
            found[name] = _over_rows(site, rows, sample)
            if name == "entropy":
                found["effective_keys"] = _over_rows(site, rows.exp(), sample)
    special = _on_keys(
        site, sample, torch.tensor([token.special for token in site.key_tokens], dtype=torch.bool)
    )
    return found if special is None else {**found, "special": special}


def _scores(site: Site, sample: int) -> dict[str, Tensor]:
    """Every pattern that can be measured at a site, NaN where a head gives nothing to measure."""
    found: dict[str, Tensor] = {}
    for name, statistic in (("first-token", "first"), ("previous-token", "previous"), ("same-token", "self")):
        rows = _statistic(site, statistic, sample)
        if rows is not None and (statistic == "first" or site.kind == "self"):
            found[name] = _over_rows(site, rows, sample)
    on_separators = _on_keys(site, sample, separators(site.key_tokens))
    if on_separators is not None:
        found["separator"] = on_separators
    maps = _maps(site, sample)
    if maps is not None:
        found |= _of_weights(site, maps)
    elif site.top_weights is not None and site.top_keys is not None:
        found |= _induction(site, *_top(site, sample))
    return found


def _of_weights(site: Site, maps: Tensor) -> dict[str, Tensor]:
    found = {"uniform": _evenness(maps)}
    if isinstance(site.offset, int) and site.kind == "self":
        queries, keys = site.lengths
        apart = torch.arange(keys)[None, :] - (torch.arange(queries)[:, None] + site.offset)
        found["next-token"] = (maps * (apart == 1)).sum((-1, -2)) / max(
            1, min(queries, keys - 1 - site.offset)
        )
        near = apart.abs() <= NEAR
        some = ((maps > 0) & ~near).any(0).sum(-1) >= 4 * (2 * NEAR + 1)
        if bool(some.any()):
            found["local"] = (maps * near).sum(-1)[:, some].mean(-1)
        found |= _induction(site, maps, torch.arange(keys))
    return found


def _evenness(maps: Tensor) -> Tensor:
    """The mean of entropy over its largest value, over the rows that see two keys or more."""
    counts = (maps > 0).sum(-1)
    rows = counts >= 2
    even = torch.special.entr(maps).sum(-1) / counts.clamp(min=2).log()
    return torch.where(rows, even, 0.0).sum(-1) / rows.sum(-1)


def _induction(site: Site, weights: Tensor, keys: Tensor) -> dict[str, Tensor]:
    """The mean weight on what followed the same token earlier; `weights` (H, Tq, k) are those of `keys`."""
    ids = torch.tensor([-1 if token.id is None else token.id for token in site.key_tokens])
    if site.query_tokens != site.key_tokens or site.kind != "self" or not len(ids) or bool((ids < 0).any()):
        return {}
    place = torch.arange(len(ids))
    numbers = ids.unique(return_inverse=True)[1]
    earliest = torch.full_like(ids, len(ids)).scatter_reduce(0, numbers, place, "amin")[numbers]
    special = torch.tensor([token.special for token in site.key_tokens])
    repeated = (earliest <= place - 2) & ~special
    if int(repeated.sum()) < _REPEATS:
        return {}
    after = (ids[(keys - 1).clamp(min=0)] == ids[:, None]) & (keys >= 1) & (keys < place[:, None])
    return {"induction": (weights * after).sum(-1)[:, repeated].mean(-1)}


def _maps(site: Site, sample: int) -> Tensor | None:
    """(H, Tq, Tk) in float32 on the CPU, where all were kept or can be computed."""
    if not site.has_weights:
        return None
    weights = site.weights.detach().float().cpu()
    return weights.reshape(-1, *weights.shape[-3:])[sample] if weights.dim() >= 3 else weights[None]


def _top(site: Site, sample: int) -> tuple[Tensor, Tensor]:
    assert site.top_weights is not None and site.top_keys is not None
    return site.top_weights[sample].float().cpu(), site.top_keys[sample].cpu()


def _statistic(site: Site, name: str, sample: int) -> Tensor | None:
    """(H, Tq) of one statistic; None where it was neither kept nor can be computed."""
    known = site.offset is not None or name not in ("self", "previous", "distance")
    if not known or (name not in site.statistics and not site.has_weights):
        return None
    return site.statistic(name)[sample].float().cpu()


def _over_rows(site: Site, rows: Tensor, sample: int) -> Tensor:
    """The mean over the queries that have a choice: those with a key, but the first where later keys are hidden."""
    mass = _statistic(site, "mass", sample)
    used = torch.ones_like(rows, dtype=torch.bool) if mass is None else mass > 0
    if site.kind == "self" and rows.shape[-1] > 1 and _hides_later(site, sample):
        used[:, 0] = False
    return torch.where(used, rows, 0.0).sum(-1) / used.sum(-1).clamp(min=1)


def _hides_later(site: Site, sample: int) -> bool:
    """Whether the first query sees one key alone, as it does under a causal mask."""
    rows = _statistic(site, "max", sample), _statistic(site, "mass", sample)
    return site.causal or (
        rows[0] is not None and rows[1] is not None and bool((rows[0] == rows[1])[:, 0].all())
    )


def _on_keys(site: Site, sample: int, chosen: Tensor) -> Tensor | None:
    """The share of all weight that lies on the chosen keys (Tk,)."""
    received = _statistic(site, "received", sample)
    if received is None or len(chosen) != site.lengths[1]:
        return None
    return (received * chosen).sum(-1) / received.sum(-1).clamp(min=1e-30)
