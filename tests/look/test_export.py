import csv

import pytest
import torch
from pyarrow import parquet

from regard.look import Record, Site, Token, _export
from regard.look._export import export

COLUMNS = "site layer name kind sample head query query_token key key_token weight".split()


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as source:
        return list(csv.DictReader(source))


def test_every_weight_is_a_row(record, tmp_path):
    (path,) = export(record, tmp_path / "weights.csv")
    rows = rows_of(path)
    assert list(rows[0]) == COLUMNS
    assert len(rows) == sum(int((site.weights > 0).sum()) for site in record.sites)
    for row in rows:
        site = record.sites[int(row["site"])]
        weight = site.weights[int(row["sample"]), int(row["head"]), int(row["query"]), int(row["key"])]
        assert float(row["weight"]) == float(weight)
        assert row["query_token"] == site.query_tokens[int(row["query"])].text
        assert row["key_token"] == site.key_tokens[int(row["key"])].text


def test_parquet_is_the_same_table(record, tmp_path):
    export(record, tmp_path / "a.csv")
    export(record, tmp_path / "a.parquet")
    table = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    plain = [{name: str(value) for name, value in row.items() if name != "weight"} for row in table]
    assert plain == [{n: v for n, v in row.items() if n != "weight"} for row in rows_of(tmp_path / "a.csv")]
    assert parquet.read_schema(tmp_path / "a.parquet").field("weight").type == "float"


def test_digits_of_a_weight_survive(record, tmp_path):
    third = torch.tensor(1 / 3)
    record.sites[0].weights[0, 0, 0, 0] = third
    rows = rows_of(export(record, tmp_path / "a.csv", heads=(0,))[0])
    assert torch.tensor(float(rows[0]["weight"])) == third
    assert {row["head"] for row in rows} == {"0"}


def test_only_larger_weights(record, tmp_path):
    rows = rows_of(export(record, tmp_path / "a.csv", least=0.5)[0])
    assert rows and all(float(row["weight"]) > 0.5 for row in rows)


def test_without_weights_the_top_ones_are_written(record, tmp_path):
    for site in record.sites:
        top = site.weights.topk(2, -1)
        site.top_weights, site.top_keys = top.values, torch.where(top.values == 0, -1, top.indices).int()
        site.query = site.key = None
        del site.__dict__["weights"]
    rows = rows_of(export(record, tmp_path / "a.csv")[0])
    assert len(rows) == sum(int((site.top_weights > 0).sum()) for site in record.sites)
    record.sites[0].top_weights = None
    with pytest.raises(ValueError, match="layer.0: neither its weights nor its top weights were kept"):
        export(record, tmp_path / "a.csv")


def test_the_weights_of_some_heads(record, tmp_path):
    site = record.sites[0]
    site.whole, site.heads_kept = site.weights[:, 1:], (1,)
    site.query = site.key = None
    del site.__dict__["weights"]
    rows = rows_of(export(record, tmp_path / "a.csv")[0])
    assert {row["head"] for row in rows if row["site"] == "0"} == {"1"}


def test_the_catalogue_is_a_table(record, tmp_path):
    rows = rows_of(export(record, tmp_path / "heads.csv", table="heads")[0])
    assert len(rows) == 4 and {row["pattern"] for row in rows} >= {"same-token"}
    export(record, tmp_path / "heads.parquet", table="heads")
    assert parquet.read_table(tmp_path / "heads.parquet").num_rows == 4


@pytest.mark.parametrize("suffix", [".npz", ".json"])
def test_npz_and_json_belong_together(record, tmp_path, suffix):
    assert {path.name for path in export(record, tmp_path / f"a{suffix}")} == {"a.npz", "a.json"}
    assert len(Record.load(tmp_path / "a").sites) == 2


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("a.xlsx", {}, "cannot write a.xlsx: a record goes to .npz, .json, .csv, .parquet"),
        ("a.csv", {"table": "tokens"}, "no table 'tokens' of a record; there are: weights, heads"),
        ("a.csv", {"heads": (2,)}, "there are 2 heads, counted from 0; got 2"),
    ],
)
def test_what_is_refused(record, tmp_path, name, options, said):
    with pytest.raises(ValueError, match=said):
        export(record, tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []


def test_too_many_rows_are_refused(record, tmp_path, monkeypatch):
    monkeypatch.setattr(_export, "MOST_ROWS", 10)
    with pytest.raises(
        ValueError, match=r"more than 10 rows; write fewer heads, or only larger weights \(least=\)"
    ):
        export(record, tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(record, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write to"):
        export(record, tmp_path / "file" / "a.csv")


def test_parquet_without_pyarrow(record, tmp_path, monkeypatch):
    monkeypatch.setattr(_export.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs pyarrow; install it with: pip install 'regard\[parquet\]'"):
        export(record, tmp_path / "a.parquet")


def test_tokens_with_commas_quotes_and_lines(record, tmp_path):

    awkward = ('a,"b"', "c\nd", "=1+1", "")
    for site in record.sites:
        site.query_tokens = site.key_tokens = tuple(Token(text) for text in awkward)
    rows = rows_of(export(record, tmp_path / "a.csv")[0])
    assert {row["query_token"] for row in rows} == set(awkward)


def test_a_record_without_attention_and_a_site_without_keys(record, tmp_path):
    with pytest.raises(ValueError, match="the record holds no attention"):
        export(Record([]), tmp_path / "a.csv")
    empty = torch.zeros(1, 2, 0, 4)
    record.sites.append(Site("empty", empty, empty, empty, empty, scale=1.0))
    rows = rows_of(export(record, tmp_path / "a.csv")[0])
    assert {row["site"] for row in rows} == {"0", "1"}
    assert len(rows_of(export(record, tmp_path / "b.csv", table="heads")[0])) == 6
