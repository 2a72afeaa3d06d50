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
_OBSERVE = 2
_VECTOR = 16  # of what keys received: written behind the last one
_PACKED = struct.Struct("16q")


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
        self.cells = (B, H, -(-self.Tq // self.tall), -(-Tk // self.across))
        edges = self.splits if self.splits > 1 else 0
        self.maps = torch.zeros(2, B * H * (self.cells[2] + edges), self.cells[3]) if wanted.pool else None
        self.starts = torch.zeros(self.splits, dtype=torch.int64)
        self.rows = None if wanted.rows is None else torch.tensor(wanted.rows, dtype=torch.int64)
        self.row_weights = None if self.rows is None else torch.zeros(B, H, self.rows.numel(), Tk)

    def numbers(self) -> list[int]:
        chosen = 0 if self.rows is None else self.rows.numel()
        found = [self.topk, self.splits, self.tall, self.across, self.cells[3], chosen, self.keys]
        tensors = [self.max, self.entropy, self.received, self.maps, self.starts]
        tensors += [self.top_weights, self.top_keys, self.rows, self.row_weights]
        return found + [native._address(tensor) for tensor in tensors]

    def statistics(self) -> dict[str, Tensor]:
        found = {"lse": self.lse, "max": self.max, "entropy": self.entropy}
        if self.received is not None:
            found["received"] = native._total(self.received)[..., : self.Tk].contiguous()
        found |= {"top_weights": self.top_weights, "top_keys": self.top_keys, "row_weights": self.row_weights}
        if self.maps is not None:
            found["pooled"], found["pooled_max"] = self._joined(self.maps)
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _joined(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """The maps of sums and of maxima, with what the parts of a head left at their edges, part after part."""
        B, H, height, columns = self.cells
        pooled, pooled_max = maps[:, : B * H * height].view(2, *self.cells)
        if self.splits > 1:
            edges = maps[:, B * H * height :].view(2, self.splits, B, H, columns)
            for part, row in enumerate(self.starts.tolist()):
                pooled[:, :, row] += edges[0, part]
                pooled_max[:, :, row] = torch.maximum(pooled_max[:, :, row], edges[1, part])
        return pooled, pooled_max
