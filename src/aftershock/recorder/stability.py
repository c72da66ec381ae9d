"""How fast a run amplifies small differences, and how far its steps are from the edge of stability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.adamw import Hyper
from ..core.dynamics import Linearized
from ..core.layout import Layout
from ..core.operators import Propagator, readout
from ..core.reductions import largest, norms, products
from ..core.state import JointState, Tangent
from ..core.trajectory import Trajectory
from ..errors import InvalidInput

BACK = 8  # steps over which growth is measured
ITERATIONS = 2  # of ΦᵀΦ
PRODUCTS = 8  # of the Hessian, for its top eigenvalue


@dataclass(frozen=True)
class Growth:
    """The number that decides whether linear contributions may follow a run."""

    # Growth per step, on 56 windows of 32 steps of hot and calm runs (MLP, CNN, language model; β2 0.95 and 0.999),
    # with the rank correlation ρ of predicted contributions and exact reruns: ρ ≥ 0.76 in all 25 below 1.13, ρ < 0.5 in
    # 7 of 13 between, ρ < 0.5 in all 18 above 1.3.
    too_fast: float = 1.3


GROWTH = Growth()


@dataclass(frozen=True)
class Amplification:
    """The most that a small displacement of θ was found to grow over the steps `start` … `stop`: a lower bound."""

    start: int
    stop: int
    growth: float  # in all

    @property
    def per_step(self) -> float:
        return self.growth ** (1 / (self.stop - self.start))

    @property
    def linear_ok(self) -> bool:
        """May linear contributions follow it? Above the bar none did."""
        return self.per_step <= GROWTH.too_fast

    @property
    def grown(self) -> str:
        count = self.stop - self.start
        if self.growth <= 1:
            return f"no growth of perturbations was found over the last {count} steps"
        return f"perturbations grow {self.growth:.3g}-fold over the last {count} steps"

    @property
    def sentence(self) -> str:
        """The same, and what follows from it."""
        return self.grown if self.linear_ok else f"{self.grown}: contributions mean nothing here"


def amplification(
    trajectory: Trajectory,
    last: int,
    back: int = BACK,
    *,
    iterations: int = ITERATIONS,
    enough: float = math.inf,
    seed: int = 0,
) -> Amplification:
    """The largest growth of δθ from state last−back to state `last`: the top singular value of S⁻¹ Φ_θθ S.

    S = √(η/(√v̂+ε)): in this norm Adam's steps are gradient steps, and a curvature counts as its stability does. v̂ is
    the larger one of both ends, so that the ruler is one and a weight that had no gradient yet is no cheap direction.
    Power iteration on ΦᵀΦ from the loss's slope and a seeded draw: one sweep back and one forward each, 5–6 g per
    step and iteration. A lower bound: after two iterations within a sixth where growth was large (above 10), and up to
    half too low where it was below 3 and nothing stood out. Ends where it is above `enough` per step.
    """
    start = max(0, last - back)
    if start == last:
        raise InvalidInput("growth is measured over at least one step before the spike: record a longer window")
    layout = trajectory.dynamics.layout
    at = trajectory.steps[min(last, len(trajectory) - 1)]
    ends = [trajectory.state(start), trajectory.state(last)]
    scale = _reach(layout, trajectory.steps[start].hypers, ends)
    slope = trajectory.dynamics.loss.gradient(ends[1].theta, ends[1].buffers, at.batch, at.random, at.where)
    y = _start(layout, layout.join(slope.grads) * scale, seed)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    phi, growth = Propagator(trajectory, start, last), 0.0
    for _ in range(iterations):
        x, growth = _unit(phi.rmv(readout((y * inverse)[None])).theta[0] * scale)
        if math.isinf(growth):
            break
        zero = torch.zeros_like(x)
        y, growth = _unit(phi.mv(Tangent(x * scale, zero, zero)).theta * inverse)
        if growth > enough ** (last - start):
            break
    return Amplification(start, last, growth)


def _unit(x: Float[Tensor, " param"]) -> tuple[Float[Tensor, " param"], float]:
    """x / ‖x‖ and ‖x‖, which may be beyond what a square can hold; infinite where numbers ran out."""
    top = largest(x)
    if not math.isfinite(top):
        return torch.zeros_like(x), math.inf
    x = x / max(top, _tiny(x))
    size = norms(x).clamp(min=_tiny(x))
    return x / size, top * float(size)


def _reach(layout: Layout, hypers: Sequence[Hyper], states: Sequence[JointState]) -> Float[Tensor, " param"]:
    """S = √(η/(√v̂+ε)), v̂ the largest of the states'."""
    out = torch.zeros_like(states[0].v)
    for i, place in enumerate(out.split(layout.padded_sizes)):
        hyper = hypers[layout.groups[i]]
        for state in states:
            if state.counts[i]:
                v = state.v.split(layout.padded_sizes)[i]
                torch.maximum(place, v / (1 - hyper.beta2 ** state.counts[i]), out=place)
        d = place.sqrt_().add_(hyper.eps)
        place.copy_(torch.where(d > 0, float(hyper.lr) / d, 0.0).sqrt_())
    return out


