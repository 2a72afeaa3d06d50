"""A call of built-ins as plain tensors and numbers: what a kernel gets, and the arguments of its operator.

Everything reduces to a few linear-size forms: masks are runs, position biases are diagonals, bilinear, linear
concat and cosine scores are inner products of transformed inputs. What is transformed stays in float32 or better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import _runs, biases, masks, normalizers, scores
from regard._call import Call
from regard._frame import Frame, Offset, wide
from regard.kernels.reference import finite_rows
from regard.normalizers import Entmax, Entmax15, Relu, Sigmoid, Softmax, Sparsemax
from regard.scores import Additive, Bilinear, Concat, Cosine, Distance, Dot, unit

UNLIMITED = 1 << 40


class Problem(NamedTuple):
    """Arguments of ``regard::attend``. Per-head parameters are (B|1, H|1), tensors of pairs (B|1, H|1, Tq|1, Tk|1).

    score: "dot" (factor * scale * q . k, soft-capped where softcap > 0), "additive" (weight . tanh(q + k)) or
    "distance" (-factor * scale * |q - k|^2).
    normalize: "softmax", "sparsemax", "entmax15", "entmax", "sigmoid" or "relu".
    dense: True may attend, unless negated.
    bounds: left and right of each run, UNLIMITED where there is none; start, stop: (B|1, H|1, Tq|1).
    kernel: "native" or "tiled", the one that the planner chose; native hands over what is not finite.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: Tensor | None
    weight: Tensor | None
    sink: Tensor | None
    alpha: Tensor | None
    shift: Tensor | None
    bias: Tensor | None
    diagonal: Tensor | None
    dense: Tensor | None
    start: Tensor | None
    stop: Tensor | None
    start2: Tensor | None
    stop2: Tensor | None
    offsets: Tensor | None
    seed: Tensor | None
    bounds: list[int]
    masked: bool
    negated: bool
    offset: int
    score: str
    normalize: str
    factor: float
    softcap: float
    dropout_p: float
    rows_wanted: bool
    kernel: str = "tiled"

    @property
    def frame(self) -> Frame:
        B, H, Tq, _ = self.query.shape
        _, Hkv, Tk, _ = self.key.shape
        return Frame((B,), 4, B, H, Hkv, Tq, Tk, self.query.device)

    @property
    def place(self) -> Offset:
        return self.offset if self.offsets is None else self.offsets

    @property
    def runs(self) -> list[_runs.Run] | None:
        """The runs of the mask, None where every key may be seen."""
        if not self.masked:
            return None
        ends = ((self.start, self.stop), (self.start2, self.stop2))
        pairs = zip(self.bounds[::2], self.bounds[1::2], ends[: len(self.bounds) // 2], strict=True)
        return [_runs.Run(_limit(left), _limit(right), *end) for left, right, end in pairs]


DIFFERENTIABLE = ("query", "key", "value", "scale", "weight", "sink", "alpha", "shift", "bias", "diagonal")


def _limit(bound: int) -> int | None:
    return None if bound == UNLIMITED else bound


def lower(call: Call, rows_wanted: bool, kernel: str = "tiled") -> Problem:
    """A checked call of built-ins, lowered. Nothing here depends on values inside tensors that need a gradient."""
    visible = _runs.lower(call.mask, call.frame, call.offset)
    strided, diagonal = biases.lower(call.bias, call.frame, call.offset)
    score = _score(call)
    # The operator's list is never empty: torch takes an empty list for one of tensors.
    runs = visible.runs or (_runs.Run(left=0, right=-1),)
    first = runs[0]
    second = runs[1] if len(runs) > 1 else _runs.Run()
    bounds = [UNLIMITED if bound is None else bound for run in runs for bound in (run.left, run.right)]
    whole = call.offset if isinstance(call.offset, Tensor) else None
    return Problem(
        **score,
        value=call.value,
        **_normalizer(call.normalize, call.query),
        bias=strided,
        diagonal=diagonal,
        dense=visible.dense,
        start=first.start,
        stop=first.stop,
        start2=second.start,
        stop2=second.stop,
        offsets=whole,
        seed=call.seed,
        bounds=bounds,
        masked=visible.runs is not None,
        negated=visible.negated,
        offset=0 if isinstance(call.offset, Tensor) else call.offset,
        dropout_p=call.dropout_p,
        rows_wanted=rows_wanted,
        kernel=kernel,
    )


def by_head(value: Any) -> Tensor | None:
    """A 0-d or (H,) parameter as (1, 1) or (1, H); None for a number."""
    return value.reshape(1, -1) if isinstance(value, Tensor) else None


def _score(call: Call) -> dict[str, Any]:
    score, query, key = call.score, call.query, call.key
    kind, softcap, weight = "dot", 0.0, None
    scale: Any = getattr(score, "scale", 1.0)
    if isinstance(score, Dot):
        scale, softcap = score.factor(query.shape[-1]), score.softcap or 0.0
    elif isinstance(score, Bilinear):
        query, key = _through(query, score.project), wide(key)
    elif isinstance(score, Concat):
        query, key = _concat(score, query, key)
    elif isinstance(score, Cosine):
        query, key = _through(query, unit), _through(key, unit)
    elif isinstance(score, Additive):
        kind = "additive"
        weight = score.v[None, None] if score.v.ndim == 1 else score.v[None]
    else:
        assert isinstance(score, Distance)
        kind = "distance"
    tensor = by_head(scale)
    factor = float(scale) if tensor is None else 1.0
    found: dict[str, Any] = {"query": query, "key": key, "score": kind, "factor": factor}
    return found | {"scale": tensor, "softcap": softcap, "weight": weight}


def _through(x: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """A transform of rows, in float32 or better; rows that are not finite stay so and send no gradient."""
    x, bad = finite_rows(wide(x))
    changed = transform(x)
    return changed if bad is None else changed.masked_fill(bad[..., None], torch.nan)


def _concat(score: Concat, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """w_query . q + w_key . k as the inner product of [w_query . q, w_key] and [1, k]: heads stay grouped."""
    along = _through(query, score.query_half)
    w_key = score.w_key.to(along.dtype)
    w_key = w_key if w_key.ndim == 1 else w_key[:, None, :]
    query = torch.cat([along, w_key.expand(*along.shape[:3], key.shape[-1])], -1)
    key = wide(key)
    return query, torch.cat([key.new_ones(*key.shape[:-1], 1), key], -1)


def _normalizer(normalize: Any, query: Tensor) -> dict[str, Any]:
    def tensor(value: Any) -> Tensor:
        found = by_head(value)
        return query.new_full((1, 1), value, dtype=wide(query[:0]).dtype) if found is None else found

    found: dict[str, Any] = {"sink": None, "alpha": None, "shift": None}
    if isinstance(normalize, Softmax):
        sink = None if normalize.sink is None else tensor(normalize.sink)
        return found | {"normalize": "softmax", "sink": sink}
    if isinstance(normalize, Entmax):
        return found | {"normalize": "entmax", "alpha": tensor(normalize.alpha)}
    if isinstance(normalize, Sigmoid):
        return found | {"normalize": "sigmoid", "shift": tensor(normalize.bias)}
    return found | {
        "normalize": {Sparsemax: "sparsemax", Entmax15: "entmax15", Relu: "relu"}[type(normalize)]
    }


def reduces(call: Call) -> str | None:
    """Why a call cannot be lowered, or None when it can."""
    if type(call.score) not in scores.BUILT_IN:
        return f"the score is a callable of yours ({type(call.score).__name__})"
    if type(call.normalize) not in normalizers.BUILT_IN:
        return "the normaliser is a callable of yours"
    if masks.rules(call.mask):
        return "the mask has a Rule"
    return None
