"""Pictures of an explained flight: the loss, what each step added to it, when, through which memory and layer."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from .figures import COLOURS, FAINT, INK, VEIL, WIDE, gaps, key_above, style

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ..recorder.explanation import Culprit, FlightExplanation

SHOWN = 8  # batches or layers in one picture
RAISES, LOWERS = COLOURS[0], COLOURS[1]
CHANNELS = {"theta": ("θ", "#2f6db3"), "m": ("m", "#7b4fa3"), "v": ("v", "#b07c10")}
KINDS = {
    "replace": "against its neighbours",
    "zero": "against a zero gradient",
    "skip": "against no step",
    "lr": "against the old learning rate",
    "reset m": "against an empty m",
    "reset v": "against an empty v",
}
FRAME = 1.6  # times the largest effect of the first step: what leaves the frame must not flatten it


def loss_figure(found: FlightExplanation, marked: Culprit | None) -> Figure:
    """The recorded loss of the window and the step that is explained, the usual level and the culprit."""
    import plotly.graph_objects as go

    attrs, data = found.data.attrs, found.data
    steps = [*data["step"].values.tolist(), attrs["step"]]
    more = np.stack([data["norm"].values, data["lr"].values, data["batch_index"].values], axis=-1).tolist()
    figure = go.Figure()
    figure.add_scatter(
        x=steps,
        y=[*data["loss"].values.tolist(), attrs["loss"]],
        customdata=[*more, [None, None, attrs["batches"][str(attrs["step"])][0]]],
        mode="lines+markers",
        line={"color": INK, "width": 1.5},
        marker={"size": 4},
        name="loss",
        hovertemplate=(
            "step %{x}, batch %{customdata[2]}<br>loss %{y:.4g}<br>gradient norm %{customdata[0]:.3g}"
            "<br>learning rate %{customdata[1]:.3g}<extra></extra>"
        ),
    )
    figure.add_scatter(
        x=[attrs["step"]],
        y=[attrs["loss"]],
        mode="markers",
        marker={"size": 13, "color": "rgba(0,0,0,0)", "line": {"color": RAISES, "width": 2.5}},
        name="explained",
        hoverinfo="skip",
    )
    low = max(attrs["baseline"] - 3 * attrs["sigma"], min(data["loss"].values))
    high = attrs["baseline"] + 3 * attrs["sigma"]
    figure.add_hrect(
        y0=low,
        y1=high,
        line_width=0,
        fillcolor="rgba(107, 114, 128, 0.12)",
        layer="below",
    )
    if marked is not None:
        _upright(figure, marked.step, f"step {marked.step}")
    style(figure, "step", "loss", height=340)
    losses = data["loss"].values
    if losses.min() > 0 and losses.max() > WIDE * attrs["baseline"]:
        figure.update_yaxes(type="log", dtick=1, exponentformat="power")
    key_above(figure)
    return figure


def contribution_figure(found: FlightExplanation) -> Figure:
    """What each step added to the explained loss, signed, for one kind of change at a time; a menu chooses it."""
    import plotly.graph_objects as go

    kinds = [kind for kind in KINDS if _says_something(found, kind)]
    steps = found.data["step"].values.tolist()
    figure = go.Figure()
    for i, kind in enumerate(kinds):
        total = found.data["contribution"].sel({"change": kind}).sum("channel").values
        figure.add_bar(
            x=steps,
            y=gaps(total),
            marker={"color": [RAISES if value > 0 else LOWERS for value in total]},
            name="predicted",
            visible=i == 0,
            hovertemplate="step %{x}: predicted %{y:+.4g}<extra></extra>",
        )
        figure.add_scatter(
            x=steps,
            y=gaps(found.data["measured"].sel({"change": kind}).values),
            mode="markers",
            marker={"symbol": "diamond-open", "size": 10, "color": INK, "line": {"width": 2}},
            name="measured by running again",
            visible=i == 0,
            hovertemplate="step %{x}: measured %{y:+.4g}<extra></extra>",
        )
    style(figure, "step", "added to the loss", height=400)
    figure.add_hline(y=0, line={"color": FAINT, "width": 1})
    _menu(figure, kinds)
    figure.update_layout(bargap=0.15, showlegend=False, margin={"t": 56})
    return figure


def emergence_figure(found: FlightExplanation) -> Figure:
    """How much of each verified step's effect had arrived at each later step, measured."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, step in enumerate(found.data.attrs["order"][:SHOWN]):
        curve = found.data["emergence"].sel({"step": step}).values
        curve = curve[: found.data.attrs["step"] - step]
        figure.add_scatter(
            x=[step + 1 + h for h in range(len(curve))],
            y=gaps(curve),
            mode="lines+markers",
            marker={"size": 5},
            line={"color": COLOURS[i % len(COLOURS)], "width": 2},
            name=f"step {step}",
            hovertemplate=f"step {step} added %{{y:+.4g}} to the loss of step %{{x}}<extra></extra>",
        )
    figure.add_hline(y=0, line={"color": FAINT, "width": 1})
    style(figure, "step whose loss it is", "added to that loss", height=360)
    figure.update_layout(showlegend=True)
    curves = found.data["emergence"].sel({"step": found.data.attrs["order"]}).values
    limit = FRAME * float(np.nanmax(np.abs(curves[0])))
    low, high = max(-limit, float(np.nanmin(curves))), min(limit, float(np.nanmax(curves)))
    if np.isfinite(limit) and high > low:
        figure.update_yaxes(range=[min(low, 0) - 0.06 * (high - low), high + 0.06 * (high - low)])
    key_above(figure)
    return figure


