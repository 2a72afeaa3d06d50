"""The compiled observer: the forward pass of ``native`` with statistics of its weights, in linear memory."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from regard._call import Call
from regard.kernels import _library, native
from regard.kernels.problem import Problem, reduces
from regard.normalizers import Relu, Sigmoid, Softmax

MOST_TOP = 64  # top weights are kept in lists that are searched from the top
FEW_QUERIES = 16  # which may have a forward kernel of their own: their output is not taken from here
_OBSERVE = 3
_VECTOR = 16  # of what keys received: written behind the last one
_PACKED = struct.Struct("17q")


class Wanted(NamedTuple):
    """statistics: names among "lse", "max", "entropy", "received"; rows: those whose weights are wanted."""

    statistics: frozenset[str]
    topk: int
    pool: int
    rows: tuple[int, ...] | None


class Seen(NamedTuple):
    """The forward pass's output, and the statistics by their names in ``Observation``."""

    output: Tensor
    statistics: dict[str, Tensor]


def refuses(call: Call, wanted: Wanted) -> str | None:
    """Why the compiled observer does not take a call, or None."""
    if wanted.topk > MOST_TOP:
        return f"at most {MOST_TOP} top weights, not {wanted.topk}"
    if type(call.normalize) not in (Softmax, Sigmoid, Relu):
        return f"not for {type(call.normalize).__name__}"
    if 0 in call.query.shape[:3] or 0 in call.value.shape:
        return "nothing to see"
    return reduces(call) or native.refuses(call)


def observe(problem: Problem, wanted: Wanted) -> Seen | None:
    """Output and statistics; None where something is not finite."""
    dtype = problem.value.dtype
    problem = native._one_dtype(problem)
    room, held = _Room(problem, wanted), list[Tensor]()
    last = [room.output.data_ptr(), native._address(room.lse), 0]
    more = _PACKED.pack(*room.numbers())
    if not native._call(_OBSERVE, problem, held, last, more):
        return None
    return Seen(room.output.to(dtype), room.statistics())


class _Room:
    """Where the compiled kernel writes."""

    def __init__(self, problem: Problem, wanted: Wanted) -> None:
        self.wanted = wanted
        (B, H, self.Tq, _), (Tk, Dv) = problem.query.shape, problem.value.shape[2:]
        asked = wanted.statistics
        self.output = torch.empty(B, H, self.Tq, Dv, dtype=problem.value.dtype)
        softmax = problem.normalize == "softmax"
        self.lse = torch.empty(B, H, self.Tq) if "lse" in asked and softmax else None
        self.max = torch.empty(B, H, self.Tq) if "max" in asked else None
        self.entropy = torch.empty(B, H, self.Tq) if "entropy" in asked else None
        threads = _library.threads()
        self.splits = 1 if threads < 2 or B * H >= 4 * threads else -(-4 * threads // (B * H))
        self.Tk, self.keys = Tk, Tk + _VECTOR
        self.received = torch.zeros(self.splits, B, H, self.keys) if "received" in asked else None
        self.topk = min(wanted.topk, Tk)
        self.top_weights = torch.empty(B, H, self.Tq, self.topk) if wanted.topk else None
        self.top_keys = torch.empty(B, H, self.Tq, self.topk, dtype=torch.int64) if wanted.topk else None
        self.tall, self.across = -(-self.Tq // max(1, wanted.pool)), -(-Tk // max(1, wanted.pool))
        self.columns = -(-Tk // self.across)
        self.pooled = self.pooled_max = self.edges = None
        if wanted.pool:
            cells = (B, H, -(-self.Tq // self.tall), self.columns)
            self.pooled, self.pooled_max = torch.zeros(cells), torch.zeros(cells)
            self.edges = torch.zeros(2, self.splits, B, H, self.columns) if self.splits > 1 else None
        self.rows = self.row_weights = None
        if wanted.rows is not None:
            self.rows = torch.tensor(wanted.rows, dtype=torch.int64)
            self.row_weights = torch.zeros(B, H, len(wanted.rows), Tk)

    def numbers(self) -> list[int]:
        chosen = 0 if self.rows is None else self.rows.numel()
        found = [self.topk, self.splits, self.tall, self.across, self.columns, chosen, self.keys]
        tensors = [self.max, self.entropy, self.received, self.pooled, self.pooled_max, self.edges]
        tensors += [self.top_weights, self.top_keys, self.rows, self.row_weights]
        return found + [native._address(tensor) for tensor in tensors]

    def statistics(self) -> dict[str, Tensor]:
        found = {
            "lse": self.lse,
            "max": self.max,
            "entropy": self.entropy,
            "received": None
            if self.received is None
            else native._total(self.received)[..., : self.Tk].contiguous(),
            "top_weights": self.top_weights,
            "top_keys": self.top_keys,
            "pooled": self.pooled,
            "pooled_max": self.pooled_max,
            "row_weights": self.row_weights,
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}
