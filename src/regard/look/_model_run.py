"""Running a loaded model on a text or an image, watched, and naming the tokens of what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.look._record import Record, Token
from regard.look._tokens import tokens_of
from regard.look._tokens_image import Patches, image_of
from regard.look._units import separators
from regard.look._watch import watch
from regard.look._watch_keep import EVERYTHING, Keep

if TYPE_CHECKING:
    from regard.look._model import LoadedModel

# What the weights of one look may take in memory, all layers and heads together; and the pooled maps in their place.
WEIGHT_BYTES = 2**30
_POOL_BYTES = 2**27
_TOPK = 8


def record_of(
    loaded: LoadedModel, text: str, *, target: str | None = None, keep: Keep | None = None
) -> Record:
    """Run the model on a text, watched, and return the Record with its tokens.

    A model that reads and writes also reads `target`, as what it is to have written; without one only the half that
    reads is run, and a note says so. `keep` is what the watch keeps: by default everything, or, where the weights of
    all heads would take more than 1 GiB, statistics, the 8 largest weights of each row and pooled maps. Which tokens
    are special and which are separators is always counted. Raises ValueError for an empty text, one that is longer
    than the model reads, a target that the model cannot take, and a model in which no attention was seen.
    """
    _require_text(loaded, text, target)
    ids, tokens = tokens_of(loaded.tokenizer, text)
    model: Any = loaded.model
    _require_length(loaded, len(ids), "the text")
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    written: list[Token] = []
    if target is not None:
        inputs["decoder_input_ids"], written = _target(loaded, target, len(text) + 1)
    # Groups of keys are counted at every site with as many keys, so both sides must not be as long.
    grouped = tokens if len(written) != len(tokens) else ()
    kept = _keep(_config_of(model), max(len(ids), len(written)), keep, grouped)
    reader = reader_of(loaded, target)
    with torch.no_grad(), watch(reader, keep=kept) as record:
        reader(**inputs)
    record.text, record.model = text if target is None else f"{text}\n{target}", loaded.name
    if reader is not model and getattr(model.config, "is_encoder_decoder", False):
        record.notes.append("this model reads and writes; only the half that reads (the encoder) was run")
    _note_pooled(record, len(ids), keep, kept)
    _require_sites(loaded, record)
    _label(record, model, tokens, written)
    return record


def _note_pooled(record: Record, length: int, asked: Keep | None, kept: Keep) -> None:
    if asked is None and not kept.weights:
        record.notes.append(
            f"the weights of {length} tokens in every head would take too much memory: statistics, the {_TOPK} "
            f"largest weights of each token, and maps pooled to {kept.pool} x {kept.pool} were kept"
        )


def reader_of(loaded: LoadedModel, target: str | None = None) -> nn.Module:
    """The part of the model that `record_of` runs: all of it, or the half that reads, or the one that reads text."""
    model: Any = loaded.model
    both = getattr(model.config, "is_encoder_decoder", False)
    if both and target is None:
        half: nn.Module = model.get_encoder()
        return half
    seeing = isinstance(getattr(model, "vision_model", None), nn.Module)
    part: nn.Module = getattr(model, "text_model", model) if seeing else model
    return part


def _config_of(model: Any) -> Any:
    """The sizes of the text's half, where a model has another for images."""
    return getattr(model.config, "text_config", model.config)


def _require_text(loaded: LoadedModel, text: str, target: str | None) -> None:
    if loaded.tokenizer is None:
        raise ValueError(
            f"{loaded.name} looks at images, and has no tokenizer: a text says nothing to it. "
            "See it with: regard look --model MODEL --image FILE"
        )
    if not text.strip():
        raise ValueError("the text is empty; give some words to look at")
    if target is None:
        return
    config: Any = loaded.model.config
    if not getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{loaded.name} does not read one text and write another; leave out the target")
    if not target.strip():
        raise ValueError(
            "the target is empty; give the text that the model is to have written, or leave it out"
        )


def _require_length(loaded: LoadedModel, length: int, what: str) -> None:
    config = _config_of(loaded.model)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ValueError(
            f"{what} is {length} tokens long, and {loaded.name} reads at most {limit}; shorten it"
        )


