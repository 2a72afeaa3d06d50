"""One case from question to verdict: agreement first, then the numbers, then the limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import agree, measure
from .case import MIB, AnyCase, Case, ImportCase, Limit


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
            "timings": [{**dataclasses.asdict(t), "ratio": t.ratio} for t in self.timings],
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
        found = f"{verdict.where} differs by {verdict.error:.1e} (allowed {case.tolerance:.0e})"
        return Outcome(case, verdict, refused=f"the two sides disagree: {found}")
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
    return judged


def _under(timing: measure.Timing) -> str:
    return f"{timing.threads} thread" + ("s" if timing.threads > 1 else "")
