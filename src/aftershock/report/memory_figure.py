"""The picture of a frozen memory: how a write into m or v comes out, and the poles that shape it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..studies.cells import minus
from .looks import COLOURS, FAINT, FONT, HORIZON_TITLE, INK, MARKED, RULE

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ..theory.frozen import FrozenMemory

CHANNEL_COLOURS = {"m": COLOURS[1], "v": COLOURS[3]}
MARGIN = 0.12  # of the complex plane, around the unit circle and whatever lies outside it


def memory_figure(memory: FrozenMemory, horizons: int = 40) -> Figure:
    """r_m(h) and r_v(h), each on its own axis with its peak marked, beside the poles and the unit circle."""
    from plotly.subplots import make_subplots

    word = "stable" if memory.stable else "not stable"
    figure = make_subplots(
        rows=2,
        cols=2,
        specs=[[{}, {"rowspan": 2}], [{}, None]],
        column_widths=[0.58, 0.42],
        horizontal_spacing=0.11,
        vertical_spacing=0.14,
        shared_xaxes=True,
        subplot_titles=(
            "what a unit in m does to the parameter, r_m(h)",
            f"poles: {word}, ρ = {memory.spectral_radius:.4g}",
            "what a unit in v does to the parameter, r_v(h)",
        ),
    )
    _add_responses(figure, memory, horizons)
    _add_poles(figure, memory)
    axis = {"gridcolor": RULE, "linecolor": FAINT, "zeroline": False, "ticks": "outside", "tickcolor": FAINT}
    figure.update_xaxes(**axis, title_font_size=13)
    figure.update_yaxes(**axis, title_font_size=13, exponentformat="power")
    figure.update_annotations(font={"size": 13, "color": INK})
    figure.update_layout(
        template="none",
        height=540,
        margin={"l": 80, "r": 20, "t": 46, "b": 90},
        font={"family": FONT, "size": 13, "color": INK},
        paper_bgcolor="white",
        plot_bgcolor="white",
        legend={"orientation": "h", "x": 1, "y": -0.13, "xanchor": "right", "yanchor": "top"},
    )
    return figure


def _add_responses(figure: Figure, memory: FrozenMemory, horizons: int) -> None:
    response, peaks = memory.response(horizons), memory.peak(horizons)
    for row, (channel, colour) in enumerate(CHANNEL_COLOURS.items(), start=1):
        values, peak = response.sel(channel=channel), peaks.sel(channel=channel)
        at, settled = int(peak["peak_horizon"]), bool(peak["settled"])
        figure.add_scatter(
            x=values["horizon"].values,
            y=values.values,
            mode="lines+markers" if horizons <= MARKED else "lines",
            line={"color": colour, "width": 2.5},
            marker={"size": 5},
            showlegend=False,
            hovertemplate=f"h = %{{x}}: r_{channel} = %{{y:+.4g}}<extra></extra>",
            row=row,
            col=1,
        )
        height = float(values.sel(horizon=at))
        figure.add_scatter(
            x=[at] if height else [],  # a channel that never comes out has no peak
            y=[height] if height else [],
            mode="markers+text",
            marker={"size": 13, "color": "rgba(0,0,0,0)", "line": {"color": colour, "width": 2}},
            text=minus(f"{height:+.3g} at h = {at}") + ("" if settled else ", so far"),
            textposition=("top" if height >= 0 else "bottom") + (" right" if at < horizons / 2 else " left"),
            textfont={"color": colour, "size": 12},
            showlegend=False,
            hoverinfo="skip",
            row=row,
            col=1,
        )
        figure.add_hline(y=0, line={"color": FAINT, "width": 1}, row=row, col=1)
        low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
        room = 0.2 * (high - low) or 1.0  # for the words beside the peak
        figure.update_yaxes(range=[low - room, high + room], row=row, col=1)
    figure.update_xaxes(tick0=0, dtick=-(-horizons // 10), range=[0.5, horizons + 0.5], col=1)
    figure.update_xaxes(title={"text": HORIZON_TITLE}, row=2, col=1)


def _add_poles(figure: Figure, memory: FrozenMemory) -> None:
    angles = [2 * math.pi * i / 180 for i in range(181)]
    figure.add_scatter(
        x=[math.cos(t) for t in angles],
        y=[math.sin(t) for t in angles],
        mode="lines",
        line={"color": FAINT, "width": 1.5, "dash": "dash"},
        name="unit circle",
        hoverinfo="skip",
        row=1,
        col=2,
    )
    uncoupled = [memory.a, memory.beta1, memory.beta2]
    figure.add_scatter(
        x=uncoupled,
        y=[0.0] * 3,
        mode="markers",
        marker={"size": 11, "color": "rgba(0,0,0,0)", "line": {"color": FAINT, "width": 1.5}},
        name="without feedback (a, β1, β2)",
        text=["a", "β1", "β2"],
        hovertemplate="%{text} = %{x:.4g}<extra></extra>",
        row=1,
        col=2,
    )
    figure.add_scatter(
        x=memory.poles.real,
        y=memory.poles.imag,
        mode="markers",
        marker={"size": 10, "symbol": "x-thin", "line": {"color": COLOURS[0], "width": 2.5}},
        name="poles",
        customdata=abs(memory.poles),
        hovertemplate="%{x:.4g} %{y:+.4g} i, |λ| = %{customdata:.4g}<extra></extra>",
        row=1,
        col=2,
    )
    reach = (1 + MARGIN) * max(1.0, memory.spectral_radius, *(abs(x) for x in uncoupled))
    figure.update_xaxes(title={"text": "real part"}, range=[-reach, reach], constrain="domain", row=1, col=2)
    figure.update_yaxes(
        title={"text": "imaginary part"}, range=[-reach, reach], scaleanchor="x2", constrain="domain", row=1, col=2
    )
