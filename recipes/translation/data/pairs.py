"""What a corpus of translations is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Link(NamedTuple):
    """A gold link: words of the source and words of the target (places, from 0) that say the same."""

    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class Pair:
    """A sentence and its translation. `links`, where people made some, count the words that white space separates."""

    source: str
    target: str
    key: str
    links: tuple[Link, ...] | None = None


@dataclass(frozen=True)
class Corpus:
    """Pairs to learn from, to choose by, and to judge by; `languages` (of source and target) as ISO 639 codes."""

    name: str
    languages: tuple[str, str]
    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]
