"""Mechanisms in words, for the command line: `window:255,0`, `dot:softcap=30`, `entmax:1.3`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from regard import biases, masks, normalizers, scores

MASKS = "causal, window:LEFT,RIGHT, prefix:N, padding:N (with :upper_left, :lower_right or :OFFSET), joined by & or |"
SCORES = "dot, dot:SCALE, softcap:CAP, cosine:SCALE, distance:SCALE, additive"
NORMALIZERS = "softmax, softmax:SINK, sparsemax, entmax15, entmax:ALPHA, sigmoid, sigmoid:BIAS, relu"
BIASES = "alibi, alibi:SLOPE, relative:REACH"


def _refuse(option: str, text: str, choices: str) -> NoReturn:
    raise ValueError(f"{option} {text!r}: expected one of: {choices}")


def _integer(option: str, text: str, choices: str) -> int | None:
    """A whole number; `none` is unlimited."""
    if text.strip().lower() in ("none", ""):
        return None
    try:
        return int(text)
    except ValueError:
        _refuse(option, text, choices)


def _number(option: str, text: str, choices: str) -> float:
    try:
        return float(text)
    except ValueError:
        _refuse(option, text, choices)


def mask(text: str) -> masks.Mask:
    """A mask in words; `&` binds before `|`."""
    made: Any = None
    for alternative in text.split("|"):
        both: Any = None
        for part in alternative.split("&"):
            one = _mask(part.strip(), text)
            both = one if both is None else both & one
        made = both if made is None else made | both
    found: masks.Mask = made
    return found


def _mask(part: str, whole: str) -> masks.Mask:
    name, *rest = part.split(":")
    if name == "causal" and len(rest) <= 1:
        return masks.Causal(**_alignment(rest, whole))
    if name == "window" and 1 <= len(rest) <= 2 and rest[0].count(",") == 1:
        left, right = (_integer("--mask", side, MASKS) for side in rest[0].split(","))
        return masks.Window(left, right, **_alignment(rest[1:], whole))
    if name in ("prefix", "padding") and len(rest) == 1:
        count = _integer("--mask", rest[0], MASKS)
        if count is not None:
            return masks.Prefix(count) if name == "prefix" else masks.Padding(count)
    _refuse("--mask", whole, MASKS)


def _alignment(rest: list[str], whole: str) -> dict[str, Any]:
    if not rest:
        return {}
    if rest[0] in ("upper_left", "lower_right"):
        return {"alignment": rest[0]}
    offset = _integer("--mask", rest[0], MASKS)
    if offset is None:
        _refuse("--mask", whole, MASKS)
    return {"offset": offset}


def score(text: str, width: int, seed: int = 0) -> Any:
    """A score in words; the vector of an additive one is drawn with the seed, of the width of the keys."""
    name, _, argument = text.partition(":")
    given = _number("--score", argument, SCORES) if argument else None
    if name == "additive" and given is None:
        return scores.Additive(torch.rand(width, generator=torch.Generator().manual_seed(seed)))
    if name == "softcap" and given is not None:
        return scores.Dot(softcap=given)
    simple: dict[str, Callable[..., Any]] = {
        "dot": scores.Dot,
        "cosine": scores.Cosine,
        "distance": scores.Distance,
    }
    if name not in simple:
        _refuse("--score", text, SCORES)
    return simple[name]() if given is None else simple[name](scale=given)


def normalizer(text: str) -> Any:
    """A normaliser in words."""
    name, _, argument = text.partition(":")
    given = _number("--normalize", argument, NORMALIZERS) if argument else None
    plain: dict[str, Callable[..., Any]] = {
        "sparsemax": normalizers.Sparsemax,
        "entmax15": normalizers.Entmax15,
        "relu": normalizers.Relu,
    }
    takes: dict[str, Callable[..., Any]] = {
        "softmax": normalizers.Softmax,
        "entmax": normalizers.Entmax,
        "sigmoid": normalizers.Sigmoid,
    }
    if name in plain and given is None:
        return plain[name]()
    if name in takes and given is not None:
        return takes[name](given)
    if name in ("softmax", "sigmoid") and given is None:
        return takes[name]()
    _refuse("--normalize", text, NORMALIZERS)


def bias(text: str, heads: int) -> Any:
    """A bias in words; the table of a relative one is zero, one row a head."""
    name, _, argument = text.partition(":")
    if name == "alibi":
        return biases.Alibi(_number("--bias", argument, BIASES) if argument else None)
    reach = _integer("--bias", argument, BIASES) if name == "relative" else None
    if reach is None or reach < 0:
        _refuse("--bias", text, BIASES)
    return biases.Relative(torch.zeros(heads, 2 * reach + 1))
