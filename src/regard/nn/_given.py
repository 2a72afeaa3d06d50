"""What the modules are given, checked: sizes, inputs, state dicts. The voice is that of ``regard._checks``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard import _checks
from regard._checks import words, wrong_type, wrong_value


def size(name: str, value: Any, least: int = 1) -> int:
    """A whole number, at least ``least``."""
    if not _checks.is_int(value):
        wrong_type(name, "a whole number", value)
    if value < least:
        wrong_value(name, f"{least} or more", value)
    return int(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        wrong_type(name, "True or False", value)
    return value


def rows(name: str, x: Any, width: int, linear: nn.Linear | None, width_name: str) -> Tensor:
    """An input (*batch, T, width) in the dtype of the Linear that takes it (any where autocast casts it)."""
    if not isinstance(x, Tensor):
        wrong_type(name, f"a tensor (B, T, {width}) or (T, {width})", x)
    if x.ndim < 2 or x.shape[-1] != width:
        wrong_value(name, f"(B, T, {width_name}) or (T, {width_name}) with {width_name} = {width}", x)
    if x.layout != torch.strided or x.is_nested:
        wrong_type(name, "a dense (strided) tensor", words("a sparse or nested one"))
    if linear is not None and x.device != linear.weight.device:
        got = words(f"one on {x.device}")
        wrong_value(
            name, f"a tensor on {linear.weight.device}, as the module", got, "Say module.to(x.device)."
        )
    if linear is not None and x.dtype != linear.weight.dtype and not _autocast(x.device.type):
        own = str(linear.weight.dtype).removeprefix("torch.")
        wrong_type(name, f"the module's dtype, {own}", x, "Say module.to(x.dtype) or x.to(...).")
    if not x.is_floating_point():
        wrong_type(name, f"a floating-point tensor (B, T, {width_name}) or (T, {width_name})", x)
    return x


def _autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def fitting_state(module: nn.Module) -> None:
    """Have ``load_state_dict`` refuse tensors of another shape before anything of ``module`` is loaded.

    A module sees its own part of a state dict alone: what was loaded before it, in a Sequential, stays loaded.
    """
    module.register_load_state_dict_pre_hook(_shapes_fit)


def _shapes_fit(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    for name, own in module.state_dict().items():
        came = state.get(prefix + name)
        if isinstance(own, Tensor) and isinstance(came, Tensor) and came.shape != own.shape:
            way_out = f"Build {type(module).__name__} with the sizes that the state dict was saved with."
            wrong_value(
                f"state_dict[{prefix + name!r}]",
                f"shape {tuple(own.shape)}",
                words(f"{tuple(came.shape)}"),
                way_out,
            )
