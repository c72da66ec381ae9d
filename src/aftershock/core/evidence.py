"""What is known of a live run that has left its path, for hypotheses about why.

A hypothesis is a function of the evidence that returns a `Cause` where it explains the difference, else `None`. Where
only one step lies between the last equal state and the difference, the evidence is sharp: the gradient that reached the
moments is solved for, and other ways to compute it can be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from .adamw import Hyper, runs_of
from .dynamics import Dynamics, Step
from .layout import Layout
from .linear_step import step_size
from .reductions import apart, equal, norm, norms, products
from .state import JointState
from .trajectory import Trajectory

Quantity = Literal["gradient", "moments", "weights", "decay", "buffer", "count", "hyperparameter", "random"]


@dataclass(frozen=True)
class Leeway:
    """The numbers that decide whether a hypothesis gives what the live run has."""

    roundings: float = 1e3  # that a gradient solved from moments is off at most: 1/(1−β1), sums of many terms
    loose: float = 0.1  # over several steps the runs drift apart, and proportions hold roughly
    # Of the whole difference: a hypothesis that leaves more of it explains a part, and where the difference is within
    # the tolerance itself the path's own gradient would pass, too.
    left: float = 0.1


LEEWAY = Leeway()


@dataclass(frozen=True)
class Cause:
    """What explains a difference: the quantity it began in, the cause in words, and what to do."""

    quantity: Quantity
    text: str
    remedy: str
    rounding: bool = False  # the difference is as large as rounding makes it, and no larger
    clip: float | None = None  # the max_norm that the loop seems to clip at, and that nobody was told


@dataclass(frozen=True)
class Evidence:
    """What is known of a live run that has left its path after `made` steps; after `since` they were still equal."""

    trajectory: Trajectory
    made: int
    since: int
    path: JointState
    live: JointState
    hypers: tuple[Hyper, ...]  # the live run's, as they stand
    other_random: bool
    loss: float | None = None  # the live run's at its last step, where it is known

    @property
    def layout(self) -> Layout:
        return self.trajectory.dynamics.layout

    @property
    def step(self) -> Step:
        return self.trajectory.steps[self.made - 1]

    @property
    def sharp(self) -> bool:
        """One step lies between the last equal state and this one."""
        return self.made - self.since == 1

    @cached_property
    def before(self) -> JointState:
        return self.trajectory.state(self.since)

    @property
    def tolerance(self) -> float:
        eps = max(torch.finfo(dtype).eps for dtype in self.layout.dtypes)
        return min(LEEWAY.roundings * eps, LEEWAY.loose) if self.sharp else LEEWAY.loose

    @cached_property
    def g_path(self) -> Float[Tensor, " param"]:
        return self.gradient(self.path)

    @cached_property
    def g_live(self) -> Float[Tensor, " param"]:
        return self.gradient(self.live)

    def gradient(self, after: JointState, before: JointState | None = None) -> Float[Tensor, " param"]:
        """The gradient that took m from `before` to `after`, in float64; over several steps, their weighted mean."""
        before, steps = (self.before, self.made - self.since) if before is None else (before, 1)
        keep = self.spread([self.step.hypers[group].beta1 ** steps for group in self.layout.groups])
        active = self.spread([float(a > b) for a, b in zip(after.counts, before.counts)])
        arrived = (after.m.double() - keep * before.m.double()) / (1 - keep)
        return active * (arrived - self.coupled_decay(before))

    def coupled_decay(self, state: JointState) -> Float[Tensor, " param"]:
        """λθ, where Adam adds it to the gradient."""
        hypers = [self.step.hypers[group] for group in self.layout.groups]
        return self.spread([0.0 if h.decoupled else h.weight_decay for h in hypers]) * state.theta.double()

    def spread(self, values: Sequence[float]) -> Float[Tensor, " param"]:
        """One number per parameter as a flat vector."""
        sizes = torch.tensor(self.layout.padded_sizes, device=self.layout.device)
        return torch.tensor(values, dtype=torch.float64, device=self.layout.device).repeat_interleave(sizes)

    @cached_property
    def one_gradient(self) -> bool:
        """Are the live moments those of AdamW with some gradient, m and v with the same one?"""
        if not self.sharp:
            return True
        beta2 = self.spread([self.step.hypers[group].beta2 for group in self.layout.groups])
        arrived = self.g_live + self.coupled_decay(self.before)
        active = self.spread([float(a > b) for a, b in zip(self.live.counts, self.before.counts)])
        squares = active * (self.live.v.double() - beta2 * self.before.v.double()) / (1 - beta2)
        noise = torch.finfo(self.layout.dtype).eps * norms(self.before.v.double()) / (1 - beta2.max())
        off, near = norms(squares - (active * arrived).square()), max(LEEWAY.loose, self.tolerance)
        return bool(off <= near * norms(squares) + noise)

    @cached_property
    def stepped(self) -> JointState:
        """The last equal state moved as AdamW moves it with the live run's own moments: what θ is if all else is."""
        theta = self.before.theta.clone()
        active = tuple(a > b for a, b in zip(self.live.counts, self.before.counts))
        for run in runs_of(self.layout, self.step.hypers, self.before.counts, active):
            if run.active:
                m, v = self.live.m[run.where], self.live.v[run.where]
                theta[run.where].mul_(run.shrink).add_(step_size(run, m, v))
        return replace(self.path, theta=theta)

    def moved(self, one: Tensor, other: Tensor) -> list[int]:
        """The parameters at which two flat vectors differ by more than the tolerance."""
        pairs = zip(self.layout.views(one), self.layout.views(other))
        return [i for i, (a, b) in enumerate(pairs) if bool(norm(a - b) > self.tolerance * norm(b))]

    def tried(
        self, dynamics: Dynamics, change: Callable[[Step], Step] = lambda step: step, before: JointState | None = None
    ) -> JointState | None:
        """The steps since the last equal state taken in another way; None where that fails."""
        state = self.before if before is None else before
        try:
            for step in self.trajectory.steps[self.since : self.made]:
                state = dynamics.advance(change(step), state)[0]
        except Exception:  # user code in surroundings that it was not written for
            return None
        return state

    def gives(self, found: JointState | None) -> bool:
        """Has this state the live run's gradient, and far closer than the path's is? Over several steps: to the bit."""
        if found is None or not self.sharp:
            return found is not None and equal(found.m, self.live.m)
        off = norms(self.gradient(found) - self.g_live)
        whole = norms(self.g_path - self.g_live)
        return bool(off <= self.tolerance * norms(self.g_live) and off < LEEWAY.left * whole)


def fit(one: Float[Tensor, " param"], other: Float[Tensor, " param"]) -> tuple[float, float]:
    """(factor, misfit): the best `factor` with one ≈ factor · other, and what it leaves, relative to `one`."""
    factor = float(products(one, other) / products(other, other).clamp(min=1e-300))
    return factor, apart(factor * other, one)
