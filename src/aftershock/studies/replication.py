"""Does a number of the paper replicate? The interval of the difference of two medians, and what it would have caught.

The paper's number is the median of its N systems and ours the median of our n; each varies by its own sampling. The
bootstrap gives both: e_n and e_N, the errors of a median of n and of N of our systems, the second scaled by the
paper's quartiles where it prints them. Ours less the paper's has the interval (m − P) + quantiles of (e_N − e_n); the
number replicates where that holds zero, give or take the paper's rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from .quotes import Quote

if TYPE_CHECKING:
    import numpy as np

LEVEL = 0.05
POWER = 0.8  # of catching a wrong value
DRAWS = 2000
LARGEST = 10.0  # factors beyond it are not looked for
# Measured by `python -m benchmarks.replication` on the six root seeds of the quadratic study: the share of perfect
# replications that is missed, with five times the paper's systems, and with as many as the paper's.
MISSED_MANY, MISSED_FEW = 0.046, 0.065
MANY = 2  # times the paper's systems
# With less than half of the paper's systems the bootstrap is too sure of itself. Simulated: 6 log-normal numbers with a
# deviation of 0.2, 0.6 and 1.2 beside the median of 16 miss 9.5, 10.8 and 11.8 %.
MISSED_SPARSE = 0.11
CALIBRATION = (
    "Calibrated on 192 independent quadratic systems, 32 of which were taken for the paper's in 30 random splits. "
    "Judged by the other 160, the verdict accepts 95.4 % of perfect replications, 41.0 % of numbers that are wrong by "
    "a factor of 1.3 and 21.1 % by 1.5 (magnitudes alone: 46.5 % and 19.1 %); the weaker rule accepts 99.6 %, 60.5 % "
    "and 37.5 % (67.3 % and 37.9 %). Judged by 32 others: 93.5 %, 50.5 % and 34.2 %; the weaker rule 96.6 %, 55.0 % "
    "and 36.7 %. Numbers of the same systems miss together: one perfect replication in twenty misses more than 8.8 % "
    "of its numbers with 160 systems, 14.8 % with 32."
)
MEDIAN, LOWER, UPPER = "median", "lower quartile", "upper quartile"
RANGE, COUNT, SHARE = "range", "count", "share"
CEILING = 0.0005  # half a unit of 1.000
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


def replications(values: np.ndarray, quote: Quote, seed: int, kind: str = "systems") -> tuple[Replication, ...]:
    """The verdict on the paper's median, and on its quartiles where it prints them.

    values: ours, one number per system; of a count or a share one outcome, 0 or 1, per trial. seed: of the bootstrap.
    kind: of the measure.
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
        return (_one(known, UPPER, quote.value, quote, seed),)
    if quote.kind == RANGE:
        return (_range(known, quote, seed),)
    if saturated(known, quote):
        return (Replication(MEDIAN, holds=True, saturated=True),)
    printed = {MEDIAN: quote.value, LOWER: quote.low, UPPER: quote.high}
    found = [_one(known, name, paper, quote, seed) for name, paper in printed.items() if paper is not None]
    return tuple(_at_ceiling(one, quote) for one in found)


def saturated(values: np.ndarray, quote: Quote) -> bool:
    """Both of our quartiles round to the paper's number: nothing varies, so nothing is tested."""
    import numpy as np

    assert quote.value is not None
    return bool(np.abs(np.quantile(values, [0.25, 0.75]) - quote.value).max() <= quote.half_unit * (1 + 1e-9))


def _at_ceiling(one: Replication, quote: Quote) -> Replication:
    """A share or correlation that the paper prints as 1.000 could not be larger: that ours is near it tests little."""
    full = quote.value == 1 and quote.half_unit <= CEILING
    return Replication(one.number, holds=True, saturated=True) if full and one.holds else one


def _one(values: np.ndarray, number: str, paper: float, quote: Quote, seed: int) -> Replication:
    import numpy as np

    distance = paper - float(np.quantile(values, QUANTILES[number]))
    mine, theirs = draws_of(values, QUANTILES[number], quote, seed)
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
    return MISSED_SPARSE if sparse(ours, papers) else MISSED_MANY if ours >= MANY * papers else MISSED_FEW


def sparse(ours: int, papers: int) -> bool:
    """Whether ours are so few that a miss says little."""
    return ours < papers / 2


