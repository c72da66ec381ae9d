"""The derivative of one AdamW step in closed form, and exact differences of its update.

The derivative is one elementwise map and its transpose. With u the variation of the gradient that
reaches the moments, a step takes a tangent to

    δm' = β1 δm + (1−β1) u
    δv' = β2 δv + 2(1−β2) g ⊙ u
    δθ' = (1−ηλ) δθ + M δm' + V δv'            (`LinearStep.absorb_`, eq:absorb)

which is the paper's carry K (eq:carry) at u = 0, its write-in B at δx = 0 and its transition A at u = H δθ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import threshold

from . import fused
from .adamw import Hyper, Run, pieces_of, runs_of
from .clipping import TORCH_EPSILON, Clip, clip_jacobian
from .layout import Layout
from .reductions import count, norms
from .state import Cotangent, JointState, Tangent


def sensitivities(run: Run, m: Float[Tensor, "*rows param"], v: Float[Tensor, "*rows param"]) -> tuple[Tensor, Tensor]:
    """M = ∂q/∂m = −η/(ρ1 d) and V = ∂q/∂v = η m̂ / (2 ρ2 √v̂ d²), d = √v̂ + ε, at post-update moments.

    eq:app_M, eq:app_V.
    Singular at v̂ = 0 (eq:zero_v_step). There V = 0 is the right derivative if m̂ = 0 too (no gradient ever came: the
    step −c g/(k|g| + ε) has slope −η(1−β1)/(ρ1 ε)); where m̂ ≠ 0 no derivative exists.
    """
    root = (v / run.bias2).sqrt_()
    inverse = (root + run.eps).reciprocal_()
    if run.eps == 0:
        inverse.masked_fill_(root == 0, 0.0)
    dq_dm = inverse * (-run.lr / run.bias1)
    # V = −M m / (2 ρ2 √v̂ d): few passes, since here they are most of a sweep's time on small models
    dq_dv = (dq_dm * m).div_(threshold(root, 0.0, math.inf, inplace=True)).mul_(inverse)
    return dq_dm, dq_dv.mul_(-0.5 / run.bias2)


class Control(NamedTuple):
    """The control's step on a piece of the flat vector: the gradient that reaches the moments, moments after it."""

    g: Tensor
    m: Tensor
    v: Tensor


