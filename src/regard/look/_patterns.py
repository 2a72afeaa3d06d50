"""What a head mostly does, read off its weights; and which head to show first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from regard.look._record import Record, Site, Token


@dataclass(frozen=True)
class Pattern:
    """The place a head looks at most: a letter of LEGEND, the share of all weight there, and the key if it is one."""

    letter: str
    share: float
    key: int | None = None

    def said(self, tokens: Sequence[Token] = ()) -> str:
        """In words, for a person."""
        if self.letter == "-":
            return "looks at no one place in particular"
        place = LEGEND[self.letter]
        if self.key is not None:
            place += f", {tokens[self.key].text}" if tokens else f", number {self.key}"
        return f"looks mostly at {place} ({self.share:.0%} of its weight)"


LEGEND = {
    "p": "the token before",
    "n": "the token after",
    "s": "the token itself",
    "f": "the first token",
    "l": "the last token",
    "o": "one other token",
    "-": "no one place",
}


def pattern_of(weights: Tensor) -> Pattern:
    """Where one head's weights (Tq, Tk) mostly go: the largest share of the places in LEGEND."""
    queries, keys = weights.shape
    if queries == 0 or keys == 0:
        return Pattern("-", 0.0)
    received = weights.mean(0)
    key = int(received.argmax())
    shares = {"f" if key == 0 else "l" if key == keys - 1 else "o": float(received[key])}
    if queries == keys:
        shares |= {name: _mean(weights.diagonal(step)) for name, step in (("p", -1), ("n", 1), ("s", 0))}
    letter = max(shares, key=lambda name: shares[name])
    # A head that looks everywhere alike puts 1/Tk on each place.
    if shares[letter] <= max(0.25, 1.5 / keys):
        return Pattern("-", 1.0 - shares[letter])
    return Pattern(letter, shares[letter], key if letter == "o" else None)


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0


def maps_of(site: Site) -> Tensor:
    """The weights of a site's first sample, (H, Tq, Tk), in float32 on the CPU."""
    weights = site.weights.detach().float().cpu()
    return weights.reshape(-1, *weights.shape[-3:])[0] if weights.dim() >= 3 else weights[None]


def most_telling(record: Record) -> tuple[int, int]:
    """(site, head) of the head that links words most: the largest weight between tokens of the text that are no
    neighbours, averaged over the queries. Special tokens do not count, on either side."""
    best, place = -1.0, (0, 0)
    for number, site in enumerate(record.sites):
        links = maps_of(site) * _far_content(site)
        scores = links.amax(-1).mean(-1) if links.numel() else torch.zeros(site.heads)
        head = int(scores.argmax())
        if float(scores[head]) > best:
            best, place = float(scores[head]), (number, head)
    return place


def telling_query(site: Site, head: int) -> int:
    """The query that gives most weight to one token of the text that is no neighbour."""
    links = maps_of(site)[head] * _far_content(site)
    return int(links.amax(-1).argmax()) if links.numel() else 0


def _far_content(site: Site) -> Tensor:
    queries, keys = site.lengths
    distance = torch.arange(queries)[:, None] - torch.arange(keys)[None, :]
    apart = distance.abs() > 1 if site.kind == "self" else torch.ones(queries, keys, dtype=torch.bool)
    if site.kind == "self":
        apart[:, 0] = False  # where heads of models without special tokens rest
    for tokens, shape in ((site.query_tokens, (-1, 1)), (site.key_tokens, (1, -1))):
        if tokens:
            apart = apart & torch.tensor([not token.special for token in tokens]).reshape(shape)
    return apart


def pick(record: Record, layer: int | None, head: int | None) -> tuple[int, int]:
    """The (layer, head) to show in full: the ones asked for, else the most telling. ValueError when out of range."""
    _require("layer", layer, len(record.sites))
    if layer is None and head is None:
        return most_telling(record)
    if layer is None:
        fitting = [
            number for number, site in enumerate(record.sites) if head is not None and head < site.heads
        ]
        _require("head", head, max(site.heads for site in record.sites))
        only = Record([record.sites[number] for number in fitting])
        return fitting[most_telling(only)[0]], int(head or 0)
    _require("head", head, record.sites[layer].heads)
    return layer, most_telling(Record([record.sites[layer]]))[1] if head is None else head


def _require(name: str, value: int | None, count: int) -> None:
    if value is not None and not 0 <= value < count:
        refuse(name, value, list(range(count)))


def refuse(name: str, asked: int | None, known: list[int]) -> NoReturn:
    """Say which layers, heads or tokens there are."""
    if len(known) == 1:
        there = f"the only {name} here is {known[0]}"
    elif known == list(range(len(known))):
        there = f"there are {len(known)} {name}s, counted from 0; give 0 to {len(known) - 1}"
    else:
        there = f"the {name}s here are {', '.join(map(str, known))}"
    raise ValueError(f"{name} {asked}: {there}")