def _range(values: np.ndarray, quote: Quote, seed: int) -> Replication:
    """The interval reaches into the range that the paper gives for several numbers at once."""
    import numpy as np

    assert quote.low is not None
    assert quote.high is not None
    ours = float(np.median(values))
    mine, theirs = draws_of(values, QUANTILES[MEDIAN], replace(quote, low=None), seed)
    low, high = bounds(mine, theirs, quote.half_unit)
    holds = ours + low <= quote.high and ours + high >= quote.low
    return Replication(RANGE, holds, -high, -low, *_caught(mine, theirs, low, high))


def bounds(mine: np.ndarray, theirs: np.ndarray, rounding: float) -> tuple[float, float]:
    """How far the paper's number may lie below and above ours."""
    import numpy as np

    low, high = np.quantile(theirs - mine, [LEVEL / 2, 1 - LEVEL / 2])
    return float(low) - rounding, float(high) + rounding


def draws_of(values: np.ndarray, quantile: float, quote: Quote, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws of our quantile and of the paper's, each of its own number of systems, the second with its own spread."""
    import numpy as np

    low, middle, high = (float(np.quantile(values, q)) for q in (0.25, quantile, 0.75))
    mine = quantile_draws(values, len(values), quantile, 2 * seed)
    theirs = quantile_draws(values, quote.systems or len(values), quantile, 2 * seed + 1)
    printed = quote.low is not None and quote.high is not None and high > low
    ratio = (float(quote.high or 0) - float(quote.low or 0)) / (high - low) if printed else 1.0
    return mine, middle + ratio * (theirs - middle)


def quantile_draws(values: np.ndarray, count: int, quantile: float, seed: int) -> np.ndarray:
    """Bootstrap draws of a quantile of `count` of the sorted values."""
    lower, upper = (values[(place * len(values)).astype(int)] for place in _places(count, quantile, seed))
    share = (count - 1) * quantile % 1
    return lower + share * (upper - lower)


@cache
def _places(count: int, quantile: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the two order statistics around a quantile of `count` uniform numbers lie.

    The k-th smallest is Beta(k, count + 1 − k), and the next one lies above it as the smallest of the rest does: two
    draws in place of `count`.
    """
    import numpy as np

    generator = np.random.default_rng(seed)
    below = math.floor((count - 1) * quantile)
    first = generator.beta(below + 1, count - below, DRAWS)
    rest = count - below - 1
    second = first + (1 - first) * generator.beta(1, rest, DRAWS) if rest else first
    return np.minimum(first, 1 - 1e-12), np.minimum(second, 1 - 1e-12)


def _caught(mine: np.ndarray, theirs: np.ndarray, low: float, high: float) -> tuple[float, float]:
    """The smallest factor, up and down, that falls outside in POWER of the cases; of what may be zero, a difference."""
    if (theirs < 0).all():
        mine, theirs, low, high = -mine, -theirs, -high, -low
    if (theirs > 0).all():
        up = _smallest(lambda log: theirs * math.exp(log) - mine > high, math.log(LARGEST))
        down = _smallest(lambda log: theirs * math.exp(-log) - mine < low, math.log(LARGEST))
        return math.exp(max(up, down)), math.nan
    reach = LARGEST * (high - low)
    up = _smallest(lambda shift: theirs + shift - mine > high, reach)
    down = _smallest(lambda shift: theirs - shift - mine < low, reach)
    return math.nan, max(up, down)


def _smallest(caught: Callable[[float], np.ndarray], largest: float) -> float:
    """The smallest size at which POWER of the cases are caught, to a thousandth of the largest; inf where none is."""
    if caught(largest).mean() < POWER:
        return math.inf
    low, high = 0.0, largest
    while high - low > largest / 1000:
        middle = (low + high) / 2
        low, high = (low, middle) if caught(middle).mean() >= POWER else (middle, high)
    return high


def _count(outcomes: np.ndarray, theirs: float, total: float) -> Replication:
    """Two shares: Fisher's exact test. The interval is that of their difference, by the binomial's own variance."""
    from scipy import stats

    ours, n = float(outcomes.sum()), len(outcomes)
    table = [[ours, n - ours], [theirs, total - theirs]]
    p = float(stats.fisher_exact(table).pvalue)
    pooled = (ours + theirs) / (n + total)
    error = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / total))
    distance = ours / n - theirs / total
    reach = float(stats.norm.ppf(1 - LEVEL / 2)) * error
    power = float(stats.norm.ppf(POWER)) * error
    return Replication(COUNT, p >= LEVEL, distance - reach, distance + reach, catches_difference=reach + power)
