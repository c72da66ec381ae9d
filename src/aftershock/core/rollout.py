"""The one way to carry rows along a path.

A row is a run with a change, or a prediction of one, and has a rule:

    exact        AdamW and the network as they are: the truth            1 g per row and step
    semilinear   AdamW exact, the network's gradient linear: g + H δθ    1 Hessian product (eq:semilinear_gradient)
    linear       the tangent A δx                                        1 Hessian product

Step counts are part of each: a row after a skipped step has its own bias corrections ever after.
Rows start at the state after a change and pass every later state together with the control. Whoever wants to know
something of them looks at each `Moment` as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .dynamics import Linearized
from .exact_rows import ExactRows, Gates, Steps
from .state import JointState, Lag, Tangent
from .sweeps import transit_, transit_semilinear_
from .trajectory import Trajectory


@dataclass
class Rows:
    """What is carried: exact states and, as differences from the control, semilinear and linear rows.

    steps: the steps of each exact row where they differ from the path's (another learning rate, another batch,
        no step at all); None for a row that takes the path's own.
    semilinear_lags, linear_lags: of every predicted row, by how many steps each parameter's count is behind the
        control's; zeros where it is not, and empty where none is.
    linear_shifted: of every linear row, whether it is shifted by what its counts do at the control's moments
        (`recount_`), as the tangent of a run is; what is a difference of two runs is not. Empty where all are.
    control: the control's state at which they start, where it is known.
    distinct: every exact row is known to start elsewhere than the control, so that nobody needs to compare.
    owned: the states belong to nobody else and may be written to.
    gates: record which side of each kink every exact row and the control take (`Moment.gates`).
    parked: exact rows wait in host memory and visit the device one at a time.
    """

    exact: Iterable[JointState] = ()
    semilinear: Tangent | None = None
    linear: Tangent | None = None
    semilinear_lags: Sequence[Lag] = ()
    linear_lags: Sequence[Lag] = ()
    linear_shifted: Sequence[bool] = ()
    steps: Sequence[Steps | None] | None = None
    control: JointState | None = None
    distinct: bool = False
    owned: bool = False
    gates: bool = False
    parked: bool = False


@dataclass
class Moment:
    """All rows at one state of the path. Its tensors are overwritten when the next moment is asked for."""

    trajectory: Trajectory
    time: int
    last: bool  # no step follows
    controls: _Controls
    exact: ExactRows
    semilinear: Tangent | None
    linear: Tangent | None

    @property
    def control(self) -> JointState:
        """The path's own state."""
        return self.controls.at(self.time)

    @property
    def states(self) -> list[JointState]:
        """The state of every exact row."""
        return [self.exact.state(i, self.control) for i in range(len(self.exact))]

    @property
    def gates(self) -> Gates:
        """What the control and every exact row choose at the kinks of the step that follows."""
        return self.exact.chosen(self.time, self.control)


def rollout(trajectory: Trajectory, begin: int, rows: Rows, stop: int) -> Iterator[Moment]:
    """Carry rows from state `begin` to state `stop`, stopping at every state for a look."""
    exact = ExactRows(trajectory, begin, rows)
    predicted = rows.semilinear is not None or rows.linear is not None
    controls = _Controls(trajectory, begin, rows, exact if exact.together and not predicted else None)
    for time in range(begin, stop + 1):
        yield Moment(trajectory, time, time == stop, controls, exact, rows.semilinear, rows.linear)
        if time == stop:
            return
        exact.advance(time, None if predicted else controls.following(time))
        if predicted:
            _predict(trajectory, time, controls, rows)


def _predict(trajectory: Trajectory, time: int, controls: _Controls, rows: Rows) -> None:
    """One step of the predicted rows; the step's graph goes with this call."""
    at = trajectory.linearize(trajectory.steps[time], controls.at(time))
    if rows.linear is not None:
        transit_(at, rows.linear, rows.linear_lags, rows.linear_shifted)
    if rows.semilinear is not None:
        transit_semilinear_(at, rows.semilinear, rows.semilinear_lags)
    controls.advance(at)


class _Controls:
    """The control at each state: the path's own, run on only as far as it is asked for, or that among the rows where
    nothing else needs it."""

    def __init__(self, trajectory: Trajectory, begin: int, rows: Rows, exact: ExactRows | None) -> None:
        self._trajectory, self._time, self._exact = trajectory, begin, exact
        self._owned = rows.owned or rows.control is None
        self._state, rows.control = rows.control, None  # it goes with the step that leaves it

    def at(self, time: int) -> JointState:
        if self._exact is not None:
            return self._exact.control
        if self._state is None:
            self._state = self._trajectory.state(self._time)
        while self._time < time:
            self.advance()
        return self._state

    def following(self, time: int) -> Callable[[], JointState] | None:
        """The control's step at `time`, for rows to take beside theirs, where that takes a gradient and the control was
        asked for so far; it returns the state before it."""
        asked = self._exact is None and self._state is not None and self._time == time
        return self._follow if asked and self._trajectory.kept(time + 1) is None else None

    def _follow(self) -> JointState:
        before = self._state
        self.advance()
        assert before is not None
        return before

    def advance(self, at: Linearized | None = None) -> None:
        """One state on: the one that is kept, else by the step, whose gradient a linearized step has already."""
        assert self._state is not None
        step, dynamics = self._trajectory.steps[self._time], self._trajectory.dynamics
        owned = self._owned and self._trajectory.kept(self._time) is None
        self._time += 1
        kept = self._trajectory.kept(self._time)
        if kept is not None:
            self._state = kept
        elif at is None:  # finite, since the path was
            self._state = dynamics.launch(step, self._state, consume=owned)[0]
        else:
            found = dynamics.plain_gradient(at.graph, step, self._state)
            self._state = dynamics.advance_with(found, step, self._state, consume=owned)[0]
        self._owned = True
