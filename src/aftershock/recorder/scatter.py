"""The ± of measured numbers: how far runs of one thing that differ by a rounding are apart in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .quantity import Quantity
from .replay import Replay
from .reruns import Values


@dataclass(frozen=True)
class Scatter:
    """The values of the unchanged run, of every replay and of the recording; one alone where the run repeats itself.

    The ± of a number that is measured in another run is how far apart these are in the same number, such as what is
    left of the event, which should be 1. A run with something changed scatters about as much where it keeps the event,
    and less where it does not. No further run is made for it.
    """

    runs: tuple[Values, ...] = ()

    @classmethod
    def of(cls, replayed: Replay, quantity: Quantity) -> Scatter:
        return cls(tuple(dict(enumerate(values)) for values in replayed.runs(quantity)))

    @property
    def known(self) -> bool:
        """Does the run not repeat itself?"""
        return len(self.runs) > 1

    def spread(self, number: Callable[[Values], float], like: Values | None = None) -> float:
        """The ± of a number of a run; NaN where the run repeats itself.

        like: the values of the run that it was measured in, at whose steps alone the others are looked at, too.
        """
        if not self.known:
            return math.nan
        runs = self.runs if like is None else [{i: run[i] for i in like} for run in self.runs]
        return apart(*(number(run) for run in runs))


def apart(*values: float) -> float:
    """How far the outermost are from each other; nothing where all are the same, infinite ones too."""
    return 0.0 if min(values) == max(values) else max(values) - min(values)
