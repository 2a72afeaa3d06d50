"""Every message of the library, one voice: which argument, what was expected, what came, the way out.

Shapes, dtypes, devices and Python numbers are always checked; values inside tensors only where looking at them is
free of surprises (eager mode, on the CPU). Everything that passes here may go to a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from regard._frame import Frame, Offset

if TYPE_CHECKING:
    from regard.biases import Bias
    from regard.masks import Mask

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_REAL = (torch.Tensor, torch.nn.Parameter)


def said(value: Any) -> str:
    """A value in a few words: shape and dtype of a tensor, repr of a number, the type of anything else."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"{type(value).__name__} {str(value)[:60]}"


def wrong_value(argument: str, expected: str, got: Any, way_out: str = "") -> NoReturn:
    """Raise the library's ValueError."""
    raise ValueError(_message(argument, expected, got, way_out))


def wrong_type(argument: str, expected: str, got: Any, way_out: str = "") -> NoReturn:
    """Raise the library's TypeError."""
    raise TypeError(_message(argument, expected, got, way_out))


def _message(argument: str, expected: str, got: Any, way_out: str) -> str:
    came = got if isinstance(got, _Words) else said(got)
    return f"{argument}: expected {expected}, got {came}." + (f" {way_out}" if way_out else "")


class _Words(str):
    """Text that goes into a message as it is."""


words = _Words


