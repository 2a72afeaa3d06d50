"""Which module of a model is running, in the thread that watches it: what its attention calls are named by."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.nn import Memory

# Arguments by which modules are handed the other sequence in cross-attention.
_OTHER_SIDE = ("encoder_hidden_states", "key_value_states", "context", "cross_states")
OUTSIDE = "(outside the model)"
# Hooks of a module are one dictionary for all threads.
_hooking = threading.Lock()


class Place(NamedTuple):
    """A running module: its path in the model, itself, and whether it was handed another sequence."""

    name: str
    module: nn.Module | None
    crossed: bool


class Places:
    """A stack of running modules, from hooks. Other threads that run the model are counted out, and remembered."""

    def __init__(self) -> None:
        self.stack: list[Place] = []
        self.ran: set[str] = set()
        self.forwards = 0
        self.others_ran = False
        self.when_left: Callable[[], None] = lambda: None
        self._thread = threading.get_ident()
        self._handles: list[RemovableHandle] = []

    def attach(self, model: nn.Module) -> None:
        """Put the hooks on."""
        with _hooking:
            for name, module in model.named_modules():
                self._hook(name or type(model).__name__, module)

    def detach(self) -> None:
        """Take them off."""
        with _hooking:
            for handle in self._handles:
                handle.remove()

    @property
    def current(self) -> Place:
        """The innermost module that runs."""
        return self.stack[-1] if self.stack else Place(OUTSIDE, None, False)

    # A hook that returns something replaces the module's input or output: these return None.
    def _hook(self, name: str, module: nn.Module) -> None:
        names = _positional(module)

        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if threading.get_ident() != self._thread:
                self.others_ran = True
                return
            if not self.stack:
                self.forwards += 1
            self.ran.add(name)
            self.stack.append(Place(name, module, _crossed(names, args, kwargs)))

        def leave(_module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
            if threading.get_ident() == self._thread:
                self.when_left()
                self.stack.pop()

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))


def _positional(module: nn.Module) -> tuple[str, ...]:
    """The names of forward's arguments, without self."""
    bound = getattr(module.forward, "__func__", None)
    return _names(module.forward) if bound is None else _names(bound)[1:]


@cache
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a forward written in C has no signature
        return ()


def _crossed(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if any(isinstance(given, Memory) for given in (*args, *kwargs.values())):
        return True  # a step of a recurrent decoder, however long the two sides are
    for other in _OTHER_SIDE:
        given = kwargs.get(other)
        if given is None and other in names and names.index(other) < len(args):
            given = args[names.index(other)]
        # The same tensor under both names is self-attention: some modules are written so.
        if given is not None and not any(isinstance(own, Tensor) and own is given for own in args[:1]):
            return True
    return False


class Layers:
    """Numbers places of one kind: those whose names are alike but for the numbers in them, in the order they ran."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, int]] = {}

    def number(self, name: str) -> int:
        """The place's number among its kind, from 0."""
        kind = self._seen.setdefault(re.sub(r"\d+", "#", name), {})
        return kind.setdefault(name, len(kind))
