"""The page and the plots of the study of 1/sqrt(d_k), made of its numbers and of nothing else."""

from __future__ import annotations

import json
from typing import Any

from studies import files
from studies.chart import Line, Panel, svg
from studies.files import percent, said, table

Found = dict[str, Any]
SIDES = ("scaled", "unscaled")
NAMES = {"scaled": "with 1/√d_k", "unscaled": "without"}
OPTIMIZERS = {"sgd": "SGD, learning rate 0.5", "adam": "Adam, learning rate 0.001"}


def contents(found: Found, *, quick: bool = False) -> dict[str, str]:
    """The files of the study."""
    numbers = files.numbers(found)
    rounded = json.loads(numbers)
    return {
        "scaling.json": numbers,
        "scaling-random.svg": random_plot(rounded),
        "scaling-trained.svg": trained_plot(rounded),
        "scaling.md": files.wrapped(files.marked(page(rounded), quick)),
    }


def random_plot(found: Found) -> str:
    rows = found["random"]
    widths = [row["d_k"] for row in rows]

    def panel(title: str, name: str, low: float, high: float, log: bool = False) -> Panel:
        lines = [Line(NAMES[side], widths, [row[side][name] for row in rows]) for side in SIDES]
        return Panel(title, "d_k", lines, low, high, log_x=True, log_y=log)

    panels = [
        panel("Variance of a row's scores", "variance", 0.1, 10000, log=True),
        panel("Entropy, as a share of log Tk", "entropy", 0.0, 1.0),
        panel("Largest weight of a row", "largest", 0.0, 1.0),
        panel("Derivative of the softmax, typical row", "jacobian", 0.0, 0.4),
        panel("Gradient to the query, typical row", "typical_gradient", 0.001, 10, log=True),
        panel("Gradient to the query, root mean square", "gradient", 0.001, 10, log=True),
    ]
    return svg(panels, 3, "What the factor 1/sqrt(d_k) does to random scores, by d_k")


