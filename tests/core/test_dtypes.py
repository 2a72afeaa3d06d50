"""Contracts 9 and 11: which dtype goes in and comes out, autocast, and the error against float64 on every kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard import attention, attention_weights, attention_with_lse, merge, observe
from regard._plan import use_kernel
from regard.biases import Alibi, Relative
from regard.masks import Causal, Dense, Padding, Window
from regard.normalizers import Entmax, Entmax15, Relu, Sigmoid, Softmax, Sparsemax
from regard.scores import Additive, Bilinear, Concat, Cosine, Distance, Dot

KERNELS = ("reference", "tiled", "inline")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FLOOR = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
T, D, DV, H = 64, 16, 8, 4


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(dtype: torch.dtype, spread: float = 1.0) -> list[Tensor]:
    """Leaves whose values are exact in every dtype, so that the error is that of the kernel."""
    low = torch.bfloat16
    made = [randn(1, 2, H, T, D, dtype=low) * spread, randn(2, 2, H, T, D, dtype=low) * spread]
    return [x.to(dtype).requires_grad_() for x in (*made, randn(3, 2, H, T, DV, dtype=low))]


def error(found: Tensor, exact: Tensor) -> float:
    scale = exact.double().norm().item()
    return (found.double() - exact.double()).norm().item() / (scale or 1.0)


def with_gradients(run: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    output = run(*leaves)
    upstream = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).sin().view(output.shape)
    return [
        output.detach(),
        *torch.autograd.grad(output, leaves, upstream.to(torch.bfloat16).to(output.dtype)),
    ]


# ------------------------------------------------------------------ which dtype


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_have_the_querys_dtype_and_statistics_are_float32_or_float64(
    kernel: str, dtype: torch.dtype
) -> None:
    q, k, v = qkv(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with use_kernel(kernel):
        output, lse = attention_with_lse(q, k, v, Causal())
    assert output.dtype == dtype and lse.dtype == wide
    assert attention_weights(q, k).dtype == dtype
    seen = observe(q, k, v, topk=2, pool=4)
    assert seen.output.dtype == dtype
    for name in ("lse", "max", "entropy", "received", "top_weights", "pooled", "pooled_max"):
        assert getattr(seen, name).dtype == wide, name
    joined, total = merge([output, output], [lse, lse])
    assert joined.dtype == dtype and total.dtype == wide
    assert all(x.dtype == dtype for x in torch.autograd.grad(output.sum(), (q, k, v)))


PARAMETERS: dict[str, tuple[Callable[[Tensor], dict[str, Any]], tuple[int, ...]]] = {
    "scale": (lambda p: {"score": Dot(p)}, ()),
    "scale a head": (lambda p: {"score": Dot(p, softcap=3.0)}, (H,)),
    "cosine scale": (lambda p: {"score": Cosine(p)}, (H,)),
    "distance scale": (lambda p: {"score": Distance(p)}, (H,)),
    "weight": (lambda p: {"score": Bilinear(p)}, (D, D)),
    "weight a head": (lambda p: {"score": Bilinear(p)}, (H, D, D)),
    "w_query": (lambda p: {"score": Concat(p, p), "normalize": Sigmoid()}, (D,)),
    "v": (lambda p: {"score": Additive(p)}, (H, D)),
    "sink": (lambda p: {"normalize": Softmax(p)}, (H,)),
    "one sink": (lambda p: {"normalize": Softmax(p)}, ()),
    "sigmoid bias": (lambda p: {"normalize": Sigmoid(p)}, (H,)),
    "alpha": (lambda p: {"normalize": Entmax(p)}, (H,)),
    "slopes": (lambda p: {"bias": Alibi(p)}, (H,)),
    "table": (lambda p: {"bias": Relative(p)}, (H, 7)),
    "tensor": (lambda p: {"bias": p}, (1, H, T, T)),
    "one row": (lambda p: {"bias": p}, (H, 1, T)),
    "a key and a table": (lambda p: {"bias": p[..., :1, :] + Relative(p[0, :, 0, :5])}, (1, H, T, T)),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_parameters_keep_their_dtype_and_shape_and_so_do_their_gradients(
    kernel: str, name: str, own: torch.dtype
) -> None:
    """Whatever the query's dtype is; the value is that of the whole computation in float64."""
    build, shape = PARAMETERS[name]
    grads = []
    for dtype, of_parameter in ((torch.float64, torch.float64), (torch.bfloat16, own), (torch.float32, own)):
        q, k, v = qkv(dtype, 0.5)
        made = randn(9, *shape) / 4
        made = 1.25 + made.abs() if name == "alpha" else made
        parameter = made.bfloat16().to(of_parameter).requires_grad_()
        given = parameter[None] if name == "one row" else parameter
        with use_kernel(kernel):
            output = attention(q, k, v, **build(given))
        assert output.dtype == dtype
        upstream = randn(10, *output.shape, dtype=torch.bfloat16).to(dtype)
        (grad,) = torch.autograd.grad(output, parameter, upstream)
        assert grad.dtype == of_parameter and grad.shape == shape
        grads.append(grad)
    bound = 0.01 if own == torch.bfloat16 else 1e-4
    assert error(grads[1], grads[0]) < bound and error(grads[2], grads[0]) < bound