def channel_figure(found: FlightExplanation) -> Figure:
    """Where the effect of the top steps lay right after them: in the weights, or waiting in m or v."""
    import plotly.graph_objects as go

    top = found.culprits[:SHOWN]
    figure = go.Figure()
    for name, (label, colour) in CHANNELS.items():
        figure.add_bar(
            x=[f"step {c.step}" for c in top],
            y=[c.channels[name] for c in top],
            name=f"in {label}",
            marker={"color": colour},
            hovertemplate=f"%{{x}}, in {label}: %{{y:+.4g}}<extra></extra>",
        )
    style(figure, "", "added to the loss (predicted)", height=340)
    figure.add_hline(y=0, line={"color": FAINT, "width": 1})
    figure.update_layout(barmode="relative", bargap=0.35)
    key_above(figure)
    return figure


def layer_figure(found: FlightExplanation, step: int) -> Figure:
    """Through which layers a step acted."""
    import plotly.graph_objects as go

    values = found.data["layer_contribution"].sel({"change": found.data.attrs["ranked_by"], "step": step})
    order = np.argsort(-np.abs(values.values))[: 2 * SHOWN][::-1]
    names = [str(values["layer"].values[i]) for i in order]
    figure = go.Figure()
    figure.add_bar(
        y=[escape(name) for name in names],
        x=values.values[order].tolist(),
        orientation="h",
        marker={"color": [RAISES if values.values[i] > 0 else LOWERS for i in order]},
        hovertemplate="%{y}: %{x:+.4g}<extra></extra>",
    )
    style(figure, "added to the loss (predicted)", "", height=120 + 26 * len(names))
    figure.add_vline(x=0, line={"color": FAINT, "width": 1})
    figure.update_yaxes(type="category")
    return figure


def example_figure(culprit: Culprit) -> Figure:
    """Which examples of a batch carry its contribution."""
    import plotly.graph_objects as go

    shares = dict(culprit.examples)
    places = sorted(shares)
    figure = go.Figure()
    figure.add_bar(
        x=places,
        y=[shares[i] for i in places],
        marker={"color": [RAISES if shares[i] > 0 else LOWERS for i in places]},
        hovertemplate="example %{x}: %{y:+.4g}<extra></extra>",
    )
    style(figure, f"place in the batch of step {culprit.step}", "its share (predicted)", height=320)
    figure.add_hline(y=0, line={"color": FAINT, "width": 1})
    return figure


def _says_something(found: FlightExplanation, kind: str) -> bool:
    values = found.data["contribution"].sel({"change": kind}).values
    return bool(np.any(np.isfinite(values) & (values != 0)))


def _menu(figure: Figure, kinds: list[str]) -> None:
    """One entry per kind; each shows its own bars and marks."""
    buttons: list[dict[str, Any]] = [
        {
            "label": KINDS[kind],
            "method": "restyle",
            "args": [{"visible": [i // 2 == shown for i in range(2 * len(kinds))]}],
        }
        for shown, kind in enumerate(kinds)
    ]
    place = {"x": 0, "xanchor": "left", "y": 1.04, "yanchor": "bottom", "pad": {"l": 0, "t": 0}}
    figure.update_layout(updatemenus=[{"buttons": buttons, "bgcolor": "white", "bordercolor": "#c9ced6", **place}])


def _upright(figure: Figure, x: float, text: str) -> None:
    figure.add_vline(
        x=x,
        line={"color": RAISES, "width": 1.5, "dash": "dash"},
        annotation={"text": text, "font": {"color": RAISES, "size": 12}, "bgcolor": VEIL},
        annotation_position="top left",
    )
