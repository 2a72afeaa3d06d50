"""Statistics that speak of single keys, or of distance: from scores and the log-sum-exp, or else from rows of weights.

Letters: B samples, H heads, Tq queries, Tk keys; p = i + offset, where query i stands among the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard import _runs
from regard._attention import attention_with_lse
from regard._call import Call
from regard._frame import coordinates
from regard.biases import Bias
from regard.kernels import inline, reference
from regard.look._record_statistics import at_keys, of_weights, positions
from regard.look._watch_seen import BoundBias, BoundMask
from regard.masks import And, Causal, Mask
from regard.normalizers import Softmax
from regard.scores import Dot

# Beyond this a log-sum-exp in float32 has no digits left behind the point.
_FAR = 1e3


def statistics(
    call: Call,
    names: Sequence[str],
    sums: Tensor,
    lse: Tensor | None,
    offset: int | Tensor | None,
    first: Tensor | None,
) -> dict[str, Tensor]:
    """Any of "first", "self", "previous", "distance", (B, H, Tq) each.

    sums (B, H, Tq, 2...): of each row the sum of its weights, and of its weights times positions. `first` (B,): the
    first key of each sample.
    """
    if not isinstance(call.normalize, Softmax):
        return _by_rows(call, names, offset, first)
    found = _of_pairs(call, [name for name in names if name != "distance"], lse, offset, first)
    if "distance" in names:
        assert offset is not None
        found["distance"] = _distance(call, sums, lse, offset)
    _mend(call, found, names, lse, offset, first)
    return found


def mask_of(call: Call) -> Mask | None:
    return None if call.mask is None else BoundMask(call.mask)


def bias_of(call: Call) -> Bias | None:
    return None if call.bias is None else BoundBias(call.bias)


def features(call: Call, groups: dict[str, Tensor]) -> Tensor:
    """(B, Hkv, Tk, 2 + groups): 1, the key's position, whether it is in each group."""
    frame, key = call.frame, call.key
    features = key.new_ones(frame.B, frame.Tk, 2 + len(groups))
    features[..., 1] = torch.arange(frame.Tk, device=frame.device)
    for number, group in enumerate(groups.values()):
        features[..., 2 + number] = group
    return features[:, None].expand(-1, frame.Hkv, -1, -1)


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
    if isinstance(offset, int) and offset >= call.frame.Tk - 1:
        return True
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
        features(call, {}),
        causal if call.mask is None else BoundMask(call.mask) & causal,
        score=call.score,
        normalize=Softmax(),
        bias=bias_of(call),
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


# ---------------------------------------------------------------------------- by rows of weights


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
    weights = rows_of(call, rows)
    found = {}
    if "first" in names:
        assert first is not None
        found["first"] = at_keys(weights, first[:, None, None])
    return found | of_weights(weights, offset, [name for name in names if name != "first"], rows)


def rows_of(call: Call, rows: Tensor) -> Tensor:
    """(B, H, len(rows), Tk): weights of some queries, by the definition."""
    whole = coordinates(call.frame, call.offset, (0, call.frame.Tq), (0, call.frame.Tk))
    at = whole._replace(i=whole.i[rows], p=whole.p[..., rows, :])
    scores, blocked = reference.scored(call, at, call.query[:, :, rows], call.key)
    return reference.normalized(call.normalize, scores, blocked)
