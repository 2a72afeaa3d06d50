"""Attention over packed sequences: segments one behind the other, no padding.

Two ways, one answer. A long segment is a call of its own. Short ones go together, as many as make one call worth its
while: what a row may see is then a run of keys by row (``masks.Rows``) within its segment. They go together where two
runs a row suffice and position biases are one set of diagonals; under torch.compile, which cannot see lengths, all do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import _packed, _runs, biases, masks, normalizers
from regard._attention import attention
from regard._checks import words, wrong_value
from regard._packed import Packed
from regard.biases import Bias
from regard.masks import Mask, Rows, Rule
from regard.normalizers import Normalizer, Softmax
from regard.scores import Dot, Modified, Score

_DOT = Dot()
_SOFTMAX = Softmax()
# One call more costs about as much as these pairs (heads counted): short segments share a call up to here.
PAIRS_TOGETHER = 1 << 17


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_query: Tensor,
    cu_key: Tensor,
    mask: Mask | None = None,
    *,
    score: Score | Any = _DOT,
    normalize: Normalizer = _SOFTMAX,
    bias: Bias | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """``attention`` of each segment of packed sequences by itself, without padding.

    query (total_q, H, D), key (total_k, Hkv, D), value (total_k, Hkv, Dv) -> (total_q, H, Dv). Segment s is the
    queries ``cu_query[s]`` to ``cu_query[s + 1]`` and the keys ``cu_key[s]`` to ``cu_key[s + 1]``: integers (S + 1,)
    that start at 0 and never fall. A segment may have no queries, no keys, or more of the one than of the other; tokens
    behind the last segment give 0 and get gradient 0.

    ``mask`` and ``bias`` speak of positions within each segment: ``Causal("lower_right")`` is aligned segment by
    segment; numbers a sample (``Padding(lengths)``, ``Causal(offset=)``, ``Prefix(n)``) are numbers a segment, (S,); b,
    q and k of a ``Rule`` or of a ``Modified`` score are the segment, the query and the key in it. Masks and biases made
    of tensors of tokens or pairs (bool tensors, ``Documents``, ``Padding.of``, ``Rows``, bias tensors) are refused.

    Memory is linear in the totals. Under torch.compile only what takes two runs a row, and position biases only where
    cu_query and cu_key are one tensor. Raises TypeError or ValueError that names the argument.
    """
    _packed.tensors(query, key, value)
    packed = _packed.segments(query, key, cu_query, cu_key, mask, bias)
    rows, keys = packed.spans
    how = _Described(score, normalize, mask, bias)
    output = _attend(query[:rows], key[:keys], value[:keys], packed, how, dropout_p)
    if query.shape[0] == rows:
        return output
    return torch.cat([output, output.new_zeros(query.shape[0] - rows, *output.shape[1:])])


class _Described(NamedTuple):
    score: Any
    normalize: Any
    mask: Mask | None
    bias: Bias | None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, packed: Packed, how: _Described, dropout_p: float
) -> Tensor:
    if not packed.readable:
        together = _together(packed, how) if _go_together(how) else None
        if together is None:
            expected = "built-ins that take runs and, with a bias, one tensor as cu_query and cu_key"
            wrong_value("varlen_attention", expected, words("others"), "Call it without torch.compile.")
        return _call(query, key, value, together, dropout_p)
    most = PAIRS_TOGETHER // max(1, query.shape[1]) if _go_together(how) else -1
    groups = list(_groups(packed, how, most)) or [(packed, how._replace(mask=None, bias=None))]
    rows, keys = [group.spans[0] for group, _ in groups], [group.spans[1] for group, _ in groups]
    parts = zip(query.split(rows), key.split(keys), value.split(keys), groups, strict=True)
    outputs = [_call(q, k, v, own, dropout_p) for q, k, v, (_, own) in parts]
    return torch.cat(outputs)


def _groups(packed: Packed, how: _Described, most: int) -> Iterator[tuple[Packed, _Described]]:
    """The segments, long ones alone and short ones together, each with what is to be done to it."""
    for group in packed.groups(most):
        together = _together(group, how) if group.many > 1 else None
        if together is not None:
            yield group, together
        else:
            yield from ((segment, _of_segment(how, segment)) for segment in group.groups(-1))


def _call(query: Tensor, key: Tensor, value: Tensor, how: _Described, dropout_p: float) -> Tensor:
    """``attention`` of (T, heads, D) tensors."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return attention(q, k, v, **how._asdict(), dropout_p=dropout_p)[0].transpose(0, 1)


# ---------------------------------------------------------------------------- together


def _together(packed: Packed, how: _Described) -> _Described | None:
    """The same as one call on all tokens, or None where position biases are not one set of diagonals."""
    bias = how.bias
    if bias is not None:
        drift = packed.drift()
        if drift is None:
            return None
        bias = _based(bias, lambda leaf: _placed(leaf, drift))
    within: Mask = packed.within()
    if how.mask is not None:
        within = within & _mapped(how.mask, lambda leaf: _in_all(leaf, packed))
    return _Described(_score(how.score, packed.local), how.normalize, within, bias)


