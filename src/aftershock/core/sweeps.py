"""Propagation along a trajectory: tangents forward, cotangents backward. One Hessian product per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jaxtyping import Float
from torch import Tensor

from .dynamics import Linearized
from .state import Cotangent, JointState, Tangent
from .trajectory import Trajectory


def transit_(at: Linearized, dx: Tangent) -> None:
    """δx ← A δx in place: carry(δx) + write_in(H δθ)."""
    for some in at.graph.pieces(dx.rows):
        transit_with_(at, dx[some], at.graph.products(dx.theta[some]))


def transit_with_(at: Linearized, dx: Tangent, products: Float[Tensor, "change param"]) -> None:
    """The same where H δθ is known, which is overwritten."""
    u = at.linear.gradient_variation(products)
    at.linear.add_coupled_decay_(u, dx.theta)
    at.linear.absorb_(dx, u)


def transit_semilinear_(at: Linearized, dx: Tangent) -> None:
    """δx ← f(x + δx) − f(x) in place, with the network's gradient linear and AdamW's arithmetic exact.

    Exact for quadratic losses. Saturation, √v and clipping are not linearized, so that coordinates with a
    small or zero v, at which A is useless at real scales, keep their true bounds.
    """
    for some in at.graph.pieces(dx.rows):
        at.linear.absorb_exactly_(dx[some], at.graph.products(dx.theta[some]), at.step.max_norm)


def retreat_(at: Linearized, c: Cotangent) -> None:
    """c ← Aᵀ c in place: carryᵀ(c) + P_θᵀ H write_inᵀ(c)."""
    w = at.linear.absorb_transposed_(c)
    at.graph.add_products_(c.theta, at.linear.gradient_variation(w))
    at.linear.add_coupled_decay_(c.theta, w)


def tangent_sweep(trajectory: Trajectory, start: int, stop: int, dx: Tangent) -> Iterator[tuple[int, Tangent]]:
    """Yield (time, δx_time) for time = start … stop. `dx` is consumed: each yield overwrites the last."""
    yield start, dx
    for step, state in trajectory.forward(start, stop):
        transit_(trajectory.linearize(step, state), dx)
        yield step.index + 1, dx


def adjoint_sweep(
    trajectory: Trajectory,
    top: int,
    bottom: int,
    c: Cotangent,
    inject: Callable[[int, Cotangent], int] = lambda time, c: c.rows,
    visit: Callable[[Linearized, JointState, Cotangent], None] = lambda at, before, c: None,
) -> Cotangent:
    """Carry cotangents from state `top` back to state `bottom`, in place.

    At each state `inject(time, c)` may add readouts, and says how many leading rows are alive: rows of
    outcomes that lie further back cost nothing until their time has come. `visit` sees each step with the
    state before it and the cotangents after it.
    """
    alive = inject(top, c)
    for step, before in trajectory.backward(bottom, top):
        at = trajectory.linearize(step, before)
        visit(at, before, c[:alive])
        retreat_(at, c[:alive])
        alive = inject(step.index, c)
    return c
