"""What rounding alone does to a probe: the size below which an exact response says nothing.

Measured, not assumed: the control runs once more from a state that differs from its own by one rounding, and the probe
is read once more at a jitter of one rounding of its own arithmetic, which autocast makes coarser than the parameters'.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .layout import Layout
from .probe import Reader, Watch
from .rollout import Rows, rollout
from .state import JointState

SEED = 0
NEAR = 2  # horizons on each side that tell how large noise is at one: alone it may cross zero there


def noise_floor(
    watch: Watch, control: Float[Tensor, " horizon"], *, exact: bool, parked: bool = False
) -> Float[Tensor, " horizon"]:
    """The scatter of an exact response by rounding alone, at every horizon.

    control: the probe without any change. exact: exact runs are read, whose states scatter too: that part costs one
    more exact row. It is one draw, so that a floor may be several times too low where a run amplifies perturbations.
    """
    read = read_noise(watch, control)
    return torch.hypot(run_noise(watch, parked=parked), read) if exact else read


def run_noise(watch: Watch, *, parked: bool = False) -> Float[Tensor, " horizon"]:
    """How far a rounding of θ right after the step leads the probe away, by horizon: 1 g and a forward pass each."""
    start = watch.trajectory.state(watch.first)
    theta = start.theta + jitter(watch.trajectory.dynamics.layout, start)
    row = JointState(theta, start.m.clone(), start.v.clone(), start.counts, start.buffers)
    reader = Reader(watch.trajectory, watch.probe)
    rows = Rows([row], control=start, owned=True, parked=parked)
    moments = rollout(watch.trajectory, watch.first, rows, watch.last)
    return _smoothed(torch.cat([reader.exact(moment) for moment in moments]))


def read_noise(watch: Watch, control: Float[Tensor, " horizon"]) -> Float[Tensor, " horizon"]:
    """The scatter of a difference of two readings of the probe, by its own arithmetic: ten forward passes in all.

    F(θ + d) + F(θ − d) − 2 F(θ) at a jitter d of half a rounding is rounding alone, where d's curvature is small; it is
    read first, half way and last. A difference of two readings scatters √3 times less, and at least by the rounding
    of the numbers themselves.
    """
    found, eps, dtype = [], 0.0, _arithmetic(watch)
    for time in sorted({watch.first, (watch.first + watch.last) // 2, watch.last}):
        state = watch.trajectory.state(time)
        middle = watch.probe.value(watch.trajectory, time, state.theta, state)
        d = jitter(watch.trajectory.dynamics.layout, state, dtype) / 2
        jittered = Reader(watch.trajectory, watch.probe).values(
            time, torch.stack([state.theta + d, state.theta - d]), [state.buffers] * 2
        )
        found.append((float(jittered.sum()) - 2 * float(middle)) ** 2 / 3)
        eps = torch.finfo(middle.dtype).eps
    return (sum(found) / len(found) + (eps * control) ** 2 / 6) ** 0.5


def jitter(
    layout: Layout, state: JointState, dtype: torch.dtype | None = None, *, seed: int = SEED
) -> Float[Tensor, " param"]:
    """± one rounding of every parameter, with random signs: of its own dtype, or of a coarser one."""
    generator = torch.Generator(layout.device).manual_seed(seed)
    signed = torch.empty_like(state.theta).bernoulli_(generator=generator).mul_(2).sub_(1).mul_(state.theta)
    coarse = 0.0 if dtype is None else torch.finfo(dtype).eps
    torch._foreach_mul_(layout.views(signed), [max(torch.finfo(own).eps, coarse) for own in layout.dtypes])
    return signed


def _smoothed(values: Float[Tensor, " horizon"]) -> Float[Tensor, " horizon"]:
    """The root mean square of the horizons around each."""
    squares = values.square()
    around = [squares[max(0, h - NEAR) : h + NEAR + 1].mean() for h in range(len(squares))]
    return torch.stack(around).sqrt()


def _arithmetic(watch: Watch) -> torch.dtype:
    """What the probe computes in: one forward pass, once, which is watched and so is none that is played back."""
    state = watch.trajectory.state(0)
    loss, batch, random, where = watch.probe.arguments(watch.trajectory, watch.at)
    if loss.arithmetic is None:
        with Arithmetic() as seen:
            loss.plain("value", state.theta, state.buffers, batch, random, where, evaluating=watch.probe.evaluating)
        loss.arithmetic = seen.dtype
    return loss.arithmetic


class Arithmetic(TorchDispatchMode):
    """The coarsest floating-point type that a computation makes numbers in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.is_floating_point() and _eps(x.dtype) > _eps(self.dtype):
                self.dtype = x.dtype
        return out


def _eps(dtype: torch.dtype) -> float:
    return math.nan if dtype.itemsize < 2 else torch.finfo(dtype).eps
