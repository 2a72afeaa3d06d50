"""The corpora of the recipe, by name."""

from __future__ import annotations

from recipes.translation.data.pairs import Corpus, Link, Pair

__all__ = ["NAMES", "Corpus", "Link", "Pair", "load"]

NAMES = ("dates", "bible", "software-fr", "software-de", "software-ru", "software-zh")


def load(name: str) -> Corpus:
    """The corpus called `name`, fetched where it must be. Raises ValueError for another name, FetchError, OSError."""
    if name == "dates":
        from recipes.translation.data import dates

        return dates.corpus()
    if name == "bible":
        from recipes.translation.data import bible

        return bible.corpus()
    if name in NAMES:
        from recipes.translation.data import software

        return software.corpus(name.removeprefix("software-"))
    raise ValueError(f"--data {name!r}: there is no such corpus; there are {', '.join(NAMES)}")
