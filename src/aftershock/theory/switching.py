"""The switching part of the error: the smooth extension f̃, which gates switch, and what each switch does.

Paper: section 3.6 and appendix D, "Exact Smooth–Switching Decomposition", "A Sufficient Activation-Margin
Condition". Clipping is a gate too: its smooth extension stays on the control's side of the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from ..core import reductions
from ..core.adamw import adamw_step
from ..core.changes import ControlStep, Shock, names_of, scales_of
from ..core.clipping import TORCH_EPSILON, Clip, clip_
from ..core.dynamics import Dynamics, Linearized, Step
from ..core.gates import Gate, Pattern, recording, replaying
from ..core.graphs import GradientGraph
from ..core.memory import in_chunks
from ..core.planning import at_once
from ..core.rollout import Rows, rollout
from ..core.row_costs import Load
from ..core.state import JointState, Tangent, difference
from ..errors import HiddenState, InvalidInput, UnfrozenGate
from ..results.provenance import provenance

if TYPE_CHECKING:
    import xarray as xr

    from ..api.change import Change


STARTED = 2  # vectors of the control's step and one change at it, as measured
SAME_LOSS = 1e-5  # relative: far above float32 rounding, far below an operation that was changed


@dataclass(frozen=True)
class HeldClip(Clip):
    """A clip factor that may exceed 1: the control's clipping continued past its threshold."""

    @property
    def binds(self) -> bool:
        return True


@dataclass(frozen=True)
class SmoothExtension:
    """f̃_s: step s with the gates and the side of clipping that the control chose."""

    dynamics: Dynamics
    step: Step
    pattern: Pattern

    def with_choices(self, choices: list[Tensor]) -> SmoothExtension:
        return replace(self, pattern=self.pattern.with_choices(choices))

    def __call__(self, state: JointState) -> JointState:
        """f̃_s(x): 1 g."""
        loss, step = self.dynamics.loss.within(replaying(self.pattern)), self.step
        found = loss.gradient(state.theta, state.buffers, step.batch, step.random, step.where)
        clip = self._clip(float(found.norm))
        if isinstance(clip, HeldClip) and clip.factor >= 1:
            torch._foreach_mul_([grad for grad in found.grads if grad is not None], clip.factor)
        elif clip.binds:
            clip_(found.grads, found.norm, step.max_norm)
        return replace(adamw_step(loss.layout, state, found.grads, step.hypers), buffers=found.buffers)

    def linearize(self, state: JointState) -> Linearized:
        """D f̃_s at another state than the control: 1.2 g."""
        loss, step = self.dynamics.loss.within(replaying(self.pattern)), self.step
        graph = GradientGraph(loss, state.theta, state.buffers, step.batch, step.random, step.where)
        step = replace(step, clip=self._clip(float(graph.gradient.norm)))
        return Linearized(step, self.dynamics.linear_step(step, state, graph.raw, graph.present), graph)

    def _clip(self, norm: float) -> Clip:
        if self.step.max_norm is None or not self.step.clip.binds:
            return Clip(norm, 1.0)
        return HeldClip(norm, self.step.max_norm / (norm + TORCH_EPSILON))


@dataclass(frozen=True)
class PairStep:
    """One step taken by both sides of an exact pair, and by f̃ from the shocked state."""

    extension: SmoothExtension
    control: JointState
    shocked: JointState
    control_after: JointState
    shocked_after: JointState
    shocked_pattern: Pattern
    clip_switched: bool

    @property
    def step(self) -> Step:
        return self.extension.step

    @cached_property
    def smooth_after(self) -> JointState:
        """f̃_s(x^c + δx)."""
        return self.extension(self.shocked)

    @cached_property
    def switches(self) -> list[Tensor]:
        """S_s, gate by gate, where the two plain passes chose differently."""
        return self.extension.pattern.switches(self.shocked_pattern)

    @property
    def deviation(self) -> Tangent:
        return difference(self.shocked, self.control)

    def gates_with_values(self, state: JointState) -> list[Gate]:
        """This step's gates at one of the two states, with what chose: 1 g."""
        pattern, step = Pattern(), self.step
        loss = self.extension.dynamics.loss.within(recording(pattern, values=True))
        loss.gradient(state.theta, state.buffers, step.batch, step.random, step.where)
        return pattern.gates

    @property
    def switching_defect(self) -> Tangent:
        """r^sw_s = f_s(x^s) − f̃_s(x^s)."""
        return difference(self.shocked_after, self.smooth_after)


