"""What to show first: the head and the token that link the words of the text most."""

from __future__ import annotations

from regard.look._patterns import refuse
from regard.look._shown import Shown


def opening(sites: list[Shown], layer: int | None = None, head: int | None = None) -> tuple[int, int]:
    """The (place in `sites`, head) to show in full: the ones asked for, else the most telling.

    `layer` is what a site is called. ValueError where there is none of this name, or no such head.

    The most telling head is the one whose largest weight between tokens of the text that are no neighbours is largest,
    averaged over the tokens that look. Special tokens do not count, on either side.
    """
    chosen = [site for site in sites if layer is None or site.called == layer]
    if not chosen:
        refuse("layer", layer, [site.called for site in sites])
    most = max(site.heads for site in chosen)
    if head is not None and not 0 <= head < most:
        refuse("head", head, list(range(most)))
    places = [(site, one) for site in chosen for one in range(site.heads) if head is None or one == head]
    if len(places) == 1:
        return places[0][0].number, places[0][1]
    scores = [site.interest(one) for site, one in places]
    best = max(
        range(len(places)), key=lambda place: float(scores[place].mean()) if scores[place].size else -1.0
    )
    return places[best][0].number, places[best][1]


def telling_query(site: Shown, head: int) -> int:
    """The query that gives most weight to one token of the text that is no neighbour."""
    found = site.interest(head)
    return int(found.argmax()) if found.size else 0
