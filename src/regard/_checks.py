"""Every message of the library, one voice: which argument, what was expected, what came, the way out.

Shapes, dtypes, devices and Python numbers are always checked; values inside tensors only where looking at them is
free of surprises (eager mode, on the CPU). Everything that passes here may go to a kernel.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from regard._frame import At

if TYPE_CHECKING:
    pass

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_REAL = (torch.Tensor, torch.nn.Parameter)


def said(value: Any) -> str:
    """A value in a few words: shape and dtype of a tensor, repr of a number, the type of anything else."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"{type(value).__name__} {' '.join(str(value).split())[:60]}"


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


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for tensors of a device (there is none for meta tensors)."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


# ---------------------------------------------------------------------------- numbers and callables


LARGEST = torch.finfo(torch.float32).max
FARTHEST = 1 << 40


def is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) or isinstance(value, numbers.Real)


def is_int(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, torch.SymInt)) or isinstance(value, numbers.Integral)


def finite_number(argument: str, value: Any) -> None:
    if not is_number(value):
        wrong_type(argument, "a number or a tensor", value)
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return
    if not -LARGEST <= value <= LARGEST:
        wrong_value(argument, "a finite number that float32 holds", words(str(value)[:40]))


def near(argument: str, value: Any) -> None:
    """A distance or a count that positions can be computed with."""
    if not isinstance(value, (Tensor, torch.SymInt)) and not -FARTHEST < value < FARTHEST:
        wrong_value(argument, "a number below 2**40", words(str(value)[:40]))


def dense(
    argument: str, tensor: Any, expected: str, dtypes: Sequence[torch.dtype], way_out: str = ""
) -> Tensor:
    """The tensor itself, strided and of one of these dtypes."""
    if not isinstance(tensor, Tensor):
        wrong_type(argument, expected, tensor, way_out)
    if tensor.layout != torch.strided or tensor.is_nested:
        wrong_type(argument, expected, words("a sparse or nested one"), "Say .to_dense() or pad it.")
    if tensor.dtype not in dtypes:
        wrong_type(argument, expected, tensor, way_out)
    return tensor


def number_or_tensor(owner: str, name: str, value: Any, none: bool = False) -> None:
    """A finite number, a floating-point tensor (0-d or (H,)), or None where that is a choice."""
    if value is None and none:
        return
    if not isinstance(value, Tensor):
        return finite_number(f"{owner}({name}=)", value)
    dense(f"{owner}({name}=)", value, "a floating-point tensor", FLOATS)
    if value.ndim > 1:
        wrong_value(f"{owner}({name}=)", "a 0-d tensor or one number a head, (H,)", value)
    if can_look(value) and not bool(torch.isfinite(value).all()):
        wrong_value(f"{owner}({name}=)", "finite values", words("a tensor with NaN or infinity in it"))


def softcap(value: Any) -> None:
    if value is None:
        return
    if not is_number(value):
        wrong_type("Dot(softcap=)", "a positive number or None", value)
    finite_number("Dot(softcap=)", value)
    if not value > 0:
        wrong_value("Dot(softcap=)", "a positive finite number", value, "Leave it out for no soft-cap.")


def entmax_alpha(value: Any) -> None:
    number_or_tensor("Entmax", "alpha", value)
    low = value.min().item() if isinstance(value, Tensor) and can_look(value) and value.numel() else value
    if not isinstance(low, Tensor) and low <= 1:
        wrong_value("Entmax(alpha=)", "alpha > 1", low, "alpha = 1 is Softmax(), 2 is Sparsemax().")


def score_weight(owner: str, name: str, value: Any, ranks: Sequence[int]) -> None:
    dense(f"{owner}({name}=)", value, "a floating-point tensor", FLOATS)
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
    whole_number(f"{owner}(offset=)", offset, "an int or an integer tensor of the batch's shape")


# ---------------------------------------------------------------------------- tensors of masks and biases


