"""Observation: the same output to the bit, and statistics equal to those of the weights written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import Observation, attention, attention_weights, attention_with_lse, observe
from regard._plan import use_kernel
from regard.biases import Alibi, Relative
from regard.kernels import inline, native_observe
from regard.masks import Causal, Dense, Documents, Padding, Prefix, Rule, Window
from regard.normalizers import Entmax, Entmax15, Relu, Sigmoid, Softmax, Sparsemax
from regard.scores import Additive, Cosine, Distance, Dot, Modified

B, H, HKV, TQ, TK, D, DV = 2, 4, 2, 23, 29, 8, 5
FIELDS = (
    "lse",
    "max",
    "entropy",
    "received",
    "top_weights",
    "top_keys",
    "pooled",
    "pooled_max",
    "row_weights",
)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = randn(1, B, H, TQ, D) * 2, randn(2, B, HKV, TK, D), randn(3, B, HKV, TK, DV)
HOLES = randn(4, B, TK) > 0
MASKS: dict[str, Any] = {
    "none": None,
    "causal": Causal("lower_right"),
    "empty rows": Causal(offset=-5),
    "window": Window(4, 2, "lower_right"),
    "two runs": Window(3, 0, "lower_right") | Prefix(2),
    "lengths": Padding(torch.tensor([TK, 0])),
    "holes": Padding.of(HOLES),
    "documents": Documents(torch.arange(TQ) // 6, torch.arange(TK) // 7),
    "bool": Dense(randn(5, B, H, TQ, TK) > 0.8),
    "rule": Rule(lambda b, h, q, k: (q + h) % 5 > k % 3),
    "nothing": Window(None, -100, "upper_left"),
}
NORMALIZERS = [Softmax(), Softmax(1.0), Sparsemax(), Entmax15(), Entmax(1.2), Sigmoid(), Relu()]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows even at these sizes."""
    monkeypatch.setattr(inline, "_BUDGET", B * H * TK * 5)


