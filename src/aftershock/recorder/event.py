"""A spike is an event, not one loss: a stretch of losses or gradient norms above the usual, and what another run
leaves of it."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .alarm import ALARM, usual
from .quantity import Quantity


@dataclass(frozen=True)
class Bars:
    """The numbers that decide a verdict."""

    gone: float = ALARM.usual  # robust σ above the usual value, below which there is no event
    little: float = 0.2  # of the event: what may be left of one that is gone, where that is ordinary (`ordinary`)
    nothing: float = 1e-3  # of the event: what is ordinary beside a usual value of zero that does not scatter
    # Times the ordinary height: a run that rises beyond it blows up, whatever share of the event that is. One that fits
    # its data rises a thousandfold when it loses what it has learnt; that is no blow-up yet.
    blown: float = 1e6
    # The height up to which no loss is a blow-up, however small the usual one: a model that has lost everything it had
    # learnt has a loss of about one, in nats or in squares of targets of unit size, and a thousandfold of that is left.
    lost: float = 1e3
    slight: float = 0.1  # of the event: a batch that adds less to it is sound
    half: float = 0.5  # of the event: what removes less does not explain it
    # Of the placebos: if more of them change the event, the step is nothing special. One of eight is chance, and one of
    # the six or seven that a window has of a rare kind of data, too; two of eight are none.
    specific: float = 1 / 6
    unspecific: float = 1 / 3  # of the placebos: from here on no more of them are asked
    clear: float = 0.5  # of what the mildest placebo leaves: a culprit leaves less than that
    together: int = 3  # steps that may be blamed at once: more are no culprits but a run that anything changes
    # Of the event: what several batches leave at most that are the spike by themselves. Without the three loudest
    # values of an ordinary noisy stretch half of it is gone, whatever they are.
    several: float = 0.25
    enough: int = 8  # placebos, below which a blame is weak: so few do not tell chance apart
    kin: int = 3  # steps of a rare kind that nobody suspects, from which on these alone are its placebos
    fewest: int = 3  # values before the event that say what is usual: of two the median is no value that came
    settled: int = 4  # usual values in a row, after which an event is over: fewer may lie between two of its values
    tail: int = 4  # last values of the event, whose mean is what comes after it: a single one scatters
    late: int = 3  # last values, whose median sees an event that came too late for running medians to follow
    as_it_is: float = 0.05  # of the event: what a treatment changes at most that leaves it as it is
    # Other runs in which a treatment must remove it, too: where half of all lose it by luck, one in 64 is mistaken.
    moved: int = 6
    near: float = 0.5  # of a measured contribution, within which its prediction may speak of channels and examples
    # Of the peak: where 3σ are more, single values tell no run without the event from one with it. One that keeps up at
    # half its height is then measured by running medians.
    noisy: float = 0.25


BARS = Bars()


class Remains:
    """What is read from the share of an event that another run leaves, whatever was done otherwise in it."""

    left: float  # of the whole event; of a run that ended early at least so much
    by_then: float  # of a run that ended early: what it leaves of the event up to there; NaN of others
    blows_up: bool

    @property
    def so_far(self) -> bool:
        """Did the run end early, and is `left` the least that it can be?"""
        return not math.isnan(self.by_then)

    @property
    def compared(self) -> float:
        """What runs are compared by: of the event as far as the run was made, so that one that ended early is not
        preferred."""
        return self.by_then if self.so_far else self.left

    @property
    def removes(self) -> bool:
        """Is half of the event gone, and no other blow-up in its place?"""
        return self.left <= BARS.half and not self.blows_up


@dataclass(frozen=True)
class Scale:
    """What runs are compared by: of single values, or of their running medians."""

    usual: float
    sigma: float
    peak: float

    @property
    def level(self) -> float:
        """Above it a value is not usual."""
        return self.usual + BARS.gone * self.sigma

    @property
    def scatters(self) -> float:
        """How high above the usual values scatter; of an event that hardly passes the level, half."""
        return min(BARS.gone * self.sigma, BARS.half * self.peak)


@dataclass(frozen=True)
class Event:
    """The values of one quantity from the first high one before the explained step to the last recorded one.

    A run is measured by its excess, Σ max(0, x − usual − 3σ), and by its peak, max x − usual, over this stretch; of
    running medians where single values scatter too much for that (`over`).
    """

    step: int  # place in the path of the value that is explained
    onset: int  # of the first value of the stretch
    values: tuple[float, ...]  # of the whole path
    usual: float
    sigma: float
    first: int = 0  # the number of the path's first step
    quantity: Quantity = "loss"
    over: int = 1  # values in the running medians by which runs are compared
    apart: frozenset[int] = frozenset()  # later places whose batches are bad by themselves: events of their own

    @classmethod
    def of(
        cls,
        values: Sequence[float],
        step: int,
        first: int = 0,
        quantity: Quantity = "loss",
        known: tuple[float, float] | None = None,
    ) -> Event:
        """The stretch begins where the values before the explained one rose above what was usual until then, or above
        what is `known` to be usual, (value, σ), from before the path."""
        onset = step
        for _ in range(2):  # the usual value by all before the step, then by those before the onset
            middle, spread = known or usual(values[:onset] or values[:1])
            spread = max(spread, ALARM.flattest * abs(middle))
            onset = step
            while onset > BARS.fewest and values[onset - 1] > middle + BARS.gone * spread:
                onset -= 1
        single = cls(step, onset, tuple(values), middle, spread, first, quantity)
        return single if known is not None else single._clearer()

    def less(self, apart: Collection[int]) -> Event:
        """The same without later values that are events of their own: nothing before them is to be found in them."""
        return replace(self, apart=frozenset(apart), over=1)._clearer() if apart else self

    def _clearer(self) -> Event:
        smooth = replace(self, over=ALARM.lasting)
        return smooth if smooth._is_clearer else self

    @property
    def _is_clearer(self) -> bool:
        """Does the event keep up, and is it not far above what values scatter by?"""
        if self.onset < 2 * self.over or not all(map(math.isfinite, self.values)):
            return False
        scatters = BARS.gone * self.sigma >= BARS.noisy * self.peak
        return scatters and self.scale.peak >= BARS.half * self.peak

    @cached_property
    def scale(self) -> Scale:
        if self.over == 1:
            return Scale(self.usual, self.sigma, self.peak)
        middle, spread = usual(self._course({}, range(self.onset))[self.over - 1 :])
        # medians that share values scatter less here than they do in the long run
        sigma = max(spread, self.sigma / math.sqrt(self.over))
        return Scale(middle, sigma, max(self._stretch({}, frozenset(), self.last)) - middle)

    @property
    def last(self) -> int:
        return len(self.values) - 1

    @property
    def level(self) -> float:
        """Above it a value is not usual."""
        return self.usual + BARS.gone * self.sigma

    @property
    def peak(self) -> float:
        return self.values[self.highest] - self.usual

    @property
    def ordinary(self) -> float:
        """How high above the usual nobody would call an event: no trigger tells it, or it is within twice the usual. A
        share of the peak says nothing of that where a run blows up: of 1e10, a hundredth is a blow-up, too. Only where
        the usual value is exactly zero, as a hinge loss may be, nothing else is there to go by."""
        return max(ALARM.threshold * self.sigma, abs(self.usual)) or BARS.nothing * self.peak

    @property
    def gone(self) -> float:
        """The share of the peak up to which what is left is no event."""
        return min(BARS.little, self.ordinary / self.peak) if self.peak > 0 else BARS.little

    @property
    def highest(self) -> int:
        """Place in the path of the largest value of the stretch."""
        places = (i for i in range(self.onset, len(self.values)) if i not in self.apart)
        return max(places, key=lambda i: self.values[i])

    @property
    def is_one(self) -> bool:
        return self.values[self.step] > self.level

    def left(self, run: Mapping[int, float], without: frozenset[int] = frozenset()) -> float:
        """What another run leaves of the event, by excess or peak, whichever is more; 1 is all of it. Without the
        explained step by peak alone: what is high around it, too, may have another cause.

        run: its values by place in the path; where it has none, before it begins and after it was ended, it is the
        path. without: steps that it did not take, or took with another batch, whose values it does not have. It is
        compared with the event less these values, where any is left: a step whose own value is the peak has not raised
        the explained one. But for that itself, without which there is none.
        """
        return self._share(run, without, self.last, self.last)

    def left_by_then(self, run: Mapping[int, float], without: frozenset[int] = frozenset()) -> float:
        """The same of the event up to where the run was ended."""
        return self._share(run, without, max(run), max(run))

    def _share(self, run: Mapping[int, float], without: frozenset[int], until: int, ours_until: int) -> float:
        theirs, ours = self._stretch(run, without, until), self._stretch({}, frozenset(), ours_until)
        share = self._of(ours, theirs, run, without)
        if share <= self.gone:  # whatever else of it was theirs
            return share
        return self._of(self._stretch({}, without - {self.step}, ours_until), theirs, run, without)

    def _of(
        self, ours: Sequence[float], theirs: Sequence[float], run: Mapping[int, float], without: frozenset[int]
    ) -> float:
        scale = self.scale
        peak = max(ours, default=scale.usual) - scale.usual
        # an event that hardly passes the level has hardly any excess to compare with
        whole = max(_excess(ours, scale.level), BARS.half * peak)
        pairs = (
            (0.0 if self.step in without else _excess(theirs, scale.level), whole),
            (max(theirs, default=scale.usual) - scale.usual, peak),
            (self._earlier(run, without), peak),
            (self._late(run, without), peak),
        )
        return max((max(now, 0.0) / was for now, was in pairs if was > 0), default=0.0)

    def so_far(self, run: Mapping[int, float], without: frozenset[int] = frozenset()) -> float:
        """Of the whole event, what a run has of it until now: it can only become more."""
        return self._share(run, without, max(run), self.last)

    def remains(self, run: Mapping[int, float], without: frozenset[int] = frozenset()) -> tuple[float, float]:
        """`left` and `by_then` of `Remains`, for a run that may have ended early."""
        ended = max(run) < self.last
        return self.so_far(run, without), self.left_by_then(run, without) if ended else math.nan

    def _earlier(self, run: Mapping[int, float], without: frozenset[int] = frozenset()) -> float:
        """How high a run rises before the stretch where the path is usual: an event that only came sooner. Where the
        path is not, an odd batch may be, which says nothing of an event."""
        scale, places = self.scale, [i for i in range(self.onset) if i not in without]
        course = zip(places, self._course({}, places), self._course(run, places))
        over = (now - scale.usual for i, was, now in course if i in run and was <= scale.level < now)
        return max(over, default=0.0)

    def _late(self, run: Mapping[int, float], without: frozenset[int] = frozenset()) -> float:
        """How high a whole run's last values are where they are not usual, and too few for a running median to follow:
        an event that only came later."""
        places = [i for i in range(self.onset, self.last + 1) if i not in without and i not in self.apart]
        if self.over == 1 or self.last not in run or len(places) < BARS.late:
            return 0.0
        last = statistics.median(_finite(run[i]) for i in places[-BARS.late :])
        return last - self.usual if last > self.level else 0.0

    def departs(self, run: Mapping[int, float], without: frozenset[int] = frozenset()) -> float:
        """How far a run's values are from the path's in the stretch, at most, as a share of the peak.

        Where leaving out almost any step makes another run of it, an event of the same size is another one: of 40 steps
        left out, 15 to 40 depart by half in windows of unstable runs, and 1 in those of calm ones.
        """
        out = without | self.apart
        apart = [abs(run[i] - self.values[i]) for i in range(self.onset, max(run) + 1) if i in run and i not in out]
        return max((x if math.isfinite(x) else math.inf for x in apart), default=0.0) / max(self.peak, 1e-300)

    def prevented(self, run: Mapping[int, float]) -> bool:
        """No event is left anywhere in the stretch, nor a new one, nor one that came sooner; and where steps after it
        are recorded, it ends as usual: half as high at most."""
        tail = self._stretch(run, frozenset(), max(run))[self.step + 1 - self.onset :][-BARS.tail :]
        most = max(self.scale.scatters, BARS.half * self._little)
        calm = len(tail) < BARS.tail or statistics.fmean(tail) - self.scale.usual <= most
        return calm and self._low(run) and not self._late(run)

    @property
    def _little(self) -> float:
        return self.gone * self.scale.peak

    def _low(self, run: Mapping[int, float]) -> bool:
        """No event is there until now, nor one that came sooner; of running medians, no single value either that stands
        out of those before the event."""
        height = max(self._stretch(run, frozenset(), max(run))) - self.scale.usual
        most = max(self.scale.scatters, self._little)
        singly = max(most, BARS.gone * self.sigma, max(self.values[: self.onset], default=self.usual) - self.usual)
        return max(height, self._earlier(run)) <= most and (self.over == 1 or self.height(run) <= singly)

    def blows_up(self, run: Mapping[int, float], without: frozenset[int] = frozenset()) -> bool:
        """Does the run leave everything ordinary far behind? Then it removes no event, however much higher that was.

        What is ordinary is not the usual value alone: one that fits its data to 1e-8 rises a hundred million times to
        the loss of a model that knows nothing, and a run that keeps to 2 % of that has removed it.
        """
        return self.height(run, without) > max(BARS.blown * self.ordinary, BARS.lost)

    def height(self, run: Mapping[int, float], without: frozenset[int] = frozenset()) -> float:
        """How far above the usual value a run rises in the stretch; `peak` is that of the path."""
        places = (i for i in range(self.onset, max(run) + 1) if i not in without and i not in self.apart)
        return max((_finite(run.get(i, self.values[i])) for i in places), default=self.usual) - self.usual

    def after(self, run: Mapping[int, float], without: frozenset[int] = frozenset()) -> float:
        """The mean of a run's last values, from the explained one on, less steps that it did not take; NaN where it was
        ended before, or took none of them."""
        places = range(max(self.step, self.last - BARS.tail + 1), self.last + 1)
        values = [run.get(i, math.nan) for i in places if i not in without and i not in self.apart]
        return statistics.fmean(values) if values else math.nan

    def delayed(self, run: Mapping[int, float]) -> bool:
        """The event is there, but its peak comes later, and the explained value is usual.

        Of a run that `fails` and ended: is that so whatever it would have done next? What has come later than the
        path's peak stays later. A run that ended before may still be a delay, which is not known then.
        """
        theirs, ours = self._stretch(run, frozenset(), max(run)), self._stretch({}, frozenset(), self.last)
        later = theirs.index(max(theirs)) > ours.index(max(ours))
        there = self._late(run) > 0 or (max(theirs) > self.scale.level and later)
        return not self.prevented(run) and there and theirs[self.step - self.onset] <= self.scale.level

    def stays(self, run: Mapping[int, float], without: frozenset[int] = frozenset()) -> bool:
        """Is half of the event there already? Whatever this run does next, it does not remove it, and may end."""
        return max(run) >= self.step and self.so_far(run, without) > BARS.half

    def fails(self, run: Mapping[int, float], without: frozenset[int] = frozenset()) -> bool:
        """The same of a treatment: whatever its run does next, it does not prevent the event either. Many small values
        may add up to half of it, none of which is one."""
        return self.stays(run, without) and not self._low(run)

    def decided(self, run: Mapping[int, float], without: frozenset[int] = frozenset()) -> bool:
        """May a run end of which one wants to know whether it keeps the event? Its own event is there, and over or
        twice as large; that of the path is past.

        A run without an event is never decided before the end: it may come later.
        """
        if max(run) < max(self.step, self.highest) or not self.stays(run, without):
            return False
        calm = max(self._stretch(run, without, max(run))[-BARS.settled :]) <= self.scale.level
        return calm or self.so_far(run, without) >= 1 / BARS.half

    def _stretch(self, run: Mapping[int, float], without: frozenset[int], last: int) -> list[float]:
        """What is compared, from the onset to `last`."""
        places = [i for i in range(last + 1) if i not in without and i not in self.apart]
        return self._course(run, places)[bisect_left(places, self.onset) :]

    def _course(self, run: Mapping[int, float], places: Sequence[int]) -> list[float]:
        """The values at these places, the path's where the run has none, or their running medians."""
        return running_medians([_finite(run.get(i, self.values[i])) for i in places], self.over)


def running_medians(values: Sequence[float], over: int) -> list[float]:
    """Of each value and those before it, so many together."""
    return [statistics.median(values[max(0, i + 1 - over) : i + 1]) for i in range(len(values))]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _excess(values: Sequence[float], level: float) -> float:
    return sum(max(0.0, x - level) for x in values)
