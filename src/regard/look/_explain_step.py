"""A step of a worked example, what it was checked against, and the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.look import _explain_text
from regard.look._files import write_all

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

# What float arithmetic may differ by, relative to the largest number of the step (1 where that is smaller).
MODEL = "what the model produced"
_ALLOWED = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Check:
    """A step's numbers beside the same numbers from elsewhere: the largest difference, and what is allowed."""

    against: str
    difference: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.allowed

    def __str__(self) -> str:
        if self.agrees:
            return f"agrees with {self.against} to {self.difference:.1e}"
        return f"DIFFERS from {self.against}: by {self.difference:.1e}, allowed {self.allowed:.0e}"


def compare(numbers: Tensor, other: Tensor, against: str) -> Check:
    """The largest difference of two tensors; infinite where shapes, infinities or NaNs are not the same."""
    ours, theirs = numbers.detach().double(), other.detach().double()
    exact = min(numbers.dtype, other.dtype, key=lambda dtype: torch.finfo(dtype).bits)
    if ours.shape != theirs.shape:
        return Check(against, float("inf"), 0.0)
    finite = ours.isfinite() & theirs.isfinite()
    same = torch.equal(ours[~finite].nan_to_num(nan=0.0), theirs[~finite].nan_to_num(nan=0.0))
    largest = max(1.0, float(theirs[finite].abs().max())) if bool(finite.any()) else 1.0
    difference = float((ours - theirs)[finite].abs().max()) if bool(finite.any()) else 0.0
    return Check(against, difference if same else float("inf"), _ALLOWED[exact] * largest)


@dataclass(frozen=True)
class Step:
    """One step: name, formula, shape and numbers.

    `numbers` is a vector or a matrix, the part that is shown of a tensor of shape `shape`; `rows` and `columns` name
    its axes where they are tokens (a vector with `columns` runs over keys). A step without numbers has a `text`: a
    string, a list of tokens, a vocabulary.
    """

    name: str
    formula: str = ""
    numbers: Tensor | None = None
    shape: tuple[int, ...] | None = None
    rows: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    text: Any = ""
    note: str = ""
    bars: bool = False
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """A worked example: its steps in order. `print(explanation)` is plain text, a terminal shows it in colour.

    `token` is the query that is followed (None: all of them), `head` the head, counted from 0.
    """

    title: str
    steps: tuple[Step, ...]
    token: int | None = None
    head: int = 0

    def __getitem__(self, name: str) -> Step:
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(f"no step {name!r}; there are: {', '.join(step.name for step in self.steps)}")

    @property
    def checks(self) -> tuple[Check, ...]:
        return tuple(check for step in self.steps for check in step.checks)

    @property
    def agrees(self) -> bool:
        """Whether every step that was computed again came out the same."""
        return all(check.agrees for check in self.checks)

    @property
    def largest_difference(self) -> float:
        return max((check.difference for check in self.checks), default=0.0)

    def _lines(self) -> Iterator[_explain_text.Line]:
        kept = self.kept()
        yield self.title, "bold"
        for place, step in enumerate(self.steps, 1):
            yield "", ""
            yield from _explain_text.step_lines(place, step, kept)
        yield "", ""
        yield self.verdict(), "green" if self.agrees else "bold red"

    def verdict(self) -> str:
        """How many checks agree, and the largest difference."""
        wrong = [step.name for step in self.steps if not all(check.agrees for check in step.checks)]
        worst = max(self.checks, key=lambda check: check.difference, default=None)
        if worst is None:
            return "nothing was computed again"
        found = f"largest difference {worst.difference:.1e} (from {worst.against})"
        model = [check.difference for check in self.checks if check.against == MODEL]
        if model and worst.against != MODEL:
            found += f"; from {MODEL}: {max(model):.1e}"
        if wrong:
            return f"{len(wrong)} of {len(self.steps)} steps DIFFER: {', '.join(wrong)}; {found}"
        return f"{len(self.checks)} checks agree: {found}"

    def kept(self) -> Sequence[int] | None:
        """The keys to show: all, or those with the largest weights where there are too many to read."""
        over_keys = [step.numbers for step in self.steps if step.bars and step.numbers is not None]
        if self.token is None or not over_keys or len(over_keys[0]) <= _explain_text.MOST_ROWS:
            return None
        largest = over_keys[0].argsort(descending=True, stable=True)[: _explain_text.MOST_ROWS]
        return sorted({*largest.tolist(), self.token} if self.token < len(over_keys[0]) else largest.tolist())

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line, _ in self._lines())

    def markdown(self) -> str:
        """The same as Markdown."""
        from regard.look import _explain_page

        return _explain_page.markdown(self)

    def html(self) -> str:
        """The same as one HTML page, which loads nothing and runs nothing."""
        from regard.look import _explain_page

        return _explain_page.page(self)

    def save(self, path: str | Path) -> Path:
        """Write it by the suffix of `path`: .html, .md or .txt. Raises ValueError for another, OSError if it cannot."""
        target = Path(path)
        made: dict[str, Callable[[], str]] = {
            ".html": self.html,
            ".md": self.markdown,
            ".txt": lambda: f"{self}\n",
        }
        if target.suffix not in made:
            raise ValueError(
                f"cannot write {target.name}: a worked example goes to {', '.join(made)} (by its suffix)"
            )
        write_all({target: made[target.suffix]().encode()})
        return target

    def _repr_html_(self) -> str:
        from html import escape

        style = "width: 100%; height: 40rem; border: 1px solid #8884"
        return f'<iframe style="{style}" title="a worked example" srcdoc="{escape(self.html())}"></iframe>'

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text  # rich takes longer to import than the rest of this package

        for line, style in self._lines():
            yield Text(line.rstrip(), style=style, overflow="fold")
