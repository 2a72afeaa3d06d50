"""Which pairs may meet. ``True`` means *may attend*, always.

A mask is a value: ``Causal``, ``Window``, ``Padding``, ``Documents``, ``Prefix``, ``Dense`` and ``Rule``
combine with ``&``, ``|`` and ``~``. Each is defined by one predicate over the sample b, the head h, the query
row i, its absolute position p = i + offset, and the key j; ``materialize`` writes that predicate out as a bool
tensor. How a mask becomes runs of keys is in ``regard._runs``.

Letters: B batch, H query heads, Tq and Tk lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard import _checks, _fits
from regard._frame import Alignment, At, Frame, coordinates

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

__all__ = ["Causal", "Dense", "Documents", "Mask", "Padding", "Prefix", "Rows", "Rule", "Window"]


class Mask:
    """Base of all masks: combines with ``&``, ``|``, ``~`` and can write itself out."""

    def __and__(self, other: Mask | Tensor) -> Mask:
        return And(self, as_mask(other))

    def __or__(self, other: Mask | Tensor) -> Mask:
        return Or(self, as_mask(other))

    def __rand__(self, other: Tensor) -> Mask:
        return And(as_mask(other), self)

    def __ror__(self, other: Tensor) -> Mask:
        return Or(as_mask(other), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise _checks.mask_truth()

    def parts(self) -> tuple[Mask, ...]:
        """The masks that this one is made of (none for a simple one)."""
        return ()

    def allowed(self, at: At) -> Tensor:
        """The definition: bool, broadcastable to (B, H, rows, keys), of a mask that was bound to a call."""
        raise NotImplementedError

    def bind(self, frame: Frame) -> Mask:
        """The same mask with its tensors checked against a call and brought to (B, ...)."""
        return self

    def materialize(
        self,
        query_length: int,
        key_length: int,
        *,
        batch: tuple[int, ...] | int = (),
        heads: int = 1,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Write the mask out: bool (*batch, heads, Tq, Tk); (Tq, Tk) when neither batch nor heads are given.

        Raises ValueError when a length, an alignment or a tensor of the mask does not fit these sizes.
        """
        shape = tuple(batch) if isinstance(batch, Sequence) else (batch,)
        _checks.sizes("materialize", query_length, key_length, heads, *shape)
        flat = 1
        for size in shape:
            flat *= size
        rank = len(shape) + 3 if shape else (3 if heads != 1 else 2)
        where = torch.device("cpu" if device is None else device)
        frame = Frame(shape, rank, flat, heads, heads, query_length, key_length, where)
        bound = self.bind(frame)
        offset = _fits.one_offset(frame, walk(bound))
        tile = coordinates(frame, offset, (0, query_length), (0, key_length))
        full = bound.allowed(tile).expand(flat, heads, query_length, key_length)
        if not shape and heads == 1:
            return full[0, 0]
        return full.reshape(*shape, heads, query_length, key_length)


def as_mask(mask: Mask | Tensor) -> Mask:
    """A mask as it is, a bool tensor as ``Dense``."""
    if isinstance(mask, Mask):
        return mask
    return Dense(_checks.bool_mask(mask))


@dataclass(frozen=True, eq=False)
class And(Mask):
    left: Mask
    right: Mask

    def parts(self) -> tuple[Mask, ...]:
        return (self.left, self.right)

    def allowed(self, at: At) -> Tensor:
        return self.left.allowed(at) & self.right.allowed(at)

    def bind(self, frame: Frame) -> Mask:
        return And(self.left.bind(frame), self.right.bind(frame))


@dataclass(frozen=True, eq=False)
class Or(Mask):
    left: Mask
    right: Mask

    def parts(self) -> tuple[Mask, ...]:
        return (self.left, self.right)

    def allowed(self, at: At) -> Tensor:
        return self.left.allowed(at) | self.right.allowed(at)

    def bind(self, frame: Frame) -> Mask:
        return Or(self.left.bind(frame), self.right.bind(frame))


