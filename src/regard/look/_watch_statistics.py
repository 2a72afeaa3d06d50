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

from regard import _runs
from regard._attention import attention_with_lse
from regard._call import Call, prepare
from regard._frame import coordinates, wide
from regard._observe import STATISTICS as OBSERVED
from regard._observe import observe
from regard.biases import Bias
from regard.kernels import inline, reference
from regard.look._record_statistics import POSITIONED, at_keys, first_keys, of_weights, positions
from regard.look._watch_keep import Keep
from regard.look._watch_seen import BoundBias, BoundMask, Seen
from regard.masks import And, Causal, Mask
from regard.normalizers import Softmax
from regard.scores import Dot

_PAIRS = ("first", "self", "previous")
# Beyond this a log-sum-exp in float32 has no digits left behind the point.
_FAR = 1e3


def kept(
    seen: Seen, keep: Keep, offset: int | Tensor | None, more: bool, *, pool: bool = True
) -> dict[str, Any]:
    """Fields of a Site. `more`: whether pools (these only where `pool`), rows and weights of this layer are wanted."""
    if not pool and keep.pool:
        keep = replace(keep, pool=0)
    if seen.weights is not None:
        return _of_own_weights(seen, keep, offset, more)
    call = _wide_call(seen)
    fields = _observed(call, keep, offset, more)
    heads = list(range(call.frame.H)) if keep.heads is None else [h for h in keep.heads if h < call.frame.H]
    if more and keep.rows:
        fields |= _chosen_rows(call, keep.rows, heads)
    if more and keep.weights:
        fields["whole"] = _whole(call, heads, seen.dtype)
    if more and (keep.rows or keep.weights or keep.pool):
        fields["heads_kept"] = None if keep.heads is None else tuple(heads)
    return fields


def _wide_call(seen: Seen) -> Call:
    """The call in float32 or better; what autocast would have rounded is rounded."""
    assert seen.query is not None and seen.key is not None
    query, key = (
        tensor if seen.autocast is None else tensor.to(seen.autocast) for tensor in (seen.query, seen.key)
    )
    query, key = wide(query), wide(key)
    return prepare(query, key, key[..., :0], seen.mask, seen.score, seen.normalize, seen.bias)


# ---------------------------------------------------------------------------- without weights


def _observed(call: Call, keep: Keep, offset: int | Tensor | None, more: bool) -> dict[str, Any]:
    wanted = [name for name in keep.statistics if offset is not None or name not in POSITIONED]
    softmax = isinstance(call.normalize, Softmax)
    if not softmax and "lse" in wanted:
        wanted.remove("lse")
    pairs = [name for name in wanted if name in _PAIRS]
    asked = {name for name in wanted if name in OBSERVED} | ({"lse", "received"} if pairs else set())
    if softmax and "distance" in wanted:
        asked.add("lse")
    distance = "distance" in wanted
    groups = _groups(keep, call)
    features = _features(call, groups)
    seen = observe(
        call.query,
        call.key,
        features,
        _mask_of(call),
        score=call.score,
        normalize=call.normalize,
        bias=_bias_of(call),
        statistics=tuple(asked),
        topk=keep.topk,
        pool=keep.pool if more else 0,
    )
    sums = seen.output
    found = {name: getattr(seen, name) for name in wanted if name in OBSERVED}
    found["mass"] = sums[..., 0]
    first = first_keys(seen.received) if seen.received is not None else None
    others = [*pairs, *(["distance"] if distance else [])]
    if softmax and others:
        found |= _of_pairs(call, pairs, seen.lse, offset, first)
        if distance:
            assert offset is not None
            found["distance"] = _distance(call, sums, seen.lse, offset)
        _mend(call, found, others, seen.lse, offset, first)
    elif others:
        found |= _by_rows(call, others, offset, first)
    statistics = {name: found[name].float() for name in wanted}
    statistics |= {name: sums[..., 2 + number].float().contiguous() for number, name in enumerate(groups)}
    fields: dict[str, Any] = {"statistics": {name: _own(tensor) for name, tensor in statistics.items()}}
    if keep.topk:
        assert seen.top_keys is not None and seen.top_weights is not None
        fields |= {"top_weights": seen.top_weights.float(), "top_keys": seen.top_keys.int()}
    if more and keep.pool:
        fields |= _pools(seen.pooled, seen.pooled_max, call, keep)
    return fields