def can_look(tensor: Tensor) -> bool:
    """Whether the values of a tensor may be read here: eager mode, on the CPU, not under a transform."""
    return (
        type(tensor) in _REAL
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


# ---------------------------------------------------------------------------- numbers and callables


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def is_int(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def finite_number(owner: str, name: str, value: Any) -> None:
    if not is_number(value):
        wrong_type(f"{owner}({name}=)", "a number or a tensor", value)
    if isinstance(value, float) and not math.isfinite(value):
        wrong_value(f"{owner}({name}=)", "a finite number", value)


def number_or_tensor(owner: str, name: str, value: Any, none: bool = False) -> None:
    """A finite number, a floating-point tensor (0-d or (H,)), or None where that is a choice."""
    if value is None and none:
        return
    if not isinstance(value, Tensor):
        return finite_number(owner, name, value)
    if value.dtype not in FLOATS:
        wrong_type(f"{owner}({name}=)", "a floating-point tensor", value)
    if value.ndim > 1:
        wrong_value(f"{owner}({name}=)", "a 0-d tensor or one number a head, (H,)", value)
    if can_look(value) and not bool(torch.isfinite(value).all()):
        wrong_value(f"{owner}({name}=)", "finite values", words("a tensor with NaN or infinity in it"))


def softcap(value: Any) -> None:
    if value is None:
        return
    if not is_number(value):
        wrong_type("Dot(softcap=)", "a positive number or None", value)
    if not 0 < value < math.inf:
        wrong_value("Dot(softcap=)", "a positive finite number", value, "Leave it out for no soft-cap.")


def entmax_alpha(value: Any) -> None:
    number_or_tensor("Entmax", "alpha", value)
    low = value.min().item() if isinstance(value, Tensor) and can_look(value) and value.numel() else value
    if not isinstance(low, Tensor) and low <= 1:
        wrong_value("Entmax(alpha=)", "alpha > 1", low, "alpha = 1 is Softmax(), 2 is Sparsemax().")


def score_weight(owner: str, name: str, value: Any, ranks: Sequence[int]) -> None:
    if not isinstance(value, Tensor) or value.dtype not in FLOATS:
        wrong_type(f"{owner}({name}=)", "a floating-point tensor", value)
    if value.ndim not in ranks:
        counts = " or ".join(str(rank) for rank in ranks)
        wrong_value(f"{owner}({name}=)", f"{counts} dimensions", value)


def is_callable(owner: str, signature: str, value: Any) -> None:
    if not callable(value):
        wrong_type(owner, f"a callable {signature}", value)


def dropout(p: Any) -> float:
    if not is_number(p):
        wrong_type("dropout_p", "a number from 0 to 1", p)
    if not 0 <= p <= 1:
        wrong_value("dropout_p", "a probability from 0 to 1", p)
    return float(p)


# ---------------------------------------------------------------------------- alignment


def alignment(owner: str, name: Any, offset: Any) -> None:
    """What ``Causal``, ``Window``, ``Alibi`` and ``Relative`` take to say where the queries stand."""
    if name is not None and name not in ("upper_left", "lower_right"):
        fail = wrong_value if isinstance(name, str) else wrong_type
        fail(
            f"{owner}(alignment)",
            '"upper_left" or "lower_right"',
            name,
            f"A number goes into {owner}(offset=...).",
        )
    if offset is None:
        return
    if name is not None:
        wrong_value(
            f"{owner}(offset=)", "an alignment by name or by offset", words("both"), "Leave one of them out."
        )
    if isinstance(offset, Tensor):
        if offset.dtype not in INTEGERS:
            wrong_type(f"{owner}(offset=)", "an int or an integer tensor of the batch's shape", offset)
    elif not is_int(offset):
        wrong_type(f"{owner}(offset=)", "an int or an integer tensor of the batch's shape", offset)


def one_offset(frame: Frame, mask: Mask | None, bias: Bias | None) -> Offset:
    """The one offset of a call: p = i + offset. Raises where it is needed and missing, or given twice."""
    from regard import biases, masks

    speakers = [part for part in (*masks.walk(mask), *biases.walk(bias)) if hasattr(part, "alignment")]
    found: list[Offset] = []
    for part in speakers:
        offset = _offset_of(part, frame)
        if offset is not None and not any(_same(offset, other) for other in found):
            found.append(offset)
    if len(found) > 1:
        wrong_value(
            "offset",
            "one alignment in a call",
            words(f"{len(found)} different ones"),
            "Give it to one of them only.",
        )
    if found:
        return found[0]
    if speakers and frame.Tq != frame.Tk:
        wrong_value(
            type(speakers[0]).__name__,
            "an alignment, because Tq != Tk",
            words(f"none with Tq = {frame.Tq}, Tk = {frame.Tk}"),
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
        return one is other or (can_look(one) and can_look(other) and torch.equal(one, other))
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other


# ---------------------------------------------------------------------------- tensors of masks and biases


def on_device(argument: str, tensor: Tensor, frame: Frame) -> Tensor:
    if tensor.device != frame.device:
        wrong_value(
            argument,
            f"a tensor on {frame.device}",
            words(f"one on {tensor.device}"),
            "Move it with .to(query.device).",
        )
    return tensor


def per_sample(owner: str, name: str, tensor: Tensor, frame: Frame) -> Tensor:
    """An integer tensor of the batch's shape, as (B,) int64."""
    argument = f"{owner}({name}=)"
    on_device(argument, tensor, frame)
    if tensor.ndim and tuple(tensor.shape) != frame.batch:
        wrong_value(argument, f"one number a sample, shape {frame.batch}", tensor)
    return tensor.reshape(-1).expand(frame.B).long()


def counts(owner: str, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        if value.dtype not in INTEGERS:
            wrong_type(f"{owner}({name}=)", "an int or an integer tensor", value)
    elif not is_int(value):
        wrong_type(f"{owner}({name}=)", "an int or an integer tensor", value)
    elif value < 0:
        wrong_value(f"{owner}({name}=)", "0 or more", value)


def key_counts(owner: str, name: str, value: int | Tensor | None, frame: Frame) -> Any:
    """A number of keys, 0 to Tk: an int or None as it is, a tensor as (B,)."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        value = per_sample(owner, name, value, frame)
        if not (can_look(value) and value.numel()):
            return value
        low, high = int(value.min()), int(value.max())
    else:
        low = high = value
    if low < 0 or high > frame.Tk:
        got = words(f"{low if low < 0 else high}")
        wrong_value(f"{owner}({name}=)", f"from 0 to Tk = {frame.Tk}", got)
    return value


def padding(lengths: Any, start: Any, stop: Any) -> None:
    if lengths is None and start is None and stop is None:
        wrong_value(
            "Padding",
            "lengths, start= or stop=",
            words("none"),
            "Padding.of(attention_mask) takes a tokenizer's mask.",
        )
    if lengths is not None and stop is not None:
        wrong_value("Padding", "lengths or stop=", words("both"), "Leave one of them out.")
    for name, value in (("lengths", lengths), ("start", start), ("stop", stop)):
        if value is not None:
            if isinstance(value, Tensor) and value.dtype == torch.bool:
                wrong_type(
                    f"Padding({name}=)", "numbers of keys", value, "A mask goes into Padding.of(mask)."
                )
            counts("Padding", name, value)


def row_edges(start: Any, stop: Any) -> None:
    if start is None and stop is None:
        wrong_value("Rows", "start, stop or both", words("none"))
    for name, edge in (("start", start), ("stop", stop)):
        if edge is not None and (not isinstance(edge, Tensor) or edge.dtype not in INTEGERS):
            wrong_type(f"Rows({name}=)", "an integer tensor (Tq,), (*batch, Tq) or (*batch, H, Tq)", edge)


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
    wrong_value(f"Rows({name}=)", f"shape {(Tq,)}, {(*batch, Tq)} or {(*batch, frame.H, Tq)}", edge)


def window(left: Any, right: Any) -> None:
    for name, value in (("left", left), ("right", right)):
        if value is not None and not is_int(value):
            wrong_type(f"Window({name}=)", "an int or None (unlimited)", value)
    if left is not None and right is not None and left + right < 0:
        wrong_value(
            "Window", "a window that can hold a key (left + right >= 0)", words(f"left={left}, right={right}")
        )


def bool_mask(mask: Any) -> Tensor:
    if not isinstance(mask, Tensor):
        wrong_type("mask", "a mask of regard.masks or a bool tensor", mask)
    if mask.dtype != torch.bool:
        way_out = (
            "A float tensor that is added goes into bias=."
            if mask.is_floating_point()
            else "Say mask.bool()."
        )
        wrong_type("mask", "a bool tensor where True means may attend", mask, way_out)
    return mask


def attention_mask(mask: Any) -> Tensor:
    if not isinstance(mask, Tensor):
        wrong_type("Padding.of", "a bool or 0/1 tensor (*batch, Tk)", mask)
    if mask.dtype != torch.bool and can_look(mask) and not bool(((mask == 0) | (mask == 1)).all()):
        wrong_value("Padding.of", "bool or 0 and 1", words("other values"), "Additive masks go into bias=.")
    return mask if mask.dtype == torch.bool else mask != 0


def per_key(argument: str, keep: Tensor, frame: Frame) -> Tensor:
    on_device(argument, keep, frame)
    if tuple(keep.shape) not in ((frame.Tk,), (*frame.batch, frame.Tk)):
        wrong_value(argument, f"shape {(*frame.batch, frame.Tk)} (batch and keys)", keep)
    return keep.reshape(-1, frame.Tk) if frame.Tk else keep.new_zeros(1, 0)


def ids(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.dtype not in INTEGERS:
        wrong_type(f"Documents({name}=)", "an integer tensor (T,) or (*batch, T)", value)


def document_ids(name: str, value: Tensor, length: int, frame: Frame) -> Tensor:
    argument = f"Documents({name}=)"
    on_device(argument, value, frame)
    if tuple(value.shape) not in ((length,), (*frame.batch, length)):
        way_out = "Where Tq != Tk give both: Documents(query_ids, key_ids)."
        wrong_value(argument, f"shape {(length,)} or {(*frame.batch, length)}", value, way_out)
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
        wrong_value(name, f"(Tq, Tk) or as many dimensions as the query ({frame.rank})", tensor, way_out)
    if tensor.ndim > frame.rank or any(
        size not in (1, full) for size, full in zip(reversed(tensor.shape), reversed(whole), strict=False)
    ):
        wrong_value(name, f"a shape that broadcasts to {whole}", tensor)
    while tensor.ndim < max(frame.rank, 4):
        tensor = tensor[None]
    if tensor.ndim == 4:
        return tensor
    lead = tensor.shape[:-3]
    if all(size == 1 for size in lead):
        return tensor.reshape(1, *tensor.shape[-3:])
    return tensor.expand(*frame.batch, *tensor.shape[-3:]).reshape(frame.B, *tensor.shape[-3:])


def bias_tensor(bias: Any) -> Tensor:
    if not isinstance(bias, Tensor):
        wrong_type("bias", "a bias of regard.biases or a floating-point tensor", bias)
    if bias.dtype not in FLOATS:
        way_out = "A bool tensor is a mask= (True means may attend)." if bias.dtype == torch.bool else ""
        wrong_type("bias", "a floating-point tensor", bias, way_out)
    return bias


def per_head(owner: str, name: str, tensor: Tensor, frame: Frame) -> Tensor:
    """A parameter 0-d or (H,), as (1,) or (H,)."""
    on_device(f"{owner}({name}=)", tensor, frame)
    if tensor.ndim and tensor.shape[0] not in (1, frame.H):
        wrong_value(f"{owner}({name}=)", f"a 0-d tensor or one number a head, ({frame.H},)", tensor)
    return tensor.reshape(-1)


def relative_table(table: Any) -> None:
    if not isinstance(table, Tensor) or table.dtype not in FLOATS:
        wrong_type("Relative(table)", "a floating-point tensor (2R + 1,) or (H, 2R + 1)", table)
    if table.ndim not in (1, 2) or table.shape[-1] % 2 == 0:
        wrong_value("Relative(table)", "shape (2R + 1,) or (H, 2R + 1): an odd number of distances", table)


def table_heads(table: Tensor, frame: Frame) -> Tensor:
    on_device("Relative(table)", table, frame)
    if table.ndim == 2 and table.shape[0] not in (1, frame.H):
        wrong_value("Relative(table)", f"one row a head, ({frame.H}, 2R + 1)", table)
    return table if table.ndim == 2 else table[None]


def interleaved_documents() -> NoReturn:
    way_out = "Sort them, or call without torch.compile, where they become a bool tensor."
    wrong_value("Documents", "each document's keys together", words("documents that interleave"), way_out)


def rule_result(result: Any) -> Tensor:
    if not isinstance(result, Tensor) or result.dtype != torch.bool:
        wrong_type("Rule: mask_mod(b, h, q, k)", "a bool tensor as its result", result)
    return result


def tile_scores(name: str, result: Any, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(result, Tensor) or not result.is_floating_point():
        wrong_type(name, f"a floating-point tensor of shape {shape} as its result", result)
    if tuple(result.shape) != shape:
        wrong_value(name, f"a result of shape {shape}", result)
    return result


def mask_truth() -> TypeError:
    return TypeError("mask: a mask has no truth value. Combine masks with &, | and ~, not with and, or, not.")


def normalizer_or_score(name: str, value: Any, what: str, way_out: str) -> None:
    if isinstance(value, type) or not callable(value):
        wrong_type(name, what, value, way_out)


def statistics(names: Any, known: Sequence[str]) -> set[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        wrong_type("statistics", "a sequence of names", names, f'Say statistics=("{known[0]}",).')
    found = set(names)
    for name in found:
        if name not in known:
            wrong_value("statistics", "names among " + ", ".join(known), name)
    return found


def count(name: str, value: Any) -> None:
    if not is_int(value):
        wrong_type(name, "a whole number, 0 for none", value)
    if value < 0:
        wrong_value(name, "0 or more", value)


def pieces(outputs: Any, lses: Any, sink: Any) -> None:
    """What ``merge`` takes: as many outputs as lses, of shapes that fit."""
    if isinstance(outputs, Tensor) or isinstance(lses, Tensor):
        wrong_type(
            "merge", "sequences of tensors, one a piece", words("a tensor"), "Say merge([out], [lse])."
        )
    if len(outputs) != len(lses) or not outputs:
        got = words(f"{len(outputs)} and {len(lses)}")
        wrong_value("merge", "as many outputs as lses, at least one", got)
    for piece in (*outputs, *lses):
        if not isinstance(piece, Tensor) or piece.dtype not in FLOATS:
            wrong_type("merge", "floating-point tensors", piece)
    for output, lse in zip(outputs, lses, strict=True):
        if output.shape != outputs[0].shape or lse.shape != output.shape[:-1]:
            shapes = words(f"{tuple(output.shape)} and {tuple(lse.shape)}")
            wrong_value("merge", "outputs (*batch, H, Tq, Dv) and lses (*batch, H, Tq) of one shape", shapes)
    number_or_tensor("merge", "sink", sink, none=True)
