"""A pooled map that grows with a generation: its cells grow with it, so that it never has more than side x side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Pool:
    """Sums and largest weights of cells (B, n, rows, columns), of rows that arrive step by step."""

    def __init__(self, side: int, fields: dict[str, Any], Tq: int, Tk: int) -> None:
        self.side, self.filled, self.width = side, Tq, Tk
        self.tall, self.across = fields["cell"]
        mean: Tensor = fields["pooled"]
        heights = (Tq - torch.arange(mean.shape[2], device=mean.device) * self.tall).clamp(max=self.tall)
        self.sums, self.most = mean * heights[:, None], fields["pooled_max"]

    def reorder(self, index: Tensor) -> None:
        """Samples change places."""
        self.sums, self.most = self.sums[index], self.most[index]

    def add(self, weights: Tensor, shift: int, Tk: int) -> None:
        """Rows (B, n, rows, keys) of the next queries, over Tk keys that begin at `shift`."""
        rows, keys = weights.shape[2:]
        self.width = max(self.width, shift + Tk)
        self._grow(self.filled + rows)
        top, left = self.filled % self.tall, shift % self.across
        low, right = -(top + rows) % self.tall, -(left + keys) % self.across
        padded = torch.nn.functional.pad(weights, (left, right, top, low))
        cells = padded.unflatten(3, (-1, self.across)).unflatten(2, (-1, self.tall))
        at = slice(self.filled // self.tall, self.filled // self.tall + cells.shape[2])
        of = slice(shift // self.across, shift // self.across + cells.shape[4])
        self.sums[:, :, at, of] += cells.sum((3, 5))
        room = self.most[:, :, at, of]
        torch.maximum(room, cells.amax((3, 5)), out=room)
        self.filled += rows

    def _grow(self, rows: int) -> None:
        while -(-rows // self.tall) > self.side:
            self.sums, self.most, self.tall = (
                _paired(self.sums, 2, False),
                _paired(self.most, 2, True),
                self.tall * 2,
            )
        while -(-self.width // self.across) > self.side:
            self.sums, self.most, self.across = (
                _paired(self.sums, 3, False),
                _paired(self.most, 3, True),
                self.across * 2,
            )
        missing = (
            max(0, -(-self.width // self.across) - self.sums.shape[3]),
            max(0, -(-rows // self.tall) - self.sums.shape[2]),
        )
        self.sums, self.most = (
            torch.nn.functional.pad(part, (0, missing[0], 0, missing[1])) for part in (self.sums, self.most)
        )

    def fields(self) -> dict[str, Any]:
        """The map as a Site has it."""
        rows = torch.arange(self.sums.shape[2], device=self.sums.device)
        heights = (self.filled - rows * self.tall).clamp(max=self.tall)
        return {
            "pooled": self.sums / heights[:, None],
            "pooled_max": self.most,
            "cell": (self.tall, self.across),
        }


def _paired(cells: Tensor, dim: int, largest: bool) -> Tensor:
    odd = cells.shape[dim] % 2
    cells = torch.nn.functional.pad(cells, (0, odd) if dim == 3 else (0, 0, 0, odd))
    pairs = cells.unflatten(dim, (-1, 2))
    joined: Tensor = pairs.amax(dim + 1) if largest else pairs.sum(dim + 1)
    return joined
