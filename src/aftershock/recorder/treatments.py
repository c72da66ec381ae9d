"""What would have prevented it: each treatment run again, over the whole event where it prevents it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..core.adamw import Hyper
from ..core.dynamics import Step
from ..core.state import JointState
from ..core.trajectory import Trajectory
from .event import BARS, Event, Remains
from .reruns import Run, Values, run_again
from .scatter import apart

HALVED = (1, 2, 4, 8)  # steps before the event with half the learning rate
BACK = 8  # steps before the event from which the rules of the whole run differ
RESTARTS = (1, 8)  # steps before the event at which Adam starts anew
QUANTILE = 0.9  # of the gradient norms before the event, at which to clip
BETAS = (0.95, 0.9)


@dataclass(frozen=True)
class Treatment:
    """One thing to do otherwise, and the run in which it is done."""

    name: str
    run: Run
    changed: int  # steps that it touches: the fewer, the milder


@dataclass(frozen=True)
class Outcome(Remains):
    """What became of the event. `left`: its share that is left, of a run that ended early at least; `after`: the mean
    of the last values of the stretch, NaN for such a run. `lucky`: it prevents it in one run, and not in one that
    starts a rounding away, which is what is told then. `…_apart`: how far these two runs are."""

    treatment: Treatment
    values: Values
    left: float
    prevents: bool
    delays: bool
    after: float
    blows_up: bool = False
    lucky: bool = False
    left_apart: float = 0.0
    after_apart: float = 0.0
    by_then: float = math.nan

    @property
    def idle(self) -> bool:
        """As far as it was run, it leaves the event as it is."""
        return abs(self.compared - 1) <= BARS.as_it_is and not self.delays and not self.blows_up

    def beside(self, again: Outcome) -> Outcome:
        """What is told once it was run again from one rounding away: this run where the second does as much, else the
        second."""
        holds = again.removes >= self.removes and again.prevents >= self.prevents
        found = self if holds else replace(again, delays=again.delays and not self.prevents, lucky=self.prevents)
        return replace(found, left_apart=apart(self.left, again.left), after_apart=apart(self.after, again.after))


def try_all(
    trajectory: Trajectory,
    event: Event,
    wanted: Sequence[Treatment],
    tick: Callable[[], None] = lambda: None,
    *,
    most: float = math.inf,
) -> list[Outcome]:
    """What becomes of the event under each: about 200 gradients for all that are `possible`. Those that start at one
    step run as rows of one rollout.

    most: steps that may be run again; where the next treatment may take more than is left, no further one is tried.
    """
    found: list[Outcome] = []
    while some := _within(event, wanted[len(found) :], most):
        ran = run_again(trajectory, [t.run for t in some], event.last, tick, event.fails, event.quantity)
        found += [_outcome(event, treatment, values) for treatment, values in zip(some, ran)]
        most -= sum(map(len, ran))
    return found


def _within(event: Event, wanted: Sequence[Treatment], most: float) -> list[Treatment]:
    """The first of them, as many as take no more steps even if every run goes to the end of the event."""
    spent = itertools.accumulate(event.last + 1 - treatment.run.at for treatment in wanted)
    return [treatment for treatment, steps in zip(wanted, spent) if steps <= most]


def _outcome(event: Event, treatment: Treatment, values: Values) -> Outcome:
    left, by_then = event.remains(values)
    return Outcome(
        treatment,
        values,
        left,
        event.prevented(values),
        event.delayed(values),
        event.after(values),
        event.blows_up(values),
        by_then=by_then,
    )


def sufficient(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The mildest treatment that prevents the event."""
    return min((o for o in outcomes if o.prevents), key=lambda o: o.treatment.changed, default=None)


def proved(trajectory: Trajectory, event: Event, outcomes: list[Outcome]) -> list[Outcome]:
    """The same, where the mildest that prevents it does so too from a start that differs by one rounding: in a run
    that amplifies, the first may have been luck."""
    found = list(outcomes)
    while (best := sufficient(found)) is not None:
        found[found.index(best)] = both = twice(trajectory, event, best)
        if both.prevents:
            break
    return found


