"""Masks as runs and biases as diagonals equal the materialised form, whatever is combined with whatever."""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import _runs, attention, biases, masks
from regard._frame import Frame, coordinates
from regard._plan import use_kernel
from regard.masks import Causal, Dense, Documents, Mask, Padding, Prefix, Rows, Rule, Window

B, H = 2, 2


@st.composite
def simple(draw: st.DrawFn, Tq: int, Tk: int) -> Mask:
    """Any mask that is not a combination, for queries (B, H, Tq, ...) and keys (B, ..., Tk, ...)."""
    counts = st.integers(0, Tk)
    kind = draw(
        st.sampled_from(
            ["causal", "window", "padding", "tokens", "documents", "prefix", "dense", "rows", "rule"]
        )
    )
    if kind == "causal":
        return Causal()
    if kind == "window":
        left = draw(st.none() | st.integers(-4, Tk + 2))
        right = draw(st.none() | st.integers(-4, Tk + 2))
        assume(left is None or right is None or left + right >= 0)
        return Window(left, right)
    if kind == "padding":
        start, stop = (torch.tensor([draw(counts), draw(counts)]) for _ in range(2))
        return draw(st.sampled_from([Padding(stop), Padding(start=start), Padding(start=start, stop=stop)]))
    if kind == "prefix":
        return Prefix(draw(counts))
    if kind == "documents":
        ids = st.integers(0, 2)
        query_ids = torch.tensor(sorted(draw(st.lists(ids, min_size=Tq, max_size=Tq))), dtype=torch.long)
        key_ids = draw(st.lists(ids, min_size=Tk, max_size=Tk))
        ordered = draw(st.booleans())
        return Documents(query_ids, torch.tensor(sorted(key_ids) if ordered else key_ids, dtype=torch.long))
    if kind == "rows":
        start, stop = (
            torch.tensor(draw(st.lists(counts, min_size=Tq, max_size=Tq)), dtype=torch.long) for _ in range(2)
        )
        return Rows(start, stop)
    if kind == "rule":
        step = draw(st.integers(1, 4))
        return Rule(lambda b, h, i, j: (i + j + h) % step == 0)
    seed = draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    if kind == "tokens":
        return Padding.of(torch.rand(B, Tk, generator=generator) > 0.4)
    shape = draw(st.sampled_from([(Tq, Tk), (B, H, Tq, Tk), (B, 1, Tq, 1), (1, H, 1, Tk)]))
    return Dense(torch.rand(shape, generator=generator) > draw(st.sampled_from([0.1, 0.5, 0.9])))


@st.composite
def combined(draw: st.DrawFn, Tq: int, Tk: int, depth: int = 3) -> Mask:
    mask = draw(simple(Tq, Tk))
    for _ in range(draw(st.integers(0, depth))):
        how = draw(st.sampled_from(["and", "or", "not"]))
        if how == "not":
            mask = ~mask
        else:
            other = draw(simple(Tq, Tk))
            mask = mask & other if how == "and" else mask | other
    return mask


sizes = st.integers(0, 9)
offsets = st.integers(-12, 12) | st.tuples(st.integers(-12, 12), st.integers(-12, 12))


def frame_of(Tq: int, Tk: int) -> Frame:
    return Frame((B,), 4, B, H, H, Tq, Tk, torch.device("cpu"))


def placed(offset: int | tuple[int, int]) -> int | Tensor:
    return torch.tensor(offset) if isinstance(offset, tuple) else offset


def written(visible: _runs.Visible, frame: Frame, offset: int | Tensor) -> Tensor:
    """The runs and the bool tensor of a lowered mask, as one bool tensor."""
    j = torch.arange(frame.Tk)
    allowed = torch.ones(B, H, frame.Tq, frame.Tk, dtype=torch.bool)
    if visible.runs is not None:
        some = torch.zeros_like(allowed)
        for run in visible.runs:
            low, high = _runs.edges(run, frame, offset)
            some |= (j >= low[..., None]) & (j < high[..., None])
        allowed &= some
    if visible.dense is not None:
        allowed &= ~visible.dense if visible.negated else visible.dense
    return allowed


def defined(mask: Mask, frame: Frame, offset: int | Tensor) -> Tensor:
    tile = coordinates(frame, offset, (0, frame.Tq), (0, frame.Tk))
    return mask.allowed(tile).expand(B, H, frame.Tq, frame.Tk)


@settings(max_examples=400)
@given(st.data(), sizes, sizes, offsets)
def test_runs_are_the_mask(data: st.DataObject, Tq: int, Tk: int, offset: int | tuple[int, int]) -> None:
    frame, place = frame_of(Tq, Tk), placed(offset)
    mask = data.draw(combined(Tq, Tk)).bind(frame)
    visible = _runs.lower(mask, frame, place)
    assert visible.runs is None or len(visible.runs) <= _runs.MOST_RUNS
    assert torch.equal(written(visible, frame, place), defined(mask, frame, place))


