"""Products of two tensors, as matmul, bmm, baddbmm or einsum write them: whose rows meet whose."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Products(NamedTuple):
    """One product: its operands, what was added to it (`baddbmm`), and for `einsum` the letters of each tensor."""

    left: Tensor
    right: Tensor
    result: Tensor
    alpha: float = 1.0
    added: Tensor | None = None
    letters: tuple[str, str, str] | None = None

    @staticmethod
    def of(name: str, args: tuple[Any, ...], kwargs: Any, result: Tensor) -> Products | None:
        """The product that a function computed; None for one of another form."""
        if name == "einsum":
            return _of_einsum(args, result)
        if name == "baddbmm":
            left, right = (kwargs.get(f"batch{n}", args[n] if len(args) > n else None) for n in (1, 2))
            if left is None or right is None:
                return None
            beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
            added = None if beta == 0 else args[0] * beta
            return Products(left, right, result, float(alpha), added)
        if len(args) < 2 or not all(isinstance(arg, Tensor) and arg.dim() >= 2 for arg in args[:2]):
            return None
        return Products(args[0], args[1], result)

    def scored(self) -> tuple[Tensor, Tensor] | None:
        """Query (..., Tq, D) and key (..., Tk, D), if this is query key^T."""
        if self.letters is None:
            return self.left, self.right.mT
        left, right, out = self.letters
        if len(out) < 2:
            return None
        lead, q, k = out[:-2], out[-2], out[-1]
        summed = [letter for letter in left if letter not in out]
        if len(summed) != 1 or {*left} != {*lead, q, summed[0]} or {*right} != {*lead, k, summed[0]}:
            return None
        return _in_order(self.left, left, lead + q + summed[0]), _in_order(
            self.right, right, lead + k + summed[0]
        )

    def mixed(self) -> tuple[Tensor, Tensor] | None:
        """Value (..., Tk, Dv) and output (..., Tq, Dv), if this is weights value."""
        if self.letters is None:
            return self.right, self.result
        left, right, out = self.letters
        if len(left) < 2:
            return None
        lead, q, k = left[:-2], left[-2], left[-1]
        wide = [letter for letter in right if letter not in left]
        if len(wide) != 1 or k in out or {*right} != {*lead, k, wide[0]} or {*out} != {*lead, q, wide[0]}:
            return None
        return _in_order(self.right, right, lead + k + wide[0]), _in_order(
            self.result, out, lead + q + wide[0]
        )


def _of_einsum(args: tuple[Any, ...], result: Tensor) -> Products | None:
    equation = args[0]
    tensors = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(tensors) != 2:
        return None
    inside, out = equation.replace(" ", "").split("->")
    left, right = inside.split(",")
    if any(len(set(letters)) != len(letters) for letters in (left, right, out)):
        return None
    return Products(tensors[0], tensors[1], result, letters=(left, right, out))


def _in_order(tensor: Tensor, letters: str, wanted: str) -> Tensor:
    return tensor.permute([letters.index(letter) for letter in wanted])
