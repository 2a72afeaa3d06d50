"""Jagged nested tensors through compat: equal to every sample by itself, nested like the query, gradients and all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import attention, compat
from regard.biases import Alibi
from regard.masks import Causal, Padding, Window
from regard.normalizers import Sparsemax
from regard.scores import Additive

H, Hkv, D, Dv = 4, 2, 8, 6


def jagged(lengths: list[int], heads: int, width: int) -> Tensor:
    """(B, heads, j, width) with gradient, as one gets it from (B, j, heads * width)."""
    samples = [torch.randn(n, heads * width, dtype=torch.float64) for n in lengths]
    x = torch.nested.nested_tensor(samples, layout=torch.jagged, requires_grad=True)
    x.retain_grad()
    return x.unflatten(-1, (heads, width)).transpose(1, 2)


def triple(rows: list[int], keys: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    k = jagged(keys, Hkv, D)
    v = torch.nested.nested_tensor_from_jagged(
        torch.randn(sum(keys), Hkv, Dv, dtype=torch.float64, requires_grad=True), k.transpose(1, 2).offsets()
    )
    return jagged(rows, H, D), k, v.transpose(1, 2)


# Lengths of queries and of keys, how all are called, and what stands in it for sample b instead.
CASES: list[tuple[list[int], list[int], dict[str, Any], Any]] = [
    ([3, 0, 5], [3, 0, 5], {}, lambda b: {}),
    ([3, 2, 5], [4, 0, 2], {}, lambda b: {}),
    ([3, 2, 5], [4, 1, 7], {"mask": Causal("lower_right"), "normalize": Sparsemax()}, lambda b: {}),
    ([2, 2], [5, 5], {"mask": Window(1, 0, "lower_right"), "bias": Alibi()}, lambda b: {}),
    (
        [3, 4],
        [3, 4],
        {"mask": Causal() & Padding(torch.tensor([2, 4])), "score": Additive(torch.ones(D).double())},
        lambda b: {"mask": Causal() & Padding((2, 4)[b])},
    ),
]


@pytest.mark.parametrize(("rows", "keys", "how", "own"), CASES)
def test_each_sample_by_itself(rows: list[int], keys: list[int], how: dict[str, Any], own: Any) -> None:
    q, k, v = triple(rows, keys)
    output = compat.nested_attention(q, k, v, **how)
    assert output.is_nested and output.layout == torch.jagged and output.shape[1] == H
    assert (output.transpose(1, 2) + q.transpose(1, 2)[..., :Dv]).shape[0] == len(
        rows
    )  # jagged like the query
    for b, got in enumerate(output.unbind()):
        sample = [tensor.unbind()[b][None] for tensor in (q, k, v)]
        torch.testing.assert_close(got, attention(*sample, **{**how, **own(b)})[0], atol=1e-12, rtol=0)


def test_gradients_reach_the_nested_inputs() -> None:
    samples = [torch.randn(n, H * D, dtype=torch.float64) for n in (3, 0, 4)]
    x = torch.nested.nested_tensor(samples, layout=torch.jagged, requires_grad=True)
    heads = x.unflatten(-1, (H, D)).transpose(1, 2)
    compat.scaled_dot_product_attention(heads, heads, heads, is_causal=True).values().sin().sum().backward()
    for got, sample in zip(x.grad.unbind(), samples, strict=True):
        alone = sample.clone().requires_grad_()
        one = alone.unflatten(-1, (H, D)).transpose(0, 1)[None]
        expected = F.scaled_dot_product_attention(one, one, one, is_causal=True)
        torch.testing.assert_close(
            got, torch.autograd.grad(expected.sin().sum(), alone)[0], atol=1e-12, rtol=0
        )


def test_traces_whole() -> None:
    """Forward only: torch cannot yet trace the gradient of anything that ends in a nested leaf."""

    def attend(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (H, D)).transpose(1, 2)
        return compat.nested_attention(heads, heads, heads, Causal(), bias=Alibi())

    samples = [torch.randn(n, H * D) for n in (3, 5)]
    x = torch.nested.nested_tensor(samples, layout=torch.jagged)
    got = torch.compile(attend, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got.values(), attend(x).values())
    torch._dynamo.reset()


def test_a_narrowed_view_is_taken() -> None:
    dense = torch.randn(3, 6, H, D, dtype=torch.float64)
    start, length = torch.tensor([0, 1, 2]), torch.tensor([2, 5, 4])
    x = torch.nested.narrow(dense, 1, start, length, layout=torch.jagged).transpose(1, 2)
    output = compat.scaled_dot_product_attention(x, x, x)
    for b, got in enumerate(output.unbind()):
        one = dense[b, start[b] : start[b] + length[b]].transpose(0, 1)[None]
        torch.testing.assert_close(got, F.scaled_dot_product_attention(one, one, one)[0], atol=1e-12, rtol=0)


def test_multihead_takes_nested_tensors_as_torch_does() -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    ours = compat.MultiheadAttention.of(theirs)
    samples = [torch.randn(n, 16) for n in (3, 5)]
    x = torch.nested.nested_tensor(samples, layout=torch.jagged)
    for average in (True, False):
        output, weights = ours(x, x, x, average_attn_weights=average)
        assert output.layout == torch.jagged and (output + x).is_nested
        for b, sample in enumerate(samples):
            with torch.no_grad():
                expected, own = theirs(sample, sample, sample, average_attn_weights=average)
            torch.testing.assert_close(output.unbind()[b], expected, atol=1e-6, rtol=0)
            n = sample.shape[0]
            torch.testing.assert_close(weights[b, ..., :n, :n], own, atol=1e-6, rtol=0)
            assert not weights[b, ..., n:, :].any() and not weights[b, ..., n:].any()


def test_multihead_trains_on_nested_tensors() -> None:
    ours = compat.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    samples = [torch.randn(n, 16, dtype=torch.float64) for n in (3, 5)]
    others = [torch.randn(n, 16, dtype=torch.float64) for n in (4, 1)]
    x, y = (
        torch.nested.nested_tensor(each, layout=torch.jagged, requires_grad=True)
        for each in (samples, others)
    )
    output = ours(x, y, y, need_weights=False)[0]
    got = torch.autograd.grad(output.values().sin().sum(), (x, y, ours.in_proj_weight))
    alone = [
        ours(a[None], b[None], b[None], need_weights=False)[0][0]
        for a, b in zip(samples, others, strict=True)
    ]
    torch.testing.assert_close(output.values(), torch.cat(alone), atol=1e-12, rtol=0)
    expected = torch.autograd.grad(torch.cat(alone).sin().sum(), ours.in_proj_weight)[0]
    torch.testing.assert_close(got[2], expected, atol=1e-12, rtol=0)
    assert got[0].values().abs().sum() > 0 and got[1].values().abs().sum() > 0


flat = torch.nested.nested_tensor([torch.zeros(3, 16), torch.zeros(2, 16)], layout=torch.jagged)
single = flat.unflatten(-1, (1, 16)).transpose(1, 2)
turned = torch.nested.nested_tensor([torch.zeros(2, 16), torch.zeros(3, 16)], layout=torch.jagged)
x4 = flat.unflatten(-1, (2, 8)).transpose(1, 2)
other = torch.nested.nested_tensor(
    [torch.zeros(1, 2, 8), torch.zeros(2, 2, 8)], layout=torch.jagged
).transpose(1, 2)
dense = torch.zeros(2, 2, 3, 8)
HOSTILE: list[tuple[type[Exception], str, Any]] = [
    (ValueError, "query.*unflatten", lambda: compat.nested_attention(flat, flat, flat)),
    (ValueError, "query.*transpose", lambda: compat.nested_attention(*[x4.transpose(1, 2)] * 3)),
    (TypeError, "key: expected a nested tensor", lambda: compat.nested_attention(x4, dense, dense)),
    (TypeError, "value: expected a nested tensor", lambda: compat.nested_attention(x4, x4, None)),
    (ValueError, "value: expected samples as long", lambda: compat.nested_attention(x4, x4, other)),
    (ValueError, "mask", lambda: compat.nested_attention(x4, x4, x4, Padding.of(torch.ones(2, 3).bool()))),
    (
        ValueError,
        "attn_mask",
        lambda: compat.scaled_dot_product_attention(x4, x4, x4, torch.ones(3, 3).bool()),
    ),
    (ValueError, "key_padding_mask", lambda: module()(flat, flat, flat, torch.zeros(2, 3))),
    (ValueError, "batch_first", lambda: module(False)(flat, flat, flat)),
    (TypeError, "key: expected a nested tensor", lambda: module()(flat, torch.zeros(2, 3, 16), flat)),
    (TypeError, "nested_attention", lambda: compat_varlen(x4)),
    (ValueError, "value: expected samples as long", lambda: module()(flat, flat, turned)),
    (
        ValueError,
        "heads: expected as many.*enable_gqa=True",
        lambda: compat.scaled_dot_product_attention(x4, single, single),
    ),
]


def module(batch_first: bool = True) -> nn.Module:
    return compat.MultiheadAttention(16, 2, batch_first=batch_first)


def compat_varlen(x: Tensor) -> Tensor:
    from regard._varlen import varlen_attention

    edges = torch.tensor([0, 3, 5])
    return varlen_attention(x, x, x, edges, edges)


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_mistakes_are_named(number: int) -> None:
    kind, message, mistake = HOSTILE[number]
    with pytest.raises(kind, match=message):
        mistake()
