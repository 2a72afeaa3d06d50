"""The command `evaluate`: how good a model's translations and its alignments are, printed and saved."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from recipes.translation import alignment, checkpoint, data, decode, judge
from recipes.translation.batches import sources, targets
from recipes.translation.data.pairs import Pair
from regard.look._files import require_writable, write_all

BATCH = 32
STEPS = ("", ", the step after", ", both steps")


@contextmanager
def counted(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; call what it gives with how many more are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda more: progress.update(task, advance=more)


def evaluate(
    model: Annotated[Path, typer.Option(help="The folder of a run, or of one of its checkpoints.")],
    corpus: Annotated[
        str, typer.Option("--data", help="The corpus; by default the one it was trained on.")
    ] = "",
    words: Annotated[int, typer.Option(help="Only pairs of at most so many source words; 0: all.")] = 0,
    beam: Annotated[int, typer.Option(help="Width of the beam, judged beside greedy.")] = 4,
    limit: Annotated[int, typer.Option(help="Only the first so many pairs of the test set; 0: all.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where to save what was found, as JSON.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of torch; 0: as it is.")] = 0,
) -> None:
    """Judge a trained model on the held-out pairs: BLEU, chrF, exact matches; and its attention against gold links."""
    for name, given in (("--words", words), ("--limit", limit), ("--threads", threads), ("--beam", beam - 1)):
        if given < 0:
            raise ValueError(f"{name}: expected a number from {1 if name == '--beam' else 0} on")
    if out is not None:
        require_writable(out.parent)
    if threads:
        torch.set_num_threads(threads)
    made, vocabulary, config = checkpoint.load_model(model)
    name = corpus or str(config.get("data", ""))
    pairs = data.load(name)
    test = _short(pairs.test, words)[: limit or None]
    if not test:
        raise ValueError(f"--words {words}: the test set of {name} has no pair as short")
    found: dict[str, Any] = {
        "model": {
            key: config[key]
            for key in ("model", "data", "words", "seed", "training", "step", "seconds")
            if key in config
        },
        "data": name,
        "words": words or None,
        "test": len(test),
    }
    found["translation"] = {
        way: _translated(made, vocabulary, test, width, way) for way, width in (("greedy", 1), ("beam", beam))
    }
    if any(pair.links for pair in test) and getattr(getattr(made, "sizes", None), "attention", "") != "none":
        found["alignment"] = aligned(made, vocabulary, _short(pairs.valid, words), test)
        found["baselines"] = baselines(_short(pairs.train, words), test)
    _say(found)
    if out is not None:
        save(out, found)
        print(f"written: {out}")


def _short(pairs: Sequence[Pair], words: int) -> list[Pair]:
    return [pair for pair in pairs if not words or len(pair.source.split()) <= words]


def _translated(model: Any, vocabulary: Any, pairs: Sequence[Pair], width: int, way: str) -> dict[str, Any]:
    started = time.perf_counter()
    written = [""] * len(pairs)
    encoded = [vocabulary.encode(pair.source) for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda place: len(encoded[place]))
    with counted(f"translating, {way}", len(pairs)) as advance:
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            source, lengths = sources([encoded[place] for place in places])
            limit = 2 * int(lengths.max()) + 20
            ids = (
                decode.greedy(model, source, lengths, limit)
                if width == 1
                else decode.beam(model, source, lengths, width, limit)
            )
            for place, one in zip(places, ids, strict=True):
                written[place] = vocabulary.decode(one)
            advance(len(places))
    expected = [" ".join(pair.target.split()) for pair in pairs]
    texts = [pair.source for pair in pairs]
    return {
        "width": width,
        **judge.judged(written, expected),
        "by_length": judge.by_length(texts, written, expected),
        "seconds": round(time.perf_counter() - started, 1),
        "examples": [
            {"source": texts[place], "reference": expected[place], "translation": written[place]}
            for place in range(0, len(pairs), max(1, len(pairs) // 5))
        ][:5],
    }


# ---------------------------------------------------------------------------- alignments


def aligned(model: Any, vocabulary: Any, valid: Sequence[Pair], test: Sequence[Pair]) -> dict[str, Any]:
    """The alignment error rate of the attention that does best on the validation set, and which that is."""
    tried = {
        name: alignment.score([alignment.hard(one) for one in maps], _links(valid)).error
        for name, maps in _views(word_maps(model, vocabulary, valid)).items()
    }
    best = min(tried, key=lambda name: tried[name])
    maps = _views(word_maps(model, vocabulary, test))[best]
    found = alignment.score([alignment.hard(one) for one in maps], _links(test))
    return {"attention": best, "validation_error": tried[best], "tried": len(tried), **asdict(found)}


def word_maps(model: Any, vocabulary: Any, pairs: Sequence[Pair]) -> list[Tensor]:
    """(steps, layers, heads, target words, source words) of every pair: cross-attention while the reference is read."""
    maps = []
    with counted("reading attention", len(pairs)) as advance:
        for pair in pairs:
            maps.append(steps_of(model, vocabulary, pair.source, pair.target))
            advance(1)
    return maps


def words_of(model: Any, vocabulary: Any, source: str, target: str) -> Tensor:
    """(layers, heads, target words, source words) of one pair, at the steps that predict the target's subwords."""
    return steps_of(model, vocabulary, source, target)[0]


