"""The tiled kernel for what cannot be lowered: your own callables, traced inline.

The reference, block of rows by block of rows, each block a checkpoint: backward recomputes it, so that no more than a
block's pairs are ever held, and tensors that a callable closes over get their gradients. Differentiable any number of
times, which is why the second derivative of the built-ins goes through here as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard import _checks, _runs
from regard._call import Call
from regard._frame import coordinates
from regard.kernels import reference
from regard.scores import Additive, Distance

MOST_TRACED_BLOCKS = 64
_BUDGET = 1 << 20
_MOST_ROWS = 256
# The graphs of many blocks, small and lasting, would pin the heap between large temporaries. From 32 MiB on the C
# library maps an allocation by itself and gives it back whole: few large blocks, where there would be many.
_MANY, _MAPPED = 1 << 27, 9 << 20


def blocks(call: Call) -> list[tuple[int, int]]:
    """The blocks of query rows; more rows a block when tracing, so that graphs stay small."""
    frame = call.frame
    wide = max(1, frame.B * frame.H * frame.Tk)
    if _additive(call):
        wide *= max(1, call.query.shape[-1])
    rows = max(1, min(_MOST_ROWS, _BUDGET // wide))
    if call.mask is None and wide * frame.Tq >= _MANY and not torch.compiler.is_compiling():
        rows = max(1, _MAPPED // wide)
    if torch.compiler.is_compiling():
        rows = max(64, rows)
    return [(start, min(start + rows, frame.Tq)) for start in range(0, frame.Tq, rows)]


def _additive(call: Call) -> bool:
    return isinstance(getattr(call.score, "score", call.score), (Additive, Distance))


def too_many(call: Call) -> str | None:
    """Why a traced graph is refused, or None."""
    count = len(blocks(call)) if torch.compiler.is_compiling() else 0
    return f"{count} blocks to trace, {MOST_TRACED_BLOCKS} at most" if count > MOST_TRACED_BLOCKS else None


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Output (B, H, Tq, Dv) and log-sum-exp (B, H, Tq; softmax only)."""
    spans = blocks(call)
    if not spans or call.frame.Tk == 0 or 0 in (call.frame.B, call.frame.H):
        return reference.attend(call)
    reason = too_many(call)
    if reason is not None:
        way_out = "Call it without torch.compile, or make it of built-ins."
        _checks.wrong_value(
            "attention", "fewer blocks of a callable of yours", _checks.words(reason), way_out
        )
    keys = visible(call, spans)
    if torch.compiler.is_compiling():
        parts = [_block(call, span, seen) for span, seen in zip(spans, keys, strict=True)]
    else:
        parts = _kept_apart(call, spans, keys)
    lse = torch.cat([part[1] for part in parts], -1)
    return torch.cat([part[0] for part in parts], -2), lse


def _kept_apart(
    call: Call, spans: list[tuple[int, int]], keys: list[tuple[int, int]]
) -> list[tuple[Tensor, Tensor]]:
    """The blocks' results in memory that was taken before the first of them ran.

    A small result that is left behind in the hole of a large temporary keeps the next one from fitting there: the heap
    would grow by a block for each block.
    """
    frame, value = call.frame, call.value
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    heights = [stop - start for start, stop in spans]
    outputs = [value.new_empty(frame.B, frame.H, rows, value.shape[-1]) for rows in heights]
    lses = [value.new_empty(frame.B, frame.H, rows, dtype=dtype) for rows in heights]
    parts = []
    for span, seen, room, rows in zip(spans, keys, outputs, lses, strict=True):
        output, lse = _block(call, span, seen)
        parts.append((room.copy_(output), rows.copy_(lse) if lse.ndim == 3 else lse))
    return parts


def _block(call: Call, rows: tuple[int, int], keys: tuple[int, int]) -> tuple[Tensor, Tensor]:
    def run(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        seen = slice(*keys)
        at = coordinates(call.frame, call.offset, rows, keys)
        return reference.attend_tile(call, at, query, key[:, :, seen], value[:, :, seen])

    query = call.query[:, :, slice(*rows)]
    if not torch.is_grad_enabled():
        return run(query, call.key, call.value)
    return _recomputed(run, query, call.key, call.value)


def _recomputed(run: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """A checkpoint that keeps the generator's state only of blocks that drew from it."""
    found: tuple[Tensor, Tensor]
    if torch.compiler.is_compiling() or inputs[0].device.type != "cpu":
        found = checkpoint(run, *inputs, use_reentrant=False)
        return found
    before = torch.get_rng_state()
    found = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    if torch.equal(before, torch.get_rng_state()):
        return found
    torch.set_rng_state(before)
    found = checkpoint(run, *inputs, use_reentrant=False)
    return found


def visible(call: Call, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each block of rows the hull of the keys that its mask may let it see."""
    whole = (0, call.frame.Tk)
    seen = _runs.lower(call.mask, call.frame, call.offset, at_most=True)
    if seen.runs is None:
        return [whole] * len(spans)
    edges = [_runs.edges(run, call.frame, call.offset) for run in seen.runs]
    if not all(_checks.can_look(edge) for pair in edges for edge in pair):
        return [whole] * len(spans)
    return [_hull(edges, span) for span in spans]


def _hull(edges: list[tuple[Tensor, Tensor]], span: tuple[int, int]) -> tuple[int, int]:
    rows = slice(*span)
    pairs = [(low[..., rows], high[..., rows]) for low, high in edges]
    seen = [(low[low < high], high[low < high]) for low, high in pairs]
    starts = [int(low.min()) for low, _ in seen if low.numel()]
    stops = [int(high.max()) for _, high in seen if high.numel()]
    return (min(starts), max(stops)) if starts else (0, 0)
