"""One adjoint sweep back from a loss or a gradient norm: what every earlier step adds to it, against each change of
that step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.adamw import Hyper
from ..core.changes import ControlStep, Edit, Replace, Shock, Skip
from ..core.contributions import BentReadout, Layers, contributions
from ..core.reductions import norms
from ..core.state import CHANNELS
from ..core.sweep_plans import plan_window_sweep
from ..core.trajectory import Trajectory
from ..core.waiting import SUMS
from .neighbours import reference_mean
from .quantity import Quantity

CHANGES = ("replace", "skip", "lr")


@dataclass(frozen=True)
class Hypers(Edit):
    """One step with the hyperparameters of another, group by group."""

    name = "lr"
    scalable = False
    hypers: tuple[Hyper, ...]

    def shock(self, control: ControlStep) -> Shock:
        step = replace(control.step, hypers=self.hypers)
        return Shock(lambda scale: control.apply(control.raw, control.present, step))


@dataclass
class Swept:
    """`contribution[change, step, channel, layer]`; NaN where a change has no meaning (the first step's lr)."""

    contribution: Float[Tensor, "change step channel layer"]
    layers: list[str]

    @classmethod
    def nothing(cls, layers: list[str], steps: int) -> Swept:
        """Where nothing can be predicted."""
        shape = (len(CHANGES), steps, len(CHANNELS), len(layers))
        return cls(torch.full(shape, torch.nan, dtype=torch.float64), layers)

    def total(self, change: str) -> Float[Tensor, " step"]:
        return self.contribution[CHANGES.index(change)].sum((-1, -2))


def readout_at(trajectory: Trajectory, last: int, quantity: Quantity) -> BentReadout:
    """The slope of the own loss of step `last`, ∇ℓ, or of its gradient's norm, ∇‖∇ℓ‖ = H ∇ℓ/‖∇ℓ‖: a gradient, and for
    the norm a Hessian product."""
    graph = trajectory.linearize(trajectory.steps[last], trajectory.state(last)).graph
    slope = graph.raw[None]
    if quantity == "gradient norm":
        slope = graph.products(slope / norms(slope[0]).clamp(min=torch.finfo(slope.dtype).tiny))
    return BentReadout(slope, torch.zeros(0, dtype=torch.float64))


def edits_at(trajectory: Trajectory, step: int, last: int, references: int) -> dict[str, Edit]:
    """Every change of one step that is compared with what happened."""
    steps = trajectory.steps
    edits: dict[str, Edit] = {"skip": Skip()}
    if references and last > 1:
        edits["replace"] = Replace(reference_mean(steps[:last], step, references))
    if step and steps[step].hypers != steps[step - 1].hypers:
        edits["lr"] = Hypers(steps[step - 1].hypers)
    return edits


def sweep(
    trajectory: Trajectory,
    last: int,
    quantity: Quantity,
    *,
    references: int,
    tick: Callable[[], None] = lambda: None,
) -> Swept:
    """Contributions to the own loss or gradient norm of step `last`: as it is, less what it is with the change made.

    Each is the exact one-step difference of a change paired with the adjoint. Costs 2–3 g per step, a few
    elementwise passes per change, and `references` gradients per step for the replaced batch.
    """
    layers = Layers.of(trajectory.dynamics.layout)

    def edits(index: int) -> dict[str, Edit]:
        return edits_at(trajectory, index, last, references)

    place = plan_window_sweep(trajectory, last, sums=2 * SUMS)  # with and without a step that is skipped
    parts = contributions(trajectory, last, readout_at(trajectory, last, quantity), edits, place, layers, tick)
    found = Swept.nothing(layers.names, last).contribution
    found[CHANGES.index("lr"), 1:] = 0.0  # a rate that did not change has no part
    for name, table in parts.items():
        row = found[CHANGES.index(name)]
        row[~table.isnan()] = table[~table.isnan()]
    return Swept(found, layers.names)
