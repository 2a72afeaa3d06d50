"""What is kept of a call: statistics, top weights, pooled maps and chosen rows, without its weights.

One `observe` gives most of it. In the place of the value it is handed features of the keys, so that its output is the
sums over the keys: of weights (`mass`), of weights times positions (`distance`), of weights of a group. The weights of
single pairs (`self`, `previous`, `first`) follow from their scores and the log-sum-exp.

Letters: B samples, H heads, Tq queries, Tk keys; p = i + offset, where query i stands among the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard._call import Call, prepare
from regard._frame import wide
from regard._observe import STATISTICS as OBSERVED
from regard._observe import observe
from regard.kernels import inline
from regard.look import _watch_pairs
from regard.look._record_statistics import POSITIONED, at_keys, first_keys, of_weights
from regard.look._watch_keep import Keep
from regard.look._watch_pairs import bias_of, features, mask_of, rows_of
from regard.look._watch_seen import Seen
from regard.normalizers import Softmax

_OTHERS = ("first", "self", "previous", "distance")


def kept(
    seen: Seen,
    keep: Keep,
    offset: int | Tensor | None,
    *,
    more: bool,
    pool: bool = True,
    first: Tensor | None = None,
) -> tuple[dict[str, Any], Tensor | None]:
    """Fields of a Site, and the first key (B,) that any query of each sample gave weight to.

    `more`: whether pools (these only where `pool`), rows and weights of this layer are wanted. `first`: that key, where
    a step before has told it; below 0 where it is none of these keys.
    """
    if not pool and keep.pool:
        keep = replace(keep, pool=0)
    if seen.weights is not None:
        return _of_own_weights(seen, keep, offset, more, first)
    call = _wide_call(seen)
    fields, first = _observed(call, keep, offset, more, first)
    heads = list(range(call.frame.H)) if keep.heads is None else [h for h in keep.heads if h < call.frame.H]
    if more and keep.rows:
        fields |= _chosen_rows(call, keep.rows, heads)
    if more and keep.weights:
        fields["whole"] = _whole(call, heads, seen.dtype)
    if more and (keep.rows or keep.weights or keep.pool):
        fields["heads_kept"] = None if keep.heads is None else tuple(heads)
    return fields, first


def _wide_call(seen: Seen) -> Call:
    """The call in float32 or better; what autocast would have rounded is rounded."""
    assert seen.query is not None and seen.key is not None
    query, key = (
        tensor if seen.autocast is None else tensor.to(seen.autocast) for tensor in (seen.query, seen.key)
    )
    query, key = wide(query), wide(key)
    return prepare(query, key, key[..., :0], seen.mask, seen.score, seen.normalize, seen.bias)


# ---------------------------------------------------------------------------- without weights


def _observed(
    call: Call, keep: Keep, offset: int | Tensor | None, more: bool, first: Tensor | None
) -> tuple[dict[str, Any], Tensor | None]:
    softmax = isinstance(call.normalize, Softmax)
    wanted = [
        name
        for name in keep.statistics
        if (offset is not None or name not in POSITIONED) and (softmax or name != "lse")
    ]
    others = [name for name in wanted if name in _OTHERS]
    asked = {name for name in wanted if name in OBSERVED} | ({"lse", "received"} if others else set())
    groups = _groups(keep, call)
    seen = observe(
        call.query,
        call.key,
        features(call, groups),
        mask_of(call),
        score=call.score,
        normalize=call.normalize,
        bias=bias_of(call),
        statistics=tuple(asked),
        topk=keep.topk,
        pool=keep.pool if more else 0,
    )
    sums = seen.output
    found = {name: getattr(seen, name) for name in wanted if name in OBSERVED} | {"mass": sums[..., 0]}
    if first is None and seen.received is not None:
        first = first_keys(seen.received)
    if others:
        found |= _watch_pairs.statistics(call, others, sums, seen.lse, offset, first)
    statistics = {name: found[name].float() for name in wanted}
    statistics |= {name: sums[..., 2 + number].float() for number, name in enumerate(groups)}
    fields: dict[str, Any] = {"statistics": {name: _own(tensor) for name, tensor in statistics.items()}}
    if keep.topk:
        assert seen.top_keys is not None and seen.top_weights is not None
        fields |= {"top_weights": seen.top_weights.float(), "top_keys": seen.top_keys.int()}
    if more and keep.pool:
        fields |= _pools(seen.pooled, seen.pooled_max, call, keep)
    return fields, first


def _own(tensor: Tensor) -> Tensor:
    """A tensor that holds on to no larger one."""
    return (
        tensor.clone()
        if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
        else tensor
    )


def _groups(keep: Keep, call: Call) -> dict[str, Tensor]:
    """The groups of keys that fit this call, (B|1, Tk)."""
    wide_groups = {name: group if group.dim() == 2 else group[None] for name, group in keep.groups.items()}
    return {
        name: group.to(call.frame.device)
        for name, group in wide_groups.items()
        if group.shape[-1] == call.frame.Tk and group.shape[0] in (1, call.frame.B)
    }


def _pools(mean: Tensor | None, largest: Tensor | None, call: Call, keep: Keep) -> dict[str, Any]:
    assert mean is not None and largest is not None
    if keep.heads is not None:
        heads = [head for head in keep.heads if head < call.frame.H]
        mean, largest = mean[:, heads], largest[:, heads]
    cell = tuple(max(1, -(-length // keep.pool)) for length in (call.frame.Tq, call.frame.Tk))
    return {"pooled": mean.float(), "pooled_max": largest.float(), "cell": cell}


# ---------------------------------------------------------------------------- weights, by rows


def row_blocks(seen: Seen, keep: Keep) -> Iterator[Tensor]:
    """Weights of the heads that were asked for, some rows at a time: (B, n, rows, Tk)."""
    if seen.weights is not None:
        H = seen.weights.shape[1]
        heads = [head for head in range(H) if keep.heads is None or head in keep.heads]
        yield seen.weights[:, heads].float()
        return
    call = _wide_call(seen)
    heads = [head for head in range(call.frame.H) if keep.heads is None or head in keep.heads]
    for span in inline.blocks(call) if call.frame.Tk else ():
        yield rows_of(call, torch.arange(*span, device=call.frame.device))[:, heads].float()


def chosen(rows: Sequence[int], length: int) -> list[int]:
    """Rows counted from either end, those that are there, each once, in order."""
    found = {row + length if row < 0 else row for row in rows}
    return sorted(row for row in found if 0 <= row < length)


def _chosen_rows(call: Call, rows: Sequence[int], heads: list[int]) -> dict[str, Any]:
    numbers = chosen(rows, call.frame.Tq)
    weights = rows_of(call, torch.tensor(numbers, dtype=torch.int64, device=call.frame.device))
    return {"rows": tuple(numbers), "row_weights": _own(weights.float()[:, heads])}


def _whole(call: Call, heads: list[int], dtype: torch.dtype) -> Tensor:
    frame = call.frame
    whole = torch.zeros(frame.B, len(heads), frame.Tq, frame.Tk, dtype=dtype, device=frame.device)
    for span in inline.blocks(call) if frame.Tk else ():
        rows = torch.arange(*span, device=frame.device)
        whole[:, :, slice(*span)] = rows_of(call, rows)[:, heads].to(dtype)
    return whole


# ---------------------------------------------------------------------------- weights that the model made


def _of_own_weights(
    seen: Seen, keep: Keep, offset: int | Tensor | None, more: bool, first: Tensor | None
) -> tuple[dict[str, Any], Tensor | None]:
    assert seen.weights is not None
    weights = seen.weights.detach()
    B, H, Tq, Tk = weights.shape
    if first is None and "first" in keep.statistics:
        first = first_keys(weights.sum(-2))
    names = [name for name in keep.statistics if name not in ("lse", "first")]
    # Head by head: the model holds all the weights already, and what is computed from them is as large.
    parts = [of_weights(weights[:, head : head + 1], offset, names) for head in range(H)]
    statistics = {name: torch.cat([part[name] for part in parts], 1) for name in (parts[0] if parts else {})}
    if "first" in keep.statistics:
        assert first is not None
        statistics["first"] = at_keys(weights, first[:, None, None]).float()
    if "lse" in keep.statistics and seen.lse is not None:
        statistics["lse"] = seen.lse.float()
    statistics |= _shares(weights, keep)
    fields: dict[str, Any] = {"statistics": statistics}
    if keep.topk:
        fields |= _top(weights, keep.topk)
    if not more or not (keep.pool or keep.rows or keep.weights):
        return fields, first
    heads = None if keep.heads is None else [head for head in keep.heads if head < H]
    wanted = weights if heads is None else weights[:, heads]
    fields["heads_kept"] = None if heads is None else tuple(heads)
    if keep.pool:
        fields |= pooled(wanted, keep.pool)
    if keep.rows:
        rows = chosen(keep.rows, Tq)
        fields |= {"rows": tuple(rows), "row_weights": wanted[:, :, rows].float()}
    if keep.weights:
        fields["whole"] = wanted.clone()
    return fields, first


def _shares(weights: Tensor, keep: Keep) -> dict[str, Tensor]:
    """How much weight each query gives to the groups of keys that fit."""
    B, Tk = weights.shape[0], weights.shape[-1]
    found = {}
    for name, group in keep.groups.items():
        share = group if group.dim() == 2 else group[None]
        if share.shape[-1] == Tk and share.shape[0] in (1, B):
            column = share.to(weights.device, torch.float32)[:, None, :, None]
            found[name] = (weights.float() @ column)[..., 0]
    return found


def _top(weights: Tensor, k: int) -> dict[str, Any]:
    found = weights.float().topk(min(k, weights.shape[-1]), -1)
    keys = torch.where(found.values == 0, -1, found.indices).int()
    return {"top_weights": found.values, "top_keys": keys}


def pooled(weights: Tensor, side: int) -> dict[str, Any]:
    """The mean over the rows of a cell of their weight in it, and the largest weight, in at most side x side cells."""
    B, H, Tq, Tk = weights.shape
    tall, across = -(-Tq // side) or 1, -(-Tk // side) or 1
    whole = torch.nn.functional.pad(weights.float(), (0, -Tk % across, 0, -Tq % tall))
    cells = whole.unflatten(3, (-1, across)).unflatten(2, (-1, tall))  # (B, H, rows, tall, columns, across)
    heights = (Tq - torch.arange(cells.shape[2], device=weights.device) * tall).clamp(max=tall)
    mean = cells.sum((3, 5)) / heights[:, None]
    return {"pooled": mean, "pooled_max": cells.amax((3, 5)), "cell": (tall, across)}