@dataclass(frozen=True, eq=False)
class Not(Mask):
    inner: Mask

    def parts(self) -> tuple[Mask, ...]:
        return (self.inner,)

    def allowed(self, at: At) -> Tensor:
        return ~self.inner.allowed(at)

    def bind(self, frame: Frame) -> Mask:
        return Not(self.inner.bind(frame))


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """Key j may be seen from the query at absolute position p when ``j <= p``.

    ``Causal("upper_left")``: query i stands at i; ``Causal("lower_right")``: at i + Tk - Tq;
    ``Causal(offset=n)``: at i + n, n an int or an integer tensor of the batch's shape. With Tq = Tk nothing
    need be said; with Tq != Tk one of these must be, or ValueError is raised.
    """

    alignment: Alignment = None
    offset: int | Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _checks.alignment("Causal", self.alignment, self.offset)

    def allowed(self, at: At) -> Tensor:
        return at.j <= at.p


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """Key j may be seen from position p when ``p - left <= j <= p + right``, both ends included.

    ``None`` is unlimited, negative numbers are legal: ``Window(255, 0)`` is 256 keys, the query's own
    included (sliding window: Beltagy et al., Longformer, 2020). The alignment is that of ``Causal``.
    Raises ValueError for a window that can hold no key.
    """

    left: int | None = None
    right: int | None = None
    alignment: Alignment = None
    offset: int | Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _checks.window(self.left, self.right)
        _checks.alignment("Window", self.alignment, self.offset)

    def allowed(self, at: At) -> Tensor:
        distance = at.j - at.p
        inside = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            inside = inside & (distance >= -self.left)
        if self.right is not None:
            inside = inside & (distance <= self.right)
        return inside


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Only the real keys of each sample: ``start <= j < stop``.

    ``Padding(lengths)`` keeps the first ``lengths[b]`` keys; ``Padding(start=, stop=)`` keeps a range (left
    padding: ``Padding(start=first)``); both are integers or integer tensors of the batch's shape.
    ``Padding.of(attention_mask)`` takes what tokenizers give: bool or 0/1 of shape (*batch, Tk), holes allowed.
    """

    lengths: int | Tensor | None = None
    start: int | Tensor | None = field(default=None, kw_only=True)
    stop: int | Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _checks.padding(self.lengths, self.start, self.stop)

    @staticmethod
    def of(attention_mask: Tensor) -> Mask:
        """The keys where ``attention_mask`` (*batch, Tk), bool or 0/1, is true."""
        return Keys(_checks.attention_mask(attention_mask))

    def bind(self, frame: Frame) -> Mask:
        last = self.stop if self.lengths is None else self.lengths
        name = "stop" if self.lengths is None else "lengths"
        start = _fits.key_counts("Padding", "start", self.start, frame)
        return Padding(start=start, stop=_fits.key_counts("Padding", name, last, frame))

    def allowed(self, at: At) -> Tensor:
        inside = torch.ones_like(at.j, dtype=torch.bool)
        if self.start is not None:
            inside = inside & (at.j >= per_sample(self.start, at))
        if self.stop is not None:
            inside = inside & (at.j < per_sample(self.stop, at))
        return inside


@dataclass(frozen=True, eq=False)
class Keys(Mask):
    """Keys by a bool tensor (B, Tk): what ``Padding.of`` makes."""

    keep: Tensor

    def bind(self, frame: Frame) -> Mask:
        return Keys(_fits.per_key("Padding.of", self.keep, frame))

    def allowed(self, at: At) -> Tensor:
        return self.keep[at.b, at.j] if self.keep.shape[0] > 1 else self.keep[0][at.j]


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Queries and keys of the same document: ``query_ids[i] == key_ids[j]``.

    ids are integer tensors (T,) or (*batch, T); ``key_ids`` is ``query_ids`` when not given. Linear memory
    holds where each document's keys lie together (packed sequences).
    """

    query_ids: Tensor
    key_ids: Tensor | None = None

    def __post_init__(self) -> None:
        _checks.ids("query_ids", self.query_ids)
        if self.key_ids is not None:
            _checks.ids("key_ids", self.key_ids)

    def bind(self, frame: Frame) -> Mask:
        keys = self.query_ids if self.key_ids is None else self.key_ids
        return Documents(
            _fits.document_ids("query_ids", self.query_ids, frame.Tq, frame),
            _fits.document_ids("query_ids" if self.key_ids is None else "key_ids", keys, frame.Tk, frame),
        )

    def allowed(self, at: At) -> Tensor:
        assert self.key_ids is not None  # bind() filled it
        return _rows_of(self.query_ids, at.b, at.i) == _rows_of(self.key_ids, at.b, at.j)


