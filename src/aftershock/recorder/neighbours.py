"""Reference batches: what a step would ordinarily have seen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.batches import Accumulated, Batch, accumulate
from ..core.dynamics import Step
from ..core.structure import flatten
from .triggers import robust_z

ALIKE = 2  # batches that stand in for one: a single one would bring its own luck
# Of the spread of likeness, what a cut into two kinds explains: measured 0.57–0.75 where data have one kind (a normal
# spread has 0.64, an even one 0.75), and 0.94–1 for images and letters from two sources.
TWO_KINDS = 0.85
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


def stand_in(steps: Sequence[Step], step: int, among: Collection[int]) -> Step:
    """The same step with the mean of those batches of other steps that are most like its own, the same inputs left out.

    Likeness is of inputs alone, so that wrong labels do not matter: the cosine of what `_portrait` says of them.
    """
    near = _likeness(steps, step, among)
    nearest = sorted(near, key=lambda i: -near[i])[:ALIKE]
    return replace(steps[step], batch=mean_batch([steps[i].batch for i in nearest])) if nearest else steps[step]


def kin(steps: Sequence[Step], step: int, among: Collection[int]) -> list[int]:
    """Those of other steps whose data are of the same rare kind, the most alike first; none where data are of one kind,
    or where this kind is not the rarer one.

    The cut is that after which the likeness on both sides differs least from its mean there (Otsu).
    """
    near = _likeness(steps, step, among)
    order = sorted(near, key=lambda i: -near[i])
    values = torch.tensor([near[i] for i in order], dtype=torch.float64)
    spread = float(values.var(correction=0)) if len(order) > ALIKE else 0.0
    if not spread > 0:
        return []
    counts, sums = torch.arange(1, len(order)), values.cumsum(0)
    apart = sums[:-1] / counts - (sums[-1] - sums[:-1]) / (len(order) - counts)
    explained = counts * (len(order) - counts) / len(order) ** 2 * apart**2 / spread
    count = int(explained.argmax()) + 1
    return order[:count] if float(explained.max()) > TWO_KINDS and 2 * count < len(order) else []


def _likeness(steps: Sequence[Step], step: int, among: Collection[int]) -> dict[int, float]:
    """Of other steps' inputs to this one's, where they are not the same."""
    own = _portrait(steps[step].batch)
    seen = {i: _portrait(steps[i].batch) for i in among if i != step}
    return {i: float(own @ x) for i, x in seen.items() if x.shape == own.shape and not torch.equal(x, own)}


def _portrait(batch: Batch) -> Float[Tensor, " feature"]:
    """Of a batch's largest tensor: the mean square and the signed squared mean of each feature, or how often each whole
    number comes; normed."""
    first = batch.batches[0] if isinstance(batch, Accumulated) else batch
    tensors = [x.detach() for x in flatten(first)[0] if isinstance(x, Tensor) and x.numel()]
    x = max(tensors, key=lambda x: x.numel(), default=torch.ones(1))
    if x.is_floating_point() or x.is_complex():
        parts = torch.view_as_real(x) if x.is_complex() else x
        rows = parts.float().reshape(len(x) if x.dim() else 1, -1)
        mean = rows.mean(0)
        found = torch.cat([rows.square().mean(0), mean * mean.abs()])
    else:
        found = torch.bincount(x.long().flatten() % BINS, minlength=BINS).float()
    return found / found.norm().clamp(min=torch.finfo(found.dtype).tiny)
