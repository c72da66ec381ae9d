"""The paper's finite differences: which step it selects, and how far each step is from the exact tangent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...results.fidelity import TINY
from ...results.statistics import across_candidates

if TYPE_CHECKING:
    import xarray as xr

IDENTIFIABLE = 0.25


def select(derivative: xr.DataArray) -> xr.Dataset:
    """The smaller step of the most consistent adjacent pair, candidate by candidate.

    Gives `consistency` (the smallest E), `step`, `identifiable` (E ≤ 0.25) and `derivative`, which is NaN for
    candidates that are not.

    derivative: [fd_step, change, horizon] and more.
    """
    import xarray as xr

    error = consistency(derivative)
    best = error.fillna(float("inf")).argmin("fd_step")
    smallest = error.isel(fd_step=best)
    identifiable = smallest <= IDENTIFIABLE
    found = {
        "consistency": smallest,
        "step": error["fd_step"].isel(fd_step=best).where(smallest.notnull()),
        "identifiable": identifiable,
        "derivative": derivative.sel(fd_step=error["fd_step"]).isel(fd_step=best).where(identifiable),
    }
    return xr.Dataset({name: values.drop_vars("fd_step", errors="ignore") for name, values in found.items()})


def consistency(derivative: xr.DataArray) -> xr.DataArray:
    """How much two neighbouring steps differ, by the smaller one of the pair: [fd_step, change] and more.

    E(ε, ε') = ‖d̂(ε) − d̂(ε')‖ / (½(‖d̂(ε)‖ + ‖d̂(ε')‖) + 1e−30)
    """
    falling = derivative.sortby("fd_step", ascending=False)
    coarse, fine = falling.isel(fd_step=slice(None, -1)), falling.isel(fd_step=slice(1, None))
    coarse = coarse.assign_coords(fd_step=fine["fd_step"])
    return _norm(coarse - fine) / ((_norm(coarse) + _norm(fine)) / 2 + TINY)


def selected_error(data: xr.Dataset, selection: xr.Dataset) -> xr.DataArray:
    """The error of each candidate's selected step; NaN where the candidate is not identifiable."""
    error = step_error(data)
    return error.sel(fd_step=selection["step"].fillna(float(error["fd_step"][0]))).where(selection["identifiable"])


def step_error(data: xr.Dataset) -> xr.DataArray:
    """‖d̂(ε) − d̂‖ / ‖d̂‖ with the exact tangent d̂ as the truth, [fd_step, change] and more."""
    tangent = exact_tangent(data)
    size = _norm(tangent)
    return _norm(data["fd_derivative"] - tangent) / size.where(size > 0)


def exact_tangent(data: xr.Dataset) -> xr.DataArray:
    """The derivative that the finite differences estimate."""
    largest = float(data["scale"].max())
    return data["response"].sel({"answer": "tangent", "scale": largest}, drop=True) / largest


def step_curve(data: xr.Dataset) -> xr.Dataset:
    """The median `error` over candidates by step, and its two slopes in log–log: [system].

    `falling` is the slope at the smallest steps (−1 where float noise rules, divided by ε), `rising` the one at the
    largest (2 where truncation rules, ε²). `best` is the smallest error and `best_step` where it is.
    """
    import numpy as np
    import xarray as xr

    error = across_candidates(step_error(data)).sortby("fd_step")
    logs = xr.apply_ufunc(np.log, error.where(error > 0))
    slope = logs.diff("fd_step") / np.diff(np.log(error["fd_step"].values))
    known = error.notnull().any("fd_step")
    at = error.fillna(float("inf")).argmin("fd_step")
    return xr.Dataset(
        {
            "error": error,
            "falling": slope.isel(fd_step=0, drop=True),
            "rising": slope.isel(fd_step=-1, drop=True),
            "best": error.min("fd_step"),
            "best_step": error["fd_step"].isel(fd_step=at).drop_vars("fd_step").where(known),
        }
    )


def _norm(values: xr.DataArray) -> xr.DataArray:
    return (values**2).sum("horizon", skipna=False) ** 0.5
