"""Making the record that a command is about: from a file, or by running a model, with a bar while that takes long."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.utils.hooks import RemovableHandle

from regard.look._doctor_model import attention_modules
from regard.look._model import LoadedModel, load_model
from regard.look._model_run import WEIGHT_BYTES, reader_of, record_of, record_of_image
from regard.look._record import Record
from regard.look._shown import LONGEST
from regard.look._tokens import tokens_of
from regard.look._watch_keep import Keep

# Shorter texts are read before a bar could be seen.
_SHORT = 256
_TOPK, _POOL = 8, 1024
MODEL = "minilm"


def made(
    *,
    model: str | None,
    text: str | None,
    image: Path | None,
    record: Path | None,
    target: str | None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Record:
    """The record of a model on a text or an image, or one that was saved. `layers` and `heads` limit what is kept."""
    if record is not None:
        if layers is not None or heads is not None:
            raise ValueError(
                "--layers and --heads choose what is kept while a model runs; a saved record holds what it holds"
            )
        if model is not None or target is not None:
            option = "--target" if model is None else "--model"
            raise ValueError(f"{option} means nothing beside --record, where no model runs; leave it out")
        return loaded_record(record)
    if image is not None and target is not None:
        raise ValueError("--target means nothing beside --image; leave it out")
    loaded = load_model(MODEL if model is None else model)
    if image is not None:
        _require_image(image)
        return record_of_image(loaded, image, keep=_chosen(loaded, 0, layers, heads))
    assert text is not None
    length = _length(loaded, text)
    keep = _chosen(loaded, length, layers, heads)
    with _bar(reader_of(loaded, target), length):
        return record_of(loaded, text, target=target, keep=keep)


def loaded_record(path: Path) -> Record:
    """A record that was saved. ValueError or OSError that names it."""
    try:
        return Record.load(path)
    except OSError as error:
        # A record is two files: where only its twin is missing, that one is named.
        missing = error.filename if path.exists() else path
        raise OSError(f"cannot read the record {missing}: {error.strerror or error}") from error


def _require_image(image: Path) -> None:
    if not image.is_file():
        raise ValueError(f"there is no image file {image}")


def _length(loaded: LoadedModel, text: str) -> int:
    return 0 if loaded.tokenizer is None or not text.strip() else len(tokens_of(loaded.tokenizer, text)[0])


def _chosen(
    loaded: LoadedModel, length: int, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> Keep | None:
    """What to keep when layers or heads are chosen: their weights, or blocks where those would be too many."""
    if layers is None and heads is None:
        return None
    config: Any = loaded.model.config
    every = getattr(config, "num_hidden_layers", 1), getattr(config, "num_attention_heads", 1)
    for option, chosen, count in (("--layers", layers, every[0]), ("--heads", heads, every[1])):
        for number in chosen or ():
            if number >= count:
                raise ValueError(
                    f"{option} {number}: {loaded.name} has {count} {option[2:]}, counted from 0; give 0 to {count - 1}"
                )
    many = (every[0] if layers is None else len(layers)) * (every[1] if heads is None else len(heads))
    fits = 4 * many * length**2 <= WEIGHT_BYTES
    # Beyond the length of a map that is shown whole, what is shown are blocks and the largest weights of every head.
    long = not fits or length > LONGEST
    topk, side = (_TOPK, _POOL) if long else (0, 0)
    return Keep(topk=topk, pool=side, weights=fits, layers=layers, heads=heads)


@contextmanager
def _bar(model: nn.Module, length: int) -> Iterator[None]:
    """A bar on stderr that moves on with every attention module, where someone watches and the text is long."""
    modules = [module for _, module in attention_modules(model)]
    if length <= _SHORT or not sys.stderr.isatty() or not modules:
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    handles: list[RemovableHandle] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"reading {length:,} tokens", total=len(modules))

        def step(*_: Any) -> None:
            progress.advance(task)

        try:
            handles += [module.register_forward_hook(step) for module in modules]
            yield
        finally:
            for handle in handles:
                handle.remove()
