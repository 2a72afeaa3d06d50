"""Writing a translation: greedily, or with a beam. Batched; the source is read and projected once, states are kept.

Letters: B sentences, W hypotheses of each, V words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipes.translation.model import BOS, EOS, PAD, positive


@torch.no_grad()
def greedy(model: Any, source: Tensor, lengths: Tensor, limit: int) -> list[list[int]]:
    """The likeliest word at each step, until EOS or ``limit`` words: ids without BOS and EOS, one list a sentence.

    Sentences that have ended leave the batch. Raises ValueError for a limit below 1.
    """
    limit = _limited(model, limit)
    state = model.start(model.encode(source, lengths))
    written: list[list[int]] = [[] for _ in range(len(source))]
    open_ = list(range(len(source)))
    tokens = source.new_full((len(source),), BOS)
    for _ in range(limit):
        logits, state = model.step(tokens, state)
        tokens = _allowed(logits).argmax(-1)
        going = tokens != EOS
        for place, token, goes in zip(open_, tokens.tolist(), going.tolist(), strict=True):
            if goes:
                written[place].append(token)
        if not bool(going.all()):
            index = going.nonzero()[:, 0]
            if not len(index):
                break
            open_ = [open_[i] for i in index.tolist()]
            tokens, state = tokens[index], state.select(index)
    return written


@torch.no_grad()
def beam(
    model: Any, source: Tensor, lengths: Tensor, width: int, limit: int, length_penalty: float = 0.6
) -> list[list[int]]:
    """The best of the hypotheses that a beam of ``width`` finds, by ``log p / ((5 + n) / 6)^length_penalty``.

    n counts words and EOS (Wu et al., 2016). A hypothesis that ``limit`` cuts off is judged as it stands, and only
    where its sentence has no whole one. Width 1 writes what ``greedy`` writes. Raises ValueError for a width or limit
    below 1 and a negative penalty.
    """
    positive("width", width)
    limit = _limited(model, limit)
    if not length_penalty >= 0:
        raise ValueError(f"length_penalty: expected 0 or more, got {length_penalty!r}")
    B, V = len(source), 0
    state = model.start(model.encode(source, lengths))
    rows = torch.arange(B).repeat_interleave(width).to(source.device)
    state = state.select(rows)
    # All hypotheses of a sentence begin alike: the first alone counts, so that they do not stay alike.
    scores = torch.full((B, width), -torch.inf, device=source.device)
    scores[:, 0] = 0
    tokens = source.new_full((B * width,), BOS)
    texts = source.new_zeros((B * width, 0))
    best: list[tuple[float, list[int]] | None] = [None] * B
    alive = list(range(B))
    for n in range(1, limit + 1):
        logits, state = model.step(tokens, state)
        logp = _allowed(logits).float().log_softmax(-1)
        V = logp.shape[-1]
        total = (scores.view(-1, 1) + logp).view(len(alive), width * V)
        # Of 2 W candidates at least W go on, since each hypothesis can end in one way only.
        values, places = total.topk(min(2 * width, width * V))
        scores, index, tokens = _next(values, places, V, width, texts, best, alive, n, length_penalty)
        texts = torch.cat([texts[index], tokens[:, None]], 1)
        kept = [
            i for i, place in enumerate(alive) if not _settled(best[place], scores[i], limit, length_penalty)
        ]
        if n == limit or not kept:
            _cut_off(texts, scores, best, alive, width)
            break
        if len(kept) < len(alive):
            rows = torch.tensor([i * width + w for i in kept for w in range(width)], device=source.device)
            alive, scores = [alive[i] for i in kept], scores[kept]
            index, tokens, texts = index[rows], tokens[rows], texts[rows]
        state = state.select(index)
    return [[] if one is None else one[1] for one in best]


def _next(
    values: Tensor,
    places: Tensor,
    V: int,
    width: int,
    texts: Tensor,
    best: list[tuple[float, list[int]] | None],
    alive: list[int],
    n: int,
    penalty: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Put the hypotheses that end aside; -> scores (A, W), rows they come from (A W,) and tokens (A W,) of the rest."""
    ends = places % V == EOS
    for i, rank in ends.nonzero().tolist():
        # What ends behind W others is no hypothesis of a beam of W.
        if rank < width and values[i, rank] > -torch.inf:
            score = float(values[i, rank]) / _length(n, penalty)
            found = best[alive[i]]
            if found is None or score > found[0]:
                row = i * width + int(places[i, rank]) // V
                best[alive[i]] = (score, texts[row].tolist())
    order = torch.sort(ends.to(torch.int8), dim=-1, stable=True).indices[:, :width]
    chosen = places.gather(1, order)
    scores = values.masked_fill(ends, -torch.inf).gather(1, order)
    first = torch.arange(len(alive), device=places.device)[:, None] * width
    return scores, (first + chosen // V).flatten(), (chosen % V).flatten()


def _settled(found: tuple[float, list[int]] | None, scores: Tensor, limit: int, penalty: float) -> bool:
    """Whether no hypothesis can still beat the one found: log p only falls, and the largest length helps it most."""
    return found is not None and found[0] >= float(scores[0]) / _length(limit, penalty)


def _cut_off(
    texts: Tensor, scores: Tensor, best: list[tuple[float, list[int]] | None], alive: list[int], width: int
) -> None:
    for i, place in enumerate(alive):
        if best[place] is None:
            best[place] = (float(scores[i, 0]), texts[i * width].tolist())


def _limited(model: Any, limit: int) -> int:
    """The limit, or what the model has positions for."""
    positive("limit", limit)
    return limit if model.longest is None else min(limit, int(model.longest))


def _length(n: int, penalty: float) -> float:
    return float(((5 + n) / 6) ** penalty)


def _allowed(logits: Tensor) -> Tensor:
    """PAD and BOS are never written."""
    logits = logits.clone()
    logits[:, [PAD, BOS]] = -torch.inf
    return logits
