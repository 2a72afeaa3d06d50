"""The catalogue names heads by what they were made to do, and says nothing of what cannot be measured."""

import pytest
import torch

from regard.look import Record, Site, Token
from regard.look._catalogue import NEAR, SAID, THRESHOLDS, catalogue

T = 60


def record_of(*maps, ids=None, causal=True, special=(0,), kind="self"):
    """One site whose heads have these weights (T, T)."""
    length = maps[0].shape[0]
    numbers = range(length) if ids is None else ids
    table = tuple(Token(f"w{n}", special=place in special, id=n) for place, n in enumerate(numbers))
    rows = torch.zeros(1, len(maps), length, 2)
    site = Site("x", rows, rows, rows, rows, scale=1.0, kind=kind, causal=causal)
    site.query_tokens = site.key_tokens = table
    site.__dict__["weights"] = torch.stack(maps)[None].float()
    return Record([site])


def at(key):
    """Weights (T, T) where query i looks at key(i), at the first token where that is not there."""
    weights = torch.zeros(T, T)
    for query in range(T):
        weights[query, min(max(key(query), 0), query)] = 1.0
    return weights


def spread():
    return torch.ones(T, T).tril() / torch.arange(1.0, T + 1)[:, None]


def near():
    weights = torch.zeros(T, T)
    for query in range(T):
        first = max(0, query - NEAR)
        weights[query, first : query + 1] = 1.0 / (query + 1 - first)
    return 0.9 * weights + 0.1 * spread()


HEADS = [
    ("previous-token", lambda: at(lambda query: query - 1)),
    ("same-token", lambda: at(lambda query: query)),
    ("first-token", lambda: at(lambda query: 0)),
    ("uniform", spread),
    ("local", near),
]


@pytest.mark.parametrize(("pattern", "make"), HEADS, ids=[name for name, _ in HEADS])
def test_a_head_has_the_name_of_what_it_does(pattern, make):
    (head,) = catalogue(record_of(make()))
    assert head.pattern == pattern
    assert head.share >= THRESHOLDS[pattern]
    assert head.said().startswith(SAID[pattern])


def test_next_token_and_separator_heads_of_a_model_that_looks_both_ways():
    following = torch.zeros(T, T)
    following[torch.arange(T), (torch.arange(T) + 1).clamp(max=T - 1)] = 1.0
    ends = torch.zeros(T, T)
    ends[:, T - 1] = 1.0
    heads = catalogue(record_of(following, ends, causal=False, special=(0, T - 1)))
    assert [head.pattern for head in heads] == ["next-token", "separator"]
    assert heads[1].special == 1.0 and heads[0].special == pytest.approx(2 / T)


def test_an_induction_head_needs_tokens_that_come_again():
    ids = [*range(T // 2), *range(T // 2)]
    copying = at(lambda query: query - T // 2 + 1 if query >= T // 2 else 0)
    (head,) = catalogue(record_of(copying, ids=ids, special=()))
    assert (head.pattern, head.share) == ("induction", pytest.approx(1.0))
    (other,) = catalogue(record_of(copying, special=()))
    assert other.pattern != "induction" and "induction" not in other.scores


def test_the_first_query_of_a_causal_head_has_no_choice():
    weights = at(lambda query: query - 1)
    (head,) = catalogue(record_of(weights))
    assert head.scores["previous-token"] == 1.0
    assert head.first == pytest.approx(1 / (T - 1))
    assert (head.entropy, head.effective_keys, head.distance) == (0.0, 1.0, 1.0)


def test_numbers_of_an_even_head():
    (head,) = catalogue(record_of(torch.full((T, T), 1 / T), causal=False))
    assert head.effective_keys == pytest.approx(T, rel=1e-5)
    assert head.entropy == pytest.approx(torch.tensor(float(T)).log().item(), rel=1e-5)
    assert head.share == pytest.approx(1.0)


def test_without_weights_kept_statistics_and_top_weights_tell():
    ids = [*range(T // 2), *range(T // 2)]
    copying = at(lambda query: query - T // 2 + 1 if query >= T // 2 else 0)
    full = record_of(copying, at(lambda query: query - 1), ids=ids, special=())
    site = full.sites[0]
    names = ("max", "entropy", "received", "mass", "first", "self", "previous", "distance")
    site.statistics = {name: site.statistic(name) for name in names}
    top = site.weights.topk(4, -1)
    expected = catalogue(full)
    site.top_weights, site.top_keys = top.values, torch.where(top.values == 0, -1, top.indices)
    site.query = site.key = None
    del site.__dict__["weights"]
    found = catalogue(full)
    assert (
        [head.pattern for head in found]
        == [head.pattern for head in expected]
        == ["induction", "previous-token"]
    )
    for head, other in zip(found, expected, strict=True):
        assert head.share == pytest.approx(other.share)
        assert "next-token" in other.scores and "next-token" not in head.scores


def test_cross_attention_has_no_positions():
    (head,) = catalogue(record_of(at(lambda query: query - 1), kind="cross", causal=False))
    assert not {"previous-token", "same-token", "next-token", "local", "induction"} & set(head.scores)


def test_empty_rows_do_not_count():
    weights = at(lambda query: query - 1)
    weights[T // 2 :] = 0.0
    (head,) = catalogue(record_of(weights))
    assert head.scores["previous-token"] == 1.0


def test_thresholds_can_be_moved_and_unknown_ones_are_refused():
    weights = 0.45 * at(lambda query: query - 1) + 0.55 * spread()
    assert catalogue(record_of(weights))[0].pattern != "previous-token"
    assert catalogue(record_of(weights), {"previous-token": 0.4})[0].pattern == "previous-token"
    with pytest.raises(ValueError, match="no pattern 'prior'; the catalogue has: induction, previous-token"):
        catalogue(record_of(weights), {"prior": 0.5})


def test_a_row_of_the_table_is_plain():
    row = catalogue(record_of(spread()))[0].row()
    assert row["pattern"] == "uniform" and row["score_uniform"] == pytest.approx(1.0)
    assert row["score_induction"] is None
    assert all(value is None or isinstance(value, (str, int, float)) for value in row.values())


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_texts(length):
    weights = torch.ones(length, length).tril()
    (head,) = catalogue(record_of(weights / weights.sum(-1, keepdim=True)))
    assert head.pattern in SAID


@pytest.mark.parametrize("lengths", [(0, 0), (0, 3), (3, 0)])
def test_a_site_that_saw_nothing_has_heads_without_numbers(lengths):
    queries, keys = (torch.zeros(1, 2, length, 4) for length in lengths)
    heads = catalogue(Record([Site("x", queries, keys, keys, queries, scale=1.0)]))
    assert [(head.pattern, head.share, head.entropy) for head in heads] == [("mixed", 0.0, None)] * 2


def test_a_sample_that_is_not_there():
    with pytest.raises(ValueError, match=r"catalogue\(sample=\): x has 1, counted from 0; got 1"):
        catalogue(record_of(spread()), sample=1)


def test_rows_that_are_no_numbers_do_not_count():
    weights = at(lambda query: query - 1)
    weights[5] = float("nan")
    (head,) = catalogue(record_of(weights))
    assert head.scores["previous-token"] == 1.0 and "next-token" not in head.scores
