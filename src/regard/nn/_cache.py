"""Keys and values of the positions so far, in position order: decode without computing them again.

``append(key, value) -> (key, value, offset)`` takes those of the n new positions, (*batch, Hkv, n, D) and
(*batch, Hkv, n, Dv), and gives those that the new queries may need, as views, and where the first of these stands:
``attention(query, key, value, Causal(offset=offset))`` continues a full pass. Nothing that was handed out is written to
again before ``crop`` or ``reset``, and a step copies the new positions alone; room is made in large pieces.

``reorder(index)`` picks samples (beam search), ``crop(n)`` keeps the first n positions, ``reset()`` starts afresh.
A call that raises leaves the cache as it was. Caches are for decoding: tensors that need a gradient are refused.

A cache is of one layer: while it holds positions, another module is refused (not under ``torch.compile``). A copy
(``copy.copy``, ``copy.deepcopy``, pickle) has rooms of its own and may go to any layer of the same sizes.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from regard import _checks
from regard._checks import words, wrong_type, wrong_value
from regard.nn import _given

if TYPE_CHECKING:
    from typing_extensions import Self

_FIRST_ROOM = 64


Like = tuple[torch.Size, int, int, torch.dtype, torch.device]


def _like(key: Tensor, value: Tensor) -> Like:
    """(batch and heads), D, Dv, dtype, device."""
    shape = key.shape
    return shape[:-2], shape[-1], value.shape[-1], key.dtype, key.device


class State(NamedTuple):
    """What a cache holds: rooms (*batch, Hkv, capacity, D), filled up to ``stop``; row 0 is position ``first``.

    ``like``: what keys and values must be to fit.
    """

    key: Tensor | None = None
    value: Tensor | None = None
    first: int = 0
    stop: int = 0
    like: Like | None = None


class Cache:
    """Base of all caches."""

    def __init__(self) -> None:
        self._state = State()
        self._owner: weakref.ref[nn.Module] | None = None

    @property
    def length(self) -> int:
        """How many positions were appended so far: the position of the next one."""
        return self._state.first + self._state.stop

    @property
    def capacity(self) -> int:
        """For how many positions there is room in memory now."""
        return 0 if self._state.key is None else self._state.key.shape[-2]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
        """Add n positions; -> (key, value, offset) for the queries of these positions. See the module's docstring.

        Raises TypeError or ValueError for tensors that do not fit what is held, and where the room ends.
        """
        _entries(key, value)
        state = self._state
        if state.first + state.stop == 0:
            state = self._empty_for(key, value)
        elif state.like != _like(key, value):
            _refuse(key, value, state)
        n = key.shape[-2]
        state = self._with_room(state, key, value)
        assert state.key is not None and state.value is not None
        stop, low = state.stop, self._from(state.stop)
        state.key.narrow(-2, stop, n).copy_(key)
        state.value.narrow(-2, stop, n).copy_(value)
        self._state = State(state.key, state.value, state.first, stop + n, state.like)
        width = stop + n - low
        return state.key.narrow(-2, low, width), state.value.narrow(-2, low, width), stop - low

    def reorder(self, index: Tensor) -> None:
        """Sample ``index[b]`` becomes sample b; ``index`` (B',) of integers, repeats allowed, B' samples afterwards.

        Raises ValueError for an index out of range and for a cache that holds nothing or has no batch dimension.
        """
        key, value = self._state.key, self._state.value
        if not isinstance(index, Tensor) or index.dtype not in _checks.INTEGERS or index.ndim != 1:
            wrong_type("index", "an integer tensor (B,), the samples to keep", index)
        if key is None or value is None or not self.length:
            wrong_value("reorder", "a cache that holds something", words("an empty one"))
        if key.ndim < 4:
            got = words(f"keys of shape {tuple(key.shape[:-2])} (heads) and T, D")
            wrong_value("reorder", "keys with a batch dimension", got)
        samples = key.shape[0]
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= samples):
            got = words(f"{int(index.min())} to {int(index.max())}")
            wrong_value("index", f"samples from 0 to {samples - 1}", got)
        index = index.to(key.device).long()
        key, value = _picked(key, index), _picked(value, index)
        self._state = self._state._replace(key=key, value=value, like=_like(key, value))

    def crop(self, n: int) -> None:
        """Keep positions 0 to n - 1. Raises ValueError for more than there are."""
        if not _checks.is_int(n):
            wrong_type("n", "a whole number of positions", n)
        if not 0 <= n <= self.length:
            wrong_value("n", f"from 0 to {self.length} positions, as many as the cache holds", n)
        self._state = self._state._replace(stop=n - self._state.first)

    def reset(self) -> None:
        """Forget everything; the next ``append`` may be of another batch, and its first position is 0."""
        self._state = State()

    def __copy__(self) -> Self:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__getstate__())
        twin._state = _separate(self._state)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = copy.copy(self)
        for name, held in twin.__dict__.items():
            if name != "_state":
                twin.__dict__[name] = copy.deepcopy(held, memo)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": None}

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.__dict__.update(held)
        if torch.is_inference_mode_enabled():
            self._state = _separate(self._state)  # a room outlives the mode it was loaded in

    def belongs_to(self, module: nn.Module) -> None:
        """Note that ``module`` appends from here on; ValueError where another one's positions are held."""
        owner = None if self._owner is None else self._owner()
        if self.length and owner is not None and owner is not module:
            way_out = "Make one cache for each layer; reset() empties it, copy.copy(cache) may go to another."
            got = words(f"one with {self.length} positions of another {type(owner).__name__}")
            wrong_value("cache", "a cache of this layer", got, way_out)
        self._owner = weakref.ref(module)

    def __repr__(self) -> str:
        held = "" if self._state.key is None else f", batch and heads {tuple(self._state.key.shape[:-2])}"
        return f"{type(self).__name__}({self.length} positions{held})"

    def _from(self, stop: int) -> int:
        """The first row that queries from row ``stop`` on may need."""
        return 0

    def _empty_for(self, key: Tensor, value: Tensor) -> State:
        return State()

    def _with_room(self, state: State, key: Tensor, value: Tensor) -> State:
        """The state with room for the rows of ``key`` behind ``stop``; the old rooms are not written to."""
        raise NotImplementedError


class GrowingCache(Cache):
    """Keeps every position; room doubles when it ends, so that a position is copied a bounded number of times."""

    def _with_room(self, state: State, key: Tensor, value: Tensor) -> State:
        wanted = state.stop + key.shape[-2]
        if state.key is not None and wanted <= state.key.shape[-2]:
            return state
        return _moved(state, key, value, 0, max(_FIRST_ROOM, 2 * state.stop, wanted))


class PreallocatedCache(Cache):
    """Keeps every position, up to ``length`` of them: the room is made once, at the first ``append``.

    ``append`` raises ValueError where the room ends.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._most = _given.size("length", length)

    def reset(self) -> None:
        """Forget everything but the room itself."""
        self._state = self._state._replace(first=0, stop=0)

    def _empty_for(self, key: Tensor, value: Tensor) -> State:
        return self._state if self._state.like == _like(key, value) else State()

    def _with_room(self, state: State, key: Tensor, value: Tensor) -> State:
        n, left = key.shape[-2], self._most - state.stop
        if n > left:
            way_out = "crop(n) or reset() makes room; PreallocatedCache(length) takes a larger one."
            got = words(f"{n}, with {state.stop} held")
            wrong_value("append", f"at most {left} more of {self._most} positions", got, way_out)
        return state if state.key is not None else _moved(state, key, value, 0, self._most)


class RingCache(Cache):
    """Keeps what a window needs: the last ``left`` positions before the new ones, for ``masks.Window(left, 0)``.

    Memory is O(left + n), n the positions of the last ``append``. The window itself is the mask's: a chunk of queries
    needs it. ``crop`` goes back as far as a window's keys are still held, at least over the last ``append``.
    """

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = _given.size("left", left, least=0)

    def crop(self, n: int) -> None:
        """Keep positions 0 to n - 1. Raises ValueError where the window before n was let go."""
        first = self._state.first
        if _checks.is_int(n) and 0 < n <= self.length and first > max(0, n - self.left):
            least = first + self.left
            way_out = "reset() starts afresh."
            wrong_value("n", f"from {least} to {self.length}: older ones were let go", n, way_out)
        if n == 0 and first:
            return self.reset()
        super().crop(n)

    def _from(self, stop: int) -> int:
        return max(0, stop - self.left)

    def _with_room(self, state: State, key: Tensor, value: Tensor) -> State:
        n = key.shape[-2]
        if state.key is not None and state.stop + n <= state.key.shape[-2]:
            return state
        low = self._from(state.stop)
        filled = state.stop - low + n
        return _moved(state, key, value, low, max(filled, min(2 * filled, 2 * self.left), _FIRST_ROOM))


@contextmanager
def unchanged_on_error(cache: Cache | None) -> Iterator[None]:
    """What is raised inside leaves the cache as it was."""
    before = None if cache is None else cache._state
    try:
        yield
    except BaseException:
        if cache is not None and before is not None:
            cache._state = before
        raise


# ---------------------------------------------------------------------------- rooms


def _moved(state: State, key: Tensor, value: Tensor, low: int, capacity: int) -> State:
    """New rooms with the rows from ``low`` on."""
    rooms = []
    for old, new in ((state.key, key), (state.value, value)):
        with torch.inference_mode(False), torch.no_grad():  # a room outlives the mode it was made in
            room = torch.empty(*new.shape[:-2], capacity, new.shape[-1], dtype=new.dtype, device=new.device)
        if old is not None:
            held = state.stop - low
            room.narrow(-2, 0, held).copy_(old.narrow(-2, low, held))
        rooms.append(room)
    return State(rooms[0], rooms[1], state.first + low, state.stop - low, _like(key, value))


def _separate(state: State) -> State:
    """The same in rooms of its own."""
    if state.key is None or state.value is None:
        return state
    with torch.inference_mode(False), torch.no_grad():
        return state._replace(key=state.key.clone(), value=state.value.clone())


def _picked(room: Tensor, index: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return room.index_select(0, index.clone())


# ---------------------------------------------------------------------------- checks


def _entries(key: Any, value: Any) -> None:
    for name, x in (("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.dtype not in _checks.FLOATS:
            wrong_type(name, "a floating-point tensor (*batch, heads, T, D)", x)
        if x.ndim < 3:
            wrong_value(name, "(*batch, heads, T, D)", x)
        if x.requires_grad and torch.is_grad_enabled():
            expected = "a tensor that needs no gradient: caches are for decoding"
            wrong_value(name, expected, x, "Decode under torch.no_grad() or torch.inference_mode().")
    if key.shape[:-1] != value.shape[:-1]:
        wrong_value("value", f"batch, heads and T as the key has, {tuple(key.shape[:-1])}", value)
    if key.dtype != value.dtype or key.device != value.device:
        wrong_type("value", f"the key's dtype and device, {key.dtype} on {key.device}", value)


def _refuse(key: Tensor, value: Tensor, state: State) -> NoReturn:
    """Say which of the two does not fit what is held."""
    assert state.like is not None
    lead, D, Dv, dtype, device = state.like
    value_alone = _like(key, value) == (lead, D, value.shape[-1], dtype, device)
    name, new, width = ("value", value, Dv) if value_alone else ("key", key, D)
    shape = "(" + ", ".join(str(part) for part in (*lead, "n", width)) + ")"
    expected = f"{shape} in {str(dtype).removeprefix('torch.')} on {device}, as the cache holds"
    wrong_value(name, expected, new, "reset() empties the cache, reorder(index) changes its samples.")
