"""Attention of a recurrent decoder to its encoder's states, step by step (Bahdanau et al., 2015; Luong et al., 2015).

Letters: B batch, Tq steps, Tk states, Dq and Dk widths of the decoder's and the encoder's states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard._attention import attention, attention_weights
from regard._checks import words, wrong_type, wrong_value
from regard.masks import Mask
from regard.nn import _given
from regard.nn._owners import AdditiveScore, current, mechanism
from regard.normalizers import Softmax


class Memory(NamedTuple):
    """What the steps attend to: key (B, 1, Tk, D) projected once, value (B, 1, Tk, Dk), and who may be seen."""

    key: Tensor
    value: Tensor
    mask: Mask | Tensor | None = None


class StepAttention(nn.Module):
    """``context = sum_j normalize(score(W state, U h_j)) h_j``, the keys ``U h_j`` projected once a sequence.

    ``memory = step.project(h, mask)`` once, then ``context = step(state, memory)`` at every step: h (B, Tk, Dk), state
    (B, Dq) -> context (B, Dk), or Tq steps at once, (B, Tq, Dq) -> (B, Tq, Dk). The values are the states h themselves.

    query_dim, key_dim: Dq and Dk, equal unless told. hidden_dim: the width that ``q_proj`` (W) and ``k_proj`` (U) map
    to, without a bias unless ``proj_bias``; None: no projections, state and h are scored as they are. score: any of the
    core or an ``nn.Owner``; unless told the additive score of Bahdanau et al., for which ``hidden_dim`` is needed.
    ``scores.Dot(scale=1)`` and ``nn.BilinearScore(Dq, Dk)`` without ``hidden_dim`` are Luong's *dot* and *general*.
    normalize: any normaliser. Raises TypeError or ValueError.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int | None = None,
        *,
        hidden_dim: int | None = None,
        score: Any = None,
        normalize: Any = None,
        proj_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _given.fitting_state(self)
        self.query_dim = _given.size("query_dim", query_dim)
        self.key_dim = query_dim if key_dim is None else _given.size("key_dim", key_dim)
        if score is None and hidden_dim is None:
            way_out = "The additive score adds projections: say hidden_dim=, or score=Dot(scale=1)."
            wrong_value("hidden_dim", "a width for the additive score", None, way_out)
        if hidden_dim is None and _given.flag("proj_bias", proj_bias):
            wrong_value("proj_bias", "False without hidden_dim: there is no projection", True)
        self.q_proj: nn.Linear | None = None
        self.k_proj: nn.Linear | None = None
        if hidden_dim is not None:
            wide = _given.size("hidden_dim", hidden_dim)
            options: dict[str, Any] = {
                "bias": _given.flag("proj_bias", proj_bias),
                "device": device,
                "dtype": dtype,
            }
            self.q_proj = nn.Linear(self.query_dim, wide, **options)
            self.k_proj = nn.Linear(self.key_dim, wide, **options)
            if score is None:
                score = AdditiveScore(wide, device=device, dtype=dtype)
        self.score = mechanism("score", score)
        self.normalize = mechanism("normalize", Softmax() if normalize is None else normalize)

    def project(self, states: Tensor, mask: Mask | Tensor | None = None) -> Memory:
        """The memory of encoder states h (B, Tk, Dk). mask: ``masks.Padding(lengths)``, or bool, True = may attend."""
        states = _given.rows("states", states, self.key_dim, self.k_proj, "key_dim")
        if states.ndim != 3:
            wrong_value("states", f"(B, Tk, {self.key_dim})", states)
        key = states if self.k_proj is None else self.k_proj(states)
        return Memory(key[:, None], states[:, None], mask)

    def forward(self, state: Tensor, memory: Memory) -> Tensor:
        """state (B, Dq) -> context (B, Dk); or (B, Tq, Dq) -> (B, Tq, Dk)."""
        query = self._query(state, memory)
        key, value, mask = memory
        context = attention(
            query, key, value, mask, score=current(self.score), normalize=current(self.normalize)
        )[:, 0]
        return context[:, 0] if state.ndim == 2 else context

    def weights(self, state: Tensor, memory: Memory) -> Tensor:
        """The weights of a step, (B, Tk), or of many, (B, Tq, Tk): for coverage, copying, and looking."""
        query = self._query(state, memory)
        weights = attention_weights(
            query, memory.key, memory.mask, score=current(self.score), normalize=current(self.normalize)
        )[:, 0]
        return weights[:, 0] if state.ndim == 2 else weights

    def _query(self, state: Tensor, memory: Memory) -> Tensor:
        if not isinstance(memory, Memory):
            wrong_type("memory", "what project(states) gives", memory)
        state = _given.rows("state", state, self.query_dim, self.q_proj, "query_dim")
        B = memory.key.shape[0]
        if state.ndim > 3 or state.shape[0] != B:
            shapes = words(f"a state {tuple(state.shape)} beside a memory of {B} samples")
            wrong_value(
                "state", f"(B, {self.query_dim}) or (B, Tq, {self.query_dim}), B as in the memory", shapes
            )
        query = state if self.q_proj is None else self.q_proj(state)
        return query[:, None, None] if state.ndim == 2 else query[:, None]

    def extra_repr(self) -> str:
        parts = [f"Dq={self.query_dim}", f"Dk={self.key_dim}"]
        for name in ("score", "normalize"):
            given = getattr(self, name)
            if not isinstance(given, nn.Module):
                parts.append(f"{name}={given!r}")
        return ", ".join(parts)
