"""The recorded run again, with something changed: exact, and all that start at one step side by side."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.dynamics import Step
from ..core.layout import Layout
from ..core.memory import in_chunks
from ..core.noise import jitter
from ..core.planning import plan_rerun_lanes
from ..core.rollout import Moment, Rows, rollout
from ..core.state import JointState
from ..core.trajectory import Trajectory
from .quantity import Quantity, seen


@dataclass(frozen=True)
class Beside:
    """The numbers that decide how runs beside a control are read."""

    # Of how far the path reaches above its median: a control that runs among rows, in whose arithmetic kernels round
    # otherwise, and differs by more from what was recorded, is another run; 16-bit ones in a run that amplifies do
    # that.
    parted: float = 0.05
    lost: float = 1e-6  # of the path's own value: below it a difference from that has too few digits left


BESIDE = Beside()
Values = Mapping[int, float]


@dataclass(frozen=True)
class Run:
    """A run that is the path's up to step `at`, and takes other steps from there on.

    steps: those that differ, by place in the path; None is a step that is not taken. start: what is done to the state
    before step `at`.
    """

    at: int
    steps: Mapping[int, Step | None] = field(default_factory=dict)
    start: Callable[[JointState], JointState] = lambda state: state
    jittered: bool = False  # every weight of the start moved by one rounding

    @property
    def left_out(self) -> frozenset[int]:
        """Steps that this run does not take."""
        return frozenset(i for i, step in self.steps.items() if step is None)


Done = Callable[[Values, frozenset[int]], bool]  # by its values so far and the steps that were left out


def run_again(
    trajectory: Trajectory,
    runs: Sequence[Run],
    last: int,
    tick: Callable[[], None] = lambda: None,
    done: Done = lambda values, left_out: False,
    quantity: Quantity = "loss",
) -> list[Values]:
    """The own loss or gradient norm of each run from its first step to step `last`, by place in the path; infinite
    once it diverges.

    One gradient per run and step, less in rows on a GPU. A run ends where `done` says so. Where the control among such
    rows is not the recorded run any more, all of them run alone, in training's own arithmetic.
    """
    found: list[Values] = [{} for _ in runs]
    by_start: dict[int, list[int]] = {}
    for i, run in enumerate(runs):
        by_start.setdefault(run.at, []).append(i)
    most = max(map(len, by_start.values()), default=0)
    plan_rerun_lanes(trajectory, most, last, trajectory.memory)
    for at, some in sorted(by_start.items()):
        work = partial(_from_one_step, trajectory, at, [runs[i] for i in some], last, done, quantity)
        together = in_chunks(len(some), len(some), work, "reruns of the recorded run")
        for i, values in zip(some, itertools.chain(*together)):
            found[i] = values
            tick()
    return found


def _from_one_step(
    trajectory: Trajectory, at: int, runs: Sequence[Run], last: int, done: Done, quantity: Quantity, some: range
) -> list[dict[int, float]]:
    """Some of the runs: side by side, and alone where their control among rows is another run."""
    work = (trajectory, at, [runs[i] for i in some], last, done, quantity)
    beside = _side_by_side(*work)
    if beside is None:
        trajectory.dynamics.loss.sharing.settle("gradient", False)
        beside = _side_by_side(*work)
        assert beside is not None  # alone there is no other control
    return beside


def state_after(trajectory: Trajectory, run: Run, last: int) -> JointState | None:
    """The state after step `last` of a run; None where it has left the finite numbers before."""
    steps = [run.steps.get(i, step) for i, step in enumerate(trajectory.steps)]
    rows = Rows([run.start(trajectory.state(run.at))], steps=[steps])
    *_, end = rollout(trajectory, run.at, rows, last + 1)
    alive = bool(end.exact.by_row([0.0] * len(end.exact.buffers), 0.0).isfinite().all())
    return end.exact.state(0, end.control) if alive else None


def _side_by_side(
    trajectory: Trajectory, at: int, runs: Sequence[Run], last: int, done: Done, quantity: Quantity
) -> list[dict[int, float]] | None:
    """None where they ran together and their control parted from the path."""
    before = trajectory.state(at)
    steps = [[run.steps.get(i, step) for i, step in enumerate(trajectory.steps)] for run in runs]
    starts = [run.start(before) for run in runs]
    layout = trajectory.dynamics.layout
    rows = Rows([_jittered(layout, x) if run.jittered else x for x, run in zip(starts, runs)], steps=steps)
    found, going = [dict[int, float]() for _ in runs], set(range(len(runs)))
    path = [seen(quantity, step) for step in trajectory.steps[: last + 1]]
    apart = BESIDE.parted * (max(path) - statistics.median(path))
    for moment in rollout(trajectory, at, rows, last + 1):
        if moment.time > last or not going:
            break
        if moment.exact.together and not abs(_own(moment, quantity)[0] - path[moment.time]) <= apart:
            return None
        values = _values(moment, quantity).tolist()
        for i in sorted(going):
            found[i][moment.time] = values[i]
            if done(found[i], runs[i].left_out):
                moment.exact.retire(i)
                going.remove(i)
    return found


def _own(moment: Moment, quantity: Quantity) -> list[float]:
    """Each row's own value, the control's first where they run together."""
    rows = moment.exact
    return rows.own_losses(moment.time) if quantity == "loss" else rows.own_norms(moment.time)


def _values(moment: Moment, quantity: Quantity) -> Float[Tensor, " row"]:
    """By their difference from the control's: rows that run together round in their own way. As they are where they are
    lost in that difference, as usual losses beside those of a path that blows up."""
    rows, own, values = moment.exact, seen(quantity, moment.trajectory.steps[moment.time]), _own(moment, quantity)
    apart = rows.by_row(values, values[0] if rows.together else own)
    plain = rows.by_row(values, 0.0)
    lost = (plain.abs() < BESIDE.lost * abs(own)) & (apart != 0)
    return torch.where(lost, plain, apart + own)


def _jittered(layout: Layout, state: JointState) -> JointState:
    """Every weight moved by one rounding of its own type, up or down."""
    return replace(state, theta=state.theta + jitter(layout, state))
