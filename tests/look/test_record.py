import json

import numpy as np
import pytest
import torch

from regard.look import Grid, Record, Site, Sizes, Token
from regard.look._record_statistics import STATISTICS, of_weights

FIELDS = ("name", "kind", "call", "scale", "causal", "dropout_p", "query_tokens", "key_tokens")
TENSORS = ("query", "key", "value", "output", "mask", "bias", "weights")


def same(one, other):
    return one is None and other is None or (one.dtype == other.dtype and torch.equal(one, other))


def test_what_is_saved_loads_back(record, tmp_path):
    record.sites[0].mask = torch.eye(4, dtype=torch.bool)
    record.sites[1].bias = torch.full((4, 4), -0.5, dtype=torch.float64)
    record.sites[1].kind, record.sites[1].call, record.sites[1].causal = "cross", 3, True
    npz, described = record.save(tmp_path / "deep" / "attention")
    assert sorted(path.name for path in npz.parent.iterdir()) == ["attention.json", "attention.npz"]
    for path in (tmp_path / "deep" / "attention", npz, described):
        loaded = Record.load(path)
        assert (loaded.text, loaded.model, loaded.notes) == (record.text, record.model, record.notes)
        for ours, theirs in zip(loaded.sites, record.sites, strict=True):
            assert all(getattr(ours, name) == getattr(theirs, name) for name in FIELDS)
            assert all(same(getattr(ours, name), getattr(theirs, name)) for name in TENSORS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_survives(tmp_path, dtype):
    rows = torch.randn(1, 1, 3, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    record = Record([Site("a", rows, rows, rows, rows, scale=1.0)])
    record.sites[0].__dict__["weights"] = rows.softmax(-1)
    record.save(tmp_path / "x")
    assert same(Record.load(tmp_path / "x").sites[0].query, rows)


def test_numpy_alone_can_read_it(record, tmp_path):
    npz, described = record.save(tmp_path / "x")
    head = json.loads(described.read_text(encoding="utf-8"))
    with np.load(npz, allow_pickle=False) as arrays:
        key, dtype = head["sites"][1]["arrays"]["weights"]
        assert dtype == "float32"
        np.testing.assert_array_equal(arrays[key], record.sites[1].weights.numpy())
    assert [token["text"] for token in head["tokens"][0]] == ["[CLS]", "<b>bold</b>", "日本", "[SEP]"]
    assert len(head["tokens"]) == 1


def test_a_dot_in_the_name_stays(record, tmp_path):
    npz, described = record.save(tmp_path / "run.v2")
    assert (npz.name, described.name) == ("run.v2.npz", "run.v2.json")
    assert Record.load(tmp_path / "run.v2").text == record.text


def test_label_fits_the_tokens_to_the_sides_of_their_length(record):
    record.sites[0].key = record.sites[0].key[:, :, :3]
    record.label([Token("a"), Token("b"), Token("c")])
    assert [token.text for token in record.sites[0].key_tokens] == ["a", "b", "c"]
    assert len(record.sites[0].query_tokens) == 4


def test_label_refuses_tokens_that_fit_no_side(record):
    with pytest.raises(ValueError, match=r"label\(tokens\): expected a token for each .*, 4 of them; got 5"):
        record.label([Token(letter) for letter in "abcde"])
    assert len(record.sites[0].query_tokens) == 4


def test_a_failed_save_leaves_what_was_there(record, tmp_path, monkeypatch):
    record.save(tmp_path / "x")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    record.text = "another"
    write = type(tmp_path).write_bytes

    def full_disk(self, data):
        if ".json" in self.name:
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(type(tmp_path), "write_bytes", full_disk)
    with pytest.raises(OSError, match="cannot write to .*No space left"):
        record.save(tmp_path / "x")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_of_another_save_is_noticed(record, tmp_path):
    record.save(tmp_path / "x")
    record.sites[0].scale = 0.25
    record.sites[0].query += 1
    npz, _ = record.save(tmp_path / "y")
    (tmp_path / "x.npz").write_bytes(npz.read_bytes())
    with pytest.raises(ValueError, match="is not the file that was saved with it"):
        Record.load(tmp_path / "x")


def edit(described, **changes):
    described.write_text(json.dumps({**json.loads(described.read_text()), **changes}))


@pytest.mark.parametrize(
    "damage",
    [
        lambda described: described.write_text("{"),
        lambda described: described.write_bytes(b"\xff\xfe"),
        lambda described: described.write_text("[]"),
        lambda described: edit(described, format="other"),
        lambda described: edit(described, sites=[{}]),
        lambda described: edit(described, sites=[3]),
        lambda described: edit(described, tokens=[[{"no": 1}]]),
        lambda described: edit(described, arrays={}),
    ],
)
def test_what_is_no_record_is_refused(record, tmp_path, damage):
    _, described = record.save(tmp_path / "x")
    damage(described)
    with pytest.raises(ValueError, match=r"x\.json is not a record of regard"):
        Record.load(tmp_path / "x")


def test_a_table_of_tokens_that_is_not_there(record, tmp_path):
    _, described = record.save(tmp_path / "x")
    edit(described, tokens=[])
    with pytest.raises(ValueError, match="it names a table of tokens that it does not hold"):
        Record.load(tmp_path / "x")


def test_no_such_record(tmp_path):
    with pytest.raises(FileNotFoundError):
        Record.load(tmp_path / "x")


def test_pickles_are_not_read(record, tmp_path):
    npz, described = record.save(tmp_path / "x")
    np.savez(npz, **{"0.query": np.array([object()])})
    import hashlib

    edit(described, arrays={"file": npz.name, "sha256": hashlib.sha256(npz.read_bytes()).hexdigest()})
    with pytest.raises(ValueError, match="is not a record"):
        Record.load(tmp_path / "x")


def test_a_record_cannot_name_a_file_elsewhere(record, tmp_path):
    npz, described = record.save(tmp_path / "in" / "x")
    (tmp_path / "secret.npz").write_bytes(npz.read_bytes())
    npz.unlink()
    head = json.loads(described.read_text())
    edit(described, arrays={**head["arrays"], "file": "../secret.npz"})
    with pytest.raises(FileNotFoundError):
        Record.load(described)


def test_a_record_is_the_two_files_of_one_name(record, tmp_path):
    npz, described = record.save(tmp_path / "x")
    npz.rename(tmp_path / "y.npz"), described.rename(tmp_path / "y.json")
    assert Record.load(tmp_path / "y").text == record.text
    record.save(tmp_path / "x")
    (tmp_path / "y.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"y\.npz is not the file that was saved with it"):
        Record.load(tmp_path / "y")


def full_site():
    """A site that holds one of everything a watch may keep, with 2 samples, 4 heads of 2, 3 queries and 5 keys."""
    weights = torch.rand(2, 4, 3, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    top = weights.topk(2, -1)
    return Site(
        "a.b",
        kind="self",
        call=1,
        layer=2,
        sizes=Sizes(2, 4, 2, 3, 5, 8, 8),
        scale=torch.arange(4.0),
        softcap=30.0,
        sink=torch.ones(4),
        masked="causal, from position 2",
        implementation="regard",
        dtype="bfloat16",
        offset=2,
        statistics={**of_weights(weights, 2, STATISTICS), "special": torch.zeros(2, 4, 3)},
        top_weights=top.values,
        top_keys=top.indices.int(),
        pooled=torch.rand(2, 1, 2, 3),
        pooled_max=torch.rand(2, 1, 2, 3),
        cell=(2, 2),
        rows=(0, 2),
        row_weights=weights[:, 3:, [0, 2]],
        whole=weights[:, 3:],
        heads_kept=(3,),
        steps=(2, 1),
        slots=torch.zeros(2, 2, dtype=torch.int64),
        query_tokens=tuple(Token(word) for word in "abc"),
        key_grid=Grid(2, 2, leading=1),
    )


def test_everything_that_is_kept_survives(tmp_path):
    site = full_site()
    image = torch.randint(0, 256, (4, 6, 3), dtype=torch.uint8)
    Record([site], "abc", image=image).save(tmp_path / "x")
    record = Record.load(tmp_path / "x")
    again = record.sites[0]
    assert torch.equal(record.image, image)
    for name, kept in vars(site).items():
        read = getattr(again, name)
        if name == "statistics":
            assert kept.keys() == read.keys() and all(same(kept[key], read[key]) for key in kept)
        else:
            assert same(kept, read) if isinstance(kept, torch.Tensor) else kept == read, name


def test_a_record_of_another_version_says_which(record, tmp_path):
    _, described = record.save(tmp_path / "x")
    edit(described, version=99)
    with pytest.raises(
        ValueError, match=r"x\.json is a record of version 99, and this regard reads version 2; read"
    ):
        Record.load(tmp_path / "x")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"query_tokens": (Token("a"),)}, "3 queries, and 1 tokens"),
        ({"key_grid": Grid(3, 3)}, "5 keys, and an image of 9 tokens"),
        ({"rows": (0, 1, 2)}, r"its row_weights of shape \(2, 1, 2, 5\) where \(2, 1, 3, 5\) fits"),
        ({"heads_kept": None}, "its pooled of shape"),
        ({"statistics": {"max": torch.zeros(2, 4, 5)}}, r"its max of shape \(2, 4, 5\)"),
    ],
)
def test_a_record_that_disagrees_with_itself_is_neither_saved_nor_read(tmp_path, change, said):
    site = full_site()
    for name, value in change.items():
        setattr(site, name, value)
    with pytest.raises(ValueError, match=f"a.b .call 2.: the record disagrees with itself: .*{said}"):
        Record([site]).save(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_file_whose_tokens_disagree_with_its_numbers_is_refused(record, tmp_path):
    _, described = record.save(tmp_path / "x")
    edit(described, tokens=[[{"text": "alone"}]])
    with pytest.raises(ValueError, match="is not a record.*layer.0: .* 4 queries, and 1 tokens"):
        Record.load(tmp_path / "x")


def test_statistics_of_weights_that_can_be_read(record):
    itself, before = (record.sites[0].statistic(name)[0] for name in ("self", "previous"))
    assert itself[0].tolist() == [1.0] * 4 and before[0].tolist() == [0.0] * 4
    assert before[1].tolist() == [0.0, 1.0, 1.0, 1.0]
    first, evenly = record.sites[1].statistic("first")[0], record.sites[1].statistic("entropy")[0, 1]
    assert first.tolist() == [[1.0] * 4, [0.25] * 4]
    torch.testing.assert_close(evenly, torch.full((4,), 4.0).log())
    distance = record.sites[1].statistic("distance")[0]
    assert distance[0].tolist() == [0.0, 1.0, 2.0, 3.0] and distance[1].tolist() == [1.5, 1.0, 1.0, 1.5]
    assert record.sites[1].statistic("received")[0].tolist() == [[4.0, 0.0, 0.0, 0.0], [1.0] * 4]
    assert record.sites[1].statistic("mass")[0].unique().tolist() == [1.0]


def test_what_was_not_kept_is_said():
    site = Site("a", sizes=Sizes(1, 1, 1, 2, 2), statistics={"max": torch.ones(1, 1, 2)})
    assert not site.has_weights
    with pytest.raises(
        ValueError, match=r"a: its weights were not kept; watch with keep=Keep\(weights=True\)"
    ):
        _ = site.weights
    with pytest.raises(ValueError, match="a: there is no statistic 'entropy' of it; kept: max"):
        site.statistic("entropy")


def test_a_site_says_what_it_holds(record):
    assert repr(Site("a")) == "<Site a: self, 0 heads, 0 x 0; kept: nothing>"
    said = repr(full_site())
    assert said == (
        "<Site a.b (call 2): self by regard, 4 heads, 3 x 5; kept: top_weights, pooled, row_weights, whole, statistics>"
    )


def test_one_head_of_those_that_were_kept():
    site = full_site()
    assert torch.equal(site.map(3, 1), site.whole[1, 0])
    with pytest.raises(ValueError, match="its weights were not kept"):
        site.map(0)
    with pytest.raises(ValueError, match="it has heads 0 to 3; got head 4"):
        site.map(4)


@pytest.mark.parametrize("Tq, Tk", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("lead", [(), (2,), (1, 2), (3, 1, 2)])
def test_sites_without_queries_or_keys(lead, Tq, Tk):
    site = Site("a", torch.zeros(*lead, Tq, 1), *[torch.zeros(*lead, Tk, 1)] * 3, scale=1.0)
    assert site.map(0).shape == (Tq, Tk)
    assert site.statistic("entropy").shape[-1] == Tq and site.statistic("received").shape[-1] == Tk
