"""Which kernel runs, and why not the others. The list of kernels, in order, is ``KERNELS``."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard import _checks, _runs, masks
from regard._call import Call
from regard._frame import Frame, Offset
from regard.kernels import _ops, direct, inline, native, reference
from regard.kernels import problem as problems

Result = tuple[Tensor, Tensor]

# Measured: forward and backward, strips overtake whole matrices between 2^15 and 2^17 pairs.
FEW_PAIRS = 1 << 15


class Kernel(NamedTuple):
    """A kernel: its name, what it is, how it runs a call, and why it does not take one (None: it does)."""

    name: str
    about: str
    run: Callable[[Call, bool], Result]
    refuses: Callable[[Call], str | None]


def _run_reference(call: Call, lse: bool) -> Result:
    with without_autocast(call.query.device):
        return reference.attend(call)


def _refuses_reference(call: Call) -> str | None:
    if _ops.forward_mode():
        return None
    frame = call.frame
    if _ops.watched() or frame.device.type == "meta":
        return "traced and transformed calls go through the registered operator"
    if frame.B * frame.H * frame.Tq * frame.Tk > FEW_PAIRS:
        return f"more than {FEW_PAIRS} pairs: a kernel of linear memory takes the call"
    if _checks.autocasts(frame.device):
        return "autocast would reach its gradients"
    return None


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Kernels compute in the dtype they choose: autocast ends where they begin."""
    return (
        torch.autocast(device.type, enabled=False) if _checks.autocasts(device) else contextlib.nullcontext()
    )


def _run_tiled(call: Call, lse: bool) -> Result:
    return _run_operator(call, lse, "tiled")


def _run_native(call: Call, lse: bool) -> Result:
    return _run_operator(call, lse, "native")


def _run_operator(call: Call, lse: bool, kernel: str) -> Result:
    if _checks.autocasts(call.query.device):
        with without_autocast(call.query.device):
            return _run_operator(call, lse, kernel)
    problem = problems.lower(call, False, kernel)
    wanted = lse or _needs_gradient(problem)
    output, found, _ = _ops.call(problem._replace(rows_wanted=True) if wanted else problem)
    return output, found


def _needs_gradient(problem: problems.Problem) -> bool:
    if not torch.is_grad_enabled():
        return False
    return _ops.differentiating() or any(
        isinstance(item, Tensor) and item.requires_grad for item in problem[: len(problems.DIFFERENTIABLE)]
    )


def _refuses_tiled(call: Call) -> str | None:
    if _ops.forward_mode():
        return "forward-mode differentiation needs every step in sight"
    return problems.reduces(call)


def _refuses_native(call: Call) -> str | None:
    return _refuses_tiled(call) or native.refuses(call)


def _run_direct(call: Call, lse: bool) -> Result:
    output = None if lse else direct.attend(call)
    return _run_tiled(call, lse) if output is None else (output, output)


def _run_inline(call: Call, lse: bool) -> Result:
    with without_autocast(call.query.device):
        return inline.attend(call)


def _refuses_inline(call: Call) -> str | None:
    if _ops.forward_mode():
        return "forward-mode differentiation needs every step in sight"
    return inline.too_many(call)


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        "direct",
        f"torch's own attention: dot and softmax, at most {direct.MOST_PAIRS} pairs, no gradients",
        _run_direct,
        direct.refuses,
    ),
    Kernel(
        "native",
        f"compiled for the CPU: built-ins, float32 and half precisions, widths to {native.WIDEST}; "
        "up to 12 queries without gradients: keys dealt out to the threads",
        _run_native,
        _refuses_native,
    ),
    Kernel(
        "reference",
        f"the definition: at most {FEW_PAIRS} pairs, and forward mode",
        _run_reference,
        _refuses_reference,
    ),
    Kernel("tiled", "strips, built-ins, one registered operator", _run_tiled, _refuses_tiled),
    Kernel("inline", "blocks, your own callables, each a checkpoint", _run_inline, _refuses_inline),
)

_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("regard_kernel", default=None)


