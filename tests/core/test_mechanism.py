"""``Mechanism``: a small frozen mapping that every public function takes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import (
    Mechanism,
    attention,
    attention_weights,
    attention_with_lse,
    observe,
    plan,
    varlen_attention,
)
from regard.biases import Alibi
from regard.masks import Causal, Window
from regard.normalizers import Softmax, Sparsemax
from regard.scores import Dot

Q, K, V = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 5)
CAPPED = Dot(softcap=2.0)
WHOLE = Mechanism(
    "everything",
    formula="w = softmax(cap(q k) - m |i - j|)",
    paper="Nobody, 2020",
    score=CAPPED,
    normalize=Softmax(0.0),
    mask=Causal(),
    bias=Alibi(),
)


def test_only_what_was_given_is_in_the_mapping_and_in_one_order() -> None:
    assert list(WHOLE) == ["score", "normalize", "mask", "bias"]
    other = Mechanism("some", mask=None, score=CAPPED)
    assert dict(other) == {"score": CAPPED, "mask": None} and list(other) == ["score", "mask"]
    assert len(other) == 2 and "bias" not in other and other.get("bias") is None
    assert other["score"] is CAPPED
    with pytest.raises(KeyError):
        other["bias"]
    assert dict(Mechanism("nothing")) == {} and len(Mechanism("nothing")) == 0


CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda **m: attention(Q, K, V, **m),
    "attention_weights": lambda **m: attention_weights(Q, K, **m),
    "attention_with_lse": lambda **m: attention_with_lse(Q, K, V, **m)[1],
    "observe": lambda **m: observe(Q, K, V, topk=2, **m).top_weights,
    "plan": lambda **m: plan(Q, K, V, **m),
    "dropout": lambda **m: attention(Q, K, V, dropout_p=1.0, **m),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_public_function_takes_it(name: str) -> None:
    found = CALLS[name](**WHOLE)
    written = CALLS[name](score=CAPPED, normalize=Softmax(0.0), mask=Causal(), bias=Alibi())
    assert torch.equal(found, written) if isinstance(found, Tensor) else found == written


def test_varlen_takes_it() -> None:
    packed = torch.randn(9, 4, 8)
    edges = torch.tensor([0, 4, 9])
    found = varlen_attention(packed, packed, packed, edges, edges, **WHOLE)
    written = varlen_attention(
        packed, packed, packed, edges, edges, Causal(), score=CAPPED, normalize=Softmax(0.0), bias=Alibi()
    )
    assert torch.equal(found, written)


def test_it_is_frozen() -> None:
    frozen = Mechanism("frozen", score=CAPPED)
    for name in ("name", "formula", "paper", "score", "anything"):
        with pytest.raises(AttributeError, match=r"frozen; say mechanism\.but"):
            setattr(frozen, name, "x")
    with pytest.raises(TypeError):
        frozen["score"] = Dot()  # type: ignore[index]
    with pytest.raises(AttributeError):
        del frozen.name
    assert frozen.name == "frozen"


def test_but_changes_one_thing_and_leaves_the_first_alone() -> None:
    changed = WHOLE.but(mask=Window(1, 0), normalize=Sparsemax())
    assert isinstance(changed["mask"], Window) and isinstance(changed["normalize"], Sparsemax)
    assert changed["score"] is CAPPED and isinstance(WHOLE["mask"], Causal)
    assert (changed.name, changed.formula, changed.paper) == (WHOLE.name, WHOLE.formula, WHOLE.paper)
    assert list(Mechanism("x").but(bias=Alibi())) == ["bias"]
    with pytest.raises(ValueError, match="'maks'"):
        WHOLE.but(maks=Causal())


@pytest.mark.parametrize(
    "way",
    [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_is_the_same_mechanism(way: Callable[[Mechanism], Mechanism]) -> None:
    made = way(WHOLE)
    assert isinstance(made, Mechanism) and list(made) == list(WHOLE)
    assert (made.name, made.formula, made.paper) == (WHOLE.name, WHOLE.formula, WHOLE.paper)
    assert torch.equal(attention(Q, K, V, **made), attention(Q, K, V, **WHOLE))


def test_a_deep_copy_holds_parameters_of_its_own() -> None:
    scale = torch.nn.Parameter(torch.tensor(0.5))
    learned = Mechanism("learned", score=Dot(scale))
    made = copy.deepcopy(learned)
    assert made["score"].scale is not scale and torch.equal(made["score"].scale, scale)
    assert copy.copy(learned)["score"].scale is scale


def test_it_is_one_thing_to_sets_and_dictionaries() -> None:
    other = Mechanism("everything", score=CAPPED)
    assert WHOLE == WHOLE and WHOLE != other and len({WHOLE, other, WHOLE}) == 2
    assert {WHOLE: 1}[WHOLE] == 1


def test_printing_shows_name_formula_parts_and_paper() -> None:
    text = str(WHOLE)
    assert text.splitlines()[0] == "everything"
    for part in ("w = softmax(cap(q k) - m |i - j|)", "Nobody, 2020", "softcap=2.0", "Causal(", "Alibi("):
        assert part in text
    assert str(Mechanism("bare")) == "bare" and repr(Mechanism("bare")) == "Mechanism('bare')"
    assert repr(WHOLE).startswith("Mechanism('everything', score=Dot(")


@pytest.mark.parametrize("attribute", ["name", "formula", "paper"])
def test_texts_are_texts(attribute: str) -> None:
    with pytest.raises(TypeError, match=rf"Mechanism\({attribute}=\): expected text"):
        Mechanism(**{"name": "x", attribute: 3})


def test_what_a_part_is_is_checked_by_the_call() -> None:
    with pytest.raises(TypeError, match="normalize"):
        attention(Q, K, V, **Mechanism("wrong", normalize="softmax"))
