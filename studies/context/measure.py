"""A word's vector before and after every layer, and what the heads attended to from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import watch
from regard.look import EVERYTHING, Record
from regard.look._model import LoadedModel, tokens_of
from studies.context.sentences import Use


@dataclass(frozen=True)
class Seen:
    """One use of a word in a model: ``vectors`` (layers + 1, width) of the word's token, ``weights`` (layers, H, T)
    that its query gave to every token, and the tokens' texts."""

    word: str
    sense: str
    use: Use
    place: int
    tokens: list[str]
    special: list[bool]
    vectors: Tensor
    weights: Tensor

    @property
    def cues(self) -> list[int]:
        """The places of the tokens that give the sense away."""
        return [place for place, token in enumerate(self.tokens) if token.lower() in self.use.cues]


def look(loaded: LoadedModel, word: str, sense: str, use: Use, *, hide_cues: bool = False) -> Seen:
    """Run the model on a sentence, watched; with ``hide_cues`` no token of it can attend to the cues.

    Raises ValueError where the word is not one token of it, once, or a cue is none.
    """
    ids, table = tokens_of(loaded.tokenizer, use.sentence)
    tokens = [token.text for token in table]
    places = [place for place, token in enumerate(tokens) if token.lower() == word]
    missing = [cue for cue in use.cues if cue not in [token.lower() for token in tokens]]
    if len(places) != 1 or missing:
        wanted = ", ".join([word, *use.cues])
        raise ValueError(f"{use.sentence!r}: expected each of {wanted} to be one token of {loaded.name}")
    model: Any = loaded.model
    shown = torch.tensor([[not (hide_cues and token.lower() in use.cues) for token in tokens]]).long()
    with torch.no_grad(), watch(model, keep=EVERYTHING) as record:
        given = {"input_ids": torch.tensor([ids]), "attention_mask": shown}
        states = model(**given, output_hidden_states=True).hidden_states
    vectors = torch.stack([state[0, places[0]] for state in states]).double()
    special = [token.special for token in table]
    return Seen(word, sense, use, places[0], tokens, special, vectors, _from(record, places[0]))


def _from(record: Record, place: int) -> Tensor:
    return torch.stack([site.weights[0, :, place] for site in record.sites]).double()


def cosines(uses: list[Seen]) -> Tensor:
    """Cosine of every pair of uses at every depth: (layers + 1, uses, uses)."""
    vectors = torch.stack([use.vectors for use in uses], 1)
    vectors = vectors / vectors.norm(dim=-1, keepdim=True)
    alike: Tensor = vectors @ vectors.mT
    return alike


def by_depth(uses: list[Seen]) -> dict[str, list[float]]:
    """At every depth (0: the embedding) the mean cosine of two uses of one word in one sense, of one word in two
    senses, and of two words; and the share of uses whose nearest other use of the word has the same sense."""
    alike = cosines(uses)
    number = range(len(uses))
    word = torch.tensor([[uses[i].word == uses[j].word for j in number] for i in number])
    sense = word & torch.tensor([[uses[i].sense == uses[j].sense for j in number] for i in number])
    other = ~torch.eye(len(uses), dtype=torch.bool)
    nearest = alike.masked_fill(~(word & other), -2.0).argmax(-1)
    agree = torch.stack([sense[torch.arange(len(uses)), row].double().mean() for row in nearest])
    kinds = {"same_sense": sense & other, "other_sense": word & ~sense, "other_word": ~word}
    found = {name: [float(layer[pairs].mean()) for layer in alike] for name, pairs in kinds.items()}
    return found | {"nearest": agree.tolist()}


def steps(uses: list[Seen]) -> list[float]:
    """The mean cosine of a word's vector before and after each layer."""
    found = [torch.cosine_similarity(use.vectors[:-1], use.vectors[1:], dim=-1) for use in uses]
    return [float(cosine) for cosine in torch.stack(found).mean(0)]


def shares(uses: list[Seen]) -> list[dict[str, float]]:
    """Layer by layer the mean share of the word's attention that goes to itself, to cues, to special tokens, to the
    rest; and what cues would get if all tokens got the same."""
    layers = uses[0].weights.shape[0]
    found = [_shares(use) for use in uses]
    return [
        {name: sum(float(one[name][layer]) for one in found) / len(found) for name in found[0]}
        for layer in range(layers)
    ]


def _shares(use: Seen) -> dict[str, Tensor]:
    weights = use.weights.mean(1)
    cues = weights[:, use.cues].sum(-1)
    special = weights[:, torch.tensor(use.special)].sum(-1)
    own = weights[:, use.place]
    evenly = torch.full_like(own, len(use.cues) / len(use.tokens))
    return {
        "itself": own,
        "cues": cues,
        "special": special,
        "rest": 1 - own - cues - special,
        "evenly": evenly,
    }


def heads(uses: list[Seen]) -> Tensor:
    """The mean share of each head that goes from the word to its cues: (layers, H)."""
    return torch.stack([use.weights[:, :, use.cues].sum(-1) for use in uses]).mean(0)


def most_attended(use: Seen, layer: int, head: int, count: int = 3) -> list[tuple[str, float]]:
    """The tokens that one head attends to most from the word, with their weights."""
    best = use.weights[layer, head].topk(min(count, len(use.tokens)))
    return [(use.tokens[place], float(weight)) for weight, place in zip(*best, strict=True)]
