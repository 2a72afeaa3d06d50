import json
import math

import pytest
import torch

from regard.look import Record, Site, Token
from regard.look._difference import align, difference
from regard.look._opening import opening
from regard.look._page_sources import sources
from regard.look._terminal_json import document


def record(words, *, heads=2, layers=2, seed=0, kind="self"):
    table = tuple(Token(word) for word in words.split())
    sites = []
    for layer in range(layers):
        generator = torch.Generator().manual_seed(seed + layer)
        rows = torch.randn(1, heads, 9, 4, generator=generator)[:, :, : len(table)]
        sites.append(Site(f"layer.{layer}", rows, rows, rows, rows, scale=1.0, kind=kind, layer=layer))
        sites[-1].query_tokens = sites[-1].key_tokens = table
    return Record(sites, words, "toy")


def test_a_record_does_not_differ_from_itself():
    found = difference(record("a b c"), record("a b c"))
    assert [row["distance"] for row in found.heads()] == [0.0] * 4
    assert all(torch.equal(pair.change, torch.zeros(2, 3, 3)) for pair in found.sites) and found.notes == []


def test_tokens_are_aligned_by_the_words_that_stayed():
    first, second = (
        tuple(Token(word) for word in words.split()) for words in ("the old cat sat", "the cat sat down")
    )
    assert align(first, second, (4, 4)) == [(0, 0), (2, 1), (3, 2)]
    assert align((), (), (2, 2)) == [(0, 0), (1, 1)]
    assert align((), (), (2, 3)) == []


def test_the_changed_head_comes_first():
    one, two = record("a b c"), record("a b c")
    changed = two.sites[1].weights.clone()
    changed[0, 1] = torch.eye(3).roll(1, 0)
    two.sites[1].__dict__["weights"] = changed
    top, *rest = difference(one, two).heads()
    assert (top["layer"], top["head"], top["name"]) == (1, 1, "layer.1")
    assert 0 < top["distance"] <= 1 and all(row["distance"] == 0 for row in rest)


def test_the_distance_is_that_of_jensen_and_shannon():
    one, two = record("a b", heads=1, layers=1), record("a b", heads=1, layers=1)
    p, q = [0.9, 0.1], [0.4, 0.6]
    one.sites[0].__dict__["weights"] = torch.tensor([[[p, [1.0, 0.0]]]], dtype=torch.float64)
    two.sites[0].__dict__["weights"] = torch.tensor([[[q, [0.0, 1.0]]]], dtype=torch.float64)
    middle = [(x + y) / 2 for x, y in zip(p, q, strict=True)]

    def bits(a):
        return sum(x * math.log2(x / m) for x, m in zip(a, middle, strict=True))

    (pair,) = difference(one, two).sites
    assert pair.row_distance[0].tolist() == pytest.approx([math.sqrt((bits(p) + bits(q)) / 2), 1.0])
    torch.testing.assert_close(pair.change[0], torch.tensor([[-0.5, 0.5], [-1.0, 1.0]]))


def test_weight_on_tokens_that_one_side_has_alone_counts():
    one, two = record("a b c", heads=1, layers=1), record("a b x", heads=1, layers=1)
    same = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])[None, None]
    away = torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])[None, None]
    one.sites[0].__dict__["weights"], two.sites[0].__dict__["weights"] = same, away
    (pair,) = difference(one, two).sites
    assert pair.queries == ((0, 0), (1, 1)) and [token.text for token in pair.key_tokens] == ["a", "b"]
    assert pair.row_distance[0].tolist() == pytest.approx([1.0, 0.0])


def test_what_does_not_fit_is_said():
    found = difference(record("a b c", layers=3), record("a b c", layers=2))
    assert len(found.sites) == 2 and "3 and 2 sites of self-attention" in found.notes[0]
    with pytest.raises(
        ValueError, match="nothing to compare: layer.0: 2 heads in one and 3 in the other; left out"
    ):
        difference(record("a b", layers=1), record("a b", layers=1, heads=3))
    with pytest.raises(ValueError, match="no tokens in common"):
        difference(record("a b", layers=1), record("x y", layers=1))
    with pytest.raises(ValueError, match="there are no sites"):
        difference(Record([]), Record([]))
    with pytest.raises(ValueError, match="has 1 samples; got 1"):
        difference(record("a b"), record("a b"), sample=1)


def test_what_is_no_number_comes_first():
    one, two = record("a b c"), record("a b c")
    changed = two.sites[1].weights.clone()
    changed[0, 0, 0] = float("nan")
    two.sites[1].__dict__["weights"] = changed
    top, *_ = difference(one, two).heads()
    assert (top["layer"], top["head"]) == (1, 0) and math.isnan(top["distance"])


def test_a_comparison_of_some_layers_calls_them_as_the_records_do():
    one, two = record("a b c", layers=3), record("a b c", layers=3, seed=9)
    for each in (one, two):
        each.sites[0].query = each.sites[0].key = each.sites[0].value = each.sites[0].output = None
    found = difference(one, two)
    sites = sources(found)[1]
    assert [site.title for site in sites] == ["Layer 1", "Layer 2"]
    assert opening(sites, 2, 1) == (1, 1)
    with pytest.raises(ValueError, match="layer 0: the layers here are 1, 2"):
        opening(sites, 0)
    assert [entry["site"] for entry in json.loads(document(found, 1, 0))["sites"]] == [1, 2]


def test_the_only_layer_of_a_comparison():
    found = difference(record("a b", layers=1), record("a b", layers=1, seed=9))
    with pytest.raises(ValueError, match="layer 1: the only layer here is 0"):
        opening(sources(found)[1], 1)
