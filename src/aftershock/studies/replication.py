"""Does a number of the paper replicate? The interval of the difference of two medians, and what it would have caught.

The paper's number is the median of its N systems and ours the median of our n; each varies by its own sampling. The
bootstrap gives both: e_n and e_N, the errors of a median of n and of N of our systems, the second scaled by the
paper's quartiles where it prints them. Ours less the paper's has the interval (m − P) + quantiles of (e_N − e_n); the
number replicates where that holds zero, give or take the paper's rounding. The bootstrap is whole: the law of a
resampled median is known in closed form, so that no verdict hangs on which resamples were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from .quotes import Quote
from .verdicts import AGREEMENT

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Power:
    """The numbers that decide what a verdict says it would have caught, beside its level (`verdicts.Agreement`)."""

    caught: float = 0.8  # of the cases of a wrong value: the customary one, four of five
    rare: float = 0.0005  # how likely a number that has a factor may still be of the other sign
    ceiling: float = 0.0005  # half a unit of 1.000: a number printed so could not be larger, and tests little
    many: int = 2  # times the paper's systems, from which on the share of misses measured with five times as many holds
    few: float = 0.5  # of the paper's systems: with fewer the bootstrap is too sure of itself (`MISSED_SPARSE`)


POWER = Power()
LARGEST = 10.0  # factors beyond it are not looked for
# Measured by `python -m benchmarks.replication` on the six root seeds of the quadratic study: the share of perfect
# replications that is missed, with five times the paper's systems, and with as many as the paper's.
MISSED_MANY, MISSED_FEW = 0.048, 0.071
# With less than half of the paper's systems the bootstrap is too sure of itself. Simulated: 6 log-normal numbers with a
# deviation of 0.2, 0.6 and 1.2 beside the median of 16 miss 9.5, 10.8 and 11.8 %.
MISSED_SPARSE = 0.11
CALIBRATION = (
    "Calibrated on 192 independent quadratic systems, 32 of which were taken for the paper's in 100 random splits. "
    "Judged by the other 160, the verdict accepts 95.2 % of perfect replications, 39.9 % of numbers that are wrong by "
    "a factor of 1.3 and 20.0 % by 1.5 (magnitudes alone: 45.4 % and 17.6 %); the weaker rule accepts 99.7 %, 60.4 % "
    "and 37.9 % (67.3 % and 38.8 %). Judged by 32 others: 92.9 %, 50.9 % and 34.3 %; the weaker rule 96.2 %, 54.8 % "
    "and 36.5 %. Numbers of the same systems miss together: one perfect replication in twenty misses more than 11.8 % "
    "of its numbers with 160 systems, 16.1 % with 32."
)
MEDIAN, LOWER, UPPER = "median", "lower quartile", "upper quartile"
RANGE, COUNT, SHARE = "range", "count", "share"
NEVER = 1e-10  # pairs of order statistics less likely than this are left out
TIED = 1e-7  # to which two chances are one
ROUNDING = 1e-12  # of the largest difference: nearer than this two are one
QUANTILES = {MEDIAN: 0.5, LOWER: 0.25, UPPER: 0.75}


@dataclass(frozen=True)
class Replication:
    """One number of the paper against ours.

    low, high: the 95 % interval of ours less the paper's. catches: the smallest factor, up or down, that the verdict
    would have caught in four cases of five; where the number may be zero, `catches_difference` instead.
    missed: how likely a perfect replication misses it.
    saturated: nothing varies, so nothing was tested; it holds, and is not counted.
    """

    number: str
    holds: bool
    low: float = math.nan
    high: float = math.nan
    catches: float = math.nan
    catches_difference: float = math.nan
    saturated: bool = False
    missed: float = MISSED_FEW

    @property
    def counted(self) -> bool:
        return not self.saturated


def replications(values: np.ndarray, quote: Quote, kind: str = "systems") -> tuple[Replication, ...]:
    """The verdict on the paper's median, and on its quartiles where it prints them.

    values: ours, one number per system; of a count or a share one outcome, 0 or 1, per trial. kind: of the measure.
    """
    import numpy as np

    known = np.sort(values[~np.isnan(values)])
    if quote.kind == COUNT:
        return (_count(known, quote.value or 0.0, quote.high or 1.0),)
    if kind == SHARE:  # of as many trials as ours: 0.931 is 67 of 72
        assert quote.value is not None
        return (_at_ceiling(_count(known, round(quote.value * len(known)), len(known)), quote),)
    if kind == UPPER:
        assert quote.value is not None
        return (_one(known, UPPER, quote.value, quote),)
    if quote.kind == RANGE:
        return (_range(known, quote),)
    if saturated(known, quote):
        return (Replication(MEDIAN, holds=True, saturated=True),)
    printed = {MEDIAN: quote.value, LOWER: quote.low, UPPER: quote.high}
    found = [_one(known, name, paper, quote) for name, paper in printed.items() if paper is not None]
    return tuple(_at_ceiling(one, quote) for one in found)


def saturated(values: np.ndarray, quote: Quote) -> bool:
    """Both of our quartiles round to the paper's number: nothing varies, so nothing is tested."""
    import numpy as np

    assert quote.value is not None
    return bool(np.abs(np.quantile(values, [0.25, 0.75]) - quote.value).max() <= quote.half_unit * (1 + 1e-9))


