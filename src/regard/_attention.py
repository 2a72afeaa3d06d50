"""The public functions, one way through each: check, choose a kernel, run it.

``attention`` is the verb; the definition it stands for is ``kernels/reference.py``, three stages in one body:
score the query against the keys, normalise the scores to weights, take the weighted sum of the values.

Letters: B batch, H query heads, Hkv key/value heads, Tq and Tk lengths, D width of query and key, Dv width of value.
Tensors are (*batch, heads, T, D); (T, D) is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from regard import _checks, _plan, _short
from regard._call import prepare
from regard.biases import Bias
from regard.kernels import reference
from regard.masks import Mask
from regard.normalizers import Normalizer, Softmax
from regard.scores import Dot, Score

_DOT = Dot()
_SOFTMAX = Softmax()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    score: Score | Any = _DOT,
    normalize: Normalizer = _SOFTMAX,
    bias: Bias | Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention: ``output_i = sum_j weights_ij value_j``, ``weights = normalize(score(query, key) + bias)``.

    query (*batch, H, Tq, D), key (*batch, Hkv, Tk, D), value (*batch, Hkv, Tk, Dv) -> (*batch, H, Tq, Dv) in the
    query's dtype; H is a multiple of Hkv. With the defaults this is scaled dot-product attention (Vaswani et al.,
    2017). ``mask``: what may meet (``regard.masks``, or a bool tensor, True = may attend). ``score``:
    ``regard.scores`` or a callable ``f(query, key) -> scores``. ``normalize``: ``regard.normalizers`` or a callable
    on rows. ``bias``: ``regard.biases`` or a tensor that broadcasts to (*batch, H, Tq, Tk). ``dropout_p``: the share
    of weights that is dropped, whenever it is not 0.

    A row that may attend to nothing gives 0. Memory is linear in Tq and Tk, forward and backward; with a callable of
    yours no more than one block of pairs is held at a time. A bias tensor or a bool mask is as large as you make it.
    Raises TypeError or ValueError that names the argument, what was expected, what came, and the way out.
    """
    if not torch.compiler.is_compiling():
        if torch._C._is_torch_function_mode_enabled():
            return _shown(query, key, value, mask, score, normalize, bias, dropout_p)
        short = _short.attend(query, key, value, mask, score, normalize, bias, dropout_p)
        if short is not None:
            return short
    call = prepare(query, key, value, mask, score, normalize, bias, dropout_p)
    output, _ = _plan.choose(call).run(call, False)
    return call.shaped(output)


def _shown(
    query: Any, key: Any, value: Any, mask: Any, score: Any, normalize: Any, bias: Any, p: Any
) -> Tensor:
    """A call inside a TorchFunctionMode is the mode's to see, as torch's own functions are (``regard.watch``)."""
    keywords = {"score": score, "normalize": normalize, "bias": bias, "dropout_p": p}
    shown: Tensor = handle_torch_function(attention, (), query, key, value, mask, **keywords)
    return shown


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    score: Score | Any = _DOT,
    normalize: Normalizer = _SOFTMAX,
    bias: Bias | Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``attention`` and the log-sum-exp of its scores, ``lse_i = log sum_j exp(scores_ij)``; differentiable in both.

    -> (output (*batch, H, Tq, Dv), lse (*batch, H, Tq), float32 or float64; -inf for a row that may attend to
    nothing). A sink counts in the lse. Softmax only (ValueError otherwise): no other normaliser has one.
    """
    if not isinstance(normalize, Softmax):
        _checks.wrong_value("normalize", "Softmax: no other normaliser has a log-sum-exp", normalize)
    call = prepare(query, key, value, mask, score, normalize, bias, dropout_p)
    output, lse = _plan.choose(call).run(call, True)
    return call.shaped(output), call.shaped(lse)


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    score: Score | Any = _DOT,
    normalize: Normalizer = _SOFTMAX,
    bias: Bias | Tensor | None = None,
) -> Tensor:
    """The weights themselves, (*batch, H, Tq, Tk), before dropout; differentiable.

    ``weights = normalize(score(query, key) + bias)`` over the allowed keys, 0 elsewhere, in the query's dtype. This is
    the definition and takes memory for every pair: for long inputs see ``observe``. Raises as ``attention`` does.
    """
    call = prepare(query, key, key, mask, score, normalize, bias)
    with _plan.without_autocast(query.device):
        return call.shaped(reference.weigh(call))


def merge(
    outputs: Sequence[Tensor], lses: Sequence[Tensor], sink: float | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over pieces of the keys, made one: ``output = sum_n exp(lse_n - lse) output_n``.

    ``lse = log sum_n exp(lse_n)``.

    outputs: (*batch, H, Tq, Dv) each, lses: (*batch, H, Tq) each, as ``attention_with_lse`` gives them without a sink;
    ``sink`` (a number, 0-d or (H,)) is added here, once. Empty pieces (lse = -inf) count for nothing, a row with no
    piece is 0 with lse -inf. Gradients flow through outputs and lses. (Milakov and Gimelshein, 2018.)
    Raises ValueError where the pieces do not fit.
    """
    _checks.pieces(outputs, lses, sink)
    parts = torch.stack([lse.to(torch.promote_types(lse.dtype, torch.float32)) for lse in lses])
    peak = parts.detach().amax(0)
    empty = peak == -torch.inf
    if sink is not None:
        at_sink = torch.as_tensor(sink, dtype=parts.dtype, device=parts.device)
        at_sink = (at_sink[:, None] if at_sink.ndim and peak.ndim > 1 else at_sink).expand(peak.shape)
        peak = torch.maximum(peak, at_sink.detach())
    peak = peak.masked_fill(empty, 0.0)
    # exp(-inf) has gradient 0, -inf - -inf has none: empty pieces are cut off before the subtraction.
    shares = torch.where(parts == -torch.inf, 0.0, (parts.masked_fill(parts == -torch.inf, 0.0) - peak).exp())
    total = shares.sum(0)
    if sink is not None:
        total = total + (at_sink - peak).exp().masked_fill(empty, 0.0)
    safe = total.masked_fill(empty, 1.0)
    output = outputs[0].new_zeros(outputs[0].shape, dtype=parts.dtype)
    for share, piece in zip(shares, outputs, strict=True):
        output = output + torch.where(share[..., None] > 0, piece, 0.0) * (share / safe)[..., None]
    lse = (peak + safe.log()).masked_fill(empty, -torch.inf)
    return output.to(outputs[0].dtype), lse


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    score: Score | Any = _DOT,
    normalize: Normalizer = _SOFTMAX,
    bias: Bias | Tensor | None = None,
    dropout_p: float = 0.0,
) -> _plan.Plan:
    """What ``attention`` would do with these arguments: which kernel, why not the others, FLOPs and bytes.

    Tensors may be on the meta device: only shapes count. Raises as ``attention`` does.
    """
    return _plan.plan_of(prepare(query, key, value, mask, score, normalize, bias, dropout_p))
