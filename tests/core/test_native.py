"""The compiled kernels against the definition in float64: outputs, gradients, edges of tiles, hostile numbers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import attention, attention_with_lse, plan
from regard._plan import use_kernel
from regard.biases import Alibi, Relative
from regard.kernels import _library, native
from regard.masks import Causal, Padding, Window
from regard.normalizers import Relu, Sigmoid, Softmax
from regard.scores import Additive, Bilinear, Dot
from tests.core import cases
from tests.core.natives import as_dtype, both, error, hold, made, mechanism, shapes

NORMALIZERS = [name for name in cases.NORMALIZERS if name.startswith(("softmax", "sigmoid", "relu"))]
SCORES = [name for name in cases.SCORES if name != "distance"]


# ---------------------------------------------------------------------------- the whole table of what can be described


def table() -> list[tuple[str, str, str, str]]:
    rows = [(score, "softmax", "causal", "none") for score in SCORES]
    rows += [("dot", normalize, "offset a sample", "tensor") for normalize in NORMALIZERS]
    rows += [("dot scale", "softmax", mask, "none") for mask in cases.MASKS]
    rows += [("additive", "sigmoid", mask, "none") for mask in cases.MASKS]
    rows += [("dot", normalize, "none", bias) for normalize in NORMALIZERS for bias in cases.BIASES]
    rows += [
        ("additive a head", "softmax sink", "window or prefix", "per key and relative"),
        ("dot scale a head, soft-cap", "softmax sink", "causal and documents", "alibi"),
        ("dot scale a head, soft-cap", "relu", "dense a head", "relative"),
        ("cosine", "sigmoid", "tokens", "tensor"),
    ]
    return rows


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("names", table(), ids=" / ".join)
def test_core_outputs_and_gradients_are_the_definition(names: tuple[str, ...], dropout_p: float) -> None:
    def make(dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
        case = cases.make(*names, seed=3, dtype=dtype)
        return [*cases.inputs(seed=4, dtype=dtype), *case.learned], case.keywords | {"dropout_p": dropout_p}

    hold(both("native", make))


# ---------------------------------------------------------------------------- edges of tiles


@settings(max_examples=30, deadline=None)
@given(shapes(), st.data())
def test_drawn_shapes_strides_masks_and_biases(shape: dict[str, Any], data: st.DataObject) -> None:
    keywords = mechanism(data.draw, shape)
    threads = torch.get_num_threads()
    torch.set_num_threads(data.draw(st.sampled_from([1, 2, 5])))
    try:
        hold(both("native", lambda dtype: (made(shape, dtype), as_dtype(keywords, dtype))))
    finally:
        torch.set_num_threads(threads)


def test_equal_weights_of_the_additive_score_do_not_add_their_rounding_up() -> None:
    """The sum of 31 weights of 1/31 is rounded the same way every time: once it is in float32, twice contract 11."""
    shape = {"B": 2, "H": 1, "Hkv": 1, "Tq": 17, "Tk": 2, "D": 31, "Dv": 1, "seed": 1, "layout": "dense"}
    keywords = {"normalize": Relu(), "score": Additive(torch.ones(31) / 31)}
    output, _, exact = (found[0] for found in both("native", lambda dtype: (made(shape, dtype), keywords)))
    assert error(output, exact) <= 2e-6


@pytest.mark.parametrize("size", [1.0, 15.0], ids=["near", "far"])
@pytest.mark.parametrize("width", [16, 40, 256])
@pytest.mark.parametrize("queries", [1, 2, 4, 5])
def test_additive_scores_of_few_queries(queries: int, width: int, size: float) -> None:
    """Up to four queries have kernels of their own."""
    shape = {
        "B": 2,
        "H": 2,
        "Hkv": 1,
        "Tq": queries,
        "Tk": 201,
        "D": width,
        "Dv": 9,
        "seed": 5,
        "layout": "dense",
    }
    v = cases.leaf(6, torch.float64)(2, width)

    def make(dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
        query, key, value = (x.detach() for x in made(shape, dtype))
        leaves = [x.requires_grad_() for x in (query * size, key * size, value, v.detach().to(dtype))]
        return leaves, {"score": Additive(leaves[3]), "mask": Causal("lower_right")}

    hold(both("native", make))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [None, Causal("lower_right")])
def test_half_precisions_are_rounded_once(dtype: torch.dtype, mask: Any) -> None:
    q, k, v = (
        torch.randn(2, h, t, d).to(dtype).requires_grad_()
        for h, t, d in ((4, 77, 40), (2, 130, 40), (2, 130, 24))
    )
    with use_kernel("native"):
        output = attention(q, k, v, mask)
    grads = torch.autograd.grad(output, (q, k, v), torch.ones_like(output))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = attention(*wide, mask)
    # The gradient of the rows' sums reads the rounded output, as every kernel that saves it does.
    expected = torch.autograd.grad(exact, wide, torch.ones_like(exact))
    bound = {torch.bfloat16: 2.5e-3, torch.float16: 3.5e-4}[dtype]
    assert output.dtype == dtype and error(output.detach(), exact.detach()) <= bound
    for got, want in zip(grads, expected, strict=True):
        assert got.dtype == dtype and error(got, want) <= 2 * bound


# ---------------------------------------------------------------------------- hostile numbers


@pytest.mark.parametrize(
    "normalize", [Softmax(), Softmax(1.0), Sigmoid(), Relu()], ids=["softmax", "sink", "sigmoid", "relu"]
)
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_where_it_is_seen_and_only_there(
    normalize: Any, where: str, poison: float
) -> None:
    q, k, v = (torch.randn(1, 2, 70, 16) for _ in range(3))
    {"query": q, "key": k, "value": v}[where][0, 1, 40, 3] = poison
    for mask in (None, Causal(), Window(9, 0), torch.ones(70, 70, dtype=torch.bool).tril()):
        found = []
        for kernel in ("native", "tiled", "reference"):
            with use_kernel(kernel):
                leaves = [x.clone().requires_grad_() for x in (q, k, v)]
                output = attention(*leaves, mask, normalize=normalize)
                seen = output.detach().nan_to_num(7e7, 7e7, 7e7)
                grads = torch.autograd.grad(output[:, :, :39].sum(), leaves)
                found.append([seen, *[grad.nan_to_num(7e7, 7e7, 7e7) for grad in grads]])
        torch.testing.assert_close(found[0][0], found[2][0], rtol=2e-5, atol=2e-5)
        for ours, expected in zip(*found[:2], strict=True):
            torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)


HOSTILE: dict[str, Callable[[Tensor], Tensor]] = {
    "large scores": lambda x: x * 300.0,
    "constant": lambda x: torch.full_like(x, 0.7),
    "one-hot": lambda x: torch.eye(x.shape[-2], x.shape[-1]).expand_as(x) * 50,
    "denormal": lambda x: x * 1e-39,
    "zero": torch.zeros_like,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "score", [Dot(), Dot(softcap=5.0), Additive(torch.ones(32) / 8)], ids=["dot", "capped", "additive"]
)
def test_hostile_magnitudes(name: str, score: Any) -> None:
    torch.manual_seed(1)
    sources = [HOSTILE[name](torch.randn(1, 2, 130, 32)) for _ in range(2)] + [torch.randn(1, 2, 130, 32)]

    def make(dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
        return [x.clone().to(dtype).requires_grad_() for x in sources], {"score": score, "mask": Causal()}

    hold(both("native", make), max(float(x.abs().max()) for x in sources))


def test_additive_far_from_zero_is_right_in_both_halves() -> None:
    """Beyond 20 the exponentials of query and key are not taken apart."""
    q = torch.tensor([30.0, -25.0, 0.1, 21.0]).repeat(1, 1, 33, 4) + torch.randn(1, 1, 33, 16) * 0.3
    k = -q[:, :, :20] + torch.randn(1, 1, 20, 16) * 0.3
    v = torch.randn(1, 1, 20, 8)

    def make(dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
        return [x.clone().to(dtype).requires_grad_() for x in (q, k, v)], {"score": Additive(torch.ones(16))}

    hold(both("native", make))


def test_padding_of_any_magnitude_does_not_reach_the_rest() -> None:
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    k[:, :, 40:], v[:, :, 40:] = 3e38, -3e38
    with use_kernel("native"):
        output = attention(q, k, v, Padding(torch.tensor([40])))
    expected = attention(*(x.double() for x in (q, k[:, :, :40], v[:, :, :40])))
    assert error(output, expected) < 1e-6


# ---------------------------------------------------------------------------- memory, threads, bits


def test_nothing_is_left_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.empty

    def poisoned(*arguments: Any, **keywords: Any) -> Tensor:
        tensor = original(*arguments, **keywords)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(native.torch, "empty", poisoned)
    for D, Dv, Tq, Tk in ((16, 8, 5, 9), (33, 65, 130, 200), (64, 64, 64, 64)):
        q, k, v = (
            torch.randn(2, h, t, d).requires_grad_() for h, t, d in ((4, Tq, D), (2, Tk, D), (2, Tk, Dv))
        )
        for mask in (None, Causal(offset=-3), Padding(torch.tensor([0, 4]))):
            for normalize in (Softmax(), Sigmoid()):
                with use_kernel("native"):
                    output = attention(q, k, v, mask, normalize=normalize, bias=Alibi(offset=-3))
                grads = torch.autograd.grad(output.sum(), (q, k, v))
                assert all(bool(torch.isfinite(x).all()) for x in (output, *grads))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_same_bits_for_the_same_thread_count(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        q, k, v = (torch.randn(1, 3, 300, 32, requires_grad=True) for _ in range(3))
        table = torch.randn(3, 21, requires_grad=True)

        def run() -> list[Tensor]:
            with use_kernel("native"):
                output = attention(q, k, v, Causal(), bias=Relative(table))
            return [output, *torch.autograd.grad(output.square().sum(), (q, k, v, table))]

        first = run()
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))
    finally:
        torch.set_num_threads(before)


def test_several_python_threads_at_once() -> None:
    inputs = [[torch.randn(1, 4, 200, 32) for _ in range(3)] for _ in range(4)]
    with use_kernel("native"):
        expected = [attention(*three, Causal()) for three in inputs]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(40):
            with use_kernel("native"):
                if not torch.equal(attention(*inputs[n], Causal()), expected[n]):
                    wrong.append(n)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


FORK = """
import os, signal, sys, torch
from regard import attention
from regard.normalizers import Softmax
torch.set_num_threads(2)
q = torch.randn(1, 4, 300, 32, requires_grad=True)
bias = torch.randn(4, 300, 300, requires_grad=True)
sink = torch.randn(4, requires_grad=True)
mask, wide = torch.ones(300, 300, dtype=torch.bool).tril(), q.detach().double().requires_grad_()
calls = {
    "plain": lambda: attention(q, q, q),
    "without gradients": lambda: attention(q.detach(), q.detach(), q.detach()),
    "bool mask": lambda: attention(q, q, q, mask),
    "bias": lambda: attention(q, q, q, bias=bias[None]),
    "sink": lambda: attention(q, q, q, normalize=Softmax(sink)),
    "float64": lambda: attention(wide, wide, wide),
}
def run(output):
    leaves = [x for x in (q, bias, sink, wide) if output.requires_grad]
    return [output, *torch.autograd.grad(output.sum(), leaves, allow_unused=True)] if leaves else [output]
