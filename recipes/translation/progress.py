"""How far a training is: a bar with loss, tokens a second and the time left; plain lines where nobody watches."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from typing_extensions import Self

_EVERY = 30.0


class Bar:
    """``with Bar(shown) as bar: bar.update(...)``; ``shown`` is False in all processes but the first."""

    def __init__(self, shown: bool) -> None:
        self._console = Console(file=sys.stderr)
        self._shown = shown
        self._live = shown and self._console.is_terminal
        self._said = time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._progress = Progress(*columns, console=self._console, disable=not self._live)
        self._task = self._progress.add_task("training", total=1.0, speed="", left="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, what: str, done: float, speed: float, left: float | None) -> None:
        """done: share of the whole, 0 to 1; speed in target tokens a second; left in seconds, None where unknown."""
        fast = f"{speed:,.0f} tokens/s"
        remains = "" if left is None else f"{clock(left)} left"
        if self._live:
            self._progress.update(self._task, description=what, completed=done, speed=fast, left=remains)
        elif self._shown and time.monotonic() - self._said > _EVERY:
            self._said = time.monotonic()
            self.say(f"{what}  {done:4.0%}  {fast}  {remains}")

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._shown:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


def clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    return (
        f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
        if whole >= 3600
        else f"{whole // 60}:{whole % 60:02}"
    )
