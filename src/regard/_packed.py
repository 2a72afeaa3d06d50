"""Where the segments of packed sequences lie, and the checks of what says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import biases, masks
from regard._checks import INTEGERS, can_look, words, wrong_type, wrong_value
from regard.biases import Bias
from regard.masks import Mask, Rows

_POSITIONS = (masks.Causal, masks.Window, biases.Alibi, biases.Relative)


class Packed(NamedTuple):
    """S segments. cu_query, cu_key (S + 1,) int64; offsets (S,): where each segment's first query stands in it.

    spans: how many queries and keys lie in segments (all that there are, where that cannot be read). first: the number
    of the first segment, where these are some of many. known: ``drift()`` where no number need be read for it.
    """

    cu_query: Tensor
    cu_key: Tensor
    offsets: Tensor
    spans: tuple[int, int]
    first: int = 0
    known: int | None = None

    @property
    def many(self) -> int:
        return self.offsets.shape[0]

    @property
    def readable(self) -> bool:
        """Whether the numbers can be read: not under torch.compile, and where there are any."""
        return not torch.compiler.is_compiling() and not self.cu_query.is_meta

    def groups(self, most: int) -> Iterator[Packed]:
        """The segments in groups of at most ``most`` pairs of a query and a key, but at least one segment each."""
        rows, keys = self.cu_query.diff().tolist(), self.cu_key.diff().tolist()
        start, r, k = 0, 0, 0
        for s, (more_rows, more_keys) in enumerate(zip(rows, keys, strict=True)):
            if s > start and (r + more_rows) * (k + more_keys) > most:
                yield self._some(start, s, (r, k))
                start, r, k = s, 0, 0
            r, k = r + more_rows, k + more_keys
        if rows:
            yield self._some(start, len(rows), (r, k))

    def _some(self, start: int, stop: int, spans: tuple[int, int]) -> Packed:
        cu_query, cu_key = self.cu_query[start : stop + 1], self.cu_key[start : stop + 1]
        offsets = self.offsets[start:stop]
        return Packed(
            cu_query - cu_query[0], cu_key - cu_key[0], offsets, spans, self.first + start, self.known
        )

    def segment(self) -> Tensor:
        """The segment of every query, (total_q,); S behind the last one."""
        rows = torch.arange(self.spans[0], device=self.cu_query.device)
        return torch.searchsorted(self.cu_query[1:].contiguous(), rows, right=True)

    def begin(self) -> Tensor:
        """The first key of every query's segment, (total_q,)."""
        return _behind(self.cu_key[:-1])[self.segment()]

    def within(self) -> Rows:
        """The keys of a row's own segment."""
        end = _behind(self.cu_key[1:])[self.segment()]
        return Rows(self.begin(), end)

    def position(self) -> Tensor:
        """Where every query stands, as the number of a key: (total_q,)."""
        segment = self.segment()
        shift = _behind(self.cu_key[:-1] - self.cu_query[:-1] + self.offsets)[segment]
        return torch.arange(self.spans[0], device=shift.device) + shift

    def key_number(self, n: int | Tensor) -> Tensor:
        """Key n of the segment of every query, n a number or (S,): (total_q,)."""
        if isinstance(n, Tensor):
            n = n[self.first : self.first + self.many] if n.ndim else n.expand(self.many)
            n = _behind(n.long())[self.segment()]
        return self.begin() + n

    def local(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Segment, query in it and key in it, of tokens by number; keys outside the segment are taken to its edge."""
        segment = self.segment()[q].clamp(max=max(self.many - 1, 0))
        begin, end = self.cu_key[segment], self.cu_key[segment + 1]
        key = (torch.minimum(k, end - 1) - begin).clamp(min=0)
        return segment + self.first, q - self.cu_query[segment], key

    def drift(self) -> int | None:
        """From a query's number to the number of the key that it stands at, where that is one step for all."""
        if self.known is not None or not self.readable:
            return self.known
        shift = self.cu_key[:-1] - self.cu_query[:-1] + self.offsets
        some = (self.cu_query.diff() > 0) & (self.cu_key.diff() > 0)
        found = shift[some].unique().tolist()
        return None if len(found) > 1 else int(found[0]) if found else 0


def _behind(numbers: Tensor) -> Tensor:
    """Numbers a segment and a 0 for the tokens behind the last one."""
    return torch.cat([numbers, numbers.new_zeros(1)])


def tensors(query: Any, key: Any, value: Any) -> None:
    """Packed tensors (total, heads, D)."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            wrong_type(name, "a tensor (total, heads, D)", tensor)
        if tensor.is_nested:
            wrong_type(
                name,
                "a dense tensor",
                words("a nested one"),
                "regard.compat.nested_attention takes nested ones.",
            )
        if tensor.ndim != 3:
            wrong_value(name, "packed tokens, (total, heads, D)", tensor)
    if key.shape[0] != value.shape[0]:
        wrong_value("value", f"as many tokens as the key has, {key.shape[0]}", value)


def segments(
    query: Tensor, key: Tensor, cu_query: Any, cu_key: Any, mask: Mask | None, bias: Bias | None
) -> Packed:
    """The segments, checked; and where the queries of each stand, by what mask and bias say of it."""
    spans = (_edges("cu_query", cu_query, query), _edges("cu_key", cu_key, key))
    if cu_query.shape != cu_key.shape:
        got = words(f"{cu_query.shape[0] - 1} and {cu_key.shape[0] - 1} segments")
        wrong_value("cu_query, cu_key", "as many segments each", got)
    leaves = _leaves(mask, bias)
    known = _known(leaves) if cu_query is cu_key else None
    cu_query, cu_key = cu_query.long(), cu_key.long()
    lengths = cu_query.diff(), cu_key.diff()
    for leaf in leaves:
        for name in ("lengths", "start", "stop", "n"):
            _numbers(leaf, name, lengths[1])
    return Packed(cu_query, cu_key, _offsets(leaves, *lengths), spans, 0, known)


def _edges(name: str, cu: Any, tokens: Tensor) -> int:
    """Checks one of the cu tensors and returns how many tokens lie in its segments."""
    total = tokens.shape[0]
    if not isinstance(cu, Tensor):
        wrong_type(name, "an integer tensor (S + 1,)", cu, f"Say torch.tensor([0, ..., {total}]).")
    if cu.dtype not in INTEGERS:
        wrong_type(name, "an integer tensor (S + 1,)", cu)
    if cu.ndim != 1 or cu.shape[0] < 1:
        wrong_value(name, "the edges of S segments, shape (S + 1,)", cu)
    if cu.device != tokens.device:
        wrong_value(name, f"a tensor on {tokens.device}", words(f"one on {cu.device}"))
    if not can_look(cu):
        return total
    numbers: list[int] = cu.tolist()
    if numbers[0] != 0:
        wrong_value(
            name,
            "0 as its first edge",
            numbers[0],
            "Lengths become edges by a cumulative sum with a 0 in front.",
        )
    for before, after in zip(numbers, numbers[1:], strict=False):
        if after < before:
            wrong_value(name, "edges that never fall", words(f"{before} before {after}"))
    if numbers[-1] > total:
        wrong_value(name, f"a last edge of at most {total}, the number of tokens", numbers[-1])
    return numbers[-1]


def _leaves(mask: Any, bias: Any) -> list[Any]:
    """The simple masks and biases; those that cannot speak of segments are refused."""
    found: list[Any] = []
    if mask is not None and not isinstance(mask, Mask):
        wrong_type("mask", "a mask of regard.masks that speaks of positions", mask, _OWN)
    if bias is not None and not isinstance(bias, Bias):
        wrong_type("bias", "a bias of regard.biases (Alibi, Relative)", bias, _OWN)
    for leaf in masks.walk(mask):
        if isinstance(leaf, (masks.Dense, masks.Documents, masks.Keys, Rows)):
            wrong_value(
                "mask", "masks that speak of positions within a segment", words(type(leaf).__name__), _OWN
            )
        if not leaf.parts() and not isinstance(leaf, masks.Not):
            found.append(leaf)
    for part in biases.walk(bias):
        if not isinstance(part, (biases.Alibi, biases.Relative)):
            wrong_value("bias", "biases of the distance (Alibi, Relative)", words("a tensor"), _OWN)
        found.append(part)
    return found


_OWN = "Segments have lengths of their own: a tensor of tokens or pairs does not fit them."


def _numbers(leaf: Any, name: str, most: Tensor) -> None:
    value = getattr(leaf, name, None)
    if not isinstance(value, Tensor):
        return
    argument = f"{type(leaf).__name__}({name}=)"
    if value.ndim and value.shape != most.shape:
        wrong_value(argument, f"one number a segment, shape {tuple(most.shape)}", value)
    if can_look(value) and can_look(most) and bool(((value < 0) | (value > most)).any()):
        wrong_value(argument, "from 0 to the keys of the segment", words("a number outside of that"))


def _offsets(leaves: list[Any], queries: Tensor, keys: Tensor) -> Tensor:
    """Where the first query of each segment stands, (S,), by the one alignment that masks and biases give."""
    speakers = [leaf for leaf in leaves if isinstance(leaf, _POSITIONS)]
    given = [_offset(leaf, queries, keys) for leaf in speakers]
    told = [offset for offset in given if offset is not None]
    if not told:
        if speakers and can_look(queries) and not torch.equal(queries, keys):
            way_out = 'Say "upper_left" or "lower_right" (of each segment) or offset=n.'
            got = words("none, and segments with Tq != Tk")
            wrong_value(type(speakers[0]).__name__, "an alignment", got, way_out)
        return torch.zeros_like(queries)
    for other in told[1:]:
        if can_look(other) and not torch.equal(told[0], other):
            wrong_value(
                "offset", "one alignment in a call", words("different ones"), "Give it to one of them only."
            )
    return told[0]


def _known(leaves: list[Any]) -> int | None:
    """The offset of all segments where each has as many queries as keys; None where it is in a tensor."""
    told = [leaf.offset for leaf in leaves if isinstance(leaf, _POSITIONS) and leaf.offset is not None]
    if any(isinstance(offset, Tensor) for offset in told):
        return None
    return int(told[0]) if told else 0


def _offset(leaf: Any, queries: Tensor, keys: Tensor) -> Tensor | None:
    if leaf.alignment == "lower_right":
        return keys - queries
    if leaf.alignment == "upper_left":
        return torch.zeros_like(queries)
    offset = leaf.offset
    if not isinstance(offset, Tensor):
        return None if offset is None else torch.full_like(queries, offset)
    if offset.ndim and offset.shape != queries.shape:
        wrong_value(
            f"{type(leaf).__name__}(offset=)", f"one number a segment, {tuple(queries.shape)}", offset
        )
    return offset.expand(queries.shape).long()
