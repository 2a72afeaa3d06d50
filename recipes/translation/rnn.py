"""The RNN encoder-decoder, with attention (Bahdanau et al., 2015; Luong et al., 2015) and without (Cho et al., 2014).

A bidirectional GRU or LSTM reads the source into states h_j; a second one writes the target. At step t its state s_t,
made of the words before y_t, looks at all h_j, and ``tanh(R [s_t; c_t; e_t])`` predicts y_t, e_t being the word that
went in. The recurrence does not need the context (Luong's order), so training attends for all steps in one call;
with ``input_feeding`` it does, and steps follow one another. Without attention c_t is the encoder's last state.

Letters: B sentences, Ts and Tt tokens of source and target, V words of the vocabulary, d width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from recipes.translation.model import PAD, among, crossed, positive, share
from regard.masks import Padding
from regard.nn import AdditiveScore, BilinearScore, Memory, Owner, StepAttention
from regard.normalizers import Entmax15, Softmax, Sparsemax
from regard.scores import Concat, Dot

CELLS = {"gru": nn.GRU, "lstm": nn.LSTM}
NORMALIZERS: dict[str, Any] = {"softmax": Softmax, "sparsemax": Sparsemax, "entmax": Entmax15}
SCORES = ("none", "dot", "bilinear", "additive", "concat")


@dataclass(frozen=True)
class RnnSizes:
    """What an ``Rnn`` is built from. ``attention``: one of SCORES; ``vocabulary``: V; ``width``: d, even."""

    vocabulary: int
    width: int = 256
    layers: int = 1
    cell: str = "gru"
    attention: str = "additive"
    normalize: str = "softmax"
    input_feeding: bool = False
    dropout: float = 0.2

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers"):
            positive(name, getattr(self, name))
        if self.width % 2:
            raise ValueError(f"width: expected an even number (two directions), got {self.width}")
        share("dropout", self.dropout)
        for name, known in (("cell", CELLS), ("attention", SCORES), ("normalize", NORMALIZERS)):
            among(name, getattr(self, name), known)
        if self.attention == "none" and (self.normalize != "softmax" or self.input_feeding):
            raise ValueError(
                "attention: without it there is nothing to normalise or to feed; leave those out"
            )


class ConcatScore(Owner):
    """``s = w_q . q + w_k . k``, the linear concat: under softmax no query can change what is looked at."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w_query = nn.Parameter(torch.randn(width) / width**0.5)
        self.w_key = nn.Parameter(torch.randn(width) / width**0.5)

    def forward(self) -> Concat:
        return Concat(self.w_query, self.w_key)


class Source(NamedTuple):
    """The source as it was read: ``summary`` (B, d) of the last states, and what attention looks at, if any."""

    summary: Tensor
    memory: Memory | None
    lengths: Tensor

    def select(self, index: Tensor) -> Source:
        """The sentences ``index``, repeats allowed."""
        lengths = self.lengths[index]
        memory = self.memory
        if memory is not None:
            memory = Memory(memory.key[index], memory.value[index], Padding(lengths))
        return Source(self.summary[index], memory, lengths)


class RnnState(NamedTuple):
    """A decoder between two steps: the source, the cell's state, and what the last step read out."""

    source: Source
    hidden: Any
    fed: Tensor

    def select(self, index: Tensor) -> RnnState:
        """The hypotheses ``index``, repeats allowed."""
        hidden = self.hidden
        hidden = tuple(h[:, index] for h in hidden) if isinstance(hidden, tuple) else hidden[:, index]
        return RnnState(self.source.select(index), hidden, self.fed[index])


