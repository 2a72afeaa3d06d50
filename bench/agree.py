"""Whether the two sides of a case compute the same thing: asked before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .case import Case, Inputs, make_inputs, prepare, run_expression, run_side


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
    if case.truth is not None:
        return against_truth(case, inputs, ours, other)
    if case.agree is None:
        return compare(ours, other, case.tolerance)
    error = case.agree(inputs, ours, other)
    return Verdict(error <= case.tolerance, error, "its law")


def allowance(case: Case) -> str:
    """What a case may be off, in words."""
    if case.truth is None:
        return f"allowed {case.tolerance:.0e}"
    return f"allowed {case.error_times:g}x the other's error against float64, or {case.error_least:.1e}"


def against_truth(
    case: Case, inputs: Inputs, ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]
) -> Verdict:
    """Both sides against float64: the tensor where ours comes nearest to, or farthest beyond, what it may be off."""
    assert case.truth is not None
    if lonely := set(ours) ^ set(other):
        return Verdict(False, float("inf"), f"only one side returned {', '.join(sorted(lonely))}")
    truth = run_expression(case.truth, case.backward, in_float64(case, inputs))
    found: list[tuple[float, float, str]] = []
    for name, value in truth.items():
        error, theirs = relative_error(ours[name], value), relative_error(other[name], value)
        if not theirs <= 0.1:
            return Verdict(False, theirs, f"{name} of the other side")
        found.append((error / max(case.error_times * theirs, case.error_least), error, name))
    share, error, name = max(found)
    return Verdict(share <= 1, error, name)


def in_float64(case: Case, inputs: Inputs) -> Inputs:
    """The same numbers in float64."""

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().double() if tensor.is_floating_point() else tensor
        return made.requires_grad_(tensor.requires_grad)

    extra = {name: wide(tensor) for name, tensor in inputs.extra.items()}
    q, k, v, upstream = (wide(x) for x in (inputs.query, inputs.key, inputs.value, inputs.upstream))
    exact = Inputs(inputs.shape, q, k, v, upstream, extra)
    exact.prepared = {
        name: wide(item) if isinstance(item, torch.Tensor) else item for name, item in inputs.prepared.items()
    }
    return exact
