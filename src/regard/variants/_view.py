"""What the command ``variants`` prints: the table, one variant in full, or the page of the docs, from one catalogue."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text
from torch import Tensor

from regard.variants import _catalogue as catalogue

_INTRODUCTION = """\
# Variants

The named mechanisms of the literature. Each is a function of `regard.variants` that returns a `Mechanism`, a small
mapping of `score`, `normalize`, `mask` and `bias` to be given to `attention`, `attention_weights`, `observe` or `plan`:

```python
import torch
from regard import attention, variants
from regard.masks import Causal

query = key = value = torch.randn(1, 8, 128, 64)
output = attention(query, key, value, **variants.sliding_window(32))
output = attention(query, key, value, **variants.soft_capped(50.0).but(mask=Causal()))  # with one thing changed
```

`print(variants.sliding_window(32))` says what it is made of; `regard variants` in a terminal prints this table with the
kernels of this machine that take each, `regard variants alibi` one of them in full.

Letters: B batch, H query heads, Hkv key heads, Tq and Tk lengths, D width, Dv width of value, R reach; s a score, w a
weight, q, k, v a query, key and value, j a key's position, p a query's. Where a line says nothing of scores, weights or
pairs, they are the Transformer's: `s = q . k / sqrt(D)`, `w = softmax(s)`, all pairs.

This page is written by `regard variants --markdown`.
"""


def show(name: str | None, *, markdown: bool) -> None:
    """Print the table, with a name that variant in full, with ``markdown`` the page of the docs."""
    from regard.look import terminal

    if name is not None and markdown:
        raise ValueError("regard variants: give a name or --markdown, not both")
    console = terminal.console()
    if markdown:
        print(page(), end="")
    elif name is not None:
        for line in in_full(catalogue.find(name)):
            console.print(Text(line), soft_wrap=True)
    elif console.is_terminal:
        for section in (*catalogue.SECTIONS, catalogue.SEVERAL):
            console.print(_table(section))
        console.print(_FOOT, highlight=False)
    else:
        for line in plain():
            print(line)


_FOOT = (
    "Kernels that take a small call without gradients, the one that runs it first; regard.plan answers for a call of "
    "yours. The definition (reference) can run all of them."
)


def _kernels(entry: catalogue.Entry) -> str:
    return ", ".join(name for name, reason in catalogue.kernels_for(entry).items() if reason is None)


def _rows(section: catalogue.Section) -> Iterator[tuple[str, str, str, str]]:
    for entry in section.entries:
        mechanism = entry.example()
        yield entry.word, mechanism.formula, mechanism.paper, _kernels(entry)


def _table(section: catalogue.Section) -> Table:
    table = Table(title=section.title, title_justify="left", title_style="bold", expand=False)
    for column in ("variant", "formula", "paper", "kernels"):
        table.add_column(column, style="bold" if column == "variant" else "")
    for row in _rows(section):
        table.add_row(*(Text(cell) for cell in row))
    return table


def plain() -> Iterator[str]:
    """The table as lines of text, one a variant, columns two blanks apart: what a pipe gets."""
    sections = [(section.title, list(_rows(section))) for section in (*catalogue.SECTIONS, catalogue.SEVERAL)]
    widths = [max(len(row[column]) for _, rows in sections for row in rows) for column in range(3)]
    for title, rows in sections:
        yield title
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
            yield "  ".join(["", *cells, row[3]]).rstrip()
        yield ""
    yield _FOOT


def in_full(entry: catalogue.Entry) -> Iterator[str]:
    """One variant: what it is, how it is called, what an example is made of, and which kernels take it."""
    mechanism = entry.example()
    yield f"{mechanism.name}  ({mechanism.paper})"
    yield f"  {mechanism.formula}"
    yield ""
    yield f"regard.variants.{entry.word}{_signature(entry)}"
    yield from (f"  {line}" if line else "" for line in _documentation(entry).splitlines())
    yield ""
    for keyword, value in mechanism.items():
        yield f"  {keyword} = {_brief(value)}"
    for kernel, reason in catalogue.kernels_for(entry).items():
        yield f"  {kernel}: {'takes it' if reason is None else reason}"


def _brief(value: object) -> str:
    """What an object is made of; of a tensor the shape, of a function the name."""
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)}"
    if dataclasses.is_dataclass(value):
        pairs = [(part.name, getattr(value, part.name)) for part in dataclasses.fields(value) if part.repr]
        inside = ", ".join(f"{name}={_brief(part)}" for name, part in pairs if part is not None)
        return f"{type(value).__name__}({inside})"
    if callable(value):
        return f"the function {getattr(value, '__name__', type(value).__name__)}"
    return repr(value)


def _signature(entry: catalogue.Entry) -> str:
    return str(inspect.signature(entry.function)).replace("'", "")


def _documentation(entry: catalogue.Entry) -> str:
    return inspect.getdoc(entry.function) or ""


def page() -> str:
    """The page of the docs, in Markdown."""
    parts = [_INTRODUCTION]
    for section in (*catalogue.SECTIONS, catalogue.SEVERAL):
        parts.append(f"\n## {section.title}\n")
        parts += [_described(entry) for entry in section.entries]
    return "".join(parts)


def _described(entry: catalogue.Entry) -> str:
    mechanism = entry.example()
    documentation = _documentation(entry).replace("``", "`")
    return (
        f"\n### {entry.word}\n\n**{mechanism.name}** ({mechanism.paper}): `{mechanism.formula}`\n\n"
        f"```\n{entry.word}{_signature(entry)}\n```\n\n{documentation}\n"
    )
