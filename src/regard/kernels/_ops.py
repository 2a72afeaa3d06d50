"""The registered operators: ``regard::attend``, its gradient, and the scan of documents.

Registered with torch, so that torch.compile, torch.export, vmap, autograd (twice) and FakeTensor know them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard import _checks, _runs
from regard.kernels import again, native, tiled
from regard.kernels.problem import DIFFERENTIABLE, Problem

_TENSORS = "Tensor query, Tensor key, Tensor value, " + ", ".join(
    f"Tensor? {name}" for name in Problem._fields[3 : Problem._fields.index("bounds")]
)
_NUMBERS = (
    "SymInt[] bounds, bool masked, bool negated, SymInt offset, str score, str normalize, "
    "float factor, float softcap, float dropout_p, bool rows_wanted, str kernel"
)
_TENSOR_COUNT = Problem._fields.index("bounds")
_BEFORE = 4

library = torch.library.Library("regard", "DEF")
library.define(f"attend({_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor)")
library.define(
    "attend_backward(Tensor? grad_output, Tensor? grad_lse, Tensor? output, Tensor rows, "
    f"{_TENSORS}, {_NUMBERS}, bool[] needs) -> Tensor[]"
)
library.define("document_runs(Tensor query_ids, Tensor key_ids, bool must) -> (Tensor, Tensor)")


def _outside_autocast(device: torch.device, run: Callable[[], Any]) -> Any:
    if not _checks.autocasts(device):
        return run()
    with torch.autocast(device.type, enabled=False):
        return run()


def attend(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem(*arguments)
    found: tuple[Tensor, Tensor, Tensor] = _outside_autocast(problem.query.device, lambda: _forward(problem))
    return found


def _forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    if problem.kernel != "native":
        return tiled.forward(problem)
    found = native.forward(problem)
    if found is None:
        output, lse, rows = tiled.forward(problem)
        more = native.row_numbers(problem) - rows.shape[0]
        # Numbers that only the compiled kernel leaves: without them it hands the gradient over too.
        found = output, lse, torch.cat([rows, rows.new_full((more, *rows.shape[1:]), torch.nan)])
    return found


def attend_backward(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    output: Tensor | None,
    rows: Tensor,
    *arguments: Any,
) -> list[Tensor]:
    problem, needs = Problem(*arguments[:-1]), arguments[-1]
    found: list[Tensor] = _outside_autocast(
        problem.query.device, lambda: _backward(grad_output, grad_lse, output, rows, problem, needs)
    )
    return found


def _backward(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    output: Tensor | None,
    rows: Tensor,
    problem: Problem,
    needs: list[bool],
) -> list[Tensor]:
    if problem.kernel == "native":
        found = native.backward(grad_output, grad_lse, output, rows, problem, needs)
        if found is not None:
            return found
        rows = rows[:2]
    return tiled.backward(grad_output, grad_lse, rows, problem, needs)


library.impl("attend", attend, "CompositeExplicitAutograd")
library.impl("attend_backward", attend_backward, "CompositeExplicitAutograd")
library.impl("document_runs", _runs.document_runs, "CompositeExplicitAutograd")


# ---------------------------------------------------------------------------- shapes only


def _fake_attend(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = Problem(*arguments)
    B, H, Tq, _ = problem.query.shape
    numbers = (native if problem.kernel == "native" else tiled).row_numbers(problem)
    output = problem.value.new_empty(B, H, Tq, problem.value.shape[-1])
    dtype = torch.float64 if problem.value.dtype == torch.float64 else torch.float32
    lse = problem.value.new_empty((B, H, Tq) if numbers >= 2 else (0,), dtype=dtype)
    return output, lse, problem.value.new_empty(numbers, B, H, Tq, dtype=dtype)


def _fake_backward(grad_output: Any, grad_lse: Any, output: Any, rows: Any, *arguments: Any) -> list[Tensor]:
    problem, needs = Problem(*arguments[:-1]), arguments[-1]
    tensors = [getattr(problem, name) for name, need in zip(DIFFERENTIABLE, needs, strict=True) if need]
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors if t is not None]


def _fake_runs(query_ids: Tensor, key_ids: Tensor, must: bool) -> tuple[Tensor, Tensor]:
    B = query_ids.shape[0] if key_ids.shape[0] == 1 else key_ids.shape[0]
    shape = (B, query_ids.shape[1])
    return query_ids.new_empty(shape, dtype=torch.int64), query_ids.new_empty(shape, dtype=torch.int64)


torch.library.register_fake("regard::attend", _fake_attend, lib=library)
torch.library.register_fake("regard::attend_backward", _fake_backward, lib=library)
torch.library.register_fake("regard::document_runs", _fake_runs, lib=library)


# ---------------------------------------------------------------------------- gradients, once and twice


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    problem = Problem(*inputs)
    kept = output[0] if problem.kernel == "native" and problem.normalize == "softmax" else None
    ctx.save_for_backward(kept, output[2], *inputs[:_TENSOR_COUNT])
    ctx.numbers = inputs[_TENSOR_COUNT:]


def _gradients(
    ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, grad_rows: Tensor | None
) -> Any:
    output, rows, *tensors = ctx.saved_tensors
    arguments = (*tensors, *ctx.numbers)
    needs = list(ctx.needs_input_grad[: len(DIFFERENTIABLE)])
    if grad_lse is not None and grad_lse.ndim == 1:
        grad_lse = None  # of a normaliser that has no log-sum-exp
    if grad_output is None and grad_lse is None:
        return (None,) * len(arguments)
    found = iter(call_backward(grad_output, grad_lse, output, rows, *arguments, needs))
    grads = [next(found) if need else None for need in needs]
    return (*grads, *(None,) * (len(arguments) - len(grads)))


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    grad_output, grad_lse, _, _, *arguments = inputs
    ctx.save_for_backward(grad_output, grad_lse, *arguments[:_TENSOR_COUNT])
    ctx.numbers, ctx.needs = tuple(arguments[_TENSOR_COUNT:-1]), arguments[-1]


def _second_gradients(ctx: Any, *grads: Any) -> Any:
    grad_output, grad_lse, *tensors = ctx.saved_tensors
    problem = Problem(*tensors, *ctx.numbers)
    given = grads[0] if len(grads) == 1 and isinstance(grads[0], (list, tuple)) else grads
    by_output, by_lse, found = again.second_gradients(grad_output, grad_lse, problem, ctx.needs, list(given))
    rest = len(Problem._fields) - len(found)
    return (by_output, by_lse, None, None, *found, *(None,) * rest, None)


torch.library.register_autograd("regard::attend", _gradients, setup_context=_setup, lib=library)
torch.library.register_autograd(
    "regard::attend_backward", _second_gradients, setup_context=_setup_backward, lib=library
)


# ---------------------------------------------------------------------------- torch.func


class Attend(torch.autograd.Function):
    """The operator for torch.func.grad and its kin, which take no operator with a registered gradient."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.regard.attend.default(*arguments)

    setup_context = staticmethod(_setup)
    backward = staticmethod(_gradients)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _vmap_attend(info, in_dims, *arguments)


