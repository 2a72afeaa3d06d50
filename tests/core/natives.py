"""What the tests of the compiled kernels share: errors, contract 11, drawn shapes, layouts and mechanisms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from regard import attention
from regard._plan import use_kernel
from regard.biases import Alibi, Relative
from regard.masks import Causal, Dense, Documents, Padding, Prefix, Window
from regard.normalizers import Relu, Sigmoid, Softmax
from regard.scores import Additive, Dot
from tests.core import cases


def error(found: Tensor, exact: Tensor) -> float:
    """Relative Frobenius error; absolute where the exact answer is 0."""
    norm = exact.double().norm()
    return float((found.double() - exact.double()).norm() / (norm if norm > 0 else 1.0))


def both(
    kernel: str, make: Callable[[torch.dtype], tuple[list[Tensor], dict[str, Any]]]
) -> list[list[Tensor]]:
    """[output, *gradients] of a call on `kernel` in float32, then of the definition in float32 and in float64."""
    found = []
    for name, dtype in ((kernel, torch.float32), ("reference", torch.float32), ("reference", torch.float64)):
        leaves, keywords = make(dtype)
        torch.manual_seed(3)
        with use_kernel(name):
            output = attention(*leaves[:3], **keywords)
        upstream = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).sin().view(output.shape)
        grads = torch.autograd.grad(output, leaves, upstream.to(dtype), allow_unused=True)
        kept = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
        found.append([output.detach(), *kept])
    return found


def hold(found: list[list[Tensor]], largest: float = 1.0) -> None:
    """Contract 11, or the rounding of what was summed up where nearly all of it cancels.

    largest: of the numbers that a gradient is summed from.
    """
    for ours, plain, exact in zip(*found, strict=True):
        apart = (ours.double() - exact.double()).norm()
        allowed = max(
            2 * float((plain.double() - exact.double()).norm()), 2e-6 * float(exact.double().norm())
        )
        rounding = 3e-6 * largest * exact.numel() ** 0.5
        assert float(apart) <= max(allowed, rounding)


EDGES = sorted({edge + near for edge in (1, 8, 16, 32, 64, 128, 192) for near in (-1, 0, 1)} - {0})
WIDTHS = [1, 3, 8, 15, 16, 17, 31, 32, 48, 64, 65, 128, 255, 256]


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    groups, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    return {
        "B": draw(st.integers(1, 2)),
        "H": heads * groups,
        "Hkv": heads,
        "Tq": draw(st.sampled_from(EDGES)),
        "Tk": draw(st.sampled_from([*EDGES, 383, 385])),
        "D": draw(st.sampled_from(WIDTHS)),
        "Dv": draw(st.sampled_from(WIDTHS)),
        "seed": draw(st.integers(0, 1000)),
        "layout": draw(st.sampled_from(["dense", "transposed", "sliced", "expanded"])),
    }


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    if layout == "transposed":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]
    if layout == "longer":
        return torch.cat([tensor, tensor.new_full(tensor.shape, torch.nan)], 2)[:, :, : tensor.shape[2]]
    if layout == "expanded":
        return tensor[:, :1].expand_as(tensor)
    return tensor


def made(shape: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    new = cases.leaf(shape["seed"], torch.float64)
    B, Tq, Tk = shape["B"], shape["Tq"], shape["Tk"]
    sizes = [
        (B, shape["H"], Tq, shape["D"]),
        (B, shape["Hkv"], Tk, shape["D"]),
        (B, shape["Hkv"], Tk, shape["Dv"]),
    ]
    return [laid_out(new(*size).detach(), shape["layout"]).to(dtype).requires_grad_() for size in sizes]


def mechanism(draw: Callable[[Any], Any], shape: dict[str, Any]) -> dict[str, Any]:
    H, Tq, Tk = shape["H"], shape["Tq"], shape["Tk"]
    offset = draw(st.integers(-Tq, Tk))
    new = cases.leaf(shape["seed"] + 1)
    masks = {
        "none": None,
        "causal": Causal(offset=offset),
        "window": Window(draw(st.integers(0, 70)), draw(st.integers(0, 9)), offset=offset),
        "window or prefix": Window(5, 0, offset=offset) | Prefix(draw(st.integers(0, Tk))),
        "padding": Padding(torch.arange(shape["B"]) * 7 % (Tk + 1)),
        "bool": new(Tq, Tk).detach() > draw(st.sampled_from([-1.0, 0.0, 3.0])),
        "not bool, a head": ~Dense(new(1, H, Tq, Tk).detach() > 0),
        "documents": Documents(torch.arange(Tq) // 40, torch.arange(Tk) // 40) & Causal(offset=offset),
    }
    biases = {
        "none": None,
        "alibi": Alibi(offset=offset),
        "relative": Relative(new(H, 9).detach(), offset=offset),
        "pairs": new(1, H, Tq, Tk).detach(),
        "a key": new(1, 1, 1, Tk).detach(),
        "a row": new(1, H, Tq, 1).detach(),
    }
    mask, bias = draw(st.sampled_from(sorted(masks))), draw(st.sampled_from(sorted(biases)))
    normalize = draw(st.sampled_from([Softmax(), Softmax(0.5), Sigmoid(-1.0), Relu()]))
    score = draw(st.sampled_from(["dot", "capped", "additive"]))
    return {
        "mask": masks[mask],
        "bias": biases[bias],
        "normalize": normalize,
        "score": {
            "dot": Dot(),
            "capped": Dot(softcap=3.0),
            "additive": Additive(torch.ones(shape["D"]) / shape["D"]),
        }[score],
        "dropout_p": draw(st.sampled_from([0.0, 0.25])),
    }


def as_dtype(keywords: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    bias = keywords["bias"]
    return keywords | {"bias": bias.to(dtype) if isinstance(bias, Tensor) else bias}
