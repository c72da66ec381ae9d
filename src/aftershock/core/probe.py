"""What is watched: a fixed batch, each step's own loss, or any function of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from ..errors import InvalidInput
from .batches import Batch
from .loss import Gradient, LossFunction
from .randomness import RandomState
from .state import JointState
from .trajectory import Trajectory


@dataclass(frozen=True)
class Probe:
    """F_s. Made from a batch, a function of the model, or `own_loss`.

    It runs in the modes that the model was captured in; `evaluating=True` puts the model into eval
    mode for the probe alone.
    """

    batch: Batch = None
    function: Callable[[nn.Module], Tensor] | None = None
    own: bool = False
    evaluating: bool = False

    @classmethod
    def of(cls, probe: Any) -> Probe:
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
        """The last state at which it is defined: a step's own loss needs a step after the state."""
        return len(trajectory) - 1 if self.own else len(trajectory)

    def arguments(self, trajectory: Trajectory, time: int) -> tuple[LossFunction, Batch, RandomState, str]:
        loss = trajectory.dynamics.loss
        if self.own:
            step = trajectory.steps[time]
            return loss, step.batch, step.random, step.where
        random, where = trajectory.steps[0].random, "the probe"
        if self.function is not None:
            return loss.with_function(self.function), None, random, where
        return loss, self.batch, random, where

    def value(self, trajectory: Trajectory, time: int, theta: Float[Tensor, " param"], state: JointState) -> Tensor:
        """F_time(θ), with the buffers of `state`: one forward pass."""
        loss, batch, random, where = self.arguments(trajectory, time)
        return loss.value(theta, state.buffers, batch, random, where, evaluating=self.evaluating).loss

    def gradient(self, trajectory: Trajectory, time: int, state: JointState) -> Gradient:
        """F_time and ∇F_time at `state`: 1 g."""
        loss, batch, random, where = self.arguments(trajectory, time)
        return loss.gradient(state.theta, state.buffers, batch, random, where, evaluating=self.evaluating)


own_loss = Probe(own=True)
