"""Time and memory of one case: interleaved rounds in this process, peaks in a fresh process per side."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .case import TOY, Case, ImportCase, SideName, make_inputs, prepare, timed_call

ROOT = Path(__file__).resolve().parent.parent
SAMPLE_SECONDS = 0.004
# A case stops after this much time, but not before three rounds: slow cases need fewer to be told apart.
BUDGET_SECONDS = 20.0
FEWEST_ROUNDS = 3
# A larger share of the machine than this in other hands makes wall clocks doubtful.
NOISE = 0.1
STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Timing:
    """Medians in seconds over `rounds` interleaved rounds; `ratio` > 1 means that ours is faster.

    `foreign` is the share of the machine that other processes took meanwhile; `toy` the time of SDPA on TOY, where a
    limit is counted in it.
    """

    threads: int
    clock: str
    ours: float
    other: float
    rounds: int
    foreign: float = 0.0
    toy: float | None = None

    @property
    def ratio(self) -> float:
        return self.other / self.ours

    @property
    def noisy(self) -> bool:
        return self.foreign > NOISE

    @property
    def extra(self) -> float:
        """How many calls of SDPA on TOY ours takes beyond the other."""
        assert self.toy is not None
        return (self.ours - self.other) / self.toy


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
        calls = {str(side): timed_call(case, side, inputs) for side in sides}
        if any(limit.measure == "extra" for limit in case.limits):
            calls["toy"] = _toy()
        repeats = {side: _repeats(call, clock) for side, call in calls.items()}
        samples: dict[str, list[float]] = {side: [] for side in calls}
        start, idle = time.monotonic(), _foreign_seconds()
        for turn in range(min(rounds, case.max_rounds)):
            if turn >= FEWEST_ROUNDS and time.monotonic() - start > BUDGET_SECONDS:
                break
            for side in calls if turn % 2 == 0 else reversed(calls):
                samples[side].append(_sample(calls[side], clock, repeats[side]))
        taken = (time.monotonic() - start) * (os.cpu_count() or 1)
        foreign = max(0.0, _foreign_seconds() - idle) / taken
    finally:
        torch.set_num_threads(before)
    medians = {side: statistics.median(found) for side, found in samples.items()}
    return Timing(
        threads,
        name,
        medians["ours"],
        medians["other"],
        len(samples["ours"]),
        foreign,
        medians.get("toy"),
    )


def _toy() -> Callable[[], object]:
    query, key, value = torch.randn(
        3, TOY.B, TOY.H, TOY.Tq, TOY.D, generator=torch.Generator().manual_seed(0)
    )

    def call() -> torch.Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(query, key, value)

    return call


def _foreign_seconds() -> float:
    """Processor time, in seconds, that anybody but this process has taken since the machine started."""
    fields = [int(field) for field in STAT.read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, soft, steal = fields[:8]
    everybody = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    return everybody - time.process_time()


def _repeats(call: Callable[[], object], clock: Callable[[], float]) -> int:
    call()
    once = _sample(call, clock, 1)
    return max(1, min(1000, int(SAMPLE_SECONDS / max(once, 1e-7))))


class ChildFailed(RuntimeError):
    """A measuring process ended without a number; the message is its last lines."""


def _child(*arguments: str) -> dict[str, Any]:
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


def linear_memory(threads: int) -> dict[str, list[float]]:
    """Peak bytes of our side of every row, at the lengths of `linear.LENGTHS`, in one fresh process."""
    return dict(_child("linear", str(threads)))


def import_seconds(case: ImportCase, rounds: int) -> float:
    """Median over fresh processes of the time that `import module` takes once `base` is imported."""
    return statistics.median(_child("import", case.base, case.module)["seconds"] for _ in range(rounds))
