"""What the modules of a model were given and gave, while it ran once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Event:
    """One call of one module: its path, which of its calls it was, and copies of its inputs and its output."""

    name: str
    module: nn.Module
    call: int
    inputs: tuple[Tensor, ...]
    y: Tensor

    @property
    def x(self) -> Tensor | None:
        """The first input."""
        return self.inputs[0] if self.inputs else None


@dataclass
class Trace:
    """The calls of a run, in order, and the pairs of cosines and sines that modules gave (rotary positions)."""

    events: list[Event] = field(default_factory=list)
    rotary: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    _calls: Counter[str] = field(default_factory=Counter)

    def tables(self, name: str, output: Any) -> bool:
        """Keep cosines and sines; False where a module gave none."""
        if isinstance(output, Tensor) and output.is_complex():
            self.rotary.append((name, _kept(output.real), _kept(output.imag)))
        elif _is_rotary(output):
            self.rotary.append((name, _kept(output[0]), _kept(output[1])))
        elif "position" in name and isinstance(output, Tensor):
            return self._halves(name, output)
        else:
            return False
        return True

    def _halves(self, name: str, table: Tensor) -> bool:
        """Sines and cosines side by side."""
        half = table.shape[-1] // 2 if table.dim() else 0
        sine, cosine = table[..., :half], table[..., half:]
        if not _is_rotary((cosine, sine)):
            return False
        self.rotary.append((name, _kept(cosine), _kept(sine)))
        return True

    def event(self, name: str, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        """Keep what a module was given and gave (the first of several)."""
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, Tensor):
            inputs = tuple(_kept(value) for value in given[:3] if _is_real(value))
            self.events.append(Event(name, module, self._calls[name], inputs, _kept(first)))
            self._calls[name] += 1

    def within(self, site: str, call: int) -> list[Event]:
        """The calls of the modules inside the module of a site ("" is all), in the site's own call (from 0)."""
        inside = [event for event in self.events if not site or f"{event.name}.".startswith(f"{site}.")]
        calls = Counter(event.name for event in inside)
        runs = max(1, calls.get(site, 1))
        return [
            event
            for event in inside
            if event.call // max(1, calls[event.name] // runs) == min(call, runs - 1)
        ]


@contextmanager
def traced(model: nn.Module, around: str = "") -> Iterator[Trace]:
    """Inside the block, keep what the modules inside `around` are given and give, and every embedding ("" is all).

    Rotary positions are kept wherever they are made. Afterwards the model's hooks are as they were.
    """
    trace = Trace()

    def hook(name: str, module: nn.Module) -> Any:
        near = not around or f"{name}.".startswith(f"{around}.") or isinstance(module, nn.Embedding)

        def seen(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # A watch that follows what the model computes is not to follow this.
            with torch._C.DisableTorchFunction():
                if not trace.tables(name, output) and near:
                    trace.event(name, module, (*args, *kwargs.values()), output)

        return module.register_forward_hook(seen, with_kwargs=True)

    handles = []
    try:
        for name, module in model.named_modules():
            if name:
                handles.append(hook(name, module))
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_complex()


def _is_rotary(output: Any) -> bool:
    """Whether a module gave two tensors of one shape whose squares add up to one number: cosines and sines."""
    if not isinstance(output, tuple) or len(output) != 2:
        return False
    cosine, sine = output
    both = isinstance(cosine, Tensor) and isinstance(sine, Tensor) and cosine.shape == sine.shape
    if not both or not cosine.is_floating_point() or cosine.numel() == 0:
        return False
    squares = cosine.detach().double() ** 2 + sine.detach().double() ** 2
    return bool((squares - squares.mean()).abs().max() <= 2e-2 * squares.mean())
