"""Learning rates per step: from a number, a list, a function or a torch scheduler."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..core.adamw import Hyper
from ..errors import InvalidInput

Rate = float | Sequence[float]
LearningRate = Rate | Callable[[int], Rate] | LRScheduler | None


def schedule(hypers: tuple[Hyper, ...], lr: LearningRate, steps: int) -> list[tuple[Hyper, ...]]:
    """Every group's hyperparameters at each of the next `steps` steps."""
    if lr is None:
        return [hypers] * steps
    if isinstance(lr, LRScheduler):
        return _from_scheduler(hypers, lr, steps)
    if callable(lr):
        rates = [lr(i) for i in range(steps)]
    elif isinstance(lr, Sequence) or (isinstance(lr, torch.Tensor) and lr.ndim):
        rates = list(lr)
        if len(rates) != steps:
            raise InvalidInput(f"{len(rates)} learning rates for {steps} batches; give one per step")
    else:
        rates = [lr] * steps
    return [_with_rates(hypers, rate, i) for i, rate in enumerate(rates)]


def _with_rates(hypers: tuple[Hyper, ...], rate: Any, step: int) -> tuple[Hyper, ...]:
    grouped = isinstance(rate, Sequence) or (isinstance(rate, torch.Tensor) and rate.ndim > 0)
    per_group = [float(r) for r in rate] if grouped else [float(rate)] * len(hypers)
    if len(per_group) != len(hypers):
        raise InvalidInput(f"step {step} has {len(per_group)} learning rates; the optimizer has {len(hypers)} groups")
    if not all(r >= 0 for r in per_group):
        raise InvalidInput(f"the learning rate of step {step} is {rate}; it must be zero or positive")
    return tuple(hyper.with_lr(r) for hyper, r in zip(hypers, per_group))


def _from_scheduler(hypers: tuple[Hyper, ...], scheduler: LRScheduler, steps: int) -> list[tuple[Hyper, ...]]:
    """Advance a copy of the scheduler on a stand-in optimizer: the user's own does not move."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InvalidInput("ReduceLROnPlateau needs a metric at each step; pass its learning rates as a list")
    groups = scheduler.optimizer.param_groups
    if len(groups) != len(hypers):
        raise InvalidInput(f"the scheduler drives {len(groups)} parameter groups; the point has {len(hypers)}")
    stand_in = torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.zeros(()))]} for _ in groups])
    for ours, theirs in zip(stand_in.param_groups, groups):
        ours.update({key: copy.deepcopy(value) for key, value in theirs.items() if key != "params"})
    twin = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
    out = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the stand-in takes no steps, which torch would warn about
        for _ in range(steps):
            out.append(tuple(_at_group(h, group) for h, group in zip(hypers, stand_in.param_groups)))
            twin.step()
    return out


def _at_group(hyper: Hyper, group: dict[str, Any]) -> Hyper:
    beta1, beta2 = (float(beta) for beta in group["betas"])  # one-cycle schedules move these too
    return replace(hyper.with_lr(float(group["lr"])), beta1=beta1, beta2=beta2)
