"""What `regard doctor MODEL` prints: every place of attention of a model, and what can be seen there."""

from __future__ import annotations

import json
from itertools import groupby

from rich.console import Console
from rich.text import Text

from regard.look._doctor_model import Finding, doctor
from regard.look._model import load_model
from regard.look._tokens import visible


def show(source: str, *, as_json: bool = False) -> None:
    """Look a model over, and print what was found, one line a place; places that agree stand under one reason."""
    loaded = load_model(source)
    found = doctor(loaded.model)
    if as_json:
        print(json.dumps([vars(finding) for finding in found], ensure_ascii=False, indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in lines(loaded.name, found):
        console.print(line)


def lines(name: str, found: list[Finding]) -> list[Text]:
    """The findings as lines: the verdict, then for each kind of place why, the way out, and where."""
    if not found:
        return [Text(f"{name}: no attention was found in this model; there is nothing for a watch to see")]
    seen = sum(finding.seen == "everything" for finding in found)
    made = [
        Text(
            f"{name}: {len(found)} places of attention; a watch sees everything at {seen} of them",
            style="bold",
        )
    ]
    order = sorted(range(len(found)), key=lambda place: (_kind(found[place]), place))
    for kind, places in groupby(order, key=lambda place: _kind(found[place])):
        each = [found[place] for place in places]
        module, implementation, sees, why, fix = kind
        made.append(Text())
        made.append(Text(f"{len(each)} x {module} ({implementation}): a watch sees {sees}"))
        made.append(Text(f"   why: {why}"))
        if fix:
            made.append(Text(f"   fix: {fix}", style="bold"))
        made += [Text(f"   {visible(finding.name)}", style="dim") for finding in each]
    return made


def _kind(finding: Finding) -> tuple[str, str, str, str, str]:
    return finding.module, finding.implementation, finding.seen, finding.why, finding.fix
