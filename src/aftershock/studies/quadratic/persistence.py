"""How late and how long each memory acts: the isolated channels, and the sweeps of β, followed for 128 horizons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ...results.statistics import across_candidates
from ...results.summaries import summarize
from ..measures import ALONE, NAMES, Results, has, measured, nested
from ..verdicts import Measure

if TYPE_CHECKING:
    import xarray as xr

TABLE, PROBES = "text:exp1_long", ("standard", "anisotropic")
MEASURED = 32  # horizons of the paper's tables
NEAR = "the paper's text rounds the medians of its table over both probes; its selected candidates are not defined"


def isolated_peaks(results: Results) -> Iterator[Measure]:
    """h* of θ, m and v alone over both probes, as the main text names them."""
    import xarray as xr

    settings = [s for s in PROBES if has(results, s, "channel_exact")]
    if not settings:
        return
    peaks = [summarize(nested(results[s]["channel_exact"]))["peak_horizon"] for s in settings]
    both = xr.concat(peaks, dim="probe").mean("probe")
    for name, channel in ALONE.items():
        values = across_candidates(both.sel(channel=channel))
        yield measured("text:exp1_controlled", f"{name} alone peaks near", "value", values, known=False, note=NEAR)


def statements(results: Results) -> Iterator[Measure]:
    """What the text says of channels and sweeps in words, each of the medians of every probe."""
    settings = [s for s in PROBES if has(results, s, "channel_exact", "persistence_m", "persistence_v")]
    if not settings:
        return
    largest: list[bool] = []
    later: dict[str, list[bool]] = {"m": [], "v": []}
    for setting in settings:
        sizes = across_candidates(summarize(nested(results[setting]["channel_exact"]))["peak"]).median("system")
        largest.append(str(sizes.sel(channel=list(ALONE.values())).idxmax("channel").values) == ALONE["m"])
        for channel, found in later.items():
            swept = summarize(nested(results[setting][f"persistence_{channel}"]))["peak_horizon"]
            middles = across_candidates(swept).median("system").sortby(f"decay_{channel}")
            found.append(bool((middles.diff(f"decay_{channel}") >= 0).all() and middles[-1] > middles[0]))
    systems = results[settings[0]].sizes["system"]
    yield _statement("text:exp1_controlled", "m alone has the largest of the three responses", largest, systems)
    for number, channel in (("β1", "m"), ("β2", "v")):
        row = f"The extremum moves later as {number} increases"
        yield _statement("text:exp1_controlled", row, later[channel], systems)


def _statement(table: str, row: str, holds: Sequence[bool], systems: int, note: str = "") -> Measure:
    import numpy as np

    return Measure(table, row, "value", np.array([float(all(holds))]), systems, "statement", note=note)


def long_measures(results: Results) -> Iterator[Measure]:
    """What the extension to 128 horizons shows, and a measure of persistence the paper does not give."""
    settings = [s for s in PROBES if has(results, s, "channel_long")]
    for setting in settings:
        alone = nested(results[setting]["channel_long"])
        yield from _rows({f"{name} alone": alone.sel(channel=c) for name, c in ALONE.items()}, NAMES[setting])
    if settings:
        yield from _order({s: nested(results[s]["channel_long"]) for s in settings})
    for setting in settings:
        for channel, number in (("m", "β1"), ("v", "β2")):
            if has(results, setting, f"persistence_long_{channel}"):
                swept = nested(results[setting][f"persistence_long_{channel}"])
                decay = f"decay_{channel}"
                found = {f"{channel}, {number} = {d:g}": swept.sel({decay: d}) for d in swept[decay].values}
                yield from _rows(found, NAMES[setting])


def _rows(responses: Mapping[str, xr.DataArray], probe: str) -> Iterator[Measure]:
    for name, response in responses.items():
        found = {"h*": summarize(response)["peak_horizon"], "mean delay": mean_delay(response)}
        found[f"ARE beyond h = {MEASURED}"] = share_beyond(response, MEASURED)
        for column, values in found.items():
            yield measured(TABLE, f"{name} (ours)", f"{probe}: {column}", across_candidates(values))


def mean_delay(response: xr.DataArray) -> xr.DataArray:
    """Σ h |d_h| / Σ |d_h|: when, on average, the effect is there. A constant effect has (H + 1)/2."""
    size = abs(response)
    return (size * size["horizon"]).sum("horizon") / size.sum("horizon")


def share_beyond(response: xr.DataArray, horizon: int) -> xr.DataArray:
    """The part of ARE that comes after a horizon."""
    size = abs(response)
    return size.where(size["horizon"] > horizon, 0.0).sum("horizon") / size.sum("horizon")


def _order(alone: Mapping[str, xr.DataArray]) -> Iterator[Measure]:
    """The paper's three statements, each for every probe's medians."""
    holds: dict[str, list[bool]] = {name: [] for name in ("earliest", "intermediate", "longest")}
    for response in alone.values():
        peaks, delays = (
            [float(across_candidates(values.sel(channel=c)).median()) for c in ALONE.values()]
            for values in (summarize(response)["peak_horizon"], mean_delay(response))
        )
        holds["earliest"].append(peaks[0] < min(peaks[1:]))
        holds["intermediate"].append(_dominates(response, peaks[0], peaks[2]))
        holds["longest"].append(delays[2] > max(delays[:2]))
    rows = {
        "earliest": "Parameter deviations act earliest",
        "intermediate": "Momentum dominates intermediate delays",
        "longest": "Second-moment effects persist longest",
    }
    notes = {
        "intermediate": "between the peaks of θ and of v alone, the response of m alone is the largest of the three",
        "longest": "read by the mean delay Σ h |d_h| / Σ |d_h|",
    }
    systems = next(iter(alone.values())).sizes["system"]
    for key, row in rows.items():
        yield _statement(TABLE, row, holds[key], systems, notes.get(key, ""))


def _dominates(response: xr.DataArray, start: float, stop: float) -> bool:
    """Whether m's typical size is the largest at more than half of the horizons between two peaks."""
    size = across_candidates(abs(response)).median("system").sel(channel=list(ALONE.values()))
    between = size.sel(horizon=slice(start, stop))
    return bool((between.idxmax("channel") == ALONE["m"]).mean() > 0.5)
