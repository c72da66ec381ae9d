"""What differs at one step, as the exact state difference after it.

Every change is one elementwise pass from the control's state before the step. Skipping a step, zeroing
its gradient and perturbing by ξ = −g are three different changes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import InvalidInput
from .adamw import Hyper
from .batches import Batch, same_batch
from .clipping import Clip
from .dynamics import Dynamics, Linearized, Step
from .linear_step import LinearStep
from .loss import Gradient
from .operators import WriteIn
from .pools import Pool
from .reductions import nonzero
from .state import JointState, Lag, Tangent, difference, lag_of
from .trajectory import Trajectory


@dataclass(frozen=True)
class ControlGradient:
    """What the control's gradient gives at the step that a change happens at."""

    raw: Float[Tensor, " param"]
    present: tuple[bool, ...]
    buffers: Mapping[str, Tensor]  # after the step

    @classmethod
    def of(cls, trajectory: Trajectory, at: int) -> ControlGradient:
        """Costs one gradient."""
        dynamics, step, before = trajectory.dynamics, trajectory.steps[at], trajectory.state(at)
        found = dynamics.loss.gradient(before.theta, before.buffers, step.batch, step.random, step.where)
        return cls(dynamics.layout.join(found.grads), found.present, found.buffers)


@dataclass(frozen=True)
class ControlStep:
    """The step that a change happens at: the control before it, its raw gradient, and the control after it, which is
    made when it is first asked for."""

    dynamics: Dynamics
    step: Step
    before: JointState
    raw: Float[Tensor, " param"]
    present: tuple[bool, ...]
    linear: LinearStep
    buffers: Mapping[str, Tensor]  # after it
    kept: JointState | None  # the control after it, where the path keeps it

    @classmethod
    def of(cls, trajectory: Trajectory, at: int, seen: ControlGradient | None = None) -> ControlStep:
        """Costs one gradient, none where it was seen before."""
        dynamics, step, before = trajectory.dynamics, trajectory.steps[at], trajectory.state(at)
        seen = seen or ControlGradient.of(trajectory, at)
        linear = dynamics.linear_step(step, before, seen.raw, seen.present)
        return cls(dynamics, step, before, seen.raw, seen.present, linear, seen.buffers, trajectory.kept(at + 1))

    @classmethod
    def linearized(cls, trajectory: Trajectory, at: Linearized, before: JointState) -> ControlStep:
        """The same from a linearized step, without a gradient; where its end is not kept, its buffers are not known."""
        kept = trajectory.kept(at.step.index + 1)
        buffers = (kept or before).buffers
        return cls(trajectory.dynamics, at.step, before, at.graph.raw, at.graph.present, at.linear, buffers, kept)

    @cached_property
    def after(self) -> JointState:
        """The control after the step: where it is not kept, one elementwise pass."""
        return self.kept or self.apply(self.raw, self.present)[0]

    def apply(
        self, raw: Float[Tensor, " param"], present: tuple[bool, ...], step: Step | None = None
    ) -> tuple[JointState, Clip]:
        """The state after this step had it seen another gradient; buffers are the control's."""
        state, clip = self.dynamics.apply(step or self.step, self.before, raw, present)
        return replace(state, buffers=self.buffers), clip

    def nothing(self) -> Shock:
        """The change that is none, to the bit: a gradient computed once more, or beside others, may round otherwise."""

        def endpoint(scale: float) -> tuple[JointState, Clip]:
            return replace(self).after.clone(), self.step.clip  # of another one, so that none stays in memory here

        return Shock(endpoint, torch.zeros_like(self.raw))


@dataclass(frozen=True)
class Shock:
    """One change, ready to use: its endpoint x^s_{t+1}(α), which belongs to whoever asks for it, and ξ where it is a
    gradient's difference."""

    endpoint: Callable[[float], tuple[JointState, Clip]]
    xi: Float[Tensor, " param"] | None = None


class Edit(ABC):
    """How a step differs.

    scalable: a scale α between control and change has a meaning.
    by_gradient: it differs by a gradient's difference ξ.
    """

    scalable = True
    by_gradient = False
    name = "change"

    @abstractmethod
    def shock(self, control: ControlStep) -> Shock: ...


