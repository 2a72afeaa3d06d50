"""One call of attention as a watch sees it, and torch's and regard's own calls brought to that form."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._attention import attention
from regard._call import prepare
from regard._frame import Frame
from regard.biases import Bias
from regard.compat import _masks
from regard.masks import Causal, Dense, Mask
from regard.normalizers import Softmax
from regard.scores import Dot


@dataclass
class Seen:
    """query (B, H, Tq, D), key (B, Hkv, Tk, D), value (B, Hkv, Tk, Dv), output (B, H, Tq, Dv), and how they met.

    Of eager models `weights` (B, H, Tq, Tk) are their own, and `score` is None where it could not be followed; query
    and key are absent then.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    output: Tensor | None
    implementation: str
    score: Any = None
    normalize: Any = field(default_factory=Softmax)
    mask: Mask | None = None
    bias: Bias | Tensor | None = None
    causal: bool = False
    dropout_p: float = 0.0
    weights: Tensor | None = None
    lse: Tensor | None = None
    crossed: bool | None = None
    # The output before the module's last projection, where the call gave only what came after it.
    context: Callable[[], Tensor | None] | None = None
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.query is not None:
            self.dtype = self.autocast or self.query.dtype


@dataclass(frozen=True, eq=False)
class BoundMask(Mask):
    """A mask whose tensors were brought to (B, ...) already."""

    inner: Mask

    def bind(self, frame: Frame) -> Mask:
        return self.inner


@dataclass(frozen=True, eq=False)
class BoundBias(Bias):
    """A bias whose tensors were brought to (B, ...) already."""

    inner: Bias

    def bind(self, frame: Frame) -> Bias:
        return self.inner


class NotSeen(Exception):
    """A call that cannot be looked into; its text says why."""


def of_sdpa(output: Tensor, *args: Any, **kwargs: Any) -> Seen:
    """`F.scaled_dot_product_attention`."""
    return _of_sdpa(output, *args, **kwargs)


