"""The definition, against formulas written out row by row in plain torch: the whole language on every kernel."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import attention, attention_weights, attention_with_lse
from regard._plan import use_kernel
from regard.biases import Alibi, Relative
from regard.masks import Causal, Dense, Documents, Padding, Prefix, Rows, Rule, Window
from regard.normalizers import Entmax, Entmax15, Relu, Sigmoid, Softmax, Sparsemax
from regard.scores import Additive, Bilinear, Concat, Cosine, Distance, Dot, Modified
from tests.core import formulas

B, H, HKV, TQ, TK, D, DV = 2, 4, 2, 5, 7, 6, 3
OFFSET = TK - TQ
KERNELS = ("reference", "tiled", "inline")


def randn(seed: int, *shape: int) -> Tensor:
    made = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = randn(1, B, H, TQ, D), randn(2, B, HKV, TK, D), randn(3, B, HKV, TK, DV)
    with torch.no_grad():
        k[0, 1, 2] = 0.0  # a zero vector has no direction: cosine must say 0
    return q, k, v


def _cosine(q: Tensor, k: Tensor) -> Tensor:
    length = k.norm(dim=1) * q.norm()
    return torch.where(length > 0, k @ q / torch.where(length > 0, length, 1.0), 0.0)


S, W, WH = randn(4, H), randn(5, D, D), randn(6, H, D, D)
A, AH, C = randn(7, D), randn(8, H, D), randn(9, D)

SCORES: dict[str, tuple[Any, formulas.ScoreRow, list[Tensor]]] = {
    "dot": (Dot(), lambda q, k, h: k @ q / D**0.5, []),
    "dot 0.3": (Dot(0.3), lambda q, k, h: k @ q * 0.3, []),
    "dot 0": (Dot(0), lambda q, k, h: k @ q * 0, []),
    "dot -2": (Dot(-2), lambda q, k, h: k @ q * -2, []),
    "dot a head": (Dot(S), lambda q, k, h: k @ q * S[h], [S]),
    "dot soft-cap": (Dot(1.0, softcap=1.5), lambda q, k, h: 1.5 * torch.tanh(k @ q / 1.5), []),
    "dot a head soft-cap": (Dot(S, softcap=0.7), lambda q, k, h: 0.7 * torch.tanh(k @ q * S[h] / 0.7), [S]),
    "bilinear": (Bilinear(W), lambda q, k, h: k @ (W.T @ q), [W]),
    "bilinear a head": (Bilinear(WH, scale=-0.5), lambda q, k, h: -0.5 * (k @ (WH[h].T @ q)), [WH]),
    "concat": (Concat(A, C), lambda q, k, h: torch.cat([q.expand_as(k), k], 1) @ torch.cat([A, C]), [A, C]),
    "concat a head": (Concat(AH, C), lambda q, k, h: q @ AH[h] + k @ C, [AH, C]),
    "additive": (Additive(A), lambda q, k, h: torch.tanh(q + k) @ A, [A]),
    "additive a head": (Additive(AH), lambda q, k, h: torch.tanh(q + k) @ AH[h], [AH]),
    "cosine": (Cosine(3.0), lambda q, k, h: 3 * _cosine(q, k), []),
    "distance": (Distance(0.2), lambda q, k, h: -0.2 * (q - k).square().sum(1), []),
    "distance a head": (Distance(S), lambda q, k, h: -S[h] * (q - k).square().sum(1), [S]),
}

NORMALIZERS: dict[str, tuple[Any, formulas.NormalizeRow, list[Tensor]]] = {
    "softmax": (Softmax(), lambda s, h: formulas.softmax(s), []),
    "sink": (Softmax(sink=0.5), lambda s, h: formulas.softmax(s, 0.5), []),
    "sink a head": (Softmax(sink=S), lambda s, h: formulas.softmax(s, S[h]), [S]),
    "sparsemax": (Sparsemax(), lambda s, h: formulas.sparsemax(s), []),
    "entmax15": (Entmax15(), lambda s, h: formulas.entmax15(s), []),
    "entmax 1.2": (Entmax(1.2), lambda s, h: formulas.entmax(s, 1.2), []),
    "entmax 2.5": (Entmax(2.5), lambda s, h: formulas.entmax(s, 2.5), []),
    "sigmoid": (Sigmoid(), lambda s, h: 1 / (1 + (-s).exp()), []),
    "sigmoid a head": (Sigmoid(S), lambda s, h: 1 / (1 + (-s - S[h]).exp()), [S]),
    "relu": (Relu(), lambda s, h: torch.where(s > 0, s, 0.0), []),
}

BOOL = torch.rand(B, H, TQ, TK, generator=torch.Generator().manual_seed(0)) > 0.4
BOOL[0, 0, 3] = False
QIDS, KIDS = torch.tensor([[0, 0, 1, 1, 2], [5, 5, 5, 3, 3]]), torch.tensor([0, 0, 1, 1, 1, 5, 3])
KEEP = torch.tensor([[1, 1, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0]])
START, STOP = torch.tensor([0, 1, 2, 3, 6]), torch.tensor([[1, 4, 2, 7, 7], [7, 7, 7, 3, 6]])


def _position(i: int) -> int:
    return i + OFFSET


MASKS: dict[str, tuple[Any, formulas.Pair]] = {
    "none": (None, lambda b, h, i, j: True),
    "causal": (Causal("lower_right"), lambda b, h, i, j: j <= i + OFFSET),
    "causal upper left": (Causal("upper_left"), lambda b, h, i, j: j <= i),
    "causal a sample": (Causal(offset=torch.tensor([-2, 3])), lambda b, h, i, j: j <= i + (-2, 3)[b]),
    "window": (Window(2, 1, "lower_right"), lambda b, h, i, j: -2 <= j - i - OFFSET <= 1),
    "window behind": (Window(3, -1, offset=OFFSET), lambda b, h, i, j: -3 <= j - i - OFFSET <= -1),
    "window open": (Window(None, 2, "lower_right"), lambda b, h, i, j: j - i - OFFSET <= 2),
    "lengths": (Padding(torch.tensor([7, 0])), lambda b, h, i, j: j < (7, 0)[b]),
    "start and stop": (Padding(start=1, stop=torch.tensor([3, 6])), lambda b, h, i, j: 1 <= j < (3, 6)[b]),
    "tokens": (Padding.of(KEEP), lambda b, h, i, j: bool(KEEP[b, j])),
    "documents": (Documents(QIDS, KIDS), lambda b, h, i, j: bool(QIDS[b, i] == KIDS[j])),
    "prefix LM": (Causal("lower_right") | Prefix(4), lambda b, h, i, j: j <= i + OFFSET or j < 4),
    "prefix a sample": (Prefix(torch.tensor([0, 2])), lambda b, h, i, j: j < (0, 2)[b]),
    "rows": (Rows(START, STOP), lambda b, h, i, j: bool(START[i] <= j < STOP[b, i])),
    "bool": (BOOL, lambda b, h, i, j: bool(BOOL[b, h, i, j])),
    "bool a head": (Dense(BOOL[:1]), lambda b, h, i, j: bool(BOOL[0, h, i, j])),
    "bool a sample": (BOOL[:, :1], lambda b, h, i, j: bool(BOOL[b, 0, i, j])),
    "bool a key": (BOOL[:, :1, :1], lambda b, h, i, j: bool(BOOL[b, 0, 0, j])),
    "bool rows": (BOOL[0, 0], lambda b, h, i, j: bool(BOOL[0, 0, i, j])),
    "rule": (Rule(lambda b, h, q, k: (b + h + q + k) % 3 != 0), lambda b, h, i, j: (b + h + i + j) % 3 != 0),
    "not": (
        ~Window(1, 1, "lower_right") & Padding(6),
        lambda b, h, i, j: not -1 <= j - i - OFFSET <= 1 and j < 6,
    ),
    "or": (Dense(BOOL) | Prefix(1), lambda b, h, i, j: bool(BOOL[b, h, i, j]) or j < 1),
    "three runs": (
        Window(0, 0, "lower_right") | Prefix(1) | Padding(start=6),
        lambda b, h, i, j: j == i + OFFSET or j < 1 or j >= 6,
    ),
}

TABLE, TABLES, FULL = randn(10, 5), randn(11, H, 3), randn(12, B, H, TQ, TK)
SLOPES = formulas.alibi_slopes(H)


def _clipped(distance: int, reach: int) -> int:
    return max(-reach, min(reach, distance)) + reach


BIASES: dict[str, tuple[Any, formulas.Pair, list[Tensor]]] = {
    "none": (None, lambda b, h, i, j: 0.0, []),
    "alibi": (Alibi(alignment="lower_right"), lambda b, h, i, j: -SLOPES[h] * abs(_position(i) - j), []),
    "slopes": (Alibi(S, "lower_right"), lambda b, h, i, j: -S[h] * abs(_position(i) - j), [S]),
    "relative": (
        Relative(TABLE, "lower_right"),
        lambda b, h, i, j: TABLE[_clipped(j - _position(i), 2)],
        [TABLE],
    ),
    "relative a head": (
        Relative(TABLES, offset=OFFSET),
        lambda b, h, i, j: TABLES[h, _clipped(j - _position(i), 1)],
        [TABLES],
    ),
    "tensor": (FULL, lambda b, h, i, j: FULL[b, h, i, j], [FULL]),
    "a key": (FULL[:, :1, :1], lambda b, h, i, j: FULL[b, 0, 0, j], [FULL]),
    "rows": (FULL[0, 0], lambda b, h, i, j: FULL[0, 0, i, j], [FULL]),
    "sum": (
        FULL[:1] + Alibi(0.5, "lower_right") + Relative(TABLE),
        lambda b, h, i, j: (
            FULL[0, h, i, j] - 0.5 * abs(_position(i) - j) + TABLE[_clipped(j - _position(i), 2)]
        ),
        [FULL, TABLE],
    ),
}

# Alignment is one for a call: masks that stand elsewhere go with biases that have none.
ALONE = ("causal upper left", "causal a sample")
PLACED = ("alibi", "slopes", "relative", "relative a head", "sum")
FLAT = [name for name in NORMALIZERS if not name.startswith("entmax ")]


Q, K, V = inputs()


def _gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    upstream = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).cos().view(output.shape)
    found = torch.autograd.grad(output, leaves, upstream, allow_unused=True)
    return [
        torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)
    ]


@functools.cache
def by_hand(score: str, normalize: str, mask: str, bias: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, weights and the gradients of all leaves, row by row."""
    output, weights = formulas.attend(
        Q, K, V, SCORES[score][1], NORMALIZERS[normalize][1], MASKS[mask][1], BIASES[bias][1]
    )
    grads = _gradients(output, leaves(score, normalize, bias)) if normalize in FLAT else []
    return output.detach(), weights.detach(), grads


