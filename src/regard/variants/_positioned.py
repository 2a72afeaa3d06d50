"""Variants in what position adds to the scores.

Letters: H query heads, Tq and Tk lengths, D width, R reach; s a score, w a weight, j a key's position, p = i + offset
the absolute position of query i. Where Tq != Tk the alignment has to be told, as to ``regard.masks.Causal``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard import _checks
from regard._frame import Alignment, wide
from regard.biases import Alibi, Relative
from regard.masks import Causal, Window
from regard.mechanism import Mechanism
from regard.nn._owners import t5_buckets
from regard.scores import Dot, Modified
from regard.variants import _arguments as arguments
from regard.variants._bound import Decay, SameQuery


def alibi(
    slopes: float | Tensor | None = None, alignment: Alignment = None, *, offset: int | Tensor | None = None
) -> Mechanism:
    """Causal attention with linear biases; ``slopes=None`` are the paper's, otherwise a number, 0-d or (H,)."""
    return Mechanism(
        "ALiBi",
        formula="s = q . k / sqrt(D) - m_h |p - j|, j <= p; w = softmax(s)",
        paper="Press et al., 2022",
        mask=Causal(),
        bias=Alibi(slopes, alignment, offset=offset),
    )


def relative(table: Tensor, alignment: Alignment = None, *, offset: int | Tensor | None = None) -> Mechanism:
    """A learned number a distance, clipped at R: ``table`` (2R + 1,) or (H, 2R + 1), entry R is distance 0."""
    return Mechanism(
        "relative bias",
        formula="s = q . k / sqrt(D) + t_h[clip(j - p, -R, R)]; w = softmax(s)",
        paper="after Shaw et al., 2018; scalars: Raffel et al., 2020",
        bias=Relative(table, alignment, offset=offset),
    )


def t5(
    buckets: Tensor,
    reach: int = 128,
    *,
    bidirectional: bool = True,
    alignment: Alignment = None,
    offset: int | Tensor | None = None,
) -> Mechanism:
    """T5's bias: ``buckets`` (N, H) is the layer's embedding, one number a bucket of distances and head.

    Distances of ``reach`` and more share a bucket. Scores are unscaled. ``bidirectional=False`` is the decoder's,
    causal. Raises ValueError for a number of buckets that the formula cannot use.
    """
    arguments.shaped("t5", "buckets", buckets, "(N, H)", (2,))
    index = _t5_index(buckets.shape[0], reach, bidirectional).to(buckets.device)
    given: dict[str, Any] = {} if bidirectional else {"mask": Causal()}
    return Mechanism(
        "T5 bias",
        formula="s = q . k + t_h[bucket(j - p)]; w = softmax(s)",
        paper="Raffel et al., 2020",
        score=Dot(scale=1.0),
        bias=Relative(buckets.T[:, index], alignment, offset=offset),
        **given,
    )


def _t5_index(buckets: int, reach: int, bidirectional: bool) -> Tensor:
    arguments.whole("t5", "reach", reach)
    exact = buckets // 4 if bidirectional else buckets // 2
    if exact < 1 or reach <= exact:
        expected = (
            f"{4 if bidirectional else 2} buckets or more, and a reach beyond the {exact} that are exact"
        )
        _checks.wrong_value("t5", expected, _checks.words(f"{buckets} buckets, reach {reach}"))
    return t5_buckets(buckets, reach, bidirectional)


def kerple_log(
    r1: Tensor,
    r2: Tensor,
    reach: int,
    alignment: Alignment = None,
    *,
    offset: int | Tensor | None = None,
) -> Mechanism:
    """Logarithmic decay, causal: ``r1``, ``r2`` (H,), positive and learned; exact for distances up to ``reach``."""
    away = _away("kerple_log", r1, r2, reach)
    return Mechanism(
        "KERPLE (log)",
        formula="s = q . k / sqrt(D) - r1_h log(1 + r2_h |p - j|), j <= p; w = softmax(s)",
        paper="Chi et al., 2022",
        mask=Causal(),
        bias=Relative(-wide(r1)[:, None] * torch.log1p(wide(r2)[:, None] * away), alignment, offset=offset),
    )


