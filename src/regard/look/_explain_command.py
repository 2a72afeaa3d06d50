"""What the command `explain` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from regard.look import _choices
from regard.look._examples import Sizes, example, sentence
from regard.look.explain import Explanation

# What only a sentence with a seeded embedding has: an example has its own, and a model too.
_OF_SENTENCE = (
    "against",
    "seed",
    "dim",
    "key_dim",
    "value_dim",
    "heads",
    "mask",
    "score",
    "normalize",
    "bias",
)


def show(explanation: Explanation, outs: Sequence[Path] = ()) -> None:
    """Print it: in colour in a terminal, as plain text elsewhere; and write it to `outs`, by their suffixes.

    A step that disagrees ends with exit code 1.
    """
    written = [explanation.save(out) for out in outs]
    if sys.stdout.isatty():
        Console().print(explanation)
    else:
        print(explanation)
    if written:
        print("written: " + ", ".join(str(path) for path in written))
    if not explanation.agrees:
        raise SystemExit(1)


def explain(options: dict[str, Any]) -> Explanation:
    """The explanation of a text, of an example, or of a text in a model; an option of another kind is refused."""
    given = {name: value for name, value in options.items() if value is not None}
    text, named, model = _given_text(given), given.pop("example", None), given.pop("model", None)
    if named is not None:
        if text is not None or model is not None:
            raise ValueError("--example has its own sentence and numbers; leave out the text and --model")
        _refuse(given, (*_OF_SENTENCE, "layer", "target"), "--example")
        return example(named, given.get("token"), given.get("head", 0))
    if text is None:
        raise ValueError('give a text: regard explain "a sentence", or --example life-is-short')
    against = given.get("against")
    if against is not None:
        given["against"] = _text(against)
    if model is not None:
        from regard.look._explain_model import of_model

        _refuse(given, _OF_SENTENCE, "--model")
        return of_model(
            text,
            model,
            layer=given.get("layer"),
            head=given.get("head"),
            token=given.get("token"),
            target=given.get("target"),
        )
    _refuse(given, ("layer", "target"), "a text without --model")
    return _sentence(text, given)


def _given_text(given: dict[str, Any]) -> str | None:
    """The one text among the argument, --text and --file; None where there is none."""
    from regard.look._command import text_from

    sources = [given.pop(name, None) for name in ("sentence", "text", "file")]
    return None if sources == [None] * 3 else text_from(*sources)


def _text(text: str) -> str:
    from regard.look._command import text_from

    return text_from(text, None, None)


def _refuse(given: dict[str, Any], others: tuple[str, ...], beside: str) -> None:
    for name in others:
        if name in given:
            raise ValueError(f"--{name.replace('_', '-')} means nothing beside {beside}; leave it out")


def _sentence(text: str, given: dict[str, Any]) -> Explanation:
    sizes = Sizes(**{name: given[name] for name in ("dim", "key_dim", "value_dim", "heads") if name in given})
    seed = given.get("seed", 123)
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed: expected a number from 0 to 2^63 - 1, got {seed}")
    mechanism: dict[str, Any] = {}
    if "mask" in given:
        mechanism["mask"] = _choices.mask(given["mask"])
    if "score" in given:
        mechanism["score"] = _choices.score(given["score"], sizes.key_dim, seed)
    if "normalize" in given:
        mechanism["normalize"] = _choices.normalizer(given["normalize"])
    if "bias" in given:
        mechanism["bias"] = _choices.bias(given["bias"], sizes.heads)
    return sentence(
        text,
        against=given.get("against"),
        token=given.get("token"),
        head=given.get("head", 0),
        seed=seed,
        sizes=sizes,
        **mechanism,
    )
