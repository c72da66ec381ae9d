"""Responses of a probe to changes at one step: exact pairs, endpoint-exact and tangent, in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import NotFinite
from .changes import ControlStep, Edit, Shock, touched_zero_v
from .operators import WriteIn, readout
from .probe import Probe
from .state import JointState, Tangent, difference, pair, stack
from .sweeps import transit_, transit_semilinear_
from .trajectory import Trajectory

ANSWERS = ("exact", "semilinear", "endpoint", "tangent")


@dataclass
class Responses:
    """Raw results. `values[answer]` is `[change, scale, horizon]` in float64 on the CPU."""

    values: dict[str, Float[Tensor, "change scale horizon"]]
    control: Float[Tensor, " horizon"]
    noise: Float[Tensor, " horizon"]  # one rounding of the probe's loss
    clip_switched: Tensor  # [change, scale]: clipping bound on one side of the pair only
    zero_v: list[tuple[int, int, int]] = field(default_factory=list)
    xi_norm: list[float] = field(default_factory=list)


def respond(
    trajectory: Trajectory,
    control: ControlStep,
    edits: Sequence[Edit],
    probe: Probe,
    scales: Sequence[float],
    answers: Sequence[str],
    horizons: int,
    tick: Callable[[], None] = lambda: None,
) -> Responses:
    """δF_{t+h} for every change, scale and horizon 1 … `horizons`.

    exact       a second run: the truth. One gradient per change, scale and horizon.
    semilinear  AdamW exact at every step, the network's gradient linear: g(θ + δθ) ≈ g + H δθ, the real
                probe at the end. One Hessian product and one forward pass per change, scale and horizon.
    endpoint    exact write-in, linear propagation, the real probe at the end. The same cost.
    tangent     all linear, α c Φ B ξ. One Hessian product per change and horizon, whatever the scales.
    """
    at = control.step.index
    shocks = [edit.shock(control) for edit in edits]
    pairs = _Pairs(trajectory, control, shocks, scales, "exact" in answers)
    rows = _LinearRows(control, shocks, pairs.endpoints, scales, answers)
    shape = (len(edits), len(scales), horizons)
    out = Responses(
        {answer: torch.full(shape, torch.nan, dtype=torch.float64) for answer in answers},
        torch.zeros(horizons, dtype=torch.float64),
        torch.zeros(horizons, dtype=torch.float64),
        pairs.clip_switched,
        [touched_zero_v(control, s, ends[-1]) for s, ends in zip(shocks, pairs.endpoints)],
        [float(s.xi.norm()) if s.xi is not None else float("nan") for s in shocks],
    )
    last = at + horizons
    for time, state in _states(trajectory, at + 1, last):
        h = time - at - 1
        _read(out, h, trajectory, time, state, probe, pairs, rows, answers)
        if time < last:
            step = trajectory.steps[time]
            pairs.advance(time)
            if rows.linear or rows.semilinear:
                linearized = trajectory.linearize(step, state)
                if rows.linear:
                    transit_(linearized, rows.linear)
                if rows.semilinear:
                    transit_semilinear_(linearized, state, rows.semilinear)
        tick()
    return out


def _states(trajectory: Trajectory, start: int, stop: int) -> Iterator[tuple[int, JointState]]:
    for step, state in trajectory.forward(start, stop):
        yield step.index, state
    yield stop, trajectory.state(stop)


def _read(
    out: Responses,
    h: int,
    trajectory: Trajectory,
    time: int,
    state: JointState,
    probe: Probe,
    pairs: _Pairs,
    rows: _LinearRows,
    answers: Sequence[str],
) -> None:
    """Readout at one horizon."""
    if "tangent" in answers:
        found = probe.gradient(trajectory, time, state)
        base, slope = found.loss, trajectory.dynamics.layout.join(found.grads)
        assert rows.linear is not None
        linear = pair(readout(slope[None]), rows.linear)[0].double().cpu()
        for i, j, row, factor in rows.tangent:
            out.values["tangent"][i, j, h] = factor * linear[row]
    else:
        base = probe.value(trajectory, time, state.theta, state)
    reference = float(base)
    out.control[h] = reference
    out.noise[h] = torch.finfo(base.dtype).eps * abs(reference)
    for answer, i, j, dtheta in rows.displacements():
        try:
            value = float(probe.value(trajectory, time, state.theta + dtheta, state))
        except NotFinite:  # a prediction that has run away is a wrong prediction, not an error
            value = math.inf
        out.values[answer][i, j, h] = value - reference
    if "exact" in answers:
        for i, j, shocked in pairs.states():
            out.values["exact"][i, j, h] = float(probe.value(trajectory, time, shocked.theta, shocked)) - reference


class _Pairs:
    """The shocked side of every pair."""

    def __init__(
        self,
        trajectory: Trajectory,
        control: ControlStep,
        shocks: Sequence[Shock],
        scales: Sequence[float],
        run: bool,
    ) -> None:
        self.trajectory = trajectory
        self.run = run
        ends = [[shock.endpoint(scale) for scale in scales] for shock in shocks]
        self.endpoints = [[state for state, _ in row] for row in ends]
        bound = control.step.clip.binds
        self.clip_switched = torch.tensor([[clip.binds != bound for _, clip in row] for row in ends])

    def states(self) -> list[tuple[int, int, JointState]]:
        return [(i, j, state) for i, row in enumerate(self.endpoints) for j, state in enumerate(row)]

    def advance(self, time: int) -> None:
        if not self.run:
            return
        step = self.trajectory.steps[time]
        for i, j, state in self.states():
            try:
                self.endpoints[i][j], seen, _ = self.trajectory.dynamics.advance(step, state)
            except NotFinite as error:
                raise NotFinite(f"the run with change {i} diverged: {error}") from error
            self.clip_switched[i, j] |= seen.clip.binds != step.clip.binds


class _LinearRows:
    """The differences that are propagated, and which answer reads which row.

    `endpoint` and `curved` hold (change, scale, row); `tangent` (change, scale, row, factor). A change
    without ξ has no write-in to linearize: its tangent starts from the exact difference.
    """

    def __init__(
        self,
        control: ControlStep,
        shocks: Sequence[Shock],
        endpoints: Sequence[Sequence[JointState]],
        scales: Sequence[float],
        answers: Sequence[str],
    ) -> None:
        self.endpoint: list[tuple[int, int, int]] = []
        self.curved: list[tuple[int, int, int]] = []
        self.tangent: list[tuple[int, int, int, float]] = []
        linear: list[Tangent] = []
        semilinear: list[Tangent] = []
        write_in = WriteIn(control.linear)
        for i, shock in enumerate(shocks):
            if "tangent" in answers and shock.xi is not None:
                self.tangent += [(i, j, len(linear), scale) for j, scale in enumerate(scales)]
                linear.append(write_in.mv(shock.xi))
            for j, end in enumerate(endpoints[i]):
                if "semilinear" in answers:
                    self.curved.append((i, j, len(semilinear)))
                    semilinear.append(difference(end, control.after))
                if "endpoint" in answers:
                    self.endpoint.append((i, j, len(linear)))
                if "tangent" in answers and shock.xi is None:
                    self.tangent.append((i, j, len(linear), 1.0))
                if "endpoint" in answers or ("tangent" in answers and shock.xi is None):
                    linear.append(difference(end, control.after))
        self.linear = stack(linear) if linear else None
        self.semilinear = stack(semilinear) if semilinear else None

    def displacements(self) -> Iterator[tuple[str, int, int, Float[Tensor, " param"]]]:
        """(answer, change, scale, δθ) of every answer that reads the real probe."""
        for i, j, row in self.endpoint:
            assert self.linear is not None
            yield "endpoint", i, j, self.linear.theta[row]
        for i, j, row in self.curved:
            assert self.semilinear is not None
            yield "semilinear", i, j, self.semilinear.theta[row]
