"""A picture of which words a translation looked at: in the terminal, as a page, and in Pharaoh's format."""

from __future__ import annotations

import html
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text
from torch import Tensor

from recipes.translation.alignment import hard

_RAMP = " ░▒▓█"


def untranslated(weights: Tensor) -> list[int]:
    """Source words that no target word looks at most: weights (target words, source words)."""
    reached = {source for source, _ in hard(weights)}
    return [place for place in range(weights.shape[-1]) if place not in reached]


def terminal(source: Sequence[str], target: Sequence[str], weights: Tensor, console: Console) -> None:
    """A row for each target word: its weights, darker where there is more, and its hard link; then what is missing."""
    best = weights.argmax(-1).tolist() if weights.numel() else []
    wide = max((Text(word).cell_len for word in target), default=1)
    for place, word in enumerate(target):
        line = Text(" " * (wide - Text(word).cell_len))
        line.append(word, style="bold")
        line.append(" ")
        for share in weights[place].tolist():
            line.append(_RAMP[min(len(_RAMP) - 1, int(share * len(_RAMP)))])
        line.append(f" {source[best[place]]} {weights[place].max().item():.2f}")
        console.print(line, soft_wrap=True)
    missing = untranslated(weights)
    if missing:
        said = " ".join(source[place] for place in missing)
        console.print(Text(f"no word of the translation looks at these most: {said}"), soft_wrap=True)


def page(source: Sequence[str], target: Sequence[str], weights: Tensor, title: str) -> str:
    """One self-contained page: a table, target words down and source words across, hard links outlined.

    Every word has its own direction, so that Hebrew beside English stands right; words that nothing looks at most are
    marked. Text is inert, and the page loads nothing.
    """
    missing = set(untranslated(weights))
    heads = "".join(
        f'<th scope="col"{" class=missing" if place in missing else ""}><bdi>{html.escape(word)}</bdi></th>'
        for place, word in enumerate(source)
    )
    best = weights.argmax(-1).tolist() if weights.numel() else []
    rows = []
    for place, word in enumerate(target):
        cells = "".join(
            f'<td style="--w:{share:.3f}"{" class=link" if at == best[place] else ""}>{_percent(share)}</td>'
            for at, share in enumerate(weights[place].tolist())
        )
        rows.append(f'<tr><th scope="row"><bdi>{html.escape(word)}</bdi></th>{cells}</tr>')
    note = (
        ""
        if not missing
        else "<p>Underlined: words of the source that no word of the translation looks at most.</p>"
    )
    return _PAGE.format(title=html.escape(title), heads=heads, rows="\n".join(rows), note=note)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.05 else ""


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: 0 90 170 }}
body {{ font: 1rem system-ui, sans-serif; margin: 2rem }}
.map {{ overflow-x: auto }}
table {{ border-collapse: collapse }}
th {{ font-weight: 500; padding: .2rem .5rem; text-align: end }}
th[scope=col] {{ writing-mode: vertical-rl; text-align: end; vertical-align: bottom }}
th.missing bdi {{ text-decoration: underline wavy #c33 }}
td {{ width: 2.2rem; height: 1.7rem; text-align: center; font-size: .75rem; border: 1px solid #8883;
      background: rgb(var(--ink) / calc(var(--w) * .8)) }}
td.link {{ outline: 2px solid #b84c00; outline-offset: -2px }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: 90 170 255 }} td.link {{ outline-color: #e69f00 }} }}
</style></head><body>
<h1>{title}</h1>
<p>Down: the translation. Across: the source. Each row sums to 100; outlined: where its word looks most.</p>
<div class="map" tabindex="0"><table><thead><tr><td></td>{heads}</tr></thead><tbody>
{rows}
</tbody></table></div>
{note}
</body></html>
"""
