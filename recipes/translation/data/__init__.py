"""The corpora of the recipe, by name."""

from __future__ import annotations

from recipes.translation.data.pairs import Corpus, Link, Pair

__all__ = ["NAMES", "Corpus", "Link", "Pair", "load"]

NAMES = ("dates", "bible")


def load(name: str) -> Corpus:
    """The corpus called `name`, fetched where it must be. Raises ValueError for another name, FetchError, OSError."""
    if name == "dates":
        from recipes.translation.data import dates

        return dates.corpus()
    if name == "bible":
        from recipes.translation.data import bible

        return bible.corpus()
    raise ValueError(f"--data {name!r}: there is no such corpus; there are {', '.join(NAMES)}")
