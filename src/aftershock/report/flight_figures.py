"""Pictures of an explained flight: its course, the runs that differ, suspects and placebos."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from ..recorder.event import BARS
from ..recorder.explanation import OFF_SCALE, shown_size
from ..recorder.facts import EventFacts
from ..recorder.verdict import CALM
from ..recorder.words import plus_minus, share
from .looks import COLOURS, FAINT, INK, RULE, VEIL, WIDE, gaps, key_above, style, upright

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ..recorder.explanation import Culprit, FlightExplanation
    from ..recorder.other_runs import OtherRun

RAISES, LOWERS, SPARED = COLOURS[0], COLOURS[1], COLOURS[2]
BAND = "rgba(107, 114, 128, 0.14)"  # what is usual
EVENT = "rgba(200, 67, 43, 0.07)"  # the stretch of the event
USUAL_UPDATE = (0.5, 1.2)  # RMS of g/√v̂ of ordinary steps
BACK = 16  # steps before the event in the picture of treatments: the earliest that one of them touches
MOST_LEFT = 2.0  # of the event: runs that leave more have an arrow for a mark
Mark = tuple[int, float, float, bool]  # a step, what is left without it, its ±, and whether that is the least
FRAME = 1.6  # times the largest measured effect: a prediction beyond it is not drawn


def course_figure(found: FlightExplanation) -> Figure:
    """What is explained, the loss or the gradient norm, with its usual band and the event; under it the other one,
    learning rate and update size."""
    from plotly.subplots import make_subplots

    data, event = found.data, found.facts.event
    both = {"loss": data["loss"].values, "gradient norm": data["norm"].values}
    rows = [*((name, values) for name, values in both.items() if name != found.quantity)]
    rows.append(("learning rate", data["lr"].values))
    if np.isfinite(data["update_size"].values).any():
        rows.append(("RMS of g/√v̂", data["update_size"].values))
    heights = [2.6, *([1.0] * len(rows))]
    figure = make_subplots(rows=len(heights), cols=1, shared_xaxes=True, vertical_spacing=0.035, row_heights=heights)
    _add_course(figure, found)
    steps = data["place"].values.tolist()
    for row, (name, values) in enumerate(rows, start=2):
        figure.add_scatter(
            x=steps,
            y=gaps(values),
            mode="lines+markers",
            line={"color": FAINT, "width": 1.5},
            marker={"size": 3},
            hovertemplate=f"step %{{x}}: {name} %{{y:.4g}}<extra></extra>",
            row=row,
            col=1,
        )
    _styled_rows(figure, [found.quantity, *(name for name, _ in rows)], 360 + 115 * len(rows))
    for row, values in enumerate([found.course, *(values for _, values in rows)], start=1):
        _scaled(figure, values, row)
    if len(rows) == 3:
        figure.add_hrect(
            y0=USUAL_UPDATE[0], y1=USUAL_UPDATE[1], line_width=0, fillcolor=BAND, layer="below", row=4, col=1
        )
    if event.kind not in CALM:
        _shade_event(figure, event, "all")
    _mark_steps(figure, found)
    return figure


def _add_course(figure: Figure, found: FlightExplanation) -> None:
    data, event, course = found.data, found.facts.event, found.course
    figure.add_scatter(
        x=data["place"].values.tolist(),
        y=gaps(course),
        error_y=upright(data["spread"].values.tolist(), FAINT),
        customdata=list(zip(data["batch_index"].values[:, 0].tolist(), _spreads(found))),
        mode="lines+markers",
        line={"color": INK, "width": 1.5},
        marker={"size": 4},
        hovertemplate=(
            f"step %{{x}}, batch %{{customdata[0]}}: {found.quantity} %{{y:.4g}}%{{customdata[1]}}<extra></extra>"
        ),
        row=1,
        col=1,
    )
    figure.add_scatter(
        x=[event.explained],
        y=[event.value],
        mode="markers",
        marker={"size": 13, "color": "rgba(0,0,0,0)", "line": {"color": RAISES, "width": 2.5}},
        hoverinfo="skip",
        row=1,
        col=1,
    )
    if not np.isfinite(course).any():
        return
    low = max(event.usual - BARS.gone * event.sigma, float(np.nanmin(course)))
    high = event.usual + BARS.gone * event.sigma
    figure.add_hrect(y0=low, y1=high, line_width=0, fillcolor=BAND, layer="below", row=1, col=1)


def _spreads(found: FlightExplanation) -> list[str]:
    """The ± of each value of the run, in words."""
    return [plus_minus(spread) for spread in found.data["spread"].values.tolist()]


def _mark_steps(figure: Figure, found: FlightExplanation) -> None:
    """An upright line at each step that the verdict names, its number above the frame."""
    asked = found.facts.event.asked
    marks = {step: f"step {step}" for step in found.blamed}
    if found.kind == "not a number":
        marks = {asked: f"step {asked}: not finite"}
    for i, (step, text) in enumerate(sorted(marks.items())):
        figure.add_vline(x=step, line={"color": RAISES, "width": 1.5, "dash": "dash"}, row="all", col=1)
        late = step > float(np.mean(found.data["place"].values))
        figure.add_annotation(
            x=step,
            y=1,
            yref="y domain",
            text=text,
            showarrow=False,
            xanchor="right" if late else "left",
            yanchor="bottom",
            yshift=15 * i,
            font={"color": RAISES, "size": 12},
        )


def treatment_figure(found: FlightExplanation, runs: Sequence[OtherRun]) -> Figure:
    """The run as it was, and the runs that are spared the event."""
    import plotly.graph_objects as go

    event, steps = found.facts.event, found.data["place"].values.tolist()
    start = max(0, steps.index(event.onset) - BACK)
    figure, spreads = go.Figure(), _spreads(found)[start:]
    others = [run for run in runs if not run.chosen]
    for i, run in enumerate(others):
        figure.add_scatter(
            x=steps[start:],
            y=gaps(run.values[start:]),
            mode="lines",
            line={"color": SPARED, "width": 1},
            opacity=0.45,
            name="others that prevent it",
            legendrank=3,
            legendgroup="others",
            showlegend=i == 0,
            customdata=spreads,
            hovertemplate=f"{escape(run.name)}<br>step %{{x}}: %{{y:.4g}}%{{customdata}}<extra></extra>",
        )
    figure.add_scatter(
        x=steps[start:],
        y=gaps(found.course[start:]),
        error_y=upright(found.data["spread"].values[start:].tolist(), FAINT),
        customdata=spreads,
        mode="lines+markers",
        marker={"size": 4},
        line={"color": INK, "width": 1.5},
        name="as it was",
        legendrank=1,
        hovertemplate="as it was, step %{x}: %{y:.4g}%{customdata}<extra></extra>",
    )
    for run in (run for run in runs if run.chosen):
        figure.add_scatter(
            x=steps[start:],
            y=gaps(run.values[start:]),
            mode="lines",
            line={"color": SPARED, "width": 3},
            name=escape(run.name),
            legendrank=2,
            connectgaps=True,
            customdata=spreads,
            hovertemplate=f"{escape(run.name)}<br>step %{{x}}: %{{y:.4g}}%{{customdata}}<extra></extra>",
        )
    style(figure, "step", found.quantity, height=380)
    if _wide(np.array([found.course[start:], *(run.values[start:] for run in runs)])):
        figure.update_yaxes(type="log", dtick=1, exponentformat="power")
    _shade_event(figure, event, None)
    key_above(figure)
    figure.update_layout(showlegend=True)
    return figure


def trial_figure(found: FlightExplanation, culprits: Sequence[Culprit], drawn: Sequence[Culprit]) -> Figure:
    """Runs without one step: what is left of the event, and under it what the step added to the explained value.

    drawn: the steps whose predictions are drawn.
    """
    from plotly.subplots import make_subplots

    tried = any(c.role for c in culprits)
    heights = [1.15, 1.0] if tried else [1.0]
    figure = make_subplots(rows=len(heights), cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=heights)
    if tried:
        _add_left(figure, found, culprits)
    _add_parts(figure, culprits, drawn, len(heights))
    titles = ["left of the event"] if tried else []
    _styled_rows(figure, [*titles, f"added at step {found.facts.event.explained}"], 200 + 190 * len(heights))
    if tried:
        most = max([1.0, *(min(c.left, MOST_LEFT) for c in culprits if not math.isnan(c.left))])
        figure.update_yaxes(range=[-0.05, 1.1 * most], tickformat=".0%", row=1, col=1)
    largest = _largest(found, culprits)
    if any(abs(c.measured) > largest for c in culprits):
        figure.update_yaxes(range=[-largest, largest], row=len(heights), col=1)
    figure.update_layout(barmode="overlay", showlegend=tried)
    key_above(figure)
    return figure


def _add_left(figure: Figure, found: FlightExplanation, culprits: Sequence[Culprit]) -> None:
    """What is left without each step that was tried, and without a group together."""
    explained, blame = found.facts.event.explained, found.facts.blame
    marks: dict[str, list[Mark]] = {"placebo": [], "suspect": [], "blamed": []}
    for c in (c for c in culprits if c.role):
        marks["blamed" if c.step in blame.blamed else c.role].append((c.step, c.left, c.left_spread, c.left_so_far))
    if explained in blame.blamed:  # it is no culprit of its own loss
        marks["blamed"].append((explained, blame.own_left, blame.own_left_spread, blame.own_left_so_far))
    _add_marks(figure, "without a placebo", marks["placebo"], symbol="diamond-open", colour=FAINT)
    _add_marks(figure, "without a suspect", marks["suspect"], symbol="circle", colour=LOWERS)
    _add_marks(figure, "without a blamed step", marks["blamed"], symbol="circle", colour=RAISES)
    if blame.group and blame.blamed:
        together = [(step, blame.group_left, blame.group_left_spread, False) for step in blame.group]
        name = "other batches at all that are blamed" if blame.group_replaced else "without all that are blamed"
        _add_marks(figure, name, together, symbol="square", colour=RAISES, mode="lines+markers")
    figure.add_hline(
        y=BARS.half,
        line={"color": SPARED, "width": 1.5, "dash": "dash"},
        annotation={"text": "half is gone below", "font": {"color": "#1f6b54", "size": 12}, "bgcolor": VEIL},
        annotation_position="bottom left",
        row=1,
        col=1,
    )
    figure.add_hline(y=1, line={"color": FAINT, "width": 1, "dash": "dot"}, row=1, col=1)


def _add_marks(
    figure: Figure, name: str, tried: Sequence[Mark], *, symbol: str, colour: str, mode: str = "markers"
) -> None:
    """What is more than the frame holds has an arrow for a mark, a full one what is at least so much."""
    if not tried:
        return
    beyond = [not left <= MOST_LEFT for _, left, _, _ in tried]
    words = [
        f"more than {MOST_LEFT:.0%}" if far else share(left, spread, so_far=so_far)
        for (_, left, spread, so_far), far in zip(tried, beyond)
    ]
    symbols = [
        "triangle-up-open" if far else "triangle-up" if so_far else symbol
        for (_, _, _, so_far), far in zip(tried, beyond)
    ]
    figure.add_scatter(
        x=[step for step, _, _, _ in tried],
        y=[MOST_LEFT if far else left for (_, left, _, _), far in zip(tried, beyond)],
        error_y=upright([math.nan if far else spread for (_, _, spread, _), far in zip(tried, beyond)], colour),
        customdata=words,
        mode=mode,
        line={"color": colour, "width": 1.5, "dash": "dot"},
        marker={
            "color": colour,
            "size": 10,
            "line": {"width": 2},
            "symbol": symbols,
        },
        name=name,
        hovertemplate=f"step %{{x}}, {name}: %{{customdata}} is left<extra></extra>",
        row=1,
        col=1,
    )


def _add_parts(figure: Figure, culprits: Sequence[Culprit], drawn: Sequence[Culprit], row: int) -> None:
    """Measured numbers as bars, predictions behind them."""
    measured = [c for c in culprits if math.isfinite(c.measured)]
    for name, some, width, opacity in (("predicted", drawn, 0.9, 0.28), ("measured", measured, 0.5, 1.0)):
        values = [c.predicted if name == "predicted" else c.measured for c in some]
        spreads = [c.measured_spread if name == "measured" else math.nan for c in some]
        figure.add_bar(
            x=[c.step for c in some],
            y=values,
            width=width,
            opacity=opacity,
            error_y=upright(spreads, INK),
            customdata=[plus_minus(spread) for spread in spreads],
            marker={"color": [RAISES if value > 0 else LOWERS for value in values]},
            showlegend=False,
            name=name,
            hovertemplate=f"step %{{x}}: {name} %{{y:+.4g}}%{{customdata}}<extra></extra>",
            row=row,
            col=1,
        )
    figure.add_hline(y=0, line={"color": FAINT, "width": 1}, row=row, col=1)


def drawable(found: FlightExplanation, culprits: Sequence[Culprit]) -> list[Culprit]:
    """The steps whose prediction has a size that may be drawn beside what is measured."""
    limit = _largest(found, culprits)
    return [c for c in culprits if abs(shown_size(c.predicted, found)) <= limit]


def _largest(found: FlightExplanation, culprits: Sequence[Culprit]) -> float:
    """The largest part that is drawn whole: a run that went away without some step must not flatten the others."""
    measured = [abs(c.measured) for c in culprits if abs(c.measured) <= OFF_SCALE * found.facts.event.peak]
    return max([found.size, *(FRAME * value for value in measured)])


# --- how to show it


def _styled_rows(figure: Figure, titles: Sequence[str], height: int) -> None:
    """Every row with its own title, one x axis for all."""
    style(figure, "", "", height=height)
    axis = {"gridcolor": RULE, "linecolor": FAINT, "zeroline": False, "ticks": "outside", "tickcolor": FAINT}
    figure.update_xaxes(**axis)
    figure.update_xaxes(title_text="step", row=len(titles), col=1)
    for row, title in enumerate(titles, start=1):
        figure.update_yaxes(
            **axis,
            automargin=True,
            nticks=6 if row == 1 else 4,
            title={"text": title, "standoff": 8, "font": {"size": 12}},
            row=row,
            col=1,
        )
    # a step is found by its column: small bars are hard to hit
    figure.update_layout(showlegend=False, hovermode="x", clickmode="event")


def _scaled(figure: Figure, values: np.ndarray, row: int) -> None:
    if _wide(values):
        figure.update_yaxes(type="log", dtick=1, exponentformat="power", row=row, col=1)
    elif row > 1:
        figure.update_yaxes(rangemode="tozero", row=row, col=1)


def _wide(values: np.ndarray) -> bool:
    """Do these need a logarithmic axis?"""
    known = values[np.isfinite(values)]
    return bool(known.size and known.min() > 0 and known.max() > WIDE * np.median(known))


def _shade_event(figure: Figure, event: EventFacts, rows: str | None) -> None:
    first, last = event.onset, event.end
    where = {} if rows is None else {"row": rows, "col": 1}
    figure.add_vrect(x0=first - 0.5, x1=last + 0.5, line_width=0, fillcolor=EVENT, layer="below", **where)
