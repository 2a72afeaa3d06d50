"""What a case of the bench is: shapes, two sides, a question and the limits it is held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

MIB = 2**20


class Shape(NamedTuple):
    """B batch, H query heads, Hkv key heads, Tq and Tk lengths, D width of query and key, Dv of value."""

    B: int
    H: int
    Tq: int
    Tk: int
    D: int
    Dv: int
    Hkv: int

    def __str__(self) -> str:
        heads = f"{self.H}" if self.H == self.Hkv else f"{self.H}/{self.Hkv}"
        length = f"{self.Tq}" if self.Tq == self.Tk else f"{self.Tq}x{self.Tk}"
        width = f"{self.D}" if self.D == self.Dv else f"{self.D}/{self.Dv}"
        return f"({self.B}, {heads}, {length}, {width})"


def shape(
    B: int, H: int, T: int, D: int, *, Tk: int | None = None, Dv: int | None = None, Hkv: int | None = None
) -> Shape:
    """A Shape in torch's order (B, H, T, D); what is not said is equal to its counterpart."""
    return Shape(B, H, T, T if Tk is None else Tk, D, D if Dv is None else Dv, H if Hkv is None else Hkv)


TOY = shape(1, 1, 6, 24)


@dataclass
class Inputs:
    """The tensors of one run; `extra` is what a mechanism learns, `prepared` what the other side needs."""

    shape: Shape
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    upstream: torch.Tensor
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    prepared: dict[str, Any] = field(default_factory=dict)

    def leaves(self) -> dict[str, torch.Tensor]:
        """Every tensor that takes a gradient, by name."""
        named = {"query": self.query, "key": self.key, "value": self.value, **self.extra}
        return {name: tensor for name, tensor in named.items() if tensor.requires_grad}


Result = torch.Tensor | Mapping[str, torch.Tensor]
Side = Callable[[Inputs], Result]
SideName = Literal["ours", "other"]
Agreement = Callable[[Inputs, dict[str, torch.Tensor], dict[str, torch.Tensor]], float]


class SideFailed(RuntimeError):
    """A side of a case cannot be run here; the message says why."""


@dataclass(frozen=True)
class Limit:
    """One promise. `measure` says of what: ours / other in time, other / ours, MiB above, seconds, or calls of TOY.

    `goal` is what is hoped for beyond it; `slack` is how far below it still counts as met, as a share of it.
    """

    measure: Literal["slower", "faster", "memory", "seconds", "extra"]
    bound: float
    goal: float | None = None
    slack: float = 0.0

    def __str__(self) -> str:
        return {
            "slower": f"at most {self.bound:g}x the other's time",
            "faster": f"at least {self.bound:g}x faster",
            "memory": f"at most {self.bound:g} MiB above",
            "seconds": f"at most {self.bound:g} s",
            "extra": f"at most {self.bound:g} calls of SDPA on {TOY} longer",
        }[self.measure]

    def met(self, value: float) -> bool:
        if self.measure == "faster":
            return value >= self.bound * (1 - self.slack)
        return value <= self.bound * (1 + self.slack)

    def reaches_goal(self, value: float) -> bool:
        return self.goal is not None and replace(self, bound=self.goal, slack=0.0).met(value)


def floor(bound: float, goal: float) -> Limit:
    """At least `bound` times faster, met within 5 %; `goal` is hoped for."""
    return Limit("faster", bound, goal, 0.05)


@dataclass(frozen=True)
class Case:
    """Two expressions of one mechanism.

    `prepare` builds what the other expression needs (a bool mask, a bias): outside the clock, so that the
    time is the kernel's alone, and inside the memory, because a user pays for it. `agree_at` is the shape at
    which the two sides are compared when the other cannot run the full one; `other_memory` then computes its
    peak. With `truth`, a plain expression that is run in float64, both sides are held against it: ours may be
    `error_times` the error of the other, or `error_least`. `only_backward` leaves the forward out of the time.
    `row` is the row of the README's table that the case belongs to.
    """

    name: str
    question: str
    at: Shape
    ours: Side
    other: Side
    other_name: str
    backward: bool = False
    only_backward: bool = False
    prepare: Callable[[Inputs], dict[str, Any]] | None = None
    extra: Callable[[Shape, torch.Generator], dict[str, torch.Tensor]] | None = None
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-5
    agree_at: Shape | None = None
    agree: Agreement | None = None
    truth: Side | None = None
    error_times: float = 2.0
    error_least: float = 2e-6
    timed: bool = True
    memory: bool = False
    other_memory: Callable[[Shape], float] | None = None
    max_rounds: int = 15
    limits: tuple[Limit, ...] = ()
    row: str = ""


@dataclass(frozen=True)
class ImportCase:
    """The time `import module` takes in a fresh process after `import base`."""

    name: str
    question: str
    module: str
    base: str
    limits: tuple[Limit, ...] = ()


AnyCase = Case | ImportCase


def make_inputs(case: Case, at: Shape | None = None, seed: int = 0) -> Inputs:
    """Inputs of a case, the same for the same seed; leaves take gradients where the case has a backward."""
    size = case.at if at is None else at
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(case.dtype)

    query = normal(size.B, size.H, size.Tq, size.D)
    key = normal(size.B, size.Hkv, size.Tk, size.D)
    value = normal(size.B, size.Hkv, size.Tk, size.Dv)
    upstream = normal(size.B, size.H, size.Tq, size.Dv)
    extra = case.extra(size, generator) if case.extra else {}
    inputs = Inputs(size, query, key, value, upstream, extra)
    for tensor in (query, key, value, *extra.values()):
        tensor.requires_grad_(case.backward and tensor.is_floating_point())
    return inputs


def prepare(case: Case, inputs: Inputs) -> None:
    """Build what the other side needs besides the inputs."""
    inputs.prepared = case.prepare(inputs) if case.prepare else {}


def run_side(case: Case, side: SideName, inputs: Inputs) -> dict[str, torch.Tensor]:
    """One forward (and backward) of one side: its outputs by name, then the gradients as `grad of NAME`."""
    return run_expression(case.ours if side == "ours" else case.other, case.backward, inputs)


def run_expression(call: Side, backward: bool, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The same of any expression."""
    if not backward:
        with torch.no_grad():
            result = call(inputs)
        return dict(result) if isinstance(result, Mapping) else {"output": result}
    result = call(inputs)
    outputs = dict(result) if isinstance(result, Mapping) else {"output": result}
    leaves = inputs.leaves()
    grads = torch.autograd.grad(outputs["output"], list(leaves.values()), inputs.upstream)
    named = {f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: tensor.detach() for name, tensor in {**outputs, **named}.items()}


def timed_call(case: Case, side: SideName, inputs: Inputs) -> Callable[[], object]:
    """What the clock sees of a side: all of it, or its backward alone, again and again on one graph."""
    if not case.only_backward:
        return lambda: run_side(case, side, inputs)
    result = (case.ours if side == "ours" else case.other)(inputs)
    output = result["output"] if isinstance(result, Mapping) else result
    leaves = list(inputs.leaves().values())
    return lambda: torch.autograd.grad(output, leaves, inputs.upstream, retain_graph=True)