def trained_plot(found: Found) -> str:
    panels = []
    for row in found["trained"]:
        curves = [
            Line(
                NAMES[side],
                [step for step, _ in row[side]["curve"]],
                [right for _, right in row[side]["curve"]],
            )
            for side in SIDES
        ]
        title = f"{_short(row)}, d_k = {row['d_k']}"
        panels.append(Panel(title, "steps", curves, 0.0, 1.0))
    return svg(panels, len(panels) // 2, "Accuracy of the trained model by step, with and without the factor")


def page(found: Found) -> str:
    settings, rows = found["settings"], found["random"]
    first, last = rows[0], rows[-1]
    seeds = ", ".join(str(seed) for seed in settings["seeds"])
    return f"""\
# Why 1/√d_k

"We suspect that for large values of d_k, the dot products grow large in magnitude, pushing the softmax function
into regions where it has extremely small gradients": so *Attention Is All You Need* (Vaswani et al., 2017)
explains its factor, with a footnote on the variance of random scores. Here it is measured. Everything on this
page is made by

```sh
python -m studies.scaling
```

The numbers are in [scaling.json](scaling.json). "Without" is the same call with `score=Dot(scale=1)`.

## Random projections

Queries, keys and values of independent standard normal entries: {settings["queries"]} queries against
{settings["keys"]} keys, seed {settings["seeds"][0]}, float64.

![Six charts by d_k: variance, entropy, largest weight, derivative, two of the gradient](scaling-random.svg)

{_random_table(rows)}
- **The variance is d_k.** Without the factor the scores of a row have a variance of
  {said(first["unscaled"]["variance"])} at d_k = {first["d_k"]} and {said(last["unscaled"]["variance"])} at d_k
  = {last["d_k"]}; with it, it stays between {said(_least(rows, "scaled", "variance"))} and
  {said(_most(rows, "scaled", "variance"))}.
- **The softmax saturates.** Without the factor the largest weight goes from
  {said(first["unscaled"]["largest"])} to {said(last["unscaled"]["largest"])}: attention becomes a choice of one
  key. With it, it is {said(last["scaled"]["largest"])} at d_k = {last["d_k"]}.
- **The derivative of the softmax does vanish, for a typical row.** Its norm is largest at d_k = {_peak(rows)},
  where the scores without the factor have a variance of {said(_at(rows, _peak(rows))["unscaled"]["variance"])},
  and is {said(last["unscaled"]["jacobian"])} at d_k = {last["d_k"]}, where it is
  {said(last["scaled"]["jacobian"])} with the factor. Below a width of {_crossing(rows)} it is *larger* without.
- **The gradient to the query does not vanish on the whole; it gathers in few rows.** Without the factor its
  root mean square is {said(last["unscaled"]["gradient"])} at d_k = {last["d_k"]},
  {said(last["unscaled"]["gradient"] / last["scaled"]["gradient"])} times that with it, because the keys that it
  is made of are not divided by √d_k either. But the typical row gets
  {said(last["unscaled"]["typical_gradient"])} against {said(last["scaled"]["typical_gradient"])}: most queries
  learn nothing, and the few that stand between two keys get everything. That is the harm, and the sentence
  above names only half of it.

## Trained projections

A model of one head learns to look things up: {_task()} Batches of 64, {settings["steps"]} steps, seeds {seeds};
accuracy on samples that were not trained on. Entries of queries and keys start with variance 1.

![Accuracy by step, for each width and optimiser, with and without the factor](scaling-trained.svg)

{_trained_tables(found)}
{_trained_findings(found)}
{_minilm(found)}
## Limits

Random vectors are not activations. The trained task is small and rewards sharp attention, so that every model
that solves it ends with little entropy; two optimisers at one learning rate each, and another learning rate
would move the curves. The curves are means over {len(settings["seeds"])} seeds.
"""


def _task() -> str:
    return (
        "16 keys of 64 symbols with one of 16 classes each, one of the keys as the query, its class as the answer "
        "(`studies/scaling/train.py`)."
    )


def _least(rows: list[Found], side: str, name: str) -> float:
    return float(min(row[side][name] for row in rows))


def _most(rows: list[Found], side: str, name: str) -> float:
    return float(max(row[side][name] for row in rows))


def _peak(rows: list[Found]) -> int:
    return int(max(rows, key=lambda row: row["unscaled"]["jacobian"])["d_k"])


def _at(rows: list[Found], width: int) -> Found:
    return next(row for row in rows if row["d_k"] == width)


def _crossing(rows: list[Found]) -> int:
    """The first width at which a typical row's derivative is smaller without the factor."""
    fallen = [row["d_k"] for row in rows if row["unscaled"]["jacobian"] < row["scaled"]["jacobian"]]
    return int(fallen[0] if fallen else rows[-1]["d_k"])


def _random_table(rows: list[Found]) -> str:
    names = ("variance", "entropy", "largest", "jacobian", "typical_gradient", "gradient")
    head = [
        "d_k",
        "variance",
        "entropy / log Tk",
        "largest",
        "derivative",
        "gradient, typical",
        "gradient, rms",
    ]
    cells = [
        [str(row["d_k"]), *(f"{said(row['scaled'][name])} / {said(row['unscaled'][name])}" for name in names)]
        for row in rows
    ]
    return "Each cell: with the factor / without it.\n\n" + table(head, cells)


def _trained_tables(found: Found) -> str:
    parts = []
    for optimizer, title in OPTIMIZERS.items():
        rows = [row for row in found["trained"] if row["optimizer"] == optimizer]
        head = [
            "d_k",
            "steps to 90 %",
            "accuracy at the end",
            "variance before",
            "variance after",
            "largest before",
        ]
        cells = [[str(row["d_k"]), *(_pair(row, cell) for cell in _CELLS)] for row in rows]
        parts.append(f"{title}; each cell: with the factor / without it.\n\n{table(head, cells)}")
    return "\n".join(parts)


def _median(side: Found) -> str:
    """The median number of steps to 90 %, "never" where most runs do not get there."""
    steps = sorted(side["reached"], key=lambda step: (step is None, step))
    middle = steps[len(steps) // 2]
    return "never" if middle is None else str(middle)


def _reached(side: Found) -> str:
    runs = side["reached"]
    return f"{_median(side)} ({sum(step is not None for step in runs)} of {len(runs)})"


_CELLS = (
    _reached,
    lambda side: percent(side["curve"][-1][1]),
    lambda side: said(side["before"]["variance"]),
    lambda side: said(side["after"]["variance"]),
    lambda side: said(side["before"]["largest"]),
)


def _pair(row: Found, cell: Any) -> str:
    return " / ".join(cell(row[side]) for side in SIDES)


def _trained_findings(found: Found) -> str:
    rows = found["trained"]
    widest = [row for row in rows if row["d_k"] == rows[-1]["d_k"]]
    late = [f"{_median(row['scaled'])} against {_median(row['unscaled'])} ({_short(row)})" for row in widest]
    wide = [row for row in rows if row["d_k"] >= 16]
    after, grown = ([row[side]["after"]["variance"] for row in wide] for side in SIDES)
    short = [row for row in wide if None in row["scaled"]["reached"]]
    missed = [
        f"d_k = {row['d_k']} with {_short(row)} ({percent(row['scaled']['curve'][-1][1])})" for row in short
    ]
    return f"""\
- **With the factor a wide head learns as fast as a narrow one or faster; without it, slower or not at all.** Median
  steps to 90 % at d_k = {rows[-1]["d_k"]}: {" and ".join(late)}; "never" is not within {found["settings"]["steps"]}
  steps. A head of {rows[0]["d_k"]} is too narrow for the task either way.
- **It is no cure-all.** With the factor, not every run got there: {", ".join(missed) or "all did"}. The likely
  reason, not measured here: a step of Adam has one size for every entry, and moves the scores of a wide head further.
- **A variance of 1 is where training starts, not where it stays.** With the factor, and d_k of 16 or more, the
  trained scores have a variance of {said(min(after))} to {said(max(after))}: the projections learn the sharpness
  that the task needs. Without it they end between {said(min(grown))} and {said(max(grown))}.
"""


def _short(row: Found) -> str:
    return {"sgd": "SGD", "adam": "Adam"}[row["optimizer"]]


def _minilm(found: Found) -> str:
    rows = found["minilm"]
    if rows is None:
        return "## A real model\n\nLeft out: all-MiniLM-L6-v2 was not fetched (`regard fetch minilm`).\n"
    head = ["", "variance", "entropy / log Tk", "largest", "derivative"]
    names = ("variance", "entropy", "largest", "jacobian")
    cells = [
        [
            f"layer {layer}",
            *(f"{said(row['scaled'][name])} / {said(row['unscaled'][name])}" for name in names),
        ]
        for layer, row in enumerate(rows)
    ]
    scaled = [row["scaled"]["variance"] for row in rows]
    return f"""\
## A real model

The projections of all-MiniLM-L6-v2 (d_k = 32, 12 heads a layer) on a paragraph, caught by `regard.watch`; each
cell: as trained / the same queries and keys without the factor.

{table(head, cells)}
Its scores, with the factor that it was trained with, have a variance of {said(min(scaled))} to
{said(max(scaled))}, mean over heads, and not 1: as above, training sets the sharpness. Taking the factor away
multiplies the variance by 32, and the largest weight of a row goes from {said(rows[0]["scaled"]["largest"])} to
{said(rows[0]["unscaled"]["largest"])} in layer 0.
"""
