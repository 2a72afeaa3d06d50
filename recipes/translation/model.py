"""What every translation model here can be asked, and how one is built from its sizes.

Letters: B sentences, Ts and Tt tokens of source and target, V words of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from regard.look import Keep, Record, watch

if TYPE_CHECKING:
    from typing_extensions import Self

PAD, BOS, EOS, UNK = 0, 1, 2, 3


class Selectable(Protocol):
    """Tensors of several sentences or hypotheses, of which ``select`` picks some; ``index`` may repeat."""

    def select(self, index: Tensor) -> Self: ...


class Seq2Seq(Protocol):
    """A model that reads a source (B, Ts), lengths (B,), and writes a target. ``PAD`` fills what is behind a length."""

    longest: int | None  # tokens of a text; None: any number

    def __call__(self, source: Tensor, lengths: Tensor, target_in: Tensor) -> Tensor: ...

    def encode(self, source: Tensor, lengths: Tensor) -> Any: ...

    def start(self, read: Any) -> Any: ...

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]: ...

    def cross(self, source: Tensor, lengths: Tensor, target_in: Tensor) -> Tensor: ...


def among(name: str, given: Any, known: Iterable[str]) -> None:
    if given not in tuple(known):
        raise ValueError(f"{name}: expected one of {', '.join(known)}; got {given!r}")


def positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a whole number from 1 on, got {value!r}")


def share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"{name}: expected a share from 0 to below 1, got {value!r}")


def build(described: Mapping[str, Any]) -> nn.Module:
    """The model that ``describe`` described, with fresh parameters. Raises ValueError for what it does not know."""
    from recipes.translation.rnn import Rnn, RnnSizes
    from recipes.translation.transformer import Transformer, TransformerSizes

    kinds: dict[str, tuple[Any, Any]] = {
        "rnn": (Rnn, RnnSizes),
        "transformer": (Transformer, TransformerSizes),
    }
    given = dict(described)
    kind = given.pop("kind", None)
    among("kind", kind, kinds)
    model, sizes = kinds[kind]
    known = [field.name for field in dataclasses.fields(sizes)]
    for name in given:
        if name not in known:
            raise ValueError(f"{kind}: expected sizes among {', '.join(known)}; got {name!r}")
    made: nn.Module = model(sizes(**given))
    return made


def describe(model: Any) -> dict[str, Any]:
    """The kind and sizes of a model, for ``build``."""
    return {"kind": type(model).__name__.lower(), **dataclasses.asdict(model.sizes)}


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def record(model: Any, source: Tensor, lengths: Tensor, target_in: Tensor) -> Record:
    """All attention of a teacher-forced pass, with its weights, as ``regard.watch`` sees it. In evaluation mode."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), watch(model, Keep(weights=True)) as seen:
            model(source, lengths, target_in)
    finally:
        model.train(training)
    return seen


def crossed(model: Any, source: Tensor, lengths: Tensor, target_in: Tensor, modules: Iterable[str]) -> Tensor:
    """(layers, B, H, Tt, Ts): the weights of these modules, one a layer; stitched where steps were single."""
    by_name: dict[str, list[Tensor]] = {name: [] for name in modules}
    for site in record(model, source, lengths, target_in).sites:
        if site.name in by_name:
            by_name[site.name].append(site.weights)
    return torch.stack([torch.cat(calls, -2) for calls in by_name.values()])
