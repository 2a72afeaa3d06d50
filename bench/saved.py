"""The last results, kept in docs/bench.json, and the README's table made of them."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import report
from .case import Case, Limit
from .cases import CASES
from .linear import LENGTHS
from .measure import ROOT
from .rows import ROWS, Row
from .runner import Outcome

RESULTS = ROOT / "docs" / "bench.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- measured: scripts/bench --table writes what follows -->", "<!-- /measured -->"
# More cases than this are shown as a range.
MOST_NUMBERS = 6
# What must be equal for two runs to stand in one table.
SAME = ("processor", "cores", "torch", "capability", "kernels")

MEMORY_NOTE = (
    "A number in bold is below its floor, which counts as met within 5 %; refused: the answer was farther from float64"
    " than it may be, and a wrong answer has no time. Memory: MiB of the process above inputs and"
    f" results, one head, n = {LENGTHS[0]} / {LENGTHS[1]}"
)

Saved = dict[str, Any]


class NotSaved(ValueError):
    """Results that do not go with those that are there, or a page without a place for the table."""


def read(path: Path | None = None) -> Saved:
    """What was saved, or nothing."""
    path = path or RESULTS
    if not path.is_file():
        return {"machine": {}, "cases": {}, "memory": {}}
    loaded: Saved = json.loads(path.read_text("utf-8"))
    return loaded


def save(
    outcomes: Sequence[Outcome], memory: dict[str, list[float]] | None = None, path: Path | None = None
) -> None:
    """Put the outcomes in the place of older ones of the same cases. Raises NotSaved for another machine's."""
    path = path or RESULTS
    saved, machine = read(path), report.machine()
    for name in SAME:
        before = saved["machine"].get(name, machine[name])
        if before != machine[name]:
            raise NotSaved(
                f"{path} was measured with {name} {before}, this is {machine[name]}: remove it to start afresh"
            )
    commit = _commit()
    for outcome in outcomes:
        saved["cases"][outcome.case.name] = {**outcome.as_json(), "commit": commit}
    saved["memory"].update(memory or {})
    saved["machine"] = machine
    report.write_whole(path, json.dumps(saved, indent=1) + "\n")


def _commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def write_table(results: Path | None = None, readme: Path | None = None) -> None:
    """Replace what stands between the markers of the README. Raises NotSaved where it has no markers."""
    readme = readme or README
    text = readme.read_text("utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise NotSaved(f"{readme}: expected one line {BEGIN} and one {END}, got none or several")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    report.write_whole(readme, f"{before}{BEGIN}\n{table(read(results))}{END}{after}")


def table(saved: Saved) -> str:
    """The table in Markdown: a line a row; a number in bold is below its floor."""
    machine = saved["machine"]
    if not machine:
        raise NotSaved(f"{RESULTS}: expected measured results, got none. Run scripts/bench --save first.")
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['kernels']} kernels, torch {machine['torch']}"
        f" ({machine['capability']}); `scripts/bench --save`, then `scripts/bench --table`.",
        "",
        "| case | beside | floor (goal) | 1 thread | 2 threads | memory |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_line(row, saved) for row in ROWS]
    return "\n".join([*lines, "", f"Ratios of median times, above 1 ours is faster. {MEMORY_NOTE}."]) + "\n"


def _line(row: Row, saved: Saved) -> str:
    cases = [case for case in CASES if isinstance(case, Case) and case.row == row.name]
    found = [saved["cases"].get(case.name) for case in cases]
    cells = [row.text, row.against, _floors(row, cases)]
    cells += [_values(row, cases, found, under) for under in ("1 thread", "2 threads")]
    return "| " + " | ".join([*cells, _memory(saved["memory"].get(row.name))]) + " |"


def _floors(row: Row, cases: Sequence[Case]) -> str:
    limits = [case.limits[0] for case in cases]
    bounds, goals = ([f"{getattr(limit, name):g}" for limit in limits] for name in ("bound", "goal"))
    if row.mean is not None:
        assert row.mean.goal is not None
        return f"{bounds[0]}, mean {row.mean.bound:g} ({goals[0]}, mean {row.mean.goal:g})"
    return f"{_once(bounds)} ({_once(goals)})"


def _once(words: list[str]) -> str:
    return words[0] if len(set(words)) == 1 else " / ".join(words)


def _values(row: Row, cases: Sequence[Case], found: Sequence[Saved | None], under: str) -> str:
    """What was measured; a range where it is many numbers."""
    values: list[tuple[Limit, float | None, bool]] = []
    for case, one in zip(cases, found, strict=True):
        value, noisy = _value(one, under)
        values.append((case.limits[0], value, noisy))
    known = [(limit, value) for limit, value, _ in values if value is not None]
    refused = [one is not None and bool(one["refused"]) for one in found]
    mark = " (others were at work)" if any(noisy for *_, noisy in values) else ""
    if not known and not any(refused):
        return "-"
    if len(cases) <= MOST_NUMBERS:
        words = [
            "refused" if no else "-" if value is None else _number(limit, value)
            for (limit, value, _), no in zip(values, refused, strict=True)
        ]
        return " / ".join(words) + mark
    if any(refused):
        mark = f", {sum(refused)} refused{mark}"
    if not known:
        return mark.removeprefix(", ")
    numbers = [value for _, value in known]
    met = sum(limit.met(value) for limit, value in known)
    middle = ""
    if row.mean is not None:
        middle = f", mean {_number(row.mean, statistics.geometric_mean(numbers))}"
    return f"{min(numbers):.2f} to {max(numbers):.2f}{middle}; met at {met} of {len(known)}{mark}"


def _value(one: Saved | None, under: str) -> tuple[float | None, bool]:
    """The measured number of a case's limit at a number of threads, and whether the machine was busy."""
    if one is None or one["refused"]:
        return None, False
    values = [limit["value"] for limit in one["limits"] if limit["under"] == under]
    threads = int(under.split()[0])
    noisy = any(timing["noisy"] for timing in one["timings"] if timing["threads"] == threads)
    return (values[0] if values else None), noisy and threads > 1


def _number(limit: Limit, value: float) -> str:
    text = f"{value:.2f}" if value < 10 else f"{value:.0f}"
    return text if limit.met(value) else f"**{text}**"


def _memory(peaks: list[float] | None) -> str:
    return "-" if peaks is None else " / ".join(f"{peak / 2**20:.0f}" for peak in peaks)