# ------------------------------------------------------------------ autocast


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", DTYPES, ids=str)
def test_autocast_casts_as_sdpa_casts(given: torch.dtype, low: torch.dtype) -> None:
    q, k, v = qkv(given)
    with torch.autocast("cpu", dtype=low):
        output, expected = attention(q, k, v), _sdpa(q, k, v)
        weights = attention_weights(q, k)
        seen = observe(q, k, v).output
        _, lse = attention_with_lse(q, k, v)
    assert output.dtype == expected.dtype == weights.dtype == seen.dtype
    assert lse.dtype == (torch.float64 if given == torch.float64 else torch.float32)
    assert torch.equal(seen, output)
    torch.testing.assert_close(output, expected, atol=2e-2, rtol=2e-2)
    grads = torch.autograd.grad(output.sum(), (q, k, v))
    assert all(grad.dtype == given for grad in grads)
    for one, other in zip(grads, torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        assert error(one, other) < 0.05


def test_autocast_mends_dtypes_that_differ_and_off_means_off() -> None:
    q, k, v = qkv(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = attention(q, k.bfloat16(), v.half())
        plain = attention(q, k, v)
        with torch.autocast("cpu", enabled=False):
            off = attention(q, k, v)
    assert mixed.dtype == torch.bfloat16 and torch.equal(mixed, plain)
    assert off.dtype == torch.float32 and torch.equal(off, attention(q, k, v))


def test_autocast_leaves_parameters_alone_and_accumulates_in_float32() -> None:
    """Under autocast a call is that of the tensors cast by hand: no step inside is cast again."""
    weight, sink = randn(4, D, D, dtype=torch.float32), randn(5, H, dtype=torch.float32)
    keywords = {"score": Bilinear(weight), "normalize": Softmax(sink), "bias": Relative(randn(6, 9).float())}
    q, k, v = (x.detach() for x in qkv(torch.float32))
    for kernel in KERNELS:
        with use_kernel(kernel):
            expected = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), Causal(), **keywords)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = attention(q, k, v, Causal(), **keywords)
        assert torch.equal(output, expected)


def test_backward_outside_autocast_is_the_same() -> None:
    q, k, v = qkv(torch.float32)
    with use_kernel("tiled"), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = attention(q, k, v, Causal())
        under = torch.autograd.grad(inside.float().cos().sum(), (q, k, v), retain_graph=True)
    outside = torch.autograd.grad(inside.float().cos().sum(), (q, k, v))
    assert all(torch.equal(one, other) for one, other in zip(under, outside, strict=True))


# ------------------------------------------------------------------ error against float64

MECHANISMS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "softmax": ({}, lambda q, k, v: torch.softmax(q @ k.mT / D**0.5, -1) @ v),
    "causal": (
        {"mask": Causal()},
        lambda q, k, v: (
            torch.softmax((q @ k.mT / D**0.5).masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf), -1)
            @ v
        ),
    ),
    "additive": (
        {"score": Additive(torch.linspace(-1, 1, D))},
        lambda q, k, v: (
            torch.softmax(
                torch.tanh(q[..., :, None, :] + k[..., None, :, :]) @ torch.linspace(-1, 1, D).to(q.dtype), -1
            )
            @ v
        ),
    ),
    "distance": (
        {"score": Distance(0.25)},
        lambda q, k, v: (
            torch.softmax(-0.25 * (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1), -1) @ v
        ),
    ),
    "cosine": (
        {"score": Cosine(8.0)},
        lambda q, k, v: torch.softmax(8 * F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT, -1) @ v,
    ),
    "sigmoid": ({"normalize": Sigmoid(-2.0)}, lambda q, k, v: torch.sigmoid(q @ k.mT / D**0.5 - 2) @ v),
    "relu": ({"normalize": Relu()}, lambda q, k, v: torch.relu(q @ k.mT / D**0.5) @ v),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MECHANISMS)
def test_error_of_outputs_and_gradients(kernel: str, name: str, dtype: torch.dtype) -> None:
    """At most twice plain torch's at the same dtype, or the floor of contract 11."""
    keywords, plain = MECHANISMS[name]
    exact = with_gradients(plain, qkv(torch.float64))
    torchs = with_gradients(plain, qkv(dtype))
    with use_kernel(kernel):
        ours = with_gradients(lambda q, k, v: attention(q, k, v, **keywords), qkv(dtype))
    for what, found, theirs, truth in zip(
        ("output", "query", "key", "value"), ours, torchs, exact, strict=True
    ):
        bound = max(2 * error(theirs, truth), FLOOR[dtype])
        assert error(found, truth) <= bound, (what, error(found, truth), bound)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "normalize", [Softmax(), Softmax(0.5), Sparsemax(), Entmax15(), Entmax(1.3), Entmax(2.5)], ids=str
)
def test_normalizers_keep_their_precision_in_float32(kernel: str, normalize: Any) -> None:
    """Against the same kernel in float64, for scores of the usual size and of a hundred times that."""
    for spread, allowed in ((1.0, 1.0), (10.0, 30.0)):
        with use_kernel(kernel):
            exact, found = (
                attention(*(x.detach() for x in qkv(dtype, spread)), normalize=normalize)
                for dtype in (torch.float64, torch.float32)
            )
        assert error(found, exact) <= 4e-6 * allowed


