"""How queries, keys and values came about: found among what a layer's modules gave, and computed again.

A tensor that attention was given is recognised by its numbers: a module gave it, or the part of it that is one role's
(of a fused projection), or it is such a tensor scaled, or turned by rotary positions (Su et al., 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.look._explain_cuts import ROLES, Cut, cuts, rows_of
from regard.look._explain_rotary import TURNS, Turn, table_of
from regard.look._explain_step import Check, compare
from regard.look._explain_trace import Event, Trace
from regard.look._record import Sizes
from regard.nn import RotaryPositions

# More stages than this between a projection and attention are none that this can tell apart.
_MOST_STAGES = 5


@dataclass(frozen=True)
class Made:
    """One stage of a role of one sample, `numbers` (T, heads, D): what made it, from what, and how to check one head.

    `how`: "projected" from `x` (T, width) by a matrix, "normed", "turned" by rotary positions, "scaled", or "changed"
    by a module of another kind.
    """

    how: str
    name: str
    numbers: Tensor
    x: Tensor | None = None
    before: Tensor | None = None
    bias: bool = False
    again: Callable[[int], Tensor] | None = None

    def check(self, head: int) -> Check | None:
        """One head of the stage computed again from the stage before, where that can be written out."""
        if self.again is None:
            return None
        return compare(self.numbers[:, head], self.again(head), _AGAINST[self.how])


# Modules that stand between projection and attention are known by their names.
_KINDS = {"norm": "normed", "rotary": "turned"}
_AGAINST = {
    "projected": "W x + b written out",
    "normed": "the norm, called on this head again",
    "changed": "the module, called on this head again",
    "turned": "the turn written out",
    "scaled": "the product written out",
}


def lineage(
    target: Tensor, role: str, trace: Trace, inside: Sequence[Event], sizes: Sizes, sample: int
) -> list[Made]:
    """The stages that lead to `target` (heads, T, D), the role of one sample; empty where none is found."""
    search = _Search(role, trace, inside, sizes, sample)
    found: list[Made] = []
    wanted: Tensor | None = target.transpose(0, 1)
    while wanted is not None and len(found) < _MOST_STAGES:
        made = search.of(wanted, {each.name for each in found})
        if made is None:
            break
        found.append(made)
        wanted = made.before
    return found[::-1]


def repeats(heads: Tensor) -> int:
    """How many neighbouring heads of (H, T, D) are the same throughout: 1 where each is its own."""
    H = len(heads)
    for count in range(H, 1, -1):
        if H % count == 0 and torch.equal(heads[::count].repeat_interleave(count, 0), heads):
            return count
    return 1


class _Search:
    def __init__(self, role: str, trace: Trace, inside: Sequence[Event], sizes: Sizes, sample: int) -> None:
        self.role, self.sizes, self.sample = role, sizes, sample
        # A product explains more than a module around it; a module that changes nothing explains nothing.
        products = [event for event in inside if matrix_of(event.module) is not None]
        others = [event for event in inside if matrix_of(event.module) is None]
        self.inside = products + [each for each in others if each.x is None or not _equal(each.x, each.y)]
        tables = [(name, table_of(c, sample), table_of(s, sample)) for name, c, s in trace.rotary]
        # Some modules give sines first.
        self.rotary = [*tables, *((name, sine, cosine) for name, cosine, sine in tables)]

    def of(self, wanted: Tensor, used: set[str]) -> Made | None:
        """What made `wanted` (T, heads, D)."""
        parts = [
            part for event in self.inside if event.name not in used for part in self._parts(event, wanted)
        ]
        for event, part, cut, layout in parts:
            if _same(part, wanted):
                return self._given(event, part, cut, layout)
        own = self._packed(wanted)
        if own is not None or self.role == "value":
            return own
        for _, part, _, _ in parts:
            made = self._turned(part, wanted) or _scaled(part, wanted)
            if made is not None:
                return made
        return None

    def _parts(self, event: Event, wanted: Tensor) -> Iterator[tuple[Event, Tensor, Cut, int]]:
        """(T, heads, D): all that a module's output could be to this role."""
        for layout, rows in enumerate(rows_of(event.y, self.sizes.B, len(wanted), self.sample)):
            if rows is None:
                continue
            for cut in cuts(self.role, self.sizes, *wanted.shape[1:]):
                if cut.width == rows.shape[1]:
                    yield event, cut(rows), cut, layout

    def _given(self, event: Event, part: Tensor, cut: Cut, layout: int) -> Made:
        rows = (
            None if event.x is None else list(rows_of(event.x, self.sizes.B, len(part), self.sample))[layout]
        )
        matrix = matrix_of(event.module)
        if matrix is not None and rows is not None and rows.shape[1] == matrix[0].shape[1]:
            return _product(event.name, part, rows, matrix, cut)
        before = None if rows is None or rows.shape[1] != part[0].numel() else rows.reshape(part.shape)
        kind = type(event.module).__name__
        how = next((how for sign, how in _KINDS.items() if sign in kind.lower()), "changed")
        return Made(
            how, f"{event.name}, a {kind}", part, before=before, again=_norm_again(event, before, part)
        )

    def _packed(self, wanted: Tensor) -> Made | None:
        """nn.MultiheadAttention keeps its projections as parameters of its own."""
        place = ROLES.index(self.role)
        for event in self.inside:
            module = event.module
            if not isinstance(module, nn.MultiheadAttention) or len(event.inputs) < 3:
                continue
            matrix = packed_matrix(module, place)
            for rows in rows_of(event.inputs[place], self.sizes.B, len(wanted), self.sample):
                if rows is None or rows.shape[1] != matrix[0].shape[1]:
                    continue
                cut = cuts(self.role, self.sizes, *wanted.shape[1:])[0]
                given = rows @ matrix[0].T if matrix[1] is None else rows @ matrix[0].T + matrix[1]
                if given.shape[1] == cut.width and _same(cut(given), wanted):
                    return _product(f"{event.name}.in_proj", wanted, rows, matrix, cut)
        return None

    def _turned(self, part: Tensor, wanted: Tensor) -> Made | None:
        for name, cosine, sine in self.rotary:
            if len(cosine) != len(part):
                continue
            for how, turn in TURNS.items():
                turned = turn(part, cosine, sine)
                if turned is not None and _same(turned, wanted):
                    again = _turn_again(turn, part, cosine, sine)
                    return Made("turned", f"{name}, {how}", wanted, before=part, again=again)
        return None


