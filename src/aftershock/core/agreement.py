"""Is a live run where its path says it is? Compared to the bit; and where not, what parted first, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidInput, UnsupportedOptimizer
from . import gradient_causes as gradient
from . import state_causes as state
from .adamw import Hyper
from .capture import plain_name, unwrapped
from .evidence import Cause, Evidence, Quantity
from .layout import Layout
from .live_optimizer import read_hyper
from .randomness import RandomState
from .reductions import apart, equal, norms
from .state import JointState
from .trajectory import Trajectory

Hypothesis = Callable[[Evidence], Cause | None]
GRADIENT: tuple[Hypothesis, ...] = (
    gradient.not_finite, state.settings, gradient.rounding, gradient.zeroed, gradient.scaled, gradient.clipped_by_value,
    gradient.accumulated_before, gradient.penalized, gradient.other_mode, gradient.autocast, gradient.loss_scaled,
    gradient.other_batch, gradient.single_parameters, gradient.own_generator, state.moved_settings,
    gradient.other_random, gradient.edited,
)  # fmt: skip
MOMENTS: tuple[Hypothesis, ...] = (
    gradient.not_finite, state.settings, state.reset, state.other_betas, state.other_optimizer,
)  # fmt: skip
WEIGHTS: tuple[Hypothesis, ...] = (
    gradient.not_finite, state.settings, state.other_rate, state.other_decay, state.clamped, state.averaged,
    state.written,
)  # fmt: skip


@dataclass(frozen=True)
class Match:
    """What a comparison of a live run with its path found; true where they are equal to the bit."""

    equal: bool
    steps: int  # of the path that the live run has made
    since: int = 0  # after this many steps they were still equal
    step: int | None = None  # of the path, from 0: the first whose result is another one, or by which it was
    quantity: Quantity | None = None
    parameter: str = ""  # parameter, buffer or group that differs most
    difference: float = 0.0  # its size, relative to the path's (a count's: absolute)
    cause: str = ""
    remedy: str = ""
    rounding: bool = False  # they differ, by no more than rounding
    clip: float | None = None  # the max_norm that the loop seems to clip at

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        if self.equal:
            return f"The live run and the path are equal to the bit after {self.steps} step(s)."
        assert self.step is not None
        where = f"at step {self.step}" if self.step <= self.since else f"between step {self.since} and {self.step}"
        more = "" if self.step <= self.since else " Call matches() after every step to find the first."
        parted = f"The live run and the path part {where}: {self.what}."
        return f"{parted} Likely cause: {self.cause}. {self.advice}{more}"

    @property
    def what(self) -> str:
        """What differs, and by how much."""
        size = f" by {self.difference:.1e}" if self.difference else ""
        return f"{self.quantity}{f' of {self.parameter}' if self.parameter else ''} differs{size}"

    @property
    def advice(self) -> str:
        return f"{self.remedy[:1].upper()}{self.remedy[1:]}."


@dataclass(frozen=True)
class Live:
    """The live run at one moment, in the path's own layout."""

    state: JointState
    hypers: tuple[Hyper, ...]
    random: RandomState
    frozen: Mapping[str, Tensor]


def read_live(model: nn.Module, optimizer: Any, trajectory: Trajectory) -> Live:
    """Copy what a path is made of from the live run. Neither model nor optimizer is touched."""
    loss, layout = trajectory.dynamics.loss, trajectory.dynamics.layout
    while hasattr(optimizer, "optimizer"):  # a wrapper's moments are those of the optimizer inside
        optimizer = optimizer.optimizer
    if not all("betas" in group for group in getattr(optimizer, "param_groups", [{}])):
        raise UnsupportedOptimizer(f"matches() compares AdamW and Adam; the optimizer is {type(optimizer).__name__}")
    parameters = {plain_name(name): p for name, p in unwrapped(model).named_parameters()}
    buffers = {plain_name(name): b for name, b in unwrapped(model).named_buffers()}
    wanted = trajectory.state(0).buffers
    missing = [name for name in (*layout.names, *loss.constants) if name not in parameters]
    missing += [name for name in wanted if name not in buffers]
    if missing:
        raise InvalidInput(f"the model has no {missing[0]!r}, which the path has: give matches() the captured model")
    moments = [optimizer.state.get(parameters[name], {}) for name in layout.names]
    return Live(
        JointState(
            theta=layout.join([parameters[name].detach() for name in layout.names]),
            m=layout.join([moment.get("exp_avg") for moment in moments]),
            v=layout.join([moment.get("exp_avg_sq") for moment in moments]),
            counts=tuple(int(moment.get("step", 0)) for moment in moments),
            buffers={name: buffers[name].detach() for name in wanted},
        ),
        tuple(read_hyper(group, optimizer) for group in optimizer.param_groups),
        RandomState.now(layout.device),
        {name: parameters[name].detach() for name in loss.constants},
    )


