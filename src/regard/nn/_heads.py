"""The room behind the attention modules: projections, heads, the mechanism, and one way through them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard import _checks
from regard._attention import attention
from regard._checks import words, wrong_type, wrong_value
from regard.biases import Bias, as_bias
from regard.masks import Dense, Mask, as_mask
from regard.nn import _given
from regard.nn._absolute import Seen, seen_bias, seen_mask, seen_score, within
from regard.nn._cache import Cache, RingCache, unchanged_on_error
from regard.nn._owners import Owner, current, mechanism
from regard.nn._positions import RotaryPositions
from regard.normalizers import Softmax
from regard.scores import Dot


class Context(NamedTuple):
    """A context projected once, for many calls: key (*batch, Hkv, Tk, D) and value (*batch, Hkv, Tk, Dv)."""

    key: Tensor
    value: Tensor


class Heads(nn.Module):
    """Base of ``Attention``, ``SelfAttention`` and ``CrossAttention``; see ``Attention`` for the arguments."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        num_kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        out_dim: int | None = None,
        out_proj: bool = True,
        proj_bias: bool | None = None,
        score: Any = None,
        normalize: Any = None,
        mask: Mask | Tensor | Owner | None = None,
        bias: bool | Bias | Tensor | Owner | None = None,
        rotary: RotaryPositions | None = None,
        dropout_p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _given.fitting_state(self)
        with_bias, bias = _two_biases(bias, proj_bias)
        self.embed_dim = _given.size("embed_dim", embed_dim)
        self.num_heads = _given.size("num_heads", num_heads)
        self.head_dim = (
            _head_dim(embed_dim, num_heads) if head_dim is None else _given.size("head_dim", head_dim)
        )
        self.v_head_dim = self.head_dim if v_head_dim is None else _given.size("v_head_dim", v_head_dim)
        self.num_kv_heads = num_heads if num_kv_heads is None else _kv_heads(num_heads, num_kv_heads)
        self.kdim = embed_dim if kdim is None else _given.size("kdim", kdim)
        self.vdim = self.kdim if vdim is None else _given.size("vdim", vdim)
        self.dropout_p = _checks.dropout(dropout_p)
        joined = num_heads * self.v_head_dim
        if not _given.flag("out_proj", out_proj) and out_dim not in (None, joined):
            way_out = "Leave out_dim out, or keep the projection."
            wrong_value("out_dim", f"num_heads * v_head_dim = {joined} without out_proj", out_dim, way_out)
        last = embed_dim if out_proj else joined
        self.out_dim = last if out_dim is None else _given.size("out_dim", out_dim)

        def linear(inside: int, outside: int) -> nn.Linear:
            return nn.Linear(inside, outside, bias=with_bias, device=device, dtype=dtype)

        self.q_proj = linear(self.embed_dim, num_heads * self.head_dim)
        self.k_proj = linear(self.kdim, self.num_kv_heads * self.head_dim)
        self.v_proj = linear(self.vdim, self.num_kv_heads * self.v_head_dim)
        self.out_proj = linear(joined, self.out_dim) if out_proj else None
        self.score = mechanism("score", Dot() if score is None else score)
        self.normalize = mechanism("normalize", Softmax() if normalize is None else normalize)
        self._dense: Dense | None = None
        self._hold("mask", mask, as_mask)
        self._hold("bias", bias, as_bias)
        self.rotary = _rotary(rotary, self.head_dim)
        self.reset_parameters()

    def _hold(self, name: str, given: Any, check: Any) -> None:
        """Keep a mask or bias; a plain tensor as a buffer, so that it moves with the module, a Parameter as one."""
        if isinstance(given, Tensor) and not isinstance(given, nn.Parameter):
            check(given)
            if given.requires_grad:
                wrong_value(name, "a tensor without a gradient, or a torch.nn.Parameter", given)
            self.register_buffer(name, given, persistent=False)
            return
        if given is not None:
            check(current(mechanism(name, given)))
        setattr(self, name, given)

    def reset_parameters(self) -> None:
        """Projections: weights uniform (Glorot and Bengio, 2010), biases 0. What ``Owner`` modules own stays."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    # ------------------------------------------------------------------ one way through

    def _checked(self, name: str, x: Tensor, width_name: str, linear: nn.Linear) -> Tensor:
        return _given.rows(name, x, linear.in_features, linear, width_name)

    def _query(self, x: Tensor, positions: Tensor | None, offset: int = 0) -> Tensor:
        return self._turned(_split(self.q_proj(x), self.num_heads), positions, offset)

    def _key(self, x: Tensor, positions: Tensor | None, offset: int = 0) -> Tensor:
        return self._turned(_split(self.k_proj(x), self.num_kv_heads), positions, offset)

    def _value(self, x: Tensor) -> Tensor:
        return _split(self.v_proj(x), self.num_kv_heads)

    def _turned(self, heads: Tensor, positions: Tensor | None, offset: int) -> Tensor:
        if self.rotary is None:
            return heads
        turned: Tensor = self.rotary(heads, positions, offset=offset if positions is None else 0)
        return turned

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None, seen: Seen | None = None
    ) -> Tensor:
        """From heads (*batch, H, Tq, D) to (*batch, Tq, out_dim), with this module's mechanism and ``mask``."""
        whole, bias, score = self._masks(mask), current(self.bias), current(self.score)
        if seen is not None:
            bias = None if bias is None else seen_bias(as_bias(bias), seen)
            whole, score = seen_mask(whole, bias, seen), seen_score(score, seen)
        context = attention(
            query,
            key,
            value,
            whole,
            score=score,
            normalize=current(self.normalize),
            bias=bias,
            dropout_p=self.dropout_p if self.training else 0.0,
        )
        joined = context.transpose(-3, -2).flatten(-2)
        return joined if self.out_proj is None else self.out_proj(joined)

    def _masks(self, mask: Mask | Tensor | None) -> Mask | None:
        own = current(self.mask)
        if isinstance(own, Tensor) and not torch.compiler.is_compiling():
            if self._dense is None or self._dense.mask is not own:
                self._dense = Dense(own)  # which keeps what a scan of the tensor finds
            own = self._dense
        both = [as_mask(one) for one in (own, mask) if one is not None]
        return both[0] & both[1] if len(both) == 2 else both[0] if both else None

    def _attend_self(
        self, x: Tensor, mask: Mask | Tensor | None, cache: Cache | None, positions: Tensor | None, name: str
    ) -> Tensor:
        """Self-attention of x (*batch, T, embed_dim), continuing a cache where there is one."""
        self._positions_used(positions)
        x = self._checked(name, x, "embed_dim", self.q_proj)
        start = 0 if cache is None else _a_cache(cache).length
        query, key, value = self._query(x, positions, start), self._key(x, positions, start), self._value(x)
        if cache is None:
            return self._unbatched(x, self._attend(query, key, value, mask))
        if isinstance(cache, RingCache) and not within(self._masks(mask), cache.left):
            way_out = "Say mask=Window(left, 0), or take a cache that keeps every position."
            got = words("a mask that may look further back")
            wrong_value(
                "cache", f"for RingCache({cache.left}) a mask with Window({cache.left}, ...)", got, way_out
            )
        if not torch.compiler.is_compiling():
            cache.belongs_to(self)
        with unchanged_on_error(cache):
            key, value, offset = cache.append(key, value)
            if self._learns(query):  # autograd lets no later step write beside what it keeps
                key, value = key.clone(), value.clone()
            seen = Seen(start, query.shape[-2], start - offset, key.shape[-2])
            return self._unbatched(x, self._attend(query, key, value, mask, seen))

    def _learns(self, query: Tensor) -> bool:
        """Whether a backward pass may come, with keys and values that need no gradient."""
        if not torch.is_grad_enabled():
            return False
        return query.requires_grad or any(parameter.requires_grad for parameter in self.parameters())

    def _positions_used(self, *positions: Tensor | None) -> None:
        if self.rotary is None and any(given is not None for given in positions):
            way_out = "Others are added to the input: nn.SinusoidalPositions, nn.LearnedPositions."
            wrong_value("positions", "none without rotary=", words("some"), way_out)

    @staticmethod
    def _unbatched(x: Tensor, output: Tensor) -> Tensor:
        return output[0] if x.ndim == 2 else output

    def extra_repr(self) -> str:
        heads = (
            f"{self.num_heads}"
            if self.num_heads == self.num_kv_heads
            else f"{self.num_heads}/{self.num_kv_heads}"
        )
        parts = [f"heads={heads}", f"D={self.head_dim}", f"Dv={self.v_head_dim}"]
        for name in ("score", "normalize", "mask", "bias"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, nn.Module):
                parts.append(f"{name}={_checks.said(given) if isinstance(given, Tensor) else given!r}")
        return ", ".join(parts + ([f"dropout_p={self.dropout_p}"] if self.dropout_p else []))


