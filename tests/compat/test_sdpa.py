"""compat.scaled_dot_product_attention against torch's, on torch's own samples and on drawn ones."""

from __future__ import annotations

import inspect
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from regard import compat

ours = compat.scaled_dot_product_attention
LIMIT = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 4e-3, torch.float16: 1e-3}


def theirs(*args: Any, **kwargs: Any) -> Tensor:
    """torch's own definition, which is what its documentation says; its fused kernels stand aside."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def leaves(*values: Any) -> list[Tensor]:
    return [x for x in values if type(x) is Tensor and x.is_floating_point()]


def run(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, gradients: bool
) -> list[Tensor]:
    """Output and every gradient, computed in a dtype."""

    def fresh(x: Any) -> Any:
        floats = type(x) is Tensor and x.is_floating_point()
        return x.detach().to(dtype, copy=True).requires_grad_(gradients) if floats else x

    given, named = [fresh(x) for x in args], {name: fresh(x) for name, x in kwargs.items()}
    output = function(*given, **named)
    torch.manual_seed(0)
    loss = (output * torch.randn(output.shape).to(dtype)).sum()
    found = torch.autograd.grad(loss, leaves(*given, *named.values())) if gradients else ()
    return [output.detach(), *found]


def assert_same(args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool = True) -> None:
    """As far from the truth (torch's definition in float64) as twice torch, or the limit of the dtype: CONTRACTS 11."""
    dtype = args[0].dtype
    got = run(ours, args, kwargs, dtype, gradients)
    expected = run(theirs, args, kwargs, dtype, gradients)
    truth = run(theirs, args, kwargs, torch.float64, gradients)
    assert len(got) == len(truth)
    for one, two, exact in zip(got, expected, truth, strict=True):
        assert one.shape == two.shape and one.dtype == two.dtype
        assert far(one, exact) <= max(2 * far(two, exact), LIMIT[dtype])


def far(x: Tensor, exact: Tensor) -> float:
    size = float(exact.norm())
    return float((x.double() - exact).norm()) / (size if size > 1e-6 else 1.0)


# ---------------------------------------------------------------------------- torch's own samples


def torch_samples(dtype: torch.dtype) -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]
    return list(info.sample_inputs("cpu", dtype, requires_grad=True))


@pytest.mark.filterwarnings("ignore")  # of importing torch's testing internals, not of ours
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_torchs_own_samples(dtype: torch.dtype) -> None:
    samples = torch_samples(dtype)
    assert len(samples) >= 25
    compared = 0
    for sample in samples:
        args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
        if kwargs["dropout_p"]:
            # Other pairs are dropped than torch's: the same shape and dtype, and the mean over many seeds.
            got = ours(*args, **kwargs)
            assert got.shape == theirs(*args, **kwargs).shape and got.dtype == dtype
            if dtype == torch.float64:
                assert_mean(args, kwargs)
            continue
        assert_same(args, kwargs, gradients=True)
        compared += 1
    assert compared >= 13


