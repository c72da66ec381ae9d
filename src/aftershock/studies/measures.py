"""What the systems say about every number of the paper: results in, one `Measure` per cell out.

Aggregation is the paper's: over horizons inside a candidate, median over candidates inside a system; the verdict
takes the median over systems. A variable that a run did not make leaves its cells out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from ..results.fidelity import (
    error_exponents,
    extremum_sign_accuracy,
    nrmse,
    sign_agreement,
    symmetric_error,
    validity_radius,
)
from ..results.statistics import across_candidates, spearman
from ..results.summaries import summarize
from .verdicts import Measure

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

Results = Mapping[str, "xr.Dataset"]

NAMES = {
    "standard": "Standard",
    "anisotropic": "Anisotropic",
    "rotating": "Rotating-readout",
    "cnn": "CNN–ReLU",
    "mlp": "MLP–GELU",
}
SCORES = {
    "full_iso": "Full ISO",
    "frozen_dynamics": "Frozen dynamics",
    "clamped_theta": "Clamped parameter state",
    "no_propagation": "No propagation",
    "initial_theta": "Initial parameter only",
    "frozen_readout": "Frozen readout",
    "exact_one_step": "Exact one-step",
    "gradient_norm": "Gradient norm",
    "write_norm": "Parameter-write norm",
    "curvature": "Curvature",
    "norm_product": "Norm product",
    "endpoint": "Endpoint-exact (ours)",
    "semilinear": "Semilinear (ours)",
}
CHANNELS = {"100": "θ", "010": "m", "001": "v", "110": "θ, m", "101": "θ, v", "011": "m, v", "111": "θ, m, v"}
ALONE = {"θ": "100", "m": "010", "v": "001"}
OURS = ("endpoint", "semilinear")
SHARE_OF_SIGNS, SHARE_OF_HORIZONS = "Right extremum signs (ours)", "Right signs over horizons (ours)"
LOCAL = 0.25  # the prespecified local range of scales
CV_ROUNDING, RESIDUAL_ROUNDING = 1e-10, 1e-14
INFERRED = "the matching rule is inferred: the first displacement, ∝ β1 Δm/ρ1, is the same for every β1"
UNKNOWN_RULE = "how the paper matches the first displacement of v is not known; ours is one natural rule"


# --- both studies


def fidelity(
    results: Results,
    table: str,
    settings: Sequence[str],
    columns: Mapping[str, str],
    notes: Mapping[str, str] | None = None,
) -> Iterator[Measure]:
    """Errors of the tangent by scale, and beside them the NRMSE of ours; notes: by column."""
    for setting in settings:
        if not has(results, setting, "exact", "predicted"):
            continue
        data = results[setting]
        errors = _errors(data)
        found = {name: errors[key] for key, name in columns.items()}
        for answer in OURS:
            if answer in data["answer"].values:
                error = nrmse(data["exact"], data["predicted"].sel({"answer": answer}))
                found[f"NRMSE, {SCORES[answer]}"] = across_candidates(error)
        for scale in data["scale"].values:
            label = str(Fraction(scale)) if setting in ("standard", "anisotropic") else f"{scale:g}"
            for name, values in found.items():
                yield measured(
                    table,
                    f"{NAMES[setting]}, α = {label}",
                    name,
                    values.sel(scale=scale),
                    note=(notes or {}).get(name, ""),
                )


def _errors(data: xr.Dataset) -> dict[str, xr.DataArray]:
    """Each error of the tangent, [system, scale]."""
    import xarray as xr

    exact, tangent = data["exact"], data["predicted"].sel({"answer": "tangent"}, drop=True)
    own, other = summarize(exact), summarize(tangent)
    return {
        "nrmse": across_candidates(nrmse(exact, tangent)),
        "sign": across_candidates(sign_agreement(exact, tangent, xr.DataArray(0.0))),
        "peak": across_candidates(symmetric_error(own["peak"], other["peak"])),
        "total": across_candidates(symmetric_error(own["total_abs"], other["total_abs"])),
        "extremum": extremum_sign_accuracy(exact, tangent),
        # right (1) or wrong (0), and then the median over candidates, as every quantity of a candidate
        "typical_extremum": across_candidates((own["peak_sign"] == other["peak_sign"]).astype(float)),
    }


def pooled_fidelity(results: Results, table: str, settings: Sequence[str]) -> Iterator[Measure]:
    """One number per system over its candidates, local scales and probes; then the median over systems."""
    import xarray as xr

    settings = [setting for setting in settings if has(results, setting, "exact", "predicted")]
    errors, signs = [], []
    for setting in settings:
        data = results[setting].sel(scale=results[setting]["scale"] <= LOCAL)
        tangent = data["predicted"].sel({"answer": "tangent"}, drop=True)
        errors.append(nrmse(data["exact"], tangent))
        signs.append(sign_agreement(data["exact"], tangent, xr.DataArray(0.0)))
    if settings:
        yield measured(table, "Pooled local NRMSE", "value", pooled(errors))
        yield measured(table, "Pooled local sign agreement", "value", pooled(signs))
    yield from _identity(results, table)


def _identity(results: Results, table: str) -> Iterator[Measure]:
    import numpy as np

    found = [data["identity_residual"].values.ravel() for data in results.values() if "identity_residual" in data]
    if found:
        largest = np.array([np.nanmax(np.concatenate(found))])
        systems = len({str(name) for data in results.values() for name in data["system"].values})
        yield Measure(
            table, "State-error identity, largest residual", "value", largest, systems, "maximum",
            at_rounding=RESIDUAL_ROUNDING,
        )  # fmt: skip


def exponents(data: xr.Dataset) -> xr.Dataset:
    """Exponent and R² of the tangent's error over the local scales, median over candidates: [system, horizon]."""
    tangent = data["predicted"].sel({"answer": "tangent"}, drop=True)
    found = error_exponents(data["exact"], tangent, LOCAL)
    return found[["exponent", "r_squared"]].map(across_candidates)