def kerple_power(
    r1: Tensor,
    r2: Tensor,
    reach: int,
    alignment: Alignment = None,
    *,
    offset: int | Tensor | None = None,
) -> Mechanism:
    """Power decay, causal: ``r1`` > 0 and 0 < ``r2`` <= 2, (H,), learned; exact for distances up to ``reach``."""
    away = _away("kerple_power", r1, r2, reach)
    if _checks.can_look(r2) and bool((r2 > 2).any()):
        _checks.wrong_value("kerple_power(r2=)", "numbers up to 2", _checks.words("larger ones"))
    # The power at distance 0 is 0 whatever r2; there its derivative, 0^r2 log 0, would be NaN.
    decay = torch.where(away > 0, away.clamp(min=1) ** wide(r2)[:, None], 0.0)
    return Mechanism(
        "KERPLE (power)",
        formula="s = q . k / sqrt(D) - r1_h |p - j|^r2_h, j <= p; w = softmax(s)",
        paper="Chi et al., 2022",
        mask=Causal(),
        bias=Relative(-wide(r1)[:, None] * decay, alignment, offset=offset),
    )


def _away(owner: str, r1: Any, r2: Any, reach: Any) -> Tensor:
    """|distance| of every entry of a table of this reach: (2R + 1,)."""
    arguments.whole(owner, "reach", reach)
    for name, numbers in (("r1", r1), ("r2", r2)):
        arguments.shaped(owner, name, numbers, "(H,)", (1,))
        if _checks.can_look(numbers) and not bool((numbers > 0).all()):
            _checks.wrong_value(f"{owner}({name}=)", "numbers above 0", _checks.words("others"))
    if r1.shape != r2.shape:
        _checks.wrong_value(f"{owner}(r2=)", f"as many heads as r1, {tuple(r1.shape)}", r2)
    return torch.arange(-reach, reach + 1, dtype=wide(r1).dtype, device=r1.device).abs()


