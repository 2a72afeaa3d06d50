"""The compiled kernels of the CPU: which problems they take, and their arguments.

A problem becomes one flat list of numbers (``csrc/arguments.h`` has its twin): sizes, addresses and strides. What is
not finite, and what the kernels cannot hold, goes to ``tiled``.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor

from regard.kernels import _library
from regard.kernels.problem import UNLIMITED, Problem

WIDEST = 256
_FORWARD = 1
_NOT_FINITE = 4
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SCORES = {"dot": 0, "additive": 1}
_NORMALIZERS = {"softmax": 0, "sigmoid": 1, "relu": 2}
_PADDING = 80  # of diagonals: tiles read past the ends, never using what they read
_PACKED = struct.Struct("105q3d")


def refuses(problem: Problem) -> str | None:
    """Why a problem is not for the compiled kernels, or None."""
    query, value = problem.query, problem.value
    if _library.library() is None:
        return _library.reason()
    if query.device.type != "cpu":
        return "compiled for the CPU"
    if query.dtype not in _KINDS:
        return f"float32, bfloat16 and float16 only, not {str(query.dtype).removeprefix('torch.')}"
    if query.shape[3] > WIDEST or value.shape[3] > WIDEST:
        return f"widths of at most {WIDEST}"
    if problem.score not in _SCORES:
        return f"no {problem.score} scores"
    if problem.normalize not in _NORMALIZERS:
        return f"no {problem.normalize}"
    return None


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor] | None:
    """Output, log-sum-exp and row numbers as ``tiled.forward`` gives them; None where something is not finite."""
    B, H, Tq, _ = problem.query.shape
    Dv, like = problem.value.shape[-1], problem.query
    numbers = 2 if problem.rows_wanted and problem.normalize == "softmax" else 0
    output = torch.empty(B, H, Tq, Dv, dtype=problem.value.dtype)
    lse = torch.empty((B, H, Tq) if numbers else (0,), dtype=torch.float32)
    rows = torch.empty(numbers, B, H, Tq, dtype=torch.float32)
    if not output.numel() and not numbers:
        return output, lse, rows
    held: list[Tensor] = []
    last = [output.data_ptr(), lse.data_ptr() if numbers else 0, rows.data_ptr() if numbers else 0]
    if _call(_FORWARD, problem, held, last):
        return output, lse, rows
    return None


def _call(which: int, problem: Problem, held: list[Tensor], last: list[int]) -> bool:
    """Run a kernel; whether what it wrote may be used. ``held`` keeps what addresses point to."""
    library = _library.library()
    assert library is not None
    numbers = _numbers(problem, held) + last
    numbers += [0] * (105 - len(numbers))
    raised = 1.0 / (1.0 - problem.dropout_p) if problem.dropout_p < 1 else 0.0
    packed = _PACKED.pack(*numbers, problem.factor, problem.softcap, raised)
    status: int = library.handle.regard_call(which, packed)
    if status not in (_library.OK, _NOT_FINITE):
        raise MemoryError("regard: the compiled kernel found no room for its tiles")
    return status == _library.OK


def _numbers(problem: Problem, held: list[Tensor]) -> list[int]:
    query, key, value = problem.query, problem.key, problem.value
    B, H, Tq, D = query.shape
    _, Hkv, Tk, Dv = value.shape
    drawn = problem.seed is not None and problem.dropout_p < 1
    seed = 0 if problem.seed is None else int(problem.seed)
    runs = len(problem.bounds) // 2 if problem.masked else 0
    bounds = [*problem.bounds, UNLIMITED, UNLIMITED][:4]
    found = [B, H, Hkv, Tq, Tk, D, Dv]
    found += [_KINDS[query.dtype], _SCORES[problem.score], _NORMALIZERS[problem.normalize], _library.threads()]
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
    return [*found, problem.seed is not None, seed, round(problem.dropout_p * 2**32) if drawn else 0]


def _kept(tensor: Tensor, held: list[Tensor]) -> Tensor:
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
