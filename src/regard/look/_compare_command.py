"""What the command `compare` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from regard.look import _look_out, _look_run, _terminal_json, terminal
from regard.look._difference import Difference, difference
from regard.look._opening import opening
from regard.look._page_sources import sources
from regard.look._record import Record
from regard.look._redact import redact_difference
from regard.look._terminal_draw import bar

_LISTED = 12


def compare(
    texts: Sequence[str],
    *,
    model: str | None,
    other_model: str | None,
    records: Sequence[Path],
    layer: int | None,
    head: int | None,
    outs: Sequence[Path],
    hidden: bool,
    as_json: bool,
) -> None:
    """Two texts in one model, one text in two models, or two saved records: what changed, head by head."""
    _look_out.check(outs, comparing=True)
    first, second = _two(texts, model, other_model, records)
    found = difference(first, second)
    if hidden:
        found = redact_difference(found)
    sites = sources(found)[1]
    layer, head = opening(sites, layer, head)
    written = _look_out.write(found, outs, (sites[layer].called, head, None))
    if as_json:
        print(_terminal_json.document(found, layer, head))
        return
    console = terminal.console()
    terminal.show(found, layer, head, console)
    _most_changed(found, console)
    if written:
        files = ", ".join(str(path) for path in written)
        console.print(f"written: {files}", markup=False, highlight=False, soft_wrap=True)


def _two(
    texts: Sequence[str], model: str | None, other_model: str | None, records: Sequence[Path]
) -> tuple[Record, Record]:
    if records:
        if len(records) != 2 or texts or model is not None or other_model is not None:
            raise ValueError("give two saved records and nothing else: regard compare --record A --record B")
        first, second = (_look_run.loaded_record(path) for path in records)
        return first, second
    wanted = 1 if other_model is not None else 2
    if len(texts) != wanted:
        raise ValueError(
            'give two texts: regard compare "one" "another", or one text and a second model: '
            f'regard compare "one" --other-model NAME; got {len(texts)} text{"" if len(texts) == 1 else "s"}'
        )
    saved = [text for text in texts if text.endswith((".npz", ".json")) and Path(text).is_file()]
    if saved:
        named = " ".join(f"--record {text}" for text in texts)
        raise ValueError(
            f"{saved[0]} is a file, and texts are compared here; of saved records: regard compare {named}"
        )
    if any(not text.strip() for text in texts):
        raise ValueError("the text is empty; give some words to look at")
    pairs = [(texts[0], model), (texts[-1], other_model or model)]
    first, second = (
        _look_run.made(model=name, text=text, image=None, record=None, target=None) for text, name in pairs
    )
    return first, second


def _most_changed(found: Difference, console: Console) -> None:
    console.print("the heads that changed most (Jensen-Shannon distance, 0 to 1)", style="bold")
    numbers = {pair.title: pair.first for pair in found.sites}
    for row in found.heads()[:_LISTED]:
        place = f"layer {numbers[row['name']]}, head {row['head']}"
        console.print(
            f"{place:<20} {row['distance']:.3f} {bar(row['distance'], 30)}",
            markup=False,
            highlight=False,
        )
    console.print()
