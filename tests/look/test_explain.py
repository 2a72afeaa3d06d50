"""The worked example: the published numbers to every digit, every step checked, and what a person sees of it."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

import regard
from regard.biases import Alibi, Relative
from regard.cli import main
from regard.look import _explain_hand, _explain_text
from regard.look._examples import LIFE, Sizes, example, sentence
from regard.look.explain import Check, Explanation, Step, compare, explain
from regard.masks import Causal, Padding, Prefix, Window
from regard.normalizers import Entmax, Entmax15, Relu, Sigmoid, Softmax, Sparsemax
from regard.scores import Additive, Bilinear, Concat, Cosine, Distance, Dot, Modified
from tests.look.explained import generator, tensors

PUBLISHED = json.loads((Path(__file__).parent.parent / "data" / "worked_examples.json").read_text("utf-8"))
LIFE_NUMBERS = PUBLISHED["life_is_short"]
KARINA = PUBLISHED["karina"]


def digits(numbers: object) -> object:
    """Numbers as they are printed, with four digits: a list of texts, or of lists of them."""
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.tolist()
    if isinstance(numbers, list):
        return [digits(entry) for entry in numbers]
    return _explain_text.number(numbers)


def printed(explanation: Explanation, name: str) -> list[str]:
    """The lines of one step as they are printed."""
    lines = str(explanation).splitlines()
    heads = [place for place, line in enumerate(lines) if line[:3].strip().isdecimal() and line[3:5] == "  "]
    start = next(place for place in heads if lines[place][5:].startswith(name))
    stop = next((place for place in heads if place > start), len(lines))
    return lines[start:stop]


def printed_numbers(explanation: Explanation, name: str) -> list[str]:
    """Every number with four digits that is printed under a step, in order."""
    words = " ".join(printed(explanation, name)).split()
    return [word for word in words if "." in word and word.lstrip("-").replace(".", "").isdecimal()]


# ---------------------------------------------------------------------------- the published examples


def test_life_is_short_before_attention() -> None:
    worked = example("life-is-short")
    assert worked["sentence"].text == LIFE_NUMBERS["sentence"]
    assert worked["vocabulary"].text == LIFE_NUMBERS["vocabulary"]
    assert [int(number) for number in worked["ids"].text] == LIFE_NUMBERS["ids"]
    rows = [LIFE_NUMBERS["embedding"][f"row_{row}"] for row in range(6)]
    assert digits(worked["embeddings"].numbers) == digits(rows)
    assert printed_numbers(worked, "embeddings") == [f"{value:.4f}" for row in rows for value in row]
    shapes = LIFE_NUMBERS["projections"]["shapes"]
    assert (
        worked["queries"].numbers is not None and list(worked["queries"].numbers.shape) == shapes["query_2"]
    )
    assert list(worked["keys"].shape or ()) == shapes["keys"]
    assert list(worked["values"].shape or ()) == shapes["values"]
    keys, values = worked["keys"].numbers, worked["values"].numbers
    assert keys is not None and list(keys[1].shape) == shapes["key_2"]
    assert values is not None and list(values[1].shape) == shapes["value_2"]


@pytest.mark.parametrize(
    ("step", "published"),
    [("scores", "scores"), ("weights", "weights_scaled_by_1_over_sqrt_24"), ("context", "context")],
)
def test_life_is_short_attention(step: str, published: str) -> None:
    worked = example("life-is-short")
    expected = LIFE_NUMBERS["second_token_as_query"][published]
    assert digits(worked[step].numbers) == digits(expected)
    assert printed_numbers(worked, step)[: len(expected)] == [f"{value:.4f}" for value in expected]
    assert worked.agrees


def test_life_is_short_scaled_scores_are_the_scores_over_the_root_of_24() -> None:
    worked = example("life-is-short")
    scaled = [score / math.sqrt(24) for score in LIFE_NUMBERS["second_token_as_query"]["scores"]]
    numbers = worked["scaled"].numbers
    assert numbers is not None
    torch.testing.assert_close(numbers.tolist(), scaled, atol=1e-4, rtol=0)


def test_karina() -> None:
    worked = example("karina")
    assert list(worked["tokens"].text) == KARINA["tokens"]
    for name, published in (
        ("embeddings", "X"),
        ("queries", "X"),
        ("keys", "X"),
        ("values", "X"),
        ("scores", "QKt"),
        ("weights", "weights_scaled_by_1_over_sqrt_2"),
        ("context", "output"),
    ):
        assert digits(worked[name].numbers) == digits(
            [[float(v) for v in row] for row in KARINA[published]]
        ), name
        assert printed_numbers(worked, name) == [f"{v:.4f}" for row in KARINA[published] for v in row], name
    assert worked.agrees and worked.token is None


def test_heads() -> None:
    shapes = LIFE_NUMBERS["multi_head"]["shapes"]
    worked = example("life-is-short-heads")
    assert list(worked["keys"].shape or ()) == shapes["keys"]
    assert list(worked["values"].shape or ()) == shapes["values"]
    assert str(tuple(shapes["weights_query"])) in worked["queries"].note
    assert str(tuple(shapes["weights_value"])) in worked["values"].note
    assert list(worked["context of every head"].shape or ()) == shapes["context_of_token_2"]
    for head in range(LIFE_NUMBERS["multi_head"]["heads"]):
        one = example("life-is-short-heads", head=head)
        every = one["context of every head"].numbers
        assert one.agrees and every is not None
        assert torch.equal(every[head], one["context"].numbers)


def test_cross() -> None:
    shapes = LIFE_NUMBERS["cross"]["shapes"]
    worked = example("life-is-short-cross")
    assert list(worked["keys"].shape or ()) == shapes["keys"]
    assert list(worked["values"].shape or ()) == shapes["values"]
    assert worked["weights"].shape == (8,) and worked["context"].shape == (28,)
    assert worked.agrees


def test_cross_attention_to_the_same_sentence_is_self_attention() -> None:
    own, cross = sentence(LIFE), sentence(LIFE, against=LIFE)
    for name in ("scores", "scaled", "weights", "context"):
        assert torch.equal(own[name].numbers, cross[name].numbers), name


def test_the_examples_leave_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    example("life-is-short")
    assert torch.equal(torch.rand(3), expected)


def test_seed_and_sizes_are_used() -> None:
    worked = sentence("a b c", seed=7, sizes=Sizes(dim=5, key_dim=6, value_dim=4, heads=2), token="c", head=1)
    torch.manual_seed(7)
    table = torch.nn.Embedding(3, 5).weight
    torch.manual_seed(7)
    w_query, w_key, w_value = torch.rand(2, 6, 5), torch.rand(2, 6, 5), torch.rand(2, 4, 5)
    query, key, value = (table @ weight[1].T for weight in (w_query, w_key, w_value))
    weights = torch.softmax(query[2] @ key.T / math.sqrt(6), -1)
    torch.testing.assert_close(worked["weights"].numbers, weights.detach())
    torch.testing.assert_close(worked["context"].numbers, (weights @ value).detach())


# ---------------------------------------------------------------------------- every mechanism


def _own_score(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return -(query[..., :, None, :] - key[..., None, :, :]).abs().sum(-1)


def _own_normalizer(scores: torch.Tensor) -> torch.Tensor:
    return torch.softmax(2 * scores, -1)


SCORES = {
    "dot": Dot(),
    "dot scaled": Dot(scale=-0.5, softcap=2.0),
    "dot per head": Dot(scale=torch.tensor([0.5, 1.0, 2.0, 3.0])),
    "bilinear": Bilinear(torch.randn(6, 6, generator=generator()), scale=0.3),
    "bilinear per head": Bilinear(torch.randn(4, 6, 6, generator=generator())),
    "concat": Concat(torch.randn(6, generator=generator()), torch.randn(4, 6, generator=generator())),
    "additive": Additive(torch.randn(4, 6, generator=generator())),
    "cosine": Cosine(scale=3.0),
    "distance": Distance(scale=0.25),
    "own": _own_score,
    "modified": Modified(Dot(), lambda score, b, h, q, k: score + 0.1 * h - 0.2 * (q - k).abs()),
}
NORMALIZERS = {
    "softmax": Softmax(),
    "sink": Softmax(sink=torch.tensor([0.5, 1.0, -1.0, 2.0])),
    "sparsemax": Sparsemax(),
    "entmax15": Entmax15(),
    "entmax": Entmax(torch.tensor([1.2, 1.4, 1.6, 2.5])),
    "sigmoid": Sigmoid(bias=-0.5),
    "relu": Relu(),
    "own": _own_normalizer,
}
PLACES = {
    "nothing": {},
    "window and prefix": {"mask": Window(2, 0, "lower_right") | Prefix(1)},
    "alibi": {"bias": Alibi(alignment="lower_right"), "mask": Causal()},
    "bias": {"bias": Relative(torch.linspace(-1, 1, 5), "upper_left") + torch.ones(5, 7)},
    "padding": {"mask": Padding(torch.tensor([7, 3]))},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("score", SCORES)
def test_scores_and_places(score: str, place: str) -> None:
    _follow({"score": SCORES[score], **PLACES[place]})


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("normalize", NORMALIZERS)
def test_normalizers_and_places(normalize: str, place: str) -> None:
    _follow({"normalize": NORMALIZERS[normalize], **PLACES[place]})


def _follow(mechanism: dict[str, object]) -> None:
    query, key, value = tensors()
    weights = regard.attention_weights(query, key, **mechanism)
    output = regard.attention(query, key, value, **mechanism)
    one = explain(query, key, value, token=3, head=2, sample=1, **mechanism)
    every = explain(query, key, value, head=3, **mechanism)
    assert one.agrees and every.agrees, f"{one}\n{every}"
    torch.testing.assert_close(one["weights"].numbers, weights[1, 2, 3])
    torch.testing.assert_close(one["context"].numbers, output[1, 2, 3])
    torch.testing.assert_close(every["weights"].numbers, weights[0, 3])
    torch.testing.assert_close(every["context"].numbers, output[0, 3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    worked = explain(*tensors(dtype), token=0, mask=Causal("lower_right"))
    assert worked.agrees, str(worked)
    assert worked["context"].numbers is not None and worked["context"].numbers.dtype == dtype
    if dtype == torch.float64:
        assert worked.largest_difference < 1e-12


def test_two_three_and_five_dimensions() -> None:
    query, key, value = tensors()
    flat = explain(query[0, 0], key[0, 0], value[0, 0], token=1)
    heads = explain(query[0], key[0, :1], value[0, :1], token=1, head=3)
    deep = explain(query[None], key[None], value[None], token=1, head=3, sample=1)
    assert flat.agrees and heads.agrees and deep.agrees
    torch.testing.assert_close(deep["context"].numbers, regard.attention(query, key, value)[1, 3, 1])


def test_a_row_that_sees_nothing_is_zero() -> None:
    query, key, value = tensors()
    mask = torch.zeros(5, 7, dtype=torch.bool)
    worked = explain(query, key, value, token=0, mask=mask)
    assert worked.agrees
    assert digits(worked["weights"].numbers) == ["0.0000"] * 7
    assert digits(worked["masked"].numbers) == ["blocked"] * 7
    assert digits(worked["context"].numbers) == ["0.0000"] * 3


# ---------------------------------------------------------------------------- what is checked, and said


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = regard.attention_weights
    monkeypatch.setattr(regard, "attention_weights", lambda *given, **words: right(*given, **words) * 1.001)
    worked = example("life-is-short")
    assert not worked.agrees
    assert "DIFFERS" in str(worked) and "steps DIFFER: weights" in str(worked).splitlines()[-1]
    with pytest.raises(SystemExit) as stop:
        main(["explain", "--example", "life-is-short"])
    assert stop.value.code == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_a_site_whose_output_is_another_is_found(bert_folder: Path) -> None:
    from regard.look._model import load_model, record_of

    site = record_of(load_model(str(bert_folder)), "the cat sat").sites[0]
    assert explain(site, token=1).agrees
    site.output = site.output + 0.01
    worked = explain(site, token=1)
    assert not worked.agrees
    assert "DIFFERS from what the model produced" in str(worked)


def test_compare_sees_infinities_and_shapes() -> None:
    numbers = torch.tensor([1.0, -math.inf])
    assert compare(numbers, numbers.double(), "itself").agrees
    assert not compare(numbers, torch.tensor([1.0, math.inf]), "another").agrees
    assert not compare(numbers, torch.tensor([1.0, 0.0]), "another").agrees
    assert not compare(numbers, torch.tensor([1.0]), "another").agrees
    assert not compare(torch.tensor([math.nan]), torch.tensor([1.0]), "another").agrees
    assert not Check("x", 2e-5, 1e-5).agrees


def test_entmax_by_hand_sums_to_one() -> None:
    rows = torch.tensor([[3.0, 1.0, -math.inf, 0.5]])
    for normalize in (Sparsemax(), Entmax15(), Entmax(1.2)):
        weights = _explain_hand.weights(normalize, rows, 0)
        assert weights is not None
        assert abs(float(weights.sum()) - 1) < 1e-9 and weights[0, 2] == 0


def test_plain_text_and_the_terminal_say_the_same() -> None:
    worked = example("life-is-short")
    plain, coloured = io.StringIO(), io.StringIO()
    Console(file=plain, width=100, no_color=True).print(worked)
    Console(file=coloured, width=100, force_terminal=True).print(worked)
    assert plain.getvalue().rstrip("\n") == str(worked) == str(example("life-is-short"))
    assert "\x1b[" in coloured.getvalue() and "\x1b[" not in str(worked)


@pytest.mark.parametrize(
    "text", [LIFE, "我们 喜欢 注意力 机制", "مرحبا بالعالم 👩‍👩‍👧 emoji", "a" * 300 + " b", "日本語"]
)
def test_lines_fit_a_terminal(text: str) -> None:
    for token in ("0", "all"):
        body = str(sentence(text, token=token)).splitlines()
        too_wide = [line for line in body if cell_len(line) > 79]
        assert not too_wide


def test_text_cannot_steer_the_terminal() -> None:
    shown = str(sentence("a \x1b[31mred\x1b[0m \u202etext\x07", token="all"))
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    assert "<001B>[31mred" in shown


def test_long_sentences_show_the_heaviest_keys() -> None:
    worked = sentence(" ".join(f"w{number}" for number in range(60)), token="5")
    weights = worked["weights"].numbers
    assert weights is not None
    shown = [int(line.split()[0]) for line in printed(worked, "weights") if line.strip()[:1].isdecimal()][1:]
    assert (
        set(weights.argsort(descending=True)[:24].tolist())
        <= set(shown)
        <= {*weights.argsort()[-24:].tolist(), 5}
    )
    assert f"{60 - len(shown)} keys with smaller weights are not shown" in str(worked)


def test_stages_come_first_by_name() -> None:
    query, key, value = tensors()
    stages = {
        "image": "a cat",
        "pixels": torch.arange(4),
        "patches": torch.ones(5, 2),
        "keys": Step("keys", "given"),
    }
    worked = explain(
        query, key, value, token=0, tokens=list("abcde"), key_tokens=list("ABCDEFG"), stages=stages
    )
    names = [step.name for step in worked.steps]
    assert names[:6] == ["image", "pixels", "patches", "keys", "queries", "values"]
    assert worked["keys"].formula == "given"
    assert "a         " in "\n".join(printed(worked, "patches"))
    assert "G " in "\n".join(printed(worked, "weights"))
    with pytest.raises(KeyError, match="no step 'pixel'; there are: image"):
        worked["pixel"]
