"""Which values are usual, how far another one is from them, and the numbers that decide what is told."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Alarm:
    """The numbers that decide what is told."""

    flattest: float = 1e-3  # a σ below this part of the median is a run that repeats itself, not one without noise
    threshold: float = 8.0  # robust σ: of a normal spread never reached; losses have longer tails
    usual: float = 3.0  # robust σ: a value within them is no event
    # Losses that keep up are told though none of them is so far: the median of so many, by this part of the threshold.
    # With these numbers none of 72 ordinary runs on shuffled data alarms that did not (400 or 600 steps), and of 40
    # runs of a small MLP with a learning rate or a weight decay far too high for one step 38 are told where 19 were.
    lasting: int = 8
    lower: float = 0.5
    far: float = 2.0  # times: two heights within this factor are one height
    # A source of data that is harder than the rest rises above any number of σ each time it comes, because MAD sees the
    # usual steps only. What has been told four times is no news: four, since a planted cause may act three times before
    # the spike that it is asked about, and within four windows, since a source may come once a window. With these
    # numbers a source every 6th step alarms 7 times in 300 steps and no longer 41 times, and every spike of
    # benchmarks/spikes and benchmarks/culprits that alarmed before still does (28 of 28, 88 of 88; a run's first alarm
    # is never held back).
    often: int = 4  # times that a height is told
    memory: int = 4  # windows
    higher: float = 1.25  # times the highest of them: a new worst spike is news, however often one nearly as high came
    # Before there are enough losses for a spread they fall fast and scatter, so that only what is far above them is
    # told. With these numbers none of 1248 ordinary runs alarmed in its first 16 steps; of 280 that blew up there, 23
    # of 31 did that had made three steps before, and 59 of the other 249 (docs/limits.md).
    early: int = 16  # steps
    first: int = 4  # losses that say where a run began
    blown: float = 1000.0  # times the highest, where there are fewer
    risen: float = 3.0  # times the highest, where there are as many
    lone: float = 8.0  # spreads above: of one loss above all before it
    held: float = 3.0  # the same of two in a row above the first
    # Of a slow rise, in medians of so many losses as `Drift` is told: before the first is believed, and for the spread
    # at the lowest of them, which a few losses that wander would not show.
    settling: int = 2
    wide: int = 4
    raised: float = 1.5  # times the lowest learning rate: above it the loss rises on purpose
    # Whatever the rate did, of the lowest median of the whole run. A raised rate lifts the loss on purpose, by many
    # times itself where it was near zero, and it falls again: a divergence takes back half of what was learned, too,
    # and goes on rising. With these numbers 18 of 18 runs that diverged under a rate of 1.002 to 1.006 times per step
    # are told, none of 186 ordinary ones, and one of 163 that were learned nearly by heart (docs/limits.md).
    doubled: float = 2.0  # times the lowest median
    lost: float = 0.5  # of what it had fallen by


ALARM = Alarm()
TO_SIGMA = 1.4826  # of a normal distribution: σ = 1.4826 · MAD


def scatter(values: Collection[float]) -> tuple[float, float]:
    """Median and 1.4826 · MAD: outliers among the values do not move them."""
    middle = statistics.median(values)
    return middle, TO_SIGMA * statistics.median(abs(x - middle) for x in values)


def usual(values: Iterable[float]) -> tuple[float, float]:
    """What comes after these values as a rule, and σ: their median and spread. Where they have fallen by more than they
    scatter, as losses of a run that learns, the median of the last quarter, and the spread around the fall.

    The fall would else count as spread, and a batch of noise in it go unseen: of losses 12 local σ above 116 ordinary
    runs 0.51 passed the threshold at step 45, and 0.70 do; the same 49 runs alarm without one, 1.2 % more often.
    """
    values = list(values)
    middle, spread = scatter(values)
    if len(values) < ALARM.early:
        return middle, spread
    half = len(values) // 2
    fall = statistics.median(values[:half]) - statistics.median(values[-half:])
    if fall <= 0:
        return middle, spread
    level = [x + fall * i / (len(values) - half) for i, x in enumerate(values)]
    around = scatter(level)[1]
    return (statistics.median(values[-(len(values) // 4) :]), around) if fall > around else (middle, spread)


def robust_z(value: float, before: Collection[float]) -> float:
    """(x − median) / (1.4826 · MAD) of the values before it, as `usual` has them."""
    middle, spread = usual(before)
    spread = max(spread, ALARM.flattest * abs(middle))
    return (value - middle) / spread if spread > 0 else math.inf if value > middle else 0.0


def newest(values: Collection[float], count: int) -> list[float]:
    return list(itertools.islice(values, max(0, len(values) - count), None))
