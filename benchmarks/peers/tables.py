"""The tables that are printed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from rich.table import Table

from .scores import Judged
from .unrolled import Measured


def adjoints(found: Sequence[Measured], steps: int) -> Table:
    table = Table(title=f"The adjoint of {steps} steps (g: one plain gradient)", title_justify="left")
    for name in ("model", "side"):
        table.add_column(name)
    for name in ("time, g", "peak, MiB", "not finite", "difference in float64"):
        table.add_column(name, justify="right")
    for one in found:
        lost = f"{one.not_finite:,} of {one.values:,}" if one.not_finite else "0"
        same = one.side == found[0].side
        table.add_row(
            one.window, one.side, f"{one.gradients:.0f}", f"{one.mebibytes:.0f}", lost,
            "" if same else f"{one.difference:.0e}",
        )  # fmt: skip
    return table


def judgements(found: Sequence[Judged], steps: int) -> Table:
    """Every window, then each side's medians."""
    title = f"What each of {steps} steps did to a held-out batch, against exact leave-one-out"
    table = Table(title=title, title_justify="left")
    for name in ("window", "side"):
        table.add_column(name)
    for name in ("rank correlation", "of sizes", "top-1", "error in sum", "time, g"):
        table.add_column(name, justify="right")
    for window in dict.fromkeys(one.window for one in found):
        for one in (one for one in found if one.window == window):
            cells = (_number(one.rank), _number(one.size_rank), "yes" if one.top else "no", _percent(one.error))
            table.add_row(window, one.side, *cells, f"{one.gradients:.0f}")
        table.add_section()
    for side in dict.fromkeys(one.side for one in found):
        ours = [one for one in found if one.side == side]
        middle = [statistics.median(getattr(one, name) for one in ours) for name in ("rank", "size_rank", "error")]
        cells = (_number(middle[0]), _number(middle[1]), f"{sum(one.top for one in ours)}/{len(ours)}")
        cost = statistics.median(one.gradients for one in ours)
        table.add_row("median", side, *cells, _percent(middle[2]), f"{cost:.0f}")
    return table


def missing(lost: Mapping[str, str]) -> Table:
    table = Table(title="Not compared", title_justify="left")
    table.add_column("peer")
    table.add_column("why")
    for name, reason in lost.items():
        table.add_row(name, reason)
    return table


def _number(value: float) -> str:
    return f"{value:.2f}"


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0%}"
