"""The worked example of a head of a watched model, with the model's own numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.look._examples import which
from regard.look._explain_step import Step, compare
from regard.look._explain_text import brief
from regard.look._model import LoadedModel, load_model, record_of
from regard.look._patterns import pick, telling_query
from regard.look._record import Record, Site
from regard.look.explain import Explanation, explain

# A projection is recognised by its result: it is what attention was given, to the last bits.
_SAME = 1e-5


@dataclass(frozen=True)
class _Projection:
    """A linear layer that ran inside the module of a site: its input (T, width) and its output (T, H D)."""

    name: str
    layer: nn.Linear
    x: Tensor
    y: Tensor


def of_model(text: str, model: str, *, layer: int | None, head: int | None, token: str | None) -> Explanation:
    """Watch `model` on `text` and explain one query of one head, checked against what the model produced.

    Layer, head and token are counted from 0; those that are not asked for are the ones that link words most. Raises
    ValueError or OSError for a model, text, layer, head or token that is not there.
    """
    loaded = load_model(model)
    record = record_of(loaded, text)
    layer, head = pick(record, layer, head)
    site = record.sites[layer]
    names = [each.text for each in site.query_tokens] or [""] * site.lengths[0]
    followed = which(token, names, telling_query(site, head))
    with _linear_layers(loaded.model, site.name) as ran:
        record_of(loaded, text)
    stages = {step.name: step for step in _stages(loaded, record, site, ran, head, followed)}
    return explain(site, token=followed, head=head, stages=stages, title=_title(loaded, site, layer, head))


def _title(loaded: LoadedModel, site: Site, layer: int, head: int) -> str:
    return f"{loaded.name}, layer {layer}, head {head} of {site.heads} ({site.title}); all counted from 0"


@contextmanager
def _linear_layers(model: nn.Module, site: str) -> Iterator[list[_Projection]]:
    """Collects what the linear layers inside the module of a site are given and give."""
    ran: list[_Projection] = []
    modules = dict(model.named_modules())
    part = model if site == type(model).__name__ else modules.get(site)

    def hook(name: str, module: nn.Linear) -> Any:
        def seen(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            x = args[0].detach()
            ran.append(_Projection(name, module, x.reshape(-1, x.shape[-1]), output.detach().flatten(0, -2)))

        return module.register_forward_hook(seen)

    inside = part.named_modules() if part is not None else ()
    linear = [(name, module) for name, module in inside if isinstance(module, nn.Linear)]
    handles = [hook(f"{site}.{name}", module) for name, module in linear]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


def _stages(
    loaded: LoadedModel, record: Record, site: Site, ran: list[_Projection], head: int, followed: int | None
) -> Iterator[Step]:
    yield Step("sentence", text=record.text)
    tokens = tuple(token.text for token in site.query_tokens)
    ids = [token.id for token in site.query_tokens if token.id is not None]
    if tokens:
        yield Step("tokens", "the model's own tokenizer", text=tokens, shape=(len(tokens),))
    if ids and len(ids) == len(tokens):
        formula = f"each token's number in a vocabulary of {len(loaded.tokenizer)}"
        yield Step("ids", formula, text=[str(number) for number in ids], shape=(len(ids),))
        yield from _embedded(loaded.model, torch.tensor(ids), tokens)
    yield from _projected(site, ran, tokens or ("",) * site.lengths[0], head, followed)


def _embedded(model: Any, ids: Tensor, tokens: tuple[str, ...]) -> Iterator[Step]:
    table = model.get_input_embeddings()
    if isinstance(table, nn.Embedding):
        x, rows = table(ids).detach(), table.weight.detach()
        check = compare(x, rows[ids], "those rows of the model's table")
        formula = f"rows of a table {tuple(rows.shape)}"
        yield Step("embeddings", formula, x, tuple(x.shape), tokens, checks=(check,))


def _projected(
    site: Site, ran: list[_Projection], names: tuple[str, ...], head: int, followed: int | None
) -> Iterator[Step]:
    """The hidden states that went into this layer, and the projections that were found by what they gave."""
    found = [_projection_of(tensor, ran) for tensor in site.tensors[:3]]
    inside = next((made for made in found if made is not None), None)
    if inside is not None:
        note = f"what {inside.name.rsplit('.', 1)[0]} was given"
        rows = names if len(names) == len(inside.x) else None
        yield Step("hidden states", "x_i", inside.x, tuple(inside.x.shape), rows, note=note)
    keys = tuple(token.text for token in site.key_tokens) or ("",) * site.lengths[1]
    yield _caught(
        "queries", "q_i = W_query x_i + b", site.tensors.query, site.heads, found[0], names, head, followed
    )
    yield _caught("keys", "k_j = W_key x_j + b", site.tensors.key, site.heads, found[1], keys, head)
    yield _caught("values", "v_j = W_value x_j + b", site.tensors.value, site.heads, found[2], keys, head)


def _caught(
    name: str,
    formula: str,
    tensor: Tensor,
    heads: int,
    made: _Projection | None,
    names: tuple[str, ...],
    head: int,
    followed: int | None = None,
) -> Step:
    """What attention was given, (1, H or Hkv, T, n), as one head sees it; checked where one linear layer made it."""
    kept = head * tensor.shape[1] // heads
    own = tensor[0, kept]
    who = "" if followed is None else f"; this is token {followed} {brief(names[followed])}".rstrip()
    note, checks = "as attention was given them: no one linear layer made them", []
    if made is None:
        formula = formula.split()[0]
    else:
        matrix = formula.split()[2]
        note = f"{matrix} is the part of {made.name} {tuple(made.layer.weight.shape)} that is this head's"
        checks = [compare(own, _again(made, tensor.shape[-1], kept), f"{matrix} x + b written out")]
    shown, rows = (own, names) if followed is None else (own[followed], None)
    return Step(name, formula, shown, tuple(tensor.shape), rows, note=note + who, checks=tuple(checks))


def _again(made: _Projection, width: int, head: int) -> Tensor:
    """What one head of a projection gives, (T, width), in float64."""
    rows = slice(head * width, (head + 1) * width)
    product = made.x.double() @ made.layer.weight.detach().double()[rows].T
    return product if made.layer.bias is None else product + made.layer.bias.detach().double()[rows]


def _projection_of(tensor: Tensor, ran: list[_Projection]) -> _Projection | None:
    """The linear layer whose output, cut into heads, is this tensor (1, H, T, D)."""
    flat = tensor[0].transpose(0, 1).flatten(1)
    for made in ran:
        if made.y.shape == flat.shape and float((made.y - flat).abs().max()) <= _SAME:
            return made
    return None
