"""A mask that looks like the (B, 1, Tq, Tk) tensor of eager models, and holds a ``regard.masks`` mask instead.

Models hand masks on, move them, now and then slice or combine them, and those that compute attention by themselves add
them to their scores. What only hands on keeps the mask as it is; any other operation first writes it out as the
additive tensor it stands for, so that no model can get a wrong number from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from regard.masks import Mask

_aten = torch.ops.aten
_SAME = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten.view.default,
    _aten.expand.default,
    _aten.slice.Tensor,
    _aten.lift_fresh.default,
}


class MaskTensor(Tensor):
    """``mask`` (None: all pairs may meet) in the shape (B, 1, Tq, Tk), of a floating-point dtype, without a storage."""

    mask: Mask | None

    @staticmethod
    def __new__(
        cls, mask: Mask | None, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> MaskTensor:
        made: MaskTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.mask = mask
        return made

    def __init__(
        self, mask: Mask | None, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()

    def allowed(self) -> Tensor:
        """The pairs that may meet, bool (B, 1, Tq, Tk)."""
        B, _, Tq, Tk = self.shape
        if self.mask is None:
            return torch.ones(B, 1, Tq, Tk, dtype=torch.bool, device=self.device)
        return self.mask.materialize(Tq, Tk, batch=(B,), device=self.device)

    def written(self) -> Tensor:
        """The tensor that this stands for, (B, 1, Tq, Tk): 0 where pairs may meet, elsewhere the least number."""
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill(~self.allowed(), torch.finfo(self.dtype).min)

    def again(self) -> MaskTensor:
        """Another one with the same mask."""
        B, one, Tq, Tk = self.shape
        return MaskTensor(self.mask, (B, one, Tq, Tk), self.dtype, self.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MaskTensor({self.mask!r}, shape={tuple(self.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> MaskTensor:
        return self.again()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.written().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _SAME and isinstance(args[0], MaskTensor) and _changes_nothing(func, args, kwargs or {}):
            return args[0].again()
        args, kwargs = pytree.tree_map_only(MaskTensor, MaskTensor.written, (args, kwargs or {}))
        return func(*args, **kwargs)


def _changes_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the result has the shape that went in (a slice from the first to the last, a view as it was)."""
    mask = args[0]
    if func is _aten.slice.Tensor:
        dim, start, end, step = (*args[1:], *(None,) * 4)[:4]
        size = mask.shape[dim or 0]
        return start in (None, 0) and (end is None or end >= size) and step in (None, 1)
    if func in (_aten.view.default, _aten.expand.default):
        return (
            all(new in (old, -1) for new, old in zip(args[1], mask.shape, strict=False)) and len(args[1]) == 4
        )
    return True
