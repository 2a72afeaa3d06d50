"""Whether the tensors of a mask, a bias or a parameter fit the call that they are bound to (voice: ``_checks``).

Each brings its tensor to the one form that kernels know: (B, ...) for samples, (1,) or (H,) for heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from regard import _checks
from regard._frame import Frame, Offset


def one_offset(frame: Frame, parts: Iterable[object]) -> Offset:
    """The one offset of a call, p = i + offset, from all its masks and biases.

    Raises where it is needed and missing, or given twice.
    """
    speakers = [part for part in parts if hasattr(part, "alignment")]
    found: list[Offset] = []
    for part in speakers:
        offset = _offset_of(part, frame)
        if offset is not None and not any(_same(offset, other) for other in found):
            found.append(offset)
    if len(found) > 1:
        _checks.wrong_value(
            "offset",
            "one alignment in a call",
            _checks.words(f"{len(found)} different ones"),
            "Give it to one of them only.",
        )
    if found:
        return found[0]
    if speakers and frame.Tq != frame.Tk:
        _checks.wrong_value(
            type(speakers[0]).__name__,
            "an alignment, because Tq != Tk",
            _checks.words(f"none with Tq = {frame.Tq}, Tk = {frame.Tk}"),
            'Say "upper_left" (query i stands at i), "lower_right" (at i + Tk - Tq) or offset=n.',
        )
    return 0


def _offset_of(part: Any, frame: Frame) -> Any:
    if part.alignment == "lower_right":
        return frame.Tk - frame.Tq
    if part.alignment == "upper_left":
        return 0
    offset = part.offset
    if not isinstance(offset, Tensor):
        return offset
    return per_sample(type(part).__name__, "offset", offset, frame)


def _same(one: Offset, other: Offset) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (_checks.can_look(one) and _checks.can_look(other) and torch.equal(one, other))
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        tensor, number = (one, other) if isinstance(one, Tensor) else (other, one)
        return isinstance(tensor, Tensor) and _checks.can_look(tensor) and bool((tensor == number).all())
    return one == other


def on_device(argument: str, tensor: Tensor, frame: Frame) -> Tensor:
    if tensor.device != frame.device:
        _checks.wrong_value(
            argument,
            f"a tensor on {frame.device}",
            _checks.words(f"one on {tensor.device}"),
            "Move it with .to(query.device).",
        )
    return tensor


def per_sample(owner: str, name: str, tensor: Tensor, frame: Frame) -> Tensor:
    """An integer tensor of the batch's shape, as (B,) int64."""
    argument = f"{owner}({name}=)"
    on_device(argument, tensor, frame)
    if tensor.ndim and tuple(tensor.shape) != frame.batch:
        _checks.wrong_value(argument, f"one number a sample, shape {frame.batch}", tensor)
    return tensor.reshape(-1).expand(frame.B).long()


def key_counts(owner: str, name: str, value: int | Tensor | None, frame: Frame) -> Any:
    """A number of keys, 0 to Tk: an int or None as it is, a tensor as (B,)."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        value = per_sample(owner, name, value, frame)
        if not (_checks.can_look(value) and value.numel()):
            return value
        low, high = int(value.min()), int(value.max())
    else:
        low = high = value
    if low < 0 or high > frame.Tk:
        got = _checks.words(f"{low if low < 0 else high}")
        _checks.wrong_value(f"{owner}({name}=)", f"from 0 to Tk = {frame.Tk}", got)
    return value


def row_edge(name: str, edge: Tensor | None, frame: Frame) -> Tensor | None:
    """A row edge as (B|1, H|1, Tq) int64."""
    if edge is None:
        return None
    on_device(f"Rows({name}=)", edge, frame)
    Tq, batch = frame.Tq, frame.batch
    if tuple(edge.shape) == (Tq,):
        return edge.reshape(1, 1, Tq).long()
    if tuple(edge.shape) == (*batch, Tq):
        return edge.reshape(frame.B, 1, Tq).long()
    if tuple(edge.shape) == (*batch, frame.H, Tq):
        return edge.reshape(frame.B, frame.H, Tq).long()
    _checks.wrong_value(f"Rows({name}=)", f"shape {(Tq,)}, {(*batch, Tq)} or {(*batch, frame.H, Tq)}", edge)


def per_key(argument: str, keep: Tensor, frame: Frame) -> Tensor:
    on_device(argument, keep, frame)
    if tuple(keep.shape) not in ((frame.Tk,), (*frame.batch, frame.Tk)):
        _checks.wrong_value(argument, f"shape {(*frame.batch, frame.Tk)} (batch and keys)", keep)
    return keep.reshape(-1, frame.Tk) if frame.Tk else keep.new_zeros(1, 0)


def document_ids(name: str, value: Tensor, length: int, frame: Frame) -> Tensor:
    argument = f"Documents({name}=)"
    on_device(argument, value, frame)
    if tuple(value.shape) not in ((length,), (*frame.batch, length)):
        way_out = "Where Tq != Tk give both: Documents(query_ids, key_ids)."
        _checks.wrong_value(argument, f"shape {(length,)} or {(*frame.batch, length)}", value, way_out)
    return value.reshape(-1, length) if length else value.new_zeros(1, 0)


def four(name: str, tensor: Tensor, frame: Frame) -> Tensor:
    """A mask or bias tensor as (B|1, H|1, Tq|1, Tk|1), without a copy of what it broadcasts."""
    on_device(name, tensor, frame)
    whole = (*frame.batch, frame.H, frame.Tq, frame.Tk)[-frame.rank :]
    if tensor.ndim > 2 and tensor.ndim != frame.rank:
        way_out = (
            f"Write {name}[:, None] for one a sample, {name}[None] for one a head."
            if tensor.ndim == 3
            else ""
        )
        _checks.wrong_value(
            name, f"(Tq, Tk) or as many dimensions as the query ({frame.rank})", tensor, way_out
        )
    if not _checks.spreads(tensor, whole):
        _checks.wrong_value(
            name, f"a shape that broadcasts to {whole}", tensor, _one_a_sample(name, tensor, frame)
        )
    while tensor.ndim < max(frame.rank, 4):
        tensor = tensor[None]
    if tensor.ndim == 4:
        return tensor
    lead = tensor.shape[:-3]
    if all(size == 1 for size in lead):
        return tensor.reshape(1, *tensor.shape[-3:])
    return tensor.expand(*frame.batch, *tensor.shape[-3:]).reshape(frame.B, *tensor.shape[-3:])


def _one_a_sample(name: str, tensor: Tensor, frame: Frame) -> str:
    if tuple(tensor.shape) != (*frame.batch, frame.Tk):
        return ""
    return (
        "One a sample is masks.Padding.of(mask)."
        if name == "mask"
        else f"One a sample is {name}[:, None, None, :]."
    )


def per_head(owner: str, name: str, tensor: Tensor, frame: Frame) -> Tensor:
    """A parameter 0-d or (H,), as (1,) or (H,)."""
    on_device(f"{owner}({name}=)", tensor, frame)
    if tensor.ndim and tensor.shape[0] not in (1, frame.H):
        _checks.wrong_value(f"{owner}({name}=)", f"a 0-d tensor or one number a head, ({frame.H},)", tensor)
    return tensor.reshape(-1)


def table_heads(table: Tensor, frame: Frame) -> Tensor:
    on_device("Relative(table)", table, frame)
    if table.ndim == 2 and table.shape[0] not in (1, frame.H):
        _checks.wrong_value("Relative(table)", f"one row a head, ({frame.H}, 2R + 1)", table)
    return table if table.ndim == 2 else table[None]
