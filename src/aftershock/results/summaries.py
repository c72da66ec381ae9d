"""Finite-horizon summaries of a signed response (the paper's section 3 and appendix B)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr


def summarize(response: xr.DataArray) -> xr.Dataset:
    """Summaries over `horizon`, for every answer, change and scale.

    peak              M = max_h |δF|
    peak_horizon      h* = the earliest horizon of the peak
    delayed           h* > 1
    peak_sign         s* = sign of δF at h*
    max_increase      P+ = max_h [δF]_+        max_decrease    P− = max_h [−δF]_+
    total_abs         ARE = Σ_h |δF|           total_increase, total_decrease: its signed halves AEL±

    A response that is NaN throughout (a candidate that does not exist) has NaN for sizes, and 0 for its sign.
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


def spike_margin(control: xr.DataArray, threshold: float | xr.DataArray) -> xr.DataArray:
    """T_{t+h} − F_{t+h}(θ^c): how much the loss may rise at each horizon before it is a spike."""
    return (threshold - control).rename("spike_margin")


def crossing(response: xr.DataArray, margin: xr.DataArray) -> xr.DataArray:
    """The first horizon at which the change lifts the loss over the threshold; NaN where none does.

    Horizons at which the control itself is over the threshold do not count.
    """
    crossed = (margin >= 0) & (response > margin)
    first = response["horizon"].isel(horizon=crossed.argmax("horizon"))
    return first.drop_vars("horizon", errors="ignore").where(crossed.any("horizon")).rename("crossing")
