"""torch.compile, torch.export, vmap, torch.func, opcheck, checkpoint, threads: built-ins are a registered operator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import attention, biases, masks, normalizers, scores
from regard._call import prepare
from regard._plan import use_kernel
from regard.kernels import problem
from regard.masks import Causal, Documents, Padding, Prefix, Rule, Window
from tests.core import cases

# What torch says of itself, on import of its own modules.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

COMPILED: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {},
    "causal": lambda: {"mask": Causal()},
    "window or prefix": lambda: {"mask": Window(9, 0) | Prefix(3)},
    "documents": lambda: {"mask": Causal() & Documents(torch.arange(128) // 30)},
    "padding": lambda: {"mask": Padding(torch.tensor([100]))},
    "bool": lambda: {"mask": torch.ones(128, 128, dtype=torch.bool).tril()},
    "alibi": lambda: {"bias": biases.Alibi(), "mask": Causal()},
    "additive": lambda: {"score": scores.Additive(torch.ones(16))},
    "entmax": lambda: {"normalize": normalizers.Entmax(1.5)},
    "score of your own": lambda: {"score": lambda q, k: (q * 0.3) @ k.mT},
    "score_mod": lambda: {
        "score": scores.Modified(scores.Dot(), lambda s, b, h, i, j: s - (i - j).abs() * 0.1)
    },
    "rule": lambda: {"mask": Rule(lambda b, h, i, j: j <= i)},
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaves(*shape: int) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_whole_and_matches(name: str) -> None:
    q, k, v = leaves(1, 2, 128, 16)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, **COMPILED[name]())

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for got, expected in zip(_with_gradients(compiled, q, k, v), _with_gradients(run, q, k, v), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def _with_gradients(run: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    output = run(*inputs)
    return [output, *torch.autograd.grad(output.sin().sum(), inputs)]


def test_inductor_compiles_4096_within_20_seconds_and_matches() -> None:
    q, k, v = leaves(1, 1, 4096, 16)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, Causal(), bias=biases.Alibi())

    eager_start = time.thread_time()
    expected = _with_gradients(run, q, k, v)
    eager = time.thread_time() - eager_start
    start = time.thread_time()
    got = _with_gradients(torch.compile(run, fullgraph=True), q, k, v)
    assert time.thread_time() - start - eager <= 20
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["offset", "length"])
def test_a_changing_offset_recompiles_at_most_twice(how: str) -> None:
    q, k, v = leaves(1, 2, 64, 16)
    counter = torch._dynamo.testing.CompileCounter()

    def by_offset(q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        return attention(q[:, :, :1], k, v, Causal(offset=n))

    def by_length(q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        return attention(q[:, :, :1], k[:, :, : n + 1], v[:, :, : n + 1], Causal("lower_right"))

    run = by_offset if how == "offset" else by_length
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for n in range(5, 25, 3):
        torch.testing.assert_close(compiled(q, k, v, n), run(q, k, v, n))
    assert counter.frame_count <= 3


def test_too_many_blocks_of_a_callable_are_refused_when_traced() -> None:
    q = torch.randn(1, 1, 20000, 2)
    compiled = torch.compile(
        lambda q: attention(q, q, q, score=lambda a, b: a @ b.mT), fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match="64 at most"):
        compiled(q)


def test_interleaved_documents_are_refused_when_traced_and_right_in_eager() -> None:
    q = torch.randn(1, 1, 6, 4)
    ids = torch.tensor([0, 1, 0, 1, 0, 1])
    expected = attention(q, q, q, ids[:, None] == ids)
    torch.testing.assert_close(attention(q, q, q, Documents(ids)), expected)
    compiled = torch.compile(
        lambda q, ids: attention(q, q, q, Documents(ids)), fullgraph=True, backend="eager"
    )
    with pytest.raises(ValueError, match="Documents: expected each document's keys together"):
        compiled(q, ids)


class Attends(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, Window(30, 0), bias=biases.Alibi())


@pytest.mark.parametrize("strict", [True, False])
def test_exports_with_a_dynamic_length(strict: bool) -> None:
    inputs = tuple(torch.randn(1, 2, 40, 8) for _ in range(3))
    T = torch.export.Dim("T", min=2, max=4096)
    shapes = {"q": {2: T}, "k": {2: T}, "v": {2: T}}
    exported = torch.export.export(Attends(), inputs, dynamic_shapes=shapes, strict=strict)
    other = [torch.randn(1, 2, 77, 8) for _ in range(3)]
    torch.testing.assert_close(exported.module()(*other), Attends()(*other))


# ------------------------------------------------------------------ vmap and torch.func

EVERY = [
    *[(score, "softmax", "causal", "none") for score in cases.SCORES],
    *[("dot", normalize, "causal", "none") for normalize in cases.NORMALIZERS],
    *[("dot", "softmax", mask, "none") for mask in cases.MASKS if mask != "causal and documents"],
    ("dot", "softmax", "causal and documents", "none"),
    *[("dot", "softmax", "none", bias) for bias in cases.BIASES],
]


def samples(n: int = 3) -> list[list[Tensor]]:
    return [[x.detach() for x in cases.inputs(seed)] for seed in range(n)]


@pytest.mark.parametrize("names", EVERY, ids=" / ".join)
def test_vmap_and_its_gradient_equal_a_loop(names: tuple[str, ...]) -> None:
    case = cases.make(*names)
    each = samples()
    stacked = [torch.stack(parts) for parts in zip(*each, strict=True)]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, **case.keywords)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return run(q, k, v).sin().sum()

    torch.testing.assert_close(torch.func.vmap(run)(*stacked), torch.stack([run(*one) for one in each]))
    found = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*stacked)
    for n, one in enumerate(each):
        fresh_inputs = [x.clone().requires_grad_() for x in one]
        expected = torch.autograd.grad(loss(*fresh_inputs), fresh_inputs)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got[n], want)


def test_vmap_over_a_parameter_and_not_over_the_inputs() -> None:
    (q, k, v), sinks = samples(1)[0], torch.randn(5, cases.H, dtype=torch.float64)

    def run(sink: Tensor) -> Tensor:
        return attention(q, k, v, normalize=normalizers.Softmax(sink))

    torch.testing.assert_close(torch.func.vmap(run)(sinks), torch.stack([run(sink) for sink in sinks]))
    by_jacobian = torch.func.jacrev(lambda sink: run(sink).sum((0, 2, 3)))(sinks[0])
    sink = sinks[0].clone().requires_grad_()
    (expected,) = torch.autograd.grad(run(sink).sum(), sink)
    torch.testing.assert_close(by_jacobian.diagonal(), expected)


@pytest.mark.parametrize("names", EVERY, ids=" / ".join)
def test_forward_mode_equals_reverse_mode(names: tuple[str, ...]) -> None:
    case, (q, k, v) = cases.make(*names), samples(1)[0]
    tangent = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(2))

    def loss(q: Tensor) -> Tensor:
        return attention(q, k, v, **case.keywords).sin().sum()

    _, forward = torch.func.jvp(loss, (q,), (tangent,))
    torch.testing.assert_close(forward, (torch.func.grad(loss)(q) * tangent).sum())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, tangent)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent, forward)


def test_second_derivatives_through_torch_func() -> None:
    q, k, v = (torch.randn(1, 1, 3, 2, dtype=torch.float64) for _ in range(3))

    def loss(q: Tensor) -> Tensor:
        return attention(q, k, v, Causal()).sin().sum()

    reverse = torch.func.jacrev(torch.func.grad(loss))(q)
    forward = torch.func.jacfwd(torch.func.grad(loss))(q)
    torch.testing.assert_close(reverse, forward)


KERNELS = [("tiled", names) for names in EVERY] + [
    ("native", names) for names in EVERY if names[0] != "distance"
]


@pytest.mark.parametrize("kernel, names", KERNELS, ids=str)
def test_gradients_in_a_batch_equal_a_loop(kernel: str, names: tuple[str, ...]) -> None:
    dtype = torch.float64 if kernel == "tiled" else torch.float32
    case = cases.make(*names, dtype=dtype)
    inputs = [*cases.inputs(dtype=dtype), *case.learned]
    with use_kernel(kernel):
        output = attention(*inputs[:3], **case.keywords)
    upstream = torch.randn(3, *output.shape, dtype=dtype, generator=torch.Generator().manual_seed(5))
    found = torch.autograd.grad(output, inputs, upstream, is_grads_batched=True, retain_graph=True)
    for n, one in enumerate(upstream):
        expected = torch.autograd.grad(output, inputs, one, retain_graph=True)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got[n], want)


def test_jacobian_and_hessian_in_one_batch() -> None:
    q, k, v = (torch.randn(1, 2, 3, 2, dtype=torch.float64) for _ in range(3))

    def run(q: Tensor, k: Tensor) -> Tensor:
        with use_kernel("tiled"):
            return attention(q, k, v, Causal())

    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    for got, want in zip(jacobian(run, (q, k), vectorize=True), jacobian(run, (q, k)), strict=True):
        torch.testing.assert_close(got, want)

    def loss(q: Tensor) -> Tensor:
        return run(q, k).sin().sum()

    torch.testing.assert_close(hessian(loss, q, vectorize=True), hessian(loss, q))


# ------------------------------------------------------------------ the operator itself


@pytest.mark.parametrize("names", [EVERY[0], EVERY[2], EVERY[13], EVERY[15], EVERY[-1]], ids=" / ".join)
def test_opcheck(names: tuple[str, ...]) -> None:
    case, (q, k, v) = cases.make(*names), cases.inputs()
    keywords = case.keywords
    call = prepare(q, k, v, keywords["mask"], keywords["score"], keywords["normalize"], keywords["bias"])
    arguments = [
        item.detach().requires_grad_(item.requires_grad) if isinstance(item, Tensor) else item
        for item in problem.lower(call, True)
    ]
    torch.library.opcheck(torch.ops.regard.attend.default, tuple(arguments))


def test_checkpoint_and_deterministic_mode() -> None:
    q, k, v = leaves(2, 2, 30, 8)
    expected = _with_gradients(lambda q, k, v: attention(q, k, v, Causal(), bias=biases.Alibi()), q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        got = _with_gradients(
            lambda q, k, v: torch.utils.checkpoint.checkpoint(  # type: ignore[no-any-return]
                lambda q, k, v: attention(q, k, v, Causal(), bias=biases.Alibi()),
                q,
                k,
                v,
                use_reentrant=False,
            ),
            *(q, k, v),
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_shapes_alone_under_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for length in (5, 300):
            q = torch.randn(1, 2, length, 8)
            assert attention(q, q, q, Causal()).shape == q.shape


def test_several_threads_at_once() -> None:
    q, k, v = leaves(1, 2, 100, 8)
    expected = _with_gradients(lambda q, k, v: attention(q, k, v, Causal()), q, k, v)
    wrong: list[str] = []

    def work() -> None:
        for _ in range(10):
            got = _with_gradients(lambda q, k, v: attention(q, k, v, Causal()), q, k, v)
            if not all(torch.equal(one, other) for one, other in zip(got, expected, strict=True)):
                wrong.append("other bits")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_masks_of_one_call_may_be_built_in_the_graph() -> None:
    q = torch.randn(2, 2, 20, 8)
    lengths = torch.tensor([20, 7])

    def run(q: Tensor, lengths: Tensor) -> Tensor:
        return attention(q, q, q, masks.Padding(lengths) & masks.Causal())

    torch.testing.assert_close(
        torch.compile(run, fullgraph=True, backend="aot_eager")(q, lengths), run(q, lengths)
    )
