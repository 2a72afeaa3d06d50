"""The attention function that models call: what they say in keyword arguments, said to ``regard.attention``.

Letters: B batch, H query heads, Hkv key heads, Tq and Tk lengths, D width of query and key, Dv of the value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.utils.output_capturing import _active_collector

from regard import attention, attention_weights
from regard._checks import words, wrong_value
from regard.integrations.transformers_tensor import MaskTensor
from regard.masks import Causal, Mask
from regard.normalizers import Softmax
from regard.scores import Dot

# What some models pass and other implementations understand; left out, it would change the numbers.
_NOT_TAKEN = {
    "indices": "the keys that an indexer chose",
    "block_indices": "the blocks of keys that an indexer chose",
    "sinks": "a sink for each query",
    "head_mask": "a factor for each head",
    "layer_head_mask": "a factor for each head",
    "block_table": "a paged cache",
}
_EAGER = 'Load this model with attn_implementation="eager".'


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one module: query (B, H, Tq, D), key (B, Hkv, Tk, D), value (B, Hkv, Tk, Dv).

    -> output (B, Tq, H, Dv), and the weights (B, H, Tq, Tk), before dropout, where the caller of the model asked for
    ``output_attentions``, else None. ``attention_mask``: a ``MaskTensor``, a bool tensor (True: may attend), a float
    tensor that is added to the scores, or None: causal where ``is_causal``, or else the module, says so. Dropout only
    while the module trains. Raises ValueError for a mask or an argument that it cannot take.
    """
    _refuse(query, kwargs)
    mask: Mask | Tensor | None
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
        packed = kwargs.get("cu_seq_lens_q") is not None
        mask, bias = _without_mask(query.shape[-2], key.shape[-2], causal, sliding_window, packed), None
    else:
        mask, bias = _of_mask(attention_mask, query.shape[-2], key.shape[-2])
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    mechanism: dict[str, Any] = {
        "score": Dot(scaling, softcap),
        "normalize": Softmax(s_aux),
        "mask": mask,
        "bias": bias,
    }
    p = dropout if getattr(module, "training", False) else 0.0
    output = attention(query, key, value, **mechanism, dropout_p=p)
    weights = attention_weights(query, key, **mechanism) if _weights_wanted(kwargs) else None
    return output.transpose(1, 2).contiguous(), weights


def _refuse(query: Tensor, kwargs: dict[str, Any]) -> None:
    for name, meaning in _NOT_TAKEN.items():
        if kwargs.get(name) is not None:
            wrong_value(name, f"None: {meaning} cannot be given", kwargs[name], _EAGER)
    if query.ndim != 4:
        wrong_value("query", "(B, H, Tq, D)", query, _EAGER)


def _weights_wanted(kwargs: dict[str, Any]) -> bool:
    """Whether the caller of the model asked for weights: some models say so here, the others collect them by hooks."""
    if kwargs.get("output_attentions"):
        return True
    collected = _active_collector.get()
    return collected is not None and any("attentions" in name for name in collected)


def _without_mask(Tq: int, Tk: int, causal: bool, sliding_window: int | None, packed: bool) -> Mask | None:
    """The mask of a module that was given none: all keys, or those before the query where it is causal."""
    way_out = "Give the module a mask, or call the model that it is part of."
    if packed:
        wrong_value(
            "attention_mask", "a mask beside packed sequences", words("None with cu_seq_lens_q"), way_out
        )
    if sliding_window is not None and Tk > sliding_window:
        window = f"None with Tk = {Tk}"
        wrong_value(
            "attention_mask", f"a mask where a window of {sliding_window} counts", words(window), way_out
        )
    if not causal or Tq == 1:
        return None
    if Tq != Tk:
        wrong_value(
            "attention_mask", "a mask where Tq != Tk", words(f"None with Tq = {Tq}, Tk = {Tk}"), way_out
        )
    return Causal("upper_left")


def _of_mask(given: Any, Tq: int, Tk: int) -> tuple[Mask | Tensor | None, Tensor | None]:
    """What a model hands on as a mask: a mask, or a bias."""
    expected = "a bool tensor (True: may attend) or a float tensor that is added, (B, heads, Tq, Tk)"
    if not isinstance(given, Tensor):
        wrong_value("attention_mask", expected, given, _EAGER)
    if given.ndim != 4 or given.dtype != torch.bool and not given.is_floating_point():
        wrong_value("attention_mask", expected, given, _EAGER)
    if given.shape[-1] not in (1, Tk) or given.shape[-2] not in (1, Tq):
        wrong_value("attention_mask", f"one that broadcasts to (..., {Tq}, {Tk})", given)
    if isinstance(given, MaskTensor) and given.changed():
        given = given.written()
    if isinstance(given, MaskTensor):
        return (given.mask if given.shape[-2:] == (Tq, Tk) else given.allowed()), None
    return (given, None) if given.dtype == torch.bool else (None, given)
