"""Software help: paragraphs out of their pages, sentences beside their translations."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from recipes.translation import data
from recipes.translation.data import software
from recipes.translation.data.split import part
from regard._fetch import FetchError

PAGE = (
    '<body><p id="bm_module" dir="auto"></p><h1 id="hd_1" dir="auto">\n<a name="x"></a>Macro &amp; Security</h1>'
    '<p id="par_1" class="paragraph">Choose <span class="switchinline"><span hidden="true" class="MAC">'
    '<span class="emph">Preferences</span></span><span hidden="true"><span class="emph">Options</span></span>'
    "</span><br>twice.</p><p>without an id</p><p id='par_2'>The last"
    "<p id='par_3'>after an open one</p></body>"
)


def test_paragraphs_are_the_text_under_an_id_without_the_form_for_macs() -> None:
    assert software.paragraphs(PAGE) == [
        ("hd_1", "Macro & Security"),
        ("par_1", "Choose Options twice."),
        ("par_2", "The last"),
        ("par_3", "after an open one"),
    ]


def test_sentences_pair_where_their_numbers_agree_and_whole_paragraphs_elsewhere() -> None:
    english = [
        ("a", "Opens the old file. Closes the new file!"),
        ("b", "This one has two sentences. The other side has one."),
        ("c", "Opens the old file."),  # seen already
        ("d", "Too short this"),
        ("e", "Not translated at all."),
        ("f", "Only the English has it."),
        ("g", "Far too long is this " + "x" * 400),
    ]
    chinese = [
        ("a", "打开旧文件。关闭新文件！"),
        ("b", "这里只有一个句子。"),
        ("c", "另一个。"),
        ("d", "太短"),
        ("e", "Not translated at all."),
        ("g", "太长"),
    ]
    assert list(software.paired(english, chinese)) == [
        ("Opens the old file.", "打开旧文件。"),
        ("Closes the new file!", "关闭新文件！"),
        ("This one has two sentences. The other side has one.", "这里只有一个句子。"),
    ]


def test_another_language_is_refused() -> None:
    with pytest.raises(ValueError, match="software-xx: there are software-de, software-fr"):
        software.corpus("xx")
    with pytest.raises(ValueError, match="--data 'software-xx': there is no such corpus"):
        data.load("software-xx")


def test_without_apt_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FetchError, match="there is no apt-get here"):
        data.load("software-fr")
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.name.startswith(".")] == []


@pytest.mark.network
def test_the_help_in_french() -> None:
    corpus = data.load("software-fr")
    every = [*corpus.train, *corpus.valid, *corpus.test]
    assert len(every) == 33_144 and corpus.languages == ("en", "fr")
    assert max(Counter(pair.source for pair in every).values()) == 1
    assert {part(pair.source) for pair in corpus.test} == {"test"}
    known = {pair.source: pair.target for pair in every}
    assert known['It is one of the libraries stored in "Application macros and dialogs".'].startswith(
        "C'est l'une des bibliothèques"
    )
