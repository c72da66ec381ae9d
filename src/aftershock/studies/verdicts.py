"""Does a number of ours agree with the paper's? Each kind of number has the rule that fits it, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..results.statistics import median_interval
from .quotes import Quote

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr


@dataclass(frozen=True)
class Agreement:
    """The numbers that decide whether ours agrees with the paper's."""

    fewest_systems: int = 4  # below it quartiles say nothing
    # The customary one, for the paper's tests, and for ours of its numbers: of those that are right one in twenty is
    # missed.
    level: float = 0.05
    factor: float = 10.0  # values at rounding agree within an order of magnitude


AGREEMENT = Agreement()
LOST, NOT_RUN = "lost in noise", "not run"
POOLED_SCALES, COMPLEMENT = "pooled scales", "complement"
TRIVIAL = ("by definition", "tied in both")  # true of any implementation: shown, and not counted

REPLICABLE = (  # kinds of a measure and of a quote
    ("systems", "value"),
    ("systems", "range"),
    ("upper quartile", "value"),
    ("count", "count"),
    ("share", "value"),
)

RULES = {
    "iqr": "the paper's value lies inside the quartiles of our systems",
    "bootstrap": "the paper's value lies inside the 95 % bootstrap interval of our median",
    "iqr or bootstrap": "the paper's value lies neither inside our quartiles nor inside the bootstrap interval",
    "range": "our quartiles, or the bootstrap interval of our median, reach into the range that the paper gives",
    "order of magnitude": "a value at rounding: within a factor of ten",
    "both at rounding": "both values are rounding errors, though of different size",
    "binomial": "our count lies inside the 95 % interval of a binomial with the paper's share",
    "same side of 0.05": "both tests are significant, or neither is; where we have more systems, in 19 of 20 draws of "
    "as many as the paper's",
    "either way": "draws of as many of our systems as the paper's come out either way: not judged",
    "same statement": "what the paper says in words holds for our medians",
    "bound": "our median keeps the bound that the paper states",
    "rounds to the paper's value": "our median rounds to the digits that the paper prints",
    "by definition": "true of any implementation; not counted",
    "tied in both": "the score is the same for every candidate, so it has no correlation; not counted",
    "undefined": "the paper has a number and ours is undefined in every system",
    "fisher": "Fisher's exact test of our share and the paper's does not tell them apart",
    "other model": "other weights, texts or dtype than the paper's, or fewer systems: its number stands beside ours "
    "and is not judged",
    "weaker test": "a test of fewer systems than the paper's: not judged",
    "one number": "one number without a spread of its own: not judged",
    POOLED_SCALES: "candidates at several scales together, which do not vary by themselves: not judged",
    COMPLEMENT: "all that another row does not count: judged there",
    "run time": "seconds on another machine: not judged",
    LOST: "rounding alone moves the loss as much as most of these responses do: not judged, and blank where nothing is "
    "left",
    "too few systems": f"fewer than {AGREEMENT.fewest_systems} systems were run; no verdict",
    NOT_RUN: "a number of the paper's own systems, which were not run here: it stands alone",
    "": "ours only: the paper has no such number",
}


@dataclass(frozen=True)
class Measure:
    """Where a number stands in the paper's tables, and what our systems say about it.

    values: one number per system (kind "systems", "upper quartile", "rounding", "definition"), one outcome 0 or 1 per
        trial ("count", "share"), one outcome per draw of as many systems as the paper's ("p", "statement"), or one
        number in all ("maximum", "number").
    unjudged: the rule that says why the number is not judged, whatever the paper's is.
    candidates: of how many candidates the values are, where the paper pools those and not systems; else 0.
    whole: of a test that is judged by draws of as many systems as the paper's, what all of our systems say; drawn: of
        how many systems a draw is.
    reason: why a number that does not replicate may not, where one is known.
    at_rounding: the size below which a number of kind "rounding" or "maximum" is nothing but rounding.
    """

    table: str
    row: str
    column: str
    values: np.ndarray
    systems: int
    kind: str = "systems"
    known: bool = True
    note: str = ""
    at_rounding: float = 0.0
    unjudged: str = ""
    candidates: int = 0
    whole: float = math.nan
    drawn: int = 0
    reason: str = ""

    @property
    def too_few(self) -> bool:
        """Whether so little was run that nothing can be said: systems, or the candidates that the paper pools."""
        return (self.candidates or self.systems) < AGREEMENT.fewest_systems


@dataclass(frozen=True)
class Spread:
    """The median over systems with its quartiles; one number has none."""

    middle: float
    low: float = math.nan
    high: float = math.nan


