"""Watching a model that somebody else wrote: its attention, without changing what comes out."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import nn

from regard.look._places import Places
from regard.look._record import Record
from regard.look._watch_keep import Keep
from regard.look._watch_mode import Watcher
from regard.look._watch_unseen import compiled_parts, on_meta, standing_down, unseen

__all__ = ["Watch", "watch"]


def watch(model: nn.Module, keep: Keep | None = None) -> Watch:
    """Watch the attention of a model inside a `with` block, in this thread.

    >>> with watch(model) as record:  # doctest: +SKIP
    ...     model(**inputs)  # or model.generate(**inputs)
    >>> record.sites[0].statistic("entropy")  # doctest: +SKIP

    Seen are `F.scaled_dot_product_attention`, `nn.MultiheadAttention`, `regard.attention` with every score, normaliser,
    mask and bias, and attention that a module writes out as softmax(query key^T) value (eager transformers models).
    What is kept of each place is `keep`'s to say: by default the statistics of `Site.statistic`, in linear memory. The
    steps of a `generate()` with a cache become one site a module, with a row for each token.

    The model is not changed: its outputs are the same to the bit, and when the block is left, also by an exception, its
    hooks are as they were. (torch's fused encoder path stands down meanwhile: compare with that path disabled.)
    What the watch cannot see is said in `record.notes`. Raises TypeError for something that is no `nn.Module` or no
    `Keep`, ValueError for a compiled model.
    """
    return Watch(model, keep)


class Watch:
    """What `watch` gives: a context manager that can be entered once."""

    def __init__(self, model: nn.Module, keep: Keep | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"watch(model): model must be a torch.nn.Module; got {type(model).__name__}")
        if keep is not None and not isinstance(keep, Keep):
            raise TypeError(f"watch(keep=): expected look.Keep(...) or None, got {type(keep).__name__}")
        compiled = compiled_parts(model)
        if compiled:
            raise ValueError(
                f"watch(model): expected a model that is run as it is written, got {compiled}, "
                "whose attention runs inside a graph. Watch the model that was compiled "
                "(compiled._orig_mod), or load it again without compiling it"
            )
        self._model, self._keep = model, keep or Keep()
        self._entered = self._closed = False

    def __enter__(self) -> Record:
        if self._entered:
            state = "was used already and is closed" if self._closed else "is open already"
            raise RuntimeError(f"watch: this watch {state}; call watch(model) for a new one")
        self._entered = True
        self._record = Record(model=type(self._model).__name__, notes=standing_down(self._model))
        self._places = Places()
        self._watcher = Watcher(self._record, self._places, self._keep)
        try:
            self._places.attach(self._model)
            self._watcher.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._places.detach()
            raise
        return self._record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        try:
            self._watcher.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        finally:
            self._places.detach()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._watcher.finish()
        for note in unseen(self._model, self._places.ran, self._watcher.seen):
            self._watcher.note(note)
        if self._places.ran and not self._record.sites:
            self._watcher.note(_nothing(self._model))


def _nothing(model: nn.Module) -> str:
    name = type(model).__name__
    if on_meta(model):
        return f"{name} is on the meta device, where there are no numbers; load its weights to look at its attention"
    return f"no attention was seen in {name}; regard.look.doctor(model) says of each module why"
