"""Propagation along a trajectory: tangents forward, cotangents backward. One Hessian product per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .path import Linearized, Trajectory
from .state import Cotangent, Tangent


def transit_(at: Linearized, dx: Tangent) -> None:
    """δx ← A δx in place: carry(δx) + write_in(H δθ)."""
    u = at.linear.gradient_variation(at.graph.products(dx.theta))
    at.linear.add_coupled_decay_(u, dx.theta)
    at.linear.absorb_(dx, u)


def retreat_(at: Linearized, c: Cotangent) -> None:
    """c ← Aᵀ c in place: carryᵀ(c) + P_θᵀ H write_inᵀ(c)."""
    w = at.linear.absorb_transposed_(c)
    c.theta.add_(at.graph.products(at.linear.gradient_variation(w)))
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
) -> Iterator[tuple[int, Cotangent]]:
    """Yield (time, c_time) for time = top … bottom, downwards. `c` is consumed.

    Before each yield `inject(time, c)` may add readouts, and says how many leading rows are alive: rows
    of outcomes that lie further back cost nothing until their time has come.
    """
    alive = inject(top, c)
    yield top, c[:alive]
    for step, state in trajectory.backward(bottom, top):
        retreat_(trajectory.linearize(step, state), c[:alive])
        alive = inject(step.index, c)
        yield step.index, c[:alive]
