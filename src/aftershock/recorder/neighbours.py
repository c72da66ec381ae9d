"""Reference batches: what a step would ordinarily have seen."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.batches import Accumulated, Batch, accumulate


def mean_batch(batches: Sequence[Batch]) -> Accumulated:
    """One batch whose loss is the mean of theirs, without the random states they were recorded with."""
    parts: list[Batch] = []
    weights: list[float] = []
    for batch in batches:
        inside, shares = (batch.batches, batch.shares) if isinstance(batch, Accumulated) else ((batch,), (1.0,))
        parts += inside
        weights += [share / len(batches) for share in shares]
    return accumulate(parts, weights=weights)


def neighbours(step: int, count: int, references: int) -> list[int]:
    """The `references` steps nearest to `step` among 0 … count−1, itself left out."""
    return sorted((i for i in range(count) if i != step), key=lambda i: (abs(i - step), i))[:references]


def reference_mean(batches: Sequence[Batch], step: int, references: int) -> Accumulated:
    """The mean of a step's neighbours: the paper's reference."""
    return mean_batch([batches[i] for i in neighbours(step, len(batches), references)])
