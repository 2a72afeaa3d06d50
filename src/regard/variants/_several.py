"""Mechanisms that are more than one attention: plain functions, each made of calls of ``attention``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard import _checks
from regard._attention import attention
from regard.biases import Bias
from regard.masks import Mask
from regard.scores import Dot, Score


def differential(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    lambda_: float | Tensor,
    score: Score | Any = None,
    bias: Bias | Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Differential attention: ``output = (softmax(s_1) - lambda softmax(s_2)) value`` (Ye et al., 2024).

    query (*batch, 2 H, Tq, D) and key (*batch, 2 Hkv, Tk, D) hold the two halves of each head side by side (heads 0 and
    1 are the first head's), value (*batch, Hkv, Tk, Dv) -> (*batch, H, Tq, Dv). ``lambda_`` is a number, 0-d or (H,),
    with gradient. ``mask`` and ``bias`` are of H heads and hold for both halves. The paper's norm of each head and its
    factor 1 - lambda_init come after, in the module. Raises ValueError for an odd number of heads, and as ``attention``
    does.
    """
    for name, tensor in (("query", query), ("key", key)):
        if not isinstance(tensor, Tensor):
            _checks.wrong_type(name, "a tensor", tensor)
        if tensor.ndim < 3 or tensor.shape[-3] % 2:
            _checks.wrong_value(name, "an even number of heads, (*batch, 2 H, T, D)", tensor)
    _checks.number_or_tensor("differential", "lambda_", lambda_)
    H = query.shape[-3] // 2
    if isinstance(lambda_, Tensor):
        if lambda_.ndim and lambda_.shape[0] not in (1, H):
            _checks.wrong_value(
                "differential(lambda_=)", f"a 0-d tensor or one number a head, ({H},)", lambda_
            )
        lambda_ = lambda_.reshape(-1, 1, 1)
    given: dict[str, Any] = {"score": Dot() if score is None else score, "bias": bias, "dropout_p": dropout_p}
    first, second = (
        attention(query[..., half::2, :, :], key[..., half::2, :, :], value, mask, **given) for half in (0, 1)
    )
    return first - (lambda_.to(first.dtype) if isinstance(lambda_, Tensor) else lambda_) * second