class AttendBackward(torch.autograd.Function):
    """The operator's gradient, likewise."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return tuple(torch.ops.regard.attend_backward.default(*arguments))

    setup_context = staticmethod(_setup_backward)
    backward = staticmethod(_second_gradients)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        found, dims = _vmap_backward(info, in_dims, *arguments)
        return tuple(found), tuple(dims)


class Eager(torch.autograd.Function):
    """The operator where nothing but autograd is at work: the same, without the dispatcher's time."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        output = attend(*arguments)
        _setup(ctx, arguments, output)
        ctx.mark_non_differentiable(output[2])
        return output

    backward = staticmethod(_gradients)


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


def differentiating() -> bool:
    """Whether torch.func.grad (or vjp, jacrev) is at work here."""
    return _transform("Grad")


def forward_mode() -> bool:
    """Whether forward-mode differentiation (jvp, jacfwd, dual numbers) is at work here."""
    return torch.autograd.forward_ad._current_level >= 0 or _transform("Jvp")


def _transform(kind: str) -> bool:
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(interpreter.key().name == kind for interpreter in stack)


def call(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """The operator, by the way that is open here."""
    found: tuple[Tensor, Tensor, Tensor]
    if watched() or problem.query.device.type == "meta":
        found = _apply(Attend, *problem) if differentiating() else torch.ops.regard.attend.default(*problem)
    elif problem.rows_wanted and torch.is_grad_enabled():
        found = _apply(Eager, *problem)
    else:
        found = attend(*problem)
    return found


def watched() -> bool:
    """Whether tracing, a mode or a transform must see the operator; else its implementation is called as it is."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def call_backward(*arguments: Any) -> Any:
    """The operator's gradient, by the way that is open here."""
    if any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in arguments[:2]):
        return _of_batched_gradients(*arguments)
    if differentiating():
        return _apply(AttendBackward, *arguments)
    if not torch.is_grad_enabled() and not watched():
        return attend_backward(*arguments)
    return torch.ops.regard.attend_backward.default(*arguments)


