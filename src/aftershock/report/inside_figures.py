"""Pictures of one step of a flight: when it did harm, where its effect waited, which layers and examples carried it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from ..recorder.explanation import shown_size
from .looks import COLOURS, FAINT, gaps, style, upright, zero_line

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ..recorder.explanation import Culprit, FlightExplanation

RAISES, LOWERS = COLOURS[0], COLOURS[1]
CHANNELS = {"theta": ("θ", "#2f6db3"), "m": ("m", "#7b4fa3"), "v": ("v", "#b07c10")}
LAYERS = 16


def emergence_figure(found: FlightExplanation, step: int) -> Figure:
    """What a step had added to each later loss or gradient norm, measured."""
    import plotly.graph_objects as go

    curve = found.data["emergence"].sel({"step": step}).values
    curve = curve[np.isfinite(curve)]
    later = found.data["spread"].sel(place=slice(step + 1, None)).values[: len(curve)]
    figure = go.Figure()
    figure.add_scatter(
        x=[step + 1 + h for h in range(len(curve))],
        y=curve.tolist(),
        error_y=upright(later.tolist(), FAINT),
        mode="lines+markers",
        marker={"size": 5},
        line={"color": RAISES, "width": 2},
        hovertemplate=f"step {step} added %{{y:+.4g}} to the {found.quantity} of step %{{x}}<extra></extra>",
    )
    zero_line(figure)
    style(figure, f"step whose {found.quantity} it is", "added to it", height=340)
    figure.update_xaxes(dtick=-(-len(curve) // 8))  # none between two steps
    return figure


def channel_figure(found: FlightExplanation, culprit: Culprit) -> Figure:
    """Where the effect of a step lay right after it: in the weights, or waiting in m or v."""
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.add_bar(
        y=[f"in {label}" for label, _ in CHANNELS.values()][::-1],
        x=gaps([shown_size(culprit.channels[name], found) for name in CHANNELS][::-1]),
        orientation="h",
        marker={"color": [colour for _, colour in CHANNELS.values()][::-1]},
        hovertemplate="%{y}: %{x:+.4g}<extra></extra>",
    )
    style(figure, f"added to the {found.quantity} (predicted)", "", height=200)
    figure.add_vline(x=0, line={"color": FAINT, "width": 1})
    return figure


def layer_figure(found: FlightExplanation, step: int) -> Figure:
    """Through which layers a step acted."""
    import plotly.graph_objects as go

    values = found.data["layer_contribution"].sel({"change": found.facts.blame.ranked_by, "step": step})
    order = np.argsort(-np.abs(values.values))[:LAYERS][::-1]
    names = [str(values["layer"].values[i]) for i in order]
    figure = go.Figure()
    figure.add_bar(
        y=[escape(name) for name in names],
        x=gaps([shown_size(value, found) for value in values.values[order].tolist()]),
        orientation="h",
        marker={"color": [RAISES if values.values[i] > 0 else LOWERS for i in order]},
        hovertemplate="%{y}: %{x:+.4g}<extra></extra>",
    )
    style(figure, f"added to the {found.quantity} (predicted)", "", height=120 + 26 * len(names))
    figure.add_vline(x=0, line={"color": FAINT, "width": 1})
    figure.update_yaxes(type="category")
    return figure


def example_figure(found: FlightExplanation, culprit: Culprit) -> Figure:
    """Which examples of a batch carry its contribution."""
    import plotly.graph_objects as go

    shares = dict(culprit.examples)
    places = sorted(shares)
    figure = go.Figure()
    figure.add_bar(
        x=places,
        y=gaps([shown_size(shares[i], found) for i in places]),
        marker={"color": [RAISES if shares[i] > 0 else LOWERS for i in places]},
        hovertemplate="example %{x}: %{y:+.4g}<extra></extra>",
    )
    style(figure, f"place in the batch of step {culprit.step}", "its share (predicted)", height=320)
    zero_line(figure)
    return figure
