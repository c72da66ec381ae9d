"""What rows take in memory: carried along a path, their Hessian products, and gradients of a pool beside them."""

from __future__ import annotations

from dataclasses import dataclass

from .footprint import Curvature, Footprint, Reading, Watched
from .rows import AT_ONCE
from .trajectory import Trajectory


@dataclass(frozen=True)
class Load:
    """Rows that are carried at once."""

    exact: int = 0
    semilinear: int = 0
    linear: int = 0
    parked: bool = False
    gates: bool = False  # of exact rows are recorded

    @property
    def predicted(self) -> int:
        return self.semilinear + self.linear


def rollout_bytes(
    trajectory: Trajectory,
    load: Load,
    *,
    own: bool = False,
    rounding: bool = False,
    late: bool = False,
    replayed: bool | None = None,
    reading: Reading | None = None,
) -> int:
    """The peak of a rollout, beside the path: what is carried, and the largest work on the way.

    own: each step's own loss is watched, so that all gradients of a step are there before the first row takes it.
    rounding: the probe is read near the control, too.
    late: predicted rows may have other step counts than the control.
    replayed: the control's states are computed on the way; default: as the path keeps them.
    reading: what the probe takes; default: as much as a batch of the path.
    """
    f = Footprint.of(trajectory)
    read = reading or Reading(f.value, f.gradient)
    v, predicted = f.vector, load.predicted
    lanes = max(1, len(trajectory.dynamics.loss.player.lanes)) if load.exact else 1
    apart = load.parked or load.gates
    together = f.together and not apart and trajectory.together("gradient", load.exact + 1)
    carried = 3 * v * predicted
    work = [read.value + v * rounding]
    replayed = (trajectory.spacing > 1 if replayed is None else replayed) and bool(predicted or not together)
    if replayed:
        carried += 3 * v
        work.append(max(f.gradient, v + f.update))
    if load.exact:
        count = load.exact + 1
        carried += 0 if load.parked else 3 * v * (load.exact + bool(together))
        shared = count * v + min(AT_ONCE, count) * (f.row - v) + f.kernels
        stepping = f.gradient + v * (load.exact - 1) if own else f.step * min(lanes, load.exact + replayed)
        alone = max(stepping, v * load.exact * own + f.update) + 3 * v * load.parked
        work.append(shared if together else alone)
    if load.gates:  # all choices of a step, and all gradients, are there at once
        w = Watched.of(trajectory)
        carried += (load.exact + 1) * w.pattern
        work.append(v * load.exact + w.gradient)
    if load.linear:
        work.append(read.gradient + v)
    if load.semilinear:
        count = load.semilinear + 1  # a step's own loss, or a probe that is not recorded, is read in rows
        together = trajectory.dynamics.loss.sharing.tries("value", count)
        work.append(min(AT_ONCE, count) * (v + read.value) if together else lanes * v + read.value)
    if predicted:
        c = Curvature.of(trajectory)
        most = min(max(load.semilinear, load.linear), c.played or predicted)
        # clipping takes two more copies of linear rows, and one of a semilinear one
        clipped = v * max(2 * load.linear, load.semilinear > 0) * any(step.clip.binds for step in trajectory.steps)
        closed = f.plain_piece if late else f.piece if load.linear else f.piece * 2 // 3
        work += [
            c.build,
            c.graph + v * most + max(product_bytes(trajectory, most), closed, clipped),
        ]
    return carried + max(work)


def product_bytes(trajectory: Trajectory, rows: int) -> int:
    """Of Hessian products of so many rows, beside their graph and the products themselves."""
    c = Curvature.of(trajectory)
    together = trajectory.together("product", rows)
    return c.product + (min(AT_ONCE, rows) - 1) * c.products * together


def pool_bytes(trajectory: Trajectory, batches: int) -> int | None:
    """Of the gradients of so many batches at one θ, where they run together."""
    f = Footprint.of(trajectory)
    if f.pooled is None or not trajectory.together("pool", batches):
        return None
    return batches * f.vector + min(AT_ONCE, batches) * (f.pooled - f.vector) + f.kernels