def _of_batched_gradients(*arguments: Any) -> list[Tensor]:
    """Under `torch.autograd.grad(is_grads_batched=True)`, whose own vmap knows no rules: by that of torch.func."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    given = tuple(g for g in arguments[:2] if g is not None)
    dims = tuple(0 if torch._C._functorch.is_legacy_batchedtensor(g) else None for g in given)
    whole = (
        g if at is None else torch._remove_batch_dim(g, level, 1, 0)
        for g, at in zip(given, dims, strict=True)
    )

    def one(*some: Tensor) -> tuple[Tensor, ...]:
        own = iter(some)
        return tuple(
            call_backward(*(None if g is None else next(own) for g in arguments[:2]), *arguments[2:])
        )

    return [torch._add_batch_dim(grad, 0, level) for grad in torch.func.vmap(one, dims)(*whole)]


# ---------------------------------------------------------------------------- vmap: fold into the batch


def _fold(info: Any, tensor: Tensor | None, dim: int | None, B: int, always: bool) -> Tensor | None:
    """(N, B or 1, ...) as (N * B, ...); what no sample owns stays (1, ...) unless ``always``."""
    if tensor is None or (dim is None and tensor.shape[0] == 1 and not always):
        return tensor
    N = info.batch_size
    tensor = tensor.expand(N, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return tensor.expand(N, B, *tensor.shape[2:]).reshape(N * B, *tensor.shape[2:])


def _folded(info: Any, dims: Any, arguments: tuple[Any, ...], needs: tuple[bool, ...]) -> Problem:
    problem = Problem(*arguments)
    at = Problem(*dims)
    if at.seed is not None:
        raise ValueError(
            "dropout under vmap: say randomness='same'. Every sample then drops other pairs all the same."
        )
    B = problem.query.shape[0 if at.query != 0 else 1]
    folded: dict[str, Any] = {}
    for n, name in enumerate(Problem._fields[:_TENSOR_COUNT]):
        always = n < 3 or (n < len(needs) and needs[n])
        if name != "seed":
            folded[name] = _fold(info, getattr(problem, name), getattr(at, name), B, always)
    return problem._replace(**folded)


def _vmap_attend(info: Any, in_dims: Any, *arguments: Any) -> Any:
    problem = _folded(info, in_dims, arguments, ())
    output, lse, rows = call(problem)
    N = info.batch_size
    lse_dim = 0 if lse.ndim == 3 else None
    lse = lse.unflatten(0, (N, -1)) if lse.ndim == 3 else lse
    B = problem.query.shape[0] // N
    return (output.unflatten(0, (N, B)), lse, rows.unflatten(1, (N, B))), (0, lse_dim, 1)


def _vmap_backward(info: Any, in_dims: Any, *arguments: Any) -> Any:
    grad_output, grad_lse, output, rows, *rest = arguments
    needs = rest[-1]
    problem = _folded(info, in_dims[_BEFORE:-1], tuple(rest[:-1]), tuple(needs))
    N = info.batch_size
    B = problem.query.shape[0] // N
    if rows.ndim == 5:
        rows = rows.movedim(in_dims[3], 1).flatten(1, 2)
    else:
        rows = rows[:, None].expand(-1, N, -1, -1, -1).flatten(1, 2)
    grad_output = _fold(info, grad_output, in_dims[0], B, True)
    grad_lse = _fold(info, grad_lse, in_dims[1], B, True)
    output = _fold(info, output, in_dims[2], B, True)
    found = call_backward(grad_output, grad_lse, output, rows, *problem, needs)
    names = [name for name, need in zip(DIFFERENTIABLE, needs, strict=True) if need]
    original, at = Problem(*rest[:-1]), Problem(*in_dims[_BEFORE:-1])
    grads = []
    for name, grad in zip(names, found, strict=True):
        grad = grad.unflatten(0, (N, B))
        tensor, dim = getattr(original, name), getattr(at, name)
        own = tensor.shape[0] if dim is None else tensor.movedim(dim, 0).shape[1]
        grads.append(grad.sum(1, keepdim=True) if own == 1 and B > 1 else grad)
    return grads, [0] * len(grads)


torch.library.register_vmap("regard::attend", _vmap_attend, lib=library)
torch.library.register_vmap("regard::attend_backward", _vmap_backward, lib=library)
