"""Dropout: the pairs that a counter hash drops, the same ones on every kernel whatever its tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import attention, attention_weights, attention_with_lse, observe, plan
from regard._plan import use_kernel
from regard.kernels import _strips, inline
from regard.masks import Causal, Dense, Window
from regard.normalizers import Entmax15, Relu, Sigmoid, Softmax
from regard.scores import Additive, Dot

KERNELS = ("reference", "tiled", "inline")
B, H, HKV, T, D = 2, 4, 2, 70, 8


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


Q, K, V = randn(1, B, H, T, D), randn(2, B, HKV, T, D), randn(3, B, HKV, T, D)


def run(kernel: str, p: float, *tensors: Tensor, seed: int = 0, **keywords: Any) -> Tensor:
    torch.manual_seed(seed)
    with use_kernel(kernel):
        return attention(*(tensors or (Q, K, V)), dropout_p=p, **keywords)


def dropped_weights(kernel: str, p: float, seed: int = 0, **keywords: Any) -> Tensor:
    """The weights after dropout: the output for values that are the unit vectors."""
    eye = torch.eye(T, dtype=Q.dtype).expand(B, HKV, T, T)
    return run(kernel, p, Q, K, eye, seed=seed, **keywords)


# ------------------------------------------------------------------ the hash, in plain Python


def mix(x: int) -> int:
    x &= 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def keeps(seed: int, b: int, h: int, i: int, j: int, p: float) -> bool:
    return mix(mix(mix(mix(seed) + b * H + h) + i) + j) >= round(p * 2**32)


def test_pairs_are_kept_by_the_written_rule() -> None:
    torch.manual_seed(4)
    seed = int(torch.randint(0, 2**32, ()))
    expected = torch.tensor(
        [
            [[[keeps(seed, b, h, i, j, 0.3) for j in range(T)] for i in range(T)] for h in range(H)]
            for b in range(B)
        ]
    )
    for kernel in KERNELS:
        assert torch.equal(dropped_weights(kernel, 0.3, seed=4) != 0, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_kept_is_divided_by_1_minus_p(kernel: str) -> None:
    weights = attention_weights(Q, K)
    for p in (0.1, 0.5, 0.99):
        found = dropped_weights(kernel, p)
        torch.testing.assert_close(found, torch.where(found != 0, weights / (1 - p), 0.0))


# ------------------------------------------------------------------ every kernel, every tile

VARIETY: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": Causal()},
    "window": {"mask": Window(9, 4)},
    "two runs": {"mask": ~Window(2, 2)},
    "bool": {"mask": Dense(randn(8, T, T) > 0)},
    "additive": {"score": Additive(randn(9, D))},
    "entmax": {"normalize": Entmax15()},
    "sigmoid": {"normalize": Sigmoid()},
}


@pytest.fixture(params=[None, 1 << 11])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int | None]:
    """The usual tiles, and far smaller ones."""
    if request.param is not None:
        monkeypatch.setattr(_strips, "PER_THREAD", request.param)
        monkeypatch.setattr(inline, "_BUDGET", request.param)
    yield request.param


@pytest.mark.parametrize("name", VARIETY)
def test_every_kernel_drops_the_same_pairs(name: str, small_tiles: int | None) -> None:
    results = []
    for kernel in KERNELS:
        leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
        output = run(kernel, 0.25, *leaves, **VARIETY[name])
        results.append([output, *torch.autograd.grad(output.cos().sum(), leaves)])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_the_weights_times_what_was_kept() -> None:
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    q, k, v = leaves
    kept = (dropped_weights("reference", 0.4) != 0).double() / 0.6
    expected = torch.softmax(q @ k.repeat_interleave(2, 1).mT / D**0.5, -1) * kept @ v.repeat_interleave(2, 1)
    for kernel in KERNELS:
        output = run(kernel, 0.4, *leaves)
        torch.testing.assert_close(output, expected)
        for one, other in zip(
            torch.autograd.grad(output.cos().sum(), leaves),
            torch.autograd.grad(expected.cos().sum(), leaves, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other)


# ------------------------------------------------------------------ chance


def test_the_rate_is_p_in_all_rows_columns_and_heads() -> None:
    n = 256
    q = torch.zeros(2, 4, n, 1)
    eye = torch.eye(n).expand(2, 4, n, n)
    for p in (0.02, 0.5, 0.9):
        torch.manual_seed(1)
        dropped = (attention(q, q, eye, dropout_p=p) == 0).double()
        deviation = (p * (1 - p)) ** 0.5
        assert abs(dropped.mean().item() - p) < 5 * deviation / dropped.numel() ** 0.5
        for dim in range(4):
            along = dropped.movedim(dim, 0).flatten(1)
            assert (along.mean(1) - p).abs().max().item() < 6 * deviation / along.shape[1] ** 0.5
        # no pair tells of its neighbour
        for one, other in ((dropped[..., 1:], dropped[..., :-1]), (dropped[:, :, 1:], dropped[:, :, :-1])):
            covariance = ((one - p) * (other - p)).mean().item()
            assert abs(covariance) < 6 * p * (1 - p) / one.numel() ** 0.5


@pytest.mark.parametrize("kernel", KERNELS)
def test_p_of_0_is_no_dropout_and_draws_nothing(kernel: str) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with use_kernel(kernel):
        output = attention(Q, K, V, dropout_p=0.0)
        assert torch.equal(output, attention(Q, K, V))
        assert torch.equal(output, attention(Q, K, V, dropout_p=0))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kernel", KERNELS)
def test_p_of_1_drops_everything(kernel: str) -> None:
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    output = run(kernel, 1.0, *leaves)
    assert torch.equal(output, torch.zeros_like(output))
    assert all(not grad.any() for grad in torch.autograd.grad(output.sum(), leaves))
    assert torch.equal(run(kernel, 1, *leaves), output)


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_calls_differ_and_the_generator_brings_the_first_one_back(kernel: str) -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    with use_kernel(kernel):
        one, two = attention(Q, K, V, dropout_p=0.2), attention(Q, K, V, dropout_p=0.2)
        assert not torch.equal(one, two)
        torch.set_rng_state(state)
        assert torch.equal(attention(Q, K, V, dropout_p=0.2), one)
        assert torch.equal(attention(Q, K, V, dropout_p=0.2), two)


def test_samples_heads_and_rows_are_dropped_apart() -> None:
    kept = dropped_weights("tiled", 0.5) != 0
    flat = kept.flatten(0, 2)
    assert len(flat.unique(dim=0)) == len(flat)


# ------------------------------------------------------------------ what dropout leaves alone


def test_weights_statistics_and_lse_are_before_dropout() -> None:
    torch.manual_seed(0)
    seen = observe(Q, K, V, dropout_p=0.5, topk=3, pool=4)
    plain = observe(Q, K, V, topk=3, pool=4)
    for name in ("lse", "max", "entropy", "received", "top_weights", "top_keys", "pooled", "pooled_max"):
        assert torch.equal(getattr(seen, name), getattr(plain, name)), name
    assert not torch.equal(seen.output, plain.output)
    assert torch.equal(seen.output, run("tiled", 0.5))
    lse = attention_with_lse(Q, K, V, dropout_p=0.5, normalize=Softmax(0.3))[1]
    assert torch.equal(lse, attention_with_lse(Q, K, V, normalize=Softmax(0.3))[1])


def test_a_callable_may_draw_too() -> None:
    """A score that draws its own numbers draws the same ones when a block is made again for the gradient."""

    def noisy(query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT + torch.randn(
            query.shape[0], 1, query.shape[2], key.shape[2], dtype=query.dtype
        )

    x = Q.clone().requires_grad_()
    torch.manual_seed(3)
    output = attention(x, K, V, score=noisy, dropout_p=0.3)
    (grad,) = torch.autograd.grad(output.cos().sum(), x)
    step = 1e-6 * randn(11, *x.shape)
    values = []
    for sign in (1, -1):
        torch.manual_seed(3)
        values.append(attention(x.detach() + sign * step, K, V, score=noisy, dropout_p=0.3).cos().sum())
    torch.testing.assert_close((grad * step).sum(), (values[0] - values[1]) / 2, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_same_pairs_in_every_dtype(dtype: torch.dtype) -> None:
    eye = torch.eye(T).expand(B, HKV, T, T)
    exact = dropped_weights("reference", 0.5, score=Dot(0.1), normalize=Sigmoid())
    for kernel in KERNELS:
        found = run(kernel, 0.5, Q.to(dtype), K.to(dtype), eye.to(dtype), score=Dot(0.1), normalize=Sigmoid())
        assert torch.equal(found != 0, exact != 0)


def test_values_that_are_not_finite_show_only_where_they_are_kept() -> None:
    v = V.clone()
    v[:, :, 5] = torch.nan
    for kernel in KERNELS:
        kept = dropped_weights(kernel, 0.5, normalize=Relu())[..., 5] != 0
        output = run(kernel, 0.5, Q, K, v, normalize=Relu())
        assert torch.equal(output.isnan().any(-1), kept)


def test_plan_knows_of_dropout() -> None:
    small = torch.zeros(1, 1, 4, 4)
    assert plan(small, small, small).kernel == "direct"
    chosen = plan(small, small, small, dropout_p=0.1)
    assert chosen.kernel != "direct" and "dropout" in chosen.reasons["direct"]
