"""Gradients in float64 against finite differences: all pairs of choices; the full product in scripts/test --full."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from regard import attention
from regard._plan import use_kernel
from tests.core import cases

Names = tuple[str, str, str, str]
TABLES = (cases.SCORES, cases.NORMALIZERS, cases.MASKS, cases.BIASES)


def _compatible(names: Names) -> bool:
    """One alignment a call: what gives its own offsets a sample goes with what speaks of none."""
    return cases.alignment_free(names[2]) or names[3] in ("none", "tensor")


def all_pairs() -> list[Names]:
    """A few rows of choices in which every two choices (that may stand together) meet at least once."""
    wanted = {
        ((a, one), (b, two))
        for a, b in itertools.combinations(range(4), 2)
        for one in TABLES[a]
        for two in TABLES[b]
        if _meets(a, b, one, two)
    }
    rows: list[Names] = []
    everything = [names for names in itertools.product(*TABLES) if _compatible(names)]
    while wanted:
        best = max(everything, key=lambda names: len(_pairs(names) & wanted))
        rows.append(best)
        wanted -= _pairs(best)
    return rows


def _meets(a: int, b: int, one: str, two: str) -> bool:
    return (a, b) != (2, 3) or cases.alignment_free(one) or two in ("none", "tensor")


def _pairs(names: Names) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    return set(itertools.combinations(enumerate(names), 2))  # type: ignore[arg-type]


def check(kernel: str, names: Names, dropout_p: float = 0.0) -> None:
    case = cases.make(*names, seed=3)
    q, k, v = cases.inputs(seed=4)

    def run(*_: Tensor) -> Tensor:
        torch.manual_seed(0)
        with use_kernel(kernel):
            return attention(q, k, v, **case.keywords, dropout_p=dropout_p)

    # One random direction a tensor: central differences against the gradient along it.
    leaves = [q, k, v, *case.learned]
    output = run()
    upstream = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    grads = torch.autograd.grad(output, leaves, upstream, allow_unused=True)
    for leaf, grad in zip(leaves, grads, strict=True):
        assert grad is not None
        assert grad.shape == leaf.shape
        direction = torch.randn(leaf.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
        step = 1e-6
        with torch.no_grad():
            leaf += step * direction
            up = run()
            leaf -= 2 * step * direction
            down = run()
            leaf += step * direction
        expected = ((up - down) / (2 * step) * upstream).sum()
        torch.testing.assert_close((grad * direction).sum(), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("names", all_pairs(), ids=" / ".join)
def test_gradients_of_all_pairs(names: Names) -> None:
    for kernel in ("tiled", "reference"):
        check(kernel, names)


@pytest.mark.slow
@pytest.mark.parametrize("score", cases.SCORES)
@pytest.mark.parametrize("normalize", cases.NORMALIZERS)
def test_gradients_of_the_full_product(score: str, normalize: str) -> None:
    for mask, bias in itertools.product(cases.MASKS, cases.BIASES):
        if _compatible((score, normalize, mask, bias)):
            for kernel in ("tiled", "reference", "inline"):
                check(kernel, (score, normalize, mask, bias))


@pytest.mark.parametrize("normalize", ["softmax", "softmax sink", "sigmoid", "entmax"])
def test_gradients_under_dropout(normalize: str) -> None:
    for kernel in ("tiled", "reference", "inline"):
        check(kernel, ("dot scale", normalize, "causal", "relative"), dropout_p=0.3)


@pytest.mark.parametrize("score", cases.SCORES)
def test_gradcheck_and_second_gradients_of_every_score(score: str) -> None:
    _twice((score, "softmax", "causal", "none"))


@pytest.mark.parametrize("normalize", cases.NORMALIZERS)
def test_gradcheck_and_second_gradients_of_every_normalizer(normalize: str) -> None:
    _twice(("dot", normalize, "causal", "none"))


@pytest.mark.parametrize("mask", cases.MASKS)
def test_gradcheck_and_second_gradients_of_every_mask(mask: str) -> None:
    _twice(("dot", "softmax", mask, "none"))


@pytest.mark.parametrize("bias", cases.BIASES)
def test_gradcheck_and_second_gradients_of_every_bias(bias: str) -> None:
    _twice(("dot", "softmax sink", "none", bias))


def _twice(names: Names) -> None:
    case = cases.make(*names, seed=5)
    q, k, v = cases.inputs(seed=6)

    def run(*_: Tensor) -> Tensor:
        with use_kernel("tiled"):
            return attention(q, k, v, **case.keywords)

    leaves = (q, k, v, *case.learned)
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


def test_one_tensor_as_query_key_and_value() -> None:
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        with use_kernel("tiled"):
            return attention(x, x, x)

    assert torch.autograd.gradcheck(run, (x,))
    assert torch.autograd.gradgradcheck(run, (x,))


def test_third_derivative() -> None:
    x = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    found = []
    for kernel in ("tiled", "reference"):
        with use_kernel(kernel):
            value = attention(x, x, x).sin().sum()
            for _ in range(3):
                (grad,) = torch.autograd.grad(value, x, create_graph=True)
                value = grad.sin().sum()
            found.append(grad.detach())
    torch.testing.assert_close(found[0], found[1])
