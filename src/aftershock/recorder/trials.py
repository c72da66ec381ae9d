"""The recorded run again without some steps, or with other batches in their place, and whom that lets one blame."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.dynamics import Step
from ..core.trajectory import Trajectory
from .event import BARS, Event, Remains
from .neighbours import Likeness
from .reruns import Run, Values, run_again
from .scatter import Scatter, apart

MOST = 14  # times the window: what runs without steps may cost, beyond which nothing further is looked for


@dataclass(frozen=True)
class Trial(Remains):
    """A run in which some steps never come: what it leaves of the event."""

    steps: tuple[int, ...]  # places in the path
    values: Values
    left: float  # of the whole event; of a run that ended early at least so much
    after: float = math.nan  # the mean of the last values; NaN of a run that ended early
    departs: float = 0.0  # from the recorded values, as a share of the event's height
    blows_up: bool = False
    lucky: bool = False  # it removed half in one of two runs, and this is the other one
    left_spread: float = math.nan  # the ± of what is left; NaN where the run repeats itself
    value_spread: float = math.nan  # and of the explained value
    after_spread: float = math.nan  # and of what comes after
    by_then: float = math.nan  # of a run that ended early: what it leaves of the event up to there

    @property
    def keeps(self) -> bool:
        """The event is still there, about as large and at its place."""
        return BARS.half < self.compared < 1 / BARS.half and self.departs <= BARS.half


NO_TRIAL = Trial((), {}, math.nan)


@dataclass
class Inquiry:
    """Suspects and placebos, and whom to blame."""

    suspects: list[Trial]
    placebos: list[Trial]
    replaced: list[Trial] = field(default_factory=list)  # suspects that were given batches like their own instead
    replaced_placebos: list[Trial] = field(default_factory=list)
    kin: bool = False  # whoever is judged by batches like its own is of a rare kind of data, beside others of that kind
    several: list[Trial] = field(default_factory=list)  # as many other steps at once, where each of several removes it
    own: Trial | None = None  # without the steps whose batches are high by themselves
    group: Trial | None = None
    group_back: float = math.nan  # what is left of the event, at least, with one step of the group back
    group_replaced: bool = False  # its steps were given batches like their own, and not left out
    group_placebos: list[Trial] = field(default_factory=list)
    asked: int = 0  # how many placebos were asked for
    turned: tuple[tuple[int, ...], ...] = ()  # placebos without which half is gone, and which are suspects since
    spent: list[int] = field(default_factory=list)  # the steps of every run that was made for it

    @property
    def changing(self) -> int:
        """How many placebos remove half of the event, double it or move it."""
        return sum(not t.keeps for t in self.placebos)

    @property
    def share(self) -> float:
        """Of the placebos: those that remove half of the event, double it or move it."""
        return changing(self.placebos)

    @property
    def removing(self) -> int:
        """How many placebos remove half of the event."""
        return sum(t.removes for t in self.placebos)

    @property
    def by_itself(self) -> tuple[int, ...]:
        """The steps whose batches are high by themselves, where the event is gone without them and hardly any other
        step removes it. How high such a batch is depends on the weights: a run without another step may double it."""
        own, placebos = self.own, self.placebos
        if own is None or not own.removes or not placebos or self.removing > BARS.specific * len(placebos):
            return ()
        others = [t for t in self.suspects if t.removes and not set(t.steps) <= set(own.steps)]
        most = BARS.several if len(own.steps) > 1 else BARS.clear * mildest(placebos)
        return own.steps if own.left <= most and len(others) < BARS.together else ()

    @property
    def blamed(self) -> tuple[int, ...]:
        """Steps without which half of it is gone, where that is so of hardly any other step."""
        if self.group is not None:
            return self.group.steps if _special([self.group], self.group_placebos) else ()
        alone = () if self.acquitted else self.alone
        return *alone, *self.blamed_by_replacing

    @property
    def alone(self) -> tuple[int, ...]:
        """Steps of which each alone removes it when it is left out, and no placebo does as much."""
        judged = {t.steps for t in self.replaced}  # by what batches like their own do
        return _firsts(_special([t for t in self.suspects if t.steps not in judged], self.placebos))

    @property
    def acquitted(self) -> bool:
        """Each of several steps removes it, and as many others left out at once do, too."""
        return bool(self.several) and changing(self.several) > BARS.specific

    @property
    def cleared(self) -> list[Trial]:
        """Those without which half is gone, and which keep the event with batches like their own in their place."""
        removing = {t.steps for t in self.suspects if t.removes}
        return [t for t in self.replaced if t.steps in removing and not t.removes]

    @property
    def blamed_by_replacing(self) -> tuple[int, ...]:
        """Those with batches like their own in whose place half is gone."""
        return _firsts(_special(self.replaced, self.replaced_placebos)) if self.group is None else ()


def changing(trials: Sequence[Trial]) -> float:
    """The share of them that do not keep the event."""
    return sum(not t.keeps for t in trials) / len(trials) if trials else 1.0


def _special(suspects: Sequence[Trial], placebos: Sequence[Trial]) -> list[Trial]:
    """Suspects that remove half, and clearly more than any placebo does, where hardly any of these changes it."""
    guilty = sorted((t for t in suspects if t.removes), key=lambda t: t.left)
    if not placebos or changing(placebos) > BARS.specific or len(guilty) > BARS.together:
        return []
    least = mildest(placebos)
    return [t for t in guilty if t.left <= BARS.clear * least]


def mildest(placebos: Sequence[Trial]) -> float:
    """What the one that changes the event most leaves of it."""
    return min((t.compared for t in placebos), default=0.0)


def _firsts(trials: Sequence[Trial]) -> tuple[int, ...]:
    return tuple(t.steps[0] for t in trials)


@dataclass(frozen=True)
class Runs:
    """The recorded run again without some steps."""

    trajectory: Trajectory
    event: Event
    tick: Callable[[], None]
    scatter: Scatter  # where the run does not repeat itself, what removes the event must do so twice
    known: dict[tuple[int, ...], Trial] = field(default_factory=dict)  # those that were accused
    spent: list[int] = field(default_factory=list)  # the steps of every run that was made

    @property
    def in_budget(self) -> bool:
        """May something be run that is not needed to judge what was found?"""
        return sum(self.spent) < MOST * len(self.event.values)

    def accused(self, steps: tuple[int, ...]) -> Trial:
        """Does it remove half of the event? The run ends once it cannot, and is made once."""
        if steps not in self.known:
            without = dict.fromkeys(steps)
            self.known[steps] = self._proved(self._trial(without), without)
        return self.known[steps]

    def placebo(self, steps: tuple[int, ...]) -> Trial:
        """The same of steps that nobody suspects, over the whole event: it may double, too."""
        return self._trial(dict.fromkeys(steps), placebo=True)

    def suspected(self, placebo: Trial) -> Trial:
        """One that was left out as a placebo, and is a suspect from now on."""
        return self._proved(placebo, dict.fromkeys(placebo.steps))

    def replaced(self, steps: tuple[int, ...], bad: Collection[int] = (), *, placebo: bool = False) -> Trial:
        """The steps with batches like their own in place of them, none of which is of a step that may be `bad` too.

        placebo: nobody suspects them, and the whole event is looked at: it may double, too.
        """
        same = self.likeness.same({*steps, *bad}, self.before)
        sound = [i for i in self.before if i not in same]
        others = {i: self.likeness.stand_in(i, sound) for i in steps}
        trial = self._trial(others, placebo=placebo)
        return trial if placebo else self._proved(trial, others)

    @property
    def before(self) -> range:
        """The steps before the event."""
        return range(self.event.onset)

    @functools.cached_property
    def likeness(self) -> Likeness:
        return Likeness(self.trajectory.steps)

    def kin(self, accused: Collection[int], suspected: Collection[int]) -> dict[int, list[int]]:
        """For each of the accused, earlier steps with data of the same rare kind that nobody suspects; where these are
        too few, suspects, too. None saw the inputs of one of the accused."""
        same, found = self.likeness.same(accused, self.before), dict[int, list[int]]()
        for i in accused:
            others = [other for other in self.likeness.kin(i, self.before) if other not in same]
            sound = [other for other in others if other not in suspected]
            found[i] = sound if len(sound) >= BARS.kin else others
        return found

    def _proved(self, first: Trial, steps: Mapping[int, Step | None]) -> Trial:
        """The same where the run repeats itself. Elsewhere what removes half is run again from a start that differs by
        one rounding, and the worse of the two runs is told: a blame that holds in one alone is none."""
        if not (self.scatter.known and first.removes):
            return first
        second, step = self._trial(steps, jittered=True), self.event.step
        worse = max(first, second, key=lambda trial: (not trial.removes, trial.left))
        return replace(
            worse,
            lucky=not second.removes,
            left_spread=max(worse.left_spread, apart(first.left, second.left)),
            value_spread=max(worse.value_spread, apart(first.values[step], second.values[step])),
            after_spread=max(worse.after_spread, apart(first.after, second.after)),  # NaN, of one that ended, is not
        )

    def _trial(self, steps: Mapping[int, Step | None], *, placebo: bool = False, jittered: bool = False) -> Trial:
        """It ends once it is known whether it removes the event, or that of a placebo whether it keeps it."""
        run, event, out = Run(min(steps), steps, jittered=jittered), self.event, frozenset(steps)
        done = event.decided if placebo else event.stays
        (values,) = run_again(self.trajectory, [run], event.last, self.tick, done, event.quantity)
        self.spent.append(len(values))
        left, by_then = event.remains(values, out)
        return Trial(
            tuple(steps),
            values,
            left,
            event.after(values, out),
            event.departs(values, out),
            event.blows_up(values, out),
            left_spread=self.scatter.spread(lambda run: event.so_far(run, out), like=values),
            value_spread=self.scatter.spread(lambda run: run[event.step]),
            after_spread=self.scatter.spread(lambda run: event.after(run, out)),
            by_then=by_then,
        )
