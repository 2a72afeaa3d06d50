"""Which part of a corpus a pair belongs to: said by its key alone, the same on every machine and in every version."""

from __future__ import annotations

import hashlib
from typing import Literal

VALID, TEST = 3, 3  # of 100

Part = Literal["train", "valid", "test"]


def part(key: str) -> Part:
    """Train, valid or test by the sha256 of the key: 3 of 100 to judge by while training, 3 of 100 held out."""
    place = int(hashlib.sha256(key.encode("utf-8")).hexdigest()[:8], 16) % 100
    if place < VALID:
        return "valid"
    return "test" if place < VALID + TEST else "train"
