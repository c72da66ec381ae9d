"""What is watched: a fixed batch, each step's own loss, or any function of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import InvalidInput
from .batches import Batch
from .footprint import Reading
from .given import whole
from .guards import hidden_buffers, moved_buffers, slope_error
from .loss import Gradient, LossFunction
from .randomness import RandomState
from .reductions import each_with, nonzero
from .rows import row_values, seen
from .state import JointState
from .trajectory import Trajectory

if TYPE_CHECKING:
    from .rollout import Moment


@dataclass(frozen=True)
class Probe:
    """F_s. Made from a batch, a function of the model, or `own_loss`.

    It runs in the modes that the model was captured in; `evaluating=True` puts the model into eval
    mode for the probe alone.

    >>> ak.Probe(batch=probe, evaluating=True).name
    'a fixed batch (eval mode)'
    >>> norm = ak.Probe(function=lambda model: model[2].weight.norm())  # any number that comes from the model
    >>> change.response(norm).summary["peak_sign"].sel(answer="exact", scale=1.0).values.tolist()
    [-1, -1]
    >>> change.response(ak.own_loss).exact.sizes["horizon"]  # each step's own loss: defined where a step follows
    3
    """

    batch: Batch = None
    function: Callable[[nn.Module], Tensor] | None = None
    own: bool = False
    evaluating: bool = False

    @classmethod
    def of(cls, probe: Any) -> Probe:
        """What a user gives as a probe, as one.

        >>> [Probe.of(given).name for given in (probe, lambda model: model[0].bias.sum(), ak.own_loss)]
        ['a fixed batch', 'a function of the model', "each step's own loss"]
        """
        if isinstance(probe, Probe):
            return probe
        if probe is None:
            raise InvalidInput("a probe is needed: a batch, a function of the model, or ak.own_loss")
        return cls(function=probe) if callable(probe) else cls(batch=probe)

    @property
    def name(self) -> str:
        kind = "each step's own loss" if self.own else "a function of the model" if self.function else "a fixed batch"
        return f"{kind} (eval mode)" if self.evaluating else kind

    def last_time(self, trajectory: Trajectory) -> int:
        """The last state at which it is defined: a step's own loss needs a step after the state.

        >>> Probe(batch=probe).last_time(path.trajectory), ak.own_loss.last_time(path.trajectory)
        (4, 3)
        """
        return len(trajectory) - 1 if self.own else len(trajectory)

    def arguments(self, trajectory: Trajectory, time: int) -> tuple[LossFunction, Batch, RandomState, str]:
        """Its loss at a state of the path, on which batch, with which draws, and what an error calls it.

        >>> loss, batch, random, where = ak.own_loss.arguments(path.trajectory, 2)
        >>> batch is path.steps[2].batch
        True
        """
        loss = trajectory.dynamics.loss
        if self.own:
            step = trajectory.steps[time]
            return loss, step.batch, step.random, step.where
        random, where = trajectory.steps[0].random, "the probe"
        if self.function is not None:
            return loss.with_function(self.function), None, random, where
        return loss, self.batch, random, where

    def value(
        self,
        trajectory: Trajectory,
        time: int,
        theta: Float[Tensor, " param"],
        state: JointState,
        *,
        wait: bool = True,
    ) -> Tensor:
        """F_time(θ), with the buffers of `state`: one forward pass. wait: until it is seen to be finite.

        >>> state = path.trajectory.state(4)
        >>> value = Probe(batch=probe).value(path.trajectory, 4, state.theta, state)
        >>> float(value) == float(response.data["control"].sel(horizon=4))
        True
        """
        loss, batch, random, where = self.arguments(trajectory, time)
        return loss.value(theta, state.buffers, batch, random, where, evaluating=self.evaluating, wait=wait).loss

    def gradient(self, trajectory: Trajectory, time: int, state: JointState) -> Gradient:
        """F_time and ∇F_time at `state`: 1 g.

        >>> found = Probe(batch=probe).gradient(path.trajectory, 4, path.trajectory.state(4))
        >>> [tuple(grad.shape) for grad in found.grads]
        [(4, 2), (4,), (2, 4), (2,)]
        """
        return self.gradient_at(trajectory, time, state.theta, state)

    def gradient_at(
        self, trajectory: Trajectory, time: int, theta: Float[Tensor, " param"], state: JointState
    ) -> Gradient:
        """The same at another θ, with the buffers of `state`.

        >>> state = path.trajectory.state(4)
        >>> found = Probe(batch=probe).gradient_at(path.trajectory, 4, 0 * state.theta, state)
        >>> f"{float(found.loss):.4f}"  # ln 2: without weights it knows nothing
        '0.6931'
        """
        loss, batch, random, where = self.arguments(trajectory, time)
        return loss.gradient(theta, state.buffers, batch, random, where, evaluating=self.evaluating)


own_loss = Probe(own=True)


def horizon_of(trajectory: Trajectory, at: int, horizon: int | None, probe: Probe | None) -> int:
    """How many states after step `at` are looked at; default: all at which the probe is defined, if there is one."""
    longest = (len(trajectory) if probe is None else probe.last_time(trajectory)) - at
    if probe is not None and longest < 1:
        raise InvalidInput(
            f"a change at step {at} has no state after it at which {probe.name} is defined; "
            "follow more batches or make the change earlier"
        )
    wanted = longest if horizon is None else whole(horizon, "a horizon is a number of states after the change")
    if wanted < 1:
        raise InvalidInput(f"a horizon is a state after the change, counted from 1; got {wanted}")
    if wanted > longest:
        raise InvalidInput(
            f"horizon {wanted} is past the end: a change at step {at} of this path of {len(trajectory)} steps can be "
            f"followed for {longest}" + ("" if probe is None else f" with {probe.name} as the probe")
        )
    return wanted


@dataclass(frozen=True)
class Watch:
    """Where a probe is read after step `at` of a path: at horizons 1 … `horizons`, h = 1 the first state after it.

    only: exact runs read it at these horizons alone, where others are not asked for.
    """

    trajectory: Trajectory
    probe: Probe
    at: int
    horizons: int
    only: tuple[int, ...] | None = None

    @classmethod
    def of(cls, trajectory: Trajectory, at: int, probe: Any, horizon: int | None = None) -> Watch:
        """Refuses a horizon at which the probe is not defined."""
        found = Probe.of(probe)
        return cls(trajectory, found, at, horizon_of(trajectory, at, horizon, found))

    def reading(self, *, curved: bool = False) -> Reading:
        """What the probe takes in memory where it is read. curved: its curvature, too."""
        evaluating = self.probe.evaluating
        return Reading.of(self.trajectory, self.probe.batch, evaluating=evaluating, curved=curved)

    @property
    def range(self) -> list[int]:
        return list(range(1, self.horizons + 1))

    def reads(self, horizon: int) -> bool:
        return self.only is None or horizon in self.only

    @property
    def first(self) -> int:
        """The time of the first state after the step."""
        return self.at + 1

    @property
    def last(self) -> int:
        """The time of the last state that is read."""
        return self.at + self.horizons

    def slopes(self) -> Float[Tensor, "horizon param"]:
        """∇F at the control of every horizon: 1 g each."""
        layout = self.trajectory.dynamics.layout
        found = layout.zeros(self.horizons)
        for time, state in self.trajectory.states(self.first, self.last):
            layout.write(found[time - self.first], self.probe.gradient(self.trajectory, time, state).grads)
        return found

    def slope(self, horizon: int) -> Float[Tensor, " param"]:
        """∇F at the control of one horizon: 1 g."""
        time = self.at + horizon
        found = self.probe.gradient(self.trajectory, time, self.trajectory.state(time))
        return self.trajectory.dynamics.layout.join(found.grads)

    def require_derivative(self) -> None:
        """Raise `NoDerivative` where the probe is a function without one, as an accuracy is: 1 g."""
        if self.probe.function is not None:
            self.probe.gradient(self.trajectory, 0, self.trajectory.state(0))

    def slope_error(self) -> float:
        """How far the probe's gradient is from its slope, at the control of the last horizon (`guards.slope_error`):
        1 g and two forward passes, up to ten.

        >>> path.watch(0, probe).slope_error() < 0.01
        True
        """
        trajectory, probe, state = self.trajectory, self.probe, self.trajectory.state(self.last)
        loss, gradient = probe.arguments(trajectory, self.last)[0], probe.gradient(trajectory, self.last, state)
        return slope_error(loss, lambda theta: probe.value(trajectory, self.last, theta, state), gradient, state.theta)

    def hidden(self) -> tuple[str, ...]:
        """Buffers moved since the change that the probe depends on, as an eval-mode probe of BatchNorm does.

        Looked at where it is read first, half way and last: two forward passes each, none where no buffer moves.
        """
        before, names = self.trajectory.state(self.at), list[str]()
        for time in sorted({self.first, (self.first + self.last) // 2, self.last}):
            state = self.trajectory.state(time)
            earlier = moved_buffers(state.buffers, before.buffers)
            loss, batch, random, _ = self.probe.arguments(self.trajectory, time)
            names += hidden_buffers(loss, state, earlier, batch, random, evaluating=self.probe.evaluating)
        return tuple(dict.fromkeys(names))


class Reader:
    """The probe at the rows of a moment, less its value at the control."""

    def __init__(self, trajectory: Trajectory, probe: Probe) -> None:
        self.trajectory, self.probe = trajectory, probe
        self._controls: dict[int, float] = {}
        self._among_rows: dict[int, float] = {}  # together rows round differently than alone

    def control(self, moment: Moment) -> float:
        """F at the control: one forward pass, once per state; none where it was read among rows."""
        if moment.exact.together and moment.time in self._among_rows:
            return self._among_rows[moment.time]
        return self.alone(moment)

    def alone(self, moment: Moment) -> float:
        """F at the control as it is read by itself: one forward pass, once per state."""
        if moment.time not in self._controls:
            if self.probe.own and not moment.last:
                value = self.trajectory.steps[moment.time].loss
            else:
                value = float(self.probe.value(self.trajectory, moment.time, moment.control.theta, moment.control))
            self._controls[moment.time] = value
        return self._controls[moment.time]

    def slope(self, moment: Moment) -> Float[Tensor, " param"]:
        """∇F at the control: 1 g."""
        found = self.probe.gradient(self.trajectory, moment.time, moment.control)
        return self.trajectory.dynamics.layout.join(found.grads)

    def exact(self, moment: Moment) -> Float[Tensor, " row"]:
        """One forward pass a row; none where each step's own loss is watched, since the step computes it."""
        rows = moment.exact
        if self.probe.own and not moment.last:
            losses = rows.own_losses(moment.time)
            return rows.by_row(losses, losses[0] if rows.together else self.control(moment))
        if rows.together:
            together = self.values(moment.time, rows.thetas, rows.buffers).tolist()
            self._among_rows[moment.time] = together[0]
            return rows.by_row(together, together[0])
        loss, batch, _, _ = self.probe.arguments(self.trajectory, moment.time)
        slots, states = len(rows.buffers), [] if moment.time in self._controls else [moment.control]

        def launched(i: int) -> Tensor:
            state = rows.slot_state(i) if i < slots else states[0]
            return self.probe.value(self.trajectory, moment.time, state.theta, state, wait=False)

        count = slots + len(states)
        found = seen(loss.spread("value", batch, count, launched, evaluating=self.probe.evaluating)).tolist()
        if states and math.isfinite(found[-1]):  # else the control's own reading says so
            self._controls[moment.time] = found[-1]
        return rows.by_row(found[:slots], self.alone(moment))

    def semilinear(self, moment: Moment) -> Float[Tensor, " row"]:
        """One forward pass a row."""
        assert moment.semilinear is not None
        loss, batch, _, _ = self.probe.arguments(self.trajectory, moment.time)
        together = loss.together("value", batch, 1 + moment.semilinear.rows, evaluating=self.probe.evaluating)
        thetas = Displaced(moment.control.theta, moment.semilinear.theta, with_base=together)
        values = self.values(moment.time, thetas, [moment.control.buffers] * len(thetas))
        apart = values[1:] - values[0] if together else values - self.alone(moment)
        # rows of one call may round differently by their place: one that is not displaced reads what the control does
        return torch.where(nonzero(moment.semilinear.theta).cpu(), apart, 0.0)

    def linear(self, moment: Moment) -> Float[Tensor, " row"]:
        """⟨∇F, δθ⟩: a dot product a row."""
        assert moment.linear is not None
        return each_with(moment.linear.theta, self.slope(moment)).double().cpu()

    def values(self, time: int, thetas: Any, buffers: Sequence[Mapping[str, Tensor]]) -> Float[Tensor, " row"]:
        """F_time at rows of θ, each with its own buffers: one forward pass a row, or less."""
        loss, batch, random, where = self.probe.arguments(self.trajectory, time)
        return row_values(loss, thetas, buffers, batch, random, where, evaluating=self.probe.evaluating)


@dataclass(frozen=True)
class Displaced:
    """θ + δθ_i, made as they are asked for; with the base, θ itself stands first."""

    theta: Float[Tensor, " param"]
    rows: Float[Tensor, "row param"]
    with_base: bool

    def __len__(self) -> int:
        return len(self.rows) + self.with_base

    def __getitem__(self, index: int | slice) -> Tensor:
        if isinstance(index, slice):
            wanted = range(*index.indices(len(self)))
            out = self.theta.repeat(len(wanted), 1)
            for row, i in zip(out, wanted):
                if i >= self.with_base:
                    row.add_(self.rows[i - self.with_base])
            return out
        at = index - self.with_base
        return self.theta if at < 0 else self.theta + self.rows[at]
