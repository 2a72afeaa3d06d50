"""Batches of sentences of like length, in an order that seed and epoch alone decide.

Letters: B sentences, Ts and Tt tokens of source and target.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recipes.translation.model import BOS, EOS, PAD

Encoded = tuple[list[int], list[int]]


class Batch(NamedTuple):
    """source (B, Ts), EOS behind each sentence; lengths (B,); target_in, target_out (B, Tt); ``tokens`` to predict."""

    source: Tensor
    lengths: Tensor
    target_in: Tensor
    target_out: Tensor
    tokens: int

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device) for tensor in self[:4]), self.tokens)


def sources(sentences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(source (B, Ts), lengths (B,)): the sentences with EOS behind each."""
    rows = [[*sentence, EOS] for sentence in sentences]
    return _padded(rows), torch.tensor([len(row) for row in rows])


def targets(sentences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(target_in, target_out), both (B, Tt): what goes in, BOS first, and what is to come, EOS last."""
    return _padded([[BOS, *one] for one in sentences]), _padded([[*one, EOS] for one in sentences])


def collate(pairs: Sequence[Encoded]) -> Batch:
    source, lengths = sources([source for source, _ in pairs])
    target_in, target_out = targets([target for _, target in pairs])
    return Batch(source, lengths, target_in, target_out, sum(len(target) + 1 for _, target in pairs))


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    wide = max(len(row) for row in rows)
    return torch.tensor([[*row, *[PAD] * (wide - len(row))] for row in rows])


@dataclass(frozen=True)
class Plan:
    """How sentences go into batches. ``tokens``: at most so many a batch, source and target, padding counted.

    A longer sentence is a batch of its own. Each epoch has another order: sentences are shuffled, those of like length
    are put together, and the batches shuffled.
    """

    pairs: Sequence[Encoded]
    tokens: int
    seed: int

    def epoch(self, number: int) -> list[list[int]]:
        """The batches of an epoch, as places of ``pairs``. The same for every process."""
        chance = random.Random(f"{self.seed}/{number}")
        order = list(range(len(self.pairs)))
        chance.shuffle(order)
        sizes = [(len(source) + 1, len(target) + 1) for source, target in self.pairs]
        order.sort(key=lambda place: (max(sizes[place]), sizes[place]))
        batches: list[list[int]] = []
        current: list[int] = []
        wide = (0, 0)
        for place in order:
            source, target = sizes[place]
            wider = (max(wide[0], source), max(wide[1], target))
            if current and sum(wider) * (len(current) + 1) > self.tokens:
                batches.append(current)
                current, wider = [], (source, target)
            current.append(place)
            wide = wider
        if current:
            batches.append(current)
        chance.shuffle(batches)
        return batches

    def batch(self, places: Sequence[int], rank: int = 0, world: int = 1) -> tuple[Batch, int, bool]:
        """The share of one process of ``world``: its batch, the tokens of all shares, and whether this one counts.

        Where there are fewer sentences than processes, one without a share computes the first sentence and counts it 0.
        """
        whole = sum(len(self.pairs[place][1]) + 1 for place in places)
        own = places[rank::world]
        counts = bool(own)
        return collate([self.pairs[place] for place in own or places[:1]]), whole, counts
