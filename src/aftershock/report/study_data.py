"""What the figures of a study show, as labelled numbers: the page and the static files draw the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..results.fidelity import error_exponents
from ..results.statistics import across_systems
from ..results.summaries import summarize
from ..studies.cifar.measures import output_shares
from ..studies.future_measures import futures
from ..studies.measures import ALONE, LOCAL, NAMES, Results, exponents, nested, rankings
from ..studies.paper import TABLES
from ..studies.verdicts import spread
from ..theory.frozen import FrozenMemory

if TYPE_CHECKING:
    import xarray as xr

WHOLE = ("exact", "predicted", "channel_exact", "future_response")  # what the overview is drawn from
SHOWN_FUTURES = 12
PREDICTIONS = ("tangent", "endpoint", "semilinear")  # endpoint-exact is an ablation of the quadratic study alone


def having(results: Results, *names: str) -> dict[str, xr.Dataset]:
    """The settings that have all of these variables, by their names in the paper."""
    settings = [s for s in NAMES if s in results]
    return {NAMES[s]: results[s] for s in settings if all(name in results[s] for name in names)}


def predictions(data: xr.Dataset) -> list[str]:
    """The predictions of one setting, the crudest first; a study has the same ones in all of its settings."""
    return [answer for answer in PREDICTIONS if answer in data["answer"].values]


def error_by_scale(data: xr.Dataset) -> xr.Dataset:
    """‖d(α) − d̂(α)‖ over ‖d(1)‖: `error[answer, scale]`, medians over candidates and systems, and its `slope`.

    The size at α = 1 divides every scale, so that a quadratic remainder has slope 2. Slopes are over local scales.
    """
    import xarray as xr

    largest = data["scale"].max()
    size = (data["exact"].sel(scale=largest, drop=True) ** 2).sum("horizon") ** 0.5
    miss = ((data["predicted"] - data["exact"]) ** 2).sum("horizon") ** 0.5
    error = (miss / size.where(size > 0)).median("change").median("system")
    slope = error_exponents(xr.zeros_like(error), error, LOCAL)["exponent"]
    return xr.Dataset({"error": error, "slope": slope})


def error_by_horizon(data: xr.Dataset) -> xr.DataArray:
    """|d_h − d̂_h| over the root mean square of d, [answer, scale, horizon], medians over candidates and systems."""
    size = (data["exact"] ** 2).mean("horizon") ** 0.5
    return (abs(data["predicted"] - data["exact"]) / size.where(size > 0)).median("change").median("system")


def exponents_by_horizon(data: xr.Dataset) -> xr.Dataset:
    """The tangent's error exponent with its quartiles over systems, by horizon."""
    return across_systems(exponents(data)["exponent"])


def typical_size(response: xr.DataArray) -> xr.DataArray:
    """|d_h|, median over candidates and systems: what a channel or a sweep typically does at each horizon."""
    return abs(nested(response)).median("change").median("system")


def source_shares(data: xr.Dataset) -> dict[str, xr.DataArray]:
    """Sizes of the parts of the response's error by source, median over candidates and systems, by horizon."""
    return {part: share.median("change").median("system") for part, share in output_shares(data).items()}


@dataclass(frozen=True)
class Overview:
    """One shock of one real run: through each memory alone, whole, as predicted, and under other futures."""

    system: str
    change: int
    horizons: list[int]
    alone: dict[str, list[float]]
    exact: list[float]
    tangent: list[float]
    futures: list[list[float]]
    peak_horizon: int


def overview(data: xr.Dataset) -> Overview:
    """The largest of the first system's followed candidates whose effect peaks late but not at the end, if any does."""
    one = data.isel(system=0).sel(scale=data["scale"].max(), drop=True)
    channels = nested(one["channel_exact"])
    peaks = summarize(channels.sel(channel="111"))
    turns = (peaks["peak_horizon"] > 1) & (peaks["peak_horizon"] < one["horizon"].max())
    i = int(peaks["peak"].where(turns | ~turns.any()).argmax("change"))
    at = one.isel(change=i)
    return Overview(
        system=str(one["system"].values),
        change=int(at["change"]),
        horizons=one["horizon"].values.tolist(),
        alone={name: channels.isel(change=i).sel(channel=channel).values.tolist() for name, channel in ALONE.items()},
        exact=at["exact"].values.tolist(),
        tangent=at["predicted"].sel({"answer": "tangent"}).values.tolist(),
        futures=at["future_response"]
        .sel(family="natural")
        .isel(future=slice(SHOWN_FUTURES))
        .transpose("future", "horizon")
        .values.tolist(),
        peak_horizon=int(peaks["peak_horizon"][i]),
    )


def frozen_memories(results: Results) -> dict[str, FrozenMemory]:
    """The frozen memory of each setting's first system, by its name in the paper."""
    found = {}
    for name, data in having(results, "frozen_memory").items():
        values = data["frozen_memory"].isel(system=0)
        found[name] = FrozenMemory(
            **{str(key): float(values.sel(coefficient=key)) for key in values["coefficient"].values}
        )
    return found


@dataclass(frozen=True)
class Cloud:
    """Scores against magnitudes, each divided by its system's median, and the median rank correlation."""

    score: list[float]
    magnitude: list[float]
    rho: float


def clouds(data: xr.Dataset, family: str, systems: int) -> dict[str, Cloud]:
    """A cloud per score, of the first `systems` systems."""
    rho = rankings(data, family).median("system")
    some = data.sel(family=family).isel(system=slice(systems))
    magnitude = some["magnitude"] / some["magnitude"].median("change")
    found = {}
    for name in [str(m) for m in some["score_method"].values]:
        score = some["score"].sel(score_method=name)
        relative = (score / score.median("change")).transpose("system", "change")
        flat = magnitude.transpose("system", "change").values.ravel().tolist()
        found[name] = Cloud(relative.values.ravel().tolist(), flat, float(rho.sel(score=name)))
    return found


@dataclass(frozen=True)
class Point:
    """A number over systems with its quartiles, and the paper's where it has one."""

    row: str
    column: str
    middle: float
    low: float
    high: float
    paper: float | None


def prospective(results: Results, settings: Sequence[str]) -> tuple[list[Point], list[Point]]:
    """Π of M, A and P+, and the rank correlation of every present-time score: one point per setting and family."""
    ratios: list[Point] = []
    scores: list[Point] = []
    for measure in futures(results, settings):
        into = ratios if measure.column.startswith("Π") else scores if "present_scores" in measure.table else None
        if into is None:
            continue
        ours = spread(measure)
        quote = TABLES[measure.table].quotes().get((measure.row, measure.column))
        paper = quote.value if quote else None
        into.append(Point(measure.row, measure.column, ours.middle, ours.low, ours.high, paper))
    return ratios, scores