class Rnn(nn.Module):
    """See the module's docstring; the calls are those of ``model.Seq2Seq``."""

    longest: int | None = None  # of a text, in tokens

    def __init__(self, sizes: RnnSizes) -> None:
        super().__init__()
        self.sizes = sizes
        d, cell = sizes.width, CELLS[sizes.cell]
        between = sizes.dropout if sizes.layers > 1 else 0.0
        self.embedding = nn.Embedding(sizes.vocabulary, d, padding_idx=PAD)
        self.encoder = cell(d, d // 2, sizes.layers, batch_first=True, bidirectional=True, dropout=between)
        self.decoder = cell(
            2 * d if sizes.input_feeding else d, d, sizes.layers, batch_first=True, dropout=between
        )
        self.bridge = nn.Linear(d, sizes.layers * d)
        self.attention = _attention(sizes)
        self.readout = nn.Linear(3 * d, d)
        self.dropout = nn.Dropout(sizes.dropout)
        self.bias = nn.Parameter(torch.zeros(sizes.vocabulary))
        nn.init.normal_(self.embedding.weight, std=d**-0.5)
        with torch.no_grad():
            self.embedding.weight[PAD].zero_()

    def encode(self, source: Tensor, lengths: Tensor) -> Source:
        """source (B, Ts) of token ids, lengths (B,), both at least 1 -> the source as it was read."""
        embedded = self.dropout(self.embedding(source))
        packed = pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        with _exact(source):
            states, last = self.encoder(packed)
        states, _ = pad_packed_sequence(states, batch_first=True, total_length=source.shape[1])
        hidden = last[0] if isinstance(last, tuple) else last
        summary = torch.cat([hidden[-2], hidden[-1]], -1)
        memory = None
        if self.attention is not None:
            memory = self.attention.project(self.dropout(states), Padding(lengths))
        return Source(summary, memory, lengths)

    def forward(self, source: Tensor, lengths: Tensor, target_in: Tensor) -> Tensor:
        """Teacher forcing: target_in (B, Tt), the words that go in -> logits (B, Tt, V) of those to come."""
        return self.logits(self._read_out(self.encode(source, lengths), target_in))

    def _read_out(self, read: Source, target_in: Tensor) -> Tensor:
        """(B, Tt, d): what each step reads out, all at once where the recurrence does not need the context."""
        state = self.start(read)
        if not self.sizes.input_feeding:
            return self._steps(target_in, state)[0]
        steps = []
        for t in range(target_in.shape[1]):
            out, state = self._steps(target_in[:, t : t + 1], state)
            steps.append(out)
        return torch.cat(steps, 1)

    def start(self, read: Source) -> RnnState:
        """The decoder before its first step."""
        layers, d = self.sizes.layers, self.sizes.width
        first = torch.tanh(self.bridge(read.summary).float()).view(-1, layers, d).transpose(0, 1).contiguous()
        hidden = (first, torch.zeros_like(first)) if self.sizes.cell == "lstm" else first
        return RnnState(read, hidden, torch.zeros_like(read.summary))

    def step(self, tokens: Tensor, state: RnnState) -> tuple[Tensor, RnnState]:
        """One step: tokens (B,) that go in -> logits (B, V), and the state behind it."""
        out, state = self._steps(tokens[:, None], state)
        return self.logits(out)[:, 0], state

    def _steps(self, target_in: Tensor, state: RnnState) -> tuple[Tensor, RnnState]:
        embedded = self.dropout(self.embedding(target_in))
        given = embedded
        if self.sizes.input_feeding:
            given = torch.cat([embedded, state.fed[:, None]], -1)
        with _exact(target_in):
            states, hidden = self.decoder(given, state.hidden)
        read = state.source
        if self.attention is None:
            context = read.summary[:, None].expand_as(states)
        else:
            assert read.memory is not None
            context = self.attention(states, read.memory)
        out = torch.tanh(self.readout(torch.cat([self.dropout(states), context, embedded], -1)).float())
        return out, RnnState(read, hidden, out[:, -1])

    def logits(self, out: Tensor) -> Tensor:
        """What was read out, against every word's embedding (Press and Wolf, 2017)."""
        return nn.functional.linear(self.dropout(out), self.embedding.weight, self.bias)

    def cross(self, source: Tensor, lengths: Tensor, target_in: Tensor) -> Tensor:
        """(1, B, 1, Tt, Ts): row t holds the weights of the step that predicts target token t."""
        if self.attention is None:
            raise ValueError("attention: this model was trained without one; there are no weights to look at")
        return crossed(self, source, lengths, target_in, ["attention"])


def _exact(tokens: Tensor) -> torch.autocast:
    """Recurrences stay in float32 under mixed precision: oneDNN has no bfloat16 LSTM for CPUs without AVX-512."""
    return torch.autocast(tokens.device.type, enabled=False)


def _attention(sizes: RnnSizes) -> StepAttention | None:
    d, normalize = sizes.width, NORMALIZERS[sizes.normalize]()
    if sizes.attention == "none":
        return None
    if sizes.attention == "additive":
        return StepAttention(d, hidden_dim=d, score=AdditiveScore(d), normalize=normalize)
    score = {
        "dot": lambda: Dot(scale=1),
        "bilinear": lambda: BilinearScore(d, d),
        "concat": lambda: ConcatScore(d),
    }
    return StepAttention(d, score=score[sizes.attention](), normalize=normalize)
