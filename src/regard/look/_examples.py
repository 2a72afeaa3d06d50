"""Worked examples from a sentence on: tokens, vocabulary, ids, embeddings, projections, then attention.

`life-is-short` is the example of S. Raschka, *Understanding and Coding the Self-Attention Mechanism of Large Language
Models* (2023), with its seeds; `karina` has four tokens of two numbers, small enough for paper. `sentence` walks any
text the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.look._explain_text import brief
from regard.look._patterns import refuse
from regard.look.explain import Explanation, Step, compare, explain

_MOST_TOKENS = 512
_MOST_WIDTH = 4096
_ORDER = ("", "second ")


@dataclass(frozen=True)
class Sizes:
    """Widths of an example: embedding, query and key, value; and the heads, each with projections of its own."""

    dim: int = 16
    key_dim: int = 24
    value_dim: int = 28
    heads: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 1 <= value <= _MOST_WIDTH:
                option = name.replace("_", "-")
                raise ValueError(f"--{option}: expected a number from 1 to {_MOST_WIDTH}, got {value}")


def tokenise(text: str) -> list[str]:
    """Drop commas, split on spaces; a text of one word (a script without spaces) is split into its characters."""
    words = re.sub("[,،，、]", " ", text).split()
    if len(words) == 1:
        words = list(words[0])
    if not words:
        raise ValueError("the text is empty; give some words to explain")
    if len(words) > _MOST_TOKENS:
        raise ValueError(
            f"the text is {len(words)} tokens long; a worked example shows at most {_MOST_TOKENS}: shorten it"
        )
    return words


def vocabulary(tokens: Iterable[str]) -> dict[str, int]:
    """Every different token once, in the order of their characters, numbered from 0."""
    return {token: number for number, token in enumerate(sorted(set(tokens)))}


def which(asked: str | None, tokens: Sequence[str], otherwise: int | None) -> int | None:
    """The token that is asked for: a number counted from 0, a token's own text, or `all` (None)."""
    if asked is None:
        return otherwise
    if asked == "all":
        return None
    if asked.lstrip("-").isdecimal():
        number = int(asked)
        if 0 <= number < len(tokens):
            return number
        refuse("token", number, list(range(len(tokens))))
    places = [place for place, token in enumerate(tokens) if token == asked]
    if len(places) == 1:
        return places[0]
    if places:
        raise ValueError(
            f"token {asked!r}: it stands at {', '.join(map(str, places))}; give one of these numbers"
        )
    raise ValueError(f"token {asked!r}: no such token; there are: {' '.join(tokens)}")


def sentence(
    text: str,
    *,
    against: str | None = None,
    token: str | None = None,
    head: int = 0,
    seed: int = 123,
    sizes: Sizes | None = None,
    **mechanism: Any,
) -> Explanation:
    """The worked example of a text whose embedding and projections are drawn with a seed.

    The embedding is `torch.nn.Embedding(vocabulary, dim)` after `torch.manual_seed(seed)`; the projections are
    `torch.rand` after the same seed: W_query (heads, key_dim, dim), W_key the same, W_value (heads, value_dim, dim),
    without the first dimension for one head. With `against`, keys and values come from a second text
    (cross-attention), embedded by the same table. `token` is read as by `which`, and is the second token where it is
    not said. torch's generator is left as it was; `mechanism` goes to `attention`.
    """
    texts = [text] if against is None else [text, against]
    tokens = [tokenise(each) for each in texts]
    words = vocabulary(word for each in tokens for word in each)
    followed = which(token, tokens[0], min(1, len(tokens[0]) - 1))
    table, projections = _drawn(seed, len(words), sizes or Sizes())
    embedded = [table[torch.tensor([words[word] for word in each])] for each in tokens]
    sources = (embedded[0], embedded[-1], embedded[-1])
    query, key, value = (source @ weight.mT for source, weight in zip(sources, projections, strict=True))
    steps = [
        *_text_steps(texts, tokens, words),
        *_embedding_steps(tokens, embedded, words, table, seed),
        _projection(
            "queries", "q_i = W_query x_i", embedded[0], projections[0], query, tokens[0], head, followed
        ),
        _projection("keys", "k_j = W_key x_j", embedded[-1], projections[1], key, tokens[-1], head),
        _projection("values", "v_j = W_value x_j", embedded[-1], projections[2], value, tokens[-1], head),
    ]
    return explain(
        query,
        key,
        value,
        token=followed,
        head=head,
        tokens=tokens[0],
        key_tokens=tokens[-1],
        stages={step.name: step for step in steps},
        title=f"{'self' if against is None else 'cross'}-attention, step by step (tokens and heads counted from 0)",
        **mechanism,
    )


