"""The training loop: one step, the schedule, judging on the validation set, checkpoints, and when to stop."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn

from recipes.translation import checkpoint
from recipes.translation.batches import Batch, Encoded, Plan
from recipes.translation.model import PAD, among, positive, share
from recipes.translation.progress import Bar, clock
from regard.look._files import write_all

COLUMNS = ("step", "epoch", "training_loss", "validation_loss", "rate", "target_tokens", "seconds")


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. What a resumed training must share with its beginning; the budget is apart.

    tokens: most tokens of a batch, padding counted. rate: the highest learning rate, reached after ``warmup`` steps;
    then it falls as 1/sqrt(step) ("root"; Vaswani et al., 2017), or on a line to 0 at ``steps`` ("linear").
    smoothing: share of the labels spread over all words (Szegedy et al., 2016). clip: largest norm of the gradient.
    every: steps between two looks at the validation set, each with a checkpoint.
    """

    seed: int = 1
    tokens: int = 4000
    rate: float = 1e-3
    warmup: int = 400
    schedule: str = "root"
    steps: int = 0
    smoothing: float = 0.1
    clip: float = 1.0
    every: int = 200
    precision: str = "no"

    def __post_init__(self) -> None:
        for name in ("tokens", "warmup", "every"):
            positive(name, getattr(self, name))
        share("smoothing", self.smoothing)
        among("schedule", self.schedule, ("root", "linear"))
        among("precision", self.precision, ("no", "bf16"))
        for name in ("rate", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: expected a number above 0, got {getattr(self, name)!r}")
        if self.steps < 0 or (self.schedule == "linear" and not self.steps):
            raise ValueError(f"steps: a linear schedule ends somewhere; say --steps (got {self.steps})")

    def rate_at(self, step: int) -> float:
        """The learning rate of step 1, 2, ..."""
        if step < self.warmup:
            return self.rate * step / self.warmup
        if self.schedule == "linear":
            return self.rate * max(0.0, (self.steps - step + 1) / max(1, self.steps - self.warmup + 1))
        return self.rate * float((self.warmup / step) ** 0.5)


@dataclass(frozen=True)
class Budget:
    """When to stop, whichever comes first; None: never for this reason. ``patience``: looks without a better one."""

    epochs: int | None = None
    minutes: float | None = None
    patience: int | None = None


@dataclass
class Place:
    """Where a training is: everything that is not in the model and the optimiser."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float = float("inf")
    best_step: int = 0
    worse: int = 0
    target_tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    loss_tokens: int = 0
    finished: bool = False
    rows: list[list[float]] = field(default_factory=list)


class Training:
    """A model on its way. ``run`` trains until the budget ends; every checkpoint on the way can be resumed."""

    def __init__(
        self,
        model: nn.Module,
        pairs: Sequence[Encoded],
        valid: Sequence[Encoded],
        folder: Path,
        recipe: Recipe,
        config: dict[str, Any],
        vocabulary: Any,
        accelerator: Accelerator,
    ) -> None:
        if not pairs or not valid:
            raise ValueError(
                f"data: {len(pairs)} pairs to train on and {len(valid)} to judge by; expected some"
            )
        self.folder, self.recipe, self.config, self.vocabulary = folder, recipe, config, vocabulary
        self.plan = Plan(pairs, recipe.tokens, recipe.seed)
        self.valid = Plan(valid, recipe.tokens, 0)
        self.accelerator = accelerator
        self.place = Place()
        self.bare = model
        optimizer = torch.optim.Adam(model.parameters(), lr=recipe.rate, betas=(0.9, 0.98), eps=1e-9)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)

    def resume(self, place: Path) -> None:
        """Go on from a ``last-`` checkpoint of the same training."""
        checkpoint.load_weights(self.bare, place)
        state = checkpoint.load_state(place)
        self.optimizer.load_state_dict(state.pop("optimizer"))
        self.place = Place(**state)

    def run(self, budget: Budget) -> Place:
        """Train. The last checkpoint is of the moment it ended."""
        at, began = self.place, time.monotonic() - self.place.seconds
        at.finished = self._spent(budget)
        with Bar(self.accelerator.is_main_process) as bar:
            if at.finished:
                bar.say(f"step {at.step:,}: the budget was spent already; a larger one goes on from here")
                return at
            for places in self._batches(budget):
                self._step(places)
                at.seconds = time.monotonic() - began
                self._show(bar, budget)
                over = self._over(budget)
                if over or at.step % self.recipe.every == 0:
                    self._look(bar)
                    at.seconds = time.monotonic() - began
                    tired = budget.patience is not None and at.worse >= budget.patience
                    at.finished = over or tired
                    self._save()
                    if at.finished:
                        break
            else:
                if at.step and (not at.rows or at.rows[-1][0] != at.step):
                    self._look(bar)
                at.finished = True
                self._save()
        return at

    # ------------------------------------------------------------------ steps

    def _batches(self, budget: Budget) -> Iterator[list[int]]:
        at = self.place
        while budget.epochs is None or at.epoch < budget.epochs:
            batches = self.plan.epoch(at.epoch)
            self._in_epoch = len(batches)
            while at.batch < len(batches):
                at.batch += 1
                yield batches[at.batch - 1]
            at.epoch, at.batch = at.epoch + 1, 0

    def _step(self, places: list[int]) -> None:
        at, recipe, accelerator = self.place, self.recipe, self.accelerator
        at.step += 1
        batch, whole, counts = self.plan.batch(places, accelerator.process_index, accelerator.num_processes)
        # Each step draws its own dropout from seed, step and process: a resumed training draws the same.
        torch.manual_seed(recipe.seed * 1_000_003 + at.step * 1009 + accelerator.process_index)
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate_at(at.step)
        self.model.train()
        batch = batch.to(accelerator.device)
        with accelerator.autocast():
            logits = self.model(batch.source, batch.lengths, batch.target_in)
        # Gradients are averaged over processes; each one's loss is its share of the mean over all tokens.
        loss = _loss(logits, batch, recipe.smoothing) * (float(counts) / whole)
        accelerator.backward(loss * accelerator.num_processes)
        accelerator.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = float(accelerator.reduce(loss.detach(), "sum"))
        if mean != mean or mean == float("inf"):
            raise ValueError(
                f"the loss of step {at.step} is {mean}; the last checkpoint is whole: train with a lower --rate"
            )
        at.loss += mean * whole
        at.loss_tokens += whole
        at.target_tokens += whole

    def _spent(self, budget: Budget) -> bool:
        """Whether a resumed training has nothing left to do."""
        at = self.place
        ended = budget.epochs is not None and at.epoch >= budget.epochs
        tired = budget.patience is not None and at.worse >= budget.patience
        return at.step > 0 and (ended or tired or self._over(budget))

    def _over(self, budget: Budget) -> bool:
        if self.recipe.steps and self.place.step >= self.recipe.steps:
            return True
        if budget.minutes is None:
            return False
        over = torch.tensor(float(self.place.seconds >= 60 * budget.minutes), device=self.accelerator.device)
        return bool(broadcast(over))

    # ------------------------------------------------------------------ looks

    def _look(self, bar: Bar) -> None:
        """Judge on the validation set, note a row of the losses, and keep the model where it is the best so far."""
        at = self.place
        valid = self.validation_loss()
        row = [at.step, at.epoch, at.loss / max(1, at.loss_tokens), valid]
        at.rows.append([*row, self.recipe.rate_at(at.step), at.target_tokens, round(at.seconds, 2)])
        at.loss, at.loss_tokens = 0.0, 0
        better = valid < at.best
        at.worse = 0 if better else at.worse + 1
        speed = at.target_tokens / max(at.seconds, 1e-9)
        bar.say(
            f"step {at.step:,}  epoch {at.epoch}  training {row[2]:.3f}  validation {valid:.3f}"
            f"{' (best)' if better else ''}  {speed:,.0f} tokens/s  {clock(at.seconds)}"
        )
        if better:
            at.best, at.best_step = valid, at.step
            if self.accelerator.is_main_process:
                self._checkpoint("best")

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean negative log-likelihood a token, in nats, without dropout and smoothing."""
        accelerator = self.accelerator
        self.bare.eval()
        total = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        for places in self.valid.epoch(0):
            batch, _, counts = self.valid.batch(places, accelerator.process_index, accelerator.num_processes)
            if counts:
                batch = batch.to(accelerator.device)
                with accelerator.autocast():
                    logits = self.bare(batch.source, batch.lengths, batch.target_in)
                total += torch.tensor([float(_loss(logits, batch, 0.0)), batch.tokens], dtype=torch.float64)
        summed = accelerator.reduce(total, "sum")
        return float(summed[0] / summed[1])

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            state = {"optimizer": checkpoint.cpu(self.optimizer.state_dict()), **vars(self.place)}
            self._checkpoint("last", state)
            write_losses(self.folder, self.place.rows, self.config)
        self.accelerator.wait_for_everyone()

    def _checkpoint(self, kind: str, state: dict[str, Any] | None = None) -> None:
        config = {**self.config, "step": self.place.step, "seconds": round(self.place.seconds, 1)}
        checkpoint.save(self.folder, kind, self.place.step, self.bare, config, self.vocabulary, state)

    def _show(self, bar: Bar, budget: Budget) -> None:
        at = self.place
        shares = [0.0]
        if budget.minutes is not None:
            shares.append(at.seconds / (60 * budget.minutes))
        if budget.epochs is not None:
            shares.append((at.epoch + at.batch / self._in_epoch) / budget.epochs)
        if self.recipe.steps:
            shares.append(at.step / self.recipe.steps)
        done = min(1.0, max(shares))
        left = at.seconds * (1 - done) / done if done else None
        loss = at.loss / max(1, at.loss_tokens)
        what = f"epoch {at.epoch} step {at.step:,} loss {loss:.3f}"
        bar.update(what, done, at.target_tokens / max(at.seconds, 1e-9), left)


def _loss(logits: Tensor, batch: Batch, smoothing: float) -> Tensor:
    """The sum over the tokens to predict."""
    loss: Tensor = nn.functional.cross_entropy(
        logits.float().flatten(0, 1),
        batch.target_out.flatten(),
        ignore_index=PAD,
        label_smoothing=smoothing,
        reduction="sum",
    )
    return loss


def write_losses(folder: Path, rows: Sequence[Sequence[float]], config: dict[str, Any]) -> None:
    """``losses.csv`` and, from two rows on, ``losses.svg``: both or none."""
    out = io.StringIO(newline="")
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    for row in rows:
        table.writerow([*map(int, row[:2]), *(f"{value:.6g}" for value in row[2:5]), int(row[5]), row[6]])
    files = {folder / "losses.csv": out.getvalue().encode()}
    if len(rows) > 1:
        files[folder / "losses.svg"] = _plot(rows, config).encode()
    write_all(files)
    for left in folder.glob(".losses.*.tmp"):  # by runs that were killed while they wrote
        left.unlink()


def _plot(rows: Sequence[Sequence[float]], config: dict[str, Any]) -> str:
    from studies.chart import Line, Panel, svg

    steps = [row[0] for row in rows]
    lines = [
        Line("training", steps, [row[2] for row in rows]),
        Line("validation", steps, [row[3] for row in rows]),
    ]
    values = [value for line in lines for value in line.ys]
    low, high = min(values), max(values)
    title = "Loss a token, nats (training: smoothed)"
    name = f"losses of {config.get('data', 'a training')}"
    return svg([Panel(title, "step", lines, low, high if high > low else low + 1)], 1, name)
