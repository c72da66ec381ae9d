"""The linear maps of the paper: B, A, Φ and G. Each has `mv`, its transpose `rmv`, `.T` and `as_matrix`.

    ξ ──B──▶ δx_{t+1} ──Φ──▶ δx_{t+h} ──c──▶ δF_{t+h}

Every product takes one vector or a batch of rows. `as_matrix` is for systems small enough to look at.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .dynamics import Linearized
from .layout import Layout
from .linear_step import LinearStep
from .rollout import Rows, rollout
from .state import Cotangent, Tangent, pair
from .sweeps import adjoint_sweep, retreat_, transit_
from .trajectory import Trajectory


class LinearOperator(ABC):
    """A linear map between gradients, tangents and responses, with its transpose.

    >>> step = path.transition(1)
    >>> basis = step.domain_basis()  # (θ, m, v), one row for each coordinate
    >>> matrix = step.as_matrix()
    >>> matrix.shape, torch.allclose(as_rows(step.layout, step.mv(basis)).mT, matrix)
    (torch.Size([66, 66]), True)
    >>> dual = Cotangent(basis.theta, basis.m, basis.v)
    >>> torch.allclose(as_rows(step.layout, step.rmv(dual)).mT, step.T.as_matrix())
    True
    """

    layout: Layout

    @abstractmethod
    def mv(self, x: Any) -> Any:
        """The map applied to one vector or to every row of a batch."""

    @abstractmethod
    def rmv(self, y: Any) -> Any:
        """The transposed map applied to one dual vector or to every row of a batch."""

    @abstractmethod
    def domain_basis(self) -> Any:
        """The identity of the domain, one basis vector per row."""

    @property
    def T(self) -> Transposed:
        return Transposed(self)

    def as_matrix(self) -> Float[Tensor, "out in"]:
        """The dense matrix, without padding: one column per coordinate of the domain."""
        return as_rows(self.layout, self.mv(self.domain_basis())).mT


class Transposed:
    """opᵀ."""

    def __init__(self, operator: LinearOperator) -> None:
        self.operator = operator

    @property
    def T(self) -> LinearOperator:
        return self.operator

    def mv(self, y: Any) -> Any:
        return self.operator.rmv(y)

    def rmv(self, x: Any) -> Any:
        return self.operator.mv(x)

    def as_matrix(self) -> Float[Tensor, "in out"]:
        return self.operator.as_matrix().mT


class WriteIn(LinearOperator):
    """B: a raw gradient difference ξ to the state after the step.

    δm = (1−β1) J ξ, δv = 2(1−β2) g ⊙ J ξ, δθ = M δm + V δv (eq:writein_remainder; its transpose
    eq:write_in_transposed). No gradient, one elementwise pass.

    >>> write_in = path.write_in(0)
    >>> xi = path.point.loss.layout.expand(theory.residuals(change))  # [change, param]
    >>> dx = write_in.mv(xi)
    >>> pulled = write_in.rmv(Cotangent(dx.theta, dx.m, dx.v))  # Bᵀ of the same numbers: ⟨B ξ, B ξ⟩ = ⟨ξ, BᵀB ξ⟩
    >>> torch.allclose((pulled * xi).sum(1), (dx.theta**2 + dx.m**2 + dx.v**2).sum(1))
    True
    """

    def __init__(self, linear: LinearStep) -> None:
        self.linear = linear
        self.layout = linear.layout

    def mv(self, xi: Float[Tensor, "*change param"]) -> Tangent:
        dx = Tangent(*(torch.zeros_like(xi) for _ in range(3)))
        self.linear.absorb_(dx, self.linear.gradient_variation(xi))
        return dx

    def rmv(self, c: Cotangent) -> Float[Tensor, "*outcome param"]:
        return self.linear.gradient_variation(self.linear.absorb_transposed_(c.clone()))

    def domain_basis(self) -> Float[Tensor, "d param"]:
        return self.layout.expand(torch.eye(self.layout.size, dtype=self.layout.dtype, device=self.layout.device))


class Transition(LinearOperator):
    """A_s = K + B H P_θ: one step of the tangent. One Hessian product per vector, either way.

    eq:transition, as blocks eq:joint_state_jacobian; its transpose eq:transition_transposed.

    >>> after = path.transition(1).mv(change.difference()[0])  # where the first change's δx_1 is one step later
    >>> torch.allclose(after.m, path.propagate(1, 2).mv(change.difference()[0]).m)
    True
    """

    def __init__(self, linearized: Linearized) -> None:
        self.linearized = linearized
        self.layout = linearized.linear.layout

    def mv(self, dx: Tangent) -> Tangent:
        out = _batched(dx.clone())
        transit_(self.linearized, out)
        return _like(dx, out)

    def rmv(self, c: Cotangent) -> Cotangent:
        out = _batched(c.clone())
        retreat_(self.linearized, out)
        return _like(c, out)

    def powers(self, dx: Tangent) -> Iterator[Tangent]:
        """δx, A δx, A² δx, … for as long as they are asked for; each is overwritten by the next.

        >>> from itertools import islice
        >>> step, start = path.transition(1), change.difference()[0]
        >>> *_, last = islice(step.powers(start), 3)
        >>> torch.allclose(last.theta, step.mv(step.mv(start)).theta)
        True
        """
        out = _batched(dx.clone())
        while True:
            yield _like(dx, out)
            transit_(self.linearized, out)

    def domain_basis(self) -> Tangent:
        return state_basis(self.layout)


class Propagator(LinearOperator):
    """Φ(stop, start) = A_{stop−1} ⋯ A_start along a trajectory; the identity where they are equal. eq:propagator

    >>> start = change.difference()[0]
    >>> twice = path.transition(2).mv(path.transition(1).mv(start))
    >>> torch.allclose(path.propagate(1, 3).mv(start).theta, twice.theta)
    True
    """

    def __init__(self, trajectory: Trajectory, start: int, stop: int) -> None:
        self.trajectory, self.start, self.stop = trajectory, start, stop
        self.layout = trajectory.dynamics.layout

    def mv(self, dx: Tangent) -> Tangent:
        out = _batched(dx.clone())
        for _moment in rollout(self.trajectory, self.start, Rows(linear=out), self.stop):
            pass  # nothing is read on the way
        return _like(dx, out)

    def rmv(self, c: Cotangent) -> Cotangent:
        return _like(c, adjoint_sweep(self.trajectory, self.stop, self.start, _batched(c.clone())))

    def domain_basis(self) -> Tangent:
        return state_basis(self.layout)


class ResponseOperator(LinearOperator):
    """G_h = c_{t+h}ᵀ Φ(t+h, t+1) B_t for the given horizons: ξ to the signed response.

    thm:finite_horizon_response, eq:response_operator.

    `readouts[i]` is ∇F at the control state of `horizons[i]`. Forward costs one Hessian product per
    step and change; the transpose one per step and outcome.

    >>> xi = path.point.loss.layout.expand(theory.residuals(change))
    >>> forward = path.response_operator(probe).mv(xi)  # [change, horizon]
    >>> torch.allclose(forward, torch.as_tensor(response.tangent.sel(scale=1.0).values))
    True
    >>> adjoint = path.response_operator(probe).rmv(torch.eye(4, dtype=torch.float64))  # one row for each horizon
    >>> torch.allclose(forward, xi @ adjoint.mT)
    True
    """

    def __init__(
        self,
        trajectory: Trajectory,
        write_in: WriteIn,
        at: int,
        horizons: Sequence[int],
        readouts: Float[Tensor, "horizon param"],
    ) -> None:
        self.trajectory, self.write_in, self.at = trajectory, write_in, at
        self.horizons, self.readouts = list(horizons), readouts
        self.layout = trajectory.dynamics.layout

    def mv(self, xi: Float[Tensor, "*change param"]) -> Float[Tensor, "*change horizon"]:
        dx = _batched(self.write_in.mv(xi))
        out = xi.new_zeros(dx.rows, len(self.horizons))
        for moment in rollout(self.trajectory, self.at + 1, Rows(linear=dx), self.at + max(self.horizons)):
            for i, h in enumerate(self.horizons):
                if self.at + h == moment.time:
                    out[:, i] = pair(readout(self.readouts[i : i + 1]), dx)[0]
        return out if xi.ndim == 2 else out[0]

    def rmv(self, weights: Float[Tensor, "*outcome horizon"]) -> Float[Tensor, "*outcome param"]:
        w = weights.reshape(-1, len(self.horizons))
        top = self.at + max(self.horizons)

        def inject(time: int, c: Cotangent) -> int:
            for i, h in enumerate(self.horizons):
                if self.at + h == time:
                    c.theta.addmm_(w[:, i : i + 1], self.readouts[i : i + 1])
            return c.rows

        c = adjoint_sweep(self.trajectory, top, self.at + 1, readout(self.layout.zeros(len(w))), inject)
        out = self.write_in.rmv(c)
        return out if weights.ndim == 2 else out[0]

    def domain_basis(self) -> Float[Tensor, "d param"]:
        return self.write_in.domain_basis()


def readout(gradients: Float[Tensor, "outcome param"]) -> Cotangent:
    """c = (∇F, 0, 0): the probe sees the moments only once they have moved the parameters. eq:readout"""
    return Cotangent(gradients, torch.zeros_like(gradients), torch.zeros_like(gradients))


def state_basis(layout: Layout) -> Tangent:
    """The identity of the joint state, one basis vector per row."""
    eye = torch.eye(3 * layout.size, dtype=layout.dtype, device=layout.device)
    return Tangent(*(layout.expand(block) for block in eye.split(layout.size, dim=1)))


def as_rows(layout: Layout, element: Tensor | Tangent | Cotangent) -> Float[Tensor, "row coordinate"]:
    """Gradients, tangents, cotangents or responses as plain rows without padding."""
    if isinstance(element, Tensor):
        return layout.compact(element) if element.shape[-1] == layout.padded_size else element
    return torch.cat([layout.compact(part) for part in (element.theta, element.m, element.v)], dim=-1)


def _batched(x: Any) -> Any:
    return x if x.theta.ndim == 2 else x[None]


def _like(template: Any, x: Any) -> Any:
    return x if template.theta.ndim == 2 else x[0]