@dataclass(frozen=True)
class Replace(Edit):
    """Another batch: g(α) = g + α (g_i − g). Costs one gradient, and none where it is the control's own."""

    name = "replace"
    by_gradient = True
    batch: Batch

    def shock(self, control: ControlStep) -> Shock:
        if same_batch(self.batch, control.step.batch):
            return control.nothing()
        loss, step, before = control.dynamics.loss, control.step, control.before
        where = f"the batch that replaces step {step.index}'s"
        found = loss.gradient(before.theta, before.buffers, self.batch, step.random, where)
        return self.shock_with(control, found, loss.layout.join(found.grads))

    def shock_with(self, control: ControlStep, found: Gradient, raw: Float[Tensor, " param"]) -> Shock:
        """The same with a gradient that is already there, `raw` as one vector."""
        where = f"the batch that replaces step {control.step.index}'s"
        control.dynamics.heads.refuse(found.present, control.dynamics.layout.names, where)
        # the gradient itself is gone with this call
        present, xi, buffers = found.present, raw - control.raw, found.buffers

        def endpoint(scale: float) -> tuple[JointState, Clip]:
            if scale == 1.0:  # the batch itself, to the bit, with the buffers it leaves
                state, clip = control.apply(raw, present)
                return replace(state, buffers=buffers), clip
            either = tuple(a or b for a, b in zip(present, control.present))
            return control.apply(torch.add(control.raw, xi, alpha=scale), either)

        return Shock(endpoint, xi)


@dataclass(frozen=True)
class Perturb(Edit):
    """A given difference of raw gradients: g(α) = g + α ξ.

    Its exact write is eq:app_exact_delta_m, eq:app_exact_delta_v and eq:app_delta_theta.
    """

    name = "perturb"
    by_gradient = True
    xi: Float[Tensor, " param"]

    def shock(self, control: ControlStep) -> Shock:
        touched = [bool(nonzero(view.reshape(1, -1))) for view in control.dynamics.layout.views(self.xi)]
        present = tuple(a or b for a, b in zip(control.present, touched))
        return Shock(lambda scale: control.apply(control.raw + scale * self.xi, present), self.xi)


@dataclass(frozen=True)
class Zero(Edit):
    """The gradient scaled away, g(α) = (1−α) g: the step is taken, moments and weights decay."""

    name = "zero"
    by_gradient = True

    def shock(self, control: ControlStep) -> Shock:
        return Shock(lambda scale: control.apply((1 - scale) * control.raw, control.present), -control.raw)


@dataclass(frozen=True)
class Skip(Edit):
    """The step is not taken: state and step counts stay as they were."""

    name = "skip"
    scalable = False

    def shock(self, control: ControlStep) -> Shock:
        return Shock(lambda scale: (control.before.clone(), control.step.clip))


@dataclass(frozen=True)
class SetHyper(Edit):
    """Other hyperparameters for this one step, interpolated by α."""

    values: Mapping[str, float]

    @property
    def name(self) -> str:  # type: ignore[override]
        return "set " + ", ".join(f"{key}={value:g}" for key, value in self.values.items())

    def shock(self, control: ControlStep) -> Shock:
        def changed(hyper: Hyper, scale: float) -> Hyper:
            def between(name: str) -> float:
                now = float(getattr(hyper, name))
                return now + scale * (self.values[name] - now) if scale != 1.0 else float(self.values[name])

            others = {name: between(name) for name in self.values if name != "lr"}
            hyper = replace(hyper, **others)  # type: ignore[arg-type]
            return hyper.with_lr(between("lr")) if "lr" in self.values else hyper

        def endpoint(scale: float) -> tuple[JointState, Clip]:
            hypers = tuple(changed(hyper, scale) for hyper in control.step.hypers)
            return control.apply(control.raw, control.present, replace(control.step, hypers=hypers))

        return Shock(endpoint)


