"""Process memory of our side of every row at two lengths: does it grow with the length, and not with its square?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .case import Case
from .cases import CASES
from .rows import ROWS

LENGTHS = (4096, 8192)
# Wide enough for every code path, narrow enough for a test.
WIDEST = 64


def at_length(case: Case, n: int) -> Case:
    """The case for one head of n keys; one query stays one query."""
    at = case.at
    Tq = n if at.Tq == at.Tk else at.Tq
    heads = (at.H // at.Hkv, 1)
    narrow = at._replace(
        B=1, H=heads[0], Hkv=heads[1], Tq=Tq, Tk=n, D=min(at.D, WIDEST), Dv=min(at.Dv, 2 * WIDEST)
    )
    return replace(case, at=narrow)


def mechanisms() -> Iterator[tuple[tuple[str, ...], Case]]:
    """Each different call of ours, with the rows that it answers for."""
    rows: dict[tuple[object, ...], list[str]] = {}
    firsts: dict[tuple[object, ...], Case] = {}
    for row in ROWS:
        case = next(found for found in CASES if isinstance(found, Case) and found.row == row.name)
        kind = _kind(case)
        rows.setdefault(kind, []).append(row.name)
        firsts.setdefault(kind, case)
    for kind, case in firsts.items():
        yield tuple(rows[kind]), case


def _kind(case: Case) -> tuple[object, ...]:
    """What decides the memory of our side: rows that agree in it are measured once."""
    described = case.ours.__closure__ and tuple(repr(cell.cell_contents) for cell in case.ours.__closure__)
    at = at_length(case, LENGTHS[0]).at
    return case.ours.__code__, described, case.backward, case.dtype, at
