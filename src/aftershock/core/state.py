"""The joint state x = (θ, m, v), its differences and its duals: three types that never mix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from .reductions import products

CHANNELS = ("theta", "m", "v")
Lag = tuple[int, ...]  # by how many steps a row's counts are behind the control's, one entry per parameter


@dataclass(frozen=True)
class JointState:
    """x_s = (θ_s, m_{s-1}, v_{s-1}), and what travels with it: step counts and buffers.

    `counts` has one entry per parameter: torch counts the steps of each parameter by itself.
    """

    theta: Float[Tensor, " param"]
    m: Float[Tensor, " param"]
    v: Float[Tensor, " param"]
    counts: tuple[int, ...]
    buffers: Mapping[str, Tensor]

    def clone(self) -> JointState:
        """A copy whose tensors may be written to; buffers are never written to and stay shared."""
        return replace(self, theta=self.theta.clone(), m=self.m.clone(), v=self.v.clone())

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.theta, self.m, self.v, *self.buffers.values()))


@dataclass(frozen=True)
class _Triple:
    theta: Float[Tensor, "*rows param"]
    m: Float[Tensor, "*rows param"]
    v: Float[Tensor, "*rows param"]

    def clone(self):  # type: ignore[no-untyped-def]
        return type(self)(self.theta.clone(), self.m.clone(), self.v.clone())

    def __getitem__(self, rows):  # type: ignore[no-untyped-def]
        return type(self)(self.theta[rows], self.m[rows], self.v[rows])

    def __mul__(self, factor: float):  # type: ignore[no-untyped-def]
        return type(self)(self.theta * factor, self.m * factor, self.v * factor)

    @property
    def rows(self) -> int:
        return self.theta.shape[0]


class Tangent(_Triple):
    """δx: a difference of two states, or a batch of them `[change, param]`."""


class Cotangent(_Triple):
    """A linear functional on tangents, or a batch of them `[outcome, param]`."""


def difference(shocked: JointState, control: JointState) -> Tangent:
    """δx = x^s − x^c."""
    return Tangent(shocked.theta - control.theta, shocked.m - control.m, shocked.v - control.v)


def lag_of(shocked: JointState, control: JointState) -> Lag:
    """By how many steps a run's counts are behind, as after a step that was not taken; it stays so."""
    return tuple(now - own for now, own in zip(control.counts, shocked.counts, strict=True))


def stack(tangents: list[Tangent]) -> Tangent:
    """Tangents of one vector each as one batch."""
    return Tangent(
        torch.stack([t.theta for t in tangents]),
        torch.stack([t.m for t in tangents]),
        torch.stack([t.v for t in tangents]),
    )


def pair(c: Cotangent, dx: Tangent) -> Shaped[Tensor, "outcome change"]:
    """⟨c, δx⟩ for every row of c with every row of δx."""
    return pair_channels(c, dx).sum(0)


def pair_channels(c: Cotangent, dx: Tangent) -> Shaped[Tensor, "channel outcome change"]:
    """⟨c, δx⟩ split by channel: the parts that wait in θ, m and v."""
    return torch.stack([products(getattr(c, name), getattr(dx, name)) for name in CHANNELS])