def _split(x: Tensor, heads: int) -> Tensor:
    """(*batch, T, heads * D) -> (*batch, heads, T, D), a view; a batch of 1 where there was none."""
    x = x if x.ndim > 2 else x[None]
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-3, -2)


def _head_dim(embed_dim: int, num_heads: int) -> int:
    if embed_dim % num_heads:
        way_out = "Or give the width of a head: head_dim=."
        wrong_value("num_heads", f"a divisor of embed_dim = {embed_dim}", num_heads, way_out)
    return embed_dim // num_heads


def _kv_heads(num_heads: int, num_kv_heads: Any) -> int:
    if num_heads % _given.size("num_kv_heads", num_kv_heads):
        wrong_value("num_kv_heads", f"a divisor of num_heads = {num_heads}", num_kv_heads)
    return int(num_kv_heads)


def _two_biases(bias: Any, proj_bias: Any) -> tuple[bool, Any]:
    """Whether the projections have a bias, and what position adds to the scores."""
    if not isinstance(bias, bool):
        return (True if proj_bias is None else _given.flag("proj_bias", proj_bias)), bias
    if proj_bias is not None and _given.flag("proj_bias", proj_bias) != bias:
        wrong_value("proj_bias", f"the same as bias={bias}", proj_bias, "Leave one of them out.")
    return bias, None


def _rotary(rotary: Any, head_dim: int) -> RotaryPositions | None:
    if rotary is None:
        return None
    if not isinstance(rotary, RotaryPositions):
        wrong_type("rotary", "nn.RotaryPositions(width)", rotary)
    if rotary.width > head_dim:
        wrong_value("rotary", f"a width of at most head_dim = {head_dim}", words(f"{rotary.width}"))
    return rotary


def _a_cache(cache: Any) -> Cache:
    if not isinstance(cache, Cache):
        way_out = "nn.GrowingCache(), nn.PreallocatedCache(length), nn.RingCache(left); one for each layer."
        wrong_type("cache", "a cache of regard.nn", cache, way_out)
    return cache