def steps_of(model: Any, vocabulary: Any, source: str, target: str) -> Tensor:
    """(3, layers, heads, target words, source words) of one pair, by `STEPS`.

    A subword can be met at two steps: the one that predicts it, and the next one, which reads it (Chen et al., 2020,
    "Accurate word alignment induction from neural machine translation"). The third is the mean of both.
    """
    read, written = vocabulary.encode(source), vocabulary.encode(target)
    ids, lengths = sources([read])
    target_in, _ = targets([written])
    weights = model.cross(ids, lengths, target_in)[:, 0, :, :, : len(read)]
    predicts, reads = weights[..., : len(written), :], weights[..., 1 : len(written) + 1, :]
    steps = torch.stack([predicts, reads, (predicts + reads) / 2])
    return alignment.of_words(steps, vocabulary.words(source), vocabulary.words(target))


def _views(maps: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Every way to read one matrix out of the maps: each step, of all, of a layer, of a head."""
    _, layers, heads = maps[0].shape[:3]
    found: dict[str, list[Tensor]] = {}
    for step, said in enumerate(STEPS):
        found[f"the mean of all{said}"] = [one[step].mean((0, 1)) for one in maps]
        for layer in range(layers):
            found[f"layer {layer}, the mean of its heads{said}"] = [one[step, layer].mean(0) for one in maps]
            for head in range(heads):
                found[f"layer {layer}, head {head}{said}"] = [one[step, layer, head] for one in maps]
    return found


def _links(pairs: Sequence[Pair]) -> list[tuple[Any, ...]]:
    return [pair.links or () for pair in pairs]


def baselines(train: Sequence[Pair], test: Sequence[Pair]) -> dict[str, Any]:
    """The diagonal, IBM Model 1 trained on the same pairs, and eflomal where it is installed, by the same rule."""
    known = alignment.Ibm1(train)
    found = {
        "diagonal": asdict(alignment.score([alignment.diagonal(pair) for pair in test], _links(test))),
        "IBM Model 1": asdict(alignment.score([known.align(pair) for pair in test], _links(test))),
    }
    if importlib.util.find_spec("eflomal") is None:
        print(
            "without a statistical aligner beside it: pip install eflomal==2.0.0 (it is compiled from source)"
        )
    else:
        found["eflomal"] = asdict(alignment.score(alignment.eflomal(train, test), _links(test)))
    return found


# ---------------------------------------------------------------------------- saying and saving


def _say(found: dict[str, Any]) -> None:
    for way, one in found["translation"].items():
        print(
            f"{way:>7}: BLEU {one['bleu']:.1f}, chrF {one['chrf']:.1f}, exact {100 * one['exact']:.2f} % "
            f"of {one['sentences']} ({one['seconds']} s)"
        )
    if "alignment" in found:
        own = found["alignment"]
        print(f"alignment error rate: {100 * own['error']:.1f} % ({own['attention']})", end="")
        print("".join(f"; {name} {100 * one['error']:.1f} %" for name, one in found["baselines"].items()))


def save(path: Path, found: dict[str, Any]) -> None:
    """Write the JSON, whole or not at all."""
    write_all({path: (json.dumps(found, ensure_ascii=False, indent=1) + "\n").encode()})
