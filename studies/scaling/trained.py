"""The figures of projections that were trained: of the small model, before and after, and of a real one."""

from __future__ import annotations

import torch

from regard import _fetch
from regard.look._model import load_model, record_of
from studies.scaling import train
from studies.scaling.measure import Figures, both, figures, mean

TEXT = (
    "The old lighthouse keeper climbed the stairs every evening, although nobody had asked him to for years. "
    "He lit the lamp, wrote the hour and the weather into his book, and looked out at the ships that no longer "
    "needed him. When a storm put out the lights of the harbour, the captains saw one bright point on the cliff "
    "and steered by it."
)


def lookup(widths: list[int], seeds: list[int], steps: int) -> list[dict[str, object]]:
    """The small model, trained with and without the factor: for each optimiser and d_k the runs of all seeds."""
    rows: list[dict[str, object]] = []
    for optimizer in ("sgd", "adam"):
        for width in widths:
            sides = {
                name: _runs(optimizer, width, scale, seeds, steps)
                for name, scale in (("scaled", None), ("unscaled", 1.0))
            }
            rows.append({"optimizer": optimizer, "d_k": width, **sides})
    return rows


def _runs(optimizer: str, width: int, scale: float | None, seeds: list[int], steps: int) -> dict[str, object]:
    runs = [train.train(width, scale, seed, optimizer=optimizer, steps=steps) for seed in seeds]
    fresh = train.draw(256, torch.Generator().manual_seed(7))
    before = [figures(*train.Lookup(width, scale, seed).heads(fresh), scale) for seed in seeds]
    after = [figures(*run.model.heads(fresh), scale) for run in runs]
    curves = zip(*(run.curve for run in runs), strict=True)
    return {
        "reached": [run.reached for run in runs],
        "curve": [[points[0][0], sum(point[1] for point in points) / len(points)] for points in curves],
        "before": mean(before),
        "after": mean(after),
    }


def minilm() -> list[dict[str, Figures]] | None:
    """all-MiniLM-L6-v2 on a text, layer by layer, as trained and with its factor taken away; None if not fetched."""
    if not _fetch.is_fetched(_fetch.MODELS["minilm"]):
        return None
    record = record_of(load_model("minilm"), TEXT)
    return [both(site.query, site.key, site.value) for site in record.sites]
