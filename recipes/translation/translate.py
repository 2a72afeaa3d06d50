"""The ``translate`` command: a sentence in, its translation out, and on request what the model looked at."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from recipes.translation import checkpoint, decode
from recipes.translation.batches import sources, targets
from recipes.translation.model import UNK

LONGEST = 1000  # subwords of a sentence


def translate(
    sentence: Annotated[str, typer.Argument(help="The sentence, in quotes; - reads one a line.")],
    model: Annotated[Path, typer.Option(help="The folder of a run, or of one of its checkpoints.")],
    beam: Annotated[int, typer.Option(help="Width of the beam; 1 is greedy.")] = 4,
    penalty: Annotated[float, typer.Option(help="Length penalty of the beam.")] = 0.6,
) -> None:
    """Translate a sentence with a trained model."""
    made, vocabulary, _ = checkpoint.load_model(model)
    lines = sys.stdin.read().splitlines() if sentence == "-" else [sentence]
    if not lines:
        raise ValueError("sentence: expected at least one line on standard input, got none")
    for line in lines:
        print(written(made, vocabulary, line, beam, penalty))


def written(model: Any, vocabulary: Any, sentence: str, beam: int = 4, penalty: float = 0.6) -> str:
    """The translation of one sentence. Raises ValueError for one that is empty, too long, or of unknown letters."""
    ids = understood(vocabulary, sentence)
    source, lengths = sources([ids])
    limit = 2 * len(ids) + 20
    if beam == 1:
        found = decode.greedy(model, source, lengths, limit)
    else:
        found = decode.beam(model, source, lengths, beam, limit, penalty)
    return str(vocabulary.decode(found[0]))


def weights(model: Any, vocabulary: Any, sentence: str, translation: str) -> torch.Tensor:
    """(layers, heads, target subwords, source subwords): cross-attention of a given translation, without EOS."""
    ids, out = understood(vocabulary, sentence), vocabulary.encode(translation)
    source, lengths = sources([ids])
    target_in, _ = targets([out])
    crossed: torch.Tensor = model.cross(source, lengths, target_in)
    return crossed[:, 0, :, : len(out), : len(ids)]


def understood(vocabulary: Any, sentence: str) -> list[int]:
    """The subwords of a sentence. Raises ValueError for one that no model here could read."""
    if not sentence.strip():
        raise ValueError("sentence: expected some words, got an empty one")
    ids: list[int] = vocabulary.encode(sentence)
    if len(ids) > LONGEST:
        raise ValueError(
            f"sentence: expected at most {LONGEST:,} subwords, got {len(ids):,} ({len(sentence.split()):,} words). "
            "Translate it sentence by sentence: one a line, with - and standard input"
        )
    unknown = sum(token == UNK for token in ids)
    if not ids or 2 * unknown > len(ids):
        raise ValueError(
            f"sentence: {unknown} of its {len(ids)} subwords are of letters that this model never saw; "
            "expected the language that it was trained to read"
        )
    return ids
