"""``python -m recipes.translation data | train | evaluate | translate | report``."""

from __future__ import annotations

import os
import signal
import sys

import typer

from recipes.translation.data.command import data
from recipes.translation.evaluate import evaluate
from recipes.translation.report import report
from recipes.translation.train import train
from recipes.translation.translate import translate

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
    from regard._fetch import FetchError

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app(prog_name="python -m recipes.translation")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (FetchError, OSError, TypeError, ValueError) as error:
        if os.environ.get("REGARD_TRACEBACK"):
            raise
        sys.stderr.write(f"recipes.translation: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
