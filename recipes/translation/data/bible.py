"""The King James Version and the Reina-Valera of 1909, verse by verse, with gold links.

Both texts carry Strong's numbers: each names the Hebrew or Greek word that some words translate. A number that stands
once on each side of a verse links the words that carry it here to those that carry it there.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from recipes.translation.data.debian import Deb, data_folder, unpacked, workspace
from recipes.translation.data.pairs import Corpus, Link, Pair
from recipes.translation.data.split import part
from regard._fetch import FetchError

DEBS = (
    Deb("sword-text-kjv", "14.3-1", "9f463f28ce665f6f528fc723179722bced880a4c5485f7a41bf742838315de57"),
    Deb("sword-text-sparv", "2.60-1", "5c87f9b2bc97457e8a872f5bae7ea7ce59cb3de1dcee73e4d4740451863694cf"),
)
TOOLS = ("libsword-utils", "libsword1.9.0", "libclucene-core1v5", "libclucene-contribs1v5", "libicu72")
ENGLISH, SPANISH = "engKJV2006eb", "spaRV1909eb"
VERSION = "kjv-14.3-rv-2.60"

_DROPPED = re.compile(r"<(note|title)\b[^>]*?>.*?</\1>|¶", re.DOTALL)
_TAG = re.compile(r"<(/?)(\w+)([^>]*)>")
_STRONG = re.compile(r"strong:([GH]\d+)")


class Verse(NamedTuple):
    """The plain text, and the words (places, from 0) that carry each Strong's number, once for every time it stands."""

    text: str
    numbers: tuple[tuple[str, tuple[int, ...]], ...]


def corpus() -> Corpus:
    """All verses that both have, split by their names. Raises FetchError where they cannot be had."""
    folder = fetch()
    pairs = list(paired(_read(folder / f"{ENGLISH}.imp"), _read(folder / f"{SPANISH}.imp")))
    parts = {name: [pair for pair in pairs if part(pair.key) == name] for name in ("train", "valid", "test")}
    return Corpus("bible", ("en", "es"), parts["train"], parts["valid"], parts["test"])


def fetch() -> Path:
    """The folder with both texts as mod2imp writes them; made where it is not there yet."""
    target = data_folder() / f"bible-{VERSION}"
    if all((target / f"{name}.imp").is_file() for name in (ENGLISH, SPANISH)):
        return target
    with workspace(target) as work:
        root = unpacked(work, DEBS, TOOLS)
        made = work / "made"
        made.mkdir()
        for name in (ENGLISH, SPANISH):
            (made / f"{name}.imp").write_bytes(_exported(root, name, work))
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(made, target)
    return target


def _exported(root: Path, name: str, home: Path) -> bytes:
    libraries = ":".join(str(path) for path in (root / "usr" / "lib").glob("*-linux-gnu*"))
    environment = os.environ | {"SWORD_PATH": str(root / "usr/share/sword"), "HOME": str(home)}
    environment["LD_LIBRARY_PATH"] = libraries
    command = [str(root / "usr/bin/mod2imp"), name]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    if done.returncode != 0 or not done.stdout.startswith(b"$$$"):
        said = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise FetchError(f"mod2imp could not read {name} ({said or 'it printed nothing'}); nothing was kept")
    return done.stdout


def _read(path: Path) -> Iterator[tuple[str, str]]:
    """(name of the verse, its text with tags)."""
    name = ""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("$$$"):
            if name:
                yield name, " ".join(lines)
            name, lines = line[3:].strip(), []
        else:
            lines.append(line)
    if name:
        yield name, " ".join(lines)


def paired(english: Iterator[tuple[str, str]], spanish: Iterator[tuple[str, str]]) -> Iterator[Pair]:
    """The verses that stand in both, as pairs with links."""
    others = {name: verse(text) for name, text in spanish}
    for name, text in english:
        one, other = verse(text), others.get(name)
        if other is not None and one.text and other.text:
            yield Pair(one.text, other.text, name, links(one, other))


def verse(tagged: str) -> Verse:
    """Plain text of a verse in OSIS, and which of its words carry which numbers."""
    tagged = _DROPPED.sub("", tagged)
    pieces: list[str] = []
    spans: list[tuple[tuple[str, ...], int, int]] = []
    open_at: tuple[tuple[str, ...], int] | None = None
    at = length = 0
    for tag in _TAG.finditer(tagged):
        plain = html.unescape(tagged[at : tag.start()])
        pieces.append(plain)
        length, at = length + len(plain), tag.end()
        if tag[2] != "w":
            continue
        if not tag[1] and not tag[3].endswith("/"):
            open_at = tuple(dict.fromkeys(_STRONG.findall(tag[3]))), length
        elif tag[1] and open_at is not None:
            spans.append((open_at[0], open_at[1], length))
            open_at = None
    pieces.append(html.unescape(tagged[at:]))
    text = "".join(pieces)
    words = [(match.start(), match.end()) for match in re.finditer(r"\S+", text)]
    numbers = []
    for names, start, stop in spans:
        inside = tuple(
            place for place, (a, b) in enumerate(words) if _meets(text, max(a, start), min(b, stop))
        )
        numbers += [(name, inside) for name in names if inside]
    return Verse(" ".join(text.split()), tuple(numbers))


def _meets(text: str, start: int, stop: int) -> bool:
    return start < stop and any(letter.isalnum() for letter in text[start:stop])


def links(one: Verse, other: Verse) -> tuple[Link, ...]:
    """A link for each number that stands exactly once on each side."""
    counts = [Counter(name for name, _ in each.numbers) for each in (one, other)]
    there = dict(other.numbers)
    return tuple(
        Link(words, there[name])
        for name, words in one.numbers
        if counts[0][name] == 1 and counts[1][name] == 1
    )
