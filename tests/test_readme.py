"""What the README shows runs: its Python blocks in order, in one namespace. The same for the pages of the docs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "variants.md"]
_BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def blocks(text):
    """The Python blocks of a page, each padded so that line numbers in a traceback are the page's."""
    return ["\n" * text.count("\n", 0, found.start(1)) + found[1] for found in _BLOCK.finditer(text)]


def run(text, name):
    found = blocks(text)
    assert found, f"{name} has no ```python block"
    namespace = {"__name__": "__main__"}
    for block in found:
        exec(compile(block, name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page.read_text(encoding="utf-8"), str(page))


def test_blocks_share_a_namespace_and_other_languages_are_left_alone():
    text = "```python\na = 1\n```\ntext\n```sh\nexit 1\n```\n```python\nb = a + 1\n```\n"
    assert run(text, "page")["b"] == 2


def test_a_page_without_a_block_and_a_block_that_fails_are_failures():
    with pytest.raises(AssertionError, match="no ```python block"):
        run("# A page\n\n```sh\ntrue\n```\n", "page")
    with pytest.raises(ZeroDivisionError) as caught:
        run("# A page\n\n```python\n1 / 0\n```\n", "page.md")
    assert caught.traceback[-1].lineno == 3