def _rows_of(ids: Tensor, b: Tensor, index: Tensor) -> Tensor:
    return ids[b, index] if ids.shape[0] > 1 else ids[0][index]


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """The first n keys: ``j < n``, n an int or an integer tensor of the batch's shape.

    ``Causal() | Prefix(n)`` is the prefix language model (Raffel et al., 2020).
    """

    n: int | Tensor

    def __post_init__(self) -> None:
        _checks.counts("Prefix", "n", self.n)

    def bind(self, frame: Frame) -> Mask:
        n = _fits.key_counts("Prefix", "n", self.n, frame)
        return replace(self, n=n)

    def allowed(self, at: At) -> Tensor:
        return at.j < per_sample(self.n, at)


@dataclass(frozen=True, eq=False)
class Rows(Mask):
    """Keys by row: ``start[i] <= j < stop[i]``, integer tensors (Tq,), (*batch, Tq) or (*batch, H, Tq); None: no limit.

    One run of keys a row, said directly (column runs on GPUs: FlashMask, Wang et al., 2024).
    """

    start: Tensor | None = None
    stop: Tensor | None = None

    def __post_init__(self) -> None:
        _checks.row_edges(self.start, self.stop)

    def bind(self, frame: Frame) -> Mask:
        return Rows(_fits.row_edge("start", self.start, frame), _fits.row_edge("stop", self.stop, frame))

    def allowed(self, at: At) -> Tensor:
        inside = torch.ones_like(at.i + at.j, dtype=torch.bool)
        if self.start is not None:
            inside = inside & (at.j >= _edge(self.start, at))
        if self.stop is not None:
            inside = inside & (at.j < _edge(self.stop, at))
        return inside


def _edge(edge: Tensor, at: At) -> Tensor:
    B, H, Tq = edge.shape
    return edge[at.b if B > 1 else at.b * 0, at.h if H > 1 else at.h * 0, at.i if Tq > 1 else at.i * 0]


def per_sample(value: int | Tensor, at: At) -> int | Tensor:
    """A number, or (B,) brought beside the coordinates."""
    return value[at.b] if isinstance(value, Tensor) else value


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A bool tensor that broadcasts to (*batch, H, Tq, Tk): (Tq, Tk), or as many dimensions as the query has.

    One scan finds whether its rows are runs of keys; the result is kept here, so that one ``Dense`` used for
    many calls is scanned once. Writing into the tensor is noticed, unless it goes round torch (``.numpy()``,
    ``.data``).
    """

    mask: Tensor
    found: dict[Any, Any] = field(default_factory=dict, repr=False)
    source: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _checks.bool_mask(self.mask)

    def bind(self, frame: Frame) -> Mask:
        source = self.mask if self.source is None else self.source
        return replace(self, mask=_fits.four("mask", self.mask, frame), source=source)

    def allowed(self, at: At) -> Tensor:
        B, H, Tq, Tk = self.mask.shape
        index = (at.b if B > 1 else at.b * 0, at.h if H > 1 else at.h * 0)
        return self.mask[(*index, at.i if Tq > 1 else at.i * 0, at.j if Tk > 1 else at.j * 0)]


@dataclass(frozen=True, eq=False)
class Rule(Mask):
    """A rule of your own, ``mask_mod(b, h, q, k) -> bool``, FlexAttention's signature.

    b, h, q, k are integer tensors that broadcast to (B, H, rows, keys): sample, query head, query row, key.
    The rule must be made of elementwise operations and indexing.
    """

    mask_mod: MaskMod

    def __post_init__(self) -> None:
        _checks.is_callable("Rule", "mask_mod(b, h, q, k)", self.mask_mod)

    def allowed(self, at: At) -> Tensor:
        return _checks.rule_result(self.mask_mod(at.b, at.h, at.i, at.j), at)


def walk(mask: Mask | None) -> list[Mask]:
    """The mask and all masks it is made of."""
    if mask is None:
        return []
    found = [mask]
    for part in mask.parts():
        found += walk(part)
    return found


def rules(mask: Mask | None) -> list[Rule]:
    """The user's own rules in a mask."""
    return [part for part in walk(mask) if isinstance(part, Rule)]
