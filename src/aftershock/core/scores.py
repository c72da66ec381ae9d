"""Adjoint scores: one sweep back from an outcome, then a dot product per batch, example or past step.

AdamW is linear along the sweep, with exact kicks at stiff coordinates (`kicks`), and a probe may be read half way
along the displacement that all candidates share (`midpoint_slopes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from .adamw import displacement
from .batches import Batch
from .changes import ControlStep
from .clipping import TORCH_EPSILON, clip_jacobian
from .dynamics import Linearized
from .kicks import IN_CACHE, STIFF, History, Pairs, Writes, count_responses, kick_responses, taken_out
from .loss import Gradient
from .operators import readout
from .probe import Watch
from .reductions import products
from .rollout import Rows, rollout
from .rows import pool_gradients
from .state import CHANNELS, Cotangent, JointState, Tangent, difference, pair
from .sweeps import adjoint_sweep
from .trajectory import Trajectory

SAMPLE = 8  # candidates whose mean displacement is followed
PAIRS_AT_ONCE = 2**24  # stiff coordinates of all candidates whose kicks are computed at once: 40 bytes each


# --- where the probe is read


def mean_write(control: ControlStep, pool: Sequence[Batch]) -> Tangent:
    """The mean over a sample of candidates of the exact difference after the step: 1 g for each of the sample."""
    every = max(1, len(pool) // SAMPLE)
    some = list(pool[::every])[:SAMPLE]
    total: Tangent | None = None
    for gradient in _gradients(control, some):
        end = control.apply(control.dynamics.layout.join(gradient.grads), gradient.present)[0]
        dx = difference(end, control.after)
        total = dx if total is None else Tangent(*(getattr(total, c).add_(getattr(dx, c)) for c in CHANNELS))
    assert total is not None
    return total * (1 / len(some))


def midpoint_slopes(watch: Watch, shared: Tangent, horizons: Sequence[int]) -> dict[int, Float[Tensor, " param"]]:
    """∇F half way along a displacement that all candidates share, carried on as one semilinear row. eq:midpoint

    Candidates that replace the same batch share most of what they do: read at the control the probe's slope would
    miss its curvature along that. One Hessian product per step, one gradient per outcome.
    """
    trajectory, found = watch.trajectory, {}
    rows = Rows(semilinear=Tangent(*(getattr(shared, c)[None].clone() for c in CHANNELS)))
    for moment in rollout(trajectory, watch.first, rows, watch.at + max(horizons)):
        if moment.time - watch.at in horizons:
            assert moment.semilinear is not None
            theta = torch.add(moment.control.theta, moment.semilinear.theta[0], alpha=0.5)
            slope = watch.probe.gradient_at(trajectory, moment.time, theta, moment.control)
            found[moment.time - watch.at] = trajectory.dynamics.layout.join(slope.grads)
    return found


# --- the sweep


@dataclass(frozen=True)
class Adjoint:
    """Cotangents of every outcome at the state after the changed step, and λ_θ at every state on the way."""

    horizons: tuple[int, ...]  # the last outcome first
    first: Cotangent
    history: History

    def by_horizon(self, values: Float[Tensor, "outcome change"]) -> Float[Tensor, "horizon change"]:
        """Rows of outcomes in the order of their horizons."""
        return values[[self.horizons.index(h) for h in sorted(self.horizons)]]


def adjoint(
    watch: Watch,
    slopes: Callable[[int], Float[Tensor, " param"]],
    horizons: Sequence[int],
    place: torch.device,
    tick: Callable[[], None] = lambda: None,
) -> Adjoint:
    """Φ(t+h, t+1)ᵀ c_{t+h} for every horizon, as rows at the state after the changed step. eq:adjoint

    Outcomes join the sweep when their time comes: H horizons cost H²/2 Hessian products.
    """
    order = sorted(horizons, reverse=True)
    history = History(place)

    def inject(time: int, c: Cotangent) -> int:
        horizon = time - watch.at
        if horizon in order:
            c.theta[order.index(horizon)] = slopes(horizon)
        tick()
        return sum(h >= horizon for h in order)

    def visit(at: Linearized, before: JointState, c: Cotangent) -> None:
        history.keep(at.step.index, c.theta)

    c = readout(watch.trajectory.dynamics.layout.zeros(len(order)))
    first = adjoint_sweep(watch.trajectory, watch.at + order[0], watch.first, c, inject, visit)
    return Adjoint(tuple(order), first, history)


# --- batches


@dataclass(frozen=True)
class PoolScores:
    """Predicted responses of a pool, and the share of coordinates at which a candidate's write is stiff (mean)."""

    response: Float[Tensor, "change outcome"]
    xi_norm: Float[Tensor, " change"]
    stiff: float


