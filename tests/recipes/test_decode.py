"""Greedy and beam: against each other, against every sentence there is, and at their limits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.translation import decode
from recipes.translation.batches import sources
from recipes.translation.model import BOS, EOS, PAD, build
from recipes.translation.rnn import Rnn

V = 9
DESCRIBED: list[dict[str, Any]] = [
    {"kind": "rnn", "vocabulary": V, "width": 8},
    {"kind": "rnn", "vocabulary": V, "width": 8, "cell": "lstm", "input_feeding": True, "layers": 2},
    {"kind": "transformer", "vocabulary": V, "width": 8, "heads": 2, "hidden": 16, "layers": 2},
]


def sharp(described: dict[str, Any], seed: int = 0) -> Any:
    """A model whose choices differ: random, with logits spread out."""
    torch.manual_seed(seed)
    model = build(described).eval()
    with torch.no_grad():
        model.embedding.weight.mul_(6)
        model.embedding.weight[PAD].zero_()
        if isinstance(model, Rnn):
            model.bias.normal_()
    return model


def drawn(count: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return sources([torch.randint(4, V, (1 + 2 * place % 7,)).tolist() for place in range(count)])


def log_likelihood(model: Any, source: Tensor, lengths: Tensor, text: list[int], ended: bool = True) -> float:
    words = [*text, EOS] if ended else text
    logits = model(source, lengths, torch.tensor([[BOS, *words[:-1]]]))[0].clone()
    logits[:, [PAD, BOS]] = -torch.inf
    return float(logits.log_softmax(-1)[range(len(words)), words].sum())


@pytest.mark.parametrize("described", DESCRIBED, ids=lambda one: one["kind"])
def test_a_beam_of_one_writes_what_greedy_writes(described: dict[str, Any]) -> None:
    written = []
    for seed in range(6):
        model = sharp(described, seed)
        written += decode.greedy(model, *drawn(), limit=12)
        assert written[-6:] == decode.beam(model, *drawn(), width=1, limit=12)
    assert len({len(text) for text in written}) > 1


@pytest.mark.parametrize("described", DESCRIBED, ids=lambda one: one["kind"])
@pytest.mark.parametrize("width", [1, 3])
def test_a_batch_is_its_sentences(described: dict[str, Any], width: int) -> None:
    model = sharp(described)
    source, lengths = drawn()
    together = decode.beam(model, source, lengths, width, 12)
    alone = [
        decode.beam(model, source[i : i + 1, : lengths[i]], lengths[i : i + 1], width, 12)[0]
        for i in range(len(source))
    ]
    assert together == alone


@pytest.mark.parametrize("described", DESCRIBED, ids=lambda one: one["kind"])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
@torch.no_grad()
def test_a_beam_wide_enough_finds_the_best_sentence_there_is(
    described: dict[str, Any], penalty: float
) -> None:
    model = sharp(described)
    source, lengths = drawn(2)
    words = [token for token in range(V) if token not in (PAD, BOS, EOS)]
    limit = 3
    found = decode.beam(model, source, lengths, V**2, limit, penalty)
    for place, text in enumerate(found):
        given = source[place : place + 1, : lengths[place]], lengths[place : place + 1]
        every = [list(one) for n in range(limit) for one in itertools.product(words, repeat=n)]
        scores = [log_likelihood(model, *given, one) / ((6 + len(one)) / 6) ** penalty for one in every]
        best = every[max(range(len(every)), key=scores.__getitem__)]
        assert text == best


@torch.no_grad()
def test_a_wider_beam_finds_likelier_sentences() -> None:
    model = sharp(DESCRIBED[0], 3)
    source, lengths = drawn()
    totals = []
    for width in (1, 5):
        found = decode.beam(model, source, lengths, width, 20, 0.0)
        totals.append(
            sum(
                log_likelihood(
                    model, source[i : i + 1, : lengths[i]], lengths[i : i + 1], text, len(text) < 20
                )
                for i, text in enumerate(found)
            )
        )
    assert totals[1] > totals[0]


class Endless:
    """Never ends: always writes the word 5."""

    longest: int | None = None

    def encode(self, source: Tensor, lengths: Tensor) -> Any:
        return self

    start = staticmethod(lambda read: read)

    def select(self, index: Tensor) -> Any:
        return self

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits = torch.full((len(tokens), V), -torch.inf)
        logits[:, [5, 6]] = torch.tensor([0.0, -1.0])
        return logits, state


def test_the_limit_cuts_a_sentence_that_does_not_end() -> None:
    assert decode.greedy(Endless(), *drawn(2), limit=4) == [[5] * 4] * 2
    assert decode.beam(Endless(), *drawn(2), width=3, limit=4) == [[5] * 4] * 2


@pytest.mark.parametrize(
    ("width", "limit", "penalty"), [(0, 5, 0.6), (2, 0, 0.6), (2, 5, -1.0), (2.5, 5, 0.0)]
)
def test_what_cannot_be_is_refused(width: Any, limit: int, penalty: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        decode.beam(sharp(DESCRIBED[0]), *drawn(1), width, limit, penalty)


@pytest.mark.parametrize("width", [1, 3])
def test_learned_positions_end_a_sentence_where_they_end(width: int) -> None:
    model = sharp({**DESCRIBED[2], "positions": "learned", "longest": 16})
    with torch.no_grad():
        model.embedding.weight[EOS].zero_()
    found = decode.beam(model, *drawn(3), width=width, limit=100)
    assert max(map(len, found)) == 16
