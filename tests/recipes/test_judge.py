"""What evaluate saves, the page that report makes of it, and the picture of an alignment."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from recipes.translation import judge, report, show


def test_a_translation_that_is_its_reference() -> None:
    texts = ["the cat sat on the mat", "it was warm there today"]
    found = judge.judged(texts, texts)
    assert (found["bleu"], found["chrf"], found["exact"]) == (pytest.approx(100), pytest.approx(100), 1.0)
    assert judge.judged(["the cat sat on the mat", "no"], texts)["exact"] == 0.5
    assert "nc:6" in found["signature"]["chrf"] and "tok:13a" in found["signature"]["bleu"]


def test_no_translations_are_refused() -> None:
    with pytest.raises(
        ValueError, match="judge: expected as many translations as references, at least one; got 0"
    ):
        judge.judged([], [])


def test_buckets_of_length_hold_every_sentence_once() -> None:
    sources = [" ".join(["w"] * n) for n in (1, 5, 6, 26, 200)]
    rows = judge.by_length(sources, ["same"] * 5, ["same"] * 5)
    assert [(row["from"], row["to"], row["sentences"]) for row in rows] == [
        (1, 5, 2),
        (6, 6, 1),
        (26, 26, 1),
        (101, 200, 1),
    ]
    assert all(row["chrf"] == pytest.approx(100) for row in rows)


def result(error: float) -> dict[str, object]:
    own = {"precision": 0.7, "recall": 0.6, "error": error}
    score = {
        "width": 1,
        "bleu": 10.0,
        "chrf": 30.0,
        "exact": 0.1,
        "sentences": 4,
        "seconds": 1.0,
        "by_length": [],
    }
    rows = [
        {"from": 1, "to": 5, "sentences": 2, "chrf": 40.0},
        {"from": 6, "to": 10, "sentences": 2, "chrf": 20.0},
    ]
    return {
        "model": {"model": {"kind": "rnn"}, "seed": 1, "seconds": 90.0},
        "data": "bible",
        "words": 25,
        "test": 4,
        "translation": {"greedy": score, "beam": score | {"width": 4, "by_length": rows}},
        "alignment": {"attention": "layer 0, head 0", "validation_error": error, "tried": 1, **own},
        "baselines": {"diagonal": own | {"error": 0.5}},
    }


def test_the_page_holds_what_was_saved(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(result(0.25)), "utf-8")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n", "utf-8")
    report.report(tmp_path, page)
    text = page.read_text("utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| `one` | bible, at most 25 words | 4 | 1.5, 1 | beam 4 | 10.0 | 30.0 | 10.00 % |" in text
    assert "| `one`: layer 0, head 0 | 25.0 % | 70.0 % | 60.0 % |" in text
    assert "| diagonal | 50.0 % | 70.0 % | 60.0 % |" in text and "| from 6 | 20.0 (2) |" in text


def test_a_page_without_its_marks_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(result(0.25)), "utf-8")
    page = tmp_path / "page.md"
    page.write_text("nothing", "utf-8")
    with pytest.raises(ValueError, match="expected one line <!-- results -->"):
        report.report(tmp_path, page)
    assert page.read_text("utf-8") == "nothing"


# ---------------------------------------------------------------------------- pictures

WEIGHTS = torch.tensor([[0.9, 0.1, 0.0], [0.6, 0.2, 0.2]])
SOURCE, TARGET = ["<b>the</b>", "שלום", "猫"], ["le", "chat & co"]


def test_the_terminal_names_what_nothing_looks_at() -> None:
    console = Console(file=io.StringIO(), width=80)
    show.terminal(SOURCE, TARGET, WEIGHTS, console)
    text = console.file.getvalue()
    assert "<b>the</b> 0.90" in text and "looks at these most: שלום 猫" in text
    assert text.splitlines()[0].index("le") + 2 == text.splitlines()[1].index("co") + 2


def test_the_page_is_inert_and_marks_links_and_missing_words() -> None:
    page = show.page(SOURCE, TARGET, WEIGHTS, "A & B")
    assert "<b>the</b>" not in page and "&lt;b&gt;the&lt;/b&gt;" in page and "A &amp; B" in page
    assert page.count("class=link") == 2 and page.count("class=missing") == 2 and "default-src 'none'" in page
    assert "<bdi>שלום</bdi>" in page and "http" not in page.replace("http-equiv", "")


def test_an_empty_translation_is_no_crash() -> None:
    console = Console(file=io.StringIO())
    show.terminal(["a"], [], torch.zeros(0, 1), console)
    assert "looks at these most: a" in console.file.getvalue()
    assert "<table>" in show.page(["a"], [], torch.zeros(0, 1), "")
