"""From numbers per candidate to a statement about systems: the order of aggregation, and the tests of it.

Candidates (`change`), horizons and scales are nested inside a system, and only systems are independent: first over
horizons inside a candidate, then the median over candidates inside a system, then median and quartiles over systems.
Medians of an even count average the middle two; variances are population variances (ddof = 0). What is undefined is
NaN, is left out of the medians and counted, and a variable `reason` says why ("" where the number is defined).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from ..core.randomness import Randomness, seed_of
from ..errors import InvalidInput
from .labelled import require_dimension

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

FEWEST = 3  # candidates below which a rank correlation says nothing
ROUNDING = 1e-9  # numbers that differ by less than this share of their size are tied
RESAMPLES = 9999


# --- the order of aggregation


def across_candidates(values: xr.DataArray) -> xr.DataArray:
    """Median over the candidates inside each system: one number per system.

    values: with a dimension `change`; NaN is left out.

    >>> import xarray as xr
    >>> across_candidates(xr.DataArray([[1.0, 5.0, 2.0], [4.0, 4.0, 9.0]], dims=("system", "change"))).values.tolist()
    [2.0, 4.0]
    """
    require_dimension(values, "change")
    return _median(values, "change")


def across_systems(values: xr.DataArray) -> xr.Dataset:
    """`median`, `q25`, `q75` and `iqr` over systems, how many `systems` were counted, how many were `undefined`.

    values: one number per system, with a dimension `system`; NaN is undefined.

    >>> import xarray as xr
    >>> found = across_systems(xr.DataArray([1.0, 2.0, 4.0, float("nan")], dims="system"))
    >>> float(found["median"]), float(found["iqr"]), int(found["systems"]), int(found["undefined"])
    (2.0, 1.5, 3, 1)
    """
    import xarray as xr

    require_dimension(values, "system")
    low, high = (_quiet(values.quantile, q, "system").drop_vars("quantile") for q in (0.25, 0.75))
    counted = values.notnull().sum("system")
    return xr.Dataset(
        {
            "median": _median(values, "system"),
            "q25": low,
            "q75": high,
            "iqr": high - low,
            "systems": counted,
            "undefined": values.sizes["system"] - counted,
        }
    )


def aggregate(values: xr.DataArray) -> xr.Dataset:
    """A quantity per candidate or per horizon as a statement about systems, in the one order.

    Horizons, where there are any, go by their median, as symmetric errors do; quantities that combine horizons in
    another way (NRMSE, peaks) have none left. Dimensions other than horizon, change and system stay.

    values: with a dimension `system`, and `change` and `horizon` where the quantity has them.

    >>> import xarray as xr
    >>> values = xr.DataArray([[1.0, 3.0], [5.0, 5.0], [7.0, 9.0]], dims=("system", "change"))
    >>> float(aggregate(values)["median"])  # of 2, 5 and 8
    5.0
    """
    if "horizon" in values.dims:
        values = _median(values, "horizon")
    return across_systems(across_candidates(values) if "change" in values.dims else values)


def coefficient_of_variation(values: xr.DataArray, dim: str) -> xr.DataArray:
    """How much values spread, relative to their size: population standard deviation over |mean|.

    NaN where the mean is zero.

    >>> import xarray as xr
    >>> float(coefficient_of_variation(xr.DataArray([1.0, 3.0], dims="future"), "future"))
    0.5
    """
    require_dimension(values, dim)
    mean = abs(values.mean(dim))
    return values.var(dim, ddof=0) ** 0.5 / mean.where(mean > 0)


# --- rankings


def rank_correlation(a: np.typing.ArrayLike, b: np.typing.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Spearman's ρ along the last axis, ties averaged, and why it is undefined where it is (NaN).

    A side that is constant to rounding has no order: exact one-step matching makes such scores. Candidates without
    both numbers are left out.

    >>> rho, reason = rank_correlation([[1, 2, 3], [1, 2, 3]], [[10, 30, 20], [5, 5, 5]])
    >>> rho.tolist()
    [0.5, nan]
    >>> reason.tolist()
    ['', 'one side is the same for every candidate']
    """
    import numpy as np

    a, b = np.broadcast_arrays(np.asarray(a, dtype=float), np.asarray(b, dtype=float))
    both = np.isfinite(a) & np.isfinite(b)
    rho, reason = np.full(a.shape[:-1], np.nan), np.full(a.shape[:-1], "", dtype=object)
    whole = both.all(-1)
    if whole.any():
        rho[whole], reason[whole] = _whole_rank_correlation(a[whole], b[whole])
    for row in map(tuple, np.argwhere(~whole)):
        rho[row], reason[row] = _whole_rank_correlation(a[row][both[row]], b[row][both[row]])
    return rho, reason


