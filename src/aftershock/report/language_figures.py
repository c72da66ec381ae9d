"""The figures of the language study for its page: plotly, one choice per model and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..results.statistics import across_candidates
from ..studies.language.candidates import FD, PREDICTIONS, Candidates
from ..studies.language.finite_differences import consistency, step_curve, step_error
from ..studies.language.measures import SCORES
from ..studies.measures import CHANNELS
from ..studies.paper import TABLES
from .drawing import HEIGHT, PAPER_MARK, Drawing, Frame, finish, lines, positive, rows_down, short
from .looks import ANSWER_COLOURS, COLOURS, DASHES, FAINT, HORIZON_TITLE, INK, decades, scale_axis, zero_line

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr
    from plotly.graph_objects import Figure

NAMES = {FD: "ISO Tangent (FD)", "tangent": "exact tangent", "semilinear": "semilinear"}
SHADES = {FD: "#c8432b", **ANSWER_COLOURS}
STROKES = {FD: "dash", **DASHES}
EVERYWHERE = "all systems"
FRAME = 3  # times the largest exact response that a curve may reach
GUIDED = 0.3  # guides end below this share of the smallest error, so that they do not stretch the axis


def language_drawings(results: Mapping[str, xr.Dataset]) -> Iterator[Drawing]:
    """Every figure of the language study; none for other studies."""
    if "language" not in results:
        return
    every = Candidates(results["language"])
    found = every.once
    yield _steps(every)
    yield _exponents(every)
    yield _scales(every)
    yield _validity(found)
    yield _curves(found)
    yield _ranking(found)
    yield _channels(found)


def names(found: Candidates) -> list[str]:
    """A name per system; the system's own where two share a model and a text."""
    shown = [condition.name for condition in found.conditions]
    return [c.system if shown.count(name) > 1 else name for c, name in zip(found.conditions, shown)]


def _steps(found: Candidates) -> Drawing:
    """A choice per model and text, as it is pooled; its median error in float64 beside it."""
    import numpy as np

    errors, medians = step_error(found.data).sortby("fd_step"), step_curve(found.data)["error"]
    gaps = across_candidates(consistency(found.data["fd_derivative"]))
    steps = errors["fd_step"].values
    frames: dict[str, Frame] = {}
    shown = names(found)
    for i, twin in found.pairs:
        own, middle = errors.isel(system=i), medians.isel(system=i).values
        gap = gaps.isel(system=i).reindex(fd_step=steps).values
        curves = [own.isel(change=k).values for k in range(own.sizes["change"])]
        guides = [middle[-1] * (steps / steps[-1]) ** 2, middle[0] * steps[0] / steps]
        guides = [[v if v > GUIDED * np.nanmin(middle) else None for v in guide] for guide in guides]
        beside: Sequence[float] | np.ndarray = [] if twin is None else medians.isel(system=twin).values
        frames[shown[i]] = {
            "x": [steps.tolist()] * (len(curves) + 3) + [steps.tolist()[: len(beside)], steps.tolist()],
            "y": [positive(values) for values in (*curves, *guides, gap, beside, middle)],
        }
    count = errors.sizes["change"]
    labels = ["a candidate"] * count + ["ε² (truncation)", "1/ε (float noise)", "consistency with 2ε"]
    labels += ["median error in float64", "median error"]
    figure = lines(frames, labels, ["#d5d9e0"] * count + [FAINT, FAINT, COLOURS[1], INK, SHADES[FD]])
    for k, trace in enumerate(figure.data[:count]):
        trace.update(mode="lines", line={"width": 1}, showlegend=k == 0)
    for trace, dash in zip(figure.data[count : count + 2], ("dash", "dot")):
        trace.update(mode="lines", line={"dash": dash, "width": 1.5})
    figure.data[-1].update(line={"width": 3}, marker={"size": 7})
    figure.data[-2].update(line={"width": 2.5}, marker={"size": 7, "symbol": "diamond"})
    finish(figure, "finite-difference step ε", "error over the exact tangent", HEIGHT + 60)
    figure.update_xaxes(type="log", tickvals=steps.tolist(), ticktext=[f"1/{1 / s:.0f}" for s in steps])
    decades(figure)
    caption = (
        "How far the centred finite differences are from the exact tangent, by their step. Truncation would grow as ε² "
        "to the right and float noise as 1/ε to the left (guides). The paper has no exact tangent and selects by the "
        "consistency of two neighbouring steps (blue). Where the same was run in float64, its median error stands "
        "beside it: what is lower there was float noise."
    )
    return Drawing("fd-steps", "Finite differences against the exact tangent", caption, figure, ("system",), frames)


