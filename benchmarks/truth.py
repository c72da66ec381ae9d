"""`python -m benchmarks.truth`: what the library predicts, against exact reruns of real kinds of models.

Each model is trained to a point. A pool of batches then takes the place of the first batch of a path of 12 steps,
one at a time, and a held-out probe batch is watched: `rank` predicts all of them from one adjoint sweep, the semilinear
and tangent answers a few one by one, and the truth is the difference of two real runs. On a path of 24 steps from the
same point, `explain` says what each step did to the probe, and the truth is the run without that step's gradient.
`rank` may spend three reruns on its own verification; its error is that of the other batches, as it gives them.
Beside each rank correlation stands that of its rival, the norm of a batch's gradient (less the control's, in a pool).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

import aftershock as ak
from aftershock.core.memory import keep_freed
from aftershock.results.fidelity import nrmse
from aftershock.results.summaries import summarize

from .timing import quiet
from .truth_models import RECIPES, Data, Recipe, trained

if TYPE_CHECKING:
    import xarray as xr

PATH_SEED = 2
VERIFIED = 3  # reruns that `rank` may spend


@dataclass(frozen=True)
class Size:
    """How much of everything is done."""

    pool: int = 24
    horizon: int = 12
    rows: int = 12  # candidates that the semilinear and the tangent answer
    slow_rows: int = 3  # the same where the model is a language model
    explained: int = 24
    longest: int = 10**9  # training, in steps
    thinner: int = 1  # how many times smaller batches are


FULL, QUICK = Size(), Size(pool=8, horizon=8, rows=3, slow_rows=1, explained=8, longest=60, thinner=4)


@dataclass(frozen=True)
class Figure:
    """One column: what it is, and its bar on the median model, if it has one."""

    name: str
    title: str
    bar: float | None = None
    at_least: bool = True

    def met(self, value: float) -> bool:
        """NaN is never met."""
        assert self.bar is not None
        return value >= self.bar if self.at_least else value <= self.bar

    @property
    def bar_text(self) -> str:
        return "" if self.bar is None else f"{'≥' if self.at_least else '≤'} {self.bar:g}"


FIGURES = (
    Figure("signed", "ρ signed\nat H", 0.95),
    Figure("signed_norm", "ρ norm,\n|at H|"),
    Figure("peak", "ρ by\npeak", 0.9),
    Figure("peak_norm", "ρ norm,\npeak"),
    Figure("error", "rank\nerror", 0.2, at_least=False),
    Figure("semilinear", "semilinear\nerror", 0.1, at_least=False),
    Figure("tangent", "tangent\nerror"),
    Figure("explain", "ρ\nexplain", 0.95),
    Figure("explain_norm", "ρ norm,\n|explain|"),
    Figure("explain_error", "explain\nerror"),
)
RIVALS = {"signed": "signed_norm", "peak": "peak_norm"}


@dataclass
class Judged:
    """The figures of one model, and all that they were computed from."""

    model: str
    parameters: int
    steps: int
    figures: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)

    @property
    def beats_norm(self) -> bool:
        return all(self.figures[own] > self.figures[rival] for own, rival in RIVALS.items())

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


# --- one model


def judge(recipe: Recipe, data: Data, size: Size, device: torch.device, folder: Path | None) -> Judged:
    recipe = dataclasses.replace(recipe, steps=min(recipe.steps, size.longest))
    began = time.perf_counter()
    point = trained(recipe, data, device, folder)
    judged = Judged(recipe.name, point.loss.layout.size, recipe.steps)
    judged.seconds["training"] = time.perf_counter() - began
    source, generator = recipe.source(data), torch.Generator().manual_seed(PATH_SEED)
    batches = [source.batch(generator) for _ in range(max(size.horizon, size.explained))]
    pool = [source.batch(generator) for _ in range(size.pool)]
    probe = source.batch(generator, held_out=True)
    rows = size.slow_rows if recipe.source is Data.tokens else size.rows
    path = point.follow(batches[: size.horizon])
    truth = judge_ranking(judged, path, pool, probe)
    judge_rows(judged, path, pool[:rows], probe, truth[:rows])
    judge_explanation(judged, point.follow(batches[: size.explained]), probe)
    return judged


def judge_ranking(judged: Judged, path: ak.Path, pool: list[Any], probe: Any) -> xr.DataArray:
    """`rank` against the exact response of every batch of the pool, which is returned."""
    names = [f"batch {i}" for i in range(len(pool))]
    with judged.timed("exact"):
        response = path.replace(pool).response(probe, answers=("exact",), labels=names)
    with judged.timed("rank"):
        ranking = path.rank(pool, probe, verify=VERIFIED, labels=names)
    truth, norms = response.exact.sel(scale=1.0, drop=True), response.data["xi_norm"].values
    predicted = predictions(ranking).sel(change=names)
    verified = ranking.verified
    others = [name for name in names if name not in verified]
    at_end, peak = truth.isel(horizon=-1).values, summarize(truth)["peak"].values
    judged.figures |= {
        "signed": rho(predicted.isel(horizon=-1).values, at_end),
        "signed_norm": rho(norms, abs(at_end)),
        "peak": rho(summarize(predicted)["peak"].values, peak),
        "peak_norm": rho(norms, peak),
        "error": float(nrmse(truth.sel(change=others), predicted.sel(change=others)).median(skipna=False)),
    }
    noise = response.data["noise_floor"].values
    judged.raw |= {"exact": truth.values, "rank": predicted.values, "norm": norms, "noise": noise, "verified": verified}
    return truth


def predictions(ranking: ak.Ranking) -> xr.DataArray:
    """[change, horizon] as the ranking itself sorts them: calibrated by its reruns."""
    return ranking.data["response"]


def judge_rows(judged: Judged, path: ak.Path, pool: list[Any], probe: Any, truth: xr.DataArray) -> None:
    """The semilinear and tangent answers, one by one."""
    with judged.timed("rows"):
        names = truth["change"].values.tolist()
        response = path.replace(pool).response(probe, answers=("semilinear", "tangent"), labels=names)
    for name in ("semilinear", "tangent"):
        predicted = response.data["response"].sel({"answer": name, "scale": 1.0}, drop=True)
        judged.figures[name] = float(nrmse(truth, predicted).median(skipna=False))
        judged.raw[name] = predicted.values


def judge_explanation(judged: Judged, path: ak.Path, probe: Any) -> None:
    """`explain` against the run without each step's gradient."""
    with judged.timed("explain"):
        predicted = path.explain(probe, verify=0).total.values
    with judged.timed("left out"):
        truth = np.array([-without(path, at, probe) for at in range(len(path))])
    norms = np.array([step.clip.norm for step in path.steps])
    judged.figures |= {
        "explain": rho(predicted, truth),
        "explain_norm": rho(norms, abs(truth)),
        "explain_error": float(np.median(abs(predicted - truth) / abs(truth))),
    }
    judged.raw |= {"explained": predicted, "left out": truth, "step norm": norms}