def _at_ceiling(one: Replication, quote: Quote) -> Replication:
    """A share or correlation that the paper prints as 1.000 could not be larger: that ours is near it tests little."""
    full = quote.value == 1 and quote.half_unit <= POWER.ceiling
    return Replication(one.number, holds=True, saturated=True) if full and one.holds else one


def _one(values: np.ndarray, number: str, paper: float, quote: Quote) -> Replication:
    import numpy as np

    distance = paper - float(np.quantile(values, QUANTILES[number]))
    mine, theirs = laws_of(values, QUANTILES[number], quote)
    low, high = bounds(mine, theirs, quote.half_unit)
    if low <= distance <= high and high - low <= 2 * quote.half_unit:
        return Replication(number, holds=True, saturated=True)  # no resampled median differs: nothing was tested
    factor, shift = _caught(mine, theirs, low, high)
    missed = _missed(len(values), quote.systems or len(values))
    return Replication(
        number, low <= distance <= high, low - distance, high - distance, factor, shift, missed=missed
    )  # fmt: skip


def _missed(ours: int, papers: int) -> float:
    """How likely a perfect replication misses a number, by the systems on either side."""
    return MISSED_SPARSE if sparse(ours, papers) else MISSED_MANY if ours >= POWER.many * papers else MISSED_FEW


def sparse(ours: int, papers: int) -> bool:
    """Whether ours are so few that a miss says little."""
    return ours < POWER.few * papers


def _range(values: np.ndarray, quote: Quote) -> Replication:
    """The interval reaches into the range that the paper gives for several numbers at once."""
    import numpy as np

    assert quote.low is not None
    assert quote.high is not None
    ours = float(np.median(values))
    mine, theirs = laws_of(values, QUANTILES[MEDIAN], replace(quote, low=None))
    low, high = bounds(mine, theirs, quote.half_unit)
    holds = ours + low <= quote.high and ours + high >= quote.low
    return Replication(RANGE, holds, -high, -low, *_caught(mine, theirs, low, high))


@dataclass(frozen=True)
class Law:
    """A number that takes each of these rising values with its chance."""

    values: np.ndarray
    chances: np.ndarray

    @cached_property
    def _sums(self) -> np.ndarray:
        import numpy as np

        return np.concatenate([[0.0], np.cumsum(self.chances)])

    def at_most(self, x: np.ndarray) -> np.ndarray:
        return self._sums[self.values.searchsorted(x, "right")]

    def below(self, x: np.ndarray) -> np.ndarray:
        return self._sums[self.values.searchsorted(x, "left")]

    def quantile(self, level: float) -> float:
        return float(self.values[min(int(self._sums[1:].searchsorted(level)), len(self.values) - 1)])

    def scaled(self, middle: float, ratio: float) -> Law:
        """The same law with its distances from `middle` multiplied by a positive ratio."""
        return Law(middle + ratio * (self.values - middle), self.chances)

    def mirrored(self) -> Law:
        return Law(-self.values[::-1], self.chances[::-1])


def bounds(mine: Law, theirs: Law, rounding: float) -> tuple[float, float]:
    """How far the paper's number may lie below and above ours."""
    low, high = (_difference(mine, theirs, level) for level in (AGREEMENT.level / 2, 1 - AGREEMENT.level / 2))
    return low - rounding, high + rounding


def _difference(mine: Law, theirs: Law, level: float) -> float:
    """The quantile of theirs less mine, which is one of the differences of their values."""
    low, high = float(theirs.values[0] - mine.values[-1]), float(theirs.values[-1] - mine.values[0])
    near = ROUNDING * max(abs(low), abs(high))
    low -= near
    while high - low > near:
        middle = (low + high) / 2
        share = mine.chances @ theirs.at_most(middle + mine.values)
        low, high = (low, middle) if share >= level else (middle, high)
    place = theirs.values.searchsorted(high + mine.values, "right") - 1
    return float((theirs.values[place] - mine.values)[place >= 0].max())


def laws_of(values: np.ndarray, quantile: float, quote: Quote) -> tuple[Law, Law]:
    """Our quantile and the paper's, each of its own number of systems, the second with its own spread."""
    import numpy as np

    low, middle, high = (float(np.quantile(values, q)) for q in (0.25, quantile, 0.75))
    mine = quantile_law(values, len(values), quantile)
    theirs = quantile_law(values, quote.systems or len(values), quantile)
    printed = quote.low is not None and quote.high is not None and high > low
    ratio = (float(quote.high or 0) - float(quote.low or 0)) / (high - low) if printed else 1.0
    return mine, theirs.scaled(middle, ratio)