@dataclass(frozen=True)
class LinearStep:
    """The derivative of one AdamW step at a control state, without the Hessian.

    `raw` is ĝ, the gradient before clipping. It holds no vector of its own: coefficients are computed from
    the state piece by piece as they are used.
    """

    layout: Layout
    runs: tuple[Run, ...]
    before: JointState
    raw: Float[Tensor, " param"]
    clip: Clip

    @classmethod
    def at(
        cls,
        layout: Layout,
        state: JointState,
        raw: Float[Tensor, " param"],
        present: Sequence[bool],
        clip: Clip,
        hypers: Sequence[Hyper],
    ) -> LinearStep:
        """Linearize the step that takes `state` with gradient `raw`."""
        return cls(layout, tuple(runs_of(layout, hypers, state.counts, present)), state, raw, clip)

    def control(self, run: Run, w: slice) -> Control:
        """The control's step on the piece `w` of an active run. eq:app_m_of_g, eq:app_v_of_g"""
        g, scale = self.raw[..., w], run.sign * self.clip.factor
        if scale != 1.0:
            g = g * scale
        if run.coupled:
            g = torch.add(g, self.before.theta[..., w], alpha=run.coupled)
        m = torch.lerp(self.before.m[..., w], g, 1 - run.beta1)
        v = (run.beta2 * self.before.v[..., w]).addcmul_(g, g, value=1 - run.beta2)
        return Control(g, m, v)

    def pieces(self, rows: Float[Tensor, "*change param"] | None = None) -> Iterator[tuple[Run, slice]]:
        """The active parts of the flat vector, in pieces sized for this many rows."""
        return pieces_of(self.runs, self.raw if rows is None else rows)

    def _each_run(self, work: Callable[[Run], None]) -> None:
        for run in self.runs:
            if run.active:
                work(run)

    def _whole(self, part: Callable[[Run, Control], Tensor]) -> Float[Tensor, " param"]:
        out = torch.zeros_like(self.raw)
        for run, w in self.pieces():
            out[..., w] = part(run, self.control(run, w))
        return out

    @cached_property
    def g(self) -> Float[Tensor, " param"]:
        """The gradient that reaches the moments, as one vector."""
        return self._whole(lambda run, at: at.g)

    @cached_property
    def dq_dm(self) -> Float[Tensor, " param"]:
        return self._whole(lambda run, at: sensitivities(run, at.m, at.v)[0])

    @cached_property
    def dq_dv(self) -> Float[Tensor, " param"]:
        return self._whole(lambda run, at: sensitivities(run, at.m, at.v)[1])

    @cached_property
    def zero_v(self) -> Bool[Tensor, " param"]:
        """Active coordinates with v̂ = 0."""
        return self._mask(lambda at: at.v == 0, inactive=False)

    @cached_property
    def broken(self) -> Bool[Tensor, " param"]:
        """No derivative: v̂ = 0 with m̂ ≠ 0, or no gradient at all in this step."""
        return self._mask(lambda at: (at.v == 0) & (at.m != 0), inactive=True)

    @cached_property
    def _zeros(self) -> int:
        return count(self.zero_v)

    def _mask(self, marked: Callable[[Control], Tensor], inactive: bool) -> Bool[Tensor, " param"]:
        out = torch.full_like(self.raw, inactive, dtype=torch.bool)
        for run, w in self.pieces():
            out[..., w] = marked(self.control(run, w))
        return out

    def zero_counts(self, one: Float[Tensor, " param"], other: Tensor) -> tuple[int, int, int]:
        """(coordinates with v̂ = 0, those at which `one` and `other` differ, such ones without any derivative)."""
        zero, touched, broken = self._zeros, 0, 0
        if zero or not all(run.active for run in self.runs):
            moved = one != other
            touched, broken = count(self.zero_v & moved), count(self.broken & moved)
        active = [i for i, start in enumerate(self.layout.starts) if self._active(start)]
        padding = sum(self.layout.padded_sizes[i] - self.layout.sizes[i] for i in active)
        return zero - padding, touched, broken  # the padding has v = 0 and never moves

    def _active(self, start: int) -> bool:
        return any(run.active and run.where.start <= start < run.where.stop for run in self.runs)

    def gradient_variation(self, xi: Float[Tensor, "change param"]) -> Float[Tensor, "change param"]:
        """σ J ξ: what a raw gradient difference becomes when it reaches the moments. Self-adjoint."""
        u = clip_jacobian(self.clip, self.raw, xi)
        if all(run.active and run.sign == 1.0 for run in self.runs):
            return u
        u = u.clone() if u is xi else u
        for run in self.runs:
            u[..., run.where] *= run.sign if run.active else 0.0
        return u

    def add_coupled_decay_(self, u: Float[Tensor, "change param"], theta: Float[Tensor, "change param"]) -> None:
        """Adam's λ θ enters the gradient after clipping: u += λ θ. Self-adjoint."""
        for run in self.runs:
            if run.active and run.coupled:
                u[..., run.where].add_(theta[..., run.where], alpha=run.coupled)

    def absorb_(self, dx: Tangent, u: Float[Tensor, "change param"]) -> None:
        """One step of tangents, in place, given the gradient variation u they cause."""
        if fused.available(u):
            return self._each_run(lambda run: fused.absorb_(self, run, dx, u))
        for run, w in self.pieces(u):
            at, du = self.control(run, w), u[..., w]
            dq_dm, dq_dv = sensitivities(run, at.m, at.v)
            dm, dv = dx.m[..., w], dx.v[..., w]
            dm.lerp_(du, 1 - run.beta1)  # β1 δm + (1−β1) u
            dv.mul_(run.beta2).addcmul_(at.g, du, value=2 * (1 - run.beta2))
            dx.theta[..., w].mul_(run.shrink).addcmul_(dq_dm, dm).addcmul_(dq_dv, dv)

    def absorb_exactly_(self, dx: Tangent, xi: Float[Tensor, "change param"], max_norm: float | None) -> None:
        """One step of finite differences, in place: AdamW's own arithmetic at g + ξ, less that at g. eq:semilinear

        Written in differences, so that a small δx loses no digits.
        """
        clipped = None if max_norm is None else self._clip_changes(xi, max_norm)
        if fused.available(xi):
            one = torch.ones_like(xi[..., 0])
            given = clipped or (one, torch.zeros_like(one))
            return self._each_run(lambda run: fused.absorb_exactly_(self, run, dx, xi, *given))
        for run, w in self.pieces(xi):
            self._absorb_exactly_at_(run, w, dx, xi, clipped)

    def _clip_changes(self, xi: Float[Tensor, "change param"], max_norm: float) -> tuple[Tensor, Tensor]:
        """The clip factors c' of g + ξ, and c' − c. Both norms are summed alike: `clip` holds torch's, by parameter,
        from which c' would differ by a rounding where nothing changes."""

        def factor(size: Tensor) -> Tensor:
            return torch.clamp(max_norm / (size + TORCH_EPSILON), max=1.0)

        # row by row: one vector of work at a time
        factors = factor(torch.stack([norms(self.raw + row) for row in xi]))
        return factors, factors - factor(norms(self.raw))

    def _absorb_exactly_at_(
        self, run: Run, w: slice, dx: Tangent, xi: Float[Tensor, "change param"], clipped: tuple[Tensor, Tensor] | None
    ) -> None:
        at, dtheta, dm, dv = self.control(run, w), dx.theta[..., w], dx.m[..., w], dx.v[..., w]
        u = xi[..., w]
        if clipped is not None:  # c' (g + ξ) − c g = c' ξ + (c' − c) g
            factors, changes = clipped
            u = torch.addcmul(factors[..., None] * u, changes[..., None], self.raw[..., w])
        if run.sign != 1.0 or run.coupled:
            u = (run.sign * u).add_(dtheta, alpha=run.coupled)
        dm.lerp_(u, 1 - run.beta1)
        dv.mul_(run.beta2).addcmul_(u.add(at.g, alpha=2), u, value=1 - run.beta2)
        dtheta.mul_(run.shrink).add_(displacement(run, at.m, at.v, dm, dv))

    def absorb_transposed_(self, c: Cotangent) -> Float[Tensor, "outcome param"]:
        """The transpose of `absorb_`: cotangents one step back, in place; returns the dual of u."""
        w_all = torch.empty_like(c.theta)
        for run in self.runs:
            if not run.active:
                w_all[..., run.where] = 0.0
        if fused.available(c.theta):
            self._each_run(lambda run: fused.absorb_transposed_(self, run, c, w_all))
            return w_all
        for run, w in self.pieces(c.theta):
            at, theta, m, v = self.control(run, w), c.theta[..., w], c.m[..., w], c.v[..., w]
            dq_dm, dq_dv = sensitivities(run, at.m, at.v)
            m.addcmul_(dq_dm, theta)
            v.addcmul_(dq_dv, theta)
            torch.mul(m, 1 - run.beta1, out=w_all[..., w])
            w_all[..., w].addcmul_(at.g, v, value=2 * (1 - run.beta2))
            theta.mul_(run.shrink)
            m.mul_(run.beta1)
            v.mul_(run.beta2)
        return w_all


