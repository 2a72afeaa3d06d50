"""Watching a model that somebody else wrote: what goes into its attention, without changing what comes out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from regard._attention import attention
from regard._call import prepare
from regard._frame import coordinates
from regard.look._record import Record, Site
from regard.normalizers import Softmax
from regard.scores import Dot

# Arguments by which modules are handed the other sequence in cross-attention.
_OTHER_SIDE = ("encoder_hidden_states", "key_value_states")


@contextmanager
def watch(model: nn.Module) -> Iterator[Record]:
    """Watch each `F.scaled_dot_product_attention` and `regard.attention` that `model` calls inside the block, here.

    >>> with watch(model) as record:  # doctest: +SKIP
    ...     model(**inputs)
    >>> record.sites[0].weights  # doctest: +SKIP

    The model is not changed: its outputs are the same to the bit, and when the block is left, also by an exception, its
    hooks are as they were. A site keeps copies of its query, key, value, output (O(T D)) and of the mask it was given.
    What the watch cannot see is said in `record.notes`. Raises TypeError for something that is no `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch(model): model must be a torch.nn.Module; got {type(model).__name__}")
    record = Record(model=type(model).__name__, notes=_standing_down(model))
    places = _Places()
    try:
        places.attach(model)
        with _Watcher(record, places):
            yield record
    finally:
        places.detach()


def _standing_down(model: nn.Module) -> list[str]:
    names = [
        name or "the model"
        for name, part in model.named_modules()
        if isinstance(part, nn.TransformerEncoderLayer)
    ]
    if not names or model.training:
        return []
    return [
        f"torch's fused encoder path stands down while {', '.join(names)} is watched: compare outputs with that path "
        "disabled (torch.backends.mha.set_fastpath_enabled(False))"
    ]


class _Places:
    """Which module is running, from hooks: a stack of (path, whether it was handed another sequence)."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, bool]] = []
        self._handles: list[RemovableHandle] = []

    def attach(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            self._hook(name or type(model).__name__, module)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def current(self) -> tuple[str, bool]:
        return self.stack[-1] if self.stack else ("(outside the model)", False)

    # A hook that returns something replaces the module's input or output: these return None.
    def _hook(self, name: str, module: nn.Module) -> None:
        def enter(_module: nn.Module, _args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            self.stack.append((name, any(kwargs.get(other) is not None for other in _OTHER_SIDE)))

        def leave(_module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
            self.stack.pop()

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))


class _Watcher(TorchFunctionMode):
    def __init__(self, record: Record, places: _Places) -> None:
        super().__init__()
        self._record = record
        self._places = places
        self._calls: dict[str, int] = {}
        self._masks: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self._catch(output, *args, **(kwargs or {}))
        elif func is attention:
            self._catch_own(output, *args, **(kwargs or {}))
        elif func is F.multi_head_attention_forward:
            self._note(f"{self._places.current[0]}: nn.MultiheadAttention is not looked into yet")
        return output

    def _note(self, note: str) -> None:
        if note not in self._record.notes:
            self._record.notes.append(note)

    def _catch(
        self,
        output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **_grouped: bool,
    ) -> None:
        # torch's `enable_gqa` is not kept: regard reads grouped heads from the head counts.
        name, other_side = self._places.current
        if query.is_nested:
            self._note(f"{name}: attention over nested tensors is not looked into")
            return
        if not query.dim() == key.dim() == value.dim():
            self._note(f"{name}: a call whose query, key and value differ in dimensions is not looked into")
            return
        query, key, value, output = _with_heads(query, key, value, output)
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        mask = None if attn_mask is None else self._keep_mask(attn_mask, query.dim())
        boolean = mask is not None and mask.dtype == torch.bool
        site = Site(
            name=name,
            query=_keep(query),
            key=_keep(key),
            value=_keep(value),
            output=_keep(output),
            scale=1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
            kind="cross" if other_side else "self",
            call=call,
            mask=mask if boolean else None,
            bias=None if boolean else mask,
            causal=is_causal,
            dropout_p=dropout_p,
        )
        self._record.sites.append(site)

    def _catch_own(
        self,
        output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any = None,
        *,
        score: Any,
        normalize: Any,
        bias: Any,
        dropout_p: float,
    ) -> None:
        name, other_side = self._places.current
        plain = isinstance(score, Dot) and score.softcap is None and not _by_head(score.scale)
        if not plain or not isinstance(normalize, Softmax) or normalize.sink is not None:
            described = f"{type(score).__name__} and {type(normalize).__name__}"
            self._note(
                f"{name}: regard.attention with {described} is not looked into; regard.observe sees it"
            )
            return
        whole = prepare(query, key, value, mask, score, normalize, bias)
        tile = coordinates(whole.frame, whole.offset, (0, whole.frame.Tq), (0, whole.frame.Tk))
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        site = Site(
            name=name,
            query=_keep(whole.query),
            key=_keep(whole.key),
            value=_keep(whole.value),
            output=_keep(output.reshape(*whole.query.shape[:3], output.shape[-1])),
            scale=float(score.factor(query.shape[-1])),
            kind="cross" if other_side or query.shape[-2] != key.shape[-2] else "self",
            call=call,
            mask=None if whole.mask is None else _four(whole.mask.allowed(tile)),
            bias=None if whole.bias is None else _four(whole.bias.value(tile)),
            dropout_p=dropout_p,
        )
        self._record.sites.append(site)

    def _keep_mask(self, mask: Tensor, dimensions: int) -> Tensor:
        # All layers are usually given one mask: it is copied once. The original is held, so that its id stays its own.
        version = (id(mask), -1 if mask.is_inference() else mask._version)
        if version not in self._masks or mask.is_inference():
            self._masks[version] = (mask, _keep(mask))
        kept = self._masks[version][1]
        return kept.reshape((1,) * (dimensions - kept.dim()) + tuple(kept.shape))


def _by_head(scale: Any) -> bool:
    return isinstance(scale, Tensor) and scale.dim() > 0


def _four(pairs: Tensor) -> Tensor:
    return _keep(pairs.reshape((1,) * (4 - pairs.dim()) + tuple(pairs.shape)))


def _with_heads(query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> tuple[Tensor, ...]:
    """Calls that torch broadcasts over heads, or groups without a batch, as regard writes them."""
    if query.dim() < 3 or query.shape[-3] == key.shape[-3] == value.shape[-3]:
        return query, key, value, output
    if query.dim() == 3:
        query, key, value, output = query[None], key[None], value[None], output[None]
    heads = max(key.shape[-3], value.shape[-3])
    key, value = (x.expand(*x.shape[:-3], heads, -1, -1) if x.shape[-3] == 1 else x for x in (key, value))
    if query.shape[-3] == 1:
        query = query.expand(*query.shape[:-3], heads, -1, -1)
    return query, key, value, output


def _keep(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
