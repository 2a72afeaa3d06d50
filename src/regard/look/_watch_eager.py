"""Attention that a model writes out by itself: softmax(query key^T) value, followed from product to product.

A product of two tensors starts scores; scaling, soft-caps, biases, masks and sinks are followed until a softmax; its
weights are followed through dropout and casts until they multiply the values. What is not attention never gets there.
Nothing of the model is replaced, and nothing is kept that the model itself has let go of when its module ends.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard import _plan
from regard._attention import attention_weights
from regard._frame import wide
from regard.look._places import Places
from regard.look._watch_einsum import Products
from regard.look._watch_groups import ungrouped
from regard.look._watch_seen import Seen
from regard.normalizers import Softmax
from regard.scores import Dot

_SAME_SHAPE = (
    "to",
    "float",
    "double",
    "half",
    "bfloat16",
    "type",
    "type_as",
    "contiguous",
    "clone",
    "detach",
    "alias",
)
_SHAPES = ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze")
_TIMES = ("mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply")
_OVER = ("div", "__truediv__", "true_divide", "div_", "__itruediv__", "divide")
_PLUS = ("add", "__add__", "__radd__", "add_", "__iadd__")
_MINUS = ("sub", "__sub__", "sub_", "__isub__")
_FILLED = ("masked_fill", "masked_fill_")
_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")
FOLLOWED = frozenset(
    (*_SAME_SHAPE, *_SHAPES, *_TIMES, *_OVER, *_PLUS, *_MINUS, *_FILLED, *_PRODUCTS)
    + (
        "tanh",
        "tanh_",
        "where",
        "cat",
        "concat",
        "softmax",
        "dropout",
        "dropout_",
        "__getitem__",
        "nan_to_num",
    )
)
_ROWS_CHECKED = 8
_MOST_CHAINS = 8


@dataclass
class _Scores:
    """Scores on their way to a softmax: `now` is query key^T as it has become, and what was done to it."""

    now: weakref.ref[Tensor]
    query: Tensor
    key: Tensor
    depth: int
    scale: Any = 1.0
    before_tanh: Any = None
    bias: list[Tensor] = field(default_factory=list)
    sink: Tensor | None = None
    heads: tuple[int, int] | None = None
    known: bool = True
    shifted: bool = False
    dtype: torch.dtype = torch.float32
    computed: torch.dtype = torch.float32  # what the product was computed in: autocast casts

    def become(self, now: Tensor) -> None:
        self.now = weakref.ref(now)
        self.dtype = now.dtype
        if now.dim() == 4:
            self.heads = (int(now.shape[0]), int(now.shape[1]))


@dataclass
class _Weights:
    """Weights on their way to the values: `now` is what will multiply them, `weights` the same before dropout."""

    now: Tensor
    weights: Tensor
    scores: _Scores | None
    lse: Tensor | None
    depth: int
    dropout_p: float = 0.0


class Followed:
    """Follows every function call of a watched model; `follow` gives a call of attention when one is complete."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._scores: list[_Scores] = []
        self._weights: _Weights | None = None

    def module_left(self) -> None:
        """Let go of what began in a module that has ended."""
        depth = len(self._places.stack)
        self._scores = [scores for scores in self._scores if depth > scores.depth]
        if self._weights is not None and depth <= self._weights.depth:
            self._weights = None

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> Seen | None:
        """Look at one call of a function."""
        name = getattr(func, "__name__", "")
        if not isinstance(result, Tensor) or not args:
            return None
        if name in _PRODUCTS:
            return self._product(name, args, kwargs, result)
        weights = self._weights
        if weights is not None and args[0] is weights.now:
            _follow_weights(weights, name, args, kwargs, result)
        elif name == "softmax":
            self._softmax(args, kwargs, result)
        elif self._scores:
            parts = args[0] if name in ("cat", "concat") else args
            scores = self._of(parts)
            if scores is not None:
                _follow_scores(scores, name, parts, kwargs, result)
        return None

    def _of(self, tensors: Any) -> _Scores | None:
        """The scores that one of these tensors is, the first of them."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                for scores in reversed(self._scores):
                    if scores.now() is tensor:
                        return scores
        return None

    def _product(self, name: str, args: tuple[Any, ...], kwargs: Any, result: Tensor) -> Seen | None:
        made = Products.of(name, args, kwargs, result)
        if made is None:
            return None
        if self._weights is not None and made.left is self._weights.now:
            weights, self._weights, self._scores = self._weights, None, []
            mixed = made.mixed()
            return None if mixed is None else _seen(weights, *mixed, self._places.current.module)
        scored = made.scored()
        if scored is not None:
            query, key = scored
            scores = _Scores(weakref.ref(result), query, key, len(self._places.stack), made.alpha)
            scores.computed = result.dtype
            scores.become(result)
            if made.added is not None:
                scores.bias.append(made.added)
            self._scores = [*self._scores[1 - _MOST_CHAINS :], scores]
        return None

    def _softmax(self, args: tuple[Any, ...], kwargs: Any, result: Tensor) -> None:
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if dim not in (-1, result.dim() - 1):
            return
        scores = self._of(args[:1])
        # Without scores that are known, weights have heads or samples, and are made inside the model: not its tokens'.
        if scores is None and (result.dim() < 3 or not self._places.stack) or result.dim() > 4:
            return
        inside = isinstance(self._places.current.module, nn.Softmax)
        depth = scores.depth if scores is not None else len(self._places.stack) - inside
        lse = None if scores is None or scores.shifted else _log_sum_exp(args[0].detach())
        self._weights = _Weights(result, result, scores, lse, depth)


def _other(args: Any, now: Tensor) -> Any:
    return args[1] if len(args) > 1 and args[0] is now else args[0]


def _follow_scores(scores: _Scores, name: str, args: Any, kwargs: Any, result: Tensor) -> None:
    now = scores.now()
    assert now is not None
    if name in (*_TIMES, *_OVER):
        _scaled(scores, _other(args, now), name in _OVER)
    elif name in ("tanh", "tanh_"):
        scores.known &= scores.before_tanh is None and not scores.bias
        scores.before_tanh, scores.scale = scores.scale, 1.0
    elif name in (*_PLUS, *_MINUS):
        _added(scores, _other(args, now), -1.0 if name in _MINUS else 1.0)
    elif name in _FILLED:
        _blocked(scores, args[1], args[2] if len(args) > 2 else kwargs.get("value"))
    elif name == "where":
        chosen = len(args) > 2 and args[1] is now
        _blocked(scores, ~args[0] if chosen else None, args[2] if chosen else None)
    elif name in ("cat", "concat"):
        _with_sink(scores, args)
    elif name not in (*_SAME_SHAPE, *_SHAPES):
        scores.known = False
    scores.become(result)


def _scaled(scores: _Scores, factor: Any, over: bool) -> None:
    if isinstance(factor, Tensor) and factor.numel() == 1:
        factor = factor.item()
    if not isinstance(factor, (int, float)) or not factor:
        scores.known = False
        return
    factor = 1.0 / factor if over else factor
    scores.scale = scores.scale * factor
    scores.bias = [bias * factor for bias in scores.bias]


def _added(scores: _Scores, other: Any, sign: float) -> None:
    if not isinstance(other, Tensor) or other.shape[-1:] == (1,):
        scores.shifted = True  # the same for all keys of a row: weights stay what they are
        return
    bias = other.detach() if other.is_floating_point() else other.detach().to(scores.dtype)
    scores.bias.append(bias if sign > 0 else -bias)


def _blocked(scores: _Scores, mask: Any, value: Any) -> None:
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if (
        not isinstance(mask, Tensor)
        or mask.dtype != torch.bool
        or not isinstance(value, (int, float))
        or value > -1e3
    ):
        scores.known = False
        return
    zeros = torch.zeros(mask.shape, dtype=scores.dtype, device=mask.device)
    scores.bias.append(zeros.masked_fill_(mask, value))


def _with_sink(scores: _Scores, parts: Any) -> None:
    sink = parts[-1]
    if len(parts) != 2 or sink.shape[-1] != 1 or sink.dim() != 4:
        scores.known = False
        return
    scores.sink = sink[0, :, 0, 0].detach()
    scores.known &= bool((sink == scores.sink[:, None, None]).all())


def _follow_weights(weights: _Weights, name: str, args: tuple[Any, ...], kwargs: Any, result: Tensor) -> None:
    if name in ("dropout", "dropout_"):
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
        weights.dropout_p = float(p) if training else 0.0
    elif name not in _SHAPES and result.dim() == weights.weights.dim():
        weights.weights = result
    weights.now = result


# ---------------------------------------------------------------------------- a complete call


def _seen(found: _Weights, value: Tensor, output: Tensor, module: nn.Module | None) -> Seen:
    weights, scores = found.weights.detach(), found.scores
    B, H = _leading(weights, scores)
    weights = weights.reshape(B, H, *weights.shape[-2:])
    value, output = (tensor.detach().reshape(B, -1, *tensor.shape[-2:]) for tensor in (value, output))
    seen = Seen(None, None, value, output, "eager", dropout_p=found.dropout_p, weights=weights)
    seen.dtype = value.dtype
    if scores is None:
        return seen
    if found.lse is not None:
        seen.lse = found.lse.reshape(B, H, -1)
    query, key = (tensor.detach().to(scores.computed) for tensor in (scores.query, scores.key))
    seen.dtype = scores.computed
    if query.numel() // max(1, query.shape[-1]) != B * H * weights.shape[-2] or not scores.known:
        return seen
    query = query.reshape(B, H, *query.shape[-2:])
    key = key.reshape(B, -1, *key.shape[-2:])
    with _plan.without_autocast(query.device):
        return _described(seen, scores, query, ungrouped(key, module), ungrouped(value, module))


def _leading(weights: Tensor, scores: _Scores | None) -> tuple[int, int]:
    if weights.dim() == 4:
        return int(weights.shape[0]), int(weights.shape[1])
    if weights.dim() == 2:
        return 1, 1
    heads = None if scores is None else scores.heads
    if heads is not None and heads[0] * heads[1] == weights.shape[0]:
        return heads
    return int(weights.shape[0]), 1


def _log_sum_exp(scores: Tensor) -> Tensor:
    """(..., Tq), one map at a time: what is computed on the way is as large as the scores."""
    maps = [torch.logsumexp(one.float(), -1) for one in scores.flatten(0, -3)] if scores.dim() > 2 else []
    if not maps:
        return torch.logsumexp(scores.float(), -1)
    return torch.stack(maps).reshape(scores.shape[:-1])


def _described(seen: Seen, scores: _Scores, query: Tensor, key: Tensor, value: Tensor) -> Seen:
    """With query, key and mechanism, if these give the model's own weights in some of its rows."""
    softcap = None
    scale = scores.scale
    if scores.before_tanh is not None:
        softcap, scale = float(scale), scores.before_tanh * float(scale)
    bias: Tensor | None = None
    for part in scores.bias:
        four = part.reshape(seen.weights.shape[:2] + part.shape[-2:]) if _flat(part, seen) else part  # type: ignore[union-attr]
        four = four.reshape((1,) * (4 - four.dim()) + tuple(four.shape))
        bias = four if bias is None else bias + four
    if softcap is not None and not softcap > 0:
        return seen
    score, normalize = Dot(scale, softcap), Softmax(scores.sink)
    weights = seen.weights
    assert weights is not None
    rows = torch.linspace(0, max(0, weights.shape[2] - 1), _ROWS_CHECKED).long().unique()
    some = bias[:, :, rows] if bias is not None and bias.shape[2] > 1 else bias
    again = attention_weights(wide(query[:, :, rows]), wide(key), score=score, normalize=normalize, bias=some)
    theirs = wide(weights[:, :, rows])
    near = 2e-2 if torch.finfo(scores.computed).bits < 32 or torch.finfo(weights.dtype).bits < 32 else 1e-4
    if not torch.allclose(again.to(theirs.dtype), theirs, rtol=near, atol=near):
        return seen
    seen.query, seen.key, seen.value = query, key, value
    seen.score, seen.normalize, seen.bias = score, normalize, bias
    return seen


def _flat(part: Tensor, seen: Seen) -> bool:
    """Whether a bias lies as (B H, Tq, Tk) where weights are (B, H, Tq, Tk)."""
    assert seen.weights is not None
    B, H = seen.weights.shape[:2]
    return part.dim() == 3 and H > 1 and part.shape[0] == B * H
