"""The tokens of an image: a grid of patches, and the ones in front of it, counted and never guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.look._record import Grid, Token

# Parameters beside the patch embedding that are put in front of the patches, in this order, and what each is called.
_LEADING = {
    "cls_token": "class",
    "class_token": "class",
    "class_embedding": "class",
    "distillation_token": "distillation",
    "dist_token": "distillation",
    "register_tokens": "register",
    "reg_token": "register",
}


class Patches:
    """Finds the grid of patches while a model runs: what the last convolution before the first attention gave."""

    def __init__(self) -> None:
        self._conv: tuple[str, tuple[int, ...]] | None = None

    @contextmanager
    def watched(self, model: nn.Module, attended: Callable[[], bool]) -> Iterator[None]:
        """Inside the block, note what each convolution gives until `attended()`."""

        def hook(name: str, module: nn.Module) -> Any:
            def seen(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
                if isinstance(output, Tensor) and output.dim() == 4 and not attended():
                    self._conv = (name, tuple(output.shape))

            return module.register_forward_hook(seen)

        convolutions = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Conv2d)]
        handles = [hook(name, part) for name, part in convolutions]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def found(self, model: nn.Module) -> tuple[Grid | None, list[Token]]:
        """The grid and its tokens; None where no convolution ran before attention."""
        if self._conv is None:
            return None, []
        name, (_, _, rows, columns) = self._conv
        front = leading(model, name)
        tokens = [Token(f"[{each}]", special=True) for each in front]
        tokens += [Token(f"{row},{column}") for row in range(rows) for column in range(columns)]
        return Grid(rows, columns, leading=len(front)), tokens

    def said(self, grid: Grid | None) -> str:
        """In words, for a note."""
        if grid is None or self._conv is None:
            return "no convolution ran before attention, so the patches of the image are not known"
        return f"{self._conv[0]} made {grid.rows} x {grid.columns} patches, after {grid.leading} other tokens"


def leading(model: nn.Module, convolution: str) -> list[str]:
    """What is put in front of the patches that `convolution` makes: parameters of the modules around it."""
    path = convolution.split(".")
    modules = dict(model.named_modules())
    for depth in range(len(path) - 1, -1, -1):
        around = modules[".".join(path[:depth])]
        found = {name: part for name, part in around.named_parameters(recurse=False) if name in _LEADING}
        if found:
            return [
                each for name in _LEADING if name in found for each in _named(_LEADING[name], found[name])
            ]
    return []


def _named(word: str, parameter: Tensor) -> list[str]:
    count = parameter.shape[-2] if parameter.dim() > 1 else 1
    return [word] if count == 1 else [f"{word} {number + 1}" for number in range(count)]


def image_of(processor: Any, path: str | Path) -> tuple[Tensor, Tensor]:
    """An image file as the model reads it, (1, channels, height, width), and as it is shown, (height, width, 3) uint8.

    What is shown is what the model saw: resized and cropped as its processor does. Raises ValueError for a file that is
    no image.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, SyntaxError) as error:
        raise ValueError(f"{path} is not an image that can be read; give a PNG or JPEG file") from error
    except OSError as error:
        raise ValueError(f"cannot read the image {path}: {error.strerror or error}") from error
    pixels = processor(images=picture, return_tensors="pt")["pixel_values"]
    plain = processor(images=picture, return_tensors="pt", do_normalize=False, do_rescale=False)[
        "pixel_values"
    ]
    shown = torch.from_numpy(np.asarray(plain[0].clamp(0, 255).round().byte().permute(1, 2, 0)))
    return pixels, shown.contiguous()
