"""The steps of a generation, one site a module: rows of all steps one below the other, keys of the last step.

A step is a call of a module that goes on where its last call ended. Beams are followed backwards from the last step:
`slots` says which sample of a step a row is from.

Letters: B samples, R rows so far, Tq and Tk lengths of one step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.look._record import Site
from regard.look._watch_pool import Pool
from regard.look._watch_statistics import chosen


@dataclass
class Step:
    """What was kept of one step: fields of a Site, and how far its first key is from the first key of all."""

    fields: dict[str, Any]
    samples: int
    Tq: int
    Tk: int
    shift: int
    before: Tensor | None  # where the samples of this step were, in the one before it


@dataclass
class Run:
    """The calls of one module that go on from each other."""

    site: Site
    ordinal: int = 0  # which call of the module this is, in each forward
    first: Tensor | None = None  # the first key of each sample
    steps: list[Step] = field(default_factory=list)
    rows: int = 0
    forward: int = 0
    pool: Pool | None = None

    def shift_of(self, site: Site, forward: int, continuing: bool, window: int | None) -> int | None:
        """How far the keys of a further call are from this run's first key; None if it does not go on from here."""
        first, (Tq, Tk) = self.site, site.lengths
        if (first.kind, first.sizes.B, first.sizes.H) != (site.kind, site.sizes.B, site.sizes.H):
            return None
        last = self.steps[-1]
        if site.kind == "cross":
            return 0 if continuing and forward > self.forward and Tk == last.Tk else None
        if not isinstance(site.offset, int) or not self.rows:
            return None
        if site.offset == self.rows and Tk >= self.rows + Tq:
            return 0
        shift = self.rows + Tq - Tk
        # A cache that lets old keys go: the keys are the last ones, as many as its window holds.
        held = window is not None and Tk in (window, window - 1 + Tq) and shift >= last.shift
        return shift if held and site.offset == Tk - Tq else None

    def add(
        self, site: Site, fields: dict[str, Any], shift: int, forward: int, before: Tensor | None
    ) -> None:
        """Take what was kept of a call."""
        Tq, Tk = site.lengths
        if self.steps:
            for name in ("key", "value"):  # those of the last step hold all that came before
                self.steps[-1].fields.pop(name, None)
        if "rows" in fields:
            fields["rows"] = tuple(row + self.rows for row in fields["rows"])
        self.steps.append(Step(fields, site.sizes.B, Tq, Tk, shift, before))
        self.rows, self.forward = self.rows + Tq, forward

    def reorder(self, index: Tensor) -> None:
        """Samples change places before the next step."""
        if self.pool is not None:
            self.pool.reorder(index)

    def finish(self, wanted_rows: tuple[int, ...]) -> None:
        """Write all steps into the site."""
        if len(self.steps) < 2:
            return
        slots = self._slots()
        write(self, self.site, slots, wanted_rows)
        moved = any(step.before is not None for step in self.steps)
        self.site.slots = slots if moved else None
        if self.pool is not None:
            for name, value in self.pool.fields().items():
                setattr(self.site, name, value)

    def _slots(self) -> Tensor:
        """(B, steps): the sample of each step that went on to be sample b of the last."""
        now = torch.arange(self.site.sizes.B)
        found = []
        for step in reversed(self.steps):
            found.append(now)
            now = now if step.before is None else step.before[now]
        return torch.stack(found[::-1], 1)


def write(run: Run, site: Site, slots: Tensor, wanted_rows: tuple[int, ...]) -> None:
    """All steps into one site; `slots` (N, steps) chooses the sample of each step, -1 for a sequence that had ended."""
    last = run.steps[-1]
    Tk = max(step.Tk + step.shift for step in run.steps)
    site.sizes = site.sizes._replace(B=slots.shape[0], Tq=run.rows, Tk=Tk)
    site.steps = tuple(step.Tq for step in run.steps)
    site.__dict__.pop("weights", None)
    pick = _Picker(run.steps, slots)
    site.statistics = {
        name: pick.received(name, Tk) if name == "received" else pick.rows_of(name)
        for name in run.steps[0].fields.get("statistics", {})
        if all(name in step.fields["statistics"] for step in run.steps)
    }
    if "top_weights" in last.fields:
        site.top_weights, site.top_keys = pick.top()
    if "whole" in last.fields:
        site.whole = torch.cat(pick.widened("whole", Tk), 2)
    if "row_weights" in last.fields:
        _write_rows(site, run, pick, Tk, wanted_rows)
    if "query" in last.fields:
        _write_tensors(site, run, pick, Tk)


def follow(runs: list[Run], beam_indices: Tensor) -> None:
    """Write the sequences that were returned into the sites of these runs."""
    if not runs:
        raise ValueError(
            "follow(beam_indices): no generation with beams is in this record (a loaded one has its beams)"
        )
    steps, B = max(len(run.steps) for run in runs), runs[0].steps[0].samples
    given = beam_indices.detach().cpu().long() if not beam_indices.is_floating_point() else beam_indices
    if given.dim() != 2 or given.is_floating_point() or given.shape[1] > steps or int(given.max()) >= B:
        raise ValueError(
            f"follow(beam_indices): expected whole numbers below {B} of shape (sequences, at most {steps} steps), "
            f"got a tensor of shape {tuple(given.shape)}"
        )
    slots = torch.nn.functional.pad(given, (0, steps - given.shape[1]), value=-1)
    for run in runs:
        write(run, run.site, slots[:, : len(run.steps)], run.site.rows)
        run.site.slots, run.site.pooled, run.site.pooled_max = slots, None, None


