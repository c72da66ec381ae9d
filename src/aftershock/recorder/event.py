"""A spike is an event, not one loss: a stretch of losses above the usual, and how much another run leaves of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .triggers import FLATTEST, usual

BEFORE = 4  # steps before the explained one that belong to it: a spike that moves there is still one


@dataclass(frozen=True)
class Bars:
    """The numbers that decide a verdict."""

    gone: float = 3.0  # robust σ above the usual loss, below which there is no event
    little: float = 0.2  # of the event: what may be left of one that is gone
    half: float = 0.5  # of the event: what removes less does not explain it
    specific: float = 0.125  # of the placebos: if more of them do the same, the step is nothing special
    unspecific: float = 1 / 3  # of the placebos: from here on no more of them are asked
    together: int = 3  # steps that may be blamed at once: more are no culprits but a run that anything changes


BARS = Bars()


@dataclass(frozen=True)
class Event:
    """The losses from a little before the explained step to the last recorded one, against those before them.

    A run is measured by its excess, Σ max(0, ℓ − usual − 3σ), and by its peak, max ℓ − usual, over the stretch.
    """

    step: int  # place in the path of the loss that is explained
    losses: tuple[float, ...]  # of the whole path
    usual: float
    sigma: float

    @classmethod
    def of(cls, losses: Sequence[float], step: int) -> Event:
        middle, spread = usual(losses[:step])
        return cls(step, tuple(losses), middle, max(spread, FLATTEST * abs(middle)))

    @property
    def first(self) -> int:
        return max(1, self.step - BEFORE)

    @property
    def last(self) -> int:
        return len(self.losses) - 1

    @property
    def level(self) -> float:
        """Above it a loss is not usual."""
        return self.usual + BARS.gone * self.sigma

    @cached_property
    def peak(self) -> float:
        return self._peak(self.losses, None)

    @property
    def is_one(self) -> bool:
        return self.losses[self.step] > self.level

    @cached_property
    def onset(self) -> int:
        """The first step of the stretch whose loss is not usual."""
        return next((i for i in self.places if self.losses[i] > self.level), self.step)

    def left(self, run: Mapping[int, float], without: frozenset[int] = frozenset()) -> float:
        """What another run leaves of the event, by excess or peak, whichever is more; 1 is all of it.

        run: its losses by place in the path; where it has none, it is the path. without: steps whose batches it did
        not see, and whose losses do not count.
        """
        theirs = self._joined(run)
        parts = [(measure(theirs, without), measure(self.losses, without)) for measure in (self._excess, self._peak)]
        return max((max(now, 0.0) / was for now, was in parts if was > 0), default=0.0)

    def prevented(self, run: Mapping[int, float], without: frozenset[int] = frozenset()) -> bool:
        """No event is left anywhere in the stretch, nor a new one."""
        return self._peak(self._joined(run), without) <= max(BARS.gone * self.sigma, BARS.little * self.peak)

    def delayed(self, run: Mapping[int, float]) -> bool:
        """The event is there, but its peak comes later, and the explained loss is usual."""
        theirs = self._joined(run)
        late, was = (max(self.places, key=some.__getitem__) for some in (theirs, self.losses))
        return not self.prevented(run) and late > was and theirs[self.step] <= self.level

    def _joined(self, run: Mapping[int, float]) -> list[float]:
        found = [run.get(i, loss) for i, loss in enumerate(self.losses)]
        return [loss if math.isfinite(loss) else math.inf for loss in found]

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The steps of the stretch. One before the explained step with a larger loss is another event."""
        before = [i for i in range(self.first, self.step) if self.losses[i] <= self.losses[self.step]]
        return (*before, *range(self.step, self.last + 1))

    def _stretch(self, losses: Sequence[float], without: frozenset[int] | None) -> list[float]:
        return [losses[i] for i in self.places if i not in (without or ())]

    def _excess(self, losses: Sequence[float], without: frozenset[int] | None) -> float:
        return sum(max(0.0, loss - self.level) for loss in self._stretch(losses, without))

    def _peak(self, losses: Sequence[float], without: frozenset[int] | None) -> float:
        return max(self._stretch(losses, without), default=self.usual) - self.usual