def start_pair(change: Change, scale: float, index: int) -> tuple[ControlStep, Shock, JointState]:
    """The control step, the shock, and the shocked state right after it."""
    if not 0 <= index < len(change.edits):
        raise InvalidInput(f"index {index} is not one of {len(change.edits)} changes")
    edit = change.edits[index]
    scales_of([edit], [scale])
    hidden = change.path.check().hidden
    if hidden:
        raise HiddenState(
            f"the loss depends on buffers that training moves ({', '.join(hidden[:2])}…), which are state outside "
            "(θ, m, v): the tangent's error is not defined there"
        )
    control = change.path.control(change.at)
    shock = edit.shock(control)
    return control, shock, shock.endpoint(scale)[0]


def paired_steps(change: Change, shocked: JointState, horizon: int, beside: Rows | None = None) -> Iterator[PairStep]:
    """Both sides through the steps after the change, up to state t + horizon. 2 g a step, 3 with f̃.

    beside: predicted rows that are carried with them; at each step they are those after it, and may be added to.
    """
    trajectory, first = change.path.trajectory, change.at + 1
    before: tuple[SmoothExtension, JointState, JointState, Pattern] | None = None
    switches, rows = 0, replace(beside or Rows(), exact=[shocked], gates=True)
    for moment in rollout(trajectory, first, rows, first + horizon - 1):
        control, row = moment.control.clone(), moment.states[0].clone()
        if before is not None:
            extension, was, other, pattern = before
            clipped, switches = moment.exact.clip_switches()[0] > switches, moment.exact.clip_switches()[0]
            yield PairStep(extension, was, other, control, row, pattern, clipped)
        if not moment.last:
            step, gates = trajectory.steps[moment.time], moment.gates
            require_same_loss(step, gates.loss)
            before = (SmoothExtension(trajectory.dynamics, step, gates.control), control, row, gates.rows[0])


def require_same_loss(step: Step, watched: float) -> None:
    """Refuse an operation that gives another loss while its gates are recorded."""
    if not math.isclose(watched, step.loss, rel_tol=SAME_LOSS):
        raise UnfrozenGate(
            f"the loss at {step.where} is {step.loss:.6g}, and {watched:.6g} while its gates are recorded: an "
            "operation behaves differently when it is watched (F.l1_loss drops its weight, for one); replace it"
        )


def pair_at(change: Change, step: int, *, scale: float = 1.0, index: int = 0) -> PairStep:
    """The pair at a step of the path after the change."""
    if not change.at < step < len(change.path):
        raise InvalidInput(f"step {step} is not a step after the change at step {change.at} on this path")
    _, _, shocked = start_pair(change, scale, index)
    for pair in paired_steps(change, shocked, step - change.at + 1):
        found = pair
    return found


def switch_fraction(
    change: Change,
    *,
    scales: Sequence[float] = (1.0,),
    kinds: Sequence[str] | None = None,
    memory: str | int | None = None,
) -> xr.DataArray:
    """Share of the gates that chose differently from the control, `[change, scale, horizon]`, along exact pairs.

    The gates at horizon h are those of the pass that step t + h makes over its batch; the last state of a path has
    no step after it: NaN. kinds: the operations that are counted, such as ("relu",); default: all. memory: as in
    `change.response`.
    Costs a gradient per change, scale and horizon.

    >>> theory.switch_fraction(path.set(at=0, lr=0.3)).values[0, 0].round(2).tolist()
    [0.03, 0.03, 0.09, nan]
    """
    import xarray as xr

    path, last = change.path, len(change.path)
    limit = path.memory if memory is None else memory

    def rows(changes: int) -> Load:
        return Load(exact=changes * len(scales), gates=True)

    size = at_once(path.trajectory, len(change), rows, limit, lambda _: STARTED, "following the gates of one change")
    found = torch.full((len(change), len(scales), last - change.at), torch.nan, dtype=torch.float64)

    def follow(some: range) -> None:
        _switched_shares_(found[some.start : some.stop], change, some.start, scales, kinds)

    in_chunks(len(change), size, follow, "following gates")
    return xr.DataArray(
        found.numpy(),
        dims=("change", "scale", "horizon"),
        coords={
            "change": names_of(change.edits), "scale": list(scales), "horizon": range(1, last - change.at + 1),
        },
        name="switch_fraction",
        attrs=provenance(path.trajectory),
    )  # fmt: skip


