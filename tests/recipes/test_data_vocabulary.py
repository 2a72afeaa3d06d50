"""The vocabulary: text there and back, words and their subwords, and the file it is known by."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.translation.data.vocabulary import BOS, EOS, PAD, UNK, Vocabulary

TEXTS = [
    "In the beginning God created the heaven and the earth.",
    "En el principio crió Dios los cielos, 1909.",
] * 3
KNOWN = Vocabulary.train(TEXTS, 120)


def test_a_text_comes_back_and_the_special_ids_are_left_out() -> None:
    for text in TEXTS:
        ids = KNOWN.encode(text)
        assert KNOWN.decode([BOS, *ids, EOS, PAD]) == text and min(ids) > UNK
    assert KNOWN.encode("") == [] and KNOWN.decode([]) == "" and KNOWN.words("  ") == []
    assert len(KNOWN) <= 120 and len(KNOWN.encode("the earth")) < len("theearth")


def test_an_unknown_script_is_unknown_letters() -> None:
    assert UNK in KNOWN.encode("猫") and set(KNOWN.encode("the")).isdisjoint({UNK})


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="aegnrtho .,¡-19猫\n\t\u00a0\u0301\u2581é", max_size=30))
def test_words_cover_the_subwords_of_their_text(text: str) -> None:
    words = KNOWN.words(text)
    bounds = [0, *(stop for _, _, stop in words)]
    assert [start for _, start, _ in words] == bounds[:-1] and bounds[-1] == len(KNOWN.encode(text))


def test_words_are_what_white_space_separates() -> None:
    assert [word for word, _, _ in KNOWN.words(" the  heaven,\nand 1909. ")] == [
        "the",
        "heaven,",
        "and",
        "1909.",
    ]


def test_a_saved_one_is_the_same_and_known_by_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    KNOWN.save(path)
    again = Vocabulary.load(path)
    assert again.digest == KNOWN.digest and again.encode(TEXTS[1]) == KNOWN.encode(TEXTS[1])
    assert Vocabulary.train(TEXTS, 120).digest == KNOWN.digest != Vocabulary.train(TEXTS[:1], 120).digest
    assert [file.name for file in tmp_path.iterdir()] == ["vocabulary.json"]


def test_what_is_no_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the vocabulary .*none.json"):
        Vocabulary.load(tmp_path / "none.json")
    for content in (b"{}", b"\xff\xfe", b""):
        (tmp_path / "other.json").write_bytes(content)
        with pytest.raises(ValueError, match="other.json: is no vocabulary of this recipe"):
            Vocabulary.load(tmp_path / "other.json")
    with pytest.raises(ValueError, match="expected more than 4 subwords, got 4"):
        Vocabulary.train(TEXTS, 4)
    with pytest.raises(ValueError, match="expected texts to learn from, got none"):
        Vocabulary.train([], 50)
