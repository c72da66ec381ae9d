"""What the controlled systems say about every number of the paper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...results.statistics import across_candidates, coefficient_of_variation
from ...results.summaries import summarize
from ..future_measures import futures
from ..measures import (
    CV_ROUNDING,
    INFERRED,
    NAMES,
    OURS,
    SCORES,
    SHARE_OF_HORIZONS,
    UNKNOWN_RULE,
    Results,
    exponents,
    fidelity,
    has,
    has_family,
    measured,
    nested,
    percentile,
    pooled,
    pooled_fidelity,
    radii,
    ranking,
)
from ..verdicts import Measure
from .persistence import isolated_peaks, long_measures, statements

if TYPE_CHECKING:
    import xarray as xr

SELECTED = "the paper's 'selected candidates' are not defined; ours are all 16"
SIGNS = "the share of candidates whose extremum has the right sign"


def quadratic_measures(results: Results) -> Iterator[Measure]:
    """Every cell of the controlled systems, in the paper's order."""
    probes = ("standard", "anisotropic")
    columns = {"nrmse": "NRMSE", "peak": "Rel. M err.", "extremum": "Sign acc.", "sign": SHARE_OF_HORIZONS}
    yield from fidelity(results, "tab:app_exp1_fidelity", probes, columns, {"Sign acc.": SIGNS})
    yield from _controlled_text(results)
    natural = ("full_iso", "exact_one_step", "gradient_norm", "write_norm", "curvature", *OURS)
    yield from ranking(results, "text:exp1_natural_ranking", probes, "natural", natural)
    yield from _matching(results)
    yield from ranking(results, "tab:app_exp1_matched_ablation", ("standard", "rotating"), "matched", tuple(SCORES))
    for setting in probes:
        yield from _interventions(results, setting)
        yield from _persistence(results, setting)
    yield from long_measures(results)
    yield from futures(results, probes)


def _controlled_text(results: Results) -> Iterator[Measure]:
    import numpy as np

    table, probes = "text:exp1_controlled", ("standard", "anisotropic")
    yield from pooled_fidelity(results, table, probes)
    fitted = [s for s in probes if has(results, s, "exact", "predicted")]
    if fitted:
        yield measured(table, "Validity radius", "value", pooled([radii(results[s]) for s in fitted]))
        fits = [exponents(results[s]) for s in fitted]
        curves = np.concatenate([fit["exponent"].transpose("horizon", "system").values for fit in fits])
        middles = np.nanmedian(curves, axis=1)
        for word, at in (("smallest", np.nanargmin(middles)), ("largest", np.nanargmax(middles))):
            yield Measure(table, f"Error exponent, {word} over horizons", "value", curves[at], curves.shape[1])
        yield measured(table, "R² of the exponent's fit", "value", pooled([fit["r_squared"] for fit in fits]))
    if has(results, "standard", "readout_cosine"):
        smallest = results["standard"]["readout_cosine"].min("horizon")
        yield measured(table, "Smallest readout cosine, standard", "value", smallest)
    for setting in ("standard", "rotating"):
        if has_family(results, setting, "matched") and "null_correlation" in results[setting]:
            row = f"Percentile in the readout null, {setting}"
            yield measured(table, row, "value", percentile(results[setting], "matched"))
    yield from isolated_peaks(results)
    yield from statements(results)


def _matching(results: Results) -> Iterator[Measure]:
    table = "tab:app_exp1_matching"
    for setting in ("standard", "rotating"):
        if not has_family(results, setting, "matched"):
            continue
        data, column = results[setting], NAMES[setting]
        magnitude = data["magnitude"].sel(family="matched")
        if "accepted" in data:
            yield measured(table, "Calibration success", column, data["accepted"].astype(float).mean("change"))
        if "first_step" in data:
            first = abs(data["first_step"].sel(family="matched"))
            values = coefficient_of_variation(first, "change")
            yield measured(table, "CV of |d1|", column, values, kind="rounding", at_rounding=CV_ROUNDING)
            yield measured(table, "CV of future M", column, coefficient_of_variation(magnitude, "change"))
            yield measured(table, "M / |d1|", column, across_candidates(magnitude / first))
        if "parameter_gain" in data:
            yield measured(table, "Parameter gain", column, across_candidates(data["parameter_gain"]))


def _interventions(results: Results, setting: str) -> Iterator[Measure]:
    if not has(results, setting, "channel_exact"):
        return
    found = three_summaries(nested(results[setting]["channel_exact"]))
    for channel in found["M"]["channel"].values:
        kind = "definition" if channel == "000" else "systems"
        for name, values in found.items():
            yield measured(
                "tab:app_exp1_state_interventions", str(channel), f"{NAMES[setting]}: {name}",
                values.sel(channel=channel), kind=kind, known=False, note=SELECTED,
            )  # fmt: skip


def _persistence(results: Results, setting: str) -> Iterator[Measure]:
    for channel, number, known, note in (("m", "β1", True, INFERRED), ("v", "β2", False, UNKNOWN_RULE)):
        if not has(results, setting, f"persistence_{channel}"):
            continue
        found = three_summaries(nested(results[setting][f"persistence_{channel}"]))
        decay = f"decay_{channel}"
        for value in found["M"][decay].values:
            for name, values in found.items():
                yield measured(
                    "tab:app_exp1_persistence", f"{channel}, {number} = {value:g}", f"{NAMES[setting]}: {name}",
                    values.sel({decay: value}), known=known, note=note,
                )  # fmt: skip


def three_summaries(response: xr.DataArray) -> dict[str, xr.DataArray]:
    """M, ARE and h* per system."""
    found = summarize(response)
    wanted = {"M": "peak", "ARE": "total_abs", "h*": "peak_horizon"}
    return {name: across_candidates(found[key]) for name, key in wanted.items()}
