"""Attention inside the models that translate: a decoder's step, and training beside the same model on torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard import nn

from .case import Case, Inputs, Result, Shape, Side, floor, shape

WIDTH, HEADS = 256, 4
STEP = shape(16, 1, 1, WIDTH, Tk=200)
LAYERS = shape(16, 1, 40, WIDTH)
RECURRENT = shape(8, 1, 60, WIDTH, Tk=300)


# ---------------------------------------------------------------------------- a step of a recurrent decoder


@lru_cache(1)
def _step() -> nn.StepAttention:
    torch.manual_seed(0)
    return nn.StepAttention(WIDTH, hidden_dim=WIDTH)


def projected(inputs: Inputs) -> dict[str, Any]:
    with torch.no_grad():
        return {"memory": _step().project(inputs.key[:, 0])}


def step_projected_once(inputs: Inputs) -> Result:
    return _step()(inputs.query[:, 0, 0], inputs.prepared["memory"])


def step_projected_again(inputs: Inputs) -> Result:
    return _step()(inputs.query[:, 0, 0], _step().project(inputs.key[:, 0]))


# ---------------------------------------------------------------------------- training


def trained(make: Callable[[], torch.nn.Module]) -> Side:
    """Forward and backward of a model of (target, source), down to its parameters."""

    def call(inputs: Inputs) -> Result:
        model = make()
        with torch.enable_grad():
            target, source = (x[:, 0].detach().requires_grad_() for x in (inputs.query, inputs.key))
            output = model(target, source)
            leaves = [target, source, *model.parameters()]
            of_target, of_source, *_ = torch.autograd.grad(output, leaves, inputs.upstream[:, 0])
        return {"output": output.detach(), "grad of target": of_target, "grad of source": of_source}

    return call


class Layers(torch.nn.Module):
    """A layer of a Transformer's encoder and one of its decoder (Vaswani et al., 2017), norms first."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.EncoderBlock(WIDTH, HEADS), nn.DecoderBlock(WIDTH, HEADS)

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        found: Tensor = self.decoder(target, self.encoder(source))
        return found


class TorchAttention(torch.nn.Module):
    """nn.MultiheadAttention with the weights of one of ours, called as the blocks call it."""

    def __init__(self, ours: Any, causal: bool) -> None:
        super().__init__()
        self.embed_dim, self.q_proj, self.causal = WIDTH, None, causal
        self.inner = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        projections = (ours.q_proj, ours.k_proj, ours.v_proj)
        with torch.no_grad():
            self.inner.in_proj_weight.copy_(torch.cat([one.weight for one in projections]))
            self.inner.in_proj_bias.copy_(torch.cat([one.bias for one in projections]))
            self.inner.out_proj.load_state_dict(ours.out_proj.state_dict())

    def forward(self, x: Tensor, context: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        other = x if context is None else context
        mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        found: Tensor = self.inner(
            x, other, other, need_weights=False, attn_mask=mask, is_causal=self.causal
        )[0]
        return found


@lru_cache(1)
def layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return Layers()


@lru_cache(1)
def torch_layers() -> torch.nn.Module:
    made: Any = copy.deepcopy(layers())
    made.encoder.attention = TorchAttention(made.encoder.attention, causal=False)
    made.decoder.attention = TorchAttention(made.decoder.attention, causal=True)
    made.decoder.cross_attention = TorchAttention(made.decoder.cross_attention, causal=False)
    return made


class Recurrent(torch.nn.Module):
    """Two GRUs, the second with additive attention to the first (Bahdanau et al., 2015) for all steps at once."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.reads = torch.nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.writes = torch.nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attention = attention

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        read, last = self.reads(source)
        written, _ = self.writes(target, last)
        context: Tensor = self.attention(written, self.attention.project(read))
        return context + written


class Broadcast(nn.StepAttention):
    """The same attention as the expression that people write: tanh of all sums, (B, Tq, Tk, D) numbers."""

    def forward(self, state: Tensor, memory: nn.Memory) -> Tensor:
        assert self.q_proj is not None
        key, value = memory.key[:, 0], memory.value[:, 0]
        sums = torch.tanh(self.q_proj(state)[:, :, None] + key[:, None])
        return torch.softmax(sums @ self.score.v, -1) @ value


@lru_cache(1)
def recurrent() -> torch.nn.Module:
    torch.manual_seed(0)
    return Recurrent(nn.StepAttention(WIDTH, hidden_dim=WIDTH))


@lru_cache(1)
def broadcast() -> torch.nn.Module:
    made = Recurrent(Broadcast(WIDTH, hidden_dim=WIDTH))
    made.load_state_dict(recurrent().state_dict())
    return made


def _training(
    name: str, question: str, at: Shape, ours: Any, other: Any, said: str, bound: float, goal: float
) -> Case:
    return Case(
        name=name,
        question=question,
        at=at,
        ours=trained(ours),
        other=trained(other),
        other_name=said,
        max_rounds=7,
        limits=(floor(bound, goal),),
    )


CASES = (
    Case(
        name="step-decoder",
        question="A decoder's step over 200 states: keys projected once a sentence, or again at each step.",
        at=STEP,
        ours=step_projected_once,
        other=step_projected_again,
        other_name="keys projected again",
        prepare=projected,
        limits=(floor(3, 5),),
    ),
    _training(
        "train-transformer",
        "A layer of an encoder and one of a decoder, forward and backward.",
        LAYERS,
        layers,
        torch_layers,
        "nn.MultiheadAttention in the same model",
        1.0,
        1.3,
    ),
    _training(
        "train-additive",
        "Two GRUs and additive attention over 300 tokens, forward and backward.",
        RECURRENT,
        recurrent,
        broadcast,
        "broadcast tanh(q + k) in the same model",
        3.0,
        5.0,
    ),
)