def without(path: ak.Path, at: int, probe: Any) -> float:
    """How the probe differs at the end of the path where step `at` has a zero gradient."""
    response = path.zero(at).response(probe, answers=("exact",), horizon=len(path) - at)
    return float(response.exact.isel(change=0, scale=0, horizon=-1))


def rho(score: np.ndarray, truth: np.ndarray) -> float:
    """Spearman's; NaN where a score is not a number."""
    return float(spearmanr(score, truth).statistic)


# --- all of them


def table(found: list[Judged], title: str) -> Table:
    made = Table(title=title, title_justify="left")
    made.add_column("model")
    for name in ("parameters", "steps", *(figure.title for figure in FIGURES), "beats\nnorm", "s"):
        made.add_column(name, justify="right", no_wrap=True)
    for one in found:
        cells = [_cell(figure, one.figures[figure.name]) for figure in FIGURES]
        beats = "[green]yes[/]" if one.beats_norm else "[red]no[/]"
        seconds = f"{sum(one.seconds.values()):.0f}"
        made.add_row(one.model, f"{one.parameters:,}", f"{one.steps:,}", *cells, beats, seconds)
    made.add_section()
    made.add_row("bar", "", "", *(figure.bar_text for figure in FIGURES), "all", "")
    middle = [_cell(figure, median(found, figure)) for figure in FIGURES]
    made.add_row("median", "", "", *middle, f"{sum(one.beats_norm for one in found)}/{len(found)}", "")
    return made


def _cell(figure: Figure, value: float) -> str:
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0e}"
    if figure.bar is None:
        return text
    return f"[green]{text}[/]" if figure.met(value) else f"[red]{text}[/]"


def median(found: list[Judged], figure: Figure) -> float:
    return float(np.median([one.figures[figure.name] for one in found]))


def verdict(found: list[Judged]) -> str:
    """The last line: medians against their bars."""
    parts = []
    for figure in FIGURES:
        if figure.bar is not None:
            value = median(found, figure)
            word = "met" if figure.met(value) else "missed"
            parts.append(f"{' '.join(figure.title.split())} {value:.3g} ({figure.bar_text}: {word})")
    beats = sum(one.beats_norm for one in found)
    word = "met" if beats == len(found) else "missed"
    return f"Medians: {', '.join(parts)}; better than the norm on {beats} of {len(found)} models (all: {word})."


def write(found: list[Judged], path: Path) -> None:
    """Every figure with what it was computed from, and the seconds that each part took."""

    def plain(value: Any) -> Any:
        return value.tolist()

    path.write_text(json.dumps([dataclasses.asdict(one) for one in found], indent=1, default=plain))


def main() -> None:
    names = [recipe.slug for recipe in RECIPES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small batches and pools, 60 steps of training: two minutes, not twenty"
    )
    parser.add_argument("--only", action="append", choices=names, help="one model; may be repeated")
    parser.add_argument("--text", type=Path, help="a text file; else a synthetic text")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of GPT-NeoX, with --text")
    parser.add_argument("--cifar", type=Path, help="CIFAR-10's folder or file; else synthetic images")
    parser.add_argument("--cache", type=Path, help="a folder to keep trained points in")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    if (options.text is None) != (options.tokenizer is None):
        parser.error("--text and --tokenizer go together")
    torch.set_num_threads(1)
    keep_freed()
    began, found = time.perf_counter(), []
    size = QUICK if options.quick else FULL
    data = Data(options.text, options.tokenizer, options.cifar, size.thinner)
    for recipe in RECIPES:
        if options.only and recipe.slug not in options.only:
            continue
        print(f"{recipe.name} …", file=sys.stderr)
        with quiet():
            found.append(judge(recipe, data, size, torch.device(options.device), options.cache))
        if options.out:
            write(found, options.out)
    title = (
        f"Predictions against exact reruns: {size.pool} batches, H = {size.horizon}, {size.explained} steps explained; "
        f"{data}; {options.device}, float32, {time.perf_counter() - began:.0f} s"
    )
    console = Console() if sys.stdout.isatty() else Console(width=180)
    console.print(table(found, title))
    console.print(verdict(found))


if __name__ == "__main__":
    main()
