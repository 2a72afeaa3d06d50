"""The command `report`: the page docs/translation.md from the saved results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.look._files import write_all

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
PAGE = ROOT / "docs" / "translation.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"


def report(
    results: Annotated[Path, typer.Option(help="The folder of saved results.")] = RESULTS,
    page: Annotated[Path, typer.Option(help="The page whose results are written anew.")] = PAGE,
) -> None:
    """Write the tables of the page anew from what evaluate saved."""
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(results.glob("*.json"))}
    if not found:
        raise ValueError(f"{results}: expected results that evaluate --out saved, got none")
    text = page.read_text("utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page}: expected one line {BEGIN} and one {END}, got none or several")
    before, rest = text.split(BEGIN)
    written = f"{before}{BEGIN}\n\n{tables(found)}\n{END}{rest.split(END)[1]}"
    write_all({page: written.encode()})
    print(f"written: {page}")


def tables(found: dict[str, dict[str, Any]]) -> str:
    """What was saved, in Markdown: translations, alignments, translations by length."""
    parts = [_translations(found)]
    aligned = {name: one for name, one in found.items() if "alignment" in one}
    if aligned:
        parts.append(_alignments(aligned))
    lengths = _lengths(found)
    return "\n".join([*parts, lengths] if lengths else parts)


def _translations(found: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| result | data | pairs judged | minutes of training, seed | way | BLEU | chrF | exact |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        model = one["model"]
        trained = f"{model.get('seconds', 0) / 60:.1f}, {model.get('seed')}"
        data = one["data"] + (f", at most {one['words']} words" if one["words"] else "")
        for way, score in one["translation"].items():
            said = way if score["width"] == 1 else f"{way} {score['width']}"
            numbers = f"{score['bleu']:.1f} | {score['chrf']:.1f} | {100 * score['exact']:.2f} %"
            lines.append(f"| `{name}` | {data} | {score['sentences']:,} | {trained} | {said} | {numbers} |")
    return "\n".join([*lines, ""])


def _alignments(found: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| alignments by | alignment error rate | precision | recall |",
        "|---|---|---|---|",
    ]
    baselines: dict[str, str] = {}
    for name, one in found.items():
        own = one["alignment"]
        lines.append(f"| `{name}`: {own['attention']} | {_shares(own)} |")
        baselines |= {said: f"| {said} | {_shares(score)} |" for said, score in one["baselines"].items()}
    return "\n".join([*lines, *baselines.values(), ""])


def _shares(score: dict[str, float]) -> str:
    return " | ".join(f"{100 * score[name]:.1f} %" for name in ("error", "precision", "recall"))


def _lengths(found: dict[str, dict[str, Any]]) -> str:
    """chrF of the beam's translations by source length, a column a result, where there are several buckets."""
    kept = {name: one["translation"]["beam"]["by_length"] for name, one in found.items()}
    kept = {name: rows for name, rows in kept.items() if len(rows) > 1 and found[name]["data"] != "dates"}
    if not kept:
        return ""
    ends = sorted({row["from"] for rows in kept.values() for row in rows})
    lines = [
        "chrF of the beam's translations by the words of the source; in brackets, how many sentences:",
        "",
    ]
    lines += [f"| words | {' | '.join(f'`{name}`' for name in kept)} |", f"|---|{'---|' * len(kept)}"]
    for low in ends:
        cells = []
        for rows in kept.values():
            own = next((row for row in rows if row["from"] == low), None)
            cells.append("-" if own is None else f"{own['chrf']:.1f} ({own['sentences']})")
        lines.append(f"| from {low} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