@settings(max_examples=200)
@given(st.data(), sizes, sizes, offsets)
def test_at_most_lets_no_pair_out(
    data: st.DataObject, Tq: int, Tk: int, offset: int | tuple[int, int]
) -> None:
    frame, place = frame_of(Tq, Tk), placed(offset)
    mask = data.draw(combined(Tq, Tk)).bind(frame)
    bound = written(_runs.lower(mask, frame, place, at_most=True), frame, place)
    assert not (defined(mask, frame, place) & ~bound).any()


@settings(max_examples=150)
@given(st.data(), st.integers(1, 9), st.integers(1, 9), offsets)
def test_every_kernel_sees_the_same_pairs(
    data: st.DataObject, Tq: int, Tk: int, offset: int | tuple[int, int]
) -> None:
    """Uniform scores over one-hot values: the output is which keys were seen."""
    mask = data.draw(combined(Tq, Tk, depth=2)) & Window(None, None, offset=placed(offset))
    q, k = torch.zeros(B, H, Tq, 1), torch.zeros(B, H, Tk, 1)
    v = torch.eye(Tk).expand(B, H, Tk, Tk)
    expected = mask.materialize(Tq, Tk, batch=B, heads=H).float()
    expected = expected / expected.sum(-1, keepdim=True).clamp(min=1)
    for kernel in ("reference", "inline") if masks.rules(mask) else ("reference", "tiled", "inline"):
        with use_kernel(kernel):
            torch.testing.assert_close(attention(q, k, v, mask), expected)


@settings(max_examples=200)
@given(st.data(), sizes, sizes, offsets, st.booleans())
def test_position_biases_are_diagonals(
    data: st.DataObject, Tq: int, Tk: int, offset: int | tuple[int, int], per_head: bool
) -> None:
    frame, place = frame_of(Tq, Tk), placed(offset)
    reach = data.draw(st.integers(0, 12))
    generator = torch.Generator().manual_seed(reach)
    table = torch.randn(*([H] if per_head else []), 2 * reach + 1, generator=generator)
    bias = data.draw(st.sampled_from([biases.Alibi(), biases.Alibi(torch.rand(H)), biases.Relative(table)]))
    both = (bias + biases.Relative(table)).bind(frame)
    strided, diagonal = biases.lower(both, frame, place)
    assert strided is None and diagonal is not None
    i, j = torch.arange(Tq)[:, None], torch.arange(Tk)
    found = diagonal[..., j - i + Tq - 1].expand(B, H, Tq, Tk)
    tile = coordinates(frame, place, (0, Tq), (0, Tk))
    torch.testing.assert_close(found, both.value(tile).expand(B, H, Tq, Tk))


def test_what_stays_in_two_runs_does() -> None:
    frame = frame_of(100, 100)
    ids = torch.arange(100) // 10
    shapes = {
        Causal(): 1,
        Window(3, 0): 1,
        Window(3, 0) | Prefix(2): 2,
        ~Window(3, 3): 2,
        ~Causal(): 1,
        Causal() & Documents(ids): 1,
        (Causal() & Documents(ids)) | Prefix(4): 2,
        Causal() & Padding(torch.tensor([50, 60])): 1,
        (Window(5, 0) | Prefix(4)) & Padding(torch.tensor([50, 60])): 2,
        ~(Window(3, 3) | Prefix(5)): 2,
        ~Documents(ids): 2,
        Causal() | Window(4, 0): 1,
        Dense(torch.ones(100, 100, dtype=torch.bool).tril()): 1,
        Dense(
            torch.ones(100, 100, dtype=torch.bool).tril(-3) | torch.ones(100, 100, dtype=torch.bool).triu(4)
        ): 2,
    }
    for mask, runs in shapes.items():
        visible = _runs.lower(mask.bind(frame), frame, 0)
        assert visible.dense is None and visible.runs is not None and len(visible.runs) == runs, mask


def test_one_dense_mask_is_scanned_once(monkeypatch: object) -> None:
    mask = Dense(torch.ones(80, 80, dtype=torch.bool).tril())
    frame = frame_of(80, 80)
    first = _runs.lower(mask.bind(frame), frame, 0)
    assert _runs.lower(mask.bind(frame), frame, 0).runs[0].stop is first.runs[0].stop  # type: ignore[index]
    mask.mask[5] = False
    changed = _runs.lower(mask.bind(frame), frame, 0)
    assert torch.equal(written(changed, frame, 0)[0, 0], mask.mask)
