"""The outcomes for a person (a table) and for a program (JSON)."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.kernels import _library

from .case import AnyCase, Case
from .linear import LENGTHS
from .runner import Judged, Outcome


def seconds(value: float) -> str:
    """A time with three digits and its unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def mib(value: float) -> str:
    return f"{value / 1024:.3g} GiB" if value >= 1024 else f"{value:.0f} MiB"


def listing(cases: Sequence[AnyCase]) -> Table:
    """What there is, unmeasured."""
    table = Table(title="cases", title_justify="left")
    table.add_column("case", no_wrap=True)
    for column in ("shape", "against", "limit", "question"):
        table.add_column(column, overflow="fold")
    for case in cases:
        limits = "\n".join(str(limit) for limit in case.limits) or "-"
        at, against = (
            (str(case.at), case.other_name) if isinstance(case, Case) else ("-", f"import {case.base}")
        )
        table.add_row(case.name, at, against, limits, case.question)
    return table


def table(outcomes: Sequence[Outcome]) -> Table:
    """One block a case: a line for each thread count, the peaks, the limits met or missed."""
    made = Table(
        title="regard beside torch",
        title_justify="left",
        caption=LEGEND,
        caption_justify="left",
        show_lines=True,
    )
    made.add_column("case", no_wrap=True)
    made.add_column("against", overflow="fold")
    for column in ("threads", "ours", "other", "ratio", "peak ours", "peak other"):
        made.add_column(column, justify="right")
    made.add_column("limit", overflow="fold")
    for outcome in outcomes:
        made.add_row(*_row(outcome))
    return made


def peaks(found: dict[str, list[float]]) -> Table:
    """The memory of our side of every row, at two lengths."""
    made = Table(title="peak memory above inputs and results, one head", title_justify="left")
    made.add_column("row")
    for n in LENGTHS:
        made.add_column(f"n = {n}", justify="right")
    for name, values in found.items():
        made.add_row(name, *(mib(value / 2**20) for value in values))
    return made


LEGEND = (
    "ratio: median time of the other / of ours, above 1 ours is faster. 1 thread: the thread's own clock;\n"
    "more: wall clock. Peaks: process memory above inputs, outputs and gradients, with the most\n"
    "threads, in a fresh process a side (~ computed, <= an upper bound)."
)


def line(outcome: Outcome) -> str:
    """A case in one line, for those who wait."""
    if outcome.refused:
        return f"refused: {outcome.refused}"
    parts = [f"{t.threads} thread(s) {t.ratio:.2f}" for t in outcome.timings]
    parts += [f"peak {side} {_peak(outcome, side)}" for side in outcome.peaks]
    parts += [seconds(outcome.seconds)] if outcome.seconds is not None else []
    missed = sum(not one.met for one in outcome.judged)
    return ", ".join(parts) + (f"; {missed} limit(s) MISSED" if missed else "")


def _row(outcome: Outcome) -> list[Text | str]:
    case = outcome.case
    if not isinstance(case, Case):
        took = seconds(outcome.seconds) if outcome.seconds is not None else ""
        return [case.name, f"import {case.base}", "", took, "", "", "", "", _limits(outcome.judged)]
    name = f"{case.name}\n{case.at}" + ("\nforward + backward" if case.backward else "")
    if outcome.refused:
        return [
            name,
            case.other_name,
            "",
            "",
            "",
            "",
            "",
            "",
            Text(f"refused: {outcome.refused}", style="red"),
        ]
    return [
        name,
        case.other_name,
        "\n".join(str(t.threads) for t in outcome.timings),
        "\n".join(seconds(t.ours) for t in outcome.timings),
        "\n".join(seconds(t.other) for t in outcome.timings),
        "\n".join(f"{t.ratio:.2f}" for t in outcome.timings),
        _peak(outcome, "ours"),
        _peak(outcome, "other"),
        _limits(outcome.judged),
    ]


def _peak(outcome: Outcome, side: str) -> str:
    peak = outcome.peaks.get(side)
    if peak is None:
        return ""
    mark = "~" if side == "other" and outcome.other_computed else "" if peak.exact else "<="
    return mark + mib(peak.mib)


def _limits(judged: Sequence[Judged]) -> Text:
    text = Text()
    for one in judged:
        units = {"memory": mib, "seconds": seconds, "extra": lambda v: f"{v:.2f} calls"}
        value = units.get(one.limit.measure, lambda v: f"{v:.2f}x")(one.value)
        word = "met" if one.met else "MISSED"
        text.append("\n" if text else "")
        text.append(f"{word}: ", style="green" if one.met else "bold red")
        text.append(f"{value} ({one.under}), {one.limit}")
    return text


def load_note(outcomes: Sequence[Outcome]) -> str:
    """A warning where other work ran beside the measurements: wall clocks then measure that work too."""
    noisy = [outcome.case.name for outcome in outcomes if any(t.noisy for t in outcome.timings)]
    if not noisy:
        return ""
    return f"others were at work on this machine, and times at more than one thread mean little: {', '.join(noisy)}"


def machine() -> dict[str, object]:
    """What the numbers were taken on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": _kernels(),
    }


def _processor() -> str:
    text = Path("/proc/cpuinfo").read_text("utf-8")
    return next(
        (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), ""
    )


def _kernels() -> str:
    library = _library.library()
    return "plain torch" if library is None else library.variant


def write_json(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write everything, whole or not at all."""
    data = {"machine": machine(), "cases": [outcome.as_json() for outcome in outcomes]}
    write_whole(path, json.dumps(data, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        os.fchmod(descriptor, 0o644)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def console() -> Console:
    """Wide enough for the table where the output is no terminal."""
    found = Console()
    return found if found.is_terminal else Console(width=150)
