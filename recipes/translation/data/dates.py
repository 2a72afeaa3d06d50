"""Dates as people write them in many languages, and in ISO 8601: drawn without limit from CLDR, by Babel."""

from __future__ import annotations

import random
from datetime import date

from recipes.translation.data.pairs import Corpus, Pair

# Of several scripts and orders. Croatian is not here: its short October is the Polish November.
_CODES = (
    "ar bg cs da de el en es et fi fr he hi hu id it ja ko lt lv nb nl pl pt ro ru sk sl sv th tr uk vi zh"
)
LANGUAGES = tuple(_CODES.split())
FORMS = ("long", "full", "d MMMM y", "d MMM y", "EEEE d MMMM y")
_YEARS = (1900, 2099)
TRAIN, HELD_OUT = 40_000, 2_000


def corpus(seed: int = 7, train: int = TRAIN, held_out: int = HELD_OUT) -> Corpus:
    """`train` pairs, and twice `held_out` that differ from them in their text; the same for the same seed."""
    from babel.dates import format_date

    chance = random.Random(seed)
    first, last = date(_YEARS[0], 1, 1).toordinal(), date(_YEARS[1], 12, 31).toordinal()
    found: dict[str, Pair] = {}
    while len(found) < train + 2 * held_out:
        day = date.fromordinal(chance.randint(first, last))
        language, form = chance.choice(LANGUAGES), chance.choice(FORMS)
        text = " ".join(format_date(day, form, locale=language).split())
        known = found.setdefault(text, Pair(text, day.isoformat(), f"{language} {text}"))
        if known.target != day.isoformat():
            raise ValueError(
                f"dates: {text!r} is both {known.target} and {day.isoformat()}; leave {language} out"
            )
    pairs = list(found.values())
    return Corpus(
        "dates", ("mul", "iso"), pairs[:train], pairs[train : train + held_out], pairs[train + held_out :]
    )


def language_of(pair: Pair) -> str:
    """The language that a date is written in."""
    return pair.key.split(" ", 1)[0]
