"""What waits in m and v after a write, and will move θ at the steps after it: kicks (`kicks`) of all writes at once.

A write (δm, δv) moves θ at a later step s, k steps on, by M_s β1^k δm, which is exact since q is linear in m, and by

    (m_s + β1^k δm) [D_s(v_s + β2^k δv) − D_s(v_s)],      D(v) = −(η/ρ1) / (√v̂ + ε)

With x = δv/v at the write, the relative change of v at step s is x r_{t+1} … r_s, r_s = β2 v_{s−1}/v_s, and

    D(v (1 + x)) − D(v) ≈ −(η/ρ1) i w x (−1/2 + (α + γ w) x),      i = 1/(√v̂ + ε),   w = i √v̂      (eq:bent_kick)

for every ε within 3.5 % from x = −0.4 to 0.1. (The slope alone is off by 7.6 % at −0.1.) So five sums over later steps,
carried back along a sweep, hold what any write of that size will do; the others are left to exact kicks.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .adamw import Run, blocks, pieces_of
from .kicks import Passed
from .layout import Layout
from .reductions import outside, parts

LOW, HIGH = -0.4, 0.1  # relative changes of v that eq:bent_kick holds for
ALPHA, GAMMA = 0.11, 0.40  # of it: the largest error between them is the smallest


class Waiting:
    """Σ_s of what a step does to writes before it, times λ_θ(s+1), for every outcome.

    Such a write is followed by counts that are `lag` behind the control's, as after a skipped step: `counted` is what
    that alone does, by parameter.
    """

    def __init__(self, layout: Layout, outcomes: int, lag: int) -> None:
        self.layout, self.lag = layout, lag
        # of δm; of x, x², x δm and x² δm
        self.m, self.v, self.vv, self.mv, self.mvv = (layout.zeros(outcomes) for _ in range(5))
        self.counted = torch.zeros(outcomes, len(layout.names), dtype=torch.float64)
        self._moved = layout.zeros()

    def pass_back_(
        self, step: Passed, v_before: Float[Tensor, " param"], slopes: Float[Tensor, "outcome param"]
    ) -> None:
        """From writes after a step to those before it; `slopes` is λ_θ after it. 30 elementwise passes."""
        self._moved.zero_()
        for now, late in zip(step.runs(self.layout), step.runs(self.layout, self.lag), strict=True):
            for _, w in pieces_of([now] if late.bias2 > 0 else [], slopes):
                self._pass_back_at_(now, late, w, step, v_before[w], slopes[:, w])
        if self.lag:
            moved = [parts(slope, self._moved, self.layout.padded_sizes) for slope in slopes]
            self.counted += torch.stack(moved).double().cpu()

    def _pass_back_at_(
        self, now: Run, late: Run, w: slice, step: Passed, v_before: Tensor, slopes: Float[Tensor, "outcome param"]
    ) -> None:
        m, v = step.after.m[w], step.after.v[w]
        root, factor = (v / late.bias2).sqrt_(), -late.lr / late.bias1
        inverse = _inverse(root, late.eps)
        if self.lag:
            usual = _inverse((v / now.bias2).sqrt_(), now.eps)
            torch.mul(usual.mul_(now.lr / now.bias1).add_(inverse, alpha=factor), m, out=self._moved[w])
        share = root.mul_(inverse)
        slope, bend = share * inverse, share.mul_(GAMMA).add_(ALPHA)
        ratio = torch.div(v_before, v.clamp(min=torch.finfo(v.dtype).tiny)).mul_(late.beta2)
        self.m[:, w].addcmul_(slopes, inverse, value=factor).mul_(late.beta1)
        found = slopes * slope
        self.v[:, w].addcmul_(found, m, value=-factor / 2).mul_(ratio)
        self.mv[:, w].add_(found, alpha=-factor / 2).mul_(late.beta1 * ratio)
        found, square = found.mul_(bend), ratio.square_()
        self.vv[:, w].addcmul_(found, m, value=factor).mul_(square)
        self.mvv[:, w].add_(found, alpha=factor).mul_(square.mul_(late.beta1))

    def bent(self, outcome: int, dm: Float[Tensor, " param"], x: Float[Tensor, " param"]) -> Float[Tensor, " param"]:
        """What v adds to the response to writes (δm, x), per unit of x."""
        out = torch.empty_like(x)
        for w in blocks(slice(None), x):
            beside = torch.addcmul(self.mv[outcome, w], self.mvv[outcome, w], x[w]).mul_(dm[w])
            torch.addcmul(self.v[outcome, w], self.vv[outcome, w], x[w], out=out[w]).add_(beside)
        return out


def relative(
    dv: Float[Tensor, " param"], v: Float[Tensor, " param"]
) -> tuple[Float[Tensor, " param"], Int64[Tensor, " coordinate"]]:
    """x = δv/v, zero at the coordinates beside it: those where eq:bent_kick does not hold."""
    x = dv / v.clamp(min=torch.finfo(v.dtype).tiny)
    stiff = outside(x, LOW, HIGH)
    return x.index_fill_(0, stiff, 0.0), stiff


def _inverse(root: Tensor, eps: float) -> Tensor:
    """1/(√v̂ + ε); 0 where ε and v are: such a coordinate does not move."""
    inverse = (root + eps).reciprocal_()
    return inverse if eps else inverse.masked_fill_(root == 0, 0.0)
