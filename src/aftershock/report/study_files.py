"""The figures of a study as files for a paper: PNG and PDF, the same numbers as on its page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..results.files import write_whole
from ..studies.future_measures import FUTURE_NAMES
from ..studies.measures import CHANNELS, SCORES
from . import study_data
from .axes import COLOURS, HORIZON, LOSS, SCALE, finish, grid, key, scale_ticks
from .language_files import language_files
from .mechanism_figures import SOURCES

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {"tangent": ("#E69F00", ":"), "endpoint": ("#0072B2", "--"), "semilinear": ("#CC79A7", "-.")}
DOTS = 200  # per inch
CLOUD_SYSTEMS = 12


def write_figures(results: Mapping[str, xr.Dataset], folder: Path) -> list[Path]:
    """Write every figure that these results can fill, each file whole or not at all; gives the files."""
    written = []
    for name, figure in chain(_figures(results), language_files(results)):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once: twice for every file takes longer than all the drawing
        for kind in ("png", "pdf"):
            path = Path(folder) / f"{name}.{kind}"
            # without a date, so that the same results give the same file
            extra: dict[str, Any] = {"metadata": {"CreationDate": None}} if kind == "pdf" else {}
            write_whole(path, partial(figure.savefig, format=kind, dpi=DOTS, **extra))
            written.append(path)
    return written


def _figures(results: Mapping[str, xr.Dataset]) -> Iterator[tuple[str, Figure]]:
    whole = study_data.having(results, *study_data.WHOLE)
    if whole:
        yield "overview", _overview(whole)
    fitted = study_data.having(results, "exact", "predicted")
    if fitted:
        yield "responses", _responses(fitted)
        yield "error-by-scale", _panels(fitted, _error_by_scale)
        yield "error-by-horizon", _panels(fitted, _error_by_horizon)
        yield "error-exponents", _exponents(fitted)
    drawn = (
        ("error-sources", "output_from_switching", _sources),
        ("switched-gates", "switch_fraction", _switches),
        ("channels", "channel_exact", partial(_channels, variable="channel_exact")),
        ("channels-long", "channel_long", partial(_channels, variable="channel_long")),
        ("persistence-m", "persistence_m", partial(_persistence, channel="m", number="β1")),
        ("persistence-v", "persistence_v", partial(_persistence, channel="v", number="β2")),
        ("persistence-m-long", "persistence_long_m", partial(_persistence, channel="m", number="β1", ending="long_")),
        ("persistence-v-long", "persistence_long_v", partial(_persistence, channel="v", number="β2", ending="long_")),
    )
    for name, variable, draw in drawn:
        settings = study_data.having(results, variable)
        if settings:
            yield name, _panels(settings, draw)
    ranked = study_data.having(results, "score", "magnitude")
    if ranked:
        yield "ranking", _ranking(ranked)
    ratios, scores = study_data.prospective(results, [s for s in FUTURE_NAMES if s in results])
    if ratios:
        yield "prospective-structure", _dots(ratios, by="column", rows="row", title="Π")
    if scores:
        yield "present-scores", _dots(scores, by="row", rows="column", title="rank correlation ρ with the mean M")


# --- Experiment 1


def _overview(settings: Mapping[str, xr.Dataset]) -> Figure:
    """One shock of one real run: through each memory alone, whole with its prediction, and under other futures."""
    figure, axes = grid(len(settings), 3, height=2.3)
    for row, (setting, data) in zip(axes, settings.items()):
        one = study_data.overview(data)
        for colour, (name, curve) in zip(COLOURS, one.alone.items()):
            row[0].plot(one.horizons, curve, color=colour, label=f"{name} alone")
        row[1].plot(one.horizons, one.exact, color="black", lw=2, label="exact")
        row[1].plot(one.horizons, one.tangent, LOOKS["tangent"][1], color=LOOKS["tangent"][0], label="tangent")
        height = one.exact[one.horizons.index(one.peak_horizon)]
        row[1].plot([one.peak_horizon], [height], "o", mfc="none", mec="black", ms=9)
        row[1].annotate(
            f"h* = {one.peak_horizon}", (one.peak_horizon, height), (5, 7), textcoords="offset points", fontsize=7
        )
        for future in one.futures:
            row[2].plot(one.horizons, future, color="0.6", lw=0.6)
        titles = ("through one memory alone", "the whole effect", f"{len(one.futures)} other futures")
        for axis, title in zip(row, titles):
            axis.axhline(0, color="0.6", lw=0.8)
            finish(axis, f"{setting}: {title}", HORIZON, LOSS if axis is row[0] else "")
        for axis in row[:2]:
            key(axis)
    return figure


def _sources(axis: Axes, data: xr.Dataset) -> None:
    for colour, (part, share) in zip(COLOURS, study_data.source_shares(data).items()):
        axis.plot(share["horizon"], share, color=colour, marker="o", ms=3, label=SOURCES[part])
    axis.set_ylim(-0.02, 1.02)
    finish(axis, "", HORIZON, "share of the tangent's error")


def _responses(settings: Mapping[str, xr.Dataset]) -> Figure:
    """The first candidate of the first system, at a local scale and at full scale."""
    figure, axes = grid(2, len(settings))
    for column, (setting, data) in enumerate(settings.items()):
        scales = data["scale"].values
        for row, scale in enumerate((scales[scales <= 0.125].max(initial=scales.min()), scales.max())):
            axis, one = axes[row][column], data.isel(system=0, change=0).sel(scale=scale)
            axis.plot(one["horizon"], one["exact"], color="black", lw=2, label="exact")
            for answer, (colour, dash) in _answers(data):
                axis.plot(one["horizon"], one["predicted"].sel({"answer": answer}), dash, color=colour, label=answer)
            axis.axhline(0, color="0.6", lw=0.8)
            finish(axis, f"{setting}, α = {scale:g}", HORIZON, LOSS if column == 0 else "")
    key(axes[0][0])
    return figure


def _error_by_scale(axis: Axes, data: xr.Dataset) -> None:
    found = study_data.error_by_scale(data)
    scales = found["scale"].values
    for answer, (colour, dash) in _answers(data):
        row = found.sel({"answer": answer})
        label = f"{answer} (slope {float(row['slope']):.2f})"
        axis.loglog(scales, row["error"], dash, color=colour, marker="o", ms=3, label=label)
    start = float(found["error"].sel({"answer": "tangent"})[0])
    axis.loglog(scales, start * (scales / scales[0]) ** 2, color="0.6", lw=0.8, label="slope 2")
    scale_ticks(axis, scales)
    finish(axis, "", SCALE, "error over the response at α = 1")


def _error_by_horizon(axis: Axes, data: xr.Dataset) -> None:
    found = study_data.error_by_horizon(data).sel(scale=data["scale"].max())
    for answer, (colour, dash) in _answers(data):
        row = found.sel({"answer": answer})
        axis.semilogy(found["horizon"], row.where(row > 0), dash, color=colour, label=answer)
    finish(axis, "", HORIZON, "error over the response's size, α = 1")


def _exponents(settings: Mapping[str, xr.Dataset]) -> Figure:
    figure, axes = grid(1, 1)
    for colour, (setting, data) in zip(COLOURS, settings.items()):
        found = study_data.exponents_by_horizon(data)
        axes[0][0].plot(found["horizon"], found["median"], color=colour, marker="o", ms=3, label=setting)
        axes[0][0].fill_between(found["horizon"], found["q25"], found["q75"], color=colour, alpha=0.15, lw=0)
    axes[0][0].axhline(2, color="0.6", lw=0.8, ls="--")
    key(axes[0][0])
    finish(axes[0][0], "", HORIZON, "exponent p of the tangent's error")
    return figure


def _switches(axis: Axes, data: xr.Dataset) -> None:
    found = data["switch_fraction"].median("change").median("system")
    for colour, scale in zip(_ramp(found.sizes["scale"]), found["scale"].values):
        row = found.sel(scale=scale)
        axis.semilogy(found["horizon"], row.where(row > 0), color=colour, marker="o", ms=3, label=f"α = {scale:g}")
    finish(axis, "", HORIZON, "share of gates that differ")


def _channels(axis: Axes, data: xr.Dataset, variable: str) -> None:
    size = study_data.typical_size(data[variable])
    for colour, (channel, name) in zip(COLOURS, CHANNELS.items()):
        axis.plot(size["horizon"], size.sel(channel=channel), color=colour, label=name)
    finish(axis, "", HORIZON, f"median |{LOSS}|")


def _persistence(axis: Axes, data: xr.Dataset, channel: str, number: str, ending: str = "") -> None:
    size = study_data.typical_size(data[f"persistence_{ending}{channel}"])
    decays = size[f"decay_{channel}"].values
    for colour, decay in zip(_ramp(len(decays)), decays):
        row = size.sel({f"decay_{channel}": decay})
        axis.semilogy(size["horizon"], row.where(row > 0), color=colour, label=f"{number} = {decay:g}")
    finish(axis, "", HORIZON, f"median |{LOSS}|")


def _ranking(settings: Mapping[str, xr.Dataset]) -> Figure:
    """Full ISO and endpoint-exact against M, a row per family of candidates."""
    families = list(dict.fromkeys(str(f) for data in settings.values() for f in data["family"].values))
    figure, axes = grid(len(families), len(settings))
    for column, (setting, data) in enumerate(settings.items()):
        for row, family in enumerate(families):
            axis = axes[row][column]
            if family not in data["family"].values:
                axis.set_axis_off()
                continue
            clouds = study_data.clouds(data, family, CLOUD_SYSTEMS)
            for colour, score, sign in (("#E69F00", "full_iso", "o"), ("#0072B2", "endpoint", "x")):
                if score in clouds:
                    cloud = clouds[score]
                    label = f"{SCORES[score]}: ρ = {cloud.rho:.3f}"
                    axis.loglog(cloud.score, cloud.magnitude, sign, color=colour, ms=3.5, alpha=0.7, label=label)
            key(axis)
            _plain_decades(axis)
            finish(axis, f"{setting}, {family}", "score over its system's median", "M over its system's median")
    return figure


# --- Experiment 2


def _dots(points: Sequence[study_data.Point], by: str, rows: str, title: str) -> Figure:
    """A panel per `by`: ours with quartiles, the paper's as diamonds."""
    panels = list(dict.fromkeys(getattr(point, by) for point in points))
    names = list(dict.fromkeys(getattr(point, rows) for point in points))
    across = min(len(panels), 4)
    down = math.ceil(len(panels) / across)
    figure, axes = grid(down, across, height=1.2 + 0.28 * len(names))
    for i, panel in enumerate(panels):
        axis = axes[i // across][i % across]
        some = [p for p in points if getattr(p, by) == panel and not math.isnan(p.middle)]
        places = [names.index(getattr(p, rows)) for p in some]
        middles = [p.middle for p in some]
        ends = [[p.middle - p.low for p in some], [p.high - p.middle for p in some]]
        axis.errorbar(middles, places, xerr=ends, fmt="o", color=COLOURS[0], ms=5, capsize=2, label="ours")
        quoted = [(p.paper, place) for p, place in zip(some, places) if p.paper is not None]
        axis.plot([q for q, _ in quoted], [place for _, place in quoted], "D", mfc="none", mec="black", label="paper")
        axis.set_yticks(range(len(names)), names if i % across == 0 else [""] * len(names))
        axis.set_ylim(len(names) - 0.5, -0.5)
        finish(axis, panel, title, "")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8
    )
    return figure


# --- how to draw


def _panels(settings: Mapping[str, xr.Dataset], draw: Any) -> Figure:
    """One panel per setting, the key in each: slopes differ."""
    figure, axes = grid(1, len(settings))
    for axis, (setting, data) in zip(axes[0], settings.items()):
        draw(axis, data)
        axis.set_title(setting, fontsize=9)
        key(axis)
    return figure


def _answers(data: xr.Dataset) -> list[tuple[str, tuple[str, str]]]:
    return [(answer, LOOKS[answer]) for answer in study_data.predictions(data)]


def _plain_decades(axis: Axes) -> None:
    """1, 2 and 5 of each decade as plain numbers: a cloud often spans less than one."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        side.set_major_formatter(FormatStrFormatter("%g"))
        side.set_minor_formatter(NullFormatter())


def _ramp(count: int) -> list[Any]:
    """Light to dark, for what has an order."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.85 - 0.8 * i / max(count - 1, 1)) for i in range(count)]
