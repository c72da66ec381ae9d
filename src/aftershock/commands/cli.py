"""Words on a terminal: the `aftershock` command."""

from __future__ import annotations

import contextlib
import enum
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from .. import __version__
from ..errors import AftershockError, InvalidInput, MissingPackage

if TYPE_CHECKING:
    import xarray as xr

    from ..studies.study import Study

# Everything else is imported inside its command, so that --version and --help answer at once.

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
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
    """What one minibatch does to a training run after the step that saw it.

    New here?

    1. `aftershock demo` records a small run, lets it go wrong and names the culprit: about a minute, no data needed.

    2. `aftershock doctor train.py:build` proves that your own training step is what is followed. `build()` is a
    function of yours that returns a dict with model, optimizer, loss_fn, batches and train_step; `explain` takes the
    same one.

    3. Put `aftershock.FlightRecorder` around your loop (the README has the lines). When the loss spikes it prints the
    command that explains it: `aftershock explain FLIGHT --build train.py:build`.

    Tab completes commands and options after `aftershock --install-completion`.
    """


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pages, the recorded flights and skip.json.")] = Path(
        "aftershock-demo"
    ),
    seed: Annotated[int, typer.Option(help="Everything is drawn from it.")] = 0,
) -> None:
    """Train a small model with a flight recorder; name what is behind each of its loss spikes (about a minute)."""
    with _plain_errors(f"cannot write to {out}"):
        import torch

        from .demo import run

        torch.set_num_threads(1)  # more of them cost a model this small more time than they save
        run(out, seed)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="A response saved with response.save(), or a study's folder.")],
    out: Annotated[Path, typer.Option(help="The page to write, or the folder for it.")] = Path("report.html"),
) -> None:
    """Turn a saved response, or the results of a study, into one self-contained page."""
    page = out / "report.html" if out.is_dir() else out
    write = _study_page if (results / "results.zarr").is_dir() else _response_page
    typer.echo(f"wrote {write(results, page)}")


def _response_page(results: Path, page: Path) -> Path:
    from ..api.response import load_response
    from ..report.response_page import write_response_page

    with _plain_errors(f"cannot read {results}"):
        response = load_response(results)
    with _plain_errors(f"cannot write {page}"):
        return write_response_page(response, page)


def _study_page(results: Path, page: Path) -> Path:
    from ..report.study_page import write_study_page
    from ..studies.results import load_results
    from ..studies.tables import build

    with _plain_errors(f"cannot read {results}"):
        study, found = load_results(results)
        cells = build(study.name, found)
    with _plain_errors(f"cannot write {page}"):
        return write_study_page(study, found, cells, page)


class StudyName(enum.StrEnum):
    quadratic = "quadratic"
    cifar = "cifar"
    language = "language"


