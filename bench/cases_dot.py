"""Plain attention beside SDPA: forward, backward, a grid of shapes, toys, and one query over a long cache."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

from regard.masks import Causal

from . import torch_expressions as plain
from .case import TOY, Case, Limit, Shape, floor, shape
from .ours import attend
from .torch_long import sdpa_folded

FP32, BF16 = torch.float32, torch.bfloat16
NAMES = {FP32: "fp32", BF16: "bf16"}
# Against float64: a share of SDPA's own error, and what is always allowed (outputs, then gradients).
ALLOWED = {FP32: (1.5, 5e-7), BF16: (1.05, 2.5e-3)}
ALLOWED_GRADIENTS = {FP32: (2.0, 2e-6), BF16: (2.0, 4e-3)}


def _plain(name: str, at: Shape, dtype: torch.dtype, causal: bool, **more: object) -> Case:
    """Dense or causal attention beside SDPA."""
    backward = bool(more.get("only_backward", False))
    times, least = (ALLOWED_GRADIENTS if backward else ALLOWED)[dtype]
    words = ("Causal" if causal else "Dense", "backward" if backward else "forward")
    made = Case(
        name=name,
        question=f"{words[0]} attention, {NAMES[dtype]}, {words[1]}.",
        at=at,
        ours=attend(Causal("upper_left")) if causal else attend(),
        other=plain.sdpa_causal if causal else plain.sdpa,
        other_name="SDPA, is_causal" if causal else "SDPA",
        backward=backward,
        dtype=dtype,
        truth=plain.sdpa_causal if causal else plain.sdpa,
        error_times=times,
        error_least=least,
        max_rounds=7,
    )
    return replace(made, **more)


# (mask, dtype, backward): {n: (floor, goal)}
PROMISES: dict[tuple[str, torch.dtype, bool], dict[int, tuple[float, float]]] = {
    ("dense", FP32, False): {128: (1.25, 1.5), 512: (1.15, 1.3), 2048: (1.1, 1.25)},
    ("causal", FP32, False): {128: (1.6, 2.0), 512: (2.0, 2.4), 2048: (1.35, 1.6)},
    ("dense", BF16, False): {512: (2.0, 2.6), 2048: (2.0, 2.6)},
    ("causal", BF16, False): {512: (3.5, 4.5), 2048: (2.5, 3.0)},
    ("dense", FP32, True): {512: (1.25, 1.4), 2048: (1.25, 1.4)},
    ("causal", FP32, True): {512: (2.0, 2.5), 2048: (1.45, 1.7)},
    ("dense", BF16, True): {512: (1.6, 2.2)},
    ("causal", BF16, True): {512: (3.0, 4.0)},
}


def _promised() -> list[Case]:
    cases = []
    for (mask, dtype, backward), by_length in PROMISES.items():
        row = f"{mask}-{NAMES[dtype]}" + ("-backward" if backward else "")
        for n, (least, goal) in by_length.items():
            cases.append(
                _plain(
                    f"{row}-{n}",
                    shape(1, 8, n, 64),
                    dtype,
                    mask == "causal",
                    only_backward=backward,
                    limits=(floor(least, goal),),
                    row=row,
                )
            )
    return cases


GRID_FROM = 1 << 23
POINTS = (
    *((1, 8, n) for n in (128, 256, 512, 1024, 2048)),
    *((1, 1, n) for n in (256, 512, 1024, 2048)),
    (4, 8, 128),
    (8, 12, 128),
    (2, 3, 333),
    (1, 4, 1000),
)
TOYS = ((1, 1, 6, 24), (1, 1, 16, 64), (1, 8, 16, 64), (1, 1, 64, 64), (1, 8, 32, 64), (4, 8, 32, 64))
TOYS += ((1, 8, 64, 64), (1, 8, 64, 128), (1, 1, 128, 64), (1, 2, 200, 64))


def _grid() -> list[Case]:
    cases = []
    for dtype, causal, (B, H, n), D in product((FP32, BF16), (False, True), POINTS, (32, 64, 128)):
        if B * H * n * n * D < GRID_FROM:
            continue
        name = f"grid-{NAMES[dtype]}-{'causal' if causal else 'dense'}-{B}x{H}x{n}x{D}"
        limits = (floor(0.95, 1.0),)
        cases.append(_plain(name, shape(B, H, n, D), dtype, causal, limits=limits, row="grid", max_rounds=5))
    return cases


def _toys() -> list[Case]:
    cases = []
    for dtype, causal, (B, H, n, D) in product((FP32, BF16), (False, True), TOYS):
        name = f"small-{NAMES[dtype]}-{'causal' if causal else 'dense'}-{B}x{H}x{n}x{D}"
        limits = (Limit("extra", 3.0, 1.0, 0.05),)
        cases.append(_plain(name, shape(B, H, n, D), dtype, causal, limits=limits, row="small", max_rounds=9))
    return cases


def _decode() -> list[Case]:
    """One query, 32 query heads over 8 key heads; the folded form is what a careful user writes."""
    others = (
        ("", plain.sdpa_grouped, "SDPA, enable_gqa", {FP32: floor(3, 4), BF16: floor(20, 35)}),
        ("-folded", sdpa_folded, "SDPA, folded rows", {FP32: floor(1.6, 2.3), BF16: floor(2.5, 4)}),
    )
    cases = []
    for dtype, (suffix, other, other_name, limits), D, Tk in product(
        (FP32, BF16), others, (64, 128), (1024, 4096, 32768)
    ):
        row = f"decode-{NAMES[dtype]}{suffix}"
        at = shape(1, 32, 1, D, Tk=Tk, Hkv=8)
        made = _plain(
            f"{row}-{D}-{Tk}", at, dtype, False, other=other, other_name=other_name, truth=sdpa_folded
        )
        question = f"One query over {Tk} keys, 32 heads over 8, {NAMES[dtype]}."
        cases.append(replace(made, question=question, limits=(limits[dtype],), row=row))
    return cases


assert TOY in [shape(*toy) for toy in TOYS]
CASES = (*_promised(), *_grid(), *_toys(), *_decode())
