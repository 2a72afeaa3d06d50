"""Dot and softmax on few pairs, with nothing asked beside the output: torch's own attention, one operation.

A call of a few microseconds should not pay for strips, statistics and gradients that it does not have. Where all is
finite torch keeps every contract here, empty rows included; where it is not, the careful kernels look.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard import _checks, masks
from regard._call import Call
from regard._frame import coordinates
from regard.kernels import _ops
from regard.normalizers import Softmax
from regard.scores import Dot

MOST_PAIRS = 1 << 14


def refuses(call: Call) -> str | None:
    """Why a call is not for this kernel, or None."""
    score, normalize, frame = call.score, call.normalize, call.frame
    if not _checks.can_look(call.query):
        return "only where values may be looked at: eager mode, on the CPU"
    if _ops.forward_mode():
        return "forward-mode differentiation needs every step in sight"
    if not 0 < frame.B * frame.H * frame.Tq * frame.Tk <= MOST_PAIRS:
        return f"1 to {MOST_PAIRS} pairs only"
    if call.bias is not None or call.seed is not None:
        return "bias and dropout are not its business"
    if call.mask is not None and masks.rules(call.mask):
        return "the mask has a Rule"
    if type(score) is not Dot or score.softcap is not None or isinstance(score.scale, Tensor):
        return "dot scores with a plain scale only"
    if type(normalize) is not Softmax or normalize.sink is not None:
        return "softmax without a sink only"
    if frame.H != frame.Hkv or not call.query.shape[3] or not call.value.shape[3]:
        return "as many key heads as query heads, and widths of 1 or more, only"
    if torch.is_grad_enabled() and (
        call.query.requires_grad or call.key.requires_grad or call.value.requires_grad
    ):
        return "no gradients"
    return None


def attend(call: Call) -> Tensor | None:
    """Output (B, H, Tq, Dv), or None where something is not finite."""
    query, key = call.query, call.key
    scale = call.score.factor(query.shape[-1])
    allowed = None
    if call.mask is not None:
        frame = call.frame
        allowed = call.mask.allowed(coordinates(frame, call.offset, (0, frame.Tq), (0, frame.Tk)))
        allowed = allowed[None] if allowed.ndim == 1 else allowed
    return checked(query, key, call.value, allowed, False, scale)


def checked(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, causal: bool, scale: float
) -> Tensor | None:
    """Torch's own attention where everything is finite, else None."""
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, allowed, 0.0, causal, scale=scale
    )
    finite = math.isfinite(query.sum().item() + key.sum().item() + output.sum().item())
    return output if finite else None
