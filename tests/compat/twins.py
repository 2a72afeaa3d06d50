"""A module of torch's and one of ours with the same parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from regard import compat


def twins(**made: Any) -> tuple[nn.MultiheadAttention, compat.MultiheadAttention]:
    theirs = nn.MultiheadAttention(**made)
    return theirs, compat.MultiheadAttention.of(theirs)
