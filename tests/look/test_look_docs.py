"""docs/look.md: its Python runs, its commands have the options that it names, its pictures are there and small."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from regard.cli import app
from tests.look.pages import record_with

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "look.md").read_text(encoding="utf-8")


def test_the_python_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = record_with(torch.rand(12, 11, 11).softmax(-1))
    record.sites = record.sites * 6
    record.save("regard-out/attention")
    [block] = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    namespace = {}
    exec(compile(block, "look.md", "exec"), namespace)
    assert "<svg" in (tmp_path / "head.svg").read_text(encoding="utf-8")
    assert namespace["page"].startswith("<!doctype html>")


def lines():
    [block] = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return [line.partition("|")[0] for line in block.splitlines() if line]


@pytest.mark.parametrize("line", lines())
def test_every_command_of_the_page_can_be_said(line):
    words = shlex.split(line, comments=True)
    command = get_command(app).commands[words[1]]
    context = command.make_context(words[1], words[2:])
    assert words[0] == "regard" and context.params


@pytest.mark.parametrize("page", ["docs/look.md", "README.md"])
def test_the_pictures_are_there_and_small(page):
    path = DOCS.parent / page
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", path.read_text(encoding="utf-8"))
    assert len(pictures) >= 2
    for name in pictures:
        assert (path.parent / name).stat().st_size <= 150_000
