import copy
import io

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from regard.look import Record, Site, Sizes, Token, _terminal_draw, terminal
from regard.look._difference import difference
from regard.look._shown import shown
from tests.look.pages import record_with


def drawn(record, layer=0, head=0, tokens=(), **options):
    stream = io.StringIO()
    options = {"width": 80, "highlight": False, **options}
    terminal.show(record, layer, head, Console(file=stream, **options), tokens)
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
    assert "layer  0  s9  p9" in lines and "layer  1  f9  u9" in lines
    assert any(line.startswith("layer 1, head 1: looks everywhere alike") for line in lines)
    assert sum(line.endswith("  2 2 2 2") for line in lines) == 4
    assert any(
        line.split() == ["[SEP]", "→", "[CLS]", "0.25", "<b>bold</b>", "0.25", "日本", "0.25"]
        for line in lines
    )


def test_the_legend_says_what_the_signs_are(record):
    said = drawn(record)
    for words in ("p previous-token", "f first-token", "a digit is tenths of the weight"):
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
    assert cell_len(_terminal_draw.padded(label, 12)) == 12


def test_glyphs_keep_what_belongs_together():
    assert _terminal_draw.glyphs("e\u0301a") == ["e\u0301", "a"]
    assert _terminal_draw.glyphs("👩\u200d👧x") == ["👩\u200d👧", "x"]


def test_text_cannot_steer_the_terminal(record):
    record.text = "a\x1b]0;title\x07b \x1b[2J"
    record.sites[0].name = "\x1b[2Jname"
    record.sites[0].query_tokens = (*record.sites[0].query_tokens[:3], Token("[red]x[/]\x1b"))
    said = drawn(record)
    assert "\x1b" not in said and "\x07" not in said
    assert "<001B>]0;title<0007>b <001B>[2J" in said and "[red]x[/]<0…" in said


def test_one_token_is_shown_both_ways(record):
    lines = drawn(record, 0, 1, tokens=[3]).splitlines()
    at = lines.index("token 3, [SEP], attends to")
    assert lines[at + 1].split()[:3] == ["日本", "2", "1.000"] and "█" * 30 in lines[at + 1]
    assert lines[at + 2] == "token 3, [SEP], is attended to by" and lines[at + 3].split()[:2] == [
        "[CLS]",
        "0",
    ]
    assert "which tokens attend to which" not in lines
    with pytest.raises(ValueError, match="token 4: there are 4 tokens, counted from 0; give 0 to 3"):
        drawn(record, tokens=[4])


def test_cross_attention_names_both_sides():
    record = record_with(torch.tensor([0.2, 0.8]).expand(1, 4, 2).contiguous(), ["un", "deux"], kind="cross")
    record.sites[0].query_tokens = tuple(Token(word) for word in "abcd")
    lines = drawn(record, tokens=[1]).splitlines()
    assert "toy: 1 layer, 1 head, 4 queries, 2 keys" in lines
    assert [line.split() for line in lines if line.startswith("b  ")] == [["b", "2", "8"]]
    assert any(line.split()[:3] == ["deux", "1", "0.800"] for line in lines)
    assert not any("is attended to by" in line for line in lines)


def test_a_difference_has_signs_and_colours(record):
    other = copy.deepcopy(record)
    other.sites[0].__dict__["weights"] = torch.full((1, 2, 4, 4), 0.25)
    lines = drawn(difference(record, other), 0, 0).splitlines()
    assert any(line.endswith(" -7 2 2 2") for line in lines) and "layer  0  C" in "\n".join(lines)
    assert any("is all of it less" in line for line in lines)
    assert "\x1b[48;2;" in coloured(difference(record, other))


def long_record(length):
    return record_with(torch.eye(length)[None])


def test_a_long_text_is_pooled_and_says_so():
    said = drawn(long_record(300), width=80)
    assert "300 x 300 weights do not fit: each cell is the largest of its block" in said
    assert "... and 252 more tokens" in said
    assert max(cell_len(line) for line in said.splitlines()[1:]) <= 100


def test_blocks_and_lists_stand_in_for_weights_that_were_not_kept():
    length = 3000
    site = Site("layer.0", sizes=Sizes(1, 1, 1, length, length), scale=1.0, offset=0)
    site.pooled, site.pooled_max, site.cell = (
        torch.full((1, 1, 10, 10), 0.1),
        torch.eye(10)[None, None],
        (300, 300),
    )
    site.top_keys = torch.arange(length).reshape(1, 1, length, 1).to(torch.int32)
    site.top_weights = torch.full((1, 1, length, 1), 0.5)
    said = drawn(Record([site]), tokens=[2999])
    assert "3000 x 3000 weights do not fit" in said
    assert said.count("2999           2999   0.500") == 2
    bare = Site("layer.0", sizes=Sizes(1, 1, 1, 5, 5), statistics={"max": torch.ones(1, 1, 5)})
    assert "there is no map of this head" in drawn(Record([bare]))


def test_pooling_keeps_the_needle_and_stretches_the_small():
    weights = np.zeros((100, 100), np.float32)
    weights[57, 3], weights[12, 60] = 0.9, -0.8
    small = _terminal_draw.pooled(weights, 7, 9)
    assert small.max() == pytest.approx(0.9) and small.min() == pytest.approx(-0.8)
    assert (_terminal_draw.pooled(np.array([[0.5]]), 2, 2) == 0.5).all()
    assert (_terminal_draw.pooled(np.eye(300), 30, 20).max(1) == 1.0).all()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_many_heads_are_folded_into_the_width(width):
    sites = shown(record_with(torch.full((40, 3, 3), 1 / 3)))
    lines = terminal._plain_glance(sites, width)[1:] + terminal._glance(sites, width, signed=False)[1:]
    assert all(line.cell_len <= width for line in lines)


@pytest.mark.parametrize("length", [0, 1])
def test_hardly_any_tokens(length):
    assert "layer 0, head 0" in drawn(long_record(length))
    assert "▀" in coloured(long_record(length))


def test_a_bar_is_measured_in_eighths():
    assert _terminal_draw.bar(1.0, 4) == "████" and _terminal_draw.bar(0.5, 1) == "▌"
    assert _terminal_draw.bar(0.0, 4) == "" and _terminal_draw.bar(-2.0, 2) == "██"
