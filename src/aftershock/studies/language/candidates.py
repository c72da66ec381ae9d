"""What each candidate of each language model says: errors of every prediction, validity, exponents, scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ...results.certificate import TRUST
from ...results.fidelity import error_exponents, nrmse, symmetric_error
from ...results.statistics import spearman
from ...results.summaries import summarize
from ..measures import LOCAL
from .conditions import Condition, conditions, in_float64, once
from .finite_differences import select

if TYPE_CHECKING:
    import xarray as xr

FD = "fd"
DROWNED = 0.5  # the share of candidates lost in noise at which a scale says nothing
PREDICTIONS = (FD, "tangent", "semilinear")


@dataclass(frozen=True)
class Candidates:
    """A joined dataset of language systems, and what follows from it, each computed once.

    Everything is [system, change] with `scale`, `answer` ("fd", "tangent", "semilinear") or `score` beside them.
    Candidates whose finite differences are not identifiable have NaN for "fd" and are left out of its numbers, and
    so is every candidate at a scale where most of its system's are lost in noise.
    """

    data: xr.Dataset

    @cached_property
    def conditions(self) -> list[Condition]:
        return conditions(self.data)

    @cached_property
    def pairs(self) -> list[tuple[int, int | None]]:
        """Places of what is pooled, each with the place of the same in float64 where that is another."""
        return [(i, in_float64(self.conditions, i)) for i in once(self.conditions)]

    @cached_property
    def once(self) -> Candidates:
        """Each model and text in one dtype: what is pooled."""
        return Candidates(self.data.isel(system=once(self.conditions)))

    @cached_property
    def exact(self) -> xr.DataArray:
        return self.data["response"].sel({"answer": "exact"}, drop=True)

    @cached_property
    def lost(self) -> xr.DataArray:
        """Candidates that cannot be told from noise, scale by scale."""
        return lost_in_noise(self.exact, self.data["noise_floor"])

    @cached_property
    def drowned(self) -> xr.DataArray:
        """Scales at which a system's candidates are mostly lost: [system, scale]."""
        return self.lost.mean("change") >= DROWNED

    @cached_property
    def noise_share(self) -> xr.DataArray:
        """What rounding alone does over the exact response, the median over horizons."""
        size = abs(self.exact)
        return (self.data["noise_floor"] / size.where(size > 0)).median("horizon")

    @cached_property
    def selection(self) -> xr.Dataset:
        return select(self.data["fd_derivative"])

    @cached_property
    def predicted(self) -> xr.DataArray:
        import xarray as xr

        own = self.data["response"].sel({"answer": list(PREDICTIONS[1:])})
        differences = (self.selection["derivative"] * self.data["scale"]).expand_dims(answer=[FD])
        return xr.concat([differences, own], dim="answer")

    @cached_property
    def errors(self) -> xr.Dataset:
        """`nrmse`, `cosine`, `peak` (symmetric error of M), `sign` (1 where the extremum's sign is right), `valid`."""
        import xarray as xr

        exact, predicted = self.exact, self.predicted
        known = predicted.notnull().all("horizon")
        own, other = summarize(exact), summarize(predicted)
        size = ((exact**2).sum("horizon") * (predicted**2).sum("horizon")) ** 0.5
        middle = symmetric_error(exact, predicted).median("horizon")
        return xr.Dataset(
            {
                "nrmse": nrmse(exact, predicted),
                "cosine": (exact * predicted).sum("horizon", skipna=False) / size.where(size > 0),
                "peak": symmetric_error(own["peak"], other["peak"]),
                "sign": (own["peak_sign"] == other["peak_sign"]).where(known),
                "valid": (middle <= TRUST.symmetric_error).where(known),
            }
        ).where(~self.drowned)

    @cached_property
    def exponents(self) -> xr.DataArray:
        """p of |d(α) − d̂(α)| ∝ αᵖ over α ≤ 1/4, horizon by horizon, then the median over horizons."""
        return error_exponents(self.exact.where(~self.drowned), self.predicted, LOCAL)["exponent"].median("horizon")

    @cached_property
    def full(self) -> xr.DataArray:
        """The exact response at full scale."""
        return self.exact.sel(scale=float(self.exact["scale"].max()), drop=True)

    @cached_property
    def magnitude(self) -> xr.DataArray:
        return abs(self.full).max("horizon")

    @cached_property
    def scores(self) -> xr.DataArray:
        """What ranks candidates: [score, system, change]."""
        import xarray as xr

        largest = float(self.exact["scale"].max())
        peaks = abs(self.predicted.sel(scale=largest, drop=True)).max("horizon", skipna=False)
        found = {
            FD: peaks.sel({"answer": FD}, drop=True),
            "one_step": abs(self.full.isel(horizon=0, drop=True)),
            "gradient_norm": self.data["gradient_norm"],
            "write_norm": self.data["write_norm"],
            "tangent": peaks.sel({"answer": "tangent"}, drop=True),
            "semilinear": peaks.sel({"answer": "semilinear"}, drop=True),
        }
        return xr.concat([s.reset_coords(drop=True) for s in found.values()], dim="score").assign_coords(
            score=list(found)
        )

    @cached_property
    def rho(self) -> xr.DataArray:
        """Spearman of every score with M inside each system: [score, system]."""
        return spearman(self.scores, self.magnitude)["rho"]

    @cached_property
    def noise(self) -> xr.DataArray:
        """The float noise of the exact response over the tangent's error at the smallest scale: median, [system].

        Where it nears 1, that error is noise of the two runs and no longer an error of the prediction.
        """
        smallest = float(self.exact["scale"].min())
        error = abs(self.exact - self.predicted.sel({"answer": "tangent"})).sel(scale=smallest)
        share = self.data["noise_floor"] / error.where(error > 0)
        return share.median(["change", "horizon"])

    @cached_property
    def semilinear_share(self) -> xr.DataArray:
        """Semilinear's error over the tangent's at the smallest scale: median, [system].

        The two differ by AdamW's arithmetic and the readout; where this is small, the tangent's error lies in those.
        """
        at = self.errors["nrmse"].sel(scale=float(self.exact["scale"].min()))
        semilinear, tangent = (at.sel({"answer": answer}, drop=True) for answer in ("semilinear", "tangent"))
        return (semilinear / tangent.where(tangent > 0)).median("change")


def lost_in_noise(exact: xr.DataArray, noise: xr.DataArray) -> xr.DataArray:
    """Whether most horizons of a response are within what rounding alone does, candidate by candidate and scale."""
    return (abs(exact) < TRUST.noise_margin * noise).mean("horizon") > 0.5
