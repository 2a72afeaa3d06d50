"""compat.MultiheadAttention: every mistake is named, and torch's own attention is never called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from regard import compat
from regard.compat import _multihead

x, PADS = torch.zeros(4, 2, 8), torch.zeros(2, 4)
HOSTILE: list[tuple[type[Exception], str, Any]] = [
    (ValueError, "embed_dim", lambda: compat.MultiheadAttention(0, 2)),
    (TypeError, "embed_dim", lambda: compat.MultiheadAttention(8.0, 2)),
    (ValueError, "num_heads: expected heads that divide", lambda: compat.MultiheadAttention(8, 3)),
    (ValueError, "num_heads", lambda: compat.MultiheadAttention(8, -2)),
    (ValueError, "kdim", lambda: compat.MultiheadAttention(8, 2, kdim=0)),
    (ValueError, "dropout", lambda: compat.MultiheadAttention(8, 2, dropout=1.5)),
    (TypeError, "dropout", lambda: compat.MultiheadAttention(8, 2, dropout="a lot")),
    (TypeError, "MultiheadAttention.of", lambda: compat.MultiheadAttention.of(nn.Linear(2, 2))),
    (ValueError, "key: expected kdim = 5", lambda: compat.MultiheadAttention(8, 2, kdim=5)(x, x, x)),
    (ValueError, "query: expected embed_dim = 8", lambda: call(query=x[..., :7])),
    (ValueError, "query", lambda: call(query=x[None])),
    (ValueError, "key", lambda: call(key=x[0])),
    (TypeError, "value: expected a tensor", lambda: call(value=None)),
    (ValueError, "value: expected as many tokens", lambda: call(value=x[:3])),
    (
        ValueError,
        "key: expected as many samples.*batch_first is False",
        lambda: call(key=x[:, :1], value=x[:, :1]),
    ),
    (TypeError, "attn_mask.*mask.bool", lambda: call(attn_mask=torch.zeros(4, 4, dtype=torch.int64))),
    (TypeError, "attn_mask", lambda: call(attn_mask="causal")),
    (
        ValueError,
        r"attn_mask: expected shape \(4, 4\) or \(4, 4, 4\)",
        lambda: call(attn_mask=torch.zeros(4, 5)),
    ),
    (ValueError, "attn_mask", lambda: call(attn_mask=torch.zeros(2, 4, 4))),
    (ValueError, "attn_mask", lambda: call(attn_mask=torch.zeros(2, 2, 4, 4))),
    (
        ValueError,
        r"key_padding_mask: expected shape \(2, 4\)",
        lambda: call(key_padding_mask=torch.zeros(4, 2)),
    ),
    (TypeError, "key_padding_mask", lambda: call(key_padding_mask=torch.zeros(2, 4, dtype=torch.uint8))),
    (TypeError, "attn_mask.*to_dense", lambda: call(attn_mask=torch.eye(4).to_sparse())),
    (
        ValueError,
        "key_padding_mask: expected a tensor on cpu",
        lambda: call(key_padding_mask=PADS.to("meta")),
    ),
    (ValueError, "query: expected a tensor on cpu", lambda: call(query=x.to("meta"))),
    (ValueError, "is_causal.*mask=Causal", lambda: call(is_causal=True)),
    (
        ValueError,
        "key_padding_mask",
        lambda: call(x[:, 0], x[:, 0], x[:, 0], key_padding_mask=torch.zeros(1, 4)),
    ),
    (TypeError, "query: expected float32", lambda: call(query=x.long())),
    (TypeError, "value: expected float32", lambda: call(value=x.double())),
]


def call(query: Any = x, key: Any = x, value: Any = x, **given: Any) -> Any:
    return compat.MultiheadAttention(8, 2)(query, key, value, **given)


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_mistakes_are_named(number: int) -> None:
    kind, message, mistake = HOSTILE[number]
    with pytest.raises(kind, match=message):
        mistake()


def test_nothing_of_torchs_attention_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("torch's own attention was called")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    monkeypatch.setattr(torch.nn.functional, "multi_head_attention_forward", refuse)
    monkeypatch.setattr(torch, "_native_multi_head_attention", refuse)
    assert call()[1] is not None
    assert _multihead.MultiheadAttention is compat.MultiheadAttention
