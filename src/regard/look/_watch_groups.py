"""Grouped heads as models hand them to kernels, brought back to what they are: H query heads over Hkv key heads.

Letters: B samples, H query heads, Hkv key heads, g = H / Hkv.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.look._watch_seen import Seen
from regard.masks import Dense


def ungrouped(key: Tensor, module: Any) -> Tensor:
    """Heads of a key or value that transformers repeats for groups of queries, once each."""
    groups = _groups(module)
    if groups == 1 or key.shape[1] % groups or not _repeated(key):
        return key
    return key[:, ::groups]


def regroup(seen: Seen, module: Any, heads_before: int) -> None:
    """Undo what transformers does to the heads of a call of `F.scaled_dot_product_attention`.

    Keys repeated for each group are taken once. Of a single query token it lays the g heads of a group one below the
    other, as g queries of one head; `heads_before` is the number of heads that the module had in its call before.
    """
    groups = _groups(module)
    if groups == 1 or seen.query is None or seen.key is None or seen.value is None:
        return
    H, Tq = seen.query.shape[1:3]
    heads = getattr(getattr(module, "config", None), "num_attention_heads", heads_before)
    if seen.key.shape[1] == H == heads // groups and Tq == groups and not seen.causal:
        _unpack(seen, groups)
    elif seen.key.shape[1] == H:
        seen.key, seen.value = ungrouped(seen.key, module), ungrouped(seen.value, module)


def _groups(module: Any) -> int:
    groups = getattr(module, "num_key_value_groups", 1)
    return groups if isinstance(groups, int) and groups > 1 else 1


def _repeated(key: Tensor) -> bool:
    return bool((key[:, 0] == key[:, 1]).all())


def _unpack(seen: Seen, groups: int) -> None:
    assert seen.query is not None
    seen.query = _heads(seen.query)
    seen.output = None if seen.output is None else _heads(seen.output)
    if isinstance(seen.mask, Dense) and seen.mask.mask.shape[2] == groups:
        seen.mask = Dense(_heads(seen.mask.mask))
    if isinstance(seen.bias, Tensor) and seen.bias.shape[2] == groups:
        seen.bias = _heads(seen.bias)


def _heads(rows: Tensor) -> Tensor:
    """(B, Hkv, g, n) -> (B, H, 1, n)."""
    return rows.flatten(1, 2)[:, :, None]