def _start(layout: Layout, slope: Float[Tensor, " param"], seed: int) -> Float[Tensor, " param"]:
    """A unit vector along the slope, which knows the sharp directions, and along a draw, which misses none."""
    generator = torch.Generator().manual_seed(seed)
    drawn = layout.expand(torch.randn(layout.size, generator=generator, dtype=layout.dtype).to(layout.device))
    mixed = slope / norms(slope).clamp(min=_tiny(slope)) + drawn / norms(drawn)
    return mixed / norms(mixed)


@dataclass(frozen=True)
class Sharpness:
    """η × the top eigenvalue of P^{−½} H P^{−½}, P = diag(√v̂+ε), against where Adam's steps become unstable."""

    value: float  # NaN where the numbers on the way to it are not finite, as with a learning rate of 1e20
    threshold: float  # 2(1+β1)/(1−β1)

    @property
    def unstable(self) -> bool:
        return self.value > self.threshold

    @property
    def sentence(self) -> str:
        if math.isnan(self.value):
            return "learning rate × sharpness is not known: the numbers on the way to it are not finite"
        side = "above" if self.unstable else "below"
        return (
            f"learning rate × sharpness is {self.value:.3g}, {side} the {self.threshold:.3g} beyond which AdamW's "
            "steps grow by themselves"
        )


def sharpness(trajectory: Trajectory, at: int, *, seed: int = 0) -> Sharpness:
    """At the state and batch of step `at`: Lanczos, 8 Hessian products on one graph, three vectors of memory.

    Each group's η is inside P, and a gradient that clipping makes c times smaller has c times the curvature. v̂ is
    that after the step, which divides it. Groups with other β1: the threshold of the lowest.
    """
    step = trajectory.steps[at]
    found = trajectory.linearize(step, trajectory.state(at))
    threshold = min(2 * (1 + hyper.beta1) / (1 - hyper.beta1) for hyper in step.hypers)
    return Sharpness(step.clip.factor * _top_eigenvalue(found, seed), threshold)


def _top_eigenvalue(found: Linearized, seed: int) -> float:
    """Of S H S. The three-term recurrence: what it loses of orthogonality only repeats an eigenvalue. NaN where its
    numbers are not finite."""
    layout, scale = found.linear.layout, torch.zeros_like(found.graph.raw)
    for run, w in found.linear.pieces():
        d = (found.linear.control(run, w).v / run.bias2).sqrt_().add_(run.eps)
        scale[w] = torch.where(d > 0, run.lr / d, 0.0).sqrt_()
    sign = found.linear.runs[0].sign  # maximize follows −H
    now = _start(layout, scale * found.graph.raw, seed)
    before, beside = torch.zeros_like(now), [0.0]
    diagonal: list[float] = []
    for _ in range(min(PRODUCTS, layout.size)):
        moved = found.graph.products((scale * now)[None])[0].mul_(sign * scale)
        diagonal.append(float(products(moved, now)))
        moved.sub_(now, alpha=diagonal[-1]).sub_(before, alpha=beside[-1])
        beside.append(float(norms(moved)))
        if beside[-1] <= abs(diagonal[0]) * torch.finfo(moved.dtype).eps:
            break
        before, now = now, moved / beside[-1]
    off = torch.tensor(beside[1 : len(diagonal)], dtype=torch.float64)
    small = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)
    try:
        return float(torch.linalg.eigvalsh(small)[-1])
    except torch.linalg.LinAlgError:  # so it refuses a matrix that is not finite
        return math.nan


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny
