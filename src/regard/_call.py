"""One call of the library, checked and brought to one form: (B, H, T, D) tensors and bound objects."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import _checks, _fits, biases, masks
from regard._checks import words, wrong_type, wrong_value
from regard._frame import Frame, Offset
from regard.kernels import _library
from regard.normalizers import Entmax, Sigmoid, Softmax
from regard.scores import Additive, Bilinear, Concat, Cosine, Distance, Dot, Modified


class Call(NamedTuple):
    """Query (B, H, Tq, D), key (B, Hkv, Tk, D), value (B, Hkv, Tk, Dv), and what is to be done with them."""

    frame: Frame
    query: Tensor
    key: Tensor
    value: Tensor
    score: Any
    normalize: Any
    mask: masks.Mask | None
    bias: biases.Bias | None
    offset: Offset
    dropout_p: float
    seed: Tensor | None

    def shaped(self, rows: Tensor) -> Tensor:
        """A result (B, H, ...) in the shape that the caller's query had before its last two dimensions."""
        frame = self.frame
        if frame.rank == 4:
            return rows
        if frame.rank > 4:
            return rows.reshape(*frame.batch, *rows.shape[1:])
        return rows[0] if frame.rank == 3 else rows[0, 0]


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    score: Any,
    normalize: Any,
    bias: Any,
    dropout_p: float = 0.0,
) -> Call:
    """Check everything a caller gave and bring it to one form. All errors of users end here."""
    if _library.unsettled:
        _library.settle()
    query, key, value = _cast(query, key, value)
    frame = _frame(query, key, value)
    if frame.rank != 4 or not query.shape[0] == key.shape[0] == value.shape[0]:
        query, key, value = _four(query, frame), _four(key, frame), _four(value, frame)
    _score(score, frame, query.shape[-1], key.shape[-1])
    _normalizer(normalize, frame)
    bound_mask = None if mask is None else masks.as_mask(mask).bind(frame)
    bound_bias = None if bias is None else biases.as_bias(bias).bind(frame)
    offset: Offset = 0
    if mask is not None or bias is not None:
        offset = _fits.one_offset(frame, [*masks.walk(bound_mask), *biases.walk(bound_bias)])
    p = _checks.dropout(dropout_p)
    seed = torch.randint(0, 2**32, (), device=query.device) if p else None
    return Call(frame, query, key, value, score, normalize, bound_mask, bound_bias, offset, p, seed)


def _cast(query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The three tensors, of one floating-point dtype and device; cast as autocast casts SDPA's."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            wrong_type(name, "a tensor", tensor)
        if tensor.layout != torch.strided or tensor.is_nested:
            wrong_type(name, "a dense (strided) tensor", words("a sparse or nested one"))
    if _checks.autocasts(query.device):
        target = torch.get_autocast_dtype(query.device.type)
        query, key, value = (_autocast(tensor, target) for tensor in (query, key, value))
    if not (query.dtype == key.dtype == value.dtype) or query.dtype not in _checks.FLOATS:
        names = ", ".join(str(t.dtype).removeprefix("torch.") for t in (query, key, value))
        wrong_type(
            "query, key, value", "one floating-point dtype", words(names), "Cast them with .to(query.dtype)."
        )
    if not (query.device == key.device == value.device):
        names = ", ".join(str(t.device) for t in (query, key, value))
        wrong_value("query, key, value", "one device", words(names))
    return query, key, value


def _autocast(tensor: Tensor, target: torch.dtype) -> Tensor:
    return tensor.to(target) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _frame(query: Tensor, key: Tensor, value: Tensor) -> Frame:
    rank = query.ndim
    if rank < 2 or key.ndim != rank or value.ndim != rank:
        shapes = words(f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}")
        wrong_value("query, key, value", "(*batch, heads, T, D) or (T, D), as many dimensions each", shapes)
    if value.shape[-2] != key.shape[-2]:
        wrong_value("value", f"as many rows as the key has, {key.shape[-2]}", value)
    batch: tuple[int, ...] = ()
    H = Hkv = 1
    if rank > 2:
        batch = _batch(query, key, value)
        H, Hkv = _heads(query, key, value)
    B = 1
    for size in batch:
        B *= size
    return Frame(batch, rank, B, H, Hkv, query.shape[-2], key.shape[-2], query.device)


def _batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    first = query.shape[:-3]
    if first == key.shape[:-3] == value.shape[:-3]:
        return tuple(first)
    try:
        return tuple(torch.broadcast_shapes(first, key.shape[:-3], value.shape[:-3]))
    except RuntimeError:
        shapes = words(f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}")
    wrong_value("query, key, value", "batch dimensions that are equal or 1", shapes)


def _heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int]:
    H, Hk, Hv = query.shape[-3], key.shape[-3], value.shape[-3]
    if query.ndim == 3:
        largest = max(H, Hk, Hv)
        if any(size not in (1, largest) for size in (H, Hk, Hv)) and 0 not in (H, Hk, Hv):
            way_out = "Grouped heads need a batch dimension: query[None], key[None], value[None]."
            wrong_value(
                "heads", "equal sizes or 1 in 3-D tensors (heads, T, D)", words(f"{H}, {Hk}, {Hv}"), way_out
            )
        if 0 in (H, Hk, Hv):
            largest = 0
        return largest, (1 if Hk == Hv == 1 else largest)
    if Hk != Hv:
        wrong_value("value", f"as many heads as the key has, {Hk}", value)
    if H != Hk and (Hk == 0 or H % Hk):
        way_out = (
            "Tensors are (*batch, heads, T, D): is one still (batch, T, heads, D)? Then .transpose(1, 2)."
        )
        wrong_value("heads", "query heads a multiple of the key's heads", words(f"{H} and {Hk}"), way_out)
    return H, Hk