def _exponents(found: Candidates) -> Drawing:
    import plotly.graph_objects as go

    middle, shown = across_candidates(found.exponents), names(found)
    figure = go.Figure()
    for answer in PREDICTIONS:
        marker = {"size": 11, "color": SHADES[answer], "symbol": "circle" if answer == FD else "circle-open"}
        if answer != FD:
            marker["line"] = {"width": 2.5}
        x = short(middle.sel({"answer": answer}).values)
        figure.add_scatter(x=x, y=shown, mode="markers", name=NAMES[answer], marker=marker)
    _add_paper(figure, "text:exp3_exponents", NAMES[FD], shown, "paper (its FD)")
    figure.add_vline(x=2, line={"color": FAINT, "width": 1, "dash": "dash"})
    finish(figure, "exponent p of the error ∝ αᵖ", "", 130 + 34 * len(shown))
    rows_down(figure, shown, [name.replace(", ", "<br>", 1) for name in shown])
    caption = (
        "Over α ≤ 1/4, medians over candidates. A smooth response has 2 with any derivative that is exact, and with "
        "semilinear too: it linearizes the gradient, whose bending it misses. An error of the derivative pulls towards "
        "1, and so does an update that saturates below the smallest scale; float noise of the exact runs pulls "
        "towards 0; where the same was run in float64, noise is gone from its row and what is "
        "real has stayed."
    )
    return Drawing("fd-exponents", "Error exponents: finite differences and exact tangent", caption, figure)


def _validity(found: Candidates) -> Drawing:
    valid, scales = found.errors["valid"], found.errors["scale"].values
    parts = {EVERYWHERE: valid} | {name: valid.isel(system=[i]) for i, name in enumerate(names(found))}
    quotes = TABLES["text:exp3_validity"].quotes()
    named = [(f"α = {s:g}", NAMES[FD]) for s in scales]
    paper = [quotes[name].value if name in quotes else None for name in named]
    frames: dict[str, Frame] = {}
    for name, some in parts.items():
        shares = [short(some.sel({"answer": a}).mean(["system", "change"]).values) for a in PREDICTIONS]
        frames[name] = {"x": [scales.tolist()] * 4, "y": [*shares, short(paper) if name == EVERYWHERE else []]}
        frames[name]["x"][-1] = scales.tolist() if name == EVERYWHERE else []
    figure = lines(frames, [*NAMES.values(), "paper (Pythia, FD)"], [*(SHADES[a] for a in PREDICTIONS), INK])
    for trace, answer in zip(figure.data, PREDICTIONS):
        trace.update(line={"dash": STROKES[answer], "width": 2})
    figure.data[-1].update(mode="markers", marker=PAPER_MARK)
    finish(figure, "scale α of the shock", "share of valid candidates")
    scale_axis(figure, scales.tolist())
    figure.update_yaxes(range=[-0.03, 1.05], tickformat=".0%")
    caption = "Valid: the median over horizons of the symmetric relative error is at most 0.2."
    return Drawing("fd-validity", "Where the prediction holds", caption, figure, ("systems",), frames)


def _scales(found: Candidates) -> Drawing:
    size = ((found.full**2).sum("horizon")) ** 0.5
    miss = ((found.predicted - found.exact) ** 2).sum("horizon", skipna=False) ** 0.5
    error = across_candidates(miss / size.where(size > 0))
    floor = across_candidates((found.data["noise_floor"] ** 2).sum("horizon") ** 0.5 / size.where(size > 0))
    scales = error["scale"].values
    frames: dict[str, Frame] = {}
    for i, name in enumerate(names(found)):
        rows = [error.sel({"answer": a}).isel(system=i).values for a in PREDICTIONS]
        noise, guide = floor.isel(system=i).item(), rows[1][-1] * scales**2
        frames[name] = {
            "x": [scales.tolist()] * 5,
            "y": [positive(row) for row in (*rows, guide, [noise] * len(scales))],
        }
    labels = [*NAMES.values(), "slope 2", "float noise of the exact runs"]
    figure = lines(frames, labels, [*(SHADES[a] for a in PREDICTIONS), FAINT, FAINT])
    for trace, dash in zip(figure.data[3:], ("dash", "dot")):
        trace.update(mode="lines", line={"dash": dash, "width": 1.5})
    finish(figure, "scale α of the shock", "error / response at α = 1")
    scale_axis(figure, scales.tolist())
    decades(figure)
    caption = "Size of the error over all horizons, medians over candidates. Below the dotted line is float noise."
    return Drawing("lm-scales", "Error against scale", caption, figure, ("system",), frames)