def spread(measure: Measure) -> Spread:
    """Our number: the median over systems, the count, or the number itself."""
    import numpy as np

    if not math.isnan(measure.whole):
        return Spread(measure.whole)
    if np.isnan(measure.values.astype(float)).all():
        return Spread(math.nan)
    if measure.kind == "count":
        return Spread(float(measure.values.sum()))
    if measure.kind == "share":
        return Spread(float(measure.values.mean()))
    if measure.kind in ("p", "statement", "maximum", "number"):
        return Spread(float(np.nanmedian(measure.values)))
    known = measure.values[~np.isnan(measure.values)]
    if measure.kind == "upper quartile":
        return Spread(float(np.quantile(known, 0.75)))
    low, middle, high = np.quantile(known, [0.25, 0.5, 0.75])
    return Spread(float(middle), float(low), float(high))


def replicable(measure: Measure, quote: Quote) -> bool:
    """Whether the number is a median of systems, or a count, of which the paper's can be a second draw."""
    if measure.unjudged or measure.too_few or math.isnan(spread(measure).middle):
        return False
    return (measure.kind, quote.kind) in REPLICABLE


def judge(measure: Measure, quote: Quote, generator: np.random.Generator) -> tuple[bool | None, str]:
    """Whether ours agrees with the paper's, and by which rule of `RULES`."""
    ours, paper = spread(measure), quote.value
    if measure.unjudged:
        return None, measure.unjudged
    if quote.kind == "tied" or paper is None:
        return math.isnan(ours.middle), "tied in both"
    if measure.kind == "definition":
        return abs(ours.middle - paper) <= 1e-12, "by definition"
    if measure.too_few:
        return None, "too few systems"
    if math.isnan(ours.middle):
        return False, "undefined"
    if quote.kind == "count":
        return _binomial(measure.values, paper / float(quote.high or 1)), "binomial"
    if measure.kind == "share":
        return _same_share(measure.values, paper), "fisher"
    if measure.kind == "p":
        return _by_draws((measure.values < AGREEMENT.level) == (paper < AGREEMENT.level), "same side of 0.05")
    if quote.kind == "statement":
        rule = "same side of 0.05" if "p =" in measure.note else "same statement"
        return _by_draws(measure.values == paper, rule)
    if quote.kind == "bound":
        return ours.middle > paper, "bound"
    if quote.kind == "about":
        return abs(ours.middle - paper) <= quote.half_unit, "rounds to the paper's value"
    if measure.kind in ("rounding", "maximum"):
        return _at_rounding(ours.middle, paper, measure.at_rounding)
    if measure.kind == "upper quartile":
        return None, "one number"
    return _by_systems(measure.values, ours, quote, generator)


def _by_systems(values: np.ndarray, ours: Spread, quote: Quote, generator: np.random.Generator) -> tuple[bool, str]:
    """The paper's value, give or take half a unit of its last digit, in the quartiles or the bootstrap interval."""
    ranged = quote.kind == "range"
    ends = (quote.low, quote.high) if ranged else (quote.value, quote.value)
    low, high = float(ends[0] or 0.0) - quote.half_unit, float(ends[1] or 0.0) + quote.half_unit
    if ours.low <= high and low <= ours.high:
        return True, "range" if ranged else "iqr"
    found = median_interval(_labelled(values), int(generator.integers(2**32)))
    inside = float(found["low"]) <= high and low <= float(found["high"])
    if ranged:
        return inside, "range"
    return inside, "bootstrap" if inside else "iqr or bootstrap"


def _by_draws(same: np.ndarray, rule: str) -> tuple[bool | None, str]:
    """Does the test say what the paper's does, in one draw or in almost every one?"""
    share = float(same.mean())
    level = AGREEMENT.level
    return (None, "either way") if level < share < 1 - level else (share >= 1 - level, rule)


def _at_rounding(ours: float, paper: float, limit: float) -> tuple[bool, str]:
    if ours > 0 and 1 / AGREEMENT.factor <= ours / paper <= AGREEMENT.factor:
        return True, "order of magnitude"
    both = ours < limit and paper < limit
    return both, "both at rounding" if both else "order of magnitude"


def _binomial(outcomes: np.ndarray, share: float) -> bool:
    from scipy import stats

    low, high = stats.binom.interval(1 - AGREEMENT.level, len(outcomes), share)
    return bool(low <= outcomes.sum() <= high)


def _same_share(outcomes: np.ndarray, share: float) -> bool:
    """Fisher's exact test, the paper's share being one of as many trials as ours."""
    from scipy import stats

    trials, ours, theirs = len(outcomes), int(outcomes.sum()), round(share * len(outcomes))
    return bool(stats.fisher_exact([[ours, trials - ours], [theirs, trials - theirs]]).pvalue >= AGREEMENT.level)


def _labelled(values: np.ndarray) -> xr.DataArray:
    import numpy as np
    import xarray as xr

    return xr.DataArray(np.asarray(values, dtype=float), dims="system")
