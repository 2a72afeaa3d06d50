"""The page in a real browser: it asks for nothing, says nothing on the console, and shows what the record holds."""

from collections.abc import Iterator

import pytest
import torch
from playwright.sync_api import Browser, Page, sync_playwright

from regard.look import Record, Site, Token, html

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        yield browser
        browser.close()


class Opened:
    """A page and what it did while it was open."""

    def __init__(self, browser: Browser, path, scheme: str = "light") -> None:
        self.requests, self.said, self.errors, self.dialogs = [], [], [], []
        self.page: Page = browser.new_page(color_scheme=scheme)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready]")
        assert self.requests.pop(0) == path.as_uri()

    def quiet(self) -> bool:
        return [*self.requests, *self.said, *self.errors, *self.dialogs] == []


@pytest.fixture
def opened(browser, tmp_path):
    pages = []

    def open_(record: Record, scheme: str = "light", **place) -> Opened:
        path = tmp_path / "attention.html"
        path.write_bytes(html.page(record, **place).encode())
        pages.append(Opened(browser, path, scheme))
        return pages[-1]

    yield open_
    for one in pages:
        one.page.close()


def pixel(page: Page, selector: str, x: int, y: int) -> list[int]:
    script = "(canvas, [x, y]) => [...canvas.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3)"
    return page.locator(selector).evaluate(script, [x, y])


@pytest.mark.parametrize(
    ("scheme", "ground", "none", "all_"),
    [
        ("light", "rgb(255, 255, 255)", [255, 255, 255], [8, 34, 88]),
        ("dark", "rgb(20, 23, 27)", [24, 28, 33], [238, 247, 255]),
    ],
)
def test_it_is_quiet_and_drawn_in_both_schemes(opened, record, scheme, ground, none, all_):
    one = opened(record, scheme, layer=0, head=0)
    assert one.quiet()
    assert one.page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
    assert pixel(one.page, "#map canvas", 2, 2) == all_ and pixel(one.page, "#map canvas", 2, 1) == none


def test_the_scheme_can_change_while_it_is_open(opened, record):
    one = opened(record, "light", layer=0, head=0)
    one.page.emulate_media(color_scheme="dark")
    # The page's policy forbids evaluating strings in it, which Playwright's own waiting would do: ask from outside.
    for _ in range(100):
        if pixel(one.page, "#map canvas", 0, 0)[0] > 200:
            break
        one.page.wait_for_timeout(50)
    assert pixel(one.page, "#map canvas", 0, 0) == [238, 247, 255]
    assert pixel(one.page, "#heads td:nth-child(2) canvas >> nth=0", 0, 0) == [238, 247, 255]


def test_hostile_text_stays_text(opened, record):
    attack = "<script>alert(1)</script><img src=x onerror=alert(2)><a href='javascript:alert(3)'>"
    record.text = attack
    record.notes = [attack]
    record.label([Token("[CLS]", special=True), Token(attack), Token("<!--"), Token("]]>")])
    one = opened(record, layer=0, head=0)
    assert one.quiet()
    assert one.page.locator(".text").inner_text() == attack
    assert one.page.locator("#tokens button").nth(1).inner_text() == attack
    assert one.page.locator("img, a, script:not([type]) ~ script").count() == 0


def test_every_head_is_there_and_can_be_chosen(opened, record):
    one = opened(record, layer=0, head=0)
    heads = one.page.locator("#heads button")
    assert heads.count() == 4
    assert (
        heads.nth(1)
        .get_attribute("aria-label")
        .startswith("layer 0, head 1: looks mostly at the token before")
    )
    heads.nth(2).click()
    assert (
        one.page.locator("#head-title")
        .inner_text()
        .startswith("Layer 1, head 0: looks mostly at the first token")
    )
    assert [button.get_attribute("aria-pressed") for button in heads.all()] == [
        "false",
        "false",
        "true",
        "false",
    ]
    one.page.select_option("#layer", "0")
    one.page.select_option("#head", "1")
    assert one.page.locator("#head-title").inner_text().startswith("Layer 0, head 1")
    assert one.quiet()


