"""A record whose weights can be read, and a browser to look at its page, for the tests of what draws records."""

import pytest
import torch

from regard.look import Record, Site, Token, html
from tests.look.browser import Opened, chromium


@pytest.fixture
def record() -> Record:
    """Two layers of two heads over four tokens, with weights that can be read: each head looks at one place.

    Layer 0: head 0 at the token itself, head 1 at the token before. Layer 1: head 0 at the first token, head 1 at all.
    """
    words = ("[CLS]", "<b>bold</b>", "日本", "[SEP]")
    tokens = tuple(Token(word, special=word.startswith("["), id=number) for number, word in enumerate(words))
    first = torch.zeros(4, 4)
    first[:, 0] = 1.0
    maps = [[torch.eye(4), torch.eye(4).roll(1, dims=0)], [first, torch.full((4, 4), 0.25)]]
    sites = []
    for number, pair in enumerate(maps):
        rows = torch.arange(16.0).reshape(1, 2, 4, 2)
        site = Site(
            f"layer.{number}",
            rows,
            rows + 1,
            rows + 2,
            rows + 3,
            scale=0.5,
            query_tokens=tokens,
            key_tokens=tokens,
        )
        site.__dict__["weights"] = torch.stack(pair)[None]
        sites.append(site)
    return Record(sites, text="<b>bold</b> 日本", model="toy", notes=["a note & more"])


@pytest.fixture(scope="module")
def browser():
    with chromium() as one:
        yield one


@pytest.fixture
def opened(browser, tmp_path):
    pages = []

    def open_(record, scheme="light", *, address="", width=1280, budget=html.BUDGET, media=None, **place):
        path = tmp_path / f"page{len(pages)}.html"
        path.write_bytes(html.page(record, budget=budget, **place).encode())
        pages.append(Opened(browser, path, address, width, color_scheme=scheme, **(media or {})))
        return pages[-1]

    yield open_
    for one in pages:
        one.page.close()
