"""Pieces of the keys, attended to apart and merged, are attention over all of them, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import attention_with_lse, merge
from regard._plan import use_kernel
from regard.biases import Alibi, Relative
from regard.masks import Causal, Dense, Prefix, Window
from regard.normalizers import Softmax
from regard.scores import Additive, Cosine, Dot

B, H, HKV, TQ, TK, D, DV = 2, 4, 2, 5, 11, 6, 3


def randn(seed: int, *shape: int) -> Tensor:
    made = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


Q, K, V = randn(1, B, H, TQ, D), randn(2, B, HKV, TK, D), randn(3, B, HKV, TK, DV)
BLOCKED = torch.rand(B, H, TQ, TK, generator=torch.Generator().manual_seed(0)) > 0.5
BLOCKED[1, 2, 3] = False


def loss(output: Tensor, lse: Tensor) -> Tensor:
    """Depends on both, in rows that see something."""
    return output.sin().sum() + lse[lse > -torch.inf].cos().sum()


def same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], leaves: list[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(
        torch.autograd.grad(loss(*one), leaves, retain_graph=True),
        torch.autograd.grad(loss(*other), leaves, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def pieces(cuts: list[int], mask: Any, keywords: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Each piece with its own part of the mask, standing where it stood."""
    edges = [0, *sorted(cuts), TK]
    found = []
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        found.append(
            attention_with_lse(Q, K[:, :, start:stop], V[:, :, start:stop], mask(start, stop), **keywords)
        )
    return found


def _dense(start: int, stop: int) -> Any:
    return BLOCKED[..., start:stop]


@settings(max_examples=40)
@given(st.lists(st.integers(0, TK), max_size=5), st.sampled_from([None, 0.7, "a head"]))
def test_any_cuts_with_and_without_a_sink(cuts: list[int], sink: Any) -> None:
    sink = randn(4, H) if sink == "a head" else sink
    parts = pieces(cuts, _dense, {})
    merged = merge([part[0] for part in parts], [part[1] for part in parts], sink)
    whole = attention_with_lse(Q, K, V, BLOCKED, normalize=Softmax(sink))
    same(merged, whole, [Q, K, V] + ([sink] if isinstance(sink, Tensor) else []))


def _causal(start: int, stop: int) -> Any:
    return Causal(offset=TK - TQ - start)


def _window(start: int, stop: int) -> Any:
    return Window(3, 0, offset=TK - TQ - start) | Prefix(min(max(2 - start, 0), stop - start))


@pytest.mark.parametrize("kernel", ["reference", "tiled", "inline"])
@pytest.mark.parametrize("mask", [_causal, _window], ids=["causal", "window or prefix"])
def test_pieces_stand_where_they_stood(kernel: str, mask: Any) -> None:
    with use_kernel(kernel):
        parts = pieces([2, 3, 9], mask, {"score": Dot(0.4, softcap=3.0)})
        whole = attention_with_lse(Q, K, V, mask(0, TK), score=Dot(0.4, softcap=3.0))
    same(merge([part[0] for part in parts], [part[1] for part in parts]), whole, [Q, K, V])


def test_position_biases_stand_where_they_stood() -> None:
    table = randn(5, H, 5)
    for make in (lambda offset: Alibi(offset=offset), lambda offset: Relative(table, offset=offset)):
        whole = attention_with_lse(Q, K, V, bias=make(TK - TQ))
        parts = []
        for start, stop in ((0, 4), (4, TK)):
            bias = make(TK - TQ - start)
            parts.append(attention_with_lse(Q, K[:, :, start:stop], V[:, :, start:stop], bias=bias))
        same(merge([part[0] for part in parts], [part[1] for part in parts]), whole, [Q, K, V])


@pytest.mark.parametrize(
    "score", [Additive(torch.linspace(-1, 1, D)), Cosine(5.0)], ids=["additive", "cosine"]
)
def test_other_scores_merge_too(score: Any) -> None:
    parts = pieces([6], _dense, {"score": score})
    whole = attention_with_lse(Q, K, V, BLOCKED, score=score)
    same(merge([part[0] for part in parts], [part[1] for part in parts]), whole, [Q, K, V])