def assert_mean(args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
    with torch.no_grad():
        mean = torch.stack([ours(*args, **kwargs) for _ in range(150)]).mean(0)
        expected = theirs(*args, **{**kwargs, "dropout_p": 0.0})
        error = (mean - expected).norm() / expected.norm()
    assert error < 4 / math.sqrt(150)


# ---------------------------------------------------------------------------- drawn


@pytest.mark.parametrize("seed", range(200))
def test_drawn_shapes_and_masks(seed: int) -> None:
    pick = random.Random(seed)
    torch.manual_seed(seed)
    dtype = pick.choice((torch.float32, torch.float64))
    H, Tq, Tk, D, Dv = (pick.choice(sizes) for sizes in ((1, 2, 4), (1, 3, 6), (1, 4, 5), (1, 4), (1, 4, 7)))
    batch = pick.choice(((), (2,), (2, 3)))
    grouped = pick.random() < 0.3

    def lead(heads: int) -> tuple[int, ...]:
        sizes = [size if pick.random() < 0.7 else 1 for size in batch]
        return (*sizes[pick.randrange(len(sizes) + 1) :], heads)

    if grouped:
        H = 4
        heads = [4, pick.choice((1, 2, 4)), pick.choice((1, 2, 4))]
    else:
        heads = [pick.choice((H, 1)) for _ in range(3)]
    shapes = [(*lead(h), *tail) for h, tail in zip(heads, ((Tq, D), (Tk, D), (Tk, Dv)), strict=True)]
    if not grouped and pick.random() < 0.2:
        shapes = [shape[-2:] for shape in shapes]
    args = tuple(torch.randn(shape, dtype=dtype) for shape in shapes)
    whole = theirs(
        args[0], args[1], args[1], enable_gqa=grouped
    ).shape  # a mask may not be larger than the scores
    kwargs: dict[str, Any] = {"enable_gqa": grouped}
    if pick.random() < 0.5:
        kwargs["scale"] = pick.choice((0.0, 1.0, -0.7, 2))
    masked = pick.choice(("none", "causal", "bool", "float"))
    if masked == "causal":
        kwargs["is_causal"] = True
    elif masked != "none":
        shape = [size if pick.random() < 0.7 else 1 for size in (*whole[:-1], Tk)]
        shape = shape[pick.randrange(len(shape) - 1) :]
        keep = torch.rand(shape) < 0.6
        kwargs["attn_mask"] = (
            keep if masked == "bool" else torch.randn(shape, dtype=dtype).masked_fill(~keep, -torch.inf)
        )
    assert_same(args, kwargs, gradients=kwargs.get("attn_mask") is None or masked == "bool")


def test_a_float_mask_gets_its_gradient() -> None:
    q, k = torch.randn(2, 4, 3, 8, dtype=torch.float64), torch.randn(2, 2, 5, 8, dtype=torch.float64)
    for shape in ((3, 5), (4, 3, 5), (2, 1, 1, 5), (4, 1, 1)):
        assert_same((q, k, k), {"attn_mask": torch.randn(shape, dtype=torch.float64), "enable_gqa": True})


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_attend(sizes: tuple[int, int]) -> None:
    Tq, Tk = sizes
    q, k = torch.randn(2, 2, Tq, 4), torch.randn(2, 2, Tk, 4)
    for kwargs in ({}, {"is_causal": True}, {"attn_mask": torch.ones(Tq, Tk, dtype=torch.bool)}):
        assert_same((q, k, k), kwargs)


def test_the_signature_is_torchs() -> None:
    names = list(inspect.signature(ours).parameters)
    assert names == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    parameters = inspect.signature(ours).parameters
    assert [parameters[name].default for name in names[3:]] == [None, 0.0, False, None, False]
    assert parameters["scale"].kind == parameters["enable_gqa"].kind == inspect.Parameter.KEYWORD_ONLY
    x = torch.randn(2, 3, 4)
    for function in (ours, F.scaled_dot_product_attention):
        function(x, x, x, None, 0.0, True)
        with pytest.raises(TypeError):
            function(x, x, x, None, 0.0, True, 0.5)


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
@pytest.mark.parametrize("corner", [causal_upper_left, causal_lower_right])
def test_torchs_causal_bias(corner: Any) -> None:
    q, k = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 5, 8)
    assert_same((q, k, k), {"attn_mask": corner(3, 5)})


# ---------------------------------------------------------------------------- where torch contradicts itself