def _four(tensor: Tensor, frame: Frame) -> Tensor:
    """(B, heads, T, D), a view wherever one exists."""
    if frame.rank == 2:
        return tensor[None, None]
    if frame.rank == 3:
        heads = frame.H if tensor.shape[0] != 1 or frame.Hkv != 1 else 1
        return (tensor if tensor.shape[0] == heads else tensor.expand(heads, -1, -1))[None]
    if tuple(tensor.shape[:-3]) != frame.batch:
        tensor = tensor.expand(*frame.batch, -1, -1, -1)
    return tensor if frame.rank == 4 else tensor.reshape(frame.B, *tensor.shape[-3:])


# ---------------------------------------------------------------------------- scores and normalisers


def _score(score: Any, frame: Frame, D: int, Dk: int) -> None:
    if isinstance(score, Modified):
        score = score.score
        if isinstance(score, Modified):
            return _score(score, frame, D, Dk)
    if isinstance(score, Bilinear):
        _weight("Bilinear(weight=)", score.weight, (D, Dk), frame)
        return _parameter("Bilinear", "scale", score.scale, frame)
    if isinstance(score, Concat):
        _weight("Concat(w_query=)", score.w_query, (D,), frame)
        return _weight("Concat(w_key=)", score.w_key, (Dk,), frame)
    if isinstance(score, (Dot, Additive, Cosine, Distance)):
        if D != Dk:
            way_out = "scores.Bilinear(weight) and scores.Concat take different widths."
            wrong_value("key", f"the query's width, {D}", words(f"{Dk}"), way_out)
        if isinstance(score, Additive):
            return _weight("Additive(v=)", score.v, (D,), frame)
        return _parameter(type(score).__name__, "scale", score.scale, frame)
    if isinstance(score, type) or not callable(score):
        wrong_type("score", "a score of regard.scores or a callable f(query, key)", score, _instance(score))


def _normalizer(normalize: Any, frame: Frame) -> None:
    if isinstance(normalize, Softmax):
        return _parameter("Softmax", "sink", normalize.sink, frame)
    if isinstance(normalize, Entmax):
        return _parameter("Entmax", "alpha", normalize.alpha, frame)
    if isinstance(normalize, Sigmoid):
        return _parameter("Sigmoid", "bias", normalize.bias, frame)
    if isinstance(normalize, type) or not callable(normalize):
        expected = "a normaliser of regard.normalizers or a callable f(scores)"
        wrong_type("normalize", expected, normalize, _instance(normalize))


def _instance(value: Any) -> str:
    return f"Say {value.__name__}(...), an instance." if isinstance(value, type) else ""


def _parameter(owner: str, name: str, value: Any, frame: Frame) -> None:
    if isinstance(value, Tensor):
        _fits.per_head(owner, name, value, frame)


def _weight(argument: str, weight: Tensor, widths: tuple[int, ...], frame: Frame) -> None:
    _fits.on_device(argument, weight, frame)
    if tuple(weight.shape) not in (widths, (frame.H, *widths)):
        wrong_value(argument, f"shape {widths} or {(frame.H, *widths)}", weight)
