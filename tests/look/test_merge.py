"""Words, sentences and lines: which tokens belong to each, and that nothing of the weights is lost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.look import Record, Site, Token
from regard.look._merge import merge_weights, merged
from regard.look._tokens import visible
from regard.look._units import separators, units


def tokens(text, *pieces, specials=()):
    found, at = [], 0
    for piece in pieces:
        if piece in specials:
            found.append(Token(piece, at, at, special=True))
            continue
        start = text.index(piece, at)
        at = start + len(piece)
        found.append(Token(visible(piece), start, at))
    assert text[at:].strip() == ""
    return tuple(found)


CASES = [
    (
        "word",
        "un break able, yes",
        ["un", " break", " able", ",", " yes"],
        ["un", "break", "able", ",", "yes"],
    ),
    ("word", "unbreakable yes", ["un", "break", "able", " yes"], ["unbreakable", "yes"]),
    ("word", "didn't go", ["didn", "'", "t", " go"], ["didn't", "go"]),
    ("word", "日本語だ", ["日本", "語", "だ"], ["日本", "語", "だ"]),
    ("word", "שָׁלוֹם עולם", ["שָׁ", "לוֹם", " עו", "לם"], ["שָׁלוֹם", "עולם"]),
    ("word", "नमस्ते जी", ["नम", "स्ते", " जी"], ["नमस्ते", "जी"]),
    ("sentence", "One. Two? Three", ["One", ".", " Two", "?", " Three"], ["One.", "Two?", "Three"]),
    ("sentence", "Pi is 3.14 now.", ["Pi is 3", ".", "14", " now", "."], ["Pi is 3.14 now."]),
    ("sentence", "一。二！", ["一", "。", "二", "！"], ["一。", "二！"]),
    ("line", "a b\nc\n\nd", ["a", " b", "\n", "c", "\n", "\n", "d"], ["a b⏎", "c⏎", "⏎", "d"]),
]


@pytest.mark.parametrize(("unit", "text", "pieces", "expected"), CASES)
def test_units(unit, text, pieces, expected):
    found = units(tokens(text, *pieces), text, unit)
    assert [each.token.text for each in found] == expected
    assert [place for each in found for place in each.members] == list(range(len(pieces)))


def test_special_tokens_stand_alone():
    table = tokens("the cat", "[CLS]", "the", " cat", "[SEP]", specials=("[CLS]", "[SEP]"))
    assert [each.members for each in units(table, "the cat", "line")] == [(0,), (1, 2), (3,)]


def test_another_unit_is_refused():
    with pytest.raises(ValueError, match="no unit 'page'; tokens merge into: word, sentence, line"):
        units((), "", "page")


def test_separators_are_punctuation_and_the_frame_but_the_first_token():
    table = [Token("[CLS]", special=True), Token("a"), Token("."), Token("[SEP]", special=True), Token("⏎")]
    assert separators(table).tolist() == [False, False, True, True, True]
    assert separators([Token("3.14"), Token("it's"), Token("")]).tolist() == [False, False, False]


def test_weights_are_summed_over_keys_and_averaged_over_queries():
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5], [0.0, 0.0, 1.0]])
    made = merge_weights(weights, [(0, 1), (2,)], [(0,), (1, 2)])
    torch.testing.assert_close(made, torch.tensor([[0.375, 0.625], [0.0, 1.0]]))


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5), st.lists(st.integers(1, 4), min_size=1, max_size=5)
)
def test_rows_sum_to_one_whatever_is_merged(queries, keys):
    generator = torch.Generator().manual_seed(sum(queries) + 7 * sum(keys))
    weights = torch.rand(2, 3, sum(queries), sum(keys), generator=generator, dtype=torch.float64).softmax(-1)
    made = merge_weights(weights, cut(queries), cut(keys))
    assert made.shape == (2, 3, len(queries), len(keys))
    torch.testing.assert_close(made.sum(-1), torch.ones(2, 3, len(queries), dtype=torch.float64))


def cut(sizes):
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


@pytest.mark.parametrize("groups", [[(0,)], [(0, 1), (1,)], [(0, 1), ()]])
def test_groups_that_are_no_partition_are_refused(groups):
    with pytest.raises(ValueError, match="merge: (each of the 2 queries|there is an empty group)"):
        merge_weights(torch.eye(2), groups, [(0,), (1,)])


def site(table):
    rows = torch.randn(1, 2, len(table), 4, generator=torch.Generator().manual_seed(0))
    return Site("x", rows, rows, rows, rows, scale=0.5, query_tokens=table, key_tokens=table)


def test_a_merged_record_is_a_record(tmp_path):
    text = "unbreakable yes"
    table = tokens(text, "un", "break", "able", " yes")
    record = Record([site(table)], text, "toy")
    words = merged(record, "word")
    words.check()
    assert words.sites[0].lengths == (2, 2) and words.sites[0].query is None
    expected = record.sites[0].weights[0, 1, :3, :3].sum(-1).mean()
    torch.testing.assert_close(words.sites[0].weights[0, 1, 0, 0], expected)
    torch.testing.assert_close(words.sites[0].statistic("mass"), torch.ones(1, 2, 2))
    words.save(tmp_path / "words")
    torch.testing.assert_close(Record.load(tmp_path / "words").sites[0].weights, words.sites[0].weights)
    assert record.sites[0].lengths == (4, 4)


def test_a_site_without_tokens_cannot_be_merged():
    with pytest.raises(ValueError, match="x: its tokens are not known"):
        merged(Record([_bare()]), "word")


def _bare():
    rows = torch.zeros(1, 1, 2, 2)
    return Site("x", rows, rows, rows, rows, scale=1.0)
