"""``python -m studies.scaling``: measure, and write docs/studies/scaling.{md,json} and its plots."""

from __future__ import annotations

from typing import Any

from studies import files
from studies.scaling import page
from studies.scaling.measure import random_projections
from studies.scaling.trained import lookup, minilm

FULL = {
    "random_widths": [4, 8, 16, 32, 64, 128, 256, 512, 1024],
    "keys": 64,
    "queries": 1024,
    "trained_widths": [4, 16, 64, 256, 1024],
    "seeds": [0, 1, 2],
    "steps": 300,
}
QUICK = FULL | {"random_widths": [4, 64], "queries": 32, "trained_widths": [4, 16], "seeds": [0], "steps": 20}


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that the page is made of."""
    return {
        "settings": settings,
        "random": random_projections(
            settings["random_widths"], settings["keys"], settings["queries"], settings["seeds"][0]
        ),
        "trained": lookup(settings["trained_widths"], settings["seeds"], settings["steps"]),
        "minilm": minilm(),
    }


def main() -> None:
    given = files.arguments("scaling", "Why 1/sqrt(d_k), measured.")
    found = measure(QUICK if given.quick else FULL)
    files.write(given.out, page.contents(found, quick=given.quick))


if __name__ == "__main__":
    files.run(main)