@pytest.fixture(params=["as it comes", "block by block"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Statistics as this machine takes them, and by the way that is open to every call."""
    if request.param == "block by block":
        monkeypatch.setattr(native_observe, "refuses", lambda *_: "left out")
    return str(request.param)


def written_out(weights: Tensor, topk: int, pool: int) -> dict[str, Tensor]:
    """The statistics of weights (..., H, Tq, Tk), from their definitions."""
    Tq, Tk = weights.shape[-2:]
    found = {"max": weights.amax(-1) if Tk else weights.sum(-1), "received": weights.sum(-2)}
    found["entropy"] = -(weights * weights.clamp(min=1e-45).log()).sum(-1)
    found["top_weights"] = weights.sort(-1, descending=True).values[..., :topk]
    tall, across = -(-Tq // pool), -(-Tk // pool)
    rows, columns = range(0, Tq, max(1, tall)), range(0, Tk, max(1, across))
    cells = [[weights[..., i : i + tall, j : j + across] for j in columns] for i in rows]
    if rows and columns:
        found["pooled"] = torch.stack(
            [torch.stack([cell.sum(-1).mean(-1) for cell in row], -1) for row in cells], -2
        )
        found["pooled_max"] = torch.stack(
            [torch.stack([cell.amax((-1, -2)) for cell in row], -1) for row in cells], -2
        )
    return found


def check(seen: Observation, weights: Tensor, topk: int, pool: int) -> None:
    for name, expected in written_out(weights, topk, pool).items():
        torch.testing.assert_close(getattr(seen, name), expected, atol=1e-5, rtol=1e-5, msg=name)
    keys = seen.top_keys
    assert keys.dtype == torch.int64 and bool(((keys == -1) == (seen.top_weights == 0)).all())
    picked = weights.gather(-1, keys.clamp(min=0)).masked_fill(keys == -1, 0.0)
    torch.testing.assert_close(picked, seen.top_weights, atol=1e-5, rtol=1e-5)
    ordered = keys.sort(-1).values
    assert not bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any())


@pytest.mark.parametrize("normalize", NORMALIZERS, ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.usefixtures("way")
def test_statistics_of_every_mask_and_normalizer(name: str, normalize: Any) -> None:
    keywords = {"mask": MASKS[name], "normalize": normalize}
    seen = observe(Q, K, V, **keywords, topk=4, pool=6)
    assert torch.equal(seen.output, attention(Q, K, V, **keywords))
    check(seen, attention_weights(Q, K, **keywords), 4, 6)
    if isinstance(normalize, Softmax):
        torch.testing.assert_close(seen.lse, attention_with_lse(Q, K, V, **keywords)[1], atol=1e-5, rtol=1e-5)
    else:
        assert seen.lse is None


@pytest.mark.parametrize(
    "keywords",
    [
        {"score": Additive(randn(6, D))},
        {"score": Cosine(4.0), "bias": Relative(randn(7, H, 5), "lower_right")},
        {"score": Distance(0.1), "bias": Alibi(alignment="lower_right")},
        {"score": Dot(0.5, softcap=1.0), "bias": randn(8, B, 1, 1, TK)},
        {"score": Modified(Dot(), lambda s, b, h, q, k: s - 0.1 * (q - k).abs())},
        {"score": lambda q, k: -torch.cdist(q, k, p=1.0)},
        {"normalize": lambda s: torch.softmax(2 * s, -1)},
        {"bias": randn(9, TQ, TK).masked_fill(randn(10, TQ, TK) > 0, -torch.inf)},
    ],
    ids=[
        "additive",
        "cosine",
        "distance",
        "soft-cap",
        "modified",
        "callable",
        "normalizer",
        "minus infinity",
    ],
)
@pytest.mark.usefixtures("way")
def test_statistics_of_every_score_and_bias(keywords: dict[str, Any]) -> None:
    mask = Causal("lower_right")
    seen = observe(Q, K, V, mask, **keywords, topk=3, pool=5)
    assert torch.equal(seen.output, attention(Q, K, V, mask, **keywords))
    check(seen, attention_weights(Q, K, mask, **keywords), 3, 5)


@settings(max_examples=40)
@given(
    Tq=st.integers(0, 17),
    Tk=st.integers(0, 17),
    topk=st.integers(1, 25),
    pool=st.integers(1, 25),
    offset=st.integers(-12, 12),
    left=st.integers(0, 20),
)
def test_any_sizes_of_anything(Tq: int, Tk: int, topk: int, pool: int, offset: int, left: int) -> None:
    q, k, v = randn(Tq, 2, Tq, 4), randn(Tk, 2, Tk, 4), randn(99, 2, Tk, 3)
    mask = Window(left, 1, offset=offset)
    seen = observe(q, k, v, mask, topk=topk, pool=pool)
    weights = attention_weights(q, k, mask)
    assert torch.equal(seen.output, attention(q, k, v, mask))
    assert seen.top_weights.shape == seen.top_keys.shape == (2, Tq, min(topk, Tk))
    rows, columns = seen.pooled.shape[-2:]
    assert rows <= pool and columns <= pool and (rows > 0) == (Tq > 0) and (columns > 0) == (Tk > 0)
    check(seen, weights, min(topk, Tk), pool)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
def test_shapes_are_those_of_the_query(shape: tuple[int, ...]) -> None:
    q, k, v = randn(1, *shape, 6, 4), randn(2, *shape, 7, 4), randn(3, *shape, 7, 5)
    seen = observe(q, k, v, topk=2, pool=3)
    assert seen.output.shape == (*shape, 6, 5)
    assert seen.lse.shape == seen.max.shape == seen.entropy.shape == (*shape, 6)
    assert seen.received.shape == (*shape, 7)
    assert seen.top_weights.shape == seen.top_keys.shape == (*shape, 6, 2)
    assert seen.pooled.shape == seen.pooled_max.shape == (*shape, 3, 3)


@pytest.mark.usefixtures("way")
def test_numbers_that_are_known() -> None:
    q, k, v = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 8, 2), torch.ones(1, 1, 8, 1)
    seen = observe(q, k, v, Padding(4), topk=5, pool=2)
    log4 = torch.tensor(4.0).log()
    torch.testing.assert_close(seen.entropy, log4.expand(1, 1, 4))
    torch.testing.assert_close(seen.lse, log4.expand(1, 1, 4))
    torch.testing.assert_close(seen.max, torch.full((1, 1, 4), 0.25))
    torch.testing.assert_close(seen.received, torch.tensor([1.0] * 4 + [0.0] * 4)[None, None])
    torch.testing.assert_close(seen.pooled, torch.tensor([[1.0, 0.0], [1.0, 0.0]])[None, None])
    torch.testing.assert_close(seen.pooled_max, torch.tensor([[0.25, 0.0], [0.25, 0.0]])[None, None])
    assert bool((seen.top_keys[..., 4] == -1).all())


@pytest.mark.parametrize("normalize", NORMALIZERS, ids=str)
@pytest.mark.usefixtures("way")
def test_rows_that_see_nothing(normalize: Any) -> None:
    for keys, mask in ((TK, Window(None, -100, "upper_left")), (0, None)):
        seen = observe(Q, K[:, :, :keys], V[:, :, :keys], mask, normalize=normalize, topk=2, pool=3)
        for name in ("output", "max", "entropy", "received", "top_weights", "pooled", "pooled_max"):
            assert not getattr(seen, name).any(), name
        assert bool((seen.top_keys == -1).all())
        assert seen.lse is None or bool((seen.lse == -torch.inf).all())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("rows", [(), [0], (22, -23, 7, 7), range(0, 23, 5), torch.tensor([3, -1])], ids=str)
def test_chosen_rows(rows: Any) -> None:
    for mask in (None, Causal("lower_right"), Window(None, -100, "upper_left")):
        seen = observe(Q, K, V, mask, statistics=(), rows=rows)
        expected = attention_weights(Q, K, mask)[:, :, list(rows)]
        torch.testing.assert_close(seen.row_weights, expected, atol=1e-6, rtol=1e-5)
        assert seen.row_weights.shape == (B, H, len(rows), TK)
        assert torch.equal(seen.output, attention(Q, K, V, mask))
    assert observe(Q[0, 0], K[0, 0], V[0, 0], rows=rows).row_weights.shape == (len(rows), TK)


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        (5, TypeError, "a sequence of row numbers"),
        ("5", TypeError, "a sequence of row numbers"),
        (torch.tensor(5), TypeError, "a sequence of row numbers"),
        ([1.0], TypeError, "whole numbers"),
        (torch.tensor([True]), TypeError, "whole numbers"),
        ([23], ValueError, "from -23 to 22"),
        ([-24], ValueError, "from -23 to 22"),
    ],
)
def test_rows_that_there_are_not(rows: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        observe(Q, K, V, rows=rows)


def test_only_what_was_asked_for_comes_back() -> None:
    for asked in ((), ("lse",), ("max", "received"), ["entropy"], {"lse", "max"}):
        seen = observe(Q, K, V, statistics=asked)
        assert {name for name in FIELDS if getattr(seen, name) is not None} == set(asked)
        assert torch.equal(seen.output, attention(Q, K, V))
    assert observe(Q, K, V, statistics=(), topk=1).top_keys is not None
    assert observe(Q, K, V, statistics=(), pool=1).pooled is not None
    assert observe(Q, K, V, statistics=(), rows=()).row_weights is not None
    assert observe(Q, K, V, statistics=("lse", "lse")).lse is not None


@pytest.mark.parametrize("kernel", ["reference", "tiled", "inline", "direct"])
def test_every_kernel_is_watched_without_a_change(kernel: str) -> None:
    k, v = K.repeat_interleave(2, 1), V.repeat_interleave(2, 1)
    with use_kernel(kernel):
        seen = observe(Q, k, v, topk=2, pool=4)
        assert torch.equal(seen.output, attention(Q, k, v))
    check(seen, attention_weights(Q, k), 2, 4)


def test_the_output_is_differentiable_and_statistics_are_detached() -> None:
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    seen = observe(*leaves, Causal("lower_right"), dropout_p=0.0, topk=2, pool=4, rows=(0,))
    assert all(not getattr(seen, name).requires_grad for name in FIELDS)
    found = torch.autograd.grad(seen.output.cos().sum(), leaves)
    expected = torch.autograd.grad(attention(*leaves, Causal("lower_right")).cos().sum(), leaves)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_key_that_is_not_finite_shows_in_the_rows_that_see_it() -> None:
    k = K.clone()
    k[:, :, 20] = torch.nan
    seen, clean = observe(Q, k, V, Causal("upper_left")), observe(Q, K, V, Causal("upper_left"))
    for name in ("max", "entropy", "lse"):
        one, other = getattr(seen, name)[..., :20], getattr(clean, name)[..., :20]
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6, msg=name)
        assert bool(getattr(seen, name)[..., 20:].isnan().all()), name


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the statistics' making is as large as the weights."""
    monkeypatch.undo()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for item in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(item, Tensor):
                    largest = max(largest, item.untyped_storage().nbytes() // item.element_size())
            return out

    T = 4096
    q = randn(1, T, 8)
    with Watch():
        observe(q, q, q, Causal(), topk=4, pool=64)
    assert T * 8 <= largest <= T * T // 8
