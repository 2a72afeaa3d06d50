"""A mask that looks like the (B, 1, Tq, Tk) tensor of eager models, and holds a ``regard.masks`` mask instead.

Models hand masks on, move them, now and then slice, combine or change them, and those that compute attention by
themselves add them to their scores. What only hands on keeps the mask as it is; any other operation is done on the
additive tensor that it stands for, written out when first asked for, so that no model gets a wrong number from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from regard.masks import Mask

_aten = torch.ops.aten
_VIEWS = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.view.default,
    _aten.expand.default,
    _aten.slice.Tensor,
}


class MaskTensor(Tensor):
    """``mask`` (None: all pairs may meet) in the shape (B, 1, Tq, Tk), of a floating-point dtype, without a storage."""

    mask: Mask | None
    out: dict[str, Tensor]  # The tensor once it was written out, shared by all views.

    @staticmethod
    def __new__(
        cls, mask: Mask | None, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> MaskTensor:
        made: MaskTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.mask = mask
        made.out = {}
        return made

    def __init__(
        self, mask: Mask | None, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()

    def allowed(self) -> Tensor:
        """The pairs that may meet by ``mask``, bool (B, 1, Tq, Tk)."""
        B, _, Tq, Tk = self.shape
        if self.mask is None:
            return torch.ones(B, 1, Tq, Tk, dtype=torch.bool, device=self.device)
        return self.mask.materialize(Tq, Tk, batch=(B,), device=self.device)

    def written(self) -> Tensor:
        """The tensor that this stands for, (B, 1, Tq, Tk): 0 where pairs may meet, elsewhere the least number."""
        if "tensor" not in self.out:
            self.out["tensor"] = self._write()
        return self.out["tensor"]

    def changed(self) -> bool:
        """Whether a model wrote something else into it, so that ``mask`` no longer says what it stands for."""
        return "tensor" in self.out and not torch.equal(self.out["tensor"], self._write())

    def _write(self) -> Tensor:
        with torch.inference_mode(self.is_inference()):
            zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            return zeros.masked_fill(~self.allowed(), torch.finfo(self.dtype).min)

    def _again(self) -> MaskTensor:
        B, one, Tq, Tk = self.shape
        with torch.inference_mode(self.is_inference()):
            return MaskTensor(self.mask, (B, one, Tq, Tk), self.dtype, self.device)

    def _view(self) -> MaskTensor:
        made = self._again()
        made.out = self.out
        return made

    def _copy(self) -> MaskTensor:
        made = self._again()
        made.out = {name: tensor.clone() for name, tensor in self.out.items()}
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MaskTensor({self.mask!r}, shape={tuple(self.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> MaskTensor:
        return self._copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.written().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, MaskTensor):
            if func in _VIEWS and _keeps_all(func, args):
                return first._view()
            if func is _aten.clone.default:
                return first._copy()
        args_written, kwargs = pytree.tree_map_only(MaskTensor, MaskTensor.written, (args, kwargs))
        result = func(*args_written, **kwargs)
        return first if isinstance(first, MaskTensor) and result is args_written[0] else result


def _keeps_all(func: Any, args: Any) -> bool:
    """Whether a view has the shape that went in."""
    shape = args[0].shape
    if func is _aten.slice.Tensor:
        dim, start, end, step = (*args[1:], *(None,) * 4)[:4]
        return start in (None, 0) and (end is None or end >= shape[dim or 0]) and step in (None, 1)
    if func in (_aten.view.default, _aten.expand.default):
        return len(args[1]) == 4 and all(new in (old, -1) for new, old in zip(args[1], shape, strict=True))
    return True
