"""A small model that must learn to look things up, with and without the factor 1/sqrt(d_k).

Each sample is T keys with a class each and one of the keys as the query; the model is to name that key's class. It has
one head: embeddings, projections of query, key and value, attention, and a linear reading of the classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import attention
from regard.scores import Dot

SYMBOLS, CLASSES, LENGTH, WIDTH, VALUE_WIDTH = 64, 16, 16, 64, 32


@dataclass(frozen=True)
class Batch:
    keys: Tensor
    classes: Tensor
    query: Tensor
    target: Tensor


def draw(samples: int, generator: torch.Generator) -> Batch:
    """Keys (B, T) without repetition, their classes (B, T), the query (B,), and the class of its key (B,)."""
    keys = torch.rand(samples, SYMBOLS, generator=generator).argsort(-1)[:, :LENGTH]
    classes = torch.randint(CLASSES, (samples, LENGTH), generator=generator)
    place = torch.randint(LENGTH, (samples, 1), generator=generator)
    return Batch(keys, classes, keys.gather(1, place)[:, 0], classes.gather(1, place)[:, 0])


class Lookup(nn.Module):
    """One head of width ``d_k``; every entry of a query or key starts with variance 1."""

    def __init__(self, d_k: int, scale: float | None, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, std: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * std)

        self.score = Dot(scale)
        self.symbols = normal(SYMBOLS, WIDTH)
        self.to_query = normal(WIDTH, d_k, std=WIDTH**-0.5)
        self.to_key = normal(WIDTH, d_k, std=WIDTH**-0.5)
        self.values = normal(CLASSES, VALUE_WIDTH)
        self.to_class = normal(VALUE_WIDTH, CLASSES, std=VALUE_WIDTH**-0.5)

    def heads(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """query (B, 1, 1, d_k), key (B, 1, T, d_k), value (B, 1, T, Dv)."""
        query = self.symbols[batch.query] @ self.to_query
        key = self.symbols[batch.keys] @ self.to_key
        return query[:, None, None], key[:, None], self.values[batch.classes][:, None]

    def forward(self, batch: Batch) -> Tensor:
        return attention(*self.heads(batch), score=self.score)[:, 0, 0] @ self.to_class


@dataclass(frozen=True)
class Run:
    """One training: the model, the accuracy on fresh samples as (steps, accuracy), and the first step at 90 %."""

    model: Lookup
    curve: list[tuple[int, float]]
    reached: int | None


def train(d_k: int, scale: float | None, seed: int, *, optimizer: str, steps: int, every: int = 20) -> Run:
    """Train from ``seed`` and test every so many steps on samples that were not trained on."""
    model = Lookup(d_k, scale, seed)
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=1e-3),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.5),
    }
    optimize = made[optimizer]()
    generator = torch.Generator().manual_seed(1000 + seed)
    test = draw(512, torch.Generator().manual_seed(2000 + seed))
    curve: list[tuple[int, float]] = []
    for step in range(steps + 1):
        if step % every == 0:
            with torch.no_grad():
                right = (model(test).argmax(-1) == test.target).float().mean()
            curve.append((step, float(right)))
        batch = draw(64, generator)
        loss = F.cross_entropy(model(batch), batch.target)
        optimize.zero_grad()
        loss.backward()
        optimize.step()
    reached = next((step for step, accuracy in curve if accuracy >= 0.9), None)
    return Run(model, curve, reached)
