"""The steps of a worked example inside attention: scores, scaled, bias, mask, weights, context.

Each takes the numbers of the step before. The numbers shown are those of the public API; beside each stands the same
computed by hand (`_explain_hand.py`), and the largest difference of the two.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from regard._frame import wide
from regard.look import _explain_hand as hand
from regard.look._explain_step import MODEL, Step, compare
from regard.look._explain_view import View
from regard.look._record import Site
from regard.normalizers import Entmax, Entmax15, Relu, Sigmoid, Softmax, Sparsemax
from regard.scores import Additive, Bilinear, Concat, Cosine, Distance, Dot, Modified, spread_heads


def inside(view: View, site: Site | None) -> list[Step]:
    """All of them, in order."""
    steps, scores = _score_steps(view, view.call.score)
    added, scores = _bias_and_mask(view, scores)
    weights = view.weights()
    return [*steps, *added, _weights_step(view, scores, weights), *_context_steps(view, weights, site)]


_SCORE_FORMULAS: dict[type, str] = {
    Dot: "s_ij = q_i . k_j",
    Bilinear: "s_ij = q_i^T W k_j",
    Concat: "s_ij = w_query . q_i + w_key . k_j",
    Additive: "s_ij = v^T tanh(q_i + k_j)",
    Cosine: "s_ij = q_i . k_j / (|q_i| |k_j|)",
    Distance: "s_ij = -|q_i - k_j|^2",
}


def _pairs(view: View, score: Any) -> Tensor:
    """The score of every pair, (B, H, Tq, Tk), in float32 or better."""
    query, key, at = wide(view.call.query), wide(view.call.key), view.at()
    if isinstance(score, Modified):
        inner = _pairs(view, score.score)
        return score.score_mod(inner, at.b, at.h, at.i, at.j)
    if type(score) not in _SCORE_FORMULAS:
        key = spread_heads(key, query.shape[1])
    found: Tensor = score(query, key)
    return found


def _score_steps(view: View, score: Any) -> tuple[list[Step], Tensor]:
    """Scores, then what the score does to them: scale, soft-cap, a function of the user's. Also the last (Tq, Tk)."""
    if isinstance(score, Modified):
        steps, before = _score_steps(view, score.score)
        after = view.head_of(_pairs(view, score))
        check = compare(
            view.rows(after), view.rows(_modified_again(view, score, before)), "score_mod, called again"
        )
        return [*steps, view.over_keys("modified", "score_mod(s_ij, b, h, i, j)", after, [check])], after
    formula = _SCORE_FORMULAS.get(type(score))
    if formula is None:
        return _own_score(view, score)
    plain = score
    if hasattr(score, "scale"):
        plain = dataclasses.replace(score, scale=1.0, **({"softcap": None} if isinstance(score, Dot) else {}))
    raw = view.head_of(_pairs(view, plain))
    again = hand.raw_scores(score, view.query, view.key, view.head)
    assert again is not None
    steps = [view.over_keys("scores", formula, raw, [compare(view.rows(raw), again, "the sums written out")])]
    return _scaled(view, score, steps, raw)


def _modified_again(view: View, score: Modified, before: Tensor) -> Tensor:
    b, h = torch.tensor(view.sample), torch.tensor(view.head)
    i, j = torch.arange(before.shape[0])[:, None], torch.arange(before.shape[1])
    return score.score_mod(before, b, h, i, j)


def _own_score(view: View, score: Any) -> tuple[list[Step], Tensor]:
    pairs = view.head_of(_pairs(view, score))
    name = getattr(score, "__name__", type(score).__name__)
    check = compare(
        view.rows(pairs), view.rows(view.head_of(_pairs(view, score))), "your function, called again"
    )
    return [
        view.over_keys("scores", f"s_ij = {name}(q_i, k_j), a function of your own", pairs, [check])
    ], pairs


def _scaled(view: View, score: Any, steps: list[Step], raw: Tensor) -> tuple[list[Step], Tensor]:
    scale, width, scores = getattr(score, "scale", 1.0), view.call.query.shape[-1], raw
    factor = hand.of_head(score.factor(width) if isinstance(score, Dot) else scale, view.head)
    if factor != 1.0:
        uncapped = dataclasses.replace(score, softcap=None) if isinstance(score, Dot) else score
        scores = view.head_of(_pairs(view, uncapped))
        root = width > 0 and abs(factor - width**-0.5) < 1e-7
        formula = f"s_ij / sqrt({width})" if root else f"{factor:.6g} s_ij"
        check = compare(view.rows(scores), factor * view.rows(raw).double(), "the scores above, scaled")
        steps = [*steps, view.over_keys("scaled", formula, scores, [check])]
    if isinstance(score, Dot) and score.softcap is not None:
        cap, capped = score.softcap, view.head_of(_pairs(view, score))
        again = cap * torch.tanh(view.rows(scores).double() / cap)
        check = compare(view.rows(capped), again, "the tanh written out")
        steps = [*steps, view.over_keys("soft-capped", f"{cap:g} tanh(s_ij / {cap:g})", capped, [check])]
        scores = capped
    return steps, scores


