"""compat.MultiheadAttention: empty rows, the causal hint, masks long enough to be scanned."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from regard import compat
from tests.compat.twins import twins


@pytest.mark.parametrize("form", [torch.bool, torch.float64])
@pytest.mark.parametrize("through", ["key_padding_mask", "attn_mask"])
def test_an_empty_row_is_zero_where_torch_is_nan(form: torch.dtype, through: str) -> None:
    theirs, ours = twins(embed_dim=8, num_heads=2, batch_first=True, dtype=torch.float64)
    for module in (theirs, ours):
        nn.init.normal_(module.out_proj.bias)
    closed = torch.zeros((2, 4) if through == "key_padding_mask" else (4, 4), dtype=torch.bool)
    closed[1] = True
    mask = (
        closed
        if form == torch.bool
        else torch.zeros(closed.shape, dtype=form).masked_fill(closed, -torch.inf)
    )
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    output, weights = ours(x, x, x, **{through: mask})
    assert theirs(x, x, x, **{through: mask})[0].isnan().any()
    empty = (slice(1, 2), slice(None)) if through == "key_padding_mask" else (slice(None), slice(1, 2))
    assert (output[empty] == ours.out_proj.bias).all() and not weights[empty].any()
    given = {through: mask, "need_weights": False}
    expected = theirs(x, x, x, **given)[0]
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    for one, two in zip(
        torch.autograd.grad(output.sin().sum(), (x, ours.in_proj_weight)),
        torch.autograd.grad(expected.sin().sum(), (x, theirs.in_proj_weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, two, atol=1e-12, rtol=0)


def test_the_causal_hint_is_torchs() -> None:
    theirs, ours = twins(embed_dim=8, num_heads=2)
    x = torch.randn(5, 2, 8)
    wrong = torch.zeros(5, 5, dtype=torch.bool)  # the hint wins where torch lets it win
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    hinted = ours(x, x, x, attn_mask=wrong, is_causal=True, need_weights=False)[0]
    torch.testing.assert_close(hinted, theirs(x, x, x, attn_mask=causal)[0], atol=1e-6, rtol=0)
    for given in (
        {"need_weights": True},
        {"key_padding_mask": torch.zeros(2, 5, dtype=torch.bool), "need_weights": False},
    ):
        got = ours(x, x, x, attn_mask=wrong, is_causal=True, **given)[0]
        torch.testing.assert_close(got, theirs(x, x, x)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("more", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_the_causal_hint_hides_no_added_key(more: dict[str, bool]) -> None:
    """torch hides the keys that it added itself from every query where the hint decides, and shows them elsewhere."""
    theirs, ours = twins(embed_dim=8, num_heads=2, dtype=torch.float64, **more)
    x, causal = torch.randn(5, 2, 8, dtype=torch.float64), torch.ones(5, 5, dtype=torch.bool).triu(1)
    asked, plain = (
        theirs(x, x, x, attn_mask=causal, is_causal=True, need_weights=n)[0] for n in (True, False)
    )
    assert (asked - plain).abs().max() > 1e-3
    for need_weights in (True, False):
        got = ours(x, x, x, attn_mask=causal, is_causal=True, need_weights=need_weights)[0]
        torch.testing.assert_close(got, asked, atol=1e-12, rtol=0)


# ---------------------------------------------------------------------------- masks that are long enough to be scanned


def long_masks(T: int, B: int, H: int) -> Iterator[tuple[str, Tensor]]:
    i, j = torch.arange(T)[:, None], torch.arange(T)
    yield "causal", j > i
    yield "window", (j > i) | (j < i - 7)
    yield "outside of a window", ((j <= i) & (j > i - 7)) | ((i == 0) & (j == 0))
    yield "prefix and window", ((j > i) | (j < i - 7)) & (j >= 5)
    yield "random", (torch.rand(T, T) < 0.5) & (j != 0)
    yield "random heads", (torch.rand(B * H, T, T) < 0.5) & (j != 0)
    yield "causal heads", (j > i + torch.arange(B * H)[:, None, None]).clone()


@pytest.mark.parametrize("padding", ["none", "bool", "blocks", "adds"])
@pytest.mark.parametrize("form", [torch.bool, torch.float64])
def test_long_masks_of_every_form(form: torch.dtype, padding: str) -> None:
    B, H, T = 2, 2, 72
    theirs, ours = twins(embed_dim=4, num_heads=H, batch_first=True, dtype=torch.float64, add_zero_attn=True)
    x = torch.randn(B, T, 4, dtype=torch.float64, requires_grad=True)
    keys = torch.rand(B, T) < 0.3
    keys[:, 0] = False
    added = (
        torch.randn(B, T, dtype=torch.float64)
        if padding == "adds"
        else torch.zeros(B, T, dtype=torch.float64)
    )
    pads = {"none": None, "bool": keys}.get(padding, added.masked_fill(keys, -torch.inf))
    for name, closed in long_masks(T, B, H):
        mask = (
            closed
            if form == torch.bool
            else torch.zeros(closed.shape, dtype=form).masked_fill(closed, -torch.inf)
        )
        found = []
        for module in (ours, theirs):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask")
                output = module(x, x, x, attn_mask=mask, key_padding_mask=pads, need_weights=False)[0]
            found.append((output, *torch.autograd.grad(output.sin().sum(), (x, module.in_proj_weight))))
        for got, expected in zip(*found, strict=True):
            torch.testing.assert_close(
                got, expected, atol=1e-12, rtol=0, msg=lambda m, name=name: f"{name}: {m}"
            )


def test_masks_are_not_written_to() -> None:
    ours = compat.MultiheadAttention(8, 2)
    x, closed = torch.randn(70, 1, 8), torch.ones(70, 70, dtype=torch.bool).triu(1)
    mask = torch.zeros(70, 70).masked_fill(closed, -torch.inf)
    pads = torch.zeros(1, 70, dtype=torch.bool)
    before = [t.clone() for t in (x, closed, mask, pads)]
    for given in (closed, mask):
        ours(x, x, x, attn_mask=given, key_padding_mask=pads)
    assert all(torch.equal(one, two) for one, two in zip((x, closed, mask, pads), before, strict=True))


@pytest.mark.parametrize("more", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize(("B", "Tq", "Tk"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0)])
def test_nothing_to_attend(B: int, Tq: int, Tk: int, more: dict[str, bool]) -> None:
    theirs, ours = twins(embed_dim=8, num_heads=2, batch_first=True, **more)
    q, k = torch.randn(B, Tq, 8), torch.randn(B, Tk, 8)
    for given in ({}, {"need_weights": False}):
        for one, two in zip(ours(q, k, k, **given), theirs(q, k, k, **given), strict=True):
            assert (one is None) == (two is None)
            if one is not None:
                torch.testing.assert_close(one, two, atol=1e-6, rtol=0)
