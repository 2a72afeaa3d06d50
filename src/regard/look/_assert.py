"""A test that attention stayed what it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from regard.look._record import Record, Site, Token

_MOST_SAID = 8
# What is compared of each site beside its weights and statistics, where the golden record has it.
_PAIRS = ("row_weights", "pooled", "pooled_max")


def assert_attention_close(
    record: Record, golden: Record | str | Path, *, atol: float = 1e-4, rtol: float = 1e-3
) -> None:
    """Raise AssertionError unless `record` is what `golden` was: the same sites and tokens, and close numbers.

    `golden` is a Record or the path of one that `Record.save` wrote. What is compared is what the golden record kept:
    weights and statistics, and the weights that its query and key give; |got - expected| <= atol + rtol |expected|
    for each number. The message names the sites, heads, queries and keys that differ most. Raises OSError when there
    is no file at that path (save the golden record first: ``record.save(path)``), ValueError for one that is no
    record.
    """
    for name, tolerance in (("atol", atol), ("rtol", rtol)):
        if not tolerance >= 0:
            raise ValueError(
                f"assert_attention_close({name}=): expected a number of at least 0; got {tolerance}"
            )
    expected = golden if isinstance(golden, Record) else _load(golden)
    wrong = list(_differences(record, expected, atol, rtol))
    if wrong:
        more = f"\n... and {len(wrong) - _MOST_SAID} more" if len(wrong) > _MOST_SAID else ""
        raise AssertionError("attention is not what it was:\n" + "\n".join(wrong[:_MOST_SAID]) + more)


def _load(path: str | Path) -> Record:
    try:
        return Record.load(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"there is no golden record at {path}; make it once, from a run that is right: record.save({str(path)!r})"
        ) from error


def _differences(record: Record, golden: Record, atol: float, rtol: float) -> Iterator[str]:
    names, wanted = [[site.title for site in each.sites] for each in (record, golden)]
    if names != wanted:
        missing = [name for name in wanted if name not in names]
        added = [name for name in names if name not in wanted]
        detail = f"; missing: {', '.join(missing) or 'none'}; new: {', '.join(added) or 'none'}"
        yield f"{len(names)} sites where there were {len(wanted)}, or in another order{detail}"
        return
    for site, was in zip(record.sites, golden.sites, strict=True):
        yield from _of_site(site, was, atol, rtol)


def _of_site(site: Site, was: Site, atol: float, rtol: float) -> Iterator[str]:
    for name in ("kind", "lengths", "heads"):
        got, expected = getattr(site, name), getattr(was, name)
        if got != expected:
            yield f"{site.title}: {name} {got} where it was {expected}"
            return
    for side in ("query_tokens", "key_tokens"):
        said = _tokens(getattr(site, side), getattr(was, side))
        if said:
            yield f"{site.title}: {side.replace('_', ' ')}: {said}"
    for name, got, expected in _numbers(site, was):
        said = _number(site, name, got, expected, atol, rtol)
        if said:
            yield f"{site.title}: {said}"


def _tokens(got: tuple[Token, ...], expected: tuple[Token, ...]) -> str:
    if not expected or [token.text for token in got] == [token.text for token in expected]:
        return ""
    if len(got) != len(expected):
        return f"{len(got)} where there were {len(expected)}"
    place = next(
        place for place, pair in enumerate(zip(got, expected, strict=True)) if pair[0].text != pair[1].text
    )
    return f"token {place} is {got[place].text!r} where it was {expected[place].text!r}"


def _numbers(site: Site, was: Site) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    for name, expected in was.statistics.items():
        there = name in site.statistics or (name != "lse" and site.has_weights)
        yield name, site.statistic(name) if there else None, expected
    for name in _PAIRS:
        expected = getattr(was, name)
        if expected is not None:
            yield name, getattr(site, name), expected
    if was.top_weights is not None and was.top_keys is not None:
        yield "top_weights", _at_top(site, was.top_weights, was.top_keys), was.top_weights
    if was.has_weights:
        yield "weights", site.weights if site.has_weights else None, was.weights
    elif was.whole is not None:
        kept = site.whole if site.heads_kept == was.heads_kept else None
        yield "weights", kept, was.whole


def _at_top(site: Site, expected: Tensor, keys: Tensor) -> Tensor | None:
    """(B, H, Tq, k): what the site gives to these keys. One it did not keep has at most its smallest kept weight."""
    if site.has_weights:
        found = site.weights.gather(-1, keys.long().clamp(min=0))
        return found.masked_fill(keys < 0, 0.0)
    if site.top_weights is None or site.top_keys is None:
        return None
    same = site.top_keys[..., None, :] == keys[..., :, None]
    least = site.top_weights.amin(-1, keepdim=True).minimum(expected)
    kept = (same * site.top_weights[..., None, :]).sum(-1)
    return kept.where(same.any(-1), least)


def _number(site: Site, name: str, got: Tensor | None, expected: Tensor, atol: float, rtol: float) -> str:
    if got is None:
        return f"{name} was not kept; watch it as the golden record was watched"
    if got.shape != expected.shape:
        return f"{name} of shape {tuple(got.shape)} where it was {tuple(expected.shape)}"
    ours, theirs = got.detach().double().cpu(), expected.detach().double().cpu()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = (ours - theirs).abs()
    bad = ~same & ~(apart <= atol + rtol * theirs.abs())
    if not bool(bad.any()):
        return ""
    worst = int(apart.nan_to_num(nan=float("inf"), posinf=float("inf")).masked_fill(~bad, -1).argmax())
    where = [int(place) for place in _unravel(worst, tuple(ours.shape))]
    return (
        f"{name}: {int(bad.sum())} of {bad.numel()} numbers differ, most at {_place(site, name, where)}: "
        f"{float(ours.flatten()[worst]):.6g} where it was {float(theirs.flatten()[worst]):.6g}"
    )


def _unravel(place: int, shape: tuple[int, ...]) -> list[int]:
    found = []
    for size in reversed(shape):
        found.append(place % size)
        place //= size
    return found[::-1]


def _place(site: Site, name: str, where: list[int]) -> str:
    """Where a number stands, in words: sample, head, query, key."""
    head = (
        where[1]
        if site.heads_kept is None or name in ("top_weights", *site.statistics)
        else site.heads_kept[where[1]]
    )
    said = f"sample {where[0]}, head {head}"
    sides = {"received": (("key", site.key_tokens),)}.get(
        name, (("query", site.query_tokens), ("key", site.key_tokens))
    )
    if name in ("pooled", "pooled_max", "top_weights", "row_weights"):
        return f"{said}, place {where[2:]}"
    for place, (side, tokens) in zip(where[2:], sides, strict=False):
        said += f", {side} {place}" + (f" {tokens[place].text!r}" if tokens else "")
    return said
