"""``torch.nn.MultiheadAttention`` by its own signature, on regard's kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._attention import attention, attention_weights, attention_with_lse, merge
from regard._checks import is_int, is_number, words, wrong_type, wrong_value
from regard.compat import _masks
from regard.compat._masks import Sizes
from regard.compat._nested import any_nested, padded, renested
from regard.masks import Causal, Mask
from regard.nn._given import fitting_state
from regard.normalizers import Softmax


class MultiheadAttention(nn.MultiheadAttention):
    """``concat_h(softmax(q_h k_h^T / sqrt(D)) v_h) W_out``, as ``torch.nn.MultiheadAttention`` has it.

    Every argument of the constructor and of ``forward``, their defaults, the parameters with their names and first
    values, and the state dict are torch's: it may stand wherever torch's stands. In torch's ``TransformerEncoderLayer``
    and ``TransformerDecoderLayer`` it runs in eval mode and under no_grad too: torch's fused path stands down for it,
    because ``_qkv_same_embed_dim``, which torch reads before it takes that path, is False here.
    ``MultiheadAttention.of(module)`` makes one that shares the parameters of a module of torch's. (Vaswani et al.,
    2017.)

    Where torch contradicts itself, and what is done here:

    - A row that may attend to nothing gives zeros before ``out_proj``, zeros as weights, and gradient 0 (torch: NaN
      with ``need_weights=True`` or on the fused path, zeros otherwise).
    - The weights are those before dropout (torch: after). Asking for them does not change the output.
    - ``attn_mask`` and ``key_padding_mask`` may differ in type (torch: deprecated, warns).
    - ``is_causal`` is torch's hint: alone it is refused; with ``need_weights=False`` and no ``key_padding_mask`` the
      mask is taken to be causal (upper left) without being read; otherwise ``attn_mask`` decides. The keys of
      ``add_bias_kv`` and ``add_zero_attn`` are seen by all either way (torch: hidden from all where the hint decides).

    Without weights, memory is linear in the lengths whatever form the masks have; two floating-point masks that do more
    than block are added up, which makes a tensor of their common size. Errors are TypeError and ValueError and name the
    argument (torch: AssertionError, RuntimeError). torch.compile and torch.export take it; torch.jit.script does not.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _arguments(embed_dim, num_heads, dropout, kdim, vdim)
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        self._qkv_same_embed_dim = False
        fitting_state(self)

    @classmethod
    def of(cls, module: nn.MultiheadAttention) -> MultiheadAttention:
        """One that shares the parameters, and has the settings, of a module of torch's."""
        if not isinstance(module, nn.MultiheadAttention):
            wrong_type("MultiheadAttention.of", "a torch.nn.MultiheadAttention", module)
        made = cls(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            module.in_proj_bias is not None,
            module.bias_k is not None,
            module.add_zero_attn,
            module.kdim,
            module.vdim,
            module.batch_first,
            device="meta",
        )
        parameters = dict(module.named_parameters(recurse=False))
        for name, _ in made.named_parameters(recurse=False):
            if name not in parameters:
                way_out = (
                    "Remove the parametrization first (torch.nn.utils.parametrize.remove_parametrizations)."
                )
                got = words(f"one whose {name} is computed from something else")
                wrong_value(
                    "MultiheadAttention.of", "a module that holds its parameters itself", got, way_out
                )
        for name, parameter in parameters.items():
            made.register_parameter(name, parameter)
        made.out_proj = module.out_proj
        return made.train(module.training)

    def _reset_parameters(self) -> None:
        weights = (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        for weight in weights:
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for key_or_value in (self.bias_k, self.bias_v):
            if key_or_value is not None:
                nn.init.xavier_normal_(key_or_value)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query (Tq, B, embed_dim), key (Tk, B, kdim), value (Tk, B, vdim) -> (output (Tq, B, embed_dim), weights).

        With ``batch_first`` the tensors are (B, T, ...); unbatched (T, ...) ones are taken always. ``key_padding_mask``
        (B, Tk) and ``attn_mask`` (Tq, Tk) or (B * H, Tq, Tk): bool, **True = blocked**, or floating point, added to the
        scores. Weights are None unless ``need_weights``: (B, Tq, Tk) averaged over the heads, or (B, H, Tq, Tk) with
        ``average_attn_weights=False``; keys of ``add_bias_kv`` and ``add_zero_attn`` come last. Nested inputs are taken
        without masks; the output is nested like the query. Raises TypeError or ValueError that names the argument.
        """
        if any_nested(query, key, value):
            return self._nested(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights
            )
        sizes = _sizes(self, query, key, value)
        pairs, keys = _masks.checked(attn_mask, key_padding_mask, sizes, query.device)
        if is_causal and attn_mask is None:
            way_out = "Pass the causal mask with it; regard.nn.Attention takes mask=Causal()."
            wrong_value("is_causal", "attn_mask beside the hint", words("none"), way_out)
        mask: Mask | None
        if is_causal and key_padding_mask is None and not need_weights:
            mask, bias = Causal("upper_left"), None
        else:
            mask, bias = _masks.lowered(pairs, keys)
        q, k, v = self._projected(query, key, value, sizes)
        output = self._attended(q, k, v, mask, bias)
        joined = output.transpose(1, 2) if self.batch_first else output.permute(2, 0, 1, 3)
        output = self.out_proj(joined.flatten(2))
        weights = self._weights(q, k, pairs, keys, average_attn_weights) if need_weights else None
        if sizes.batched:
            return output, weights
        return output.squeeze(0 if self.batch_first else 1), None if weights is None else weights[0]

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, sizes: Sizes) -> list[Tensor]:
        """(B, H, T, D) each, views of what the projections give."""
        if self.in_proj_weight is not None and query is key and key is value:
            found = list(F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1))
        else:
            weights = (
                (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
                if self.in_proj_weight is None
                else self.in_proj_weight.chunk(3)
            )
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            found = [F.linear(*given) for given in zip((query, key, value), weights, biases, strict=True)]
        if not sizes.batched:
            found = [tensor.unsqueeze(0 if self.batch_first else 1) for tensor in found]
        heads = [tensor.unflatten(-1, (self.num_heads, self.head_dim)) for tensor in found]
        return [t.transpose(1, 2) if self.batch_first else t.permute(1, 2, 0, 3) for t in heads]

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None) -> Tensor:
        """A key of zeros is a sink at 0; the learned key and value are a piece of their own, merged in."""
        dropout_p = self.dropout if self.training else 0.0
        sink = 0.0 if self.add_zero_attn else None
        if self.bias_k is None or self.bias_v is None:
            return attention(q, k, v, mask, normalize=Softmax(sink), bias=bias, dropout_p=dropout_p)
        own = [self._learned(parameter).to(q.dtype) for parameter in (self.bias_k, self.bias_v)]
        first = attention_with_lse(q, k, v, mask, bias=bias, dropout_p=dropout_p)
        last = attention_with_lse(q, *own, dropout_p=dropout_p)
        output, _ = merge([first[0], last[0]], [first[1], last[1]], sink)
        return output

    def _learned(self, parameter: Tensor) -> Tensor:
        return parameter.view(1, 1, self.num_heads, self.head_dim).transpose(1, 2)

    def _weights(
        self, q: Tensor, k: Tensor, pairs: Tensor | None, keys: Tensor | None, average: bool
    ) -> Tensor:
        """The definition's weights, over the added keys too."""
        more = (
            []
            if self.bias_k is None
            else [self._learned(self.bias_k).to(k.dtype).expand(k.shape[0], -1, -1, -1)]
        )
        more += [k.new_zeros(*k.shape[:2], 1, k.shape[3])] if self.add_zero_attn else []
        bias = _masks.added(pairs, keys, q.dtype, len(more))
        weights = attention_weights(q, torch.cat([k, *more], 2), bias=bias)
        return weights.mean(1) if average else weights

    def _nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None:
                wrong_value(name, "None beside nested tensors", mask)
        if not self.batch_first:
            wrong_value("batch_first", "True for a module that takes nested tensors", self.batch_first)
        dense = {id(x): padded(name, x) for name, x in (("query", query), ("key", key), ("value", value))}
        (q, rows), (k, keys), (v, values) = (dense[id(tensor)] for tensor in (query, key, value))
        if not torch.equal(keys, values):
            wrong_value("value", "samples as long as the key's", words("other lengths"))
        behind = torch.arange(k.shape[1], device=k.device) >= keys[:, None]
        output, weights = self.forward(q, k, v, behind, need_weights, None, average_attn_weights)
        if weights is not None:
            real = torch.arange(q.shape[1], device=q.device) < rows[:, None]
            real = real[:, :, None] if average_attn_weights else real[:, None, :, None]
            weights = weights.masked_fill(~real, 0.0)
        return renested(output, query), weights


def _arguments(embed_dim: Any, num_heads: Any, dropout: Any, kdim: Any, vdim: Any) -> None:
    for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("kdim", kdim), ("vdim", vdim)):
        if size is None and name in ("kdim", "vdim"):
            continue
        if not is_int(size):
            wrong_type(name, "a whole number", size)
        if size <= 0:
            wrong_value(name, "1 or more", size)
    if embed_dim % num_heads:
        got = words(f"embed_dim = {embed_dim}, num_heads = {num_heads}")
        way_out = "regard.nn.Attention takes a head_dim of its own."
        wrong_value("num_heads", "heads that divide embed_dim", got, way_out)
    if not is_number(dropout):
        wrong_type("dropout", "a number from 0 to 1", dropout)
    if not 0 <= dropout <= 1:
        wrong_value("dropout", "a probability from 0 to 1", dropout)


