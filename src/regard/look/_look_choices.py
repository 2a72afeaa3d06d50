"""Which layers, heads and tokens are meant, in words: `0,2-4`, and for tokens also the text of one."""

from __future__ import annotations

import re

from regard.look._record import Token

_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")


def numbers(option: str, given: str | None) -> tuple[int, ...] | None:
    """`0,2-4` as (0, 2, 3, 4); None for nothing. ValueError for anything else."""
    if given is None:
        return None
    found: list[int] = []
    for part in given.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{option} {given!r}: expected numbers counted from 0, such as 0,2-4")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{option} {given!r}: {part.strip()} runs backwards; say {last}-{first}")
        found += range(first, last + 1)
    return tuple(dict.fromkeys(found))


def within(option: str, chosen: tuple[int, ...] | None, count: int, what: str) -> None:
    """Refuse a number that there is none of."""
    beyond = [number for number in chosen or () if number >= count]
    if beyond:
        there = f"is 1 {what}" if count == 1 else f"are {count} {what}s"
        raise ValueError(f"{option} {beyond[0]}: there {there}, counted from 0; give 0 to {count - 1}")


def places(given: str | None, tokens: tuple[Token, ...], length: int) -> tuple[int, ...]:
    """The tokens that `--tokens` asks for: numbers and ranges, or the text of one, wherever it stands."""
    if given is None:
        return ()
    named = tuple(place for place, token in enumerate(tokens) if token.text == given)
    if named:
        return named
    if not re.fullmatch(r"[\d,\s-]+", given):
        raise ValueError(
            f"--tokens {given!r}: there is no such token; give its text, or numbers such as 0,2-4"
        )
    chosen = numbers("--tokens", given) or ()
    within("--tokens", chosen, length, "token")
    return chosen
