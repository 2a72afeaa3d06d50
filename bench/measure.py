"""Time and memory of one case: interleaved rounds in this process, peaks in a fresh process per side."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .case import Case, ImportCase, SideName, make_inputs, prepare, run_side

ROOT = Path(__file__).resolve().parent.parent
SAMPLE_SECONDS = 0.004
# A case stops after this much time, but not before three rounds: slow cases need fewer to be told apart.
BUDGET_SECONDS = 20.0
FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Timing:
    """Medians in seconds over `rounds` interleaved rounds; `ratio` > 1 means that ours is faster."""

    threads: int
    clock: str
    ours: float
    other: float
    rounds: int

    @property
    def ratio(self) -> float:
        return self.other / self.ours


@dataclass(frozen=True)
class Peak:
    """Peak process memory in MiB above inputs, outputs and gradients.

    `exact` is False where the kernel refuses to reset the high-water mark: the number is then an upper bound.
    """

    mib: float
    exact: bool


def _clock(threads: int) -> tuple[str, Callable[[], float]]:
    # A thread's own clock does not count what else the machine does, but it sees one thread only.
    return ("thread", time.thread_time) if threads == 1 else ("wall", time.perf_counter)


def _sample(call: Callable[[], object], clock: Callable[[], float], repeat: int) -> float:
    start = clock()
    for _ in range(repeat):
        call()
    return (clock() - start) / repeat


def time_case(case: Case, threads: int, rounds: int) -> Timing:
    """Both sides in turn, the order swapped every round; tiny calls are repeated to fill a sample of 4 ms."""
    name, clock = _clock(threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        inputs = make_inputs(case)
        prepare(case, inputs)
        sides: tuple[SideName, SideName] = ("ours", "other")
        calls = {side: (lambda side=side: run_side(case, side, inputs)) for side in sides}
        repeats = {side: _repeats(calls[side], clock) for side in sides}
        samples: dict[str, list[float]] = {side: [] for side in sides}
        start = time.monotonic()
        for turn in range(min(rounds, case.max_rounds)):
            if turn >= FEWEST_ROUNDS and time.monotonic() - start > BUDGET_SECONDS:
                break
            for side in sides if turn % 2 == 0 else reversed(sides):
                samples[side].append(_sample(calls[side], clock, repeats[side]))
    finally:
        torch.set_num_threads(before)
    ours, other = (statistics.median(samples[side]) for side in sides)
    return Timing(threads, name, ours, other, len(samples["ours"]))


def _repeats(call: Callable[[], object], clock: Callable[[], float]) -> int:
    call()
    once = _sample(call, clock, 1)
    return max(1, min(1000, int(SAMPLE_SECONDS / max(once, 1e-7))))


class ChildFailed(RuntimeError):
    """A measuring process ended without a number; the message is its last lines."""


def _child(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.child", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-3:] or [f"exit code {done.returncode}"]
        raise ChildFailed(f"`{' '.join(command[1:])}` failed: " + " / ".join(reason))
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def peak_memory(case: Case, side: SideName, threads: int) -> Peak:
    """Peak of one side in a fresh process (the case is looked up by its name there)."""
    answer = _child("memory", case.name, side, str(threads))
    return Peak(answer["bytes"] / 2**20, bool(answer["exact"]))


def import_seconds(case: ImportCase, rounds: int) -> float:
    """Median over fresh processes of the time that `import module` takes once `base` is imported."""
    return statistics.median(_child("import", case.base, case.module)["seconds"] for _ in range(rounds))
