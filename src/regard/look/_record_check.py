"""Whether what a site holds fits together."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

if TYPE_CHECKING:
    from regard.look._record import Site


def check(site: Site) -> None:
    """Raise ValueError that names the site, what was expected and what is there."""
    for side, length in zip(("query", "key"), site.lengths, strict=True):
        tokens, grid = getattr(site, f"{side}_tokens"), getattr(site, f"{side}_grid")
        word = {"query": "queries", "key": "keys"}[side]
        if tokens and len(tokens) != length:
            _refuse(site, f"{length} {word}, and {len(tokens)} tokens to name them")
        if grid is not None and grid.tokens != length:
            _refuse(site, f"{length} {word}, and an image of {grid.tokens} tokens")
    for name, tensor, shape in _expected(site):
        if tuple(tensor.shape) != shape:
            _refuse(site, f"its {name} of shape {tuple(tensor.shape)} where {shape} fits")


def _expected(site: Site) -> list[tuple[str, Tensor, tuple[int, ...]]]:
    B, H = site.sizes.B, site.sizes.H
    Tq, Tk = site.lengths
    n = H if site.heads_kept is None else len(site.heads_kept)
    found: list[tuple[str, Tensor, tuple[int, ...]]] = [
        (name, tensor, (B, H, Tk if name == "received" else Tq)) for name, tensor in site.statistics.items()
    ]
    for name in ("top_weights", "top_keys"):
        tensor = getattr(site, name)
        if tensor is not None:
            found.append((name, tensor, (B, H, Tq, tensor.shape[-1])))
    tall, wide = site.cell
    cells = (B, n, -(-Tq // max(1, tall)), -(-Tk // max(1, wide)))
    shapes = {
        "pooled": cells,
        "pooled_max": cells,
        "row_weights": (B, n, len(site.rows), Tk),
        "whole": (B, n, Tq, Tk),
    }
    return found + [
        (name, getattr(site, name), shape)
        for name, shape in shapes.items()
        if getattr(site, name) is not None
    ]


def _refuse(site: Site, what: str) -> NoReturn:
    raise ValueError(f"{site.title}: the record disagrees with itself: {what}")
