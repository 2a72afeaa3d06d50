"""Attention on jagged nested tensors: (B, H, j, D), every sample with a length of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._checks import can_look, said, words, wrong_type, wrong_value
from regard._varlen import varlen_attention
from regard.masks import Mask
from regard.normalizers import Normalizer, Softmax
from regard.scores import Dot, Score

_DOT = Dot()
_SOFTMAX = Softmax()


def nested_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None = None,
    *,
    score: Score | Any = _DOT,
    normalize: Normalizer = _SOFTMAX,
    bias: Any = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """``regard.varlen_attention`` for those who keep their samples in a jagged nested tensor.

    query (B, H, jq, D), key (B, Hkv, jk, D), value (B, Hkv, jk, Dv), jagged in their third dimension (what
    ``.transpose(1, 2)`` makes of (B, j, H, D)) -> (B, H, jq, Dv), jagged like the query; gradients reach the nested
    inputs. Each sample attends within itself; ``mask`` and ``bias`` speak of positions within it. No padding is made.
    Raises TypeError or ValueError for tensors that are not jagged and samples that do not match, and as
    ``varlen_attention`` does.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _jagged(name, tensor)
    rows, cu_query = _packed("query", query)
    keys, cu_key = _packed("key", key)
    values, cu_value = _packed("value", value)
    if cu_value is not cu_key and can_look(cu_key) and not torch.equal(cu_value, cu_key):
        wrong_value("value", "samples as long as the key's", words("other lengths"))
    output = varlen_attention(
        rows,
        keys,
        values,
        cu_query,
        cu_key,
        mask,
        score=score,
        normalize=normalize,
        bias=bias,
        dropout_p=dropout_p,
    )
    return torch.nested.nested_tensor_from_jagged(output, cu_query).transpose(1, 2)


def any_nested(*tensors: Tensor) -> bool:
    """Whether one of them is a nested tensor."""
    return any(isinstance(tensor, Tensor) and tensor.is_nested for tensor in tensors)


def _jagged(name: str, tensor: Any) -> None:
    expected = "a nested tensor of layout torch.jagged, (B, H, j, D)"
    if not isinstance(tensor, Tensor):
        wrong_type(name, expected, tensor)
    if not tensor.is_nested or tensor.layout != torch.jagged:
        got = words(f"a nested tensor of layout {tensor.layout}" if tensor.is_nested else said(tensor))
        wrong_type(name, expected, got, "torch.nested.nested_tensor(list, layout=torch.jagged) makes one.")
    if tensor.ndim != 4 or tensor._ragged_idx != 2:  # type: ignore[attr-defined]
        way_out = "Split the heads off with unflatten(-1, (H, D)), then .transpose(1, 2)."
        wrong_value(
            name, expected + ", jagged in its third dimension", words(f"shape {tuple(tensor.shape)}"), way_out
        )


def _packed(name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens one behind the other, (total, H, D), and where each sample begins, (B + 1,)."""
    lines = tensor.transpose(1, 2)
    if lines.lengths() is not None:  # type: ignore[attr-defined]
        lines = lines.contiguous()
    return lines.values(), lines.offsets()  # type: ignore[attr-defined]


def padded(name: str, tensor: Any) -> tuple[Tensor, Tensor]:
    """Nested samples (B, j, E), strided or jagged, as (B, T, E) with zeros behind, and their lengths (B,)."""
    if not isinstance(tensor, Tensor) or not tensor.is_nested or tensor.ndim != 3:
        got = words(f"a nested tensor of {tensor.ndim} dimensions") if any_nested(tensor) else tensor
        wrong_type(name, "a nested tensor (B, j, features), as the others are", got)
    samples = tensor.unbind()
    lengths = torch.tensor([sample.shape[0] for sample in samples], device=tensor.device)
    return torch.nn.utils.rnn.pad_sequence(list(samples), batch_first=True), lengths


def renested(tensor: Tensor, like: Tensor) -> Tensor:
    """(B, T, E) as a nested tensor of the lengths and the layout of another one."""
    samples = [sample[: own.shape[0]] for sample, own in zip(tensor, like.unbind(), strict=True)]
    if like.layout == torch.jagged and like.lengths() is None:  # type: ignore[attr-defined]
        offsets: Tensor = like.offsets()  # type: ignore[attr-defined]
        return torch.nested.nested_tensor_from_jagged(torch.cat(samples), offsets)
    return torch.nested.as_nested_tensor(samples, layout=like.layout)