call = calls[sys.argv[1]]
expected = run(call())
pid = os.fork()
if not pid:
    signal.alarm(20)
    found = run(call())
    close = all(a is b is None or torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected))
    os._exit(0 if close and torch.get_num_threads() == 1 else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert all(a is b is None or torch.equal(a, b) for a, b in zip(run(call()), expected))
assert torch.get_num_threads() == 2
"""


@pytest.mark.parametrize("call", ["plain", "without gradients", "bool mask", "bias", "sink", "float64"])
def test_a_forked_child_computes_on_one_thread(call: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK, call], check=True, timeout=60)


def test_wide_lanes_pass_the_same_tests() -> None:
    """The 16-lane code, which AVX-512 runs, compiled for this processor."""
    library = _library.library()
    assert library is not None and "wide" in library.variants
    if library.variant == "wide":
        return
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", "core or hostile or drawn or half"]
    done = subprocess.run(
        command, env={**os.environ, "REGARD_ISA": "wide"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:]


# ---------------------------------------------------------------------------- what the planner says


def test_the_plan_says_what_is_compiled_and_why_not() -> None:
    q = torch.randn(1, 2, 200, 16)
    assert plan(q, q, q, Causal()).kernel == "native"
    for other, word in (
        (q.double(), "float64"),
        (torch.randn(1, 2, 200, 257), "256"),
    ):
        made = plan(other, other, other)
        assert made.kernel == "tiled" and word in made.reasons["native"]
    assert "callable" in plan(q, q, q, score=lambda a, b: a @ b.mT).reasons["native"]


@pytest.mark.parametrize("heads", list(itertools.product((1, 4), (1, 2))))
def test_the_short_way_is_the_long_way(heads: tuple[int, int]) -> None:
    groups, hkv = heads
    for dtype, T, mask in itertools.product((torch.float32, torch.bfloat16), (9, 90), (None, Causal())):
        q, k = torch.randn(2, groups * hkv, T, 24).to(dtype), torch.randn(2, hkv, T, 24).to(dtype)
        with use_kernel("native"):
            expected = attention(q, k, k, mask)
        assert error(attention(q, k, k, mask), expected) <= {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    with pytest.raises(ValueError, match="value"):
        attention(q, k, k[:, :, :-1])


def test_log_sum_exp_and_its_gradient() -> None:
    def run(kernel: str, dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, 50, 8).to(dtype).requires_grad_() for _ in range(3))
        with use_kernel(kernel):
            output, lse = attention_with_lse(q, k, v, Causal(offset=-2), normalize=Softmax(0.3))
        grads = torch.autograd.grad(output.sum() + lse[:, :, 2:].sin().sum(), (q, k, v))
        return [output.detach(), lse.detach(), *grads]

    for ours, exact in zip(run("native", torch.float32), run("reference", torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_what_was_projected_in_float32_meets_half_precision_values() -> None:
    q, k, v = (torch.randn(1, 2, 40, 16).bfloat16() for _ in range(3))
    weight = torch.randn(16, 16, requires_grad=True)
    with use_kernel("native"):
        output = attention(q, k, v, score=Bilinear(weight))
    (grad,) = torch.autograd.grad(output.sum(), weight)
    assert output.dtype == torch.bfloat16 and grad.dtype == torch.float32
    exact = attention(q.double(), k.double(), v.double(), score=Bilinear(weight.detach().double()))
    assert error(output.detach(), exact) < 4e-3


def test_dropout_next_to_1_drops_everything() -> None:
    q = torch.randn(1, 2, 300, 16)
    for p in (1.0, 1 - 1e-11):
        with use_kernel("native"):
            assert not attention(q, q, q, dropout_p=p).any()


def test_lazy_signs_and_lazy_zeros_are_read_as_they_are() -> None:
    q = torch.randn(1, 2, 200, 16)
    bias = torch.randn(200, 200, dtype=torch.complex64).conj().imag
    assert bias.is_neg()
    negative, zeros = torch._neg_view(q), torch._efficientzerotensor(tuple(q.shape))
    assert torch.equal(attention(q, q, q, bias=bias), attention(q, q, q, bias=bias.resolve_neg().clone()))
    assert torch.equal(attention(negative, q, q), attention(-q, q, q))
    assert torch.equal(attention(zeros, q, q), attention(torch.zeros_like(q), q, q))