def _go_together(how: _Described) -> bool:
    """Whether runs will do; a normaliser of your own is given whole rows of its segment and nothing else."""
    return isinstance(how.normalize, normalizers.BUILT_IN) and _runs_needed(how.mask) <= _runs.MOST_RUNS


def _runs_needed(mask: Mask | None) -> int:
    """How many runs a row a mask takes, at most; a Rule is looked up pair by pair and takes none."""
    if isinstance(mask, masks.And):
        return _runs_needed(mask.left) * _runs_needed(mask.right)
    if isinstance(mask, masks.Or):
        return _runs_needed(mask.left) + _runs_needed(mask.right)
    if isinstance(mask, masks.Not):
        inner = _runs_needed(mask.inner)
        sides = 2 if _two_sided(mask.inner) else 1
        return sides if inner == 1 else inner + 1
    return 1


def _two_sided(mask: Mask) -> bool:
    if isinstance(mask, masks.Window):
        return mask.left is not None and mask.right is not None
    if isinstance(mask, masks.Padding):
        return mask.start is not None and (mask.stop is not None or mask.lengths is not None)
    return isinstance(mask, (masks.And, masks.Or, masks.Not))


def _in_all(leaf: Mask, packed: Packed) -> Mask:
    """A simple mask in the coordinates of all tokens."""
    if isinstance(leaf, Rule):
        return Rule(_local_rule(leaf.mask_mod, packed.local))
    if isinstance(leaf, masks.Causal):
        return Rows(None, packed.position() + 1)
    if isinstance(leaf, masks.Window):
        p = packed.position()
        return Rows(
            None if leaf.left is None else p - leaf.left, None if leaf.right is None else p + (leaf.right + 1)
        )
    if isinstance(leaf, masks.Prefix):
        return Rows(None, packed.key_number(leaf.n))
    assert isinstance(leaf, masks.Padding)
    stop = leaf.stop if leaf.lengths is None else leaf.lengths
    return Rows(
        None if leaf.start is None else packed.key_number(leaf.start),
        None if stop is None else packed.key_number(stop),
    )


Local = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _local_rule(rule: masks.MaskMod, local: Local) -> masks.MaskMod:
    def within(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        segment, row, key = local(q, k)
        return rule(segment, h, row, key)

    return within


def _score(score: Any, local: Local) -> Any:
    if not isinstance(score, Modified):
        return score
    change = score.score_mod

    def within(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        segment, row, key = local(q, k)
        return change(s, segment, h, row, key)

    return Modified(_score(score.score, local), within)


# ---------------------------------------------------------------------------- a segment alone


def _of_segment(how: _Described, packed: Packed) -> _Described:
    """The same for the one segment of ``packed``."""
    offset, Tk = int(packed.offsets[0]), packed.spans[1]

    def own(n: int | Tensor | None) -> int | None:
        if isinstance(n, Tensor):
            n = int(n[packed.first] if n.ndim else n)
        return None if n is None else min(n, Tk)

    def in_one(leaf: Mask) -> Mask:
        if isinstance(leaf, Rule):
            return Rule(_local_rule(leaf.mask_mod, packed.local))
        if isinstance(leaf, masks.Prefix):
            return masks.Prefix(own(leaf.n) or 0)
        if isinstance(leaf, masks.Padding):
            return masks.Padding(own(leaf.lengths), start=own(leaf.start), stop=own(leaf.stop))
        placed: Mask = _placed(leaf, offset)
        return placed

    mask = None if how.mask is None else _mapped(how.mask, in_one)
    bias = None if how.bias is None else _based(how.bias, lambda leaf: _placed(leaf, offset))
    return _Described(_score(how.score, packed.local), how.normalize, mask, bias)


# ---------------------------------------------------------------------------- walking what is made of parts


def _placed(leaf: Any, offset: int) -> Any:
    """A mask or bias that speaks of positions, with its alignment said in numbers."""
    return replace(leaf, alignment=None, offset=offset)


def _mapped(mask: Mask, change: Callable[[Mask], Mask]) -> Mask:
    """A mask with every simple mask in it changed."""
    if isinstance(mask, masks.Not):
        return masks.Not(_mapped(mask.inner, change))
    if isinstance(mask, (masks.And, masks.Or)):
        return type(mask)(_mapped(mask.left, change), _mapped(mask.right, change))
    return change(mask)


def _based(bias: Bias, change: Callable[[Any], Bias]) -> Bias:
    """A bias with every simple bias in it changed."""
    if isinstance(bias, biases.Sum):
        return biases.Sum(_based(bias.left, change), _based(bias.right, change))
    return change(bias)
