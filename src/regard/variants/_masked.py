"""Variants in which pairs may meet. Each is a mask; scores and weights are those of the Transformer.

Letters: Tq and Tk lengths, j a key's position, p = i + offset the absolute position of query i. Where Tq != Tk the
alignment has to be told, as to ``regard.masks.Causal``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard import _checks
from regard._frame import Alignment
from regard.masks import Causal, Dense, Documents, Mask, Padding, Prefix, Rule, Window
from regard.mechanism import Mechanism
from regard.variants import _arguments as arguments
from regard.variants._bound import Sinks


def causal(alignment: Alignment = None, *, offset: int | Tensor | None = None) -> Mechanism:
    """The language model's: each token sees itself and what came before."""
    return Mechanism(
        "causal",
        formula="j <= p",
        paper="Vaswani et al., 2017 (decoder); Radford et al., 2018",
        mask=Causal(alignment, offset=offset),
    )


def bidirectional(attention_mask: Tensor) -> Mechanism:
    """The encoder's: every token sees every real token; ``attention_mask`` (*batch, T) as tokenizers give it."""
    return Mechanism(
        "bidirectional",
        formula="j is no padding",
        paper="Devlin et al., 2019",
        mask=Padding.of(attention_mask),
    )


def cross(attention_mask: Tensor | None = None) -> Mechanism:
    """The decoder's look at the encoder: queries of one sequence, keys and values of another, Tq and Tk as they are.

    ``attention_mask`` (*batch, Tk): which keys are real; None: all.
    """
    given = {} if attention_mask is None else {"mask": Padding.of(attention_mask)}
    return Mechanism(
        "cross-attention",
        formula="q of the decoder, k and v of the encoder; j is no padding",
        paper="Vaswani et al., 2017; after Bahdanau et al., 2015",
        **given,
    )


def prefix_lm(prefix: int | Tensor) -> Mechanism:
    """The first ``prefix`` tokens (a number or one a sample) see each other; what follows is causal."""
    return Mechanism(
        "prefix LM",
        formula="j <= p or j < n",
        paper="Raffel et al., 2020",
        mask=Causal() | Prefix(prefix),
    )


def packed_documents(documents: Tensor) -> Mechanism:
    """Several documents in one row, causal, each for itself; ``documents`` (T,) or (*batch, T) numbers them."""
    return Mechanism(
        "packed documents",
        formula="j <= p and document(j) = document(p)",
        paper="Krell et al., 2021",
        mask=Documents(documents) & Causal(),
    )


def sliding_window(
    window: int, alignment: Alignment = None, *, offset: int | Tensor | None = None
) -> Mechanism:
    """The last ``window`` keys, the token's own included."""
    arguments.whole("sliding_window", "window", window)
    return Mechanism(
        "sliding window",
        formula="p - window < j <= p",
        paper="Mistral: Jiang et al., 2023; after Beltagy et al., 2020",
        mask=Window(window - 1, 0, alignment, offset=offset),
    )


def streaming(
    window: int, sinks: int = 4, alignment: Alignment = None, *, offset: int | Tensor | None = None
) -> Mechanism:
    """StreamingLLM: the first ``sinks`` tokens and the last ``window``.

    The paper also counts rotary positions within what is kept; that is the caller's, who turns the keys.
    """
    arguments.whole("streaming", "window", window)
    arguments.whole("streaming", "sinks", sinks, 0)
    kept = Window(window - 1, 0, alignment, offset=offset) | Sinks(sinks)
    return Mechanism(
        "StreamingLLM",
        formula="j <= p and (p - window < j or j < sinks)",
        paper="Xiao et al., 2024",
        mask=Causal() & kept,
    )