def _switched_shares_(
    found: Float[Tensor, "change scale horizon"],
    change: Change,
    first: int,
    scales: Sequence[float],
    kinds: Sequence[str] | None,
) -> None:
    """Of so many changes from the first on, into `found`."""
    control, edits = change.path.control(change.at), change.edits[first : first + len(found)]
    ends = (shock.endpoint(scale)[0] for shock in (edit.shock(control) for edit in edits) for scale in scales)
    rows = Rows(ends, gates=True, owned=True)
    for moment in rollout(change.path.trajectory, change.at + 1, rows, len(change.path)):
        if not moment.last:
            gates = moment.gates
            shares = [_switched_share(gates.control, row, kinds) for row in gates.rows]
            found[:, :, moment.time - change.at - 1] = torch.tensor(shares, dtype=torch.float64).view(found.shape[:2])


def _switched_share(control: Pattern, other: Pattern, kinds: Sequence[str] | None) -> float:
    pairs = zip(control.gates, control.switches(other))
    counted = [switched for gate, switched in pairs if kinds is None or gate.kind in kinds]
    total = sum(switched.numel() for switched in counted)
    return sum(int(switched.sum()) for switched in counted) / total if total else math.nan


def joint_norm(dx: Tangent) -> float:
    """‖δx‖, the Euclidean norm of the three blocks together."""
    return float(reductions.joint_norm([dx.theta, dx.m, dx.v]))


def telescoped_defects(pair: PairStep) -> tuple[list[tuple[int, int]], list[Tangent]]:
    """r^sw_{s,j_r} = f^(r)(x^s) − f^(r−1)(x^s): one defect per switched gate, in order of the pass.

    Returns (gate, element) and its defect; they sum to r^sw. Costs 1 g per switched gate: small systems.

    >>> from aftershock.theory.switching import pair_at
    >>> places, defects = theory.telescoped_defects(pair_at(path.set(at=0, lr=0.3), 1))
    >>> len(places) == len(defects), places[0]
    (True, (0, 3))
    """
    if pair.clip_switched:
        raise UnfrozenGate("clipping switched at this step: its part of the defect belongs to no activation gate")
    choices = [gate.pattern.clone() for gate in pair.extension.pattern.gates]
    shocked = [gate.pattern for gate in pair.shocked_pattern.gates]
    places = [(g, int(e)) for g, switched in enumerate(pair.switches) for e in switched.flatten().nonzero()]
    defects, before = [], pair.smooth_after
    for gate, element in places:
        choices[gate] = choices[gate].clone()
        choices[gate].view(-1)[element] = shocked[gate].reshape(-1)[element]
        after = pair.extension.with_choices(choices)(pair.shocked)
        defects.append(difference(after, before))
        before = after
    return places, defects