def whole_number(argument: str, value: Any, expected: str = "an int or an integer tensor") -> None:
    if isinstance(value, Tensor):
        dense(argument, value, expected, INTEGERS)
    elif not is_int(value):
        wrong_type(argument, expected, value)
    near(argument, value)
    if isinstance(value, Tensor) and can_look(value) and value.numel():
        near(argument, int(value.max()))
        near(argument, int(value.min()))


def counts(owner: str, name: str, value: Any) -> None:
    whole_number(f"{owner}({name}=)", value)
    if not isinstance(value, Tensor) and value < 0:
        wrong_value(f"{owner}({name}=)", "0 or more", value)


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
                way_out = "A mask goes into Padding.of(mask)."
                wrong_type(f"Padding({name}=)", "numbers of keys", value, way_out)
            counts("Padding", name, value)


def row_edges(start: Any, stop: Any) -> None:
    if start is None and stop is None:
        wrong_value("Rows", "start, stop or both", words("none"))
    for name, edge in (("start", start), ("stop", stop)):
        if edge is not None:
            dense(
                f"Rows({name}=)", edge, "an integer tensor (Tq,), (*batch, Tq) or (*batch, H, Tq)", INTEGERS
            )


def window(left: Any, right: Any) -> None:
    for name, value in (("left", left), ("right", right)):
        if value is None:
            continue
        if not is_int(value):
            wrong_type(f"Window({name}=)", "an int or None (unlimited)", value)
        near(f"Window({name}=)", value)
    if left is not None and right is not None and left + right < 0:
        wrong_value(
            "Window", "a window that can hold a key (left + right >= 0)", words(f"left={left}, right={right}")
        )


def bool_mask(mask: Any) -> Tensor:
    if not isinstance(mask, Tensor):
        wrong_type("mask", "a mask of regard.masks or a bool tensor", mask)
    way_out = (
        "A float tensor that is added goes into bias=." if mask.is_floating_point() else "Say mask.bool()."
    )
    return dense("mask", mask, "a bool tensor where True means may attend", (torch.bool,), way_out)


def attention_mask(mask: Any) -> Tensor:
    mask = dense("Padding.of", mask, "a bool or 0/1 tensor (*batch, Tk)", (torch.bool, *INTEGERS, *FLOATS))
    if mask.dtype != torch.bool and can_look(mask) and not bool(((mask == 0) | (mask == 1)).all()):
        wrong_value("Padding.of", "bool or 0 and 1", words("other values"), "Additive masks go into bias=.")
    keep: Tensor = mask if mask.dtype == torch.bool else mask != 0
    return keep


def ids(name: str, value: Any) -> None:
    dense(f"Documents({name}=)", value, "an integer tensor (T,) or (*batch, T)", INTEGERS)


def bias_tensor(bias: Any) -> Tensor:
    if not isinstance(bias, Tensor):
        wrong_type("bias", "a bias of regard.biases or a floating-point tensor", bias)
    way_out = "A bool tensor is a mask= (True means may attend)." if bias.dtype == torch.bool else ""
    return dense("bias", bias, "a floating-point tensor", FLOATS, way_out)


def relative_table(table: Any) -> None:
    dense("Relative(table)", table, "a floating-point tensor (2R + 1,) or (H, 2R + 1)", FLOATS)
    if table.ndim not in (1, 2) or table.shape[-1] % 2 == 0:
        wrong_value("Relative(table)", "shape (2R + 1,) or (H, 2R + 1): an odd number of distances", table)


def interleaved_documents() -> NoReturn:
    way_out = "Sort them, or call without torch.compile, where they become a bool tensor."
    wrong_value("Documents", "each document's keys together", words("documents that interleave"), way_out)


def rule_result(result: Any, at: At) -> Tensor:
    """A rule's answer for a tile: bool, broadcastable to (B, H, rows, keys)."""
    argument = "Rule: mask_mod(b, h, q, k)"
    result = dense(argument, result, "a bool tensor as its result", (torch.bool,))
    shape = (at.b.shape[0], at.h.shape[-3], at.i.shape[-2], at.j.shape[-1])
    if not spreads(result, shape):
        wrong_value(argument, f"a result that broadcasts to {shape}", result)
    checked: Tensor = result
    return checked


