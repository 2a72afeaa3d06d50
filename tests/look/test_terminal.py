import io

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from regard.look import Record, Site, Token, terminal


def drawn(record, layer=0, head=0, **options):
    stream = io.StringIO()
    options = {"width": 80, "highlight": False, **options}
    terminal.show(record, layer, head, Console(file=stream, **options))
    return stream.getvalue()


def coloured(record, **options):
    return drawn(record, force_terminal=True, color_system="truecolor", no_color=False, **options)


def test_piped_is_plain_and_carries_the_numbers(record):
    said = drawn(record, 1, 1)
    assert "\x1b" not in said and "▀" not in said
    lines = said.splitlines()
    assert lines[0] == "<b>bold</b> 日本"
    assert lines[1] == "toy: 2 layers, 2 heads, 4 tokens"
    assert "note: a note & more" in lines
    assert "layer  0  s9  p9" in lines and "layer  1  f9  -7" in lines
    assert any(line.startswith("layer 1, head 1 looks at no one place") for line in lines)
    assert sum(line.endswith("  2 2 2 2") for line in lines) == 4
    assert any(
        line.split() == ["[SEP]", "→", "[CLS]", "0.25", "<b>bold</b>", "0.25", "日本", "0.25"]
        for line in lines
    )


def test_the_legend_says_what_the_signs_are(record):
    said = drawn(record)
    for words in ("p the token before", "f the first token", "a digit is tenths of the weight"):
        assert words in said


def test_a_terminal_gets_colour_and_another_drawing(record):
    said = coloured(record)
    assert "▀" in said and "\x1b[38;2;" in said
    assert "in tenths" not in said and "a digit is tenths" not in said


def test_no_color_gets_the_plain_drawing(record):
    plain = drawn(record, force_terminal=True, color_system="truecolor", no_color=True)
    assert "▀" not in plain and "layer  0  s9  p9" in plain
    assert "38;2;" not in plain and "48;2;" not in plain


def test_a_dumb_terminal_gets_the_plain_drawing(record):
    assert "▀" not in drawn(record, force_terminal=True, color_system=None)


def test_wide_characters_are_measured(record):
    rows = [line for line in drawn(record).splitlines() if " → " in line]
    assert len(rows) == 4
    assert {cell_len(row[: row.index("→")]) for row in rows} == {13}
    heads = [line for line in drawn(record).splitlines() if line.startswith(" " * 13) and "日" in line]
    assert [cell_len(line[: line.index("日")]) for line in heads] == [17]


@pytest.mark.parametrize(
    "label",
    ["日本語の長い言葉です", "👩\u200d👩\u200d👧", "e\u0301e\u0301", "averyveryverylongword", "مرحبا"],
)
def test_a_label_takes_its_room_and_no_more(label):
    assert cell_len(terminal._padded(label, 12)) == 12


def test_glyphs_keep_what_belongs_together():
    assert terminal._glyphs("e\u0301a") == ["e\u0301", "a"]
    assert terminal._glyphs("👩\u200d👧x") == ["👩\u200d👧", "x"]


def test_text_cannot_steer_the_terminal(record):
    record.text = "a\x1b]0;title\x07b \x1b[2J"
    record.sites[0].query_tokens = (*record.sites[0].query_tokens[:3], Token("[red]x[/red]"))
    said = drawn(record)
    assert "\x1b" not in said and "\x07" not in said
    assert "<001B>]0;title<0007>b <001B>[2J" in said and "[red]x[/red]" in said


def long_record(length):
    site = Site("a", *[torch.zeros(1, 1, length, 1)] * 4, scale=1.0)
    site.__dict__["weights"] = torch.eye(length).expand(1, 1, length, length)
    return Record([site], text="long")


def test_a_long_text_is_pooled_and_says_so():
    said = drawn(long_record(300), width=80)
    assert "300 x 300 weights do not fit: each cell is the largest of its block" in said
    assert "... and 252 more tokens" in said
    assert max(cell_len(line) for line in said.splitlines()) <= 80
    small = terminal._pooled(torch.eye(300), 30, 20)
    assert small.shape == (20, 30) and bool((small.amax(1) == 1.0).all())


def test_pooling_keeps_the_needle_and_stretches_the_small():
    weights = torch.zeros(100, 100)
    weights[57, 3] = 0.9
    assert float(terminal._pooled(weights, 7, 9).max()) == pytest.approx(0.9)
    assert torch.equal(terminal._pooled(torch.tensor([[0.5]]), 2, 2), torch.full((2, 2), 0.5))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_many_heads_are_folded_into_the_width(width):
    site = Site("a", *[torch.zeros(1, 40, 3, 1)] * 4, scale=1.0)
    site.__dict__["weights"] = torch.full((1, 40, 3, 3), 1 / 3)
    for line in (
        terminal._plain_glance(Record([site]), width)[1:-2] + terminal._glance(Record([site]), width)[1:]
    ):
        assert line.cell_len <= width


def test_one_token(record):
    assert "0" in drawn(long_record(1)) and "▀" in coloured(long_record(1))