def _whole_rank_correlation(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same where every number is there: Pearson's correlation of the ranks."""
    import numpy as np
    from scipy import stats

    rows = a.shape[:-1]
    if a.shape[-1] < FEWEST:
        return np.full(rows, np.nan), np.full(rows, "fewer than three candidates have both numbers", dtype=object)
    flat = np.zeros(rows, dtype=bool)
    centered = []
    for side in (a, b):
        flat |= np.ptp(side, axis=-1) <= ROUNDING * abs(side).max(-1)
        ranks = stats.rankdata(side, axis=-1)
        centered.append(ranks - ranks.mean(-1, keepdims=True))
    x, y = centered
    size = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    rho = np.where(flat, np.nan, (x * y).sum(-1) / np.where(size > 0, size, 1.0))
    return rho, np.where(flat, "one side is the same for every candidate", "")


def spearman(score: xr.DataArray, target: xr.DataArray) -> xr.Dataset:
    """Rank correlation of two quantities over the candidates inside each system: `rho` and `reason`.

    Undefined where one side is constant, or where fewer than three candidates have both numbers.

    score, target: with a dimension `change`; every other dimension stays.

    >>> import xarray as xr
    >>> found = spearman(xr.DataArray([1.0, 2.0, 3.0], dims="change"), xr.DataArray([10.0, 30.0, 20.0], dims="change"))
    >>> float(found["rho"])
    0.5
    """
    import xarray as xr

    for values in (score, target):
        require_dimension(values, "change")
        if values.sizes["change"] < FEWEST:
            raise InvalidInput(f"a rank correlation needs {FEWEST} candidates at least; got {values.sizes['change']}")
    rho, reason = xr.apply_ufunc(
        rank_correlation, score, target, input_core_dims=[["change"], ["change"]], output_core_dims=[[], []]
    )
    return xr.Dataset({"rho": rho, "reason": reason.astype(str)})


# --- comparisons over systems


def compare_scores(values: xr.DataArray, reference: Hashable, alternative: str = "two-sided") -> xr.Dataset:
    """Paired Wilcoxon tests of `reference` against every other score, the system as the unit, with Holm's correction.

    alternative: "greater" asks whether the reference is larger. Gives, per score, the median `difference`
    (reference less score), `statistic`, `p`, `p_holm`, the number of `pairs`, and `reason`; p is undefined where no
    pair differs, and is then no comparison that Holm counts. Other dimensions are families of their own.

    values: with dimensions `system` and `score`. reference: one of the scores.

    >>> import xarray as xr
    >>> rho = [[0.9, 0.8, 0.95, 0.9, 0.85, 0.92], [0.5, 0.2, 0.6, 0.1, 0.4, 0.3]]
    >>> values = xr.DataArray(rho, dims=("score", "system"), coords={"score": ["iso", "norm"]})
    >>> found = compare_scores(values, "iso", "greater").sel(score="norm")
    >>> int(found["pairs"]), float(found["p"])  # every pair agrees: p = 1/2⁶
    (6, 0.015625)
    """
    import numpy as np
    from scipy import stats

    require_dimension(values, "system")
    require_dimension(values, "score")
    names = values["score"].values.tolist()
    if reference not in names or len(names) < 2:
        raise InvalidInput(f"nothing to compare {reference!r} with: the scores are {', '.join(map(str, names))}")
    own = values.sel(score=reference, drop=True)
    others = values.sel(score=[name for name in names if name != reference])

    def one(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float, int, str]:
        gap = (a - b)[np.isfinite(a - b)]
        middle = float(np.median(gap)) if len(gap) else np.nan
        if not gap.any():
            return middle, np.nan, np.nan, len(gap), "no pair differs" if len(gap) else "no system has both numbers"
        test = stats.wilcoxon(gap, alternative=alternative)
        return middle, float(test.statistic), float(test.pvalue), len(gap), ""

    names = ["difference", "statistic", "p", "pairs", "reason"]
    found = _rows(one, (own, others), ("system", "system"), names)
    return found.assign(p_holm=_along(holm, found["p"], "score"))


def holm(p: np.typing.ArrayLike) -> np.ndarray:
    """Holm's step-down correction: the i-th smallest of n becomes the largest (n−j) p_j so far, at most 1.

    NaN stays NaN and is not counted.

    p: p-values of one family of comparisons.

    >>> holm([0.01, 0.04, 0.03, float("nan")]).tolist()
    [0.03, 0.06, 0.06, nan]
    """
    import numpy as np

    p = np.asarray(p, dtype=float)
    if ((p < 0) | (p > 1)).any():
        raise InvalidInput("a p-value lies between 0 and 1")
    order = np.argsort(p)[: int(np.isfinite(p).sum())]  # NaN sorts last
    adjusted = np.full_like(p, np.nan)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1.0)
    return adjusted


