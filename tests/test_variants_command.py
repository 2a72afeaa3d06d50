"""`regard variants`: the table is made of what the library answers, and the page of the docs is what it prints."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from regard import _plan, attention, plan
from regard.variants import _catalogue as catalogue
from regard.variants import _view

PAGE = Path(__file__).parents[1] / "docs" / "variants.md"
ENTRIES = [entry for section in (*catalogue.SECTIONS, catalogue.SEVERAL) for entry in section.entries]


def run(capsys, name=None, *, markdown=False):
    _view.show(name, markdown=markdown)
    return capsys.readouterr().out


def test_the_table_has_a_line_for_each(capsys):
    lines = run(capsys).splitlines()
    for entry in ENTRIES:
        (line,) = [line for line in lines if line.split()[:1] == [entry.word] and line.startswith("  ")]
        mechanism = entry.example()
        assert mechanism.formula in line and mechanism.paper in line
        kernels = line.split("  ")[-1].strip().split(", ")
        assert kernels[0] == plan(*entry.tensors(), **entry.example()).kernel


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.word)
def test_kernels_that_are_named_take_it_and_agree_with_the_definition(entry):
    tensors = [torch.randn_like(x) for x in entry.tensors()]
    with _plan.use_kernel("reference"):
        expected = attention(*tensors, **entry.example())
    taken = [name for name, reason in catalogue.kernels_for(entry).items() if reason is None]
    assert taken
    for name in taken:
        with _plan.use_kernel(name):
            torch.testing.assert_close(attention(*tensors, **entry.example()), expected, rtol=1e-4, atol=1e-5)


def test_one_in_full(capsys):
    out = run(capsys, "streaming")
    assert "regard.variants.streaming(window: int, sinks: int = 4" in out
    assert "Window(left=2, right=0), right=Sinks(n=2)" in out
    assert "inline: takes it" in out
    assert "inline: takes it" in run(capsys, "graph_v2")
    assert " at 0x" not in run(capsys, "transformer_xl")


def test_in_a_terminal_it_is_a_table():
    console = Console(force_terminal=True, width=140)
    with console.capture() as captured:
        for section in catalogue.SECTIONS:
            console.print(_view._table(section))
    drawn = captured.get()
    assert "sliding_window" in drawn and "│" in drawn


def test_the_page_in_the_docs_is_what_the_command_prints(capsys):
    assert run(capsys, markdown=True) == PAGE.read_text(encoding="utf-8"), (
        "docs/variants.md is not up to date; write it with: regard variants --markdown > docs/variants.md"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "there is no variant 'nonsense'; there are: alibi, bahdanau"),
        (["alibi", "--markdown"], "not both"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    command = [sys.executable, "-m", "regard.cli", "variants", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
