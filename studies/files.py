"""Where a study leaves what it found: numbers, plots and a page, all or none of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parents[1] / "docs" / "studies"


def arguments(name: str, about: str) -> argparse.Namespace:
    """The command line of a study: ``--out`` and ``--quick``."""
    parser = argparse.ArgumentParser(prog=f"python -m studies.{name}", description=about)
    parser.add_argument("--out", type=Path, default=PAGES, help="the folder for the page, plots and numbers")
    parser.add_argument("--quick", action="store_true", help="a small version, to see that it runs")
    given = parser.parse_args()
    _folder(given.out)
    return given


def run(study: Callable[[], None]) -> None:
    """Run a study's command: a mistake is one message and exit code 2."""
    try:
        study()
    except (OSError, ValueError) as error:
        sys.stderr.write(f"studies: {error}\n")
        sys.exit(2)


def _folder(path: Path) -> None:
    """Refuse a place that a file already takes, or that lies below one."""
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise ValueError(f"--out: expected a folder, or a name for a new one; {part} is a file")


def write(folder: Path, contents: dict[str, str]) -> None:
    """Write all files of a study: first beside their places, then each into its own."""
    _folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".study-") as beside:
        for name, text in contents.items():
            (Path(beside) / name).write_text(text, encoding="utf-8")
        for name in contents:
            os.replace(Path(beside) / name, folder / name)
            print(folder / name)


def numbers(found: Any) -> str:
    """What was measured as JSON, to five digits: what the page and the plots are made of."""
    return json.dumps(_rounded(found), indent=1) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, (list, tuple)) else value


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown, its first column to the left, the others to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def wrapped(page: str) -> str:
    """A page with its paragraphs and list items broken at 120 characters; tables, code and headings stay."""
    parts: list[str] = []
    done: list[str] = []
    code = False
    for line in page.splitlines():
        fence = line.startswith("```")
        if code or fence or not line or line[0] in "|#!":
            parts += [_filled(done), line] if done else [line]
            done = []
            code ^= fence
        elif line.startswith("- ") and done:
            parts.append(_filled(done))
            done = [line]
        else:
            done.append(line.strip())
    return "\n".join(parts + ([_filled(done)] if done else [])) + "\n"


def _filled(lines: list[str]) -> str:
    indent = "  " if lines[0].startswith("- ") else ""
    return textwrap.fill(
        " ".join(lines), 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def marked(page: str, quick: bool) -> str:
    """A page of a quick run, which says so."""
    title, rest = page.split("\n", 1)
    note = "*A quick run, to see that the command works: too small for what the sentences say.*"
    return f"{title}\n\n{note}\n{rest}" if quick else page


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def said(number: float) -> str:
    """Three digits, never as a power of ten."""
    if number == 0 or abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}" if abs(number) >= 0.001 else f"{number:.1e}"
