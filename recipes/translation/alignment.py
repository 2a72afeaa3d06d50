"""Which words attention links, judged against gold links: alignment error rate, and the baselines it must beat.

Letters: Ts and Tt words (or subwords) of source and target. An alignment is a set of pairs (source word, target word),
here always with one source word for every target word: the one it looks at most. All baselines are held to that rule.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.translation.data.pairs import Link, Pair

Points = set[tuple[int, int]]


@dataclass(frozen=True)
class Score:
    """Shares of 1. `error` is the alignment error rate of Och and Ney (2003)."""

    precision: float
    recall: float
    error: float


def score(found: Iterable[Points], gold: Iterable[Sequence[Link]]) -> Score:
    """Judge alignments over the source words that carry a gold link.

    Of the points A found at such words, those inside a link are right: every word that a link spans is a possible
    partner. A link L is found when some point lies inside it. precision = right / |A|, recall = found links / |L|,
    error = 1 - (right + found links) / (|A| + |L|). 1 where there is neither point nor link.
    """
    points = right = known = reached = 0
    for some, links in zip(found, gold, strict=True):
        linked = {source for link in links for source in link.source}
        inside = {(source, target) for link in links for source in link.source for target in link.target}
        points += sum(source in linked for source, _ in some)
        right += len(some & inside)
        known += len(links)
        reached += sum(any((a, b) in some for a in link.source for b in link.target) for link in links)
    if points + known == 0:
        return Score(0.0, 0.0, 1.0)
    precision, recall = right / max(1, points), reached / max(1, known)
    return Score(precision, recall, 1 - (right + reached) / (points + known))


def of_words(
    weights: Tensor, source: Sequence[tuple[str, int, int]], target: Sequence[tuple[str, int, int]]
) -> Tensor:
    """From subwords to words: weights (..., Tt, Ts) to (..., target words, source words).

    Weights on a word are the sum over its subwords, weights of a word the mean over its own; rows that summed to 1
    over the words still do. `source` and `target` are what `Vocabulary.words` gives.
    """
    across = torch.stack([weights[..., a:b].sum(-1) for _, a, b in source], -1)
    return torch.stack([across[..., a:b, :].mean(-2) for _, a, b in target], -2)


def hard(weights: Tensor) -> Points:
    """(target words, source words) to points: for each target word the source word with the largest weight."""
    if weights.numel() == 0:
        return set()
    return {(source, target) for target, source in enumerate(weights.argmax(-1).tolist())}


def diagonal(pair: Pair) -> Points:
    """Target word j at the source word in the same place of its sentence."""
    sources, targets = len(pair.source.split()), len(pair.target.split())
    return {(min(sources - 1, int((j + 0.5) * sources / targets)), j) for j in range(targets)}


def pharaoh(points: Points) -> str:
    """`0-0 1-2 ...`: source word, hyphen, target word, from 0, by source."""
    return " ".join(f"{source}-{target}" for source, target in sorted(points))


def from_pharaoh(line: str) -> Points:
    """Read what `pharaoh` writes. ValueError for anything else."""
    found = set()
    for item in line.split():
        source, hyphen, target = item.partition("-")
        if not hyphen or not source.isdecimal() or not target.isdecimal():
            raise ValueError(f"Pharaoh format: expected pairs such as 0-1, got {item!r}")
        found.add((int(source), int(target)))
    return found


class Ibm1:
    """IBM Model 1 (Brown et al., 1993): t(target word | source word) by expectation maximisation, with an empty word.

    Words are compared in small letters and without punctuation at their ends.
    """

    def __init__(self, pairs: Sequence[Pair], steps: int = 8) -> None:
        self._sources: dict[str, int] = {"": 0}
        self._targets: dict[str, int] = {}
        sentences = [
            (
                [
                    0,
                    *(
                        self._sources.setdefault(_plain(word), len(self._sources))
                        for word in pair.source.split()
                    ),
                ],
                [self._targets.setdefault(_plain(word), len(self._targets)) for word in pair.target.split()],
            )
            for pair in pairs
        ]
        # One entry for every meeting of a source and a target word; `slot` is the target word's own place in all text.
        meetings, slots, at = [], [], 0
        for source, target in sentences:
            one, other = np.array(source), np.array(target)
            meetings.append((one[None, :] * len(self._targets) + other[:, None]).ravel())
            slots.append(np.repeat(np.arange(at, at + len(other)), len(one)))
            at += len(other)
        self._keys, which = np.unique(np.concatenate(meetings), return_inverse=True)
        slot = np.concatenate(slots)
        by_source = self._keys // len(self._targets)
        self._table = np.full(len(self._keys), 1.0 / len(self._targets))
        for _ in range(steps):
            each = self._table[which]
            share = each / np.bincount(slot, each)[slot]
            counts = np.bincount(which, share)
            self._table = counts / np.bincount(by_source, counts)[by_source]

    def align(self, pair: Pair) -> Points:
        """For each target word the likeliest source word; the first of equals; none of unknown target words."""
        sources = np.array([self._sources.get(_plain(word), -1) for word in pair.source.split()])
        found = set()
        for place, word in enumerate(pair.target.split()):
            known = self._targets.get(_plain(word))
            if known is not None and (sources >= 0).any():
                likely = np.where(sources >= 0, self._of(sources * len(self._targets) + known), -1.0)
                found.add((int(likely.argmax()), place))
        return found

    def _of(
        self, keys: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        at = np.searchsorted(self._keys, keys).clip(0, len(self._keys) - 1)
        found: np.ndarray[tuple[int], np.dtype[np.float64]] = np.where(
            self._keys[at] == keys, self._table[at], 0.0
        )
        return found


def eflomal(train: Sequence[Pair], pairs: Sequence[Pair]) -> list[Points]:
    """For each target word one source word or none, by eflomal (Östling and Tiedemann, 2016), which must be installed.

    It aligns what it learns from: `pairs` come first, then `train`. It samples, so that figures vary a little.
    """
    from eflomal import Aligner

    every = [*pairs, *train]
    source, target = (
        [" ".join(map(_plain, text.split())) + "\n" for text in side]
        for side in ([pair.source for pair in every], [pair.target for pair in every])
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "links"
        Aligner().align(source, target, links_filename_fwd=str(path))
        lines = path.read_text("utf-8").splitlines()
    return [from_pharaoh(line) for line in lines[: len(pairs)]]


def _plain(word: str) -> str:
    small = word.lower().strip(".,;:!?()[]¿¡'’\"“”-")
    return small or word
