"""The control trajectory: every step from a point on, with as many states kept as memory allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Literal

import torch

from ..errors import NotFinite
from .batches import Batch, batch_bytes
from .dynamics import Dynamics, Linearized, Step, Taken
from .loss import Gradient
from .playback import LONG, typical
from .randomness import RandomState
from .reductions import goes_on
from .state import JointState

Keep = Literal["graphs", "states", "checkpoints"]


class Trajectory:
    """The states x_0 … x_H of a path and its H steps.

    keep="states" holds every state; "checkpoints" holds one of every `spacing` and replays the segment it needs;
    "graphs" holds each step's gradient graph too, which makes sweeps fastest and memory largest.
    """

    def __init__(self, dynamics: Dynamics, keep: Keep, spacing: int = 1) -> None:
        self.dynamics = dynamics
        self.keep = keep
        self.spacing = spacing
        self.steps: list[Step] = []
        self.memory: str | int | None = None  # what work along it may use; None: what is free
        self.seconds_per_step = 0.0
        self.random_after: RandomState
        self._states: dict[int, JointState] = {}
        self._linearized: dict[int, Linearized] = {}

    @classmethod
    def follow(
        cls,
        dynamics: Dynamics,
        start: JointState,
        random: RandomState,
        steps: Sequence[Step],
        keep: Keep,
        spacing: int = 1,
        known: list[Gradient] | None = None,
    ) -> Trajectory:
        """Train on from `start` through `steps`, each beginning where the last left the random state.

        A step with `own_random` (a recorded run's) starts from that instead. A step's numbers are looked at while
        the next one runs, as in a training loop that does not wait for its loss. `known` holds the
        first step's plain gradient where it was computed before, and is emptied.
        """
        self = cls(dynamics, keep, spacing)
        state, waiting, seconds = start, list[Taken](), []
        self._states[0] = start
        if len(steps) >= LONG and (batches := typical(step.batch for step in steps)) is not None:
            dynamics.loss.rehearse("gradient", start.theta, start.buffers, batches, random)
        for step in steps:
            began = perf_counter()
            if not step.own_random:
                step = replace(step, random=random)
            try:
                state, taken = self._take(step, state, step.index not in self._states, known.pop() if known else None)
            except Exception:
                self._settle(waiting)  # the step before it may be what is wrong
                raise
            random, after = taken.random, step.index + 1
            self._settle(waiting)
            waiting = [taken]
            if after % spacing == 0 or (after == len(steps) and spacing <= len(steps)):
                self._states[after] = state
            seconds.append(perf_counter() - began)
        self._settle(waiting)
        self.random_after = random
        self.seconds_per_step = sorted(seconds)[len(seconds) // 2]
        return self

    @classmethod
    def untaken(cls, dynamics: Dynamics, start: JointState, step: Step) -> Trajectory:
        """One step that cannot be taken, and the state before it."""
        self = cls(dynamics, "states")
        self.steps, self._states = [step], {0: start}
        return self

    def _take(self, step: Step, state: JointState, consume: bool, known: Gradient | None) -> tuple[JointState, Taken]:
        if self.keep != "graphs" and known is not None:
            return self.dynamics.take(known, step, state, consume=consume)
        if self.keep != "graphs":
            return self.dynamics.launch(step, state, consume=consume)
        after, taken, linearized = self.dynamics.advance_with_graph(step, state, known)
        self._linearized[step.index] = linearized
        return after, taken

    def _settle(self, waiting: Sequence[Taken]) -> None:
        """Note what was seen of these steps; one that is not finite is run again, and raises an error that names it."""
        for taken in waiting:
            seen = taken.settle()
            if not all(goes_on(seen.loss, seen.clip.norm)):
                self.dynamics.advance(seen, self.state(seen.index))
                raise NotFinite(f"the loss or gradient at {seen.where} was not finite, and is when it is run again")
            self.steps.append(seen)

    @property
    def device(self) -> torch.device:
        return self.dynamics.layout.device

    @property
    def typical(self) -> tuple[Batch, Batch] | None:
        """Two of its batches that stand for all; None where each is made of several."""
        return typical(step.batch for step in self.steps)

    @property
    def heaviest(self) -> Step:
        """The first of the steps with the largest batch."""
        return max(self.steps, key=lambda step: batch_bytes(step.batch))

    def together(self, kind: str, rows: int) -> bool:
        """Whether so many rows along it are computed together, as a typical batch of it allows."""
        batch, _ = self.typical or (self.steps[0].batch, None)
        return self.dynamics.loss.together(kind, batch, rows)

    def __len__(self) -> int:
        return len(self.steps)

    def state(self, time: int) -> JointState:
        """x_time, from the nearest kept state before it."""
        begin = max(kept for kept in self._states if kept <= time)
        state = self._states[begin]
        for step in self.steps[begin:time]:
            state = self.dynamics.advance(step, state, consume=step.index > begin)[0]
        return state

    def kept(self, time: int) -> JointState | None:
        """x_time where it is in memory."""
        return self._states.get(time)

    @property
    def not_kept(self) -> int:
        """Bytes of the states that are not in memory."""
        return (len(self) + 1 - len(self._states)) * self._states[0].nbytes

    def _from(self, state: JointState, start: int, stop: int) -> Iterator[tuple[Step, JointState]]:
        for step in self.steps[start:stop]:
            yield step, state
            after = step.index + 1
            if after < stop:
                state = self._states.get(after) or self.dynamics.advance(step, state)[0]

    def states(self, start: int, stop: int) -> Iterator[tuple[int, JointState]]:
        """x_start … x_stop with their times. A state is gone when the next one is asked for."""
        state, owned = self.state(start), start not in self._states
        for time in range(start, stop + 1):
            yield time, state
            if time < stop:
                kept = self._states.get(time + 1)
                state = kept or self.dynamics.advance(self.steps[time], state, consume=owned)[0]
                owned = kept is None

    def backward(self, start: int, stop: int) -> Iterator[tuple[Step, JointState]]:
        """Steps stop−1 … start, each with the state before it; segments are replayed as needed."""
        while stop > start:
            begin = max(start, max(kept for kept in self._states if kept < stop))
            yield from self._segment(self.state(begin), begin, stop)
            stop = begin

    def _segment(self, state: JointState, begin: int, stop: int) -> Iterator[tuple[Step, JointState]]:
        """The same between two kept states. No more states are made at once than are kept: a longer segment is
        halved, and its first half replayed once more."""
        if stop - begin <= max(len(self._states), 2):
            segment = list(self._from(state, begin, stop))
            while segment:
                yield segment.pop()
            return
        middle, later = (begin + stop) // 2, state
        for step in self.steps[begin:middle]:
            later = self.dynamics.advance(step, later, consume=step.index > begin)[0]
        yield from self._segment(later, middle, stop)
        del later
        yield from self._segment(state, begin, middle)

    def linearize(self, step: Step, state: JointState) -> Linearized:
        return self._linearized.get(step.index) or self.dynamics.linearize(step, state)