def longformer(window: int, is_global: Tensor) -> Mechanism:
    """``window`` keys to each side, and global tokens that see all and are seen by all.

    ``is_global`` bool (T,) or (*batch, T). One set of projections serves both; the paper gives the global pairs their
    own.
    """
    arguments.whole("longformer", "window", window, 0)
    if not isinstance(is_global, Tensor) or is_global.dtype != torch.bool:
        _checks.wrong_type("longformer(is_global=)", "a bool tensor (T,) or (*batch, T)", is_global)
    if is_global.ndim == 0:
        _checks.wrong_value("longformer(is_global=)", "shape (T,) or (*batch, T)", is_global)
    rows = is_global[:, None] if is_global.ndim == 1 else is_global[..., None, :, None]
    return Mechanism(
        "Longformer",
        formula="|p - j| <= window or j is global or p is global",
        paper="Beltagy et al., 2020",
        mask=Window(window, window) | Padding.of(is_global) | Dense(rows),
    )


def dilated_window(window: int, step: int, *, offset: int | None = None) -> Mechanism:
    """``window`` keys, every ``step``-th one back from the token's own."""
    arguments.whole("dilated_window", "window", window)
    arguments.whole("dilated_window", "step", step)
    start = arguments.place("dilated_window", offset)

    def on_step(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + start - k) % step == 0

    return Mechanism(
        "dilated window",
        formula="0 <= p - j < window * step and step | p - j",
        paper="Beltagy et al., 2020",
        mask=Window((window - 1) * step, 0, offset=offset) & Rule(on_step),
    )


def strided_sparse(stride: int, *, offset: int | None = None) -> Mechanism:
    """Sparse Transformer, *strided*: the last ``stride`` keys and every ``stride``-th before, both in one pattern."""
    arguments.whole("strided_sparse", "stride", stride)
    start = arguments.place("strided_sparse", offset)

    def on_stride(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + start - k) % stride == 0

    return Mechanism(
        "sparse, strided",
        formula="j <= p and (p - j < stride or stride | p - j)",
        paper="Child et al., 2019",
        mask=Causal(offset=offset) & (Window(stride - 1, 0) | Rule(on_stride)),
    )


def fixed_sparse(stride: int, summary: int, *, offset: int | None = None) -> Mechanism:
    """Sparse Transformer, *fixed*: the token's own block of ``stride``, and the last ``summary`` keys of each block."""
    arguments.whole("fixed_sparse", "stride", stride)
    if arguments.whole("fixed_sparse", "summary", summary) > stride:
        _checks.wrong_value("fixed_sparse(summary=)", f"from 1 to the stride, {stride}", summary)
    start = arguments.place("fixed_sparse", offset)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((q + start) // stride == k // stride) | (k % stride >= stride - summary)

    return Mechanism(
        "sparse, fixed",
        formula="j <= p and (block(j) = block(p) or j mod stride >= stride - c)",
        paper="Child et al., 2019",
        mask=Causal(offset=offset) & Rule(seen),
    )


def local_blocks(block: int, length: int, device: torch.device | str | None = None) -> Mechanism:
    """Blocks of ``block`` tokens, each for itself, both ways; ``length`` is T, ``device`` the query's."""
    arguments.whole("local_blocks", "block", block)
    return Mechanism(
        "local blocks",
        formula="block(j) = block(p)",
        paper="Liu et al., 2018; Parmar et al., 2018",
        mask=_blocks("local_blocks", block, length, device),
    )


def chunked(chunk: int, length: int, device: torch.device | str | None = None) -> Mechanism:
    """Causal within chunks of ``chunk`` tokens, nothing across; ``length`` is T, ``device`` the query's."""
    arguments.whole("chunked", "chunk", chunk)
    return Mechanism(
        "chunked",
        formula="j <= p and chunk(j) = chunk(p)",
        paper="Llama 4: Meta AI, 2025",
        mask=_blocks("chunked", chunk, length, device) & Causal(),
    )


def _blocks(owner: str, size: int, length: int, device: torch.device | str | None) -> Mask:
    arguments.whole(owner, "length", length, 0)
    try:
        tokens = torch.arange(length, device=device)
    except (RuntimeError, AssertionError):  # torch names neither the argument nor a way out
        _checks.wrong_value(f"{owner}(device=)", "a device of this machine, the query's", device)
    return Documents(tokens // size)
