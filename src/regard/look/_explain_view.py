"""What a worked example shows of one call: one head of one sample, one query or all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import regard
from regard._call import Call, prepare
from regard._frame import At, coordinates, wide
from regard.look._explain_step import Check, Step
from regard.masks import Dense, Window
from regard.normalizers import Softmax
from regard.scores import Dot

# More pairs than this are nothing to read, and the worked example writes all of them out.
_MOST_PAIRS = 2**26
_KEYWORDS = ("score", "normalize", "mask", "bias")


@dataclass(frozen=True)
class View:
    """A checked call, the tensors as the caller gave them, and which part of it is shown."""

    call: Call
    public: tuple[Tensor, Tensor, Tensor]
    mechanism: dict[str, Any]
    token: int | None
    head: int
    sample: int
    tokens: tuple[str, ...]
    key_tokens: tuple[str, ...]

    @classmethod
    def of(
        cls,
        public: tuple[Tensor, Tensor, Tensor],
        mechanism: dict[str, Any],
        place: tuple[int | None, int, int],
        tokens: Sequence[str],
        key_tokens: Sequence[str],
    ) -> View:
        """Check everything that was given. `place` is (token, head, sample)."""
        for name in mechanism:
            if name not in _KEYWORDS:
                raise TypeError(f"explain: unknown keyword {name!r}; a mechanism has {', '.join(_KEYWORDS)}")
        score, normalize = mechanism.get("score", Dot()), mechanism.get("normalize", Softmax())
        call = prepare(*public, mechanism.get("mask"), score, normalize, mechanism.get("bias"))
        token, head, sample = place
        _, _, B, H, _, Tq, Tk, _ = call.frame
        _within("head", head, H)
        _within("sample", sample, B)
        if token is not None:
            _within("token", token, Tq)
        if Tq == 0:
            raise ValueError("explain: there are no queries in this call, so there is nothing to work out")
        if H * Tq * Tk > _MOST_PAIRS:
            raise ValueError(
                f"explain: {H} heads x {Tq} queries x {Tk} keys are too many to write out (at most {_MOST_PAIRS} "
                "pairs); give fewer tokens, and look at long ones with observe"
            )
        names = _named("tokens", tokens, Tq)
        keys = _named("key_tokens", key_tokens or (tokens if Tk == Tq else ()), Tk)
        return cls(call, public, mechanism, token, head, sample, names, keys)

    # ---- parts of tensors

    def one(self, tensor: Tensor) -> Tensor:
        """(B or 1, H or Hkv or 1, T, n) -> (T, n): the head and sample that are shown."""
        heads, H = tensor.shape[1], self.call.frame.H
        return tensor[min(self.sample, tensor.shape[0] - 1), self.head * heads // H]

    def four(self, result: Tensor) -> Tensor:
        """A result of the public API, (*batch, H, T, n) or (T, n), as (B, H, T, n)."""
        frame = self.call.frame
        return result.reshape(frame.B, frame.H, *result.shape[-2:])

    def shown(self, rows: Tensor) -> Tensor:
        """(Tq, n) -> what is shown: (n,) of one token, or all of it."""
        return rows if self.token is None else rows[self.token]

    def rows(self, tensor: Tensor) -> Tensor:
        """(Tq, n) -> what is shown, always (rows, n)."""
        return tensor if self.token is None else tensor[self.token : self.token + 1]

    @property
    def query(self) -> Tensor:
        """(rows, D) of the head, in float32 or better."""
        return self.rows(self.one(wide(self.call.query)))

    @property
    def key(self) -> Tensor:
        """(Tk, D) of the head, in float32 or better."""
        return self.one(wide(self.call.key))

    def at(self) -> At:
        """The coordinates of every pair of the call."""
        frame = self.call.frame
        return coordinates(frame, self.call.offset, (0, frame.Tq), (0, frame.Tk))

    def head_of(self, pairs: Tensor) -> Tensor:
        """Something that broadcasts to (B, H, Tq, Tk) -> (Tq, Tk) of the head that is shown."""
        frame = self.call.frame
        return pairs.expand(frame.B, frame.H, frame.Tq, frame.Tk)[self.sample, self.head]

    # ---- the public API, and steps

    def weights(self) -> Tensor:
        """(Tq, Tk): `attention_weights` of the head."""
        return self.one(self.four(regard.attention_weights(*self.public[:2], **self.mechanism)))

    def met(self) -> Tensor:
        """(Tq, Tk) bool: the pairs of the head that get weight where all scores are equal: the mask alone decides."""
        given = self.mechanism["mask"]
        mask = Dense(given) if isinstance(given, Tensor) else given
        offset, batch = self.call.offset, self.call.frame.batch
        # Where the bias places the queries for both, the mask is told here.
        placed = Window(None, None, offset=offset.reshape(batch) if isinstance(offset, Tensor) else offset)
        query, key = (torch.zeros_like(tensor) for tensor in self.public[:2])
        return self.one(self.four(regard.attention_weights(query, key, mask=mask & placed))) > 0

    def output(self) -> Tensor:
        """(B, H, Tq, Dv): `attention`."""
        return self.four(regard.attention(*self.public, **self.mechanism))

    @property
    def row_names(self) -> tuple[str, ...] | None:
        return self.tokens if self.token is None else None

    def over_keys(self, name: str, formula: str, rows: Tensor, checks: Sequence[Check], **more: Any) -> Step:
        """A step whose numbers run over the keys, from the rows (Tq, Tk) of the head."""
        numbers = self.shown(rows)
        columns, shape = self.key_tokens, tuple(numbers.shape)
        return Step(name, formula, numbers, shape, self.row_names, columns, checks=tuple(checks), **more)


def _within(name: str, index: int, size: int) -> None:
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"explain({name}=): expected an int, counted from 0; got {index!r}")
    if not 0 <= index < size:
        counted = f"0 to {size - 1}" if size else "none"
        raise ValueError(f"explain({name}=): there are {size}, counted from 0 ({counted}); got {index}")


def _named(argument: str, names: Sequence[str], length: int) -> tuple[str, ...]:
    if not names:
        return ("",) * length
    if len(names) != length:
        raise ValueError(f"explain({argument}=): expected one name for each of {length}; got {len(names)}")
    return tuple(names)
