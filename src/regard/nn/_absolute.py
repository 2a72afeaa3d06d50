"""What masks, biases and scores say of positions, for a call that sees only some of them.

With a cache, query row i of a call stands at position ``row + i`` and key j at ``first + j``. Masks, biases and scores
go on speaking of positions from 0 on, as in a full pass: here they are brought to the rows and keys of the call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from regard import _checks, biases, masks
from regard._checks import words, wrong_value
from regard.biases import Bias
from regard.masks import Mask
from regard.scores import Modified


class Seen(NamedTuple):
    """The rows of a call: positions ``row`` to row + Tq - 1; its keys: ``first`` to first + Tk - 1."""

    row: int
    Tq: int
    first: int
    Tk: int

    @property
    def offset(self) -> int:
        return self.row - self.first


def seen_mask(mask: Mask | None, bias: Bias | None, seen: Seen) -> Mask | None:
    """The mask for the call's rows and keys, with the alignment that mask and bias lack."""
    here = None if mask is None else _mask(mask, seen)
    if seen.offset == 0 and seen.Tq == seen.Tk:
        return here
    if not any(hasattr(part, "alignment") for part in (*masks.walk(here), *biases.walk(bias))):
        return here
    told = masks.Window(offset=seen.offset)  # lets everything pass, and says where the queries stand
    return told if here is None else here & told


def _mask(mask: Mask, seen: Seen) -> Mask | None:
    """The mask here; None where it lets every key of the call pass, as ``Causal()`` does for one new position."""
    if isinstance(mask, masks.And):
        left, right = _mask(mask.left, seen), _mask(mask.right, seen)
        return right if left is None else left if right is None else left & right
    if isinstance(mask, masks.Or):
        left, right = _mask(mask.left, seen), _mask(mask.right, seen)
        return None if left is None or right is None else left | right
    if isinstance(mask, (masks.Causal, masks.Window)):
        return None if _passes_all(mask, seen) else mask
    return _leaf(mask, seen)


def _passes_all(mask: masks.Causal | masks.Window, seen: Seen) -> bool:
    if mask.offset is not None or mask.alignment == "upper_left":
        return False  # told where the queries stand: that must be compared with where they do
    left, right = (None, 0) if isinstance(mask, masks.Causal) else (mask.left, mask.right)
    behind = right is None or seen.Tk - 1 <= seen.offset + right
    return behind and (left is None or seen.offset + seen.Tq - 1 <= left)


def _leaf(mask: Mask, seen: Seen) -> Mask:
    if isinstance(mask, masks.Not):
        inner = _mask(mask.inner, seen)
        return masks.Not(masks.Window() if inner is None else inner)
    if isinstance(mask, masks.Padding):
        stop = mask.stop if mask.lengths is None else mask.lengths
        return masks.Padding(start=_shifted(mask.start, seen), stop=_shifted(stop, seen))
    if isinstance(mask, masks.Prefix):
        return masks.Prefix(_shifted(mask.n, seen))
    if isinstance(mask, masks.Keys):
        return masks.Keys(_keys("Padding.of", mask.keep, seen))
    if isinstance(mask, masks.Dense):
        return masks.Dense(_pairs("mask", mask.mask, seen))
    if isinstance(mask, masks.Documents):
        name, ids = ("query_ids", mask.query_ids) if mask.key_ids is None else ("key_ids", mask.key_ids)
        keys = _keys(f"Documents({name}=)", ids, seen)
        return masks.Documents(_rows("Documents(query_ids=)", mask.query_ids, seen), keys)
    if isinstance(mask, masks.Rows):
        start, stop = (
            None if edge is None else _shifted(_rows(f"Rows({name}=)", edge, seen), seen)
            for name, edge in (("start", mask.start), ("stop", mask.stop))
        )
        return masks.Rows(start, stop)
    if isinstance(mask, masks.Rule):
        rule = mask.mask_mod
        return masks.Rule(lambda b, h, q, k: rule(b, h, q + seen.row, k + seen.first))
    if seen.first:
        way_out = "Use a growing or preallocated cache, which keeps every key."
        wrong_value("mask", "masks of regard.masks behind a ring", words(type(mask).__name__), way_out)
    return mask


def seen_bias(bias: Bias | None, seen: Seen) -> Bias | None:
    """The bias for the call's rows and keys."""
    if isinstance(bias, biases.Sum):
        left, right = seen_bias(bias.left, seen), seen_bias(bias.right, seen)
        assert left is not None and right is not None
        return biases.Sum(left, right)
    return biases.Values(_pairs("bias", bias.tensor, seen)) if isinstance(bias, biases.Values) else bias


def seen_score(score: Any, seen: Seen) -> Any:
    """The score for the call's rows and keys."""
    if not isinstance(score, Modified):
        return score
    change = score.score_mod
    return replace(
        score,
        score=seen_score(score.score, seen),
        score_mod=lambda s, b, h, q, k: change(s, b, h, q + seen.row, k + seen.first),
    )


def within(mask: Mask | None, left: int) -> bool:
    """Whether a mask surely lets no query see further back than ``left`` positions."""
    if isinstance(mask, masks.And):
        return within(mask.left, left) or within(mask.right, left)
    if isinstance(mask, masks.Or):
        return within(mask.left, left) and within(mask.right, left)
    return isinstance(mask, masks.Window) and mask.left is not None and mask.left <= left


def _shifted(count: Any, seen: Seen) -> Any:
    """A number of keys counted from position 0, counted from ``first`` and within the keys of the call."""
    if count is None:
        return None
    if isinstance(count, Tensor):
        return (count - seen.first).clamp(0, seen.Tk)
    return min(max(count - seen.first, 0), seen.Tk)


def _keys(name: str, along: Tensor, seen: Seen) -> Tensor:
    return _part(name, along, -1, "keys", seen.first, seen.Tk)


def _rows(name: str, along: Tensor, seen: Seen) -> Tensor:
    """The rows of the call, of a tensor that has these or those of a whole pass."""
    return along if along.shape[-1] == seen.Tq else _part(name, along, -1, "rows", seen.row, seen.Tq)


def _pairs(name: str, tensor: Tensor, seen: Seen) -> Tensor:
    """A tensor of pairs: the keys of the call, and its rows where it has those of a whole pass."""
    if tensor.ndim and tensor.shape[-1] > 1:
        tensor = _keys(name, tensor, seen)
    if tensor.ndim > 1 and tensor.shape[-2] > 1 and tensor.shape[-2] != seen.Tq:
        tensor = _part(name, tensor, -2, "rows", seen.row, seen.Tq)
    return tensor


def _part(name: str, tensor: Tensor, dim: int, said: str, first: int, count: int) -> Tensor:
    """Positions ``first`` to first + count - 1; a slice past the end would leave fewer, and one would broadcast."""
    if tensor.shape[dim] < first + count:
        way_out = "With a cache they are counted from position 0 on, as in a full pass."
        _checks.wrong_value(name, f"{first + count} {said} or more", tensor, way_out)
    return tensor.narrow(dim, first, count)