def median_interval(values: xr.DataArray, generator: Randomness = 0, level: float = 0.95) -> xr.Dataset:
    """Percentile bootstrap interval of the median over systems: `median`, `low`, `high`, `systems`, `reason`.

    values: one number per system, with a dimension `system`. generator: draws the resamples; or an integer seed.
    level: of the interval.

    >>> import xarray as xr
    >>> values = xr.DataArray([1.0, 2.0, 3.0, 4.0, 5.0], dims="system")
    >>> found = median_interval(values)
    >>> float(found["low"]), float(found["median"]), float(found["high"])
    (1.0, 3.0, 5.0)
    """
    import numpy as np
    from scipy import stats

    require_dimension(values, "system")
    if not 0 < level < 1:
        raise InvalidInput(f"the level of an interval lies between 0 and 1; got {level}")
    draws = np.random.default_rng(seed_of(generator))

    def one(x: np.ndarray) -> tuple[float, float, float, int, str]:
        x = x[np.isfinite(x)]
        if len(x) < 2:
            return float(x[0]) if len(x) else np.nan, np.nan, np.nan, len(x), "fewer than two systems are defined"
        found = stats.bootstrap(
            (x,), np.median, confidence_level=level, n_resamples=RESAMPLES, method="percentile", random_state=draws
        ).confidence_interval
        return float(np.median(x)), float(found.low), float(found.high), len(x), ""

    return _rows(one, (values,), ("system",), ("median", "low", "high", "systems", "reason"))


# --- labels


def _median(values: xr.DataArray, dim: str) -> xr.DataArray:
    return _quiet(values.median, dim, skipna=True)


def _quiet(reduce: Callable[..., xr.DataArray], *arguments: Any, **options: Any) -> xr.DataArray:
    """NumPy warns of slices that are NaN throughout; here they are counted instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return reduce(*arguments, **options)


def _rows(
    one: Callable[..., tuple[Any, ...]], arrays: Sequence[xr.DataArray], dims: Sequence[str], names: Sequence[str]
) -> xr.Dataset:
    """`one` on every row of the arrays along `dims`, its results as labelled variables."""
    import xarray as xr

    kinds = [object if name == "reason" else int if name in ("pairs", "systems") else float for name in names]
    columns = xr.apply_ufunc(
        one,
        *arrays,
        input_core_dims=[[dim] for dim in dims],
        output_core_dims=[[] for _ in names],
        output_dtypes=kinds,
        vectorize=True,
    )
    # as `str` NumPy would cut every reason to the length of the first
    return xr.Dataset({name: c.astype(str) if name == "reason" else c for name, c in zip(names, columns)})


def _along(f: Callable[[np.ndarray], np.ndarray], values: xr.DataArray, dim: str) -> xr.DataArray:
    import xarray as xr

    return xr.apply_ufunc(f, values, input_core_dims=[[dim]], output_core_dims=[[dim]], vectorize=True)
