"""What is measured of a step: its loss, or the norm of its gradient before clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ..core.batches import Batch, undrawn
from ..core.dynamics import Step
from ..core.randomness import RandomState
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
    random = trajectory.steps[time].random
    return tuple(_value(quantity, trajectory, time, batch, random) for batch in batches)


def with_other_draws(quantity: Quantity, trajectory: Trajectory, time: int, others: Sequence[int]) -> tuple[float, ...]:
    """Of step `time` again, with what was drawn at other steps in place of its own random numbers. Nothing where the
    first of these makes no difference: its loss draws none."""
    step, found = trajectory.steps[time], list[float]()
    for other in others:
        found.append(_value(quantity, trajectory, time, step.batch, trajectory.steps[other].random))
        if found == [seen(quantity, step)]:
            return ()
    return tuple(found)


def _value(quantity: Quantity, trajectory: Trajectory, time: int, batch: Batch, random: RandomState) -> float:
    """With these random numbers, whatever was drawn when the batch came."""
    state, loss = trajectory.state(time), trajectory.dynamics.loss
    arguments = (state.theta, state.buffers, undrawn(batch), random, trajectory.steps[time].where)
    try:
        return float(loss.value(*arguments).loss if quantity == "loss" else loss.gradient(*arguments).norm)
    except NotFinite:
        return math.inf
