"""The worked example from the command line: mechanisms in words, and what is refused."""

import re
from pathlib import Path

import pytest
import torch

import regard
from regard.cli import main
from regard.look import _choices
from regard.look._examples import EXAMPLES, LIFE, example, tokenise, vocabulary, which
from regard.look._explain_model import of_model
from regard.look.explain import explain
from regard.masks import Causal, Prefix, Window
from regard.scores import Dot
from tests.look.explained import tensors


def test_tokenise_and_vocabulary() -> None:
    assert tokenise(LIFE) == ["Life", "is", "short", "eat", "dessert", "first"]
    assert tokenise("日本語") == ["日", "本", "語"]
    assert vocabulary(["b", "a", "b"]) == {"a": 0, "b": 1}
    assert (
        which("all", ["a", "b"], 0) is None and which("b", ["a", "b"], 0) == 1 and which(None, ["a"], 0) == 0
    )


def test_mechanisms_in_words() -> None:
    mask = _choices.mask("causal & window:2,none | prefix:1")
    expected = (Causal() & Window(2, None)) | Prefix(1)
    assert torch.equal(mask.materialize(6, 6), expected.materialize(6, 6))
    offset = _choices.mask("window:1,1:lower_right").materialize(2, 5)
    assert torch.equal(offset, Window(1, 1, "lower_right").materialize(2, 5))
    assert torch.equal(_choices.mask("causal:2").materialize(2, 5), Causal(offset=2).materialize(2, 5))
    assert _choices.score("softcap:30", 4).softcap == 30 and _choices.score("dot:2", 4).scale == 2
    assert _choices.normalizer("entmax:1.3").alpha == 1.3 and _choices.normalizer("softmax:0").sink == 0
    assert (
        _choices.bias("relative:3", 2).table.shape == (2, 7) and _choices.bias("alibi:0.5", 2).slopes == 0.5
    )


WRONG_CALLS = {
    "token out of range": (
        {"token": 5},
        ValueError,
        r"token=\): there are 5, counted from 0 \(0 to 4\); got 5",
    ),
    "negative token": ({"token": -1}, ValueError, "got -1"),
    "token as text": ({"token": "1"}, TypeError, "counted from 0; got '1'"),
    "head": ({"head": 4}, ValueError, r"head=\): there are 4"),
    "sample": ({"sample": 2}, ValueError, r"sample=\): there are 2"),
    "keyword": ({"scale": 1.0}, TypeError, "unknown keyword 'scale'"),
    "tokens": ({"tokens": ["a"]}, ValueError, "one name for each of 5; got 1"),
    "key tokens": ({"key_tokens": ["a"]}, ValueError, "one name for each of 7; got 1"),
    "alignment": ({"mask": Causal()}, ValueError, "alignment"),
}


@pytest.mark.parametrize("wrong", WRONG_CALLS)
def test_wrong_calls(wrong: str) -> None:
    options, kind, message = WRONG_CALLS[wrong]
    with pytest.raises(kind, match=message):
        explain(*tensors(), **options)


def test_wrong_sources(record: regard.look.Record) -> None:
    with pytest.raises(TypeError, match="leave them out"):
        explain(record.sites[0], torch.ones(1))
    with pytest.raises(TypeError, match="leave them out"):
        explain(record.sites[0], score=Dot())
    with pytest.raises(
        TypeError, match="or one site of a Record, or a model; got Tensor, NoneType, NoneType"
    ):
        explain(torch.ones(2, 2))
    long = torch.zeros(1, 2**14, 2)
    with pytest.raises(ValueError, match="too many to write out"):
        explain(long, long, long)


def main_exits(arguments: list[str], code: int) -> None:
    """Run the command line; 0 also when it returns."""
    try:
        main(arguments)
    except SystemExit as stop:
        assert (stop.code or 0) == code, arguments
    else:
        assert code == 0, arguments