@pytest.mark.parametrize("alpha", [1.001, 1.05, 1.5, 2.0, 3.0, 5.0, 20.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_entmax_weights_sum_to_one_whatever_alpha(alpha: float, dtype: torch.dtype) -> None:
    q, k, v = (x.detach() for x in qkv(dtype))
    weights = attention_weights(q, k, normalize=Entmax(alpha))
    assert bool((weights >= 0).all())
    bound = 1e-4 if dtype == torch.float32 else 1e-9
    assert (weights.sum(-1) - 1).abs().max().item() < bound
    for kernel in KERNELS:
        with use_kernel(kernel):
            output = attention(q, k, v, normalize=Entmax(alpha))
        assert error(output, weights @ v) < bound


# ------------------------------------------------------------------ odd magnitudes

NORMALIZERS = [Softmax(), Softmax(0.0), Sparsemax(), Entmax15(), Entmax(1.3), Sigmoid(), Relu()]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("normalize", NORMALIZERS, ids=str)
def test_scores_of_ten_thousand(kernel: str, normalize: Any) -> None:
    q, k, v = qkv(torch.float32)
    with torch.no_grad():
        scores = (q @ k.mT).abs().amax()
    scale = (1e4 / scores).item()
    with use_kernel(kernel):
        output = attention(q, k, v, Causal(), score=Dot(scale), normalize=normalize)
    exact = attention(
        *(x.detach().double() for x in (q, k, v)), Causal(), score=Dot(scale), normalize=normalize
    )
    assert error(output, exact) < 1e-3
    if not isinstance(normalize, Relu):
        assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(output.sum(), (q, k, v)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("normalize", NORMALIZERS, ids=str)
@pytest.mark.parametrize("kind", ["constant", "one-hot", "denormal", "denormal key", "zero", "huge and tiny"])
def test_odd_inputs(kernel: str, normalize: Any, kind: str) -> None:
    eye = torch.eye(T, D).expand(2, H, T, D)
    made = {
        "constant": torch.full((2, H, T, D), 0.7),
        "one-hot": eye,
        "denormal": torch.full((2, H, T, D), 1e-41),
        "denormal key": torch.ones(2, H, T, D),
        "zero": torch.zeros(2, H, T, D),
        "huge and tiny": torch.where(torch.arange(T)[:, None] % 2 == 0, 1e15, 1e-15).expand(2, H, T, D),
    }[kind]
    q, k = made.clone(), made.clone() * (1e-41 if kind == "denormal key" else 1.0)
    q, k = q.requires_grad_(), k.requires_grad_()
    v = qkv(torch.float32)[2]
    scale = 1e-30 if kind == "huge and tiny" else 1.0
    with use_kernel(kernel):
        output = attention(q, k, v, Window(20, 0), score=Dot(scale), normalize=normalize)
    exact = attention(
        *(x.detach().double() for x in (q, k, v)), Window(20, 0), score=Dot(scale), normalize=normalize
    )
    assert error(output, exact) < 1e-5 or (output - exact).abs().max().item() < 1e-40
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(output.sum(), (q, k, v)))


def test_half_precisions_do_not_overflow_inside() -> None:
    """Scores beyond float16's 65504, sums of many values: accumulated in float32."""
    q, k = torch.full((1, 1, 64, 64), 60.0).half(), torch.full((1, 1, 64, 64), 60.0).half()
    v = torch.full((1, 1, 64, 4), 1000.0).half()
    for kernel in KERNELS:
        with use_kernel(kernel):
            assert torch.equal(attention(q, k, v, score=Dot(1.0)), v)
            assert torch.equal(
                attention(q, k, v, normalize=Sigmoid())[0, 0, 0, :1], torch.tensor([64000.0]).half()
            )


# ------------------------------------------------------------------ bits and inputs


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_twice_and_inputs_untouched(kernel: str, dtype: torch.dtype) -> None:
    leaves = qkv(dtype)
    table, bias, sink = randn(7, H, 9).requires_grad_(), randn(8, 1, H, T, T).requires_grad_(), randn(9, H)
    scale = randn(10, H).requires_grad_()
    blocked, lengths = Dense(randn(11, T, T) > -0.5), torch.tensor([T, 40])
    given = [*leaves, table, bias, sink, scale, blocked.mask, lengths]
    before = [x.detach().clone() for x in given]

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        with use_kernel(kernel):
            output, lse = attention_with_lse(
                *leaves,
                blocked & Padding(lengths),
                score=Dot(scale, softcap=5.0),
                normalize=Softmax(sink),
                bias=bias + Relative(table),
                dropout_p=0.1,
            )
        grads = torch.autograd.grad(output.sum() + lse[lse > -torch.inf].sum(), [*leaves, table, bias, scale])
        return [output, lse, *grads]

    first, second = run(), run()
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(before, given, strict=True))
