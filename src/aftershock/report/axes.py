"""Panels of the figures that are files: how many, how large, their colours, and how each is finished."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..extras import require

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours can be told apart with every kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
HORIZON, LOSS = "horizon h (states after the change)", "change of the probe's loss"
SCALE = "scale α of the shock"


def grid(rows: int, columns: int, height: float = 2.6) -> tuple[Figure, Any]:
    require("matplotlib", "report", "figures as files")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * columns + 0.4, height * rows + 0.3), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def finish(axis: Axes, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def key(axis: Axes) -> None:
    axis.legend(frameon=False, fontsize=7)


def scale_ticks(axis: Axes, scales: np.ndarray) -> None:
    """A tick at every scale that was run, and none between."""
    axis.set_xticks(scales, [f"{scale:g}" for scale in scales])
    axis.set_xticks([], minor=True)