WRONG_COMMANDS = {
    "no text": (["explain"], "give a text"),
    "empty text": (["explain", "  "], "the text is empty"),
    "no text at all": (["explain", "a \udcff b"], "not valid UTF-8"),
    "only commas": (["explain", ",,"], "the text is empty"),
    "example": (["explain", "--example", "nope"], "there is no example 'nope'; there are: life-is-short"),
    "example and text": (["explain", "a b", "--example", "karina"], "leave out the text"),
    "example and seed": (
        ["explain", "--example", "karina", "--seed", "1"],
        "--seed means nothing beside --example",
    ),
    "example and layer": (["explain", "--example", "karina", "--layer", "1"], "--layer means nothing"),
    "model and dim": (
        ["explain", "a b", "--model", "minilm", "--dim", "4"],
        "--dim means nothing beside --model",
    ),
    "layer": (["explain", "a b", "--layer", "0"], "--layer means nothing"),
    "no such model": (["explain", "a b", "--model", "/nowhere/at/all"], "no model folder"),
    "token number": (["explain", "a b", "--token", "2"], "there are 2 tokens, counted from 0; give 0 to 1"),
    "token word": (["explain", "a b", "--token", "c"], "no such token; there are: a b"),
    "token twice": (["explain", "a b a", "--token", "a"], "it stands at 0, 2"),
    "head": (["explain", "a b", "--head", "1"], "there are 1"),
    "heads": (["explain", "a b", "--heads", "0"], "--heads: expected a number from 1 to 4096, got 0"),
    "width": (["explain", "a b", "--key-dim", "100000"], "--key-dim: expected a number from 1 to 4096"),
    "seed": (["explain", "a b", "--seed", "-1"], "--seed: expected a number from 0"),
    "long": (["explain", "a " * 600], "600 tokens long"),
    "mask": (["explain", "a b", "--mask", "diagonal"], "--mask 'diagonal': expected one of: causal, window"),
    "window": (["explain", "a b", "--mask", "window:1"], "--mask 'window:1'"),
    "window that holds nothing": (["explain", "a b", "--mask", "window:-2,0"], "can hold a key"),
    "score": (["explain", "a b", "--score", "inner"], "--score 'inner'"),
    "normalize": (["explain", "a b", "--normalize", "entmax"], "--normalize 'entmax'"),
    "bias": (["explain", "a b", "--bias", "relative:x"], "expected one of: alibi"),
    "plan shape": (["plan", "--query", "1,x"], "--query '1,x': expected a shape such as 1,8,2048,64"),
    "plan dtype": (["plan", "--query", "1,1,4,4", "--dtype", "int8"], "--dtype 'int8'"),
    "plan too long": (["plan", "--query", "1,8,100000000000,64"], "does not fit on this machine"),
    "plan alignment": (["plan", "--query", "1,1,1,8", "--key", "1,1,9,8", "--mask", "causal"], "lower_right"),
    "plan heads": (["plan", "--query", "1,3,4,8", "--key", "1,2,4,8"], "heads"),
}


@pytest.mark.parametrize("wrong", WRONG_COMMANDS)
def test_wrong_commands(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = WRONG_COMMANDS[wrong]
    main_exits(arguments, 2)
    said = capsys.readouterr()
    assert message in said.err and said.out == "" and "Traceback" not in said.err


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_on_the_command_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main_exits(["explain", "--example", name], 0)
    assert capsys.readouterr().out.rstrip("\n") == str(example(name))


def test_any_sentence_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--seed 1 --dim 4 --key-dim 3 --value-dim 2 --heads 2 --head 1 --token c --mask causal --bias alibi"
    )
    main_exits(["explain", "a b c", *words.split(), "--score", "softcap:3", "--normalize", "sparsemax"], 0)
    shown = capsys.readouterr().out
    for step in ("soft-capped", "bias", "masked", "max(s_ij - tau_i, 0)", "context of every head"):
        assert step in shown


def test_plan_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    main_exits(
        ["plan", "--query", "1,8,4096,64", "--mask", "window:255,0", "--dtype", "bfloat16", "--train"], 0
    )
    shown = capsys.readouterr().out
    query = torch.empty(1, 8, 4096, 64, dtype=torch.bfloat16, requires_grad=True)
    assert shown.rstrip("\n") == str(regard.plan(query, query, query, Window(255, 0)))
    main_exits(["plan", "--query", "1,8,1,64", "--key", "1,2,64,64", "--value", "1,2,64,32"], 0)
    assert "Hkv 2" in capsys.readouterr().out


def test_the_page_shows_what_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text("utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    code = [body for kind, body in blocks if kind == "python"]
    assert len(code) == 3
    namespace: dict[str, object] = {}
    for body in code:
        exec(body, namespace)
    (shown,) = [body for kind, body in blocks if kind == "" and body.startswith(" 11  weights")]
    made = str(example("life-is-short"))
    for line in shown.splitlines():
        # The last digits of a difference are the machine's own; every other line is there to the letter.
        assert line.rsplit(" to ", 1)[0].split("difference")[0] in made


@pytest.mark.network
def test_minilm(minilm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "The animal didn't cross the street because it was too tired."
    main_exits(["explain", text, "--model", "minilm", "--layer", "5", "--head", "11", "--token", "it"], 0)
    shown = capsys.readouterr().out
    assert "agrees with what the model produced to " in shown
    worked = of_model(text, "minilm", layer=5, head=11, token="it")
    weights = worked["weights"].numbers
    assert worked.agrees and weights is not None and worked["weights"].columns is not None
    assert worked["weights"].columns[int(weights.argmax())] == "animal"
