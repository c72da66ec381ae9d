"""Adjoint scores: one sweep back from an outcome, then a dot product per batch, example or past step.

What a change writes into θ, m and v has its exact effect on θ at every later step (`curves`, `kicks`); how that
displacement goes on through the network is linear. A probe may be read half way along the displacement that all
candidates share (`midpoint_slopes`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import NotFinite
from .batches import Batch, same_batch
from .changes import ControlStep
from .clipping import TORCH_EPSILON, clip_jacobian
from .curves import Beyond, Curves, Reach, Sweep, total
from .dynamics import Linearized
from .kicks import IN_CACHE, PAIRS_AT_ONCE, History, Writes, count_responses, kick_responses, places, taken_out
from .linear_step import displacement
from .loss import Gradient
from .operators import readout
from .pools import Pool
from .probe import Watch
from .reductions import marked, products
from .rollout import Rows, rollout
from .state import CHANNELS, Cotangent, JointState, Tangent, difference, pair
from .sweeps import adjoint_sweep
from .trajectory import Trajectory

SAMPLE = 8  # candidates whose mean displacement is followed


# --- where the probe is read


def mean_write(control: ControlStep, pool: Sequence[Batch], at_once: int = SAMPLE) -> Tangent:
    """The mean over a sample of candidates of the exact difference after the step: 1 g for each of the sample.

    at_once: gradients of the sample that are computed together at most, for less memory.
    """
    every = max(1, len(pool) // SAMPLE)
    some = list(pool[::every])[:SAMPLE]
    pieces = (_pool(control, some[first : first + at_once], first) for first in range(0, len(some), at_once))
    total: Tangent | None = None
    for gradient in itertools.chain.from_iterable(piece.gradients() for piece in pieces):
        dx = _written(control, gradient)
        total = dx if total is None else Tangent(*(getattr(total, c).add_(getattr(dx, c)) for c in CHANNELS))
        del dx
    assert total is not None
    return total * (1 / len(some))


def _written(control: ControlStep, gradient: Gradient) -> Tangent:
    """The exact difference after the step; what it took to make it is gone with this call."""
    end = control.apply(control.dynamics.layout.join(gradient.grads), gradient.present)[0]
    return difference(end, control.after)


def midpoint_slopes(watch: Watch, shared: Tangent, horizons: Sequence[int]) -> dict[int, Float[Tensor, " param"]]:
    """∇F half way along a displacement that all candidates share, carried on as one semilinear row. eq:midpoint

    Candidates that replace the same batch share most of what they do: read at the control the probe's slope would
    miss its curvature along that. At the control where the probe is not finite half way. One Hessian product per step,
    one gradient per outcome.
    """
    trajectory, found = watch.trajectory, {}
    rows = Rows(semilinear=Tangent(*(getattr(shared, c)[None].clone() for c in CHANNELS)))
    for moment in rollout(trajectory, watch.first, rows, watch.at + max(horizons)):
        if moment.time - watch.at in horizons:
            assert moment.semilinear is not None
            theta = torch.add(moment.control.theta, moment.semilinear.theta[0], alpha=0.5)
            try:
                slope = watch.probe.gradient_at(trajectory, moment.time, theta, moment.control)
            except NotFinite:
                slope = watch.probe.gradient_at(trajectory, moment.time, moment.control.theta, moment.control)
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
    at_once: int | None = None,
) -> Adjoint:
    """Φ(t+h, t+1)ᵀ c_{t+h} for every horizon, as rows at the state after the changed step. eq:adjoint

    Outcomes join the sweep when their time comes: H horizons cost H²/2 Hessian products.
    at_once: products that are computed together at most; default: all of a step's.
    """
    order, layout = sorted(horizons, reverse=True), watch.trajectory.dynamics.layout
    history = History(place, layout, sum(h - 1 for h in order))

    def inject(time: int, c: Cotangent) -> int:
        horizon = time - watch.at
        if horizon in order:
            c.theta[order.index(horizon)] = slopes(horizon)
        tick()
        return sum(h >= horizon for h in order)

    def visit(at: Linearized, before: JointState, c: Cotangent) -> None:
        history.keep(at.step.index, c.theta)

    c = readout(layout.zeros(len(order)))
    first = adjoint_sweep(watch.trajectory, watch.at + order[0], watch.first, c, inject, visit, at_once)
    return Adjoint(tuple(order), first, history)


# --- batches


@dataclass(frozen=True)
class AtOnce:
    """How much of a pool is in memory at once."""

    gradients: int
    pairs: int = IN_CACHE  # of a batch and a coordinate beyond its curve, while they are looked at
    waiting: int = IN_CACHE  # of these, until their kicks are computed together


@dataclass(frozen=True)
class PoolScores:
    """Predicted responses of a pool, the share of coordinates at which a candidate's write is stiff (mean), and how far
    curves are from exact kicks (NRMSE of one batch, the one with the largest gradient among the first)."""

    response: Float[Tensor, "change outcome"]
    xi_norm: Float[Tensor, " change"]
    stiff: float
    curve_error: float


def pool_scores(
    control: ControlStep,
    found: Adjoint,
    trajectory: Trajectory,
    pool: Sequence[Batch],
    at_once: AtOnce,
    tick: Callable[[], None] = lambda: None,
) -> PoolScores:
    """Predicted responses to each batch of the pool in the place of the control's: 1 g each, or less in rows.

    Every coordinate's response is read off its curve (`curves`) at the gradient that reaches the moments (clipping is
    exact), and where it has none it is computed from the exact write and its kicks. A batch that uses other parameters
    than the control's has its whole exact difference paired, and the counts of those parameters.
    """
    layout, scored = control.dynamics.layout, _Scored(control, found, trajectory, pool, at_once)
    size = min(at_once.gradients, len(pool))
    rows = layout.zeros(size)  # one buffer for all: fresh memory costs as much as a gradient
    for first in range(0, len(pool), size):
        some = list(pool[first : first + size])
        own = rows[: len(some)]
        norm, present = _pool(control, some, first).write(own, tick)
        scored.add(own, norm, present, first)
    return scored.result()


class _Scored:
    """Scores of a pool as its gradients pass; kicks wait until enough of them have come together."""

    def __init__(
        self, control: ControlStep, found: Adjoint, trajectory: Trajectory, pool: Sequence[Batch], at_once: AtOnce
    ) -> None:
        self.control, self.found, self.trajectory, self.size = control, found, trajectory, len(pool)
        # the control's own batch is no change: its gradient, computed once more, may round otherwise
        self.nothing = [i for i, batch in enumerate(pool) if same_batch(batch, control.step.batch)]
        self.at_once = at_once
        self.sweep = Sweep(trajectory, found.first, found.history)
        self.curves = Curves.of(control, self.sweep)
        self.base, _ = self.curves.read(control, self.curves.reach.own[None])
        self.own = products(control.raw, control.raw)
        outcomes = len(found.horizons)
        self.response = torch.zeros(self.size, outcomes, dtype=torch.float64, device=control.raw.device)
        self.sizes: list[Tensor] = []
        self.pairs = 0
        self._beyond: list[Beyond] = []
        self._waiting = 0  # of these
        self._writes: list[Writes] = []
        self._odd: dict[int, list[int]] = {}  # batches that use other parameters: how far counts are behind
        self._direct: tuple[int, Float[Tensor, " outcome"]] | None = None  # one batch with exact kicks everywhere

    def add(
        self,
        rows: Float[Tensor, "row param"],
        norm: Float[Tensor, " row"],
        present: Sequence[tuple[bool, ...]],
        first: int,
    ) -> None:
        """Raw gradients of candidates from `first` on, which are used up."""
        norm, inner = norm.to(self.own), products(rows, self.control.raw)
        factor = _clip_factors(self.control, norm)
        self.sizes.append((norm.square() - 2 * inner + self.own).clamp_(min=0).sqrt_())
        odd = {i: one for i, one in enumerate(present) if one != self.control.present}
        replaced = {i: self._unusual(rows[i], one, first + i) for i, one in odd.items()}
        for i in odd:
            rows[i] = self.control.raw
            factor[i] = self.control.step.clip.factor
        _reach_moments_(self.control, rows, factor)
        usual = {i for i in range(len(rows)) if i not in odd and first + i not in self.nothing}
        if self._direct is None and usual:
            self._check(rows, max(usual, key=self.sizes[-1].tolist().__getitem__), first)
        response, largest = self.curves.read(self.control, rows)
        response -= self.base
        for some in self.curves.reach.beyond(rows, largest, self.at_once.pairs):
            response.index_add_(0, *self.curves.correction(some))
            self._far(some, first)
        for i, whole in replaced.items():
            response[i] = whole
        self.response[first : first + len(rows)] += response

    def _check(self, rows: Float[Tensor, "row param"], row: int, first: int) -> None:
        """What exact kicks at all coordinates make of one batch."""
        self._direct = first + row, total(self.control, self.sweep, rows[row])

    def _unusual(self, raw: Float[Tensor, " param"], present: tuple[bool, ...], row: int) -> Float[Tensor, " outcome"]:
        """A batch that uses other parameters than the control's: its whole exact difference is paired."""
        control, layout = self.control, self.control.dynamics.layout
        self._odd[row] = [int(a) - int(b) for a, b in zip(control.present, present)]
        dx = difference(control.apply(raw, present)[0], control.after)
        self._keep(taken_out(dx, control.after.v, layout, control.step.index, self._odd[row], row))
        return pair(self.found.first, dx[None])[:, 0]

    def _far(self, some: Beyond, first: int) -> None:
        self._beyond.append(Beyond(some.row + first, some.where, some.g))
        self._waiting += len(some.row)
        if self._waiting >= self.at_once.pairs:
            self._write()

    def _write(self) -> None:
        """Exact writes where no curve reaches: their displacement at once, their kicks later."""
        wrote = _wrote(self.control, self._beyond)
        self._beyond, self._waiting = [], 0
        if len(wrote.writes):
            slopes = self.found.first.theta.index_select(1, wrote.writes.coordinate)
            self.response.index_add_(0, wrote.writes.row, (slopes * wrote.dtheta).mT.double())
            self._keep(wrote.writes)

    def _keep(self, writes: Writes) -> None:
        self._writes.append(writes)
        self.pairs += len(writes)
        if sum(map(len, self._writes)) >= self.at_once.waiting:
            self._kick()

    def _kick(self) -> None:
        joined, outcomes, self._writes = Writes.joined(self._writes), len(self.found.horizons), []
        kicked = kick_responses(self.trajectory, self.found.history, joined, self.size, outcomes)
        self.response += kicked.mT

    def result(self) -> PoolScores:
        if self._beyond:
            self._write()
        if self._writes:
            self._kick()
        if self._odd:
            lags, begin = torch.tensor(list(self._odd.values())), torch.full((len(self._odd),), self.control.step.index)
            found = count_responses(self.trajectory, self.found.history, lags, begin, len(self.found.horizons))
            self.response[list(self._odd)] += found.sum(-1).mT.to(self.response)
        share = self.pairs / (self.size * self.control.dynamics.layout.size)
        by_horizon, sizes = self.found.by_horizon(self.response.mT.cpu()).mT, torch.cat(self.sizes).double().cpu()
        by_horizon[self.nothing], sizes[self.nothing] = 0.0, 0.0
        return PoolScores(by_horizon, sizes, share, self._curve_error())

    def _curve_error(self) -> float:
        """NaN where no batch of the pool differs from the control's."""
        if self._direct is None:
            return math.nan
        row, direct = self._direct
        size = float(direct.norm())
        return float((self.response[row] - direct).norm()) / size if size > 0 else math.nan


