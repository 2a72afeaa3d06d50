"""The command `data`: fetch a corpus and say what is in it."""

from __future__ import annotations

from typing import Annotated

import typer

from recipes.translation import data as corpora
from recipes.translation.data.pairs import Pair


def data(
    name: Annotated[str, typer.Argument(help=f"The corpus: {', '.join(corpora.NAMES)}.")],
    examples: Annotated[int, typer.Option(help="How many pairs of the training set to show.")] = 5,
) -> None:
    """Fetch a corpus (kept in the cache folder), count it, and show some of it."""
    if examples < 0:
        raise ValueError(f"--examples: expected a number from 0 on, got {examples}")
    corpus = corpora.load(name)
    for part, pairs in (("train", corpus.train), ("valid", corpus.valid), ("test", corpus.test)):
        print(f"{part:>6}: {_counted(pairs)}")
    for pair in corpus.train[:examples]:
        print(f"{pair.key}\n    {pair.source}\n    {pair.target}{_linked(pair)}")


def _counted(pairs: list[Pair]) -> str:
    source, target = (sum(len(text.split()) for text in side) for side in _sides(pairs))
    links = sum(len(pair.links or ()) for pair in pairs)
    said = f"{len(pairs):,} pairs, {source:,} and {target:,} words"
    return f"{said}, {links:,} gold links" if links else said


def _sides(pairs: list[Pair]) -> tuple[list[str], list[str]]:
    return [pair.source for pair in pairs], [pair.target for pair in pairs]


def _linked(pair: Pair) -> str:
    if not pair.links:
        return ""
    source, target = pair.source.split(), pair.target.split()

    def said(words: list[str], places: tuple[int, ...]) -> str:
        return " ".join(words[place] for place in places)

    shown = [f"{said(source, link.source)} = {said(target, link.target)}" for link in pair.links]
    return f"\n    {'; '.join(shown)}"
