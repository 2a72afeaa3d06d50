"""Checkpoints: a folder that is whole or absent. ``last-00000120`` goes on with a training, ``best-...`` is for use.

    best-00000080/  model.safetensors  config.json  vocabulary.json
    last-00000120/  the same, and state/training.pt: optimiser, place in the data, losses

Each is written beside its place, flushed to the disk and renamed; the one before it goes only then. Dropout and the
order of batches follow from seed and step, so that a training that was killed goes on to the losses it would have had.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from recipes.translation.model import build

VERSION = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read, in one sentence."""


def save(
    run: Path,
    kind: str,
    step: int,
    model: nn.Module,
    config: Mapping[str, Any],
    vocabulary: Any,
    state: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``run/kind-step`` and remove older ones of its kind. Raises CheckpointError; the older one then stays."""
    place = run / f"{kind}-{step:08}"
    beside = Path(tempfile.mkdtemp(dir=run, prefix=".writing-"))
    try:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        _write(beside / "model.safetensors", safetensors.torch.save(tensors))
        _write(beside / "config.json", (json.dumps({"version": VERSION, **config}, indent=1) + "\n").encode())
        vocabulary.save(beside / "vocabulary.json")
        _flush(beside / "vocabulary.json")
        if state is not None:
            (beside / "state").mkdir()
            held = BytesIO()
            torch.save(dict(state), held)
            _write(beside / "state" / "training.pt", held.getvalue())
        if place.exists():
            os.replace(place, run / f".writing-old-{place.name}")
        os.replace(beside, place)
        _flush(run)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        before = newest(run, kind)
        stays = f"{before.name}, the one before it, is whole" if before else "there was none before it"
        reason = error.strerror or str(error)
        raise CheckpointError(
            f"cannot save {place}: {reason}; {stays}. Make room, then run the same command with --resume"
        ) from error
    for old in [*run.glob(f"{kind}-[0-9]*"), *run.glob(".writing-*")]:
        if old != place and old.is_dir():
            shutil.rmtree(old)
    return place


def newest(run: Path, kind: str) -> Path | None:
    """The latest whole checkpoint of a kind."""
    return max(run.glob(f"{kind}-[0-9]*"), default=None, key=lambda path: int(path.name.rpartition("-")[2]))


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resolve(folder: Path) -> Path:
    """A checkpoint's folder: ``folder`` itself, or the best, else the last of a run. Raises CheckpointError."""
    if (folder / "model.safetensors").is_file():
        return folder
    found = newest(folder, "best") or newest(folder, "last")
    if found is None:
        what = "holds no checkpoint" if folder.is_dir() else "is not there"
        raise CheckpointError(
            f"{folder} {what}; train one first: "
            f"python -m recipes.translation train --data dates --minutes 3 --out {folder}"
        )
    return found


def load_model(folder: str | Path) -> tuple[nn.Module, Any, dict[str, Any]]:
    """(model in evaluation mode, vocabulary, config) of a run or of one of its checkpoints. Raises CheckpointError."""
    place = resolve(Path(folder))
    config = load_config(place)
    vocabulary = _vocabulary(place, config)
    try:
        model = build(config["model"])
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{place / 'config.json'}: {error}") from error
    load_weights(model, place)
    return model.eval(), vocabulary, config


def load_config(place: Path) -> dict[str, Any]:
    try:
        config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {place / 'config.json'}: {error}") from error
    if not isinstance(config, dict) or config.get("version") != VERSION:
        raise CheckpointError(
            f"{place / 'config.json'}: expected a checkpoint of version {VERSION} of this recipe"
        )
    return config


def _vocabulary(place: Path, config: Mapping[str, Any]) -> Any:
    from recipes.translation.data.vocabulary import Vocabulary

    vocabulary = Vocabulary.load(place / "vocabulary.json")
    same_vocabulary(place, config, vocabulary)
    return vocabulary


def same_vocabulary(place: Path, config: Mapping[str, Any], vocabulary: Any) -> None:
    """Raise CheckpointError where a checkpoint was trained with another vocabulary: its ids would mean other words."""
    expected = config.get("vocabulary")
    if expected != vocabulary.digest:
        raise CheckpointError(
            f"{place}: was trained with another vocabulary (sha256 {str(expected)[:12]}, this one is "
            f"{vocabulary.digest[:12]}); use the vocabulary.json that it was saved with, or train anew"
        )


def load_weights(model: nn.Module, place: Path) -> None:
    """Fill a model with a checkpoint's parameters. Raises CheckpointError where they are not its own."""
    path = place / "model.safetensors"
    try:
        model.load_state_dict(safetensors.torch.load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[-1].strip()
        raise CheckpointError(f"{path}: does not fit the sizes in config.json: {first}") from error


def load_state(place: Path) -> dict[str, Any]:
    """Optimiser, place in the data and losses of a ``last-`` checkpoint. Raises CheckpointError."""
    path = place / "state" / "training.pt"
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"cannot read {path}: it is damaged, or no state of a training; train anew into another folder"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: expected the state of a training")
    return state


def cpu(held: Any) -> Any:
    """The tensors of a state on the CPU, so that it loads anywhere."""
    if isinstance(held, Tensor):
        return held.detach().cpu()
    if isinstance(held, dict):
        return {name: cpu(part) for name, part in held.items()}
    return [cpu(part) for part in held] if isinstance(held, (list, tuple)) else held
