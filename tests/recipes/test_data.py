"""The corpora: verses out of their markup, gold links, dates; and what is said when they cannot be had."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

from recipes.translation import data
from recipes.translation.data import bible, dates, debian
from recipes.translation.data.pairs import Link
from recipes.translation.data.split import part
from regard._fetch import FetchError

ENGLISH = (
    'And the <w lemma="strong:H0776">earth</w> <transChange type="added">was</transChange> '
    '<w lemma="strong:H8414 strong:H9999">without form</w>,<note n="1">a <hi>note</hi></note> and ¶ '
    '<w lemma="strong:H0922">void</w>; <w lemma="strong:H6440">face</w> <w lemma="strong:H6440">face</w> '
    '<div eID="gen3" type="x-p"/>'
)
SPANISH = (
    '<w lemma="strong:H0776">Y la tierra</w> estaba <w lemma="strong:H8414">desordenada</w> '
    '<w lemma="strong:H0922">y vac&#237;a</w>, <w lemma="strong:H6440">la haz</w>.'
)


def test_a_verse_is_its_text_and_the_words_of_its_numbers() -> None:
    one = bible.verse(ENGLISH)
    assert one.text == "And the earth was without form, and void; face face"
    words = one.text.split()
    named = [(name, [words[place] for place in places]) for name, places in one.numbers]
    assert named[:3] == [
        ("H0776", ["earth"]),
        ("H8414", ["without", "form,"]),
        ("H9999", ["without", "form,"]),
    ]
    assert bible.verse(SPANISH).text == "Y la tierra estaba desordenada y vacía, la haz."


def test_a_number_that_stands_once_on_each_side_is_a_link() -> None:
    (pair,) = bible.paired(
        iter([("Genesis 1:2", ENGLISH), ("Genesis 1:3", "")]), iter([("Genesis 1:2", SPANISH)])
    )
    assert pair.key == "Genesis 1:2"
    assert pair.links == (Link((2,), (0, 1, 2)), Link((4, 5), (4,)), Link((7,), (5, 6)))


def test_the_parts_follow_from_the_key_alone() -> None:
    keys = [f"verse {n}" for n in range(20_000)]
    shares = {name: sum(part(key) == name for key in keys) / len(keys) for name in ("train", "valid", "test")}
    assert shares == pytest.approx({"train": 0.94, "valid": 0.03, "test": 0.03}, abs=0.005)
    assert part("Genesis 1:1") == "train"


def test_dates_are_what_they_say_and_the_held_out_are_new() -> None:
    corpus = dates.corpus(train=3000, held_out=500)
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (3000, 500, 500)
    every = [*corpus.train, *corpus.valid, *corpus.test]
    assert len({pair.source for pair in every}) == len(every)
    assert len({dates.language_of(pair) for pair in corpus.test}) >= 14
    for pair in every:
        day = date.fromisoformat(pair.target)
        if re.search(r"[0-9]", pair.source) and dates.language_of(pair) not in ("th", "fa"):
            assert str(day.year) in pair.source and str(day.day) in pair.source
    assert dates.corpus(train=50, held_out=10) == dates.corpus(train=50, held_out=10)
    assert dates.corpus(seed=8, train=50, held_out=10) != dates.corpus(train=50, held_out=10)


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="--data 'wmt': there is no such corpus; there are dates, bible"):
        data.load("wmt")


def test_without_apt_it_says_where_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        FetchError, match="there is no apt-get here; fetch them on a Debian or Ubuntu machine and copy"
    ):
        bible.fetch()
    assert list((tmp_path / "data").iterdir()) == []


def test_another_content_than_pinned_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def pretend(command: list[str], folder: Path) -> None:
        commands.append(command)
        if "download" in command:
            (folder / "toy_1_all.deb").write_bytes(b"something else")

    monkeypatch.setattr(debian, "_run", pretend)
    with pytest.raises(FetchError, match="toy=1 has another content than expected .*; nothing was kept"):
        debian.unpacked(tmp_path, [debian.Deb("toy", "1", "0" * 64)])
    assert [command for command in commands if command[0] == "dpkg-deb"] == []


def test_apt_without_network_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(FetchError, match=r"apt-get could not get the data \(.*\)\. Is there a network"):
        debian.unpacked(tmp_path, [debian.Deb("no-such-package-at-all", "1", "0" * 64)])


@pytest.mark.network
def test_the_verses_and_their_links() -> None:
    corpus = data.load("bible")
    every = [*corpus.train, *corpus.valid, *corpus.test]
    links = [link for pair in every for link in pair.links or ()]
    assert len(every) == 31_084 and len(links) == 251_946
    for pair in every:
        source, target = len(pair.source.split()), len(pair.target.split())
        assert all(max(link.source) < source and max(link.target) < target for link in pair.links or ())
    first = next(pair for pair in every if pair.key == "Genesis 1:1")
    assert first.source == "In the beginning God created the heaven and the earth."
    assert Link((3,), (4,)) in (first.links or ()) and first.target.split()[4] == "Dios"
