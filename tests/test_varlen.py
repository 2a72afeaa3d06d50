"""varlen_attention: every segment by itself, whatever lies beside it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import _varlen, attention
from regard._varlen import varlen_attention
from regard.biases import Alibi, Relative
from regard.masks import Causal, Dense, Documents, Padding, Prefix, Rule, Window
from regard.normalizers import Entmax, Entmax15, Relu, Sigmoid, Softmax, Sparsemax
from regard.scores import Additive, Bilinear, Concat, Cosine, Distance, Dot, Modified

H, Hkv, D, Dv = 4, 2, 6, 5
torch.manual_seed(0)
TABLE = torch.randn(H, 7, dtype=torch.float64)
SCORES: dict[str, Any] = {
    "dot": Dot(),
    "soft-capped": Dot(0.7, softcap=2.0),
    "bilinear": Bilinear(torch.randn(D, D).double()),
    "concat": Concat(torch.randn(D).double(), torch.randn(D).double()),
    "additive": Additive(torch.randn(D).double()),
    "cosine": Cosine(3.0),
    "distance": Distance(0.3),
    "callable": lambda q, k: (q @ k.mT).sin(),
}
NORMALIZERS: dict[str, Any] = {
    "softmax": Softmax(),
    "sink": Softmax(sink=torch.randn(H).double()),
    "sparsemax": Sparsemax(),
    "entmax15": Entmax15(),
    "entmax": Entmax(1.3),
    "sigmoid": Sigmoid(-1.0),
    "relu": Relu(),
    "callable": lambda s: torch.relu(s) / s.shape[-1],  # it counts keys: only those of its segment are there
}


def numbers(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int64)


def window(left: int | None, right: int | None, offset: Any = None) -> Any:
    return lambda s, n, m: Window(left, right, offset=m - n if offset is None else offset)


# What varlen_attention is given, beside what one segment (number s, n queries, m keys) means by it.
MASKS: dict[str, tuple[Any, Any]] = {
    "none": (lambda n, m: None, lambda s, n, m: None),
    "causal": (lambda n, m: Causal("lower_right"), lambda s, n, m: Causal(offset=m - n)),
    "upper left": (lambda n, m: Causal("upper_left"), lambda s, n, m: Causal(offset=0)),
    "offsets": (lambda n, m: Causal(offset=torch.arange(len(n))), lambda s, n, m: Causal(offset=s)),
    "window": (lambda n, m: Window(2, 1, "lower_right"), window(2, 1)),
    "not window": (lambda n, m: ~Window(1, 0, "upper_left"), window(1, 0, 0)),
    "lengths": (lambda n, m: Padding(numbers(m) // 2), lambda s, n, m: Padding(m // 2)),
    "range": (
        lambda n, m: Padding(start=numbers(m) // 3, stop=numbers(m)),
        lambda s, n, m: Padding(start=m // 3),
    ),
    "prefix": (
        lambda n, m: Causal("upper_left") | Prefix(numbers(m).clamp(max=2)),
        lambda s, n, m: Causal(offset=0) | Prefix(min(m, 2)),
    ),
    "prefix by number": (
        lambda n, m: Window(1, 0, "upper_left") | Prefix(2),
        lambda s, n, m: Window(1, 0, offset=0) | Prefix(min(2, m)),
    ),
    "three runs": (
        lambda n, m: (~Window(1, 1, "upper_left") & ~Padding(start=1, stop=2)) | Window(0, 0),
        lambda s, n, m: (~Window(1, 1, offset=0) & ~Padding(start=min(1, m), stop=min(2, m))) | Window(0, 0),
    ),
    "rule": (
        lambda n, m: Rule(lambda b, h, q, k: (k + b + h) % 3 != q % 3) & Causal("lower_right"),
        lambda s, n, m: Rule(lambda b, h, q, k: (k + s + h) % 3 != q % 3) & Causal(offset=m - n),
    ),
}


def packed(lengths: list[int], heads: int, width: int, more: int) -> Tensor:
    return torch.randn(sum(lengths) + more, heads, width, dtype=torch.float64, requires_grad=True)


def edges(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, n: list[int], m: list[int], how: Any) -> Tensor:
    """The expectation: ``attention`` of each segment, zeros behind the last one."""
    outputs, row, key = [], 0, 0
    for s, (rows, keys) in enumerate(zip(n, m, strict=True)):
        parts = (q[row : row + rows], k[key : key + keys], v[key : key + keys])
        four = [part.transpose(0, 1)[None] for part in parts]
        outputs.append(attention(*four, **how(s, rows, keys))[0].transpose(0, 1))
        row, key = row + rows, key + keys
    return torch.cat([*outputs, q.new_zeros(q.shape[0] - row, H, v.shape[-1])])


def assert_same(n: list[int], m: list[int], given: dict[str, Any], own: Any, limit: float = 1e-11) -> None:
    q, k, v = packed(n, H, D, 2), packed(m, Hkv, D, 3), packed(m, Hkv, Dv, 3)
    extra = [given["bias"].table] if isinstance(given.get("bias"), Relative) else []
    found = []
    for output in (
        varlen_attention(q, k, v, edges(n), edges(m, torch.int32), **given),
        one_by_one(q, k, v, n, m, own),
    ):
        assert output.shape == (q.shape[0], H, Dv)
        gradients = torch.autograd.grad(output.sin().sum(), [q, k, v, *extra], materialize_grads=True)
        found.append((output, *gradients))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=limit, rtol=limit)
    output, dq, dk, dv = found[0][:4]
    assert not output[sum(n) :].any() and not dq[sum(n) :].any()
    assert not dk[sum(m) :].any() and not dv[sum(m) :].any()


segments = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5)


@settings(max_examples=150)
@given(
    lengths=segments,
    mask=st.sampled_from(sorted(MASKS)),
    score=st.sampled_from(sorted(SCORES)),
    normalize=st.sampled_from(sorted(NORMALIZERS)),
    together=st.sampled_from([0, 1 << 8, 1 << 17]),
)
def test_equals_each_segment_by_itself(
    lengths: list[tuple[int, int]], mask: str, score: str, normalize: str, together: int
) -> None:
    n, m = [rows for rows, _ in lengths], [keys for _, keys in lengths]
    make, own = MASKS[mask]
    if mask == "not window":
        inner = own
        own = lambda s, rows, keys: ~inner(s, rows, keys)  # noqa: E731
    how = {"score": SCORES[score], "normalize": NORMALIZERS[normalize]}
    before, _varlen.PAIRS_TOGETHER = _varlen.PAIRS_TOGETHER, together
    try:
        assert_same(
            n, m, {**how, "mask": make(n, m)}, lambda s, rows, keys: {**how, "mask": own(s, rows, keys)}
        )
    finally:
        _varlen.PAIRS_TOGETHER = before


@settings(max_examples=60)
@given(
    lengths=segments,
    corner=st.sampled_from(["upper_left", "lower_right"]),
    masked=st.booleans(),
    alike=st.booleans(),
)
def test_position_biases_speak_of_the_segment(
    lengths: list[tuple[int, int]], corner: str, masked: bool, alike: bool
) -> None:
    n = [rows for rows, _ in lengths]
    m = n if alike else [keys for _, keys in lengths]
    table, slopes = TABLE.clone().requires_grad_(), torch.rand(H, dtype=torch.float64)
    made = (
        lambda place: Alibi(None, **place),
        lambda place: Alibi(slopes, **place) + Alibi(2 * slopes),
        lambda place: Relative(table, **place),
    )
    mask = Causal() if masked else None
    for bias in made:

        def own(s: int, rows: int, keys: int, bias: Any = bias) -> dict[str, Any]:
            return {"bias": bias({"offset": 0 if corner == "upper_left" else keys - rows}), "mask": mask}

        assert_same(n, m, {"bias": bias({"alignment": corner}), "mask": mask}, own)


def test_no_segments() -> None:
    q, none = torch.randn(4, H, D, requires_grad=True), edges([])
    output = varlen_attention(q, q, q, none, none, Causal(), bias=Alibi())
    assert output.shape == (4, H, D) and not output.any()
    assert not torch.autograd.grad(output.sum(), q)[0].any()


def test_a_score_of_pairs_is_told_segment_query_and_key() -> None:
    n, m = [3, 0, 4, 2], [5, 2, 4, 0]
    slope = torch.tensor(0.1, dtype=torch.float64)

    def bend(shift: int | None) -> Modified:
        return Modified(
            Dot(), lambda s, b, h, q, k: s + slope * (b if shift is None else shift) * k - 0.2 * q * h
        )

    assert_same(n, m, {"score": bend(None)}, lambda s, rows, keys: {"score": bend(s)})


def test_what_a_score_closes_over_gets_its_gradient() -> None:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    q = packed([3, 4], H, D, 0)
    score = Modified(Dot(), lambda s, b, h, q, k: s * weight)
    output = varlen_attention(q, q, q, edges([3, 4]), edges([3, 4]), score=score)
    (got,) = torch.autograd.grad(output.sin().sum(), weight)
    expected = one_by_one(q, q, q, [3, 4], [3, 4], lambda s, n, m: {"score": Dot(weight * D**-0.5)})
    torch.testing.assert_close(got, torch.autograd.grad(expected.sin().sum(), weight)[0])


@pytest.mark.parametrize("together", [0, 1 << 17])
def test_what_lies_behind_or_beside_carries_nothing(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_varlen, "PAIRS_TOGETHER", together)
    n, m = [3, 2, 4], [2, 3, 1]
    q, k, v = packed(n, H, D, 2), packed(m, Hkv, D, 3), packed(m, Hkv, Dv, 3)
    with torch.no_grad():
        for x in (q, k, v):
            x[-2:] = torch.nan  # uninitialised memory behind the last segment
        k[2], v[3] = torch.nan, torch.inf  # and rubbish in the second one
    output = varlen_attention(q, k, v, edges(n), edges(m))
    assert output[:3].isfinite().all() and output[5:9].isfinite().all() and not output[9:].any()
    assert not output[3:5].isfinite().any()
    dq, dk, dv = torch.autograd.grad(output[5:].sum(), (q, k, v))
    assert dq[:3].isfinite().all() and dq[5:].isfinite().all()
    for gradient in (dk, dv):
        assert gradient[:2].isfinite().all() and gradient[5:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    q = torch.randn(9, H, D, dtype=dtype)
    output = varlen_attention(q, q, q, edges([4, 5]), edges([4, 5]), Causal())
    expected = varlen_attention(q.double(), q.double(), q.double(), edges([4, 5]), edges([4, 5]), Causal())
    assert output.dtype == dtype
    limit = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(output.double(), expected, atol=limit, rtol=limit)


def test_dropout_follows_torchs_generator() -> None:
    q, cu = torch.randn(40, H, D), edges([16, 24])
    torch.manual_seed(1)
    first, second = (varlen_attention(q, q, q, cu, cu, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(varlen_attention(q, q, q, cu, cu, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    assert not varlen_attention(q, q, q, cu, cu, dropout_p=1.0).any()


def test_no_work_across_long_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[int] = []
    real = _varlen._call

    def counted(query: Tensor, key: Tensor, *rest: Any) -> Tensor:
        pairs.append(query.shape[0] * key.shape[0])
        return real(query, key, *rest)

    monkeypatch.setattr(_varlen, "_call", counted)
    n, m = [300, 400, 0, 350], [500, 300, 7, 600]
    q, k = torch.randn(sum(n), 1, 4), torch.randn(sum(m), 1, 4)
    varlen_attention(q, k, k, edges(n), edges(m), Causal("lower_right"))
    assert sum(pairs) <= sum(a * b for a, b in zip(n, m, strict=True)) + 7 * 350 + 7 * 400
    pairs.clear()
    q = torch.randn(3000, 4, 4)
    varlen_attention(q, q, q, edges([10] * 300), edges([10] * 300))
    assert len(pairs) <= 30 and max(pairs) * 4 <= _varlen.PAIRS_TOGETHER


def test_traces_whole() -> None:
    traced = torch.compile(varlen_attention, fullgraph=True, backend="aot_eager")
    n, m = [3, 0, 4], [5, 2, 4]
    q, k, v = packed(n, H, D, 2), packed(m, Hkv, D, 1), packed(m, Hkv, Dv, 1)
    for mask in (Causal("lower_right"), Window(1, 0, "upper_left") | Prefix(1)):
        got = traced(q, k, v, edges(n), edges(m), mask)
        expected = varlen_attention(q, k, v, edges(n), edges(m), mask)
        torch.testing.assert_close(got, expected)
        grads = zip(
            torch.autograd.grad(got.sin().sum(), (q, k, v)),
            torch.autograd.grad(expected.sin().sum(), (q, k, v)),
            strict=True,
        )
        for one, two in grads:
            torch.testing.assert_close(one, two)
    cu = edges(n)
    got = traced(q, q, q, cu, cu, Causal(), bias=Alibi())
    torch.testing.assert_close(got, varlen_attention(q, q, q, cu, cu, Causal(), bias=Alibi()))
    torch._dynamo.reset()


CHILD = """
import json, torch
from regard._varlen import varlen_attention
from regard.masks import Causal
torch.set_num_threads(1)

