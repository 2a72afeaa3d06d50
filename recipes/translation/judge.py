"""How good translations are: BLEU and chrF as sacrebleu counts them, exact matches, and chrF by length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Upper ends of the buckets of source length, in words.
LENGTHS = (5, 10, 15, 20, 25, 30, 40, 50, 75, 100, 10**9)


def judged(found: Sequence[str], expected: Sequence[str]) -> dict[str, Any]:
    """{"bleu", "chrf", "exact"}: BLEU and chrF2 from 0 to 100, and the share that equals its reference.

    `signature` is sacrebleu's own, by which others can count the same. ValueError for no sentences.
    """
    from sacrebleu.metrics import BLEU, CHRF

    if not found or len(found) != len(expected):
        raise ValueError(
            f"judge: expected as many translations as references, at least one; got {len(found)}"
        )
    bleu, chrf = BLEU(), CHRF()
    return {
        "sentences": len(found),
        "bleu": bleu.corpus_score(list(found), [list(expected)]).score,
        "chrf": chrf.corpus_score(list(found), [list(expected)]).score,
        "exact": sum(one == other for one, other in zip(found, expected, strict=True)) / len(found),
        "signature": {"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())},
    }


def by_length(sources: Sequence[str], found: Sequence[str], expected: Sequence[str]) -> list[dict[str, Any]]:
    """chrF of each bucket of source length that has sentences: {"from", "to" (words), "sentences", "chrf"}."""
    rows, low = [], 1
    for high in LENGTHS:
        inside = [place for place, source in enumerate(sources) if low <= len(source.split()) <= high]
        if inside:
            own = judged([found[place] for place in inside], [expected[place] for place in inside])
            longest = max(len(sources[place].split()) for place in inside)
            rows.append(
                {"from": low, "to": min(high, longest), "sentences": len(inside), "chrf": own["chrf"]}
            )
        low = high + 1
    return rows
