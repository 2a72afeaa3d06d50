"""Checks of what the variants take beyond tensors that the rest of the library checks itself."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from regard import _checks


def whole(owner: str, name: str, value: Any, least: int = 1) -> int:
    """A whole number, at least ``least``."""
    if not _checks.is_int(value):
        _checks.wrong_type(f"{owner}({name}=)", f"a whole number, {least} or more", value)
    if value < least:
        _checks.wrong_value(f"{owner}({name}=)", f"{least} or more", value)
    return int(value)


def number(owner: str, name: str, value: Any) -> None:
    """A finite number."""
    if not _checks.is_number(value):
        _checks.wrong_type(f"{owner}({name}=)", "a number", value)
    if not math.isfinite(value):
        _checks.wrong_value(f"{owner}({name}=)", "a finite number", value)


def place(owner: str, value: Any) -> int:
    """An offset that a rule of positions can use: None is 0 (and then Tq must be Tk)."""
    if value is not None and not _checks.is_int(value):
        _checks.wrong_type(f"{owner}(offset=)", "a whole number: query i stands at i + offset", value)
    return 0 if value is None else int(value)


def shaped(owner: str, name: str, tensor: Any, shape: str, ranks: tuple[int, ...]) -> Tensor:
    """A floating-point tensor of one of these ranks."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in _checks.FLOATS:
        _checks.wrong_type(f"{owner}({name}=)", f"a floating-point tensor {shape}", tensor)
    if tensor.ndim not in ranks:
        _checks.wrong_value(f"{owner}({name}=)", f"shape {shape}", tensor)
    return tensor