def _mask_of(call: Call) -> Mask | None:
    return None if call.mask is None else BoundMask(call.mask)


def _bias_of(call: Call) -> Bias | None:
    return None if call.bias is None else BoundBias(call.bias)


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


def _features(call: Call, groups: dict[str, Tensor]) -> Tensor:
    """(B, Hkv, Tk, 2 + groups): 1, the key's position, whether it is in each group."""
    frame, key = call.frame, call.key
    features = key.new_ones(frame.B, frame.Tk, 2 + len(groups))
    features[..., 1] = torch.arange(frame.Tk, device=frame.device)
    for number, group in enumerate(groups.values()):
        features[..., 2 + number] = group
    return features[:, None].expand(-1, frame.Hkv, -1, -1)


def _pools(mean: Tensor | None, largest: Tensor | None, call: Call, keep: Keep) -> dict[str, Any]:
    assert mean is not None and largest is not None
    if keep.heads is not None:
        heads = [head for head in keep.heads if head < call.frame.H]
        mean, largest = mean[:, heads], largest[:, heads]
    cell = tuple(max(1, -(-length // keep.pool)) for length in (call.frame.Tq, call.frame.Tk))
    return {"pooled": mean.float(), "pooled_max": largest.float(), "cell": cell}


# ---------------------------------------------------------------------------- distance


def _distance(call: Call, sums: Tensor, lse: Tensor | None, offset: int | Tensor) -> Tensor:
    """The mean of |p - j|. Keys on both sides of a query are told apart by a second call."""
    at = positions(offset, call.frame.Tq, call.frame.device).to(sums.dtype)
    mass, place = sums[..., 0], sums[..., 1]
    if _looks_back(call, offset):
        total = at * mass - place
    else:
        behind, behind_place = _behind(call, lse, offset)
        total = (at * behind - behind_place) + (place - behind_place) - at * (mass - behind)
    return total.clamp(min=0) / torch.where(mass == 0, 1.0, mass)


def _looks_back(call: Call, offset: int | Tensor) -> bool:
    """Whether no query may see a key that comes after it."""
    if call.mask is None or call.frame.Tk == 0:
        return call.frame.Tk == 0
    if _has_causal(call.mask):
        return True
    seen = _runs.lower(call.mask, call.frame, call.offset, at_most=True)
    if seen.runs is None:
        return False
    at = positions(offset, call.frame.Tq, call.frame.device)
    for run in seen.runs:
        low, high = _runs.edges(run, call.frame, call.offset)
        if bool(((low < high) & (high - 1 > at)).any()):
            return False
    return True


def _has_causal(mask: Mask) -> bool:
    if isinstance(mask, And):
        return _has_causal(mask.left) or _has_causal(mask.right)
    return isinstance(mask, Causal)


def _behind(call: Call, lse: Tensor | None, offset: int | Tensor) -> tuple[Tensor, Tensor]:
    """Sums of weights, and of weights times positions, over the keys up to the query's own: (B, H, Tq) each."""
    assert lse is not None
    causal: Mask = Causal(offset=offset)
    sums, part = attention_with_lse(
        call.query,
        call.key,
        _features(call, {}),
        causal if call.mask is None else BoundMask(call.mask) & causal,
        score=call.score,
        normalize=Softmax(),
        bias=_bias_of(call),
    )
    share = torch.where(part == -torch.inf, 0.0, (part - lse).exp())
    return share * sums[..., 0], share * sums[..., 1]


# ---------------------------------------------------------------------------- single pairs


def _of_pairs(
    call: Call,
    names: Sequence[str],
    lse: Tensor | None,
    offset: int | Tensor | None,
    first: Tensor | None,
) -> dict[str, Tensor]:
    """The weights of one key of each row, exp(s - lse)."""
    found = {}
    for name in names:
        assert lse is not None
        if name == "first":
            assert first is not None
            keys = first[:, None]
        else:
            assert offset is not None
            keys = positions(offset, call.frame.Tq, call.frame.device)[:, 0] - int(name == "previous")
        scores = _scores_at(call, keys)
        found[name] = torch.where(scores == -torch.inf, 0.0, (scores - lse).exp())
    return found


def _scores_at(call: Call, keys: Tensor) -> Tensor:
    """(B, H, Tq): the score of key `keys` (B|1, Tq|1) of each row with its bias; -inf where they may not meet."""
    frame = call.frame
    if not frame.Tk or not frame.Tq:
        return call.query.new_full(call.query.shape[:3], -torch.inf)
    inside = (keys >= 0) & (keys < frame.Tk)
    index = keys.clamp(0, frame.Tk - 1).expand(frame.B, frame.Tq)
    key = call.key.gather(2, index[:, None, :, None].expand(-1, frame.Hkv, -1, call.key.shape[-1]))
    whole = coordinates(frame, call.offset, (0, frame.Tq), (0, 1))
    at = whole._replace(j=index[:, None, :, None])
    scores = _dots(call, key) if isinstance(call.score, Dot) else _scores_by_row(call, key, at)
    if call.bias is not None:
        scores = scores + call.bias.value(at).to(scores.dtype)[..., 0]
    blocked = ~inside[:, None].expand(frame.B, 1, frame.Tq)
    if call.mask is not None:
        blocked = blocked | ~call.mask.allowed(at).expand(frame.B, frame.H, frame.Tq, 1)[..., 0]
    return scores.masked_fill(blocked, -torch.inf)


def _dots(call: Call, key: Tensor) -> Tensor:
    """Scaled inner products of each query with the key of its own row (B, Hkv, Tq, D)."""
    grouped = call.query.unflatten(1, (call.frame.Hkv, -1)) if call.frame.Hkv else call.query[:, :, None]
    raw = torch.einsum("bkgtd,bktd->bkgt", grouped, key).flatten(1, 2)
    scale = call.score.factor(call.query.shape[-1])
    scores = raw * (scale.to(raw.dtype)[..., None] if isinstance(scale, Tensor) and scale.ndim else scale)
    cap = call.score.softcap
    return scores if cap is None else cap * torch.tanh(scores / cap)


def _scores_by_row(call: Call, key: Tensor, at: Any) -> Tensor:
    """Any score: each row is a call of one query and one key. A score_mod is given the pair's own coordinates."""
    query = call.query.transpose(1, 2).flatten(0, 1)[:, :, None]
    key = key.transpose(1, 2).flatten(0, 1)[:, :, None]
    B, H, Tq = call.query.shape[:3]
    score, changes = call.score, []
    while hasattr(score, "score_mod"):
        changes.append(score.score_mod)
        score = score.score
    plain = call._replace(score=score, mask=None, bias=None)
    scores, _ = reference.scored(plain, at, query, key)
    found = scores.reshape(B, Tq, H, 1).transpose(1, 2)
    for change in reversed(changes):
        found = change(found, at.b, at.h, at.i, at.j)
    return found[..., 0]


# ---------------------------------------------------------------------------- weights, by rows


def _by_rows(
    call: Call, names: Sequence[str], offset: int | Tensor | None, first: Tensor | None
) -> dict[str, Tensor]:
    """Statistics of other normalisers: a block of whole rows of weights at a time, by the definition."""
    frame = call.frame
    found = {name: call.query.new_zeros(frame.B, frame.H, frame.Tq) for name in names}
    for span in inline.blocks(call) if frame.Tk else ():
        part = _of_rows(call, torch.arange(*span, device=frame.device), names, offset, first)
        for name in names:
            found[name][:, :, slice(*span)] = part[name]
    return found


def _mend(
    call: Call,
    found: dict[str, Tensor],
    names: Sequence[str],
    lse: Tensor | None,
    offset: int | Tensor | None,
    first: Tensor | None,
) -> None:
    """Rows whose log-sum-exp is too large to subtract from (every key masked by a least number), by the definition."""
    assert lse is not None
    far = ((lse.abs() > _FAR) & lse.isfinite()).flatten(0, 1).any(0).nonzero()[:, 0]
    for rows in far.split(256):
        part = _of_rows(call, rows, names, offset, first)
        for name in names:
            found[name] = found[name].index_copy(2, rows, part[name].to(found[name].dtype))


def _of_rows(
    call: Call, rows: Tensor, names: Sequence[str], offset: int | Tensor | None, first: Tensor | None
) -> dict[str, Tensor]:
    """Statistics of some rows, (B, H, len(rows)) each."""
    weights = _rows_of(call, rows)
    found = {}
    if "first" in names:
        assert first is not None
        found["first"] = at_keys(weights, first[:, None, None])
    return found | of_weights(weights, offset, [name for name in names if name != "first"], rows)


def _rows_of(call: Call, rows: Tensor) -> Tensor:
    """(B, H, len(rows), Tk): weights of some queries, by the definition."""
    whole = coordinates(call.frame, call.offset, (0, call.frame.Tq), (0, call.frame.Tk))
    at = whole._replace(i=whole.i[rows], p=whole.p[..., rows, :])
    scores, blocked = reference.scored(call, at, call.query[:, :, rows], call.key)
    return reference.normalized(call.normalize, scores, blocked)


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
        yield _rows_of(call, torch.arange(*span, device=call.frame.device))[:, heads].float()


def chosen(rows: Sequence[int], length: int) -> list[int]:
    """Rows counted from either end, those that are there, each once, in order."""
    found = {row + length if row < 0 else row for row in rows}
    return sorted(row for row in found if 0 <= row < length)


def _chosen_rows(call: Call, rows: Sequence[int], heads: list[int]) -> dict[str, Any]:
    numbers = chosen(rows, call.frame.Tq)
    weights = _rows_of(call, torch.tensor(numbers, dtype=torch.int64, device=call.frame.device))
    return {"rows": tuple(numbers), "row_weights": _own(weights.float()[:, heads])}


def _whole(call: Call, heads: list[int], dtype: torch.dtype) -> Tensor:
    frame = call.frame
    whole = torch.zeros(frame.B, len(heads), frame.Tq, frame.Tk, dtype=dtype, device=frame.device)
    for span in inline.blocks(call) if frame.Tk else ():
        rows = torch.arange(*span, device=frame.device)
        whole[:, :, slice(*span)] = _rows_of(call, rows)[:, heads].to(dtype)
    return whole


# ---------------------------------------------------------------------------- weights that the model made


def _of_own_weights(seen: Seen, keep: Keep, offset: int | Tensor | None, more: bool) -> dict[str, Any]:
    weights = seen.weights
    assert weights is not None
    weights = weights.detach()
    B, H, Tq, Tk = weights.shape
    names = [name for name in keep.statistics if name != "lse"]
    # Head by head: the model holds all the weights already, and what is computed from them is as large.
    parts = [of_weights(weights[:, head : head + 1], offset, names) for head in range(H)]
    statistics = {name: torch.cat([part[name] for part in parts], 1) for name in (parts[0] if parts else {})}
    if "lse" in keep.statistics and seen.lse is not None:
        statistics["lse"] = seen.lse.float()
    for name, group in keep.groups.items():
        if group.shape[-1] == Tk and (group.dim() == 1 or group.shape[0] in (1, B)):
            share = group.to(weights.device, torch.float32)
            share = (
                share.expand(B, Tk)[:, None, :, None]
                if share.dim() == 1
                else share.expand(B, -1)[:, None, :, None]
            )
            statistics[name] = (weights.float() @ share)[..., 0]
    fields: dict[str, Any] = {"statistics": statistics}
    if keep.topk:
        fields |= _top(weights, keep.topk)
    if not more or not (keep.pool or keep.rows or keep.weights):
        return fields
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
    return fields


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