def pool_scores(
    control: ControlStep,
    found: Adjoint,
    trajectory: Trajectory,
    pool: Sequence[Batch],
    at_once: int,
    tick: Callable[[], None] = lambda: None,
) -> PoolScores:
    """Predicted responses to each batch of the pool in the place of the control's: 1 g each, or less in rows.

    ⟨∂F/∂g, g_i − g⟩ with the gradients that reach the moments (clipping is exact), and at stiff coordinates the exact
    write with its kicks instead. A batch that uses other parameters than the control's has its whole exact
    difference paired, and the counts of those parameters.
    """
    layout, scored = control.dynamics.layout, _Scored(control, found, trajectory, len(pool))
    rows = layout.zeros(min(at_once, len(pool)))  # one buffer for all: fresh memory costs as much as a gradient
    for first in range(0, len(pool), at_once):
        gradients = _gradients(control, list(pool[first : first + at_once]), first)
        for row, gradient in zip(rows, gradients):
            if not all(gradient.present):
                row.zero_()
            layout.write(row, gradient.grads)
            tick()
        scored.add(rows[: len(gradients)], gradients, first)
    return scored.result()


class _Scored:
    """Scores of a pool as its gradients pass; kicks wait until enough of them have come together."""

    def __init__(self, control: ControlStep, found: Adjoint, trajectory: Trajectory, size: int) -> None:
        self.control, self.found, self.trajectory, self.size = control, found, trajectory, size
        self.lift = control.linear.absorb_transposed_(found.first.clone())  # ∂F/∂g of every outcome, past the clip
        _mask_inactive_(control, self.lift)
        self.screen = _Screen(control)
        # read where stiff coordinates lie, all outcomes of one at once
        self.by_coordinate = self.lift.mT.contiguous(), found.first.theta.mT.contiguous()
        self.against = torch.cat([self.lift, control.raw[None]])
        self.base = products(self.lift, control.raw) * control.step.clip.factor
        self.own = products(control.raw, control.raw)
        outcomes = len(found.horizons)
        self.response = torch.zeros(size, outcomes, dtype=torch.float64, device=self.lift.device)
        self.sizes: list[Tensor] = []
        self.pairs = 0
        self._writes: list[Writes] = []
        self._odd: dict[int, list[int]] = {}  # batches that use other parameters: how far counts are behind

    def add(self, rows: Float[Tensor, "row param"], gradients: Sequence[Gradient], first: int) -> None:
        norm = torch.stack([gradient.norm for gradient in gradients]).to(self.own)
        factor, paired = _clip_factors(self.control, norm), products(rows, self.against)
        linear = paired[:, :-1] * factor[:, None] - self.base
        usual = torch.tensor([g.present == self.control.present for g in gradients], device=rows.device)
        for wrote in self.screen.writes(rows, factor, first, usual):
            _replace_(linear, wrote, *self.by_coordinate, first)
            self._keep(wrote.writes)
        for i in (~usual).nonzero()[:, 0].tolist():
            linear[i] = self._unusual(rows[i], gradients[i].present, first + i)
        self.response[first : first + len(rows)] += linear
        self.sizes.append((norm.square() - 2 * paired[:, -1] + self.own).clamp_(min=0).sqrt_())

    def _unusual(self, raw: Float[Tensor, " param"], present: tuple[bool, ...], row: int) -> Float[Tensor, " outcome"]:
        """A batch that uses other parameters than the control's: its whole exact difference is paired."""
        control, layout = self.control, self.control.dynamics.layout
        self._odd[row] = [int(a) - int(b) for a, b in zip(control.present, present)]
        dx = difference(control.apply(raw, present)[0], control.after)
        self._keep(taken_out(dx, control.after.v, layout, control.step.index, self._odd[row], row))
        return pair(self.found.first, dx[None])[:, 0]

    def _keep(self, writes: Writes) -> None:
        self._writes.append(writes)
        self.pairs += len(writes)
        if sum(map(len, self._writes)) >= PAIRS_AT_ONCE:
            self._kick()

    def _kick(self) -> None:
        joined = Writes.joined(self._writes)
        outcomes = len(self.found.horizons)
        self.response += kick_responses(self.trajectory, self.found.history, joined, self.size, outcomes, split=False)[
            0
        ].mT
        self._writes = []

    def result(self) -> PoolScores:
        if self._writes:
            self._kick()
        if self._odd:
            lags, begin = torch.tensor(list(self._odd.values())), torch.full((len(self._odd),), self.control.step.index)
            found = count_responses(self.trajectory, self.found.history, lags, begin, len(self.found.horizons))
            self.response[list(self._odd)] += found.sum(-1).mT.to(self.response)
        share = self.pairs / (self.size * self.control.dynamics.layout.size)
        by_horizon = self.found.by_horizon(self.response.mT.cpu()).mT
        return PoolScores(by_horizon, torch.cat(self.sizes).double().cpu(), share)


