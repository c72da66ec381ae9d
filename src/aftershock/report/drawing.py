"""A figure with choices: what each choice puts into its traces, and how such figures are begun and finished."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .looks import HORIZON_TITLE, INK, key_above, style

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr
    from plotly.graph_objects import Figure

Frame = dict[str, list[Any]]
HEIGHT = 320  # two of them fit on a sheet of paper
PAPER_MARK = {"symbol": "diamond-open", "size": 10, "color": INK}


@dataclass(frozen=True)
class Drawing:
    """A figure, and where it has choices, what each of them puts into its traces (`frames`, by "a|b|c")."""

    name: str
    heading: str
    caption: str
    figure: Figure
    choices: tuple[str, ...] = ()
    frames: Mapping[str, Frame] = field(default_factory=dict)


def short(values: Sequence[float | None] | np.ndarray) -> list[float | None]:
    """Four digits are what a screen shows; NaN is a gap."""
    return [float(f"{v:.4g}") if v is not None and math.isfinite(v) else None for v in values]


def positive(values: Sequence[float | None] | np.ndarray) -> list[float | None]:
    """The same for a logarithmic axis, which has no zero."""
    return [v if v is None or v > 0 else None for v in short(values)]


def lines(frames: Mapping[str, Frame], names: Sequence[str], colours: Sequence[str]) -> Figure:
    """A trace per name with the data of the first choice; a choice may carry names of its own."""
    import plotly.graph_objects as go

    first = next(iter(frames.values()))
    figure = go.Figure()
    for i, (name, colour) in enumerate(zip(first.get("name", names), colours)):
        figure.add_scatter(
            x=first["x"][i],
            y=first["y"][i],
            name=name,
            mode="lines+markers",
            marker={"size": 4, "color": colour},
            line={"color": colour, "width": 2},
        )
    return figure


def add_band(figure: Figure, name: str, found: xr.Dataset, colour: str) -> None:
    """A median by horizon as a line, its quartiles as a band."""
    x = found["horizon"].values.tolist()
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    figure.add_scatter(
        x=x + x[::-1],
        y=short([*found["q25"].values, *found["q75"].values[::-1]]),
        fill="toself",
        fillcolor=f"rgba({red}, {green}, {blue}, 0.14)",
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
    )
    figure.add_scatter(
        x=x,
        y=short(found["median"].values),
        name=name,
        mode="lines+markers",
        marker={"size": 4},
        line={"color": colour, "width": 2},
    )


def finish(figure: Figure, x_title: str, y_title: str, height: int = HEIGHT) -> None:
    style(figure, x_title, y_title, height)
    if x_title == HORIZON_TITLE:  # there is no state before the first
        figure.update_xaxes(autorangeoptions={"minallowed": 0.5})
    key_above(figure)


def rows_down(figure: Figure, rows: Sequence[str], texts: Sequence[str]) -> None:
    """Names down the side, the first at the top; texts: the same in two short lines, for a telephone."""
    figure.update_yaxes(
        range=[len(rows) - 0.5, -0.5], type="category", categoryorder="array", categoryarray=list(rows),
        tickvals=list(rows), ticktext=list(texts),
    )  # fmt: skip


def ramp(count: int) -> list[str]:
    """Light to dark, for what has an order."""
    from plotly.colors import sample_colorscale

    return sample_colorscale("Viridis", [0.85 - 0.8 * i / max(count - 1, 1) for i in range(count)], colortype="rgb")
