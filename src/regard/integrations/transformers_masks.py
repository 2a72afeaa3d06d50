"""The mask function that transformers calls once a forward: its description of a mask, as a mask of regard.

transformers describes a mask by nested functions of (sample, head, query, key). The functions it makes itself are
known by their code and become runs; any other is evaluated for every pair, as transformers does it, and its
rows are scanned for runs once for all layers.

Letters: B batch, Tq and Tk lengths. Query i stands at i + q_offset, key j at j + kv_offset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from regard._checks import can_look, wrong_value
from regard.integrations.transformers_tensor import MaskTensor
from regard.masks import Causal, Dense, Documents, Mask, Padding, Rows, Window

MaskFunction = Callable[..., Any]


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """The mask of a forward in the shape (B, 1, Tq, Tk): a ``MaskTensor``, or eager's tensor where a graph is traced.

    Never None: what None means differs from module to module. Raises ValueError for an ``attention_mask`` that is not
    (B, Tk).
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        wrong_value("attention_mask", "(B, Tk), or a whole mask (B, heads, Tq, Tk)", attention_mask)
    where = torch.device(device)
    described: dict[str, Any] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "allow_is_bidirectional_skip": False,
        "use_vmap": use_vmap,
        "device": where,
    }
    if _goes_into_a_graph(q_length, q_offset, attention_mask, mask_function, allow_is_causal_skip):
        return _tensor(masking_utils.eager_mask(**described, dtype=dtype))
    place = Place(batch_size, q_length, kv_length, int(q_offset), int(kv_offset), where)
    try:
        mask = _both(of_function(mask_function, place), padding(attention_mask, place))
    except UnknownFunction:
        mask = Dense(_tensor(masking_utils.sdpa_mask(**described, allow_is_causal_skip=False)))
    return MaskTensor(mask, (batch_size, 1, q_length, kv_length), dtype, where)


def _tensor(mask: Any) -> Tensor:
    assert isinstance(mask, Tensor)  # None is given only where a mask may be skipped
    return mask


def _goes_into_a_graph(
    q_length: int,
    q_offset: int | Tensor,
    attention_mask: Tensor | None,
    mask_function: MaskFunction,
    allow_is_causal_skip: bool,
) -> bool:
    """Whether a compiled forward will take the mask, or is being traced: it takes plain tensors.

    A causal mask that must not be skipped for a single query is how transformers prepares a compiled decoding step.
    """
    if torch.compiler.is_compiling() or (attention_mask is not None and is_tracing(attention_mask)):
        return True
    if isinstance(q_offset, Tensor) and is_tracing(q_offset):
        return True
    bidirectional = mask_function is masking_utils.bidirectional_mask_function
    return q_length == 1 and not allow_is_causal_skip and not bidirectional


class Place(NamedTuple):
    """Sizes of a mask, and where its queries and keys stand."""

    B: int
    Tq: int
    Tk: int
    q_offset: int
    kv_offset: int
    device: torch.device

    @property
    def offset(self) -> int:
        """Where the first query stands among the keys at hand."""
        return self.q_offset - self.kv_offset


class UnknownFunction(Exception):
    """A mask function that transformers did not make itself, or in a place where its meaning is not known here."""


def _both(one: Mask | None, two: Mask | None) -> Mask | None:
    return two if one is None else one if two is None else one & two


# ---------------------------------------------------------------------------- functions


def _code(function: MaskFunction) -> Any:
    return getattr(function, "__code__", None)


