"""A record as two files: numbers in npz (read without pickle), everything else in JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.look._record import Grid, Record, Site, Sizes, Token

FORMAT = "regard-record"
VERSION = 2

_TENSORS: tuple[str, ...] = ("query", "key", "value", "output", "mask", "bias", "top_weights", "top_keys")
_TENSORS += ("pooled", "pooled_max", "row_weights", "whole", "slots")
_EITHER = ("scale", "sink", "offset")  # a number, a tensor or None
_PLAIN: tuple[str, ...] = (
    "name",
    "kind",
    "call",
    "causal",
    "dropout_p",
    "layer",
    "softcap",
    "score",
    "normalize",
)
_PLAIN += ("masked", "implementation", "dtype")
_TUPLES = ("cell", "rows", "heads_kept", "steps")
_TABLES = ("query_tokens", "key_tokens")
_GRIDS = ("query_grid", "key_grid")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DTYPES = (torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, *_FLOATS)


def pack(record: Record, path: str | Path) -> dict[Path, bytes]:
    """The two files, as bytes. Raises ValueError for a record that disagrees with itself."""
    record.check()
    npz, described = _pair(path)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    tables: dict[tuple[Token, ...], int] = {}
    sites = [_describe(site, number, arrays, tables) for number, site in enumerate(record.sites)]
    if record.image is not None:
        arrays["image"] = _to_numpy(record.image)
    buffer = io.BytesIO()
    # Not compressed: weights hardly shrink, and squeezing them takes longer than computing them.
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    data = buffer.getvalue()
    head = {
        "format": FORMAT,
        "version": VERSION,
        "text": record.text,
        "model": record.model,
        "notes": record.notes,
        "arrays": {"sha256": hashlib.sha256(data).hexdigest()},
        "image": record.image is not None,
        "tokens": [[vars(token) for token in table] for table in tables],
        "sites": sites,
    }
    return {npz: data, described: json.dumps(head, ensure_ascii=False, indent=1).encode()}


def unpack(path: str | Path) -> Record:
    """Read what `pack` gave. Raises OSError for a missing file, ValueError for what is not such a record."""
    npz, described = _pair(path)
    content = described.read_bytes()
    try:
        head = json.loads(content)
        if head["format"] != FORMAT:
            raise ValueError(f"its format is {head['format']!r}")
        found = head["version"]
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(described, error) from error
    if found != VERSION:
        raise ValueError(
            f"{described} is a record of version {found!r}, and this regard reads version {VERSION}; "
            "read it with the regard that wrote it, or make it again with this one"
        )
    try:
        data = npz.read_bytes()
        if hashlib.sha256(data).hexdigest() != head["arrays"]["sha256"]:
            raise ValueError(f"{npz.name} is not the file that was saved with it")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            record = _restored(head, arrays)
        record.check()
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        raise _broken(described, error) from error
    return record


def _broken(described: Path, error: Exception) -> ValueError:
    said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    if isinstance(error, IndexError):
        said = "it names a table of tokens that it does not hold"
    return ValueError(f"{described} is not a record of regard (version {VERSION}): {said}")


def _restored(head: dict[str, Any], arrays: Any) -> Record:
    tables = [tuple(Token(**token) for token in table) for table in head["tokens"]]
    sites = [_restore(site, arrays, tables) for site in head["sites"]]
    image = torch.from_numpy(arrays["image"]) if head["image"] else None
    return Record(sites, head["text"], head["model"], head["notes"], image)


def _pair(path: str | Path) -> tuple[Path, Path]:
    stem = Path(path)
    stem = stem.with_suffix("") if stem.suffix in (".npz", ".json") else stem
    return stem.with_name(stem.name + ".npz"), stem.with_name(stem.name + ".json")


def _describe(
    site: Site, number: int, arrays: dict[str, np.ndarray[Any, Any]], tables: dict[tuple[Token, ...], int]
) -> dict[str, Any]:
    kept = {name: getattr(site, name) for name in (*_TENSORS, *_EITHER)}
    if "weights" in site.__dict__ and site.whole is None:
        kept["weights"] = site.weights
    kept |= {f"statistics.{name}": tensor for name, tensor in site.statistics.items()}
    stored = {}
    for name, tensor in kept.items():
        if isinstance(tensor, Tensor):
            arrays[f"{number}.{name}"] = _to_numpy(tensor)
            stored[name] = [f"{number}.{name}", str(tensor.dtype).removeprefix("torch.")]
    grids = {name: getattr(site, name) for name in _GRIDS}
    return {
        **{name: getattr(site, name) for name in (*_PLAIN, *_TUPLES)},
        **{name: kept[name] for name in _EITHER if not isinstance(kept[name], Tensor)},
        **{name: tables.setdefault(getattr(site, name), len(tables)) for name in _TABLES},
        **{name: None if grid is None else dataclasses.asdict(grid) for name, grid in grids.items()},
        "sizes": list(site.sizes),
        "arrays": stored,
    }


def _restore(head: dict[str, Any], arrays: Any, tables: list[tuple[Token, ...]]) -> Site:
    tensors: dict[str, Any] = {
        name: _to_torch(arrays[key], dtype) for name, (key, dtype) in head["arrays"].items()
    }
    statistics = {
        name.removeprefix("statistics."): tensors.pop(name)
        for name in list(tensors)
        if name.startswith("statistics.")
    }
    weights = tensors.pop("weights", None)
    fields: dict[str, Any] = {name: head[name] for name in _PLAIN}
    fields |= {name: head[name] for name in _EITHER if name not in tensors}
    fields |= {name: None if head[name] is None else tuple(head[name]) for name in _TUPLES}
    fields |= {name: tables[head[name]] for name in _TABLES}
    fields |= {name: None if head[name] is None else Grid(**head[name]) for name in _GRIDS}
    site = Site(**fields, **tensors, statistics=statistics, sizes=Sizes(*head["sizes"]))
    if weights is not None:
        site.__dict__["weights"] = weights
    return site


def _to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    # numpy has no bfloat16; the name of the dtype is kept beside the array, so that nothing is lost.
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _to_torch(array: np.ndarray[Any, Any], dtype: str) -> Tensor:
    kinds = {str(kind).removeprefix("torch."): kind for kind in _DTYPES}
    return torch.from_numpy(array).to(kinds[dtype])
