"""Records as tables, for other programs: CSV and parquet."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from regard.look._catalogue import catalogue
from regard.look._files import write_all
from regard.look._record import Record, Site, Token

SUFFIXES = (".npz", ".json", ".csv", ".parquet")
TABLES = ("weights", "heads")
# A table of more rows is nothing that other programs open well.
MOST_ROWS = 2_000_000

_Column = list[Any]


def export(
    record: Record,
    path: str | Path,
    *,
    table: str = "weights",
    heads: Sequence[int] | None = None,
    least: float = 0.0,
) -> tuple[Path, ...]:
    """Write a record by the suffix of `path`: .npz or .json (always both), .csv or .parquet. Returns the files.

    CSV and parquet (needs the extra `parquet`) hold one table. "weights": one row for each weight above `least`, with
    the columns site, layer, name, kind, sample, head, query, query_token, key, key_token, weight; where whole weights
    were not kept, the rows are the top weights that were. "heads": one row a head, the catalogue. `heads` are the
    ones of "weights" that are written (all). Positions count from 0. Raises ValueError for another suffix or table, a
    head that no site has, more than two million rows, and a record that kept neither weights nor top weights; OSError
    where it cannot be written; nothing is left half-written.
    """
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise ValueError(
            f"cannot write {target.name}: a record goes to {', '.join(SUFFIXES)} (by its suffix)"
        )
    if target.suffix in (".npz", ".json"):
        return record.save(target)
    if table not in TABLES:
        raise ValueError(f"there is no table {table!r} of a record; there are: {', '.join(TABLES)}")
    if not record.sites:
        raise ValueError("the record holds no attention, so there is nothing to write as a table")
    columns = _weights(record, heads, least) if table == "weights" else _heads(record)
    write_all({target: _csv(columns) if target.suffix == ".csv" else _parquet(columns)})
    return (target,)


def _heads(record: Record) -> dict[str, _Column]:
    rows = [head.row() for head in catalogue(record)]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


# ------------------------------------------------------------------ weights, as columns


def _weights(record: Record, heads: Sequence[int] | None, least: float) -> dict[str, _Column]:
    names = (
        "site",
        "layer",
        "name",
        "kind",
        "sample",
        "head",
        "query",
        "query_token",
        "key",
        "key_token",
        "weight",
    )
    columns: dict[str, _Column] = {name: [] for name in names}
    most = max((site.heads for site in record.sites), default=0)
    for head in heads or ():
        if not 0 <= head < most:
            raise ValueError(f"export(heads=): there are {most} heads, counted from 0; got {head}")
    for number, site in enumerate(record.sites):
        for sample, head, query, key, weight in _cells(site, heads, least):
            count = len(weight)
            if len(columns["weight"]) + count > MOST_ROWS:
                raise ValueError(
                    f"the table would have more than {MOST_ROWS:,} rows; write fewer heads, or only larger "
                    "weights (least=)"
                )
            constants = (number, site.layer, site.title, site.kind, sample, head)
            for name, value in zip(names, constants, strict=False):
                columns[name] += [value] * count
            columns["query"] += query.tolist()
            columns["key"] += key.tolist()
            columns["query_token"] += _named(site.query_tokens, query)
            columns["key_token"] += _named(site.key_tokens, key)
            columns["weight"] += weight.tolist()
    return columns


def _named(tokens: Sequence[Token], places: np.ndarray[Any, Any]) -> _Column:
    return [tokens[place].text for place in places.tolist()] if tokens else [""] * len(places)


def _cells(site: Site, heads: Sequence[int] | None, least: float) -> Iterator[tuple[int, int, Any, Any, Any]]:
    """(sample, head, queries, keys, weights) of each head: its weights above `least`, as arrays of one length."""
    if 0 in site.lengths:
        return
    kept = range(site.heads) if site.heads_kept is None or site.has_weights else site.heads_kept
    wanted = [head for head in kept if heads is None or head in heads]
    if site.has_weights or site.whole is not None:
        samples = site.weights.shape[0] if site.has_weights else _whole(site).shape[0]
        for sample in range(samples):
            for head in wanted:
                weights = _numpy(site.map(head, sample))
                query, key = np.nonzero(weights > least)
                yield sample, head, query, key, weights[query, key]
        return
    if site.top_weights is None or site.top_keys is None:
        raise ValueError(
            f"{site.title}: neither its weights nor its top weights were kept; watch with Keep(topk=8)"
        )
    for sample in range(site.top_weights.shape[0]):
        for head in range(site.heads) if heads is None else [head for head in heads if head < site.heads]:
            weights, keys = _numpy(site.top_weights[sample, head]), _numpy(site.top_keys[sample, head])
            query, place = np.nonzero((weights > least) & (keys >= 0))
            yield sample, head, query, keys[query, place].astype(int), weights[query, place]


def _whole(site: Site) -> Tensor:
    assert site.whole is not None
    return site.whole


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = tensor.detach().float().cpu().numpy()
    return found


# ------------------------------------------------------------------ files


def _csv(columns: dict[str, _Column]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow([_number(value) for value in row])
    return text.getvalue().encode()


def _number(value: Any) -> Any:
    """Numbers with the digits that a float32 has."""
    return f"{value:.9g}" if isinstance(value, float) else value


def _parquet(columns: dict[str, _Column]) -> bytes:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError("writing parquet needs pyarrow; install it with: pip install 'regard[parquet]'")
    import pyarrow
    from pyarrow import parquet

    arrays = {name: pyarrow.array(column) for name, column in columns.items()}
    if "weight" in arrays:
        arrays["weight"] = arrays["weight"].cast(pyarrow.float32())
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(arrays), sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data
