"""Rank statistics over systems that are fixed conditions: descriptive, never a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr


@dataclass(frozen=True)
class Pooled:
    """Correlations of ranks that were normalized inside each system, over all candidates.

    partial: of `score` with the target, `control` held fixed linearly. r_control, r_both: R² of the target's ranks
    on the control's alone, and on both.
    """

    score: float
    control: float
    partial: float
    r_control: float
    r_both: float


def pooled_ranks(score: xr.DataArray, control: xr.DataArray, target: xr.DataArray) -> Pooled:
    """How much `score` adds to `control` in telling the target's rank.

    score, control, target: [system, change]; candidates without all three are left out.
    """
    import numpy as np

    x, z, y = _normalized(score, control, target)
    if len(y) < 4 or min(np.ptp(x), np.ptp(z), np.ptp(y)) == 0:
        return Pooled(*[float("nan")] * 5)
    xy, zy, xz = (float(np.corrcoef(a, b)[0, 1]) for a, b in ((x, y), (z, y), (x, z)))
    alone = (1 - zy**2) * (1 - xz**2)
    partial = (xy - zy * xz) / alone**0.5 if alone > 1e-12 else float("nan")
    # R² of two predictors: what the first explains, and of the rest the share of the partial correlation
    both = zy**2 + (1 - zy**2) * (partial**2 if alone > 1e-12 else 0.0)
    return Pooled(xy, zy, partial, zy**2, both)


def _normalized(*arrays: xr.DataArray) -> list[np.ndarray]:
    """(rank − ½) / n inside each system, of the candidates that every array has."""
    import numpy as np
    from scipy import stats

    rows = [array.transpose("system", "change").values for array in arrays]
    known = np.isfinite(np.stack(rows)).all(0)
    ranked = []
    for values in rows:
        parts = [(stats.rankdata(v[k]) - 0.5) / max(k.sum(), 1) for v, k in zip(values, list(known))]
        ranked.append(np.concatenate(parts))
    return ranked