def _held(function: Any, name: str) -> Any:
    """What a nested function closes over under a name."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


_CAUSAL = _code(masking_utils.causal_mask_function)
_BIDIRECTIONAL = _code(masking_utils.bidirectional_mask_function)
_none = torch.zeros(1, 1, dtype=torch.int64)
_AND = _code(masking_utils.and_masks(masking_utils.causal_mask_function))
_OR = _code(masking_utils.or_masks(masking_utils.causal_mask_function))
_SLIDING = _code(masking_utils.sliding_window_overlay(1))
_AROUND = _code(masking_utils.sliding_window_bidirectional_overlay(1))
_CHUNKED = _code(masking_utils.chunked_overlay(1, _none))
_BLOCKWISE = _code(masking_utils.blockwise_overlay(_none))
_PACKED = _code(masking_utils.packed_sequence_mask_function(_none))
_REMAPPED = _code(
    masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, _none)
)


def of_function(function: MaskFunction, place: Place) -> Mask | None:
    """A mask function as a mask, None where it allows every pair. Raises UnknownFunction."""
    code = _code(function)
    if code is _CAUSAL:
        return None if place.offset >= place.Tk - 1 else Causal(offset=place.offset)
    if code is _BIDIRECTIONAL:
        return None
    if code is _AND:
        return _all_of(_held(function, "mask_functions"), place)
    if code is _OR:
        return _any_of(_held(function, "mask_functions"), place)
    if code is _SLIDING:
        left = _held(function, "sliding_window") - 1
        return None if left >= place.offset + place.Tq - 1 else Window(left, None, offset=place.offset)
    if code is _AROUND:
        reach = _held(function, "sliding_window")
        return Window(reach, reach, offset=place.offset)
    if code is _CHUNKED:
        return _chunks(_held(function, "chunk_size"), _held(function, "left_padding"), place)
    if code is _BLOCKWISE:
        return _blocks(_held(function, "block_sequence_ids"), place)
    if code is _PACKED:
        return _packed(_held(function, "packed_sequence_mask"), place)
    raise UnknownFunction


def _all_of(functions: Any, place: Place) -> Mask | None:
    parts = list(functions)
    packed = any(_code(part) is _PACKED for part in parts)
    mask = None
    for part in parts:
        if packed and _code(part) is _REMAPPED:
            part = _held(part, "mask_function")
            # Within a packed sequence positions count up by one, so that distances are those of the rows.
            if not _by_distance(part):
                raise UnknownFunction
        mask = _both(mask, of_function(part, place))
    return mask


def _by_distance(function: MaskFunction) -> bool:
    if _code(function) is _AND:
        return all(_by_distance(part) for part in _held(function, "mask_functions"))
    return _code(function) in (_CAUSAL, _BIDIRECTIONAL, _SLIDING, _AROUND)


def _any_of(functions: Any, place: Place) -> Mask | None:
    found: Mask | None = None
    for index, part in enumerate(functions):
        mask = of_function(part, place)
        if mask is None:
            return None
        found = mask if index == 0 or found is None else found | mask
    return found


def _chunks(size: int, left_padding: Tensor, place: Place) -> Mask:
    """Queries see the keys of their own chunk; chunks are counted from the first real token of a sample."""
    first = left_padding.to(place.device).reshape(-1, 1)
    at = torch.arange(place.Tq, device=place.device) + place.q_offset
    start = first + (at - first).div(size, rounding_mode="floor") * size - place.kv_offset
    return Rows(start.clamp(min=0), (start + size).clamp(min=0))


def _packed(ids: Tensor, place: Place) -> Mask:
    if place.Tq != place.Tk or place.q_offset or place.kv_offset or ids.shape[-1] != place.Tk:
        raise UnknownFunction
    return Documents(ids.to(place.device))


def _blocks(ids: Tensor, place: Place) -> Mask:
    """Queries and keys of one block; what carries a negative id is in none."""
    if ids.shape[-1] < max(place.Tq + place.q_offset, place.Tk + place.kv_offset):
        raise UnknownFunction
    ids = ids.to(place.device).long()
    queries = ids[:, place.q_offset : place.q_offset + place.Tq]
    keys = ids[:, place.kv_offset : place.kv_offset + place.Tk]
    alone = -2 - torch.arange(place.Tk, device=place.device)
    return Documents(torch.where(queries < 0, -1, queries), torch.where(keys < 0, alone, keys))


# ---------------------------------------------------------------------------- padding


def padding(attention_mask: Tensor | None, place: Place) -> Mask | None:
    """The real keys of each sample, of (B, length) true for real tokens; keys beyond its length are not real."""
    if attention_mask is None:
        return None
    keep = attention_mask.to(device=place.device, dtype=torch.bool)
    missing = place.kv_offset + place.Tk - keep.shape[-1]
    if missing > 0:
        keep = torch.nn.functional.pad(keep, (0, missing))
    keep = keep[:, place.kv_offset : place.kv_offset + place.Tk]
    if not can_look(keep) or place.Tk == 0:
        return Padding.of(keep)
    if bool(keep.all()):
        return None
    count = keep.sum(-1)
    start = keep.view(torch.uint8).argmax(-1)
    last = place.Tk - 1 - keep.flip(-1).view(torch.uint8).argmax(-1)
    if not bool(((last - start + 1 == count) | (count == 0)).all()):
        return Padding.of(keep)
    stop = start + count
    return Padding(stop) if not bool(start.any()) else Padding(start=start, stop=stop)
