"""Where a command's findings go: files by their suffix, or a folder with a page and a record."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from regard.look import html
from regard.look._difference import Difference
from regard.look._export import export
from regard.look._files import require_writable, write_all
from regard.look._record import Record
from regard.look.figure import figure

_PAGE, _FIGURES, _RECORD, _TABLES = (".html",), (".svg", ".png"), (".npz", ".json"), (".csv", ".parquet")
SUFFIXES = (*_PAGE, *_FIGURES, *_RECORD, *_TABLES)
# What a name with a dot at its end could have meant; other names are folders.
_FILE_LIKE = 6


def check(outs: Sequence[Path], *, comparing: bool = False) -> None:
    """Refuse, before any work, a suffix that cannot be written and a place that cannot be written to."""
    for out in outs:
        suffix = out.suffix.lower()
        if suffix and suffix not in SUFFIXES and len(suffix) <= _FILE_LIKE and not out.is_dir():
            raise ValueError(
                f"--out {out}: cannot write {suffix}; give a folder, or a file that ends in {', '.join(SUFFIXES)}"
            )
        if comparing and suffix in (*_RECORD, *_TABLES):
            raise ValueError(f"--out {out}: a comparison goes to .html, .svg or .png; its numbers: --json")
        if suffix in SUFFIXES and out.is_dir():
            raise OSError(f"cannot write to {out}: it is a folder; name a file")
        require_writable(out.parent if suffix in SUFFIXES else out)


def write(
    source: Record | Difference,
    outs: Sequence[Path],
    place: tuple[int, int, int | None],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[Path]:
    """Write every one of them, opened on `place` (layer, head, token or None); the files that were written.

    Tables hold the weights of `layers` and `heads`, by default of all.
    """
    found: list[Path] = []
    for out in outs:
        suffix = out.suffix.lower()
        if suffix in _FIGURES:
            found.append(figure(source, *place[:2]).save(out.with_suffix(suffix)))
        elif suffix in _PAGE or isinstance(source, Difference):
            path = out if suffix in _PAGE else out / "compared.html"
            write_all({path: _page(source, place)})
            found.append(path)
        elif suffix in SUFFIXES:
            whole = layers is None or suffix in _RECORD
            found += export(source if whole else _of(source, layers), out.with_suffix(suffix), heads=heads)
        else:
            files = {out / "attention.html": _page(source, place), **source.files(out / "attention")}
            write_all(files)
            found += files
    return found


def _of(record: Record, layers: Sequence[int] | None) -> Record:
    sites = [site for site in record.sites if layers is None or site.layer in layers]
    return dataclasses.replace(record, sites=sites)


def _page(source: Record | Difference, place: tuple[int, int, int | None]) -> bytes:
    layer, head, token = place
    return html.page(source, layer, head, token=token).encode()