def _gradients(control: ControlStep, batches: Sequence[Batch], first: int = 0) -> list[Gradient]:
    """Gradients of candidates at the control's state before the step."""
    loss, step, before = control.dynamics.loss, control.step, control.before
    return pool_gradients(
        loss, before.theta, before.buffers, batches, step.random,
        lambda i: f"batch {first + i} of the pool", control.present,
    )  # fmt: skip


def _clip_factors(control: ControlStep, norm: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
    """What clipping makes of gradients of these norms at the control's step."""
    limit = control.step.max_norm
    return torch.ones_like(norm) if limit is None else torch.clamp(limit / (norm + TORCH_EPSILON), max=1.0)


def _mask_inactive_(control: ControlStep, lift: Float[Tensor, "outcome param"]) -> None:
    for run in control.linear.runs:
        if not run.active or run.sign != 1.0:
            lift[..., run.where] *= run.sign if run.active else 0.0


@dataclass(frozen=True)
class _Wrote:
    """Exact writes at stiff coordinates: the moments' part, the displacement of θ, the difference of the clipped
    gradients as the loss gives them (before `maximize` turns their sign)."""

    writes: Writes
    dtheta: Float[Tensor, " pair"]
    dg: Float[Tensor, " pair"]


class _Screen:
    """Finds, in rows of gradients, the coordinates at which a candidate's write is stiff.

    |δv| > τ v with δv = (1−β2)(g_i² − g²) is |g_i| > √(g² + τ v/(1−β2)), one comparison. Where the control's own
    gradient made v, or a decay is coupled to the gradient, more pass it than are stiff; those are few, and looked at.
    """

    def __init__(self, control: ControlStep) -> None:
        self.control = control
        self.limit = torch.full_like(control.raw, torch.inf)
        for run, w in control.linear.pieces():
            at = control.linear.control(run, w)
            share = 1 - run.beta2
            limit = (at.g * at.g + (STIFF / share) * at.v).sqrt_() if share > 0 else torch.full_like(at.g, torch.inf)
            if run.coupled:
                limit = (limit - (run.coupled * control.before.theta[w]).abs()).clamp_(min=0)
            own = share * at.g * at.g > STIFF * at.v
            self.limit[w] = torch.where(own, -1.0, limit)

    def writes(
        self, rows: Float[Tensor, "row param"], factor: Float[Tensor, " row"], first: int, some: Bool[Tensor, " row"]
    ) -> Iterator[_Wrote]:
        """The exact writes of some candidates at their stiff coordinates: one pass over the gradients.

        Early in training most coordinates are stiff: then a few rows at a time.
        """
        loudest = rows[0].abs()
        for row in rows[1:]:
            torch.maximum(loudest, row.abs(), out=loudest)
        columns = (loudest > self.limit).nonzero()[:, 0]
        most = IN_CACHE if rows.device.type == "cpu" else PAIRS_AT_ONCE
        group = max(1, most // max(len(columns), 1))
        for begin in range(0, len(rows), group):
            few = slice(begin, min(begin + group, len(rows)))
            loud = rows[few][:, columns].abs() * factor[few, None] > self.limit[columns]
            row, column = (loud & some[few, None]).nonzero(as_tuple=True)
            row, where = row + begin, columns[column]
            yield self._exact(row, where, rows[row, where] * factor[row], first)

    def _exact(self, row: Tensor, where: Int64[Tensor, " pair"], clipped: Float[Tensor, " pair"], first: int) -> _Wrote:
        dm, dv, dtheta, dg = (torch.zeros_like(clipped) for _ in range(4))
        keep = torch.zeros_like(clipped, dtype=torch.bool)
        control = self.control
        for run in control.linear.runs:
            some = ((where >= run.where.start) & (where < run.where.stop)).nonzero()[:, 0]
            if run.active and len(some):
                at, now = where[some], control.before
                coupled = run.coupled * now.theta[at]
                g = control.raw[at] * (run.sign * control.step.clip.factor) + coupled
                other = clipped[some] * run.sign + coupled
                m = torch.lerp(now.m[at], g, 1 - run.beta1)
                v = (run.beta2 * now.v[at]).addcmul_(g, g, value=1 - run.beta2)
                dg[some] = run.sign * (other - g)
                dm[some] = (1 - run.beta1) * (other - g)
                dv[some] = (1 - run.beta2) * (other - g) * (other + g)
                dtheta[some] = displacement(run, m, v, dm[some], dv[some])
                keep[some] = dv[some].abs() > STIFF * v
        row, where, dm, dv, dtheta, dg = (x[keep] for x in (row, where, dm, dv, dtheta, dg))
        step = torch.full_like(row, control.step.index)
        return _Wrote(Writes(row + first, where, dm, dv, step, torch.zeros_like(row)), dtheta, dg)


def _replace_(
    linear: Float[Tensor, "row outcome"],
    wrote: _Wrote,
    lift: Float[Tensor, "param outcome"],
    theta: Float[Tensor, "param outcome"],
    first: int,
) -> None:
    """Take the linear part of stiff coordinates out of the scores and put the exact displacement in."""
    writes = wrote.writes
    if len(writes):
        pairs = Pairs(replace(writes, row=writes.row - first), writes.coordinate.int())
        pairs.add_(linear.mT, wrote.dtheta, theta)
        pairs.add_(linear.mT, -wrote.dg, lift)


def difference_scores(
    control: ControlStep, found: Adjoint, trajectory: Trajectory, differences: Sequence[Tangent]
) -> Float[Tensor, "row outcome"]:
    """Predicted responses to given differences of the state after the control's step: no gradient."""
    layout, values, writes = control.dynamics.layout, [], []
    for row, dx in enumerate(differences):
        dx = dx.clone()
        writes.append(taken_out(dx, control.after.v, layout, control.step.index, [0] * len(layout.names), row))
        values.append(pair(found.first, dx[None])[:, 0].double())
    kicked = kick_responses(trajectory, found.history, Writes.joined(writes), len(values), len(found.horizons))
    return found.by_horizon((torch.stack(values, dim=1) + kicked.sum(0)).cpu()).mT


# --- examples


def example_direction(
    control: ControlStep, found: Adjoint, trajectory: Trajectory, sample: Sequence[Batch]
) -> Float[Tensor, " param"]:
    """∂F/∂ĝ for shares of a batch's gradient: the adjoint's, and at stiff coordinates the slope of the exact response.

    There the slope is that of a least-squares line through the exact responses of a sample of batches, whose
    gradients have the size that examples give them; the derivative would hold only far below eps.
    """
    layout = control.dynamics.layout
    lift = control.linear.absorb_transposed_(found.first.clone())
    _mask_inactive_(control, lift)
    screen, wrote = _Screen(control), list[_Wrote]()
    for i, gradient in enumerate(_gradients(control, sample)):
        row, factor = layout.join(gradient.grads)[None], _clip_factors(control, gradient.norm[None])
        wrote.extend(screen.writes(row, factor.to(row), i, factor > 0))
    pairs = torch.cat([part.writes.coordinate for part in wrote])
    if len(pairs):
        where, place = pairs.unique(return_inverse=True)
        # every pair is a row of its own, so that its response comes back by itself
        joined = Writes.joined([part.writes for part in wrote])
        alone = replace(joined, row=torch.arange(len(pairs), device=pairs.device))
        response = kick_responses(trajectory, found.history, alone, len(pairs), 1).sum(0)[0]
        response += (found.first.theta[0][pairs] * torch.cat([part.dtheta for part in wrote])).double()
        dg = torch.cat([part.dg for part in wrote]).double()
        up, down = (torch.zeros(len(where), dtype=torch.float64, device=pairs.device) for _ in range(2))
        up.index_add_(0, place, response * dg)
        down.index_add_(0, place, dg * dg)
        lift[0][where] = torch.where(down > 0, up / down, 0.0).to(lift)
    return clip_jacobian(control.linear.clip, control.raw, lift)[0]
