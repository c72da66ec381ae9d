"""Panels of the figures that are files: how many, how large, and how each is finished."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def grid(rows: int, columns: int, share_y: bool = False, height: float = 2.6) -> tuple[Figure, Any]:
    require("matplotlib", "report", "figures as files")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * columns + 0.4, height * rows + 0.3), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=share_y)


def finish(axis: Axes, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
