"""Exact rows of a rollout: runs with a change, by the same step map as training.

Where rows run together they are one tensor each of θ, m and v, with the control among them; else each is a state of its
own, which a GPU steps beside others where its gradient is recorded in lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from .adamw import Hyper, adam_, advanced
from .clipping import scale_
from .dynamics import Step, Taken
from .gates import Pattern, recording
from .loss import Gradient
from .reductions import equal, goes_on
from .rows import finite, row_gradients, row_values
from .state import JointState
from .trajectory import Trajectory

if TYPE_CHECKING:
    from .rollout import Rows

Steps = Sequence[Step | None]  # of a whole path; None where a row takes no step


@dataclass(frozen=True)
class Gates:
    """Choices at the kinks of one step: the control's, every row's, and the control's loss while it was watched."""

    control: Pattern
    rows: list[Pattern]
    loss: float


class ExactRows:
    """Exact runs side by side. Together they are one tensor each of θ, m and v, the control its first row.

    A row that starts as the control does and takes its steps *is* the control: a change of nothing has a response
    of exactly nothing.
    """

    def __init__(self, trajectory: Trajectory, begin: int, rows: Rows) -> None:
        self.trajectory, self.dynamics = trajectory, trajectory.dynamics
        self.layout = self.dynamics.layout
        self.gates, self.parked = rows.gates, rows.parked
        self.slots: list[int | None] = []  # where each row lives; None: it is the control
        self._states: list[JointState] = []
        self._steps: list[Steps | None] = []
        self._found: tuple[int, list[Gradient | None], dict[int, Pattern]] | None = None
        self._launched: dict[int, Taken] = {}  # each slot's last step, where nobody has looked at its numbers yet
        self.together = False
        self._fill(begin, rows)
        self._alive = [True] * len(self._states)
        self._own = set(range(len(self._states))) if rows.owned else set[int]()
        self._switched = [0] * len(self._states)  # steps at which clipping bound one of row and control only
        if self.together:
            self._stack()
        elif self.parked:
            self._states = [moved(state, torch.device("cpu")) for state in self._states]

    def _fill(self, begin: int, rows: Rows) -> None:
        control = rows.control
        for i, start in enumerate(rows.exact):
            own = None if rows.steps is None else rows.steps[i]
            different = own is not None or rows.distinct
            if not different:
                control = control or self.trajectory.state(begin)
                different = not same_state(moved(start, self.layout.device), control)
            self.slots.append(len(self._states) if different else None)
            if different:
                self._states.append(start)
                self._steps.append(own)
        count = 1 + len(self._states)
        if self.slots and not (self.gates or self.parked):
            self.together = self.trajectory.together("gradient", count)
        if self.together:
            first = control or self.trajectory.state(begin)
            self._states, self._steps = [first, *self._states], [None, *self._steps]
            self.slots = [None if slot is None else slot + 1 for slot in self.slots]
            if rows.semilinear is None and rows.linear is None:
                rows.control = None  # it is the first row now

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def control(self) -> JointState:
        """The control among the rows, where they run together."""
        return self._states[0]

    def state(self, row: int, control: JointState) -> JointState:
        """One row's state."""
        slot = self.slots[row]
        return control if slot is None else self.slot_state(slot)

    def slot_state(self, slot: int) -> JointState:
        return moved(self._states[slot], self.layout.device)

    @property
    def thetas(self) -> Float[Tensor, "slot param"]:
        """θ of the control and of every row that differs from it, where they run together."""
        return self._theta

    @property
    def buffers(self) -> list[Mapping[str, Tensor]]:
        """Buffers of every slot."""
        return [state.buffers for state in self._states]

    def by_row(self, values: Sequence[float], control: float) -> Float[Tensor, " row"]:
        """Numbers of the slots as differences from the control's, row by row: 0 for a row that is the control, and
        +∞ for one that has left the finite numbers."""
        self._look()
        return self.differences(torch.tensor(values, dtype=torch.float64), torch.tensor(control, dtype=torch.float64))

    def differences(self, values: Float[Tensor, "slot ..."], control: Float[Tensor, "..."]) -> Float[Tensor, "row ..."]:
        """The same of readings that leave the finite numbers where θ does, without waiting for the device."""
        nothing, gone = torch.zeros_like(control), torch.full_like(control, math.inf)
        apart = torch.where(values.isfinite(), values - control, math.inf)
        return torch.stack([nothing if s is None else apart[s] if self._alive[s] else gone for s in self.slots])

    def retire(self, row: int) -> None:
        """Nobody asks for this row any more: it takes no further step."""
        slot = self.slots[row]
        if slot is not None:
            self._alive[slot] = False

    def clip_switches(self) -> list[int]:
        """At how many steps so far clipping has bound one of row and control only, row by row."""
        self._look()
        return [0 if slot is None else self._switched[slot] for slot in self.slots]

    def own_losses(self, time: int) -> list[float]:
        """The loss of the step at `time` at every slot: it comes with the gradient that the step needs anyway."""
        found, _ = self._gradients(time)
        return [self._own_loss(slot, time, gradient) for slot, gradient in enumerate(found)]

    def own_norms(self, time: int) -> list[float]:
        """The norm of the gradient of the step at `time` at every slot, before clipping; NaN where none is taken."""
        return [math.nan if gradient is None else float(gradient.norm) for gradient in self._gradients(time)[0]]

    def _own_loss(self, slot: int, time: int, gradient: Gradient | None) -> float:
        if self._step(slot, time) is not None:
            return math.inf if gradient is None else float(gradient.loss)
        state, step = self.slot_state(slot), self.trajectory.steps[time]  # a step not taken has a loss all the same
        arguments = (step.batch, step.random, step.where)
        return float(row_values(self.dynamics.loss, state.theta[None], [state.buffers], *arguments))

    def chosen(self, time: int, control: JointState) -> Gates:
        """See `Moment.gates`."""
        own, step = Pattern(), self.trajectory.steps[time]
        loss = self.dynamics.loss.within(recording(own))
        found = loss.gradient(control.theta, control.buffers, step.batch, step.random, step.where)
        patterns = self._gradients(time)[1]
        return Gates(own, [own if slot is None else patterns[slot] for slot in self.slots], float(found.loss))

    # --- the step

    def advance(self, time: int, control: Callable[[], JointState] | None = None) -> None:
        """Every row takes its own step at `time`; `control`, the control's, is taken beside those of rows that run
        alone, where there are any."""
        if self.together:
            self._step_together(time, self._gradients(time)[0])
        else:
            self._step_beside(time, control)
        self._found = None

    def _step_beside(self, time: int, control: Callable[[], JointState] | None) -> None:
        """Rows that run alone, launched without waiting for a GPU: their numbers are looked at when they are asked for,
        or a step later."""
        ready = self._found[1] if self._found is not None and self._found[0] == time else None
        self._look()

        going = [slot for slot, alive in enumerate(self._alive) if alive and self._step(slot, time) is not None]
        steps = len(going) + (control is not None and len(going) > 0)

        def step(i: int) -> JointState | None:
            if i == len(going):
                assert control is not None
                return control()
            slot = going[i]
            before = None if self.parked else self._states[slot]
            self._step_alone(slot, time, None if ready is None else ready[slot])
            return before  # held until all rows have taken their step, which may be on several streams

        self.dynamics.loss.spread("gradient", self.trajectory.steps[time].batch, steps, step)

    def _step_alone(self, slot: int, time: int, gradient: Gradient | None) -> None:
        step = self._step(slot, time)
        assert step is not None
        # the first state belongs to whoever gave it, those after it to the row
        state, consume = self.slot_state(slot), slot in self._own
        if gradient is None:
            after, taken = self.dynamics.launch(step, state, consume=consume)
        else:
            after, taken = self.dynamics.take(gradient, step, state, consume=consume)
        self._launched[slot] = taken
        self._own.add(slot)
        self._states[slot] = moved(after, torch.device("cpu")) if self.parked else after

    def _look(self) -> None:
        """What was seen of the last steps."""
        for slot, taken in self._launched.items():
            seen = taken.settle()
            self._alive[slot] &= all(goes_on(seen.loss, seen.clip.norm))
            self._switched[slot] += seen.clip.binds != self.trajectory.steps[seen.index].clip.binds
        self._launched.clear()

    def _stack(self) -> None:
        """One tensor per channel; the states become views of its rows, and the single tensors go."""
        states, channels = self._states, []
        for name in ("theta", "m", "v"):
            stack = self.layout.zeros(len(states))
            for row, state in zip(stack, states):
                row.copy_(getattr(state, name))
            channels.append(stack)
            self._states = states = [replace(s, **{name: row}) for s, row in zip(states, stack)]
        self._theta, m, v = channels
        self._views = [tuple(self.layout.views(x[r]) for x in (self._theta, m, v)) for r in range(len(states))]

    def _step(self, slot: int, time: int) -> Step | None:
        steps = self._steps[slot]
        return self.trajectory.steps[time] if steps is None else steps[time]

    def _gradients(self, time: int) -> tuple[list[Gradient | None], dict[int, Pattern]]:
        """Each slot's gradient for its step at `time`, rows of one batch together; None for no step, or no number."""
        if self._found is not None and self._found[0] == time:
            return self._found[1:]
        self._look()
        out: list[Gradient | None] = [None] * len(self._states)
        patterns: dict[int, Pattern] = {}
        groups: dict[tuple[int, int], list[int]] = {}
        for slot in range(len(self._states)):
            step = self._step(slot, time)
            if step is not None and self._alive[slot]:
                groups.setdefault((id(step.batch), id(step.random)), []).append(slot)
        for slots in groups.values():
            step = self._step(slots[0], time)
            assert step is not None
            for slot, gradient in zip(slots, self._evaluate(slots, step, patterns)):
                out[slot] = gradient
                self._alive[slot] = gradient is not None
        self._found = (time, out, patterns)
        return out, patterns

    def _evaluate(self, slots: Sequence[int], step: Step, patterns: dict[int, Pattern]) -> list[Gradient | None]:
        loss, states = self.dynamics.loss, [self._states[slot] for slot in slots]
        own = self.trajectory.steps[step.index]
        present = own.present if step.batch is own.batch else None  # another batch may use other parameters
        if self.together:
            thetas = self._theta if len(slots) == len(self._states) else self._theta[list(slots)]
            buffers = [state.buffers for state in states]
            return row_gradients(loss, thetas, buffers, step.batch, step.random, step.where, present)

        def alone(i: int) -> Gradient:
            watched = loss.within(recording(patterns.setdefault(slots[i], Pattern()))) if self.gates else loss
            state = moved(states[i], self.layout.device)
            return watched.gradient(state.theta, state.buffers, step.batch, step.random, step.where, wait=False)

        if self.gates:  # watched, and so not recorded
            return finite([alone(i) for i in range(len(slots))])
        return finite(loss.spread("gradient", step.batch, len(slots), alone))

    def _step_together(self, time: int, found: Sequence[Gradient | None]) -> None:
        """AdamW on every row in as few calls as there are different hyperparameters."""
        groups: dict[tuple[Hyper, ...], list[int]] = {}
        for slot, gradient in enumerate(found):
            step = self._step(slot, time)
            if gradient is not None and step is not None and step.bounded:
                self._states[slot] = self.dynamics.advance_with(gradient, step, self._states[slot], consume=True)[0]
            elif gradient is not None and step is not None:
                groups.setdefault(step.hypers, []).append(slot)
                factor = scale_(gradient.grads, gradient.norm, step.max_norm)  # nobody waits where nothing is clipped
                self._switched[slot] += (float(factor) < 1.0) != self.trajectory.steps[time].clip.binds
        fused = self.layout.device.type == "cuda"
        for hypers, slots in groups.items():
            for group, hyper in enumerate(hypers):
                own = [i for i, g in enumerate(self.layout.groups) if g == group]
                members = [
                    (slot, i) for slot in slots for i in own
                    if found[slot].grads[i] is not None  # type: ignore[union-attr]
                ]  # fmt: skip
                if members:
                    theta, m, v = ([self._views[slot][c][i] for slot, i in members] for c in range(3))
                    grads = [found[slot].grads[i] for slot, i in members]  # type: ignore[union-attr]
                    counts = [self._states[slot].counts[i] for slot, i in members]
                    plain = replace(hyper, foreach=None, fused=fused or None, capturable=False, lr=float(hyper.lr))
                    adam_(theta, grads, m, v, counts, plain)  # type: ignore[arg-type]
        for slot, gradient in enumerate(found):
            step = self._step(slot, time)
            if gradient is not None and step is not None and not step.bounded:
                state = self._states[slot]
                after = advanced(state.counts, gradient.grads)
                self._states[slot] = replace(state, counts=after, buffers=gradient.buffers)


def same_state(a: JointState, b: JointState) -> bool:
    """Equal to the bit in everything that a run goes on from."""
    return (
        a.counts == b.counts
        and all(equal(getattr(a, name), getattr(b, name)) for name in ("theta", "m", "v"))
        and all(equal(x, b.buffers[name]) for name, x in a.buffers.items())
    )


def moved(state: JointState, device: torch.device) -> JointState:
    """The state on another device; itself where it is there already."""
    if state.theta.device == device:
        return state
    buffers = {name: b.to(device) for name, b in state.buffers.items()}
    return replace(state, theta=state.theta.to(device), m=state.m.to(device), v=state.v.to(device), buffers=buffers)
