"""What each token stands for: the characters of the text at its offsets, and never the raw piece of a vocabulary."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from regard.look._record import Token

_UNFINISHED = "\ufffd"
_BLANK_PIECE = "\u2581"  # how vocabularies of whole texts write a blank


def tokens_of(tokenizer: Any, text: str, pair: str | None = None) -> tuple[list[int], list[Token]]:
    """The ids of a text (or of two, as the model joins a pair), and the token that each is.

    `start` and `stop` count characters of the text; those of a second text count on from the end of the first. Several
    tokens that share the same characters (the bytes of one emoji) are numbered: 1/4, 2/4, ... Raises ValueError for a
    tokenizer that does not say which characters its tokens stand for.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} does not say which characters its tokens stand for; a fast tokenizer is "
            "needed (a folder with tokenizer.json)"
        )
    both = (text,) if pair is None else (text, pair)
    encoded = tokenizer(*both, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    ids = [int(number) for number in encoded["input_ids"]]
    shift, whole = {0: 0, 1: len(text), None: 0}, "".join(both)
    spans = [
        (int(start) + shift[part], int(stop) + shift[part])
        for (start, stop), part in zip(encoded["offset_mapping"], encoded.sequence_ids(), strict=True)
    ]
    spans = [_without_prefix(tokenizer, *each, whole) for each in zip(ids, spans, strict=True)]
    flags = [
        bool(flag) and start == stop
        for flag, (start, stop) in zip(encoded["special_tokens_mask"], spans, strict=True)
    ]
    return ids, table(tokenizer, ids, spans, whole, flags)


def _without_prefix(tokenizer: Any, number: int, span: tuple[int, int], text: str) -> tuple[int, int]:
    """The blank that some vocabularies put before a text stands for none of its characters."""
    piece = tokenizer.convert_ids_to_tokens(number)
    made_up = piece and not piece.strip(_BLANK_PIECE) and text[slice(*span)].strip()
    return (span[0], span[0]) if made_up else span


def table(
    tokenizer: Any,
    ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    text: str,
    added: Sequence[bool] = (),
) -> list[Token]:
    """The tokens of `ids`, given which characters of the text each stands for. `added` marks those put in around it."""
    special = _special(tokenizer, ids, spans, text, added or [False] * len(ids))
    parts = _parts(
        [(0, 0) if apart else _core(span, text) for span, apart in zip(spans, special, strict=True)]
    )
    made = []
    for number, span, is_special, (part, count) in zip(ids, spans, special, parts, strict=True):
        if is_special:
            shown = visible(str(tokenizer.convert_ids_to_tokens(number)))
        elif span[0] == span[1]:
            shown = _of_nothing(tokenizer, number)
        else:
            shown = visible(text[slice(*span)]) + (f" {part}/{count}" if count > 1 else "")
        made.append(Token(shown, *span, special=is_special, id=number))
    return made


def _parts(cores: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each token which part it is, and of how many, among neighbours that share characters; 1 of 1 by itself."""
    groups: list[list[int]] = []
    end = 0
    for place, (start, stop) in enumerate(cores):
        if start < stop and start < end:
            groups[-1].append(place)
        else:
            groups.append([place])
        end = max(end, stop) if start < stop else 0
    return [(part, len(group)) for group in groups for part in range(1, len(group) + 1)]


def _special(
    tokenizer: Any, ids: Sequence[int], spans: Sequence[tuple[int, int]], text: str, added: Sequence[bool]
) -> list[bool]:
    """Whether a token is one of the frame: put around the text, or written in it by name, as chats are."""
    frame = set(getattr(tokenizer, "all_special_ids", ()))
    decoder = getattr(tokenizer, "added_tokens_decoder", {})
    frame |= {number for number, token in decoder.items() if getattr(token, "special", False)}
    # These two stand for something of the text: a word that is to be guessed, and one that is not known.
    frame -= {getattr(tokenizer, "mask_token_id", None)}
    unknown = getattr(tokenizer, "unk_token_id", None)
    found = []
    for number, span, is_added in zip(ids, spans, added, strict=True):
        of_text = number == unknown and text[slice(*span)] != tokenizer.convert_ids_to_tokens(number)
        found.append(is_added or (number in frame and not of_text))
    return found


def _core(span: tuple[int, int], text: str) -> tuple[int, int]:
    """A span without the blanks around it: of the bytes of a character, only the first carries the blank before."""
    piece = text[slice(*span)]
    if not piece.strip():
        return span
    start = span[0] + len(piece) - len(piece.lstrip())
    return start, start + len(piece.strip())


def _of_nothing(tokenizer: Any, number: int) -> str:
    """What to show for a token that stands for no character of the text."""
    decoded = str(tokenizer.decode([number])).replace(_UNFINISHED, "")
    return visible(decoded) if decoded.strip() else "␣"


def tokens_of_ids(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[Token]]:
    """The text that generated `ids` spell, and the token that each is: offsets count characters of that text.

    Bytes that make a character together all stand for that character. Bytes that make none at all (a text that was cut
    off) stand for a replacement character.
    """
    text, spans, waiting = "", [], 0
    numbers = [int(number) for number in ids]
    for place, piece in enumerate(_pieces(tokenizer, numbers)):
        if piece is None:
            waiting += 1
            continue
        spans += [(len(text), len(text) + len(piece))] * (waiting + 1)
        text, waiting = text + piece, 0
        assert len(spans) == place + 1
    return text, table(tokenizer, numbers, spans, text)


def _pieces(tokenizer: Any, ids: list[int]) -> Iterator[str | None]:
    """For each id the characters that it completes; None where a character goes on in the next id."""
    start = done = 0  # decoding needs what came before: some tokenizers drop the blank of a first word
    whole = since = 0  # how many characters are whole by now, and at which id that last grew
    for place in range(len(ids)):
        before = tokenizer.decode(ids[start:done], clean_up_tokenization_spaces=False)
        until = tokenizer.decode(ids[start : place + 1], clean_up_tokenization_spaces=False)
        if len(until.rstrip(_UNFINISHED)) > whole:
            whole, since = len(until.rstrip(_UNFINISHED)), place
        # Four bytes make a character at most: what is not whole by then never will be.
        if until.endswith(_UNFINISHED) and place + 1 - max(since, done) < 4 and place + 1 < len(ids):
            yield None
            continue
        yield until[len(before) :]
        start, done = done, place + 1
        whole, since = 0, place + 1


_JOINERS = "\u200c\u200d\u200e\u200f\u061c"
_MARKS = {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": "␣"}


def visible(text: str) -> str:
    """The text with whatever cannot be seen made visible, so that it can neither hide nor steer what shows it.

    Blanks around a word are dropped; blanks alone, controls, and what turns the direction of text become signs. The
    joiners and direction marks that scripts and emoji are written with stay, but where there is nothing else.
    """
    kept = text.strip(" ") or text
    if kept.isspace():
        return "".join(_MARKS.get(character, "␣") for character in kept)
    if all(character in _JOINERS for character in kept):
        return "".join(_sign(character) for character in kept)
    return "".join(character if _harmless(character) else _sign(character) for character in kept)


def _harmless(character: str) -> bool:
    return character in _JOINERS or unicodedata.category(character) not in (
        "Cc",
        "Cf",
        "Co",
        "Cs",
        "Zl",
        "Zp",
    )


def _sign(character: str) -> str:
    return _MARKS.get(character) or f"<{ord(character):04X}>"
