"""Which tokens make a word, a sentence, a line; which ones separate."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.look._record import Token
from regard.look._tokens import visible

UNITS = ("word", "sentence", "line")

# Chinese and Japanese are written without blanks: there, each character stands for itself.
_IDEOGRAPH = r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
_LETTER = r"[^\W\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
# A word keeps its marks and the joiners and apostrophes inside it; anything else that can be seen stands alone.
_MARK = r"[\u0300-\u036f\u0483-\u0489\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0900-\u0dff\u0e00-\u0e7f\u200c\u200d]"
_WORD = re.compile(rf"{_IDEOGRAPH}|(?:{_LETTER}|{_MARK})+(?:['’](?:{_LETTER}|{_MARK})+)*|\S")
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s)|[。！？؟।]+[」』”’)]*|\n\s*\n")


@dataclass(frozen=True)
class Unit:
    """Some neighbouring tokens taken as one: their places, and the token that stands for them."""

    token: Token
    members: tuple[int, ...]


def units(tokens: Sequence[Token], text: str, unit: str) -> list[Unit]:
    """The words, sentences or lines of a text, each with the tokens whose characters lie in it.

    A token that reaches over a border belongs where its first visible character is. Special tokens, and tokens that
    stand for no character, stand alone. Blanks between units go with what came before. Raises ValueError for another
    unit.
    """
    if unit not in UNITS:
        raise ValueError(f"there is no unit {unit!r}; tokens merge into: {', '.join(UNITS)}")
    starts = [start for start, _ in _spans(text, unit)]
    found: list[Unit] = []
    places: list[int] = []
    for place, token in enumerate(tokens):
        at = _place(token, text, starts)
        if found and at >= 0 and at == places[-1]:
            found[-1] = _with(found[-1], token, place, text)
        else:
            found.append(Unit(token, (place,)))
            places.append(at)
    return found


def _place(token: Token, text: str, starts: Sequence[int]) -> int:
    """The number of the unit that a token lies in; -1 where it stands alone."""
    if token.special or token.start == token.stop:
        return -1
    piece = text[token.start : token.stop]
    first = token.start + (len(piece) - len(piece.lstrip()) if piece.strip() else 0)
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if starts[middle] <= first else (low, middle)
    return max(0, low - 1)


def _with(unit: Unit, token: Token, place: int, text: str) -> Unit:
    start, stop = min(unit.token.start, token.start), max(unit.token.stop, token.stop)
    return Unit(Token(visible(text[start:stop]), start, stop), (*unit.members, place))


def _spans(text: str, unit: str) -> Iterator[tuple[int, int]]:
    if unit == "word":
        yield from (match.span() for match in _WORD.finditer(text))
        return
    ends = re.finditer(r"\n", text) if unit == "line" else _SENTENCE_END.finditer(text)
    start = 0
    for match in ends:
        stop = match.end()
        while stop < len(text) and text[stop].isspace() and (unit != "line"):
            stop += 1
        yield start, stop
        start = stop
    if start < len(text):
        yield start, len(text)


def separators(tokens: Sequence[Token]) -> Tensor:
    """(T,) bool: the tokens that separate, of the frame (but the first token) or of punctuation and line ends alone."""
    found = [place > 0 and (token.special or _punctuation(token)) for place, token in enumerate(tokens)]
    return torch.tensor(found, dtype=torch.bool)


def _punctuation(token: Token) -> bool:
    text = token.text
    return bool(text) and all(
        character in "⏎␍" or unicodedata.category(character) in ("Po", "Pd") for character in text
    )
