"""Windows and documents beside what torch offers for them, and the parts of a call that SDPA has no fast path for."""

from __future__ import annotations

from dataclasses import replace

from regard.biases import Alibi
from regard.masks import Causal, Window
from regard.scores import Dot

from . import compiled, torch_long
from . import torch_expressions as plain
from .case import Case, Inputs, Result, Side, floor, shape
from .ours import attend, attend_documents, attend_relative, attend_sink
from .torch_long import Prepare


def prepared_by(prepare: Prepare, call: Side) -> Side:
    """An expression that builds for itself what it needs: the truth of cases whose other side needs something else."""

    def run(inputs: Inputs) -> Result:
        return call(replace(inputs, prepared=prepare(inputs)))

    return run


WINDOW = attend(Window(plain.WINDOW_LEFT, 0))
BY_BLOCKS = prepared_by(torch_long.block_mask, torch_long.sdpa_blocks)


def _window(n: int, H: int, backward: bool) -> Case:
    direction = "backward" if backward else "forward"
    return Case(
        name="",
        question=f"Window(255, 0) at {n}, {direction}: is what it empties skipped?",
        at=shape(1, H, n, 64),
        ours=WINDOW,
        other=plain.sdpa_masked,
        other_name="SDPA, bool mask",
        backward=backward,
        only_backward=backward,
        prepare=plain.window_mask,
        truth=BY_BLOCKS,
        max_rounds=5,
    )


def _windows() -> list[Case]:
    cases = []
    for n, H, limit in ((4096, 4, floor(15, 22)), (16384, 1, floor(60, 100))):
        masked = _window(n, H, False)
        cases.append(replace(masked, name=f"window-mask-{n}", limits=(limit,), row="window-mask"))
    masked = _window(4096, 4, True)
    row = "window-backward-mask"
    cases.append(replace(masked, name=f"{row}-4096", limits=(floor(15, 22),), row=row))
    for backward, n in ((False, 4096), (False, 16384), (True, 4096), (True, 16384)):
        row = "window-backward-blocks" if backward else "window-blocks"
        cases.append(
            replace(
                _window(n, 4, backward),
                name=f"{row}-{n}",
                other=torch_long.sdpa_blocks,
                other_name="SDPA by blocks",
                prepare=torch_long.block_mask,
                limits=(floor(3, 4),),
                row=row,
                max_rounds=9,
            )
        )
    for n in (4096, 16384):
        cases.append(
            replace(
                _window(n, 4, False),
                name=f"window-flex-{n}",
                other=compiled.call_prepared,
                other_name="compiled FlexAttention",
                prepare=compiled.flex(compiled.window),
                limits=(floor(2, 3),),
                row="window-flex",
            )
        )
    return cases


DOCUMENTS = Case(
    name="documents-mask",
    question="Sixteen documents in one sequence of 4096, causal: is what lies between them skipped?",
    at=shape(1, 8, 4096, 64),
    ours=attend_documents,
    other=plain.sdpa_masked,
    other_name="SDPA, bool mask",
    extra=torch_long.document_ids,
    prepare=torch_long.document_mask,
    truth=prepared_by(torch_long.document_bounds, torch_long.sdpa_documents),
    max_rounds=5,
    limits=(floor(15, 22),),
    row="documents-mask",
)

WIDE = Case(
    name="wide-value-128",
    question="A value wider than the key, Dv = 128, where SDPA leaves its fused kernel.",
    at=shape(1, 8, 1024, 64, Dv=128),
    ours=attend(),
    other=plain.sdpa,
    other_name="SDPA",
    truth=plain.sdpa,
    limits=(floor(3, 5),),
    row="wide-value",
)
DROPOUT = Case(
    name="dropout-1024",
    question="Dropout of weights, where SDPA leaves its fused kernel.",
    at=shape(1, 8, 1024, 64),
    ours=attend(dropout_p=plain.DROPOUT_P),
    other=plain.sdpa_dropout,
    other_name="SDPA, dropout",
    agree=plain.dropout_law,
    tolerance=0.02,
    limits=(floor(3, 6),),
    row="dropout",
)
RELATIVE = Case(
    name="relative-train-1024",
    question="A learned relative bias, forward and backward.",
    at=shape(1, 8, 1024, 64),
    ours=attend_relative,
    other=plain.sdpa_relative,
    other_name="SDPA, gathered bias",
    backward=True,
    extra=plain.relative_table,
    truth=plain.sdpa_relative,
    max_rounds=7,
    limits=(floor(2, 3),),
    row="relative",
)
SOFTCAP = Case(
    name="softcap-flex",
    question="Soft-capped causal scores.",
    at=shape(1, 8, 1024, 64),
    ours=attend(Causal("upper_left"), score=Dot(softcap=plain.SOFTCAP)),
    other=compiled.call_prepared,
    other_name="compiled FlexAttention",
    prepare=compiled.flex(compiled.causal, compiled.softcap),
    truth=plain.softcap_causal,
    limits=(floor(2, 3),),
    row="softcap",
)
ALIBI = replace(
    SOFTCAP,
    name="alibi-flex",
    question="Causal ALiBi.",
    ours=attend(Causal("upper_left"), bias=Alibi()),
    prepare=compiled.flex(compiled.causal, compiled.alibi),
    truth=prepared_by(plain.alibi_bias, plain.sdpa_masked),
    row="alibi",
)
SINK = Case(
    name="sink",
    question="A sink a head, which takes weight and has no value.",
    at=shape(1, 8, 1024, 64),
    ours=attend_sink,
    other=torch_long.sdpa_sink,
    other_name="SDPA, one more key",
    extra=torch_long.sinks,
    truth=torch_long.sdpa_sink,
    limits=(floor(1.3, 1.6),),
    row="sink",
)

CASES = (
    *_windows(),
    DOCUMENTS,
    replace(
        DOCUMENTS,
        name="documents-loop",
        other=torch_long.sdpa_documents,
        other_name="SDPA, a loop over them",
        prepare=torch_long.document_bounds,
        max_rounds=9,
        limits=(floor(1.5, 1.8),),
        row="documents-loop",
    ),
    WIDE,
    replace(WIDE, name="wide-value-128-train", backward=True, max_rounds=5, limits=(), row=""),
    DROPOUT,
    replace(DROPOUT, name="dropout-1024-train", backward=True, max_rounds=5, limits=(), row=""),
    RELATIVE,
    SOFTCAP,
    ALIBI,
    SINK,
)
