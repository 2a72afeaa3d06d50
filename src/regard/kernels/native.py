"""The compiled kernels of the CPU: which problems they take, and their arguments.

A problem becomes one flat list of numbers (``csrc/arguments.h`` has its twin): sizes, addresses and strides. What is
not finite, and what the kernels cannot hold, goes to ``tiled``.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from regard._call import Call
from regard.kernels import _library
from regard.kernels.problem import DIFFERENTIABLE, UNLIMITED, Problem
from regard.scores import Concat, Distance

WIDEST = 256
_FORWARD, _BACKWARD = 0, 1
_GROUPS = {"v4": 32, "wide": 32}  # queries of a group, 16 elsewhere: gradients of keys are padded to it
_NOT_FINITE = 4
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SCORES = {"dot": 0, "additive": 1}
_NUMBERS = {"softmax": 0, "sigmoid": 1, "relu": 2, "sparsemax": 3, "entmax15": 4, "entmax": 5}
_ROW_NUMBERS = {"softmax": 2, "sparsemax": 1, "entmax15": 1, "entmax": 1}
_PADDING = 80  # of diagonals: tiles read past the ends, never using what they read
_PACKED = struct.Struct("106q3d")


def refuses(call: Call) -> str | None:
    """Why a call of built-ins is not for the compiled kernels, or None."""
    if call.query.device.type != "cpu":
        return "compiled for the CPU"
    if _library.library() is None:
        return _library.reason()
    if call.query.dtype not in KINDS:
        return f"not for {str(call.query.dtype).removeprefix('torch.')}: float32, bfloat16 and float16 only"
    widest = max(call.query.shape[3], call.key.shape[3] + isinstance(call.score, Concat), call.value.shape[3])
    if widest > WIDEST:
        return f"widths of at most {WIDEST}, not {widest}"
    if isinstance(call.score, Distance):
        return "distances are computed from differences"
    return None


def row_numbers(problem: Problem) -> int:
    """How many numbers a row the forward pass leaves for the backward pass.

    Under softmax in half precision the output is among them, not yet rounded: what the gradient takes from it cancels.
    """
    numbers = _ROW_NUMBERS.get(problem.normalize, 0) if problem.rows_wanted else 0
    return (
        numbers + problem.value.shape[-1]
        if numbers == 2 and problem.value.dtype != torch.float32
        else numbers
    )


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor] | None:
    """Output, log-sum-exp and row numbers as ``tiled.forward`` gives them; None where something is not finite."""
    dtype, numbers = problem.value.dtype, row_numbers(problem)
    carried, problem = numbers > 2, _one_dtype(problem)
    B, H, Tq, _ = problem.query.shape
    Dv = problem.value.shape[-1]
    output = torch.empty(B, H, Tq, Dv, dtype=problem.value.dtype)
    lse = torch.empty((B, H, Tq) if numbers >= 2 else (0,), dtype=torch.float32)
    rows = torch.empty(numbers, B, H, Tq, dtype=torch.float32)
    if not output.numel() and not numbers:
        return output.to(dtype), lse, rows
    held: list[Tensor] = []
    last = [output.data_ptr(), _address(lse), _address(rows), carried]
    if _call(_FORWARD, problem, held, last):
        return output.to(dtype), lse, rows
    return None


# Everything between the three tensors and the causal bound, and between the offset and the output, that is absent.
_ABSENT = (0,) * 28
_UNUSED = (0,) * 16


def short(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor | None:
    """Dot and softmax of checked (B, H, T, D) tensors, without gradients; None where it is not for this kernel."""
    library = _library.library()
    B, H, Tq, D = query.shape
    _, Hkv, Tk, Dv = value.shape
    if library is None or D > WIDEST or Dv > WIDEST:
        return None
    held: list[Tensor] = []
    output = torch.empty(B, H, Tq, Dv, dtype=query.dtype)
    packed = _PACKED.pack(
        *(B, H, Hkv, Tq, Tk, D, Dv, KINDS[query.dtype], 0, 0, _library.threads()),
        *_rows(query, held),
        *_rows(key, held),
        *_rows(value, held),
        *_ABSENT,
        *(0, causal, UNLIMITED, UNLIMITED, 0, UNLIMITED),
        *_UNUSED,
        *(0, 0, 0, 0, 0, output.data_ptr()),
        *_NO_GRADIENTS,
        *(scale, 0.0, 0.0),
    )
    return output if library.call(_FORWARD, packed) == _library.OK else None


_NO_GRADIENTS = (0,) * 27


def _one_dtype(problem: Problem) -> Problem:
    """What was transformed before it came here is in float32: so is the rest, then."""
    if problem.query.dtype == problem.key.dtype == problem.value.dtype:
        return problem
    query, key, value = (x.float() for x in (problem.query, problem.key, problem.value))
    return problem._replace(query=query, key=key, value=value)


def backward(
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    output: Tensor | None,
    rows: Tensor,
    problem: Problem,
    needs: list[bool],
) -> list[Tensor] | None:
    """Gradients as ``tiled.backward`` gives them, of the output and row numbers that ``forward`` gave.

    None where something is not finite, and for the gradient of a scale that is 0.
    """
    wanted = [name for name, need in zip(DIFFERENTIABLE, needs, strict=True) if need]
    if "scale" in wanted and not bool(problem.scale.all()):  # type: ignore[union-attr]
        return None
    given, problem = problem, _one_dtype(problem)
    dtype = problem.value.dtype
    if grad_output is None:
        grad_output = torch.zeros(*problem.query.shape[:3], problem.value.shape[-1], dtype=dtype)
    grad_output = grad_output.to(dtype)
    output = grad_output if output is None else output.to(dtype)
    room = _Room(problem, wanted)
    held: list[Tensor] = []
    last = [0, 0, _address(rows), rows.shape[0] > 2]
    last += _rows(grad_output, held) + _rows(output, held)
    last += [0 if grad_lse is None else _kept(grad_lse.to(torch.float32).contiguous(), held).data_ptr()]
    if not _call(_BACKWARD, problem, held, last + room.numbers()):
        return None
    found = room.gradients(grad_output, grad_lse, output, rows)
    return [found[name].to(getattr(given, name).dtype) for name in wanted]


class _Room:
    """Where the compiled kernel sums gradients up, in float32."""

    def __init__(self, problem: Problem, wanted: list[str]) -> None:
        self.problem, self.wanted = problem, wanted
        B, H, Tq, D = problem.query.shape
        _, Hkv, Tk, Dv = problem.value.shape
        bias, self.in_turn, self.splits = problem.bias, False, 1
        whole = bias is not None and "bias" in wanted and bias.shape[2] > 1 and bias.shape[3] > 1
        if whole:
            assert bias is not None
            self.in_turn = bias.shape[0] < B or bias.shape[1] < H
        threads, heads = _library.threads(), B * Hkv
        if self.in_turn:
            self.splits = threads
        elif heads % threads and heads < 4 * threads:
            self.splits = -(-2 * threads // max(1, heads))
        self.splits = max(1, min(self.splits, -(-Tq // 64)))
        self.query = torch.empty(B, H, Tq, D)
        self.key = torch.empty(self.splits, B, Hkv, Tk, _padded(D))
        self.value = torch.empty(self.splits, B, Hkv, Tk, _padded(Dv))
        self.row = torch.empty(B, H, Tq) if "shift" in wanted or "alpha" in wanted else None
        self.weight = torch.zeros(self.splits, B, H, D) if problem.weight is not None else None
        self.bias = self.diagonal = None
        if bias is not None and "bias" in wanted:
            shape = bias.shape if whole else (self.splits, B, H, *bias.shape[2:])
            self.bias = torch.zeros(shape)
        if problem.diagonal is not None and "diagonal" in wanted:
            self.diagonal = torch.zeros(self.splits, B, H, problem.diagonal.shape[-1] + 2 * _PADDING)

    def numbers(self) -> list[int]:
        B, H, Tq, _ = self.problem.query.shape
        found = [self.query.data_ptr(), self.key.data_ptr(), self.value.data_ptr()]
        diagonal = 0 if self.diagonal is None else self.diagonal.data_ptr() + 4 * (Tq - 1 + _PADDING)
        found += [_address(self.row), diagonal, _address(self.weight)]
        if self.bias is None:
            found += [0, 0, 0, 0, 0, 0]
        else:
            alone = self.bias.ndim == 5
            found += [self.bias.data_ptr(), *_strides(self.bias[0] if alone else self.bias)]
            found += [self.bias.stride(0) if alone else 0]
        return [*found, 0 if self.diagonal is None else self.diagonal.stride(0), self.splits, self.in_turn]

    def gradients(
        self, grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, rows: Tensor
    ) -> dict[str, Tensor]:
        problem, found = self.problem, {"query": self.query}
        found["key"] = _total(self.key)[..., : problem.key.shape[-1]]
        found["value"] = _total(self.value)[..., : problem.value.shape[-1]]
        if self.weight is not None and problem.weight is not None:
            found["weight"] = _total(self.weight).sum_to_size(problem.weight.shape)
        if self.bias is not None and problem.bias is not None:
            bias = self.bias if self.bias.ndim == 4 else _total(self.bias)
            sums = bias if bias.shape == problem.bias.shape else bias.double()
            found["bias"] = sums.sum_to_size(problem.bias.shape)
        if self.diagonal is not None and problem.diagonal is not None:
            inner = _total(self.diagonal)[..., _PADDING:-_PADDING]
            found["diagonal"] = inner.double().sum_to_size(problem.diagonal.shape)
        if "scale" in self.wanted and problem.scale is not None:
            # dquery = scale sum_j ds_ij k_j: its product with the query is the scale times the gradient of the scale.
            along = (self.query.double() * problem.query).sum((-1, -2)) / problem.scale
            found["scale"] = along.sum_to_size(problem.scale.shape)
        if self.row is not None and problem.shift is not None:
            found["shift"] = self.row.double().sum(-1).sum_to_size(problem.shift.shape)
        if self.row is not None and problem.alpha is not None:
            found["alpha"] = self.row.double().sum(-1).sum_to_size(problem.alpha.shape)
        if "sink" in self.wanted and problem.sink is not None:
            found["sink"] = _sink_gradient(problem.sink, grad_output, grad_lse, output, rows)
        return found


def _sink_gradient(
    sink: Tensor, grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, rows: Tensor
) -> Tensor:
    """The sink is a key of value 0: of weight w, its gradient is w (dlse - grad_output . output), over all rows."""
    peak, total = rows[:2]
    share = torch.exp(sink.double()[..., None] - peak) / total
    share = share.masked_fill(total == 0, 0.0)
    output = rows[2:].permute(1, 2, 3, 0) if rows.shape[0] > 2 else output.float()
    mean = torch.linalg.vecdot(grad_output.double(), output.double())
    change = -mean if grad_lse is None else grad_lse - mean
    total_change: Tensor = (change * share).sum(-1)
    return total_change.sum_to_size(sink.shape)


def _padded(width: int) -> int:
    library = _library.library()
    assert library is not None
    group = _GROUPS.get(library.variant, 16)
    return -(-width // group) * group


def _total(splits: Tensor) -> Tensor:
    return splits[0] if splits.shape[0] == 1 else splits.sum(0)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None or not tensor.numel() else tensor.data_ptr()


def _call(which: int, problem: Problem, held: list[Tensor], last: list[int], more: bytes = b"") -> bool:
    """Run a kernel; whether what it wrote may be used. ``held`` keeps what addresses point to.

    more: what the kernel takes behind the arguments of a call.
    """
    library = _library.library()
    assert library is not None
    numbers = _numbers(problem, held) + last
    numbers += [0] * (106 - len(numbers))
    raised = 1.0 / (1.0 - problem.dropout_p) if _threshold(problem) < 1 << 32 else 0.0
    packed = _PACKED.pack(*numbers, problem.factor, problem.softcap, raised) + more
    status = library.call(which, packed)
    if status not in (_library.OK, _NOT_FINITE):
        raise MemoryError("regard: the compiled kernel found no room for its tiles")
    return status == _library.OK


def _numbers(problem: Problem, held: list[Tensor]) -> list[int]:
    query, key, value = problem.query, problem.key, problem.value
    B, H, Tq, D = query.shape
    _, Hkv, Tk, Dv = value.shape
    threshold = _threshold(problem) % (1 << 32)
    seed = 0 if problem.seed is None else int(problem.seed)
    runs = len(problem.bounds) // 2 if problem.masked else 0
    bounds = [*problem.bounds, UNLIMITED, UNLIMITED][:4]
    found = [B, H, Hkv, Tq, Tk, D, Dv]
    found += [KINDS[query.dtype], _SCORES[problem.score], _NUMBERS[problem.normalize], _library.threads()]
    for rows in (query, key, value):
        found += _rows(rows, held)
    for by_head in (problem.scale, problem.weight, problem.sink, problem.alpha, problem.shift):
        found += _by_head(by_head, held)
    found += _diagonal(problem.diagonal, Tq, held)
    found += _pairs(problem.bias, torch.float32, held)
    found += _pairs(problem.dense, torch.bool, held)
    found += [problem.negated, runs, bounds[0], bounds[2], bounds[1], bounds[3]]
    for end in (problem.start, problem.start2, problem.stop, problem.stop2):
        found += _ends(end, held)
    found += [_whole(problem.offsets, held), problem.offset]
    return [*found, problem.seed is not None, seed, threshold]


def _threshold(problem: Problem) -> int:
    """Pairs whose 32-bit hash is below it are dropped; 2^32 drops them all."""
    return round(problem.dropout_p * 2**32) if problem.seed is not None else 0


def _kept(tensor: Tensor, held: list[Tensor]) -> Tensor:
    """The tensor with its numbers where its address says: nothing lazy about their sign, or about zeros."""
    tensor = tensor.resolve_neg()
    tensor = tensor.clone() if tensor._is_zerotensor() else tensor
    held.append(tensor)
    return tensor


def _strides(tensor: Tensor) -> list[int]:
    """Strides, 0 along what is broadcast."""
    return [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]


def _rows(tensor: Tensor, held: list[Tensor]) -> list[int]:
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        tensor = tensor.contiguous()
    return [_kept(tensor, held).data_ptr(), *tensor.stride()[:3]]


def _by_head(tensor: Tensor | None, held: list[Tensor]) -> list[int]:
    if tensor is None:
        return [0, 0, 0]
    tensor = _kept(tensor.to(torch.float32).contiguous(), held)
    return [tensor.data_ptr(), *_strides(tensor)[:2]]


def _diagonal(tensor: Tensor | None, Tq: int, held: list[Tensor]) -> list[int]:
    if tensor is None:
        return [0, 0, 0]
    padded = _kept(torch.nn.functional.pad(tensor.to(torch.float32), (_PADDING, _PADDING)), held)
    return [padded.data_ptr() + 4 * (Tq - 1 + _PADDING), *_strides(padded)[:2]]


def _pairs(tensor: Tensor | None, dtype: torch.dtype, held: list[Tensor]) -> list[int]:
    if tensor is None:
        return [0, 0, 0, 0, 0]
    tensor = _kept(tensor.to(dtype), held)
    return [tensor.data_ptr(), *_strides(tensor)]


def _ends(tensor: Tensor | None, held: list[Tensor]) -> list[int]:
    if tensor is None:
        return [0, 0, 0, 0]
    tensor = _kept(tensor.to(torch.int64), held)
    return [tensor.data_ptr(), *_strides(tensor)]


def _whole(tensor: Tensor | None, held: list[Tensor]) -> int:
    return 0 if tensor is None else _kept(tensor.to(torch.int64).contiguous(), held).data_ptr()
