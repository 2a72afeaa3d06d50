"""What the page says about itself: where the numbers come from, how exact they are, and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from html import escape

from regard.look._page_pack import Packer
from regard.look._record import Record
from regard.look._shown import LONGEST, TOP, Shown

_WARNING = (
    "A weight says where a head looked. It is no explanation of what the model answered: values of any size, the other "
    "heads, and the layers above stand between the two."
)
_COMPLETE = "This page is complete: it loads nothing and sends nothing."


def facts(record: Record, sites: list[Shown]) -> str:
    """One line: the model, how many layers and heads, how many tokens."""
    first = sites[0]
    length = f"{first.Tk} tokens" if first.Tq == first.Tk else f"{first.Tq} queries, {first.Tk} keys"
    heads = Counter(site.heads for site in sites).most_common(1)[0][0]
    said = f"{_count(len(sites), 'layer')}, {_count(heads, 'head')}, {length if first.Tk != 1 else '1 token'}"
    return f"{record.model}: {said}" if record.model else said


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def honesty(record: Record, sites: list[Shown], packer: Packer) -> str:
    """The panel at the foot of the page, as HTML."""
    listed = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(said)}</dd>" for name, said in _listed(sites, packer)
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in [*record.notes, _WARNING, _COMPLETE])
    return f"<dl>{listed}</dl>{notes}"


def _listed(sites: list[Shown], packer: Packer) -> Iterator[tuple[str, str]]:
    ran = Counter((site.site.implementation or "not recorded", site.site.dtype or "?") for site in sites)
    yield (
        "Implementation",
        "; ".join(f"{name}, {dtype} ({_count(count, 'layer')})" for (name, dtype), count in ran.items()),
    )
    if packer.signed:
        yield "Weights", "differences of weights, per head, before dropout"
    else:
        yield (
            "Weights",
            "those of attention itself, per head, before dropout; of the first sample of the batch",
        )
    broken = sum(len(site.not_numbers) for site in sites)
    if broken:
        yield (
            "Not numbers",
            f"in {_count(broken, 'head')} some weights are NaN or infinite; they are drawn as 0",
        )
    yield "Exactness", _exactness(packer)
    yield "In this page", _carried(sites, packer)


def _exactness(packer: Packer) -> str:
    forms = set(packer.forms.values())
    exact = f"the {TOP} largest of each row to within {1 / 32767 if packer.signed else 1 / 65535:.0e}"
    if "whole" not in forms:
        return f"{exact}; blocks in 8 bits along the square root (to within 0.004)"
    if packer.error < 1e-4:
        return f"every weight in 16 bits: the largest error is {packer.error:.1e}"
    return f"maps in 8 bits along the square root: the largest error here is {packer.error:.4f}; {exact}"


_FORMS = {
    "whole": "every weight",
    "blocks": "blocks (the largest and the mean weight of each) and lists of the largest weights",
    "lists": "lists of the largest weights",
    "numbers": "the numbers of the catalogue",
}


def _carried(sites: list[Shown], packer: Packer) -> str:
    every, count = len(packer.forms), Counter(packer.forms.values())
    said = []
    for form, what in _FORMS.items():
        if count[form]:
            whose = f"all {_count(every, 'head')}" if count[form] == every else _named(packer, form)
            said.append(f"{whose}: {what}")
    if any(max(site.Tq, site.Tk) > LONGEST for site in sites):
        said.append(f"maps of more than {LONGEST:,} tokens are not carried whole")
    if packer.lacking:
        said.append(f"of {_count(len(packer.lacking), 'head')} the record holds no map")
    less = [place for place, form in packer.forms.items() if form != "whole" and place not in packer.lacking]
    if any(
        max(sites[number].Tq, sites[number].Tk) <= LONGEST or packer.forms[number, head] == "numbers"
        for number, head in less
    ):
        said.append(f"all weights would have made it larger than {packer.budget / 1e6:g} MB")
    return "; ".join(said)


def _named(packer: Packer, form: str) -> str:
    """Heads by name while they are few, whole layers as layers, else how many."""
    found: dict[int, list[int]] = {}
    every: Counter[int] = Counter(layer for layer, _ in packer.forms)
    for (layer, head), has in sorted(packer.forms.items()):
        if has == form:
            found.setdefault(layer, []).append(head)
    if len(found) > 6:
        return _count(sum(len(heads) for heads in found.values()), "head")
    parts = [
        f"layer {layer}"
        if len(heads) == every[layer]
        else f"layer {layer} heads {', '.join(map(str, heads))}"
        for layer, heads in found.items()
    ]
    return ", ".join(parts)
