"""Finite-horizon summaries of a signed response (the paper's section 3 and appendix B).

Positive means that the loss goes up. h = 1 is the first state after the change.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr


def summarize(response: xr.DataArray) -> xr.Dataset:
    """A response in a few numbers: how large, when, which way (eq:peak), and how much in all (eq:totals).

    peak              M = max_h |δF|
    peak_horizon      h* = the earliest horizon of the peak
    delayed           h* > 1
    peak_sign         s* = sign of δF at h*
    max_increase      P+ = max_h [δF]_+        max_decrease    P− = max_h [−δF]_+
    total_abs         ARE = Σ_h |δF|           total_increase, total_decrease: its signed halves AEL±

    All but `peak_sign` are sizes, without a sign. A response that is NaN throughout (a candidate that does not exist)
    has NaN for sizes, and 0 for its sign; one that diverges has an infinite peak at its first infinite horizon.

    response: δF with a dimension and coordinate `horizon`; every other dimension (answer, change, scale) stays.

    >>> import xarray as xr
    >>> late = xr.DataArray([0.5, -2.0, 1.0], dims="horizon", coords={"horizon": [1, 2, 3]})
    >>> found = summarize(late)
    >>> float(found["peak"]), int(found["peak_horizon"]), int(found["peak_sign"])
    (2.0, 2, -1)
    >>> float(found["total_increase"]), float(found["total_decrease"])
    (1.5, 2.0)
    """
    import numpy as np
    import xarray as xr

    size = abs(response)
    at_peak = size.fillna(-1.0).argmax("horizon")
    horizon = response["horizon"].isel(horizon=at_peak).drop_vars("horizon", errors="ignore")
    at_extremum = response.isel(horizon=at_peak).drop_vars("horizon", errors="ignore")
    up, down = response.clip(min=0), (-response).clip(min=0)
    return xr.Dataset(
        {
            "peak": size.max("horizon"),
            "peak_horizon": horizon,
            "delayed": horizon > int(response["horizon"][0]),
            "peak_sign": xr.apply_ufunc(np.sign, at_extremum.fillna(0.0)).astype(int),
            "max_increase": up.max("horizon"),
            "max_decrease": down.max("horizon"),
            "total_abs": size.sum("horizon", min_count=1),
            "total_increase": up.sum("horizon", min_count=1),
            "total_decrease": down.sum("horizon", min_count=1),
        }
    )


def diverged_at(response: xr.DataArray) -> xr.DataArray:
    """The first horizon at which a response is not finite; NaN where it is finite throughout.

    response: with a dimension and coordinate `horizon`.

    >>> import xarray as xr
    >>> curves = [[0.1, float("inf"), float("inf")], [0.1, 0.2, 0.3]]
    >>> response = xr.DataArray(curves, dims=("change", "horizon"), coords={"horizon": [1, 2, 3]})
    >>> diverged_at(response).values.tolist()
    [2.0, nan]
    """
    return _first(~finite(response)).rename("diverged_at")


def spike_margin(control: xr.DataArray, threshold: float | xr.DataArray) -> xr.DataArray:
    """How much the loss may rise at each horizon before it is a spike: T_{t+h} − F_{t+h}(θ^c). eq:spike_margin

    control: the loss without the change, by `horizon`. threshold: T, one number or one per horizon.

    >>> import xarray as xr
    >>> control = xr.DataArray([1.0, 1.25], dims="horizon", coords={"horizon": [1, 2]})
    >>> spike_margin(control, 1.5).values.tolist()
    [0.5, 0.25]
    """
    return (threshold - control).rename("spike_margin")


def crossing(response: xr.DataArray, margin: xr.DataArray) -> xr.DataArray:
    """The first horizon at which the change lifts the loss over the threshold; NaN where none does.

    Horizons at which the control itself is over the threshold do not count.

    response: δF with a dimension and coordinate `horizon`. margin: of `spike_margin`.

    >>> import xarray as xr
    >>> response = xr.DataArray([0.1, 0.4], dims="horizon", coords={"horizon": [1, 2]})
    >>> margin = xr.DataArray([0.5, 0.25], dims="horizon", coords={"horizon": [1, 2]})
    >>> float(crossing(response, margin))
    2.0
    """
    return _first((margin >= 0) & (response > margin)).rename("crossing")


def finite(values: xr.DataArray) -> xr.DataArray:
    """Where a number is neither infinite nor NaN.

    >>> import xarray as xr
    >>> finite(xr.DataArray([1.0, float("inf"), float("nan")])).values.tolist()
    [True, False, False]
    """
    return abs(values) < math.inf


def _first(true: xr.DataArray) -> xr.DataArray:
    """The first horizon at which it is true; NaN where it never is."""
    first = true["horizon"].isel(horizon=true.argmax("horizon"))
    return first.drop_vars("horizon", errors="ignore").where(true.any("horizon"))
