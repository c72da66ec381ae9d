"""What a batch's gradient does at one coordinate, as a curve of that gradient: AdamW exact at every later step.

The write of a gradient g at one coordinate moves an outcome, through the displacement at the changed step and the
kicks after it (`kicks`), by a function of g alone,

    f(g) = Σ_s λ_θ(s+1) [q(m_s + β1^k δm, v_s + β2^k δv) − q(m_s, v_s)],   δm = (1−β1)(g−g°), δv = (1−β2)(g²−g°²)

with g° the control's gradient. All its terms have the form (a + b g)/(√(R_s² + g²) + e_s), where R² = β2 v/(1−β2) and
e = ε √(ρ2/(1−β2)) at the changed step, and both grow little along a path. With e = 0 such a term is a sine in the angle
of g on a circle of radius R. With any e it is one, to the third order of g, on a circle of radius r:

    √(R² + g²) + e = √(1 + e/R) √(r² + g²) + O(g⁴),      r² = R² (1 + e/R),   e/R = ε/√(β2 v/ρ2)      (eq:circle)

    f(g) ≈ A sin φ + B cos φ + C,   tan φ = g/r      (eq:curve)

Up to g = R, where v doubles, the two sides of eq:circle differ by less than 2 % for every e; up to g = r they would
not, since r grows with ε and the bend at R does not. So the curve is drawn through three exact points within a few R,
the control's and one on each side, and judged at a fourth. Coordinates that fail there (a tiny v, large gradients
later), and gradients beyond `FAR` R, are left to exact kicks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from .adamw import Run, blocks, run_of
from .changes import ControlStep
from .kicks import History, steps_after
from .linear_step import displacement
from .reductions import marked, norms, products
from .state import Cotangent
from .trajectory import Trajectory

FAR = 1.0  # gradients beyond so many R are left to exact kicks: v would double
# on the circle of radius R:
ASIDE = math.atan(0.6)  # from the control's angle to the points on its sides: most gradients of a pool lie between
# from the control's angle to where a curve is judged. For controls up to 0.3 R its error there is 5 × that in between,
# which is then a hundredth; beyond, errors of 6 % (β2 0.99) and 39 % (0.9) of the larger side were seen far from it
JUDGED = 1.5 * ASIDE
ALLOWED = 0.05  # there, of the larger side or of a typical curve
NOTHING = 1e-36  # r² of a coordinate without a curve: any gradient whose square is a number lies beyond it


@dataclass(frozen=True)
class Sweep:
    """λ_θ after the changed step and after every later one, rows by outcome, the last outcome first."""

    trajectory: Trajectory
    first: Cotangent
    history: History


@dataclass(frozen=True)
class Beyond:
    """Candidates and coordinates that no curve covers, and the gradient there as it reaches the moments."""

    row: Int64[Tensor, " pair"]
    where: Int64[Tensor, " pair"]
    g: Float[Tensor, " pair"]


@dataclass(frozen=True)
class Reach:
    """Up to which gradient each coordinate has a curve."""

    own: Float[Tensor, " param"]  # g°, the control's gradient as it reaches the moments
    square: Float[Tensor, " param"]  # r²
    edge: Float[Tensor, " param"]  # of r² + g²; below zero where the control's own gradient has no curve

    @classmethod
    def of(cls, control: ControlStep) -> Reach:
        """By the distance of gradients alone: no curve where v was zero, or where the control's gradient is far."""
        found = cls(torch.zeros_like(control.raw), *(torch.full_like(control.raw, NOTHING) for _ in range(2)))
        for run, w in control.linear.pieces():
            found.own[w] = own = control.linear.control(run, w).g
            radius = _radius(run, control.before.v[w])
            near = (FAR * radius).square_()
            found.square[w] = radius * (radius + run.eps * math.sqrt(run.bias2 / (1 - run.beta2)))  # eq:circle
            found.edge[w] = found.square[w] + near
            found.leave_out_(w, (own.square() > near) | (near <= NOTHING))
        return found

    def leave_out_(self, w: slice, some: Bool[Tensor, " param"]) -> None:
        """No curve at some coordinates of a piece: there only nothing in place of nothing is covered."""
        nothing = self.edge.new_tensor(NOTHING)  # in the dtype in which it is compared
        self.edge[w] = torch.where(some, torch.where(self.own[w] == 0, nothing, -1.0), self.edge[w])
        self.square[w].masked_fill_(some, NOTHING)

    def beyond(self, rows: Float[Tensor, "row param"], largest: Float[Tensor, " param"], most: int) -> Iterator[Beyond]:
        """The entries of rows that lie beyond their curves, given the largest r² + g² of each coordinate.

        Early in training that is most of them: all rows of some coordinates at a time, `most` entries at once.
        """
        for some in marked(largest > self.edge).split(max(1, most // len(rows))):
            g = rows[:, some]
            row, column = (torch.addcmul(self.square[some], g, g) > self.edge[some]).nonzero(as_tuple=True)
            if len(row):
                yield Beyond(row, some[column], g[row, column])


@dataclass(frozen=True)
class Curves:
    """The curves of all coordinates, for every outcome."""

    reach: Reach
    sine: Float[Tensor, "outcome param"]  # A
    cosine: Float[Tensor, "outcome param"]  # B r

    @classmethod
    def of(cls, control: ControlStep, sweep: Sweep) -> Curves:
        """Three elementwise passes of AdamW per step, and three per outcome; no gradient."""
        reach = Reach.of(control)
        points = _points(control, reach)
        above, below, judged = folded(control, sweep, points)
        covered = reach.edge > NOTHING  # what others do is not typical of those that a curve may cover
        typical = norms(above.index_fill_(1, marked(~covered), 0.0))[:, None] / norms(covered.to(above))
        for _, w in control.linear.pieces(above):
            up, down, radius = above[:, w], below[:, w], reach.square[w].sqrt()
            angle = torch.atan(reach.own[w] / radius)
            turns = torch.atan(points[:, w] / radius).sub_(angle)  # from the control's point, where the curve is zero
            across, along = torch.sin(turns), 2 * torch.sin(turns / 2).square_()  # sin and 1 − cos, to all digits
            area = across[0] * along[1] - across[1] * along[0]
            odd = (up * (along[1] / area)).addcmul_(down, along[0] / area, value=-1)
            even = (down * (across[0] / area)).addcmul_(up, across[1] / area, value=-1)
            error = (odd * across[2]).addcmul_(even, along[2]).sub_(judged[:, w]).abs_()
            larger = torch.maximum(torch.maximum(up.abs(), down.abs()), typical)
            bad = ~((error.sub_(larger, alpha=ALLOWED).amax(0) <= 0) & covered[w])
            sine, cosine, few = torch.sin(angle), torch.cos(angle), marked(bad)
            torch.mul(odd, cosine, out=up).addcmul_(even, sine, value=-1).index_fill_(1, few, 0.0)
            torch.mul(odd, -radius * sine, out=down).addcmul_(even, -radius * cosine).index_fill_(1, few, 0.0)
            reach.leave_out_(w, bad)
        return cls(reach, above, below)

    def read(
        self, control: ControlStep, rows: Float[Tensor, "row param"]
    ) -> tuple[Float[Tensor, "row outcome"], Float[Tensor, " param"]]:
        """Σ A sin φ + B cos φ of rows of gradients as they reach the moments, in one pass over them.

        Beside it, the largest r² + g² of each coordinate: `Reach.beyond` then finds what must be corrected.
        """
        out = torch.zeros(len(self.sine), len(rows), dtype=torch.float64, device=rows.device)
        largest = torch.zeros_like(control.raw)
        for _, w in control.linear.pieces(rows):
            g = rows[:, w]
            sums = torch.addcmul(self.reach.square[w], g, g)
            torch.amax(sums, 0, out=largest[w])
            out += products(self.cosine[:, w], sums.rsqrt_())
            out += products(self.sine[:, w], sums.mul_(g))
        return out.mT, largest

    def correction(self, some: Beyond) -> tuple[Int64[Tensor, " pair"], Float[Tensor, "pair outcome"]]:
        """By which rows change, and by how much, where the control's gradient is read in the place of some others."""
        there = self.reach.edge[some.where] > NOTHING
        where, g = some.where[there], some.g[there]
        square, own = self.reach.square[where], self.reach.own[where]
        inverse, before = torch.addcmul(square, own, own).rsqrt_(), torch.addcmul(square, g, g).rsqrt_()
        change = self.cosine[:, where] * (inverse - before) + self.sine[:, where] * (own * inverse - g * before)
        return some.row[there], change.mT.double()


def _radius(run: Run, v: Float[Tensor, " param"]) -> Float[Tensor, " param"]:
    """R, at which a gradient doubles v."""
    return (v * (run.beta2 / (1 - run.beta2))).sqrt_()


def _points(control: ControlStep, reach: Reach) -> Float[Tensor, "3 param"]:
    """Gradients above and below the control's, and where curves are judged."""
    points = torch.zeros(3, *reach.own.shape, dtype=reach.own.dtype, device=reach.own.device)
    for run, w in control.linear.pieces(points):
        radius = _radius(run, control.before.v[w]).clamp_(min=math.sqrt(NOTHING))
        angle = torch.atan(reach.own[w] / radius)
        asides = ASIDE, -ASIDE, torch.copysign(torch.full_like(angle, JUDGED), -angle)
        torch.stack([radius * torch.tan(angle + aside) for aside in asides], out=points[:, w])
    return points


def folded(
    control: ControlStep, sweep: Sweep, points: Float[Tensor, "point param"]
) -> Float[Tensor, "point outcome param"]:
    """f of every coordinate, exactly, at some gradients as they reach the moments. eq:curve"""
    out = torch.zeros(len(points), *sweep.first.theta.shape, dtype=points.dtype, device=points.device)
    for w, moved, slopes in _moves(control, sweep, points, like=out[0]):
        out[:, : len(slopes), w].addcmul_(moved[:, None], slopes)
    return out


def total(control: ControlStep, sweep: Sweep, gradient: Float[Tensor, " param"]) -> Float[Tensor, " outcome"]:
    """Σ f over all coordinates of one gradient."""
    out = torch.zeros(sweep.first.rows, dtype=torch.float64, device=gradient.device)
    for _, moved, slopes in _moves(control, sweep, gradient[None], like=gradient):
        out[: len(slopes)] += products(slopes, moved[0])
    return out


def _moves(
    control: ControlStep, sweep: Sweep, points: Float[Tensor, "point param"], like: Float[Tensor, "*rows param"]
) -> Iterator[tuple[slice, Float[Tensor, "point piece"], Float[Tensor, "outcome piece"]]]:
    """What gradients move, piece by piece, at the changed step and at each later one, and λ_θ after it.

    All steps of a piece in turn: what they are added up in, a vector `like` this, stays in a core's cache.
    """
    later, device = list(_later(control, sweep)), points.device
    every = (control.linear.runs, *(runs for _, runs, _, _ in later))
    edges = sorted({run.where.start for runs in every for run in runs} | {points.shape[-1]})
    for start, stop in itertools.pairwise(edges):
        run = run_of(control.linear.runs, start)
        for w in blocks(slice(start, stop), like) if run.active else ():
            at = control.linear.control(run, w)
            change = points[:, w] - at.g
            dv = torch.mul(change, points[:, w] + at.g).mul_(1 - run.beta2)
            dm = change.mul_(1 - run.beta1)
            yield w, displacement(run, at.m, at.v, dm, dv), sweep.first.theta[:, w]
            for step, runs, m, v in later:
                now = run_of(runs, start)
                if now.active:
                    kept = dm.mul_(now.beta1), dv.mul_(now.beta2)
                    moved = displacement(now, m[w].to(device), v[w].to(device), *kept)
                    yield w, moved, sweep.history.piece(step, w, device)


def _later(control: ControlStep, sweep: Sweep) -> Iterator[tuple[int, list[Run], Tensor, Tensor]]:
    """Steps after the changed one that an outcome lies behind, and the moments after each; where its state is not kept
    they are copied to where the sweep's slopes are."""
    for step, runs, after in steps_after(sweep.trajectory, control.step.index + 1):
        if not len(sweep.history.piece(step, slice(0, 0), control.raw.device)):
            return
        moments = after.m, after.v
        if sweep.trajectory.kept(step + 1) is None:
            moments = after.m.to(sweep.history.place, copy=True), after.v.to(sweep.history.place, copy=True)
        yield step, runs, *moments
