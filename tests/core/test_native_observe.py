"""The compiled observer: statistics of the weights in one pass, at every edge of its tiles, on what is hostile too."""

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

from regard import Observation, attention, attention_weights, attention_with_lse, observe
from regard._call import prepare
from regard._plan import use_kernel
from regard.biases import Alibi, Relative
from regard.kernels import _library, native, native_observe
from regard.kernels.native_observe import Wanted
from regard.kernels.problem import lower
from regard.masks import Causal, Dense, Padding, Prefix, Rows, Window
from regard.normalizers import Relu, Sigmoid, Softmax
from regard.scores import Additive, Bilinear, Dot

EDGES = (1, 2, 15, 16, 17, 31, 33, 63, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 257, 385)
WIDTHS = (1, 7, 8, 9, 15, 16, 17, 33)
FLOOR = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
EVERYTHING = ("lse", "max", "entropy", "received")


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def compiled_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the compiled observer should take it takes: the way that is open to every call is closed."""

    class Closed:
        def __init__(self, *_: Any) -> None:
            raise AssertionError("the compiled observer did not take the call")

    assert _library.library() is not None
    monkeypatch.setattr("regard._observe._Seen", Closed)


def statistics_of(weights: Tensor, topk: int, pool: int, rows: list[int]) -> dict[str, Tensor]:
    """From their definitions, of weights (B, H, Tq, Tk)."""
    Tq, Tk = weights.shape[-2:]
    found = {"max": weights.amax(-1), "received": weights.sum(-2), "row_weights": weights[:, :, rows]}
    found["entropy"] = torch.special.entr(weights).sum(-1)
    if topk:
        found["top_weights"] = weights.topk(min(topk, Tk), -1).values
    if pool:
        tall, across = -(-Tq // pool), -(-Tk // pool)
        whole = torch.nn.functional.pad(weights, (0, -Tk % across, 0, -Tq % tall))
        cells = whole.unflatten(-2, (-1, tall)).unflatten(-1, (-1, across))
        heights = (Tq - torch.arange(cells.shape[2]) * tall).clamp(max=tall)
        found["pooled"], found["pooled_max"] = cells.sum((-3, -1)) / heights[:, None], cells.amax((-3, -1))
    return found


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    topk: int = 0,
    pool: int = 0,
    floor: float = 2e-6,
    **keywords: Any,
) -> Observation:
    """Contract 11 for every statistic; the output to the bit; top keys that are what they are said to be."""
    rows = list(range(q.shape[2])) if q.shape[2] <= 40 else [0, q.shape[2] - 1, q.shape[2] // 2]
    seen = observe(q, k, v, mask, topk=topk, pool=pool, rows=rows, **keywords)
    again = observe(q, k, v, mask, topk=topk, pool=pool, rows=rows, **keywords)
    assert torch.equal(seen.output, attention(q, k, v, mask, **keywords))
    exact_weights = attention_weights(q.double(), k.double(), mask, **keywords)
    exact = statistics_of(exact_weights, topk, pool, rows)
    with use_kernel("reference"):
        plain = statistics_of(attention_weights(q.float(), k.float(), mask, **keywords), topk, pool, rows)
    for name, expected in exact.items():
        found = getattr(seen, name)
        assert torch.equal(found, getattr(again, name)), name
        assert found.dtype == torch.float32 and found.shape == expected.shape, name
        assert error(found, expected) <= max(2 * error(plain[name], expected), floor), name
    if topk:
        _check_top(seen, exact_weights)
    return seen


def _check_top(seen: Observation, weights: Tensor) -> None:
    top, keys = seen.top_weights, seen.top_keys
    assert bool((top[..., 1:] <= top[..., :-1]).all()) and torch.equal(top[..., 0], seen.max)
    assert torch.equal(keys == -1, top == 0) and bool((keys < weights.shape[-1]).all())
    ordered = keys.sort(-1).values
    assert not bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any())
    picked = weights.gather(-1, keys.clamp(min=0)).masked_fill(keys == -1, 0.0)
    torch.testing.assert_close(top.double(), picked, atol=1e-7, rtol=1e-3)


MASKS: dict[str, Any] = {
    "none": lambda B, H, Tq, Tk: None,
    "causal": lambda B, H, Tq, Tk: Causal("lower_right"),
    "window": lambda B, H, Tq, Tk: Window(Tk // 3, 5, "upper_left"),
    "far": lambda B, H, Tq, Tk: Window(None, -(Tk // 2), "upper_left"),
    "two runs": lambda B, H, Tq, Tk: Window(3, 0, "lower_right") | Prefix(min(2, Tk)),
    "lengths": lambda B, H, Tq, Tk: Padding(torch.tensor([Tk, Tk // 2][:B])),
    "bool": lambda B, H, Tq, Tk: randn(5, B, H, Tq, Tk) > 0.3,
    "not bool": lambda B, H, Tq, Tk: ~Dense(randn(6, Tq, Tk) > 0.9),
    "rows": lambda B, H, Tq, Tk: Rows(torch.arange(Tq) % Tk, (torch.arange(Tq) % Tk + 7).clamp(max=Tk)),
}
MECHANISMS: dict[str, Any] = {
    "softmax": lambda H, D, Tq, Tk: {},
    "sink": lambda H, D, Tq, Tk: {"normalize": Softmax(randn(1, H))},
    "sigmoid": lambda H, D, Tq, Tk: {"normalize": Sigmoid(randn(2, H))},
    "relu": lambda H, D, Tq, Tk: {"normalize": Relu()},
    "soft-cap": lambda H, D, Tq, Tk: {"score": Dot(randn(3, H), softcap=2.0)},
    "additive": lambda H, D, Tq, Tk: {"score": Additive(randn(4, D))},
    "bilinear": lambda H, D, Tq, Tk: {"score": Bilinear(randn(5, D, D) / D)},
    "alibi": lambda H, D, Tq, Tk: {"bias": Alibi()},
    "table": lambda H, D, Tq, Tk: {"bias": Relative(randn(6, H, 5)), "normalize": Sigmoid()},
    "pairs": lambda H, D, Tq, Tk: {"bias": randn(7, 1, H, Tq, Tk)},
    "keys": lambda H, D, Tq, Tk: {"bias": randn(8, 1, 1, 1, Tk)},
}
POSITIONED = ("alibi", "table")
LAYOUTS: dict[str, Any] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([x, x + 1], -1)[..., : x.shape[-1]],
    "not unit": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:1].expand(x.shape),
}


@settings(max_examples=40)
@given(
    sizes=st.tuples(st.sampled_from(EDGES), st.sampled_from(EDGES)),
    widths=st.tuples(st.sampled_from(WIDTHS), st.sampled_from(WIDTHS)),
    heads=st.sampled_from([(1, 1, 1), (1, 4, 2), (2, 3, 1), (2, 2, 2)]),
    mask=st.sampled_from(sorted(MASKS)),
    mechanism=st.sampled_from(sorted(MECHANISMS)),
    layouts=st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 3),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    topk=st.sampled_from([0, 1, 2, 8, 64]),
    pool=st.sampled_from([0, 1, 2, 7, 40, 1000]),
    threads=st.sampled_from([1, 2]),
)
def test_any_call(
    sizes: tuple[int, int],
    widths: tuple[int, int],
    heads: tuple[int, int, int],
    mask: str,
    mechanism: str,
    layouts: tuple[str, str, str],
    dtype: torch.dtype,
    topk: int,
    pool: int,
    threads: int,
) -> None:
    (Tq, Tk), (D, Dv), (B, H, Hkv) = sizes, widths, heads
    q, k, v = randn(1, B, H, Tq, D), randn(2, B, Hkv, Tk, D), randn(3, B, Hkv, Tk, Dv)
    q, k, v = (LAYOUTS[name](x.to(dtype)) for name, x in zip(layouts, (q, k, v), strict=True))
    given_mask = MASKS[mask](B, H, Tq, Tk)
    if mechanism in POSITIONED and Tq != Tk and (given_mask is None or mask in ("bool", "lengths", "rows")):
        given_mask = Causal("lower_right")
    if mechanism in POSITIONED and mask == "not bool":
        given_mask = Window(9, 9, "upper_left")
    _with_threads(
        threads, lambda: check(q, k, v, given_mask, topk, pool, **MECHANISMS[mechanism](H, D, Tq, Tk))
    )


def _with_threads(threads: int, run: Any) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("pool", [1, 3, 10, 77, 400])
def test_rows_of_cells_across_blocks_and_threads(pool: int, threads: int) -> None:
    """One head: its blocks are split among threads, and cells reach over the splits."""
    q, k, v = randn(1, 1, 1, 391, 4), randn(2, 1, 1, 400, 4), randn(3, 1, 1, 400, 3)
    seen = _with_threads(threads, lambda: check(q, k, v, Causal("lower_right"), 4, pool))
    torch.testing.assert_close(seen.pooled.sum(-1), torch.ones(seen.pooled.shape[:-1]), atol=1e-5, rtol=0)


def test_log_sum_exp_and_dropout() -> None:
    q, k, v = randn(1, 2, 4, 70, 16), randn(2, 2, 2, 210, 16), randn(3, 2, 2, 210, 8)
    for keywords in ({}, {"normalize": Softmax(3.0)}, {"mask": Window(None, -100, "upper_left")}):
        seen = observe(q, k, v, **keywords)
        assert torch.equal(seen.lse, attention_with_lse(q, k, v, **keywords)[1])
    for keywords in ({}, {"normalize": Sigmoid()}):
        plain = observe(q, k, v, **keywords, topk=3, pool=9)
        torch.manual_seed(7)
        seen = observe(q, k, v, **keywords, topk=3, pool=9, dropout_p=0.4)
        torch.manual_seed(7)
        assert torch.equal(seen.output, attention(q, k, v, **keywords, dropout_p=0.4))
        assert not torch.equal(seen.output, plain.output)
        for name in ("max", "entropy", "received", "top_weights", "top_keys", "pooled", "pooled_max"):
            assert torch.equal(getattr(seen, name), getattr(plain, name)), name


HOSTILE = {
    "large": (randn(1, 1, 2, 40, 16) * 300, randn(2, 1, 2, 230, 16) * 30),
    "constant": (torch.ones(1, 2, 40, 16), torch.ones(1, 2, 230, 16)),
    "zero": (torch.zeros(1, 2, 40, 16), randn(3, 1, 2, 230, 16)),
    "one-hot": (
        torch.eye(16).repeat(3, 1)[:40].expand(1, 2, 40, 16) * 400,
        torch.eye(16).repeat(15, 1)[:230].expand(1, 2, 230, 16),
    ),
    "denormal": (randn(4, 1, 2, 40, 16) * 1e-40, randn(5, 1, 2, 230, 16) * 1e-3),
    "rising": (torch.ones(1, 2, 40, 16), torch.arange(230.0)[:, None].expand(1, 2, 230, 16) / 64),
    "falling": (-torch.ones(1, 2, 40, 16), torch.arange(230.0)[:, None].expand(1, 2, 230, 16) / 64),
}


@pytest.mark.parametrize("normalize", [Softmax(), Softmax(2.0), Sigmoid(), Relu()], ids=str)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_numbers(name: str, normalize: Any) -> None:
    (q, k), v = HOSTILE[name], randn(9, 1, 2, 230, 5)
    # What rounding does to a score it does to the logarithm of a weight, and the more so the larger the score.
    floor = max(2e-6, 2e-7 * float((q @ k.mT).abs().max()) / 4)
    for mask in (None, Causal("lower_right")):
        check(q, k, v, mask, 8, 9, floor, normalize=normalize)


def test_of_equal_weights_the_first_keys_are_the_top() -> None:
    v = randn(1, 1, 1, 300, 2)
    seen = observe(torch.zeros(1, 1, 50, 8), randn(2, 1, 1, 300, 8), v, Causal(offset=250), topk=8)
    assert torch.equal(seen.top_keys, torch.arange(8).expand(1, 1, 50, 8))
    seen = observe(torch.zeros(1, 1, 50, 8), randn(2, 1, 1, 300, 8), v, Window(3, 0, offset=100), topk=8)
    rows = torch.arange(50)[:, None] + 97 + torch.arange(4)
    assert torch.equal(seen.top_keys[0, 0, :, :4], rows) and bool((seen.top_keys[..., 4:] == -1).all())


@pytest.mark.parametrize("normalize", [Softmax(), Sigmoid(), Relu()], ids=str)
@pytest.mark.parametrize("what", ["inf key", "nan key", "nan query", "nan value", "overflow"])
@pytest.mark.parametrize("blocked", [False, True])
def test_what_is_not_finite_is_left_to_who_looks(
    monkeypatch: pytest.MonkeyPatch, what: str, blocked: bool, normalize: Any
) -> None:
    q, k, v = randn(1, 1, 2, 40, 8), randn(2, 1, 2, 50, 8), randn(3, 1, 2, 50, 4)
    tensor = {"query": q, "value": v}.get(what.split()[-1], k)
    tensor[0, 1, 30, 3] = {"inf": torch.inf, "nan": torch.nan, "overflow": 3e38}[what.split()[0]]
    if what == "overflow":  # of one key's scores, and of no others
        q[..., 3] = -3e38 * torch.arange(1, 41).remainder(2)
        k[..., 3] = k[..., 3].where(k[..., 3] == tensor.max(), 1e-3)
    mask = Padding(29) if blocked and what != "nan query" else None
    wanted = Wanted(frozenset(EVERYTHING), 4, 7, (1, 39))
    found = native_observe.observe(lower(prepare(q, k, v, mask, Dot(), normalize, None), False), wanted)
    monkeypatch.undo()
    seen = observe(q, k, v, mask, normalize=normalize, topk=4, pool=7, rows=(1, 39))
    monkeypatch.setattr(native_observe, "refuses", lambda *_: "left out")
    careful = observe(q, k, v, mask, normalize=normalize, topk=4, pool=7, rows=(1, 39))
    for name in (*EVERYTHING, "pooled", "pooled_max", "row_weights", "top_weights"):
        one, other = getattr(seen, name), getattr(careful, name)
        if other is not None and not (name == "lse" and found is not None):
            torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5, equal_nan=True, msg=name)
    if found is None:
        assert torch.equal(seen.output.isnan(), attention(q, k, v, mask, normalize=normalize).isnan())
    else:
        assert all(bool(x.isfinite().all()) for name, x in found.statistics.items() if name != "lse")


def test_whatever_is_in_the_room_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = randn(1, 1, 3, 140, 8), randn(2, 1, 3, 200, 8), randn(3, 1, 3, 200, 5)
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs).fill_(-7 if kwargs.get("dtype") == torch.int64 else torch.nan)

    for keywords in ({}, {"mask": Window(None, -60, "upper_left")}, {"normalize": Relu()}):
        clean = observe(q, k, v, **keywords, topk=5, pool=11, rows=(3,))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", poisoned)
            seen = observe(q, k, v, **keywords, topk=5, pool=11, rows=(3,))
        for name, tensor in vars(clean).items():
            if tensor is not None:
                assert torch.equal(getattr(seen, name), tensor), name


def test_one_pass_and_no_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = randn(1, 1, 2, 150, 8), randn(2, 1, 2, 150, 8), randn(3, 1, 2, 150, 8)
    expected = attention(q, k, v, Causal())
    calls: list[int] = []
    run = native._call
    monkeypatch.setattr(native, "_call", lambda which, *rest: calls.append(which) or run(which, *rest))
    seen = observe(q, k, v, Causal(), topk=2, pool=8)
    assert len(calls) == 1 and torch.equal(seen.output, expected)
    leaf = q.clone().requires_grad_()
    seen = observe(leaf, k, v, Causal(), topk=2, pool=8)
    assert len(calls) == 3 and torch.equal(seen.output, expected) and seen.output.requires_grad
    assert not any(x.requires_grad for name, x in vars(seen).items() if name != "output" and x is not None)


@pytest.mark.parametrize("Tq", [1, 3, 16, 17])
def test_few_queries_that_another_kernel_may_take(Tq: int) -> None:
    check(randn(1, 2, 8, Tq, 16), randn(2, 2, 2, 400, 16), randn(3, 2, 2, 400, 16), None, 8, 16)
    check(
        randn(1, 2, 8, Tq, 16), randn(2, 2, 2, 400, 16), randn(3, 2, 2, 400, 16), Causal("lower_right"), 8, 16
    )


def test_what_it_does_not_take() -> None:
    q = randn(1, 1, 1, 20, 4)
    wanted = Wanted(frozenset(EVERYTHING), 0, 0, None)

    def reason(tensor: Tensor, wanted: Wanted = wanted, normalize: Any = None, score: Any = None) -> str:
        call = prepare(tensor, tensor, tensor, None, score or Dot(), normalize or Softmax(), None)
        return str(native_observe.refuses(call, wanted))

    assert reason(q) == "None"
    assert "at most 64 top weights, not 65" in reason(q, wanted._replace(topk=65))
    assert "float64" in reason(q.double())
    assert "callable" in reason(q, score=lambda q, k: q @ k.mT)
    assert "function" in reason(q, normalize=lambda s: s.softmax(-1))
    assert "nothing to see" in reason(q[:, :, :0])


PROGRAM = """
import sys, torch
from regard import observe
from regard.masks import Causal
torch.set_num_threads(1)
T = int(sys.argv[1])
def memory(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024
q, k, v = (torch.randn(1, 2, T, 16) for _ in range(3))
observe(q[:, :, :200], k[:, :, :200], v[:, :, :200], topk=8, pool=256)
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
observe(q, k, v, topk=8, pool=256, rows=(0, T - 1))
print(memory("VmHWM") - before)
"""


def test_memory_is_linear() -> None:
    peaks = []
    for length in (4096, 8192):
        command = [sys.executable, "-c", PROGRAM, str(length)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(float(done.stdout))
    assert peaks[0] < 12 and peaks[1] < 2.4 * peaks[0]  # MiB; the weights would be 128 and 512


def test_the_wide_copy_of_the_kernels() -> None:
    assert _library.library() is not None and "wide" in _library.library().compiled
    tests = ["test_rows_of_cells_across_blocks_and_threads", "test_hostile_numbers", "test_any_call"]
    tests += ["test_of_equal_weights_the_first_keys_are_the_top", "test_log_sum_exp_and_dropout"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        " or ".join(tests),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"REGARD_ISA": "wide"})
    assert done.returncode == 0, done.stdout[-3000:]
