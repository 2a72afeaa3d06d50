"""The ``train`` command: from pairs to a run's folder of checkpoints and losses."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from recipes.translation import checkpoint
from recipes.translation.batches import Encoded
from recipes.translation.model import build, describe, parameters
from regard.look._files import require_writable

_DEFAULTS: dict[str, dict[str, Any]] = {
    "dates": {"width": 128, "vocabulary": 600, "hidden": 512, "dropout": 0.1}
}
_LONGEST = 250  # subwords: a longer sentence is left out of the training, and counted


def train(
    data: Annotated[
        str, typer.Option(help="dates, bible, software-fr, software-de, software-ru or software-zh.")
    ],
    out: Annotated[Path, typer.Option(help="The run's folder: checkpoints, losses.csv, losses.svg.")],
    model: Annotated[str, typer.Option(help="rnn or transformer.")] = "rnn",
    attention: Annotated[
        str | None, typer.Option(help="rnn: none, dot, bilinear, additive (unless told) or concat.")
    ] = None,
    normalize: Annotated[
        str | None, typer.Option(help="rnn: softmax (unless told), sparsemax, entmax.")
    ] = None,
    cell: Annotated[str | None, typer.Option(help="rnn: gru (unless told) or lstm.")] = None,
    input_feeding: Annotated[
        bool, typer.Option("--input-feeding", help="rnn: the last context goes into the next step.")
    ] = False,
    norm: Annotated[str | None, typer.Option(help="transformer: pre (unless told) or post.")] = None,
    positions: Annotated[
        str | None, typer.Option(help="transformer: sinusoidal (unless told), learned, rotary.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="transformer: heads (4).")] = None,
    hidden: Annotated[
        int | None, typer.Option(help="transformer: width of the feed-forward layers (1024).")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Width of the model (256; dates 128).")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of each side (rnn 1, transformer 3).")] = None,
    dropout: Annotated[float | None, typer.Option(help="Share of units dropped.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Subwords to learn (8000; dates 600).")] = None,
    words: Annotated[int | None, typer.Option(help="Leave out sources of more words.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Stop after so many passes over the data.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so much time, resumed parts together.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Stop after so many steps.")] = 0,
    patience: Annotated[
        int | None, typer.Option(help="Stop after so many looks at the validation set without a better one.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Most tokens of a batch, source and target, padding counted.")
    ] = 4000,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps up to it.")] = 400,
    schedule: Annotated[
        str, typer.Option(help="root: falls as 1/sqrt(step); linear: to 0 at --steps.")
    ] = "root",
    smoothing: Annotated[float, typer.Option(help="Label smoothing.")] = 0.1,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = 1.0,
    every: Annotated[
        int, typer.Option(help="Steps between looks at the validation set, and checkpoints.")
    ] = 200,
    precision: Annotated[str, typer.Option(help="no (float32) or bf16.")] = "no",
    device: Annotated[str, typer.Option(help="auto, or cpu.")] = "auto",
    seed: Annotated[int, typer.Option(help="Draws parameters, batches and dropout.")] = 1,
    threads: Annotated[int | None, typer.Option(help="Threads of each process.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where this run was ended or killed.")
    ] = False,
) -> None:
    """Train a model; ends at the first of --epochs, --minutes, --steps and --patience."""
    # accelerate: placement, mixed precision and processes without taking the loop away from its reader.
    from accelerate import Accelerator

    from recipes.translation.training import Budget, Recipe, Training

    if model not in ("rnn", "transformer"):
        raise ValueError(f"--model: expected rnn or transformer, got {model!r}")
    if device not in ("auto", "cpu"):
        raise ValueError(f"--device: expected auto or cpu, got {device!r}")
    _budget(epochs, minutes, steps, patience, threads, words)
    sizes = _sizes(
        model,
        rnn={
            "attention": attention,
            "normalize": normalize,
            "cell": cell,
            "input_feeding": input_feeding or None,
        },
        transformer={"norm": norm, "positions": positions, "heads": heads, "hidden": hidden},
        both={"width": width, "layers": layers, "dropout": dropout},
        usual=_DEFAULTS.get(data, {}),
    )
    recipe = Recipe(
        seed=seed,
        tokens=tokens,
        rate=rate,
        warmup=warmup,
        schedule=schedule,
        steps=steps,
        smoothing=smoothing,
        clip=clip,
        every=every,
        precision=precision,
    )
    if threads is not None:
        torch.set_num_threads(threads)
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision)
    last = _room(out, resume, accelerator.is_main_process)
    with accelerator.main_process_first():
        corpus = _corpus(data)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out: cannot make {out}: {error.strerror}; take another folder") from error
    size = vocabulary or _DEFAULTS.get(data, {}).get("vocabulary", 8000)
    corpus = [_short(part, words) for part in (corpus.train, corpus.valid)]
    known = _vocabulary(corpus[0], size, last, out, accelerator)
    torch.manual_seed(seed)
    made = build({"kind": model, "vocabulary": len(known), **sizes})
    config: dict[str, Any] = {
        "model": describe(made),
        "data": data,
        "words": words,
        "vocabulary": known.digest,
        "seed": seed,
        "training": dataclasses.asdict(recipe),
    }
    pairs, valid = (_encoded(part, known) for part in corpus)
    if accelerator.is_main_process:
        _say(f"{data}: {len(pairs):,} of {len(corpus[0]):,} pairs to train on, {len(valid):,} to judge by")
        _say(f"{model}: {parameters(made):,} parameters; {len(known):,} subwords")
    training = Training(made, pairs, valid, out, recipe, config, known, accelerator)
    if last is not None:
        _same(last, config, known)
        training.resume(last)
    try:
        at = training.run(Budget(epochs, minutes, patience))
    except KeyboardInterrupt:
        _say(f"stopped; --resume goes on from {checkpoint.newest(out, 'last') or 'the beginning'}")
        raise typer.Exit(130) from None
    if accelerator.is_main_process:
        _say(f"best validation loss {at.best:.4f} at step {at.best_step:,}: {checkpoint.newest(out, 'best')}")
    accelerator.end_training()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _budget(
    epochs: int | None,
    minutes: float | None,
    steps: int,
    patience: int | None,
    threads: int | None,
    words: int | None,
) -> None:
    given = {"epochs": epochs, "patience": patience, "threads": threads, "words": words}
    for name, value in given.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name}: expected 1 or more, got {value}")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise ValueError(f"--minutes: expected a number above 0, got {minutes}")
    if epochs is None and minutes is None and not steps and patience is None:
        raise ValueError("train: when shall it stop? Say --epochs, --minutes, --steps or --patience")


def _sizes(
    model: str, rnn: dict[str, Any], transformer: dict[str, Any], both: dict[str, Any], usual: dict[str, Any]
) -> dict[str, Any]:
    """What was said of the model's own kind; anything said of the other kind is refused."""
    own, other = (rnn, transformer) if model == "rnn" else (transformer, rnn)
    for name, value in other.items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')}: means nothing to --model {model}; leave it out")
    said = {name: value for name, value in {**both, **own}.items() if value is not None}
    return {**{name: usual[name] for name in usual if name in {**both, **own}}, **said}


