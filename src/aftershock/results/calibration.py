"""What reruns say of predictions that were not rerun: the part of their residuals that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Shared:
    """The numbers that decide how much of the others' mean residual is added, by its best share; between the two more
    and more, so that a rounding does not decide."""

    whole: float = 0.5  # from here on all of it, which then helps what is held out
    nothing: float = 0.25  # below it nothing


SHARED = Shared()


def shared_offset(predicted: np.ndarray, measured: np.ndarray) -> tuple[np.ndarray, float]:
    """What is added to predictions by horizon: a share of the mean residual of reruns, and that share. eq:calibration

    A pool may have little in common: the mean is then that of its largest residual, and many times a small response. So
    each rerun is predicted from the others. By least squares of relative errors the best share of their mean is f, and
    the whole lowers the error of what is held out where f > 1/2: from there on the whole is added, below 1/4 nothing.
    A single rerun cannot tell: its whole residual is added. Rows are reruns; what is not finite was not
    measured, or not predicted.
    """
    import numpy as np

    seen = np.isfinite(measured) & np.isfinite(predicted)
    residual = np.where(seen, measured - predicted, 0.0)
    mean = residual.sum(0) / seen.sum(0).clip(min=1)
    if seen.any(1).sum() < 2:
        return mean, 1.0
    others = (residual.sum(0) - residual) / (seen.sum(0) - seen).clip(min=1)
    size = np.where(seen, measured**2 + predicted**2, 0.0).sum(1, keepdims=True)
    weight = np.divide(seen, size, out=np.zeros_like(residual), where=size > 0)
    whole = (weight * others**2).sum()
    best = float((weight * others * residual).sum() / whole) if whole > 0 else 1.0
    share = min(max((best - SHARED.nothing) / (SHARED.whole - SHARED.nothing), 0.0), 1.0)
    return share * mean, share


def held_out(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Each rerun's prediction with the offset that the others share."""
    import numpy as np

    each = np.arange(len(predicted))
    offsets = [shared_offset(predicted[each != i], measured[each != i])[0] for i in each]
    return predicted + np.array(offsets).reshape(predicted.shape)
