"""A record without its text: what can be shown of a private prompt."""

from __future__ import annotations

import dataclasses

from regard.look._difference import Difference
from regard.look._record import Record, Site, Token

_NOTE = (
    "the text was redacted: tokens are named by their place, and the text, the image, token ids, queries, keys, values "
    "and outputs are not in here; where special tokens stand and the weights themselves still are"
)


def redact(record: Record) -> Record:
    """The same record with the text of every token masked; lengths, weights and statistics are kept.

    Text, image, ids and offsets of tokens go, and so do queries, keys, values and outputs, from which tokens could be
    read off. Special tokens keep their names. Weights that were to be computed from query and key are computed first.
    """
    sites = [_site(site) for site in record.sites]
    return Record(sites, "", record.model, [*record.notes, _NOTE])


def redact_difference(found: Difference) -> Difference:
    """The same comparison with the text of every token masked; the two are named by their order."""
    pairs = [
        dataclasses.replace(
            pair, query_tokens=_masked(pair.query_tokens), key_tokens=_masked(pair.key_tokens)
        )
        for pair in found.sites
    ]
    return dataclasses.replace(
        found, first="the first", second="the second", sites=pairs, notes=[*found.notes, _NOTE]
    )


def _site(site: Site) -> Site:
    whole = site.weights if site.has_weights else site.whole
    heads_kept = None if site.has_weights else site.heads_kept
    return dataclasses.replace(
        site,
        query=None,
        key=None,
        value=None,
        output=None,
        whole=whole,
        heads_kept=heads_kept,
        sizes=site.sizes,
        given=None,
        query_tokens=_masked(site.query_tokens),
        key_tokens=_masked(site.key_tokens),
    )


def _masked(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    return tuple(
        Token(token.text, special=True) if token.special else Token(f"·{place}")
        for place, token in enumerate(tokens)
    )