def leaves(score: str, normalize: str, bias: str) -> list[Tensor]:
    return [Q, K, V, *SCORES[score][2], *NORMALIZERS[normalize][2], *BIASES[bias][2]]


def check(kernel: str, score: str, normalize: str, mask: str, bias: str) -> None:
    keywords = {
        "mask": MASKS[mask][0],
        "score": SCORES[score][0],
        "normalize": NORMALIZERS[normalize][0],
        "bias": BIASES[bias][0],
    }
    with use_kernel("inline" if mask == "rule" and kernel == "tiled" else kernel):
        output = attention(Q, K, V, **keywords)
    expected, weights, grads = by_hand(score, normalize, mask, bias)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(attention_weights(Q, K, **keywords), weights, rtol=1e-9, atol=1e-9)
    if grads:
        for one, other in zip(_gradients(output, leaves(score, normalize, bias)), grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("score", SCORES)
def test_scores(kernel: str, score: str) -> None:
    check(kernel, score, "softmax", "causal", "none")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("normalize", NORMALIZERS)
def test_normalizers(kernel: str, normalize: str) -> None:
    check(kernel, "dot -2", normalize, "bool", "none")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(kernel: str, mask: str) -> None:
    check(kernel, "dot", "softmax", mask, "none")


@pytest.mark.parametrize("mask", [name for name in MASKS if name != "rule"])
def test_masks_on_the_direct_kernel(mask: str) -> None:
    """It takes no grouped heads and no gradients."""
    q, k, v = Q.detach(), *(x.detach().repeat_interleave(2, 1) for x in (K, V))
    with use_kernel("direct"):
        output = attention(q, k, v, MASKS[mask][0])
    torch.testing.assert_close(output, by_hand("dot", "softmax", mask, "none")[0])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bias", BIASES)
def test_biases(kernel: str, bias: str) -> None:
    check(kernel, "dot", "softmax", "bool", bias)


@settings(max_examples=40)
@given(
    st.sampled_from(KERNELS),
    st.sampled_from(sorted(SCORES)),
    st.sampled_from(sorted(NORMALIZERS)),
    st.sampled_from(sorted(MASKS)),
    st.sampled_from(sorted(BIASES)),
)
def test_any_of_them_together(kernel: str, score: str, normalize: str, mask: str, bias: str) -> None:
    """Scale, soft-cap, bias, mask, normalise, in this order."""
    bias = "tensor" if mask in ALONE and bias in PLACED else bias
    check(kernel, score, normalize, mask, bias)


@pytest.mark.parametrize("mask", [name for name in MASKS if name not in ("none", "bool", "rule")])
def test_a_mask_writes_itself_out(mask: str) -> None:
    made, allowed = MASKS[mask]
    made = Dense(made) if isinstance(made, Tensor) else made
    expected = [
        [[[bool(allowed(b, h, i, j)) for j in range(TK)] for i in range(TQ)] for h in range(H)]
        for b in range(B)
    ]
    assert torch.equal(made.materialize(TQ, TK, batch=B, heads=H), torch.tensor(expected))


# ------------------------------------------------------------------ against what everybody has


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa(kernel: str, causal: bool) -> None:
    q, k, v = inputs()
    with use_kernel(kernel):
        output = attention(q, k, v, Causal("upper_left") if causal else None)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(output, expected)


def test_the_direct_kernel_is_sdpa_too() -> None:
    q, k, v = (x.detach() for x in inputs())
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    with use_kernel("direct"):
        output = attention(q, k, v, score=Dot(0.3))
    torch.testing.assert_close(output, F.scaled_dot_product_attention(q, k, v, scale=0.3))


def test_log_sum_exp() -> None:
    q, k, v = inputs()
    output, lse = attention_with_lse(q, k, v, BOOL, normalize=Softmax(S), bias=FULL)
    s = q @ k.repeat_interleave(2, 1).mT / D**0.5 + FULL
    s = s.masked_fill(~BOOL, -torch.inf)
    expected = (s.exp().sum(-1) + S.exp()[:, None]).log().masked_fill(~BOOL.any(-1), -torch.inf)
    torch.testing.assert_close(lse, expected)
    torch.testing.assert_close(output, attention(q, k, v, BOOL, normalize=Softmax(S), bias=FULL))


@pytest.mark.parametrize("heads", range(1, 34))
def test_alibi_slopes_follow_the_original_rule(heads: int) -> None:
    q = torch.zeros(1, heads, 1, 2)
    weights = attention_weights(q, torch.zeros(1, heads, 2, 2), bias=Alibi(alignment="upper_left"))
    slopes = (weights[0, :, 0, 0] / weights[0, :, 0, 1]).log()
    torch.testing.assert_close(slopes, torch.tensor(formulas.alibi_slopes(heads)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5_buckets_expand_to_a_table_by_distance(bidirectional: bool) -> None:
    T, heads, buckets, reach = 40, 2, 8, 20
    q, k = randn(20, 1, heads, T, 4), randn(21, 1, heads, T, 4)
    learned = randn(22, heads, buckets)
    by_distance = torch.tensor(
        [formulas.t5_bucket(d, buckets, reach, bidirectional) for d in range(-reach, reach + 1)]
    )
    weights = attention_weights(q, k, score=Dot(1.0), bias=Relative(learned[:, by_distance]))
    bucket = torch.tensor(
        [[formulas.t5_bucket(j - i, buckets, reach, bidirectional) for j in range(T)] for i in range(T)]
    )
    expected = torch.softmax(q @ k.mT + learned[:, bucket], -1)
    torch.testing.assert_close(weights, expected)
    for one, other in zip(
        torch.autograd.grad(weights.cos().sum(), (q, k, learned)),
        torch.autograd.grad(expected.cos().sum(), (q, k, learned)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_under_softmax_linear_concat_cannot_look_at_its_query() -> None:
    q, k, _ = inputs()
    weights = attention_weights(q, k, score=Concat(A, C))
    torch.testing.assert_close(weights, weights[:, :, :1].expand_as(weights))
    sigmoid = attention_weights(q, k, score=Concat(A, C), normalize=Sigmoid())
    assert not torch.allclose(sigmoid, sigmoid[:, :, :1].expand_as(sigmoid))


def test_dots_key_width_is_free_where_a_weight_says_so() -> None:
    q, k, v = randn(30, B, H, TQ, 4), randn(31, B, HKV, TK, 9), randn(32, B, HKV, TK, 2)
    weight, a, c = randn(33, 4, 9), randn(34, 4), randn(35, 9)
    spread = k.repeat_interleave(2, 1)
    for score, s in (
        (Bilinear(weight, scale=0.3), q @ weight @ spread.mT * 0.3),
        (Concat(a, c), (q @ a)[..., None] + (spread @ c)[..., None, :]),
    ):
        expected = torch.softmax(s, -1) @ v.repeat_interleave(2, 1)
        torch.testing.assert_close(attention(q, k, v, score=score), expected)


def test_modified_scores_are_changed_pair_by_pair() -> None:
    q, k, v = inputs()

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where((i + h) % 2 == 0, score * 2, score - b) + 0.1 * (j - i)

    output = attention(q, k, v, BOOL, score=Modified(Dot(1.0), mod))
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    i, j = torch.arange(TQ)[:, None], torch.arange(TK)
    s = mod(q @ k.repeat_interleave(2, 1).mT, b, h, i, j).masked_fill(~BOOL, -torch.inf)
    expected = torch.softmax(s, -1).nan_to_num(0.0) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(output, expected)


# ------------------------------------------------------------------ dimensions


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 5, 3), (1, 2, 2, 3)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_number_of_leading_dimensions(kernel: str, shape: tuple[int, ...]) -> None:
    q, k, v = randn(40, *shape, TQ, D), randn(41, *shape, TK, D), randn(42, *shape, TK, DV)
    bias, mask = randn(43, *shape, TQ, TK), randn(44, *shape, TQ, TK) > -0.5
    with use_kernel(kernel):
        output, lse = attention_with_lse(q, k, v, mask, bias=bias)
    s = (q @ k.mT / D**0.5 + bias).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(output, torch.softmax(s, -1) @ v)
    torch.testing.assert_close(lse, s.logsumexp(-1))
    assert attention_weights(q, k).shape == (*shape, TQ, TK)


SHAPES = [
    ((2, 3), (1, 3), (2, 3)),
    ((1, 4), (2, 4), (2, 4)),
    ((2, 1, 4), (1, 5, 2), (2, 5, 2)),
    ((1, 1, 2), (3, 1, 2), (1, 4, 2)),
    ((3,), (1,), (1,)),
    ((1,), (3,), (3,)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_leading_dimensions_broadcast(shapes: tuple[tuple[int, ...], ...]) -> None:
    q, k, v = (
        randn(50 + n, *shape, T, D) for n, (shape, T) in enumerate(zip(shapes, (TQ, TK, TK), strict=True))
    )
    groups = q.shape[-3] // k.shape[-3] if q.ndim > 3 else 1
    output = attention(q, k, v, Causal("lower_right"))
    spread = [x.repeat_interleave(groups, -3) for x in (k, v)]
    allowed = Causal("lower_right").materialize(TQ, TK)
    s = (q @ spread[0].mT / D**0.5).masked_fill(~allowed, -torch.inf)
    expected = torch.softmax(s, -1) @ spread[1]
    torch.testing.assert_close(output, expected)
    for one, other in zip(
        torch.autograd.grad(output.cos().sum(), (q, k, v)),
        torch.autograd.grad(expected.cos().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _spaced(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


def _offset(x: Tensor) -> Tensor:
    return torch.cat([torch.full_like(x, torch.nan), x], 2)[:, :, x.shape[2] :]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", [_transposed, _spaced, _offset], ids=lambda f: f.__name__.strip("_"))
def test_any_strides(kernel: str, layout: Any) -> None:
    q, k, v = (x.detach() for x in inputs())
    with use_kernel(kernel):
        expected = attention(q, k, v, Causal("lower_right"), bias=FULL.detach())
        laid = [layout(x).requires_grad_() for x in (q, k, v)]
        output = attention(*laid, Causal("lower_right"), bias=layout(FULL.detach()))
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert all(x.grad is not None and torch.isfinite(x.grad).all() for x in laid)
