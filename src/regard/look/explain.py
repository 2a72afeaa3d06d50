"""The worked example: one attention call, step by step, every number computed twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.look._explain_stages import inside
from regard.look._explain_step import Check, Explanation, Step, compare
from regard.look._explain_text import brief
from regard.look._explain_view import View
from regard.look._record import Site

__all__ = ["Check", "Explanation", "Step", "compare", "explain"]


def explain(
    source: Tensor | Site | nn.Module,
    key: Any = None,
    value: Tensor | None = None,
    *,
    token: int | str | None = None,
    layer: int | None = None,
    head: int | None = None,
    sample: int = 0,
    tokens: Sequence[str] = (),
    key_tokens: Sequence[str] = (),
    tokenizer: Any = None,
    stages: Mapping[str, Any] | None = None,
    title: str = "",
    **mechanism: Any,
) -> Explanation:
    """The worked example of one attention call: scores, scaled, bias, mask, weights, context.

    `explain(query, key, value, **mechanism)` takes what `attention` takes (query (*batch, H, Tq, D), key
    (*batch, Hkv, Tk, D), value (*batch, Hkv, Tk, Dv), and score=, normalize=, mask=, bias=); `explain(site)` takes a
    site of a Record, and its context is also compared with what the model produced. Each step has its name, formula,
    shape and numbers; the numbers come from the public API, and each is computed again from the step before it by
    plain arithmetic in float64.

    `explain(model, inputs)` runs any module once, watched, on a mapping of keywords, a tuple or one tensor, and
    begins further back: ids and embeddings (where `tokenizer` names the tokens), hidden states, and how queries, keys
    and values came about (projections, norms, rotary positions), each found among what the layer's modules gave and
    computed again. `layer` is the place of attention in the order they ran; layer, head and token that are not given
    are the ones that link tokens most, and `token` may be a token's own text, or "all".

    One head of one sample is shown, for one query `token` or, with None, for all (of a model: with "all"); the three
    are counted from 0. `tokens` and `key_tokens` name queries and keys (`key_tokens` are the `tokens` where there are
    as many). `stages` are what came before, by name, printed first: text, vocabularies, tensors, or a `Step` with
    checks of its own; stages named queries, keys or values stand in for the ones that are shown otherwise.

    Weights are shown before dropout. Raises ValueError or TypeError as `attention` does, and for a layer, token, head
    or sample that is not there, a model in which no attention was seen, a site whose tensors were not kept, or a call
    of more than 2^26 pairs (H Tq Tk).
    """
    if isinstance(source, nn.Module):
        if value is not None or mechanism or stages or len(key_tokens) or title:
            raise TypeError(
                "explain(model, inputs): a model has its own value, mechanism and stages; leave them out"
            )
        from regard.look._explain_model import of_inputs

        return of_inputs(
            source,
            key,
            layer=layer,
            head=head,
            token=token,
            sample=sample,
            tokens=tokens,
            tokenizer=tokenizer,
        )
    if layer is not None or tokenizer is not None:
        raise TypeError("explain: layer= and tokenizer= belong to explain(model, inputs); leave them out")
    if isinstance(token, str):
        raise TypeError(f"explain(token=): expected an int, counted from 0; got {token!r}")
    site = source if isinstance(source, Site) else None
    if isinstance(source, Site):
        if key is not None or value is not None or mechanism:
            raise TypeError("explain(site): a site has its own key, value and mechanism; leave them out")
        tokens = tokens or [token.text for token in source.query_tokens]
        key_tokens = key_tokens or [token.text for token in source.key_tokens]
        public, mechanism = source.tensors[:3], dict(source.mechanism)
    elif isinstance(source, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor):
        public = (source, key, value)
    else:
        got = ", ".join(type(given).__name__ for given in (source, key, value))
        raise TypeError(
            f"explain: expected query, key and value tensors, or one site of a Record, or a model; got {got}"
        )
    place = (token, 0 if head is None else head, sample)
    with torch.no_grad():
        view = View.of(public, mechanism, place, tokens, key_tokens)
        steps = [*_before(stages or {}, view), *inside(view, site)]
    return Explanation(title or _title(view, site), tuple(steps), token, view.head)


def _title(view: View, site: Site | None) -> str:
    where = f"{site.title}, " if site is not None else ""
    head = f"head {view.head} of {view.call.frame.H}, " if view.call.frame.H > 1 else ""
    who = "every query"
    if view.token is not None:
        name = brief(view.tokens[view.token])
        who = f'query {view.token} "{name}"' if name else f"query {view.token}"
    return f"{where}{head}{who} over {view.call.frame.Tk} keys (all counted from 0)"


def _before(stages: Mapping[str, Any], view: View) -> list[Step]:
    """What came before attention: the stages that were given, and queries, keys and values where they were not."""
    steps = [
        stage if isinstance(stage, Step) else _stage(name, stage, view) for name, stage in stages.items()
    ]
    given = {step.name for step in steps}
    names = (view.tokens, view.key_tokens, view.key_tokens)
    tensors = (view.call.query, view.call.key, view.call.value)
    for name, tensor, public, rows in zip(
        ("queries", "keys", "values"), tensors, view.public, names, strict=True
    ):
        if name not in given:
            steps.append(Step(name, "", view.one(tensor), tuple(public.shape), rows))
    return steps


def _stage(name: str, stage: Any, view: View) -> Step:
    if not isinstance(stage, Tensor):
        return Step(name, text=stage)
    shape = tuple(stage.shape)
    if not stage.is_floating_point() or stage.ndim == 0:
        return Step(name, text=[str(entry) for entry in stage.reshape(-1).tolist()], shape=shape)
    numbers = stage if stage.ndim < 3 else stage.reshape(-1, *shape[-2:])[0]
    named = numbers.ndim == 2 and len(numbers) == len(view.tokens)
    return Step(name, "", numbers, shape, view.tokens if named else None)
