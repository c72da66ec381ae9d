"""What waits in m and v after a write, and will move θ at the steps after it: kicks (`kicks`) of all writes at once.

A write (δm, δv) moves θ at a later step s, k steps on, by M_s β1^k δm, which is exact since q is linear in m, and by

    (m_s + β1^k δm) [D_s(v_s + β2^k δv) − D_s(v_s)],      D(v) = −(η/ρ1) / (√v̂ + ε)

With x = δv/v at the write, the relative change of v at step s is x r_{t+1} … r_s, r_s = β2 v_{s−1}/v_s, and

    D(v (1 + x)) − D(v) ≈ −(η/ρ1) i w x (−1/2 + (α + γ w) x),      i = 1/(√v̂ + ε),   w = i √v̂      (eq:bent_kick)

for every ε within 3.5 % from x = −0.4 to 0.1. (The slope alone is off by 7.6 % at −0.1.) So five sums over later steps,
carried back along a sweep, hold what any write of that size will do; the others are left to exact kicks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .adamw import Run, blocks
from .kicks import Passed
from .layout import Layout
from .reductions import outside, products
from .state import CHANNELS, JointState

LOW, HIGH = -0.4, 0.1  # relative changes of v that eq:bent_kick holds for
ALPHA, GAMMA = 0.11, 0.40  # of it: the largest error between them is the smallest
SUMS = 5  # vectors per outcome


class Waiting:
    """Σ_s of what a step does to writes before it, times λ_θ(s+1), for every outcome.

    Such a write is followed by counts that are `lag` behind the control's, as after a skipped step: `counted` is what
    that alone does, by parameter.
    """

    def __init__(self, layout: Layout, outcomes: int, lag: int) -> None:
        self.layout, self.lag, self.outcomes = layout, lag, outcomes
        # of δm; of x, x², x δm and x² δm
        self.m, self.v, self.vv, self.mv, self.mvv = (layout.zeros(outcomes) for _ in range(SUMS))
        self.counted = self._totals()

    def _totals(self) -> _Totals:
        return _Totals(self.outcomes, len(self.layout.names))

    def pass_back_(
        self, step: Passed, before: JointState, ends: Mapping[str, JointState], slopes: Float[Tensor, "outcome param"]
    ) -> dict[str, Ended]:
        """From writes after a step to those before it; `slopes` is λ_θ after it. 30 elementwise passes.

        On the way, what runs do to the outcomes that go on from each of some `ends` instead of from the state after
        the step: 15 elementwise passes each.
        """
        found = {name: Ended(self._totals()) for name in ends}
        counted = self.counted.sums().clone()
        tiny = torch.finfo(slopes.dtype).tiny
        for now, late in zip(step.runs(self.layout), step.runs(self.layout, self.lag), strict=True):
            for w in blocks(now.where, slopes):
                at = _Piece(w, slopes[:, w], step.after.v[w].clamp(min=tiny), self.layout.inside(w))
                for name, end in ends.items():
                    self._end_at(found[name], end, step.after, at)
                if now.active and late.bias2 > 0:
                    self._pass_back_at_(now, late, step.after, before.v[w], at)
        for ended in found.values():
            ended.counted = counted * torch.tensor(step.present)
        return found

    def _pass_back_at_(self, now: Run, late: Run, after: JointState, v_before: Tensor, at: _Piece) -> None:
        w, v, slopes = at.w, at.v, at.slopes
        m, root, factor = after.m[w], (v / late.bias2).sqrt_(), -late.lr / late.bias1
        inverse = (root + late.eps).reciprocal_()
        if late.eps == 0:
            inverse.masked_fill_(after.v[w] == 0, 0.0)  # such a coordinate does not move
        found, share = slopes * inverse, root.mul_(inverse)
        counts = _by_counts(now, late)
        self._count(counts[0], found, m, at)
        self.m[:, w].add_(found, alpha=factor).mul_(late.beta1)
        ratio = torch.div(v_before, v, out=v).mul_(late.beta2)
        slower = torch.mul(ratio, late.beta1, out=inverse)
        self._count(counts[1], found.mul_(share), m, at)
        self.v[:, w].addcmul_(found, m, value=-factor / 2).mul_(ratio)
        self.mv[:, w].add_(found, alpha=-factor / 2).mul_(slower)
        self._count(counts[2], found.mul_(share.mul_(GAMMA).add_(ALPHA)), m, at)
        self.vv[:, w].addcmul_(found, m, value=factor).mul_(ratio).mul_(ratio)
        self.mvv[:, w].add_(found, alpha=factor).mul_(slower).mul_(ratio)

    def _count(self, scale: float, found: Float[Tensor, "outcome piece"], m: Tensor, at: _Piece) -> None:
        if self.lag:
            self.counted.add(0, found, m, at, scale)

    def _end_at(self, found: Ended, end: JointState, control: JointState, at: _Piece) -> None:
        w = at.w
        dm, x = end.m[w] - control.m[w], (end.v[w] - control.v[w]).div_(at.v)
        few = outside(x, LOW, HIGH)
        found.stiff.append(few + w.start)
        x.index_fill_(0, few, 0.0)
        found.totals.add(0, at.slopes, end.theta[w] - control.theta[w], at)
        found.totals.add(1, self.m[:, w], dm, at)
        bent = torch.addcmul(self.mv[:, w], self.mvv[:, w], x).mul_(dm)
        found.totals.add(2, bent.add_(self.v[:, w]).addcmul_(self.vv[:, w], x), x, at)


class _Piece(NamedTuple):
    """A stretch of the flat vector, and the parameters in it."""

    w: slice
    slopes: Float[Tensor, "outcome piece"]
    v: Float[Tensor, " piece"]  # to divide by: nothing is then nothing, anything else infinite
    inside: list[tuple[int, slice]]


class _Totals:
    """Sums of dot products by outcome, channel and parameter; nobody waits for a GPU until they are asked for."""

    def __init__(self, outcomes: int, parameters: int) -> None:
        self._sums = torch.zeros(outcomes, len(CHANNELS), parameters, dtype=torch.float64)
        self._waiting: list[tuple[int, int, float, Float[Tensor, " outcome"]]] = []

    def add(self, channel: int, a: Float[Tensor, "outcome piece"], b: Tensor, at: _Piece, scale: float = 1.0) -> None:
        for parameter, some in at.inside:
            self._waiting.append((channel, parameter, scale, products(a[:, some], b[some])))

    def sums(self) -> Float[Tensor, "outcome channel parameter"]:
        if self._waiting:
            channels, parameters, scales, values = zip(*self._waiting)
            found = torch.stack(values, dim=1).double().cpu() * torch.tensor(scales, dtype=torch.float64)
            where = torch.tensor(channels) * self._sums.shape[2] + torch.tensor(parameters)
            self._sums.flatten(1).index_add_(1, where, found)
            self._waiting = []
        return self._sums


@dataclass
class Ended:
    """What a run does to the outcomes that goes on from another state, except for what v adds at `where`: there
    eq:bent_kick does not hold."""

    totals: _Totals
    stiff: list[Int64[Tensor, " coordinate"]] = field(default_factory=list)
    counted: Float[Tensor, "outcome channel parameter"] | float = 0.0

    @property
    def responses(self) -> Float[Tensor, "outcome channel parameter"]:
        return self.totals.sums() + self.counted

    @property
    def where(self) -> Int64[Tensor, " coordinate"]:
        return torch.cat(self.stiff)


def _by_counts(now: Run, late: Run) -> tuple[float, float, float]:
    """Of Σ λ m i, Σ λ m i w and Σ λ m i w (α + γ w), what Σ λ (q' − q) is made of where counts are behind.

    q = −(η/ρ1) m i / (1 + κ w) with the late i and w, 1 + κ = √(ρ2'/ρ2): as a parabola in w through w = 0, 1/2 and 1.
    Between them it is off by 0.05 κ³ at most: 10⁻⁷ of q after 20 steps, and 10⁻³ after two.
    """
    kappa = math.sqrt(late.bias2 / now.bias2) - 1
    half, whole = 1 / (1 + kappa / 2) - 1, 1 / (1 + kappa) - 1
    rate, twice = now.lr / now.bias1, (2 * whole - 4 * half) / GAMMA
    return rate - late.lr / late.bias1, rate * (4 * half - whole - ALPHA * twice), rate * twice
