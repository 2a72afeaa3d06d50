"""What `look`, `compare`, `explain` and `doctor` write, print and refuse, on tiny models."""

import csv
import io
import json
import xml.etree.ElementTree as ET

import pytest
import torch

from regard.look import Record, Site, Sizes, _look_run
from tests.command import run
from tests.look.pages import data_of, record_with


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def saved(here):
    """A record of words that a test can look for, as files."""
    record = record_with(torch.eye(3)[None] * 0.5 + 0.5 / 3, ["secret", "words", "here"])
    record.sites[0].whole = record.sites[0].weights
    record.save(here / "kept")
    return here / "kept.npz"


def test_every_kind_of_file_is_written_by_its_suffix(saved, here, capfd):
    names = ["a.html", "a.svg", "a.png", "a.csv", "a.parquet", "b.npz"]
    arguments = [part for name in names for part in ("--out", name)]
    code, out, err = run(["look", "--record", saved, *arguments], capfd)
    assert (code, err) == (0, "")
    assert "written: a.html, a.svg, a.png, a.csv, a.parquet, b.npz, b.json" in out
    assert data_of((here / "a.html").read_text(encoding="utf-8"))["text"] == "secret words here"
    assert "secret" in (here / "a.svg").read_text() and (here / "a.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(io.StringIO((here / "a.csv").read_text(encoding="utf-8"))))
    assert len(rows) == 9 and {row["query_token"] for row in rows} == {"secret", "words", "here"}
    assert Record.load(here / "b").text == "secret words here"
    assert (here / "a.parquet").read_bytes().startswith(b"PAR1")


def test_redacted_files_hold_no_word_of_the_text(saved, here, capfd):
    names = ["a.html", "a.svg", "a.csv", "b.npz", "folder"]
    arguments = [part for name in names for part in ("--out", name)]
    code, out, _ = run(["look", "--record", saved, "--redact", *arguments], capfd)
    assert code == 0 and "the text was redacted" in out
    for path in [path for path in here.rglob("*") if path.is_file() and path.stem != "kept"]:
        assert all(word not in path.read_bytes() for word in (b"secret", b"words here")), path
    assert "secret" not in out and "·1" in out
    record = Record.load(here / "b")
    assert record.sites[0].query is None and record.sites[0].weights.shape == (1, 1, 3, 3)


def test_json_is_for_programs(saved, here, capfd):
    code, out, err = run(["look", "--record", saved, "--json", "--tokens", "words"], capfd)
    found = json.loads(out)
    assert (code, err, found["format"], found["version"]) == (0, "", "regard-look", 1)
    [row] = found["head"]["rows"]
    assert (row["query"], row["token"]) == (1, "words")
    assert row["attends_to"][0] == {"key": 1, "token": "words", "weight": 0.666667}
    assert row["attended_by"][0]["weight"] == 0.666667
    assert found["heads"][0]["kind"] == "same-token" and found["heads"][0]["self"] == pytest.approx(
        2 / 3, abs=1e-4
    )
    assert (
        list(here.iterdir()) == sorted([here / "kept.json", here / "kept.npz"])
        or not (here / "regard-out").exists()
    )


def test_tokens_by_number_range_and_text(saved, capfd):
    for asked, shown in (("0-1", [0, 1]), ("2", [2]), ("here", [2])):
        code, out, _ = run(["look", "--record", saved, "--tokens", asked], capfd)
        heads = [line for line in out.splitlines() if line.endswith(", attends to")]
        assert code == 0 and [int(line.split()[1].rstrip(",")) for line in heads] == shown


def test_the_text_of_a_token_is_asked_for_before_it_is_masked(saved, capfd):
    code, out, _ = run(["look", "--record", saved, "--redact", "--tokens", "words"], capfd)
    assert code == 0 and "token 1, " in out and "words" not in out


def test_words_stand_for_their_tokens(bert_folder, capfd):
    code, out, _ = run(["look", "the cat sat", "--model", bert_folder, "--unit", "sentence", "--json"], capfd)
    assert code == 0 and json.loads(out)["sites"][0]["queries"] < 5


def test_layers_and_heads_limit_what_is_kept(bert_folder, here, capfd):
    arguments = ["--model", bert_folder, "--layers", "1", "--heads", "0,2", "--out", "seen", "--out", "a.csv"]
    code, out, _ = run(["look", "the cat sat", *arguments], capfd)
    assert code == 0 and "layer 1, head" in out
    record = Record.load(here / "seen" / "attention")
    assert record.sites[0].whole is None and record.sites[1].heads_kept == (0, 2)
    assert {"entropy", "max"} <= set(record.sites[0].statistics)
    heads = [
        [head["map"] is not None for head in site["heads"]]
        for site in data_of((here / "seen" / "attention.html").read_text(encoding="utf-8"))["sites"]
    ]
    assert heads == [[False] * 3, [True, False, True]]
    assert {
        row["head"] for row in csv.DictReader(io.StringIO((here / "a.csv").read_text(encoding="utf-8")))
    } == {"0", "2"}


def test_two_texts_are_compared(bert_folder, here, capfd):
    texts = ["the cat sat on the mat", "the dog sat on the mat"]
    code, out, err = run(
        ["compare", *texts, "--model", bert_folder, "--out", "c.html", "--out", "c.svg"], capfd
    )
    assert (code, err) == (0, "") and "the heads that changed most" in out and "written: c.html, c.svg" in out
    data = data_of((here / "c.html").read_text(encoding="utf-8"))
    assert data["signed"] and "the cat sat" in data["text"] and "the dog sat" in data["text"]
    assert ET.fromstring((here / "c.svg").read_text(encoding="utf-8")) is not None
    code, out, _ = run(["compare", *texts, "--model", bert_folder, "--json", "--redact", "--out", "c"], capfd)
    assert code == 0 and json.loads(out)["heads"][0]["distance"] >= 0 and "cat" not in out
    assert "the cat sat" not in (here / "c" / "compared.html").read_text(encoding="utf-8")


def test_records_and_models_are_compared(saved, bert_folder, capfd):
    code, out, _ = run(["compare", "--record", saved, "--record", saved], capfd)
    assert code == 0 and "layer 0, head 0      0.000" in out
    for layers, name in (("0,1", "both.npz"), ("1", "one.npz")):
        arguments = ["--model", bert_folder, "--layers", layers, "--out", name]
        assert run(["look", "the cat", *arguments], capfd)[0] == 0
    code, out, _ = run(["compare", "--record", "both.npz", "--record", "one.npz"], capfd)
    assert (
        code == 0
        and "encoder.layer.1" in out
        and "encoder.layer.0.attention.self: the weights of all heads" in out
    )
    code, out, _ = run(["compare", "the cat", "--model", bert_folder, "--other-model", bert_folder], capfd)
    assert code == 0 and "hardly changed" in out


def test_doctor_looks_a_model_over(bert_folder, capfd):
    code, out, err = run(["doctor", bert_folder], capfd)
    assert (code, err) == (0, "")
    assert out.startswith("tiny-bert: 2 places of attention; a watch sees everything at 2 of them\n")
    assert "2 x BertSelfAttention (sdpa): a watch sees everything" in out
    code, out, _ = run(["doctor", bert_folder, "--json"], capfd)
    assert [finding["implementation"] for finding in json.loads(out)] == ["sdpa", "sdpa"]
    code, out, _ = run(["doctor", "--json"], capfd)
    assert any(finding["what"] == "kernel" for finding in json.loads(out))


def test_explain_is_written_and_reads_files(here, capfd):
    (here / "text.txt").write_text("Life is short", encoding="utf-8")
    code, out, err = run(["explain", "--file", "text.txt", "--out", "e.html", "--out", "e.md"], capfd)
    assert (code, err) == (0, "") and "written: e.html, e.md" in out
    assert run(["explain", "Life is short"], capfd)[1] in out
    assert "<html" in (here / "e.html").read_text(encoding="utf-8")


def broken(change):
    def make(here, saved):
        change(here)
        return ["look", "--record", saved]

    return make


HOSTILE = [
    (["look", "--record", "nowhere.npz"], "cannot read the record nowhere.npz: No such file"),
    (
        broken(lambda here: (here / "kept.json").rename(here / "away.json")),
        "kept.json: No such file",
    ),
    (broken(lambda here: (here / "kept.npz").unlink()), "kept.npz: No such file"),
    (["look", "--record", "kept.npz", "--model", "MODEL"], "--model means nothing beside --record"),
    (["look", "--record", "kept.npz", "--target", "a"], "--target means nothing beside --record"),
    (["look", "--image", "a.png", "--target", "a"], "--target means nothing beside --image"),
    (["compare", "--record", "kept.npz", "--record", "kept.npz", "--model", "MODEL"], "and nothing else"),
    (
        ["compare", "kept.npz", "kept.json"],
        "kept.npz is a file, and texts are compared here; of saved records: regard compare --record kept.npz --record",
    ),
    (broken(lambda here: (here / "kept.json").write_text("{")), "is not a record of regard"),
    (broken(lambda here: (here / "kept.npz").write_bytes(b"PK")), "is not a record of regard"),
    (
        broken(
            lambda here: (here / "kept.json").write_text(
                (here / "kept.json").read_text().replace('"version": 2', '"version": 99')
            )
        ),
        "version 99",
    ),
    (["look", "a", "--record", "kept.npz"], "give one of these: a text, --image FILE, or --record FILE"),
    (["look", "--image", "a.png", "--record", "kept.npz"], "give one of these"),
    (["look", "--image", "nowhere.png", "--model", "MODEL"], "there is no image file nowhere.png"),
    (["look", "--record", "kept.npz", "--layers", "0"], "a saved record holds what it holds"),
    (
        ["look", "--record", "kept.npz", "--out", "a.gif"],
        "cannot write .gif; give a folder, or a file that ends in",
    ),
    (["look", "--record", "kept.npz", "--out", "/proc/nowhere/a.html"], "cannot write to /proc/nowhere"),
    (
        ["look", "--record", "kept.npz", "--tokens", "3"],
        "--tokens 3: there are 3 tokens, counted from 0; give 0 to 2",
    ),
    (["look", "--record", "kept.npz", "--tokens", "nothing"], "there is no such token"),
    (["look", "--record", "kept.npz", "--head", "1"], "head 1: the only head here is 0"),
    (["look", "--record", "kept.npz", "--unit", "page"], "page"),
    (["look", "the cat", "--model", "MODEL", "--layers", "2"], "--layers 2: tiny-bert has 2 layers"),
    (["look", "the cat", "--model", "MODEL", "--heads", "1-3"], "--heads 3: tiny-bert has 3 heads"),
    (["look", "the cat", "--model", "MODEL", "--heads", "x"], "--heads 'x': expected numbers counted from 0"),
    (["look", "the cat", "--model", "MODEL", "--layers", "1-0"], "runs backwards; say 0-1"),
    (
        ["look", "the cat", "--model", "MODEL", "--target", "le chat"],
        "does not read one text and write another",
    ),
    (["compare", "one"], "give two texts"),
    (["compare", "one", ""], "the text is empty"),
    (["compare", "one", "two", "three"], "give two texts"),
    (["compare", "--record", "kept.npz"], "give two saved records and nothing else"),
    (["compare", "one", "two", "--out", "a.csv"], "a comparison goes to .html, .svg or .png"),
    (["explain", "a", "--text", "b"], "more than one of them"),
    (["explain", "a", "--target", "b"], "--target means nothing beside a text without --model"),
    (["explain", "a b", "--out", "a.pdf"], "cannot write a.pdf"),
]


@pytest.mark.parametrize(("typed", "said"), HOSTILE, ids=[said for _, said in HOSTILE])
def test_a_mistake_is_one_message_and_nothing_is_written(typed, said, saved, bert_folder, here, capfd):
    arguments = (
        typed(here, saved)
        if callable(typed)
        else [bert_folder if part == "MODEL" else part for part in typed]
    )
    before = {path: path.read_bytes() for path in here.rglob("*")}
    code, out, err = run(arguments, capfd)
    assert code == 2 and out == ""
    assert said in err and "Traceback" not in err and err.count("\n") == 1
    assert {path: path.read_bytes() for path in here.rglob("*")} == before


def test_a_long_record_is_looked_at(here, capfd):
    length = 100_000
    site = Site("layer.0", sizes=Sizes(1, 1, 1, length, length), scale=1.0, offset=0)
    site.top_keys = torch.arange(length).reshape(1, 1, length, 1).to(torch.int32)
    site.top_weights = torch.full((1, 1, length, 1), 0.5)
    site.statistics = {"entropy": torch.zeros(1, 1, length)}
    Record([site], model="long").save(here / "long")
    code, out, err = run(["look", "--record", "long.npz", "--out", "long.html", "--tokens", "99999"], capfd)
    assert (code, err) == (0, "") and "token 99999, 99999, attends to" in out
    assert (here / "long.html").stat().st_size < 3_000_000


def test_a_bar_moves_on_while_a_long_text_is_read(monkeypatch):
    class Attention(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    model = torch.nn.Sequential(Attention(), Attention())
    with _look_run._bar(model, 5000):
        model(torch.zeros(1, 1, 4, 2))
    assert "reading 5,000 tokens" in shown.getvalue() and "━" in shown.getvalue()
    assert all(not module._forward_hooks for module in model.modules())
    shown.truncate(0)
    with _look_run._bar(model, 100):
        assert all(not module._forward_hooks for module in model.modules())
    assert shown.getvalue().strip("\x00") == ""


def test_an_image_is_looked_at(here, capfd):
    from PIL import Image
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    torch.manual_seed(0)
    ViTModel(ViTConfig(image_size=32, patch_size=8, **sizes)).save_pretrained(here / "vit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(here / "vit")
    Image.new("RGB", (40, 40), (200, 30, 30)).save(here / "red.png")
    code, out, err = run(["look", "--image", "red.png", "--model", "vit", "--out", "i.html"], capfd)
    assert (code, err) == (0, "") and "vit: 2 layers, 3 heads, 17 tokens" in out
    grid = data_of((here / "i.html").read_text(encoding="utf-8"))["tables"][0]["grid"]
    assert (grid["rows"], grid["columns"], grid["first"]) == (4, 4, 1) and grid["image"] is not None
    code, out, err = run(["look", "a text", "--model", "vit"], capfd)
    assert (code, out) == (2, "") and "--image FILE" in err
