"""A translation of letters that a small model learns in seconds: reversed, vowels doubled. Also run as a program."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from pathlib import Path
from unittest.mock import patch

from recipes.translation import __main__, data
from recipes.translation.data.pairs import Corpus, Pair
from recipes.translation.training import Training

LETTERS = "abcdefghij"
FIRST = 4


class Letters:
    """A vocabulary of single letters, with the calls of the recipe's own."""

    def __init__(self, letters: str = LETTERS) -> None:
        self.letters = letters

    def __len__(self) -> int:
        return FIRST + len(self.letters)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.letters.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return [FIRST + self.letters.index(letter) if letter in self.letters else 3 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.letters[token - FIRST] for token in ids if token >= FIRST)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.letters), encoding="utf-8")


def translated(text: str) -> str:
    return "".join(2 * letter if letter in "aei" else letter for letter in reversed(text))


def pairs(count: int, seed: int = 0, longest: int = 6) -> list[tuple[list[int], list[int]]]:
    chance, known = random.Random(seed), Letters()
    texts = ["".join(chance.choices(LETTERS, k=chance.randint(1, longest))) for _ in range(count)]
    return [(known.encode(text), known.encode(translated(text))) for text in texts]


def corpus() -> Corpus:
    """The same, as a corpus of the recipe."""
    parts = [pairs(count, seed) for count, seed in ((103, 0), (40, 1), (20, 2))]
    known = Letters()
    made = [
        [
            Pair(known.decode(source), known.decode(target), str(place))
            for place, (source, target) in enumerate(one)
        ]
        for one in parts
    ]
    return Corpus("letters", ("xx", "yy"), *made)


def main() -> None:
    """The recipe's command line, whose only corpus is this one. Dies at the step that KILL_AT names."""
    data.load = lambda name: corpus()
    usual, fatal = Training._step, int(os.environ.get("KILL_AT", 0))

    def step(self: Training, places: list[int]) -> None:
        usual(self, places)
        if self.place.step == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(Training, "_step", step):
        __main__.main()


if __name__ == "__main__":
    main()
