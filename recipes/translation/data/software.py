"""The help of LibreOffice, in English and four translations: sentences by the paragraphs that carry the same id."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

from recipes.translation.data.debian import Deb, data_folder, unpacked, workspace
from recipes.translation.data.pairs import Corpus, Pair
from recipes.translation.data.split import part

VERSION = "4:7.4.7-1+deb12u14"
# Language: the end of its package's name, the folder of its pages, the sha256 of the package.
ENGLISH = ("en-us", "en-US", "8faa840285734d6cfe1ed25537b48f07e74bd6412e3917bf8e5f8a653f7b3712")
TRANSLATIONS = {
    "de": ("de", "de", "00490b63c509ac96f7f212d6a6e40452d3e0d1f97ccf4b824dd5ec4c01e8277f"),
    "fr": ("fr", "fr", "c796530d3e95af1ea4d054076682efc8aad2b569ae9513f3d4a776b2df3fd206"),
    "ru": ("ru", "ru", "5a2f75d5b0dfcf660275070647af528a81be28b5d3e9c3ec2d419ef5518db7a2"),
    "zh": ("zh-cn", "zh-CN", "db867cdece4c2f9c7eebe65e519c6cf386fdcf49d6e061db3dffec893b3e1dee"),
}
FEWEST_WORDS, MOST_LETTERS = 4, 400

_BLOCKS = frozenset(("p", "h1", "h2", "h3", "h4", "h5", "h6", "td", "th", "li"))
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=\S)|(?<=[。！？])\s*(?=\S)")


def corpus(language: str) -> Corpus:
    """Sentences of `language` (de, fr, ru, zh) and English, split by the English one. Raises ValueError, FetchError."""
    if language not in TRANSLATIONS:
        raise ValueError(f"software-{language}: there are software-{', software-'.join(TRANSLATIONS)}")
    lines = fetch(language).read_text(encoding="utf-8").splitlines()
    pairs = [Pair(source, target, source) for source, target in (line.split("\t") for line in lines)]
    parts = {name: [pair for pair in pairs if part(pair.key) == name] for name in ("train", "valid", "test")}
    return Corpus(f"software-{language}", ("en", language), parts["train"], parts["valid"], parts["test"])


def fetch(language: str) -> Path:
    """The file with a pair of sentences in every line; made where it is not there yet."""
    target = data_folder() / f"software-{VERSION.split(':')[-1]}" / f"{language}.tsv"
    if target.is_file():
        return target
    sides = ENGLISH, TRANSLATIONS[language]
    with workspace(target) as work:
        pinned = [Deb(f"libreoffice-help-{name}", VERSION, sha256) for name, _, sha256 in sides]
        pages = unpacked(work, pinned) / "usr" / "share" / "libreoffice" / "help"
        made = work / "made"
        with made.open("w", encoding="utf-8") as file:
            for source, other in paired(*(_read(pages / folder) for _, folder, _ in sides)):
                file.write(f"{source}\t{other}\n")
        os.replace(made, target)
    return target


def _read(folder: Path) -> Iterator[tuple[str, str]]:
    """(page and id, text) of every paragraph."""
    for page in sorted(folder.rglob("*.html")):
        place = page.relative_to(folder).as_posix()
        for name, text in paragraphs(page.read_text(encoding="utf-8")):
            yield f"{place}#{name}", text


def paired(english: Iterable[tuple[str, str]], other: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The sentences of the paragraphs that both have, each English one once.

    A paragraph with as many sentences on either side is cut into them; another is one pair. Left out: what has
    fewer than 4 English words or 400 letters and more, and what is not translated.
    """
    translations = dict(other)
    seen: set[str] = set()
    for name, text in english:
        if name not in translations:
            continue
        cut = _SENTENCE.split(text), _SENTENCE.split(translations[name])
        aligned = zip(*cut, strict=True) if len(cut[0]) == len(cut[1]) else [(text, translations[name])]
        for source, target in aligned:
            if source not in seen and _usable(source, target):
                seen.add(source)
                yield source, target


def _usable(source: str, target: str) -> bool:
    return (
        source != target
        and max(len(source), len(target)) < MOST_LETTERS
        and sum(any(letter.isalpha() for letter in word) for word in source.split()) >= FEWEST_WORDS
        and any(letter.isalpha() for letter in target)
    )


def paragraphs(page: str) -> list[tuple[str, str]]:
    """(id, text) of the paragraphs and headings of a page that carry an id and have a text."""
    parser = _Paragraphs()
    parser.feed(page)
    parser.close()
    return [(name, text) for name, text in parser.found if text]


class _Paragraphs(HTMLParser):
    """Text between the tags, without what is shown on a Mac only (`<span class="MAC">` beside the common form)."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, str]] = []
        self._name = ""
        self._pieces: list[str] = []
        self._dropping = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in _BLOCKS:
            self._end()
            self._name = given.get("id") or ""
        elif tag == "span" and (self._dropping or given.get("class") == "MAC"):
            self._dropping += 1
        elif tag == "br":
            self._pieces.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._end()
        elif tag == "span" and self._dropping:
            self._dropping -= 1

    def handle_data(self, data: str) -> None:
        if self._name and not self._dropping:
            self._pieces.append(data)

    def _end(self) -> None:
        if self._name:
            self.found.append((self._name, " ".join("".join(self._pieces).split())))
        self._name, self._pieces, self._dropping = "", [], 0
