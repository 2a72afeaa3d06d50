"""``torch.nn.functional.scaled_dot_product_attention`` by its own signature."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from regard._attention import attention
from regard._checks import is_number, words, wrong_type, wrong_value
from regard.compat import _masks
from regard.compat._nested import any_nested, nested_attention
from regard.masks import Causal, Dense, Mask
from regard.scores import Dot


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``softmax(scale * query key^T + attn_mask) value``: torch's function, its signature and meaning to the letter.

    query (..., H, Tq, D), key (..., H, Tk, D), value (..., H, Tk, Dv) -> (..., H, Tq, Dv). All dimensions before the
    last two broadcast; (T, D) is allowed. ``attn_mask`` broadcasts to (..., H, Tq, Tk): bool, True = may attend, or
    floating point, added to the scores; torch's ``CausalBias`` is taken too. ``is_causal`` is aligned upper left
    whatever Tq and Tk are. ``scale`` is 1/sqrt(D) unless given. ``dropout_p`` is applied whenever it is not 0. With
    ``enable_gqa`` the heads of key and value each divide the query's; they are not expanded in memory where they are as
    many. Jagged nested tensors (B, H, j, D) are taken without ``attn_mask``. (Vaswani et al., 2017.)

    Where torch contradicts itself, and what is done here:

    - A row that may attend to nothing gives 0 with gradient 0 (torch: so on the CPU, not everywhere).
    - ``attn_mask`` beside ``is_causal`` is refused, as torch documents (its fused CPU kernel combines them).
    - Key and value of different lengths are refused (torch's fused CPU kernel reads past the end of one of them).
    - A floating-point ``attn_mask`` of any dtype is added (torch takes float32 beside bfloat16, not float64 beside
      float32).
    - A pair that is masked out carries nothing, not even NaN (torch multiplies what is there by 0).

    Dropout drops other pairs than torch's, as often. Errors are TypeError and ValueError and name the argument (torch:
    RuntimeError).
    """
    _switch("is_causal", is_causal)
    _switch("enable_gqa", enable_gqa)
    if scale is not None and not is_number(scale):
        wrong_type("scale", "a number or None (1/sqrt(D))", scale)
    score = Dot(scale)
    if any_nested(query, key, value):
        if attn_mask is not None:
            way_out = "regard.compat.nested_attention takes masks of regard.masks."
            wrong_value("attn_mask", "None beside nested tensors", attn_mask, way_out)
        causal = Causal("upper_left") if is_causal else None
        if not enable_gqa and all(isinstance(t, Tensor) and t.ndim == 4 for t in (query, key, value)):
            H, Hk, Hv = (tensor.shape[1] for tensor in (query, key, value))
            if not H == Hk == Hv:
                way_out = "enable_gqa=True lets several query heads share one key head."
                wrong_value("heads", "as many in query, key and value", words(f"{H}, {Hk}, {Hv}"), way_out)
        return nested_attention(query, key, value, causal, score=score, dropout_p=dropout_p)
    rank = _rank(query, key, value)
    to = max(rank, 4) if enable_gqa and rank == 3 else rank
    query, key, value = (_of_rank(tensor, to) for tensor in (query, key, value))
    if rank > 2:
        query, key, value = _heads(query, key, value, enable_gqa)
    elif enable_gqa:
        wrong_value("enable_gqa", "tensors with a dimension of heads (..., H, T, D)", query)
    mask, bias = _mask(attn_mask, is_causal, query, key, value)
    output = attention(query, key, value, mask, score=score, bias=bias, dropout_p=dropout_p)
    return output if to == rank else output[0]


def _switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        wrong_type(name, "True or False", value)


def _rank(query: Tensor, key: Tensor, value: Tensor) -> int:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            wrong_type(name, "a tensor", tensor)
        if tensor.ndim < 2:
            wrong_value(name, "at least 2 dimensions (..., T, D)", tensor)
    return max(query.ndim, key.ndim, value.ndim)


def _of_rank(tensor: Tensor, rank: int) -> Tensor:
    return tensor[(None,) * (rank - tensor.ndim)] if tensor.ndim < rank else tensor


def _heads(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Heads that the core takes as they are: equal, or those of key and value dividing the query's."""
    H, Hk, Hv = (tensor.shape[-3] for tensor in (query, key, value))
    if grouped:
        if not (_divides(Hk, H) and _divides(Hv, H)):
            wrong_value(
                "enable_gqa", "key and value heads that divide the query's", words(f"{H}, {Hk}, {Hv}")
            )
        if Hk == Hv:
            return query, key, value
        return query, key.repeat_interleave(H // Hk, -3), value.repeat_interleave(H // Hv, -3)
    sizes = {H, Hk, Hv} - {1}
    if len(sizes) > 1:
        way_out = "enable_gqa=True lets several query heads share one key head." if _divides(Hk, H) else ""
        wrong_value("heads", "equal sizes or 1 in dimension -3", words(f"{H}, {Hk}, {Hv}"), way_out)
    whole = sizes.pop() if sizes else 1
    if H != whole:
        query = query.expand(*query.shape[:-3], whole, -1, -1)
    if Hk != Hv:
        key, value = (t.expand(*t.shape[:-3], whole, -1, -1) for t in (key, value))
    return query, key, value


def _divides(part: int, whole: int) -> bool:
    return whole % part == 0 if part else whole == 0


def _mask(
    attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Mask | None, Tensor | None]:
    """torch's two arguments as a mask and a bias."""
    if attn_mask is None:
        return (Causal("upper_left") if is_causal else None), None
    if is_causal:
        way_out = "Combine them in attention(mask=Causal() & attn_mask)."
        wrong_value("is_causal", "attn_mask or is_causal", words("both"), way_out)
    corner = _causal_bias(attn_mask)
    if corner is not None:
        return Causal(corner), None
    _masks.tensor("attn_mask", attn_mask, "True = may attend", query.device)
    whole = (*_lead(query, key, value), query.shape[-2], key.shape[-2])
    if not 2 <= attn_mask.ndim <= query.ndim or any(
        size not in (1, full) for size, full in zip(reversed(attn_mask.shape), reversed(whole), strict=False)
    ):
        wrong_value("attn_mask", f"a shape that broadcasts to {whole}", attn_mask)
    if attn_mask.ndim > 2:
        attn_mask = _of_rank(attn_mask, query.ndim)
    return (Dense(attn_mask), None) if attn_mask.dtype == torch.bool else (None, attn_mask)


def _lead(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """The dimensions before the last two: broadcast, the heads as the query has them by now."""
    batches = [tensor.shape[:-3] for tensor in (query, key, value)]
    try:
        return (*torch.broadcast_shapes(*batches), *query.shape[-3:-2])
    except RuntimeError:
        shapes = words(", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value)))
    wrong_value("query, key, value", "leading dimensions that are equal or 1", shapes)


def _causal_bias(attn_mask: object) -> str | None:
    """The corner of torch's ``causal_upper_left`` and ``causal_lower_right``; None for a tensor like any other."""
    module = sys.modules.get("torch.nn.attention.bias")  # where it was never imported, nobody can hold one
    if module is None or not isinstance(attn_mask, module.CausalBias):
        return None
    return "upper_left" if attn_mask.variant == module.CausalVariant.UPPER_LEFT else "lower_right"
