"""`python -m bench`: run the cases, print the table, keep what was measured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console

from . import measure, report, saved
from .case import AnyCase, SideFailed
from .cases import CASES
from .measure import ROOT, ChildFailed
from .runner import Outcome, mean_judgements, run


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


def shown(path: Path) -> str:
    """A path of the repository, from its root."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


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
        "--save",
        action="store_true",
        help=f"keep the results in {shown(saved.RESULTS)}, in the place of older ones",
    )
    made.add_argument(
        "--memory",
        action="store_true",
        help="only the memory of every row at two lengths (with --save: kept)",
    )
    made.add_argument(
        "--table", action="store_true", help=f"measure nothing; write the table of {shown(saved.README)} anew"
    )
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
        except (ChildFailed, SideFailed) as failure:
            outcome = Outcome(case, refused=str(failure))
        errors.print(report.line(outcome), style="dim", markup=False, highlight=False, soft_wrap=True)
        outcomes.append(outcome)
        if options.save:
            saved.save([outcome])
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
    try:
        if options.table:
            saved.write_table()
            return 0
        if options.memory:
            return _memory(options, out)
        return _run(cases, options, out)
    except (ChildFailed, OSError, saved.NotSaved) as error:
        made.error(str(error))


def _memory(options: argparse.Namespace, out: Console) -> int:
    peaks = measure.linear_memory(max(options.threads))
    out.print(report.peaks(peaks))
    if options.save:
        saved.save([], peaks)
    return 0


def _run(cases: Sequence[AnyCase], options: argparse.Namespace, out: Console) -> int:
    outcomes = _measure(cases, options, Console(stderr=True))
    out.print(report.table(outcomes))
    if note := report.load_note(outcomes):
        out.print(note, style="yellow")
    missed = [outcome for outcome in outcomes if not outcome.good]
    limits = sum(len(outcome.judged) for outcome in outcomes)
    out.print(
        f"{len(outcomes)} cases, {limits} limits judged, {len(missed)} cases with a limit missed or refused"
    )
    means = mean_judgements(outcomes)
    for mean in means:
        out.print(f"{'met' if mean.met else 'MISSED'}: {mean.value:.2f}x ({mean.under}), {mean.limit}")
    if options.json:
        report.write_json(options.json, outcomes)
    return 1 if options.check and (missed or not all(mean.met for mean in means)) else 0


if __name__ == "__main__":
    sys.exit(main())