def swin(table: Tensor, height: int, width: int) -> Mechanism:
    """Attention within a window of an image: ``table`` ((2 height - 1)(2 width - 1), H), as Swin's checkpoints keep it.

    Tokens are the window's pixels, row by row; query (windows, H, height * width, D).
    """
    arguments.shaped("swin", "table", table, "((2 height - 1)(2 width - 1), H)", (2,))
    arguments.whole("swin", "height", height)
    arguments.whole("swin", "width", width)
    if table.shape[0] != (2 * height - 1) * (2 * width - 1):
        expected = f"{(2 * height - 1) * (2 * width - 1)} rows for a window of {height} x {width}"
        _checks.wrong_value("swin(table=)", expected, table)
    pixel = torch.arange(height * width, device=table.device)
    down = (pixel // width)[:, None] - pixel // width + height - 1
    across = (pixel % width)[:, None] - pixel % width + width - 1
    return Mechanism(
        "Swin window",
        formula="s = q . k / sqrt(D) + t_h[y_p - y_j, x_p - x_j]; w = softmax(s)",
        paper="Liu et al., 2021",
        bias=table[down * (2 * width - 1) + across].permute(2, 0, 1)[None],
    )


def forgetting(
    log_gates: Tensor, alignment: Alignment = None, *, offset: int | Tensor | None = None
) -> Mechanism:
    """The Forgetting Transformer: ``log_gates`` (*batch, H, Tk), the log of a forget gate a key (log-sigmoid of a
    projection), causal.

    A gate of 0, its log -inf, blocks the pairs across it and no others. The sums are kept in float64 until each pair
    has its difference, which makes a tensor (*batch, H, Tq, Tk).
    """
    arguments.shaped("forgetting", "log_gates", log_gates, "(*batch, H, Tk)", tuple(range(1, 9)))
    return Mechanism(
        "forgetting",
        formula="s = q . k / sqrt(D) + sum_(j < t <= p) log f_t, j <= p; w = softmax(s)",
        paper="Lin et al., 2025",
        mask=Causal(alignment, offset=offset),
        bias=Decay(log_gates, alignment, offset=offset),
    )


def shaw(query: Tensor, table: Tensor, *, offset: int | None = None) -> Mechanism:
    """Relative keys: each clipped distance has a vector, which the query is scored against beside the key.

    ``query`` (*batch, H, Tq, D) is the query of the call, ``table`` (2R + 1, D) or (H, 2R + 1, D), entry R is distance
    0. The paper's relative values are left out: its own ablation finds that the keys' suffice.
    """
    _query("shaw", query)
    along = _along(query, table, "shaw")
    start = arguments.place("shaw", offset)
    scale = 1.0 / math.sqrt(query.shape[-1])
    return Mechanism(
        "relative keys (Shaw)",
        formula="s = q . (k + a[clip(j - p, -R, R)]) / sqrt(D); w = softmax(s)",
        paper="Shaw et al., 2018",
        score=Modified(Dot(), _by_distance(along * scale, start)),
        bias=SameQuery("shaw", tuple(query.shape)),
        **_aligned(offset),
    )


def transformer_xl(
    query: Tensor, u: Tensor, v: Tensor, table: Tensor, *, offset: int | None = None
) -> Mechanism:
    """Transformer-XL's score, causal: content and position, each with a bias of its own in the query's place.

    ``query`` (*batch, H, Tq, D) is the query of the call; ``u``, ``v`` (H, D); ``table`` (2R + 1, D) or (H, 2R + 1, D):
    the projected sinusoids W r of the distances j - p = -R ... R. The state of the segment before is more keys, and
    ``offset`` how many.
    """
    _query("transformer_xl", query)
    shape = (query.shape[-3] if query.ndim > 2 else 1, query.shape[-1])
    for name, bias in (("u", u), ("v", v)):
        arguments.shaped("transformer_xl", name, bias, "(H, D)", (2,))
        if tuple(bias.shape) != shape:
            _checks.wrong_value(f"transformer_xl({name}=)", f"shape {shape}", bias)
    along = _along(query + v[:, None] if query.ndim > 2 else query + v, table, "transformer_xl")
    start = arguments.place("transformer_xl", offset)
    scale = 1.0 / math.sqrt(query.shape[-1])

    def content(query: Tensor, key: Tensor) -> Tensor:
        return (query + u[:, None].to(query.dtype)) @ key.mT * scale

    return Mechanism(
        "Transformer-XL",
        formula="s = ((q + u) . k + (q + v) . r[j - p]) / sqrt(D), j <= p; w = softmax(s)",
        paper="Dai et al., 2019",
        score=Modified(content, _by_distance(along * scale, start)),
        mask=Causal(offset=offset),
        bias=SameQuery("transformer_xl", tuple(query.shape)),
    )


def _query(owner: str, query: Any) -> None:
    arguments.shaped(owner, "query", query, "(*batch, H, Tq, D)", tuple(range(2, 9)))


def _along(query: Tensor, table: Tensor, owner: str) -> Tensor:
    """Every query against every distance: (B, H, Tq, 2R + 1)."""
    arguments.shaped(owner, "table", table, "(2R + 1, D) or (H, 2R + 1, D)", (2, 3))
    if table.shape[-1] != query.shape[-1] or table.shape[-2] % 2 == 0:
        expected = f"an odd number of distances of width {query.shape[-1]}"
        _checks.wrong_value(f"{owner}(table=)", expected, table)
    if table.ndim == 3 and table.shape[0] != (query.shape[-3] if query.ndim > 2 else 1):
        _checks.wrong_value(f"{owner}(table=)", "one table a head, (H, 2R + 1, D), or one for all", table)
    while query.ndim < 4:
        query = query[None]
    return wide(query).flatten(0, -4) @ wide(table).mT


def _by_distance(along: Tensor, start: int) -> Any:
    reach = along.shape[-1] // 2

    def modified(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + along[
            b if along.shape[0] > 1 else b * 0, h, q, (k - q - start).clamp(-reach, reach) + reach
        ].to(score.dtype)

    return modified


def _aligned(offset: int | None) -> dict[str, Any]:
    """No pair is blocked, but lengths that differ without an offset are refused as everywhere."""
    return {"mask": Window(offset=offset)}
