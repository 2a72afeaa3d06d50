"""The page and the plot of the study of context, made of its numbers and of nothing else."""

from __future__ import annotations

import json
from typing import Any

from studies import files
from studies.chart import Line, Panel, svg
from studies.files import percent, said, table

Found = dict[str, Any]


def contents(found: Found, *, quick: bool = False) -> dict[str, str]:
    """The three files of the study."""
    numbers = files.numbers(found)
    rounded = json.loads(numbers)
    return {
        "context.json": numbers,
        "context.svg": plot(rounded),
        "context.md": files.wrapped(files.marked(page(rounded), quick)),
    }


def plot(found: Found) -> str:
    depth = list(range(len(found["shown"]["nearest"])))
    layers = depth[:-1]
    names = {"same_sense": "same sense", "other_sense": "other sense", "other_word": "other word"}

    def cosines(kind: str, title: str) -> Panel:
        lines = [Line(name, depth, found[kind][key]) for key, name in names.items()]
        return Panel(title, "layers passed", lines, 0.0, 1.0)

    near = [
        Line(name, depth, found[kind]["nearest"])
        for kind, name in (("shown", "cues seen"), ("hidden", "cues hidden"))
    ]
    parts = ("itself", "cues", "special", "rest")
    given = [Line(name, layers, [row[name] for row in found["attention"]]) for name in parts]
    panels = [
        cosines("shown", "Cosine of two uses"),
        cosines("hidden", "The same, cues hidden"),
        Panel("Nearest other use has the same sense", "layers passed", near, 0.0, 1.0),
        Panel("Where the word's attention goes", "layer", given, 0.0, 1.0),
    ]
    return svg(panels, 2, "The same word in different sentences, layer by layer")


def page(found: Found) -> str:
    shown, hidden = found["shown"], found["hidden"]
    layers = len(found["attention"])
    senses = "; ".join(f"*{word}* ({', '.join(names)})" for word, names in found["words"].items())
    least = min(range(layers), key=lambda layer: found["steps"][layer])
    special = max(row["special"] for row in found["attention"])
    evenly = found["attention"][0]["evenly"]
    above = [f"layer {layer}" for layer, row in enumerate(found["attention"]) if row["cues"] > row["evenly"]]
    return f"""\
# The same word in different sentences

It is said that attention turns a word's one vector into a vector of its meaning in the sentence. How much of
that can be seen in {found["model"]}? {found["uses"]} sentences, each with one word of two senses: {senses}. In
every sentence the words that give the sense away, its *cues*, are marked by hand
(`studies/context/sentences.py`). Everything here is made by

```sh
regard fetch minilm
python -m studies.context
```

which watches the unmodified model with `regard.watch`. The numbers are in [context.json](context.json).

![Four charts: cosines by layer, with and without the cues; nearest uses; where attention goes](context.svg)

## Before and after each layer

Cosine of the word's vectors in two sentences, mean over pairs; and the share of uses whose nearest other use of
the same word has the same sense (by chance: {said(_chance(found))}).

{_depth_table(shown)}
- **Two senses stay close.** After the last layer two uses in different senses still have a cosine of
  {said(shown["other_sense"][-1])}, two in the same sense {said(shown["same_sense"][-1])}, two different words
  {said(shown["other_word"][-1])}. The vector of a word in context is mostly the word.
- **But the order is right.** The nearest other use has the same sense in {percent(shown["nearest"][0])} of the
  cases at the embedding, where two uses differ by position only, in {percent(shown["nearest"][1])} after the
  first layer, and in {percent(shown["nearest"][-1])} after the last. The gap between the two cosines grows from
  {said(_gap(shown, 0))} to {said(_gap(shown, -1))}.
- **The layers do not do equal work.** Cosine of a word's vector before and after a layer:
  {", ".join(f"{said(step)} (layer {layer})" for layer, step in enumerate(found["steps"]))}. Layer {least} turns
  it most.

## With the cues hidden

The same sentences, with the cues masked in every layer, so that no token can attend to them:

{_depth_table(hidden)}
The gap after the last layer is {said(_gap(hidden, -1))} where it was {said(_gap(shown, -1))}, and the nearest
use is right in {percent(hidden["nearest"][-1])} of the cases where it was in {percent(shown["nearest"][-1])}.
What is left comes from the other words and from word order: *a light suitcase* is no lamp even where the
suitcase is hidden.

## One word at a time

After the last layer:

{_word_table(found)}
## What the heads attended to

Where the word's query sends its attention, mean over heads and sentences:

{_share_table(found)}
Cues are {percent(evenly)} of the tokens; they get more than that share in {" and ".join(above) or "no layer"}.
Up to {percent(special)} goes to [CLS] and [SEP], which stand for no word: a mean over heads says little about
what a layer reads. Single heads say more. The head of each layer that gives most to the cues:

{_head_table(found)}
and what these heads attended to most, in one sentence a sense:

{_example_table(found)}
A weight says what was mixed in, not what was used. That the cues are used is what hiding them shows.

Limits: one small model, {len(found["words"])} words, sentences written for this study; cues marked by hand. A
mean cosine of pairs hides how uneven words are, as the table by word shows.
"""


def _chance(found: Found) -> float:
    """Four uses a sense, two senses: three of the seven others."""
    each = int(found["uses"]) // (2 * len(found["words"]))
    return (each - 1) / (2 * each - 1)


def _gap(cosines: Found, depth: int) -> float:
    return float(cosines["same_sense"][depth] - cosines["other_sense"][depth])


def _depth(place: int) -> str:
    return "embedding" if place == 0 else f"after layer {place - 1}"


def _depth_table(cosines: Found) -> str:
    names = ("same_sense", "other_sense", "other_word", "nearest")
    rows = [
        [_depth(place), *(f"{cosines[name][place]:.3f}" for name in names)]
        for place in range(len(cosines["nearest"]))
    ]
    return table(["", "same sense", "other sense", "other word", "nearest has the same sense"], rows)


def _word_table(found: Found) -> str:
    rows = [
        [word, *(f"{each[name][-1]:.3f}" for name in ("same_sense", "other_sense", "nearest"))]
        for word, each in found["each"].items()
    ]
    return table(["word", "same sense", "other sense", "nearest has the same sense"], rows)


def _share_table(found: Found) -> str:
    names = ("itself", "cues", "special", "rest")
    rows = [
        [f"layer {layer}", *(f"{row[name]:.3f}" for name in names)]
        for layer, row in enumerate(found["attention"])
    ]
    return table(["", "itself", "cues", "[CLS], [SEP]", "other words"], rows)


def _head_table(found: Found) -> str:
    rows = []
    for layer, heads in enumerate(found["heads"]):
        head = max(range(len(heads)), key=heads.__getitem__)
        rows.append([f"layer {layer}", str(head), f"{heads[head]:.3f}", f"{sum(heads) / len(heads):.3f}"])
    return table(["", "head", "to the cues", "all heads"], rows)


def _example_table(found: Found) -> str:
    first, last = 0, len(found["attention"]) - 1
    rows = []
    for example in found["examples"]:
        cells = [
            ", ".join(f"{token} {weight:.2f}" for token, weight in example["most"][layer])
            for layer in (first, last)
        ]
        rows.append([f"{example['word']} ({example['sense']}): {example['sentence']}", *cells])
    return table(["", f"layer {first}", f"layer {last}"], rows)
