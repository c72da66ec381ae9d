"""The figures of the language study as files for a paper, the same numbers as on its page: a panel per system."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ..results.statistics import across_candidates
from ..studies.language.candidates import FD, PREDICTIONS, Candidates
from ..studies.language.finite_differences import consistency, step_curve, step_error
from ..studies.language.measures import SCORES
from ..studies.measures import CHANNELS
from .axes import COLOURS, HORIZON, LOSS, SCALE, finish, grid, key, scale_ticks
from .language_figures import NAMES, names

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {FD: ("#D55E00", "--"), "tangent": ("#E69F00", ":"), "semilinear": ("#CC79A7", "-.")}
ACROSS = 3  # panels in a row


def language_files(results: Mapping[str, xr.Dataset]) -> Iterator[tuple[str, Figure]]:
    """Every figure of the language study with the name of its file; none for other studies."""
    if "language" not in results:
        return
    every = Candidates(results["language"])
    found = every.once
    for name, draw, some in (
        ("finite-difference-steps", _steps, every),
        ("responses", _responses, found),
        ("error-by-scale", _scales, every),
        ("channels", _channels, found),
    ):
        yield name, _panels(some, draw)
    yield "validity", _validity(found)
    yield "ranking", _ranking(found)


def _panels(found: Candidates, draw: Callable[[Axes, Candidates, int], None]) -> Figure:
    shown = names(found)
    across = min(len(shown), ACROSS)
    figure, axes = grid(math.ceil(len(shown) / across), across)
    for i, name in enumerate(shown):
        axis = axes[i // across][i % across]
        draw(axis, found, i)
        axis.set_title(name, fontsize=9)
    for i in range(len(shown), axes.size):
        axes[i // across][i % across].set_visible(False)
    key(axes[0][0])
    return figure


def _steps(axis: Axes, found: Candidates, i: int) -> None:
    error = step_error(found.data).isel(system=i).sortby("fd_step")
    middle = step_curve(found.data)["error"].isel(system=i)
    gap = across_candidates(consistency(found.data["fd_derivative"])).isel(system=i)
    steps = error["fd_step"].values
    axis.loglog(steps, error.transpose("fd_step", "change"), color="0.8", lw=0.8)
    axis.loglog(steps, middle, color=COLOURS[1], marker="o", ms=4, lw=2, label="error, median")
    axis.loglog(gap["fd_step"], gap, color=COLOURS[0], marker="o", ms=3, label="consistency with 2ε")
    low, high = float(error.min()), float(error.max())
    axis.loglog(steps, float(middle[-1]) * (steps / steps[-1]) ** 2, "--", color="0.4", lw=0.8, label="ε²")
    axis.loglog(steps, float(middle[0]) * steps[0] / steps, ":", color="0.4", lw=0.8, label="1/ε")
    axis.set_ylim(min(low, float(gap.min())) / 2, high * 2)
    axis.set_xticks(steps, [f"1/{1 / step:.0f}" for step in steps])
    axis.set_xticks([], minor=True)
    finish(axis, "", "finite-difference step ε", "error over the exact tangent")


def _responses(axis: Axes, found: Candidates, i: int) -> None:
    """The first candidate at full scale."""
    exact = found.full.isel(system=i, change=0)
    axis.plot(exact["horizon"], exact, color="black", lw=2, label="exact")
    at = found.predicted.isel(system=i, change=0).sel(scale=float(found.exact["scale"].max()))
    for answer, (colour, dash) in LOOKS.items():
        axis.plot(at["horizon"], at.sel({"answer": answer}), dash, color=colour, label=NAMES[answer])
    axis.axhline(0, color="0.6", lw=0.8)
    finish(axis, "", HORIZON, LOSS)


def _scales(axis: Axes, found: Candidates, i: int) -> None:
    error = found.errors["nrmse"].isel(system=i).median("change")
    for answer, (colour, dash) in LOOKS.items():
        axis.loglog(
            error["scale"], error.sel({"answer": answer}), dash, color=colour, marker="o", ms=3, label=NAMES[answer]
        )
    scale_ticks(axis, error["scale"].values)
    finish(axis, "", SCALE, "NRMSE, median over candidates")


def _channels(axis: Axes, found: Candidates, i: int) -> None:
    size = abs(found.data["channel_exact"]).isel(system=i)
    for colour, (channel, name) in zip(COLOURS, CHANNELS.items()):
        row = size.sel(channel=channel)
        axis.semilogy(size["horizon"], row.where(row > 0), color=colour, marker="o", ms=3, label=name)
    finish(axis, "", HORIZON, f"|{LOSS}|")


def _validity(found: Candidates) -> Figure:
    figure, axes = grid(1, 1)
    share = found.errors["valid"].mean(["system", "change"])
    for answer in PREDICTIONS:
        colour, dash = LOOKS[answer]
        axes[0][0].semilogx(
            share["scale"], share.sel({"answer": answer}), dash, color=colour, marker="o", ms=3, label=NAMES[answer]
        )
    scale_ticks(axes[0][0], share["scale"].values)
    axes[0][0].set_ylim(-0.03, 1.03)
    key(axes[0][0])
    finish(axes[0][0], "", SCALE, "share of valid candidates")
    return figure


def _ranking(found: Candidates) -> Figure:
    shown = names(found)
    figure, axes = grid(1, 1, height=1.6 + 0.28 * len(shown))
    for colour, (score, name) in zip(COLOURS, SCORES.items()):
        axes[0][0].plot(found.rho.sel(score=score), range(len(shown)), "o", color=colour, ms=5, label=name)
    axes[0][0].axvline(0, color="0.6", lw=0.8)
    axes[0][0].set_yticks(range(len(shown)), shown)
    axes[0][0].set_ylim(len(shown) - 0.5, -0.5)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    finish(axes[0][0], "", "rank correlation ρ with M", "")
    return figure
