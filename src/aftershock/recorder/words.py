"""Numbers as they are read: a share of the event, a number with its ±."""

from __future__ import annotations

import math


def percent(left: float, spread: float = math.nan, *, so_far: bool = False) -> str:
    """A share that is left of an event: not nothing."""
    if math.isinf(left):
        return "infinitely much (it diverges)"
    less = left < 0.01 and not spread > 0
    return "less than 1%" if less else share(left, spread, so_far=so_far)


SO_FAR = "≥: at least so much; the run ended once half of the event was there."
LESS_OWN = "Where a step inside the event was left out, what stays is a share of the event less that step's own value."


def share(left: float, spread: float, *, so_far: bool) -> str:
    """A share of the event, such as 68% ± 2%, or ≥ 52% where the run ended early."""
    return f"≥ {at_least(left, spread)}" if so_far else f"{left:.0%}{share_spread(spread)}"


def at_least(left: float, spread: float = math.nan) -> str:
    """A share that is at least so much: rounded down, else it might not be."""
    down = math.floor(100 * left) / 100 if math.isfinite(left) else left
    return f"{down:.0%}{share_spread(spread)}"


def share_spread(spread: float) -> str:
    """The ± of a share; nothing where there is none."""
    if not spread > 0:
        return ""
    return f" ± {spread:.0%}" if spread >= 0.1 else f" ± {100 * spread:.2g}%"


def plus_minus(spread: float) -> str:
    """The ± of a number; nothing where there is none."""
    return f" ± {spread:.2g}" if spread > 0 else ""
