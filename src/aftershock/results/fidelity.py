"""How far a prediction is from the exact response: its errors, its signs, and how far in horizon and scale it holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import InvalidInput
from .labelled import require_dimension
from .summaries import finite, summarize

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

VALID = 0.2  # the paper's bar for a valid horizon or scale (eq:app_validity_radius)
TINY = 1e-30


def symmetric_error(exact: xr.DataArray, predicted: xr.DataArray) -> xr.DataArray:
    """Error of each number between 0 (equal) and 1 (another sign, or infinitely far off).

    e = |d − d̂| / (|d| + |d̂| + 1e−30)    (eq:app_relative_error)

    NaN where the exact number is not finite, or a prediction is missing (NaN): there is nothing to compare.

    exact, predicted: d and d̂, of shapes that fit each other.

    >>> import xarray as xr
    >>> exact = xr.DataArray([1.0, 2.0, -4.0, float("inf")], dims="horizon")
    >>> predicted = xr.DataArray([1.0, 1.0, 4.0, 8.0], dims="horizon")
    >>> symmetric_error(exact, predicted).round(2).values.tolist()
    [0.0, 0.33, 1.0, nan]
    """
    exact, bounded = exact.where(finite(exact)), predicted.where(finite(predicted))
    error = abs(exact - bounded) / (abs(exact) + abs(bounded) + TINY)
    return error.where(abs(predicted) != math.inf, 1.0).where(exact.notnull())


def nrmse(exact: xr.DataArray, predicted: xr.DataArray) -> xr.DataArray:
    """Error over all horizons together, relative to the size of the exact response: 0 is equal, 1 is as bad as zero.

    (Σ_h (d − d̂)² / Σ_h d²)^½ over the horizons at which d is finite    (eq:app_nrmse)

    NaN where the exact response is zero throughout, and where a prediction is missing (NaN) at one of the horizons.

    exact, predicted: d and d̂ with a dimension `horizon`.

    >>> import xarray as xr
    >>> exact = xr.DataArray([3.0, 4.0], dims="horizon")
    >>> float(nrmse(exact, 1.5 * exact))
    0.5
    """
    import numpy as np

    known = finite(exact)
    exact = exact.where(known)
    with np.errstate(over="ignore"):  # a prediction that has run away is infinitely wrong
        miss = ((exact - predicted) ** 2).where(known, 0.0).sum("horizon", skipna=False)
        size = (exact**2).sum("horizon")
        return (miss / size.where(size > 0)) ** 0.5


def sign_agreement(exact: xr.DataArray, predicted: xr.DataArray, noise: xr.DataArray) -> xr.DataArray:
    """Share of horizons at which the predicted sign is the exact one.

    Counted are the horizons at which the exact response is finite and above float noise; NaN where there is none.

    exact, predicted: with a dimension `horizon`. noise: the size below which a response has no sign.

    >>> import xarray as xr
    >>> exact = xr.DataArray([1.0, -1.0, 1e-9], dims="horizon")
    >>> predicted = xr.DataArray([0.5, 0.5, -1.0], dims="horizon")
    >>> float(sign_agreement(exact, predicted, xr.DataArray(1e-6)))
    0.5
    """
    counted = (abs(exact) > noise) & finite(exact)
    return ((exact * predicted > 0) & counted).sum("horizon") / counted.sum("horizon")


def extremum_sign_accuracy(exact: xr.DataArray, predicted: xr.DataArray) -> xr.DataArray:
    """Share of candidates whose predicted sign is the exact one, each at its own peak horizon.

    Candidates whose exact response is zero throughout have no sign, and ones with a NaN are not known: they are left
    out, and the share is NaN where none remains.

    exact, predicted: with dimensions `change` and `horizon`.

    >>> import xarray as xr
    >>> horizon = {"horizon": [1, 2]}
    >>> exact = xr.DataArray([[0.1, -2.0], [1.0, 0.5]], dims=("change", "horizon"), coords=horizon)
    >>> predicted = xr.DataArray([[-3.0, 0.1], [-1.0, 0.5]], dims=("change", "horizon"), coords=horizon)
    >>> float(extremum_sign_accuracy(exact, predicted))
    0.5
    """
    require_dimension(exact, "change")
    signs = [summarize(response.fillna(0.0))["peak_sign"] for response in (exact, predicted)]
    known = exact.notnull().all("horizon") & predicted.notnull().all("horizon") & (signs[0] != 0)
    return (signs[0] == signs[1]).where(known).mean("change").rename("extremum_sign_accuracy")


def trusted_horizon(error: xr.DataArray, bar: float = VALID) -> xr.DataArray:
    """The last horizon up to which every symmetric error stays within the bar; 0 where the first fails.

    error: of `symmetric_error`, with a dimension and coordinate `horizon`.

    >>> import xarray as xr
    >>> error = xr.DataArray([0.1, 0.15, 0.5, 0.1], dims="horizon", coords={"horizon": [1, 2, 3, 4]})
    >>> int(trusted_horizon(error))
    2
    """
    good = (error <= bar).astype(int).cumprod("horizon")
    return (good * error["horizon"]).max("horizon")


def validity_radius(error: xr.DataArray, bar: float = VALID) -> xr.DataArray:
    """The largest scale run whose median symmetric error over horizons is within the bar; 0 where none is.

    α* = max {α : median_h e_h(α) ≤ 0.2}, on the grid of scales that were run (eq:app_validity_radius)

    error: of `symmetric_error`, with dimensions `horizon` and `scale` and the scales as a coordinate.

    >>> import xarray as xr
    >>> error = xr.DataArray([[0.01, 0.1], [0.2, 0.6]], dims=("scale", "horizon"), coords={"scale": [0.5, 1.0]})
    >>> float(validity_radius(error))
    0.5
    """
    known = error.notnull().any("horizon")  # a scale with nothing to compare is not valid
    valid = error.where(known, math.inf).median("horizon") <= bar
    return (valid * error["scale"]).max("scale")


def error_exponents(exact: xr.DataArray, predicted: xr.DataArray, limit: float) -> xr.Dataset:
    """p_h of |d(α) − d̂(α)| ∝ α^p: least squares of log|error| on log α over the scales 0 < α ≤ `limit`.

    2 where the remainder is quadratic. Gives `exponent`, `intercept`, `r_squared`, the number of `scales` fitted and
    `reason`. Undefined where an error is exactly zero or not finite; R² also where all errors are equal.

    exact, predicted: d and d̂ with a dimension and coordinate `scale`. limit: the largest scale that is fitted.

    >>> import xarray as xr
    >>> scale = xr.DataArray([0.125, 0.25, 1.0], dims="scale", coords={"scale": [0.125, 0.25, 1.0]})
    >>> found = error_exponents(scale + 3 * scale**2, scale, limit=0.25)
    >>> round(float(found["exponent"]), 6), int(found["scales"])
    (2.0, 2)
    """
    import numpy as np
    import xarray as xr

    require_dimension(exact, "scale")
    scales = exact["scale"].values
    local = np.flatnonzero((scales > 0) & (scales <= limit))
    if len(np.unique(scales[local])) < 2:
        raise InvalidInput(f"an exponent needs two scales at least in (0, {limit:g}]; got {scales.tolist()}")
    error = abs(exact - predicted).isel(scale=local).transpose("scale", ...)
    flat = error.values.reshape(len(local), -1)
    usable = (np.isfinite(flat) & (flat > 0)).all(0)
    fits = np.full((3, flat.shape[1]), np.nan)
    if usable.any():
        fits[:, usable] = _line(np.log(scales[local]), np.log(flat[:, usable]))
    rest, sizes = error.dims[1:], error.shape[1:]
    reason = np.where(usable, "", "an error is exactly zero or not finite: it has no logarithm")
    found = {name: (rest, row.reshape(sizes)) for name, row in zip(("exponent", "intercept", "r_squared"), fits)}
    coords = {name: c for name, c in error.coords.items() if "scale" not in c.dims}
    return xr.Dataset({**found, "reason": (rest, reason.reshape(sizes)), "scales": len(local)}, coords)


def _line(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Slope, intercept and R² of each column of y on x."""
    import numpy as np

    slope, intercept = np.polyfit(x, y, 1)
    left = ((y - intercept - np.outer(x, slope)) ** 2).sum(0)
    spread = ((y - y.mean(0)) ** 2).sum(0)
    flat = spread <= (1e-14 * abs(y).max(0)) ** 2  # equal but for rounding
    return np.stack([slope, intercept, np.where(flat, np.nan, 1 - left / np.where(flat, 1.0, spread))])
