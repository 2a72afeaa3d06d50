"""Figures for papers and slides: a head, or all heads, as SVG with real text, and as PNG."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regard.look import _figure_draw
from regard.look._files import write_all
from regard.look._opening import opening

if TYPE_CHECKING:
    from regard.look._difference import Difference
    from regard.look._record import Record

SUFFIXES = (".svg", ".png")
SCHEMES = ("light", "dark")
# Sides of a PNG beyond which nothing shows it well, and its pixels take more memory than a model.
_LARGEST = 20_000


@dataclass(frozen=True)
class Figure:
    """A drawing: `svg` as text, `width` and `height` in CSS pixels (1/96 inch)."""

    svg: str
    width: int
    height: int

    def png(self, scale: float = 2.0) -> bytes:
        """The drawing as PNG, `scale` pixels to the CSS pixel (3.125 is 300 dpi).

        Rendered by resvg with the fonts of this machine. Raises ValueError without it (the extra `figures`), and for a
        scale that is not positive or makes a side longer than 20,000 pixels.
        """
        if not 0 < scale * max(self.width, self.height) <= _LARGEST:
            raise ValueError(
                f"png(scale=): expected a positive scale with sides up to {_LARGEST:,} pixels; got {scale} for "
                f"{self.width} x {self.height}"
            )
        try:
            from resvg_py import svg_to_bytes
        except ImportError as error:
            raise ValueError(
                "a PNG needs resvg-py; install it with: pip install 'regard[figures]', or write .svg"
            ) from error
        return bytes(svg_to_bytes(svg_string=self.svg, zoom=scale))

    def save(self, path: str | Path, *, scale: float = 2.0) -> Path:
        """Write `path`, as SVG or PNG by its suffix. Raises ValueError for another suffix, OSError where it cannot."""
        target = Path(path)
        if target.suffix not in SUFFIXES:
            raise ValueError(
                f"cannot write {target.name}: a figure is {' or '.join(SUFFIXES)}, by its suffix"
            )
        write_all({target: self.svg.encode() if target.suffix == ".svg" else self.png(scale)})
        return target

    def _repr_svg_(self) -> str:
        return self.svg


def figure(
    source: Record | Difference,
    layer: int | None = None,
    head: int | None = None,
    *,
    overview: bool = False,
    scheme: str = "light",
) -> Figure:
    """One head of a record as a figure (by default its most telling one), or with `overview` all of them side by side.

    `layer` is the place of a site in the record. Rows are the tokens that look, columns the tokens looked at; colour
    follows the square root of the weight (of a difference: blue is more, orange less). Up to 64 tokens are named;
    longer sides carry positions, and beyond 1,024 weights are pooled to the largest of each block, which the figure
    says. `scheme` is "light" or "dark". Raises ValueError for a record without sites, a head that it does not have or
    whose weights were not kept, and another scheme.
    """
    from regard.look._page_sources import sources

    if scheme not in SCHEMES:
        raise ValueError(f"figure(scheme=): expected 'light' or 'dark'; got {scheme!r}")
    record, sites, _ = sources(source)
    layer, head = opening(sites, layer, head)
    if overview:
        return Figure(*_figure_draw.overview(record, sites, scheme))
    return Figure(*_figure_draw.head(record, sites[layer], head, scheme))
