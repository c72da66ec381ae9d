"""Hyperparameters per step: from a number, a list, a function or torch schedulers."""

from __future__ import annotations

import copy
import numbers
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..core.adamw import Hyper
from ..errors import InvalidInput

Rate = float | Sequence[float]
Number = Rate | Sequence[Rate] | Callable[[int], Rate] | None
Pair = tuple[float, float]
Betas = Pair | Sequence[Pair | Sequence[Pair]] | Callable[[int], Pair | Sequence[Pair]] | None
LearningRate = Number | LRScheduler | Sequence[LRScheduler] | Literal["constant"]
WORDS = {"lr": "the learning rate"}
EXPECTED = {"betas": "a pair of numbers"}


def schedule(
    hypers: tuple[Hyper, ...],
    steps: int,
    lr: LearningRate = None,
    *,
    weight_decay: Number = None,
    betas: Betas = None,
    eps: Number = None,
) -> list[tuple[Hyper, ...]]:
    """Every group's hyperparameters at each of the next `steps` steps. A value given here overrides a scheduler's."""
    schedulers = _schedulers(lr)
    if schedulers:
        out = _from_schedulers(hypers, schedulers, steps)
    else:
        out = _set("lr", [hypers] * steps, None if isinstance(lr, str) and lr == "constant" else lr)
    for name, given in (("weight_decay", weight_decay), ("betas", betas), ("eps", eps)):
        out = _set(name, out, given)
    return out


def _set(name: str, before: list[tuple[Hyper, ...]], given: Any) -> list[tuple[Hyper, ...]]:
    """One hyperparameter as `given`: one value, one per step, or a function of the step."""
    if given is None:
        return before
    if callable(given):
        values = [given(i) for i in range(len(before))]
    elif _is_one(name, given):
        values = [given] * len(before)
    else:
        values = list(_sequence(name, given))
        if len(values) != len(before):
            raise InvalidInput(f"{len(values)} values of {name} for {len(before)} batches; give one per step")
    return [_at_step(name, groups, value, i) for i, (groups, value) in enumerate(zip(before, values))]


def _at_step(name: str, groups: tuple[Hyper, ...], value: Any, step: int) -> tuple[Hyper, ...]:
    each = [value] * len(groups) if _is_one(name, value) else list(_sequence(name, value))
    if len(each) != len(groups):
        raise InvalidInput(f"step {step} has {len(each)} values of {name}; the optimizer has {len(groups)} groups")
    return tuple(_with(name, hyper, one, step) for hyper, one in zip(groups, each))


def _with(name: str, hyper: Hyper, value: Any, step: int) -> Hyper:
    if not _is_one(name, value):
        raise InvalidInput(f"{name} of step {step} is {value!r}; expected {EXPECTED.get(name, 'a number')}")
    if name == "betas":
        beta1, beta2 = (float(beta) for beta in value)
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise InvalidInput(f"betas of step {step} are {value}; both must be at least 0 and below 1")
        return replace(hyper, beta1=beta1, beta2=beta2)
    number = _in_range(name, value, f" of step {step}")
    return hyper.with_lr(number) if name == "lr" else replace(hyper, **{name: number})  # type: ignore[arg-type]


def values_of(name: str, given: Any) -> float | list[float]:
    """A hyperparameter, or several values of it, as plain numbers that torch's optimizer would take.

    >>> values_of("lr", 0), values_of("beta1", torch.tensor([0.5, 0.9], dtype=torch.float64))
    (0.0, [0.5, 0.9])
    """
    if _is_number(given):
        return _in_range(name, given)
    given = _sequence(name, given)
    if not all(map(_is_number, given)):
        raise InvalidInput(f"{name} is {given!r}; expected numbers")
    return [_in_range(name, one) for one in given]


def _in_range(name: str, value: Any, where: str = "") -> float:
    number, decays = float(value), name.startswith("beta")
    if not number >= 0 or (decays and number >= 1):
        must = "at least 0 and below 1" if decays else "zero or positive"
        raise InvalidInput(f"{WORDS.get(name, name)}{where} is {number}; it must be {must}")
    return number


def _is_one(name: str, value: Any) -> bool:
    """One value of this hyperparameter, rather than several of it."""
    if name == "betas":
        return isinstance(value, Sequence) and len(value) == 2 and all(map(_is_number, value))
    return _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or (isinstance(value, torch.Tensor) and value.ndim == 0)


def _sequence(name: str, value: Any) -> Sequence[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value  # tensors and arrays
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidInput(
            f"{name} is {value!r}; give a number, a list with one entry per step or a function of the step"
            + (', a torch scheduler, or "constant"' if name == "lr" else "")
        )
    return value


# --- schedulers


def _schedulers(lr: Any) -> list[LRScheduler]:
    """The torch schedulers in `lr`, in the order in which the loop steps them; none where it holds none."""
    given = list(lr) if isinstance(lr, list | tuple) else [lr]
    found = [_unwrapped(one) for one in given]
    if not any(isinstance(one, LRScheduler) for one in found):
        return []
    for one in found:
        if isinstance(one, ReduceLROnPlateau):
            raise InvalidInput("ReduceLROnPlateau needs a metric at each step; pass its learning rates as a list")
        if not isinstance(one, LRScheduler):
            raise InvalidInput(f"lr holds schedulers and a {type(one).__name__}; give torch schedulers only")
    return found


def _unwrapped(scheduler: Any) -> Any:
    """The scheduler inside accelerate's, which steps it once per update where one process trains."""
    if type(scheduler).__module__.partition(".")[0] != "accelerate":
        return scheduler
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise InvalidInput(
            "accelerate steps this scheduler several times per update where several processes train; pass its learning "
            "rates as a list"
        )
    return scheduler.scheduler


def _from_schedulers(hypers: tuple[Hyper, ...], schedulers: list[LRScheduler], steps: int) -> list[tuple[Hyper, ...]]:
    """Advance copies of the schedulers on a stand-in optimizer: the user's own do not move."""
    optimizer = schedulers[0].optimizer
    if any(one.optimizer is not optimizer for one in schedulers):
        raise InvalidInput("the schedulers drive different optimizers; a point has one")
    groups = optimizer.param_groups
    if len(groups) != len(hypers):
        raise InvalidInput(f"the scheduler drives {len(groups)} parameter groups; the point has {len(hypers)}")
    stand_in = torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.zeros(()))]} for _ in groups])
    for ours, theirs in zip(stand_in.param_groups, groups):
        ours.update({key: copy.deepcopy(value) for key, value in theirs.items() if key != "params"})
    twins = copy.deepcopy(schedulers, {id(optimizer): stand_in})
    out = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the stand-in takes no steps, which torch would warn about
        for _ in range(steps):
            out.append(tuple(_at_group(h, group) for h, group in zip(hypers, stand_in.param_groups)))
            for twin in twins:
                twin.step()
    return out


def _at_group(hyper: Hyper, group: dict[str, Any]) -> Hyper:
    """Everything that a scheduler may have moved: one-cycle schedules move betas, custom ones anything."""
    if group.get("amsgrad") or bool(group.get("maximize", False)) != hyper.maximize:
        raise InvalidInput("the scheduler changes amsgrad or maximize, which a path cannot follow")
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return replace(
        hyper.with_lr(float(group["lr"])),
        beta1=beta1,
        beta2=beta2,
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
    )
