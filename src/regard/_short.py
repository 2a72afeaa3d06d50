"""The short way for the commonest call: dot and softmax of plain tensors, no gradient, no mask or a causal one.

It reaches the kernels that the long way would choose, after the same checks, without describing the call first: a call
of a few microseconds should not spend them on bookkeeping. Whatever is unusual, or wrong, takes the long way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard import _plan
from regard.kernels import _library, direct, native
from regard.masks import Causal
from regard.normalizers import Softmax
from regard.scores import Dot


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    score: Any,
    normalize: Any,
    bias: Any,
    dropout_p: Any,
) -> Tensor | None:
    """The output (B, H, Tq, Dv), or None where the call must go the long way."""
    if not (type(query) is type(key) is type(value) is Tensor) or bias is not None:
        return None
    if type(dropout_p) not in (int, float) or dropout_p != 0:
        return None
    if type(score) is not Dot or score.softcap is not None or isinstance(score.scale, Tensor):
        return None
    if type(normalize) is not Softmax or normalize.sink is not None:
        return None
    if mask is not None and (type(mask) is not Causal or mask.offset is not None):
        return None
    if query.requires_grad or key.requires_grad or value.requires_grad or _unusual():
        return None
    shapes = query.shape, key.shape, value.shape
    if not _plain(query, key, value) or not _fit(*shapes):
        return None
    B, H, Tq, D = shapes[0]
    Hkv, Tk = shapes[1][1:3]
    if mask is not None and Tq != Tk:
        return None
    scale = float(score.factor(D))
    if H == Hkv and B * H * Tq * Tk <= direct.MOST_PAIRS:
        return direct.checked(query, key, value, None, mask is not None, scale)
    return native.short(query, key, value, mask is not None, scale)


def _unusual() -> bool:
    """Whether something is on that must see the call, or changes what it means."""
    return (
        _library.unsettled
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or _plan.forced() is not None
    )


def _plain(query: Tensor, key: Tensor, value: Tensor) -> bool:
    dtype = query.dtype
    return (
        dtype in native.KINDS
        and dtype == key.dtype == value.dtype
        and query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and query.layout == key.layout == value.layout == torch.strided
        and not (query.is_nested or key.is_nested or value.is_nested)
    )


def _fit(query: torch.Size, key: torch.Size, value: torch.Size) -> bool:
    if not len(query) == len(key) == len(value) == 4 or 0 in query or 0 in key or 0 in value:
        return False
    return (
        query[0] == key[0] == value[0]
        and key[1] == value[1]
        and query[1] % key[1] == 0
        and query[3] == key[3]
        and key[2] == value[2]
        and math.prod(query) < 1 << 40
    )
