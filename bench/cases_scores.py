"""Additive scores, sparse normalisers and observation beside what can be written for them today."""

from __future__ import annotations

from dataclasses import replace

from regard.normalizers import Entmax15, Sparsemax

from . import compiled, torch_long
from . import torch_expressions as plain
from .case import Case, Limit, floor, shape
from .ours import attend, attend_additive, observe_all

SHORT = shape(1, 2, 512, 128)
ADDITIVE = Case(
    name="additive-512-128",
    question="Additive scores, where the broadcast expression still fits.",
    at=SHORT,
    ours=attend_additive,
    other=plain.additive,
    other_name="broadcast tanh(q + k)",
    extra=plain.additive_vector,
    truth=plain.additive,
    agree_at=shape(1, 2, 256, 128),
    max_rounds=5,
    limits=(floor(20, 50),),
    row="additive",
)
TRAINED = replace(ADDITIVE, backward=True, limits=(floor(10, 25),), row="additive-train")
COMPILED = replace(
    ADDITIVE,
    other=compiled.call_prepared,
    other_name="torch.compile of broadcast",
    prepare=compiled.compiled(plain.additive),
    agree_at=None,
    limits=(floor(6, 12),),
    row="additive-compiled",
)

SPARSE = Case(
    name="",
    question="A sparse normaliser, forward and backward.",
    at=shape(1, 4, 1024, 64),
    ours=attend(),
    other=plain.sdpa,
    other_name="PyPI entmax and matmuls",
    backward=True,
    truth=plain.sdpa,
    max_rounds=5,
    limits=(floor(20, 40),),
    row="sparse",
)
# The package sorts the k largest scores first where k is given: what its documentation recommends.
MAPPINGS = (
    ("sparsemax", Sparsemax(), plain.sparsemax, 100),
    ("entmax15", Entmax15(), plain.entmax15, 256),
)


def _sparse() -> list[Case]:
    cases = []
    for row, limit, partial in (("sparse", floor(20, 40), False), ("sparse-k", floor(6, 10), True)):
        for n, (name, normalize, exact, k) in ((n, mapping) for n in (1024, 2048) for mapping in MAPPINGS):
            package = torch_long.package_entmax(name, k if partial else None)
            cases.append(
                replace(
                    SPARSE,
                    name=f"{name}{f'-k{k}' if partial else ''}-{n}",
                    at=shape(1, 4 if n == 1024 else 2, n, 64),
                    ours=attend(normalize=normalize),
                    other=plain.with_normalizer(package),
                    other_name=f"PyPI entmax{f', k={k}' if partial else ''}",
                    truth=plain.with_normalizer(exact),
                    limits=(limit,),
                    row=row,
                )
            )
    return cases


OBSERVED = Case(
    name="observe-all-2048",
    question="Every statistic, the 8 largest weights of a row and a map of 256 x 256 cells.",
    at=shape(1, 4, 2048, 64),
    ours=observe_all,
    other=torch_long.observed_all,
    other_name="explicit weights",
    truth=torch_long.observed_all,
    max_rounds=5,
    limits=(floor(5, 8),),
    row="observe",
)
PLAIN = replace(
    OBSERVED,
    name="observe-plain-2048",
    question="What does observing add to the same call?",
    ours=observe_all,
    other=attend(),
    other_name="our own attention",
    agree=lambda inputs, ours, other: float((ours["output"] - other["output"]).abs().max()),
    truth=None,
    tolerance=0.0,
    limits=(Limit("slower", 1.3, 1.15, 0.05),),
    row="observe-plain",
)
LONG = shape(1, 1, 8192, 64)

CASES = (
    ADDITIVE,
    replace(ADDITIVE, name="additive-2048-128", at=shape(1, 1, 2048, 128), max_rounds=3),
    replace(TRAINED, name="additive-train-512-128"),
    replace(TRAINED, name="additive-train-1024-128", at=shape(1, 1, 1024, 128)),
    replace(COMPILED, name="additive-compiled"),
    replace(COMPILED, name="additive-compiled-train", backward=True),
    *_sparse(),
    OBSERVED,
    replace(OBSERVED, name="observe-all-8192", at=LONG, max_rounds=3),
    PLAIN,
    replace(PLAIN, name="observe-plain-8192", at=LONG, max_rounds=3),
)
