"""Reference batches: what a step would ordinarily have seen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.batches import Accumulated, Batch, accumulate
from ..core.dynamics import Step
from ..core.structure import flatten
from .alarm import ALARM, scatter


@dataclass(frozen=True)
class Nearness:
    """The numbers that decide whose batch is like another's, and whose is ordinary."""

    # Standard deviations of a kind's likeness, by which its mean must be above the most alike of the others: measured
    # at most 3.3 where data have one kind, and 5 to 1,500 for images and letters from two sources.
    two_kinds: float = 4.0
    a_kind: int = 3  # other batches that make one: two are near to each other by chance
    far: float = 5.0  # robust σ above the median gradient norm, beyond which a batch is no reference
    stand_ins: int = 2  # batches that stand in for one: a single one would bring its own luck


NEARNESS = Nearness()
BINS = 4096  # in which whole numbers are counted


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
    middle, spread = scatter(norms)
    ordinary = [i for i in others if norms[i] - middle <= NEARNESS.far * max(spread, ALARM.flattest * middle)]
    pool = ordinary if len(ordinary) >= references else others
    return sorted(pool, key=lambda i: (abs(i - step), i))[:references]


def reference_mean(steps: Sequence[Step], step: int, references: int) -> Accumulated:
    """The mean of a step's neighbours: the paper's reference."""
    norms = [float(s.clip.norm) for s in steps]
    return mean_batch([steps[i].batch for i in neighbours(step, norms, references)])


class Likeness:
    """How alike the batches of some steps are, by inputs alone, so that wrong labels do not matter: the cosine of what
    `_portrait` says of them. By their losses on the same weights wrong labels would be a kind of their own, too."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps, self._portraits = steps, [_portrait(step.batch) for step in steps]

    def stand_in(self, step: int, among: Collection[int]) -> Step:
        """The same step with the mean of those batches of other steps that are most like its own, the same inputs left
        out."""
        batches = [self.steps[i].batch for i in self.nearest(step, among, NEARNESS.stand_ins)]
        return replace(self.steps[step], batch=mean_batch(batches)) if batches else self.steps[step]

    def nearest(self, step: int, among: Collection[int], count: int) -> list[int]:
        """Those of other steps whose inputs are most like this one's, and not the same."""
        near = self._near(step, among)
        return sorted(near, key=lambda i: -near[i])[:count]

    def kin(self, step: int, among: Collection[int], least: int = NEARNESS.a_kind) -> list[int]:
        """Those of other steps whose data are of the same rare kind, the most alike first; none where data are of one
        kind, where this kind is not the rarer one, or where there are fewer than `least` of it.

        The cut is that after which the likeness on both sides differs least from its mean there (Otsu).
        """
        near = self._near(step, among)
        order = sorted(near, key=lambda i: -near[i])
        values = torch.tensor([near[i] for i in order], dtype=torch.float64)
        if len(order) <= NEARNESS.stand_ins:
            return []
        counts, sums = torch.arange(1, len(order)), values.cumsum(0)
        apart = sums[:-1] / counts - (sums[-1] - sums[:-1]) / (len(order) - counts)
        count = int((counts * (len(order) - counts) * apart**2).argmax()) + 1
        alike, other = values[:count], float(values[count])
        separate = float(alike.mean()) - other > NEARNESS.two_kinds * float(alike.std(correction=0))
        return order[:count] if separate and least <= count < len(order) / 2 else []

    def same(self, some: Collection[int], among: Collection[int]) -> set[int]:
        """Steps among others that saw the inputs of one of `some`, and these."""
        return {*some, *(i for i in among if any(self._equal(i, step) for step in some))}

    def _near(self, step: int, among: Collection[int]) -> dict[int, float]:
        """The likeness of other steps' inputs to this one's, where they are not the same."""
        own, others = self._portraits[step], [i for i in among if i != step and not self._equal(i, step)]
        return {i: float(own @ x) for i in others if (x := self._portraits[i]).shape == own.shape}

    def _equal(self, one: int, other: int) -> bool:
        x, y = self._portraits[one], self._portraits[other]
        return x.shape == y.shape and torch.equal(x, y)


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
