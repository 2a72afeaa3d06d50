"""What the command `plan` does: the Plan of a call, from shapes and words alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import regard
from regard.look import _choices

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def shape(option: str, text: str) -> tuple[int, ...]:
    """`1,8,2048,64` as numbers."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not 2 <= len(sizes) <= 8 or min(sizes) < 0:
        raise ValueError(
            f"{option} {text!r}: expected a shape such as 1,8,2048,64 (batch, heads, length, width)"
        )
    return sizes


def made(
    shapes: tuple[str, str | None, str | None],
    *,
    mask: str | None,
    score: str | None,
    normalize: str | None,
    bias: str | None,
    dtype: str,
    train: bool,
) -> Any:
    """The Plan. Tensors are only reserved, never filled, so that long shapes cost nothing."""
    if dtype not in _DTYPES:
        raise ValueError(f"--dtype {dtype!r}: expected one of: {', '.join(_DTYPES)}")
    query_shape = shape("--query", shapes[0])
    key_shape = query_shape if shapes[1] is None else shape("--key", shapes[1])
    value_shape = key_shape if shapes[2] is None else shape("--value", shapes[2])
    tensors = [_reserved(sizes, _DTYPES[dtype], train) for sizes in (query_shape, key_shape, value_shape)]
    heads = query_shape[-3] if len(query_shape) > 2 else 1
    mechanism: dict[str, Any] = {}
    if mask is not None:
        mechanism["mask"] = _choices.mask(mask)
    if score is not None:
        mechanism["score"] = _choices.score(score, key_shape[-1])
    if normalize is not None:
        mechanism["normalize"] = _choices.normalizer(normalize)
    if bias is not None:
        mechanism["bias"] = _choices.bias(bias, heads)
    return regard.plan(*tensors, **mechanism)


def _reserved(sizes: tuple[int, ...], dtype: torch.dtype, train: bool) -> Tensor:
    try:
        return torch.empty(sizes, dtype=dtype, requires_grad=train)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"a tensor of shape {sizes} does not fit on this machine; give smaller sizes"
        ) from error


def show(shapes: tuple[str, str | None, str | None], **words: Any) -> None:
    """Print the Plan as it says itself."""
    print(made(shapes, **words))