def steps_made(trajectory: Trajectory, live: Live) -> int:
    """How many steps the live run has made since capture, by its step counts."""
    made = max(now - then for now, then in zip(live.state.counts, trajectory.state(0).counts))
    if not 1 <= made <= len(trajectory):
        told = "has made no step" if made < 1 else f"has made {made} steps"
        raise InvalidInput(
            f"the live run {told} since it was captured, and the path has {len(trajectory)}: train the captured model "
            "on the path's first batches, then compare"
        )
    return made


def compare(trajectory: Trajectory, live: Live, made: int, since: int) -> Match:
    """The live run after `made` steps against the path; `since`: they were equal after that many.

    Costs one look at every number; where they differ, a handful of gradients to tell why.
    """
    parted = differences(trajectory, live, made, since)
    return parted[0] if parted else Match(True, made, made)


def differences(trajectory: Trajectory, live: Live, made: int, since: int, loss: float | None = None) -> list[Match]:
    """The same, with all that differs: what comes first may explain the rest.

    loss: the live run's loss at its last step, where it is known.
    """
    path, drew = trajectory.state(made), _other_random(trajectory, live, made)
    evidence = Evidence(trajectory, made, since, path, live.state, live.hypers, drew, loss)
    found = [look(evidence, live) for look in (_frozen, _state, _buffers, _settings, _random)]
    parted = [match for match in found if match is not None]
    return sorted(parted, key=lambda match: match.rounding)  # rounding must not hide what is more


def _parted(e: Evidence, cause: Cause, parameter: str, difference: float, *, ahead: bool = False) -> Match:
    """ahead: the states are still equal, and the next step will be another one."""
    step, since = (e.made, e.made) if ahead else (e.made - 1, e.since)
    return Match(
        False, e.made, since, step, cause.quantity, parameter, difference, cause.text, cause.remedy, cause.rounding,
        cause.clip,
    )  # fmt: skip


def _state(e: Evidence, live: Live) -> Match | None:
    """Counts, then moments, then weights: in the order in which one makes the next."""
    if live.state.counts != e.path.counts:
        off = [abs(now - told) for now, told in zip(live.state.counts, e.path.counts)]
        worst = off.index(max(off))
        return _parted(e, state.counted(e), e.layout.names[worst], float(off[worst]))
    if not (equal(live.state.m, e.path.m) and equal(live.state.v, e.path.v)):
        if e.one_gradient:
            cause = _likely(e, GRADIENT)
            written = _weights(replace(e, path=e.stepped), live, e.tolerance) if cause.rounding else None
            return _parted(e, cause, *_most(e.layout, e.g_live, e.g_path)) if written is None else written
        channel = "v" if equal(live.state.m, e.path.m) else "m"
        return _parted(e, _likely(e, MOMENTS), *_most(e.layout, getattr(live.state, channel), getattr(e.path, channel)))
    # weights that were other ones before the last step would have given it another gradient
    return _weights(replace(e, since=e.made - 1), live)


