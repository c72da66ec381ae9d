"""Where the tangent's error comes from: write-in, smooth curvature, switched gates (paper, section 3.6, appendix D).

e_{t+h} = Φ(t+h, t+1) r_B + Σ_j Φ(t+h, j+1) (r^sm_j + r^sw_j)               (eq:exact_multistep_error)

r_B  = δx_{t+1} − B ξ                          AdamW's own curvature at the changed step
r^sm = f̃(x^c + δx) − f̃(x^c) − A δx            curvature of the step with the control's gates
r^sw = f(x^c + δx) − f̃(x^c + δx)              gates, and clipping, that switched

eq:remainders, in the recursions eq:tangent_recursion and eq:piecewise_error_recursion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.changes import tangent_lag
from ..core.gates import Pattern, recording, replaying
from ..core.guards import hidden_buffers
from ..core.memory import in_one_piece
from ..core.operators import WriteIn, readout
from ..core.probe import Probe, horizon_of
from ..core.reductions import count, norms
from ..core.rollout import Rows
from ..core.state import CHANNELS, Cotangent, JointState, Tangent, difference, pair, stack
from ..core.trajectory import Trajectory
from ..errors import HiddenState
from ..results.labelled import LabelledResult
from ..results.provenance import asked, provenance
from .switching import PairStep, joint_norm, paired_steps, start_pair

if TYPE_CHECKING:
    import xarray as xr

    from ..api.change import Change

# rows that travel together: the exact deviation, the tangent, and the three parts of their difference
ROWS = ("deviation", "tangent", "write_in", "smooth", "switching")
PARTS = ROWS[2:]
# step counts of its own, as after a skip, shift deviation and tangent alike, and so no part of their difference
SHIFTED = tuple(row not in PARTS for row in ROWS)


class Decomposition(LabelledResult):
    """The error of the tangent along one exact pair, by source. `data` is an `xarray.Dataset`.

    By horizon h (the state t + h) and channel (θ, m, v), as norms: `deviation` δx, `tangent` its prediction,
    `state_error` e, and what each source has become by then: `state_from_write_in`, `_smooth`, `_switching`;
    `state_share_*` are ⟨part, e⟩/‖e‖², which sum to 1. `identity_residual` is ‖e − Σ parts‖ / ‖δx‖.
    By step j: `smooth_remainder`, `switching_defect`, `clip_switched`; by step and layer: `switched`, `gates`.
    With a probe: `response`, `predicted`, `output_error` and its parts `output_from_*`, signed, with the
    probe's own curvature and switching as `output_from_readout_smooth`, `output_from_readout_switching`.

    >>> data = theory.decompose(change, index=1, horizon=2).data
    >>> [round(float(data[f"state_share_{part}"].sel(horizon=2)), 2) for part in ("write_in", "smooth", "switching")]
    [1.13, -0.13, 0.0]
    """

    kind = "decomposition"
    wanted = ("deviation", "tangent", "state_error", "identity_residual", "switched", "gates", "change", "note")

    def __str__(self) -> str:
        data = self.data
        lines = [
            f"Error of the tangent for '{data['change'].item()}' at step {int(data['at'])}, scale "
            f"{float(data['scale']):g}: shares of ‖e‖² by source, and what switched on the way.",
            f"{'h':>4}  {'‖e‖/‖δx‖':>9}  {'write-in':>9}  {'smooth':>9}  {'switching':>9}  {'gates switched':>14}",
        ]
        size, error = joint(data["deviation"]), joint(data["state_error"])
        switched = data["switched"].sum("layer") / data["gates"].sum("layer") if data.sizes["layer"] else None
        for i, h in enumerate(data["horizon"].values):
            shares = [_percent(float(data[f"state_share_{part}"][i])) for part in PARTS]
            # the step that led to this state; the first state follows the change itself
            gates = "" if i == 0 or switched is None else f"{float(switched[i - 1]):.2%}"
            ratio = float(error[i]) / max(float(size[i]), 1e-300)
            lines.append(f"{h:>4}  {ratio:>9.2e}  {shares[0]:>9}  {shares[1]:>9}  {shares[2]:>9}  {gates:>14}")
        lines.append(
            f"The parts sum to the error within {float(data['identity_residual'].max()):.0e} of the deviation."
        )
        return "\n".join([*lines, *filter(None, [data["note"].item()])])


def _percent(share: float) -> str:
    return "—" if math.isnan(share) else f"{share:.1%}"


def joint(norms: xr.DataArray) -> xr.DataArray:
    """Channel norms as the norm of the joint state."""
    return (norms**2).sum("channel") ** 0.5


def decompose(
    change: Change, *, scale: float = 1.0, index: int = 0, horizon: int | None = None, probe: Any = None
) -> Decomposition:
    """Run one exact pair and split the tangent's error at every horizon (thm:finite_horizon_error).

    change: its `index`-th change is taken, at `scale`. A change without ξ (skip, set, reset) has no linear
        write-in: its tangent starts from the exact difference, so that its write-in part is zero.
    probe: also split the error of the response.
    Costs about 12 g per step (three gradients, five Hessian products), and 4 g per horizon of a probe.
    Raises `UnfrozenGate` where a kink of the model cannot be held, `HiddenState` where buffers are state.

    >>> data = theory.decompose(change, index=1, probe=probe).data
    >>> float(data["identity_residual"].max()) < 1e-12
    True
    """
    return in_one_piece(lambda: _decomposed(change, scale, index, horizon, probe), "one exact pair")


def _decomposed(change: Change, scale: float, index: int, horizon: int | None, probe: Any) -> Decomposition:
    path = change.path
    watched = None if probe is None else Probe.of(probe)
    horizon = horizon_of(path.trajectory, change.at, horizon, watched)
    control, shock, shocked = start_pair(change, scale, index)
    if watched is not None:
        _refuse_hidden(path.trajectory, watched)
    deviation = difference(shocked, control.after)
    tangent = deviation if shock.xi is None else WriteIn(control.linear).mv(shock.xi) * scale
    nothing = deviation * 0.0
    rows = stack([deviation, tangent, minus(deviation, tangent), nothing, nothing])
    lags = len(ROWS) * [tangent_lag(control, shock, shocked)]
    table = _Table(path.trajectory, watched)
    table.read(change.at + 1, control.after, shocked, rows)
    carried = Rows(linear=rows, linear_lags=lags, linear_shifted=SHIFTED)
    for step in paired_steps(change, shocked, horizon, carried):  # rows[0] is A δx now, of the deviation before it
        smooth = minus(difference(step.smooth_after, step.control_after), rows[0])
        switching = step.switching_defect
        _add_(rows[3], smooth)
        _add_(rows[4], switching)
        _set_(rows[0], difference(step.shocked_after, step.control_after))
        table.step(step, smooth, switching)
        table.read(step.step.index + 1, step.control_after, step.shocked_after, rows)
    write_in = minus(deviation, tangent)
    edit = change.edits[index]
    note = "" if shock.xi is not None else f"A {edit.name} has no ξ: its tangent starts from the exact difference."
    touched = count(control.linear.broken)
    note += f" At {touched} coordinates v = 0 but m ≠ 0: no derivative exists there." if touched else ""
    given = {"change": edit.name, "scale": scale, "note": note.strip(), **asked(change.kind, change.at, watched)}
    return Decomposition(table.dataset(write_in, horizon, given))


def minus(a: Tangent, b: Tangent) -> Tangent:
    return Tangent(a.theta - b.theta, a.m - b.m, a.v - b.v)


def _add_(dx: Tangent, other: Tangent) -> None:
    for name in CHANNELS:
        getattr(dx, name).add_(getattr(other, name))


def _set_(dx: Tangent, other: Tangent) -> None:
    for name in CHANNELS:
        getattr(dx, name).copy_(getattr(other, name))


def channel_norms(dx: Tangent) -> list[float]:
    return [float(norms(getattr(dx, name))) for name in CHANNELS]


def _refuse_hidden(trajectory: Trajectory, probe: Probe) -> None:
    state, after = trajectory.state(0), trajectory.state(1)
    moved = {n: b for n, b in after.buffers.items() if not torch.equal(b, state.buffers[n])}
    loss, batch, random, _ = probe.arguments(trajectory, 0)
    if hidden_buffers(loss, state, moved, batch, random, evaluating=probe.evaluating):
        raise HiddenState("the probe depends on buffers that training moves: probe in training mode")


class _Table:
    """Collects what `decompose` reads on its way, and labels it."""

    def __init__(self, trajectory: Trajectory, probe: Probe | None) -> None:
        self.trajectory, self.probe = trajectory, probe
        self.states: list[dict[str, Any]] = []
        self.outputs: list[dict[str, float]] = []
        self.steps: list[dict[str, Any]] = []
        self.switched: list[dict[str, int]] = []
        self.gates: dict[str, int] = {}

    def read(self, time: int, control: JointState, shocked: JointState, rows: Tangent) -> None:
        error = minus(rows[0], rows[1])
        row: dict[str, Any] = {"deviation": channel_norms(rows[0]), "tangent": channel_norms(rows[1])}
        row["state_error"] = channel_norms(error)
        shares = pair(Cotangent(error.theta, error.m, error.v)[None], rows[2:])[0] / joint_norm(error) ** 2
        rest = error
        for i, part in enumerate(PARTS):
            row[f"state_from_{part}"] = channel_norms(rows[2 + i])
            row[f"state_share_{part}"] = float(shares[i])
            rest = minus(rest, rows[2 + i])
        row["identity_residual_absolute"] = joint_norm(rest)
        row["identity_residual"] = joint_norm(rest) / max(joint_norm(rows[0]), 1e-300)
        self.states.append(row)
        if self.probe is not None:
            self.outputs.append(read_output(self.trajectory, self.probe, time, control, shocked, rows))

    def step(self, pair: PairStep, smooth: Tangent, switching: Tangent) -> None:
        row = {"smooth_remainder": channel_norms(smooth), "switching_defect": channel_norms(switching)}
        self.steps.append({"step": pair.step.index, "clip_switched": pair.clip_switched, **row})
        labels = pair.extension.pattern.labels
        self.switched.append({label: int(s.sum()) for label, s in zip(labels, pair.switches)})
        self.gates |= {label: s.numel() for label, s in zip(labels, pair.switches)}

    def dataset(self, write_in: Tangent, horizon: int, given: Mapping[str, Any]) -> xr.Dataset:
        import numpy as np
        import xarray as xr

        layers = list(self.gates)
        counts = [[row.get(layer, 0) for layer in layers] for row in self.switched]
        variables: dict[str, Any] = {"write_in_remainder": ("channel", channel_norms(write_in))}
        for name, value in self.states[0].items():
            dims = ("horizon", "channel") if isinstance(value, list) else "horizon"
            variables[name] = (dims, [row[name] for row in self.states])
        for name in ("smooth_remainder", "switching_defect"):
            shape = np.array([row[name] for row in self.steps]).reshape(-1, len(CHANNELS))
            variables[name] = (("step", "channel"), shape)
        variables["clip_switched"] = ("step", np.array([row["clip_switched"] for row in self.steps], dtype=bool))
        variables["switched"] = (("step", "layer"), np.array(counts, dtype=int).reshape(len(counts), len(layers)))
        variables["gates"] = ("layer", np.array([self.gates[layer] for layer in layers], dtype=int))
        for name in self.outputs[0] if self.outputs else ():
            variables[name] = ("horizon", [row[name] for row in self.outputs])
        coords = {
            "horizon": list(range(1, horizon + 1)),
            "channel": list(CHANNELS),
            "step": np.array([row["step"] for row in self.steps], dtype=int),
            "layer": np.array(layers, dtype=object),
        }
        return xr.Dataset({**variables, **given}, coords=coords, attrs=provenance(self.trajectory))


def read_output(
    trajectory: Trajectory, probe: Probe, time: int, control: JointState, shocked: JointState, rows: Tangent
) -> dict[str, float]:
    """δF, its prediction and the parts of the difference, signed (appendix D, "Probe-Output Error")."""
    pattern = Pattern()
    base, slope = _probe_gradient(trajectory, probe, time, control, recording(pattern))
    held, _ = _probe_gradient(trajectory, probe, time, shocked, replaying(pattern))
    truth = float(probe.value(trajectory, time, shocked.theta, shocked))
    read = pair(readout(slope[None]), rows)[0]
    row = {"response": truth - base, "predicted": float(read[1])}
    row["output_error"] = row["response"] - row["predicted"]
    row |= {f"output_from_{part}": float(read[2 + i]) for i, part in enumerate(PARTS)}
    row["output_from_readout_smooth"] = held - base - float(read[0])
    row["output_from_readout_switching"] = truth - held
    row["readout_norm"] = float(norms(slope))
    return row


def _probe_gradient(
    trajectory: Trajectory, probe: Probe, time: int, state: JointState, surroundings: Any
) -> tuple[float, Float[Tensor, " param"]]:
    loss, batch, random, where = probe.arguments(trajectory, time)
    found = loss.within(surroundings).gradient(
        state.theta, state.buffers, batch, random, where, evaluating=probe.evaluating
    )
    return float(found.loss), trajectory.dynamics.layout.join(found.grads)
