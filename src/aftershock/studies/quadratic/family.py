"""The paper's controlled systems: quadratic losses, drawn one after the other from a correlated process.

Every function takes rows of θ and a batch of losses at once: a loss has leading dimensions of its own (futures),
and θ is `[*batch, row, d]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.adamw import Hyper
from ...core.state import JointState

DIMENSION = 512
RANK = 16
CORRELATION = 0.85
LINEAR_SPREAD = 0.05
PROBE_SPREAD = 0.02
START_SPREAD = 0.1
CONDITIONS = (1.0, 4.0, 16.0)  # κ, in turn with the system's index
ANISOTROPY = 32.0
HYPER = Hyper(lr=2e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, fused=True)


@dataclass(frozen=True)
class Quadratic:
    """ℓ(θ) = ½ θᵀ D θ + ‖Uᵀ θ‖²/(2r) + qᵀ θ. `eq:exp_main_quadratic`"""

    diagonal: Float[Tensor, "*batch d"]
    factor: Float[Tensor, "*batch d r"]
    linear: Float[Tensor, "*batch d"]

    def products(self, x: Float[Tensor, "*batch row d"]) -> Float[Tensor, "*batch row d"]:
        """H x = D x + U Uᵀ x / r."""
        inner = (x @ self.factor) / self.factor.shape[-1]
        return torch.addcmul(inner @ self.factor.mT, self.diagonal[..., None, :], x)

    def gradient(self, theta: Float[Tensor, "*batch row d"]) -> Float[Tensor, "*batch row d"]:
        return self.products(theta).add_(self.linear[..., None, :])

    def value(self, theta: Float[Tensor, "*batch row d"]) -> Float[Tensor, "*batch row"]:
        return values_of([self], theta)[0]


@dataclass(frozen=True)
class Probe:
    """A quadratic loss seen from a center: F(θ) = ℓ(θ − μ)."""

    loss: Quadratic
    center: Float[Tensor, " d"]

    def value(self, theta: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows"]:
        return self.loss.value(theta - self.center)

    def gradient(self, theta: Float[Tensor, "row d"]) -> Float[Tensor, "row d"]:
        return self.loss.gradient(theta - self.center)


def values_of(losses: Sequence[Quadratic], theta: Float[Tensor, "*batch row d"]) -> list[Float[Tensor, "*batch row"]]:
    """Several losses at the same θ, which is read twice, not twice for each."""
    curved = theta.square() @ torch.stack([loss.diagonal for loss in losses], dim=-1)
    columns = [torch.cat([loss.factor, loss.linear[..., None]], dim=-1) for loss in losses]
    products = (theta @ torch.cat(columns, dim=-1)).split([column.shape[-1] for column in columns], dim=-1)
    return [
        (curved[..., i] + inner[..., :-1].square().mean(-1)) / 2 + inner[..., -1] for i, inner in enumerate(products)
    ]


# --- the process


@dataclass(frozen=True)
class Process:
    """D_s = ρ D_{s−1} + (1−ρ) D̃_s; U and q by ρ and √(1−ρ²). `app:exp1_controlled_details`"""

    condition: float

    def innovation(self, generator: torch.Generator, *batch: int, spread: float = LINEAR_SPREAD) -> Quadratic:
        uniform = torch.rand(*batch, DIMENSION, generator=generator, dtype=torch.float64)
        factor = torch.randn(*batch, DIMENSION, RANK, generator=generator, dtype=torch.float64)
        linear = torch.randn(*batch, DIMENSION, generator=generator, dtype=torch.float64)
        low, high = 0.05, 0.25 * self.condition
        return Quadratic(low + (high - low) * uniform, factor.div_(DIMENSION**0.5), linear.mul_(spread))

    def after(self, last: Quadratic, generator: torch.Generator, *batch: int) -> Iterator[Quadratic]:
        """The batches that follow `last`, one draw of the future for each element of `batch`."""
        now, mixing = last, (1 - CORRELATION**2) ** 0.5
        while True:
            new = self.innovation(generator, *batch)
            now = Quadratic(
                torch.add(new.diagonal.mul_(1 - CORRELATION), now.diagonal, alpha=CORRELATION),
                torch.add(new.factor.mul_(mixing), now.factor, alpha=CORRELATION),
                torch.add(new.linear.mul_(mixing), now.linear, alpha=CORRELATION),
            )
            yield now

    def sequence(self, generator: torch.Generator, count: int) -> list[Quadratic]:
        first = self.innovation(generator)
        following = self.after(first, generator)
        return [first, *(next(following) for _ in range(count - 1))]


def mean_loss(losses: list[Quadratic]) -> Quadratic:
    """The mean of quadratics is one of R times the rank: ‖[U_1 … U_R]ᵀ θ‖²/(2 r R)."""
    return Quadratic(
        torch.stack([loss.diagonal for loss in losses]).mean(0),
        torch.cat([loss.factor for loss in losses], dim=-1),
        torch.stack([loss.linear for loss in losses]).mean(0),
    )


def stacked(losses: list[Quadratic]) -> Quadratic:
    """Losses side by side along a new leading dimension."""
    return Quadratic(*(torch.stack([getattr(loss, field.name) for loss in losses]) for field in fields(Quadratic)))


# --- probes


def standard_probe(process: Process, generator: torch.Generator) -> Probe:
    """A fresh innovation of the family with a smaller linear term."""
    return Probe(process.innovation(generator, spread=PROBE_SPREAD), torch.zeros(DIMENSION, dtype=torch.float64))


def anisotropic_probe(standard: Probe, generator: torch.Generator) -> Probe:
    """The standard probe without its linear term, its diagonal spread over a factor of 32."""
    loss = standard.loss
    weighted = Quadratic(loss.diagonal * _weights(generator), loss.factor, torch.zeros_like(loss.linear))
    return Probe(weighted, standard.center)


def rotating_probe(before: Float[Tensor, " d"], after: Float[Tensor, " d"], generator: torch.Generator) -> Probe:
    """½ (θ−μ)ᵀ W (θ−μ), centered between the two middle states of the control. `eq:app_rotating_probe`"""
    weights = _weights(generator)
    return Probe(
        Quadratic(weights, torch.zeros_like(weights)[:, None], torch.zeros_like(weights)), (before + after) / 2
    )


def _weights(generator: torch.Generator) -> Float[Tensor, " d"]:
    powers = torch.arange(DIMENSION, dtype=torch.float64) / (DIMENSION - 1)
    return (ANISOTROPY**powers)[torch.randperm(DIMENSION, generator=generator)]


# --- the start


def start_state(generator: torch.Generator) -> JointState:
    theta = START_SPREAD * torch.randn(1, DIMENSION, dtype=torch.float64, generator=generator)
    return JointState(theta, torch.zeros_like(theta), torch.zeros_like(theta), (0,), {})