def spreads(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor broadcasts to a shape."""
    pairs = zip(reversed(tensor.shape), reversed(shape), strict=False)
    return tensor.ndim <= len(shape) and all(size in (1, full) for size, full in pairs)


def tile_scores(name: str, result: Any, shape: tuple[int, ...], broadcast: bool = False) -> Tensor:
    if not isinstance(result, Tensor) or not result.is_floating_point():
        wrong_type(name, f"a floating-point tensor of shape {shape} as its result", result)
    if tuple(result.shape) != shape and not (broadcast and spreads(result, shape)):
        wrong_value(name, f"a result of shape {shape}", result)
    return result.expand(shape)


def mask_truth() -> TypeError:
    return TypeError("mask: a mask has no truth value. Combine masks with &, | and ~, not with and, or, not.")


def statistics(names: Any, known: Sequence[str]) -> set[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        wrong_type("statistics", "a sequence of names", names, f'Say statistics=("{known[0]}",).')
    found = list(names)
    for name in found:
        if name not in known:
            wrong_value("statistics", "names among " + ", ".join(known), name)
    return set(found)


def count(name: str, value: Any) -> None:
    if not is_int(value):
        wrong_type(name, "a whole number, 0 for none", value)
    if value < 0:
        wrong_value(name, "0 or more", value)


def rows(given: Any, Tq: int) -> tuple[int, ...] | None:
    """Numbers of rows, those from the end counted from the start; None where none are asked for."""
    if given is None:
        return None
    if isinstance(given, Tensor) and given.ndim == 1 and not given.is_floating_point():
        given = given.tolist()
    if isinstance(given, (str, Tensor)) or not isinstance(given, Iterable):
        wrong_type("rows", "a sequence of row numbers", given, "Say rows=(0,).")
    found = list(given)
    for row in found:
        if not is_int(row):
            wrong_type("rows", "whole numbers", row)
        if not -Tq <= row < Tq:
            wrong_value("rows", f"numbers from {-Tq} to {Tq - 1}" if Tq else "none, there are no rows", row)
    return tuple(row % Tq for row in found)


def pieces(outputs: Any, lses: Any, sink: Any) -> None:
    """What ``merge`` takes: as many outputs as lses, of shapes that fit."""
    for given in (outputs, lses):
        if isinstance(given, Tensor) or not isinstance(given, Sequence):
            wrong_type("merge", "sequences of tensors, one a piece", given, "Say merge([out], [lse]).")
    if len(outputs) != len(lses) or not outputs:
        wrong_value(
            "merge", "as many outputs as lses, at least one", words(f"{len(outputs)} and {len(lses)}")
        )
    for piece in (*outputs, *lses):
        dense("merge", piece, "floating-point tensors", FLOATS)
        if piece.device != outputs[0].device:
            wrong_value("merge", "pieces on one device", words(f"{outputs[0].device} and {piece.device}"))
    for output, lse in zip(outputs, lses, strict=True):
        if output.ndim < 2 or output.shape != outputs[0].shape or lse.shape != output.shape[:-1]:
            shapes = words(f"{tuple(output.shape)} and {tuple(lse.shape)}")
            wrong_value("merge", "outputs (*batch, H, Tq, Dv) and lses (*batch, H, Tq) of one shape", shapes)
        if output.dtype != outputs[0].dtype:
            wrong_type("merge", f"outputs of one dtype, {outputs[0].dtype}", output)
    number_or_tensor("merge", "sink", sink, none=True)
    heads = outputs[0].shape[-3] if outputs[0].ndim > 2 else 1
    if isinstance(sink, Tensor) and sink.ndim and sink.shape[0] not in (1, heads):
        wrong_value("merge(sink=)", f"a number, 0-d, or one a head, ({heads},)", sink)


def sizes(argument: str, *values: Any) -> None:
    """Lengths and counts: whole numbers, 0 or more."""
    for value in values:
        if not is_int(value):
            wrong_type(argument, "whole numbers as sizes", value)
        if value < 0:
            wrong_value(argument, "sizes of 0 or more", value)
