"""A worked example as Markdown and as one self-contained HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.look import _explain_text as plain

if TYPE_CHECKING:
    from regard.look._explain_step import Explanation, Step

_MOST_COLUMNS, _CUT_COLUMNS = 18, 8  # of a row that is shown whole; of a longer one
_MOST_WORDS = 200

_STYLE = """
:root { color-scheme: light dark; --line: #d5d9e0; --bar: #2c6fbb; --good: #1a6b3c; --bad: #b3261e; --soft: #5b6472; }
@media (prefers-color-scheme: dark) {
  :root { --line: #39414d; --bar: #6aa7e8; --good: #6fcf97; --bad: #ff8a80; --soft: #a3adba; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .25rem; }
h2 span { color: var(--soft); font-weight: normal; float: right; }
code, td.number { font-family: ui-monospace, monospace; font-size: .85rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .1rem .6rem; border-bottom: 1px solid var(--line); text-align: start; }
td.number { text-align: end; font-variant-numeric: tabular-nums; }
td.bar { width: 16rem; } td.bar i { display: block; height: .7rem; background: var(--bar); forced-color-adjust: none; }
.words span { display: inline-block; border: 1px solid var(--line); border-radius: .25rem; padding: 0 .4rem; }
td { white-space: nowrap; } p { margin: .25rem 0; } .note { color: var(--soft); }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: bold; }
"""


def page(explanation: Explanation) -> str:
    """One HTML file: no scripts, nothing loaded, light and dark."""
    kept = explanation.kept()
    steps = "".join(_section(place, step, kept) for place, step in enumerate(explanation.steps, 1))
    verdict = f'<p class="{"good" if explanation.agrees else "bad"}">{escape(explanation.verdict())}</p>'
    title = _shown(explanation.title)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n"
        f"<body><main><h1>{title}</h1>\n{steps}<h2>Checks</h2>{verdict}</main></body></html>\n"
    )


def _section(place: int, step: Step, kept: Sequence[int] | None) -> str:
    shape = "" if step.shape is None else f" <span>({', '.join(map(str, step.shape))})</span>"
    lines = [f"<section><h2>{place}. {_shown(step.name)}{shape}</h2>"]
    if step.formula:
        lines.append(f"<p><code>{_shown(step.formula)}</code></p>")
    lines.append(_numbers(step, kept))
    if step.note:
        lines.append(f'<p class="note">{_shown(step.note)}</p>')
    lines += [
        f'<p class="{"good" if check.agrees else "bad"}">{_shown(str(check))}</p>' for check in step.checks
    ]
    return "\n".join(lines) + "</section>\n"


def _shown(text: str) -> str:
    return escape(plain.shown(text))


def _token(text: str) -> str:
    return f'<bdi dir="auto">{_shown(text)}</bdi>'


def _numbers(step: Step, kept: Sequence[int] | None) -> str:
    if step.numbers is None:
        return _words(step.text)
    if step.numbers.ndim == 1 and step.columns:
        return _table(_over_keys(step, step.numbers, kept))
    if step.numbers.ndim == 1:
        cells = [f"<td class=number>{plain.number(value)}</td>" for value in step.numbers.double().tolist()]
        rows = ["".join(cells[start : start + 8]) for start in range(0, len(cells), 8)]
        return _table(f"<tr>{row}</tr>" for row in rows)
    return _table(_matrix(step, step.numbers, kept))


def _words(value: Any) -> str:
    """Text as a paragraph, tokens side by side, a vocabulary as what it maps to what."""
    if isinstance(value, str):
        return f"<p>{_token(value)}</p>"
    entries = (
        [f"{name}: {entry}" for name, entry in value.items()] if isinstance(value, Mapping) else list(value)
    )
    shown = "".join(f"<span>{_token(str(entry))}</span> " for entry in entries[:_MOST_WORDS])
    more = f"… {len(entries) - _MOST_WORDS} more" if len(entries) > _MOST_WORDS else ""
    return f'<p class="words">{shown}{more}</p>'


def _table(rows: Iterator[str]) -> str:
    return f'<div class="scroll" tabindex="0" role="group"><table>{"".join(rows)}</table></div>'


def _over_keys(step: Step, numbers: Tensor, kept: Sequence[int] | None) -> Iterator[str]:
    assert step.columns is not None
    values = numbers.double().tolist()
    yield "<tr><th>key<th>token<th>number" + ("<th></tr>" if step.bars else "</tr>")
    places = range(len(values)) if kept is None else kept
    for place in places:
        width = min(1.0, max(0.0, values[place])) if step.bars else 0.0
        bar = f'<td class=bar><i style="width:{100 * width:.1f}%"></i></td>' if step.bars else ""
        number = f"<td class=number>{plain.number(values[place])}</td>"
        yield f"<tr><td>{place}</td><td>{_token(step.columns[place])}</td>{number}{bar}</tr>"
    if len(places) < len(values):
        yield f"<tr><td colspan=4>… {len(values) - len(places)} keys with smaller weights are not shown</td></tr>"


def _matrix(step: Step, numbers: Tensor, kept: Sequence[int] | None) -> Iterator[str]:
    count, width = numbers.shape
    places = _rows(count, kept)
    most = width if width <= _MOST_COLUMNS else _CUT_COLUMNS
    if step.columns:
        yield "<tr><th><th>" + "".join(f"<th>{_token(name)}" for name in step.columns[:most]) + "</tr>"
    for place in places:
        label = _token(step.rows[place]) if step.rows else ""
        cells = "".join(
            f"<td class=number>{plain.number(value)}</td>"
            for value in numbers[place, :most].double().tolist()
        )
        yield f"<tr><td>{place}</td><td>{label}</td>{cells}</tr>"
    left = [f"{width - most} more numbers in each row"] if most < width else []
    left += [f"{count - len(places)} more rows"] if len(places) < count else []
    if left:
        yield f"<tr><td colspan={most + 2}>… {'; '.join(left)}</td></tr>"


def _rows(count: int, kept: Sequence[int] | None) -> Sequence[int]:
    shown = range(count) if kept is None else [place for place in kept if place < count]
    return range(plain.MOST_ROWS) if count > plain.MOST_ROWS and len(shown) == count else shown


# ------------------------------------------------------------------ Markdown


def markdown(explanation: Explanation) -> str:
    """A heading and a table or block a step; what tokens hold is shown as it is."""
    kept = explanation.kept()
    lines = [f"# {_marked(explanation.title)}", ""]
    for place, step in enumerate(explanation.steps, 1):
        shape = "" if step.shape is None else f" ({', '.join(map(str, step.shape))})"
        lines += [f"## {place}. {_marked(step.name)}{shape}", ""]
        if step.formula:
            lines += [_code(step.formula), ""]
        lines += [*_block(step, kept), ""]
        if step.note:
            lines += [_marked(step.note), ""]
        lines += [part for check in step.checks for part in (f"*{_marked(str(check))}*", "")]
    return "\n".join([*lines, f"**{_marked(explanation.verdict())}**", ""])


def _block(step: Step, kept: Sequence[int] | None) -> Iterator[str]:
    if step.numbers is not None and step.numbers.ndim == 1 and step.columns:
        values = step.numbers.double().tolist()
        places = range(len(values)) if kept is None else kept
        yield "| key | token | number |"
        yield "|---:|---|---:|"
        for place in places:
            yield f"| {place} | {_marked(step.columns[place])} | {plain.number(values[place])} |"
        if len(places) < len(values):
            yield ""
            yield f"… {len(values) - len(places)} keys with smaller weights are not shown"
        return
    body = list(plain.body(step, kept))
    fence = "`" * max(3, 1 + max((len(run) for line in body for run in re.findall("`+", line)), default=0))
    yield f"{fence}text"
    yield from body
    yield fence


def _marked(text: str) -> str:
    """Text in which Markdown sees nothing of its own."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", plain.shown(text))


def _code(text: str) -> str:
    text = plain.shown(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"
