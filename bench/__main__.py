"""`python -m bench`: run the cases, print the table, write the JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console

from . import report
from .case import AnyCase
from .cases import CASES
from .measure import ChildFailed
from .runner import Outcome, run


def _threads(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"expected thread counts such as 1,2; got {text!r}")
    return counts


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of rounds, at least 1; got {text!r}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    made.add_argument(
        "--only", metavar="GLOB", action="append", help="cases whose name matches (may be repeated)"
    )
    made.add_argument("--list", action="store_true", help="say what there is and measure nothing")
    made.add_argument(
        "--threads", type=_threads, default=(1, 2), metavar="1,2", help="thread counts (default 1,2)"
    )
    made.add_argument("--rounds", type=_rounds, default=9, help="interleaved rounds at most (default 9)")
    made.add_argument(
        "--no-memory", action="store_true", help="skip the peaks; limits on memory are not judged"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured to FILE")
    made.add_argument(
        "--check", action="store_true", help="exit with 1 when a limit is missed or a case refused"
    )
    return made


def chosen(globs: Sequence[str] | None) -> list[AnyCase]:
    """The cases that match any of the globs, all of them without one."""
    if not globs:
        return list(CASES)
    return [case for case in CASES if any(fnmatchcase(case.name, glob) for glob in globs)]


def _measure(cases: Sequence[AnyCase], options: argparse.Namespace, errors: Console) -> list[Outcome]:
    outcomes = []
    for number, case in enumerate(cases, 1):
        errors.print(
            f"[{number}/{len(cases)}] {case.name}: ", end="", style="dim", markup=False, highlight=False
        )
        try:
            outcome = run(case, options.threads, options.rounds, not options.no_memory)
        except ChildFailed as failure:
            outcome = Outcome(case, refused=str(failure))
        errors.print(report.line(outcome), style="dim", markup=False, highlight=False, soft_wrap=True)
        outcomes.append(outcome)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser()
    options = made.parse_args(arguments)
    cases = chosen(options.only)
    if not cases:
        made.error(
            f"no case matches {', '.join(options.only)}; there are: {', '.join(case.name for case in CASES)}"
        )
    if options.json and not options.json.resolve().parent.is_dir():
        made.error(f"--json: there is no folder {options.json.resolve().parent}")
    out = report.console()
    if options.list:
        out.print(report.listing(cases))
        return 0
    outcomes = _measure(cases, options, Console(stderr=True))
    out.print(report.table(outcomes))
    if report.load_note():
        out.print(report.load_note(), style="yellow")
    missed = [outcome for outcome in outcomes if not outcome.good]
    limits = sum(len(outcome.judged) for outcome in outcomes)
    out.print(
        f"{len(outcomes)} cases, {limits} limits judged, {len(missed)} cases with a limit missed or refused"
    )
    if options.json:
        report.write_json(options.json, outcomes)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