def _pool(control: ControlStep, batches: Sequence[Batch], first: int = 0) -> Pool:
    """Candidates, whose gradients are taken at the control's state before the step."""
    loss, step, before = control.dynamics.loss, control.step, control.before
    return Pool(
        loss, before.theta, before.buffers, batches, step.random,
        lambda i: f"batch {first + i} of the pool", control.present,
    )  # fmt: skip


def _clip_factors(control: ControlStep, norm: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
    """What clipping makes of gradients of these norms at the control's step."""
    limit = control.step.max_norm
    return torch.ones_like(norm) if limit is None else torch.clamp(limit / (norm + TORCH_EPSILON), max=1.0)


def _reach_moments_(control: ControlStep, rows: Float[Tensor, "row param"], factor: Float[Tensor, " row"]) -> None:
    """Raw gradients become those that reach the moments: clipped, signed, with a coupled decay."""
    if control.step.max_norm is not None:
        rows.mul_(factor[:, None])
    for run in control.linear.runs:
        if run.active and (run.sign != 1.0 or run.coupled):
            rows[:, run.where].mul_(run.sign).add_(control.before.theta[run.where], alpha=run.coupled)


@dataclass(frozen=True)
class _Wrote:
    """Exact writes where no curve reaches: the moments' part, the displacement of θ, the difference of gradients."""

    writes: Writes
    dtheta: Float[Tensor, " pair"]
    dg: Float[Tensor, " pair"]


def _wrote(control: ControlStep, beyond: Sequence[Beyond]) -> _Wrote:
    row, where, other = (torch.cat([getattr(some, name) for some in beyond]) for name in ("row", "where", "g"))
    dm, dv, dtheta, dg = (torch.zeros_like(other) for _ in range(4))
    for run in control.linear.runs:
        some = marked((where >= run.where.start) & (where < run.where.stop))
        if run.active and len(some):
            at, now = where[some], control.before
            g = control.raw[at] * (run.sign * control.step.clip.factor) + run.coupled * now.theta[at]
            m = torch.lerp(now.m[at], g, 1 - run.beta1)
            v = (run.beta2 * now.v[at]).addcmul_(g, g, value=1 - run.beta2)
            dg[some] = other[some] - g
            dm[some] = (1 - run.beta1) * dg[some]
            dv[some] = (1 - run.beta2) * dg[some] * (other[some] + g)
            dtheta[some] = displacement(run, m, v, dm[some], dv[some])
    changed = dg != 0
    row, where, dm, dv, dtheta, dg = (x[changed] for x in (row, where, dm, dv, dtheta, dg))
    step = torch.full_like(row, control.step.index)
    return _Wrote(Writes(row, where, dm, dv, step, torch.zeros_like(row)), dtheta, dg)


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
    return found.by_horizon((torch.stack(values, dim=1) + kicked).cpu()).mT


# --- examples


def example_direction(
    control: ControlStep, found: Adjoint, trajectory: Trajectory, sample: Sequence[Batch], pairs: int = PAIRS_AT_ONCE
) -> Float[Tensor, " param"]:
    """∂F/∂ĝ for shares of a batch's gradient: the adjoint's, and beyond `curves.FAR` the slope of the exact response.

    There the slope is that of a least-squares line through the exact responses of a sample of batches, whose
    gradients have the size that examples give them; the derivative would hold only far below eps.

    pairs: of a batch and a coordinate, at once; a path that replays its states does so for each so many.
    """
    layout, reach = control.dynamics.layout, Reach.of(control)
    lift, rows = control.linear.absorb_transposed_(found.first.clone()), layout.zeros(len(sample))
    norm, _ = _pool(control, sample).write(rows)
    _reach_moments_(control, rows, _clip_factors(control, norm).to(rows))
    largest = torch.addcmul(reach.square, rows[0], rows[0])
    for row in rows[1:]:
        torch.maximum(largest, torch.addcmul(reach.square, row, row), out=largest)
    for some in reach.beyond(rows, largest, pairs):
        wrote = _wrote(control, [some])
        if len(wrote.writes):
            _fit_slopes_(lift[0], wrote, found, trajectory)
    for run in control.linear.runs:
        if not run.active or run.sign != 1.0:
            lift[..., run.where] *= run.sign if run.active else 0.0
    return clip_jacobian(control.linear.clip, control.raw, lift)[0]


def _fit_slopes_(lift: Float[Tensor, " param"], wrote: _Wrote, found: Adjoint, trajectory: Trajectory) -> None:
    """Least-squares lines through exact responses, in the place of the adjoint's slopes at their coordinates."""
    pairs, dg = wrote.writes.coordinate, wrote.dg.double()
    where, place = places(pairs, len(lift))
    # every pair is a row of its own, so that its response comes back by itself
    alone = replace(wrote.writes, row=torch.arange(len(pairs), device=pairs.device))
    response = kick_responses(trajectory, found.history, alone, len(pairs), 1)[0]
    response += (found.first.theta[0][pairs] * wrote.dtheta).double()
    up, down = (torch.zeros(len(where), dtype=torch.float64, device=pairs.device) for _ in range(2))
    up.index_add_(0, place, response * dg)
    down.index_add_(0, place, dg * dg)
    lift[where] = torch.where(down > 0, up / down, 0.0).to(lift)