def _product(name: str, part: Tensor, x: Tensor, matrix: tuple[Tensor, Tensor | None], cut: Cut) -> Made:
    weight, bias = matrix

    def again(head: int) -> Tensor:
        rows = cut(torch.arange(weight.shape[0])[None])[0, head]
        product = x.double() @ weight.double()[rows].T
        return product if bias is None else product + bias.double()[rows]

    shaped = f"{name} {tuple(weight.shape)}"
    return Made("projected", shaped, part, x=x, bias=bias is not None, again=again)


def _turn_again(turn: Turn, part: Tensor, cosine: Tensor, sine: Tensor) -> Callable[[int], Tensor]:
    def again(head: int) -> Tensor:
        turned = turn(part[:, head : head + 1].double(), cosine.double(), sine.double())
        assert turned is not None
        return turned[:, 0]

    return again


def _norm_again(event: Event, before: Tensor | None, part: Tensor) -> Callable[[int], Tensor] | None:
    """A norm over the width of a head, or regard's own turn of it, can be called on one head: any weight is as wide."""
    module = event.module
    known = isinstance(module, RotaryPositions) or "norm" in type(module).__name__.lower()
    if before is None or not known or len(event.inputs) != 1:
        return None
    if any(each.shape != before.shape[-1:] for each in module.parameters()):
        return None
    source = before

    def again(head: int) -> Tensor:
        with torch.no_grad():
            called: Tensor = module(source[:, head])
        return called.detach()

    return again if _same(again(0), part[:, 0]) else None


def _scaled(part: Tensor, wanted: Tensor) -> Made | None:
    """Queries (or both sides) scaled before attention, by a usual power of their width."""
    width = part.shape[-1]
    for power, said in ((-0.5, f"1 / sqrt({width})"), (-0.25, f"1 / {width}^(1/4)")):
        if width > 1 and _same(part * width**power, wanted):
            factor = width**power

            def again(head: int, factor: float = factor) -> Tensor:
                return part[:, head].double() * factor

            return Made("scaled", said, wanted, before=part, again=again)
    return None


def matrix_of(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """(weight (out, in), bias) of a module that is one product: a Linear, or one with its matrix the other way."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
        return None
    matrix = (weight.T if type(module).__name__ == "Conv1D" else weight).detach()
    return matrix, bias.detach() if isinstance(bias, Tensor) else None


def packed_matrix(module: Any, place: int) -> tuple[Tensor, Tensor | None]:
    """The matrix of one role of an nn.MultiheadAttention, 0 to 2."""
    width = module.embed_dim
    part = slice(place * width, (place + 1) * width)
    if module.in_proj_weight is not None:
        weight = module.in_proj_weight[part]
    else:
        weight = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)[place]
    return weight.detach(), None if module.in_proj_bias is None else module.in_proj_bias.detach()[part]


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x, y)


def _same(part: Tensor, wanted: Tensor) -> bool:
    return part.shape == wanted.shape and compare(part, wanted, "").agrees