class Device(enum.StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Precision(enum.StrEnum):
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"


@dataclass(frozen=True)
class LanguageOptions:
    """What only the language study takes."""

    models: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    tokenizer: Path | None = None
    fresh: bool = False
    dtypes: tuple[Precision, ...] = (Precision.float32,)


Library = Annotated[
    Path | None, typer.Option(help="A file of the plotting library for pages to share.", show_default="none")
]


class Lists(TyperCommand):
    """`--model A B --text C D` for `--model A --model B --text C --text D`, where the study is the first word."""

    listed = ("--model", "--text", "--dtype")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words, option = args[:1], ""
        for word in args[1:]:
            if word.startswith("-"):
                option = word if word in self.listed and not args[0].startswith("-") else ""
            elif option and words[-1] != option:
                words.append(option)
            words.append(word)
        return super().parse_args(ctx, words)


@app.command(cls=Lists)
def reproduce(
    study: Annotated[StudyName, typer.Argument(help="Which of the paper's studies.")],
    out: Annotated[Path | None, typer.Option(help="Folder for everything.", show_default="reproduction/STUDY")] = None,
    systems: Annotated[
        str | None,
        typer.Option(help="3 (the first three), mlp, mlp:2, a name; commas between.", show_default="all"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small version, to see that it works.")] = False,
    seed: Annotated[int, typer.Option(help="Everything is drawn from it.")] = 2026,
    roots: Annotated[
        int | None,
        typer.Option(min=1, help="Root seeds, four apart, that the tables pool.", show_default="6 quadratic, 1 cifar"),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="CIFAR-10: a folder or file.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="language: a folder, a GGUF file, a hub name, pythia-410m; NAME=… names it. One or more."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="language: a UTF-8 file, a dataset, wikitext-103; NAME=… names it. One or more."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="language: tokenizer.json.", show_default="the model's")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="language: weights drawn anew, only to measure.")] = False,
    dtype: Annotated[
        list[Precision] | None,
        typer.Option(
            help="language: of the weights; float64 beside float32 tells noise. One or more.", show_default="float32"
        ),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where cifar and language train.")] = Device.cpu,
    workers: Annotated[int | None, typer.Option(min=1, help="Local processes.", show_default="one per core")] = None,
    cluster: Annotated[str | None, typer.Option(help="A Dask scheduler, tcp://HOST:8786, instead of them.")] = None,
    library: Library = None,
) -> None:
    """Regenerate a study of the paper, every number beside the paper's. Run again, it goes on where it was stopped."""
    from ..api.progress import duration
    from ..studies.runner import machine_kinds, run_study, select

    start, out = time.monotonic(), out or Path("reproduction") / study.value
    words = LanguageOptions(
        tuple(model or ()), tuple(text or ()), tokenizer, fresh, tuple(dtype or [Precision.float32])
    )
    if study is StudyName.language and device is Device.cuda and cluster is None:
        workers = workers or 1  # systems of one card run one after another
    with _plain_errors("cannot read the data"):
        recipe = _recipe(study, seed, quick, data, device, roots, words)
        wanted = recipe.systems if systems is None else select(recipe, systems)
    try:
        with _plain_errors(f"cannot write to {out}"):
            results = run_study(recipe, out, wanted, workers=workers, cluster=cluster)
            if study is StudyName.language:
                from ..studies.language.recipe import require_same_sources

                require_same_sources(recipe, results)
            _publish(recipe, results, out, library)
            typer.echo(f"took {duration(time.monotonic() - start)} on {' | '.join(machine_kinds(results))}")
    except KeyboardInterrupt:
        typer.echo(
            f"\naftershock: stopped; finished systems are kept in {out}: run the same command again to go on", err=True
        )
        raise typer.Exit(130) from None


@app.command()
def gather(
    out: Annotated[Path, typer.Argument(help="A study's results folder: made where there is none.")],
    carried: Annotated[
        list[Path] | None, typer.Argument(help="Systems that ran on machines without zarr: files, or folders of them.")
    ] = None,
    library: Library = None,
) -> None:
    """Bring systems that ran elsewhere into a study's results, and make its tables and page of everything there."""
    from ..studies.carried import bring_in
    from ..studies.results import load_results

    with _plain_errors(f"cannot write to {out}"):
        brought = bring_in(carried, out) if carried else ()
        study, results = load_results(out)
        typer.echo(f"brought in {len(brought)} systems")
        _publish(study, results, out, library)


def _recipe(
    study: StudyName,
    seed: int,
    quick: bool,
    data: Path | None,
    device: Device,
    roots: int | None = None,
    words: LanguageOptions = LanguageOptions(),
) -> Study:
    if study is StudyName.language:
        if data is not None or roots is not None:
            raise InvalidInput("--data and --roots do not belong to the language study: it takes --model and --text")
        return _language(seed, quick, device, words)
    if words != LanguageOptions():
        raise InvalidInput("--model, --text, --tokenizer, --fresh and --dtype belong to the language study")
    if study is StudyName.cifar:
        from ..studies.cifar.recipe import cifar_study

        # workers may run in another folder
        return cifar_study(data and data.absolute(), seed=seed, quick=quick, device=device.value, roots=roots or 1)
    from ..studies.quadratic.recipe import quadratic_study

    if data is not None or device is not Device.cpu:
        raise InvalidInput(
            "--data and --device do not belong to the quadratic study: it has no data and runs on the CPU"
        )
    return quadratic_study(seed=seed, quick=quick, roots=roots)


def _language(seed: int, quick: bool, device: Device, words: LanguageOptions) -> Study:
    from ..studies.language.recipe import language_study

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        study = language_study(
            words.models, words.texts, tokenizer=words.tokenizer and words.tokenizer.absolute(), fresh=words.fresh,
            seed=seed, quick=quick, device=device.value, dtypes=[dtype.value for dtype in words.dtypes],
        )  # fmt: skip
    for one in told:
        if issubclass(one.category, UserWarning):
            typer.echo(f"aftershock: {one.message}", err=True)
    return study


def _publish(study: Study, results: dict[str, xr.Dataset], out: Path, library: Path | None) -> None:
    """Tables, page and figures from results, and a few words on them."""
    from ..report.study_files import write_figures
    from ..report.study_page import write_study_page
    from ..studies import tables
    from ..studies.results import systems_in
    from ..studies.runner import machine_kinds

    cells = tables.build(study.name, results)
    tables.write(cells, out, results, study)
    write_study_page(study, results, cells, out / "report.html", library=library)
    written = ["tables.md", "tables.json", "values.json", "report.html"]
    written += ["figures/"] if write_figures(results, out / "figures") else []

    kinds = machine_kinds(results)
    if len(kinds) > 1:
        typer.echo(f"aftershock: systems ran on different machines, so bits may differ: {' | '.join(kinds)}", err=True)
    typer.echo(tables.verdict(cells))
    done, whole = len(systems_in(results)), len(study.systems)
    if done < whole:
        typer.echo(f"partial: {done} of {whole} systems")
    if study.attrs.get("quick"):
        typer.echo("partial: --quick is a small version of the study")
    typer.echo(f"wrote {', '.join(written)} and results.zarr to {out}")


@app.command()
def explain(
    flight: Annotated[Path, typer.Argument(help="A recorded flight, or one window of it.")],
    build: Annotated[
        str,
        typer.Option(help="module:function, train.py:function, or train.py for its build() (see above)."),
    ],
    step: Annotated[int | None, typer.Option(help="The step to explain; default: the run's worst spike.")] = None,
    of: Annotated[
        str | None, typer.Option(help="loss or norm; default: the loss, and the norm where it alone stands out.")
    ] = None,
    clip: Annotated[float | None, typer.Option(help="max_norm, where the recorder was not told it.")] = None,
    window: Annotated[int | None, typer.Option(help="How many steps back to look; default: as recorded.")] = None,
    verify: Annotated[int, typer.Option(min=0, help="How many suspects to run again without.")] = 5,
    placebos: Annotated[int, typer.Option(min=0, help="How many others to run again without, to compare.")] = 8,
    no_treatments: Annotated[bool, typer.Option("--no-treatments", help="Do not try what would prevent it.")] = False,
    memory: Annotated[
        str | None, typer.Option(help="What it may use, such as 8GiB; default: on a CPU 3 × what training holds.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The placebos are drawn from it.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="The page to write, or the folder for it.", show_default="FLIGHT-run2-step340.html"),
    ] = None,
    skip_list: Annotated[
        Path | None, typer.Option(help="Where to write the batches to skip, as JSON; exit code 1 where none did it.")
    ] = None,
) -> None:
    """Say what kind of event raised a recorded loss or gradient norm, who did it, and what would have
    prevented it, and write a page.

    The page has what the terminal shows, the charts and every step; it is always written, because asking for it
    afterwards would take as long again.

    `build()` is a function of yours that returns `(model, optimizer, loss_fn)` as training makes them, or a dict of
    them by these names, with `dataset`, `constant` and `describe` where the recorder has them; the doctor takes the
    same one. A flight is the folder that a FlightRecorder was given.
    Example: `aftershock explain flight --build train.py:build --step 340`.
    """
    from ..recorder.explain import explain as explain_flight
    from .building import build as built_by

    with _plain_errors(f"cannot read {flight}"):
        built = built_by(build)
        found = explain_flight(
            flight,
            step,
            of=of,
            model=built.model,
            loss_fn=built.loss_fn,
            dataset=built.dataset,
            constant=built.constant,
            describe=built.describe,
            clip=clip,
            window=window,
            verify=verify,
            placebos=placebos,
            treatments=not no_treatments,
            memory=memory,
            generator=seed,
        )
    typer.echo(str(found))
    page = out if out is not None and out.suffix and not out.is_dir() else found.page(out or Path())
    again = " over the page that was there" if page.exists() else ""
    with _plain_errors(f"cannot write {page}"):
        try:
            typer.echo(f"\nwrote {found.report(page)}{again}: the same with its charts, and every step")
        except MissingPackage as error:  # what was asked for stands above
            typer.echo(f"\nno page: {error}")
    if skip_list is not None:
        with _plain_errors(f"cannot write {skip_list}"):  # nobody blamed is an error: an older list may be there
            typer.echo(f"wrote {found.save_skip_list(skip_list)}: {len(found.skip)} batch(es) to skip")


@app.command()
def doctor(
    build: Annotated[
        str,
        typer.Argument(help="module:function, train.py:function, or train.py for its build() (see above)."),
    ],
) -> None:
    """Prove that your own training step is what is followed, and say what of a model is supported, and how exactly.

    `build()` is a function of yours that returns a dict with `model`, `optimizer`, `loss_fn(model, batch)`, `batches`
    and `train_step(model, optimizer, batch)`, and where the loop has them `clip` and `scheduler`; `explain` takes the
    same one. (A tuple `(model, optimizer, loss_fn, batch)` does where there is no train_step to prove.) It runs five
    steps. Exit code 1: something is refused, and each line says what to change.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from .building import build as built_by
    from .doctor import examine
    from .loop import prove_loop

    needed = ("model", "optimizer", "loss_fn", "batch")
    with _plain_errors("cannot run the model"):
        # the loop trains what was built, so the rest looks at another one
        proved, examined = prove_loop(built_by(build, needed)), examine(built_by(build, needed))
    said = {finding.text for finding in proved}
    findings = [*proved, *(finding for finding in examined if finding.text not in said)]
    colours = {"supported": "green", "approximated": "yellow", "refused": "red", "note": "dim"}
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        table.add_row(finding.subject, f"[{colours[finding.level]}]{finding.level}[/]", escape(finding.text))
    Console().print(table)
    if any(finding.level == "refused" for finding in findings):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
