"""Frozen coefficients of a real step: the diagonal of each block of A_s at chosen coordinates.

The step's own derivative (`LinearStep.absorb_`) is given three unit writes and read where they were made, so that
clipping, coupled decay, `maximize` and coordinates with v = 0 are what they are everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.adamw import Run
from ..core.dynamics import Dynamics, Linearized
from ..core.layout import Layout
from ..core.linear_step import LinearStep
from ..core.randomness import Randomness, generator_of
from ..core.reductions import count
from ..core.state import Tangent
from ..errors import InvalidInput, NotFinite

if TYPE_CHECKING:
    from ..api.path import Path

Coordinate = int | slice | str | tuple[str, Any]
Diagonal = Callable[[Linearized, Tensor], Tensor]

ROWS_AT_ONCE = 16  # Hessian products asked for together: memory for 16 vectors of the model's size


@dataclass(frozen=True)
class Place:
    """Coordinates of one step of a path; `curvature` is the diagonal of σ J H there, as the moments feel it."""

    dynamics: Dynamics
    at: Linearized
    positions: Int[Tensor, " chosen"]
    curvature: Float[Tensor, " chosen"]

    @classmethod
    def of(cls, path: Path, step: int, coordinate: Coordinate, diagonal: Diagonal) -> Place:
        index, dynamics = path.index(step), path.trajectory.dynamics
        where = positions(dynamics.layout, coordinate)
        at = path.trajectory.linearize(path.steps[index], path.trajectory.state(index))
        _check(at.linear, where, at.step.where)
        return cls(dynamics, at, where, diagonal(at, where))

    def coefficients(self) -> dict[str, float]:
        """a, b_m, b_v, d_m, d_v averaged over the coordinates, β1, β2: a few elementwise passes."""
        linear, where, zeros = self.at.linear, self.positions, self.dynamics.layout.zeros
        dx, u = Tangent(zeros(3), zeros(3), zeros(3)), zeros(3)
        dx.theta[0, where], dx.m[1, where], dx.v[2, where] = 1.0, 1.0, 1.0
        u[0, where] = self.curvature.to(u)
        linear.add_coupled_decay_(u, dx.theta)
        linear.absorb_(dx, u)
        theta, m, v = (part[:, where].double().mean(1).tolist() for part in (dx.theta, dx.m, dx.v))
        run = _runs(linear, where)[0]
        return {
            "a": theta[0], "b_m": theta[1], "b_v": theta[2], "d_m": m[0], "d_v": v[0],
            "beta1": run.beta1, "beta2": run.beta2,
        }  # fmt: skip


def exact_diagonal(at: Linearized, where: Int[Tensor, " chosen"]) -> Float[Tensor, " chosen"]:
    """(σ J H)_ii by one Hessian product of a basis vector each."""
    found = []
    for some in torch.arange(len(where), device=where.device).split(ROWS_AT_ONCE):
        rows = torch.zeros(len(some), len(where), dtype=at.linear.g.dtype, device=where.device)
        rows[torch.arange(len(some)), some] = 1.0
        found.append((_products(at, where, rows) * rows).sum(1))
    return torch.cat(found)


def sampled_diagonal(samples: int, generator: Randomness) -> Diagonal:
    """An unbiased estimate of the same, z_i (σ J H z)_i with random signs z: one Hessian product per sample."""
    if samples < 1:
        raise InvalidInput(f"an estimate needs at least one sample; got {samples}")
    draw = generator_of(generator)

    def diagonal(at: Linearized, where: Int[Tensor, " chosen"]) -> Float[Tensor, " chosen"]:
        total = torch.zeros(len(where), dtype=at.linear.g.dtype, device=where.device)
        for first in range(0, samples, ROWS_AT_ONCE):
            shape = (min(ROWS_AT_ONCE, samples - first), len(where))
            signs = torch.randint(0, 2, shape, generator=draw, device=draw.device) * 2 - 1
            z = signs.to(total)
            total += (_products(at, where, z) * z).sum(0)
        return total / samples

    return diagonal


def positions(layout: Layout, coordinate: Coordinate) -> Int[Tensor, " chosen"]:
    """Where the named coordinates lie in the flat vector."""
    try:
        if isinstance(coordinate, int | slice):
            found = layout.index[coordinate]
        else:
            name, index = (coordinate, ...) if isinstance(coordinate, str) else coordinate
            found = layout.by_name(torch.arange(layout.padded_size, device=layout.device))[name][index]
    except KeyError as error:
        raise InvalidInput(f"{error.args[0]!r} is not a trainable parameter of this model") from error
    except (IndexError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"{coordinate!r} names no coordinate of the {layout.size:,} here: give a flat index or slice, the name of "
            f"a parameter, or (name, index). {error}"
        ) from error
    if found.numel() == 0:
        raise InvalidInput(f"{coordinate!r} holds no coordinate")
    return found.reshape(-1).unique()


def _products(
    at: Linearized, where: Int[Tensor, " chosen"], rows: Float[Tensor, "row chosen"]
) -> Float[Tensor, "row chosen"]:
    """σ J H u at the chosen coordinates, for rows u that live there."""
    vectors = at.linear.layout.zeros(len(rows))
    vectors[:, where] = rows
    return at.linear.gradient_variation(at.graph.products(vectors))[:, where]


def _runs(linear: LinearStep, where: Tensor) -> list[Run]:
    """The stretches of the flat vector that hold these coordinates."""
    inside = [(where >= run.where.start) & (where < run.where.stop) for run in linear.runs]
    return [run for run, mask in zip(linear.runs, inside) if bool(mask.any())]


def _check(linear: LinearStep, where: Tensor, step: str) -> None:
    runs = _runs(linear, where)
    if not all(run.active for run in runs):
        raise InvalidInput(f"{step} gives these coordinates no gradient, so AdamW leaves them alone there")
    if len({(run.beta1, run.beta2) for run in runs}) > 1:
        raise InvalidInput("these coordinates lie in parameter groups with different betas; freeze each group alone")
    broken = count(linear.broken[where])
    if broken:
        raise NotFinite(f"{step} has no derivative at {broken} of these coordinates: v = 0 there but m ≠ 0")
