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
from .rollout import Moment, Rows, rollout
from .state import JointState

SEED = 0
NEAR = 2  # horizons on each side that tell how large noise is at one: alone it may cross zero there


class Noise:
    """The scatter of an exact response by rounding alone, measured while rows pass.

    One more exact row starts from the control's state, one rounding away; and the probe is read twice more at three
    states. It is one draw, so that a floor may be several times too low where a run amplifies perturbations.
    """

    def __init__(self, watch: Watch) -> None:
        assert watch.only is None, "every horizon is read"
        self._watch, self._dtype = watch, _arithmetic(watch)
        self._times = {watch.first, (watch.first + watch.last) // 2, watch.last}
        self._read: dict[int, float] = {}
        self._ran: list[float] = []
        self._eps = 0.0

    def row(self, control: JointState, *, spend: bool = False) -> JointState:
        """Where the further row starts: the control's state right after the step, θ one rounding away. `spend` gives
        that state's tensors away."""
        self._ran = []
        theta = jitter(self._watch.trajectory.dynamics.layout, control).add_(control.theta)
        m, v = (control.m, control.v) if spend else (control.m.clone(), control.v.clone())
        return JointState(theta, m, v, control.counts, control.buffers)

    def ran(self, value: Float[Tensor, ""]) -> None:
        """How far that row's reading is from the control's, horizon by horizon."""
        self._ran.append(float(value))

    def look(self, moment: Moment, reader: Reader) -> None:
        """The scatter of readings by the probe's own arithmetic: two forward passes, at three states in all.

        F(θ + d) + F(θ − d) − 2 F(θ) at a jitter d of half a rounding is rounding alone, where d's curvature is small.
        """
        if moment.time not in self._times or moment.time in self._read:
            return
        trajectory, state = self._watch.trajectory, moment.control
        theta = jitter(trajectory.dynamics.layout, state, self._dtype).div_(2).add_(state.theta)

        def value(theta: Float[Tensor, " param"]) -> Tensor:
            return self._watch.probe.value(trajectory, moment.time, theta, state, wait=False)

        beside = [value(theta), value(theta.neg_().add_(state.theta, alpha=2))]  # on both sides, equally far
        self._read[moment.time] = float(beside[0].double() + beside[1].double()) - 2 * reader.alone(moment)
        self._eps = torch.finfo(beside[0].dtype).eps

    def floor(self, control: Float[Tensor, " horizon"]) -> Float[Tensor, " horizon"]:
        """The scatter at every horizon; `control` is the probe without any change.

        A difference of two readings scatters √3 times less than the three of `look`, and at least by the rounding of
        the numbers themselves. Where exact rows were read their states scatter too.
        """
        squares = [value**2 / 3 for value in self._read.values()]
        read = (sum(squares) / len(squares) + (self._eps * control) ** 2 / 6) ** 0.5
        return torch.hypot(_smoothed(torch.tensor(self._ran, dtype=torch.float64)), read) if self._ran else read


def noise_floor(watch: Watch, control: Float[Tensor, " horizon"]) -> Float[Tensor, " horizon"]:
    """The same for exact rows that were carried elsewhere: one more row, and seven forward passes."""
    watch.trajectory.dynamics.loss.player.narrow()  # one row needs one lane, and others' memory is not counted here
    noise, reader, start = Noise(watch), Reader(watch.trajectory, watch.probe), watch.trajectory.state(watch.first)
    rows = Rows([noise.row(start)], control=start, owned=True)
    del start  # it is the control's from here on
    for moment in rollout(watch.trajectory, watch.first, rows, watch.last):
        noise.ran(reader.exact(moment)[0])
        noise.look(moment, reader)
    return noise.floor(control)


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