def field(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

def peak(lengths):
    q = torch.randn(sum(lengths), 1, 16, requires_grad=True)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = field("VmRSS")
    varlen_attention(q, q, q, cu, cu, Causal()).sum().backward()
    return (field("VmHWM") - before) / 1024

peak([16] * 8)
print(json.dumps([peak([64] * 256), peak([8192, 8192])]))
"""


def test_memory_is_linear() -> None:
    """16384 tokens: scores of all of them are 1 GiB a head, those of one of two segments 256 MiB."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).resolve().parents[1] / "src"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert max(json.loads(done.stdout)) <= 80


x = torch.zeros(5, 2, 4)
cu = torch.tensor([0, 2, 5])
HOSTILE: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "query: expected a tensor", lambda: varlen_attention([1.0], x, x, cu, cu)),
    (ValueError, "query: expected packed tokens", lambda: varlen_attention(x[None], x, x, cu, cu)),
    (ValueError, "value: expected as many tokens", lambda: varlen_attention(x, x, x[:4], cu, cu)),
    (
        ValueError,
        "heads",
        lambda: varlen_attention(x, x[:, :1].expand(5, 3, 4), x[:, :1].expand(5, 3, 4), cu, cu),
    ),
    (TypeError, "cu_query: expected an integer tensor", lambda: varlen_attention(x, x, x, [0, 5], cu)),
    (TypeError, "cu_key: expected an integer tensor", lambda: varlen_attention(x, x, x, cu, cu.float())),
    (ValueError, r"cu_query.*shape \(S \+ 1,\)", lambda: varlen_attention(x, x, x, cu[None], cu)),
    (ValueError, "cu_query", lambda: varlen_attention(x, x, x, cu[:0], cu[:0])),
    (ValueError, "cu_query: expected 0 as its first", lambda: varlen_attention(x, x, x, cu[1:], cu[1:])),
    (
        ValueError,
        "cu_key: expected edges that never fall, got 4 before 2",
        lambda: varlen_attention(x, x, x, cu, torch.tensor([0, 4, 2])),
    ),
    (ValueError, "cu_key.*at most 5", lambda: varlen_attention(x, x, x, cu, torch.tensor([0, 2, 6]))),
    (ValueError, "as many segments each, got 2 and 1", lambda: varlen_attention(x, x, x, cu, cu[::2])),
    (
        ValueError,
        "Causal: expected an alignment",
        lambda: varlen_attention(x, x, x, cu, torch.tensor([0, 3, 5]), Causal()),
    ),
    (
        ValueError,
        "one alignment",
        lambda: varlen_attention(
            x, x, x, cu, torch.tensor([0, 3, 5]), Causal("upper_left"), bias=Alibi(None, "lower_right")
        ),
    ),
    (TypeError, "mask.*regard.masks", lambda: varlen_attention(x, x, x, cu, cu, torch.ones(5, 5).bool())),
    (
        ValueError,
        "mask.*Dense",
        lambda: varlen_attention(x, x, x, cu, cu, Causal() & Dense(torch.ones(5, 5).bool())),
    ),
    (
        ValueError,
        "mask.*Documents",
        lambda: varlen_attention(x, x, x, cu, cu, Documents(torch.zeros(5).long())),
    ),
    (ValueError, "mask.*Keys", lambda: varlen_attention(x, x, x, cu, cu, Padding.of(torch.ones(5).bool()))),
    (TypeError, "bias.*regard.biases", lambda: varlen_attention(x, x, x, cu, cu, bias=torch.zeros(5, 5))),
    (
        ValueError,
        "bias.*Alibi, Relative",
        lambda: varlen_attention(x, x, x, cu, cu, bias=Alibi() + torch.zeros(5, 5)),
    ),
    (
        ValueError,
        r"Padding\(lengths=\): expected one number a segment",
        lambda: varlen_attention(x, x, x, cu, cu, Padding(torch.tensor([1, 1, 1]))),
    ),
    (
        ValueError,
        r"Padding\(lengths=\): expected from 0",
        lambda: varlen_attention(x, x, x, cu, cu, Padding(torch.tensor([1, 4]))),
    ),
    (ValueError, r"Prefix\(n=\)", lambda: varlen_attention(x, x, x, cu, cu, Prefix(torch.tensor([-1, 1])))),
    (
        ValueError,
        r"Causal\(offset=\)",
        lambda: varlen_attention(x, x, x, cu, cu, Causal(offset=torch.tensor([1]))),
    ),
    (ValueError, "dropout_p", lambda: varlen_attention(x, x, x, cu, cu, dropout_p=1.5)),
    (TypeError, "score", lambda: varlen_attention(x, x, x, cu, cu, score=Dot)),
    (TypeError, "normalize", lambda: varlen_attention(x, x, x, cu, cu, normalize="softmax")),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_mistakes_are_named(number: int) -> None:
    kind, message, mistake = HOSTILE[number]
    with pytest.raises(kind, match=message):
        mistake()
