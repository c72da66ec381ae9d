"""How figures on pages look: colours, axes, keys, and the gaps in their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLOURS = ("#c8432b", "#2f6db3", "#2e8b6f", "#b07c10", "#7b4fa3", "#4a9cc4", "#a3476b", "#6d7a2c")
ANSWER_COLOURS = {"semilinear": "#7b4fa3", "tangent": "#b07c10"}
DASHES = {"exact": "solid", "semilinear": "dashdot", "tangent": "dot"}
INK, FAINT, RULE = "#24292f", "#6b7280", "#e4e7eb"
VEIL = "rgba(255, 255, 255, 0.85)"  # behind words that curves may cross
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
TITLE = {"font": {"size": 12}, "standoff": 10}  # larger letters run past the height of a figure
HORIZON_TITLE = "states after the change (h)"
MARKED = 40  # horizons up to which every state has its own dot
SPAN = 1000  # up to which a logarithmic axis has room for more ticks than its powers of ten
WIDE = 20  # a loss so many times the control's needs a logarithmic axis


def style(figure: Figure, x_title: str, y_title: str, height: int = 460) -> None:
    """Paper, ink, grid and the titles of the axes."""
    axis = {
        "gridcolor": RULE,
        "linecolor": FAINT,
        "zeroline": False,
        "ticks": "outside",
        "tickcolor": FAINT,
        "automargin": True,
    }
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 70, "r": 20, "t": 34, "b": 56},
        font={"family": FONT, "size": 13, "color": INK},
        paper_bgcolor="white",
        plot_bgcolor="white",
        hovermode="closest",
        xaxis={**axis, "title": {"text": x_title, **TITLE}},
        yaxis={**axis, "title": {"text": y_title, **TITLE}},
    )


def whole_horizons(figure: Figure, count: int) -> None:
    """A dozen ticks at most, and none between two states."""
    figure.update_xaxes(tick0=0, dtick=-(-count // 12), range=[0.5, count + 0.5])


def key_above(figure: Figure) -> None:
    """The key as a line over the picture."""
    figure.update_layout(
        legend={
            "orientation": "h",
            "traceorder": "normal",
            "yanchor": "bottom",
            "y": 1.02,
            "xanchor": "left",
            "x": 0,
        }
    )


def decades(figure: Figure) -> None:
    """A logarithmic vertical axis with a tick at every power of ten."""
    figure.update_yaxes(type="log", exponentformat="power", dtick=1)


def log_ticks(values: Iterable[float | None]) -> dict[str, Any]:
    """A logarithmic axis for these values, every tick with its whole number: 1, 2 and 5 where they span little."""
    known = [value for value in values if value is not None]
    low, high = (min(known), max(known)) if known else (1.0, 10.0)
    digits = (1, 2, 5) if high < SPAN * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [(digit, power) for power in powers for digit in digits]
    return {
        "type": "log",
        "tickvals": [digit * 10.0**power for digit, power in ticks],
        "ticktext": [_tick(digit, power) for digit, power in ticks],
    }


def _tick(digit: int, power: int) -> str:
    if abs(power) <= 2:
        return f"{digit * 10.0**power:g}"
    factor = "" if digit == 1 else f"{digit}·"
    return f"{factor}10<sup>{str(power).replace('-', '−')}</sup>"


def scale_axis(figure: Figure, scales: Sequence[float]) -> None:
    """A logarithmic horizontal axis with a tick at every scale that was run."""
    figure.update_xaxes(type="log", tickvals=list(scales), ticktext=[f"{scale:g}" for scale in scales])


def zero_line(figure: Figure) -> None:
    figure.add_hline(y=0, line={"color": FAINT, "width": 1})


def gaps(values: Iterable[float]) -> list[float | None]:
    """Numbers for a drawing, in which what is not finite is a gap."""
    return [float(value) if math.isfinite(value) else None for value in values]


def upright(spreads: Sequence[float], colour: str) -> dict[str, Any]:
    """The ± of points or bars as upright lines; none where there is none."""
    known = any(spread > 0 for spread in spreads)
    return {"array": gaps(spreads), "color": colour, "thickness": 1, "width": 3} if known else {}
