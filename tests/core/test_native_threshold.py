"""The compiled sparsemax and entmax against the definition in float64: outputs, gradients, tiles, hostile numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import attention, plan
from regard._call import prepare
from regard._plan import use_kernel
from regard.biases import Alibi, Relative
from regard.kernels import _library, native, problem, tiled
from regard.masks import Causal, Padding, Window
from regard.normalizers import Entmax, Entmax15, Sparsemax
from regard.scores import Additive, Dot
from tests.core import cases
from tests.core.natives import as_dtype, both, error, hold, made, mechanism, shapes

NORMALIZERS = [name for name in cases.NORMALIZERS if name.startswith(("sparsemax", "entmax"))]
SCORES = ["dot", "dot scale", "dot scale a head, soft-cap", "bilinear", "additive", "additive a head"]
KINDS = {
    "sparsemax": Sparsemax(),
    "entmax15": Entmax15(),
    "entmax 1.5": Entmax(1.5),
    "entmax 2": Entmax(2.0),
    "entmax 1.3": Entmax(1.3),
    "entmax near 1": Entmax(1.0001),
}


def run(kernel: str, leaves: list[Tensor], mask: Any = None, **keywords: Any) -> list[Tensor]:
    """[output, *gradients of leaves] under a fixed upstream gradient."""
    torch.manual_seed(3)
    with use_kernel(kernel):
        output = attention(*leaves[:3], mask, **keywords)
    upstream = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).sin().view(output.shape)
    grads = torch.autograd.grad(output, leaves, upstream.to(output.dtype))
    return [output.detach(), *grads]


def drawn(*sizes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in sizes]


# ---------------------------------------------------------------------------- the whole table of what can be described


def table() -> list[tuple[str, str, str, str]]:
    rows = [("dot", normalize, mask, "none") for normalize in NORMALIZERS for mask in cases.MASKS]
    rows += [(score, normalize, "causal", "none") for score in SCORES for normalize in NORMALIZERS]
    rows += [("dot", normalize, "none", bias) for normalize in NORMALIZERS for bias in cases.BIASES]
    return [*rows, ("additive a head", "entmax", "window or prefix", "per key and relative")]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("names", table(), ids=" / ".join)
def test_core_outputs_and_gradients_are_the_definition(names: tuple[str, ...], dropout_p: float) -> None:
    def make(dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
        case = cases.make(*names, seed=3, dtype=dtype)
        return [*cases.inputs(seed=4, dtype=dtype), *case.learned], case.keywords | {"dropout_p": dropout_p}

    hold(both("native", make))


# ---------------------------------------------------------------------------- edges of tiles


@settings(max_examples=12, deadline=None)
@given(shapes(), st.sampled_from(sorted(KINDS)), st.data())
def test_drawn_shapes_strides_masks_and_biases(shape: dict[str, Any], kind: str, data: st.DataObject) -> None:
    keywords = mechanism(data.draw, shape) | {"normalize": KINDS[kind]}
    threads = torch.get_num_threads()
    torch.set_num_threads(data.draw(st.sampled_from([1, 2, 5])))
    try:
        hold(both("native", lambda dtype: (made(shape, dtype), as_dtype(keywords, dtype))))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("keys", [1, 15, 16, 17, 63, 64, 65, 191, 192, 193, 385, 1000])
@pytest.mark.parametrize("kind", ["sparsemax", "entmax15", "entmax 1.3"])
def test_core_every_length_with_all_and_with_few_keys_in_the_support(kind: str, keys: int) -> None:
    q, k, v = drawn((1, 2, 33, 24), (1, 1, keys, 24), (1, 1, keys, 20), seed=keys)
    for sharp in (0.0, 1e-3, 1.0, 30.0):

        def make(dtype: torch.dtype, by: float = sharp) -> tuple[list[Tensor], dict[str, Any]]:
            leaves = [x.to(dtype).requires_grad_() for x in (q * by, k, v)]
            return leaves, {"normalize": KINDS[kind]}

        hold(both("native", make), max(1.0, 4 * sharp))


def test_supports_of_many_keys_keep_their_sum() -> None:
    """Where thousands of keys share the weight, rounding of a threshold would be felt in every one of them."""
    q, k, v = drawn((1, 1, 16, 16), (1, 1, 20000, 16), (1, 1, 20000, 4))
    for kind in ("sparsemax", "entmax15"):
        for sharp in (0.0, 1e-5, 1e-3):
            ones = torch.ones_like(v)
            with use_kernel("native"):
                output = attention(q * sharp, k, ones, normalize=KINDS[kind])
            assert error(output, torch.ones_like(output)) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precisions_are_rounded_once(kind: str, dtype: torch.dtype) -> None:
    leaves = [x.to(dtype).requires_grad_() for x in drawn((2, 4, 77, 40), (2, 2, 230, 40), (2, 2, 230, 24))]
    bound = {torch.bfloat16: 2.5e-3, torch.float16: 3.5e-4}[dtype]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    found = run("native", leaves, Causal("lower_right"), normalize=KINDS[kind])
    expected = run("reference", wide, Causal("lower_right"), normalize=KINDS[kind])
    for n, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert got.dtype == dtype and error(got, want) <= (2 if n else 1) * bound


# ---------------------------------------------------------------------------- alpha


@pytest.mark.parametrize("alpha", [1.0 + 2**-18, 1.0 + 2**-10, 1.0625, 1.25, 1.5, 1.75, 2.0, 2.5])
def test_gradients_of_alpha_also_near_1(alpha: float) -> None:
    leaves = drawn((1, 40, 3, 8), (1, 40, 50, 8), (1, 40, 50, 4))

    def make(dtype: torch.dtype) -> list[Tensor]:
        each = torch.full((40,), alpha, dtype=dtype)
        with use_kernel("native" if dtype == torch.float32 else "reference"):
            tensors = [x.to(dtype).requires_grad_() for x in [*leaves, each]]
            output = attention(*tensors[:3], normalize=Entmax(tensors[3]))
        return [output.detach(), *torch.autograd.grad(output.square().sum(), tensors)]

    ours, exact = make(torch.float32), make(torch.float64)
    # A support's edge moves by the rounding of scores, and weights begin steeply there beyond alpha = 2.
    bound = 3e-6 if alpha <= 2 else 2e-4
    for got, want in zip(ours, exact, strict=True):
        assert error(got, want) <= bound


def test_alphas_of_all_sizes_sum_to_1() -> None:
    q, k = drawn((1, 1, 20, 8), (1, 1, 300, 8))
    ones = torch.ones(1, 1, 300, 3)
    for alpha in (1.000001, 1.01, 1.9999999, 2.0000002, 3.0, 10.0, 1e3, 1e30):
        with use_kernel("native"):
            output = attention(q, k, ones, normalize=Entmax(alpha))
            sharp = attention(q * 1e4, k, ones, normalize=Entmax(alpha))
        assert error(output, torch.ones_like(output)) < 1e-6
        assert error(sharp, torch.ones_like(output)) < 1e-6


# ---------------------------------------------------------------------------- rows that both kernels know


@pytest.mark.parametrize("kind", KINDS)
def test_row_numbers_are_those_of_tiled(kind: str) -> None:
    """Either kernel's backward pass takes the other's rows."""
    q, k, v = drawn((1, 2, 40, 16), (1, 2, 90, 16), (1, 2, 90, 8))
    call = prepare(q, k, v, Window(50, 9, "upper_left"), Dot(), KINDS[kind], None, 0.0)
    given = problem.lower(call, True)
    ours, theirs = native.forward(given), tiled.forward(given)
    assert ours is not None
    torch.testing.assert_close(ours[2], theirs[2], rtol=0, atol=2e-6)
    needs = [name in ("query", "key", "value") for name in problem.DIFFERENTIABLE]
    upstream = torch.linspace(-1, 1, ours[0].numel()).view(ours[0].shape)
    expected = tiled.backward(upstream, None, theirs[2], given, needs)
    crossed = native.backward(upstream, None, theirs[0], theirs[2], given, needs)
    assert crossed is not None
    for other in (crossed, tiled.backward(upstream, None, ours[2], given, needs)):
        for got, want in zip(other, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)


# ---------------------------------------------------------------------------- hostile numbers


@pytest.mark.parametrize("kind", ["sparsemax", "entmax15", "entmax 1.3"])
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_where_it_is_seen_and_only_there(
    kind: str, where: str, poison: float
) -> None:
    q, k, v = drawn((1, 2, 70, 16), (1, 2, 70, 16), (1, 2, 70, 16))
    {"query": q, "key": k, "value": v}[where][0, 1, 40, 3] = poison
    for mask in (Causal(), Window(9, 0), torch.ones(70, 70, dtype=torch.bool).tril()):
        found = []
        for kernel in ("native", "tiled", "reference"):
            with use_kernel(kernel):
                leaves = [x.clone().requires_grad_() for x in (q, k, v)]
                output = attention(*leaves, mask, normalize=KINDS[kind])
                grads = torch.autograd.grad(output[:, :, :39].sum(), leaves)
                found.append([x.detach().nan_to_num(7e7, 7e7, 7e7) for x in (output[:, :, :40], *grads)])
                beyond = output[0, 1, 40 if where == "query" else slice(40, 49)]
                assert where == "value" or bool(beyond.isnan().all())
        torch.testing.assert_close(found[0][0], found[2][0], rtol=2e-5, atol=2e-5)
        for ours, expected in zip(*found[:2], strict=True):
            torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)


def test_bias_and_overflow_that_are_not_finite_are_not_hidden() -> None:
    q, k, v = drawn((1, 1, 20, 4), (1, 1, 30, 4), (1, 1, 30, 4))
    bias = torch.zeros(1, 1, 20, 30)
    bias[..., 5, 7], bias[..., 6, 7], bias[..., 8, :] = torch.nan, torch.inf, -torch.inf
    with use_kernel("native"):
        output = attention(q, k, v, normalize=Sparsemax(), bias=bias)
        big = attention(q * 1e30, k * 1e30, v, normalize=Entmax15())
    assert bool(output[0, 0, 5:7].isnan().all()) and bool((output[0, 0, 8] == 0).all())
    kept = [n for n in range(20) if n not in (5, 6)]
    with use_kernel("reference"):
        expected = attention(*(x.double() for x in (q, k, v)), normalize=Sparsemax(), bias=bias.double())
        large = attention(q * 1e30, k * 1e30, v, normalize=Entmax15())
    assert error(output[0, 0, kept], expected[0, 0, kept]) < 2e-6
    assert torch.equal(big.isnan(), large.isnan())


@pytest.mark.parametrize("kind", ["sparsemax", "entmax15", "entmax 1.3"])
@pytest.mark.parametrize("name", ["large", "constant", "one-hot", "denormal", "ties", "steps"])
@pytest.mark.parametrize("score", [Dot(), Additive(torch.ones(32) / 8)], ids=["dot", "additive"])
def test_hostile_magnitudes(name: str, kind: str, score: Any) -> None:
    q, k, v = drawn((1, 2, 130, 32), (1, 2, 130, 32), (1, 2, 130, 32))
    hostile = {
        "large": lambda x: x * 100.0,
        "constant": lambda x: torch.full_like(x, 0.7),
        "one-hot": lambda x: torch.eye(130, 32).expand_as(x) * 50,
        "denormal": lambda x: x * 1e-39,
        "ties": lambda x: x.round(),
        "steps": lambda x: torch.logspace(-8, 1, 130)[:, None].expand_as(x),
    }[name]

    def make(dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
        leaves = [x.to(dtype).requires_grad_() for x in (hostile(q), hostile(k), v)]
        return leaves, {"score": score, "mask": Causal(), "normalize": KINDS[kind]}

    hold(both("native", make), max(1.0, *(float(hostile(x).abs().max()) for x in (q, k))))


def test_padding_of_any_magnitude_does_not_reach_the_rest() -> None:
    q, k, v = drawn((1, 2, 64, 16), (1, 2, 64, 16), (1, 2, 64, 16))
    k[:, :, 40:], v[:, :, 40:] = 3e38, -3e38
    for kind in KINDS.values():
        with use_kernel("native"):
            output = attention(q, k, v, Padding(torch.tensor([40])), normalize=kind)
        expected = attention(*(x.double() for x in (q, k[:, :, :40], v[:, :, :40])), normalize=kind)
        assert error(output, expected) < 2e-6


# ---------------------------------------------------------------------------- memory, threads, bits


def test_nothing_is_left_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.empty

    def poisoned(*arguments: Any, **keywords: Any) -> Tensor:
        tensor = original(*arguments, **keywords)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(native.torch, "empty", poisoned)
    for D, Dv, Tq, Tk in ((16, 8, 5, 9), (33, 65, 130, 200), (64, 64, 64, 64), (8, 8, 20, 4)):
        q, k, v = (x.requires_grad_() for x in drawn((2, 4, Tq, D), (2, 2, Tk, D), (2, 2, Tk, Dv)))
        alpha = torch.tensor(1.4, requires_grad=True)
        for mask in (None, Causal(offset=-3), Padding(torch.tensor([0, 4])), torch.zeros(Tq, Tk).bool()):
            for kind in (Sparsemax(), Entmax15(), Entmax(alpha)):
                with use_kernel("native"):
                    output = attention(q, k, v, mask, normalize=kind, bias=Alibi(offset=-3))
                wanted = [q, k, v, alpha] if isinstance(kind, Entmax) else [q, k, v]
                grads = torch.autograd.grad(output.sum(), wanted)
                assert all(bool(torch.isfinite(x).all()) for x in (output, *grads))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_same_bits_for_the_same_thread_count(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        q, k, v = (x.requires_grad_() for x in drawn((1, 3, 300, 32), (1, 3, 300, 32), (1, 3, 300, 32)))
        table, alpha = (
            torch.randn(3, 21, requires_grad=True),
            torch.tensor([1.2, 1.5, 1.8], requires_grad=True),
        )

        def once() -> list[Tensor]:
            with use_kernel("native"):
                output = attention(q, k, v, Causal(), bias=Relative(table), normalize=Entmax(alpha))
            return [output, *torch.autograd.grad(output.square().sum(), (q, k, v, table, alpha))]

        first = once()
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(once(), first, strict=True))
    finally:
        torch.set_num_threads(before)


def test_core_thresholds_do_not_depend_on_other_rows_of_a_group() -> None:
    """A row's neighbours in the lanes decide which keys its strip keeps, and nothing else."""
    q, k, v = drawn((1, 1, 64, 16), (1, 1, 500, 16), (1, 1, 500, 8))
    flat = q.clone()
    flat[:, :, 1::2] = 0
    for kind in KINDS.values():
        with use_kernel("native"):
            together = attention(flat, k, v, normalize=kind)[:, :, ::2]
            apart = attention(q, k, v, normalize=kind)[:, :, ::2]
        torch.testing.assert_close(together, apart, rtol=2e-6, atol=1e-6)


def test_wide_lanes_pass_the_same_tests() -> None:
    """The 16-lane code, which AVX-512 runs, compiled for this processor."""
    library = _library.library()
    assert library is not None and "wide" in library.variants
    if library.variant == "wide":
        return
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", "core_ or half or unwritten"]
    done = subprocess.run(
        command, env={**os.environ, "REGARD_ISA": "wide"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_names_the_compiled_kernel(kind: str) -> None:
    q = torch.randn(1, 2, 200, 16)
    assert plan(q, q, q, Causal(), normalize=KINDS[kind]).kernel == "native"
