"""The worked example of a head of a watched model, with the model's own numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.look._examples import which
from regard.look._explain_lineage import Made, lineage, repeats
from regard.look._explain_step import Step, compare
from regard.look._explain_text import brief
from regard.look._explain_trace import Event, Trace, traced
from regard.look._model import load_model
from regard.look._model_run import WEIGHT_BYTES, reader_of, record_of
from regard.look._patterns import pick, telling_query
from regard.look._record import Record, Site, Token
from regard.look._tokens import tokens_of_ids
from regard.look._watch import watch
from regard.look._watch_keep import Keep

if TYPE_CHECKING:
    from regard.look._explain_step import Explanation

_KEEP = Keep(statistics=(), tensors=True)
# What each role is called in the plural, and its letters.
_SAID = {
    "query": ("queries", "q_i", "W_query x_i"),
    "key": ("keys", "k_j", "W_key x_j"),
    "value": ("values", "v_j", "W_value x_j"),
}


def of_model(
    text: str,
    model: str,
    *,
    layer: int | None,
    head: int | None,
    token: str | None,
    target: str | None = None,
) -> Explanation:
    """Watch `model` on `text` and explain one query of one head, checked against what the model produced.

    Layer, head and token are counted from 0; those that are not asked for are the ones that link words most. Raises
    ValueError or OSError for a model, text, layer, head or token that is not there.
    """
    loaded = load_model(model)

    def run() -> Record:
        return record_of(loaded, text, target=target, keep=_KEEP)

    return _explained(loaded.name, reader_of(loaded, target), run, layer, head, token, 0)


def of_inputs(
    model: nn.Module,
    inputs: Any,
    *,
    layer: int | None,
    head: int | None,
    token: int | str | None,
    sample: int,
    tokens: Sequence[str],
    tokenizer: Any,
) -> Explanation:
    """Run `model` on its inputs once, watched, and explain one query of one head."""

    def run() -> Record:
        with torch.no_grad(), watch(model, keep=_KEEP) as record:
            _call(model, inputs)
        if not record.sites:
            notes = "".join(f"; {note}" for note in record.notes)
            raise ValueError(f"explain: no attention was seen in {type(model).__name__}{notes}")
        if tokens:
            record.label([Token(name) for name in tokens])
        elif tokenizer is not None:
            record.text, table = tokens_of_ids(tokenizer, _ids(inputs, sample))
            if len(table) in record.lengths:
                record.label(table)
        return record

    asked = None if token is None else str(token)
    return _explained(type(model).__name__, model, run, layer, head, asked, sample)


def _explained(
    name: str,
    model: nn.Module,
    run: Callable[[], Record],
    layer: int | None,
    head: int | None,
    token: str | None,
    sample: int,
) -> Explanation:
    """Run once to choose a place, and once more to keep what the modules around it were given and gave."""
    first = run()
    number, head, followed = _choice(first, layer, head, token, sample)
    path = first.sites[number].name.split(".")
    around = "" if first.sites[number].name == type(model).__name__ else ".".join(path[:-1])
    with traced(model, around) as trace:
        record = run()
    return worked(name, model, record, trace, number, head, followed, sample)


def _call(model: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        model(**inputs)
    elif isinstance(inputs, (tuple, list)):
        model(*inputs)
    else:
        model(inputs)


def _ids(inputs: Any, sample: int) -> list[int]:
    """The ids of the tokens of one sample among the inputs: whole numbers, (B, T)."""
    given = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    for value in given if isinstance(given, (tuple, list)) else [given]:
        if isinstance(value, Tensor) and not value.is_floating_point() and value.dim() == 2:
            _require_sample(sample, len(value))
            ids: list[int] = value[sample].tolist()
            return ids
    raise ValueError(
        "explain(tokenizer=): the inputs have no ids of tokens (whole numbers, (B, T)); give tokens="
    )


def _require_sample(sample: int, count: int) -> None:
    if not 0 <= sample < count:
        raise ValueError(f"explain(sample=): there are {count}, counted from 0; got {sample}")


def _choice(
    record: Record, layer: int | None, head: int | None, token: str | None, sample: int
) -> tuple[int, int, int | None]:
    """The place, head and query to explain: those that are asked for, else the ones that link tokens most."""
    needed = sum(4 * site.sizes.B * site.sizes.H * site.sizes.Tq * site.sizes.Tk for site in record.sites)
    if (layer is None or head is None) and needed > WEIGHT_BYTES:
        raise ValueError(
            f"the weights of all heads take {needed / 2**30:.1f} GiB, too much to choose one by; say "
            "which layer and head"
        )
    number, head = pick(record, layer, head)
    site = record.sites[number]
    _require_sample(sample, site.sizes.B)
    names = [each.text for each in site.query_tokens] or [""] * site.lengths[0]
    return number, head, which(token, names, None if token else telling_query(site, head))


def worked(
    name: str,
    model: nn.Module,
    record: Record,
    trace: Trace,
    number: int,
    head: int,
    followed: int | None,
    sample: int = 0,
) -> Explanation:
    """The explanation of one head of one site of what was watched and traced."""
    from regard.look.explain import explain

    site = record.sites[number]
    before = _Before(model, record, site, trace, head, followed, sample)
    title = f"{name}, layer {number}, head {head} of {site.heads} ({site.title}); all counted from 0"
    stages = {step.name: step for step in before.steps()}
    return explain(site, token=followed, head=head, sample=sample, stages=stages, title=title)


class _Before:
    """The stages before attention: text, tokens, ids, embeddings, hidden states, and how q, k and v came about."""

    def __init__(
        self,
        model: nn.Module,
        record: Record,
        site: Site,
        trace: Trace,
        head: int,
        followed: int | None,
        sample: int,
    ) -> None:
        self.model, self.record, self.site, self.trace = model, record, site, trace
        self.head, self.followed, self.sample = head, followed, sample
        self.names = tuple(token.text for token in site.query_tokens) or ("",) * site.lengths[0]
        self.key_names = tuple(token.text for token in site.key_tokens) or ("",) * site.lengths[1]

    def steps(self) -> Iterator[Step]:
        if self.record.text:
            yield Step("sentence", text=self.record.text)
        tokens = self.site.query_tokens
        if tokens:
            yield Step("tokens", "the model's own tokenizer", text=self.names, shape=(len(tokens),))
        ids = [token.id for token in tokens if token.id is not None]
        if tokens and len(ids) == len(tokens):
            yield Step("ids", "each token's number", text=[str(number) for number in ids], shape=(len(ids),))
            yield from self._embeddings(torch.tensor(ids))
        made = {role: self._lineage(role) for role in _SAID}
        yield from self._hidden(made)
        for role, stages in made.items():
            yield from self._role(role, stages)

    def _embeddings(self, ids: Tensor) -> Iterator[Step]:
        """What the table of embeddings gave for these ids, as the model ran."""
        for event in self.trace.events:
            if not isinstance(event.module, nn.Embedding) or event.x is None or event.x.dim() > 2:
                continue
            given = event.x.reshape(-1, event.x.shape[-1])
            row = min(self.sample, len(given) - 1)
            if given.shape[1] != len(ids) or not torch.equal(given[row], ids):
                continue
            table, x = event.module.weight.detach(), event.y.reshape(*given.shape, -1)[row]
            check = compare(x, table[ids], "those rows of the model's table")
            formula = f"rows of {event.name} {tuple(table.shape)}"
            yield Step("embeddings", formula, x, tuple(x.shape), self.names, checks=(check,))
            return

    # ------------------------------------------------------------------ queries, keys, values

    def _lineage(self, role: str) -> list[Made]:
        target, sizes = getattr(self.site.tensors, role)[self.sample], self.site.sizes
        shared = repeats(self.site.tensors.key[self.sample])
        if shared > 1 and sizes.Hkv == sizes.H:
            # Some models write each key head out once for every query head that shares it.
            sizes = sizes._replace(Hkv=sizes.H // shared)
            target = target if role == "query" else target[::shared]
        for inside in self._scopes():
            found = lineage(target, role, self.trace, inside, sizes, self.sample)
            if found:
                return found
        return []

    def _scopes(self) -> Iterator[list[Event]]:
        """The modules inside the site's own module, then inside the one around it."""
        path = [] if self.site.name == type(self.model).__name__ else self.site.name.split(".")
        for depth in range(len(path), max(-1, len(path) - 2), -1):
            yield self.trace.within(".".join(path[:depth]), self.site.call)

    def _hidden(self, made: Mapping[str, list[Made]]) -> Iterator[Step]:
        shown: list[Tensor] = []
        for role, names, title in (
            ("query", self.names, "hidden states"),
            ("key", self.key_names, "hidden states of the other side"),
        ):
            first = next((stage for stage in made[role] if stage.x is not None), None)
            if first is None or first.x is None or any(_equal(first.x, other) for other in shown):
                continue
            shown.append(first.x)
            rows = names if len(names) == len(first.x) else None
            letter = "x_i" if role == "query" else "x_j"
            note = f"what {first.name.split(' ')[0].rsplit('.', 1)[0]} was given"
            yield Step(title, letter, first.x, tuple(first.x.shape), rows, note=note)

    def _role(self, role: str, stages: Sequence[Made]) -> Iterator[Step]:
        plural, letter, product = _SAID[role]
        tensor = getattr(self.site.tensors, role)
        before = letter
        for number, stage in enumerate(stages):
            last = number == len(stages) - 1
            made = letter if last else f"{letter}{chr(39) * (len(stages) - 1 - number)}"
            name = plural if last else f"{stage.how} {plural}"
            heads = stage.numbers.shape[1]
            kept = self.head * heads // self.site.heads
            note = _note(role, stage, kept, heads, self.site.heads)
            yield self._step(
                name,
                _formula(role, stage, made, before),
                stage.numbers[:, kept],
                tensor,
                role,
                note,
                stage.check(kept),
            )
            before = made
        if not stages:
            note = "as attention was given them: what made them was not found among the layer's modules"
            kept = self.head * tensor.shape[1] // self.site.heads
            yield self._step(plural, letter, tensor[self.sample, kept], tensor, role, note, None)

    def _step(
        self, name: str, formula: str, own: Tensor, whole: Tensor, role: str, note: str, check: Any
    ) -> Step:
        names = self.names if role == "query" else self.key_names
        checks = () if check is None else (check,)
        shape = tuple(whole.shape)
        if role != "query" or self.followed is None:
            rows = names if len(names) == len(own) else None
            return Step(name, formula, own, shape, rows, note=note, checks=checks)
        who = f"; this is token {self.followed} {brief(names[self.followed])}".rstrip()
        return Step(name, formula, own[self.followed], shape, None, note=note + who, checks=checks)


def _formula(role: str, stage: Made, made: str, before: str) -> str:
    product = _SAID[role][2]
    place = "p_i" if role == "query" else "j"
    said = {
        "projected": f"{made} = {product}{' + b' if stage.bias else ''}",
        "normed": f"{made} = norm({before})" if stage.before is not None else made,
        "changed": f"{made} = module({before})" if stage.before is not None else made,
        "turned": f"{made} = {before} turned by its position {place}: x cos + x' sin",
        "scaled": f"{made} = {before} {stage.name}",
    }
    return said[stage.how]


def _note(role: str, stage: Made, kept: int, heads: int, all_heads: int) -> str:
    matrix = _SAID[role][2].split()[0]
    grouped = (
        "" if heads == all_heads else f" (head {kept} of {heads}, which {all_heads // heads} heads share)"
    )
    said = {
        "projected": f"{matrix} is the part of {stage.name} that is this head's{grouped}",
        "normed": f"by {stage.name}{grouped}",
        "changed": f"by {stage.name}{grouped}",
        "turned": f"rotary positions by {stage.name}{grouped}",
        "scaled": f"times {stage.name}, before attention",
    }
    return said[stage.how]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
