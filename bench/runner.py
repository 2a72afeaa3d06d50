"""One case from question to verdict: agreement first, then the numbers, then the limits."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import agree, measure
from .case import MIB, AnyCase, Case, ImportCase, Limit
from .rows import ROWS


@dataclass(frozen=True)
class Judged:
    """A limit, what was measured for it, and whether it was met."""

    limit: Limit
    under: str
    value: float

    @property
    def met(self) -> bool:
        return self.limit.met(self.value)


@dataclass
class Outcome:
    """Everything known of a case. `refused` says why no number may be shown."""

    case: AnyCase
    verdict: agree.Verdict | None = None
    timings: list[measure.Timing] = field(default_factory=list)
    peaks: dict[str, measure.Peak] = field(default_factory=dict)
    other_computed: bool = False
    seconds: float | None = None
    refused: str = ""
    judged: list[Judged] = field(default_factory=list)

    @property
    def row(self) -> str:
        """The row of the README's table that the case belongs to, if any."""
        return self.case.row if isinstance(self.case, Case) else ""

    @property
    def good(self) -> bool:
        return not self.refused and all(judged.met for judged in self.judged)

    def as_json(self) -> dict[str, object]:
        """Plain data; times in seconds, memory in MiB."""
        data: dict[str, object] = {
            "name": self.case.name,
            "question": self.case.question,
            "refused": self.refused or None,
            "limits": [
                {"limit": str(j.limit), "under": j.under, "value": j.value, "met": j.met} for j in self.judged
            ],
        }
        if isinstance(self.case, ImportCase):
            return {**data, "seconds": self.seconds}
        return {
            **data,
            "shape": self.case.at._asdict(),
            "dtype": str(self.case.dtype).removeprefix("torch."),
            "backward": self.case.backward,
            "other": self.case.other_name,
            "difference": dataclasses.asdict(self.verdict) if self.verdict else None,
            "row": self.case.row,
            "timings": [{**dataclasses.asdict(t), "ratio": t.ratio, "noisy": t.noisy} for t in self.timings],
            "peak_mib": {side: dataclasses.asdict(peak) for side, peak in self.peaks.items()},
            "other_peak_is": "computed" if self.other_computed else "measured",
        }


def run(case: AnyCase, threads: Sequence[int] = (1, 2), rounds: int = 9, memory: bool = True) -> Outcome:
    """Measure a case; one whose sides disagree is refused and measured no further."""
    if isinstance(case, ImportCase):
        seconds = measure.import_seconds(case, rounds)
        judged = [Judged(limit, "its own clock", seconds) for limit in case.limits]
        return Outcome(case, seconds=seconds, judged=judged)
    verdict = agree.check(case)
    if not verdict.agrees:
        words = "the two sides disagree" if case.truth is None else "wrong"
        found = f"{verdict.where} is off by {verdict.error:.1e} ({agree.allowance(case)})"
        return Outcome(case, verdict, refused=f"{words}: {found}")
    outcome = Outcome(case, verdict)
    if case.timed:
        outcome.timings = [measure.time_case(case, count, rounds) for count in threads]
    if case.memory and memory:
        _measure_memory(case, outcome, max(threads))
    outcome.judged = _judge(case, outcome)
    return outcome


def _measure_memory(case: Case, outcome: Outcome, threads: int) -> None:
    outcome.peaks["ours"] = measure.peak_memory(case, "ours", threads)
    if case.other_memory is None:
        outcome.peaks["other"] = measure.peak_memory(case, "other", threads)
    else:
        outcome.peaks["other"] = measure.Peak(case.other_memory(case.at) / MIB, True)
        outcome.other_computed = True


def _judge(case: Case, outcome: Outcome) -> list[Judged]:
    judged = []
    for limit in case.limits:
        if limit.measure == "memory" and "ours" in outcome.peaks:
            judged.append(Judged(limit, "memory", outcome.peaks["ours"].mib))
        elif limit.measure == "slower":
            judged += [Judged(limit, _under(t), t.ours / t.other) for t in outcome.timings]
        elif limit.measure == "faster":
            judged += [Judged(limit, _under(t), t.ratio) for t in outcome.timings]
        elif limit.measure == "extra":
            judged += [Judged(limit, _under(t), t.extra) for t in outcome.timings]
    return judged


def _under(timing: measure.Timing) -> str:
    return f"{timing.threads} thread" + ("s" if timing.threads > 1 else "")


def mean_judgements(outcomes: Sequence[Outcome]) -> list[Judged]:
    """The geometric mean of every row that is held to one, over its cases that were measured, a thread count each."""
    found = []
    for row in ROWS:
        timings = [t for one in outcomes if one.row == row.name for t in one.timings]
        if row.mean is None:
            continue
        for threads in sorted({t.threads for t in timings}):
            ratios = [t.ratio for t in timings if t.threads == threads]
            under = f"geometric mean of {row.name} over {len(ratios)} points at {threads} threads"
            found.append(Judged(row.mean, under, statistics.geometric_mean(ratios)))
    return found