def radii(data: xr.Dataset) -> xr.DataArray:
    """Validity radius of each candidate, [system, change]."""
    return validity_radius(symmetric_error(data["exact"], data["predicted"].sel({"answer": "tangent"}, drop=True)))


def rankings(data: xr.Dataset, family: str) -> xr.DataArray:
    """Spearman of every score with the exact magnitude inside each system, [score, system]."""
    score, magnitude = (data[name].sel(family=family) for name in ("score", "magnitude"))
    return spearman(score, magnitude)["rho"].rename(score_method="score")


def ranking(
    results: Results, table: str, settings: Sequence[str], family: str, shown: Sequence[str]
) -> Iterator[Measure]:
    """Rank correlations: a row per score, a column per setting."""
    found = {s: rankings(results[s], family) for s in settings if has_family(results, s, family)}
    for score in shown:
        for setting, rho in found.items():
            if score in rho["score"].values:
                yield measured(table, SCORES[score], NAMES[setting], rho.sel(score=score))


def percentile(data: xr.Dataset, family: str) -> xr.DataArray:
    """Share of the shuffled readouts that rank no better than Full ISO, in percent, per system."""
    own, null = rankings(data, family).sel(score="full_iso"), data["null_correlation"].sel(family=family)
    return 100 * (null <= own + 1e-12).where(null.notnull()).mean("permutation")


# --- labels


def pooled(arrays: Sequence[xr.DataArray]) -> xr.DataArray:
    """One number per system: the median of all that it has in any of these arrays."""
    import numpy as np
    import xarray as xr

    found: dict[str, list[np.ndarray]] = {}
    for array in arrays:
        for name in array["system"].values:
            found.setdefault(str(name), []).append(array.sel(system=name).values.ravel())
    middles = [np.nanmedian(np.concatenate(parts)) for parts in found.values()]
    return xr.DataArray(middles, dims="system", coords={"system": list(found)})


def nested(values: xr.DataArray) -> xr.DataArray:
    """The candidates and horizons of channels and sweeps under their common names."""
    common = {"channel_change": "change", "persistence_change": "change", "long_horizon": "horizon"}
    return values.rename({old: new for old, new in common.items() if old in values.dims})


def has(results: Results, setting: str, *names: str) -> bool:
    return setting in results and all(name in results[setting] for name in names)


def has_family(results: Results, setting: str, family: str) -> bool:
    return has(results, setting, "score", "magnitude") and family in results[setting]["family"].values


def measured(
    table: str,
    row: str,
    column: str,
    values: xr.DataArray,
    kind: str = "systems",
    known: bool = True,
    note: str = "",
    at_rounding: float = 0.0,
    reason: str = "",
) -> Measure:
    numbers: np.ndarray = values.values.astype(float)
    return Measure(table, row, column, numbers, len(numbers), kind, known, note, at_rounding, reason=reason)
