"""The commands train and translate: from pairs to a translation, and one message for what cannot be."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipes.translation import __main__, alignment, checkpoint
from recipes.translation import data as corpora
from recipes.translation.data.pairs import Corpus, Pair
from tests.recipes import tiny

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """A command, its exit code, and what it printed. The corpus is one of letters."""
    texts = ["".join(chr(ord("a") + (i * k) % 10) for k in range(1, 2 + i % 4)) for i in range(200)]
    pairs = [Pair(text, tiny.translated(text), str(place)) for place, text in enumerate(texts)]
    corpus = Corpus("dates", ("xx", "yy"), pairs[:160], pairs[160:180], pairs[180:])
    monkeypatch.setattr(corpora, "load", lambda name: corpus)
    before = signal.getsignal(signal.SIGTERM)

    def ran(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["recipes.translation", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            __main__.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    yield ran
    signal.signal(signal.SIGTERM, before)


SMALL = ("--data", "dates", "--width", 16, "--vocabulary", 40, "--device", "cpu", "--tokens", 200)


def test_train_resume_and_translate(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, _, err = run("train", *SMALL, "--out", folder, "--epochs", 1)
    assert code == 0, err
    first = checkpoint.newest(folder, "last")
    assert first is not None and (first / "state" / "training.pt").is_file()
    code, _, err = run("train", *SMALL, "--out", folder, "--epochs", 1)
    assert (code, err.count("\n")) == (2, 1) and "--resume" in err
    code, _, err = run("train", *SMALL, "--out", folder, "--epochs", 1, "--resume")
    assert code == 0 and "the budget was spent already" in err and first.exists()
    (folder / ".losses.csv.1.tmp").write_text("left by a killed run", encoding="utf-8")
    (folder / ".writing-abc").mkdir()
    code, _, err = run("train", *SMALL, "--out", folder, "--epochs", 2, "--resume")
    assert code == 0, err
    later = checkpoint.newest(folder, "last")
    assert later is not None and later.name > first.name and not first.exists()
    assert not (folder / ".writing-abc").exists() and not (folder / ".losses.csv.1.tmp").exists()
    assert (folder / "losses.svg").is_file() and (folder / "losses.csv").is_file()
    for width in (1, 3):
        code, out, err = run("translate", "abc", "--model", folder, "--beam", width)
        assert (code, out.count("\n"), err) == (0, 1, "")
    links = tmp_path / "links.txt"
    code, out, err = run("translate", "ab c", "--model", folder, "--pharaoh", links)
    found = alignment.from_pharaoh(links.read_text(encoding="utf-8"))
    assert code == 0 and [target for _, target in sorted(found, key=lambda link: link[1])] == list(
        range(len(out.split()))
    )
    assert {source for source, _ in found} <= {0, 1}
    page = tmp_path / "page.html"
    code, out, err = run("translate", "ab c", "--model", folder, "--show", "--out", page)
    text, *rows = out.splitlines()
    assert (code, err) == (0, "") and len(rows) >= len(text.split())
    assert page.read_text(encoding="utf-8").count('<th scope="col"') == 2
    code, _, err = run("translate", "abc", "--model", folder, "--pharaoh", links, "--head", 1)
    assert (code, err.count("\n")) == (2, 1) and "--head 1: the only head" in err


def test_a_resumed_training_must_be_the_same_one(run: Run, tmp_path: Path) -> None:
    assert run("train", *SMALL, "--out", tmp_path, "--epochs", 1)[0] == 0
    for changed, said in (
        (("--rate", 0.5), "trained with rate 0.001, this command says 0.5"),
        (("--attention", "dot"), "trained with attention 'additive', this command says 'dot'"),
        (("--seed", 2), "trained with seed 1, this command says 2"),
    ):
        code, _, err = run("train", *SMALL, "--out", tmp_path, "--epochs", 2, "--resume", *changed)
        assert (code, err.count("recipes.translation:")) == (2, 1) and said in err


def test_sentences_that_no_model_can_read_get_one_message(run: Run, tmp_path: Path) -> None:
    assert run("train", *SMALL, "--out", tmp_path, "--epochs", 1)[0] == 0
    for sentence, said in (
        ("", "got an empty one"),
        (" \n ", "got an empty one"),
        ("日本語の文", "letters that this model never saw"),
        ("abc " * 5000, "expected at most 1,000 subwords, got"),
    ):
        code, out, err = run("translate", sentence, "--model", tmp_path)
        assert (code, out, err.count("\n")) == (2, "", 1) and said in err


def test_a_checkpoint_with_another_vocabulary_is_refused(run: Run, tmp_path: Path) -> None:
    assert run("train", *SMALL, "--out", tmp_path, "--epochs", 1)[0] == 0
    place = checkpoint.resolve(tmp_path)
    path = place / "vocabulary.json"
    path.write_text(path.read_text(encoding="utf-8").replace("<unk>", "<who>"), encoding="utf-8")
    code, _, err = run("translate", "abc", "--model", tmp_path)
    assert (code, err.count("\n")) == (2, 1) and "another vocabulary" in err
    path.write_text("{", encoding="utf-8")
    code, _, err = run("translate", "abc", "--model", tmp_path)
    assert (code, err.count("\n")) == (2, 1) and "is no vocabulary of this recipe" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "when shall it stop?"),
        (("--epochs", 0), "--epochs: expected 1 or more"),
        (("--minutes", "nan"), "--minutes: expected a number above 0"),
        (("--epochs", 1, "--heads", 4), "--heads: means nothing to --model rnn"),
        (
            ("--epochs", 1, "--model", "transformer", "--cell", "gru"),
            "--cell: means nothing to --model transformer",
        ),
        (("--epochs", 1, "--model", "cnn"), "--model: expected rnn or transformer"),
        (("--epochs", 1, "--attention", "loud"), "attention: expected one of none, dot"),
        (("--epochs", 1, "--schedule", "linear"), "say --steps"),
        (("--epochs", 1, "--rate", "nan"), "rate: expected a number above 0"),
        (("--epochs", 1, "--vocabulary", 3), "vocabulary: expected more than 4"),
        (("--epochs", 1, "--precision", "fp8"), "precision: expected one of no, bf16"),
    ],
)
def test_options_that_cannot_be_get_one_message(run: Run, tmp_path: Path, options: tuple, said: str) -> None:
    code, out, err = run("train", *SMALL[:2], "--out", tmp_path / "run", "--device", "cpu", *options)
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err, err


def test_a_run_needs_a_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    code, _, err = run("train", *SMALL, "--out", tmp_path / "file", "--epochs", 1)
    assert (code, err.count("\n")) == (2, 1) and "is a file" in err


def test_a_place_that_cannot_be_written_is_refused_before_any_work(run: Run, tmp_path: Path) -> None:
    nowhere = tmp_path / "file"
    nowhere.write_text("", encoding="utf-8")
    for command in (
        ("translate", "abc", "--out", nowhere / "x.html"),
        ("translate", "abc", "--pharaoh", nowhere / "x.txt"),
        ("evaluate", "--out", nowhere / "x.json"),
    ):
        code, out, err = run(*command, "--model", tmp_path / "none")
        assert (code, out, err.count("\n")) == (
            2,
            "",
            1,
        ) and f"cannot write to {nowhere}: it is a file" in err
    code, _, err = run("train", *SMALL, "--out", "/proc/nowhere", "--epochs", 1)
    assert (code, err.count("\n")) == (2, 1) and "cannot " in err and "/proc/nowhere" in err


def test_what_translate_is_given_is_looked_at_first(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run("train", *SMALL, "--out", folder, "--epochs", 1)[0] == 0
    for options, said in (
        (("--out", tmp_path / "x.png"), "--out: expected a name that ends in .html, got x.png"),
        (("--layer", 9), "--layer 9: the only layer"),
        (("--beam", 0), "--beam: expected 1 or more, got 0"),
        (("--penalty", "nan"), "--penalty: expected a number, got nan"),
    ):
        code, out, err = run("translate", "abc", "--model", folder, *options)
        assert (code, out, err.count("\n")) == (2, "", 1) and said in err


def test_lines_on_standard_input(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    assert run("train", *SMALL, "--out", folder, "--epochs", 1)[0] == 0

    def given(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    given(b"a\n\nb c\n")
    code, out, _ = run("translate", "-", "--model", folder, "--pharaoh", tmp_path / "links")
    assert code == 0 and out.count("\n") == 3 and out.splitlines()[1] == ""
    assert (tmp_path / "links").read_text(encoding="utf-8").splitlines()[1] == ""
    for data, said in (
        (b"\n \n", "expected at least one line"),
        (b"ab\xff\n", "expected UTF-8 on standard input; byte 2"),
    ):
        given(data)
        code, out, err = run("translate", "-", "--model", folder)
        assert (code, out, err.count("\n")) == (2, "", 1) and said in err


def test_a_damaged_state_is_said_in_our_words(run: Run, tmp_path: Path) -> None:
    assert run("train", *SMALL, "--out", tmp_path, "--epochs", 1)[0] == 0
    last = checkpoint.newest(tmp_path, "last")
    assert last is not None
    (last / "state" / "training.pt").write_bytes(b"garbage")
    code, _, err = run("train", *SMALL, "--out", tmp_path, "--epochs", 2, "--resume")
    assert (
        code == 2
        and "training.pt: it is damaged, or no state of a training" in err
        and "weights_only" not in err
    )