class _Picker:
    """The samples of each step that were chosen; those of ended sequences are empty."""

    def __init__(self, steps: list[Step], slots: Tensor) -> None:
        self.steps, self.slots = steps, slots

    def of(self, number: int, tensor: Tensor, empty: float = 0.0) -> Tensor:
        slot = self.slots[:, number]
        if len(slot) == len(tensor) and torch.equal(slot, torch.arange(len(tensor))):
            return tensor
        slot = slot.to(tensor.device)
        picked = tensor[slot.clamp(min=0)]
        ended = slot < 0
        return (
            picked.masked_fill(ended.reshape(-1, *(1,) * (picked.dim() - 1)), empty)
            if bool(ended.any())
            else picked
        )

    def rows_of(self, name: str) -> Tensor:
        empty = -torch.inf if name == "lse" else 0.0
        return torch.cat(
            [self.of(n, step.fields["statistics"][name], empty) for n, step in enumerate(self.steps)], -1
        )

    def received(self, name: str, Tk: int) -> Tensor:
        total: Tensor | None = None
        for number, step in enumerate(self.steps):
            part = self.of(number, step.fields["statistics"][name])
            total = part.new_zeros(*part.shape[:2], Tk) if total is None else total
            total[..., step.shift : step.shift + step.Tk] += part
        assert total is not None
        return total

    def top(self) -> tuple[Tensor, Tensor]:
        k = max(step.fields["top_weights"].shape[-1] for step in self.steps)
        weights, keys = [], []
        for number, step in enumerate(self.steps):
            one, at = step.fields["top_weights"], step.fields["top_keys"]
            at = torch.where(at >= 0, at + step.shift, at)
            missing = (0, k - one.shape[-1])
            weights.append(self.of(number, torch.nn.functional.pad(one, missing)))
            keys.append(self.of(number, torch.nn.functional.pad(at, missing, value=-1), -1))
        return torch.cat(weights, 2), torch.cat(keys, 2)

    def widened(self, name: str, Tk: int) -> list[Tensor]:
        """Rows over the keys of their step as rows over all keys."""
        return [
            torch.nn.functional.pad(
                self.of(number, step.fields[name]),
                (step.shift, Tk - step.shift - step.fields[name].shape[-1]),
            )
            for number, step in enumerate(self.steps)
        ]


def _write_rows(site: Site, run: Run, pick: _Picker, Tk: int, wanted: tuple[int, ...]) -> None:
    kept = [row for step in run.steps for row in step.fields["rows"]]
    rows = chosen(wanted, run.rows)
    weights = torch.cat(pick.widened("row_weights", Tk), 2)
    rows = [row for row in rows if row in kept]
    site.rows, site.row_weights = tuple(rows), weights[:, :, [kept.index(row) for row in rows]]


def _write_tensors(site: Site, run: Run, pick: _Picker, Tk: int) -> None:
    """Queries and outputs of all rows over the keys of the last step, with the mask that was in force at each."""
    last = run.steps[-1]
    whole = all(step.shift == 0 for step in run.steps) and bool((pick.slots >= 0).all())
    for name in ("query", "key", "value", "output", "mask", "bias"):
        setattr(site, name, None)
    if not whole or any("query" not in step.fields for step in run.steps):
        return
    site.query = torch.cat([pick.of(n, step.fields["query"]) for n, step in enumerate(run.steps)], 2)
    end = len(run.steps) - 1
    site.key, site.value = (pick.of(end, last.fields[name]) for name in ("key", "value"))
    if all(step.fields.get("output") is not None for step in run.steps):
        site.output = torch.cat([pick.of(n, step.fields["output"]) for n, step in enumerate(run.steps)], 2)
    site.mask, site.bias, site.causal = _mask(run, pick, Tk), _bias(run, pick, Tk), False
    corner = torch.ones(run.rows, Tk, dtype=torch.bool).tril().to(site.mask.device)
    if site.mask.shape[:2] == (1, 1) and torch.equal(site.mask[0, 0], corner):
        site.mask, site.causal = None, True


def _mask(run: Run, pick: _Picker, Tk: int) -> Tensor:
    parts = []
    for number, step in enumerate(run.steps):
        mask, device = step.fields.get("mask"), step.fields["query"].device
        if mask is None:
            mask = torch.ones(1, 1, step.Tq, step.Tk, dtype=torch.bool, device=device)
        elif mask.shape[0] > 1:
            mask = pick.of(number, mask)
        if step.fields.get("causal"):
            mask = mask & torch.ones(step.Tq, step.Tk, dtype=torch.bool, device=device).tril()
        mask = mask.expand(*mask.shape[:2], step.Tq, step.Tk)
        parts.append(torch.nn.functional.pad(mask, (0, Tk - step.Tk), value=False))
    return _below(parts)


def _bias(run: Run, pick: _Picker, Tk: int) -> Tensor | None:
    given = [step.fields.get("bias") for step in run.steps]
    some = next((bias for bias in given if bias is not None), None)
    if some is None:
        return None
    parts = []
    for number, (step, bias) in enumerate(zip(run.steps, given, strict=True)):
        bias = some.new_zeros(1, 1, 1, 1) if bias is None else bias
        bias = pick.of(number, bias) if bias.shape[0] > 1 else bias
        parts.append(
            torch.nn.functional.pad(bias.expand(*bias.shape[:2], step.Tq, step.Tk), (0, Tk - step.Tk))
        )
    return _below(parts)


def _below(parts: list[Tensor]) -> Tensor:
    B, H = (max(part.shape[dim] for part in parts) for dim in (0, 1))
    return torch.cat([part.expand(B, H, -1, -1) for part in parts], 2)
