"""Which strips of the score matrix a kernel walks: some heads, some query rows, and the keys that these may see.

A strip holds all the visible keys of its rows, so that any normaliser can work on it; its size is bounded, so that
memory is linear in the length. Keys that no row of a strip may see are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from regard import _runs
from regard.kernels.problem import Problem

PER_THREAD = 1 << 19
ELSEWHERE = 1 << 25
MOST_ROWS, FEWEST_ROWS = 256, 64
_TILE = 64


class Strip(NamedTuple):
    """Samples b, key heads h, query heads heads, query rows, and the ranges of keys that they may see.

    ragged: the columns (of the strip) where some row may not see a key; None where every row sees every key.
    filled: whether every row surely sees some key.
    """

    b: slice
    h: slice
    heads: slice
    rows: tuple[int, int]
    keys: tuple[tuple[int, int], ...]
    ragged: tuple[tuple[int, int], ...] | None
    filled: bool

    @property
    def width(self) -> int:
        return sum(stop - start for start, stop in self.keys)


class _Block(NamedTuple):
    """What one run says of one block of rows: the hull of its keys, the part that all rows see, any empty row."""

    start: int
    stop: int
    inner_start: int
    inner_stop: int
    empty: int


def walk(problem: Problem, edges: list[tuple[Tensor, Tensor]]) -> Iterator[Strip]:
    """All strips that are not empty, in a fixed order; ``edges`` are ``edges_of`` the problem."""
    B, H, Tq, _ = problem.query.shape
    _, Hkv, Tk, _ = problem.key.shape
    if 0 in (B, H, Tq, Tk):
        return
    groups = H // Hkv
    by_sample = any(low.shape[0] > 1 for low, _ in edges) or _varies(problem.dense, 0)
    by_head = any(low.shape[1] > 1 for low, _ in edges) or _varies(problem.dense, 1)
    rows, samples, heads = _sizes(problem, edges, groups, by_sample, by_head)
    blocks = [_blocks(low, high, Tk, rows) for low, high in edges]
    for b in range(0, B, samples):
        for h in range(0, Hkv, heads):
            bs, hs = slice(b, min(b + samples, B)), slice(h, min(h + heads, Hkv))
            across = slice(hs.start * groups, hs.stop * groups)
            for n, i in enumerate(range(0, Tq, rows)):
                span = (i, min(i + rows, Tq))
                seen = [_merged(found, bs, across, n) for found in blocks] if problem.masked else None
                strip = _strip(problem, bs, hs, across, span, seen)
                if strip is not None:
                    yield strip


def _varies(tensor: Tensor | None, dim: int) -> bool:
    return tensor is not None and tensor.shape[dim] > 1


def edges_of(problem: Problem) -> list[tuple[Tensor, Tensor]]:
    """First key and end of every run, row by row."""
    return [_runs.edges(run, problem.frame, problem.place) for run in problem.runs or []]


def _widths(edges: list[tuple[Tensor, Tensor]]) -> tuple[int, int]:
    """How many keys a row may see: on average, and at most."""
    each = [(high - low).clamp(min=0).double() for low, high in edges]
    means, most = zip(*[torch.stack([width.mean(), width.amax()]).tolist() for width in each], strict=True)
    return int(sum(means)), int(sum(most))


def _sizes(
    problem: Problem, edges: list[tuple[Tensor, Tensor]], groups: int, by_sample: bool, by_head: bool
) -> tuple[int, int, int]:
    """Rows, samples and key heads of a strip, within the budget; short rows where rows see few keys."""
    B, _, Tq, _ = problem.query.shape
    _, Hkv, Tk, _ = problem.key.shape
    budget = PER_THREAD * torch.get_num_threads() if problem.query.device.type == "cpu" else ELSEWHERE
    most, wide = MOST_ROWS, Tk
    if edges:
        mean, largest = _widths(edges)
        most = min(MOST_ROWS, max(FEWEST_ROWS, mean // 2))
        wide = max(1, min(Tk, largest + most))
    rows = max(1, min(Tq, most, budget // max(1, groups * wide)))
    elements = groups * rows * wide
    heads = 1 if by_head and groups == 1 else max(1, min(Hkv, budget // max(1, elements)))
    samples = 1 if by_sample or heads < Hkv else max(1, min(B, budget // max(1, elements * Hkv)))
    return rows, samples, heads


def _blocks(low: Tensor, high: Tensor, Tk: int, rows: int) -> list[list[list[_Block]]]:
    """Hulls and inner parts, [sample][head][block of rows]."""
    empty = low >= high
    start = _per_block(low.masked_fill(empty, Tk), rows).amin(-1)
    stop = _per_block(high.masked_fill(empty, 0), rows).amax(-1)
    inner_start = _per_block(low.masked_fill(empty, Tk), rows).amax(-1)
    inner_stop = _per_block(high.masked_fill(empty, 0), rows).amin(-1)
    some = _per_block(empty, rows).any(-1).to(start.dtype)
    table = torch.stack([start, stop, inner_start, inner_stop, some], -1).tolist()
    return [[[_Block(*cell) for cell in row] for row in head] for head in table]


def _per_block(edge: Tensor, rows: int) -> Tensor:
    missing = -edge.shape[-1] % rows
    if missing:
        edge = torch.cat([edge, edge[..., -1:].expand(*edge.shape[:-1], missing)], -1)
    return edge.reshape(*edge.shape[:-1], -1, rows)


def _merged(found: list[list[list[_Block]]], bs: slice, heads: slice, n: int) -> _Block:
    """One block for all samples and heads of a strip."""
    samples = found[bs] if len(found) > 1 else found
    cells = [head[n] for sample in samples for head in (sample[heads] if len(sample) > 1 else sample)]
    if len(cells) == 1:
        return cells[0]
    return _Block(
        min(cell.start for cell in cells),
        max(cell.stop for cell in cells),
        max(cell.inner_start for cell in cells),
        min(cell.inner_stop for cell in cells),
        max(cell.empty for cell in cells),
    )


def _strip(
    problem: Problem, bs: slice, hs: slice, heads: slice, span: tuple[int, int], seen: list[_Block] | None
) -> Strip | None:
    Tk = problem.key.shape[2]
    keys: list[tuple[int, int]] = [(0, Tk)]
    ragged: list[tuple[int, int]] | None = None
    filled = problem.dense is None and (seen is None or any(not cell.empty for cell in seen))
    if seen is not None:
        keys = _union([(cell.start, cell.stop) for cell in seen if cell.start < cell.stop])
        ragged = _ragged(seen[0], keys) if len(seen) == 1 and keys else [(0, _width(keys))]
    if problem.dense is not None:
        keys = _only_seen(part(problem.dense, bs, heads, span), problem.negated, keys)
        ragged = [(0, _width(keys))]
    if not keys:
        return None
    return Strip(bs, hs, heads, span, tuple(keys), tuple(ragged) if ragged else None, filled)


def _ragged(cell: _Block, keys: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Columns of a single run's strip that some row may not see."""
    (start, stop), width = keys[0], _width(keys)
    if cell.inner_start >= cell.inner_stop:
        return [(0, width)]
    edges = [(0, cell.inner_start - start), (cell.inner_stop - start, stop - start)]
    return [(low, high) for low, high in edges if low < high]