def _sizes(module: MultiheadAttention, query: Any, key: Any, value: Any) -> Sizes:
    widths = {"query": module.embed_dim, "key": module.kdim, "value": module.vdim}
    order = "(B, T, ...)" if module.batch_first else "(T, B, ...)"
    for (name, width), tensor in zip(widths.items(), (query, key, value), strict=True):
        if not isinstance(tensor, Tensor):
            wrong_type(name, "a tensor", tensor)
        if tensor.ndim not in (2, 3) or tensor.ndim != query.ndim:
            wrong_value(name, f"{order}, or (T, ...) unbatched, all three alike", tensor)
        if tensor.shape[-1] != width:
            own = {"query": "embed_dim", "key": "kdim", "value": "vdim"}[name]
            wrong_value(name, f"{own} = {width} features in the last dimension", tensor)
        _fits(module.out_proj.weight, name, tensor)
    if key.shape[:-1] != value.shape[:-1]:
        wrong_value("value", f"as many tokens as the key has, {tuple(key.shape[:-1])}", value)
    if query.ndim == 2:
        return Sizes(1, module.num_heads, query.shape[0], key.shape[0], False)
    B, T = (0, 1) if module.batch_first else (1, 0)
    if query.shape[B] != key.shape[B]:
        way_out = f"batch_first is {module.batch_first}: tensors are {order}."
        wrong_value("key", f"as many samples as the query has, {query.shape[B]}", key, way_out)
    return Sizes(query.shape[B], module.num_heads, query.shape[T], key.shape[T], True)


def _fits(parameter: Tensor, name: str, tensor: Tensor) -> None:
    """Device and dtype are the module's; autocast casts."""
    if tensor.device != parameter.device:
        wrong_value(
            name, f"a tensor on {parameter.device}, where the module is", words(f"one on {tensor.device}")
        )
    if tensor.dtype != parameter.dtype and not torch.is_autocast_enabled(tensor.device.type):
        dtype = str(parameter.dtype).removeprefix("torch.")
        wrong_type(
            name, f"{dtype}, as the module's parameters", tensor, "Cast it, or the module with .to(dtype)."
        )
