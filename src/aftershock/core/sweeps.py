"""One step of predicted rows forward (`rollout` carries them), and cotangents backward along a trajectory.

One Hessian product per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from jaxtyping import Float
from torch import Tensor

from .adamw import Run, blocks, late_runs_of
from .dynamics import Linearized, Step
from .linear_step import Control, recounted, sensitivities
from .state import Cotangent, JointState, Lag, Tangent
from .trajectory import Trajectory


def transit_(at: Linearized, dx: Tangent, lags: Sequence[Lag] = (), shifted: Sequence[bool] = ()) -> None:
    """δx ← A δx in place: carry(δx) + write_in(H δθ).

    lags, shifted: as in `recount_`.
    """
    for some in at.graph.pieces(dx.rows):
        transit_with_(at, dx[some], at.graph.products(dx.theta[some]))
    recount_(at, dx, lags, shifted)


def transit_with_(at: Linearized, dx: Tangent, products: Float[Tensor, "change param"]) -> None:
    """The same where H δθ is known, which is overwritten."""
    u = at.linear.gradient_variation(products)
    at.linear.add_coupled_decay_(u, dx.theta)
    at.linear.absorb_(dx, u)


def transit_semilinear_(at: Linearized, dx: Tangent, lags: Sequence[Lag] = ()) -> None:
    """δx ← f(x + δx) − f(x) in place, with the network's gradient linear and AdamW's arithmetic exact.

    Exact for quadratic losses. Saturation, √v and clipping are not linearized, so that coordinates with a
    small or zero v, at which A is useless at real scales, keep their true bounds.

    lags: of every row, where there are any; such a row's own bias corrections are exact too.
    """
    for some in at.graph.pieces(dx.rows):
        at.linear.absorb_exactly_(dx[some], at.graph.products(dx.theta[some]), at.step.max_norm)
    recount_exactly_(at, dx, lags)


def recount_(at: Linearized, dx: Tangent, lags: Sequence[Lag], shifted: Sequence[bool] = ()) -> None:
    """After one linear step, in place: rows whose counts are not the control's take their own bias corrections.

    δθ += (M' − M) δm + (V' − V) δv + q' − q: the derivative of the row's own step, and what its counts do at the
    control's moments, which is no part of δx and known exactly. Rows that are not `shifted` (empty: all are) take the
    derivative alone.
    """
    for i, now, late, w, control in _late_pieces(at, dx, lags):
        theta, m, v = dx.theta[i, w], dx.m[i, w], dx.v[i, w]
        for sign, run in ((1, late), (-1, now)):
            dq_dm, dq_dv = sensitivities(run, control.m, control.v)
            theta.addcmul_(dq_dm, m, value=sign).addcmul_(dq_dv, v, value=sign)
        if not shifted or shifted[i]:
            theta.add_(recounted(now, late, control.m, control.v))


def recount_exactly_(at: Linearized, dx: Tangent, lags: Sequence[Lag]) -> None:
    """The same after one semilinear step: q' − q at the row's own moments. eq:recounted"""
    for i, now, late, w, control in _late_pieces(at, dx, lags):
        m, v = control.m.add_(dx.m[i, w]), control.v.add_(dx.v[i, w]).clamp_(min=0)
        dx.theta[i, w].add_(recounted(now, late, m, v))


def _late_pieces(at: Linearized, dx: Tangent, lags: Sequence[Lag]) -> Iterator[tuple[int, Run, Run, slice, Control]]:
    """Each row that is behind, in pieces, with the control's scalars and its own.

    Row by row and in plain arithmetic on every device: a kernel has one set of scalars for all of its rows, and rows
    that are behind are few.
    """
    layout, hypers, counts, present = at.linear.layout, at.step.hypers, at.linear.before.counts, at.graph.present
    for i, lag in enumerate(lags):
        if not any(lag):
            continue
        for now, late in late_runs_of(layout, hypers, counts, present, lag):
            for w in blocks(now.where, dx.theta[i]):
                yield i, now, late, w, at.linear.control(now, w)


def retreat_(at: Linearized, c: Cotangent, at_once: int | None = None) -> None:
    """c ← Aᵀ c in place: carryᵀ(c) + P_θᵀ H write_inᵀ(c).

    at_once: rows whose products are computed together at most, for less memory; default: all.
    """
    w = at.linear.absorb_transposed_(c)
    vectors, size = at.linear.gradient_variation(w), at_once or max(c.rows, 1)
    for some in (slice(first, first + size) for first in range(0, c.rows, size)):
        at.graph.add_products_(c.theta[some], vectors[some])
    at.linear.add_coupled_decay_(c.theta, w)


def adjoint_sweep(
    trajectory: Trajectory,
    top: int,
    bottom: int,
    c: Cotangent,
    inject: Callable[[int, Cotangent], int] = lambda time, c: c.rows,
    visit: Callable[[Linearized, JointState, Cotangent], None] = lambda at, before, c: None,
    at_once: int | None = None,
) -> Cotangent:
    """Carry cotangents from state `top` back to state `bottom`, in place.

    At each state `inject(time, c)` may add readouts, and says how many leading rows are alive: rows of
    outcomes that lie further back cost nothing until their time has come. `visit` sees each step with the
    state before it and the cotangents after it. at_once: as in `retreat_`.
    """

    def back(step: Step, before: JointState, alive: int) -> None:  # its graph is gone before the next one is built
        at = trajectory.linearize(step, before)
        visit(at, before, c[:alive])
        retreat_(at, c[:alive], at_once)

    alive = inject(top, c)
    for step, before in trajectory.backward(bottom, top):
        back(step, before, alive)
        alive = inject(step.index, c)
    return c
