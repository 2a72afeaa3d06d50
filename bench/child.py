"""What runs in a fresh process: the peak memory of one side, or the time of one import.

`python -m bench.child memory CASE SIDE THREADS`, `python -m bench.child linear THREADS` and
`python -m bench.child import BASE MODULE` print one line of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .case import Case, SideName

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_HIGH_WATER_MARK = "5"
MOST_BYTES = 8 * 2**30  # a side that wants more fails by itself, instead of taking the machine with it


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {field}: peak memory can only be measured on Linux")


def _return_free_memory() -> None:
    """Hand freed heap pages back, so that the run cannot hide in memory that the set-up left behind."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _reset_peak() -> bool:
    try:
        CLEAR_REFS.write_text(RESET_HIGH_WATER_MARK)
    except OSError:
        return False
    return True


def memory(name: str, side: SideName, threads: int) -> dict[str, float | bool]:
    import torch

    from .case import Case
    from .cases import find

    case = find(name)
    if not isinstance(case, Case) or side not in ("ours", "other"):
        raise SystemExit(f"bench.child: no memory to measure for {name!r}, side {side!r}")
    torch.set_num_threads(threads)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    return peak(case, side)


def peak(case: Case, side: SideName) -> dict[str, float | bool]:
    """Peak bytes of one side above inputs, outputs and gradients."""
    from .case import make_inputs, prepare, run_side

    size = case.agree_at or case.at
    tiny = make_inputs(case, size._replace(Tq=min(size.Tq, 16), Tk=min(size.Tk, 16)))
    if side == "other":
        prepare(case, tiny)
    run_side(case, side, tiny)  # code pages, thread pools and lazily made tables are not the call's memory
    inputs = make_inputs(case)
    _return_free_memory()
    exact = _reset_peak()
    before = _status("VmRSS")
    if side == "other":
        prepare(case, inputs)
    results = run_side(case, side, inputs)
    highest = _status("VmHWM")
    kept = sum(tensor.numel() * tensor.element_size() for tensor in results.values())
    return {"bytes": max(0, highest - before - kept), "exact": exact}


def linear(threads: int) -> dict[str, list[float]]:
    """Peak bytes of our side of every row of the table, at each of two lengths."""
    import torch

    from .linear import LENGTHS, at_length, mechanisms

    torch.set_num_threads(threads)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    found = {}
    for rows, case in mechanisms():
        peaks = [float(peak(at_length(case, n), "ours")["bytes"]) for n in LENGTHS]
        found.update(dict.fromkeys(rows, peaks))
    return found


def import_time(base: str, module: str) -> dict[str, float]:
    importlib.import_module(base)
    start = time.thread_time()
    importlib.import_module(module)
    return {"seconds": time.thread_time() - start}


def main(arguments: list[str]) -> None:
    answer: object
    if arguments[0] == "memory":
        answer = memory(arguments[1], arguments[2], int(arguments[3]))
    elif arguments[0] == "linear":
        answer = linear(int(arguments[1]))
    else:
        answer = import_time(arguments[1], arguments[2])
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