@dataclass(frozen=True)
class Reset(Edit):
    """Moments scaled by 1−α just before the step, which is then taken with its own gradient."""

    channels: tuple[str, ...]

    @property
    def name(self) -> str:  # type: ignore[override]
        return "reset " + "".join(self.channels)

    def shock(self, control: ControlStep) -> Shock:
        def endpoint(scale: float) -> tuple[JointState, Clip]:
            scaled = {name: (1 - scale) * getattr(control.before, name) for name in self.channels}
            before = replace(control.before, **scaled)
            return replace(control, before=before).apply(control.raw, control.present)

        return Shock(endpoint)


def shocks_of(control: ControlStep, edits: Sequence[Edit], *, in_rows: bool) -> Iterator[Shock]:
    """Every change at the control's step, one after another; gradients of replaced batches in rows where that pays."""
    loss, step, before = control.dynamics.loss, control.step, control.before
    same = [isinstance(edit, Replace) and same_batch(edit.batch, step.batch) for edit in edits]
    replaced = [edit for edit, nothing in zip(edits, same) if isinstance(edit, Replace) and not nothing]
    alike = in_rows and 0 < len(replaced) == len(edits) - sum(same)
    if not alike or not loss.sharing.tries("pool", 1 + len(replaced)):
        yield from (edit.shock(control) for edit in edits)
        return
    # together they round differently than alone: the control's own batch is then one of them, and a batch counts by its
    # difference
    mapped = any(loss.together("pool", batch, 1 + len(replaced)) for batch in (step.batch, replaced[0].batch))
    beside = [step.batch] if mapped else []
    gradients = Pool(
        loss, before.theta, before.buffers, [*beside, *(edit.batch for edit in replaced)], step.random,
        lambda i: f"the batch that replaces step {step.index}'s", control.present,
    ).gradients()  # fmt: skip
    own = loss.layout.join(next(gradients).grads).neg_().add_(control.raw) if beside else None
    others = zip(replaced, gradients, strict=True)
    for nothing in same:
        if nothing:
            yield control.nothing()
            continue
        edit, found = next(others)
        raw = loss.layout.join(found.grads)
        yield edit.shock_with(control, found, raw if own is None else raw.add_(own))


def touched_zero_v(control: ControlStep, shock: Shock, endpoint: JointState) -> tuple[int, int, int]:
    """(coordinates with v̂ = 0, those of them the change touches, those without any derivative)."""
    if shock.xi is not None:
        return control.linear.zero_counts(shock.xi, torch.zeros((), dtype=shock.xi.dtype, device=shock.xi.device))
    return control.linear.zero_counts(endpoint.theta, control.after.theta)


def names_of(edits: Sequence[Edit], labels: Sequence[str] | None = None) -> list[str]:
    """The label of every change: as given, else what it is, numbered where several are the same."""
    if labels is None:
        names = [edit.name for edit in edits]
        return names if len(set(names)) == len(names) else [f"{name} {i}" for i, name in enumerate(names)]
    names = [str(label) for label in labels]
    if len(names) != len(edits) or len(set(names)) != len(edits):
        raise InvalidInput(f"{len(edits)} changes need as many different labels; got {list(labels)}")
    return names


def scales_of(edits: Sequence[Edit], scales: Sequence[float]) -> list[float]:
    """Scales α that have a meaning for every change."""
    values = [float(scale) for scale in scales]
    if not values or not all(math.isfinite(scale) and scale != 0 for scale in values):
        raise InvalidInput(f"scales must be nonzero numbers; got {list(scales)}")
    unscalable = [edit for edit in edits if not edit.scalable]
    if values != [1.0] and unscalable:
        raise InvalidInput(f"a {unscalable[0].name} has no scale between control and change; leave the scale at 1")
    return values


def first_tangent(control: ControlStep, shock: Shock, scale: float = 1.0) -> Tangent:
    """δx_{t+1} = α B ξ. A change without ξ has no write-in to linearize: its exact difference at α."""
    if shock.xi is None:
        return difference(shock.endpoint(scale)[0], control.after)
    return WriteIn(control.linear).mv(shock.xi) * scale


def tangent_lag(control: ControlStep, shock: Shock, end: JointState) -> Lag:
    """By how many steps the counts that go with `first_tangent` are behind: none for B ξ, which is at the control's."""
    return lag_of(control.after if shock.xi is not None else end, control.after)
