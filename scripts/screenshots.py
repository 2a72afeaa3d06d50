"""The pictures of the docs: pages in a browser at two widths and in both schemes, the terminal, a figure.

Names given on the command line choose among them; `--list` prints them. Each is a PNG of at most 150 kB.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright
from rich.console import Console

from regard.look import Keep, Record, html, terminal
from regard.look._difference import difference
from regard.look._model import LoadedModel, load_model, record_of
from regard.look.figure import figure

DOCS = Path(__file__).resolve().parent.parent / "docs"
SENTENCE = "The animal didn't cross the street because it was too tired."
OTHER = "The animal didn't cross the street because it was too wide."
LARGEST = 150_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run"]


@cache
def model(name: str) -> LoadedModel:
    return load_model(name)


@cache
def sentence() -> Record:
    return record_of(model("minilm"), SENTENCE)


def shot(page: Page, source: str, *, width: int, scheme: str, height: int, hash_: str = "") -> bytes:
    """The top of a page, as it opens."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(source, encoding="utf-8")
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": height})
        page.goto(path.as_uri() + hash_)
        if source.startswith("<!doctype"):
            page.wait_for_selector("body[data-ready]")
        found: bytes = page.screenshot()
        return found


def whole_page(page: Page) -> bytes:
    return shot(page, html.page(sentence()), width=1280, scheme="light", height=1440)


def dark(page: Page) -> bytes:
    address = "#layer=0&head=5&token=8&side=key"
    return shot(page, html.page(sentence()), width=1280, scheme="dark", height=1440, hash_=address)


def narrow(page: Page) -> bytes:
    return shot(page, html.page(sentence()), width=420, scheme="light", height=1900)


def compared(page: Page) -> bytes:
    other = record_of(model("minilm"), OTHER)
    return shot(page, html.page(difference(sentence(), other)), width=1280, scheme="light", height=1440)


def long(page: Page) -> bytes:
    """More than 2,048 tokens: blocks, lists and needles of an induction head."""
    text = (DOCS.parent / "CONTRACTS.md").read_text(encoding="utf-8")
    keep = Keep(topk=8, pool=1024, layers=(17, 18), heads=(3, 6))
    record = record_of(model("smollm2"), text, keep=keep)
    shot(page, html.page(record, 17, 3), width=1280, scheme="light", height=900)
    first, last = (page.locator(name).bounding_box() for name in ("#head-title", "#needles-part"))
    assert first is not None and last is not None
    height = last["y"] + last["height"] - first["y"] + 40
    clip = {"x": 0, "y": first["y"] - 20, "width": 1280, "height": height}
    found: bytes = page.screenshot(full_page=True, clip=clip)  # type: ignore[arg-type]
    return found


def in_terminal(page: Page) -> bytes:
    console = Console(
        record=True, force_terminal=True, width=100, file=io.StringIO(), color_system="truecolor"
    )
    terminal.show(sentence(), 5, 11, console, [10])
    drawn = console.export_svg(title=f'regard look "{SENTENCE}" --tokens it')
    page.set_viewport_size({"width": 900, "height": 1400})
    page.set_content(f"<style>body{{margin:0}} svg{{width:900px;height:auto;display:block}}</style>{drawn}")
    found: bytes = page.locator("svg").first.screenshot()
    return found


def drawing(_: Page) -> bytes:
    return figure(sentence(), 5, 11).png()


PICTURES: dict[str, Callable[[Page], bytes]] = {
    "look-page": whole_page,
    "look-page-dark": dark,
    "look-page-narrow": narrow,
    "look-compare": compared,
    "look-long": long,
    "look-terminal": in_terminal,
    "look-figure": drawing,
}


def small(data: bytes) -> bytes:
    """The same picture with a palette: of 256 colours, or of as many fewer as it takes to be small."""
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    for colours in (256, 128, 64, 32):
        kept = io.BytesIO()
        picture.quantize(colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            kept, "PNG", optimize=True
        )
        if kept.tell() <= LARGEST:
            break
    return kept.getvalue()


def main(arguments: list[str]) -> int:
    if arguments == ["--list"]:
        print("\n".join(PICTURES))
        return 0
    unknown: list[Any] = [name for name in arguments if name not in PICTURES]
    if unknown:
        print(
            f"screenshots: there is no picture {unknown[0]!r}; there are: {', '.join(PICTURES)}",
            file=sys.stderr,
        )
        return 2
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        for name in arguments or PICTURES:
            page = browser.new_page()
            data = small(PICTURES[name](page))
            page.close()
            if len(data) > LARGEST:
                print(
                    f"screenshots: {name} takes {len(data) / 1000:.0f} kB; it may take 150", file=sys.stderr
                )
                return 1
            (DOCS / f"{name}.png").write_bytes(data)
            print(f"docs/{name}.png: {len(data) / 1000:.0f} kB")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
