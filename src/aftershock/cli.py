"""Words on a terminal: the `aftershock` command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .errors import AftershockError

# Everything else is imported inside its command, so that --version and --help answer at once.

app = typer.Typer(
    help="What one minibatch does to a training run after the step that saw it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@contextlib.contextmanager
def _plain_errors(failed: str) -> Iterator[None]:
    """What the user can act on is one message and exit code 1; a bug keeps its traceback.

    failed: what a file that cannot be read or written means here, in the user's words.
    """
    try:
        yield
    except AftershockError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{failed}: {error.strerror or error}")


def _fail(message: str) -> None:
    typer.echo(f"aftershock: {message}", err=True)
    raise typer.Exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"aftershock {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What one minibatch does to a training run after the step that saw it."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for report.html and response.zarr.")] = Path(),
    seed: Annotated[int, typer.Option(help="Everything is drawn from it.")] = 0,
) -> None:
    """Train a small model, feed it one bad batch, show what that does and find it again (about a minute)."""
    with _plain_errors(f"cannot write to {out}"):
        from .demo import run

        run(out, seed)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="A response saved with response.save().")],
    out: Annotated[Path, typer.Option(help="The page to write, or the folder for it.")] = Path("report.html"),
) -> None:
    """Turn a saved response into one self-contained page."""
    from .api.response import load_response
    from .report.html import write_response_page

    with _plain_errors(f"cannot read {results}"):
        response = load_response(results)
    page = out / "report.html" if out.is_dir() else out
    with _plain_errors(f"cannot write {page}"):
        typer.echo(f"wrote {write_response_page(response, page)}")


if __name__ == "__main__":
    app()