def _of_sdpa(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Seen:
    # torch's `enable_gqa` is not kept: regard reads grouped heads from the head counts.
    _require_dense(query, key, value)
    if not query.dim() == key.dim() == value.dim():
        raise NotSeen("a call whose query, key and value differ in dimensions is not looked into")
    rank = query.dim()
    query, key, value = _heads(query, key, value)
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    query, key, value = (_four(tensor, lead) for tensor in (query, key, value))
    corner = _corner(attn_mask)
    mask: Mask | None = None
    bias: Tensor | None = None
    if corner is None and attn_mask is not None:
        wide = _of_mask(attn_mask, rank, lead)
        mask, bias = (Dense(wide), None) if wide.dtype == torch.bool else (None, wide)
    if is_causal or corner is not None:
        causal = Causal(corner or "upper_left")
        mask = causal if mask is None else mask & causal
    return Seen(
        query,
        key,
        value,
        output.reshape(query.shape[0], query.shape[1], *output.shape[-2:]),
        "sdpa",
        Dot(1.0 / math.sqrt(query.shape[-1]) if scale is None and query.shape[-1] else scale),
        mask=mask,
        bias=bias,
        causal=is_causal,
        dropout_p=dropout_p,
        autocast=_autocast(query),
    )


def _require_dense(*tensors: Tensor) -> None:
    if any(tensor.is_nested for tensor in tensors):
        raise NotSeen("attention over nested tensors is not looked into")
    if any(tensor.device.type == "meta" for tensor in tensors):
        raise NotSeen(
            "it ran on the meta device, where there are no numbers; load the weights to look at them"
        )
    if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
        raise NotSeen("attention inside vmap or another transform of torch.func is not looked into")


def _autocast(query: Tensor) -> torch.dtype | None:
    device = query.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return None if query.dtype == torch.float64 else torch.get_autocast_dtype(device)


def _heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Calls that torch broadcasts over heads, as regard writes them: with a dimension of heads, of sizes that group."""
    if query.dim() == 2:
        query, key, value = query[None], key[None], value[None]
    H, Hk, Hv = (tensor.shape[-3] for tensor in (query, key, value))
    heads = max(Hk, Hv)
    if Hk != Hv:
        key, value = (_spread(tensor, heads) for tensor in (key, value))
    if H == 1 and heads > 1:
        query = query.expand(*query.shape[:-3], heads, -1, -1)
    return query, key, value


def _spread(tensor: Tensor, heads: int) -> Tensor:
    own = tensor.shape[-3]
    return tensor if own == heads else tensor.repeat_interleave(heads // own, -3)


def _four(tensor: Tensor, lead: torch.Size) -> Tensor:
    """(B, heads, T, n): a view where one exists."""
    tensor = tensor.detach()
    if tensor.shape[:-3] != lead:
        tensor = tensor.expand(*lead, -1, -1, -1)
    return tensor if len(lead) == 1 else tensor.reshape(-1, *tensor.shape[-3:])


def _of_mask(mask: Tensor, rank: int, lead: torch.Size) -> Tensor:
    """What torch broadcasts to (*lead, heads, Tq, Tk) as (B|1, H|1, Tq|1, Tk|1)."""
    mask = mask.detach()
    if rank == 2:  # there was no dimension of heads
        mask = mask[..., None, :, :] if mask.dim() > 2 else mask
    wide = mask.reshape((1,) * (len(lead) + 3 - mask.dim()) + tuple(mask.shape))
    if len(lead) == 1:
        return wide
    alone = all(size == 1 for size in wide.shape[:-3])
    wide = wide if alone else wide.expand(*lead, -1, -1, -1)
    return wide.reshape(-1, *wide.shape[-3:]) if len(lead) else wide.reshape(1, *wide.shape[-3:])


def _corner(mask: Any) -> str | None:
    from regard.compat._sdpa import _causal_bias

    return None if mask is None else _causal_bias(mask)


# ---------------------------------------------------------------------------- regard's own


def of_own(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any = None,
    *,
    score: Any,
    normalize: Any,
    bias: Any,
    dropout_p: float,
) -> Seen:
    """`regard.attention`, with every score, normaliser, mask and bias."""
    _require_dense(query, key, value)
    autocast = _autocast(query)
    call = prepare(query, key, value, mask, score, normalize, bias)
    B, H = call.frame.B, call.frame.H
    return Seen(
        call.query.detach(),
        call.key.detach(),
        call.value.detach(),
        output.detach().reshape(B, H, *output.shape[-2:]),
        "regard",
        score,
        normalize,
        None if call.mask is None else BoundMask(call.mask),
        None if call.bias is None else BoundBias(call.bias),
        dropout_p=dropout_p,
        autocast=autocast,
    )


# ---------------------------------------------------------------------------- nn.MultiheadAttention


def of_multihead(output: Any, *args: Any, **kwargs: Any) -> Seen:
    """`F.multi_head_attention_forward`: heads are projected again, which gives what it computed inside."""
    return _of_multihead(output, *args, **kwargs)


def _of_multihead(
    output: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Seen:
    _require_dense(query, key, value)
    batched = query.dim() == 3
    projections = (
        (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else _thirds(in_proj_weight)
    )
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    given = (query, static_k, static_v)
    heads = []
    for x, weight, bias, static in zip(
        (query, key, value), projections, biases, (None, *given[1:]), strict=True
    ):
        heads.append(
            _static(static, num_heads)
            if static is not None
            else _project(x, weight, bias, num_heads, batched)
        )
    q, k, v = heads
    pairs, keys = _masks.checked(
        attn_mask,
        key_padding_mask,
        _masks.Sizes(q.shape[0], num_heads, q.shape[2], k.shape[2], batched),
        query.device,
    )
    more = [(bias_k, bias_v)] if bias_k is not None and bias_v is not None else []
    mask: Mask | None
    if more:
        k, v = (torch.cat([one, _learned(extra, one)], 2) for one, extra in zip((k, v), more[0], strict=True))
        mask, bias_pairs = None, _masks.added(pairs, keys, q.dtype, 1)
    else:
        mask, bias_pairs = _masks.lowered(pairs, keys)
    seen = Seen(
        q,
        k,
        v,
        None,
        "multi_head_attention_forward",
        Dot(),
        Softmax(0.0 if add_zero_attn else None),
        mask,
        bias_pairs,
        dropout_p=dropout_p if training else 0.0,
        crossed=key is not query,
    )
    produced = output[0].detach() if batched else output[0].detach()[:, None]
    seen.context = lambda: _context(seen, produced, out_proj_weight, out_proj_bias)
    return seen


def _context(seen: Seen, produced: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """(B, H, Tq, Dv): what the last projection was given, computed again, if it then gives what the module gave.

    None while weights are dropped: which ones the module dropped is not known.
    """
    assert seen.query is not None and seen.key is not None and seen.value is not None
    if seen.dropout_p:
        return None
    how: dict[str, Any] = {"score": seen.score, "normalize": seen.normalize, "bias": seen.bias}
    context = attention(seen.query, seen.key, seen.value, seen.mask, **how)
    again = F.linear(context.permute(2, 0, 1, 3).flatten(2), weight, bias)
    near = 1e-4 if again.dtype in (torch.float32, torch.float64) else 2e-2
    return context if torch.allclose(again, produced, rtol=near, atol=near) else None


def _thirds(weight: Tensor | None) -> tuple[Tensor, ...]:
    assert weight is not None  # torch refuses a call that has neither
    return weight.chunk(3)


def _project(x: Tensor, weight: Tensor | None, bias: Tensor | None, heads: int, batched: bool) -> Tensor:
    """(T, B, width) or (T, width) -> (B, heads, T, D)."""
    rows = F.linear(x, weight, bias).detach()  # type: ignore[arg-type]
    rows = rows if batched else rows[:, None]
    split: Tensor = rows.unflatten(-1, (heads, -1))
    return split.permute(1, 2, 0, 3)


def _static(rows: Tensor, heads: int) -> Tensor:
    split: Tensor = rows.detach().unflatten(0, (-1, heads))
    return split


def _learned(extra: Tensor, rows: Tensor) -> Tensor:
    """The learned key or value (1, 1, width) as one more row of every sample."""
    B, heads = rows.shape[:2]
    one = extra.detach().reshape(1, 1, heads, -1).transpose(1, 2).to(rows.dtype)
    return one.expand(B, -1, -1, -1)