def _width(keys: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in keys)


def _union(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _only_seen(dense: Tensor, negated: bool, keys: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of the key ranges in which a strip's bool tensor lets any row see anything, by tiles of 64 keys."""
    dense = dense.flatten(0, 2)
    seen = ~dense.all(0) if negated else dense.any(0)
    if seen.shape[0] == 1:
        return keys if bool(seen) else []
    found: list[tuple[int, int]] = []
    for start, stop in keys:
        flags = seen[start:stop]
        flags = torch.nn.functional.pad(flags, (0, -flags.shape[0] % _TILE)).view(-1, _TILE).any(-1)
        for n, flag in enumerate(flags.tolist()):
            if flag:
                found.append((start + n * _TILE, min(start + (n + 1) * _TILE, stop)))
    return _union(found)


def part(tensor: Tensor, bs: slice, heads: slice, span: tuple[int, int]) -> Tensor:
    """The samples, heads and rows of a strip, of a tensor (B|1, H|1, Tq|1, ...) that may broadcast."""
    one = slice(0, 1)
    return tensor[
        bs if tensor.shape[0] > 1 else one,
        heads if tensor.shape[1] > 1 else one,
        slice(*span) if tensor.shape[2] > 1 else one,
    ]


def columns(tensor: Tensor, keys: tuple[tuple[int, int], ...]) -> Tensor:
    """The keys of a strip along the last dimension, which may be 1."""
    if tensor.shape[-1] == 1:
        return tensor
    if len(keys) == 1:
        return tensor[..., keys[0][0] : keys[0][1]]
    return torch.cat([tensor[..., start:stop] for start, stop in keys], -1)


def rows_of(tensor: Tensor, keys: tuple[tuple[int, int], ...]) -> Tensor:
    """The keys of a strip along the second to last dimension."""
    if len(keys) == 1:
        return tensor[..., keys[0][0] : keys[0][1], :]
    return torch.cat([tensor[..., start:stop, :] for start, stop in keys], -2)


class Closed(NamedTuple):
    """Pairs of a strip's columns low to high that may not meet: bool, broadcastable to (b, heads, rows, high - low)."""

    low: int
    high: int
    pairs: Tensor


def closed(problem: Problem, edges: list[tuple[Tensor, Tensor]], strip: Strip) -> list[Closed]:
    """Which pairs of a strip may not meet, for its ragged columns."""
    if strip.ragged is None:
        return []
    device = problem.query.device
    index = torch.cat([torch.arange(*span, device=device) for span in strip.keys])
    own = [[part(edge[..., None], strip.b, strip.heads, strip.rows) for edge in pair] for pair in edges]
    dense = None
    if problem.dense is not None:
        dense = columns(part(problem.dense, strip.b, strip.heads, strip.rows), strip.keys)
        dense = dense if problem.negated else ~dense
    return [_closed(problem, index[low:high], own, dense, low, high) for low, high in strip.ragged]


def _closed(
    problem: Problem, index: Tensor, own: list[list[Tensor]], dense: Tensor | None, low: int, high: int
) -> Closed:
    pairs: Tensor | None = None
    for first, end in own:
        outside = (index < first) | (index >= end)
        pairs = outside if pairs is None else pairs & outside
    if problem.masked and pairs is None:
        pairs = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=index.device)
    if dense is not None:
        there = dense if dense.shape[-1] == 1 else dense[..., low:high]
        pairs = there if pairs is None else pairs | there
    assert pairs is not None
    return Closed(low, high, pairs)
