"""What renderers ask of a site, one sample of it: names, maps, the largest weights, blocks, numbers a head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.look._catalogue import Head, catalogue
from regard.look._record import Record, Site, Token

Array = np.ndarray[Any, np.dtype[Any]]

# Above this many tokens on a side a map is shown as blocks; one of this size is 16 MiB.
LONGEST = 2048
# The side of the blocks' map that is made here where the record holds none.
POOL = 1024
TOP = 8


@dataclass(frozen=True)
class Top:
    """The largest weights of each row: (Tq, k) and their keys; key -1 where a row sees fewer."""

    weights: Array
    keys: Array


class Shown:
    """One site of a record as renderers see it. `number` is its place among the sites, from 0."""

    def __init__(self, record: Record, number: int, sample: int = 0) -> None:
        self.site: Site = record.sites[number]
        self.number, self.sample = number, sample
        # What people call it by: of a comparison, its place in the first of the two records.
        self.called = number
        self.heads = self.site.heads
        self.Tq, self.Tk = self.site.lengths
        self.queries, self.keys = self.site.query_tokens, self.site.key_tokens
        # Heads among whose weights were NaN or infinite ones, as far as they were read.
        self.not_numbers: set[int] = set()
        self._several = len({_group(site) for site in record.sites}) > 1

    @property
    def two_sided(self) -> bool:
        """Whether the tokens that look and those looked at are two tables."""
        return self.site.kind == "cross" or self.Tq != self.Tk or self.queries != self.keys

    @property
    def title(self) -> str:
        """Which layer, in words."""
        said = f"Layer {self.called}"
        if self._several:
            said += f" ({_group(self.site)} {self.site.layer})"
        return said

    @property
    def option(self) -> str:
        """The same, short."""
        more = f" {_group(self.site)} {self.site.layer}" if self._several else ""
        return f"{self.called}{more}"

    @property
    def facts(self) -> str:
        """Where it is in the model, and what ran."""
        site = self.site
        length = f"{self.Tq} tokens" if not self.two_sided else f"{self.Tq} queries, {self.Tk} keys"
        parts = [site.title, f"{site.kind}-attention", length, site.masked.replace("none", "no mask")]
        if isinstance(site.scale, float | int):
            parts.append(f"scale {site.scale:.4g}")
        if site.softcap is not None:
            parts.append(f"soft-cap {site.softcap:g}")
        if site.sink is not None:
            parts.append("with a sink")
        grouped = site.sizes.Hkv
        if grouped and grouped != site.sizes.H:
            parts.append(f"{site.sizes.H} query heads on {grouped} key heads")
        parts.append(", ".join(part for part in (site.implementation, site.dtype) if part))
        return " · ".join(part for part in parts if part)

    # ------------------------------------------------------------------ weights

    def has_map(self, head: int) -> bool:
        """Whether all weights of a head can be had, at a size that can be shown."""
        return (self.site.has_weights or self._kept(head)) and max(self.Tq, self.Tk) <= LONGEST

    def _kept(self, head: int) -> bool:
        """Whether the record holds the weights of a head themselves, however many."""
        kept = self.site.heads_kept
        return self.site.whole is not None and (kept is None or head in kept)

    def map(self, head: int) -> Array:
        """(Tq, Tk) in float32, 0 for what is no number (see `not_numbers`). ValueError where it was not kept."""
        if self.Tq * self.Tk == 0:
            return np.zeros((self.Tq, self.Tk), np.float32)
        return self._numbers(head, _numpy(self.site.map(head, self.sample)))

    def _numbers(self, head: int, weights: Array) -> Array:
        """Rows that saw a NaN are NaN: they cannot be drawn, and it is kept in mind that they were there."""
        if np.isfinite(weights).all():
            return weights
        self.not_numbers.add(head)
        return np.nan_to_num(weights, nan=0.0, posinf=0.0, neginf=0.0)

    def top(self, head: int, count: int = TOP) -> Top | None:
        """The largest weights of each row, `count` or as many as the record holds; None where it holds none."""
        if self.has_map(head) or self._kept(head):
            weights = self.map(head)
            keys = _largest(np.abs(weights), min(count, self.Tk))
            return Top(np.take_along_axis(weights, keys, -1), keys)
        kept, kept_keys = self.site.top_weights, self.site.top_keys
        if kept is not None and kept_keys is not None:
            return Top(
                self._numbers(head, _numpy(kept[self.sample, head])),
                kept_keys[self.sample, head].cpu().numpy(),
            )
        seen = self._observed
        if seen is None:
            return None
        return Top(
            _numpy(seen.top_weights[self.sample, head]), seen.top_keys[self.sample, head].cpu().numpy()
        )

    def rows(self, head: int) -> dict[int, Array]:
        """The rows of a head that were kept whole: query -> (Tk,)."""
        site, kept = self.site, self.site.heads_kept
        if site.row_weights is None or (kept is not None and head not in kept):
            return {}
        place = head if kept is None else kept.index(head)
        weights = self._numbers(head, _numpy(site.row_weights[self.sample, place]))
        return {query % self.Tq: row for query, row in zip(site.rows, weights, strict=True)}

    def row(self, head: int, query: int) -> Array | None:
        """(Tk,): the weights of one query, where all of them are known."""
        if self.has_map(head):
            found: Array = self.map(head)[query]
            return found
        return self.rows(head).get(query)

    def pooled(self, head: int) -> tuple[Array, Array] | None:
        """(means, largest) over blocks, each (rows, columns); None where the record holds nothing to make them of."""
        site = self.site
        if site.pooled is not None and site.pooled_max is not None:
            kept = site.heads_kept
            if kept is not None and head not in kept:
                return None
            place = head if kept is None else kept.index(head)
            mean = _numpy(site.pooled[self.sample, place]) / site.cell[1]
            return mean, _numpy(site.pooled_max[self.sample, place])
        if self.has_map(head) or self._kept(head):
            return pool(self.map(head), POOL)
        seen = self._observed
        if seen is None:
            return None
        across = -(-self.Tk // POOL)
        return (
            _numpy(seen.pooled[self.sample, head]) / across,
            _numpy(seen.pooled_max[self.sample, head]),
        )

    @cached_property
    def _observed(self) -> Any:
        """A long site whose query and key were kept, looked over in linear memory."""
        from regard import observe

        site = self.site
        if site.query is None or site.key is None or not site.has_weights:
            return None
        value = site.key if site.value is None else site.value
        with torch.no_grad():
            return observe(site.query, site.key, value, statistics=(), topk=TOP, pool=POOL, **site.mechanism)

    # ------------------------------------------------------------------ numbers a head

    def said(self, head: int) -> str:
        """What a head mostly does, as a sentence without its subject."""
        return self._catalogue[head].said() if self._catalogue else "its weights were not kept"

    def kind(self, head: int) -> str:
        """The same by its name in the catalogue."""
        return self._catalogue[head].pattern if self._catalogue else "not kept"

    def share(self, head: int) -> float | None:
        """The share of its weight that does so."""
        return self._catalogue[head].share if self._catalogue else None

    @cached_property
    def _catalogue(self) -> list[Head]:
        """Empty where nothing was kept to name a head by, or only what a long map would have to be computed from."""
        measured = bool(self.site.statistics) or self.has_map(0)
        return catalogue(Record([self.site]), sample=self.sample) if measured and self.Tq * self.Tk else []

    def interest(self, head: int) -> Array:
        """(Tq,): the largest weight from each token of the text to another one that is no neighbour; else 0."""
        top = self.top(head, 64)
        if top is None or top.weights.size == 0:
            return np.zeros(self.Tq, np.float32)
        weights = np.where(top.keys < 0, 0.0, top.weights)
        keys = np.clip(top.keys, 0, None)
        if self.site.kind == "self":
            offset = self.site.offset if isinstance(self.site.offset, int) else 0
            weights = weights * (np.abs(np.arange(self.Tq)[:, None] + offset - keys) > 1)
            if not any(token.special for token in self.keys):
                # Many heads of models without such tokens rest on the first.
                weights = weights * (keys > 0)
        if len(self.keys) == self.Tk:
            weights = weights * ~_special(self.keys)[keys]
        if len(self.queries) == self.Tq:
            weights = weights * ~_special(self.queries)[:, None]
        found: Array = np.abs(weights).max(-1).astype(np.float32)
        return found

    def mean(self, name: str, head: int) -> float | None:
        """A statistic of the head, the mean over its queries; None where it cannot be had."""
        rows = self._statistic(name)
        return None if rows is None or rows.shape[-1] == 0 else float(rows[head].mean())

    def _statistic(self, name: str) -> Tensor | None:
        if name not in self._statistics:
            self._statistics[name] = self._find(name)
        return self._statistics[name]

    @cached_property
    def _statistics(self) -> dict[str, Tensor | None]:
        return {}

    def _find(self, name: str) -> Tensor | None:
        site = self.site
        small = site.has_weights and 0 < min(self.Tq, self.Tk) and max(self.Tq, self.Tk) <= LONGEST
        if name == "special" and name not in site.statistics:
            marks = [token.special for token in self.keys]
            if not small or len(marks) != self.Tk or not any(marks):
                return None
            return torch.stack(
                [torch.from_numpy(self.map(head)[:, marks].sum(-1)) for head in range(self.heads)]
            )
        if name not in site.statistics and (name == "lse" or not small or self._unplaced(name)):
            return None
        return site.statistic(name)[self.sample].float()

    def _unplaced(self, name: str) -> bool:
        return self.site.offset is None and name in ("self", "previous", "distance")

    def effective(self, head: int) -> float | None:
        """The effective number of keys, e^entropy, the mean over the queries."""
        rows = self._statistic("entropy")
        return None if rows is None or rows.shape[-1] == 0 else float(np.exp(_numpy(rows[head])).mean())

    def received(self, head: int) -> Array | None:
        """(Tk,): what each key received in all."""
        rows = self._statistic("received")
        return None if rows is None else _numpy(rows[head])


def shown(record: Record) -> list[Shown]:
    """Every site of a record. Raises ValueError for a record without sites, or one that disagrees with itself."""
    if not any(site.heads for site in record.sites):
        raise ValueError("this record holds no attention: there is nothing to draw")
    record.check()
    return [Shown(record, number) for number in range(len(record.sites))]


def name_of(tokens: tuple[Token, ...], number: int) -> str:
    """What to write for a token: its text, or its number where the record has no tokens."""
    return tokens[number].text if number < len(tokens) else str(number)


def pool(weights: Array, side: int) -> tuple[Array, Array]:
    """(means, largest) of the weights over at most side x side blocks of one size."""
    rows, columns = weights.shape
    tall, across = max(1, -(-rows // side)), max(1, -(-columns // side))
    if tall == across == 1:
        return weights, weights
    tops, lefts = np.arange(0, rows, tall), np.arange(0, columns, across)
    largest = np.maximum.reduceat(np.maximum.reduceat(weights, tops, 0), lefts, 1)
    sums = np.add.reduceat(np.add.reduceat(weights, tops, 0), lefts, 1)
    sizes = np.outer(np.diff(np.append(tops, rows)), np.diff(np.append(lefts, columns)))
    return (sums / sizes).astype(np.float32), largest


def _largest(weights: Array, count: int) -> Array:
    """The keys of the largest weights of each row; of equal ones the first, while sorting all is cheap."""
    rows = torch.from_numpy(weights)
    if rows.shape[-1] <= 512:
        return rows.sort(dim=-1, descending=True, stable=True).indices[:, :count].numpy()
    return rows.topk(count, dim=-1).indices.numpy()


def _special(tokens: tuple[Token, ...]) -> Array:
    return np.array([token.special for token in tokens], dtype=bool)


def _numpy(tensor: Tensor) -> Array:
    return tensor.detach().float().cpu().numpy()


def _group(site: Site) -> str:
    side = next((word for word in ("encoder", "decoder") if word in site.name.lower()), "")
    what = "cross" if site.kind == "cross" else ("" if side else "self")
    return " ".join(part for part in (side, what) if part)
