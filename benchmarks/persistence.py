"""Which candidates did the paper select, and how did it match v? Its two open tables under many readings.

The channel table (tab:app_exp1_state_interventions) and the sweeps of β (tab:app_exp1_persistence), on the study's own
quadratic systems. A ratio is ours over the paper's: the geometric mean over the M and ARE of a table, the root mean
square of their logarithms, and the geometric mean of h*. All six root seeds: `python -m benchmarks.persistence`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from torch import Tensor

from aftershock.core.adamw import Run
from aftershock.results.summaries import summarize
from aftershock.studies.measures import NAMES
from aftershock.studies.paper import TABLES
from aftershock.studies.quadratic.family import HYPER
from aftershock.studies.quadratic.recipe import DECAYS, PERSISTENCE_SCALE, ROOTS, quadratic_study
from aftershock.studies.quadratic.rows import (
    HYBRIDS,
    hybrid_responses,
    persistent_responses,
    responses,
    rows_of,
    with_control,
)
from aftershock.studies.quadratic.scene import CANDIDATES, HORIZON, Scene
from aftershock.theory.matching import calibrate, matched_moment

SIZES = (1 / 8, 1 / 4, 1 / 2, 1.0)  # of the shock
SELECTIONS = {
    **{f"first {n}": slice(0, n) for n in (2, 4, 6, 8, 12)},
    "last 8": slice(CANDIDATES - 8, CANDIDATES),
    f"all {CANDIDATES}": slice(0, CANDIDATES),
}
SUMMARIES = {"M": "peak", "ARE": "total_abs", "h*": "peak_horizon"}
CHANNELS, SWEEPS = "tab:app_exp1_state_interventions", "tab:app_exp1_persistence"

Rows = Float[Tensor, "change d"]


@dataclass(frozen=True)
class Displaced:
    """What v does to the first step at one β2, and its derivative, coordinate by coordinate."""

    run: Run
    v: Rows
    moved: Rows  # m̂, up to what every β2 shares
    fresh: Rows

    def root(self, v: Rows) -> Rows:
        return ((self.run.beta2 * v + (1 - self.run.beta2) * self.fresh**2) / self.run.bias2).sqrt()

    def by(self, change: Rows) -> Rows:
        inverse = 1 / (self.root((self.v + change).clamp(min=0)) + self.run.eps)
        return self.moved * (inverse - 1 / (self.root(self.v) + self.run.eps))

    @property
    def slope(self) -> Rows:
        root = self.root(self.v)
        return -self.moved * self.run.beta2 / (2 * self.run.bias2 * root * (root + self.run.eps) ** 2)


# --- how Δv is rescaled for another β2


def by_coordinate(own: Displaced, new: Displaced, change: Rows) -> Rows:
    return change * own.slope / new.slope


def by_norm(own: Displaced, new: Displaced, change: Rows) -> Rows:
    sizes = [(at.slope * change).norm(dim=1, keepdim=True) for at in (own, new)]
    return change * sizes[0] / sizes[1]


def by_norm_exactly(own: Displaced, new: Displaced, change: Rows) -> Rows:
    target = own.by(change).norm(dim=1)
    factor = calibrate(lambda gamma: new.by(gamma[:, None] * change).norm(dim=1) - target, len(change))
    return factor[:, None] * change


MATCHED: dict[str, Callable[[Displaced, Displaced, Rows], Rows]] = {
    "coordinate, linearly": by_coordinate,
    "norm, exactly": by_norm_exactly,
    "norm, linearly": by_norm,
    "none": lambda own, new, change: change,
}
EXACTLY = "coordinate, exactly"  # the study's own: `matched_moment`


def deviations(scene: Scene) -> dict[str, Rows]:
    """Δv of every candidate."""
    found = {f"{size:g} of the shock": scene.after(size * scene.xi).v - scene.control.v for size in SIZES}
    whole = {"whole deviation": found["1 of the shock"], "tangent": scene.written(scene.xi).v}
    return found | {f"{PERSISTENCE_SCALE:g} of the {name}": PERSISTENCE_SCALE * dv for name, dv in whole.items()}


def rescaled(scene: Scene, change: Rows, decay: float) -> Iterator[tuple[str, Rows]]:
    """Δv at this β2 by every way of matching."""
    control, fresh = scene.control, scene.future[0].gradient(scene.control.theta)
    moved = HYPER.beta1 * control.m + (1 - HYPER.beta1) * fresh
    own, new = (Run.at(h, control.counts[0] + 1) for h in (HYPER, replace(HYPER, beta2=decay)))
    shocked = replace(rows_of(control, len(change)), v=(control.v + change).clamp(min=0))
    yield EXACTLY, matched_moment(own, new, control, shocked, fresh, "v")[0] - control.v
    at = [Displaced(run, control.v, moved, fresh) for run in (own, new)]
    for name, rule in MATCHED.items():
        yield name, rule(*at, change)


def swept_v(scene: Scene) -> xr.DataArray:
    """Responses to v alone: [probe, decay, deviation, match, change, horizon]."""
    curves, tried = [], deviations(scene)
    for decay in DECAYS["v"]:
        rows = torch.cat([each for change in tried.values() for _, each in rescaled(scene, change, decay)])
        start = rows_of(scene.control, len(rows))
        start = replace(start, v=(start.v + rows).clamp(min=0))
        found = responses(
            with_control(scene.control, start), scene.future, list(scene.probes.values()), replace(HYPER, beta2=decay)
        )
        curves.append(found.unflatten(1, (len(tried), len(MATCHED) + 1, CANDIDATES)))
    labels = {"decay": list(DECAYS["v"]), "deviation": list(tried), "match": [EXACTLY, *MATCHED]}
    return _labelled(torch.stack(curves, dim=1), scene, labels)


def swept_m(scene: Scene) -> xr.DataArray:
    """Responses to m alone, which is linear in the shock: [probe, decay, change, horizon]."""
    shocked, probes = scene.after(PERSISTENCE_SCALE * scene.xi), list(scene.probes.values())
    found = persistent_responses(scene.control, shocked, scene.future, probes, HYPER, "m", DECAYS["m"])
    return _labelled(found, scene, {"decay": list(DECAYS["m"])})


def channels(scene: Scene) -> xr.DataArray:
    """Responses to the hybrids of the whole shock: [probe, channel, change, horizon]."""
    found = hybrid_responses(scene.control, scene.after(scene.xi), scene.future, list(scene.probes.values()), HYPER)
    return _labelled(found, scene, {"channel": list(HYBRIDS)})


def _labelled(values: Tensor, scene: Scene, labels: Mapping[str, list]) -> xr.DataArray:
    coords = {"probe": [NAMES[name] for name in scene.probes], **labels, "change": range(CANDIDATES)}
    coords["horizon"] = range(1, HORIZON + 1)
    return xr.DataArray(values.numpy(), coords, list(coords))


# --- beside the paper


def ratios(found: xr.Dataset, table: str, row: Callable[[object], str], rows: str) -> tuple[float, float, float]:
    """M and ARE over the paper's: geometric mean, root mean square of the logarithm; h* over the paper's.

    found: `SUMMARIES` by [system, probe, rows, change], of the selected candidates. row: the table's name of one.
    """
    middles, quotes = found.median("change").median("system"), TABLES[table].quotes()
    logs: dict[str, list[float]] = {name: [] for name in SUMMARIES}
    for probe in middles["probe"].values:
        for one in middles[rows].values:
            for name, key in SUMMARIES.items():
                paper = quotes[row(one), f"{probe}: {name}"].value
                if paper and row(one) != HYBRIDS[0]:  # nothing moves there
                    logs[name].append(float(np.log(middles[key].sel({"probe": probe, rows: one}) / paper)))
    sizes = np.array(logs["M"] + logs["ARE"])
    return float(np.exp(sizes.mean())), float((sizes**2).mean() ** 0.5), float(np.exp(np.mean(logs["h*"])))


def _told(found: xr.Dataset, table: str, row: Callable[[object], str], rows: str) -> str:
    mean, spread, peak = ratios(found, table, row, rows)
    return f"{mean:.2f} ({spread:.2f}), {peak:.2f}"


def by_selection(channel: xr.Dataset, m: xr.Dataset) -> Table:
    table = Table("candidates", "channels: M and ARE, h*", "m: M and ARE, h*")
    for name, chosen in SELECTIONS.items():
        some = [data.isel(change=chosen) for data in (channel, m)]
        table.add_row(
            name, _told(some[0], CHANNELS, str, "channel"), _told(some[1], SWEEPS, "m, β1 = {:g}".format, "decay")
        )
    return table


def by_rule(v: xr.Dataset) -> Table:
    table = Table("Δv", "matched", *(f"v: {name}" for name in SELECTIONS))
    for deviation in v["deviation"].values:
        for match in v["match"].values:
            own = v.sel(deviation=deviation, match=match)
            cells = [
                _told(own.isel(change=chosen), SWEEPS, "v, β2 = {:g}".format, "decay") for chosen in SELECTIONS.values()
            ]
            table.add_row(str(deviation), str(match), *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.persistence", description=__doc__)
    parser.add_argument("--roots", type=int, default=ROOTS, help="root seeds of 32 systems; default: %(default)s")
    options = parser.parse_args()
    began, systems = time.monotonic(), quadratic_study(roots=options.roots).systems
    found: dict[str, list[xr.Dataset]] = {"channels": [], "m": [], "v": []}
    for scene in map(Scene.of, systems):
        for name, responded in (("channels", channels), ("m", swept_m), ("v", swept_v)):
            found[name].append(summarize(responded(scene))[list(SUMMARIES.values())])
    joined = {name: xr.concat(some, "system") for name, some in found.items()}
    console = Console(width=200)
    console.print(by_selection(joined["channels"], joined["m"]), by_rule(joined["v"]))
    console.print(f"{len(systems)} systems; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
