"""Room for what is kept of a long input.

What is kept of a layer is small beside what the model computes on the way, and lasts: left where it was computed,
between one layer's temporaries and the next's, it would keep the heap from fitting them into the same places again. The
C library maps an allocation of more than 32 MiB by itself, outside the heap: what is kept of many layers goes there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MAPPED = 40 << 20
# Less than this in all is not worth it, and a tensor of more is mapped by itself.
_LEAST, _MOST = 1 << 20, 16 << 20
_APART = 64


class Room:
    """Tensors side by side in few large allocations."""

    def __init__(self) -> None:
        self._block: Tensor | None = None
        self._used = 0

    def moved(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a Site with its tensors in here, if they are of some size; else as they are."""
        tensors = [*fields.get("statistics", {}).values(), *fields.values()]
        sizes = [_size(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
        if sum(size for size in sizes if size <= _MOST) < _LEAST:
            return fields
        found = {
            name: self._put(value) if isinstance(value, Tensor) else value for name, value in fields.items()
        }
        if "statistics" in fields:
            found["statistics"] = {name: self._put(tensor) for name, tensor in fields["statistics"].items()}
        return found

    def _put(self, tensor: Tensor) -> Tensor:
        size = _size(tensor)
        if size > _MOST or not size or tensor.device.type != "cpu":
            return tensor
        if self._block is None or self._used + size > _MAPPED:
            self._block, self._used = torch.empty(_MAPPED, dtype=torch.uint8), 0
        room = self._block[self._used : self._used + size].view(tensor.dtype).view(tensor.shape)
        self._used += -(-size // _APART) * _APART
        return room.copy_(tensor)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
