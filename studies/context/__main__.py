"""``python -m studies.context``: measure on all-MiniLM-L6-v2, and write docs/studies/context.{md,json,svg}."""

from __future__ import annotations

from typing import Any

from regard.look._model import LoadedModel, load_model
from studies import files
from studies.context import measure, page
from studies.context.measure import Seen
from studies.context.sentences import WORDS


def uses_in(loaded: LoadedModel, words: list[str], *, hide_cues: bool = False) -> list[Seen]:
    """Every use of these words, seen in the model."""
    return [
        measure.look(loaded, word, sense, use, hide_cues=hide_cues)
        for word in words
        for sense, uses in WORDS[word].items()
        for use in uses
    ]


def found_in(loaded: LoadedModel, words: list[str]) -> dict[str, Any]:
    """Everything that the page is made of."""
    uses = uses_in(loaded, words)
    strongest = [int(row.argmax()) for row in measure.heads(uses)]
    return {
        "model": loaded.name,
        "words": {word: list(WORDS[word]) for word in words},
        "uses": len(uses),
        "shown": measure.by_depth(uses),
        "hidden": measure.by_depth(uses_in(loaded, words, hide_cues=True)),
        "each": {word: measure.by_depth([use for use in uses if use.word == word]) for word in words},
        "steps": measure.steps(uses),
        "attention": measure.shares(uses),
        "heads": measure.heads(uses).tolist(),
        "examples": [
            {
                "word": use.word,
                "sense": use.sense,
                "sentence": use.use.sentence,
                "most": [measure.most_attended(use, layer, head) for layer, head in enumerate(strongest)],
            }
            for use in uses
            if use.use == WORDS[use.word][use.sense][0]
        ],
    }


def main() -> None:
    given = files.arguments("context", "The same word in different sentences, layer by layer.")
    words = list(WORDS)[:2] if given.quick else list(WORDS)
    files.write(given.out, page.contents(found_in(load_model("minilm"), words), quick=given.quick))


if __name__ == "__main__":
    files.run(main)
