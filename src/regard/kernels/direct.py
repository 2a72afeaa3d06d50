"""Dot and softmax on few pairs, with nothing asked beside the output: three torch operations on whole matrices.

A call of a few microseconds should not pay for strips, masks and gradients that it does not have.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._call import Call
from regard.normalizers import Softmax
from regard.scores import Dot

MOST_PAIRS = 1 << 14


def refuses(call: Call) -> str | None:
    """Why a call is not for this kernel, or None."""
    score, normalize, frame = call.score, call.normalize, call.frame
    if frame.device.type == "meta":
        return "there are no values to look at"
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return "traced and transformed calls go through the registered operator"
    if frame.B * frame.H * frame.Tq * frame.Tk > MOST_PAIRS:
        return f"more than {MOST_PAIRS} pairs"
    if call.mask is not None or call.bias is not None or call.seed is not None:
        return "mask, bias and dropout are not its business"
    if type(score) is not Dot or score.softcap is not None or isinstance(score.scale, Tensor):
        return "dot scores with a plain scale only"
    if type(normalize) is not Softmax or normalize.sink is not None:
        return "softmax without a sink only"
    if call.query.dtype not in (torch.float32, torch.float64) or frame.H != frame.Hkv or frame.Tk == 0:
        return "float32 and float64, as many key heads as query heads, some keys"
    if torch.is_grad_enabled() and (
        call.query.requires_grad or call.key.requires_grad or call.value.requires_grad
    ):
        return "no gradients"
    return None


def attend(call: Call) -> Tensor | None:
    """Output (B, H, Tq, Dv), or None where a score is not finite and the careful kernels must look."""
    query, key, value = call.query.flatten(0, 1), call.key.flatten(0, 1), call.value.flatten(0, 1)
    scale = call.score.factor(query.shape[-1])
    room = query.new_empty(query.shape[0], query.shape[1], key.shape[1])
    scores = torch.baddbmm(room, query, key.mT, beta=0, alpha=scale, out=room)
    if not math.isfinite(scores.sum().item()):
        return None
    output = torch.bmm(torch.softmax(scores, -1), value)
    return output.view(call.frame.B, call.frame.H, *output.shape[1:])
