"""What repeated futures say: the tables of Experiment 2, the same for every system."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..results.statistics import coefficient_of_variation, spearman
from ..theory.futures import prospective_ratio, prospective_structure, summary_of
from .measures import (
    CV_ROUNDING,
    Results,
    has,
    measured,
)
from .verdicts import Measure

if TYPE_CHECKING:
    import xarray as xr

FUTURE_NAMES = {
    "standard": "Quadratic, standard",
    "anisotropic": "Quadratic, anisotropic",
    "mlp": "MLP–GELU",
    "cnn": "CNN–ReLU",
}
PRESENT = {
    "exact_one_step": "Exact 1-step",
    "gradient_norm": "Grad. norm",
    "write_norm": "Write norm",
    "present_frozen": "Frozen ISO",
    "reference_surrogate": "Ref.-surrogate ISO",
    "sampled_future": "Sampled future (ours)",
    "forecast": "Forecast (ours)",
    "sampled_true": "Sampled, true process (ours)",
}


def futures(results: Results, settings: Sequence[str]) -> Iterator[Measure]:
    """The five tables of repeated futures."""
    for setting in settings:
        name = FUTURE_NAMES[setting]
        if has(results, setting, "future_response"):
            for family in results[setting]["family"].values:
                yield from _structure(results[setting].sel(family=family), f"{name}; {family}", name)
        if has(results, setting, "matched_first_step"):
            data, table = results[setting], "tab:app_exp2_matching_audit"
            values = coefficient_of_variation(abs(data["matched_first_step"]), "change")
            yield measured(table, name, "CV of |d1|", values, kind="rounding", at_rounding=CV_ROUNDING)
            if "accepted" in data:
                yield measured(table, name, "Calibration success", data["accepted"].astype(float).mean("change"))


def _structure(data: xr.Dataset, row: str, name: str) -> Iterator[Measure]:
    found = prospective_structure(data["future_response"], "peak")
    primary = "tab:app_exp2_predictability_primary"
    yield measured(primary, row, "Π(M)", found["prospective_ratio"])
    yield measured(primary, row, "Branch ρ", found["branch_correlation"])
    if "present_score" in data:
        rho = spearman(data["present_score"], found["mean"])["rho"]
        for answer in [answer for answer in PRESENT if answer in rho["present_method"].values]:
            values = rho.sel(present_method=answer)
            if answer not in ("sampled_true", "forecast") or values.notnull().any():
                yield measured("tab:app_exp2_present_scores", row, PRESENT[answer], values)
    if str(data["family"].values) == "matched":
        for column, key in (("Between candidates", "between"), ("Within futures", "within")):
            yield measured("tab:app_exp2_variance_components", name, column, found[key])
    for column, by in (("Π(A)", "total_abs"), ("Π(P+)", "max_increase")):
        values = prospective_ratio(summary_of(data["future_response"], by))
        yield measured("tab:app_exp2_secondary_metrics", row, column, values)
