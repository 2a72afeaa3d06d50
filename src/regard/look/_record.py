"""What was seen: one Site for each attention call, and the Record that holds them, saves and loads."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.look._files import write_all

FORMAT = "regard-record"
VERSION = 1


@dataclass(frozen=True)
class Token:
    """One token: the characters `text[start:stop]` that it stands for, and what to show for it."""

    text: str
    start: int = 0
    stop: int = 0
    special: bool = False
    id: int | None = None


@dataclass
class Site:
    """One call of attention inside a model, as it was made.

    query (B, H, Tq, D), key (B, Hkv, Tk, D), value (B, Hkv, Tk, Dv), output (B, H, Tq, Dv) are copies; `mask` is a bool
    tensor (True = may attend), `bias` what a floating-point mask adds to the scores, `causal` torch's `is_causal`
    (upper left). `call` counts the calls of one module: 0 is the first.
    """

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    scale: float
    kind: str = "self"
    call: int = 0
    mask: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    dropout_p: float = 0.0
    query_tokens: tuple[Token, ...] = ()
    key_tokens: tuple[Token, ...] = ()

    @property
    def heads(self) -> int:
        return int(self.query.shape[-3])

    @property
    def lengths(self) -> tuple[int, int]:
        """(Tq, Tk)."""
        return int(self.query.shape[-2]), int(self.key.shape[-2])

    @property
    def title(self) -> str:
        return self.name if self.call == 0 else f"{self.name} (call {self.call + 1})"

    @property
    def mechanism(self) -> dict[str, Any]:
        """The keywords that describe this call: `attention(site.query, site.key, site.value, **site.mechanism)`."""
        from regard.masks import Causal
        from regard.scores import Dot

        mask = Causal("upper_left") if self.causal else self.mask
        return {"score": Dot(scale=self.scale), "mask": mask, "bias": self.bias}

    @cached_property
    def weights(self) -> Tensor:
        """(B, H, Tq, Tk): `regard.attention_weights` of what was caught, before dropout."""
        from regard import attention_weights

        with torch.no_grad():
            return attention_weights(self.query, self.key, **self.mechanism)


_ARRAYS = ("query", "key", "value", "output", "mask", "bias")


@dataclass
class Record:
    """The attention calls of one watched run, in order, with the text and the tokens they are about."""

    sites: list[Site] = field(default_factory=list)
    text: str = ""
    model: str = ""
    notes: list[str] = field(default_factory=list)

    def label(self, tokens: Sequence[Token]) -> None:
        """Give every site the tokens of the text, on each side whose length is theirs."""
        table = tuple(tokens)
        for site in self.sites:
            query_length, key_length = site.lengths
            if query_length == len(table):
                site.query_tokens = table
            if key_length == len(table):
                site.key_tokens = table

    def save(self, path: str | Path) -> tuple[Path, Path]:
        """Write `path`.npz (numbers, weights included) and `path`.json (everything else), both or none."""
        contents = self.files(path)
        write_all(contents)
        npz, described = contents
        return npz, described

    def files(self, path: str | Path) -> dict[Path, bytes]:
        """The two files that `save` writes, as bytes."""
        npz, described = _pair(path)
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        tables: list[tuple[Token, ...]] = []
        sites = [_describe(site, number, arrays, tables) for number, site in enumerate(self.sites)]
        buffer = io.BytesIO()
        # Not compressed: weights hardly shrink, and squeezing them takes longer than computing them.
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        data = buffer.getvalue()
        head = {
            "format": FORMAT,
            "version": VERSION,
            "text": self.text,
            "model": self.model,
            "notes": self.notes,
            "arrays": {"file": npz.name, "sha256": hashlib.sha256(data).hexdigest()},
            "tokens": [[vars(token) for token in table] for table in tables],
            "sites": sites,
        }
        return {npz: data, described: json.dumps(head, ensure_ascii=False, indent=1).encode()}

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Read what `save` wrote. Raises OSError for a missing file, ValueError for one that is not such a record."""
        npz, described = _pair(path)
        try:
            head = json.loads(described.read_bytes())
            if head["format"] != FORMAT or head["version"] != VERSION:
                raise ValueError(f"it says {head['format']!r} version {head['version']!r}")
            data = npz.with_name(Path(head["arrays"]["file"]).name).read_bytes()
            if hashlib.sha256(data).hexdigest() != head["arrays"]["sha256"]:
                raise ValueError(f"{npz.name} is not the file that was saved with it")
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                tables = [tuple(Token(**token) for token in table) for table in head["tokens"]]
                sites = [_restore(site, arrays, tables) for site in head["sites"]]
            return cls(sites, head["text"], head["model"], head["notes"])
        except (KeyError, IndexError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{described} is not a record of regard (version {VERSION}): {error}") from error


def _pair(path: str | Path) -> tuple[Path, Path]:
    stem = Path(path)
    stem = stem.with_suffix("") if stem.suffix in (".npz", ".json") else stem
    return stem.with_name(stem.name + ".npz"), stem.with_name(stem.name + ".json")


def _describe(
    site: Site, number: int, arrays: dict[str, np.ndarray[Any, Any]], tables: list[tuple[Token, ...]]
) -> dict[str, Any]:
    kept = {name: getattr(site, name) for name in _ARRAYS if getattr(site, name) is not None}
    kept["weights"] = site.weights
    for name, tensor in kept.items():
        arrays[f"{number}.{name}"] = _to_numpy(tensor)
    for table in (site.query_tokens, site.key_tokens):
        if table not in tables:
            tables.append(table)
    stored = {
        name: [f"{number}.{name}", str(tensor.dtype).removeprefix("torch.")] for name, tensor in kept.items()
    }
    return {
        "name": site.name,
        "kind": site.kind,
        "call": site.call,
        "scale": site.scale,
        "causal": site.causal,
        "dropout_p": site.dropout_p,
        "query_tokens": tables.index(site.query_tokens),
        "key_tokens": tables.index(site.key_tokens),
        "arrays": stored,
    }


def _restore(head: dict[str, Any], arrays: Any, tables: list[tuple[Token, ...]]) -> Site:
    tensors = {name: _to_torch(arrays[key], dtype) for name, (key, dtype) in head["arrays"].items()}
    weights = tensors.pop("weights")
    plain = {name: head[name] for name in ("name", "kind", "call", "scale", "causal", "dropout_p")}
    tokens = {name: tables[head[name]] for name in ("query_tokens", "key_tokens")}
    site = Site(**plain, **tokens, **tensors)  # type: ignore[arg-type]
    site.__dict__["weights"] = weights
    return site


def _to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    # numpy has no bfloat16; the name of the dtype is kept beside the array, so that nothing is lost.
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _to_torch(array: np.ndarray[Any, Any], dtype: str) -> Tensor:
    kinds = {str(kind).removeprefix("torch."): kind for kind in _DTYPES}
    return torch.from_numpy(array).to(kinds[dtype])


_DTYPES = (torch.bool, torch.float64, torch.float32, torch.float16, torch.bfloat16)
