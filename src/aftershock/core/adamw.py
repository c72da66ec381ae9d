"""AdamW: torch's own step on the flat state, and the stretches of the flat vector that share its scalars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import _get_scalar_dtype

from .layout import Layout
from .state import JointState, Lag

T = TypeVar("T")
CACHED_BYTES = 2**20  # of each of the tensors that one pass after another reads
GPU_BYTES = 2**27  # of each of the tensors that a pass on a GPU makes on the way


@dataclass(frozen=True)
class Hyper:
    """One parameter group's hyperparameters at one step."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None
    capturable: bool = False

    def with_lr(self, lr: float) -> Hyper:
        """The same group at another learning rate, kept as a tensor where the optimizer has a tensor."""
        return replace(self, lr=torch.full_like(self.lr, lr) if isinstance(self.lr, Tensor) else float(lr))


def adamw_step(
    layout: Layout,
    state: JointState,
    grads: Sequence[Tensor | None],
    hypers: Sequence[Hyper],
    *,
    consume: bool = False,
    bounded: bool = False,
) -> JointState:
    """x_{s+1} by `torch.optim.adam.adam`, equal to the bit to the optimizer's own step. eq:adamw_step

    `grads` are those that reach the optimizer (clipped). A parameter whose gradient is `None` is left
    alone, decay and step count included. `consume` writes into the tensors of `state`, which is then gone.
    `bounded` is another rule, StableAdamW's: each parameter's rate is divided by the RMS of its update, where that is
    larger than one.
    """
    new = state if consume else state.clone()
    if new.theta.is_cuda and not bounded and (flat := layout.whole(grads)) is not None:
        _step_whole(layout, new, flat, hypers, [grad is not None for grad in grads])
        return replace(new, counts=advanced(state.counts, grads))
    theta, m, v = (layout.typed_views(flat) for flat in (new.theta, new.m, new.v))
    for group, hyper in enumerate(hypers):
        own = [i for i, g in enumerate(layout.groups) if g == group and grads[i] is not None]
        for members in [[i] for i in own] if bounded else [own] if own else []:
            first = members[0]
            rule = _bounded(hyper, theta[first], grads[first], v[first], state.counts[first]) if bounded else hyper  # type: ignore[arg-type]
            adam_(
                [theta[i] for i in members],
                [grads[i] for i in members],  # type: ignore[misc]
                [m[i] for i in members],
                [v[i] for i in members],
                [state.counts[i] for i in members],
                rule,
            )
    if not layout.uniform:
        for flat, views in ((new.theta, theta), (new.m, m), (new.v, v)):
            layout.write(flat, views)
    return replace(new, counts=advanced(state.counts, grads))


def _step_whole(
    layout: Layout, state: JointState, grad: Float[Tensor, " param"], hypers: Sequence[Hyper], present: Sequence[bool]
) -> None:
    """The same in as few tensors as there are stretches that share their scalars: AdamW is elementwise."""
    for where, group, taken, active in _stretches(layout, state.counts, present):
        if active:
            theta, g, m, v = ([x[where]] for x in (state.theta, grad, state.m, state.v))
            adam_(theta, g, m, v, [taken], hypers[group])


def _bounded(hyper: Hyper, theta: Tensor, grad: Tensor, v: Tensor, count: int) -> Hyper:
    """The rate divided by max(1, RMS of g/√v̂): StableAdamW's rule for one parameter."""
    run = Run.at(hyper, count + 1)
    g = run.sign * grad + run.coupled * theta
    second = (run.beta2 * v + (1 - run.beta2) * g * g) / run.bias2
    size = (g * g / second.clamp(min=max(run.eps, 1e-30) ** 2)).mean().sqrt()
    return hyper.with_lr(run.lr / max(1.0, float(size)))


