import json

import numpy as np
import pytest
import torch

from regard.look import Record, Site, Token

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
        lambda described: edit(described, version=99),
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
