"""``python -m recipes.translation data | train | evaluate | translate | report``."""

from __future__ import annotations

import typer

from recipes.translation.data.command import data
from recipes.translation.evaluate import evaluate
from recipes.translation.report import report
from recipes.translation.train import train
from recipes.translation.translate import translate
from regard.cli import run

app = typer.Typer(
    help="Translation with attention: data, training, judgement, pictures.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("data")(data)
app.command("train")(train)
app.command("evaluate")(evaluate)
app.command("translate")(translate)
app.command("report")(report)


def main() -> None:
    """Run the command line. A mistake is one message on stderr and exit code 2; REGARD_TRACEBACK=1 shows where."""
    run(app, "python -m recipes.translation", "recipes.translation")


if __name__ == "__main__":
    main()
