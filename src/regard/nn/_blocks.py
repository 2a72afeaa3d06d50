"""Encoder and decoder blocks: attention and a feed-forward layer, each with a norm and a way around it.

Letters: B batch, T, Tq, Tk lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard import _checks
from regard._checks import wrong_type
from regard.masks import Causal, Mask
from regard.nn import _given
from regard.nn._attention import CrossAttention, Options, SelfAttention
from regard.nn._cache import Cache, unchanged_on_error
from regard.nn._heads import Context

if TYPE_CHECKING:
    from typing_extensions import Unpack

Activation = Callable[[Tensor], Tensor]
Norm = Callable[..., nn.Module]


class FeedForward(nn.Module):
    """``down(dropout(activation(up(x))))``, x (..., embed_dim) -> (..., embed_dim) (Vaswani et al., 2017)."""

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int | None = None,
        *,
        activation: Activation = nn.functional.gelu,
        dropout_p: float = 0.0,
        proj_bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _given.fitting_state(self)
        width = _given.size("embed_dim", embed_dim)
        hidden = 4 * width if hidden_dim is None else _given.size("hidden_dim", hidden_dim)
        if isinstance(activation, type) or not callable(activation):
            wrong_type("activation", "a function of a tensor, such as torch.nn.functional.gelu", activation)
        with_bias = _given.flag("proj_bias", proj_bias)
        self.up = nn.Linear(width, hidden, bias=with_bias, device=device, dtype=dtype)
        self.down = nn.Linear(hidden, width, bias=with_bias, device=device, dtype=dtype)
        self.activation = activation
        self.dropout = nn.Dropout(_checks.dropout(dropout_p))

    def forward(self, x: Tensor) -> Tensor:
        x = _given.rows("x", x, self.up.in_features, self.up, "embed_dim")
        y: Tensor = self.down(self.dropout(self.activation(self.up(x))))
        return y


class _Block(nn.Module):
    """A residual stream: ``x + f(norm(x))`` with norms before (``pre_norm``), ``norm(x + f(x))`` with norms behind."""

    def __init__(self, pre_norm: bool, dropout_p: float) -> None:
        super().__init__()
        _given.fitting_state(self)
        self.pre_norm = _given.flag("pre_norm", pre_norm)
        self.dropout = nn.Dropout(_checks.dropout(dropout_p))

    def _around(self, x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_norm:
            y: Tensor = x + self.dropout(layer(norm(x)))
            return y
        y = norm(x + self.dropout(layer(x)))
        return y

    def extra_repr(self) -> str:
        return f"pre_norm={self.pre_norm}"


class EncoderBlock(_Block):
    """Self-attention, then a feed-forward layer: x (B, T, embed_dim) or (T, embed_dim) -> the same shape.

    ``pre_norm``: a norm before each layer (Xiong et al., 2020), else behind it (Vaswani et al., 2017). hidden_dim:
    4 embed_dim unless told. norm: a class or function of a width, such as ``torch.nn.RMSNorm``. dropout_p: on weights,
    hidden units and both layers' outputs, in training mode. ``options``: those of ``nn.SelfAttention`` (score, mask,
    bias, rotary, num_kv_heads, ...). With ``mask=Causal()`` and a cache: the block of a decoder-only model.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        hidden_dim: int | None = None,
        activation: Activation = nn.functional.gelu,
        pre_norm: bool = True,
        norm: Norm = nn.LayerNorm,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(pre_norm, options.get("dropout_p", 0.0))
        self.attention = SelfAttention(embed_dim, num_heads, **_inside(options))
        self.feed_forward = _feed_forward(embed_dim, hidden_dim, activation, options)
        self.norm1, self.norm2 = _norms(2, norm, embed_dim, options)

    def forward(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        cache: Cache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """mask, cache, positions: those of ``nn.SelfAttention``."""
        x = _given.rows("x", x, self.attention.embed_dim, self.attention.q_proj, "embed_dim")
        with unchanged_on_error(cache):
            x = self._around(
                x, self.norm1, lambda y: self.attention(y, mask, cache=cache, positions=positions)
            )
            return self._around(x, self.norm2, self.feed_forward)


class DecoderBlock(_Block):
    """Causal self-attention, attention to a context, a feed-forward layer (Vaswani et al., 2017).

    x (B, Tq, embed_dim), context (B, Tk, context_dim) -> (B, Tq, embed_dim). Arguments as ``EncoderBlock``; ``options``
    are the self-attention's, whose mask is ``Causal()`` unless told. cross: a mapping of options of the cross-attention
    (a ``Mechanism``, or score, num_kv_heads, ...), which else has the same heads and dot scores.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        context_dim: int | None = None,
        cross: Mapping[str, Any] | None = None,
        hidden_dim: int | None = None,
        activation: Activation = nn.functional.gelu,
        pre_norm: bool = True,
        norm: Norm = nn.LayerNorm,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(pre_norm, options.get("dropout_p", 0.0))
        if cross is not None and not isinstance(cross, Mapping):
            wrong_type("cross", "a mapping of options of nn.CrossAttention", cross)
        options.setdefault("mask", Causal())
        same: dict[str, Any] = {
            name: options[name]
            for name in (
                "head_dim",
                "v_head_dim",
                "num_kv_heads",
                "proj_bias",
                "dropout_p",
                "device",
                "dtype",
            )
            if name in options
        }
        if isinstance(options.get("bias"), bool):
            same["bias"] = options["bias"]
        both = _inside({**same, **(cross or {})})
        self.attention = SelfAttention(embed_dim, num_heads, **_inside(options))
        self.cross_attention = CrossAttention(embed_dim, num_heads, context_dim=context_dim, **both)
        self.feed_forward = _feed_forward(embed_dim, hidden_dim, activation, options)
        self.norm1, self.norm2, self.norm3 = _norms(3, norm, embed_dim, options)

    def forward(
        self,
        x: Tensor,
        context: Tensor | Context,
        mask: Mask | Tensor | None = None,
        context_mask: Mask | Tensor | None = None,
        *,
        cache: Cache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """context: the encoder's output, or ``block.cross_attention.project(output)``, made once for all steps."""
        x = _given.rows("x", x, self.attention.embed_dim, self.attention.q_proj, "embed_dim")
        with unchanged_on_error(cache):
            x = self._around(
                x, self.norm1, lambda y: self.attention(y, mask, cache=cache, positions=positions)
            )
            x = self._around(x, self.norm2, lambda y: self.cross_attention(y, context, context_mask))
            return self._around(x, self.norm3, self.feed_forward)


def _inside(options: Any) -> Any:
    """The options of an attention inside a block, which must give back the width it takes."""
    for name in ("out_proj", "out_dim"):
        if name in options:
            wrong_type("options", "none of out_proj and out_dim: a block keeps its width", name)
    return options


def _feed_forward(
    embed_dim: int, hidden_dim: int | None, activation: Activation, options: Options
) -> FeedForward:
    given = options.get("bias")
    with_bias = given if isinstance(given, bool) else options.get("proj_bias")
    return FeedForward(
        embed_dim,
        hidden_dim,
        activation=activation,
        dropout_p=options.get("dropout_p", 0.0),
        proj_bias=True if with_bias is None else with_bias,
        device=options.get("device"),
        dtype=options.get("dtype"),
    )


def _norms(count: int, norm: Norm, embed_dim: int, options: Options) -> list[nn.Module]:
    if not callable(norm):
        wrong_type("norm", "a class or function of a width, such as torch.nn.LayerNorm", norm)
    made = [norm(embed_dim) for _ in range(count)]
    for one in made:
        if not isinstance(one, nn.Module):
            wrong_type("norm", "a function that returns a module", one)
    return [one.to(device=options.get("device"), dtype=options.get("dtype")) for one in made]