def _drawn(seed: int, words: int, sizes: Sizes) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    heads = () if sizes.heads == 1 else (sizes.heads,)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        table = torch.nn.Embedding(words, sizes.dim).weight.detach()
        torch.manual_seed(seed)
        query = torch.rand(*heads, sizes.key_dim, sizes.dim)
        key = torch.rand(*heads, sizes.key_dim, sizes.dim)
        value = torch.rand(*heads, sizes.value_dim, sizes.dim)
    return table, (query, key, value)


def _text_steps(texts: list[str], tokens: list[list[str]], words: dict[str, int]) -> list[Step]:
    steps = []
    for text, each, of in zip(texts, tokens, _ORDER, strict=False):
        how = (
            "drop commas, split on spaces" if len(text.split()) > 1 else "one word: split into its characters"
        )
        steps += [Step(f"{of}sentence", text=text), Step(f"{of}tokens", how, text=each, shape=(len(each),))]
    steps.append(
        Step("vocabulary", "every different token, sorted and numbered", text=words, shape=(len(words),))
    )
    for each, of in zip(tokens, _ORDER, strict=False):
        ids = [str(words[word]) for word in each]
        steps.append(Step(f"{of}ids", "the number of each token", text=ids, shape=(len(ids),)))
    return steps


def _embedding_steps(
    tokens: list[list[str]], embedded: list[Tensor], words: dict[str, int], table: Tensor, seed: int
) -> list[Step]:
    formula = f"x_i = row id_i of a table {tuple(table.shape)}, drawn after torch.manual_seed({seed})"
    steps = []
    for each, x, of in zip(tokens, embedded, _ORDER, strict=False):
        chosen = torch.tensor([[float(words[word] == row) for row in range(len(words))] for word in each])
        check = compare(x, chosen.double() @ table.double(), "one-hot rows times the table")
        steps.append(Step(f"{of}embeddings", formula, x, tuple(x.shape), tuple(each), checks=(check,)))
    return steps


def _projection(
    name: str,
    formula: str,
    x: Tensor,
    weight: Tensor,
    result: Tensor,
    tokens: list[str],
    head: int,
    followed: int | None = None,
) -> Step:
    """q = W x (or k, v) of one head: all tokens, or the one that is followed."""
    own, matrix = (
        (result, weight) if result.ndim == 2 else (result[head % len(result)], weight[head % len(weight)])
    )
    check = compare(own, x.double() @ matrix.double().T, "the sums written out")
    note, shape = f"{formula.split()[2]} is {tuple(weight.shape)}", tuple(result.shape)
    if followed is None:
        return Step(name, formula, own, shape, tuple(tokens), note=note, checks=(check,))
    note += f', and this is token {followed}, "{brief(tokens[followed])}"'
    return Step(name, formula, own[followed], shape, note=note, checks=(check,))


def karina(token: str | None = None) -> Explanation:
    """Four tokens of two numbers, with projections that change nothing: Q = K = V = X."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 1.0]])
    text = "Карина идет в магазин"
    tokens = text.split()
    note = "the projections are the identity: Q = K = V = X"
    stages = {
        "sentence": text,
        "tokens": Step("tokens", "split on spaces", text=tokens, shape=(len(tokens),)),
        "embeddings": Step("embeddings", "X, given", x, tuple(x.shape), tuple(tokens), note=note),
    }
    title = "self-attention, small enough for paper (tokens counted from 0)"
    return explain(x, x, x, token=which(token, tokens, None), tokens=tokens, stages=stages, title=title)


LIFE = "Life is short, eat dessert first"
LIFE_ELSEWHERE = "Short is the life that waits for dessert"
EXAMPLES = ("life-is-short", "life-is-short-heads", "life-is-short-cross", "karina")


def example(name: str, token: str | None = None, head: int = 0) -> Explanation:
    """A named example, at the token that it is published with unless another is asked for."""
    if name == "karina" and head == 0:
        return karina(token)
    if name == "life-is-short":
        return sentence(LIFE, token=token, head=head)
    if name == "life-is-short-heads":
        return sentence(LIFE, token=token, head=head, sizes=Sizes(heads=3))
    if name == "life-is-short-cross":
        return sentence(LIFE, against=LIFE_ELSEWHERE, token=token, head=head)
    if name == "karina":
        raise ValueError(f"head {head}: the only head of karina is 0")
    raise ValueError(f"there is no example {name!r}; there are: {', '.join(EXAMPLES)}")
