"""A Difference as renderers see it: its changes of weights as signed maps, its distances as what a head does."""

from __future__ import annotations

from regard.look._difference import Difference, SiteDifference
from regard.look._head_columns import Column
from regard.look._record import Record, Site, Sizes
from regard.look._shown import Array, Shown

# Jensen-Shannon distances from which a head is said to have changed, and changed much.
SOME, MUCH = 0.1, 0.3


class Compared(Shown):
    """One pair of sites: the second's weights minus the first's, over the tokens that both have."""

    def __init__(self, record: Record, number: int, pair: SiteDifference) -> None:
        super().__init__(record, number)
        self.pair, self.called = pair, pair.first

    def said(self, head: int) -> str:
        """How much it changed."""
        return f"{self.kind(head)} (Jensen-Shannon distance {self.distance(head):.3f} of 1)"

    def kind(self, head: int) -> str:
        """The same in words."""
        distance = self.distance(head)
        return "changed much" if distance >= MUCH else "changed" if distance >= SOME else "hardly changed"

    def share(self, head: int) -> float | None:
        """The same as a number from 0 to 1."""
        return self.distance(head)

    def distance(self, head: int) -> float:
        """The mean over the queries of the Jensen-Shannon distance."""
        return float(self.pair.distance[head])

    def interest(self, head: int) -> Array:
        """(Tq,): how much each row changed."""
        found: Array = self.pair.row_distance[head].float().numpy()
        return found


COLUMNS = [
    Column(
        "kind",
        "kind",
        f"changed much: a distance of {MUCH} or more; changed: {SOME} or more",
        "words",
        lambda site, head: site.kind(head),
    ),
    Column(
        "distance",
        "distance",
        "Jensen-Shannon distance, 0 (the same) to 1 (nothing in common), the mean over the rows",
        "fine",
        lambda site, head: round(site.distance(head), 4) if isinstance(site, Compared) else None,
    ),
    Column(
        "largest gain",
        "largest_gain",
        "the largest weight that the second has more than the first",
        "fine",
        lambda site, head: _extreme(site, head, 1),
    ),
    Column(
        "largest loss",
        "largest_loss",
        "the largest weight that the first has more than the second",
        "fine",
        lambda site, head: _extreme(site, head, -1),
    ),
]


def compared(difference: Difference) -> tuple[Record, list[Compared]]:
    """The record of the changes, and its sites."""
    sites = [_site(pair) for pair in difference.sites]
    notes = ["The maps show the weights of the second minus those of the first.", *difference.notes]
    record = Record(sites, f"{difference.first}\n{difference.second}", "", notes)
    pairs = enumerate(difference.sites)
    return record, [Compared(record, number, pair) for number, pair in pairs]


def _site(pair: SiteDifference) -> Site:
    heads, queries, keys = pair.change.shape
    return Site(
        pair.title,
        kind=pair.kind,
        layer=pair.layer,
        sizes=Sizes(1, heads, heads, queries, keys),
        whole=pair.change[None],
        query_tokens=pair.query_tokens,
        key_tokens=pair.key_tokens,
        dtype="float32",
        implementation="difference of two records",
    )


def _extreme(site: Shown, head: int, sign: int) -> float | None:
    weights = site.map(head)
    return round(max(0.0, float((sign * weights).max())), 4) if weights.size else None
