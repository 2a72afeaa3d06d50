"""Whether the two sides of a case compute the same thing: asked before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .case import Case, Inputs, make_inputs, prepare, run_side


@dataclass(frozen=True)
class Verdict:
    """`error` is the largest difference found (relative Frobenius), `where` the tensor it was found in."""

    agrees: bool
    error: float
    where: str


def relative_error(ours: torch.Tensor, other: torch.Tensor) -> float:
    """||ours - other|| / ||other|| in float64; infinite where shapes, infinities or NaNs differ."""
    if ours.shape != other.shape:
        return float("inf")
    a, b = ours.double(), other.double()
    finite = b.isfinite()
    if not torch.equal(a[~finite], b[~finite]) or not bool(a[finite].isfinite().all()):
        return float("inf")
    scale = b[finite].norm().item()
    difference = (a[finite] - b[finite]).norm().item()
    return difference / scale if scale else difference


def compare(ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> Verdict:
    """The worst tensor of the two sides; tensors that only one side returned are a disagreement."""
    lonely = set(ours) ^ set(other)
    if lonely:
        return Verdict(False, float("inf"), f"only one side returned {', '.join(sorted(lonely))}")
    errors = {name: relative_error(ours[name], other[name]) for name in ours}
    where = max(errors, key=lambda name: errors[name])
    return Verdict(errors[where] <= tolerance, errors[where], where)


def check(case: Case) -> Verdict:
    """Run both sides once on equal inputs and compare them, by the case's own law where it has one."""
    at = case.agree_at or case.at
    inputs: Inputs = make_inputs(case, at)
    prepare(case, inputs)
    ours = run_side(case, "ours", inputs)
    other = run_side(case, "other", inputs)
    if case.agree is None:
        return compare(ours, other, case.tolerance)
    error = case.agree(inputs, ours, other)
    return Verdict(error <= case.tolerance, error, "its law")
