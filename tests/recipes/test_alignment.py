"""Alignments: the error rate by hand, words from subwords, the baselines on text where the answer is known."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path

import pytest
import torch

from recipes.translation import evaluate
from recipes.translation.alignment import (
    Ibm1,
    Score,
    diagonal,
    from_pharaoh,
    hard,
    of_words,
    pharaoh,
    score,
)
from recipes.translation.data import Link, Pair

LINKS = (Link((0,), (0, 1)), Link((2,), (2,)))


def test_the_error_rate_by_hand() -> None:
    # Points at linked words: (0, 0) right, (0, 2) wrong, (2, 2) right; (1, 3) is at a word without a link.
    found = score([{(0, 0), (0, 2), (2, 2), (1, 3)}], [LINKS])
    assert found == Score(precision=2 / 3, recall=1.0, error=pytest.approx(1 - (2 + 2) / (3 + 2)))


def test_any_word_that_a_link_spans_finds_it_and_all_of_them_are_right() -> None:
    assert score([{(0, 1), (2, 2)}], [LINKS]) == Score(1.0, 1.0, 0.0)
    assert score([{(0, 0), (0, 1), (2, 2)}], [LINKS]) == Score(1.0, 1.0, 0.0)
    assert score([set()], [LINKS]) == Score(0.0, 0.0, 1.0)
    assert score([], []) == Score(0.0, 0.0, 1.0)
    assert score([{(5, 5)}], [()]) == Score(0.0, 0.0, 1.0)


def test_words_sum_what_they_are_looked_at_and_share_what_they_look() -> None:
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]])
    source, target = [("ab", 0, 2), ("c", 2, 3)], [("x", 0, 1), ("yz", 1, 3)]
    found = of_words(weights, source, target)
    torch.testing.assert_close(found, torch.tensor([[0.75, 0.25], [0.45, 0.55]]))
    assert hard(found) == {(0, 0), (1, 1)}
    torch.testing.assert_close(of_words(weights.expand(2, 3, 3, 3), source, target)[1, 2], found)


def test_the_diagonal_keeps_to_the_sentence() -> None:
    assert diagonal(Pair("a b c", "x y z", "k")) == {(0, 0), (1, 1), (2, 2)}
    assert diagonal(Pair("a b c d", "x y", "k")) == {(1, 0), (3, 1)}
    assert diagonal(Pair("a", "x y z", "k")) == {(0, 0), (0, 1), (0, 2)}


def test_pharaoh_goes_out_and_in() -> None:
    points = {(2, 0), (0, 1), (0, 0)}
    assert pharaoh(points) == "0-0 0-1 2-0"
    assert from_pharaoh(pharaoh(points)) == points and from_pharaoh("") == set()
    for wrong in ("0", "a-1", "1-", "0--1"):
        with pytest.raises(ValueError, match="Pharaoh format: expected pairs such as 0-1, got"):
            from_pharaoh(wrong)


def test_model_1_finds_what_two_sentences_leave_open_and_a_third_decides() -> None:
    pairs = [
        Pair("the house", "das Haus", "1"),
        Pair("the book", "das Buch", "2"),
        Pair("a book", "ein Buch", "3"),
    ]
    model = Ibm1(pairs, 20)
    assert model.align(Pair("the House.", "Haus, das", "x")) == {(1, 0), (0, 1)}
    assert model.align(Pair("a book", "ein Buch", "x")) == {(0, 0), (1, 1)}
    assert model.align(Pair("the book", "das Unbekannte", "x")) == {(0, 0)}
    assert model.align(Pair("unknown", "das", "x")) == set()


def test_model_1_is_a_distribution_over_target_words() -> None:
    model = Ibm1([Pair("a b", "x y z", "1"), Pair("b c", "y w", "2")], 5)
    by_source = model._keys // len(model._targets)
    for word in range(len(model._sources)):
        assert model._table[by_source == word].sum() == pytest.approx(1.0)


class Looking:
    """Two words in, two out: the step that predicts a word looks at the first, the next step at the word itself."""

    def cross(self, source: torch.Tensor, lengths: torch.Tensor, target_in: torch.Tensor) -> torch.Tensor:
        rows = [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
        return torch.tensor(rows)[: target_in.shape[1], : source.shape[1]].expand(1, 1, 1, -1, -1)


class Letters:
    """A vocabulary with a subword for every word."""

    def encode(self, text: str) -> list[int]:
        return [4 for _ in text.split()]

    def words(self, text: str) -> list[tuple[str, int, int]]:
        return [(word, place, place + 1) for place, word in enumerate(text.split())]


def test_the_step_that_reads_a_word_is_offered_and_chosen_where_it_is_better() -> None:
    steps = evaluate.steps_of(Looking(), Letters(), "a b", "x y")
    assert steps.shape == (3, 1, 1, 2, 2)
    assert steps[:, 0, 0].tolist() == [
        [[1.0, 0.0], [1.0, 0.0]],
        [[1.0, 0.0], [0.0, 1.0]],
        [[1.0, 0.0], [0.5, 0.5]],
    ]
    assert torch.equal(evaluate.words_of(Looking(), Letters(), "a b", "x y"), steps[0])
    pair = Pair("a b", "x y", "1", (Link((0,), (0,)), Link((1,), (1,))))
    found = evaluate.aligned(Looking(), Letters(), [pair], [pair])
    assert found["attention"] == "the mean of all, the step after" and found["error"] == 0.0
    assert found["tried"] == 9


class Diagonal:
    """Stands in for eflomal's aligner: the first word at the first; it refuses what is not a line a sentence."""

    def align(self, source: list[str], target: list[str], links_filename_fwd: str) -> None:
        assert source == ["god said\n", "a b\n"] and target == ["dios dijo\n", "x y\n"]
        Path(links_filename_fwd).write_text("0-0 1-1\n0-0\n", "utf-8")


def test_a_statistical_aligner_stands_beside_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, test = [Pair("a b", "x y", "1", ())], [Pair("God said,", "Dios dijo:", "2", (Link((1,), (1,)),))]
    module = types.ModuleType("eflomal")
    module.__spec__ = importlib.machinery.ModuleSpec("eflomal", None)
    module.Aligner = Diagonal
    monkeypatch.setitem(sys.modules, "eflomal", module)
    assert evaluate.baselines(train, test)["eflomal"] == {"precision": 1.0, "recall": 1.0, "error": 0.0}
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda name: None)
    assert "eflomal" not in evaluate.baselines(train, test)
    assert "pip install eflomal" in capsys.readouterr().out
