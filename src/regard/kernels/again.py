"""A lowered problem as a call once more, so that the differentiable kernel can take its second derivative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import _runs, biases, masks, normalizers, scores
from regard._call import Call
from regard._frame import At, Frame
from regard.kernels import inline, reference
from regard.kernels.problem import DIFFERENTIABLE, Problem


@dataclass(frozen=True, eq=False)
class Lowered(masks.Mask):
    """Runs and a bool tensor, as a mask."""

    problem: Problem

    def allowed(self, at: At) -> Tensor:
        problem = self.problem
        allowed = torch.ones_like(at.b + at.i + at.j, dtype=torch.bool)
        if problem.masked:
            runs = torch.zeros_like(allowed)
            for run in problem.runs or []:
                low, high = _runs.edges(run, problem.frame, problem.place)
                runs = runs | masks.Rows(low, high).allowed(at)
            allowed = allowed & runs
        if problem.dense is not None:
            dense = masks.Dense(problem.dense).allowed(at)
            allowed = allowed & (~dense if problem.negated else dense)
        return allowed


@dataclass(frozen=True, eq=False)
class Diagonal(biases.Bias):
    """One number a diagonal, as a bias."""

    tensor: Tensor
    Tq: int

    def value(self, at: At) -> Tensor:
        B, H, _ = self.tensor.shape
        b, h = (at.b if B > 1 else at.b * 0), (at.h if H > 1 else at.h * 0)
        return self.tensor[b, h, at.j - at.i + (self.Tq - 1)]


def _unchecked(kind: type, **fields: Any) -> Any:
    """A built-in whose parameters were checked before they were lowered, (B|1, H|1) by now."""
    made: Any = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def as_call(problem: Problem) -> Call:
    """The same computation as a call of the definition."""
    bias: biases.Bias | None = None if problem.bias is None else biases.Values(problem.bias)
    if problem.diagonal is not None:
        along = Diagonal(problem.diagonal, problem.query.shape[2])
        bias = along if bias is None else bias + along
    masked = problem.masked or problem.dense is not None
    frame: Frame = problem.frame
    return Call(
        frame,
        problem.query,
        problem.key,
        problem.value,
        _score(problem),
        _normalizer(problem),
        Lowered(problem) if masked else None,
        bias,
        problem.place,
        problem.dropout_p,
        problem.seed,
    )


def _score(problem: Problem) -> Any:
    factor: Any = problem.factor if problem.scale is None else problem.factor * problem.scale
    if problem.score == "additive":
        return _unchecked(scores.Additive, v=problem.weight)
    if problem.score == "distance":
        return _unchecked(scores.Distance, scale=factor)
    return _unchecked(scores.Dot, scale=factor, softcap=problem.softcap or None)


def _normalizer(problem: Problem) -> Any:
    if problem.normalize == "softmax":
        return _unchecked(normalizers.Softmax, sink=problem.sink)
    if problem.normalize == "entmax":
        return _unchecked(normalizers.Entmax, alpha=problem.alpha)
    if problem.normalize == "sigmoid":
        return _unchecked(normalizers.Sigmoid, bias=problem.shift)
    kinds = {"sparsemax": normalizers.Sparsemax, "entmax15": normalizers.Entmax15, "relu": normalizers.Relu}
    return kinds[problem.normalize]()


def second_gradients(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    problem: Problem,
    needs: list[bool],
    given: list[Tensor | None],
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """Gradients of the first gradients weighted by ``given``: by the upstream gradients and the problem's tensors."""
    if torch._C._are_functorch_transforms_active():
        return _second_by_func(grad_output, grad_lse, problem, needs, given)
    keep = torch.is_grad_enabled()
    names = [name for name, need in zip(DIFFERENTIABLE, needs, strict=True) if need]
    with torch.enable_grad():
        tensors: dict[str, Any] = {name: _connected(getattr(problem, name)) for name in DIFFERENTIABLE}
        upstream = [_connected(grad_output), _connected(grad_lse)]
        outputs = inline.attend(as_call(problem._replace(**tensors)))
        pairs = [(out, up) for out, up in zip(outputs, upstream, strict=True) if up is not None]
        first = torch.autograd.grad(
            [out for out, _ in pairs],
            [tensors[name] for name in names],
            [up for _, up in pairs],
            create_graph=True,
            materialize_grads=True,
        )
        chosen = [
            (one, by) for one, by in zip(first, given, strict=True) if by is not None and one.requires_grad
        ]
        sources = [up for up in upstream if up is not None] + [t for t in tensors.values() if t is not None]
        if not chosen:
            return None, None, [None] * len(DIFFERENTIABLE)
        second = torch.autograd.grad(
            [one for one, _ in chosen],
            sources,
            [by for _, by in chosen],
            create_graph=keep,
            allow_unused=True,
        )
    found = dict(zip(map(id, sources), second, strict=True))
    by_tensor = [found.get(id(tensors[name])) for name in DIFFERENTIABLE]
    return found.get(id(upstream[0])), found.get(id(upstream[1])), by_tensor


def _vjp(function: Any, *arguments: Tensor) -> tuple[tuple[Tensor, ...], Any]:
    pulled: Any = torch.func.vjp(function, *arguments)
    return pulled[0], pulled[1]


def _connected(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    # An alias of its own for each argument: query and key may be one tensor, their gradients are two.
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


def _second_by_func(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    problem: Problem,
    needs: list[bool],
    given: list[Tensor | None],
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """The same by the definition, under torch.func, whose transforms take no checkpoint and no ``requires_grad_``."""
    names = [name for name in DIFFERENTIABLE if getattr(problem, name) is not None]
    chosen = [name for name, need in zip(DIFFERENTIABLE, needs, strict=True) if need]
    upstream = [up for up in (grad_output, grad_lse) if up is not None]

    def outputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        changed: dict[str, Any] = dict(zip(names, tensors, strict=True))
        output, lse = reference.attend(as_call(problem._replace(**changed)))
        pairs = ((output, grad_output), (lse, grad_lse))
        return tuple(found for found, up in pairs if up is not None)

    def first(*arguments: Tensor) -> tuple[Tensor, ...]:
        ups, tensors = arguments[: len(upstream)], arguments[len(upstream) :]
        _, pull = _vjp(outputs, *tensors)
        grads = dict(zip(names, pull(tuple(ups)), strict=True))
        return tuple(grads[name] for name in chosen)

    found, pull = _vjp(first, *upstream, *(getattr(problem, name) for name in names))
    by = tuple(torch.zeros_like(one) if up is None else up for one, up in zip(found, given, strict=True))
    grads = list(pull(by))
    by_output = grads.pop(0) if grad_output is not None else None
    by_lse = grads.pop(0) if grad_lse is not None else None
    of_tensor = dict(zip(names, grads, strict=True))
    return by_output, by_lse, [of_tensor.get(name) for name in DIFFERENTIABLE]