def _keep(config: Any, length: int, keep: Keep | None, tokens: Sequence[Token]) -> Keep:
    layers, heads = getattr(config, "num_hidden_layers", 1), getattr(config, "num_attention_heads", 1)
    chosen = keep
    if chosen is None:
        fits = 4 * layers * heads * length**2 <= WEIGHT_BYTES
        side = max(1, min(1024, int((_POOL_BYTES / (8 * layers * heads)) ** 0.5)))
        chosen = EVERYTHING if fits else Keep(topk=_TOPK, pool=side)
    if not tokens:
        return chosen
    special = torch.tensor([token.special for token in tokens], dtype=torch.bool)
    groups = {"special": special, "separators": separators(tokens), **chosen.groups}
    return Keep(**{**vars(chosen), "groups": groups})


def _target(loaded: LoadedModel, target: str, shift: int) -> tuple[Tensor, list[Token]]:
    """What the decoder reads: its start token, then the target, which begins at `shift` in the record's text."""
    ids, tokens = tokens_of(loaded.tokenizer, target)
    model: Any = loaded.model
    start = getattr(model.config, "decoder_start_token_id", None)
    if start is None:
        raise ValueError(
            f"the config.json of {loaded.name} names no decoder_start_token_id; leave out the target"
        )
    if ids and ids[0] != start:
        name = str(loaded.tokenizer.convert_ids_to_tokens(start))
        ids, tokens = [start, *ids], [Token(name, special=True, id=start), *tokens]
    _require_length(loaded, len(ids), "the target")
    tokens = [replace(token, start=token.start + shift, stop=token.stop + shift) for token in tokens]
    return torch.tensor([ids]), tokens


def _require_sites(loaded: LoadedModel, record: Record) -> None:
    if not record.sites:
        config: Any = loaded.model.config
        implementation = getattr(config, "_attn_implementation", None)
        notes = "".join(f"; {note}" for note in record.notes)
        raise ValueError(
            f"no attention was seen in {loaded.name} (its implementation is {implementation!r}){notes}; "
            "regard doctor MODEL says what can be seen of a model, and how"
        )


def _label(record: Record, model: Any, read: Sequence[Token], written: Sequence[Token]) -> None:
    """Name the tokens on both sides of every site: what was read, and, in the half that writes, what is written."""
    if not written:
        if len(read) in record.lengths:
            record.label(read)
        else:
            record.notes.append(
                f"no layer has the {len(read)} tokens of the text: its tokens have no names here"
            )
        return
    encoder = model.get_encoder()
    within = next(name for name, part in model.named_modules() if part is encoder)
    for site in record.sites:
        reads = site.name == within or site.name.startswith(f"{within}.")
        site.query_tokens = _fitting(read if reads else written, site.lengths[0])
        site.key_tokens = _fitting(read if reads or site.kind == "cross" else written, site.lengths[1])


def _fitting(tokens: Sequence[Token], length: int) -> tuple[Token, ...]:
    return tuple(tokens) if len(tokens) == length else ()


def _patches(model: Any, pixels: Tensor) -> int:
    """About how many tokens an image makes; one where the model does not say how large its patches are."""
    size = getattr(getattr(model, "config", None), "patch_size", None)
    height, width = (size, size) if isinstance(size, int) else tuple(size or pixels.shape[-2:])
    return max(1, int(pixels.shape[-2] // height) * int(pixels.shape[-1] // width))


def record_of_image(loaded: LoadedModel, image: str | Path, *, keep: Keep | None = None) -> Record:
    """Run a model of images on one, watched, and return the Record with its grid of patches.

    `image` is a file that pillow opens. The grid is that of the last convolution before attention, and the tokens in
    front of it (class, distillation, registers) are counted among the model's parameters; where that does not add up to
    the tokens of a site, the site has no grid and a note says so. `keep` is as in `record_of`. Raises ValueError for a
    model without an image processor, a file that is no image, and a model in which no attention was seen.
    """
    if loaded.processor is None:
        raise ValueError(f"{loaded.name} reads text, and has no image processor; leave out the image")
    pixels, shown = image_of(loaded.processor, image)
    model: Any = loaded.model
    model = getattr(model, "vision_model", model)
    patches = Patches()
    count = _patches(model, pixels)
    kept = _keep(getattr(model, "config", None), count, keep, ())
    with (
        torch.no_grad(),
        watch(model, keep=kept) as record,
        patches.watched(model, lambda: bool(record.sites)),
    ):
        model(pixel_values=pixels)
    record.model, record.image = loaded.name, shown
    _note_pooled(record, count, keep, kept)
    _require_sites(loaded, record)
    grid, tokens = patches.found(model)
    if grid is not None and len(tokens) in record.lengths:
        record.label(tokens, grid)
    if any(not site.query_tokens for site in record.sites):
        said = patches.said(grid)
        record.notes.append(f"{said}; sites with another number of tokens have no grid")
    return record
