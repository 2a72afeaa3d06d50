import pytest
import torch

from regard.look import Record, Site, Token
from regard.look._patterns import most_telling, pattern_of, pick, telling_query


def eye(step, length=6):
    return torch.diag(torch.ones(length - abs(step)), step)


@pytest.mark.parametrize(
    ("weights", "letter", "share"),
    [
        (eye(0), "s", 1.0),
        (eye(-1), "p", 1.0),
        (eye(1), "n", 1.0),
        (torch.eye(6)[0].expand(6, 6), "f", 1.0),
        (torch.eye(6)[5].expand(6, 6), "l", 1.0),
        (torch.full((6, 6), 1 / 6), "-", 5 / 6),
        (torch.eye(3)[2].expand(6, 3), "l", 1.0),
        (torch.eye(6)[3].expand(6, 6), "o", 1.0),
        (torch.empty(0, 6), "-", 0.0),
        (torch.empty(6, 0), "-", 0.0),
    ],
)
def test_pattern(weights, letter, share):
    found = pattern_of(weights)
    assert (found.letter, found.share) == (letter, pytest.approx(share))


def test_pattern_in_words():
    assert pattern_of(eye(-1)).said() == "looks mostly at the token before (100% of its weight)"
    column = pattern_of(torch.eye(6)[3].expand(6, 6))
    assert column.said() == "looks mostly at one other token, number 3 (100% of its weight)"
    assert (
        column.said([Token(word) for word in "abcdef"])
        == "looks mostly at one other token, d (100% of its weight)"
    )
    assert pattern_of(torch.full((6, 6), 1 / 6)).said() == "looks at no one place in particular"


@pytest.fixture
def planted():
    """Three layers of two heads; in layer 1, head 0, word 1 looks at word 4, which is far; others at ends and near."""
    tokens = tuple(Token(str(number), special=number in (0, 5)) for number in range(6))
    maps = torch.zeros(3, 1, 2, 6, 6)
    maps[0, 0, :, :, 0] = 1.0
    maps[1, 0, 0, 1, 4] = 0.7
    maps[1, 0, 1] = eye(1)
    maps[2, 0, 1] = eye(0)
    sites = []
    for layer in maps:
        rows = torch.zeros(1, 2, 6, 1)
        sites.append(Site("x", rows, rows, rows, rows, scale=1.0, query_tokens=tokens, key_tokens=tokens))
        sites[-1].__dict__["weights"] = layer
    return Record(sites)


def test_the_most_telling_head_links_words_that_are_no_neighbours(planted):
    assert most_telling(planted) == (1, 0)
    assert telling_query(planted.sites[1], 0) == 1


@pytest.mark.parametrize(
    ("layer", "head", "picked"),
    [(None, None, (1, 0)), (2, 1, (2, 1)), (1, None, (1, 0)), (None, 0, (1, 0)), (0, 0, (0, 0))],
)
def test_pick(planted, layer, head, picked):
    assert pick(planted, layer, head) == picked


@pytest.mark.parametrize(("layer", "head"), [(3, None), (-1, None), (0, 2), (None, 2), (0, -1)])
def test_pick_says_how_many_there_are(planted, layer, head):
    with pytest.raises(
        ValueError, match=r"^(layer|head) -?\d: there are \d (layer|head)s, counted from 0; give 0 to"
    ):
        pick(planted, layer, head)
