"""Reference batches: what a step would ordinarily have seen."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.batches import Accumulated, Batch, accumulate
from ..core.dynamics import Step
from .triggers import robust_z

FAR = 5.0  # robust σ above the median gradient norm, beyond which a batch is no reference


def mean_batch(batches: Sequence[Batch]) -> Accumulated:
    """One batch whose loss is the mean of theirs, without the random states they were recorded with."""
    parts: list[Batch] = []
    weights: list[float] = []
    for batch in batches:
        inside, shares = (batch.batches, batch.shares) if isinstance(batch, Accumulated) else ((batch,), (1.0,))
        parts += inside
        weights += [share / len(batches) for share in shares]
    return accumulate(parts, weights=weights)


def neighbours(step: int, norms: Sequence[float], references: int) -> list[int]:
    """The `references` steps nearest to `step`, itself left out, and those whose gradient is far from usual too.

    An ordinary batch is meant: a bad one among the references would make every step around it look good.
    """
    others = [i for i in range(len(norms)) if i != step]
    ordinary = [i for i in others if robust_z(norms[i], norms) <= FAR]
    pool = ordinary if len(ordinary) >= references else others
    return sorted(pool, key=lambda i: (abs(i - step), i))[:references]


def reference_mean(steps: Sequence[Step], step: int, references: int) -> Accumulated:
    """The mean of a step's neighbours: the paper's reference."""
    norms = [float(s.clip.norm) for s in steps]
    return mean_batch([steps[i].batch for i in neighbours(step, norms, references)])
