"""Where a probe is read along a path, and whether the linear answers exist for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.guards import hidden_buffers
from ..core.probe import Probe
from ..errors import HiddenState, InvalidInput

if TYPE_CHECKING:
    from .path import Path


class Readouts:
    """The horizons of a change at step `at` of a path, and the probe's gradient at each."""

    def __init__(self, path: Path, probe: Probe, at: int, horizon: int | None) -> None:
        longest = probe.last_time(path.trajectory) - at
        if longest < 1:
            raise InvalidInput(
                f"a change at step {at} has no state after it at which {probe.name} is defined; "
                "follow more batches or make the change earlier"
            )
        horizon = longest if horizon is None else horizon
        if not 1 <= horizon <= longest:
            raise InvalidInput(
                f"horizon {horizon} is past the end: a change at step {at} of this path of {len(path)} steps can be "
                f"followed for {longest} with {probe.name} as the probe"
            )
        self.path, self.probe, self.at = path, probe, at
        self.horizons = list(range(1, horizon + 1))

    def gradient(self, horizon: int) -> Float[Tensor, " param"]:
        """∇F at one horizon: 1 g."""
        trajectory, time = self.path.trajectory, self.at + horizon
        found = self.probe.gradient(trajectory, time, trajectory.state(time))
        return trajectory.dynamics.layout.join(found.grads)

    def gradients(self) -> Float[Tensor, "horizon param"]:
        return torch.stack([self.gradient(h) for h in self.horizons])

    def hidden(self) -> tuple[str, ...]:
        """Moving buffers that the probe depends on, as an eval-mode probe of BatchNorm does."""
        trajectory = self.path.trajectory
        state, after = trajectory.state(0), trajectory.state(1)
        moved = {n: b for n, b in after.buffers.items() if not torch.equal(b, state.buffers[n])}
        loss, batch, random, _ = self.probe.arguments(trajectory, 0)
        return hidden_buffers(loss, state, moved, batch, random, evaluating=self.probe.evaluating)


def require_linear(path: Path, readouts: Readouts) -> None:
    hidden = path.check().hidden or readouts.hidden()
    if hidden:
        raise HiddenState(
            f"the loss of the path or probe depends on buffers that training moves ({', '.join(hidden[:2])}…), which "
            "are state outside (θ, m, v), so an adjoint would be wrong; probe in training mode, or use "
            "change.response(..., answers=('exact',))"
        )
