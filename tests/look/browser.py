"""A page in a real browser, and everything it did while it was open."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        yield browser
        browser.close()


class Opened:
    """A page and what it did while it was open."""

    def __init__(self, browser: Browser, path: Path, address: str = "", width: int = 1280, **media) -> None:
        self.requests, self.said, self.errors, self.dialogs = [], [], [], []
        self.page: Page = browser.new_page(viewport={"width": width, "height": 900}, **media)
        self.page.set_default_timeout(10_000)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        self.page.goto(path.as_uri() + address)
        self.page.wait_for_selector("body[data-ready]")
        assert self.requests.pop(0).startswith(path.as_uri())

    def quiet(self) -> bool:
        """Whether it asked for nothing, said nothing on the console and made no error."""
        heard = [*self.requests, *self.said, *self.errors, *self.dialogs]
        assert heard == [], heard
        return True

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def until(self, selector: str, wanted: str) -> None:
        """Wait for a text. The page's policy forbids evaluating strings in it: ask from outside."""
        for _ in range(100):
            if wanted in self.page.locator(selector).inner_text():
                return
            self.page.wait_for_timeout(30)
        raise AssertionError(f"{selector} says {self.page.locator(selector).inner_text()!r}, not {wanted!r}")

    def rows(self, selector: str) -> list[list[str]]:
        """The cells of a table's body, but for the bars."""
        rows = self.page.locator(f"{selector} tbody tr").all()
        return [[cell.inner_text() for cell in row.locator("th, td").all()] for row in rows]

    def table(self, selector: str) -> list[tuple[str, str]]:
        return [(row[0], row[1]) for row in self.rows(selector)]

    def pixel(self, selector: str, x: float, y: float) -> list[int]:
        """The colour of a canvas at a place, in CSS pixels."""
        script = """(canvas, [x, y]) => {
          const [across, down] = [canvas.width / canvas.clientWidth, canvas.height / canvas.clientHeight];
          const pen = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
          pen.drawImage(canvas, -Math.floor(x * across), -Math.floor(y * down));
          return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
        }"""
        return self.page.locator(selector).evaluate(script, [x, y])

    def cell(self, query: int, key: int, count: int = 4) -> list[int]:
        """The colour in the middle of a cell of the head's map."""
        box = self.page.locator("#weights").bounding_box()
        return self.pixel(
            "#weights", box["width"] * (key + 0.5) / count, box["height"] * (query + 0.5) / count
        )
