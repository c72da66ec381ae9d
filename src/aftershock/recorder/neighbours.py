"""Reference batches: what a step would ordinarily have seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.batches import Accumulated, Batch, accumulate
from ..core.dynamics import Step
from ..core.structure import flatten
from .triggers import robust_z

ALIKE = 2  # batches that stand in for one: a single one would bring its own luck
BINS = 4096  # in which whole numbers are counted
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


def stand_in(steps: Sequence[Step], step: int) -> Step:
    """The same step with the mean of the other batches that are most like its own, the same inputs left out.

    Likeness is of inputs alone, so that wrong labels do not matter: the cosine of what `_portrait` says of them.
    """
    own = _portrait(steps[step].batch)
    seen = {i: _portrait(other.batch) for i, other in enumerate(steps)}
    near = {i: float(own @ x) for i, x in seen.items() if x.shape == own.shape and not torch.equal(x, own)}
    nearest = sorted(near, key=lambda i: -near[i])[:ALIKE]
    return replace(steps[step], batch=mean_batch([steps[i].batch for i in nearest])) if nearest else steps[step]


def _portrait(batch: Batch) -> Float[Tensor, " feature"]:
    """Of a batch's largest tensor: the mean square of each feature, or how often each whole number comes; normed."""
    first = batch.batches[0] if isinstance(batch, Accumulated) else batch
    tensors = [x.detach() for x in flatten(first)[0] if isinstance(x, Tensor) and x.numel()]
    x = max(tensors, key=lambda x: x.numel(), default=torch.ones(1))
    if x.is_floating_point() or x.is_complex():
        found = x.abs().float().square().reshape(len(x), -1).mean(0) if x.dim() else x.abs().float()[None]
    else:
        found = torch.bincount(x.long().flatten() % BINS, minlength=BINS).float()
    return found / found.norm().clamp(min=torch.finfo(found.dtype).tiny)