def test_merging_is_associative_and_orderless() -> None:
    parts = pieces([3, 7], _dense, {})
    outputs, lses = [part[0] for part in parts], [part[1] for part in parts]
    step = merge(outputs[:2], lses[:2])
    for other in (
        merge([step[0], outputs[2]], [step[1], lses[2]]),
        merge(outputs[::-1], lses[::-1]),
        merge(outputs, lses),
    ):
        same(other, attention_with_lse(Q, K, V, BLOCKED), [Q, K, V])


def test_one_piece_is_itself_and_sequences_may_be_tuples() -> None:
    output, lse = attention_with_lse(Q, K, V, BLOCKED)
    same(merge((output,), (lse,)), (output, lse), [Q, K, V])


def test_rows_that_no_piece_sees_are_empty_rows_also_with_a_sink() -> None:
    output, lse = attention_with_lse(Q, K, V, BLOCKED)
    for sink in (None, 0.0, randn(6, H)):
        merged, total = merge([output, output], [lse, lse], sink)
        assert not merged[1, 2, 3].any() and total[1, 2, 3] == -torch.inf
        grads = torch.autograd.grad(merged.sum(), (Q, K, V), retain_graph=True)
        assert all(torch.isfinite(grad).all() for grad in grads) and not grads[0][1, 2, 3].any()


def test_an_empty_piece_counts_for_nothing_whatever_its_output_holds() -> None:
    output, lse = attention_with_lse(Q, K, V, Dense(BLOCKED) | Prefix(1))
    nothing = torch.full_like(output, torch.nan).requires_grad_()
    merged, total = merge([nothing, output], [torch.full_like(lse, -torch.inf), lse])
    same((merged, total), (output, lse), [Q, K, V])
    (grad,) = torch.autograd.grad(merged.sum(), nothing, retain_graph=True)
    assert not grad.any()


def test_no_keys_no_rows_no_width() -> None:
    for q, k, v in (
        (Q[:, :, :0], K, V),
        (Q, K[:, :, :0], V[:, :, :0]),
        (Q, K, V[..., :0]),
        (Q[:0], K[:0], V[:0]),
    ):
        part = attention_with_lse(q, k, v)
        merged, total = merge([part[0]] * 2, [part[1]] * 2, sink=0.5)
        assert merged.shape == part[0].shape and total.shape == part[1].shape
        assert bool(torch.isfinite(merged).all())


def test_large_scores_neither_overflow_nor_vanish() -> None:
    for size in (1e4, -1e4):
        output = torch.ones(1, 1, 1, 1)
        lses = [torch.full((1, 1, 1), size), torch.full((1, 1, 1), size + 1)]
        merged, total = merge([output, 3 * output], lses)
        share = torch.tensor(1.0).sigmoid()
        torch.testing.assert_close(merged, (1 + 2 * share).view(1, 1, 1, 1))
        torch.testing.assert_close(total, torch.full((1, 1, 1), size) + torch.tensor([0.0, 1.0]).logsumexp(0))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("sink", [None, 0.2, "a head"])
def test_any_leading_dimensions(shape: tuple[int, ...], sink: Any) -> None:
    heads = shape[-1] if shape else 1
    sink = randn(7, heads) if sink == "a head" else sink
    q, k, v = randn(8, *shape, 4, 3), randn(9, *shape, 6, 3), randn(10, *shape, 6, 2)
    parts = [attention_with_lse(q, x, y) for x, y in zip(k.split(4, -2), v.split(4, -2), strict=True)]
    merged = merge([part[0] for part in parts], [part[1] for part in parts], sink)
    whole = attention_with_lse(q, k, v, normalize=Softmax(sink))
    for one, other in zip(merged, whole, strict=True):
        torch.testing.assert_close(one, other)


def test_half_precisions_are_merged_in_float32() -> None:
    k, v = K.detach(), V.detach()
    q = Q.detach()
    parts = [
        attention_with_lse(q.bfloat16(), k[:, :, cut].bfloat16(), v[:, :, cut].bfloat16())
        for cut in (slice(0, 5), slice(5, TK))
    ]
    merged, total = merge([part[0] for part in parts], [part[1] for part in parts])
    assert merged.dtype == torch.bfloat16 and total.dtype == torch.float32
    exact = attention_with_lse(*(x.bfloat16().double() for x in (q, k, v)))
    torch.testing.assert_close(total.double(), exact[1], rtol=1e-5, atol=1e-5)
    assert (merged.double() - exact[0]).norm() / exact[0].norm() < 6e-3