def test_a_token_shows_what_it_attends_to(opened, record):
    one = opened(record, layer=0, head=1)
    one.page.locator("#tokens button").nth(3).click()
    first = one.page.locator("#rows tr").first
    assert (
        first.locator("td").nth(0).inner_text() == "日本"
        and first.locator("td").nth(1).inner_text() == "1.000"
    )
    assert one.page.locator("#said").inner_text() == "[SEP] → 日本: 1.000"
    assert one.page.locator("#tokens button[aria-pressed=true]").inner_text() == "[SEP]"


def test_the_keyboard_walks_the_map(opened, record):
    one = opened(record, layer=0, head=0)
    one.page.locator("#tokens button").nth(0).click()
    one.page.locator("#map canvas").focus()
    one.page.keyboard.press("ArrowDown")
    one.page.keyboard.press("ArrowDown")
    one.page.keyboard.press("ArrowUp")
    assert one.page.locator("#said").inner_text() == "<b>bold</b> → <b>bold</b>: 1.000"


def test_pointing_at_a_cell_reads_it(opened, record):
    one = opened(record, layer=1, head=1)
    one.page.locator("#map canvas").hover(position={"x": 80, "y": 20})
    assert one.page.locator("#said").inner_text() == "[CLS] → 日本: 0.250"


def test_arabic_runs_from_the_right(opened, record):
    record.text = "مرحبا بالعالم"
    record.label([Token(word) for word in ("مرحبا", "بال", "عا", "لم")])
    one = opened(record)
    boxes = [button.bounding_box()["x"] for button in one.page.locator("#tokens button").all()]
    assert boxes == sorted(boxes, reverse=True)
    assert one.page.evaluate("getComputedStyle(document.querySelector('.text')).direction") == "rtl"


def test_cross_attention_shades_the_other_side(opened, record):
    site = record.sites[0]
    cross = Site("x", site.query, site.key[:, :, :2], site.value[:, :, :2], site.output, 1.0, kind="cross")
    cross.key_tokens = (Token("un"), Token("deux"))
    cross.__dict__["weights"] = torch.tensor([0.2, 0.8]).expand(1, 2, 4, 2)
    one = opened(Record([cross], text="a b"))
    assert one.page.locator("#keys").inner_text().split() == ["un", "deux"]
    assert one.page.locator("#rows tr").first.inner_text().split() == ["deux", "0.800"]
    assert one.quiet()


def test_heads_that_were_left_out_cannot_be_chosen(opened, record, monkeypatch):
    monkeypatch.setattr(html, "_BUDGET", 20)
    one = opened(record, layer=1, head=0)
    assert (
        one.page.locator("#heads button").count() == 1 and one.page.locator("#heads .left-out").count() == 3
    )
    assert one.page.locator("#head option").all_inner_texts() == ["0"]
    assert "Only layer 1, head 0 is in this page" in one.page.locator("footer").inner_text()


def test_eight_bits_show_the_same_map(opened, record, monkeypatch):
    monkeypatch.setattr(html, "_BUDGET", 70)
    one = opened(record, layer=1, head=1)
    assert one.page.locator("#heads button").count() == 4
    assert one.page.locator("#said").inner_text().endswith(": 0.252")
    assert "to within 0.004" in one.page.locator("footer").inner_text()


def test_a_long_text_opens_without_a_node_a_cell(opened):
    length = 400
    site = Site("a", *[torch.zeros(1, 12, length, 1)] * 4, scale=1.0)
    site.__dict__["weights"] = torch.eye(length).expand(1, 12, length, length)
    one = opened(Record([site], text="long"))
    assert one.quiet()
    assert one.page.evaluate("document.querySelectorAll('*').length") < 8 * length