def _room(out: Path, resume: bool, main: bool) -> Path | None:
    """The checkpoint to go on from, if one is to be gone on from."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: expected a folder, or a name for a new one; {out} is a file")
    require_writable(out)
    last = checkpoint.newest(out, "last")
    if last is not None and not resume:
        raise ValueError(
            f"--out: {out} holds a training already; go on with --resume, or take another folder"
        )
    if last is None and resume and main:
        _say(f"{out} holds no checkpoint yet: starting from the beginning")
    return last


def _corpus(name: str) -> Any:
    from recipes.translation import data

    return data.load(name)


def _short(pairs: Any, words: int | None) -> list[Any]:
    """The pairs whose source has at most so many words."""
    return [pair for pair in pairs if words is None or len(pair.source.split()) <= words]


def _vocabulary(pairs: list[Any], size: int, last: Path | None, out: Path, accelerator: Any) -> Any:
    """The vocabulary of the checkpoint, or one learned from the training pairs by the first process for all."""
    from recipes.translation.data.vocabulary import Vocabulary

    if last is not None:
        return Vocabulary.load(last / "vocabulary.json")
    path = out / "vocabulary.json"
    if accelerator.is_main_process:
        texts = [text for pair in pairs for text in (pair.source, pair.target)]
        Vocabulary.train(texts, size).save(path)
    accelerator.wait_for_everyone()
    return Vocabulary.load(path)


def _encoded(pairs: list[Any], known: Any) -> list[Encoded]:
    found = []
    for pair in pairs:
        source, target = known.encode(pair.source), known.encode(pair.target)
        if 0 < len(source) <= _LONGEST and 0 < len(target) <= _LONGEST:
            found.append((source, target))
    return found


def _same(last: Path, config: dict[str, Any], known: Any) -> None:
    """Raise CheckpointError where a checkpoint is of another training than the one asked for."""
    saved = checkpoint.load_config(last)
    checkpoint.same_vocabulary(last, saved, known)
    for name in ("data", "words", "seed", "model", "training"):
        was, now = saved.get(name), config[name]
        if name == "training" and isinstance(was, dict) and now["schedule"] == "root":
            was = {**was, "steps": now["steps"]}  # only a budget where the rate does not depend on it
        if was != now:
            if isinstance(was, dict) and isinstance(now, dict):
                differ = [part for part in now if was.get(part) != now[part]]
                name = differ[0] if differ else name
                was, now = was.get(name), now.get(name)
            raise checkpoint.CheckpointError(
                f"{last}: was trained with {name} {was!r}, this command says {now!r}; "
                "--resume goes on with the same training, another one needs another --out"
            )
