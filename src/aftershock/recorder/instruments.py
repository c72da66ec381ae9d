"""What kind of event a spike was, in the run's own numbers: update sizes, amplification, sharpness, data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.adamw import Hyper
from ..core.batches import Batch
from ..core.contributions import Layers
from ..core.dynamics import Linearized
from ..core.layout import Layout
from ..core.operators import Propagator, readout
from ..core.reductions import norms, parts, products
from ..core.state import JointState, Tangent
from ..core.trajectory import Trajectory
from ..errors import InvalidInput, NotFinite
from .replay import own_value
from .triggers import FLATTEST, usual

LARGE_UPDATE = 2.0  # RMS of g/√v̂: ordinary steps have 0.5–1.2, the steps before spikes 3.6–6.2
LEADERS = 3
BACK = 8  # steps over which growth is measured
ITERATIONS = 2  # of ΦᵀΦ
PRODUCTS = 8  # of the Hessian, for its top eigenvalue
TOO_FAST = 30.0  # growth beyond which linear contributions say nothing
GONE = 3.0  # robust σ above the usual loss, below which a loss is ordinary
HALF = 0.5  # of the spike: a batch with less of it on the same weights is ordinary
LEAST_AFTER = 2  # high batches in a row after the spike that make a shift: one may be bad by itself


# --- the update against its memory


@dataclass(frozen=True)
class Leader:
    """A tensor whose gradient is large against its memory."""

    name: str
    rms: float
    share: float  # of the whole model's Σ g²/v̂


@dataclass(frozen=True)
class UpdateSizes:
    """RMS of g/√v̂ at each step of the path; NaN where a tensor had no gradient."""

    whole: Float[Tensor, " step"]
    by_layer: Float[Tensor, "step layer"]
    by_tensor: Float[Tensor, "step tensor"]
    layers: tuple[str, ...]
    tensors: tuple[str, ...]
    sizes: tuple[int, ...]  # elements of each tensor

    def leaders(self, at: int = -1, count: int = LEADERS) -> tuple[Leader, ...]:
        """The tensors with the largest RMS at a step."""
        row = self.by_tensor[at]
        squares = row.square().nan_to_num(0.0) * torch.tensor(self.sizes, dtype=row.dtype)
        shares = squares / squares.sum().clamp(min=1e-300)
        order = row.nan_to_num(-1.0).argsort(descending=True)[:count].tolist()
        return tuple(Leader(self.tensors[i], float(row[i]), float(shares[i])) for i in order)

    def usual(self, at: int = -1) -> float:
        """The median over the steps before `at`."""
        before = self.whole[:at]
        return float(before.median()) if len(before) else math.nan

    def large(self, at: int = -1) -> bool:
        """Larger than a gradient that its memory knows: beyond any ordinary step, and twice what is usual here."""
        usual = self.usual(at)
        return float(self.whole[at]) > max(LARGE_UPDATE, 2 * (0.0 if math.isnan(usual) else usual))

    def sentence(self, at: int = -1) -> str:
        first = self.leaders(at, 1)[0]
        return (
            f"the gradient is {float(self.whole[at]):.2g} times what Adam's memory of it expects (RMS of g/√v̂; usual "
            f"here {self.usual(at):.2g}), most of all in {first.name} ({first.rms:.2g})"
        )


def update_sizes(trajectory: Trajectory, layers: Layers | None = None) -> UpdateSizes:
    """√mean(g²/max(v̂, ε²)) by step and layer: StableAdamW's RMS, g as it reaches the moments, v̂ after the step.

    g = (m' − β1 m)/(1−β1) from the states, so that no gradient is computed where they are kept; elsewhere one per
    step. Its rounding error is that of m, ten times: far below what an RMS shows.
    """
    layout = trajectory.dynamics.layout
    layers = Layers.of(layout) if layers is None else layers
    sums: list[Tensor] = []
    before: JointState | None = None
    for time, state in trajectory.states(0, len(trajectory)):
        if before is not None:
            sums.append(_squares(layout, trajectory.steps[time - 1].hypers, before, state))
        before = replace(state, m=state.m.clone())  # the next state may be written in its place
    squares = torch.stack(sums)
    sizes = torch.tensor(layout.sizes, dtype=squares.dtype).expand_as(squares)
    counted = torch.where(squares.isnan(), 0.0, sizes)
    squared = squares.nan_to_num(0.0)
    by_layer = (layers.summed(squared) / layers.summed(counted)).sqrt()
    whole = (squared.sum(1) / counted.sum(1)).sqrt()
    by_tensor = (squares / sizes).sqrt()
    return UpdateSizes(whole, by_layer, by_tensor, tuple(layers.names), layout.names, layout.sizes)


def _squares(
    layout: Layout, hypers: Sequence[Hyper], before: JointState, after: JointState
) -> Float[Tensor, " tensor"]:
    """Σ g²/max(v̂, ε²) of each tensor at one step; NaN where it had no gradient."""
    out = torch.full((len(layout.names),), torch.nan, dtype=torch.float64)
    ratio = torch.zeros_like(after.m)
    pieces = [flat.split(layout.padded_sizes) for flat in (before.m, after.m, after.v, ratio)]
    taken = [i for i, (was, now) in enumerate(zip(before.counts, after.counts)) if now > was]
    for i in taken:
        m_before, m, v, place = (piece[i] for piece in pieces)
        hyper = hypers[layout.groups[i]]
        g = torch.sub(m, m_before, alpha=hyper.beta1).div_(1 - hyper.beta1)
        root = (v / (1 - hyper.beta2 ** after.counts[i])).sqrt_().clamp_(min=max(hyper.eps, _tiny(v)))
        torch.div(g, root, out=place)
    found = parts(ratio, ratio, layout.padded_sizes).double().cpu()
    out[taken] = found[taken]
    return out


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny


# --- how fast the run amplifies


@dataclass(frozen=True)
class Amplification:
    """How far a small displacement of θ grows over the steps `start` … `stop`, at most."""

    start: int
    stop: int
    growth: float  # in all
    per_step: float
    linear_ok: bool  # can linear contributions follow it?

    @property
    def sentence(self) -> str:
        grown = f"perturbations grow {self.growth:.3g}-fold over the last {self.stop - self.start} steps"
        return grown if self.linear_ok else f"{grown}: contributions mean nothing here"


def amplification(
    trajectory: Trajectory, last: int, back: int = BACK, *, iterations: int = ITERATIONS, seed: int = 0
) -> Amplification:
    """The largest growth of δθ from state last−back to state `last`: the top singular value of S⁻¹ Φ_θθ S.

    S = √(η/(√v̂+ε)): in this norm Adam's steps are gradient steps, and a curvature counts as its stability does. v̂ is
    the larger one of both ends, so that the ruler is one and a weight that had no gradient yet is no cheap direction.
    Power iteration on ΦᵀΦ from the loss's slope and a seeded draw: one sweep back and one forward each, 5–6 g per
    step and iteration. It is a lower bound, off by a few percent after two.
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
        x = phi.rmv(readout((y * inverse)[None])).theta[0] * scale
        x /= norms(x).clamp(min=_tiny(x))
        zero = torch.zeros_like(x)
        y = phi.mv(Tangent(x * scale, zero, zero)).theta * inverse
        growth = float(norms(y))
        y /= max(growth, _tiny(y))
    per_step = growth ** (1 / (last - start))
    return Amplification(start, last, growth, per_step, math.isfinite(growth) and growth <= TOO_FAST)


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

    value: float
    threshold: float  # 2(1+β1)/(1−β1)

    @property
    def unstable(self) -> bool:
        return self.value > self.threshold

    @property
    def sentence(self) -> str:
        side = "above" if self.unstable else "below"
        return (
            f"learning rate × sharpness is {self.value:.3g}, {side} the {self.threshold:.3g} beyond which AdamW's steps "
            "grow by themselves"
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
    """Of S H S. The three-term recurrence: what it loses of orthogonality only repeats an eigenvalue."""
    layout, scale = found.linear.layout, torch.zeros_like(found.graph.raw)
    for run, w in found.linear.pieces():
        d = (found.linear.control(run, w).v / run.bias2).sqrt_().add_(run.eps)
        scale[w] = torch.where(d > 0, run.sign * run.lr / d, 0.0).abs().sqrt_()
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
    return float(torch.linalg.eigvalsh(small)[-1])