def activation_margin(change: Change, step: int, *, scale: float = 1.0, index: int = 0) -> xr.Dataset:
    """The activation-margin condition at one step, with its constants (eq:app_weighted_margin_mass and
    eq:app_switching_quadratic_bound): ‖r^sw‖ ≤ ρ L̄_a ‖δx‖².

    L̄_a = max_j |δa_j| / ‖δx‖ over all gates; K_j = ‖r^sw_j‖ / ‖δx‖, by the telescoped switch where j switched
    and by switching j alone at x^s where it only could have (|a_j| ≤ L̄_a ‖δx‖); ρ = max_u Σ_{|a_j| ≤ u} K_j / u.
    These are the constants of this pair, exact for it; for other pairs they are estimates. Choices between
    more than two inputs (pooling, max along a dimension, comparisons) have no pre-activation: where one
    switched, the constant is NaN and `reason` says so. Costs 2 g, and 1 g per gate in the strip: small systems.

    step: of the path, after the changed one. index: which of the changes, at `scale`.

    >>> found = theory.activation_margin(path.set(at=0, lr=0.3), step=1)
    >>> int(found["switched"]), bool(found["switching_defect"] <= found["bound"])
    (1, True)
    """
    found = margin_of(pair_at(change, step, scale=scale, index=index))
    return found.assign_attrs(provenance(change.path.trajectory))


def margin_of(pair: PairStep) -> xr.Dataset:
    """`activation_margin` of a pair that is at hand."""
    import xarray as xr

    size = joint_norm(pair.deviation)
    defect = joint_norm(pair.switching_defect)
    control, shocked = (pair.gates_with_values(state) for state in (pair.control, pair.shocked))
    reason = _no_margin(pair, control)
    values = {"deviation": size, "switching_defect": defect, "switched": sum(int(s.sum()) for s in pair.switches)}
    names = ("preactivation_slope", "strip", "margin_mass", "switching_constant", "bound")
    values |= dict.fromkeys(names, float("nan"))
    if not reason:
        moves = [reductions.largest(b.value - a.value) for a, b in zip(control, shocked) if a.value is not None]  # type: ignore[operator]
        slope = max(moves, default=0.0) / size if size else 0.0
        places, weights = _weights(pair, control, slope * size, size)
        margins = [float(control[g].margin.reshape(-1)[e]) for g, e in places]  # type: ignore[union-attr]
        mass = margin_mass(margins, weights)
        constant = mass * slope if weights else 0.0
        found = (slope, len(places), mass, constant, constant * size**2)
        values |= dict(zip(names, found))
    return xr.Dataset({**values, "step": pair.step.index, "reason": reason})


def margin_mass(margins: list[float], weights: list[float]) -> float:
    """ρ: the smallest number with Σ_{j: |a_j| ≤ u} K_j ≤ ρ u for every u > 0 (eq:app_weighted_margin_mass).

    margins, weights: |a_j| and K_j of each gate.

    >>> theory.margin_mass([0.1, 0.5], [1.0, 2.0])  # 1/0.1 against 3/0.5
    10.0
    """
    total, mass = 0.0, 0.0
    order = sorted(zip(margins, weights))
    for i, (margin, weight) in enumerate(order):
        total += weight
        if i + 1 < len(order) and order[i + 1][0] == margin:
            continue
        if total > 0:
            mass = max(mass, total / margin if margin > 0 else float("inf"))
    return mass


def _no_margin(pair: PairStep, control: Sequence[Gate]) -> str:
    if pair.clip_switched:
        return "clipping switched"
    for gate, switched in zip(control, pair.switches):
        if gate.value is None and bool(switched.any()):
            return f"{gate.kind} in {gate.layer!r} switched, which has no single pre-activation"
    return ""


def _weights(
    pair: PairStep, control: Sequence[Gate], strip: float, size: float
) -> tuple[list[tuple[int, int]], list[float]]:
    """K_j of every gate that switched or lies in the strip |a| ≤ L̄_a ‖δx‖."""
    switched, defects = telescoped_defects(pair)
    weights = {place: joint_norm(defect) / size for place, defect in zip(switched, defects)}
    choices = [gate.pattern for gate in control]
    for g, gate in enumerate(control):
        if gate.margin is None or gate.across is None:
            continue
        for e in map(int, (gate.margin.reshape(-1) <= strip).nonzero()):
            if (g, e) in weights:
                continue
            flipped = choices[g].clone()
            flipped.view(-1)[e] = gate.across.reshape(-1)[e]
            alone = pair.extension.with_choices([*choices[:g], flipped, *choices[g + 1 :]])(pair.shocked)
            weights[g, e] = joint_norm(difference(alone, pair.smooth_after)) / size
    return list(weights), list(weights.values())
