"""The worked example as a page and as Markdown says what the plain text says, and nothing in a token can act."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from regard.look import explain
from regard.look._examples import example
from tests.look.browser import chromium

NASTY = ("<script>alert(1)</script>", "| a | b |", "`tick` ``` fence", "\u202eright", "# *bold*", "")


def nasty() -> object:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 6, 4) for _ in range(3))
    return explain(query, key, value, token=2, tokens=NASTY)


def test_the_page_has_every_step_and_check() -> None:
    worked = example("life-is-short")
    page = worked.html()
    headings = re.findall(r"<h2>(\d+)\. ([^<]*)", page)
    assert [name.strip() for _, name in headings] == [step.name for step in worked.steps]
    assert page.count("agrees with") == len(worked.checks) and worked.verdict().split(":")[0] in page
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page
    assert not re.search(r"<script|https?://|src=|href=", page)
    assert "0.4917" in page and "dessert" in page


def test_markdown_has_every_step_and_check() -> None:
    worked = example("life-is-short")
    text = worked.markdown()
    assert re.findall(r"^## \d+\. ([^(\n]*?)(?: \(|$)", text, re.MULTILINE) == [
        step.name for step in worked.steps
    ]
    assert text.count("agrees with") == len(worked.checks)
    assert "| 4 | dessert | 0.4917 |" in text


def test_tokens_cannot_act_in_the_page() -> None:
    page = nasty().html()
    assert "<script" not in page and "&lt;script&gt;" in page and "\u202e" not in page


def test_tokens_cannot_act_in_markdown() -> None:
    text = nasty().markdown()
    assert not re.search(r"(?<!\\)<", re.sub(r"(?ms)^(`{3,})text$.*?^\1$", "", text))
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows) and rows
    fences = re.findall(r"^(`{3,})(?:text)?$", text, re.MULTILINE)
    assert len(fences) % 2 == 0
    assert all(fences[place] == fences[place + 1] for place in range(0, len(fences), 2))
    assert "\u202e" not in text


def test_a_step_that_differs_is_marked() -> None:
    import dataclasses

    from regard.look import Explanation
    from regard.look.explain import Check

    worked = example("karina")
    wrong = dataclasses.replace(worked.steps[-1], checks=(Check("elsewhere", 1.0, 0.0),))
    broken = Explanation(worked.title, (*worked.steps[:-1], wrong), worked.token)
    assert 'class="bad"' in broken.html() and 'class="bad"' not in worked.html()
    assert "DIFFERS from elsewhere" in broken.markdown()


def test_what_is_long_is_cut_and_said() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 60, 40) for _ in range(3))
    worked = explain(query, key, value, token=3)
    for made in (worked.html(), worked.markdown()):
        assert "keys with smaller weights are not shown" in made and "more numbers" in made
    assert "more rows" in explain(query, key, value).html()


@pytest.mark.parametrize("suffix", [".html", ".md", ".txt"])
def test_it_is_written_by_its_suffix(tmp_path: Path, suffix: str) -> None:
    worked = example("karina")
    path = worked.save(tmp_path / f"worked{suffix}")
    made = {".html": worked.html(), ".md": worked.markdown(), ".txt": f"{worked}\n"}[suffix]
    assert path.read_text("utf-8") == made
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_other_suffixes_and_places(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot write a.pdf: a worked example goes to .html, .md, .txt"):
        example("karina").save(tmp_path / "a.pdf")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write to"):
        example("karina").save(tmp_path / "file" / "a.md")


def test_in_a_notebook_it_is_a_frame() -> None:
    frame = example("karina")._repr_html_()
    assert frame.startswith("<iframe") and "srcdoc=" in frame and "<script" not in frame


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser_it_loads_nothing_and_says_nothing(tmp_path: Path, scheme: str) -> None:
    path = nasty().save(tmp_path / "worked.html")
    with chromium() as browser:
        page = browser.new_context(color_scheme=scheme, viewport={"width": 420, "height": 800}).new_page()
        asked, said = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(path.as_uri())
        assert asked == [path.as_uri()] and said == []
        assert page.locator("h2").count() == len(nasty().steps) + 1
        assert page.get_by_role("main").locator("bdi", has_text="<script>alert(1)</script>").count() > 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 420
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "scroll"
