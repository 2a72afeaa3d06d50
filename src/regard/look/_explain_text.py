"""How a worked example is written: one plain text, 79 columns wide, that a terminal shows in colour.

Numbers have four digits after the point. What is too much to read is cut, and the text says how much was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from torch import Tensor

if TYPE_CHECKING:
    from regard.look._explain_step import Step

WIDTH = 79
MOST_ROWS = 24
_A_LINE = 6
_MOST_IN_ROW = 18
_MOST_LINES = 12
_MOST_IN_VECTOR = 64
_LABEL = 18  # a token's own line
_NAME = 10  # a token before its numbers
_BAR = 24
_INDENT = "     "

Line = tuple[str, str]  # the text, and the style it has where there is colour


def number(value: float) -> str:
    """Four digits after the point; -inf is a pair that may not meet."""
    if value == -math.inf:
        return "blocked"
    if not math.isfinite(value) or abs(value) >= 1e6:
        return f"{value:.4g}"
    text = f"{value:.4f}"
    return text.lstrip("-") if float(text) == 0 else text


def cut(text: str, width: int) -> str:
    """The text filled or cut to a width in terminal cells; what could steer a terminal is made visible."""
    text = shown(text)
    if cell_len(text) > width:
        kept = ""
        for character in text:
            if cell_len(kept + character) > width - 1:
                break
            kept += character
        text = kept + "…"
    return text + " " * (width - cell_len(text))


def shown(text: str) -> str:
    """The text with what could hide or steer made visible; nothing for nothing."""
    from regard.look._tokens import visible  # brings more along than `import regard` should

    return visible(text) if text else text


def brief(token: str) -> str:
    """A token's text, cut where it is long."""
    return cut(token, _LABEL).rstrip()


def _right(text: str, width: int) -> str:
    text = cut(text, width).rstrip()
    return " " * (width + 1 - cell_len(text)) + text


def step_lines(place: int, step: Step, kept: Sequence[int] | None) -> Iterator[Line]:
    """A step: its name and shape, its formula, its numbers, its checks."""
    shape = "" if step.shape is None else str(tuple(step.shape)).replace(",)", ")")
    head = f"{place:3}  {step.name}"
    yield head + shape.rjust(max(1, WIDTH - cell_len(head))), "bold"
    if step.formula:
        yield _INDENT + step.formula, "cyan"
    for line in body(step, kept):
        yield _INDENT + line, ""
    for line in words(step.note) if step.note else ():
        yield _INDENT + line, "dim"
    for check in step.checks:
        yield _INDENT + str(check), "green" if check.agrees else "bold red"


def body(step: Step, kept: Sequence[int] | None) -> Iterator[str]:
    """The numbers or words of a step, line by line."""
    if step.numbers is None:
        yield from words(step.text)
    elif step.numbers.ndim == 1 and step.columns:
        yield from _over_keys(step, kept)
    elif step.numbers.ndim == 1:
        yield from _numbers(step.numbers, _MOST_IN_VECTOR)
    elif step.columns and len(step.columns) <= _A_LINE:
        yield from _grid(step)
    else:
        yield from _rows(step, kept)


def words(value: Any) -> Iterator[str]:
    """Text, tokens or a vocabulary, in lines that fit."""
    if isinstance(value, Mapping):
        value = [f"{name}: {entry}" for name, entry in value.items()]
    words, gap = (value.split(), " ") if isinstance(value, str) else ([str(part) for part in value], "   ")
    lines = [""]
    for word in [piece for whole in words for piece in _pieces(whole)]:
        line = f"{lines[-1]}{gap}{word}" if lines[-1] else word
        if lines[-1] and cell_len(line) > WIDTH - len(_INDENT):
            lines.append(word)
        else:
            lines[-1] = line
    yield from lines[:_MOST_LINES]
    if len(lines) > _MOST_LINES:
        yield f"… {len(lines) - _MOST_LINES} more lines"


def _pieces(word: str) -> list[str]:
    """A word, made visible, and in pieces where it is longer than a line."""
    word = shown(word)
    if cell_len(word) <= WIDTH - len(_INDENT):
        return [word]
    size = (WIDTH - len(_INDENT)) // 2
    return [word[start : start + size] for start in range(0, len(word), size)]


def _over_keys(step: Step, kept: Sequence[int] | None) -> Iterator[str]:
    assert step.numbers is not None and step.columns is not None
    values = [float(value) for value in step.numbers.double()]
    shown = range(len(values)) if kept is None else kept
    for place in shown:
        bar = "█" * round(_BAR * values[place]) if step.bars and 0 < values[place] <= 1 else ""
        yield f"{place:3} {cut(step.columns[place], _LABEL)} {number(values[place]):>10}  {bar}".rstrip()
    rest = [values[place] for place in range(len(values)) if place not in set(shown)]
    if rest:
        total = f", together {number(sum(rest))}" if step.bars else ""
        yield f"    … {len(rest)} keys with smaller weights are not shown{total}"


def _numbers(values: Tensor, most: int) -> Iterator[str]:
    texts = [f"{number(float(value)):>10}" for value in values.double()[:most]]
    for start in range(0, len(texts), _A_LINE):
        yield "".join(texts[start : start + _A_LINE])
    if len(values) > most:
        yield f"  … {len(values) - most} more numbers"


def _grid(step: Step) -> Iterator[str]:
    assert step.numbers is not None and step.columns is not None
    labels = step.rows or [""] * len(step.numbers)
    yield " " * (_NAME + 4) + "".join(_right(column, 9) for column in step.columns)
    for place, row in enumerate(step.numbers.double()[:MOST_ROWS]):
        numbers = "".join(f"{number(float(value)):>10}" for value in row)
        yield f"{place:3} {cut(labels[place], _NAME)}{numbers}"
    if len(step.numbers) > MOST_ROWS:
        yield f"    … {len(step.numbers) - MOST_ROWS} more rows"


def _rows(step: Step, kept: Sequence[int] | None) -> Iterator[str]:
    assert step.numbers is not None
    count, width = step.numbers.shape
    shown = range(count) if kept is None or len(kept) > count else [place for place in kept if place < count]
    if count > MOST_ROWS and len(shown) == count:
        shown = range(MOST_ROWS)
    most = width if width <= _MOST_IN_ROW else _A_LINE
    for place in shown:
        label = f"{place:3} {cut(step.rows[place] if step.rows else '', _NAME)}"
        lines = list(_numbers(step.numbers[place][:most], most))
        for at, line in enumerate(lines):
            yield (label if at == 0 else " " * cell_len(label)) + line
    if most < width:
        yield f"    … {width - most} more numbers in each row"
    if len(shown) < count:
        yield f"    … {count - len(shown)} more rows"