def quantile_law(values: np.ndarray, count: int, quantile: float) -> Law:
    """The law of a quantile of `count` draws, with replacement, of the sorted values."""
    import numpy as np

    lower, upper, chances = _places(len(values), count, quantile)
    share = (count - 1) * quantile % 1
    found, place = np.unique(values[lower] + share * (values[upper] - values[lower]), return_inverse=True)
    return Law(found, np.bincount(place, chances))


@cache
def _places(size: int, count: int, quantile: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which two of `size` sorted numbers lie around a quantile of `count` draws of them, and how likely each pair is.

    The k-th smallest draw is number i and the next one j > i where k draws are at most i and not all of them less, the
    others at least j and not all of them more: C(count, k) (pᵢ^k − pᵢ₋₁^k) ((1 − pⱼ₋₁)^(count−k) − (1 − pⱼ)^(count−k))
    with pᵢ = i / size. What is left of the k-th's own chance has both at i.
    """
    import numpy as np
    from scipy import special, stats

    below = math.floor((count - 1) * quantile) + 1
    share = np.arange(size + 1) / size
    with np.errstate(divide="ignore"):
        first = np.log(np.diff(share**below))
        rest = np.log(-np.diff((1 - share) ** (count - below)))
    choices = special.gammaln(count + 1) - special.gammaln(below + 1) - special.gammaln(count - below + 1)
    both = np.triu(np.exp(choices + first[:, None] + rest[None]), 1)
    alone = np.diff(stats.binom.sf(below - 1, count, share))
    both[np.diag_indices(size)] = np.maximum(alone - both.sum(1), 0.0)
    lower, upper = np.nonzero(both > NEVER)
    return lower, upper, both[lower, upper]


def _caught(mine: Law, theirs: Law, low: float, high: float) -> tuple[float, float]:
    """The smallest factor, up and down, that falls outside in enough cases; of what may be zero, a difference."""
    if theirs.quantile(1 - POWER.rare) < 0:
        mine, theirs, low, high = mine.mirrored(), theirs.mirrored(), -high, -low
    if theirs.quantile(POWER.rare) > 0:
        up = _smallest(lambda log: _above(mine, theirs, high, math.exp(log), 0.0), math.log(LARGEST))
        down = _smallest(lambda log: _below(mine, theirs, low, math.exp(-log), 0.0), math.log(LARGEST))
        return math.exp(max(up, down)), math.nan
    reach = LARGEST * (high - low)
    up = _smallest(lambda shift: _above(mine, theirs, high, 1.0, shift), reach)
    down = _smallest(lambda shift: _below(mine, theirs, low, 1.0, -shift), reach)
    return math.nan, max(up, down)


def _above(mine: Law, theirs: Law, limit: float, factor: float, shift: float) -> float:
    """How likely factor · theirs + shift − mine is above the limit."""
    return 1 - float(mine.chances @ theirs.at_most((limit - shift + mine.values) / factor))


def _below(mine: Law, theirs: Law, limit: float, factor: float, shift: float) -> float:
    return float(mine.chances @ theirs.below((limit - shift + mine.values) / factor))


def _smallest(caught: Callable[[float], float], largest: float) -> float:
    """The smallest size at which enough cases are caught, to a thousandth of the largest; inf where none is."""
    if caught(largest) < POWER.caught:
        return math.inf
    low, high = 0.0, largest
    while high - low > largest / 1000:
        middle = (low + high) / 2
        low, high = (low, middle) if caught(middle) >= POWER.caught else (middle, high)
    return high


def _count(outcomes: np.ndarray, theirs: float, total: float) -> Replication:
    """Two shares: Fisher's exact test. The interval is that of their difference, by the binomial's own variance."""
    from scipy import stats

    ours, n = float(outcomes.sum()), len(outcomes)
    p, missed = _fisher(int(ours), n, round(theirs), round(total))
    pooled = (ours + theirs) / (n + total)
    error = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / total))
    distance = ours / n - theirs / total
    reach = float(stats.norm.ppf(1 - AGREEMENT.level / 2)) * error
    power = float(stats.norm.ppf(POWER.caught)) * error
    return Replication(
        COUNT, p >= AGREEMENT.level, distance - reach, distance + reach, catches_difference=reach + power, missed=missed
    )


def _fisher(ours: int, trials: int, theirs: int, total: int) -> tuple[float, float]:
    """Fisher's p of two counts, and how likely equal shares with as many successes in all have p < level.

    Counts are few, so that the latter lies well below the level.
    """
    import numpy as np
    from scipy import stats

    both = ours + theirs
    could = np.arange(max(0, both - total), min(both, trials) + 1)
    chances = stats.hypergeom(trials + total, both, trials).pmf(could)
    p = np.array([chances[chances <= chance * (1 + TIED)].sum() for chance in chances])
    return float(p[could == ours][0]), float(chances[p < AGREEMENT.level].sum())