def adam_(
    theta: list[Tensor], grads: list[Tensor], m: list[Tensor], v: list[Tensor], counts: Sequence[int], hyper: Hyper
) -> None:
    """Torch's own step on tensors that share their hyperparameters, in place; `counts` are the steps before it."""
    device = theta[0].device if hyper.fused or hyper.capturable else torch.device("cpu")
    # one transfer for all, which nobody waits for; as torch's own counts, whatever the default type is
    dtype = _get_scalar_dtype(is_fused=hyper.fused)
    steps = torch.tensor([float(count) for count in counts], dtype=dtype, pin_memory=device.type == "cuda")
    adam(
        theta, grads, m, v, [], list(steps.to(device, non_blocking=True).unbind()),
        foreach=hyper.foreach, capturable=hyper.capturable, fused=hyper.fused,
        decoupled_weight_decay=hyper.decoupled, amsgrad=False, beta1=hyper.beta1, beta2=hyper.beta2, lr=hyper.lr,
        weight_decay=hyper.weight_decay, eps=hyper.eps, maximize=hyper.maximize,
    )  # fmt: skip


def advanced(counts: Sequence[int], grads: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Step counts after a step with these gradients."""
    return tuple(count + (grad is not None) for count, grad in zip(counts, grads))


@dataclass(frozen=True)
class Run:
    """A stretch of the flat vector whose parameters share every scalar of the step."""

    where: slice
    active: bool  # False where the gradient is None: torch leaves the parameter alone
    lr: float
    beta1: float
    beta2: float
    eps: float
    bias1: float
    bias2: float
    shrink: float  # 1 − ηλ, decoupled decay
    coupled: float  # λ of Adam, which enters through the gradient
    sign: float  # −1 under maximize

    @classmethod
    def at(cls, hyper: Hyper, s: int, where: slice = slice(None), active: bool = True) -> Run:
        """The scalars of step s, counted from 1."""
        lr, decay = float(hyper.lr), float(hyper.weight_decay)
        return cls(
            where=where,
            active=active,
            lr=lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            eps=hyper.eps,
            bias1=1 - hyper.beta1**s,
            bias2=1 - hyper.beta2**s,
            shrink=1 - lr * decay if hyper.decoupled else 1.0,
            coupled=0.0 if hyper.decoupled else decay,
            sign=-1.0 if hyper.maximize else 1.0,
        )


def runs_of(layout: Layout, hypers: Sequence[Hyper], counts: Sequence[int], present: Sequence[bool]) -> list[Run]:
    """The stretches of the flat vector at a step that starts from `counts`."""
    found = _stretches(layout, counts, present)
    return [Run.at(hypers[group], taken + 1, where, active) for where, group, taken, active in found]


def late_runs_of(
    layout: Layout, hypers: Sequence[Hyper], counts: Sequence[int], present: Sequence[bool], lag: Lag
) -> Iterator[tuple[Run, Run]]:
    """The active stretches on which counts are behind: the control's scalars, and those of the run that is behind."""
    for where, group, (taken, behind), active in _stretches(layout, list(zip(counts, lag)), present):
        if active and behind:
            yield Run.at(hypers[group], taken + 1, where), Run.at(hypers[group], taken - behind + 1, where)


def run_of(runs: Sequence[Run], start: int) -> Run:
    """The stretch that holds the coordinate `start`."""
    return next(run for run in runs if run.where.stop > start)


def _stretches(layout: Layout, counts: Sequence[T], present: Sequence[bool]) -> list[tuple[slice, int, T, bool]]:
    """Stretches of parameters with one group, step count and presence of a gradient."""
    found: list[tuple[slice, int, T, bool]] = []
    for i, (group, start, size) in enumerate(zip(layout.groups, layout.starts, layout.padded_sizes)):
        key = (group, counts[i], present[i])
        if found and found[-1][1:] == key:
            start = found.pop()[0].start
        found.append((slice(start, layout.starts[i] + size), *key))
    return found


def blocks(where: slice, rows: Float[Tensor, "*change param"]) -> Iterator[slice]:
    """A stretch in pieces: on the CPU they stay in a core's cache through a dozen passes, on a GPU they bound the
    memory of what is computed on the way."""
    start, stop, _ = where.indices(rows.shape[-1])
    count = max(rows.numel() // max(rows.shape[-1], 1), 1)
    size = max((GPU_BYTES if rows.is_cuda else CACHED_BYTES) // (count * rows.element_size()), 512)
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def pieces_of(runs: Sequence[Run], rows: Float[Tensor, "*change param"]) -> Iterator[tuple[Run, slice]]:
    """The active stretches in pieces sized for these rows."""
    for run in runs:
        if run.active:
            for w in blocks(run.where, rows):
                yield run, w