def _weights(e: Evidence, live: Live, tolerance: float = 0.0) -> Match | None:
    """tolerance: relative to the step's own update, where the path's weights are known to rounding only."""
    away, update = live.state.theta - e.path.theta, e.path.theta - e.before.theta
    noise = torch.finfo(e.layout.dtype).eps * e.path.theta.abs()
    near = tolerance > 0 and bool(norms((away.abs() - noise).clamp(min=0)) <= tolerance * norms(update))
    if near or equal(live.state.theta, e.path.theta):
        return None
    return _parted(e, _likely(e, WEIGHTS), *_most(e.layout, live.state.theta, e.path.theta))


def _likely(e: Evidence, hypotheses: Sequence[Hypothesis]) -> Cause:
    """The first hypothesis that explains the difference."""
    return next(cause for hypothesis in hypotheses if (cause := hypothesis(e)) is not None)


def _most(layout: Layout, live: Tensor, path: Tensor) -> tuple[str, float]:
    """The first parameter that differs about as much as any, and by how much, relative to the path's."""
    pairs = zip(layout.views(live.double()), layout.views(path.double()))
    sizes = [apart(a, b) for a, b in pairs]
    first = next(i for i, size in enumerate(sizes) if not size < max(sizes) / 2)
    return layout.names[first], sizes[first]


def _frozen(e: Evidence, live: Live) -> Match | None:
    loss = e.trajectory.dynamics.loss
    rewritten = {mark.words: mark.distance for mark in loss.frozen if mark.moved}  # on memory that both share
    for name, told in loss.constants.items():
        if name in rewritten or not torch.equal(live.frozen[name], told):
            cause = Cause(
                "weights",
                "the loop writes to a frozen parameter: a target network or a moving average inside the model",
                "its updates are not modelled: capture the model without it, or hold it still along the path",
            )
            away = apart(live.frozen[name], told)
            return _parted(e, cause, name, rewritten.get(name, away))
    return None


def _buffers(e: Evidence, live: Live) -> Match | None:
    for name, told in e.path.buffers.items():
        now = live.state.buffers[name]
        if not torch.equal(now, told):
            away = apart(now.double(), told.double())
            cause = _buffer_cause(e, live)
            return _parted(e, replace(cause, rounding=e.sharp and away <= e.tolerance), name, away)
    return None


def _buffer_cause(e: Evidence, live: Live) -> Cause:
    counts = [
        int(live.state.buffers[name] - told)
        for name, told in e.path.buffers.items()
        if name.endswith("batches_tracked")
    ]
    if counts and max(counts) > 0:
        text = f"the model ran {max(counts)} more time(s) in training mode (logging, a validation without eval())"
        return Cause("buffer", text, "run whatever does not train in eval mode")
    if counts and min(counts) < 0:
        return Cause("buffer", "normalization ran in eval mode in the loop", "capture in the modes that training uses")
    return Cause(
        "buffer",
        "something else than loss_fn writes to this buffer (a moving average, a counter, a mask)",
        "update it in the forward pass, or leave it out of the model",
    )


def _settings(e: Evidence, live: Live) -> Match | None:
    """What the next step would run with; a scheduler may be stepped before or after the comparison."""
    if e.made == len(e.trajectory):
        return None
    coming, last = e.trajectory.steps[e.made].hypers, e.step.hypers
    names = state.differing(live.hypers, coming)
    if not names or not state.differing(live.hypers, last):
        return None
    group, _, now, told = names[0]
    away = abs(now - told) / max(abs(told), 1e-300)
    return _parted(e, state.changed_settings(names), f"group {group}", away, ahead=True)


def _random(e: Evidence, live: Live) -> Match | None:
    if not e.other_random:
        return None
    cause = Cause(
        "random",
        "the loop draws from torch's generator after loss_fn did (a data loader, augmentation, noise): the next masks "
        "are other ones",
        "draw in loss_fn from torch's generator, outside of it from one of your own, or give follow(random=…)",
    )
    return _parted(e, cause, "", 0.0, ahead=True)


def _other_random(trajectory: Trajectory, live: Live, made: int) -> bool:
    """Is the random state another one? Where no step draws, nobody can tell, and it does not matter."""
    path = [*(step.random for step in trajectory.steps), trajectory.random_after]
    draws = any(not path[0].same(other) for other in path[1:])
    return draws and not path[made].same(live.random)