def _curves(found: Candidates) -> Drawing:
    import numpy as np

    frames: dict[str, Frame] = {}
    order = ("system", "change", "scale", "horizon")
    exact = found.exact.transpose(*order)
    predicted = found.predicted.transpose("answer", *order)
    curves = np.concatenate([exact.values[None], predicted.sel({"answer": list(PREDICTIONS)}).values])
    curves = np.where(abs(curves) <= FRAME * abs(curves[:1]).max(-1, keepdims=True), curves, np.nan)
    horizons = exact["horizon"].values.tolist()
    for i, name in enumerate(names(found)):
        for k, change in enumerate(exact["change"].values):
            for j, scale in reversed(list(enumerate(exact["scale"].values))):
                frames[f"{name}|candidate {change}|α = {scale:g}"] = {
                    "x": [horizons] * len(curves),
                    "y": [short(curve) for curve in curves[:, i, k, j]],
                }
    figure = lines(frames, ["exact", *NAMES.values()], [INK, *(SHADES[a] for a in PREDICTIONS)])
    for trace, answer in zip(figure.data, ("exact", *PREDICTIONS)):
        trace.update(line={"dash": STROKES[answer], "width": 3 if answer == "exact" else 2})
    zero_line(figure)
    finish(figure, HORIZON_TITLE, "change of the probe's loss")
    figure.update_yaxes(exponentformat="power")
    caption = (
        "The exact response to one candidate batch, and what each prediction says; a prediction of more than "
        f"{FRAME} times the largest exact response is left out."
    )
    choices = ("system", "candidate", "scale")
    return Drawing("lm-curves", "Exact response and predictions", caption, figure, choices, frames)


def _ranking(found: Candidates) -> Drawing:
    shown = names(found)
    frames: dict[str, Frame] = {}
    for score, label in SCORES.items():
        quotes = TABLES["tab:app_exp3_ranking"].quotes()
        quoted = [(name, quotes[name, label].value) for name in shown if (name, label) in quotes]
        frames[label] = {
            "x": [short(found.rho.sel(score=score).values), short([value for _, value in quoted])],
            "y": [shown, [name for name, _ in quoted]],
        }
    figure = lines(frames, ["ours", "paper"], [COLOURS[1], INK])
    figure.data[0].update(mode="markers", marker={"size": 10})
    figure.data[1].update(mode="markers", marker=PAPER_MARK)
    finish(figure, "rank correlation ρ with M", "", 130 + 34 * len(shown))
    figure.update_xaxes(range=[-1.05, 1.05])
    figure.add_vline(x=0, line={"color": FAINT, "width": 1})
    rows_down(figure, shown, [name.replace(", ", "<br>", 1) for name in shown])
    caption = "Does the score order the candidates of a system as the largest change M that they really made?"
    return Drawing("lm-ranking", "Who matters most", caption, figure, ("score",), frames)


def _channels(found: Candidates) -> Drawing:
    size = abs(found.data["channel_exact"])
    x = size["horizon"].values.tolist()
    frames = {
        name: {
            "x": [x for _ in CHANNELS],
            "y": [positive(size.isel(system=i).sel(channel=channel).values) for channel in CHANNELS],
        }
        for i, name in enumerate(names(found))
    }
    figure = lines(frames, list(CHANNELS.values()), [*COLOURS[1:7], INK])
    finish(figure, HORIZON_TITLE, "|change of the probe's loss|")
    decades(figure)
    caption = (
        "The first candidate's difference let into only some of θ, m and v, then run on exactly. m without its v "
        "divides new gradients by an old second moment, which is tiny for rows of rare tokens."
    )
    return Drawing("lm-channels", "Through which memory", caption, figure, ("system",), frames)


def _add_paper(figure: Figure, table: str, column: str, rows: list[str], name: str) -> None:
    quotes = TABLES[table].quotes()
    quoted = [(row, quotes[row, column].value) for row in rows if (row, column) in quotes]
    if quoted:
        x, y = [value for _, value in quoted], [row for row, _ in quoted]
        figure.add_scatter(x=x, y=y, mode="markers", name=name, marker=PAPER_MARK)