def step_size(run: Run, m: Tensor, v: Tensor) -> Tensor:
    """q(m, v) = −η m̂/(√v̂ + ε); 0/0 is a coordinate that does not move."""
    d = _root(run, v)
    return _still_(run, m / d, d).mul_(-run.lr / run.bias1)


def displacement(run: Run, m: Tensor, v: Tensor, dm: Tensor, dv: Tensor) -> Tensor:
    """q(m + δm, v + δv) − q(m, v) with q = −η m̂/(√v̂ + ε): exact for any δ, and without loss of digits.

    eq:displacement: m'/d' − m/d = (δm − (d' − d) m/d) / d', and 0/0 is a coordinate that does not move (ε = 0).
    """
    d, shocked = _root(run, v), _root(run, torch.add(v, dv).clamp_(min=0))
    ratio = torch.addcmul(dm, shocked - d, _still_(run, m / d, d), value=-1).div_(shocked)
    return _still_(run, ratio, shocked).mul_(-run.lr / run.bias1)


def recounted(now: Run, late: Run, m: Tensor, v: Tensor) -> Tensor:
    """q' − q at the same moments: what the bias corrections of another step count do by themselves.

    eq:recounted: with a = ρ1 (√v̂ + ε) = k √v + ρ1 ε and k = ρ1/√ρ2, q = −η m/a and q' − q = −η (m/a) (a − a')/a',
    so that no digits are lost where the counts hardly matter any more; 0/0 is a coordinate that does not move.
    """
    root, k, other = v.sqrt(), now.bias1 / math.sqrt(now.bias2), late.bias1 / math.sqrt(late.bias2)
    found = m / (root * k).add_(now.bias1 * now.eps)
    shocked = (root * other).add_(late.bias1 * late.eps)
    apart = root.mul_(k - other).add_((now.bias1 - late.bias1) * now.eps)
    return _still_(now, found.mul_(apart.div_(shocked)), v).mul_(-now.lr)


def displacement_by_v(run: Run, m: Tensor, v: Tensor, dm: Tensor, dv: Tensor) -> Tensor:
    """The part of it that v adds, (m + δm)(1/d' − 1/d): q is linear in m, which alone does δm/d, and nothing where d is
    (ε = 0)."""
    if run.eps == 0:
        return displacement(run, m, v, dm, dv).sub_(sensitivities(run, m, v)[0] * dm)
    d, shocked = _root(run, v), _root(run, torch.add(v, dv).clamp_(min=0))
    added = torch.add(m, dm).div_(d).mul_(d.sub_(shocked).div_(shocked))
    return added.mul_(-run.lr / run.bias1)


def _root(run: Run, v: Tensor) -> Tensor:
    """√v̂ + ε"""
    return (v / run.bias2).sqrt_().add_(run.eps)


def _still_(run: Run, ratio: Tensor, divisor: Tensor) -> Tensor:
    """0/0, which comes where ε is nothing, as 0. Any other NaN is told, such as that of a Hessian product."""
    if run.eps >= torch.finfo(ratio.dtype).tiny:
        return ratio
    return ratio.masked_fill_(ratio.isnan() & (divisor == 0), 0.0)
