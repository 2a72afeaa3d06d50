"""A translation of letters that a small model learns in seconds: reversed, vowels doubled. Also run as a program."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path

import torch

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


def main(folder: Path, steps: int, dropout: float, kill_at: int) -> None:
    """Train a small model for ``steps``, going on where the folder holds a checkpoint; die at step ``kill_at``."""
    from accelerate import Accelerator

    from recipes.translation import checkpoint
    from recipes.translation.model import build, describe
    from recipes.translation.training import Budget, Recipe, Training

    torch.set_num_threads(1)
    torch.manual_seed(0)
    known = Letters()
    model = build({"kind": "rnn", "vocabulary": len(known), "width": 16, "dropout": dropout})
    recipe = Recipe(tokens=120, every=5, warmup=10, rate=3e-3, steps=steps)
    config = {"model": describe(model), "data": "letters", "vocabulary": known.digest}
    accelerator = Accelerator(cpu=True)
    training = Training(model, pairs(103), pairs(40, seed=1), folder, recipe, config, known, accelerator)
    last = checkpoint.newest(folder, "last")
    if last is not None:
        training.resume(last)
    if kill_at:
        _die_at(training, kill_at)
    training.run(Budget())
    accelerator.end_training()


def _die_at(training: object, step: int) -> None:
    import os
    import signal

    usual = training._step  # type: ignore[attr-defined]

    def fatal(places: list[int]) -> None:
        usual(places)
        if training.place.step == step:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)

    training._step = fatal  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
