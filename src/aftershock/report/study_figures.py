"""The figures of a study for its page: plotly, with a choice of what is shown where there is much to show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..studies.cells import minus
from ..studies.future_measures import FUTURE_NAMES
from ..studies.measures import CHANNELS, SCORES
from . import mechanism_figures, study_data
from .drawing import PAPER_MARK, Drawing, Frame, add_band, finish, lines, positive, ramp, rows_down, short
from .looks import ANSWER_COLOURS, COLOURS, DASHES, FAINT, HORIZON_TITLE, INK, decades, log_ticks, scale_axis, zero_line

if TYPE_CHECKING:
    import xarray as xr
    from plotly.graph_objects import Figure

SHOWN_SYSTEMS, SHOWN_CHANGES, CLOUD_SYSTEMS = 2, 4, 4  # what is embedded must stay small
PREDICTION_COLOURS = {**ANSWER_COLOURS, "endpoint": "#2f6db3"}
PREDICTION_DASHES = {**DASHES, "endpoint": "dash"}
LINEAR = {
    "tangent": "the tangent linearizes the write into the state, its propagation and the readout",
    "endpoint": "endpoint-exact only the propagation",
    "semilinear": "semilinear only the network's gradient",
}


def drawings(results: Mapping[str, xr.Dataset]) -> Iterator[Drawing]:
    """Every figure that these results can fill."""
    yield from mechanism_figures.overview(results)
    fitted = study_data.having(results, "exact", "predicted")
    if fitted:
        yield _curves(fitted)
        yield _scales(fitted)
        yield _sources(fitted)
        yield _exponents(fitted)
    yield from mechanism_figures.sources(results)
    switched = study_data.having(results, "switch_fraction")
    if switched:
        yield _switches(switched)
    ranked = study_data.having(results, "score", "magnitude")
    if ranked:
        yield _ranking(ranked)
    channels = study_data.having(results, "channel_exact")
    if channels:
        yield _channels(channels)
    swept = study_data.having(results, "persistence_m")
    if swept:
        yield _persistence(swept)
    yield from mechanism_figures.frozen(results)
    ratios, scores = study_data.prospective(results, [s for s in FUTURE_NAMES if s in results])
    if ratios:
        yield _ratios(ratios)
    if scores:
        yield _present(scores)


# --- Experiment 1


def _numbers(frames: Mapping[str, Frame], axis: str) -> Iterator[float | None]:
    """Everything that any choice puts on an axis."""
    for frame in frames.values():
        for row in frame[axis]:
            yield from row


def _curves(settings: Mapping[str, xr.Dataset]) -> Drawing:
    answers = _predictions(settings)
    frames: dict[str, Frame] = {}
    for setting, data in settings.items():
        some = data.isel(system=slice(SHOWN_SYSTEMS), change=slice(SHOWN_CHANGES))
        horizons = some["horizon"].values.tolist()
        for system in some["system"].values:
            for change in some["change"].values:
                for scale in some["scale"].values[::-2]:  # every second one, from full scale down
                    one = some.sel({"system": system, "change": change, "scale": scale})
                    curves = [one["exact"], *(one["predicted"].sel({"answer": m}) for m in answers)]
                    key = f"{setting}|{system}|candidate {change}|α = {scale:g}"
                    frames[key] = {"x": [horizons] * len(curves), "y": [short(c.values) for c in curves]}
    figure = lines(frames, ["exact", *answers], [INK, *(PREDICTION_COLOURS[m] for m in answers)])
    for frame in frames.values():
        del frame["x"]  # the same horizons for every choice
    for trace in figure.data:
        trace.update(line={"dash": PREDICTION_DASHES[trace.name], "width": 3 if trace.name == "exact" else 2})
    zero_line(figure)
    finish(figure, HORIZON_TITLE, "change of the probe's loss")
    figure.update_yaxes(exponentformat="power")
    caption = (
        "The exact response to one candidate and what each answer predicts. Choose the probe or network, the system, "
        f"the candidate and the scale α of the shock ({SHOWN_SYSTEMS} systems and {SHOWN_CHANGES} candidates are here)."
    )
    choices = ("setting", "system", "candidate", "scale")
    return Drawing("curves", "Exact response and predictions", caption, figure, choices, frames)


def _predictions(settings: Mapping[str, xr.Dataset]) -> list[str]:
    return study_data.predictions(next(iter(settings.values())))


def _scales(settings: Mapping[str, xr.Dataset]) -> Drawing:
    answers = _predictions(settings)
    frames: dict[str, Frame] = {}
    for setting, data in settings.items():
        found = study_data.error_by_scale(data)
        scales = found["scale"].values
        rows = [found.sel({"answer": m}) for m in answers]
        tangent = found["error"].sel({"answer": "tangent"}).values
        frames[setting] = {
            "x": [scales.tolist()] * (len(answers) + 1),
            "y": [*(short(row["error"].values) for row in rows), short(tangent[0] * (scales / scales[0]) ** 2)],
            "name": [*(f"{m}: slope {float(row['slope']):.2f}" for m, row in zip(answers, rows)), "slope 2"],
        }
    figure = lines(frames, [*answers, "slope 2"], [*(PREDICTION_COLOURS[m] for m in answers), FAINT])
    figure.data[-1].update(line={"dash": "dash", "width": 1.5}, mode="lines")
    finish(figure, "scale α of the shock", "error over the response at α = 1")
    scale_axis(figure, scales.tolist())
    decades(figure)
    caption = (
        "Size of the error over all horizons, medians over candidates and systems; slopes are fitted over α ≤ 1/4. "
        "A second-order remainder has slope 2."
    )
    return Drawing("scales", "Error against scale", caption, figure, ("setting",), frames)


def _sources(settings: Mapping[str, xr.Dataset]) -> Drawing:
    answers = _predictions(settings)
    frames: dict[str, Frame] = {}
    for setting, data in settings.items():
        found = study_data.error_by_horizon(data)
        for scale in found["scale"].values[::-1]:
            horizons, at = found["horizon"].values.tolist(), found.sel(scale=scale)
            frames[f"{setting}|α = {scale:g}"] = {
                "x": [horizons] * len(answers),
                "y": [positive(at.sel({"answer": m}).values) for m in answers],
            }
    figure = lines(frames, answers, [PREDICTION_COLOURS[m] for m in answers])
    finish(figure, HORIZON_TITLE, "error over the response's size")
    figure.update_yaxes(**log_ticks(_numbers(frames, "y")))
    caption = f"Where the error comes from: {'; '.join(LINEAR[m] for m in answers)}."
    return Drawing("sources", "Where the error comes from", caption, figure, ("setting", "scale"), frames)


def _exponents(settings: Mapping[str, xr.Dataset]) -> Drawing:
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, (setting, data) in enumerate(settings.items()):
        found = study_data.exponents_by_horizon(data)
        add_band(figure, setting, found, COLOURS[i])
    figure.add_hline(y=2, line={"color": FAINT, "width": 1, "dash": "dash"})
    finish(figure, HORIZON_TITLE, "exponent p of the error ∝ αᵖ")
    caption = "Medians over systems with their quartiles. A smooth system has 2; switching gates pull it down."
    return Drawing("exponents", "Error exponent by horizon", caption, figure)


def _switches(settings: Mapping[str, xr.Dataset]) -> Drawing:
    frames: dict[str, Frame] = {}
    scales: list[float] = []
    for setting, data in settings.items():
        found = data["switch_fraction"].median("change").median("system")
        scales = [float(s) for s in found["scale"].values]
        frames[setting] = {
            "x": [found["horizon"].values.tolist()] * len(scales),
            "y": [positive(found.sel(scale=s).values) for s in scales],
        }
    figure = lines(frames, [f"α = {s:g}" for s in scales], ramp(len(scales)))
    finish(figure, HORIZON_TITLE, "share of gates that differ")
    figure.update_yaxes(**log_ticks(_numbers(frames, "y")))
    caption = "Share of ReLU gates that the shock has switched, median over candidates and systems."
    choices = ("setting",) if len(frames) > 1 else ()
    return Drawing("switches", "Switched gates", caption, figure, choices, frames if choices else {})


def _ranking(settings: Mapping[str, xr.Dataset]) -> Drawing:
    frames: dict[str, Frame] = {}
    for setting, data in settings.items():
        for family in [str(f) for f in data["family"].values]:
            for score, cloud in study_data.clouds(data, family, CLOUD_SYSTEMS).items():
                word = "tied: no rank correlation" if math.isnan(cloud.rho) else minus(f"median ρ = {cloud.rho:.3f}")
                frames[f"{setting}|{family}|{SCORES[score]}"] = {
                    "x": [positive(cloud.score)],
                    "y": [positive(cloud.magnitude)],
                    "name": [word],
                }
    figure = lines(frames, [""], [COLOURS[1]])
    figure.data[0].update(mode="markers", marker={"size": 6, "opacity": 0.6}, showlegend=True)
    finish(figure, "score over its system's median", "M over its system's median")
    figure.update_xaxes(**log_ticks(_numbers(frames, "x")))
    figure.update_yaxes(**log_ticks(_numbers(frames, "y")))
    caption = (
        f"Every candidate of {CLOUD_SYSTEMS} systems: its score against the largest change M that it really made. "
        "ρ is the median over all systems of the rank correlation inside each."
    )
    return Drawing("ranking", "Who matters most", caption, figure, ("setting", "candidates", "score"), frames)


def _channels(settings: Mapping[str, xr.Dataset]) -> Drawing:
    frames: dict[str, Frame] = {}
    for setting, data in settings.items():
        for name, variable in ((setting, "channel_exact"), (f"{setting}, long", "channel_long")):
            if variable in data:
                size = study_data.typical_size(data[variable])
                x = size["horizon"].values.tolist()
                frames[name] = {
                    "x": [x for _ in CHANNELS],
                    "y": [short(size.sel(channel=c).values) for c in CHANNELS],
                }
    figure = lines(frames, list(CHANNELS.values()), [*COLOURS[1:7], INK])
    finish(figure, HORIZON_TITLE, "median |change of the probe's loss|")
    figure.update_yaxes(exponentformat="power")
    caption = (
        "The shock's difference let into only some of θ, m and v, then run on exactly: the parameters act early, "
        "the first moment later, the second moment longest."
    )
    return Drawing("channels", "Through which memory", caption, figure, ("setting",), frames)


def _persistence(settings: Mapping[str, xr.Dataset]) -> Drawing:
    frames: dict[str, Frame] = {}
    most = 0
    for setting, data in settings.items():
        for ending, channel, number in [(end, *one) for end in ("", "long_") for one in (("m", "β1"), ("v", "β2"))]:
            if f"persistence_{ending}{channel}" in data:
                size = study_data.typical_size(data[f"persistence_{ending}{channel}"])
                decays = size[f"decay_{channel}"].values
                x, most = size["horizon"].values.tolist(), max(most, len(decays))
                frames[f"{setting}{', long' if ending else ''}|{channel}"] = {
                    "x": [x for _ in decays],
                    "y": [positive(size.sel({f"decay_{channel}": d}).values) for d in decays],
                    "name": [f"{number} = {d:g}" for d in decays],
                }
    for frame in frames.values():  # a choice with fewer curves empties the rest
        missing = most - len(frame["x"])
        frame["x"], frame["y"] = frame["x"] + [[]] * missing, frame["y"] + [[]] * missing
        frame["name"] += [" "] * missing
    figure = lines(frames, [""] * most, ramp(most))
    finish(figure, HORIZON_TITLE, "median |change of the probe's loss|")
    decades(figure)
    caption = (
        "The same first displacement under another decay: a longer memory makes the effect larger and later. "
        "How the paper matches the displacement of v is not known."
    )
    return Drawing("persistence", "How long a memory keeps it", caption, figure, ("setting", "memory"), frames)


# --- Experiment 2


def _ratios(points: Sequence[study_data.Point]) -> Drawing:
    frames = {column: _dots([p for p in points if p.column == column], "row") for column in _distinct(points, "column")}
    rows = _distinct(points, "row")
    figure = _dot_plot(frames, rows, "Π", [0, 1.03])
    caption = (
        "Π, the share of the variance under 32 futures that belongs to the candidate, for the largest change M, the "
        "accumulated change A or the largest increase P+: medians over systems with quartiles. A ratio of variances, "
        "not a share of information."
    )
    return Drawing("ratios", "What belongs to the candidate, not to the future", caption, figure, ("summary",), frames)


def _present(points: Sequence[study_data.Point]) -> Drawing:
    defined = [p for p in points if not math.isnan(p.middle)]
    frames = {row: _dots([p for p in defined if p.row == row], "column") for row in _distinct(defined, "row")}
    columns = _distinct(points, "column")
    figure = _dot_plot(frames, columns, "rank correlation ρ", [-0.7, 1.05])
    caption = (
        "Scores that know nothing of the future, against what 32 futures did on average: medians over systems with "
        "quartiles. A score that is tied for every candidate has no correlation and is left out."
    )
    return Drawing("present", "Told in advance", caption, figure, ("candidates",), frames)


def _distinct(points: Sequence[study_data.Point], name: str) -> list[str]:
    return list(dict.fromkeys(getattr(point, name) for point in points))


def _dots(points: Sequence[study_data.Point], name: str) -> Frame:
    """Ours with quartiles as the first trace, the paper's as the second."""
    quoted = [p for p in points if p.paper is not None]
    return {
        "x": [short([p.middle for p in points]), short([p.paper for p in quoted])],
        "y": [[getattr(p, name) for p in points], [getattr(p, name) for p in quoted]],
        "error_x.array": [short([p.high - p.middle for p in points]), []],
        "error_x.arrayminus": [short([p.middle - p.low for p in points]), []],
    }


def _dot_plot(frames: Mapping[str, Frame], rows: Sequence[str], title: str, extent: Sequence[float]) -> Figure:
    figure = lines(frames, ["ours", "paper"], [COLOURS[1], INK])
    first = next(iter(frames.values()))
    ends = {"array": first["error_x.array"][0], "arrayminus": first["error_x.arrayminus"][0]}
    figure.data[0].update(
        mode="markers",
        marker={"size": 10},
        error_x={"type": "data", "symmetric": False, "thickness": 1.5, "width": 4, **ends},
    )
    figure.data[1].update(mode="markers", marker=PAPER_MARK)
    finish(figure, title, "", 130 + 38 * len(rows))
    figure.update_xaxes(range=list(extent))
    rows_down(figure, rows, [row.replace("; ", "<br>").replace(" (ours)", "<br>(ours)") for row in rows])
    return figure
