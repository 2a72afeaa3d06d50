"""What kind of attention a call is, where its queries stand among its keys, and its mask in words.

Letters: B samples, Tq queries, Tk keys; query i stands at i + offset.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard import biases, masks
from regard._call import prepare
from regard._frame import Offset
from regard.biases import Alibi, Bias, Relative, Sum, Values
from regard.look._places import Place
from regard.look._watch_seen import BoundBias, BoundMask, Seen
from regard.masks import And, Causal, Dense, Mask, Not, Or, Window


def where(seen: Seen, place: Place, lengths: tuple[int, int], rows_before: int) -> tuple[str, Offset | None]:
    """("self", offset) or ("cross", None). `rows_before`: how many queries of this module a generation had before."""
    Tq, Tk = lengths
    if seen.crossed or place.crossed:
        return "cross", None
    if seen.causal or seen.crossed is False:
        return "self", 0
    spoken = _spoken(seen)
    if spoken is not None:
        return "self", spoken
    if Tq == Tk:
        return "self", 0
    if Tq < Tk:
        shown = _shown(seen, Tq, Tk)
        if shown is not None and (Tq > 1 or rows_before or _causal(place)):
            return "self", shown
        if rows_before or _causal(place):
            return "self", Tk - Tq
    return "cross", None


def window(seen: Seen, place: Place) -> int | None:
    """How many keys a sliding window holds, by the module's own word or by its mask; None without one."""
    mask = seen.mask.inner if isinstance(seen.mask, BoundMask) else seen.mask
    own = getattr(place.module, "mask", None)
    for part in [*masks.walk(mask), *masks.walk(own if isinstance(own, Mask) else None)]:
        if isinstance(part, Window) and part.left is not None:
            return part.left + 1
    for owner in (place.module, getattr(place.module, "config", None)):
        size = getattr(owner, "sliding_window", None)
        if isinstance(size, int) and size > 0:
            return size
    return None


def _causal(place: Place) -> bool:
    return bool(getattr(place.module, "is_causal", False))


def _spoken(seen: Seen) -> Offset | None:
    """The offset of a call whose mask or bias speaks of positions."""
    mask = seen.mask.inner if isinstance(seen.mask, BoundMask) else seen.mask
    bias = seen.bias.inner if isinstance(seen.bias, BoundBias) else seen.bias
    parts: list[Any] = [*masks.walk(mask), *(biases.walk(bias) if isinstance(bias, Bias) else [])]
    if (
        seen.query is None
        or seen.key is None
        or not any(isinstance(part, (Causal, Window, Alibi, Relative)) for part in parts)
    ):
        return None
    value = seen.key[..., :0]
    return prepare(seen.query, seen.key, value, seen.mask, seen.score, seen.normalize, seen.bias).offset


def _shown(seen: Seen, Tq: int, Tk: int) -> int | None:
    """The offset that a tensor shows by the last key that each query may see, where these go up row by row."""
    mask = seen.mask.inner if isinstance(seen.mask, BoundMask) else seen.mask
    bias = seen.bias.inner if isinstance(seen.bias, BoundBias) else seen.bias
    bias = bias.tensor if isinstance(bias, Values) else bias if isinstance(bias, Tensor) else None
    allowed = None
    if isinstance(mask, Dense):
        allowed = mask.mask
    elif mask is None and bias is not None:
        allowed = bias > torch.finfo(bias.dtype).min / 2
    if allowed is None or allowed.shape[-1] != Tk or allowed.shape[-2] not in (1, Tq) or allowed.dim() < 2:
        return None
    rows = allowed.reshape(-1, *allowed.shape[-2:])[:, [0, -1]]
    last = Tk - 1 - rows.flip(-1).to(torch.uint8).argmax(-1)
    first, end = int(last[:, 0].max()), int(last[:, 1].max())
    return first if end - first == Tq - 1 and not bool((~rows).all(-1).all()) else None


# ---------------------------------------------------------------------------- words


def masked_words(seen: Seen) -> str:
    """The mask and what is added to the scores, for a person."""
    said = [] if seen.mask is None else [_mask_words(seen.mask)]
    if seen.bias is not None:
        said.append(_bias_words(seen.bias))
    return ", ".join(said) or "none"


def _mask_words(mask: Mask) -> str:
    if isinstance(mask, BoundMask):
        mask = mask.inner
    if isinstance(mask, (And, Or)):
        word = " and " if isinstance(mask, And) else " or "
        return word.join(_mask_words(part) for part in (mask.left, mask.right))
    if isinstance(mask, Not):
        return f"not ({_mask_words(mask.inner)})"
    if isinstance(mask, Dense):
        return f"bool tensor {tuple(mask.mask.shape)}"
    if isinstance(mask, Window):
        ends = ["all" if end is None else str(end) for end in (mask.left, mask.right)]
        return f"window of {ends[0]} keys back and {ends[1]} on"
    words = {"Keys": "padding", "Rule": "a rule of its own", "Rows": "runs of keys by row"}
    return words.get(type(mask).__name__, type(mask).__name__.lower())


def _bias_words(bias: Bias | Tensor) -> str:
    if isinstance(bias, BoundBias):
        bias = bias.inner
    if isinstance(bias, Sum):
        return f"{_bias_words(bias.left)}, {_bias_words(bias.right)}"
    if isinstance(bias, Values):
        bias = bias.tensor
    if isinstance(bias, Tensor):
        return f"float tensor {tuple(bias.shape)} added"
    return {"Alibi": "ALiBi", "Relative": "relative bias"}.get(type(bias).__name__, type(bias).__name__)
