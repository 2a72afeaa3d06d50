"""The ``translate`` command: a sentence in, its translation out, and on request what the model looked at."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from recipes.translation import alignment, checkpoint, decode
from recipes.translation import show as drawing
from recipes.translation.batches import sources
from recipes.translation.evaluate import words_of
from recipes.translation.model import UNK
from regard.look._files import require_writable, write_all

LONGEST = 1000  # subwords of a sentence


def translate(
    sentence: Annotated[str, typer.Argument(help="The sentence, in quotes; - reads one a line.")],
    model: Annotated[Path, typer.Option(help="The folder of a run, or of one of its checkpoints.")],
    beam: Annotated[int, typer.Option(help="Width of the beam; 1 is greedy.")] = 4,
    penalty: Annotated[float, typer.Option(help="Length penalty of the beam.")] = 0.6,
    show: Annotated[bool, typer.Option("--show", help="Draw which words were looked at.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write that drawing to an .html file.")] = None,
    pharaoh: Annotated[
        Path | None, typer.Option(help="Write hard links, a line a sentence: 0-0 1-2 ...")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="The layer to look at; the last unless told.")] = None,
    head: Annotated[
        int | None, typer.Option(help="The head to look at; the mean of all unless told.")
    ] = None,
) -> None:
    """Translate a sentence with a trained model."""
    _writable(out, pharaoh)
    if beam < 1:
        raise ValueError(f"--beam: expected 1 or more, got {beam}")
    if not math.isfinite(penalty):
        raise ValueError(f"--penalty: expected a number, got {penalty}")
    made, vocabulary, _ = checkpoint.load_model(model)
    _known(made, layer, head)
    lines = _lines() if sentence == "-" else [sentence]
    if out is not None and len(lines) > 1:
        raise ValueError(f"--out: expected one sentence, got {len(lines)}; --pharaoh takes many")
    links = []
    for line in lines:
        if sentence == "-" and not line.strip():  # blank lines of a text stay
            print()
            links.append("\n")
            continue
        found = written(made, vocabulary, line, beam, penalty)
        print(found)
        if not found:
            print("the model wrote nothing for this sentence; a longer training may help", file=sys.stderr)
        if not (show or out or pharaoh):
            continue
        words = found.split()
        across = word_weights(made, vocabulary, line, found, layer, head)
        links.append(alignment.pharaoh(alignment.hard(across)) + "\n")
        if show:
            drawing.terminal(line.split(), words, across, Console())
        if out is not None:
            write_all({out: drawing.page(line.split(), words, across, found or line).encode()})
    if pharaoh is not None:
        write_all({pharaoh: "".join(links).encode()})


def _writable(out: Path | None, pharaoh: Path | None) -> None:
    if out is not None and out.suffix != ".html":
        raise ValueError(f"--out: expected a name that ends in .html, got {out.name}")
    for file in (out, pharaoh):
        if file is not None:
            require_writable(file.parent)


def _known(model: Any, layer: int | None, head: int | None) -> None:
    """Refuse a layer or head that the model has not, before anything is translated."""
    heads = getattr(model.sizes, "heads", 1)
    layers = model.sizes.layers if hasattr(model.sizes, "heads") else 1
    for name, place, many in (("layer", layer, layers), ("head", head, heads)):
        if place is not None and not 0 <= place < many:
            there = (
                f"the only {name} of this model's attention is 0" if many == 1 else f"give 0 to {many - 1}"
            )
            raise ValueError(f"--{name} {place}: {there}")


def _lines() -> list[str]:
    try:
        lines = sys.stdin.buffer.read().decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"sentence: expected UTF-8 on standard input; byte {error.start} is none") from error
    if not any(line.strip() for line in lines):
        raise ValueError("sentence: expected at least one line on standard input, got none")
    return lines


def written(model: Any, vocabulary: Any, sentence: str, beam: int = 4, penalty: float = 0.6) -> str:
    """The translation of one sentence. Raises ValueError for one that is empty, too long, or of unknown letters."""
    ids = understood(vocabulary, sentence, model.longest)
    source, lengths = sources([ids])
    limit = 2 * len(ids) + 20
    if beam == 1:
        found = decode.greedy(model, source, lengths, limit)
    else:
        found = decode.beam(model, source, lengths, beam, limit, penalty)
    return str(vocabulary.decode(found[0]))


def word_weights(
    model: Any, vocabulary: Any, sentence: str, translation: str, layer: int | None, head: int | None
) -> Tensor:
    """(target words, source words): what the model looks at when it predicts the words of a given translation."""
    if not translation:
        return torch.zeros(0, len(sentence.split()))
    maps = words_of(model, vocabulary, sentence, translation)
    chosen = maps[-1 if layer is None else layer]
    return chosen.mean(0) if head is None else chosen[head]


def understood(vocabulary: Any, sentence: str, longest: int | None = None) -> list[int]:
    """The subwords of a sentence. Raises ValueError for one that no model here could read."""
    if not sentence.strip():
        raise ValueError("sentence: expected some words, got an empty one")
    ids: list[int] = vocabulary.encode(sentence)
    most = LONGEST if longest is None else min(LONGEST, longest - 1)
    if len(ids) > most:
        raise ValueError(
            f"sentence: expected at most {most:,} subwords, got {len(ids):,} ({len(sentence.split()):,} words). "
            "Translate it sentence by sentence: one a line, with - and standard input"
        )
    unknown = sum(token == UNK for token in ids)
    if not ids or 2 * unknown > len(ids):
        raise ValueError(
            f"sentence: {unknown} of its {len(ids)} subwords are of letters that this model never saw; "
            "expected the language that it was trained to read"
        )
    return ids
