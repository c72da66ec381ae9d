"""What is measured of a step: its loss, or the norm of its gradient before clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ..core.batches import Batch
from ..core.dynamics import Step
from ..core.trajectory import Trajectory
from ..errors import NotFinite
from .records import Record

Quantity = Literal["loss", "gradient norm"]


def seen(quantity: Quantity, step: Step) -> float:
    """Of a step that was taken."""
    return step.loss if quantity == "loss" else step.clip.norm


def recorded(quantity: Quantity, record: Record) -> float:
    """Of a recorded one; the norm as it reached the optimizer where that before clipping was not told."""
    return record.loss if quantity == "loss" else record.told_norm


def on_weights(quantity: Quantity, trajectory: Trajectory, time: int, batches: Sequence[Batch]) -> tuple[float, ...]:
    """Of other batches at the state before step `time`, infinite where it is not finite: a forward pass each, for the
    norm a gradient."""
    step, state, loss = trajectory.steps[time], trajectory.state(time), trajectory.dynamics.loss

    def of(batch: Batch) -> float:
        arguments = (state.theta, state.buffers, batch, step.random, step.where)
        try:
            return float(loss.value(*arguments).loss if quantity == "loss" else loss.gradient(*arguments).norm)
        except NotFinite:
            return math.inf

    return tuple(map(of, batches))
