"""Our side of the cases: the public calls, as a user writes them."""

from __future__ import annotations

import regard
from regard.biases import Relative
from regard.masks import Causal, Documents
from regard.normalizers import Softmax
from regard.scores import Additive

from .case import Inputs, Result, Side

TOP, CELLS = 8, 256
STATISTICS = ("lse", "max", "entropy", "received")


def attend(mask: object = None, **mechanism: object) -> Side:
    """The public `attention` with these keywords."""

    def call(inputs: Inputs) -> Result:
        return regard.attention(inputs.query, inputs.key, inputs.value, mask, **mechanism)

    return call


def attend_additive(inputs: Inputs) -> Result:
    return regard.attention(inputs.query, inputs.key, inputs.value, score=Additive(inputs.extra["v"]))


def attend_relative(inputs: Inputs) -> Result:
    return regard.attention(inputs.query, inputs.key, inputs.value, bias=Relative(inputs.extra["table"]))


def attend_sink(inputs: Inputs) -> Result:
    return regard.attention(inputs.query, inputs.key, inputs.value, normalize=Softmax(inputs.extra["sink"]))


def attend_documents(inputs: Inputs) -> Result:
    mask = Documents(inputs.extra["ids"]) & Causal("upper_left")
    return regard.attention(inputs.query, inputs.key, inputs.value, mask)


def observe(inputs: Inputs) -> Result:
    seen = regard.observe(inputs.query, inputs.key, inputs.value, statistics=STATISTICS)
    return {"output": seen.output, **{name: getattr(seen, name) for name in STATISTICS}}


def observe_all(inputs: Inputs) -> Result:
    """Every statistic, the eight largest weights of each row and a map of 256 x 256 cells."""
    seen = regard.observe(inputs.query, inputs.key, inputs.value, statistics=STATISTICS, topk=TOP, pool=CELLS)
    assert seen.top_weights is not None and seen.pooled is not None and seen.pooled_max is not None
    more = {"top": seen.top_weights, "pooled": seen.pooled, "pooled_max": seen.pooled_max}
    return {"output": seen.output, **{name: getattr(seen, name) for name in STATISTICS}, **more}
