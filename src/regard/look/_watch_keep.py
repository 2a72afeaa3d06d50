"""What a watch is to keep of each place of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard import _checks
from regard.look._record_statistics import STATISTICS


@dataclass(frozen=True)
class Keep:
    """What `watch(model, keep=Keep(...))` keeps of each place of attention. Memory is linear in Tq and Tk but for
    weights.

    `statistics`: names among those of `Site.statistic`, all nine by default (36 bytes a row and head). `topk`: how
    many of the largest weights of each row, 8 bytes each. `pool`: the largest side of the pooled maps. `rows`:
    queries whose weights are kept whole, counted from 0, or from the end where negative. `weights`: the weights of
    all queries, Tq x Tk. `tensors`: copies of query, key, value, output, mask and bias (what `explain` needs).
    `heads` and `layers`: the heads, and the layers (`Site.layer`), of which pools, rows, weights and tensors are
    kept; None is all; statistics and top weights are of all. `groups`: name -> bool tensor (Tk,) or (B, Tk); how much
    weight each query gives to those keys becomes a statistic of that name, at each site with that many keys.
    Raises TypeError or ValueError for what cannot be kept.
    """

    statistics: Sequence[str] = STATISTICS
    topk: int = 0
    pool: int = 0
    rows: Sequence[int] = ()
    weights: bool = False
    tensors: bool = False
    heads: Sequence[int] | None = None
    layers: Sequence[int] | None = None
    groups: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _checks.statistics(self.statistics, STATISTICS)
        _checks.count("Keep(topk=)", self.topk)
        _checks.count("Keep(pool=)", self.pool)
        for name in ("weights", "tensors"):
            if not isinstance(getattr(self, name), bool):
                _checks.wrong_type(f"Keep({name}=)", "True or False", getattr(self, name))
        for name in ("rows", "heads", "layers"):
            _numbers(name, getattr(self, name))
        for name, group in self.groups.items():
            _group(name, group)

    def wants(self, layer: int) -> bool:
        """Whether pools, rows, weights and tensors of a layer are to be kept."""
        return self.layers is None or layer in self.layers


def _numbers(name: str, given: Any) -> None:
    if given is None and name != "rows":
        return
    way_out = f"Say Keep({name}=(0,))."
    if isinstance(given, (str, Tensor)) or not isinstance(given, Sequence):
        _checks.wrong_type(f"Keep({name}=)", "a sequence of whole numbers", given, way_out)
    for number in given:
        if not _checks.is_int(number):
            _checks.wrong_type(f"Keep({name}=)", "whole numbers", number, way_out)
        if number < 0 and name != "rows":
            _checks.wrong_value(f"Keep({name}=)", "numbers counted from 0", number)


def _group(name: str, group: Any) -> None:
    expected = "bool tensors (Tk,) or (B, Tk), True for the keys of the group"
    if not isinstance(group, Tensor) or group.dtype != torch.bool:
        _checks.wrong_type("Keep(groups=)", expected, group)
    if group.dim() not in (1, 2):
        _checks.wrong_value("Keep(groups=)", expected, group)
    if name in STATISTICS:
        _checks.wrong_value("Keep(groups=)", "a name that no statistic has", name)


EVERYTHING = Keep(weights=True, tensors=True)
