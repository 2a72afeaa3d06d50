"""The registry: every case of the bench, as data. The limits are those that the project has set itself."""

from __future__ import annotations

from dataclasses import replace

from regard.biases import Alibi
from regard.masks import Causal, Window
from regard.normalizers import Entmax15, Sparsemax
from regard.scores import Dot

from . import torch_expressions as plain
from .case import AnyCase, Case, ImportCase, Limit, shape
from .cases_decode import CASES as DECODE
from .cases_dot import CASES as DOT
from .cases_long import CASES as LONG
from .cases_long import DROPOUT, RELATIVE
from .cases_recipes import CASES as RECIPES
from .cases_scores import CASES as SCORES
from .ours import attend, attend_additive, observe

# Against float64 the broadcast expression's own gradient of v is off by 1e-5 (ours by 6e-7): one sum over all pairs.
BROADCAST_SUMS = 5e-5
CASES: tuple[AnyCase, ...] = (
    Case(
        name="dot",
        question="Is plain attention near torch's fused kernel?",
        at=shape(1, 8, 2048, 64),
        ours=attend(),
        other=plain.sdpa,
        other_name="SDPA",
        memory=True,
        limits=(Limit("slower", 1.8),),
    ),
    Case(
        name="window",
        question="Does a window skip what it empties? Window(255, 0) at 8192.",
        at=shape(1, 8, 8192, 64),
        ours=attend(Window(plain.WINDOW_LEFT, 0)),
        other=plain.sdpa_masked,
        other_name="SDPA, bool mask",
        prepare=plain.window_mask,
        memory=True,
        max_rounds=5,
        limits=(Limit("faster", 8.0),),
    ),
    Case(
        name="dot-train",
        question="Forward and backward at 4096: is memory linear?",
        at=shape(1, 8, 4096, 64),
        ours=attend(),
        other=plain.sdpa,
        other_name="SDPA",
        backward=True,
        memory=True,
        max_rounds=3,
        limits=(Limit("memory", 150),),
    ),
    Case(
        name="dot-train-2048",
        question="The same at 2048, with a proportionate limit.",
        at=shape(1, 8, 2048, 64),
        ours=attend(),
        other=plain.sdpa,
        other_name="SDPA",
        backward=True,
        memory=True,
        max_rounds=7,
        limits=(Limit("memory", 75),),
    ),
    Case(
        name="additive-train",
        question="Additive scores at 4096, forward and backward: is memory linear?",
        at=shape(1, 8, 4096, 64),
        ours=attend_additive,
        other=plain.additive,
        other_name="broadcast tanh(q + k)",
        backward=True,
        extra=plain.additive_vector,
        tolerance=BROADCAST_SUMS,
        agree_at=shape(1, 2, 256, 64),
        timed=False,
        memory=True,
        other_memory=plain.additive_bytes,
        limits=(Limit("memory", 300),),
    ),
    Case(
        name="additive-train-2048",
        question="The same at 2048, with a proportionate limit.",
        at=shape(1, 8, 2048, 64),
        ours=attend_additive,
        other=plain.additive,
        other_name="broadcast tanh(q + k)",
        backward=True,
        extra=plain.additive_vector,
        tolerance=BROADCAST_SUMS,
        agree_at=shape(1, 2, 256, 64),
        timed=False,
        memory=True,
        other_memory=plain.additive_bytes,
        limits=(Limit("memory", 150),),
    ),
    Case(
        name="additive-512",
        question="Additive scores where the broadcast still fits, forward and backward.",
        at=shape(1, 4, 512, 64),
        ours=attend_additive,
        other=plain.additive,
        other_name="broadcast tanh(q + k)",
        backward=True,
        extra=plain.additive_vector,
        tolerance=BROADCAST_SUMS,
        memory=True,
        max_rounds=5,
    ),
    Case(
        name="observe",
        question="Statistics of every row and key at 8192 without the weights in memory?",
        at=shape(1, 1, 8192, 64),
        ours=observe,
        other=plain.observed,
        other_name="explicit weights",
        memory=True,
        max_rounds=5,
        limits=(Limit("memory", 100),),
    ),
    Case(
        name="call",
        question="What does one call cost on a toy, (1, 1, 6, 24)?",
        at=shape(1, 1, 6, 24),
        ours=attend(),
        other=plain.sdpa,
        other_name="SDPA",
        limits=(Limit("slower", 10.0),),
    ),
    ImportCase(
        name="import",
        question="What does `import regard` add to `import torch`?",
        module="regard",
        base="torch",
        limits=(Limit("seconds", 0.3),),
    ),
    Case(
        name="causal",
        question="Causal, forward.",
        at=shape(1, 8, 2048, 64),
        ours=attend(Causal("upper_left")),
        other=plain.sdpa_causal,
        other_name="SDPA, is_causal",
    ),
    Case(
        name="causal-train",
        question="Causal, forward and backward.",
        at=shape(1, 8, 2048, 64),
        ours=attend(Causal("upper_left")),
        other=plain.sdpa_causal,
        other_name="SDPA, is_causal",
        backward=True,
        max_rounds=7,
    ),
    Case(
        name="alibi",
        question="Causal ALiBi against the bias as a tensor.",
        at=shape(1, 8, 2048, 64),
        ours=attend(Causal("upper_left"), bias=Alibi()),
        other=plain.sdpa_masked,
        other_name="SDPA, bias tensor",
        prepare=plain.alibi_bias,
        memory=True,
    ),
    Case(
        name="softcap",
        question="Soft-capped causal scores, which SDPA has not.",
        at=shape(1, 8, 2048, 64),
        ours=attend(Causal("upper_left"), score=Dot(softcap=plain.SOFTCAP)),
        other=plain.softcap_causal,
        other_name="explicit torch",
        memory=True,
        max_rounds=7,
    ),
    replace(DROPOUT, name="dropout", at=shape(1, 8, 2048, 64), memory=True, max_rounds=7, limits=(), row=""),
    replace(RELATIVE, name="relative-train", memory=True, limits=(), row=""),
    Case(
        name="grouped",
        question="32 query heads over 8 key heads.",
        at=shape(1, 32, 1024, 64, Hkv=8),
        ours=attend(),
        other=plain.sdpa_grouped,
        other_name="SDPA, enable_gqa",
        memory=True,
        max_rounds=7,
    ),
    Case(
        name="grouped-decode",
        question="One query position over 8192 keys, 32 heads over 8.",
        at=shape(1, 32, 1, 128, Tk=8192, Hkv=8),
        ours=attend(),
        other=plain.sdpa_grouped,
        other_name="SDPA, enable_gqa",
    ),
    Case(
        name="wide-value",
        question="A value wider than the key, Dv = 96.",
        at=shape(1, 8, 2048, 64, Dv=96),
        ours=attend(),
        other=plain.sdpa,
        other_name="SDPA",
        memory=True,
        max_rounds=7,
    ),
    Case(
        name="sparsemax-train",
        question="Sparsemax, forward and backward.",
        at=shape(1, 4, 1024, 64),
        ours=attend(normalize=Sparsemax()),
        other=plain.with_normalizer(plain.sparsemax),
        other_name="explicit torch",
        backward=True,
        memory=True,
        max_rounds=7,
    ),
    Case(
        name="entmax15-train",
        question="1.5-entmax, forward and backward.",
        at=shape(1, 4, 1024, 64),
        ours=attend(normalize=Entmax15()),
        other=plain.with_normalizer(plain.entmax15),
        other_name="explicit torch",
        backward=True,
        memory=True,
        max_rounds=7,
    ),
    *DECODE,
    *DOT,
    *LONG,
    *SCORES,
    *RECIPES,
)


def find(name: str) -> AnyCase:
    """The case of this name."""
    for case in CASES:
        if case.name == name:
            return case
    raise LookupError(f"no case named {name!r}; there are: {', '.join(case.name for case in CASES)}")
