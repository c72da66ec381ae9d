"""Responses of a probe to changes at one step: exact pairs, endpoint-exact and tangent, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import NotFinite
from .changes import ControlStep, Edit, Shock, touched_zero_v
from .operators import WriteIn, readout
from .path import Trajectory
from .probe import Probe
from .state import JointState, Tangent, difference, pair, stack
from .sweeps import transit_

METHODS = ("exact", "endpoint", "tangent")


@dataclass
class Responses:
    """Raw results. `values[method]` is `[change, scale, horizon]` in float64 on the CPU."""

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
    methods: Sequence[str],
    horizons: int,
    tick: Callable[[], None] = lambda: None,
) -> Responses:
    """δF_{t+h} for every change, scale and horizon 1 … `horizons`.

    Costs, per change and horizon: one gradient per scale (exact), one Hessian product (tangent) and one
    more with a forward pass per scale (endpoint-exact); per horizon one gradient graph.
    """
    at = control.step.index
    shocks = [edit.shock(control) for edit in edits]
    pairs = _Pairs(trajectory, control, shocks, scales, "exact" in methods)
    rows = _LinearRows(control, shocks, pairs.endpoints, scales, methods)
    shape = (len(edits), len(scales), horizons)
    out = Responses(
        {method: torch.full(shape, torch.nan, dtype=torch.float64) for method in methods},
        torch.zeros(horizons, dtype=torch.float64),
        torch.zeros(horizons, dtype=torch.float64),
        pairs.clip_switched,
        [touched_zero_v(control, s, ends[-1]) for s, ends in zip(shocks, pairs.endpoints)],
        [float(s.xi.norm()) if s.xi is not None else float("nan") for s in shocks],
    )
    last = at + horizons
    for time, state in _states(trajectory, at + 1, last):
        h = time - at - 1
        _read(out, h, trajectory, time, state, probe, pairs, rows, methods)
        if time < last:
            step = trajectory.steps[time]
            pairs.advance(time)
            if rows.dx is not None:
                transit_(trajectory.linearize(step, state), rows.dx)
        tick()
    return out


def _states(trajectory: Trajectory, start: int, stop: int):  # type: ignore[no-untyped-def]
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
    methods: Sequence[str],
) -> None:
    """Readout at one horizon."""
    if "tangent" in methods:
        found = probe.gradient(trajectory, time, state)
        base, slope = found.loss, trajectory.dynamics.layout.join(found.grads)
        assert rows.dx is not None
        linear = pair(readout(slope[None]), rows.dx)[0].double().cpu()
        for i, j, row, factor in rows.tangent:
            out.values["tangent"][i, j, h] = factor * linear[row]
    else:
        base = probe.value(trajectory, time, state.theta, state)
    reference = float(base)
    out.control[h] = reference
    out.noise[h] = torch.finfo(base.dtype).eps * abs(reference)
    if "endpoint" in methods:
        assert rows.dx is not None
        for i, j, row in rows.endpoint:
            value = probe.value(trajectory, time, state.theta + rows.dx.theta[row], state)
            out.values["endpoint"][i, j, h] = float(value) - reference
    if "exact" in methods:
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
    """The tangents that are propagated, each once, and which answer reads which row.

    `endpoint` holds (change, scale, row); `tangent` (change, scale, row, factor). A change without ξ has
    no write-in to linearize: its tangent starts from the exact difference, as its endpoint-exact does.
    """

    def __init__(
        self,
        control: ControlStep,
        shocks: Sequence[Shock],
        endpoints: Sequence[Sequence[JointState]],
        scales: Sequence[float],
        methods: Sequence[str],
    ) -> None:
        self.endpoint: list[tuple[int, int, int]] = []
        self.tangent: list[tuple[int, int, int, float]] = []
        starts: list[Tangent] = []
        write_in = WriteIn(control.linear)
        for i, shock in enumerate(shocks):
            if "tangent" in methods and shock.xi is not None:
                self.tangent += [(i, j, len(starts), scale) for j, scale in enumerate(scales)]
                starts.append(write_in.mv(shock.xi))
            if "endpoint" in methods or ("tangent" in methods and shock.xi is None):
                for j, end in enumerate(endpoints[i]):
                    if "endpoint" in methods:
                        self.endpoint.append((i, j, len(starts)))
                    if "tangent" in methods and shock.xi is None:
                        self.tangent.append((i, j, len(starts), 1.0))
                    starts.append(difference(end, control.after))
        self.dx = stack(starts) if starts else None
