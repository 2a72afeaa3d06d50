"""Multi-head attention as modules: projections around ``regard.attention``.

Letters: B batch, H query heads, Hkv key heads, Tq and Tk lengths, D width of a head, Dv of its value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from regard._checks import words, wrong_type, wrong_value
from regard.biases import Bias
from regard.masks import Mask
from regard.nn import _given
from regard.nn._cache import Cache
from regard.nn._heads import Context, Heads
from regard.nn._owners import Owner
from regard.nn._positions import RotaryPositions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(TypedDict, total=False):
    """The arguments that all attention modules share."""

    head_dim: int | None
    v_head_dim: int | None
    num_kv_heads: int | None
    out_dim: int | None
    out_proj: bool
    proj_bias: bool | None
    score: Any
    normalize: Any
    mask: Mask | Tensor | Owner | None
    bias: bool | Bias | Tensor | Owner | None
    rotary: RotaryPositions | None
    dropout_p: float
    device: torch.device | str | None
    dtype: torch.dtype | None


class AllOptions(Options, total=False):
    """Those of ``Attention``, which takes keys and values of other widths."""

    kdim: int | None
    vdim: int | None


class Attention(Heads):
    """Multi-head attention, ``out_proj(concat_h attention(q_h, k_h, v_h))`` (Vaswani et al., 2017), any mechanism.

    q, k, v are ``q_proj(query)``, ``k_proj(key)``, ``v_proj(value)``; with ``out_proj`` four separate Linears. Inputs:
    query (B, Tq, embed_dim), key (B, Tk, kdim), value (B, Tk, vdim), or without B; output (B, Tq, out_dim).

    embed_dim, num_heads: width of the query and H. head_dim: D, embed_dim / H unless told. v_head_dim: Dv, D unless
    told. num_kv_heads: Hkv, a divisor of H (grouped and multi-query attention), H unless told. kdim, vdim: widths of
    key (embed_dim unless told) and value (kdim unless told). out_dim: embed_dim unless told. ``out_proj=False`` gives
    heads side by side, (B, Tq, H Dv).

    score, normalize, mask, bias: the mechanism (``**mechanism`` of ``regard.Mechanism``), each an object of the core or
    an ``nn.Owner``, which owns its parameters; mask joins the one of a call by ``&``.
    **Two biases**: a bool ``bias`` is torch's flag, whether the Linears have one (``bias=False, out_proj=False`` are
    the bare matrices); any other is what position adds to the scores, and ``proj_bias=`` then says the first.
    rotary: turns queries and keys by their positions. dropout_p: share of weights dropped in training mode.

    Weights are never returned: see ``regard.observe`` and ``regard.watch``. Tensors inside core objects stay on their
    device when the module moves; plain tensors and Owners move with it. A state dict with a tensor of another shape is
    refused before anything of this module is loaded; modules that stand before it in a Sequential are loaded by then.
    Raises TypeError or ValueError.
    """

    def __init__(self, embed_dim: int, num_heads: int, **options: Unpack[AllOptions]) -> None:
        super().__init__(embed_dim, num_heads, **_only_options("Attention", options, AllOptions))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> Tensor:
        """Without a key: self-attention. Without a value: the value is the key.

        mask: bool, True = may attend, (Tq, Tk) or 4-D, or of ``regard.masks``. cache: self-attention goes on behind the
        positions it holds. positions, key_positions: integers (T,) or (B, T) for ``rotary``, 0, 1, ... unless told.
        """
        if key is None:
            self._of_one_width(value)
            if key_positions is not None:
                wrong_value("key_positions", "none in self-attention", words("some"), "Say positions=.")
            return self._attend_self(query, mask, cache, positions, "query")
        if cache is not None:
            wrong_value("cache", "self-attention: a call without key and value", words("one with a key"))
        self._positions_used(positions, key_positions)
        if value is None and self.vdim != self.kdim:
            wrong_value("value", f"an input of width vdim = {self.vdim}", None, "It is not the key's width.")
        query = self._checked("query", query, "embed_dim", self.q_proj)
        key = self._checked("key", key, "kdim", self.k_proj)
        value = key if value is None else self._checked("value", value, "vdim", self.v_proj)
        _same_batch(query, key)
        heads = self._query(query, positions), self._key(key, key_positions), self._value(value)
        return self._unbatched(query, self._attend(*heads, mask))

    def _of_one_width(self, value: Tensor | None) -> None:
        if value is not None:
            wrong_value("key", "a key beside the value", None, "Say Attention()(query, key, value).")
        for name, width in (("kdim", self.kdim), ("vdim", self.vdim)):
            if width != self.embed_dim:
                way_out = "Self-attention has one width, embed_dim."
                wrong_value(
                    "key, value" if name == "vdim" else "key",
                    f"an input of width {name} = {width}",
                    None,
                    way_out,
                )


class SelfAttention(Heads):
    """``Attention`` of a sequence to itself: x (B, T, embed_dim) or (T, embed_dim) -> (B, T, out_dim).

    Takes the arguments of ``Attention`` but kdim and vdim.
    """

    def __init__(self, embed_dim: int, num_heads: int, **options: Unpack[Options]) -> None:
        super().__init__(embed_dim, num_heads, **_only_options("SelfAttention", options))

    def forward(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        cache: Cache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """cache: go on behind the positions it holds (``nn.GrowingCache`` and its kin), whose keys and values are not
        computed again. Masks, biases and rules speak of positions from 0 on, as in a full pass; a mask is needed
        where a position must not see later ones of its own chunk. positions: integers (T,) or (B, T) for ``rotary``.
        """
        return self._attend_self(x, mask, cache, positions, "x")


class CrossAttention(Heads):
    """``Attention`` of x to a context: x (B, Tq, embed_dim), context (B, Tk, context_dim) -> (B, Tq, out_dim).

    context_dim is embed_dim unless told. Takes the arguments of ``Attention`` but kdim and vdim.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, context_dim: int | None = None, **options: Unpack[Options]
    ) -> None:
        width = None if context_dim is None else _given.size("context_dim", context_dim)
        super().__init__(embed_dim, num_heads, kdim=width, **_only_options("CrossAttention", options))

    def project(self, context: Tensor, *, positions: Tensor | None = None) -> Context:
        """Keys and values of a context, once for many calls."""
        self._positions_used(positions)
        context = self._checked("context", context, "context_dim", self.k_proj)
        return Context(self._key(context, positions), self._value(context))

    def forward(
        self,
        x: Tensor,
        context: Tensor | Context,
        mask: Mask | Tensor | None = None,
        *,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
    ) -> Tensor:
        """context: the encoder's output, or what ``project`` made of it."""
        self._positions_used(positions, context_positions)
        x = self._checked("x", x, "embed_dim", self.q_proj)
        q = self._query(x, positions)
        if isinstance(context, Context):
            if context_positions is not None:
                way_out = "Give them to project(context, positions=)."
                wrong_value("context_positions", "none for a projected context", words("some"), way_out)
            key, value = context
            if x.ndim == 2 and key.shape[:-3] != (1,):
                wrong_value("context", "one context beside one x (T, embed_dim)", key)
        elif isinstance(context, Tensor):
            _same_batch(x, context, "context")
            key, value = self.project(context, positions=context_positions)
        else:
            wrong_type("context", "a tensor (B, Tk, context_dim) or what project() gives", context)
        return self._unbatched(x, self._attend(q, key, value, mask))


def _same_batch(query: Tensor, key: Tensor, name: str = "key") -> None:
    if query.ndim != key.ndim:
        shapes = words(f"{tuple(query.shape)} and {tuple(key.shape)}")
        wrong_value(name, "as many dimensions as the query has", shapes)


_WAYS_OUT = {
    "kdim": "nn.Attention takes kdim and vdim.",
    "vdim": "nn.Attention takes kdim and vdim.",
    "batch_first": "Inputs are batch first, (B, T, embed_dim); regard.compat.MultiheadAttention takes the flag.",
}


def _only_options(owner: str, options: Any, known: Any = Options) -> Any:
    for name in options:
        if name not in known.__annotations__:
            expected = "arguments among " + ", ".join(known.__annotations__)
            wrong_type(owner, expected, name, _WAYS_OUT.get(name, ""))
    return options