@contextlib.contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Run every call inside on one kernel (tests and measurements); it must take the call."""
    if name not in [kernel.name for kernel in KERNELS]:
        _checks.wrong_value("kernel", "one of " + ", ".join(kernel.name for kernel in KERNELS), name)
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> str | None:
    """The kernel that ``use_kernel`` asks for here."""
    return _forced.get()


def choose(call: Call) -> Kernel:
    """The first kernel of the list that takes the call."""
    only = None if torch.compiler.is_compiling() else _forced.get()
    if only is not None:
        return _only(only, call)
    for kernel in KERNELS:
        if kernel.refuses(call) is None:
            return kernel
    reasons = "; ".join(f"{kernel.name}: {kernel.refuses(call)}" for kernel in KERNELS)
    way_out = "Call it without torch.compile, or make it of built-ins."
    _checks.wrong_value("attention", "a kernel that takes the call", _checks.words(reasons), way_out)


def _only(name: str, call: Call) -> Kernel:
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    reason = None if name == "reference" else kernel.refuses(call)
    if reason is not None:
        _checks.wrong_value(
            "kernel", f"a call that {name} takes", _checks.words(f"one that it does not: {reason}")
        )
    return kernel


def kernels() -> list[tuple[str, bool, str]]:
    """Every kernel of the library: its name, whether it can run on this machine, and what it is."""
    return [(kernel.name, True, kernel.about) for kernel in KERNELS]


@dataclass(frozen=True)
class Plan:
    """What will happen to a call.

    kernel: the one that runs; reasons: for each of the others, why it does not; mask: the form the mask takes;
    flops: multiply-adds of the visible pairs, counted twice, forward; bytes: of query, key, value and output.
    """

    kernel: str
    reasons: dict[str, str] = field(hash=False)
    mask: str
    pairs: int
    flops: int
    bytes: int
    shapes: str

    def __str__(self) -> str:
        lines = [f"{self.shapes}", f"kernel   {self.kernel}"]
        lines += [f"  not    {name}: {reason}" for name, reason in self.reasons.items()]
        lines += [
            f"mask     {self.mask}, {self.pairs:,} pairs",
            f"forward  {self.flops:,} FLOPs, {self.bytes:,} bytes",
        ]
        return "\n".join(lines)


def plan_of(call: Call) -> Plan:
    """The plan of a checked call."""
    kernel = choose(call)
    order = [other.name for other in KERNELS]
    reasons = {}
    for other in KERNELS:
        if other.name != kernel.name:
            later = order.index(other.name) > order.index(kernel.name)
            reasons[other.name] = other.refuses(call) or (
                f"{kernel.name} comes first" if later else "not forced"
            )
    frame, D, Dv = call.frame, call.query.shape[-1], call.value.shape[-1]
    pairs, form = _pairs(call)
    size = call.query.element_size()
    moved = sum(x.numel() for x in (call.query, call.key, call.value)) + frame.B * frame.H * frame.Tq * Dv
    shapes = f"B {frame.B}, H {frame.H}, Hkv {frame.Hkv}, Tq {frame.Tq}, Tk {frame.Tk}, D {D}, Dv {Dv}"
    dtype = str(call.query.dtype).removeprefix("torch.")
    return Plan(
        kernel.name,
        reasons,
        form,
        pairs,
        2 * pairs * (D + Dv),
        moved * size,
        f"{shapes}, {dtype} on {frame.device}",
    )


def _pairs(call: Call) -> tuple[int, str]:
    """How many pairs may meet (all of them where a rule decides, or where there are no values), and the mask's form."""
    frame = call.frame
    everything = frame.B * frame.H * frame.Tq * frame.Tk
    if masks.rules(call.mask):
        return everything, "a rule, tile by tile"
    if frame.device.type == "meta":
        frame = frame._replace(device=torch.device("cpu"))
    visible = _runs.lower(call.mask, frame, call.offset)
    if visible.everything or not everything or _unknown(visible, call.offset):
        return everything, visible.describe()
    edges = [_runs.edges(run, frame, call.offset) for run in visible.runs or ()]
    if visible.dense is None:
        return _in_runs(edges, frame), visible.describe()
    step = max(1, (1 << 22) // frame.Tk)
    parts = range(0, frame.Tq, step)
    return sum(_in_rows(visible, edges, frame, slice(row, row + step)) for row in parts), visible.describe()


def _unknown(visible: _runs.Visible, offset: Offset) -> bool:
    """Whether a mask is made of tensors without values."""
    ends = [end for run in visible.runs or () for end in (run.start, run.stop)]
    return any(isinstance(item, Tensor) and item.is_meta for item in (visible.dense, offset, *ends))


def _in_runs(edges: list[tuple[Tensor, Tensor]], frame: Frame) -> int:
    """Pairs in one run or in two that may overlap."""
    total = torch.zeros(1, 1, 1, dtype=torch.int64, device=frame.device)
    for low, high in edges:
        total = total + (high - low).clamp(min=0)
    if len(edges) == 2:
        (low, high), (low2, high2) = edges
        total = total - (torch.minimum(high, high2) - torch.maximum(low, low2)).clamp(min=0)
    return int(total.expand(frame.B, frame.H, frame.Tq).sum())


def _in_rows(visible: _runs.Visible, edges: list[tuple[Tensor, Tensor]], frame: Frame, rows: slice) -> int:
    """Pairs of some rows, by the bool tensor and the runs beside it."""
    assert visible.dense is not None
    dense = visible.dense[:, :, rows] if visible.dense.shape[2] > 1 else visible.dense
    seen = ~dense if visible.negated else dense
    if visible.runs is not None:
        j = torch.arange(frame.Tk, device=frame.device)
        inside = [(j >= low[:, :, rows, None]) & (j < high[:, :, rows, None]) for low, high in edges]
        seen = seen & (inside[0] | inside[-1]) if inside else torch.zeros_like(seen)
    height = len(range(*rows.indices(frame.Tq)))
    return sum(
        int(one.expand(frame.H, height, frame.Tk).sum()) for one in seen.expand(frame.B, *seen.shape[1:])
    )