def twice(trajectory: Trajectory, event: Event, outcome: Outcome) -> Outcome:
    """The same, beside a second run that starts a rounding away."""
    moved = replace(outcome.treatment.run, jittered=True)
    (values,) = run_again(trajectory, [moved], event.last, done=event.fails, quantity=event.quantity)
    return outcome.beside(_outcome(event, outcome.treatment, values))


def not_by_luck(trajectory: Trajectory, event: Event, outcome: Outcome) -> Outcome:
    """The same, where what removes half does about as much in the run without any one of some other steps: a small
    change may make another run of it, as leaving out steps that nobody suspects does."""
    if not outcome.removes:
        return outcome
    run, bar = outcome.treatment.run, (outcome.left + 1) / 2  # nearer to the whole event than to what was left
    for i in dict.fromkeys(round(k * (event.onset - 1) / (BARS.moved - 1)) for k in range(BARS.moved)):
        moved = replace(run, at=min(i, run.at), steps={**run.steps, i: None})
        (values,) = run_again(trajectory, [moved], event.last, quantity=event.quantity)
        left = event.left(values, moved.left_out)
        if left > bar:
            after = _outcome(event, outcome.treatment, values).after
            return replace(outcome, left=left, prevents=False, delays=False, after=after)
    return outcome


def possible(trajectory: Trajectory, event: Event) -> Iterator[Treatment]:
    """Every treatment that has a meaning here, the mildest first: half the rate for a few steps, Adam anew, and other
    rules for the steps around the event."""
    steps, onset = trajectory.steps, event.onset
    for count in HALVED:
        if count <= onset:
            some = range(onset - count, onset)
            yield Treatment(
                f"half the learning rate at {_numbers(event, onset - count, onset - 1)}, {count} before it",
                Run(onset - count, {i: _with(steps[i], lambda h: h.with_lr(float(h.lr) / 2)) for i in some}),
                count,
            )
    for back in RESTARTS:
        if back <= onset:
            name = f"Adam restarted at {_numbers(event, onset - back, onset - back)}, {back} before it (m, v and count)"
            yield Treatment(name, Run(onset - back, start=_restarted), 10 + back)
    first = max(0, onset - BACK)
    for name, change in _rules(trajectory, event):
        run = Run(first, {i: change(steps[i]) for i in range(first, event.last + 1)})
        since = f"{_numbers(event, first, event.last)}, from {onset - first} before it"
        yield Treatment(f"{name} at {since}", run, 20 + onset - first)


def _rules(trajectory: Trajectory, event: Event) -> Iterator[tuple[str, Callable[[Step], Step]]]:
    norms = sorted(step.clip.norm for step in trajectory.steps[: event.onset])
    if norms:
        bound = norms[min(int(QUANTILE * len(norms)), len(norms) - 1)]
        if all(step.max_norm is None or bound < step.max_norm for step in trajectory.steps):
            yield f"clipping at {bound:.3g}", lambda step: replace(step, max_norm=bound)
    for beta in BETAS:
        if all(hyper.beta2 > beta for hyper in trajectory.steps[event.step].hypers):
            yield f"β2 = {beta:g}", lambda step, beta=beta: _with(step, lambda h: replace(h, beta2=beta))  # type: ignore[misc]
    yield "updates bounded by their RMS (StableAdamW)", lambda step: replace(step, bounded=True)


def _with(step: Step, change: Callable[[Hyper], Hyper]) -> Step:
    return replace(step, hypers=tuple(change(hyper) for hyper in step.hypers))


def _restarted(state: JointState) -> JointState:
    """θ as it is, Adam as new."""
    zeros = torch.zeros_like(state.m)
    return replace(state, m=zeros, v=zeros.clone(), counts=(0,) * len(state.counts))


def _numbers(event: Event, first: int, last: int) -> str:
    """Such as: steps 312–319."""
    first, last = event.first + first, event.first + last
    return f"step {first}" if first == last else f"steps {first}–{last}"