def _bias_and_mask(view: View, scores: Tensor) -> tuple[list[Step], Tensor]:
    steps: list[Step] = []
    if view.call.bias is not None:
        added = view.head_of(view.call.bias.value(view.at()).to(scores.dtype))
        again = view.rows(scores).double() + view.rows(added).double()
        scores = scores + added
        check = compare(view.rows(scores), again, "the sum written out")
        steps.append(view.over_keys("bias", "b_ij", added, ()))
        steps.append(view.over_keys("scores + bias", "s_ij + b_ij", scores, [check]))
    if view.call.mask is not None:
        allowed = view.head_of(view.call.mask.allowed(view.at()))
        again = scores.masked_fill(~view.met(), -torch.inf)
        scores = scores.masked_fill(~allowed, -torch.inf)
        shown = view.rows(allowed)
        note = f"{int((~shown).sum())} of {shown.numel()} pairs may not meet"
        check = compare(view.rows(scores), view.rows(again), "the pairs that meet where all scores are equal")
        formula = "s_ij where query i may attend to key j"
        steps.append(view.over_keys("masked", formula, scores, [check], note=note))
    return steps, scores


_WEIGHT_FORMULAS: dict[type, str] = {
    Softmax: "w_ij = exp(s_ij) / sum_k exp(s_ik)",
    Sparsemax: "w_ij = max(s_ij - tau_i, 0), tau_i such that they sum to 1",
    Entmax15: "w_ij = max(s_ij / 2 - tau_i, 0)^2, tau_i such that they sum to 1",
    Relu: "w_ij = max(s_ij, 0)",
}


def _weight_formula(normalize: Any, head: int) -> str:
    if isinstance(normalize, Softmax) and normalize.sink is not None:
        sink = hand.of_head(normalize.sink, head)
        return f"w_ij = exp(s_ij) / (exp(sink) + sum_k exp(s_ik)), sink = {sink:.4f}"
    if isinstance(normalize, Entmax):
        power = hand.of_head(normalize.alpha, head) - 1
        return f"w_ij = max({power:g} s_ij - tau_i, 0)^(1 / {power:g}), tau_i such that they sum to 1"
    if isinstance(normalize, Sigmoid):
        return f"w_ij = 1 / (1 + exp(-(s_ij + bias))), bias = {hand.of_head(normalize.bias, head):.4f}"
    name = getattr(normalize, "__name__", type(normalize).__name__)
    return _WEIGHT_FORMULAS.get(type(normalize), f"w_i = {name}(s_i), a function of your own")


def _weights_step(view: View, scores: Tensor, weights: Tensor) -> Step:
    rows = view.rows(scores)
    again, against = (
        hand.weights(view.call.normalize, rows, view.head),
        "the definition, applied to the row above",
    )
    if again is None:
        again, against = _own_weights(view, rows), "your function, called on the row above"
    check = compare(view.rows(weights), again, against)
    note = "" if view.token is None else f"they sum to {float(view.rows(weights).double().sum()):.4f}"
    formula = _weight_formula(view.call.normalize, view.head)
    return view.over_keys("weights", formula, weights, [check], note=note, bars=True)


def _own_weights(view: View, rows: Tensor) -> Tensor:
    blocked = rows == -torch.inf
    empty = blocked.all(-1, keepdim=True)
    made: Tensor = view.call.normalize(rows.masked_fill(empty, 0.0)[None, None])
    return made[0, 0].masked_fill(blocked, 0.0)


def _context_steps(view: View, weights: Tensor, site: Site | None) -> list[Step]:
    output = view.output()
    context = view.one(output)
    again = hand.context(view.rows(weights), view.one(view.call.value))
    checks, note = [compare(view.rows(context), again, "the values, added up with the weights above")], ""
    if site is not None and site.dropout_p > 0:
        note = f"the model dropped weights (p = {site.dropout_p:g}), so its own context is another one"
    elif site is not None:
        produced = view.one(view.four(site.tensors.output))
        checks.append(compare(view.rows(context), view.rows(produced), MODEL))
    numbers = view.shown(context)
    shape = tuple(numbers.shape)
    steps = [
        Step(
            "context", "c_i = sum_j w_ij v_j", numbers, shape, view.row_names, note=note, checks=tuple(checks)
        )
    ]
    if view.call.frame.H > 1 and view.token is not None:
        steps.append(_every_head(output[view.sample, :, view.token]))
    return steps


def _every_head(contexts: Tensor) -> Step:
    names = tuple(f"head {head}" for head in range(len(contexts)))
    note = "side by side, they are what attention hands on"
    return Step("context of every head", "", contexts, tuple(contexts.shape), names, note=note)