@pytest.mark.parametrize("form", [torch.bool, torch.float64])
def test_empty_rows_are_zero(form: torch.dtype) -> None:
    keep = torch.ones(3, 5, dtype=torch.bool)
    keep[1] = False
    mask = keep if form == torch.bool else torch.zeros(3, 5, dtype=form).masked_fill(~keep, -torch.inf)
    q, k = (torch.randn(2, 2, T, 4, dtype=torch.float64, requires_grad=True) for T in (3, 5))
    output = ours(q, k, k, mask)
    assert not output[:, :, 1].any() and output[:, :, [0, 2]].all()
    gradient = torch.autograd.grad(output.sin().sum(), (q, k))
    assert not gradient[0][:, :, 1].any() and all(g.isfinite().all() for g in gradient)


def test_what_is_masked_carries_nothing() -> None:
    q, k = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 4, 4)
    k[:, :, 3] = torch.nan
    assert ours(q, k, k, is_causal=True)[:, :, :3].isfinite().all()


def test_dropout_is_drawn_from_torchs_generator() -> None:
    q = torch.randn(1, 2, 16, 4)
    torch.manual_seed(5)
    first, second = ours(q, q, q, dropout_p=0.5), ours(q, q, q, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(ours(q, q, q, dropout_p=0.5), first) and not torch.equal(first, second)
    assert not ours(q, q, q, dropout_p=1.0).any()


def test_traces_whole() -> None:
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    traced = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for kwargs in ({"is_causal": True}, {"attn_mask": torch.rand(3, 5) < 0.7}):
        torch.testing.assert_close(
            traced(q, k, k, enable_gqa=True, **kwargs), ours(q, k, k, enable_gqa=True, **kwargs)
        )
    torch._dynamo.reset()


# ---------------------------------------------------------------------------- mistakes

q, k = torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 5, 8)
HOSTILE: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "query: expected a tensor", lambda: ours(None, k, k)),
    (ValueError, "query: expected at least 2 dimensions", lambda: ours(q[0, 0, 0], k, k)),
    (ValueError, "as many rows as the key", lambda: ours(q, k, k[:, :, :4])),
    (ValueError, "the query's width", lambda: ours(q[..., :7], k, k)),
    (ValueError, "heads.*enable_gqa=True", lambda: ours(q, k[:, :2], k[:, :2])),
    (ValueError, "enable_gqa", lambda: ours(q, k[:, :3], k[:, :3], enable_gqa=True)),
    (ValueError, "enable_gqa", lambda: ours(q[0, 0], k[0, 0], k[0, 0], enable_gqa=True)),
    (ValueError, "leading dimensions", lambda: ours(q, k[:1].expand(3, 4, 5, 8), k, torch.zeros(3, 5))),
    (TypeError, "attn_mask.*attn_mask.bool", lambda: ours(q, k, k, torch.ones(3, 5, dtype=torch.int64))),
    (TypeError, "attn_mask", lambda: ours(q, k, k, "causal")),
    (
        ValueError,
        r"attn_mask: expected a shape that broadcasts to \(2, 4, 3, 5\)",
        lambda: ours(q, k, k, torch.zeros(3, 4)),
    ),
    (ValueError, "attn_mask", lambda: ours(q, k, k, torch.zeros(5))),
    (ValueError, "attn_mask", lambda: ours(q, k, k, torch.zeros(1, 2, 4, 3, 5))),
    (ValueError, "attn_mask or is_causal", lambda: ours(q, k, k, torch.zeros(3, 5), is_causal=True)),
    (TypeError, "is_causal", lambda: ours(q, k, k, is_causal=1)),
    (TypeError, "scale", lambda: ours(q, k, k, scale="small")),
    (ValueError, "scale", lambda: ours(q, k, k, scale=math.nan)),
    (ValueError, "dropout_p", lambda: ours(q, k, k, dropout_p=2.0)),
    (TypeError, "one floating-point dtype", lambda: ours(q, k.double(), k)),
    (TypeError, "one floating-point dtype", lambda: ours(q.long(), k.long(), k.long())),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_mistakes_are_named(number: int) -> None:
    kind, message, mistake = HOSTILE[number]
    with pytest.raises(kind, match=message):
        mistake()
