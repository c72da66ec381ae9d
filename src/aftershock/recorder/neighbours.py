"""Reference batches: what a step would ordinarily have seen."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.batches import Accumulated, Batch, accumulate


def plain_batches(batches: Sequence[Batch]) -> list[Batch]:
    """The micro-batches of all of them, without the random states they were recorded with."""
    return [part for batch in batches for part in (batch.batches if isinstance(batch, Accumulated) else (batch,))]


def neighbours(step: int, count: int, references: int) -> list[int]:
    """The `references` steps nearest to `step` among 0 … count−1, itself left out."""
    return sorted((i for i in range(count) if i != step), key=lambda i: (abs(i - step), i))[:references]


def reference_mean(batches: Sequence[Batch], step: int, references: int) -> Accumulated:
    """The mean of a step's neighbours: the paper's reference."""
    return accumulate(plain_batches([batches[i] for i in neighbours(step, len(batches), references)]))
