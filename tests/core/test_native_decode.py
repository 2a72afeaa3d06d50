"""The compiled kernel for a few queries against a long cache, against the definition in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import attention
from regard._call import prepare
from regard._plan import use_kernel
from regard.biases import Alibi
from regard.kernels import _library, native, reference
from regard.kernels.problem import lower
from regard.masks import Causal, Padding, Prefix, Rows, Window
from regard.normalizers import Softmax
from regard.scores import Dot
from tests.core.natives import laid_out

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
LOWER = "lower_right"
FINDS = tuple[Tensor, Tensor, Tensor]


def decoded(query: Tensor, key: Tensor, value: Tensor, **mechanism: Any) -> FINDS | None:
    """What the compiled kernel gives where no row numbers are wanted; None where it hands the call over."""
    options = {"mask": None, "score": Dot(), "normalize": Softmax(), "bias": None} | mechanism
    return native.forward(lower(prepare(query, key, value, **options), False, "native"))


def defined(dtype: torch.dtype, *tensors: Tensor, **mechanism: Any) -> tuple[Tensor, Tensor]:
    options = {"mask": None, "score": Dot(), "normalize": Softmax(), "bias": None} | mechanism
    return reference.attend(prepare(*(tensor.to(dtype) for tensor in tensors), **options))


def hold(query: Tensor, key: Tensor, value: Tensor, bound: float | None = None, **mechanism: Any) -> Tensor:
    """The output is that of the definition (contract 11), empty rows are 0."""
    found = decoded(query, key, value, **mechanism)
    assert found is not None
    output = found[0]
    exact, exact_lse = defined(torch.float64, query, key, value, **mechanism)
    plain, _ = defined(query.dtype, query, key, value, **mechanism)
    size = float(exact.norm())
    apart = float((output.double() - exact).norm())
    assert output.dtype == query.dtype
    twice = 2 * float((plain.double() - exact).norm())
    assert apart <= (max(twice, BOUNDS[query.dtype] * size) if bound is None else bound * size)
    empty = exact_lse == -torch.inf
    assert bool((output[empty] == 0).all())
    return output


def normal(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


# ---------------------------------------------------------------------------- every edge

LENGTHS = sorted(
    {edge + near for edge in (1, 8, 12, 16, 24, 32, 48, 96, 480, 960) for near in (-1, 0, 1)} - {0}
)
WIDTHS = [1, 7, 8, 9, 15, 16, 17, 24, 31, 33, 48, 64, 80, 96, 127, 128, 129, 255, 256]
LAYOUTS = ["dense", "transposed", "sliced", "longer", "expanded"]


def mask_of(draw: Callable[[Any], Any], B: int, Tk: int) -> Any:
    numbers = st.integers(0, Tk)
    lengths = torch.tensor([draw(numbers) for _ in range(B)])
    left = draw(st.integers(-3, Tk))
    window = Window(left, draw(st.integers(max(-3, -left), 5)), LOWER)
    masks = {
        "none": None,
        "causal": Causal(LOWER),
        "offset": Causal(offset=lengths),
        "window": window,
        "lengths": Padding(lengths),
        "left": Padding(start=lengths, stop=torch.full((B,), Tk)),
        "both": Padding(lengths) & Causal(LOWER),
        "window or prefix": window | Prefix(draw(numbers)),
        "not window": ~window,
    }
    return masks[draw(st.sampled_from(sorted(masks)))]


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_core_every_edge_is_the_definition(data: st.DataObject) -> None:
    draw = data.draw
    B, Hkv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 9))
    Tq, Tk = draw(st.integers(1, 13)), draw(st.sampled_from(LENGTHS))
    D, Dv = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from(WIDTHS))
    H, seed = Hkv * group, draw(st.integers(0, 1000))
    dtype = draw(st.sampled_from(sorted(BOUNDS, key=str)))
    tensors = normal(seed, (B, H, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, Dv), dtype=dtype)
    layout = draw(st.sampled_from(LAYOUTS))
    query, key, value = (laid_out(tensor, layout) for tensor in tensors)
    pairs, keys, sink, scale = normal(seed + 1, (1, H, Tq, Tk), (B, 1, 1, Tk), (H,), (H,))
    bias = draw(st.sampled_from([None, None, pairs, keys, Alibi(alignment=LOWER)]))
    mask = mask_of(draw, B, Tk)
    if isinstance(bias, Alibi) and mask is not None:
        bias = None  # whose alignment is the mask's
    softcap = draw(st.sampled_from([None, 3.0]))
    score = draw(st.sampled_from([Dot(softcap=softcap), Dot(0.0), Dot(-0.7), Dot(scale, softcap=softcap)]))
    normalize = draw(st.sampled_from([Softmax(), Softmax(sink)]))
    hold(query, key, value, mask=mask, score=score, normalize=normalize, bias=bias)


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 13, 64])
def test_core_every_number_of_rows(group: int, dtype: torch.dtype) -> None:
    for Tq in (1, 3, 12):
        query, key, value = normal(
            group, (1, 2 * group, Tq, 40), (1, 2, 500, 40), (1, 2, 500, 72), dtype=dtype
        )
        hold(query, key, value)
        hold(query, key, value, mask=Causal(LOWER) & Window(130, 0, LOWER))


def test_core_rows_of_their_own() -> None:
    """One run a row, another one for every head and query."""
    query, key, value = normal(1, (2, 6, 4, 64), (2, 2, 300, 64), (2, 2, 300, 32))
    start = torch.randint(0, 300, (2, 6, 4), generator=torch.Generator().manual_seed(2))
    stop = (start + torch.arange(4) * 40).clamp(max=300)
    hold(query, key, value, mask=Rows(start, stop))


def test_a_long_cache_is_as_accurate_as_a_short_one() -> None:
    query, key, value = normal(3, (1, 8, 1, 64), (1, 2, 20000, 64), (1, 2, 20000, 64))
    hold(query * 0.1, key, value, bound=8e-7)


def test_nothing_at_all() -> None:
    for B, H, Tq, Tk in ((0, 2, 1, 9), (2, 0, 1, 9), (2, 2, 0, 9), (2, 2, 1, 0)):
        found = decoded(*normal(14, (B, H, Tq, 32), (B, H, Tk, 32), (B, H, Tk, 32)))
        assert found is not None and found[0].shape == (B, H, Tq, 32) and not bool(found[0].any())


# ---------------------------------------------------------------------------- what is not seen


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
def test_padding_is_not_even_read(dtype: torch.dtype) -> None:
    """A sequence of a ragged batch is the sequence alone, and what stands behind it is not looked at."""
    lengths = [700, 1, 0, 481, 12, 333, 480, 97]
    query, key, value = normal(4, (8, 8, 1, 64), (8, 2, 700, 64), (8, 2, 700, 64), dtype=dtype)
    for b, length in enumerate(lengths):
        key[b, :, length:], value[b, :, length:] = torch.nan, torch.inf
    found = decoded(query, key, value, mask=Padding(torch.tensor(lengths)))
    assert found is not None
    for b, length in enumerate(lengths):
        one = slice(b, b + 1)
        alone = decoded(query[one], key[one, :, :length], value[one, :, :length])
        assert alone is not None
        assert torch.equal(found[0][one], alone[0]) and torch.equal(found[1][one], alone[1])
    left = Padding(start=torch.tensor([700 - length for length in lengths]), stop=torch.full((8,), 700))
    turned = decoded(query, key.flip(2), value.flip(2), mask=left)
    assert turned is not None and bool(turned[0].isfinite().all())


def test_a_window_reads_its_keys_only() -> None:
    query, key, value = normal(5, (1, 4, 2, 64), (1, 2, 900, 64), (1, 2, 900, 64))
    key[:, :, 20:700], value[:, :, 20:700] = torch.nan, torch.nan
    mask = Window(100, 0, LOWER) | Prefix(20)
    hold(query, key.nan_to_num(), value.nan_to_num(), mask=mask)
    found = decoded(query, key, value, mask=mask)
    clean = decoded(query, key.nan_to_num(), value.nan_to_num(), mask=mask)
    assert found is not None and clean is not None and torch.equal(found[0], clean[0])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [0, 1, 2], ids=["query", "key", "value"])
def test_hostile_what_is_not_finite_shows_where_it_is_seen_and_only_there(where: int, poison: float) -> None:
    tensors = normal(6, (2, 4, 3, 24), (2, 2, 90, 24), (2, 2, 90, 24))
    tensors[where][1, 1, -1, 5] = poison
    for mask in (None, Causal(LOWER), Padding(torch.tensor([90, 89]))):
        assert mask is not None or decoded(*tensors) is None
        found = []
        for kernel in ("native", "reference"):
            with use_kernel(kernel):
                found.append(attention(*tensors, mask).isfinite())
        assert torch.equal(*found)


def test_a_value_behind_a_vanishing_weight_may_not_harm_others() -> None:
    query, key, value = normal(7, (1, 4, 1, 32), (1, 2, 100, 32), (1, 2, 100, 32))
    value[0, 0, 50, 3] = torch.inf
    with use_kernel("native"):
        found = attention(query, key, value)
    assert bool(found[:, 2:].isfinite().all()) and not bool(found[:, :2, :, 3].isfinite().any())


# ---------------------------------------------------------------------------- hostile numbers


def test_hostile_numbers() -> None:
    query, key, value = normal(8, (1, 8, 2, 64), (1, 2, 777, 64), (1, 2, 777, 64))
    hold(query * 0, key, value)
    hold(query * 1e-40, key * 1e-3, value * 1e-38, bound=1e-5)
    hold(query, key[:, :, :1].expand_as(key), value)
    hold(query, key, value, bias=torch.full((1, 1, 1, 777), 1e4))
    # The largest of scores of 1e4 and more stands alone, or a score's own rounding decides.
    large, one_hot = key * 1000, torch.zeros_like(key)
    large[:, :, 400] = query[:, ::4, 0] * 5000
    one_hot[:, :, 123] = 100 * query[:, ::4, 0]
    hold(query[:, ::4, :1] * 10, large, value)
    hold(query[:, ::4, :1], one_hot, value)


def test_hostile_a_finite_bias_blocks_nothing() -> None:
    query, key, value = normal(9, (1, 4, 2, 64), (1, 2, 100, 64), (1, 2, 100, 64))
    least = torch.finfo(torch.float32).min
    bias = torch.zeros(1, 1, 2, 100)
    bias[..., 1, :] = least
    output = attention(query, key, value, bias=bias)
    torch.testing.assert_close(output[:, :, 1], value.mean(2).repeat_interleave(2, 1), atol=1e-5, rtol=1e-5)
    closed = bias.clone()
    closed[..., 1, :], closed[..., 0, 30:] = -torch.inf, -torch.inf
    hold(query, key, value, bias=closed)
    assert bool((attention(query, key, value, bias=closed)[:, :, 1] == 0).all())


def test_hostile_rising_scores_are_followed() -> None:
    """Every batch brings a new maximum; and the largest score comes first."""
    query, key, value = normal(10, (1, 4, 1, 32), (1, 1, 1500, 32), (1, 1, 1500, 32))
    for rising in (
        torch.linspace(-300, 300, 1500),
        torch.linspace(300, -300, 1500),
        torch.arange(1500) % 7 * 40.0,
    ):
        hold(query, key, value, bias=rising[None, None, None])


def test_all_of_the_output_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = normal(11, (2, 6, 3, 33), (2, 2, 70, 33), (2, 2, 70, 19))
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> Tensor:
        return empty(*shape, **options).fill_(torch.nan)

    expected = decoded(query, key, value, mask=Padding(torch.tensor([0, 50])))
    monkeypatch.setattr(torch, "empty", poisoned)
    found = decoded(query, key, value, mask=Padding(torch.tensor([0, 50])))
    assert found is not None and expected is not None
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


# ---------------------------------------------------------------------------- threads, and the other copies


def test_threads_share_the_keys_and_bits_repeat() -> None:
    shapes = (
        ((1, 4, 2, 64), (1, 1, 2500, 64), (1, 1, 2500, 48)),
        ((8, 4, 1, 64), (8, 2, 700, 64), (8, 2, 700, 64)),
    )
    before = torch.get_num_threads()
    try:
        for number, (one, two, three) in enumerate(shapes):
            tensors = normal(12, one, two, three)
            mask = Padding(torch.arange(1, 9) * 87) if number else Causal(LOWER)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                first = hold(*tensors, mask=mask)
                again = decoded(*tensors, mask=mask)
                assert again is not None and torch.equal(first, again[0])
    finally:
        torch.set_num_threads(before)


def test_inputs_are_never_written_to() -> None:
    tensors = normal(13, (1, 4, 2, 64), (1, 2, 300, 64), (1, 2, 300, 64))
    before = [tensor.clone() for tensor in tensors]
    hold(*tensors, mask=Causal(LOWER))
    assert all(torch.equal(one, two) for one, two in zip(tensors, before, strict=True))


def test_wide_lanes_pass_the_same_tests() -> None:
    """The 16-lane code, which AVX-512 runs, compiled for this processor."""
    library = _library.library()
    assert library is not None and "wide" in library.variants
    if library.variant == "wide":
        return
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", "core or hostile"]
    done = subprocess.run(
        command, env={**os.environ, "REGARD_ISA": "wide"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:]
