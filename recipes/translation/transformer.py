"""The Transformer encoder-decoder (Vaswani et al., 2017), from regard's blocks.

Norms before each layer (Xiong et al., 2020) or behind it; positions sinusoidal, learned or rotary (Su et al., 2021);
one table of embeddings for source, target and output (Press and Wolf, 2017).

Letters: B sentences, Ts and Tt tokens of source and target, V words of the vocabulary, d width, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recipes.translation.model import PAD, among, crossed, positive, share
from regard.masks import Padding
from regard.nn import (
    Context,
    DecoderBlock,
    EncoderBlock,
    GrowingCache,
    LearnedPositions,
    RotaryPositions,
    SinusoidalPositions,
)

NORMS = ("pre", "post")
POSITIONS = ("sinusoidal", "learned", "rotary")


@dataclass(frozen=True)
class TransformerSizes:
    """What a ``Transformer`` is built from. ``hidden``: width of the feed-forward layers; ``longest``: learned rows."""

    vocabulary: int
    width: int = 256
    layers: int = 3
    heads: int = 4
    hidden: int = 1024
    norm: str = "pre"
    positions: str = "sinusoidal"
    longest: int = 512
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "hidden", "longest"):
            positive(name, getattr(self, name))
        if self.width % (2 * self.heads):
            raise ValueError(f"heads: expected a divisor of width / 2 = {self.width / 2:g}, got {self.heads}")
        share("dropout", self.dropout)
        among("norm", self.norm, NORMS)
        among("positions", self.positions, POSITIONS)


class Encoded(NamedTuple):
    """The encoder's output (B, Ts, d) and the lengths of its sentences (B,)."""

    states: Tensor
    lengths: Tensor

    def select(self, index: Tensor) -> Encoded:
        """The sentences ``index``, repeats allowed."""
        return Encoded(self.states[index], self.lengths[index])


class TransformerState(NamedTuple):
    """A decoder between two steps: keys and values of the source, projected once, and of the target so far."""

    contexts: list[Context]
    lengths: Tensor
    caches: list[GrowingCache]

    def select(self, index: Tensor) -> TransformerState:
        """The hypotheses ``index``, repeats allowed. The caches are handed on, not copied."""
        contexts = [Context(context.key[index], context.value[index]) for context in self.contexts]
        for cache in self.caches:
            if cache.length:
                cache.reorder(index)
        return TransformerState(contexts, self.lengths[index], self.caches)


class Transformer(nn.Module):
    """See the module's docstring; the calls are those of ``model.Seq2Seq``."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.sizes = sizes
        d, pre = sizes.width, sizes.norm == "pre"
        options: dict[str, Any] = {"hidden_dim": sizes.hidden, "pre_norm": pre, "dropout_p": sizes.dropout}
        if sizes.positions == "rotary":
            options["rotary"] = RotaryPositions(d // sizes.heads)
        self.embedding = nn.Embedding(sizes.vocabulary, d, padding_idx=PAD)
        self.source_positions, self.target_positions = _positions(sizes), _positions(sizes)
        self.encoder = nn.ModuleList(EncoderBlock(d, sizes.heads, **options) for _ in range(sizes.layers))
        self.decoder = nn.ModuleList(DecoderBlock(d, sizes.heads, **options) for _ in range(sizes.layers))
        self.encoder_norm = nn.LayerNorm(d) if pre else nn.Identity()
        self.decoder_norm = nn.LayerNorm(d) if pre else nn.Identity()
        self.dropout = nn.Dropout(sizes.dropout)
        self.longest: int | None = sizes.longest if sizes.positions == "learned" else None
        nn.init.normal_(self.embedding.weight, std=d**-0.5)
        with torch.no_grad():
            self.embedding.weight[PAD].zero_()

    def _embedded(self, tokens: Tensor, positions: nn.Module | None, offset: int = 0) -> Tensor:
        x = self.embedding(tokens) * self.sizes.width**0.5
        x = self.dropout(x if positions is None else positions(x, offset=offset))
        return x

    def encode(self, source: Tensor, lengths: Tensor) -> Encoded:
        """source (B, Ts) of token ids, lengths (B,) -> the encoder's output."""
        x = self._embedded(source, self.source_positions)
        mask = Padding(lengths)
        for block in self.encoder:
            x = block(x, mask)
        return Encoded(self.encoder_norm(x), lengths)

    def forward(self, source: Tensor, lengths: Tensor, target_in: Tensor) -> Tensor:
        """Teacher forcing: target_in (B, Tt), the words that go in -> logits (B, Tt, V) of those to come."""
        read = self.encode(source, lengths)
        x, mask = self._embedded(target_in, self.target_positions), Padding(lengths)
        for block in self.decoder:
            x = block(x, read.states, context_mask=mask)
        return self.logits(self.decoder_norm(x))

    def start(self, read: Encoded) -> TransformerState:
        """The decoder before its first step."""
        contexts = [block.cross_attention.project(read.states) for block in self.decoder]
        return TransformerState(contexts, read.lengths, [GrowingCache() for _ in self.decoder])

    def step(self, tokens: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """One step: tokens (B,) that go in -> logits (B, V), and the state behind it."""
        x = self._embedded(tokens[:, None], self.target_positions, offset=state.caches[0].length)
        mask = Padding(state.lengths)
        for block, context, cache in zip(self.decoder, state.contexts, state.caches, strict=True):
            x = block(x, context, context_mask=mask, cache=cache)
        return self.logits(self.decoder_norm(x))[:, 0], state

    def logits(self, out: Tensor) -> Tensor:
        """The decoder's output against every word's embedding."""
        return nn.functional.linear(out, self.embedding.weight)

    def cross(self, source: Tensor, lengths: Tensor, target_in: Tensor) -> Tensor:
        """(layers, B, H, Tt, Ts): row t holds the weights of the step that predicts target token t."""
        modules = [f"decoder.{layer}.cross_attention" for layer in range(self.sizes.layers)]
        return crossed(self, source, lengths, target_in, modules)


def _positions(sizes: TransformerSizes) -> nn.Module | None:
    if sizes.positions == "rotary":
        return None
    if sizes.positions == "learned":
        return LearnedPositions(sizes.longest, sizes.width)
    return SinusoidalPositions(sizes.width)
