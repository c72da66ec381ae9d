"""The ± of measured numbers: how far replays of the unchanged run are apart in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .event import Event
from .replay import Replay


@dataclass(frozen=True)
class Scatter:
    """How far apart replays of the unchanged run, and the recording, are in the numbers that are told of other runs;
    NaN where the run repeats itself.

    Each is the number itself asked of the unchanged run, such as what is left of the event, which should be 1. A run
    with something changed scatters about as much where it keeps the event, and less where it does not.
    """

    value: tuple[float, ...]  # at each step of the path
    left: float  # of the event
    peak: float
    after: float  # of the mean of the last values
    step: int  # place in the path of the explained value

    @classmethod
    def of(cls, replayed: Replay, event: Event) -> Scatter:
        """No further run is made."""
        runs = [dict(enumerate(values)) for values in replayed.runs(event.quantity)]

        def spread(number: Callable[[dict[int, float]], float]) -> float:
            return apart([number(run) for run in runs]) if len(runs) > 1 else math.nan

        value = tuple(spread(lambda run, i=i: run[i]) for i in range(len(event.values)))  # type: ignore[misc]
        return cls(value, spread(event.left), spread(event.height), spread(event.after), event.step)

    @property
    def explained(self) -> float:
        """Of the explained value, and of what a step adds to it."""
        return self.value[self.step]

    @property
    def known(self) -> bool:
        return not math.isnan(self.left)


def apart(values: Sequence[float]) -> float:
    """How far the outermost are from each other; nothing where all are the same, infinite ones too."""
    return 0.0 if min(values) == max(values) else max(values) - min(values)


def told(scatter: float, own: float) -> float:
    """The ± of a number: how far replays of the unchanged run are apart in it, or, where that is more, the two runs
    that it was measured in. NaN where the run repeats itself."""
    return math.nan if math.isnan(scatter) else max(scatter, own)
